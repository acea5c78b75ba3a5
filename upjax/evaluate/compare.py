"""How far two models agree on the same text. Dims: B batch, T time, V vocab."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from upjax.errors import Problems
from upjax.mesh import batch_sharded
from upjax.model import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Two models' next-token predictions over the same positions, in float32 logits."""

    max_abs_logit_diff: float
    """The largest difference of any logit at any position."""
    kl: float
    """The mean over positions of KL(first || second), in nats."""
    top1_agreement: float
    """The share of positions at which both find the same token likeliest."""
    num_tokens: int


def verify(first: Decoder, second: Decoder, tokens_BT: np.ndarray, *, batch_size: int = 1) -> Agreement:
    """Returns how far the models agree on the rows of `tokens_BT`, each read as one document.

    Rows are run `batch_size` at a time; their number must be a multiple of it, and that one of the mesh's devices.
    Raises InputError when the vocabularies differ or a token is in neither.
    """
    problems = Problems("the models cannot be compared on this text")
    vocabs = (first.config.vocab_size, second.config.vocab_size)
    if vocabs[0] != vocabs[1]:
        problems.add(f"the first has a vocabulary of {vocabs[0]}, the second of {vocabs[1]}")
    if tokens_BT.max() >= min(vocabs):
        problems.add(f"token {tokens_BT.max()} is in no vocabulary of {min(vocabs)}")
    if tokens_BT.shape[0] % batch_size:
        problems.add(f"{tokens_BT.shape[0]} rows are no multiple of the batch size {batch_size}")
    problems.raise_if_any()
    # "highest": a TPU would otherwise multiply float32 in bfloat16, and what is asked is how far the models differ.
    with jax.default_matmul_precision("highest"):
        starts = range(0, tokens_BT.shape[0], batch_size)
        parts = [_agreement(first, second, _on_mesh(tokens_BT[start : start + batch_size])) for start in starts]
    parts = jax.device_get(parts)
    return Agreement(
        max_abs_logit_diff=float(max(part["diff"] for part in parts)),
        kl=float(sum(part["kl"] for part in parts) / tokens_BT.size),
        top1_agreement=float(sum(part["same"] for part in parts) / tokens_BT.size),
        num_tokens=tokens_BT.size,
    )


def _on_mesh(tokens_BT: np.ndarray) -> jax.Array:
    return batch_sharded(jnp.asarray(tokens_BT, jnp.int32))


@jax.jit
def _agreement(first: Decoder, second: Decoder, tokens_BT):
    p_BTV, q_BTV = first(tokens_BT).logits, second(tokens_BT).logits
    log_p_BTV, log_q_BTV = jax.nn.log_softmax(p_BTV), jax.nn.log_softmax(q_BTV)
    return {
        "diff": jnp.max(jnp.abs(p_BTV - q_BTV)),
        "kl": jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV)),
        "same": jnp.sum(jnp.argmax(p_BTV, axis=-1) == jnp.argmax(q_BTV, axis=-1)),
    }
