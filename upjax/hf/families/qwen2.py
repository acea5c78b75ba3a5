"""Qwen2: biases on query, key and value, always; a window on any choice of layers."""

from typing import Any

from upjax.hf.families.common import DENSE, Family, head_dim_of_its_own, lacking, read_base, write_base
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import read_layered_window, write_layered_window
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings)
    return base | dict(qkv_bias=True) | read_layered_window(settings, base["num_layers"])


def write(config: DecoderConfig) -> dict[str, Any]:
    return write_base(config) | write_layered_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    unbiased = [] if config.qkv_bias else ["qkv_bias False"]
    return lacking(config, "moe", "qk_norm", "attention_out_bias", "mlp_bias") + unbiased + head_dim_of_its_own(config)


QWEN2 = Family(
    model_type="qwen2", architecture="Qwen2ForCausalLM", layouts=(DENSE,), read=read, write=write, lacks=lacks
)
