"""Qwen3: query and key norms, always; one switch for all attention biases; a window on any choice of layers."""

from typing import Any

from upjax.hf.families.common import DENSE, Family, lacking, read_base, write_base
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import read_layered_window, write_layered_window
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings, head_dim=128)
    bias = settings.flag("attention_bias", False)
    return (
        base
        | dict(qk_norm=True, qkv_bias=bias, attention_out_bias=bias)
        | read_layered_window(settings, base["num_layers"])
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    return write_base(config) | dict(attention_bias=config.qkv_bias) | write_layered_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    one_sided = f"qkv_bias {config.qkv_bias} with attention_out_bias {config.attention_out_bias}"
    return (
        lacking(config, "moe", "mlp_bias")
        + ([] if config.qk_norm else ["qk_norm False"])
        + ([one_sided] if config.qkv_bias != config.attention_out_bias else [])
    )


QWEN3 = Family(
    model_type="qwen3", architecture="Qwen3ForCausalLM", layouts=(DENSE,), read=read, write=write, lacks=lacks
)
