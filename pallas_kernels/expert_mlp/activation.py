"""The gated activation between the products, and its derivative. All in float32."""

import jax
import jax.numpy as jnp


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up in the dtype of `gate`."""
    return gated_tile(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def gated_gradients(gate: jax.Array, up: jax.Array, d_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (d_gate, d_up) in the dtype of `gate`, given the gradient of `gated(gate, up)`."""
    d_gate, d_up, _ = gated_tile_gradients(*(x.astype(jnp.float32) for x in (d_hidden, gate, up)))
    return d_gate.astype(gate.dtype), d_up.astype(gate.dtype)


def gated_tile(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up of float32 arrays."""
    return gate * jax.nn.sigmoid(gate) * up


def gated_tile_gradients(d_hidden: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (d_gate, d_up, hidden) of float32 arrays: what `d_hidden` gives, and `gated_tile(gate, up)` again."""
    share = jax.nn.sigmoid(gate)
    silu = gate * share
    return d_hidden * up * (share + silu - silu * share), d_hidden * silu, silu * up
