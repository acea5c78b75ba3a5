"""Grouped matmul in plain XLA operations, for CPUs: one loop over the groups, and in it tiles of rows.

`jax.lax.ragged_dot` on a CPU multiplies every row by every group's matrix; here a row meets its own only.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.row_tiles import (
    add_to_matrix,
    bounds,
    empty_bits,
    for_each_tile,
    from_bits,
    matmul,
    overshoot,
    padded_bits,
    read_rows,
    tile_sizes,
    write_matrix,
    write_rows,
    zero_past,
)
from pallas_kernels.transposed_matmul import transposed_matmul
from pallas_kernels.varying import vary_together


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset=0) -> jax.Array:
    """Multiplies each run of rows of `lhs` [M, K] by its own of `rhs` [G, K, N]; [M, N] in the dtype of `lhs`."""
    starts, ends = bounds(group_sizes)
    ours = [lax.dynamic_slice_in_dim(x, group_offset, rhs.shape[0]) for x in (starts, ends)]
    return _grouped_matmul(*vary_together(lhs, rhs, *ours))


@jax.custom_vjp
def _grouped_matmul(lhs, rhs, starts, ends):
    return _rows_times_matrices(lhs, rhs, starts, ends, contract_rhs=0)


def _forward(*operands):
    return _grouped_matmul(*operands), operands


def _backward(operands, cotangent):
    lhs, rhs, starts, ends = operands
    d_lhs = _rows_times_matrices(cotangent, rhs, starts, ends, contract_rhs=1)
    return d_lhs, _transposed_products(lhs, cotangent, starts, ends), None, None


_grouped_matmul.defvjp(_forward, _backward)


def _rows_times_matrices(rows, matrices, starts, ends, *, contract_rhs: int):
    """Multiplies the rows of each group by its matrix, or by the transpose of it when `contract_rhs` is 1."""
    num_rows, num_groups = rows.shape[0], matrices.shape[0]
    sizes = tile_sizes(num_rows, num_groups)
    padded = padded_bits(rows, sizes)

    def group(g, out):
        matrix = matrices[g]

        def tile(size, start, out):
            return write_rows(out, matmul(read_rows(padded, start, size), matrix, contract_rhs=contract_rhs), start)

        return for_each_tile(starts[g], ends[g], sizes, tile, tile, out)

    out = empty_bits((num_rows + overshoot(sizes), matrices.shape[2 - contract_rhs]), rows.dtype, rows)
    # Rows before the first group are the zeros that the buffer was filled with.
    return zero_past(ends[-1], from_bits(lax.fori_loop(0, num_groups, group, out)[:num_rows]))


def _transposed_products(lhs, rhs, starts, ends):
    """Returns lhs^T @ rhs of each group's rows, [G, K, N] in the dtype of `lhs`; zeros for an empty group."""
    num_rows, num_groups = lhs.shape[0], starts.shape[0]
    sizes = tile_sizes(num_rows, num_groups)
    sides = [padded_bits(x, sizes) for x in (lhs, rhs)]

    def group(g, out):
        def product(size, start):
            live = (start + jnp.arange(size) < ends[g])[:, None]  # a tile's other rows count as zeros
            return transposed_matmul(*(jnp.where(live, read_rows(x, start, size), 0) for x in sides))

        first = lambda size, start, out: write_matrix(out, product(size, start), g, lhs.dtype)
        more = lambda size, start, out: add_to_matrix(out, product(size, start), g, lhs.dtype)
        return for_each_tile(starts[g], ends[g], sizes, first, more, out)

    out = empty_bits((num_groups, lhs.shape[1], rhs.shape[1]), lhs.dtype, lhs)
    return from_bits(lax.fori_loop(0, num_groups, group, out))
