"""The real TPU compiler takes the experts' kernels, for every generation and for the experts of real models."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.expert_mlp import expert_mlp, pallas_tpu
from pallas_kernels.expert_mlp.cases import REAL
from pallas_kernels.tpu_chips import chip_of

TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
FORWARD = ["expert_mlp_down", "expert_mlp_gate_up"]
BACKWARD = [
    "expert_mlp_down_weights_grad",
    "expert_mlp_gate_up_grad",
    "expert_mlp_gate_weights_grad",
    "expert_mlp_rows_grad",
    "expert_mlp_up_weights_grad",
]


def kernels_in(function, *shapes) -> list[str]:
    """Returns the names of the kernels in the program that the TPU compiler makes of a function, sorted."""
    compiled = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return sorted(re.search(r"%?(\w+)", line).group(1) for line in calls)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", REAL.values(), ids=lambda case: case.name)
def test_experts_of_real_models_compile_for_every_generation(case, topology, devices_of):
    device = devices_of(topology)[0]
    chip, shapes = chip_of(device.device_kind), case.shapes("bfloat16", "float32", SingleDeviceSharding(device))
    assert kernels_in(partial(pallas_tpu.forward, chip=chip), *shapes.values()) == FORWARD
    product = jax.ShapeDtypeStruct((case.M, case.F), jnp.uint16, sharding=SingleDeviceSharding(device))
    backward = partial(pallas_tpu.backward, chip=chip)
    assert kernels_in(backward, *shapes.values(), (product, product), shapes["rows"]) == BACKWARD


def test_nothing_asked_for_takes_the_kernels_where_the_program_is_for_a_tpu(devices_of):
    """Lowered in a process whose own backend is a CPU, differentiated from outside."""
    assert jax.default_backend() == "cpu"
    *operands, group_sizes = (
        REAL["smollm2"].shapes("bfloat16", None, SingleDeviceSharding(devices_of("v5p:2x2x1")[0])).values()
    )
    loss = lambda *args: jnp.sum(expert_mlp(*args).astype(jnp.float32))
    found = kernels_in(jax.grad(loss, argnums=(0, 1, 2, 3)), *operands, group_sizes)
    assert found == sorted(["expert_mlp_gate_up", *BACKWARD])  # the value is not asked for, so there is no down product
