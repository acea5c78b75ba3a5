"""Attention in blocks of queries against `jax.nn.dot_product_attention`, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upjax.model.blockwise_attention import blockwise_attention


def plain(q, k, v, segment_ids, window):
    same_document = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=same_document, is_causal=True, local_window_size=local)


def operands(T, N, G, dtype, B=2, H=32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, G, H), (B, T, G, H), (B, T, N, H))
    q, k, v, d_out = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    # Two documents of different lengths and padding, which is segment 0, at the end.
    position = np.arange(T)[None, :]
    segment_ids = jnp.asarray(
        np.where(position >= T - 5, 0, 1 + (position > np.array([[T // 3], [T // 2]]))), jnp.int32
    )
    return 2 * q, k, v, segment_ids, d_out


# 128 is one block, 200 one and a part, 2100 more than the sixteen blocks that the smallest size would give.
@pytest.mark.parametrize(
    "T, window", [(7, None), (128, None), (200, None), (300, 1), (300, 40), (300, 500), (2100, None)]
)
@pytest.mark.parametrize("N, G", [(4, 4), (6, 2)])
def test_equals_the_plain_form(T, window, N, G):
    q, k, v, segment_ids, d_out = operands(T, N, G, jnp.float32, B=1 if T > 1000 else 2)
    results = {}
    for name, attend in (("ours", blockwise_attention), ("plain", plain)):
        out, vjp = jax.vjp(lambda q, k, v, attend=attend: attend(q, k, v, segment_ids[: q.shape[0]], window), q, k, v)
        results[name] = (out, *vjp(d_out))
    for ours, wanted in zip(results["ours"], results["plain"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


def test_bfloat16_is_as_near_to_float32_as_the_plain_form():
    q, k, v, segment_ids, d_out = operands(300, 6, 2, jnp.bfloat16)
    exact_of = [x.astype(jnp.float32) for x in (q, k, v)]

    def gradients(attend, *qkv):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids, None), *qkv)
        return [np.asarray(x, np.float32) for x in (out, *vjp(d_out.astype(out.dtype)))]

    exact = gradients(plain, *exact_of)
    error = lambda attend: [np.abs(x - e).max() for x, e in zip(gradients(attend, q, k, v), exact, strict=True)]
    for ours, theirs, reference in zip(error(blockwise_attention), error(plain), exact, strict=True):
        assert ours <= max(2 * theirs, 2**-7 * np.abs(reference).max())
    assert blockwise_attention(q, k, v, segment_ids, None).dtype == jnp.bfloat16


def test_keys_of_other_documents_and_of_the_future_do_not_matter():
    q, k, v, segment_ids, _ = operands(200, 4, 2, jnp.float32)
    before = blockwise_attention(q, k, v, segment_ids, None)
    after = blockwise_attention(q, k.at[:, 150:].set(1e4), v.at[:, 150:].set(1e4), segment_ids, None)
    np.testing.assert_array_equal(before[:, :150], after[:, :150])
    assert not np.array_equal(before[:, 150:], after[:, 150:])
