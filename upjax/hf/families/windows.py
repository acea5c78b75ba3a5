"""Sliding windows: which layers have one, as the formats say it."""

from typing import Any

from upjax.hf.families.settings import Settings
from upjax.model.config import DecoderConfig

TRANSFORMERS_DEFAULT = 4096
FULL, SLIDING = "full_attention", "sliding_attention"


def read_uniform_window(settings: Settings, num_layers: int, absent: int | None) -> dict[str, Any]:
    """Returns the window of the Mistral formats, where all layers have it or none; `absent` is the key's default."""
    window = settings.whole("sliding_window", None if "sliding_window" in settings.values else absent)
    return dict(sliding_window=window, window_layers=tuple(range(num_layers))) if window else {}


def read_qwen_window(settings: Settings) -> int | None:
    """Returns the window of the Qwen formats, or None where `use_sliding_window` is off."""
    used = settings.flag("use_sliding_window", False)
    absent = None if "sliding_window" in settings.values else TRANSFORMERS_DEFAULT
    window = settings.whole("sliding_window", absent, least=1 if used else 0)
    return window if used else None


def read_layer_types(settings: Settings, num_layers: int) -> tuple[int, ...] | None:
    """Returns the layers that `layer_types` gives a window, or None where the key is absent."""
    types = settings.listing("layer_types")
    if types is None:
        return None
    if len(types) != num_layers or not all(kind in (FULL, SLIDING) for kind in types):
        settings.problem("layer_types", f"{FULL} or {SLIDING} for each of {num_layers} layers")
    return tuple(l for l, kind in enumerate(types[:num_layers]) if kind == SLIDING)


def read_layered_window(settings: Settings, num_layers: int) -> dict[str, Any]:
    """Returns the window of dense Qwen: `layer_types`, or all layers from `max_window_layers` on."""
    window = read_qwen_window(settings)
    first = settings.whole("max_window_layers", 28, least=0)
    layers = read_layer_types(settings, num_layers)
    if layers is None:
        layers = tuple(range(first, num_layers))
    return dict(sliding_window=window, window_layers=layers) if window and layers else {}


def write_uniform_window(config: DecoderConfig) -> dict[str, Any]:
    """Returns the key of the Mistral formats."""
    return dict(sliding_window=config.sliding_window if config.window_layers else None)


def write_layered_window(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of the Qwen formats: layer by layer, and as the number of global layers before the windowed."""
    windowed = config.window_layers
    suffix = bool(windowed) and windowed == tuple(range(windowed[0], config.num_layers))
    return dict(
        use_sliding_window=bool(windowed),
        sliding_window=config.sliding_window if windowed else None,
        max_window_layers=windowed[0] if suffix else config.num_layers,
        layer_types=[SLIDING if l in windowed else FULL for l in range(config.num_layers)],
    )


def some_layers_windowed(config: DecoderConfig) -> list[str]:
    """Returns the windowed layers as a thing lacking, where they are neither all nor none."""
    some = 0 < len(config.window_layers) < config.num_layers
    return [f"window_layers {config.window_layers} (only all {config.num_layers} layers or none)"] if some else []
