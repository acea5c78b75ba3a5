"""Faulty checkpoints are refused with every fault named, before anything is read."""

import json
import shutil
from pathlib import Path

import hf_checkpoints as hf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from upjax.errors import InputError
from upjax.hf import import_hf
from upjax.model import Dtypes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    return {
        "single": hf.save("llama", root / "single"),
        "sharded": hf.save("llama", root / "sharded", max_shard_size="20KB"),
        "tied": hf.save("qwen2_tied", root / "tied"),
    }


@pytest.fixture
def single(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["single"], tmp_path / "single"))


@pytest.fixture
def sharded(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["sharded"], tmp_path / "sharded"))


def faults(directory: Path, **options) -> list[str]:
    with pytest.raises(InputError) as error:
        import_hf(directory, **options)
    return list(error.value.problems)


def change(directory: Path, remove: tuple[str, ...] = (), **tensors) -> None:
    stored = load_file(directory / WEIGHTS) | tensors
    save_file({name: array for name, array in stored.items() if name not in remove}, directory / WEIGHTS)


def edit_header(file: Path, edit) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_missing_tensor(single):
    change(single, remove=(QUERY,))
    assert faults(single) == [f"{QUERY}: missing"]


def test_a_tensor_too_many(single):
    change(single, **{"model.layers.9.self_attn.q_proj.weight": np.ones((2, 2), np.float32)})
    (problem,) = faults(single)
    assert "model.layers.9.self_attn.q_proj.weight is not a tensor of this llama model" in problem


def test_a_wrong_shape(single):
    change(single, **{QUERY: np.ones((32, 31), np.float32)})
    (problem,) = faults(single)
    assert f"{QUERY} has shape [32, 31], not [32, 32]" in problem


def test_a_wrong_dtype(single):
    change(single, **{QUERY: np.ones((32, 32), np.int8)})
    (problem,) = faults(single)
    assert f"{QUERY} is I8; supported: F32, BF16, F16" in problem


def test_one_wide_tensor_among_narrow_ones_needs_a_decision(single):
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(single / WEIGHTS).items()}
    save_file(narrow | {QUERY: narrow[QUERY].astype(np.float32)}, single / WEIGHTS)
    (problem,) = faults(single)
    assert f"{QUERY} is F32 among bfloat16" in problem
    assert import_hf(single, dtypes=Dtypes(parameters="float32")).dtypes.parameters == "float32"


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1], ids="{}_bytes".format)
def test_a_truncated_file(single, kept):
    data = (single / WEIGHTS).read_bytes()
    (single / WEIGHTS).write_bytes(data[:kept])
    (problem,) = faults(single)
    assert "truncated" in problem and WEIGHTS in problem


def test_bytes_past_the_end(single):
    (single / WEIGHTS).write_bytes((single / WEIGHTS).read_bytes() + b"\0")
    (problem,) = faults(single)
    assert "bytes past the last tensor" in problem


def test_a_header_that_is_no_header(single):
    (single / WEIGHTS).write_bytes((10).to_bytes(8, "little") + b"[1, 2, 3] " + bytes(90))
    (problem,) = faults(single)
    assert "the header is not what safetensors writes" in problem


def test_offsets_that_overlap_or_do_not_fit_the_shape(single):
    def overlap(header):
        start, stop = header[QUERY]["data_offsets"]
        header[QUERY]["data_offsets"] = [start - 4, stop]

    edit_header(single / WEIGHTS, overlap)
    told = faults(single)
    assert any(f"{QUERY} begins at byte" in problem for problem in told)
    assert any(f"{QUERY} has 4100 bytes; F32[32, 32] needs 4096" in problem for problem in told)


def test_nan_and_infinity_are_named_unless_allowed(single):
    weights = load_file(single / WEIGHTS)
    query, norm = weights[QUERY].copy(), weights["model.norm.weight"].copy()
    query[3, 4], norm[5] = np.nan, -np.inf
    change(single, **{QUERY: query, "model.norm.weight": norm})
    assert faults(single) == [f"{QUERY}: NaN or infinity", "model.norm.weight: NaN or infinity"]
    decoder = import_hf(single, allow_nonfinite=True)
    assert np.isnan(np.asarray(decoder.segments[0][0].attention.query[...])[1, 4, 3])


def test_nan_in_bfloat16_is_found(made, tmp_path):
    directory = hf.save("llama", tmp_path / "narrow", dtype="bfloat16")
    query = load_file(directory / WEIGHTS)[QUERY].copy()
    query[-1, -1] = np.nan
    change(directory, **{QUERY: query})
    assert faults(directory) == [f"{QUERY}: NaN or infinity"]


def test_an_index_that_names_a_file_that_is_not_there(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    names = len(load_file(shard))
    shard.unlink()
    (problem,) = faults(sharded)
    assert shard.name in problem and f"places {names} tensors in it" in problem


def test_an_index_and_files_that_disagree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][moved] = shards[1]
    (sharded / INDEX).write_text(json.dumps(index))
    told = faults(sharded)
    assert any(f"{moved} is not in it" in problem for problem in told)
    assert any(f"{moved} is in it" in problem for problem in told)


def test_an_index_that_points_outside(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][QUERY] = "../elsewhere.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert any("'../elsewhere.safetensors' is not the name of a file" in problem for problem in faults(sharded))


def test_pickled_weights_are_refused(single):
    (single / WEIGHTS).unlink()
    (single / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    (problem,) = faults(single)
    assert "pytorch_model.bin" in problem and "never loads" in problem


def test_nothing_there(tmp_path, single):
    with pytest.raises(InputError, match="not a directory"):
        import_hf(tmp_path / "absent")
    (single / "config.json").unlink()
    (single / WEIGHTS).unlink()
    assert len(faults(single)) == 2


def test_a_config_that_is_not_json(single):
    (single / "config.json").write_text("{")
    (problem,) = faults(single)
    assert "config.json: not JSON" in problem


def test_a_tied_head_that_differs(made, tmp_path):
    directory = Path(shutil.copytree(made["tied"], tmp_path / "tied"))
    embedding = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    change(directory, **{"lm_head.weight": embedding + 1})
    (problem,) = faults(directory)
    assert "lm_head.weight differs from the embedding" in problem


def test_a_head_that_is_not_tied_and_not_there(single):
    change(single, remove=("lm_head.weight",))
    assert faults(single) == ["lm_head.weight: missing"]


def test_faults_of_config_files_and_tensors_together(sharded):
    """Three files damaged in different ways, and the config as well: one list names them all."""
    hf.edit_config(sharded, quantization_config={"bits": 4})
    first, second, third = sorted(sharded.glob("*.safetensors"))[:3]
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    third.write_bytes(b"not safetensors")
    told = faults(sharded)
    assert len(told) == 4
    for part in ("quantization_config", first.name, second.name, third.name):
        assert sum(part in problem for problem in told) == 1


def test_faults_of_many_tensors_together(single):
    extra = {"model.layers.0.odd.weight": np.ones(2, np.float32)}
    change(single, remove=("model.norm.weight",), **{QUERY: np.ones((4, 4), np.int32)} | extra)
    told = faults(single)
    assert len(told) == 4
    for part in ("model.norm.weight: missing", "has shape [4, 4]", "is I32", "odd.weight"):
        assert any(part in problem for problem in told)
