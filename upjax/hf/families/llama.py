"""Llama: no windows, no query and key norms; one switch for all attention biases."""

from typing import Any

from upjax.hf.families.common import DENSE, Family, lacking, read_base, write_base
from upjax.hf.families.settings import Settings
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings, kv_heads_default_to_heads=True)
    bias = settings.flag("attention_bias", False)
    mlp_bias = settings.flag("mlp_bias", False)
    return base | dict(qkv_bias=bias, attention_out_bias=bias, mlp_bias=mlp_bias)


def write(config: DecoderConfig) -> dict[str, Any]:
    return write_base(config) | dict(attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias, pretraining_tp=1)


def lacks(config: DecoderConfig) -> list[str]:
    one_sided = f"qkv_bias {config.qkv_bias} with attention_out_bias {config.attention_out_bias}"
    return lacking(config, "moe", "qk_norm", "window_layers") + (
        [one_sided] if config.qkv_bias != config.attention_out_bias else []
    )


LLAMA = Family(
    model_type="llama", architecture="LlamaForCausalLM", layouts=(DENSE,), read=read, write=write, lacks=lacks
)
