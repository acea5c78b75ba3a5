"""Qwen2-MoE without its shared expert: any layers with experts, any window, gates renormalised or not.

transformers reads `shared_expert_intermediate_size` 0 as a shared expert of no width, and vLLM as none; vLLM wants
the shared expert's gate all the same, stops at tensors of no size, and always has biases on query, key and value.
Written here is what both load: the gate as zeros, biases as zeros where the model has none, no tensors of no size.
"""

from collections.abc import Iterable
from typing import Any

from upjax.hf.families.common import Family, Zeros, head_dim_of_its_own, lacking, read_base, write_base
from upjax.hf.families.experts import expert_layouts, no_experts, read_qwen_experts, write_qwen_experts
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import (
    read_layer_types,
    read_qwen_window,
    some_layers_windowed,
    write_layered_window,
)
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings)
    num_layers = base["num_layers"]
    if settings.whole("shared_expert_intermediate_size", 5632, least=0):
        settings.problem("shared_expert_intermediate_size", "0, since upjax has no shared experts")
    window, layers = read_qwen_window(settings), read_layer_types(settings, num_layers)
    settings.whole("max_window_layers", 28, least=0)
    if window and layers is None:
        settings.problem("layer_types", "a list, since versions of transformers differ on which layers have a window")
    windows = dict(sliding_window=window, window_layers=layers) if window and layers else {}
    bias = settings.flag("qkv_bias", True)
    return base | dict(qkv_bias=bias) | windows | read_qwen_experts(settings, num_layers)


def write(config: DecoderConfig) -> dict[str, Any]:
    shared = dict(qkv_bias=True, shared_expert_intermediate_size=0)
    return write_base(config) | shared | write_qwen_experts(config) | write_layered_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    return (
        no_experts(config) + lacking(config, "qk_norm", "attention_out_bias", "mlp_bias") + head_dim_of_its_own(config)
    )


def differs(config: DecoderConfig) -> list[str]:
    reason = "; vLLM and transformers v4 give the window to all layers"
    return [windows + reason for windows in some_layers_windowed(config)]


def zeros(config: DecoderConfig) -> Iterable[Zeros]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        if not config.qkv_bias:
            for name, size in dict(q=query, k=key, v=key).items():
                yield Zeros(name=f"model.layers.{layer}.self_attn.{name}_proj.bias", shape=(size,))
        if layer in config.moe_layers:
            yield Zeros(name=f"model.layers.{layer}.mlp.shared_expert_gate.weight", shape=(1, config.embed_dim))


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    layouts=expert_layouts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    read=read,
    write=write,
    lacks=lacks,
    differs=differs,
    zeros=zeros,
    ignored=r".*(\.rotary_emb\.inv_freq|\.mlp\.shared_expert_gate\.weight|\.mlp\.shared_expert\.\w+\.weight)",
)
