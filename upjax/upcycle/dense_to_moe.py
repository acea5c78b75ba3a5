"""A dense model becomes a Mixture-of-Experts model of the same cost per token and expert (sparse upcycling)."""

import dataclasses
from collections.abc import Sequence

from upjax.errors import InputError, Problems
from upjax.model import Decoder, DecoderConfig, MoEConfig, RouterKind
from upjax.upcycle.experts import copy_experts, keep
from upjax.upcycle.routers import random_router
from upjax.upcycle.rules import Rule, apply_rules

COPY = (
    Rule(r"embedding|final_norm|head", r"\g<0>", keep),
    Rule(r"layers/\d+/(attention|attention_norm|mlp_norm)(/.+)?", r"\g<0>", keep),
    Rule(r"layers/\d+/mlp/.+", r"\g<0>", keep),
    Rule(r"layers/(\d+)/mlp/(gate|up|down)", r"layers/\1/moe/\2", copy_experts),
    Rule(None, r"layers/\d+/moe/router", random_router),
)
"""Every expert is a copy of the dense MLP; layers that stay dense and all else are kept; routers are new."""

METHODS = {"copy": COPY}
"""The rule tables by the name that commands and provenance give them."""


def upcycle(
    dense: Decoder,
    *,
    num_experts: int,
    experts_per_token: int,
    router: RouterKind = "softmax_topk_renormalized",
    moe_layers: Sequence[int] | None = None,
    method: str = "copy",
    seed: int = 0,
) -> Decoder:
    """Returns the MoE model made of a dense one, in its dtypes, laid out on the mesh that is set.

    `moe_layers` get routed experts (None: all layers), the others stay dense. With a router whose gates sum to 1
    (renormalised, or softmax after top-k) the model computes what the dense one did; with `softmax_topk` the experts'
    output is scaled by the sum of the k gates. Raises InputError when the model is no dense one or the numbers do not
    fit, with every problem.
    """
    if method not in METHODS:
        raise InputError(f"method {method!r} is not one of {', '.join(METHODS)}")
    config = moe_config(
        dense.config,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        router=router,
        moe_layers=moe_layers,
    )
    return apply_rules(METHODS[method], dense, config, seed=seed)


def moe_config(
    dense: DecoderConfig,
    *,
    num_experts: int,
    experts_per_token: int,
    router: RouterKind = "softmax_topk_renormalized",
    moe_layers: Sequence[int] | None = None,
) -> DecoderConfig:
    """Returns the config of the upcycled model; raises InputError as `upcycle` does."""
    layers = tuple(range(dense.num_layers)) if moe_layers is None else tuple(sorted(set(moe_layers)))
    problems = Problems("this model cannot be upcycled so")
    if dense.moe is not None:
        problems.add(f"the source has {dense.moe.num_experts} experts already; only a dense model can be upcycled")
    if dense.mlp_bias:
        problems.add("the source's MLP has biases, which no MoE format holds for experts")
    if not 1 <= experts_per_token <= num_experts:
        problems.add(f"experts_per_token {experts_per_token} must be from 1 to num_experts {num_experts}")
    if not layers:
        problems.add("moe_layers is empty; at least one layer must get experts")
    if beyond := [layer for layer in layers if not 0 <= layer < dense.num_layers]:
        problems.add(f"moe_layers {beyond} are not layers of a model of {dense.num_layers}")
    problems.raise_if_any()
    moe = MoEConfig(
        num_experts=num_experts, experts_per_token=experts_per_token, hidden_dim=dense.hidden_dim, router=router
    )
    return dataclasses.replace(dense, moe=moe, moe_layers=layers)
