"""What does not go together is found before anything is loaded, all at once, with the numbers."""

import dataclasses

import jax
import pytest
from conftest import write_documents

from upjax.checkpoint import save_model
from upjax.config import MeshConfig
from upjax.errors import InputError, Problems
from upjax.model import Decoder
from upjax.train.checks import check, check_numbers


def test_everything_that_does_not_fit_is_listed_at_once(make_config, moe):
    config = make_config(
        decoder=dataclasses.replace(moe, vocab_size=40, moe=dataclasses.replace(moe.moe, num_experts=6)),
        data={"sequence_length": 64, "batch_size": 6},
        schedule={"warmup_steps": 10, "decay_steps": 5},
    )
    config = dataclasses.replace(config, mesh=MeshConfig(expert=4, fsdp=3))
    with pytest.raises(InputError) as caught:
        check(config)
    problems = "\n".join(caught.value.problems)
    for expected in (
        "mesh (data 1 x fsdp 3 x expert 4) needs 12 devices, there are 8",
        "data.batch_size 6 is not a multiple of 12",
        "schedule.warmup_steps 10 + schedule.decay_steps 5 > train.steps 12",
        "data.sequence_length 64 is more than the model's max_sequence_length 32",
        "segments/0/0/moe/gate has a dim of 6, which mesh expert = 4 does not divide",
        "embedding has a dim of 16, which mesh fsdp x expert = 12 does not divide",
        "holds token id 47, the model has ids below its vocab_size 40",
    ):
        assert expected in problems


def test_what_fits_passes(make_config, moe):
    config = dataclasses.replace(make_config(decoder=moe), mesh=MeshConfig(data=2, fsdp=2, expert=2))
    decoder, dataset = check(config)
    assert decoder == moe
    assert dataset.splits["train"].documents == 200


def test_a_capacity_needs_experts(make_config, dense):
    config = make_config(decoder=dense, train={"steps": 12, "capacity_factor": 1.25})
    with pytest.raises(InputError, match="cannot start") as caught:
        check(config)
    assert "train.capacity_factor 1.25 for a model that has no experts" in caught.value.problems


def test_missing_model_and_dataset_are_listed_together(make_config, tmp_path):
    config = make_config(
        model={"decoder": None, "init_from": tmp_path / "no_model"},
        data={"path": tmp_path / "no_data", "sequence_length": 16, "batch_size": 8},
    )
    with pytest.raises(InputError) as caught:
        check(config)
    assert "no_model" in caught.value.problems[0]
    assert "no_data" in caught.value.problems[1]


@pytest.mark.parametrize(("accumulation", "num_problems"), [(1, 0), (2, 0), (3, 1)])
def test_microbatches_must_divide_the_batch(make_config, accumulation, num_problems):
    config = make_config(optimizer={"learning_rate": 1e-2, "gradient_accumulation": accumulation})
    problems = Problems("")
    check_numbers(config, problems, num_devices=1, num_processes=1)
    assert len(problems.found) == num_problems


def test_several_processes_must_share_all_their_devices(make_config):
    problems = Problems("")
    check_numbers(make_config(), problems, num_devices=8, num_processes=2)
    assert "2 processes must share all 8" in problems.found[0]


def test_too_little_data_is_found_before_training(make_config, tmp_path):
    path = write_documents(tmp_path, train=[[1, 2, 3]], held_out=[[1] * 9])
    config = make_config(
        data={"path": path, "sequence_length": 16, "batch_size": 8},
        train={"steps": 12, "evaluate_every": 4, "evaluate_tokens": 5},
    )
    with pytest.raises(InputError) as caught:
        check(config)
    assert "holds 4 tokens, fewer than one sequence of 16" in caught.value.problems[0]
    assert "max_tokens 5 is less than the first document's 10 tokens" in caught.value.problems[1]


def test_a_model_must_have_the_architecture_that_the_config_states(make_config, dense, moe, tmp_path):
    save_model(tmp_path / "model", Decoder(dense, key=jax.random.key(0)), provenance={})
    fits = make_config(model={"decoder": dense, "init_from": tmp_path / "model"})
    assert check(fits)[0] == dense
    with pytest.raises(InputError) as caught:
        check(make_config(model={"decoder": moe, "init_from": tmp_path / "model"}))
    problems = "\n".join(caught.value.problems)
    assert f"model.decoder.tied_embeddings is True, in the model {tmp_path / 'model'} it is False" in problems
    assert "model.decoder.moe.num_experts is 8" in problems
    assert "vocab_size" not in problems
