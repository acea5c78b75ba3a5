"""Attention on TPU by JAX's splash kernel. Dims: B batch, T time, N heads, G key/value heads, H head."""

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

LANES = 128


def fits_splash(sequence_length: int) -> bool:
    """Says whether the kernel can tile sequences of this length."""
    return sequence_length % LANES == 0


def splash_attention(q_BTNH, k_BTGH, v_BTGH, segment_ids_BT, *, window: int | None) -> jax.Array:
    """Returns causal attention within documents (and the window), [B, T, N, H], of one device's part of the batch."""
    _, T, N, H = q_BTNH.shape
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    block = next(size for size in (512, 256, LANES) if T % size == 0)
    kernel = splash.make_splash_mha(
        mask=masks.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    heads_first = lambda x: x.swapaxes(1, 2)
    segments = splash.SegmentIds(q=segment_ids_BT, kv=segment_ids_BT)
    scaled = q_BTNH * H**-0.5  # the kernel leaves the scale to its caller
    out = jax.vmap(kernel)(heads_first(scaled), heads_first(k_BTGH), heads_first(v_BTGH), segments)
    return heads_first(out)
