"""The floating-point operations that training needs, and the rate that a device offers: MFU is the one over the other.

Only what a token must meet is counted: its own k experts, and of attention the positions that the causal mask and the
window let it see. What is recomputed to save memory, and what padding costs, is not work that the model needs.
"""

from upjax.model import DecoderConfig, num_params

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
}
"""Dense bfloat16 FLOP/s of a device by its `device_kind`.

Compared with the table in JAX's `jax._src.pallas.mosaic.tpu_info`, which rounds v6e to 920 and TPU7x to 2310 TFLOP/s a
chip. A chip is one device except on TPU7x, where it is two; a v4 is two where its cores are not joined to a megacore,
and MFU then comes out at half of what it is.
"""


def flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Returns the FLOPs of a training step for each token of a whole sequence: three times those of the forward pass.

    That is 6 for each parameter that multiplies a hidden state (2 forward, 4 backward), and 12 for each head dim and
    position that attention sees (queries by keys, and weights by values).
    """
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.embed_dim
    matmuls = 6 * (num_params(config, active=True) - looked_up)
    seen = sum(mean_context(sequence_length, layer.window) for layer in config.layers)
    return matmuls + 12 * config.num_heads * config.head_dim * seen


def mean_context(sequence_length: int, window: int | None) -> float:
    """Returns how many positions a token sees on average, itself among them, in a sequence that is one document."""
    w = min(window or sequence_length, sequence_length)
    return (w * (w + 1) / 2 + (sequence_length - w) * w) / sequence_length


def peak_flops(device_kind: str) -> float | None:
    """Returns the FLOP/s that a device of this kind offers, None where that is not known."""
    return PEAK_FLOPS.get(device_kind)
