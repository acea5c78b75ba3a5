"""The gated activation between the products, and its derivative. All in float32."""

import jax
import jax.numpy as jnp


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up in the dtype of `gate`."""
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (jax.nn.silu(gate32) * up32).astype(gate.dtype)


def gated_gradients(gate: jax.Array, up: jax.Array, d_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (d_gate, d_up) in the dtype of `gate`, given the gradient of `gated(gate, up)`."""
    gate32, up32, d32 = gate.astype(jnp.float32), up.astype(jnp.float32), d_hidden.astype(jnp.float32)
    share = jax.nn.sigmoid(gate32)
    d_gate = d32 * up32 * share * (1 + gate32 * (1 - share))
    return d_gate.astype(gate.dtype), (d32 * gate32 * share).astype(gate.dtype)
