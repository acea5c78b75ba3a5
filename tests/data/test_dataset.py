"""A dataset that is damaged or does not fit the model is refused with everything that is wrong."""

import json

import numpy as np
import pytest

from upjax.data import PackedSequences, check_vocabulary, load_info
from upjax.data.dataset import INFO_FILE
from upjax.errors import InputError


@pytest.fixture
def small(write_dataset, tmp_path):
    """The path of a small dataset of several shards, free to be damaged."""
    write_dataset(tmp_path / "dataset", [30] * 10)
    return tmp_path / "dataset"


def edit(path, change):
    content = json.loads((path / INFO_FILE).read_text())
    change(content)
    (path / INFO_FILE).write_text(json.dumps(content))


def test_a_whole_dataset_is_read_back(small):
    info = load_info(small)
    assert info.splits["train"].documents == 10
    assert info.splits["train"].tokens == 300
    assert len(info.splits["train"].shards) > 1
    assert info.splits["held_out"].shards == ()


def test_no_dataset_is_told_as_such(tmp_path):
    with pytest.raises(InputError, match=f"no dataset at {tmp_path}"):
        load_info(tmp_path)


def test_every_wrong_key_is_named(small):
    def change(content):
        content["format"] = 2
        content["dtype"] = "int8"
        content["extra"] = 1
        del content["seed"]
        content["splits"]["train"]["tokens"] = "many"

    edit(small, change)
    with pytest.raises(InputError) as error:
        load_info(small)
    assert {problem.split(": ")[1] for problem in error.value.problems} == {
        "format",
        "dtype",
        "extra",
        "seed",
        "splits.train.tokens",
    }


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_what_is_no_json_object_is_refused(small, content):
    (small / INFO_FILE).write_text(content)
    with pytest.raises(InputError, match="not a whole dataset"):
        load_info(small)


def test_every_missing_or_cut_file_is_named(small):
    first, second, *_ = sorted(small.glob("train-*.array_record"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    (small / "train-lengths.npy").unlink()
    with pytest.raises(InputError) as error:
        load_info(small)
    assert [problem.split()[0] for problem in error.value.problems] == [first.name, second.name, "train-lengths.npy"]


def test_shards_and_documents_must_agree(small):
    edit(small, lambda content: content["splits"]["train"].update(documents=11))
    with pytest.raises(InputError, match="do not sum to 11"):
        load_info(small)


@pytest.mark.parametrize(
    "lengths",
    [np.full(9, 30), np.full(10, 31), np.full(10, 30.0), np.full((10, 1), 30), np.array([30] * 10, object)],
    ids=["too few", "other sum", "floats", "other shape", "pickled"],
)
def test_lengths_that_do_not_fit_are_refused(small, lengths):
    np.save(small / "train-lengths.npy", lengths)
    with pytest.raises(InputError, match="train-lengths.npy"):
        PackedSequences(small, sequence_length=8, seed=0)


def test_cut_lengths_are_refused(small):
    content = (small / "train-lengths.npy").read_bytes()
    for size in (0, 5, len(content) - 8):
        (small / "train-lengths.npy").write_bytes(content[:size])
        with pytest.raises(InputError, match="train-lengths.npy"):
            PackedSequences(small, sequence_length=8, seed=0)


def test_a_token_without_an_embedding_is_refused(small):
    info = load_info(small)
    assert info.max_token_id == 300
    check_vocabulary(info, 301)
    with pytest.raises(InputError, match="token id 300, .* vocab_size 300"):
        check_vocabulary(info, 300)
