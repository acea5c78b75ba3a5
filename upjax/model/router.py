"""The router: which experts a token goes to, with what gates, and the losses that keep the load even.

Dims: B batch, T time, D embed, E experts, K experts per token, L MoE layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from upjax.mesh import replicated
from upjax.model.config import MoEConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """What the routers of a forward pass did, one row a MoE layer. Padding is in none of it."""

    expert_counts: jax.Array
    """[L, E] int32: the tokens that each expert saw."""
    load_balance_loss: jax.Array
    """[L] float32: E * sum_e f_e P_e, with f_e the share of the token-expert pairs that went to expert e and P_e the
    mean probability given to it; 1 when both are even (Fedus et al. 2021, eq. 4; divided by K, as megablocks does and
    Hugging Face does not)."""
    z_loss: jax.Array
    """[L] float32: the mean squared logsumexp of the router logits (Zoph et al. 2022, eq. 5)."""
    dropped_pairs: jax.Array
    """[L] int32: the token-expert pairs that a capacity factor left out; 0 without one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """A token's experts and the gates that weigh their outputs."""

    experts_BTK: jax.Array
    """int32; padding tokens carry E, which is no expert."""
    gates_BTK: jax.Array
    """float32."""


def route(x_BTD: jax.Array, router_DE: jax.Array, config: MoEConfig, is_token_BT: jax.Array):
    """Returns (Routing, RouterStats without its L dim) of one layer; everything here is float32."""
    E, K = config.num_experts, config.experts_per_token
    with jax.named_scope("route"):
        logits_BTE = jnp.einsum(
            "btd,de->bte",
            x_BTD.astype(jnp.float32),
            replicated(router_DE.astype(jnp.float32)),
            precision=jax.lax.Precision.HIGHEST,
        )
        probs_BTE = jax.nn.softmax(logits_BTE)
        if config.router == "topk_softmax":
            top_BTK, experts_BTK = jax.lax.top_k(logits_BTE, K)
            gates_BTK = jax.nn.softmax(top_BTK)
        else:
            gates_BTK, experts_BTK = jax.lax.top_k(probs_BTE, K)
            if config.router == "softmax_topk_renormalized":
                gates_BTK = gates_BTK / jnp.sum(gates_BTK, axis=-1, keepdims=True)
        experts_BTK = jnp.where(is_token_BT[:, :, None], experts_BTK, E)
        return Routing(experts_BTK, gates_BTK), _stats(logits_BTE, probs_BTE, experts_BTK, is_token_BT)


def _stats(logits_BTE, probs_BTE, experts_BTK, is_token_BT) -> RouterStats:
    E, K = logits_BTE.shape[-1], experts_BTK.shape[-1]
    weight_BT = is_token_BT.astype(jnp.float32)
    num_tokens = jnp.maximum(jnp.sum(weight_BT), 1.0)
    counts_E = jnp.sum(experts_BTK[..., None] == jnp.arange(E)[None, None, None, :], axis=(0, 1, 2), dtype=jnp.int32)
    fraction_E = counts_E.astype(jnp.float32) / (num_tokens * K)
    mean_probs_E = jnp.sum(probs_BTE * weight_BT[:, :, None], axis=(0, 1)) / num_tokens
    logsumexp_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
    return RouterStats(
        expert_counts=counts_E,
        load_balance_loss=E * jnp.sum(fraction_E * mean_probs_E),
        z_loss=jnp.sum(weight_BT * jnp.square(logsumexp_BT)) / num_tokens,
        dropped_pairs=jnp.zeros((), jnp.int32),
    )
