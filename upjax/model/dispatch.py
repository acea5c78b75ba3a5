"""Tokens into expert order and back, by gathers only: the scatter-add of autodiff is slow on every platform.

Dims: M tokens of one device, K experts per token, D embed, E experts.
"""

import jax
import jax.numpy as jnp


def expert_order(experts_MK: jax.Array, num_experts: int):
    """Returns (order, inverse, group_sizes): the token-expert pairs sorted by expert, stable, and back.

    `order` [M*K] lists pairs (numbered token * K + choice) by expert; `inverse` is where each pair went; `group_sizes`
    [E] counts each expert's pairs. Pairs of expert ids past the last come last and are in no group.
    """
    pairs = jnp.minimum(experts_MK.reshape(-1), num_experts)
    # Where a pair goes is counted, not sorted: a sort takes the TPU's compiler seconds, each one.
    is_of = (pairs[:, None] == jnp.arange(num_experts + 1)[None, :]).astype(jnp.int32)
    sizes = jnp.sum(is_of, axis=0)
    before = jnp.cumsum(sizes) - sizes
    inverse = jnp.sum(is_of * (before[None, :] + jnp.cumsum(is_of, axis=0) - 1), axis=1)
    return jnp.argsort(pairs, stable=True), inverse, sizes[:num_experts]


@jax.custom_vjp
def dispatch(x_MD: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns one row of `x` a token-expert pair, in expert order: [M*K, D]."""
    return jnp.take(x_MD, order // (order.size // x_MD.shape[0]), axis=0)


def _dispatch_backward(residuals, g):
    x_shape, inverse = residuals
    by_token = jnp.take(g, inverse, axis=0).reshape(x_shape[0], -1, x_shape[1])
    return jnp.sum(by_token, axis=1, dtype=jnp.float32).astype(g.dtype), None, None


dispatch.defvjp(
    lambda x_MD, order, inverse: (dispatch(x_MD, order, inverse), (x_MD.shape, inverse)),
    _dispatch_backward,
)


@jax.custom_vjp
def combine(y: jax.Array, gates_MK: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns each token's gate-weighted sum of its experts' rows of `y` [M*K, D], in float32: [M, D]."""
    by_token = jnp.take(y, inverse, axis=0).reshape(*gates_MK.shape, y.shape[1])
    return jnp.sum(by_token.astype(jnp.float32) * gates_MK[:, :, None], axis=1)


def _combine_forward(y, gates_MK, order, inverse):
    return combine(y, gates_MK, order, inverse), (y, gates_MK, order, inverse)


def _combine_backward(residuals, g_MD):
    y, gates_MK, order, inverse = residuals
    K = gates_MK.shape[1]
    g_pairs = jnp.take(g_MD, order // K, axis=0)
    d_y = g_pairs * jnp.take(gates_MK.reshape(-1), order)[:, None]
    d_gates = jnp.sum(y.astype(jnp.float32) * g_pairs, axis=1)
    return d_y.astype(y.dtype), jnp.take(d_gates, inverse).reshape(gates_MK.shape), None, None


combine.defvjp(_combine_forward, _combine_backward)
