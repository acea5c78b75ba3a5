"""Which row tile meets which group, in the order in which a kernel walks them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """A walk over pairs of a group and a row tile; a tile that several groups share is visited once for each.

    Groups are numbered from 1: group 0 is the rows before the first and group G + 1 those past the last, which have no
    matrix. Groups and tiles never step back along the walk, so a block that depends on either is fetched or written
    once a run. Only the first `count` entries are visits; what follows repeats the last group.
    """

    starts: Int[Array, "G+3"]
    """Rows starts[g] to starts[g + 1] are group g."""
    groups: Int[Array, "W"]
    tiles: Int[Array, "W"]
    count: Int[Array, ""]


def row_bounds(group_sizes: Int[Array, "H"], num_groups: int, group_offset, num_rows: int) -> Int[Array, "G+3"]:
    """Returns `Visits.starts` of the G groups from number `group_offset` on; nothing reaches past the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    ours = jax.lax.dynamic_slice_in_dim(starts, group_offset, num_groups + 1)
    return jnp.concatenate([jnp.zeros_like(ours[:1]), ours, jnp.full_like(ours[:1], num_rows)])


def visits_of_rows(starts: Int[Array, "G+3"], num_rows: int, tile: int, *, others: bool = True) -> Visits:
    """Returns the walk that meets every row, or, without the others, every row of a group that has a matrix."""
    wanted = jnp.arange(len(starts) - 1)
    wanted = others | ((wanted > 0) & (wanted < len(starts) - 2))
    return _walk(starts, num_rows, tile, jnp.zeros_like(starts[1:]), wanted)


def visits_of_groups(starts: Int[Array, "G+3"], num_rows: int, tile: int) -> Visits:
    """Returns the walk that meets every group with a matrix, an empty one in one visit, and no other row."""
    wanted = jnp.arange(len(starts) - 1)
    wanted = (wanted > 0) & (wanted < len(starts) - 2)
    return _walk(starts, num_rows, tile, jnp.ones_like(starts[1:]), wanted)


def _walk(starts, num_rows: int, tile: int, least, wanted) -> Visits:
    first, end = starts[:-1], starts[1:]
    num_tiles = -(-num_rows // tile)
    first_tile = jnp.minimum(first // tile, num_tiles - 1)
    per_group = jnp.where(wanted, jnp.where(end > first, (end - 1) // tile - first_tile + 1, least), 0)
    ends = jnp.cumsum(per_group)
    # Each group can add one visit to those of the tiles: that of the tile it shares with the group before, or, when
    # it is empty, its only one. The number of visits is known when the program runs, the bound when it is compiled.
    walk = jnp.arange(num_tiles + len(first), dtype=jnp.int32)
    groups = jnp.minimum(jnp.sum(walk[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(first) - 1)
    tiles = jnp.minimum(first_tile[groups] + walk - (ends - per_group)[groups], num_tiles - 1)
    return Visits(starts, groups, tiles.astype(jnp.int32), ends[-1].astype(jnp.int32))
