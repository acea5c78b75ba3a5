"""Packed sequences against an oracle that goes through the stream token by token."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upjax.data import PackedSequences
from upjax.errors import InputError


@pytest.fixture
def open_numbered(write_dataset, tmp_path):
    """A function that makes a dataset of documents of some lengths and opens its sequences."""

    def open_sequences(lengths, **options):
        write_dataset(tmp_path / "dataset", lengths)
        return PackedSequences(tmp_path / "dataset", **options)

    return open_sequences


def stream_of_epoch(sequences, epoch):
    """The tokens of an epoch in the order in which they come, without padding."""
    rows = [sequences[epoch * sequences.sequences_per_epoch + i] for i in range(sequences.sequences_per_epoch)]
    return [int(t) for row in rows for t, segment in zip(row["tokens"], row["segment_ids"], strict=True) if segment]


def expected_row(stream, document_of, start, length):
    """One sequence, written down from the stream alone."""
    row = {"tokens": [], "targets": [], "segment_ids": [], "positions": [], "loss_weights": []}
    segment, position, last_document = 0, 0, None
    for place in range(start, start + length):
        if place >= len(stream):
            values = (0, 0, 0, 0, 0)
        else:
            token = stream[place]
            if document_of[token] != last_document:
                segment, position, last_document = segment + 1, 0, document_of[token]
            target = stream[place + 1] if place + 1 < len(stream) else 0
            values = (token, target, segment, position, int(document_of.get(target) == last_document))
            position += 1
        for name, value in zip(row, values, strict=True):
            row[name].append(value)
    return row


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    sequence_length=st.integers(2, 25),
    seed=st.integers(0, 2**63 - 1),
)
def test_sequences_are_the_documents_end_to_end(write_dataset, lengths, sequence_length, seed):
    sequence_length = min(sequence_length, max(2, sum(lengths)))
    with tempfile.TemporaryDirectory() as directory:
        documents = write_dataset(Path(directory) / "dataset", [length + 1 for length in lengths])
        sequences = PackedSequences(
            Path(directory) / "dataset", sequence_length=sequence_length, seed=seed, num_epochs=3
        )
        document_of = {token: number for number, document in enumerate(documents) for token in document}
        for epoch in range(3):
            stream = stream_of_epoch(sequences, epoch)
            # Every token once, and documents whole: cutting where the document changes gives all of them back.
            cuts = [i for i in range(1, len(stream)) if document_of[stream[i]] != document_of[stream[i - 1]]]
            pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
            assert sorted(pieces) == documents
            for number in range(sequences.sequences_per_epoch):
                row = sequences[epoch * sequences.sequences_per_epoch + number]
                wanted = expected_row(stream, document_of, number * sequence_length, sequence_length)
                assert {name: array.tolist() for name, array in row.items()} == wanted
        assert len(sequences) == 3 * sequences.sequences_per_epoch


def test_the_arrays_have_the_dtypes_that_the_model_reads(open_numbered):
    row = open_numbered([30, 50], sequence_length=16, seed=0)[0]
    integers = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32")
    assert {name: (str(array.dtype), array.shape) for name, array in row.items()} == {
        name: (dtype, (16,)) for name, dtype in {**integers, "loss_weights": "float32"}.items()
    }


def test_epochs_and_seeds_have_orders_of_their_own(write_dataset, tmp_path):
    write_dataset(tmp_path / "dataset", [5] * 20)
    orders = [
        tuple(stream_of_epoch(PackedSequences(tmp_path / "dataset", sequence_length=7, seed=seed), epoch))
        for seed in (0, 1, 2**63 - 1)
        for epoch in (0, 1, 10**6)
    ]
    assert len(set(orders)) == 9
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(1, 101))}


def test_the_order_is_the_same_for_good(open_numbered):
    # Runs go on after upgrades: what a seed meant when a run began, it must mean when the run ends.
    sequences = open_numbered([1] * 8, sequence_length=8, seed=5)
    assert [stream_of_epoch(sequences, epoch) for epoch in (0, 1)] == [
        [3, 5, 4, 2, 6, 1, 7, 8],
        [8, 5, 6, 2, 7, 1, 3, 4],
    ]


def test_a_sequence_does_not_depend_on_what_was_read_before(write_dataset, tmp_path):
    write_dataset(tmp_path / "dataset", list(range(2, 60)))
    open_sequences = lambda: PackedSequences(tmp_path / "dataset", sequence_length=32, seed=3)
    in_order, at_random, indices = open_sequences(), open_sequences(), list(range(150))
    wanted = {index: in_order[index] for index in indices}
    for index in np.random.default_rng(0).permutation(indices):
        for name, array in at_random[index].items():
            np.testing.assert_array_equal(array, wanted[index][name])


def test_a_sequence_reads_no_other_documents_than_its_own(open_numbered, monkeypatch):
    sequences = open_numbered([10] * 1000, sequence_length=20, seed=0)
    read = []
    source = type(sequences._documents)
    get = source.__getitem__
    monkeypatch.setattr(source, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    sequences[10**12]
    assert len(read) <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sequence_length=1, seed=0), "sequence_length must be at least 2, got 1"),
        (dict(sequence_length=4, seed=-1), "seed must not be negative"),
        (dict(sequence_length=4, seed=0, num_epochs=0), "num_epochs must be at least 1, got 0"),
        (dict(sequence_length=13, seed=0), "holds 12 tokens, fewer than one sequence of 13"),
        (dict(sequence_length=4, seed=0, split="test"), "no split 'test', it has train, held_out"),
        (dict(sequence_length=4, seed=0, split="held_out"), "'held_out' of dataset .* holds no documents"),
    ],
)
def test_sequences_that_cannot_be_are_refused(open_numbered, options, message):
    with pytest.raises(InputError, match=message):
        open_numbered([5, 7], **options)


def test_one_sequence_may_be_the_whole_dataset(open_numbered):
    sequences = open_numbered([5, 7], sequence_length=12, seed=0)
    assert sequences.sequences_per_epoch == 1
    assert sorted(sequences[0]["tokens"].tolist()) == list(range(1, 13))
