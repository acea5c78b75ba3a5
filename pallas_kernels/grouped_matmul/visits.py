"""Which row tile meets which group, in the order in which a kernel walks them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """A walk over pairs of a group and a row tile; a tile that several groups share is visited once for each.

    Groups and tiles never step back along the walk, so a block that depends on either is fetched or written once a run.
    Only the first `count` entries are visits; what follows repeats the last group.
    """

    starts: Int[Array, "G+1"]  # rows starts[g] to starts[g + 1] are group g
    groups: Int[Array, "W"]
    tiles: Int[Array, "W"]
    count: Int[Array, ""]


def visits_of_rows(group_sizes: Int[Array, "G"], num_rows: int, tile: int) -> Visits:
    """Returns the walk that meets every row: the rows past the sum are one more group, number G."""
    starts = _starts(group_sizes, num_rows)
    return _walk(jnp.append(starts, num_rows), num_rows, tile, least=0)


def visits_of_groups(group_sizes: Int[Array, "G"], num_rows: int, tile: int) -> Visits:
    """Returns the walk that meets every group, an empty one in one visit, and leaves out the rows past the sum."""
    return _walk(_starts(group_sizes, num_rows), num_rows, tile, least=1)


def _starts(group_sizes, num_rows: int):
    """Returns the first row of each group and, last, the end of them all; nothing reaches past the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])


def _walk(starts, num_rows: int, tile: int, least: int) -> Visits:
    first, end = starts[:-1], starts[1:]
    num_tiles = -(-num_rows // tile)
    first_tile = jnp.minimum(first // tile, num_tiles - 1)
    per_group = jnp.where(end > first, (end - 1) // tile - first_tile + 1, least)
    ends = jnp.cumsum(per_group)
    # Each group can add one visit to those of the tiles: that of the tile it shares with the group before, or, when
    # it is empty, its only one. The number of visits is known when the program runs, the bound when it is compiled.
    walk = jnp.arange(num_tiles + len(first), dtype=jnp.int32)
    groups = jnp.minimum(jnp.sum(walk[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(first) - 1)
    tiles = jnp.minimum(first_tile[groups] + walk - (ends - per_group)[groups], num_tiles - 1)
    return Visits(starts, groups, tiles.astype(jnp.int32), ends[-1].astype(jnp.int32))
