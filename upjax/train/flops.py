"""The floating-point operations that training needs, and the rate that a device offers: MFU is the one over the other.

Only what a token must meet is counted: its own k experts, and of attention the positions that the causal mask and the
window let it see. What is recomputed to save memory, and what padding costs, is not work that the model needs.
"""

from pallas_kernels.tpu_chips import chip_of
from upjax.model import DecoderConfig, num_params


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


def recomputed_flops_per_token(config: DecoderConfig, sequence_length: int, remat: str) -> float:
    """Returns the FLOPs that a step spends a second time, to have kept less: `remat` is that of the config.

    "full" is the forward pass of all layers, "dots" that of attention and routed experts, whose kernels' results it
    does not keep. The logits, made again where the loss is cut into chunks, are not counted here.
    """
    head = 2 * config.embed_dim * config.vocab_size
    attention = sum(
        4 * config.num_heads * config.head_dim * mean_context(sequence_length, layer.window) for layer in config.layers
    )
    experts = 0
    if config.moe:
        experts = 6 * config.moe.experts_per_token * config.embed_dim * config.moe.hidden_dim * len(config.moe_layers)
    layers = flops_per_token(config, sequence_length) / 3 - head
    return {"none": 0.0, "dots": attention + experts, "full": layers}[remat]


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 FLOP/s that a device of this kind offers, None where that is not known."""
    chip = chip_of(device_kind)
    if chip is None:
        return None
    # On Cloud TPUs the two cores of a v4 are joined to one device; compiled for absent chips they are two.
    return chip.flops_per_second * (2 if chip.name == "v4" else 1)
