"""An imported model computes what transformers computes; every tensor arrives, whatever its layout on disk."""

from pathlib import Path

import hf_checkpoints as hf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as torch_save_file

from upjax.hf import FAMILIES, import_hf, read_config
from upjax.hf.layout import lay_out, uncovered
from upjax.model import Decoder, Dtypes, abstract_params, flat_params

TOLERANCE = 1e-4


def logits(decoder: Decoder, tokens_BT: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens_BT: model(tokens_BT).logits)(decoder, tokens_BT))


@pytest.mark.parametrize("name", hf.CASES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    directory = hf.save(name, tmp_path)
    tokens_BT = hf.tokens()
    expected = hf.torch_logits(directory, tokens_BT)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits(import_hf(directory), tokens_BT), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window", "mixtral_window_tied"])
def test_the_window_matters_in_the_parity_tests(name):
    """The sequences of the parity tests reach past the window, so a wrong window would show."""
    _, settings = hf.CASES[name]
    tokens_BT = hf.tokens()
    wider = hf.model_of(name, sliding_window=settings["sliding_window"] + 1)
    difference = np.abs(hf.torch_logits(wider, tokens_BT) - hf.torch_logits(hf.model_of(name), tokens_BT)).max()
    assert difference > 100 * TOLERANCE


def test_shards_and_a_single_file_give_the_same_parameters(tmp_path):
    single = hf.save("llama", tmp_path / "single")
    sharded = hf.save("llama", tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same(import_hf(single), import_hf(sharded))


def test_names_without_the_model_prefix_are_read(tmp_path):
    directory = hf.save("llama_tied_biased", tmp_path)
    before = import_hf(directory)
    rename(directory, lambda name: name.removeprefix("model."))
    assert_same(before, import_hf(directory))


@pytest.mark.parametrize("name", hf.MOE_CASES)
def test_fused_experts_are_read_as_separate_ones(name, tmp_path):
    directory = hf.save(name, tmp_path)
    before = import_hf(directory)
    tensors = {key: value.contiguous() for key, value in hf.model_of(name).state_dict().items() if value.numel()}
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    if before.config.tied_embeddings:
        del tensors["lm_head.weight"]
    torch_save_file(tensors, directory / "model.safetensors")
    assert_same(before, import_hf(directory))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe"])
def test_swapped_gate_and_up_projections_would_show(name, tmp_path):
    """The parity tests tell the two apart: with the names swapped on disk the logits are far off."""
    directory = hf.save(name, tmp_path)
    tokens_BT = hf.tokens()
    expected = hf.torch_logits(directory, tokens_BT)
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
    rename(directory, lambda key: ".".join(swap.get(part, part) for part in key.split(".")))
    assert np.abs(logits(import_hf(directory), tokens_BT) - expected).max() > 100 * TOLERANCE


def test_bfloat16_stays_bfloat16_to_the_bit_and_routers_are_float32(tmp_path):
    directory = hf.save("mixtral", tmp_path, dtype="bfloat16")
    decoder = import_hf(directory)
    flat, tensors = flat_params(decoder), load_file(directory / "model.safetensors")
    assert decoder.dtypes.parameters == "bfloat16"
    for path, array in flat.items():
        assert array.dtype == ("float32" if path.endswith("router") else "bfloat16")
    up = np.asarray(flat["segments/0/0/moe/up"])[2, 1]
    stored = tensors["model.layers.2.block_sparse_moe.experts.1.w3.weight"]
    np.testing.assert_array_equal(up.T.view(np.uint16), stored.view(np.uint16))
    router = np.asarray(flat["segments/0/0/moe/router"])[1]
    gate = tensors["model.layers.1.block_sparse_moe.gate.weight"]
    np.testing.assert_array_equal(router.T, gate.astype(np.float32))


def test_the_dtype_asked_for_is_the_dtype_kept(tmp_path):
    directory = hf.save("llama", tmp_path, dtype="bfloat16")
    narrow, wide = import_hf(directory), import_hf(directory, dtypes=Dtypes(parameters="float32"))
    for path, array in flat_params(wide).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(array), np.asarray(flat_params(narrow)[path]).astype(np.float32))


def test_float16_is_kept_without_loss_in_float32(tmp_path):
    decoder = import_hf(hf.save("llama", tmp_path, dtype="float16"))
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(decoder.embedding[...]), stored.astype(np.float32))


def test_a_tied_checkpoint_may_carry_its_head(tmp_path):
    directory = hf.save("qwen2_tied", tmp_path)
    before = import_hf(directory)
    tensors = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_tensors(directory, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert_same(before, import_hf(directory))


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path):
    directory = hf.save("llama", tmp_path)
    before = import_hf(directory)
    tensors = load_file(directory / "model.safetensors")
    save_tensors(directory, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert_same(before, import_hf(directory))


def test_read_config_says_what_the_files_hold(tmp_path):
    directory = hf.save("qwen3_moe_mixed", tmp_path, dtype="bfloat16")
    hf.edit_config(directory, dtype="float32")
    config, family, dtype = read_config(directory)
    assert (family, dtype) == ("qwen3_moe", "bfloat16")
    assert config.moe_layers == (1, 2, 4) and config.moe.num_experts == 5 and config.window_layers == (0, 1, 2, 3, 4)


def test_a_parameter_written_twice_or_not_at_all_is_noticed(tmp_path):
    config = import_hf(hf.save("qwen3_moe_mixed", tmp_path)).config
    shapes = {path: leaf.shape for path, leaf in abstract_params(config, Dtypes()).items()}
    for rows in FAMILIES["qwen3_moe"].layouts:
        entries = lay_out(rows, config, shapes, prefix="model.")
        assert uncovered(entries, shapes) == []
        for entry in entries:
            assert uncovered([other for other in entries if other is not entry], shapes) == [entry.path]
            assert uncovered([*entries, entry], shapes) == [entry.path]


def assert_same(first: Decoder, second: Decoder) -> None:
    one, other = flat_params(first), flat_params(second)
    assert one.keys() == other.keys() and first.config == second.config
    for path in one:
        np.testing.assert_array_equal(np.asarray(one[path]), np.asarray(other[path]), err_msg=path)


def rename(directory: Path, new_name) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_tensors(directory, {new_name(name): array for name, array in tensors.items()})


def save_tensors(directory: Path, tensors) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
