"""Attention on CPU in blocks of queries, each against the keys it may see only, with a backward pass of its own.

`jax.nn.dot_product_attention` multiplies every query by every key, keeps the [T, S] matrix, and on a CPU its products
miss the fast paths. Here nothing larger than a block of rows of that matrix is made, and products have the forms that
XLA's CPU compiler hands to its matmul library: contracted over the last dim of their left side, in float32.

Dims: B batch, T time (of queries), S time (of keys), N heads, G key/value heads, R heads of one key/value head,
H head, Q rows of a block: the R heads' queries of one stretch of time.
"""

from functools import partial

import jax
import jax.numpy as jnp

SMALLEST_BLOCK = 128
MOST_BLOCKS = 16
"""Each block is a piece of program of its own to compile."""

MASKED = -1e30


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, window: int | None) -> jax.Array:
    """Returns causal attention within documents (and the window), [B, T, N, H] in the dtype of `q`."""
    return _forward(q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, window)[0]


def _forward(q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, window):
    q_BGRTH, k_BGSH, v_BGSH = _grouped(q_BTNH, k_BSGH.shape[2]), k_BSGH.swapaxes(1, 2), v_BSGH.swapaxes(1, 2)
    outs, log_sums = [], []
    for block in _blocks(q_BTNH.shape[1], window):
        scores_BGQS = _scores(block, q_BGRTH, k_BGSH, segment_ids_BT, window)
        largest_BGQ = jnp.max(scores_BGQS, axis=-1, keepdims=True)
        weights_BGQS = jnp.exp(scores_BGQS - largest_BGQ)
        sum_BGQ = jnp.sum(weights_BGQS, axis=-1, keepdims=True)
        out_BGQH = _dot("bgqs,bgsh->bgqh", weights_BGQS.astype(v_BGSH.dtype), block.keys(v_BGSH)) / sum_BGQ
        outs.append(block.unfolded(out_BGQH.astype(q_BTNH.dtype), q_BGRTH.shape[2]))
        log_sums.append(block.unfolded(largest_BGQ + jnp.log(sum_BGQ), q_BGRTH.shape[2]))
    out_BTNH = _ungrouped(_joined(outs))
    return out_BTNH, (q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, out_BTNH, _joined(log_sums))


def _backward(window, residuals, d_out_BTNH):
    q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, out_BTNH, log_sum_BGRT1 = residuals
    (_, T, _, _), (_, _, G, _) = q_BTNH.shape, k_BSGH.shape
    q_BGRTH, k_BGSH, v_BGSH = _grouped(q_BTNH, G), k_BSGH.swapaxes(1, 2), v_BSGH.swapaxes(1, 2)
    d_out_BGRTH = _grouped(d_out_BTNH, G)
    # The part of the softmax's gradient that is the same for all keys of a query: sum_s p_s dp_s = out . d_out.
    common_BGRT1 = jnp.sum(
        _grouped(out_BTNH, G).astype(jnp.float32) * d_out_BGRTH.astype(jnp.float32), axis=-1, keepdims=True
    )
    d_qs, d_k_BGHS, d_v_BGHS = [], *(jnp.zeros(x.swapaxes(2, 3).shape, jnp.float32) for x in (k_BGSH, v_BGSH))
    for block in _blocks(T, window):
        q_BGQH, d_out_BGQH = block.folded(q_BGRTH), block.folded(d_out_BGRTH)
        scores_BGQS = _scores(block, q_BGRTH, k_BGSH, segment_ids_BT, window)
        weights_BGQS = jnp.exp(scores_BGQS - block.folded(log_sum_BGRT1))
        d_weights_BGQS = _dot("bgqh,bgsh->bgqs", d_out_BGQH, block.keys(v_BGSH))
        d_scores_BGQS = weights_BGQS * (d_weights_BGQS - block.folded(common_BGRT1)) * _scale(q_BTNH)
        d_scores_BGQS, weights_BGQS = d_scores_BGQS.astype(q_BTNH.dtype), weights_BGQS.astype(q_BTNH.dtype)
        d_q_BGQH = _dot("bgqs,bgsh->bgqh", d_scores_BGQS, block.keys(k_BGSH))
        d_qs.append(block.unfolded(d_q_BGQH.astype(q_BTNH.dtype), q_BGRTH.shape[2]))
        # Transposed, so that the small side is the one that is turned round in memory.
        d_k_BGHS = block.add_keys(d_k_BGHS, _dot("bghq,bgqs->bghs", q_BGQH.swapaxes(2, 3), d_scores_BGQS))
        d_v_BGHS = block.add_keys(d_v_BGHS, _dot("bghq,bgqs->bghs", d_out_BGQH.swapaxes(2, 3), weights_BGQS))
    d_k_BSGH, d_v_BSGH = (x.transpose(0, 3, 1, 2).astype(k_BSGH.dtype) for x in (d_k_BGHS, d_v_BGHS))
    return _ungrouped(_joined(d_qs)), d_k_BSGH, d_v_BSGH, None


blockwise_attention.defvjp(_forward, _backward)


class _Block:
    """Queries of the times start..end, and the keys from `first` on that they may see."""

    def __init__(self, start: int, end: int, first: int):
        self.start, self.end, self.first = start, end, first

    def folded(self, x_BGRTH):
        """Returns the block's rows, [B, G, Q, H]."""
        x = x_BGRTH[:, :, :, self.start : self.end]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def unfolded(self, x_BGQH, R: int):
        """Returns rows of the block by head and time again, [B, G, R, end - start, H]."""
        return x_BGQH.reshape(*x_BGQH.shape[:2], R, self.end - self.start, -1)

    def keys(self, x_BGSH):
        return x_BGSH[:, :, self.first : self.end]

    def add_keys(self, total_BGHS, part):
        seen = total_BGHS[..., self.first : self.end] + part
        return jax.lax.dynamic_update_slice_in_dim(total_BGHS, seen, self.first, axis=3)


def _blocks(T: int, window: int | None) -> list[_Block]:
    size = max(SMALLEST_BLOCK, -(-T // MOST_BLOCKS))
    first = lambda start: 0 if window is None else max(0, start - window + 1)
    return [_Block(start, min(start + size, T), first(start)) for start in range(0, T, size)]


def _scores(block: _Block, q_BGRTH, k_BGSH, segment_ids_BT, window):
    B, G, R, _, _ = q_BGRTH.shape
    scores_BGQS = _dot("bgqh,bgsh->bgqs", block.folded(q_BGRTH), block.keys(k_BGSH)) * _scale(q_BGRTH)
    times, key_times = jnp.arange(block.start, block.end)[:, None], jnp.arange(block.first, block.end)[None, :]
    visible_TS = key_times <= times
    if window is not None:
        visible_TS &= key_times > times - window
    segments, key_segments = segment_ids_BT[:, block.start : block.end], segment_ids_BT[:, block.first : block.end]
    visible_BTS = visible_TS[None] & (segments[:, :, None] == key_segments[:, None, :])
    by_head = jnp.where(visible_BTS[:, None, None], scores_BGQS.reshape(B, G, R, *visible_BTS.shape[1:]), MASKED)
    return by_head.reshape(scores_BGQS.shape)


def _joined(parts_BGRTH: list[jax.Array]) -> jax.Array:
    """Returns the blocks' rows in one array; a concatenation would be computed anew, and slowly, by what reads it."""
    B, G, R, _, H = parts_BGRTH[0].shape
    start, whole = 0, jnp.zeros((B, G, R, sum(part.shape[3] for part in parts_BGRTH), H), parts_BGRTH[0].dtype)
    for part in parts_BGRTH:
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=3)
        start += part.shape[3]
    return whole


def _scale(q):
    return q.shape[-1] ** -0.5


def _dot(equation: str, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _grouped(x_BTNH, G: int):
    """Returns [B, T, N, H] as [B, G, R, T, H]."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4)


def _ungrouped(x_BGRTH):
    """Returns [B, G, R, T, H] as [B, T, N, H]."""
    B, G, R, T, H = x_BGRTH.shape
    return x_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, G * R, H)
