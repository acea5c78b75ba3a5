"""The Mosaic kernel that multiplies each group's rows, transposed, by the same rows of another array: weight gradients.

It walks (group, row tile) pairs, see `visits.py`, for one block of the result after the other, and sums over a group's
rows in vector memory.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.blocks import dot, for_each_step, keep, result_shape
from pallas_kernels.grouped_matmul.tiling import Tiling, vmem_limit
from pallas_kernels.grouped_matmul.visits import Visits
from pallas_kernels.tpu_chips import TpuChip


def rows_transposed_times_rows(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "M N"],
    visits: Visits,
    *,
    tile: Tiling,
    dtype,
    chip: TpuChip,
    name: str,
    interpret: Any = False,
) -> Float[Array, "G K N"]:
    """Returns lhs^T @ rhs over each group's rows, summed in float32, in `dtype`; zeros for a group without rows."""
    (m, k), n, num_groups = lhs.shape, rhs.shape[1], len(visits.starts) - 3
    itemsize = jnp.dtype(lhs.dtype).itemsize
    return pl.pallas_call(
        partial(_kernel, tile=tile),
        out_shape=result_shape((num_groups, k, n), dtype, lhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(k, tile.k), pl.cdiv(n, tile.n), visits.count),
            in_specs=[
                pl.BlockSpec((tile.m, tile.k), lambda k, n, visit, starts, groups, tiles: (tiles[visit], k)),
                pl.BlockSpec((tile.m, tile.n), lambda k, n, visit, starts, groups, tiles: (tiles[visit], n)),
            ],
            out_specs=pl.BlockSpec(
                (None, tile.k, tile.n), lambda k, n, visit, starts, groups, tiles: (groups[visit] - 1, k, n)
            ),
            # A float32 result is summed where it lies.
            scratch_shapes=[pltpu.VMEM((tile.k, tile.n), jnp.float32)] * (jnp.dtype(dtype) != jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(chip)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            bytes_accessed=m * (k + n) * itemsize + num_groups * k * n * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name=name,
    )(visits.starts, visits.groups, visits.tiles, lhs, rhs)


def _kernel(starts, groups, tiles, lhs, rhs, out, *scratch, tile: Tiling):
    total = scratch[0] if scratch else out
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    group, first_row = groups[visit], tiles[visit] * tile.m
    start, end = (jnp.clip(starts[group + i] - first_row, 0, tile.m) for i in (0, 1))  # the group's rows in this tile
    first_of_group = (visit == 0) | (groups[jnp.maximum(visit - 1, 0)] != group)
    last_of_group = (visit == last_visit) | (groups[jnp.minimum(visit + 1, last_visit)] != group)

    # Set by the first rows of a group, added to by the others: filling it with zeros would cost as much as storing it.
    def add(rows, left, right):
        is_first = first_of_group & (rows.start <= start)
        total[...] = jnp.where(is_first, 0, total[...]) + dot(left, right, 0, 0)

    def whole(rows):
        add(rows, lhs[rows, :], rhs[rows, :])

    def edge(rows):
        # Rows are summed over here, so both sides must lose what is not the group's.
        add(rows, *(keep(side[rows, :], 0, start - rows.start, end - rows.start) for side in (lhs, rhs)))

    for_each_step(start, end, tile, whole, edge)

    has_rows = starts[group] < starts[group + 1]
    if scratch:

        @pl.when(last_of_group)
        def _():
            out[...] = jnp.where(has_rows, total[...], 0).astype(out.dtype)

    else:

        @pl.when(~has_rows)
        def _():
            out[...] = jnp.zeros_like(out)
