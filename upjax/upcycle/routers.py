"""How a router begins: functions of one layer. Each says what it preserves. Dims: D embed, E experts."""

import jax
import jax.numpy as jnp

INITIAL_STD = 0.02
"""As OLMoE's upcycling script has it; Komatsuzaki et al. do not say theirs."""


def random_router(source: None, target: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Returns router weights [D, E] from N(0, 0.02): routing is nearly even, and copies part from the first step."""
    return INITIAL_STD * jax.random.normal(key, target.shape, jnp.float32)
