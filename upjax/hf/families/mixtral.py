"""Mixtral: experts in every layer, gates that sum to 1, no biases, a window on all layers or none."""

from typing import Any

from upjax.hf.families.common import Family, lacking, read_base, write_base
from upjax.hf.families.experts import expert_layouts, experts_of, no_experts, read_num_experts
from upjax.hf.families.settings import Settings
from upjax.hf.families.windows import read_uniform_window, some_layers_windowed, write_uniform_window
from upjax.model.config import DecoderConfig


def read(settings: Settings) -> dict[str, Any]:
    base = read_base(settings, norm_epsilon=1e-5, rope_theta=1e6)
    moe = dict(
        num_experts=read_num_experts(settings),
        experts_per_token=settings.whole("num_experts_per_tok", 2),
        hidden_dim=base["hidden_dim"],
        router="softmax_topk_renormalized",
    )
    layers = base["num_layers"]
    return base | dict(moe=moe, moe_layers=tuple(range(layers))) | read_uniform_window(settings, layers, absent=None)


def write(config: DecoderConfig) -> dict[str, Any]:
    moe = experts_of(config)
    experts = dict(
        intermediate_size=moe.hidden_dim,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
    )
    return write_base(config) | experts | write_uniform_window(config)


def lacks(config: DecoderConfig) -> list[str]:
    found = no_experts(config)
    found += lacking(config, "qk_norm", "qkv_bias", "attention_out_bias", "mlp_bias")
    found += some_layers_windowed(config)
    if config.moe and len(config.moe_layers) < config.num_layers:
        found.append(f"moe_layers {config.moe_layers} (only all {config.num_layers} layers)")
    # With every expert chosen the softmax sums to 1 as it is.
    if config.moe and config.moe.router == "softmax_topk" and config.moe.experts_per_token < config.moe.num_experts:
        found.append("router softmax_topk (only gates that sum to 1: softmax_topk_renormalized, topk_softmax)")
    return found


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layouts=expert_layouts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    read=read,
    write=write,
    lacks=lacks,
)
