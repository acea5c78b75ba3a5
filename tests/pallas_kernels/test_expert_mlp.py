"""The experts' gated MLP: every implementation against a NumPy loop, values and gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.expert_mlp import IMPLEMENTATIONS, expert_mlp, pallas_tpu
from pallas_kernels.grouped_matmul.cases import PATTERNS
from pallas_kernels.grouped_matmul.tiling import Tiling

M, D, F, E = 150, 24, 40, 6
NAMES = ("out", "d_rows", "d_gate", "d_up", "d_down")


def operands(dtype=jnp.float32, weight_dtype=jnp.float32, M=M, D=D, F=F):
    keys = jax.random.split(jax.random.key(0), 5)
    rows, d_out = (jax.random.normal(key, (M, D)).astype(dtype) for key in keys[:2])
    shapes = ((E, D, F), (E, D, F), (E, F, D))
    weights = [0.3 * jax.random.normal(k, s).astype(weight_dtype) for k, s in zip(keys[2:], shapes, strict=True)]
    return rows, *weights, d_out


# Along rows and every width several tiles and a tail; steps of 16 rows, and of 8 where they are not all of one group.
SMALL = pallas_tpu.Tilings(
    **dict.fromkeys(
        (field.name for field in dataclasses.fields(pallas_tpu.Tilings)), Tiling(m=64, k=16, n=16, step=16, edge=8)
    )
)
KERNELS = {"kernels": None, "kernels in small tiles": SMALL}
OTHERS = tuple(name for name in IMPLEMENTATIONS if name != "pallas_tpu")  # which needs a TPU, or the interpreter


@partial(jax.jit, static_argnums=6)
def run(rows, gate, up, down, d_out, group_sizes, way):
    if way in KERNELS:
        return by_kernels(rows, gate, up, down, d_out, group_sizes, KERNELS[way], interpret=True)
    out, vjp = jax.vjp(lambda *args: expert_mlp(*args, group_sizes, implementation=way), rows, gate, up, down)
    return out, *vjp(d_out)


def by_kernels(rows, gate, up, down, d_out, group_sizes, tilings, interpret):
    """Returns value and gradients by the kernels' own functions: the interpreter is nothing to ask for by name."""
    operands, options = (rows, gate, up, down, group_sizes), {"tilings": tilings, "interpret": interpret}
    out, products = pallas_tpu.forward(*operands, **options)
    return out, *pallas_tpu.backward(*operands, products, d_out, **options)


def by_loop(rows, gate, up, down, d_out, group_sizes):
    """Returns value and gradients in float64, one expert at a time, by the rules of matrix calculus."""
    rows, gate, up, down, d_out = (np.asarray(x, np.float64) for x in (rows, gate, up, down, d_out))
    out, d_rows = np.zeros_like(rows), np.zeros_like(rows)
    d_gate, d_up, d_down = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    start = 0
    for e, size in enumerate(group_sizes):
        own = slice(start, start + size)
        g, u = rows[own] @ gate[e], rows[own] @ up[e]
        s = 1 / (1 + np.exp(-g))
        out[own] = (g * s * u) @ down[e]
        d_h = d_out[own] @ down[e].T
        d_g, d_u = d_h * u * (s + g * s * (1 - s)), d_h * g * s
        d_rows[own] = d_g @ gate[e].T + d_u @ up[e].T
        d_gate[e], d_up[e], d_down[e] = rows[own].T @ d_g, rows[own].T @ d_u, (g * s * u).T @ d_out[own]
        start += size
    return out, d_rows, d_gate, d_up, d_down


def assert_same(actual, expected, tolerance):
    for name, left, right in zip(NAMES, actual, expected, strict=True):
        left = np.asarray(left, np.float64)
        assert np.isfinite(left).all(), name
        assert np.abs(left - right).max() <= tolerance * max(1.0, np.abs(right).max()), name


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("implementation", (None, *OTHERS, *KERNELS))
def test_value_and_gradients_are_those_of_a_loop_over_experts(implementation, pattern):
    sizes = PATTERNS[pattern](M, E)
    args = operands()
    actual = run(*args, jnp.array(sizes, jnp.int32), implementation)
    assert_same(actual, by_loop(*args, sizes), 1e-5)


@pytest.mark.parametrize("way", ("xla", "kernels in small tiles"))
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=E, max_size=E), poison=st.sampled_from([np.nan, np.inf]))
def test_any_group_sizes_with_poison_past_their_sum(way, sizes, poison):
    while sum(sizes) > M:
        sizes = [size // 2 for size in sizes]
    rows, gate, up, down, d_out = operands()
    dead = (jnp.arange(M) >= sum(sizes))[:, None]
    rows, d_out = jnp.where(dead, poison, rows), jnp.where(dead, poison, d_out)
    actual = run(rows, gate, up, down, d_out, jnp.array(sizes, jnp.int32), way)
    clean = [jnp.where(dead, 0, x) for x in (rows, d_out)]
    assert_same(actual, by_loop(clean[0], gate, up, down, clean[1], sizes), 1e-5)


def test_a_large_group_takes_several_tiles():
    sizes = [M - 3, 0, 1, 0, 0, 2]  # the mean is 25 rows, the largest tile twice that and a bit
    args = operands()
    assert_same(run(*args, jnp.array(sizes, jnp.int32), "xla"), by_loop(*args, sizes), 1e-5)


@pytest.mark.parametrize("implementation", ("xla", "composed", *KERNELS))
def test_bfloat16_rows_with_float32_weights_give_float32_gradients(implementation):
    sizes = PATTERNS["skewed"](M, E)
    args = operands(jnp.bfloat16)
    actual = run(*args, jnp.array(sizes, jnp.int32), implementation)
    assert [x.dtype for x in actual] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    assert_same(actual, by_loop(*args, sizes), 3e-2)


def test_what_does_not_fit_is_refused_with_its_shapes():
    rows, gate, up, down, _ = operands()
    with pytest.raises(ValueError, match=r"down.*\(6, 40, 24\)"):
        expert_mlp(rows, gate, up, up, jnp.zeros(E, jnp.int32))
    with pytest.raises(ValueError, match="group_sizes"):
        expert_mlp(rows, gate, up, down, jnp.zeros(E + 1, jnp.int32))
    with pytest.raises(ValueError, match="implementation"):
        expert_mlp(rows, gate, up, down, jnp.zeros(E, jnp.int32), implementation="cuda")
