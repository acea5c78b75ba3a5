"""Every implementation means what the reference means, in value and gradients, whatever the groups."""

from functools import lru_cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_ways import QUICK_COMPILE, WAYS, assert_close, by_loop, random_dout, value_and_gradients

from pallas_kernels.grouped_matmul import grouped_matmul, pallas_tpu, reference
from pallas_kernels.grouped_matmul.cases import PATTERNS, TINY
from pallas_kernels.grouped_matmul.pallas_tpu import Tilings
from pallas_kernels.grouped_matmul.tiling import Tiling

EVERY_WAY = {"reference": reference.grouped_matmul, "by_platform": grouped_matmul, **WAYS}


@lru_cache  # a shape is compiled once for all its patterns
def compiled(way: str):
    return value_and_gradients(EVERY_WAY[way])


# The patterns share a compiled program. Of the other shapes, those of known faults are in the fast run, in float32.
FAST = {*PATTERNS, "k_tail", "n_160", "odd_everywhere"}


def cases(dtype: str):
    fast = FAST if dtype == "float32" else set(PATTERNS)
    return [pytest.param(dtype, case, marks=[pytest.mark.slow] * (case.name not in fast)) for case in TINY]


@pytest.mark.parametrize("dtype, case", cases("float32"), ids=lambda value: getattr(value, "name", value))
def test_reference_multiplies_each_run_of_rows_by_its_matrix(dtype, case):
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), dtype)
    dout = random_dout(lhs, rhs)
    actual = compiled("reference")(lhs, rhs, group_sizes, dout)
    assert_close(actual, by_loop(lhs, rhs, group_sizes, dout), dtype)


@pytest.mark.parametrize(
    "dtype, case", cases("float32") + cases("bfloat16"), ids=lambda value: getattr(value, "name", value)
)
@pytest.mark.parametrize("way", sorted(WAYS))
def test_value_and_gradients_match_reference(way, dtype, case):
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), dtype)
    dout = random_dout(lhs, rhs)
    actual = compiled(way)(lhs, rhs, group_sizes, dout)
    expected = compiled("reference")(lhs, rhs, group_sizes, dout)
    assert [x.dtype for x in actual] == [dtype] * 3
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", sorted({"reference", *WAYS}))
def test_what_lies_past_the_groups_never_reaches_anything(way, poison):
    """Two steps of descent, each with a poisoned tail in the rows and in the cotangent, equal two with a clean one."""
    case = next(case for case in TINY if case.name == "tail")
    step = compiled(way)
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), "float32")
    dout, total = random_dout(lhs, rhs), sum(case.group_sizes)

    def two_steps(tail):
        rows, matrices = lhs, rhs
        for _ in range(2):
            rows, cotangent = rows.at[total:].set(tail), dout.at[total:].set(tail)
            out, drows, dmatrices = step(rows, matrices, group_sizes, cotangent)
            assert not np.any(out[total:]) and not np.any(drows[total:])
            rows, matrices = rows - 0.1 * drows, matrices - 0.1 * dmatrices
        return out, rows[:total], matrices

    for poisoned, clean in zip(two_steps(poison), two_steps(0.0), strict=True):
        assert np.all(np.isfinite(poisoned))
        np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_group_with_nan_harms_no_other(way):
    case = next(case for case in TINY if case.name == "skewed")
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), "float32")
    dout, group = random_dout(lhs, rhs), 2
    first = sum(case.group_sizes[:group])
    rows = slice(first, first + case.group_sizes[group])
    args = lhs.at[rows].set(jnp.nan), rhs.at[group].set(jnp.nan), group_sizes, dout.at[rows].set(jnp.nan)
    out, dlhs, drhs = (np.asarray(x) for x in compiled(way)(*args))
    for rowwise in (out, dlhs):
        assert np.all(np.isnan(rowwise[rows])) and np.all(np.isfinite(np.delete(rowwise, rows, axis=0)))
    assert np.all(np.isnan(drhs[group])) and np.all(np.isfinite(np.delete(drhs, group, axis=0)))


# Tiles of 32 rows in steps of 16, so that any sizes make many tiles that groups share, and steps that they do not.
ROWS, GROUPS = 96, 5
FINE = Tiling(m=32, k=24, n=40, step=16, edge=8)
fine_tiles = value_and_gradients(
    lambda lhs, rhs, group_sizes: pallas_tpu.grouped_matmul(
        lhs, rhs, group_sizes, tilings=Tilings(forward=FINE, lhs_grad=FINE, rhs_grad=FINE), interpret=True
    )
)


@st.composite
def some_group_sizes(draw):
    """Draws sizes whose sum is at most ROWS: the gaps between sorted cuts."""
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS)))
    return np.diff(cuts, prepend=0).astype(np.int32)


as_users_compile_it = value_and_gradients(grouped_matmul, compiler_options=None)


@pytest.mark.parametrize("run", [fine_tiles, as_users_compile_it], ids=["pallas_tpu", "by_platform"])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(group_sizes=some_group_sizes(), poison=st.sampled_from([0.0, np.nan, np.inf]))
def test_any_group_sizes(run, group_sizes, poison):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.normal(size=(ROWS, 24)).astype("float32"), rng.normal(size=(GROUPS, 24, 40)).astype("float32")
    dout = rng.normal(size=(ROWS, 40)).astype("float32")
    lhs[group_sizes.sum() :] = dout[group_sizes.sum() :] = poison
    assert_close(run(lhs, rhs, group_sizes, dout), by_loop(lhs, rhs, group_sizes, dout), "float32")


@pytest.mark.parametrize("way", sorted({"by_platform", "reference", *WAYS}))
def test_shards_of_the_groups_together_make_the_whole(way):
    """Each of three shards has two of the six groups' matrices; what they make of the rows of others is zero."""
    case = next(case for case in TINY if case.name == "tail")
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), "float32")
    dout = random_dout(lhs, rhs)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def shard(rhs, offset):
        multiply = lambda lhs, rhs: EVERY_WAY[way](lhs, rhs, group_sizes, group_offset=offset)
        out, vjp = jax.vjp(multiply, lhs, rhs)
        return out, *vjp(dout)

    shards = [shard(rhs[offset : offset + 2], offset) for offset in (0, 2, 4)]
    out, dlhs, drhs = zip(*shards, strict=True)
    actual = sum(map(np.asarray, out)), sum(map(np.asarray, dlhs)), np.concatenate(drhs)
    assert_close(actual, by_loop(lhs, rhs, group_sizes, dout), "float32")
    ends = np.cumsum(case.group_sizes)
    for i, (rows, of_rows) in enumerate(zip(out, dlhs, strict=True)):
        others = np.ones(case.m, bool)
        others[(ends[2 * i - 1] if i else 0) : ends[2 * i + 1]] = False
        assert not np.any(np.asarray(rows)[others]) and not np.any(np.asarray(of_rows)[others])


@pytest.mark.parametrize("way", ["by_platform", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_layers_scanned_and_recomputed_have_the_gradient_of_a_plain_loop(way):
    keys = jax.random.split(jax.random.key(3))
    x = jax.random.normal(keys[0], (150, 64))
    layers = jax.random.normal(keys[1], (3, 4, 64, 64)) / 8
    group_sizes = jnp.array([70, 0, 21, 40], jnp.int32)

    def scanned(layers):
        layer = jax.checkpoint(lambda x, matrices: (jnp.tanh(EVERY_WAY[way](x, matrices, group_sizes)), None))
        return jnp.sum(jax.lax.scan(layer, x, layers)[0] ** 2)

    def unrolled(layers):
        out = x
        for matrices in layers:
            out = jnp.tanh(reference.grouped_matmul(out, matrices, group_sizes))
        return jnp.sum(out**2)

    compiled = partial(jax.jit, compiler_options=QUICK_COMPILE)
    actual, expected = compiled(jax.grad(scanned))(layers), compiled(jax.grad(unrolled))(layers)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_an_implementation_asked_for_by_name_runs_or_fails():
    lhs, rhs, group_sizes = TINY[0].arrays(jax.random.key(0), "float32")
    by_name = grouped_matmul(lhs, rhs, group_sizes, implementation="reference")
    np.testing.assert_array_equal(by_name, reference.grouped_matmul(lhs, rhs, group_sizes))
    with pytest.raises(ValueError, match="interpret mode"):
        grouped_matmul(lhs, rhs, group_sizes, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="float16"):
        grouped_matmul(lhs.astype("float16"), rhs.astype("float16"), group_sizes, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="'mosaic'"):
        grouped_matmul(lhs, rhs, group_sizes, implementation="mosaic")


@pytest.mark.parametrize(
    "lhs, rhs, group_sizes, message",
    [
        (("float32", 8, 4), ("float32", 4, 6), ("int32", 2), r"need lhs \[M, K\], rhs \[G, K, N\]"),
        (("float32", 8, 4), ("float32", 2, 5, 6), ("int32", 2), "lhs has K = 4 columns, the matrices of rhs K = 5"),
        (("float32", 8, 4), ("float32", 2, 4, 6), ("int32", 3), "rhs has 2 groups, group_sizes 3"),
        (("float32", 0, 4), ("float32", 2, 4, 6), ("int32", 2), "at least 1"),
        (("bfloat16", 8, 4), ("float32", 2, 4, 6), ("int32", 2), "one floating dtype"),
        (("int32", 8, 4), ("int32", 2, 4, 6), ("int32", 2), "one floating dtype"),
        (("float32", 8, 4), ("float32", 2, 4, 6), ("float32", 2), "group_sizes must be int32"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_shapes(lhs, rhs, group_sizes, message):
    arrays = [jnp.zeros(shape, dtype) for dtype, *shape in (lhs, rhs, group_sizes)]
    with pytest.raises(ValueError, match=message) as error:
        grouped_matmul(*arrays)
    assert all(str(jax.typeof(array)) in str(error.value) for array in arrays)
