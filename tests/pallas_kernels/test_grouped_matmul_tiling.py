"""The walk meets each row of each group once, and the chosen tiles fit."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.cases import REAL, TINY
from pallas_kernels.grouped_matmul.tiling import VMEM_BUDGET_BYTES, Tiling, choose_tilings
from pallas_kernels.grouped_matmul.visits import visits_of_groups, visits_of_rows

ROWS = 50
walk_rows, walk_groups = (jax.jit(walk, static_argnums=(1, 2)) for walk in (visits_of_rows, visits_of_groups))


def walked(visits):
    """Returns the visits that count, as (group, tile) pairs, after checking what every walk promises."""
    count = int(visits.count)
    assert 0 < count <= len(visits.groups) == len(visits.tiles)
    pairs = list(
        zip(np.asarray(visits.groups)[:count].tolist(), np.asarray(visits.tiles)[:count].tolist(), strict=True)
    )
    assert pairs == sorted(set(pairs)), "a block left is never come back to, and no pair is met twice"
    assert [tile for _, tile in pairs] == sorted(tile for _, tile in pairs)
    return pairs


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(sizes=st.lists(st.integers(0, 20), min_size=4, max_size=4), tile=st.sampled_from([8, 16, 50]))
def test_a_walk_meets_every_row_of_every_group(sizes, tile):
    # Sizes may reach past the last row here: no visit may, for that would be memory of others.
    ends = np.minimum(np.cumsum(sizes), ROWS)
    of_groups = [set(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]
    of_rows = [*of_groups, set(range(ends[-1], ROWS))]  # the rows past the sum come as one more group
    tiles = lambda rows: {row // tile for row in rows}

    by_rows = walked(walk_rows(jnp.array(sizes, jnp.int32), ROWS, tile))
    assert set(by_rows) == {(group, i) for group, rows in enumerate(of_rows) for i in tiles(rows)}

    by_groups = walked(walk_groups(jnp.array(sizes, jnp.int32), ROWS, tile))
    for group, rows in enumerate(of_groups):
        met = [i for g, i in by_groups if g == group]
        assert set(met) == tiles(rows) if rows else len(met) == 1
    assert max(i for _, i in by_groups) <= (ROWS - 1) // tile


@pytest.mark.parametrize("vmem_bytes", [VMEM_BUDGET_BYTES, 12 * 2**20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", REAL + TINY, ids=lambda case: case.name)
def test_tiles_fit_in_the_budget_and_on_the_grid(case, dtype, vmem_bytes):
    tilings = choose_tilings(case.m, case.k, case.n, case.num_groups, dtype, vmem_bytes)
    itemsize = jnp.dtype(dtype).itemsize
    for tile in (tilings.forward, tilings.lhs_grad, tilings.rhs_grad):
        for size, whole in ((tile.m, case.m), (tile.k, case.k), (tile.n, case.n)):
            assert size == whole or (size % 128 == 0 and size < whole)
        # Blocks are fetched while others are worked on, so each side is there twice.
        assert 2 * itemsize * (tile.m * tile.k + tile.k * tile.n + tile.m * tile.n) <= vmem_bytes


def test_a_budget_that_holds_no_tile_is_refused():
    with pytest.raises(ValueError, match="no tiles .* fit in 1024 bytes"):
        choose_tilings(256, 256, 256, 4, "bfloat16", vmem_bytes=1024)


def test_weights_of_a_wide_model_stay_while_the_rows_of_their_group_pass():
    """At Mixtral's shape both products take a whole contraction at once, so a group's weights are fetched once."""
    tilings = choose_tilings(16384, 4096, 14336, 8, "bfloat16")
    assert tilings.forward.k == 4096
    assert tilings.lhs_grad.n == 14336


def test_small_groups_get_small_tiles():
    """Rows of a shared tile are multiplied once a group: tiles far larger than the groups would mostly do that."""
    many = choose_tilings(32768, 2048, 768, 128, "bfloat16").forward
    few = choose_tilings(32768, 2048, 768, 2, "bfloat16").forward
    assert many.m <= 32768 // 128 < few.m
    assert isinstance(many, Tiling)
