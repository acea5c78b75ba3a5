"""Cross-entropy of the next token without ever holding all logits.

Dims: B batch, T time, C chunk of time, D embed, V vocab.
"""

import math

import jax
import jax.numpy as jnp

from upjax.mesh import AXES, axis_size
from upjax.model.decoder import Decoder
from upjax.model.linear import linear

CHUNK_TOKENS = 2048
"""Tokens a device holds logits of at a time."""


def cross_entropy_sum(decoder: Decoder, hidden_BTD, targets_BT, weights_BT) -> jax.Array:
    """Returns the summed, weighted negative log likelihood of the targets in nats, float32.

    The sequence is cut into chunks; each chunk's logits are made, used and dropped, and made again in the backward
    pass, so memory does not grow with T * V.
    """
    head_DV = decoder.head_weight

    def of_chunk(chunk):
        hidden, targets, weights = chunk
        return jnp.sum(weights * token_losses(hidden, head_DV, targets))

    num_chunks = _num_chunks(*hidden_BTD.shape[:2])
    if num_chunks == 1:
        return of_chunk((hidden_BTD, targets_BT, weights_BT))
    of_chunk = jax.checkpoint(of_chunk)
    chunks = jax.tree.map(lambda x: _split_time(x, num_chunks), (hidden_BTD, targets_BT, weights_BT))
    total, _ = jax.lax.scan(lambda total, chunk: (total + of_chunk(chunk), None), jnp.float32(0), chunks)
    return total


def token_losses(hidden_BCD, head_DV, targets_BC) -> jax.Array:
    """Returns each position's negative log likelihood of its target in nats, [B, C] float32."""
    logits_BCV = linear(hidden_BCD, head_DV).astype(jnp.float32)
    return jax.nn.logsumexp(logits_BCV, axis=-1) - _at(logits_BCV, targets_BC)


def _at(logits_BCV, targets_BC):
    """Returns the logit of each target, by a comparison instead of a gather: its gradient is then no scatter."""
    is_target = targets_BC[:, :, None] == jnp.arange(logits_BCV.shape[-1])[None, None, :]
    return jnp.sum(jnp.where(is_target, logits_BCV, 0.0), axis=-1)


def _num_chunks(B, T):
    num_devices = math.prod(axis_size(axis) for axis in AXES)
    num_chunks = max(1, B * T // num_devices // CHUNK_TOKENS)
    while T % num_chunks:
        num_chunks -= 1
    return num_chunks


def _split_time(x, num_chunks):
    B, T = x.shape[:2]
    return jnp.moveaxis(x.reshape(B, num_chunks, T // num_chunks, *x.shape[2:]), 1, 0)
