"""Documents as sequences of one length: the concatenation of all documents, cut every T tokens.

Dims: T sequence length, W = T + 1, a sequence and the token after it.

Which tokens a sequence holds is a function of (seed, index) alone, so the order is the same for any number of
processes, threads and restarts. Each epoch puts the documents in an order of its own; its sequence i is the tokens i*T
to (i+1)*T of them laid end to end, the last one filled up with padding, so that an epoch has every token once.
"""

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from upjax.data.dataset import Documents
from upjax.errors import InputError, Problems

ENDLESS = 1 << 48
"""Sequences without end: more than any run reads, few enough that Grain, which divides lengths as floats, is exact."""


class Span(NamedTuple):
    """Tokens `begin` to `end` of the document at `place` in an order of documents."""

    place: int
    begin: int
    end: int


def spans(ends: np.ndarray, start: int, stop: int) -> Iterator[Span]:
    """Yields what lies between `start` and `stop` in documents laid end to end, of which number p ends at `ends[p]`."""
    place = int(np.searchsorted(ends, start, side="right"))
    stop = min(stop, int(ends[-1]))
    while start < stop:
        first = int(ends[place - 1]) if place else 0
        end = min(stop, int(ends[place]))
        yield Span(place, start - first, end - first)
        place, start = place + 1, end


def shuffled(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the documents in an epoch."""
    # The raw bits are the same in every release of NumPy, what Generator.permutation makes of them need not be.
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(num_documents), kind="stable")


class PackedSequences:
    """Random access to the training sequences of a split: item i is a dict of arrays of length T.

    `tokens` and `targets`, the token after each; `segment_ids`, which count the documents of the sequence from 1 (0 is
    padding); `positions`, which start at 0 in each of them; `loss_weights`, 0 where the target is of another document
    or padding and 1 elsewhere. With `num_epochs` None there is no end.
    """

    def __init__(
        self, path: Path | str, split: str = "train", *, sequence_length: int, seed: int, num_epochs: int | None = None
    ):
        check_sequences(sequence_length=sequence_length, seed=seed, num_epochs=num_epochs)
        self._documents = Documents(path, split)
        num_tokens = int(self._documents.lengths.sum())
        if num_tokens < sequence_length:
            raise InputError(
                f"split {split!r} of {path} holds {num_tokens} tokens, fewer than one sequence of {sequence_length}"
            )
        self._sequence_length = sequence_length
        self._seed = seed
        self.sequences_per_epoch = -(-num_tokens // sequence_length)
        self._num_epochs = num_epochs or -(-ENDLESS // self.sequences_per_epoch)
        # Two, because at the end of an epoch the sequences of the next are read ahead.
        self._order_and_ends = functools.lru_cache(maxsize=2)(self._make_order_and_ends)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.sequences_per_epoch * self._num_epochs

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, number = divmod(int(index), self.sequences_per_epoch)
        with self._lock:  # or every thread would make the order, when one will do
            order, ends = self._order_and_ends(epoch)
        T = self._sequence_length
        tokens_W, segments_W, positions_W = np.zeros((3, T + 1), np.int32)
        filled = 0
        for segment, (place, begin, end) in enumerate(spans(ends, number * T, number * T + T + 1), start=1):
            here = slice(filled, filled + end - begin)
            tokens_W[here] = self._documents[order[place]][begin:end]
            segments_W[here] = segment
            positions_W[here] = np.arange(end - begin)
            filled = here.stop
        same_document_T = (segments_W[1:] == segments_W[:-1]) & (segments_W[1:] > 0)
        return {
            "tokens": tokens_W[:-1],
            "targets": tokens_W[1:],
            "segment_ids": segments_W[:-1],
            "positions": positions_W[:-1],
            "loss_weights": same_document_T.astype(np.float32),
        }

    def _make_order_and_ends(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = shuffled(len(self._documents), self._seed, epoch)
        return order, np.cumsum(self._documents.lengths[order])


def check_sequences(*, sequence_length: int, seed: int = 0, num_epochs: int | None = None, **counts: int) -> None:
    """Raises InputError with every argument that cannot be; each of `counts` must be at least 1."""
    problems = Problems("cannot make sequences")
    if sequence_length < 2:
        problems.add(f"sequence_length must be at least 2, got {sequence_length}")
    if not 0 <= seed < 1 << 63:
        problems.add(f"seed must not be negative and fit 63 bits, got {seed}")
    if num_epochs is not None:
        counts["num_epochs"] = num_epochs
    for name, count in counts.items():
        if count < 1:
            problems.add(f"{name} must be at least 1, got {count}")
    problems.raise_if_any()
