"""Batches for training, in an order that neither the number of processes nor a restart changes."""

from pathlib import Path

import grain

from upjax.data.packing import PackedSequences, check_sequences
from upjax.errors import InputError


def make_dataset(
    path: Path | str,
    *,
    split: str = "train",
    sequence_length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    num_epochs: int | None = None,
    num_threads: int = 4,
    prefetch: int = 8,
) -> grain.IterDataset:
    """Returns this process's rows of the batches of the dataset at `path`, dicts as PackedSequences makes them.

    Batch b of the run holds sequences b*batch_size to (b+1)*batch_size - 1, a process its share of these rows in their
    order, so the batches are the same for any `process_count`. The iterator's state is {"next_index": b}: equal on all
    processes, good for another number of them, and restored at no cost, as no sequence depends on those before it.
    With `num_epochs` None there is no end; else the sequences at the end that fill no batch are dropped.
    """
    check_sequences(sequence_length=sequence_length, seed=seed, num_epochs=num_epochs, batch_size=batch_size)
    if not 0 <= process_index < process_count:
        raise InputError(f"need 0 <= process_index < process_count, got {process_index} and {process_count}")
    if batch_size % process_count:
        raise InputError(f"batch_size {batch_size} is not a multiple of process_count {process_count}")
    sequences = PackedSequences(path, split, sequence_length=sequence_length, seed=seed, num_epochs=num_epochs)
    num_batches = len(sequences) // batch_size
    if not num_batches:
        raise InputError(
            f"split {split!r} of {path} makes {len(sequences)} sequences, fewer than a batch of {batch_size}"
        )
    rows = grain.MapDataset.source(sequences)[: num_batches * batch_size].batch(batch_size // process_count)
    return rows[process_index::process_count].to_iter_dataset(
        grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
    )
