"""Every way to compute a grouped matmul on the machine that runs the tests, and the meaning in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, pallas_tpu
from pallas_kernels.grouped_matmul.pallas_tpu import Tilings
from pallas_kernels.grouped_matmul.tiling import Tiling


def small_tiles(lhs, rhs) -> Tilings:
    """Returns tiles of 128 at most, so that small shapes have several of them, and tails, along every dim.

    Where there are rows for it, they are multiplied 64 at a time, and 32 where a step is not all of one group.
    """
    step, edge = (64, 32) if lhs.shape[0] > 128 else (lhs.shape[0], lhs.shape[0])
    tile = Tiling(m=min(128, lhs.shape[0]), k=min(128, lhs.shape[1]), n=min(128, rhs.shape[2]), step=step, edge=edge)
    return Tilings(forward=tile, lhs_grad=tile, rhs_grad=tile)


def in_small_tiles(lhs, rhs, group_sizes, group_offset=0, interpret=True):
    tilings = small_tiles(lhs, rhs)
    return pallas_tpu.grouped_matmul(lhs, rhs, group_sizes, group_offset, tilings=tilings, interpret=interpret)


# All but the reference; the kernels run in interpret mode, in tiles that they choose and in small ones.
WAYS = {
    **{name: IMPLEMENTATIONS[name] for name in sorted(set(IMPLEMENTATIONS) - {"reference"})},
    "pallas_tpu": partial(pallas_tpu.grouped_matmul, interpret=True),
    "pallas_tpu_small_tiles": in_small_tiles,
}


# Small programs take longer to compile well than to run badly.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}


def value_and_gradients(grouped_matmul, compiler_options=QUICK_COMPILE):
    """Returns a compiled function of (lhs, rhs, group_sizes, dout) that gives the value, dlhs and drhs."""

    @partial(jax.jit, compiler_options=compiler_options)
    def run(lhs, rhs, group_sizes, dout):
        out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes), lhs, rhs)
        return out, *vjp(dout)

    return run


def by_loop(lhs, rhs, group_sizes, dout):
    """Returns value, dlhs and drhs in float64: one NumPy product a group, by the rules of matrix calculus."""
    lhs, rhs, dout = (np.asarray(x, np.float64) for x in (lhs, rhs, dout))
    out, dlhs, drhs = np.zeros_like(dout), np.zeros_like(lhs), np.zeros_like(rhs)
    start = 0
    for group, size in enumerate(np.asarray(group_sizes)):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[group]
        dlhs[rows] = dout[rows] @ rhs[group].T
        drhs[group] = lhs[rows].T @ dout[rows]
        start += size
    return out, dlhs, drhs


def random_dout(lhs, rhs) -> jax.Array:
    """Returns a cotangent for lhs by rhs."""
    return jax.random.normal(jax.random.key(7), (lhs.shape[0], rhs.shape[2])).astype(lhs.dtype)


def assert_close(actual, expected, dtype) -> None:
    """Compares value and gradients to within the rounding of the result, whose terms are of order 1."""
    tolerance = {"float32": 2e-5, "bfloat16": 1e-2}[jnp.dtype(dtype).name]
    for name, left, right in zip(("value", "dlhs", "drhs"), actual, expected, strict=True):
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        scale = max(1.0, np.abs(right).max())
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale, err_msg=name)
