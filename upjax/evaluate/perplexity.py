"""Held-out loss: how well a model predicts documents that it did not train on.

Dims: B batch, T time, L MoE layers, E experts.
"""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from upjax.data import check_vocabulary, held_out_batches, load_info
from upjax.errors import InputError
from upjax.mesh import AXES, BATCH, axis_size, has_mesh
from upjax.model import Decoder
from upjax.model.loss import cross_entropy_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The score of a model on held-out documents."""

    loss: float
    """Nats per token, the end-of-text tokens among them."""
    perplexity: float
    bits_per_byte: float
    """Of UTF-8 text: comparable between tokenizers."""
    num_tokens: int
    num_bytes: int
    expert_load: tuple[tuple[float, ...], ...] | None
    """For each MoE layer the share of its token-expert pairs that each expert got; None for a dense model."""


def evaluate(
    decoder: Decoder,
    dataset: Path | str,
    *,
    split: str = "held_out",
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
) -> Evaluation:
    """Returns the model's score on a split of a tokenized dataset, every token of it scored once.

    With `max_tokens`, on as many whole documents as hold no more tokens, the same ones each time.
    """
    check_vocabulary(load_info(dataset), decoder.config.vocab_size)
    num_devices = math.prod(axis_size(axis) for axis in AXES)
    if batch_size % num_devices:
        raise InputError(f"batch_size {batch_size} is not a multiple of the mesh's {num_devices} devices")
    held_out = held_out_batches(
        dataset, sequence_length=sequence_length, batch_size=batch_size, max_tokens=max_tokens, split=split
    )
    nats, counts_LE = 0.0, None
    for batch in held_out.batches:
        batch_nats, batch_counts_LE = _score(decoder, jax.device_put(batch, _batch_sharding()))
        nats += float(batch_nats)  # summed in float64: a float32 sum would lose the last tokens of a long split
        if batch_counts_LE is not None:
            counts_LE = np.asarray(batch_counts_LE, np.int64) + (0 if counts_LE is None else counts_LE)
    loss = nats / held_out.num_tokens
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=nats / math.log(2) / held_out.num_bytes,
        num_tokens=held_out.num_tokens,
        num_bytes=held_out.num_bytes,
        expert_load=None if counts_LE is None else _shares(counts_LE),
    )


@jax.jit
def _score(decoder: Decoder, batch: dict[str, jax.Array]):
    """Returns the summed negative log likelihood of a batch's targets in nats, and the tokens each expert saw."""
    hidden_BTD, router = decoder.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    nats = cross_entropy_sum(decoder, hidden_BTD, batch["targets"], batch["loss_weights"])
    return nats, None if router is None else router.expert_counts


def _batch_sharding():
    return jax.NamedSharding(jax.sharding.get_mesh(), P(BATCH, None)) if has_mesh() else None


def _shares(counts_LE: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(c) for c in row / row.sum()) for row in counts_LE)
