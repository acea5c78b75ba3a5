"""Mistral: no biases; a window on all layers or none."""

from typing import Any

from upjax.hf.families.common import DENSE, Family, lacking, read_base, write_base
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import (
    TRANSFORMERS_DEFAULT,
    read_uniform_window,
    some_layers_windowed,
    write_uniform_window,
)
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings)
    return base | read_uniform_window(settings, base["num_layers"], absent=TRANSFORMERS_DEFAULT)


def write(config: DecoderConfig) -> dict[str, Any]:
    return write_base(config) | write_uniform_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    return lacking(config, "moe", "qk_norm", "qkv_bias", "attention_out_bias", "mlp_bias") + some_layers_windowed(
        config
    )


MISTRAL = Family(
    model_type="mistral", architecture="MistralForCausalLM", layouts=(DENSE,), read=read, write=write, lacks=lacks
)
