"""Grouped matmul in plain XLA operations, for CPUs: one loop over the groups, and in it tiles of rows.

`jax.lax.ragged_dot` on a CPU multiplies every row by every group's matrix; here a row meets its own only.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.row_tiles import (
    bounds,
    bucket_sizes,
    empty_bits,
    for_each_tile,
    from_bits,
    matmul,
    padded_bits,
    read_rows,
    tile_sizes,
    to_bits,
    write_rows,
    zero_past,
    zeros_varying,
)
from pallas_kernels.transposed_matmul import transposed_matmul
from pallas_kernels.varying import vary_together


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
    d_lhs = _rows_times_matrices(cotangent, rhs, group_sizes, contract_rhs=1)
    return d_lhs, _transposed_products(lhs, cotangent, group_sizes), None


_grouped_matmul.defvjp(_forward, _backward)


def _rows_times_matrices(rows, matrices, group_sizes, *, contract_rhs: int):
    """Multiplies the rows of each group by its matrix, or by the transpose of it when `contract_rhs` is 1."""
    num_rows, num_groups = rows.shape[0], matrices.shape[0]
    sizes = tile_sizes(num_rows, num_groups)
    starts, ends = bounds(group_sizes)
    padded = padded_bits(rows, sizes[0])

    def group(g, out):
        matrix = matrices[g]

        def tile(size, start, out):
            return write_rows(out, matmul(read_rows(padded, start, size), matrix, contract_rhs=contract_rhs), start)

        return for_each_tile(starts[g], ends[g], sizes, tile, out)

    out = empty_bits((num_rows + sizes[0], matrices.shape[2 - contract_rhs]), rows.dtype, rows)
    return zero_past(ends[-1], from_bits(lax.fori_loop(0, num_groups, group, out)[:num_rows]))


def _transposed_products(lhs, rhs, group_sizes):
    """Returns lhs^T @ rhs of each group's rows, [G, K, N] in the dtype of `lhs`; zeros for an empty group.

    Adding to a carried sum costs a pass over [K, N], so a group should take one product: the smallest of the bucket
    sizes that holds its rows, with zeros on both sides in the rows that are not its own.
    """
    num_rows, num_groups = lhs.shape[0], group_sizes.shape[0]
    shape = (lhs.shape[1], rhs.shape[1])
    buckets = bucket_sizes(num_rows, num_groups)
    largest = buckets[-1]
    starts, ends = bounds(group_sizes)
    sides = [padded_bits(x, largest) for x in (lhs, rhs)]

    def group(g, out):
        start, end = starts[g], ends[g]
        num_full = jnp.maximum(end - start - 1, 0) // largest
        rest = end - start - num_full * largest
        bucket = jnp.sum(rest > jnp.array([0, *buckets[:-1]]))  # 0 only for an empty group

        def product(size, start):
            live = (start + jnp.arange(size) < end)[:, None]
            return transposed_matmul(*(jnp.where(live, read_rows(x, start, size), 0) for x in sides))

        branches = [lambda start: zeros_varying(shape, jnp.float32, lhs)]
        branches += [lambda start, size=size: product(size, start) for size in buckets]
        total = lax.switch(bucket, branches, start + num_full * largest)
        total = lax.fori_loop(0, num_full, lambda i, total: total + product(largest, start + i * largest), total)
        return lax.dynamic_update_index_in_dim(out, to_bits(total.astype(lhs.dtype)), g, 0)

    return from_bits(lax.fori_loop(0, num_groups, group, empty_bits((num_groups, *shape), lhs.dtype, lhs)))
