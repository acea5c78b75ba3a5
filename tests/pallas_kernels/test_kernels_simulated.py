"""The kernels on a simulated TPU of two cores: memory holds NaN until it is written, and races are watched for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_expert_mlp as experts
from grouped_matmul_ways import assert_close, by_loop, in_small_tiles, random_dout, value_and_gradients
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.cases import PATTERNS, TINY

SIMULATED = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="uninitialized",
    num_cores_or_threads=2,
    random_seed=0,
)


def simulated(run, capfd):
    """Returns what `run` makes, after checking that no race was seen; JAX 0.10 prints one, JAX 0.12 raises."""
    result = jax.block_until_ready(run())
    assert "RACE DETECTED" not in capfd.readouterr().out
    return result


grouped_matmul = value_and_gradients(partial(in_small_tiles, interpret=SIMULATED))


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_grouped_matmul_reads_nothing_unwritten_and_races_with_nothing(case, capfd):
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), "float32")
    dout, total = random_dout(lhs, rhs), sum(case.group_sizes)
    lhs, dout = lhs.at[total:].set(np.nan), dout.at[total:].set(np.nan)
    actual = simulated(lambda: grouped_matmul(lhs, rhs, group_sizes, dout), capfd)
    assert_close(actual, by_loop(lhs, rhs, group_sizes, dout), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_experts_read_nothing_unwritten_and_race_with_nothing(pattern, capfd):
    M = 128  # dims that the tiles divide: JAX 0.10's simulator pads two operands of one shape twice
    sizes = PATTERNS[pattern](M, experts.E)
    rows, gate, up, down, d_out = experts.operands(M=M, D=16, F=32)
    dead = (jnp.arange(M) >= sum(sizes))[:, None]
    poisoned = [jnp.where(dead, np.nan, x) for x in (rows, d_out)]
    args = (poisoned[0], gate, up, down, poisoned[1], jnp.array(sizes, jnp.int32))
    actual = simulated(lambda: experts.by_kernels(*args, experts.SMALL, interpret=SIMULATED), capfd)
    clean = [jnp.where(dead, 0, x) for x in (rows, d_out)]
    experts.assert_same(actual, experts.by_loop(clean[0], gate, up, down, clean[1], sizes), 1e-5)


def test_the_watch_sees_two_cores_write_the_same_block(capfd):
    def kernel(out):
        out[...] = jnp.full(out.shape, pl.program_id(0), out.dtype)

    everyone_writes = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(2,),
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=SIMULATED,
    )
    try:
        jax.block_until_ready(jax.jit(everyone_writes)())
        report = capfd.readouterr().out  # JAX 0.10 prints what it saw, JAX 0.12 raises it
    except jax.errors.JaxRuntimeError as error:
        report = str(error)
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" in report
