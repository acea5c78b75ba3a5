"""The decoder by data: every supported family is one DecoderConfig, and each layer is one LayerKind."""

import dataclasses
import math
from typing import Literal

RouterKind = Literal["softmax_topk", "softmax_topk_renormalized", "topk_softmax"]
"""How router logits become gates:

- `softmax_topk`: softmax over all experts, keep the k largest as they are (Qwen-MoE with `norm_topk_prob: false`).
- `softmax_topk_renormalized`: the same, then divided by their sum (Mixtral, Qwen-MoE with `norm_topk_prob: true`).
- `topk_softmax`: the k largest logits, softmax over those.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; `scaling` "llama3" is the frequency-dependent stretch of Llama 3.1."""

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_sequence_length: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The routed experts of an MoE layer; `hidden_dim` is the width of one expert."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    router: RouterKind = "softmax_topk_renormalized"
    capacity_factor: float | None = None
    """How many times its even share of each device's tokens an expert takes; None: all that come."""

    def __post_init__(self):
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor must be above 0 and finite, or None for no capacity, got {self.capacity_factor}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"need 1 <= experts_per_token <= num_experts, got {self}")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What sets one layer apart: routed experts or a dense MLP, and the attention window (None: global)."""

    moe: bool
    window: int | None


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` repetitions of a pattern of layer kinds; one scan runs it, so compile time does not grow with depth."""

    pattern: tuple[LayerKind, ...]
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer: grouped-query attention, rotary positions, RMSNorm before each block, gated MLP."""

    vocab_size: int
    embed_dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequence_length: int
    rope: RopeConfig = RopeConfig()
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    """Layers whose attention sees only the last `sliding_window` positions, itself included."""
    moe: MoEConfig | None = None
    moe_layers: tuple[int, ...] = ()
    """Layers whose MLP is the routed experts of `moe`; the others are dense."""

    def __post_init__(self):
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if bool(self.window_layers) and self.sliding_window is None:
            problems.append(f"window_layers {self.window_layers} without a sliding_window")
        if bool(self.moe_layers) != (self.moe is not None):
            problems.append(f"moe_layers {self.moe_layers} does not go with moe {self.moe}")
        for name in ("window_layers", "moe_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted({l for l in layers if 0 <= l < self.num_layers}):
                problems.append(f"{name} {layers} must be increasing layer numbers below {self.num_layers}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, first to last."""
        return tuple(
            LayerKind(moe=l in self.moe_layers, window=self.sliding_window if l in self.window_layers else None)
            for l in range(self.num_layers)
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as the fewest scans found greedily: the longest repetition at each point, else one layer."""
        layers, segments, start = self.layers, [], 0
        while start < len(layers):
            period, repeats = _longest_repetition(layers[start:])
            segments.append(Segment(layers[start : start + period], repeats))
            start += period * repeats
        return tuple(segments)

    def place(self, layer: int) -> tuple[int, int, int]:
        """Where layer number `layer` lives: (segment, position in its pattern, repeat)."""
        for index, segment in enumerate(self.segments):
            size = len(segment.pattern) * segment.repeats
            if layer < size:
                return index, layer % len(segment.pattern), layer // len(segment.pattern)
            layer -= size
        raise IndexError(f"layer is past the last of {self.num_layers}")


def _longest_repetition(layers: tuple[LayerKind, ...]) -> tuple[int, int]:
    """Returns (period, repeats) that covers most of the start of `layers`, the shortest such period; (1, 1) if none."""
    best = (1, 1)
    for period in range(1, len(layers) // 2 + 1):
        repeats = 1
        while layers[repeats * period : (repeats + 1) * period] == layers[:period]:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
