"""The Mosaic kernel that multiplies rows by the matrices of their groups and does something to the products.

It walks (group, row tile) pairs, see `visits.py`, for one tile of columns after the other, so that a group's weights
stay in vector memory while its rows pass. A visit multiplies `Tiling.step` rows at a time, and only steps that hold
rows of its group: a row tile that many groups share costs little more than its rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.blocks import dot, for_each_step, keep, result_shape
from pallas_kernels.grouped_matmul.tiling import Tiling, vmem_limit
from pallas_kernels.grouped_matmul.visits import Visits
from pallas_kernels.tpu_chips import TpuChip

Epilogue = Callable[..., tuple[jax.Array, ...]]
"""Takes the products and the tiles of `beside`, float32 [rows, n] each, and returns the tiles of the results."""


def only_product(product: jax.Array) -> tuple[jax.Array]:
    """Returns the one product as the one result."""
    return (product,)


def rows_times_matrices(
    lhs: Sequence[Float[Array, "M K"]],
    rhs: Sequence[Float[Array, "G K N"]],
    visits: Visits,
    *,
    tile: Tiling,
    chip: TpuChip,
    name: str,
    interpret: Any = False,
    transpose_rhs: bool = False,
    summed: bool = False,
    beside: Sequence[Float[Array, "M N"]] = (),
    epilogue: Epilogue = only_product,
    num_results: int = 1,
    aliases: dict[int, int] | None = None,
) -> list[Float[Array, "M N"]]:
    """Returns the results of the epilogue for every row that `visits` meets, each [M, N] in the dtype of `lhs`.

    Args:
        lhs: One array of rows for each of `rhs`, or one for all.
        rhs: The matrices of the groups, [G, N, K] where they are to be transposed.
        visits: The walk; rows of its first and its last group, which have no matrix, become zeros. Rows that it does
            not meet are left as they come.
        tile: The sizes of the blocks.
        chip: Whose vector memory the compiler may use.
        name: What profiles and dumps call the kernel.
        interpret: As in `pl.pallas_call`.
        transpose_rhs: Whether the matrices are [N, K].
        summed: Whether the products are added up to one.
        beside: Further arrays whose tiles the epilogue takes.
        epilogue: Makes the tiles of the results.
        num_results: How many it makes.
        aliases: Which of `beside` gives its memory to which result.
    """
    (m, k), num_groups = lhs[0].shape, rhs[0].shape[0]
    n = rhs[0].shape[1] if transpose_rhs else rhs[0].shape[2]
    tiles_k = pl.cdiv(k, tile.k)

    # Rows outside of the groups need no input: their visits name blocks that are there already, so none is fetched.
    def k_block(visit, k, groups):
        return jnp.where(_has_matrix(groups[visit], num_groups), k, tiles_k - 1)

    def lhs_block(n, visit, k, starts, groups, tiles):
        first, last = (jax.lax.div(jnp.maximum(row, 0), tile.m) for row in (starts[1], starts[num_groups + 1] - 1))
        return jnp.clip(tiles[visit], first, jnp.maximum(first, last)), k_block(visit, k, groups)

    def rhs_block(n, visit, k, starts, groups, tiles):
        group, k = jnp.clip(groups[visit] - 1, 0, num_groups - 1), k_block(visit, k, groups)
        return (group, n, k) if transpose_rhs else (group, k, n)

    def row_block(n, visit, k, starts, groups, tiles):
        return tiles[visit], n

    out_block = pl.BlockSpec((tile.m, tile.n), row_block)
    num_sums = 1 if summed else len(rhs)
    num_scalars = 3
    return pl.pallas_call(
        partial(
            _kernel,
            k=k,
            tile=tile,
            num_groups=num_groups,
            transpose_rhs=transpose_rhs,
            summed=summed,
            epilogue=epilogue,
            counts=(len(lhs), len(rhs), len(beside), num_results),
        ),
        out_shape=[result_shape((m, n), lhs[0].dtype, lhs[0])] * num_results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(pl.cdiv(n, tile.n), visits.count, tiles_k),
            in_specs=[
                *[pl.BlockSpec((tile.m, tile.k), lhs_block)] * len(lhs),
                *[pl.BlockSpec((None, tile.n, tile.k) if transpose_rhs else (None, tile.k, tile.n), rhs_block)]
                * len(rhs),
                *[out_block] * len(beside),
            ],
            out_specs=[out_block] * num_results,
            scratch_shapes=[pltpu.VMEM((tile.m, tile.n), jnp.float32)] * (num_sums if tiles_k > 1 else 0),
        ),
        input_output_aliases={
            num_scalars + len(lhs) + len(rhs) + source: result for source, result in (aliases or {}).items()
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit(chip)
        ),
        cost_estimate=_cost_estimate(lhs, rhs, beside, num_results, n),
        interpret=interpret,
        name=name,
    )(visits.starts, visits.groups, visits.tiles, *lhs, *rhs, *beside)


def _has_matrix(group, num_groups: int):
    return (group > 0) & (group <= num_groups)


def _kernel(
    starts,
    groups,
    tiles,
    *refs,
    k: int,
    tile: Tiling,
    num_groups: int,
    transpose_rhs: bool,
    summed: bool,
    epilogue: Epilogue,
    counts: tuple[int, ...],
):
    num_lhs, num_rhs, num_beside, num_results = counts
    lhs, rhs = refs[:num_lhs], refs[num_lhs : num_lhs + num_rhs]
    beside = refs[num_lhs + num_rhs : sum(counts[:3])]
    results, sums = refs[sum(counts[:3]) : sum(counts)], refs[sum(counts) :]
    visit, k_step, last_k_step = pl.program_id(1), pl.program_id(2), pl.cdiv(k, tile.k) - 1
    group, first_row = groups[visit], tiles[visit] * tile.m
    start, end = (jnp.clip(starts[group + i] - first_row, 0, tile.m) for i in (0, 1))  # the group's rows in this tile

    def products(rows):
        made = []
        for i, matrix in enumerate(rhs):
            left, right = lhs[min(i, num_lhs - 1)][rows, :], matrix[...]
            if k % tile.k:
                # The last block along K reaches past both arrays, where anything may lie.
                left = keep(left, 1, 0, k - k_step * tile.k)
                right = keep(right, int(transpose_rhs), 0, k - k_step * tile.k)
            made.append(dot(left, right, 1, int(transpose_rhs)))
        return [sum(made[1:], made[0])] if summed else made

    def store(rows, mine, tiles_of_results):
        for result, total in zip(results, tiles_of_results, strict=True):
            # The other rows belong to groups whose visits to this tile come just before or after; the block stays in
            # place until every one of them has been stored.
            kept = total if mine is None else jnp.where(mine, total, result[rows, :].astype(jnp.float32))
            result[rows, :] = kept.astype(result.dtype)

    def multiply(rows, mine):
        totals = products(rows)
        if last_k_step > 0:
            for total, product in zip(sums, totals, strict=True):
                total[rows, :] = jnp.where(k_step == 0, 0, total[rows, :]) + product
            # Read back, not carried over: a value that lives across a branch is stored once more.
            pl.when(k_step == last_k_step)(lambda: finish(rows, mine, [total[rows, :] for total in sums]))
        else:
            finish(rows, mine, totals)

    def finish(rows, mine, totals):
        store(rows, mine, epilogue(*totals, *(array[rows, :].astype(jnp.float32) for array in beside)))

    def zero(rows, mine):
        store(rows, mine, [jnp.zeros((rows.size, tile.n), jnp.float32)] * num_results)

    def rows_of_group(body):
        for_each_step(start, end, tile, partial(body, mine=None), lambda rows: edge(rows, body))

    def edge(rows, body):
        row = rows.start + jax.lax.broadcasted_iota(jnp.int32, (rows.size, tile.n), 0)
        body(rows, mine=(row >= start) & (row < end))

    pl.when(_has_matrix(group, num_groups))(lambda: rows_of_group(multiply))
    pl.when(~_has_matrix(group, num_groups) & (k_step == last_k_step))(lambda: rows_of_group(zero))


def _cost_estimate(lhs, rhs, beside, num_results: int, n: int) -> pl.CostEstimate:
    """Returns what the meaning takes: each operand and each result moved once, whatever the tiles make of it."""
    m, k = lhs[0].shape
    itemsize = jnp.dtype(lhs[0].dtype).itemsize
    moved = sum(x.size for x in (*lhs, *rhs, *beside)) + num_results * m * n
    return pl.CostEstimate(flops=2 * m * k * n * len(rhs), bytes_accessed=moved * itemsize, transcendentals=0)
