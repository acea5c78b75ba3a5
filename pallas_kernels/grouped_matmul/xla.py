"""Grouped matmul in plain XLA operations, for CPUs: one loop over the groups, and in it tiles of rows.

`jax.lax.ragged_dot` on a CPU multiplies every row by every group's matrix; here a row meets its own only.

The rows of a group are cut into tiles of the largest size, and what is left into one tile a size, so at most
`SMALLEST_TILE - 1` rows a group are multiplied for nothing. Those rows belong to the groups that follow (or lie past the
last group): the forward loop lets their results be overwritten when their own group comes, so no mask is needed.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.transposed_matmul import transposed_matmul
from pallas_kernels.varying import vary_together

LARGEST_TILE = 512
SMALLEST_TILE = 32


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each run of rows of `lhs` [M, K] by its own matrix of `rhs` [G, K, N]; [M, N] in the dtype of `lhs`."""
    return _grouped_matmul(*vary_together(lhs, rhs, group_sizes))


@jax.custom_vjp
def _grouped_matmul(lhs, rhs, group_sizes):
    return _rows_times_matrices(lhs, rhs, group_sizes, contract_rhs=0)


def _forward(lhs, rhs, group_sizes):
    return _grouped_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals, cotangent):
    lhs, rhs, group_sizes = residuals
    d_lhs = _rows_times_matrices(cotangent.astype(lhs.dtype), rhs, group_sizes, contract_rhs=1)
    d_rhs = _outer_products(lhs, cotangent.astype(lhs.dtype), group_sizes).astype(rhs.dtype)
    return d_lhs, d_rhs, None


_grouped_matmul.defvjp(_forward, _backward)


def _rows_times_matrices(rows, matrices, group_sizes, *, contract_rhs: int):
    """Multiplies the rows of each group by its matrix, or by the transpose of it when `contract_rhs` is 1."""
    num_rows, _ = rows.shape
    width = matrices.shape[2 - contract_rhs]
    sizes = _tile_sizes(num_rows)
    starts, ends = _bounds(group_sizes)
    padded = jnp.pad(rows, ((0, sizes[0]), (0, 0)))  # a tile may reach past the last row
    out = _zeros_like_varying((num_rows + sizes[0], width), rows.dtype, rows)

    def tile(size, matrix, start, out):
        block = lax.dynamic_slice_in_dim(padded, start, size)
        product = lax.dot_general(
            block, matrix, (((1,), (contract_rhs,)), ((), ())), preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice_in_dim(out, product.astype(rows.dtype), start, 0)

    def group(g, out):
        matrix = lax.dynamic_index_in_dim(matrices, g, keepdims=False)
        return _for_each_tile(starts[g], ends[g], sizes, lambda size, start, out: tile(size, matrix, start, out), out)

    out = lax.fori_loop(0, group_sizes.shape[0], group, out)[:num_rows]
    return jnp.where(jnp.arange(num_rows)[:, None] < ends[-1], out, 0)


def _for_each_tile(start, end, sizes, body, carry):
    """Runs `body(size, start, carry)` over tiles that cover rows start..end: the largest size repeated, then the rest."""
    for size in sizes:
        last = size == sizes[-1]
        count = -(-(end - start) // size) if last else (end - start) // size
        carry = lax.fori_loop(0, count, lambda i, carry, size=size, start=start: body(size, start + i * size, carry), carry)
        start = start + count * size
    return carry


def _outer_products(lhs, rhs, group_sizes):
    """Returns lhs^T @ rhs of each group's rows, [G, K, N] in float32; zeros for an empty group.

    A product that is added to a carried sum costs a pass over [K, N], so a group should take one product: its rows
    are rounded up to the next of several sizes, and the rows of others in it are set to zero on both sides.
    """
    num_rows = lhs.shape[0]
    largest = _tile_sizes(num_rows)[0]
    step = max(largest // 8, SMALLEST_TILE)
    buckets = list(range(step, largest + 1, step))
    starts, ends = _bounds(group_sizes)
    lhs, rhs = (jnp.pad(x, ((0, largest), (0, 0))) for x in (lhs, rhs))

    def product(size, start, end):
        live = (start + jnp.arange(size) < end)[:, None]
        a, b = (jnp.where(live, lax.dynamic_slice_in_dim(x, start, size), 0) for x in (lhs, rhs))
        return transposed_matmul(a, b)

    def group(g, out):
        start, end = starts[g], ends[g]
        num_full = jnp.maximum(end - start - 1, 0) // largest
        bucket = -(-(end - start - num_full * largest) // step)  # 0 only for an empty group

        def last(start):
            empty = lambda start: _zeros_like_varying((lhs.shape[1], rhs.shape[1]), jnp.float32, lhs)
            return lax.switch(bucket, [empty] + [partial(product, size, end=end) for size in buckets], start)

        total = lax.fori_loop(
            0, num_full, lambda i, total: total + product(largest, start + i * largest, end), last(start + num_full * largest)
        )
        return lax.dynamic_update_index_in_dim(out, total, g, 0)

    out = _zeros_like_varying((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), jnp.float32, lhs)
    return lax.fori_loop(0, group_sizes.shape[0], group, out)


def _tile_sizes(num_rows):
    sizes = [LARGEST_TILE]
    while sizes[-1] > SMALLEST_TILE:
        sizes.append(sizes[-1] // 2)
    return sizes


def _bounds(group_sizes):
    ends = jnp.cumsum(group_sizes)
    return ends - group_sizes, ends


def _zeros_like_varying(shape, dtype, like):
    """Returns zeros that vary over the mesh axes that `like` varies over, as a loop's carry must from its start."""
    return vary_together(jnp.zeros(shape, dtype), like)[0]
