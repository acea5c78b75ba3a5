"""The experts in plain XLA operations, fused for CPUs: one loop over the experts, all products of a tile of rows in it.

A tile's activations stay in the caches from one product to the next, each expert's weights are cut out of their stack
once, and nothing as large as [M, F] is kept but the gate and up products.

Dims: M rows, D embed, F hidden, E experts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_mlp.activation import gated, gated_gradients
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


def forward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes):
    """Returns the output [M, D] and what the backward pass needs: the gate and up products, each [M, F], as bits."""
    (M, D), (E, _, F), dtype = rows_MD.shape, gate_EDF.shape, rows_MD.dtype
    sizes = tile_sizes(M, E)
    starts, ends = bounds(group_sizes)
    by_row = padded_bits(rows_MD, sizes[0])

    def expert(e, carry):
        gate_DF, up_DF, down_FD = (w[e].astype(rows_MD.dtype) for w in (gate_EDF, up_EDF, down_EFD))

        def tile(size, start, carry):
            rows = read_rows(by_row, start, size)
            gate, up = matmul(rows, gate_DF), matmul(rows, up_DF)
            results = (matmul(gated(gate, up), down_FD), gate, up)
            return tuple(write_rows(c, r, start) for c, r in zip(carry, results, strict=True))

        return for_each_tile(starts[e], ends[e], sizes, tile, carry)

    carry = tuple(empty_bits((M + sizes[0], width), dtype, rows_MD) for width in (D, F, F))
    out_MD, gate_MF, up_MF = lax.fori_loop(0, E, expert, carry)
    return zero_past(ends[-1], from_bits(out_MD[:M])), (gate_MF[:M], up_MF[:M])


def backward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, products, d_out_MD):
    """Returns the gradients of the rows and the three weights."""
    (M, D), (E, _, F), dtype = rows_MD.shape, gate_EDF.shape, gate_EDF.dtype
    buckets = bucket_sizes(M, E)
    starts, ends = bounds(group_sizes)
    by_row = [padded_bits(x, buckets[-1]) for x in (rows_MD, *products, d_out_MD)]

    def expert(e, carry):
        gate_DF, up_DF, down_FD = (w[e].astype(rows_MD.dtype) for w in (gate_EDF, up_EDF, down_EFD))

        def tile(size, start):
            """Returns the tile's part of the weights' gradients, and that of its rows, filled up to the largest size."""
            live = (start + jnp.arange(size) < ends[e])[:, None]
            rows, gate, up, d_out = (jnp.where(live, read_rows(x, start, size), 0) for x in by_row)
            d_gate, d_up = gated_gradients(gate, up, matmul(d_out, down_FD, contract_rhs=1))
            d_rows = matmul(d_gate, gate_DF, contract_rhs=1) + matmul(d_up, up_DF, contract_rhs=1)
            d_weights = (
                transposed_matmul(rows, d_gate),
                transposed_matmul(rows, d_up),
                transposed_matmul(gated(gate, up), d_out),
            )
            return d_weights, jnp.pad(d_rows, ((0, buckets[-1] - size), (0, 0)))

        d_rows_MD, *d_weights = carry
        d_rows_MD, sums = _sum_over_tiles(starts[e], ends[e], buckets, tile, d_rows_MD, [(D, F), (D, F), (F, D)])
        updated = [
            lax.dynamic_update_index_in_dim(d, to_bits(s.astype(dtype)), e, 0)
            for d, s in zip(d_weights, sums, strict=True)
        ]
        return (d_rows_MD, *updated)

    d_weights = [empty_bits(shape, dtype, rows_MD) for shape in ((E, D, F), (E, D, F), (E, F, D))]
    d_rows_MD = empty_bits((M + buckets[-1], D), rows_MD.dtype, rows_MD)
    d_rows_MD, *d_weights = lax.fori_loop(0, E, expert, (d_rows_MD, *d_weights))
    return zero_past(ends[-1], from_bits(d_rows_MD[:M])), *(from_bits(d) for d in d_weights)


def _sum_over_tiles(start, end, buckets, tile, d_rows_MD, shapes):
    """Returns `d_rows_MD` (bits) with the rows start..end filled in, and the sums of the tiles' weight gradients.

    Adding to a carried sum costs a pass over a weight, so an expert should take one tile: the smallest of the bucket
    sizes that holds its rows. Only what is over the largest goes by a loop. What a tile writes past its expert's rows
    is overwritten when the expert comes whose rows they are.
    """
    largest = buckets[-1]
    num_full = jnp.maximum(end - start - 1, 0) // largest
    rest = end - start - num_full * largest
    bucket = jnp.sum(rest > jnp.array([0, *buckets[:-1]]))  # 0 only for an expert without rows

    def nothing(start):
        of_rows = zeros_varying((largest, d_rows_MD.shape[1]), d_rows_MD.dtype, d_rows_MD)
        return tuple(zeros_varying(s, jnp.float32, d_rows_MD) for s in shapes), from_bits(of_rows)

    def one_more(i, carry):
        d_rows_MD, sums = carry
        d_weights, d_rows = tile(largest, start + i * largest)
        return write_rows(d_rows_MD, d_rows, start + i * largest), jax.tree.map(jnp.add, sums, d_weights)

    last = start + num_full * largest
    branches = [nothing] + [lambda start, size=size: tile(size, start) for size in buckets]
    sums, d_rows = lax.switch(bucket, branches, last)
    return lax.fori_loop(0, num_full, one_more, (write_rows(d_rows_MD, d_rows, last), sums))
