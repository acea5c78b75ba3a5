"""On a mesh each device gets its own part of the checkpoint, and no more is read than those parts hold."""

import os
import subprocess
import sys
from pathlib import Path

import hf_checkpoints as hf
import jax
import numpy as np
import pytest

from upjax.hf import import_hf, reader
from upjax.hf.safetensors import StoredTensor
from upjax.mesh import make_mesh
from upjax.model import flat_params

MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": hf.save("llama", root / "llama"),
        "qwen3_moe_mixed": hf.save("qwen3_moe_mixed", root / "moe", changes=dict(num_experts=8)),
        "mixtral": hf.save("mixtral", root / "mixtral", dtype="bfloat16", changes=dict(num_local_experts=8)),
    }


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe_mixed", "mixtral"])
def test_each_device_holds_its_slice_of_the_whole(name, shape, checkpoints):
    whole = {path: np.asarray(array) for path, array in flat_params(import_hf(checkpoints[name])).items()}
    with jax.set_mesh(make_mesh(*shape)):
        parts = flat_params(import_hf(checkpoints[name]))
    assert parts.keys() == whole.keys()
    for path, array in parts.items():
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[path][shard.index], err_msg=path)
    sharded = [path for path, array in parts.items() if not array.is_fully_replicated]
    assert bool(sharded) == (shape != (8, 1, 1))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_is_read_is_what_the_shards_hold(name, shape, checkpoints, monkeypatch):
    """Each shard reads its own bytes and each byte of the checkpoint is read once, however many devices share it."""
    read, shards = [], []
    read_tensor, read_shard = StoredTensor.read, reader._read_shard

    def counted_read(tensor, slices=()):
        part = read_tensor(tensor, slices)
        read.append(part.size)
        return part

    def counted_shard(slices, *rest):
        before = sum(read)
        out = read_shard(slices, *rest)
        shards.append((out.size, sum(read) - before))
        return out

    monkeypatch.setattr(StoredTensor, "read", counted_read)
    monkeypatch.setattr(reader, "_read_shard", counted_shard)
    with jax.set_mesh(make_mesh(*shape)):
        flat = flat_params(import_hf(checkpoints[name]))
    assert all(held == fetched for held, fetched in shards)
    assert sum(read) == sum(array.size for array in flat.values())


PEAK = """
import resource, sys
import jax
from upjax.hf import import_hf
from upjax.model import flat_params
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
jax.block_until_ready(jax.numpy.zeros(8))
before = peak()
params = jax.block_until_ready(flat_params(import_hf(sys.argv[1])))
print(peak() - before, sum(a.nbytes for a in params.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_is_the_parameters_and_about_a_tensor(tmp_path):
    """Stacks of layers and experts are filled tensor by tensor, so nothing is ever there twice."""
    hf.save(
        "mixtral",
        tmp_path,
        dtype="bfloat16",
        changes=dict(hidden_size=512, intermediate_size=1024, num_local_experts=12, vocab_size=4096),
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    grown, parameters = map(int, result.stdout.split())
    assert parameters > 120e6
    assert grown < 1.2 * parameters, f"{grown} bytes for {parameters} bytes of parameters"
