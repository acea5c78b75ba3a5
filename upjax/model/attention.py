"""Grouped-query self-attention: causal, within one document, optionally within a window.

Dims: B batch, T time (S the same, of keys), D embed, N heads, G key/value heads, H head, R stacked layers.
"""

from functools import partial

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from upjax.mesh import SHARDED, per_device
from upjax.model.blockwise_attention import blockwise_attention
from upjax.model.config import DecoderConfig
from upjax.model.linear import add_bias, linear
from upjax.model.norms import rms_norm
from upjax.model.parameters import Dtypes, constant, normal
from upjax.model.rope import rotate
from upjax.model.splash import fits_splash, splash_attention


class Attention(nnx.Module):
    """The attention of R stacked layers; each call uses the parameters of one (R sliced off by the scan)."""

    def __init__(self, config: DecoderConfig, dtypes: Dtypes, stack: int, *, key: jax.Array):
        D, R, dtype = config.embed_dim, stack, dtypes.parameters
        NH, GH = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        keys = jax.random.split(key, 4)
        self.query = normal(keys[0], (R, D, NH), dtype, P(None, SHARDED, None))
        self.key = normal(keys[1], (R, D, GH), dtype, P(None, SHARDED, None))
        self.value = normal(keys[2], (R, D, GH), dtype, P(None, SHARDED, None))
        self.out = normal(keys[3], (R, NH, D), dtype, P(None, None, SHARDED))
        if config.qkv_bias:
            self.query_bias = constant(0.0, (R, NH), dtype)
            self.key_bias = constant(0.0, (R, GH), dtype)
            self.value_bias = constant(0.0, (R, GH), dtype)
        if config.attention_out_bias:
            self.out_bias = constant(0.0, (R, D), dtype)
        if config.qk_norm:
            self.query_norm = constant(1.0, (R, config.head_dim), dtype)
            self.key_norm = constant(1.0, (R, config.head_dim), dtype)

    def __call__(self, x_BTD: jax.Array, rope, segment_ids_BT: jax.Array, window: int | None) -> jax.Array:
        """Returns the attention output, [B, T, D]; `rope` is (cos, sin) of `rope_angles`."""
        config = self.config
        B, T, _ = x_BTD.shape
        q, k, v = linear(x_BTD, self.query[...]), linear(x_BTD, self.key[...]), linear(x_BTD, self.value[...])
        if config.qkv_bias:
            q, k, v = (add_bias(x, b[...]) for x, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias)))
        q, k, v = (x.reshape(B, T, -1, config.head_dim) for x in (q, k, v))
        if config.qk_norm:
            q = rms_norm(q, self.query_norm[...], config.norm_epsilon)
            k = rms_norm(k, self.key_norm[...], config.norm_epsilon)
        attended = attend(rotate(q, *rope), rotate(k, *rope), v, segment_ids_BT, window)
        out = linear(attended.reshape(B, T, -1), self.out[...])
        return add_bias(out, self.out_bias[...]) if config.attention_out_bias else out


def attend(q_BTNH, k_BSGH, v_BSGH, segment_ids_BT, window: int | None) -> jax.Array:
    """Returns softmax(q k^T / sqrt(H)) v over the earlier positions of the same document and window, [B, T, N, H].

    A window of w sees w positions, the token's own among them. On TPU this is the splash kernel where T is a multiple
    of its 128 lanes, on CPU the blockwise form; neither ever holds the T x S matrix. Elsewhere it is
    `jax.nn.dot_product_attention`.
    """
    with jax.named_scope("attend"):
        operands = (q_BTNH, k_BSGH, v_BSGH, segment_ids_BT)
        # Like those of the other two, this backward pass makes the T x S matrix again instead of keeping one a layer.
        plain = jax.checkpoint(partial(_dot_product_attention, window=window))
        fast = {"cpu": lambda *operands: blockwise_attention(*operands, window)}
        if fits_splash(q_BTNH.shape[1]):
            fast["tpu"] = partial(splash_attention, window=window)
        branches = {platform: per_device(run, check_vma=False) for platform, run in fast.items()}
        return jax.lax.platform_dependent(*operands, default=plain, **branches)


def _dot_product_attention(q, k, v, segment_ids, *, window):
    same_document = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=same_document, is_causal=True, local_window_size=local)
