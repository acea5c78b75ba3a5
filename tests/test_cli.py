"""The commands, as a user runs them: in order on a tiny model, and wrongly."""

import json
import sys

import jax
import numpy as np
import pytest
import tokenizers

from upjax import cli, export_hf, load
from upjax.model import Decoder, DecoderConfig, flat_params

TEXT = "the quick brown fox jumps over the lazy dog while 12 ships leave the harbour of Gothenburg\n"


@pytest.fixture(scope="module")
def hf_dense(tmp_path_factory):
    """A Hugging Face directory with a byte-level tokenizer."""
    root = tmp_path_factory.mktemp("hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    (root / "files").mkdir()
    tokenizer.save(str(root / "files" / "tokenizer.json"))
    (root / "files" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    config = DecoderConfig(
        vocab_size=304,
        embed_dim=16,
        hidden_dim=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_sequence_length=64,
        tied_embeddings=True,
    )
    export_hf(Decoder(config, key=jax.random.key(0)), root / "model", tokenizer_files=root / "files")
    return root / "model"


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command and returns its exit code, stdout and stderr."""
    monkeypatch.setattr(cli, "_prepare_process", lambda: None)  # of a process of its own

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["upjax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return exit_.value.code or 0, said.out, said.err

    return run


def test_the_main_job_command_by_command(run, hf_dense, tmp_path):
    def result(*arguments):
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    dense, moe, data, hf_moe = (tmp_path / name for name in ("dense", "moe", "data", "hf_moe"))
    assert result("import", hf_dense, dense)["kind"] == "model"
    made = result("upcycle", dense, moe, "--num-experts", 4, "--experts-per-token", 2, "--moe-layers", "every:2")
    assert made["config"]["moe_layers"] == [1]
    assert made["provenance"]["method"] == "upcycle:copy"
    assert result("verify", dense, moe)["max_abs_logit_diff"] < 1e-5
    assert result("verify", hf_dense, moe, "--mesh", "data=2,expert=4")["max_abs_logit_diff"] < 1e-5

    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(TEXT[number:] * 3 + str(number))
    info = result("tokenize", texts, "--output", data, "--tokenizer", dense, "--held-out", 0.3)
    assert info["splits"]["train"]["documents"] + info["splits"]["held_out"]["documents"] == 40

    config = tmp_path / "run.yaml"
    config.write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{init_from: {moe}}}\n"
        f"data: {{path: {data}, sequence_length: 32, batch_size: 8}}\n"
        "optimizer: {learning_rate: 0.01}\nschedule: {decay_steps: 2}\ntrain: {steps: 100, log_every: 1}\n"
    )
    before = result("eval", moe, data, "--sequence-length", 32)
    trained = result("train", config, "train.steps=12", "mesh.fsdp=2", "mesh.expert=4")
    assert (trained["step"], trained["finished"]) == (12, True)
    after = result("eval", tmp_path / "run", data, "--sequence-length", 32)
    assert after["loss"] < before["loss"]
    assert after["num_bytes"] == before["num_bytes"]

    assert result("export", tmp_path / "run", hf_moe, "--family", "qwen2_moe")["family"] == "qwen2_moe"
    assert result("verify", tmp_path / "run", hf_moe, "--max-diff", 1e-5)["top1_agreement"] == 1.0
    assert result("inspect", tmp_path / "run")["checkpoints"][-1] == 12
    assert result("inspect", data)["kind"] == "dataset"
    assert (hf_moe / "tokenizer.json").read_bytes() == (hf_dense / "tokenizer.json").read_bytes()


def test_tables_are_for_people(run, hf_dense):
    code, out, _ = run("inspect", hf_dense)
    assert code == 0
    assert "llama" in out and "active_parameters" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("inspect", "{tmp}"), ["no model.json in it", "no config.json in it"]),
        (("import", "{tmp}/nothing", "{tmp}/out"), ["nothing"]),
        (("import", "{hf}", "{hf}"), ["exists already"]),
        (("import", "{hf}", "{tmp}/out", "--parameters", "int4"), ["'int4' is not one of float32, bfloat16"]),
        (("upcycle", "{hf}", "{tmp}/out", "--num-experts", "2", "--experts-per-token", "3"), ["3", "num_experts 2"]),
        (("upcycle", "{hf}", "{tmp}/out", "--moe-layers", "0,7"), ["[7]", "model of 2"]),
        (("upcycle", "{hf}", "{tmp}/out", "--moe-layers", "odd"), ["'odd' is not all, every:N"]),
        (("verify", "{hf}", "{hf}", "--mesh", "fsdp=99"), ["fsdp=99", "8 devices"]),
        (("verify", "{hf}", "{hf}", "--mesh", "pipeline=2"), ["pipeline"]),
        (("verify", "{hf}", "{hf}", "--num-tokens", "1"), ["two"]),
        (("export", "{hf}", "{tmp}/out", "--family", "qwen3_moe"), ["qwen3_moe"]),
        (("train", "{tmp}/absent.yaml"), ["absent.yaml"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_mistake_ends_with_code_2_and_says_what_it_is(run, hf_dense, tmp_path, arguments, told):
    code, out, err = run(*(argument.format(tmp=tmp_path, hf=hf_dense) for argument in arguments))
    assert code == 2, err
    assert out == ""
    words = " ".join(err.split())
    assert "Traceback" not in err
    for text in told:
        assert text in words
    assert not list(tmp_path.iterdir())


def test_verify_can_fail_a_script(run, hf_dense, tmp_path):
    run("upcycle", hf_dense, tmp_path / "moe", "--router", "softmax_topk")
    code, out, _ = run("verify", hf_dense, tmp_path / "moe", "--max-diff", 1e-6, "--json")
    assert code == 1
    assert json.loads(out)["max_abs_logit_diff"] > 1e-6


def test_every_command_has_help_with_an_example(run):
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        code, out, _ = run(name, "--help")
        assert code == 0
        assert f"upjax {name}" in " ".join(out.split())


def test_what_is_loaded_is_what_was_saved(run, hf_dense, tmp_path):
    run("import", hf_dense, tmp_path / "dense", "--parameters", "bfloat16")
    saved, source = flat_params(load(tmp_path / "dense")), flat_params(load(hf_dense))
    assert saved.keys() == source.keys()
    for path, value in saved.items():
        np.testing.assert_array_equal(value, source[path].astype(value.dtype))
