"""Batches come in one global order, whatever the processes, the threads and the restarts."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from upjax.data import PackedSequences, make_dataset
from upjax.errors import InputError

SIZES = dict(sequence_length=32, batch_size=8, seed=4)


def batches(dataset, count, **options):
    """The first batches, as nested lists that compare by value."""
    iterator = iter(make_dataset(dataset, **{**SIZES, **options}))
    return [as_lists(batch) for batch in itertools.islice(iterator, count)]


def as_lists(batch):
    return {name: array.tolist() for name, array in batch.items()}


def joined(parts):
    """The global batch of the rows of all processes."""
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def test_a_batch_is_the_next_sequences(dataset):
    sequences = PackedSequences(dataset, sequence_length=32, seed=4)
    for number, batch in enumerate(batches(dataset, 5)):
        assert batch == as_lists(
            {
                name: np.stack([sequences[number * 8 + row][name] for row in range(8)])
                for name in ("tokens", "targets", "segment_ids", "positions", "loss_weights")
            }
        )


@pytest.mark.parametrize("process_count", [1, 2, 4, 8])
def test_the_processes_share_the_global_batch_in_order(dataset, process_count):
    parts = [batches(dataset, 4, process_index=i, process_count=process_count) for i in range(process_count)]
    assert [joined(part) for part in zip(*parts, strict=True)] == batches(dataset, 4)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (4, 2)])
def test_a_state_goes_over_to_another_number_of_processes(dataset, before, after):
    iterators = [iter(make_dataset(dataset, **SIZES, process_index=i, process_count=before)) for i in range(before)]
    for iterator in iterators:
        for _ in range(3):
            next(iterator)
    (state,) = {json.dumps(iterator.get_state()) for iterator in iterators}
    parts = []
    for i in range(after):
        iterator = iter(make_dataset(dataset, **SIZES, process_index=i, process_count=after))
        iterator.set_state(json.loads(state))
        parts.append([as_lists(next(iterator)) for _ in range(3)])
    assert [joined(part) for part in zip(*parts, strict=True)] == batches(dataset, 6)[3:]


RESUME = """
import json, sys
from orbax.checkpoint import v1 as ocp
from upjax.data import make_dataset
dataset, how, state = sys.argv[1:]
iterator = iter(make_dataset(dataset, sequence_length=32, batch_size=8, seed=4))
next(iterator)  # a restored iterator forgets what it has read ahead
if how == "state":
    iterator.set_state(json.loads(state))
else:
    ocp.load_checkpointables(state, {"data": iterator})
print(json.dumps([{name: array.tolist() for name, array in next(iterator).items()} for _ in range(4)]))
"""


@pytest.mark.parametrize("how", ["state", "checkpoint"])
def test_a_fresh_process_goes_on_where_another_stopped(dataset, tmp_path, how):
    iterator = iter(make_dataset(dataset, **SIZES))
    for _ in range(5):
        next(iterator)
    state = json.dumps(iterator.get_state())
    if how == "checkpoint":
        state = str(tmp_path / "checkpoint")
        ocp.save_checkpointables(state, {"data": iterator})
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(dataset), how, state], capture_output=True, text=True, check=True
    )
    wanted = [as_lists(next(iterator)) for _ in range(4)]
    assert json.loads(done.stdout) == wanted == batches(dataset, 9)[5:]


def test_restoring_replays_nothing(write_dataset, tmp_path):
    write_dataset(tmp_path / "dataset", [40] * 50)
    iterator = iter(make_dataset(tmp_path / "dataset", **SIZES))
    iterator.set_state({"next_index": 10**11})  # any replay would outlast the test
    sequences = PackedSequences(tmp_path / "dataset", sequence_length=32, seed=4)
    np.testing.assert_array_equal(next(iterator)["tokens"][3], sequences[8 * 10**11 + 3]["tokens"])


def test_any_size_of_dataset_goes_on_without_end(write_dataset, tmp_path):
    # Grain computes lengths with floats; an endless length near the largest integer made one in two of these fail.
    for size in (96, 97, 203, 385, 1000, 4099):
        write_dataset(tmp_path / str(size), [size])
        parts = [batches(tmp_path / str(size), 3, process_index=i, process_count=8) for i in range(8)]
        assert [joined(part) for part in zip(*parts, strict=True)] == batches(tmp_path / str(size), 3)


def test_threads_and_reading_ahead_do_not_change_the_order(dataset):
    assert batches(dataset, 12, num_threads=0, prefetch=0) == batches(dataset, 12, num_threads=7, prefetch=3)


def test_epochs_follow_each_other_and_end(write_dataset, tmp_path):
    write_dataset(tmp_path / "dataset", [16] * 24)  # 12 sequences an epoch
    three_epochs = batches(tmp_path / "dataset", None, num_epochs=3)
    assert len(three_epochs) == 36 // 8
    assert three_epochs == batches(tmp_path / "dataset", 4)
    rows = [row for batch in three_epochs for row in batch["tokens"]]
    for epoch in range(2):
        tokens = [token for row in rows[epoch * 12 : epoch * 12 + 12] for token in row]
        assert sorted(tokens) == list(range(1, 385))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=6, process_count=4), "batch_size 6 is not a multiple of process_count 4"),
        (dict(process_index=2, process_count=2), "got 2 and 2"),
        (dict(process_index=-1), "got -1 and 1"),
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(batch_size=10**6, num_epochs=1), "sequences, fewer than a batch of 1000000"),
        (dict(sequence_length=10**7), "tokens, fewer than one sequence of 10000000"),
        (dict(split="test"), "no split 'test'"),
    ],
)
def test_batches_that_cannot_be_are_refused(dataset, options, message):
    with pytest.raises(InputError, match=message):
        make_dataset(dataset, **{**SIZES, **options})
