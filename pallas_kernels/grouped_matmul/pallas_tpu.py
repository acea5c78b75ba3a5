"""Grouped matmul and both of its gradients as Mosaic kernels for TPU.

A kernel walks (group, row tile) pairs, see `visits.py`; the walk is prefetched to scalar memory, where the pipeline
reads which blocks come next. Rows of a tile that belong to another group, or to none, are kept out by selects.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.tiling import Tiling, Tilings, choose_tilings
from pallas_kernels.grouped_matmul.visits import visits_of_groups, visits_of_rows
from pallas_kernels.varying import vary_together

# What the compiler may use: the budget of the blocks, and room for what it spills.
_VMEM_LIMIT_BYTES = 60 * 2**20


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_sizes: Int[Array, "G"],
    *,
    tilings: Tilings | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M N"]:
    """Returns what `reference.grouped_matmul` does, differentiable in `lhs` and `rhs`.

    Args:
        lhs: Rows, sorted by group.
        rhs: One matrix a group, of the dtype of `lhs`: float32 or bfloat16.
        group_sizes: How many rows each group has.
        tilings: Tile sizes; None chooses them by shape, dtype and vector memory.
        interpret: Runs the kernels without a TPU, as `pl.pallas_call` does.
    """
    if lhs.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernels multiply float32 or bfloat16, got {lhs.dtype}")
    if tilings is None:
        tilings = choose_tilings(*lhs.shape, rhs.shape[2], rhs.shape[0], lhs.dtype)
    return _grouped_matmul(tilings, interpret, *vary_together(lhs, rhs, group_sizes))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(tilings: Tilings, interpret, lhs, rhs, group_sizes):
    return _matmul(lhs, rhs, group_sizes, tilings.forward, interpret, "grouped_matmul_forward")


def _forward(tilings: Tilings, interpret, lhs, rhs, group_sizes):
    return _grouped_matmul(tilings, interpret, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(tilings: Tilings, interpret, residuals, dout):
    lhs, rhs, group_sizes = residuals
    transposed = Tiling(m=tilings.lhs_grad.m, k=tilings.lhs_grad.n, n=tilings.lhs_grad.k)
    dlhs = _matmul(dout, rhs, group_sizes, transposed, interpret, "grouped_matmul_lhs_grad", transpose_rhs=True)
    drhs = _rhs_grad(lhs, dout, group_sizes, tilings.rhs_grad, interpret)
    return dlhs, drhs, None


_grouped_matmul.defvjp(_forward, _backward)


def _matmul(lhs, rhs, group_sizes, tile: Tiling, interpret, name: str, *, transpose_rhs: bool = False):
    """Returns [M, N] = lhs [M, K] by the rhs of each row's group, [K, N], or [N, K] if it is to be transposed."""
    (m, k), num_groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    visits = visits_of_rows(group_sizes, m, tile.m)
    tiles_n, tiles_k = pl.cdiv(n, tile.n), pl.cdiv(k, tile.k)

    # Rows past the groups need no input: their visits name the blocks that are there already, so that none is fetched.
    def k_block(visit, k, groups):
        return jnp.where(groups[visit] < num_groups, k, tiles_k - 1)

    def lhs_block(n, visit, k, starts, groups, tiles):
        last_tile = jax.lax.div(jnp.maximum(starts[num_groups] - 1, 0), tile.m)
        return jnp.minimum(tiles[visit], last_tile), k_block(visit, k, groups)

    def rhs_block(n, visit, k, starts, groups, tiles):
        group, k = jnp.minimum(groups[visit], num_groups - 1), k_block(visit, k, groups)
        return (group, n, k) if transpose_rhs else (group, k, n)

    return pl.pallas_call(
        partial(_matmul_kernel, k=k, tile=tile, num_groups=num_groups, transpose_rhs=transpose_rhs),
        out_shape=_result((m, n), lhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tiles_n, visits.count, tiles_k),
            in_specs=[
                pl.BlockSpec((tile.m, tile.k), lhs_block),
                pl.BlockSpec((None, tile.n, tile.k) if transpose_rhs else (None, tile.k, tile.n), rhs_block),
            ],
            out_specs=pl.BlockSpec((tile.m, tile.n), lambda n, visit, k, starts, groups, tiles: (tiles[visit], n)),
            scratch_shapes=[pltpu.VMEM((tile.m, tile.n), jnp.float32)],
        ),
        compiler_params=_compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost_estimate(m, k, n, num_groups, lhs.dtype),
        interpret=interpret,
        name=name,
    )(visits.starts, visits.groups, visits.tiles, lhs, rhs)


def _matmul_kernel(
    starts, groups, tiles, lhs, rhs, out, accumulator, *, k: int, tile: Tiling, num_groups: int, transpose_rhs: bool
):
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.cdiv(k, tile.k) - 1
    group = groups[visit]

    def product():
        left, right = lhs[...], rhs[...]
        if k % tile.k:
            # The last block along K reaches past both arrays, where anything may lie.
            left = _keep(left, 1, 0, k - step * tile.k)
            right = _keep(right, int(transpose_rhs), 0, k - step * tile.k)
        return _dot(left, right, 1, int(transpose_rhs))

    def store(total):
        # The other rows belong to groups whose visits to this tile come just before or after, the last being the rows
        # past the sum; the block stays in place until every row has been stored.
        row = tiles[visit] * tile.m + jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
        mine = (row >= starts[group]) & (row < starts[group + 1])
        out[...] = jnp.where(mine, total, out[...].astype(jnp.float32)).astype(out.dtype)

    @pl.when(group < num_groups)
    def _():
        if last_step == 0:
            store(product())
        else:
            accumulator[...] = jnp.where(step == 0, 0, accumulator[...]) + product()
            pl.when(step == last_step)(lambda: store(accumulator[...]))

    @pl.when((group == num_groups) & (step == last_step))
    def _():
        store(jnp.zeros(out.shape, jnp.float32))


def _rhs_grad(lhs, dout, group_sizes, tile: Tiling, interpret):
    """Returns [G, K, N]: each group's rows of lhs [M, K], transposed, by the same rows of dout [M, N]."""
    (m, k), n, num_groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    visits = visits_of_groups(group_sizes, m, tile.m)
    return pl.pallas_call(
        partial(_rhs_grad_kernel, tile=tile),
        out_shape=_result((num_groups, k, n), lhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(k, tile.k), pl.cdiv(n, tile.n), visits.count),
            in_specs=[
                pl.BlockSpec((tile.m, tile.k), lambda k, n, visit, starts, groups, tiles: (tiles[visit], k)),
                pl.BlockSpec((tile.m, tile.n), lambda k, n, visit, starts, groups, tiles: (tiles[visit], n)),
            ],
            out_specs=pl.BlockSpec(
                (None, tile.k, tile.n), lambda k, n, visit, starts, groups, tiles: (groups[visit], k, n)
            ),
            scratch_shapes=[pltpu.VMEM((tile.k, tile.n), jnp.float32)],
        ),
        compiler_params=_compiler_params("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost_estimate(m, k, n, num_groups, lhs.dtype),
        interpret=interpret,
        name="grouped_matmul_rhs_grad",
    )(visits.starts, visits.groups, visits.tiles, lhs, dout)


def _rhs_grad_kernel(starts, groups, tiles, lhs, dout, out, accumulator, *, tile: Tiling):
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    group = groups[visit]
    start, end = starts[group], starts[group + 1]
    first_of_group = (visit == 0) | (groups[jnp.maximum(visit - 1, 0)] != group)
    last_of_group = (visit == last_visit) | (groups[jnp.minimum(visit + 1, last_visit)] != group)

    @pl.when(start < end)
    def _():
        # Rows are summed over here, so both sides must lose what is not the group's.
        before = tiles[visit] * tile.m
        left = _keep(lhs[...], 0, start - before, end - before)
        right = _keep(dout[...], 0, start - before, end - before)
        accumulator[...] = jnp.where(first_of_group, 0, accumulator[...]) + _dot(left, right, 0, 0)

    @pl.when(last_of_group)
    def _():
        out[...] = jnp.where(start < end, accumulator[...], 0).astype(out.dtype)


def _keep(block, dim: int, start, end):
    """Returns the block with zeros outside of `start <= index < end` along a dim."""
    # A select, not a product with a mask: 0 * NaN is NaN.
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, dim)
    return jnp.where((index >= start) & (index < end), block, jnp.zeros_like(block))


def _dot(left, right, left_dim: int, right_dim: int):
    """Returns the product of two blocks over one dim of each, in float32."""
    # Products of bfloat16 are exact in float32, so they need no more than the default; float32 follows JAX's setting.
    precision = jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def _result(shape: tuple[int, ...], like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, like.dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def _compiler_params(*dimension_semantics: str) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=dimension_semantics, vmem_limit_bytes=_VMEM_LIMIT_BYTES)


def _cost_estimate(m: int, k: int, n: int, num_groups: int, dtype) -> pl.CostEstimate:
    """Returns what the meaning takes: each operand and the result moved once, whatever the tiles make of it."""
    moved = (m * k + m * n + num_groups * k * n) * jnp.dtype(dtype).itemsize
    return pl.CostEstimate(flops=2 * m * k * n, bytes_accessed=moved, transcendentals=0)
