"""Qwen3-MoE: query and key norms, always; any layers with experts; a window on all layers or none."""

from collections.abc import Iterable
from typing import Any

from upjax.hf.families.common import Family, Zeros, lacking, read_base, write_base
from upjax.hf.families.experts import expert_layouts, experts_of, no_experts, read_qwen_experts, write_qwen_experts
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import read_qwen_window, some_layers_windowed, write_uniform_window
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings)
    num_layers = base["num_layers"]
    bias = settings.flag("attention_bias", False)
    window = read_qwen_window(settings)
    # Other Qwen formats use this key; this one's model code does not.
    settings.whole("max_window_layers", None, least=0)
    windows = dict(sliding_window=window, window_layers=tuple(range(num_layers))) if window else {}
    attention = dict(qk_norm=True, qkv_bias=bias, attention_out_bias=bias)
    return base | attention | windows | read_qwen_experts(settings, num_layers)


def write(config: DecoderConfig) -> dict[str, Any]:
    own = dict(
        attention_bias=config.qkv_bias or config.attention_out_bias,
        use_sliding_window=bool(config.window_layers),
        # transformers v5 reads this name and v4 `num_experts`; each ignores the other's.
        num_local_experts=experts_of(config).num_experts,
    )
    return write_base(config) | own | write_qwen_experts(config) | write_uniform_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    return (
        no_experts(config)
        + lacking(config, "mlp_bias")
        + ([] if config.qk_norm else ["qk_norm False"])
        + some_layers_windowed(config)
    )


def differs(config: DecoderConfig) -> list[str]:
    return [f"{bias}; vLLM leaves that bias out" for bias in lacking(config, "attention_out_bias")]


def zeros(config: DecoderConfig) -> Iterable[Zeros]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.self_attn.{{}}_proj.bias"
        if config.attention_out_bias and not config.qkv_bias:
            for projection, size in dict(q=query, k=key, v=key).items():
                yield Zeros(name=name.format(projection), shape=(size,))
        if config.qkv_bias and not config.attention_out_bias:
            yield Zeros(name=name.format("o"), shape=(config.embed_dim,))


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layouts=expert_layouts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    read=read,
    write=write,
    lacks=lacks,
    differs=differs,
    zeros=zeros,
)
