"""One training step: a pure function of (state, batch).

Dims: B batch, T time, M microbatches, L MoE layers, E experts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from upjax.mesh import BATCH, has_mesh
from upjax.model import DecoderConfig, Dtypes, build
from upjax.model.decoder import Remat
from upjax.model.loss import cross_entropy_sum
from upjax.train.state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

REMATS: dict[str, Remat] = {
    "none": lambda run: run,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}
"""What the backward pass makes again: nothing, all but the products with weights, or all of each layer."""


def make_train_step(
    config: DecoderConfig,
    dtypes: Dtypes,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    load_balance_coefficient: float,
    z_loss_coefficient: float,
    remat: str = "none",
    num_microbatches: int = 1,
) -> TrainStep:
    """Returns the step, jitted; it gives its state's memory to the next state.

    A batch is a dict of [B, T] arrays (tokens, targets, segment_ids, positions, loss_weights). The loss is the
    cross-entropy over the weighted targets of the whole batch, in however many microbatches it is computed, plus the
    coefficients times the routers' losses, each the mean over layers. A microbatch's router losses count by its share
    of the tokens: the z-loss is then that of the whole batch, the load balance is that within each microbatch.
    """

    def loss(params: dict[str, jax.Array], microbatch: Batch, num_targets: jax.Array, num_tokens: jax.Array):
        decoder = build(config, dtypes, params)
        hidden_BTD, router = decoder.hidden(
            microbatch["tokens"], microbatch["positions"], microbatch["segment_ids"], remat=REMATS[remat]
        )
        nats = cross_entropy_sum(decoder, hidden_BTD, microbatch["targets"], microbatch["loss_weights"])
        parts = {"loss": nats / num_targets}
        total = parts["loss"]
        if router is not None:
            share = _count(microbatch["segment_ids"] > 0) / num_tokens
            parts["load_balance_loss"] = share * jnp.mean(router.load_balance_loss)
            parts["z_loss"] = share * jnp.mean(router.z_loss)
            parts["expert_counts"] = router.expert_counts
            if config.moe.capacity_factor is not None:
                parts["dropped_pairs"] = router.dropped_pairs
            total += load_balance_coefficient * parts["load_balance_loss"] + z_loss_coefficient * parts["z_loss"]
        return total, parts

    def gradients_of(params: dict[str, jax.Array], microbatch: Batch, num_targets, num_tokens):
        gradients, parts = jax.grad(loss, has_aux=True)(params, microbatch, num_targets, num_tokens)
        return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), parts

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        num_targets = jnp.maximum(jnp.sum(batch["loss_weights"]), 1.0)
        num_tokens = jnp.maximum(_count(batch["segment_ids"] > 0), 1.0)
        if num_microbatches == 1:
            gradients, parts = gradients_of(state.params, batch, num_targets, num_tokens)
        else:
            microbatches = jax.tree.map(lambda x: _split(x, num_microbatches), batch)
            run = lambda microbatch: gradients_of(state.params, microbatch, num_targets, num_tokens)
            gradients, parts = _accumulate(run, state.params, microbatches)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = _metrics(parts) | {
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": schedule(state.step),
            "tokens": num_tokens,
        }
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1, key=state.key), metrics

    return jax.jit(train_step, donate_argnums=0)


def _accumulate(gradients_of: Callable, params: dict[str, jax.Array], microbatches: Batch):
    """Returns the gradients and the parts of the loss summed over the microbatches, one after the other."""

    def add(total, microbatch):
        gradients, parts = gradients_of(microbatch)
        return jax.tree.map(jnp.add, total, gradients), parts

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
    gradients, parts = jax.lax.scan(add, zeros, microbatches)
    return gradients, jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)


def _split(x_BT: jax.Array, num_microbatches: int) -> jax.Array:
    """Returns the rows dealt out to microbatches, [M, B / M, T], without moving any between devices."""
    B, T = x_BT.shape
    sharding = P(BATCH, None, None) if has_mesh() else None
    dealt = jax.lax.reshape(x_BT, (B // num_microbatches, num_microbatches, T), out_sharding=sharding)
    return dealt.swapaxes(0, 1)


def _count(is_token_BT: jax.Array) -> jax.Array:
    return jnp.sum(is_token_BT, dtype=jnp.float32)


def _metrics(parts: Metrics) -> Metrics:
    """Returns the scalars to report: the losses, and how unevenly the tokens fell to the experts."""
    metrics = {name: value for name, value in parts.items() if value.ndim == 0}
    if "expert_counts" in parts:
        counts_LE = parts["expert_counts"].astype(jnp.float32)
        metrics["max_expert_load"] = jnp.max(jnp.max(counts_LE, axis=1) / jnp.mean(counts_LE, axis=1))
        metrics["dead_experts"] = jnp.mean(counts_LE == 0)
    if "dropped_pairs" in parts:
        metrics["dropped_fraction"] = jnp.sum(parts["dropped_pairs"]) / jnp.maximum(jnp.sum(counts_LE), 1.0)
    return metrics
