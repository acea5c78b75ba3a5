"""Held-out batches score each token once and count its bytes."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upjax.data import held_out_batches, load_info
from upjax.data.dataset import Documents
from upjax.errors import InputError

END = 10_000


def scored(evaluation):
    """(document context seen so far in the row, target) of each target of weight 1, in the order of the batches."""
    pairs = []
    for number in range(len(evaluation.batches)):
        batch = evaluation.batches[number]
        for row in range(len(batch["tokens"])):
            tokens, segments = batch["tokens"][row].tolist(), batch["segment_ids"][row].tolist()
            for place, target in enumerate(batch["targets"][row].tolist()):
                if batch["loss_weights"][row, place]:
                    context = [t for t, s in zip(tokens[: place + 1], segments, strict=False) if s == segments[place]]
                    assert len(context) == batch["positions"][row, place] + 1
                    pairs.append((context, target))
                else:
                    assert segments[place] == tokens[place] == target == 0
    return pairs


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    sequence_length=st.integers(2, 25),
    batch_size=st.integers(1, 5),
    max_tokens=st.none() | st.integers(40, 500),
)
def test_each_token_is_scored_once_in_its_context(write_dataset, lengths, sequence_length, batch_size, max_tokens):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dataset"
        documents = write_dataset(path, lengths, split="held_out", end_of_text=END)
        evaluation = held_out_batches(
            path, sequence_length=sequence_length, batch_size=batch_size, max_tokens=max_tokens
        )
        pairs = scored(evaluation)
        targets = [target for _, target in pairs]
        # Whole documents, each once, and their bytes.
        document_of = {token: number for number, document in enumerate(documents) for token in document}
        taken = list(dict.fromkeys(document_of[target] for target in targets))
        assert targets == [token for number in taken for token in documents[number]]
        assert evaluation.num_documents == len(taken)
        assert evaluation.num_tokens == len(targets)
        assert evaluation.num_bytes == sum(100 + number for number in taken)
        if max_tokens is None:
            assert len(taken) == len(documents)
        else:
            assert len(targets) <= max_tokens
        # The context is what precedes the target in its document, as far as the row goes back, after the end of text.
        for place, (context, target) in enumerate(pairs):
            document = [END, *documents[document_of[target]]]
            before = document[: document.index(target)]
            assert context == before[-len(context) :]
            assert len(context) == min(len(before), place % sequence_length + 1)
        assert all(
            batch["tokens"].shape == (batch_size, sequence_length)
            for batch in map(evaluation.batches.__getitem__, range(len(evaluation.batches)))
        )


def test_as_many_documents_are_taken_as_fit(write_dataset, tmp_path):
    write_dataset(tmp_path / "dataset", [10] * 9, split="held_out")
    for max_tokens, documents in ((10, 1), (19, 1), (20, 2), (89, 8), (10**6, 9)):
        evaluation = held_out_batches(tmp_path / "dataset", sequence_length=4, batch_size=2, max_tokens=max_tokens)
        assert evaluation.num_documents == documents
    with pytest.raises(InputError, match="max_tokens 9 is less than the first document's 10 tokens"):
        held_out_batches(tmp_path / "dataset", sequence_length=4, batch_size=2, max_tokens=9)


def test_real_text_has_the_bytes_of_its_files(dataset):
    evaluation = held_out_batches(dataset, sequence_length=128, batch_size=4)
    split = load_info(dataset).splits["held_out"]
    assert (evaluation.num_documents, evaluation.num_tokens, evaluation.num_bytes) == (
        split.documents,
        split.tokens,
        split.bytes,
    )
    documents = Documents(dataset, "held_out")
    wanted = np.sort(np.concatenate([documents[number] for number in range(len(documents))]))
    np.testing.assert_array_equal(np.sort([target for _, target in scored(evaluation)]), wanted)


def test_the_batches_are_the_same_each_time(dataset):
    first, second = (held_out_batches(dataset, sequence_length=64, batch_size=2, max_tokens=5000) for _ in range(2))
    for a, b in zip(first.batches, second.batches, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize(
    ("options", "problems"),
    [(dict(sequence_length=1, batch_size=0), 2), (dict(sequence_length=8, batch_size=-1), 1)],
)
def test_wrong_sizes_are_refused(dataset, options, problems):
    with pytest.raises(InputError) as error:
        held_out_batches(dataset, **options)
    assert len(error.value.problems) == problems
