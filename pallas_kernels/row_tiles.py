"""Rows of many groups cut into tiles of a few fixed sizes, for loops whose bodies need static shapes.

The rows of a group are contiguous and the groups follow each other, so a tile that reaches past its group's end covers
rows of later groups. Loops that go through the groups in order can let that happen when they write: the later group
overwrites what the tile left in its rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.varying import vary_together

SMALLEST_TILE = 32
LARGEST_TILE = 1024
STEPS_PER_MEAN = 8


def tile_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Returns the sizes of tiles for so many rows in so many groups: evenly spaced, smallest first, at most 16.

    They are about an eighth of the mean group apart and go up to twice the mean or all rows, so most groups take one
    tile and few rows are multiplied for nothing. Each size is a program of its own to compile.
    """
    mean = num_rows / num_groups
    step = SMALLEST_TILE
    while step * STEPS_PER_MEAN < mean and step * 2 * STEPS_PER_MEAN < LARGEST_TILE:
        step *= 2
    count = min(max(1, math.ceil(2 * mean / step)), math.ceil(num_rows / step), 2 * STEPS_PER_MEAN)
    return [step * i for i in range(1, count + 1)]


def overshoot(sizes: list[int]) -> int:
    """Returns how many rows past its group's end a tile may reach."""
    return sizes[0]


def bounds(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where each group's rows start and end."""
    ends = jnp.cumsum(group_sizes)
    return ends - group_sizes, ends


def for_each_tile(start, end, sizes: list[int], first, more, carry):
    """Returns the carry after tiles that cover the rows start..end: `first` once, then `more` for each further tile.

    Both are called as `body(size, start of the tile, carry)`. The first tile is of the smallest size that holds the
    rows, or the rows that are left over by tiles of the largest size, which are the further ones. So a tile reaches
    past the end by less than `overshoot(sizes)`. Without rows there is no tile. A loop that runs once or never stands
    for each size: a conditional would copy what the tile writes to.
    """
    largest = sizes[-1]
    num_more = jnp.maximum(end - start - 1, 0) // largest
    rest = end - start - num_more * largest
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        fits = ((smaller < rest) & (rest <= size)).astype(jnp.int32)
        # `i` is 0, but the compiler must not know: it would compute the tile before the loop, whether it runs or not.
        one = lambda i, carry, size=size: first(size, start + num_more * largest + i * size, carry)
        carry = lax.fori_loop(0, fits, one, carry)
    return lax.fori_loop(0, num_more, lambda i, carry: more(largest, start + i * largest, carry), carry)


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


def write_matrix(stack: jax.Array, matrix: jax.Array, index, dtype) -> jax.Array:
    """Returns `stack` (bits of `dtype`) with `matrix` (values) at `index` of its first dim."""
    return lax.dynamic_update_index_in_dim(stack, to_bits(matrix.astype(dtype)), index, 0)


def add_to_matrix(stack: jax.Array, matrix: jax.Array, index, dtype) -> jax.Array:
    """Returns `stack` (bits of `dtype`) with `matrix` (values) added, in float32, to what is at `index`."""
    return write_matrix(stack, from_bits(stack[index]).astype(jnp.float32) + matrix, index, dtype)


def zero_if(condition: jax.Array, stack: jax.Array, index) -> jax.Array:
    """Returns `stack`, where the condition holds with zeros at `index` of its first dim."""
    # `i` is 0; made of it, the zeros are not computed before the loop, whether it runs or not.
    write = lambda i, stack: lax.dynamic_update_index_in_dim(stack, jnp.full(stack.shape[1:], i, stack.dtype), index, 0)
    return lax.fori_loop(0, condition.astype(jnp.int32), write, stack)


def padded_bits(rows: jax.Array, sizes: list[int]) -> jax.Array:
    """Returns `rows` as bits with zero rows below, so that a tile may reach past the last row."""
    return jnp.pad(to_bits(rows), ((0, overshoot(sizes)), (0, 0)))


def zero_past(end: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` with zeros from row `end` on, whatever is there."""
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < end, rows, 0)


def empty_bits(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Returns the bits of zeros of `dtype`, a buffer for a loop to write to.

    They vary over the mesh axes that `like` varies over, as a loop's carry must from its start.
    """
    return to_bits(vary_together(jnp.zeros(shape, dtype), like)[0])
