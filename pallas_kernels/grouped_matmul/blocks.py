"""What the Mosaic kernels do to the blocks in vector memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.tiling import Tiling


def keep(block: jax.Array, dim: int, start, end) -> jax.Array:
    """Returns the block with zeros outside of `start <= index < end` along a dim."""
    # A select, not a product with a mask: 0 * NaN is NaN.
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, dim)
    return jnp.where((index >= start) & (index < end), block, jnp.zeros_like(block))


def dot(left: jax.Array, right: jax.Array, left_dim: int, right_dim: int) -> jax.Array:
    """Returns the product of two blocks over one dim of each, in float32."""
    # Products of bfloat16 are exact in float32, so they need no more than the default; float32 follows JAX's setting.
    precision = jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def result_shape(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def for_each_step(
    start, end, tile: Tiling, whole: Callable[[pl.Slice], None], edge: Callable[[pl.Slice], None]
) -> None:
    """Goes through the rows start..end of a block: `whole` for `tile.step` that all lie between, `edge` for others.

    Both get the rows as a slice of the block; of the `tile.edge` rows of an edge some lie between.
    """

    def step(i, _):
        first, last = i * tile.step, (i + 1) * tile.step
        is_whole = (start <= first) & (last <= end)
        pl.when(is_whole)(lambda: whole(_slice(i, tile.step, tile)))

        @pl.when(~is_whole)
        def _():
            from_row, to_row = jnp.maximum(start, first), jnp.minimum(end, last)
            for_rows = lambda j, _: edge(_slice(j, tile.edge, tile))
            jax.lax.fori_loop(jax.lax.div(from_row, tile.edge), pl.cdiv(to_row, tile.edge), for_rows, None)

    jax.lax.fori_loop(jax.lax.div(start, tile.step), pl.cdiv(end, tile.step), step, None)


def _slice(index, size: int, tile: Tiling) -> pl.Slice:
    # The compiler must see that a start is a multiple of a register's rows, which those of a small block are not.
    return pl.ds(0 if size == tile.m else pl.multiple_of(index * size, size), size)
