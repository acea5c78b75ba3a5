"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints.

Dims: B batch, T time, N heads, H head, J half of H.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from upjax.model.config import RopeConfig


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the rotation in radians per position of each pair of dims, [J] float32."""
    frequencies = config.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    if config.scaling == "llama3":
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended.
        turns = config.original_max_sequence_length * frequencies / (2 * math.pi)
        kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / config.factor)
    return frequencies.astype(np.float32)


def rope_angles(config: RopeConfig, head_dim: int, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of each position's angles, each [B, T, 1, J] float32."""
    angles = (
        positions_BT[:, :, None, None].astype(jnp.float32) * rope_frequencies(config, head_dim)[None, None, None, :]
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` with each pair (j, j + H/2) of its last dim turned by its position's angle, in the dtype of `x`."""
    left, right = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
