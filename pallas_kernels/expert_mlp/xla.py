"""The experts in plain XLA operations, fused for CPUs: one loop over the experts, all products of a tile of rows in it.

A tile's activations stay in the caches from one product to the next, each expert's weights are cut out of their stack
once, and nothing as large as [M, F] is kept but the gate and up products.

Dims: M rows, D embed, F hidden, E experts.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_mlp.activation import gated, gated_gradients
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
    to_bits,
    write_matrix,
    write_rows,
    zero_if,
    zero_past,
)
from pallas_kernels.transposed_matmul import transposed_matmul


def forward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes):
    """Returns the output [M, D] and what the backward pass needs: the gate and up products, each [M, F], as bits."""
    (M, D), (E, _, F), dtype = rows_MD.shape, gate_EDF.shape, rows_MD.dtype
    sizes = tile_sizes(M, E)
    starts, ends = bounds(group_sizes)
    by_row = padded_bits(rows_MD, sizes)

    def expert(e, carry):
        gate_DF, up_DF, down_FD = (w[e].astype(rows_MD.dtype) for w in (gate_EDF, up_EDF, down_EFD))

        def tile(size, start, carry):
            rows = read_rows(by_row, start, size)
            gate, up = matmul(rows, gate_DF), matmul(rows, up_DF)
            results = (matmul(gated(gate, up), down_FD), gate, up)
            return tuple(write_rows(c, r, start) for c, r in zip(carry, results, strict=True))

        return for_each_tile(starts[e], ends[e], sizes, tile, tile, carry)

    carry = tuple(empty_bits((M + overshoot(sizes), width), dtype, rows_MD) for width in (D, F, F))
    out_MD, gate_MF, up_MF = lax.fori_loop(0, E, expert, carry)
    return zero_past(ends[-1], from_bits(out_MD[:M])), (gate_MF[:M], up_MF[:M])


def backward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, products, d_out_MD):
    """Returns the gradients of the rows and the three weights."""
    (M, D), E, dtype = rows_MD.shape, gate_EDF.shape[0], gate_EDF.dtype
    sizes = tile_sizes(M, E)
    starts, ends = bounds(group_sizes)
    by_row = [padded_bits(x, sizes) for x in (rows_MD, *products, d_out_MD)]

    def expert(e, carry):
        d_rows_MD, *stacks = carry
        gate_DF, up_DF, down_FD = (from_bits(stack[e]).astype(rows_MD.dtype) for stack in stacks)

        def tile(put, size, start, carry):
            d_rows_MD, *stacks = carry
            live = (start + jnp.arange(size) < ends[e])[:, None]  # a tile's other rows count as zeros
            rows, gate, up, d_out = (jnp.where(live, read_rows(x, start, size), 0) for x in by_row)
            d_gate, d_up = gated_gradients(gate, up, matmul(d_out, down_FD, contract_rhs=1))
            d_rows = matmul(d_gate, gate_DF, contract_rhs=1) + matmul(d_up, up_DF, contract_rhs=1)
            parts = (
                transposed_matmul(rows, d_gate),
                transposed_matmul(rows, d_up),
                transposed_matmul(gated(gate, up), d_out),
            )
            stacks = [put(stack, part, e, dtype) for stack, part in zip(stacks, parts, strict=True)]
            return (write_rows(d_rows_MD, d_rows, start), *stacks)

        first, more = partial(tile, write_matrix), partial(tile, add_to_matrix)
        d_rows_MD, *stacks = for_each_tile(starts[e], ends[e], sizes, first, more, carry)
        return (d_rows_MD, *(zero_if(starts[e] == ends[e], stack, e) for stack in stacks))

    # An expert's gradients take the place of its weights, once read: in a layer scan no other memory is touched.
    stacks = [to_bits(w) for w in (gate_EDF, up_EDF, down_EFD)]
    d_rows_MD = empty_bits((M + overshoot(sizes), D), rows_MD.dtype, rows_MD)
    d_rows_MD, *d_weights = lax.fori_loop(0, E, expert, (d_rows_MD, *stacks))
    return zero_past(ends[-1], from_bits(d_rows_MD[:M])), *(from_bits(d) for d in d_weights)
