"""The config: strict, everything wrong at once, and the same after a round trip through YAML."""

import dataclasses

import pytest
import yaml

from upjax.config import config_to_dict, config_to_yaml, load_config, parse_config
from upjax.errors import InputError

DECODER = {
    "vocab_size": 48,
    "embed_dim": 16,
    "hidden_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "max_sequence_length": 32,
    "moe": {"num_experts": 4, "experts_per_token": 2, "hidden_dim": 16},
    "moe_layers": [1],
}
CONFIG = {
    "output": "runs/x",
    "model": {"decoder": DECODER},
    "data": {"path": "data/x", "sequence_length": 16, "batch_size": 8},
    "optimizer": {"learning_rate": "1e-3"},  # YAML reads 1e-3, without a dot, as a string
    "train": {"steps": 100},
}


@pytest.fixture
def write(tmp_path):
    def write(mapping):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(mapping))
        return path

    return write


def test_values_are_read_and_defaults_filled_in(write):
    config = load_config(write(CONFIG))
    assert config.optimizer.learning_rate == 1e-3
    assert config.model.decoder.moe.num_experts == 4
    assert config.model.decoder.moe_layers == (1,)
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.expert) == (1, 1, 1)


def test_the_resolved_config_reads_back_as_an_equal_one(write, tmp_path):
    config = load_config(write(CONFIG), ["schedule.decay=1-sqrt", "schedule.decay_steps=10"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config_to_yaml(config))
    assert load_config(resolved) == config
    assert parse_config(config_to_dict(config), "here") == config


def test_overrides_are_yaml_values_by_dotted_name(write):
    config = load_config(
        write(CONFIG),
        [
            "train.steps=7",
            "model.dtypes.compute=bfloat16",
            "model.decoder.moe.num_experts=8",
            "train.keep_branch_points=false",
            "model.decoder.moe_layers=[0, 1]",
            "optimizer.learning_rate=2e-4",
        ],
    )
    assert config.train.steps == 7
    assert config.model.dtypes.compute == "bfloat16"
    assert config.model.decoder.moe.num_experts == 8
    assert config.train.keep_branch_points is False
    assert config.model.decoder.moe_layers == (0, 1)
    assert config.optimizer.learning_rate == 2e-4


def test_everything_wrong_is_listed_at_once_with_place_and_values(write):
    mapping = CONFIG | {
        "optimizer": {"learning_rate": -1, "weight_deca": 0.9},
        "train": {"stepz": 100, "learning_rate": 3},
        "schedule": {"decay": "exponential"},
        "model": {"decoder": DECODER | {"num_heads": 3, "num_kv_heads": 2}},
    }
    path = write(mapping)
    with pytest.raises(InputError) as caught:
        load_config(path, ["data.batch_size=0.5", "nonsense", "output.x=1", "data.seed=["])
    assert str(path) in caught.value.summary
    problems = "\n".join(caught.value.problems)
    for expected in (
        "optimizer.learning_rate: input should be greater than 0, got -1",
        "optimizer.weight_deca: unknown key, did you mean optimizer.weight_decay?",
        "train.stepz: unknown key, did you mean train.steps?",
        "train.learning_rate: unknown key, did you mean optimizer.learning_rate?",
        "train.steps: missing",
        "final_fraction must be above 0, got 0.0",
        "num_heads 3 is not a multiple of num_kv_heads 2",
        "data.batch_size (from the command line): ",
        "got 0.5",
        "override 'nonsense': write it as section.key=value",
        "override 'output.x=1': output holds 'runs/x', not a mapping",
        "override 'data.seed=[': the value is not YAML",
    ):
        assert expected in problems
    assert len(caught.value.problems) == 11


def test_the_model_comes_from_somewhere(write):
    with pytest.raises(InputError, match="give init_from .* or both, got none"):
        load_config(write(CONFIG | {"model": {}}))


def test_an_architecture_may_stand_beside_a_model_to_begin_with(write):
    config = load_config(write(CONFIG | {"model": {"decoder": DECODER, "init_from": "models/x"}}))
    assert config.model.decoder.num_layers == 2
    assert str(config.model.init_from) == "models/x"


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "\xff"])
def test_a_file_that_holds_no_mapping_is_named(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="config.yaml"):
        load_config(path)
    with pytest.raises(InputError, match=r"missing.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")


def test_numbers_that_are_none_are_refused(write):
    with pytest.raises(InputError, match="finite number, got nan"):
        load_config(write(CONFIG), ["optimizer.weight_decay=.nan"])


def test_a_config_cannot_be_changed(write):
    config = load_config(write(CONFIG))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3
