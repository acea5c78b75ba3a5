"""Batches that score each token of held-out documents once, and the bytes that those tokens stand for.

Dims: T sequence length.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from upjax.data.dataset import Documents
from upjax.data.packing import check_sequences, shuffled, spans
from upjax.errors import InputError


class HeldOut(NamedTuple):
    """Evaluation batches and what they score: bits per byte is the sum of all nats / ln 2 / `num_bytes`."""

    batches: grain.MapDataset
    num_documents: int
    num_tokens: int
    num_bytes: int


def held_out_batches(
    path: Path | str, *, sequence_length: int, batch_size: int, max_tokens: int | None = None, split: str = "held_out"
) -> HeldOut:
    """Returns batches over the documents of a split in which each of their tokens is the target of one weight of 1.

    The end-of-text token stands before each document as the context of its first token, so every byte is scored, and so
    is the end-of-text token after it: the nats are the price of the text and of where it ends. A document that does not
    fit a sequence goes on in the next one, without the context before. Documents are taken whole, in an order of their
    own, the same each time, as many as `max_tokens` allows. The last batch is filled up with padding (segment 0).
    """
    check_sequences(sequence_length=sequence_length, batch_size=batch_size)
    sequences = _ScoredSequences(Documents(path, split), sequence_length, max_tokens)
    batches = grain.MapDataset.source(sequences).batch(
        batch_size, batch_fn=functools.partial(grain.experimental.batch_and_pad, batch_size=batch_size)
    )
    documents, order = sequences.documents, sequences.order
    return HeldOut(
        batches,
        num_documents=len(order),
        num_tokens=int(sequences.ends[-1]),
        num_bytes=sum(documents.num_bytes(document) for document in order),
    )


class _ScoredSequences:
    """Random access to the sequences of `held_out_batches`."""

    def __init__(self, documents: Documents, sequence_length: int, max_tokens: int | None):
        # Shards are in the order of file names; shuffled, the documents within `max_tokens` are a fair sample.
        order = shuffled(len(documents), seed=0, epoch=0)
        ends = np.cumsum(documents.lengths[order])
        fitting = len(order) if max_tokens is None else int(np.searchsorted(ends, max_tokens, side="right"))
        if not fitting:
            raise InputError(f"max_tokens {max_tokens} is less than the first document's {ends[0]} tokens")
        self.documents, self.order, self.ends = documents, order[:fitting], ends[:fitting]
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-int(self.ends[-1]) // self._sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        T = self._sequence_length
        tokens_T, targets_T, segments_T, positions_T = np.zeros((4, T), np.int32)
        filled = 0
        for segment, (place, begin, end) in enumerate(spans(self.ends, index * T, index * T + T), start=1):
            here = slice(filled, filled + end - begin)
            document = self.documents[self.order[place]]
            targets_T[here] = document[begin:end]
            tokens_T[here] = np.append(self.documents.info.end_of_text, document)[begin:end]
            segments_T[here] = segment
            positions_T[here] = np.arange(end - begin)
            filled = here.stop
        return {
            "tokens": tokens_T,
            "targets": targets_T,
            "segment_ids": segments_T,
            "positions": positions_T,
            "loss_weights": (segments_T > 0).astype(np.float32),
        }
