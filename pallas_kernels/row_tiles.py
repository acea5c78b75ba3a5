"""Rows of many groups cut into tiles of a few fixed sizes, for loops whose bodies need static shapes.

The rows of a group are contiguous and the groups follow each other, so a tile that reaches past its group's end covers
rows of later groups. Loops that go through the groups in order can let that happen when they write: the later group
overwrites what the tile left in its rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.varying import vary_together

LARGEST_TILE = 512
SMALLEST_TILE = 32
NUM_BUCKETS = 8


def tile_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Returns the tile sizes of `for_each_tile`, powers of two, largest first; twice the mean group at most."""
    sizes = [_largest(num_rows, num_groups)]
    while sizes[-1] > SMALLEST_TILE:
        sizes.append(sizes[-1] // 2)
    return sizes


def bucket_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Returns sizes, smallest first and evenly spaced, of which a group takes the first that holds its rows."""
    largest = _largest(num_rows, num_groups)
    step = max(largest // NUM_BUCKETS, 8)
    return list(range(step, largest + 1, step))


def _largest(num_rows, num_groups):
    size = SMALLEST_TILE
    while size < LARGEST_TILE and size < 2 * num_rows / num_groups:
        size *= 2
    return size


def bounds(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where each group's rows start and end."""
    ends = jnp.cumsum(group_sizes)
    return ends - group_sizes, ends


def for_each_tile(start, end, sizes: list[int], body, carry):
    """Returns the carry after `body(size, start, carry)` for tiles that cover rows start..end.

    The largest size is repeated while it fits, what is left takes each smaller one at most once: fewer than the
    smallest size of rows are covered for nothing.
    """
    for size in sizes:
        rows = end - start
        count = -(-rows // size) if size == sizes[-1] else rows // size
        one_more = lambda i, carry, size=size, start=start: body(size, start + i * size, carry)
        carry = lax.fori_loop(0, count, one_more, carry)
        start = start + count * size
    return carry


def matmul(rows: jax.Array, matrix: jax.Array, *, contract_rhs: int = 0) -> jax.Array:
    """Returns rows @ matrix (its transpose when `contract_rhs` is 1), accumulated in float32, in the rows' dtype."""
    dims = (((1,), (contract_rhs,)), ((), ()))
    return lax.dot_general(rows, matrix, dims, preferred_element_type=jnp.float32).astype(rows.dtype)


def to_bits(x: jax.Array) -> jax.Array:
    """Returns bfloat16 as the uint16 of its bits, other dtypes as they are; `from_bits` undoes it.

    XLA's CPU compiler turns an update of a few rows of a bfloat16 array into conversions of the whole array to float32
    and back. Arrays that a loop fills, or that a scan stacks, are kept as bits.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """Returns the array that `to_bits` was given."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def write_rows(buffer: jax.Array, rows: jax.Array, start) -> jax.Array:
    """Returns `buffer` (bits) with `rows` (values) from row `start` on."""
    return lax.dynamic_update_slice_in_dim(buffer, to_bits(rows), start, 0)


def read_rows(buffer: jax.Array, start, size: int) -> jax.Array:
    """Returns the values of `size` rows of `buffer` (bits) from row `start` on."""
    return from_bits(lax.dynamic_slice_in_dim(buffer, start, size))


def padded_bits(rows: jax.Array, more: int) -> jax.Array:
    """Returns `rows` as bits with `more` zero rows below, so that a tile may reach past the last row."""
    return jnp.pad(to_bits(rows), ((0, more), (0, 0)))


def zero_past(end: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` with zeros from row `end` on, whatever is there."""
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < end, rows, 0)


def zeros_varying(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Returns zeros that vary over the mesh axes that `like` varies over, as a loop's carry must from its start."""
    return vary_together(jnp.zeros(shape, dtype), like)[0]


def empty_bits(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Returns the bits of zeros of `dtype`, a buffer for `write_rows`, varying as `like` does."""
    return to_bits(zeros_varying(shape, dtype, like))
