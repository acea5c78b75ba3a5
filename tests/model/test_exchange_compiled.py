"""The exchange of a routed layer through the real TPU compiler: what it sends, and what runs meanwhile."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from upjax.mesh import AXES
from upjax.model.config import MoEConfig
from upjax.model.moe import _experts
from upjax.model.router import Routing

D, F, E, T, K = 1024, 2048, 8, 2048, 2
CONFIG = MoEConfig(num_experts=E, experts_per_token=K, hidden_dim=F)


@pytest.fixture
def scheduled(devices_of, tmp_path):
    """Returns the lines of the entry computation, in the order in which they run, of a layer's value and gradients."""
    devices = devices_of("v5p:2x2x1")
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, 1, 4), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 3)

    def compile_(config: MoEConfig) -> list[str]:
        def loss(x, gates, experts, *weights):
            y, _ = _experts(config, x, Routing(experts, gates), *weights)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        of = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        by_token = partial(of, spec=P(AXES))
        weight = partial(of, dtype="bfloat16", spec=P("expert"))
        operands = (by_token((4, T, D), "bfloat16"), by_token((4, T, K), "float32"), by_token((4, T, K), "int32"))
        weights = (weight((E, D, F)), weight((E, D, F)), weight((E, F, D)))
        options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": False}
        # Dumped, because libtpu 0.0.52 cannot give the text of a compiled program with such exchanges.
        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3, 4, 5)))
            step.trace(*operands, *weights).lower(lowering_platforms=("tpu",)).compile(compiler_options=options)
        (text,) = (path.read_text() for path in tmp_path.glob("*.after_optimizations.txt"))
        return text[text.index("\nENTRY") :].splitlines()

    return compile_


def places(lines, pattern: str) -> list[int]:
    return [i for i, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.slow
def test_rows_travel_by_ragged_all_to_all_while_experts_multiply(scheduled):
    lines = scheduled(CONFIG)
    started = {
        re.search(r"%([\w.-]+) =", lines[i])[1]: i for i in places(lines, r" async-start\(.*ragged|-all-to-all-start")
    }
    synchronous = places(lines, r" ragged-all-to-all\(")
    ends = {name: places(lines, rf"async-done\(%{re.escape(name)}\)") for name in started}
    ragged = {name: (i, ends[name][0]) for name, i in started.items() if ends[name]}
    # Two chunks, each there and back, and each of those once more for its gradient.
    assert len(ragged) + len(synchronous) == 8
    kernels = places(lines, r"%expert_mlp_\w+[.\d]* = .*custom-call\(")
    assert len(kernels) == 2 * 7
    hidden = [name for name, (start, done) in ragged.items() if any(start < k < done for k in kernels)]
    # A first chunk's rows have nothing to hide behind, nor have the last one's on their way back.
    assert len(hidden) >= 4, {name: (start, done) for name, (start, done) in ragged.items()}
    assert not places(lines, r" scatter\(")
    # All that is gathered is how many rows each device has for each expert.
    assert all(re.search(r"s32\[", lines[i]) for i in places(lines, r" all-gather(-start)?\("))


@pytest.mark.slow
def test_a_capacity_makes_it_an_all_to_all_of_fixed_shape(scheduled):
    config = MoEConfig(num_experts=E, experts_per_token=K, hidden_dim=F, capacity_factor=1.25)
    lines = scheduled(config)
    assert not places(lines, "ragged-all-to-all")
    assert len(places(lines, r" all-to-all(-start)?\(|all-to-all-start")) >= 4  # there and back, and their gradients
    assert len(places(lines, r"%expert_mlp_\w+[.\d]* = .*custom-call\(")) == 7
