"""Experts: tensor layouts, and the keys of the MoE formats."""

from typing import Any

from upjax.hf.families.common import DENSE, Row, linear
from upjax.hf.families.settings import Settings
from upjax.model.config import DecoderConfig, MoEConfig

FUSED = (
    *DENSE,
    linear("mlp.gate", "moe/router"),
    Row(name="{prefix}layers.{layer}.mlp.experts.gate_up_proj", path="moe/gate", transposed=True, part=0),
    Row(name="{prefix}layers.{layer}.mlp.experts.gate_up_proj", path="moe/up", transposed=True, part=1),
    Row(name="{prefix}layers.{layer}.mlp.experts.down_proj", path="moe/down", transposed=True),
)
"""How transformers v5 holds experts in memory: all in one tensor, the gate before the up projection."""


def expert_layouts(block: str, gate: str, up: str, down: str) -> tuple[tuple[Row, ...], ...]:
    """Returns the layout with a tensor an expert, which transformers writes and every loader reads, and the fused."""
    expert = f"{block}.experts.{{expert}}"
    separate = (
        *DENSE,
        linear(f"{block}.gate", "moe/router"),
        linear(f"{expert}.{gate}", "moe/gate"),
        linear(f"{expert}.{up}", "moe/up"),
        linear(f"{expert}.{down}", "moe/down"),
    )
    return separate, FUSED


def read_num_experts(settings: Settings) -> int:
    """Returns the number of experts, which transformers v5 calls `num_local_experts` also where v4 did not."""
    values = {key: settings.whole(key, None) for key in ("num_experts", "num_local_experts")}
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return settings.whole("num_experts")
    if len(set(given.values())) > 1:
        settings.problem("num_local_experts", f"the same as num_experts {values['num_experts']}")
    return min(given.values())


def read_qwen_experts(settings: Settings, num_layers: int) -> dict[str, Any]:
    """Returns the experts of a Qwen MoE and the layers that have them."""
    step = settings.whole("decoder_sparse_step", 1)
    dense = settings.listing("mlp_only_layers") or []
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        settings.problem("mlp_only_layers", f"layer numbers below {num_layers}")
    layers = tuple(l for l in range(num_layers) if (l + 1) % step == 0 and l not in dense)
    if not layers:
        settings.problem("decoder_sparse_step", "a pattern, with mlp_only_layers, that leaves a layer with experts")
    moe = dict(
        num_experts=read_num_experts(settings),
        experts_per_token=settings.whole("num_experts_per_tok"),
        hidden_dim=settings.whole("moe_intermediate_size"),
        router="softmax_topk_renormalized" if settings.flag("norm_topk_prob", False) else "softmax_topk",
    )
    return dict(moe=moe, moe_layers=layers)


def write_qwen_experts(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of a Qwen MoE; dense layers are named one by one, which takes any pattern."""
    moe = experts_of(config)
    return dict(
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.hidden_dim,
        norm_topk_prob=moe.router != "softmax_topk",
        decoder_sparse_step=1,
        mlp_only_layers=[l for l in range(config.num_layers) if l not in config.moe_layers],
        output_router_logits=False,
        router_aux_loss_coef=0.001,
    )


def no_experts(config: DecoderConfig) -> list[str]:
    """Returns the missing experts as a thing lacking."""
    return [] if config.moe else ["a model without experts"]


def experts_of(config: DecoderConfig) -> MoEConfig:
    """Returns the experts of a config that has some."""
    assert config.moe is not None
    return config.moe
