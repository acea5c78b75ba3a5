"""An exported model computes the same in transformers; formats say no to what they cannot express."""

import dataclasses
import json
import logging
import resource
import signal

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from upjax.errors import InputError
from upjax.hf import FAMILIES, choose_family, export_hf, import_hf
from upjax.mesh import make_mesh
from upjax.model import Decoder, DecoderConfig, Dtypes, MoEConfig, RopeConfig, abstract_params, build

TOLERANCE = 1e-4
DENSE = DecoderConfig(
    vocab_size=97,
    embed_dim=32,
    hidden_dim=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_sequence_length=64,
)


def moe(**changes) -> DecoderConfig:
    experts = MoEConfig(
        num_experts=changes.pop("num_experts", 6),
        experts_per_token=changes.pop("experts_per_token", 2),
        hidden_dim=changes.pop("expert_dim", 20),
        router=changes.pop("router", "softmax_topk_renormalized"),
    )
    return dataclasses.replace(DENSE, **(dict(moe=experts, moe_layers=(0, 1, 2, 3)) | changes))


TARGETS = {
    "mixtral": moe(),
    "mixtral_one_expert": moe(num_experts=1, experts_per_token=1, tied_embeddings=True),
    "mixtral_all_chosen": moe(num_experts=3, experts_per_token=3, router="softmax_topk"),
    "mixtral_topk_softmax": moe(router="topk_softmax", sliding_window=5, window_layers=(0, 1, 2, 3), head_dim=12),
    "qwen2_moe_router": moe(router="softmax_topk", num_experts=7, experts_per_token=5),
    "qwen2_moe_biased": moe(qkv_bias=True, moe_layers=(1, 3)),
    "qwen2_moe_pattern": moe(moe_layers=(0, 3), expert_dim=8, sliding_window=5, window_layers=(2, 3)),
    "qwen3_moe": moe(qk_norm=True, head_dim=16, router="softmax_topk", moe_layers=(2,)),
    "qwen3_moe_half_biased": moe(qk_norm=True, qkv_bias=True, sliding_window=5, window_layers=(0, 1, 2, 3)),
    "qwen3_moe_out_biased": moe(qk_norm=True, attention_out_bias=True, tied_embeddings=True),
    "llama_scaled": dataclasses.replace(
        DENSE,
        rope=RopeConfig(theta=500.0, scaling="llama3", factor=4.0, original_max_sequence_length=16),
        mlp_bias=True,
        norm_epsilon=1e-5,
    ),
    "llama_stretched": dataclasses.replace(DENSE, rope=RopeConfig(theta=100.0, scaling="linear", factor=2.0)),
    "mistral": dataclasses.replace(DENSE, sliding_window=6, window_layers=(0, 1, 2, 3)),
    "qwen2": dataclasses.replace(DENSE, qkv_bias=True, sliding_window=6, window_layers=(1, 2)),
    "qwen3": dataclasses.replace(DENSE, qk_norm=True, head_dim=20),
}
"""Models by the family that `choose_family` is to find, the longest of the families that the name begins with."""


def random_decoder(config: DecoderConfig, dtype: str = "float32") -> Decoder:
    """Returns a decoder whose parameters are all random, norms and biases included."""
    random, dtypes = np.random.default_rng(1), Dtypes(parameters=dtype)
    flat = {}
    for path, leaf in abstract_params(config, dtypes).items():
        noise = 0.15 * random.standard_normal(leaf.shape)
        flat[path] = jnp.asarray(noise + path.endswith("norm"), leaf.dtype)
    return build(config, dtypes, flat)


def logits(decoder: Decoder, tokens_BT: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens_BT: model(tokens_BT).logits)(decoder, tokens_BT))


def family_in(name: str) -> str:
    return max((family for family in FAMILIES if name.startswith(family)), key=len)


def assert_reloads(directory, expected: np.ndarray, tokens_BT: np.ndarray) -> None:
    """Asserts that transformers finds every weight that has one, no other, and computes the same."""
    model, info = hf.reload(directory)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    state = model.state_dict()
    assert [name for name in info["missing_keys"] if state[name].numel()] == []
    np.testing.assert_allclose(hf.torch_logits(model, tokens_BT), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
def test_transformers_computes_the_same_from_the_export(name, tmp_path):
    decoder, tokens_BT = random_decoder(TARGETS[name]), hf.tokens()
    assert export_hf(decoder, tmp_path / "out") == choose_family(TARGETS[name]) == family_in(name)
    expected = logits(decoder, tokens_BT)
    assert np.abs(expected).max() > 0.5
    assert_reloads(tmp_path / "out", expected, tokens_BT)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe_pattern", "qwen3_moe", "llama_scaled"])
def test_the_export_imports_as_it_was(name, tmp_path):
    decoder, tokens_BT = random_decoder(TARGETS[name]), hf.tokens()
    export_hf(decoder, tmp_path / "out")
    again = import_hf(tmp_path / "out")
    # Qwen2-MoE always has these biases, which come back as the zeros they were written as; Mixtral has no dense width.
    unsaid = dict(qkv_bias=decoder.config.qkv_bias, hidden_dim=decoder.config.hidden_dim)
    assert dataclasses.replace(again.config, **unsaid) == decoder.config
    np.testing.assert_array_equal(logits(again, tokens_BT), logits(decoder, tokens_BT))


@pytest.mark.parametrize("name", hf.CASES)
def test_tensors_of_transformers_come_back_to_the_bit(name, tmp_path):
    source = hf.save(name, tmp_path / "in", dtype="bfloat16")
    family = json.loads((source / "config.json").read_text())["model_type"]
    export_hf(import_hf(source), tmp_path / "out", family=family)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    zeros = {key for key in after.keys() - before.keys() if not after[key].any()}
    left_out = {key for key in before.keys() - after.keys() if not before[key].size}
    assert before.keys() - left_out == after.keys() - zeros
    for key in before.keys() - left_out:
        if "shared_expert_gate" not in key:
            np.testing.assert_array_equal(before[key].view(np.uint16), after[key].view(np.uint16), err_msg=key)


def test_the_config_is_read_by_v5_and_by_v4(tmp_path):
    """Both spellings of everything that v5 renamed are there and agree."""
    config = dataclasses.replace(TARGETS["qwen3_moe"], rope=TARGETS["llama_scaled"].rope)
    export_hf(random_decoder(config, "bfloat16"), tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    scaling = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    assert values["rope_parameters"] == dict(rope_type="llama3", rope_theta=500.0, **scaling)
    assert (values["rope_theta"], values["rope_scaling"]) == (500.0, dict(rope_type="llama3", **scaling))
    assert values["torch_dtype"] == values["dtype"] == "bfloat16"
    assert values["num_experts"] == values["num_local_experts"] == 6
    assert values["architectures"] == ["Qwen3MoeForCausalLM"]


def test_vllm_finds_every_tensor_it_wants_of_qwen2_moe(tmp_path):
    """vLLM stops without the shared expert's gate or a bias on q, k, v, and at a tensor of no size."""
    export_hf(random_decoder(TARGETS["qwen2_moe_router"]), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(4):
        assert tensors[f"model.layers.{layer}.mlp.shared_expert_gate.weight"].shape == (1, 32)
        for projection, size in dict(q=32, k=16, v=16).items():
            assert tensors[f"model.layers.{layer}.self_attn.{projection}_proj.bias"].shape == (size,)
    assert all(array.size for array in tensors.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["qkv_bias"] is True


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_a_sharded_model_exports_as_an_unsharded_one(shape, tmp_path):
    config = moe(num_experts=8, expert_dim=16)
    source = random_decoder(config)
    export_hf(source, tmp_path / "one")
    with jax.set_mesh(make_mesh(*shape)):
        export_hf(import_hf(tmp_path / "one"), tmp_path / "mesh")
    one, mesh = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "mesh"))
    assert one.keys() == mesh.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], mesh[key], err_msg=key)


def test_files_are_split_by_size_with_an_index(tmp_path):
    decoder, tokens_BT = random_decoder(TARGETS["mixtral"]), hf.tokens()
    export_hf(decoder, tmp_path / "out", shard_bytes=40_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {name: array for file in files for name, array in load_file(file).items()}
    assert len(files) > 3 and index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    for file in files:
        assert sum(array.nbytes for array in load_file(file).values()) <= 40_000
    assert_reloads(tmp_path / "out", logits(decoder, tokens_BT), tokens_BT)


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_padding_is_cut(tied, tmp_path):
    decoder, tokens_BT = random_decoder(moe(tied_embeddings=tied)), hf.tokens(vocab_size=90)
    export_hf(decoder, tmp_path / "out", vocab_size=90)
    assert_reloads(tmp_path / "out", logits(decoder, tokens_BT)[..., :90], tokens_BT)
    with pytest.raises(InputError, match="vocab_size 98"):
        export_hf(decoder, tmp_path / "more", vocab_size=98)


def test_an_error_names_everything_the_format_cannot_express(tmp_path):
    config = moe(router="softmax_topk", moe_layers=(1,), qk_norm=True, qkv_bias=True, mlp_bias=True)
    config = dataclasses.replace(config, sliding_window=4, window_layers=(0,))
    with pytest.raises(InputError) as error:
        export_hf(random_decoder(config), tmp_path / "out", family="mixtral")
    told = " ".join(error.value.problems)
    for field in ("router softmax_topk", "moe_layers (1,)", "qk_norm", "qkv_bias", "mlp_bias", "window_layers (0,)"):
        assert field in told
    assert len(error.value.problems) == 6 and not list(tmp_path.iterdir())
    with pytest.raises(InputError) as error:
        choose_family(config)
    assert [problem.split()[0] for problem in error.value.problems] == list(FAMILIES)


@pytest.mark.parametrize(
    ("config", "family", "told"),
    [
        (DENSE, "mixtral", "without experts"),
        (moe(), "llama", "moe"),
        (moe(), "qwen3_moe", "qk_norm False"),
        (moe(head_dim=16), "qwen2_moe", "head_dim 16"),
        (dataclasses.replace(DENSE, qkv_bias=True), "llama", "attention_out_bias False"),
        (DENSE, "qwen2", "qkv_bias False"),
    ],
    ids=str,
)
def test_each_format_knows_its_limits(config, family, told, tmp_path):
    with pytest.raises(InputError, match=f"{family} format cannot express") as error:
        export_hf(random_decoder(config), tmp_path / "out", family=family)
    assert any(told in problem for problem in error.value.problems)


def test_what_other_loaders_read_differently_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        export_hf(random_decoder(TARGETS["qwen2_moe_pattern"]), tmp_path / "windows")
        export_hf(random_decoder(TARGETS["qwen3_moe_out_biased"]), tmp_path / "bias")
    assert ["vLLM" in record.getMessage() for record in caplog.records] == [True, True]


def test_tokenizer_and_special_tokens_come_along(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 3], "hidden_size": 4}')
    export_hf(random_decoder(DENSE), tmp_path / "out", tokenizer_files=source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    export_hf(random_decoder(DENSE), tmp_path / "again", tokenizer_files=tmp_path / "out")
    for name in ("out", "again"):
        generation = json.loads((tmp_path / name / "generation_config.json").read_text())
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert generation["eos_token_id"] == values["eos_token_id"] == [2, 3]
        assert values["bos_token_id"] == 1 and values["pad_token_id"] is None
    (source / "generation_config.json").write_text('{"eos_token_id": 97}')
    with pytest.raises(InputError, match="eos_token_id 97 is not below vocab_size 97"):
        export_hf(random_decoder(DENSE), tmp_path / "past", tokenizer_files=source)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """The system refuses to let a file grow past 100 kB, as a full disk would."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    decoder = random_decoder(TARGETS["mixtral"])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(OSError):
            export_hf(decoder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(InputError, match="1,000 free"):
        export_hf(random_decoder(DENSE), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_stays_unless_told_otherwise(tmp_path):
    decoder = random_decoder(DENSE)
    export_hf(decoder, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        export_hf(decoder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    export_hf(decoder, tmp_path / "out", overwrite=True, vocab_size=50)
    assert len((tmp_path / "out" / "model.safetensors").read_bytes()) < len(before)
