"""The kernels on a simulated TPU of two cores: memory holds NaN until it is written, and races are watched for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_ways import assert_close, by_loop, in_small_tiles, random_dout, value_and_gradients
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.cases import Case

SIMULATED = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="uninitialized",
    num_cores_or_threads=2,
    random_seed=0,
)


@pytest.mark.slow
def test_kernels_read_nothing_unwritten_and_race_with_nothing(capfd):
    lhs, rhs, _ = Case(name="simulated", m=200, k=200, n=160, num_groups=4).arrays(jax.random.key(0), "float32")
    group_sizes = jnp.array([0, 90, 0, 41], jnp.int32)  # empty groups, tiles that groups share, and a tail of rows
    dout, total = random_dout(lhs, rhs), 131
    lhs, dout = lhs.at[total:].set(np.nan), dout.at[total:].set(np.nan)
    run = value_and_gradients(partial(in_small_tiles, interpret=SIMULATED))
    actual = jax.block_until_ready(run(lhs, rhs, group_sizes, dout))
    assert_close(actual, by_loop(lhs, rhs, group_sizes, dout), "float32")
    assert "RACE DETECTED" not in capfd.readouterr().out


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
