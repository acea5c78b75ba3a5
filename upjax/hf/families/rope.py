"""Rotary settings in both forms: `rope_theta` + `rope_scaling` (transformers v4, vLLM), `rope_parameters` (v5)."""

from typing import Any

from upjax.hf.families.settings import Settings
from upjax.model.config import RopeConfig

KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
OPTIONAL = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def read_rope(settings: Settings, default_theta: float, max_sequence_length: int) -> RopeConfig:
    """Returns the rotary settings of a config.json; where both forms are present they must say the same."""
    theta = settings.real("rope_theta", None)
    legacy, current = settings.mapping("rope_scaling"), settings.mapping("rope_parameters")
    if current is None:
        return _parse(settings, "rope_scaling", legacy or {}, theta or default_theta, max_sequence_length)
    rope = _parse(settings, "rope_parameters", current, theta or default_theta, max_sequence_length)
    if theta is not None and theta != rope.theta:
        settings.problem("rope_theta", f"{rope.theta}, as in rope_parameters, or no such key")
    elif legacy is not None and _parse(settings, "rope_scaling", legacy, rope.theta, max_sequence_length) != rope:
        settings.problem("rope_scaling", f"the same as rope_parameters {current}, or null")
    return rope


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of both forms, which agree."""
    scaling: dict[str, Any] = {}
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_sequence_length
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, **scaling},
    }


def _parse(settings: Settings, where: str, values: dict[str, Any], theta: float, max_length: int) -> RopeConfig:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in KEYS:
        settings.problem(where, f"rope_type {', '.join(KEYS)}")
        return RopeConfig(theta=theta)
    unknown = sorted(values.keys() - KEYS[kind] - OPTIONAL)
    if unknown:
        settings.problem(where, f"for rope_type {kind!r} without {', '.join(unknown)}")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        settings.problem(where, "partial_rotary_factor 1.0")
    given = {"rope_theta": theta, "original_max_position_embeddings": max_length, **values}
    wrong = [k for k in sorted(KEYS[kind] | {"rope_theta"}) if type(given.get(k)) not in (int, float) or given[k] <= 0]
    if wrong:
        settings.problem(where, f"for rope_type {kind!r} with a positive number for {', '.join(wrong)}")
        return RopeConfig(theta=theta)
    rope = RopeConfig(theta=float(given["rope_theta"]))
    if kind == "default":
        return rope
    if kind == "linear":
        return RopeConfig(theta=rope.theta, scaling="linear", factor=float(given["factor"]))
    return RopeConfig(
        theta=rope.theta,
        scaling="llama3",
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_max_sequence_length=int(given["original_max_position_embeddings"]),
    )
