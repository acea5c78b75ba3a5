"""The real TPU compiler takes the kernels, for chips that are not here."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_ways import in_small_tiles
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul, pallas_tpu
from pallas_kernels.grouped_matmul.cases import REAL, TINY
from pallas_kernels.tpu_chips import chip_of

TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
KERNELS = {"grouped_matmul_forward", "grouped_matmul_lhs_grad", "grouped_matmul_rhs_grad"}


def kernels_in(function, *shapes) -> list[str]:
    """Returns the names of the kernels in the program that the TPU compiler makes of a function, sorted."""
    compiled = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return sorted(re.search("|".join(KERNELS), line).group() for line in calls)


def value_and_gradients(multiply, lhs, rhs, group_sizes, dout):
    out, vjp = jax.vjp(lambda lhs, rhs: multiply(lhs, rhs, group_sizes), lhs, rhs)
    return out, *vjp(dout)


def compile_case(case, dtype, device, multiply=None) -> list[str]:
    sharding = SingleDeviceSharding(device)
    multiply = multiply or partial(pallas_tpu.grouped_matmul, chip=chip_of(device.device_kind))
    dout = jax.ShapeDtypeStruct((case.m, case.n), dtype, sharding=sharding)
    return kernels_in(partial(value_and_gradients, multiply), *case.shapes(dtype, sharding), dout)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name != "qwen3_30b_a3b_up")) for case in REAL],
    ids=lambda case: case.name,
)
def test_value_and_gradients_of_real_models_compile(case, topology, devices_of):
    assert compile_case(case, "bfloat16", devices_of(topology)[0]) == sorted(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", {(c.m, c.k, c.n): c for c in TINY}.values(), ids=lambda case: case.name)
def test_awkward_shapes_compile(case, dtype, devices_of):
    device = devices_of("v5p:2x2x1")[0]
    assert compile_case(case, dtype, device) == sorted(KERNELS)
    assert compile_case(case, dtype, device, partial(in_small_tiles, interpret=False)) == sorted(KERNELS)


def test_nothing_asked_for_takes_the_kernels_where_the_program_is_for_a_tpu(devices_of):
    """Lowered in a process whose own backend is a CPU. The value is not asked for, so only gradients are computed."""
    assert jax.default_backend() == "cpu"
    case = TINY[0]
    loss = lambda lhs, rhs, group_sizes: jnp.sum(grouped_matmul(lhs, rhs, group_sizes).astype(jnp.float32))
    shapes = case.shapes("bfloat16", SingleDeviceSharding(devices_of("v5p:2x2x1")[0]))
    assert kernels_in(jax.grad(loss, argnums=(0, 1)), *shapes) == sorted(KERNELS - {"grouped_matmul_forward"})


def test_scanned_and_recomputed_layers_of_a_mesh_compile(devices_of):
    """A scan of recomputed layers in `jax.shard_map`: the forward kernel once on the way up, once on the way down."""
    mesh = jax.sharding.Mesh(
        np.array(devices_of("v5p:2x2x1")).reshape(2, 2),
        ("data", "expert"),
        axis_types=(jax.sharding.AxisType.Explicit,) * 2,
    )
    rows = P(("data", "expert"))

    def local(x, layers, group_sizes):
        layer = jax.checkpoint(lambda x, matrices: (jnp.tanh(grouped_matmul(x, matrices, group_sizes)), None))
        return jax.lax.scan(layer, x, layers)[0]

    def loss(layers, x, group_sizes):
        out = jax.shard_map(local, in_specs=(rows, P(None, "expert"), rows), out_specs=rows)(x, layers, group_sizes)
        return jnp.sum(out.astype(jnp.float32))

    shape = lambda size, dtype, spec: jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        found = kernels_in(
            jax.grad(loss),
            shape((3, 8, 128, 128), "bfloat16", P(None, "expert")),
            shape((1024, 128), "bfloat16", rows),
            shape((16,), "int32", rows),
        )
    assert found == sorted([*KERNELS, "grouped_matmul_forward"])
