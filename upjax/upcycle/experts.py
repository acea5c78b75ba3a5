"""How an expert is made of a dense MLP: functions of one layer's weight. Each says what it preserves.

Dims: D and F embed and hidden (either order), E experts.
"""

import jax
import jax.numpy as jnp


def keep(source: jax.Array, target: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Returns the parameter as it is."""
    return source


def copy_experts(source_DF: jax.Array, target: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Returns E copies of the dense weight, [E, D, F] (Komatsuzaki et al. 2022).

    With gates that sum to 1 the layer's output is the dense MLP's, whatever the router does.
    """
    return jnp.broadcast_to(source_DF[None], target.shape)
