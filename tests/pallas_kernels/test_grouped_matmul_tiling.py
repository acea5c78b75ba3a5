"""The walk meets each row of each group once, and the chosen tiles fit."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.cases import REAL, TINY
from pallas_kernels.grouped_matmul.pallas_tpu import choose_tilings
from pallas_kernels.grouped_matmul.visits import row_bounds, visits_of_groups, visits_of_rows
from pallas_kernels.tpu_chips import tpu_chips

ROWS, GROUPS, OFFSET = 50, 4, 1  # of six groups the four from number 1 on have matrices
bounds = jax.jit(lambda sizes: row_bounds(sizes, GROUPS, OFFSET, ROWS))


def walked(visits):
    """Returns the visits that count, as (group, tile) pairs, after checking what every walk promises."""
    count = int(visits.count)
    assert count <= len(visits.groups) == len(visits.tiles)
    groups, tiles = (np.asarray(x)[:count].tolist() for x in (visits.groups, visits.tiles))
    pairs = list(zip(groups, tiles, strict=True))
    assert pairs == sorted(set(pairs)), "a block left is never come back to, and no pair is met twice"
    assert tiles == sorted(tiles)
    return pairs


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(sizes=st.lists(st.integers(0, 15), min_size=6, max_size=6), tile=st.sampled_from([8, 16, 50]))
def test_a_walk_meets_every_row_of_every_group(sizes, tile):
    # Sizes may reach past the last row here: no visit may, for that would be memory of others.
    ends = np.minimum(np.cumsum(sizes), ROWS)
    of_groups = [set(range(start, end)) for start, end in zip(ends[:4], ends[1:5], strict=True)]
    of_rows = [set(range(ends[0])), *of_groups, set(range(ends[4], ROWS))]  # first and last: rows without a matrix
    tiles = lambda rows: {row // tile for row in rows}
    starts = bounds(jnp.array(sizes, jnp.int32))

    every_row = {(group, i) for group, rows in enumerate(of_rows) for i in tiles(rows)}
    assert set(walked(visits_of_rows(starts, ROWS, tile))) == every_row
    with_matrix = {(group, i) for group, i in every_row if 0 < group <= GROUPS}
    assert set(walked(visits_of_rows(starts, ROWS, tile, others=False))) == with_matrix

    by_groups = walked(visits_of_groups(starts, ROWS, tile))
    assert {group for group, _ in by_groups} == {1, 2, 3, 4}
    for group, rows in enumerate(of_groups, start=1):
        met = [i for g, i in by_groups if g == group]
        assert set(met) == tiles(rows) if rows else len(met) == 1
    assert max(i for _, i in by_groups) <= (ROWS - 1) // tile


@pytest.mark.parametrize("chip", tpu_chips().values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", REAL + TINY, ids=lambda case: case.name)
def test_tiles_fit_in_the_vector_memory_and_on_the_grid(case, dtype, chip):
    tilings = choose_tilings(case.m, case.k, case.n, case.num_groups, dtype, chip)
    itemsize = jnp.dtype(dtype).itemsize
    for tile in (tilings.forward, tilings.lhs_grad, tilings.rhs_grad):
        for size, whole in ((tile.m, case.m), (tile.k, case.k), (tile.n, case.n)):
            assert size == whole or (size % 128 == 0 and size < whole)
        assert tile.m % tile.step == 0 and tile.step % tile.edge == 0
        # Blocks are fetched while others are worked on, so each side is there twice.
        assert 2 * itemsize * (tile.m * tile.k + tile.k * tile.n + tile.m * tile.n) <= chip.vmem_bytes


def test_a_shape_that_no_tile_of_the_chip_holds_is_refused_with_the_numbers():
    chip = dataclasses.replace(tpu_chips()["v4"], name="small", vmem_bytes=2**18)
    with pytest.raises(NotImplementedError, match=r"of a small: the smallest need [\d,]+ bytes, [\d,]+ of its 262,144"):
        choose_tilings(4096, 4096, 4096, 8, "float32", chip)


def test_weights_of_a_wide_model_stay_while_the_rows_of_their_group_pass():
    """At Mixtral's shape a group's weights are fetched once: the tiles take the whole contraction."""
    for chip in ("v5e", "v5p", "v6e", "tpu7x"):
        assert choose_tilings(16384, 4096, 14336, 8, "bfloat16", tpu_chips()[chip]).forward.k == 4096


def test_small_groups_get_small_edges():
    """Rows where groups meet are multiplied for each of them, so few at a time where there are many groups."""
    many = choose_tilings(32768, 2048, 768, 128, "bfloat16", tpu_chips()["v5p"]).forward
    assert many.step <= 32768 // 128 and many.edge == 128
