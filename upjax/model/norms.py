"""RMSNorm. Dims: B batch, T time, D embed."""

import jax
import jax.numpy as jnp


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array, epsilon: float) -> jax.Array:
    """Returns x / rms(x) * weight over the last dim, computed in float32, in the dtype of `x`."""
    x = x_BTD.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (normed * weight_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x_BTD.dtype)
