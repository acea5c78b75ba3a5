"""A dataset is exactly the text it was made of, split by file, the same each time."""

import errno
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from array_record.python.array_record_module import ArrayRecordReader

from upjax.data import load_info, tokenize
from upjax.data.dataset import Documents
from upjax.errors import InputError

END_OF_TEXT = "<|endoftext|>"
MODULE = sys.modules[tokenize.__module__]  # the function has the name of its module


def texts(dataset: Path, tokenizer_file: Path, split: str) -> list[bytes]:
    """The text of each document, by the tokenizer alone; the last token must be the end of text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    documents = Documents(dataset, split)
    decoded = []
    for number in range(len(documents)):
        *tokens, end = documents[number].tolist()
        assert end == tokenizer.token_to_id(END_OF_TEXT)
        assert end not in tokens
        decoded.append(tokenizer.decode(tokens, skip_special_tokens=False).encode())
    return decoded


def tokenized(inputs, output, tokenizer_file, **options):
    """The info of a small dataset and the texts of its two splits."""
    info = tokenize(inputs, output, tokenizer=tokenizer_file, **options)
    splits = [texts(output, tokenizer_file, name) if split.documents else [] for name, split in info.splits.items()]
    return info, *splits


def tree(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_tokens_are_the_files_and_every_file_is_in_one_split(dataset, corpus, tokenizer_file):
    files = {path.read_bytes() for path in corpus.rglob("*") if path.is_file()} - {b""}
    train, held_out = (texts(dataset, tokenizer_file, split) for split in ("train", "held_out"))
    assert set(train) | set(held_out) == files
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == len(files)
    info = load_info(dataset)
    assert info.splits["train"].bytes == sum(map(len, train))
    assert info.splits["held_out"].bytes == sum(map(len, held_out))
    assert len(info.splits["train"].shards) > 3


def test_info_counts_what_the_documents_hold(dataset):
    info, documents = load_info(dataset), Documents(dataset, "train")
    assert [len(documents[number]) for number in range(len(documents))] == documents.lengths.tolist()
    assert info.splits["train"].tokens == documents.lengths.sum()
    largest = max(documents[number].max() for number in range(len(documents)))
    assert largest <= info.max_token_id < info.vocab_size
    assert info.dtype == "uint16"


def test_the_held_out_share_is_about_what_was_asked(tmp_path, tokenizer_file):
    tree(tmp_path / "in", {f"{number}.txt": f"text {number}" for number in range(1000)})
    info = tokenize([tmp_path / "in"], tmp_path / "out", tokenizer=tokenizer_file, held_out=0.1)
    assert 60 < info.splits["held_out"].documents < 140  # over four standard deviations


def test_more_files_do_not_move_the_others(dataset, corpus, tmp_path, tokenizer_file):
    before = texts(dataset, tokenizer_file, "held_out")
    more = shutil.copytree(corpus, tmp_path / "corpus")
    tree(more, {f"{place}{number}.txt": f"text {place}{number}" for place in ("a", "json/z") for number in range(50)})
    _, _, after = tokenized([more], tmp_path / "out", tokenizer_file, held_out=0.2)
    assert set(before) < set(after)
    assert all(text.startswith(b"text ") for text in set(after) - set(before))


def test_a_dataset_is_the_same_to_the_byte_for_the_same_seed_only(
    dataset, corpus, tmp_path, tokenizer_file, monkeypatch
):
    monkeypatch.setattr(MODULE, "BATCH_BYTES", 10_000)  # nor does it depend on how much is encoded at once
    options = dict(tokenizer=tokenizer_file, held_out=0.2, shard_size=100_000)
    tokenize([corpus], tmp_path / "same", **options)
    assert digests(tmp_path / "same") == digests(dataset)
    tokenize([corpus], tmp_path / "other", **options, seed=1)
    assert texts(tmp_path / "other", tokenizer_file, "held_out") != texts(dataset, tokenizer_file, "held_out")


def test_copies_and_empty_files_are_left_out_and_counted(tmp_path, tokenizer_file):
    files = {"a.txt": "one", "b.txt": "one", "c/a.txt": "one", "d.txt": "two", "e.txt": "", "f.txt": ""}
    info, train, _ = tokenized([tree(tmp_path / "in", files)], tmp_path / "out", tokenizer_file, held_out=0)
    assert train == [b"one", b"two"]
    assert (info.duplicates, info.empty) == (2, 2)


def test_what_cannot_be_read_is_listed(tmp_path, tokenizer_file):
    directory = tree(
        tmp_path / "in", {"good.txt": "caf\u00e9 \u65e5\u672c\r\n", "latin.txt": b"caf\xe9", "cut.txt": b"\xe6\x97"}
    )
    (directory / "dangling.txt").symlink_to("nowhere")
    info, train, _ = tokenized([directory], tmp_path / "out", tokenizer_file, held_out=0)
    assert train == ["caf\u00e9 \u65e5\u672c\r\n".encode()]
    assert [Path(line.split(": ")[0]).name for line in info.unreadable] == ["cut.txt", "dangling.txt", "latin.txt"]
    with pytest.raises(InputError) as error:
        tokenize([directory], tmp_path / "strict", tokenizer=tokenizer_file, strict=True)
    assert error.value.problems == info.unreadable
    (directory / "good.txt").unlink()
    with pytest.raises(InputError, match="no documents") as error:
        tokenize([directory], tmp_path / "none", tokenizer=tokenizer_file)
    assert set(info.unreadable) < set(error.value.problems)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_the_lines_of_jsonl_are_documents(tmp_path, tokenizer_file):
    lines = [{"text": f"document {number}\n", "id": number} for number in range(200)]
    bad = ['{"text": 1}', "[1]", "{", '{"txt": "a"}', '{"text": "\\ud800"}', ""]
    content = "\n".join([*map(json.dumps, lines), *bad])
    tree(tmp_path / "in", {"a.jsonl": content})
    info, train, held_out = tokenized([tmp_path / "in" / "a.jsonl"], tmp_path / "out", tokenizer_file, held_out=0.2)
    assert sorted(train + held_out) == sorted(line["text"].encode() for line in lines)
    assert held_out
    assert [line.split(": ")[0].rsplit(":", 1)[1] for line in info.unreadable] == ["201", "202", "203", "204", "205"]


def test_suffixes_and_globs_choose_files(tmp_path, tokenizer_file):
    names = ["a.py", "a.txt", "test/b.py", "deep/tests/c.py", "deep/contest/d.py", "deep/test_e.py", "lib2to3/f.py"]
    directory = tree(tmp_path / "in", {name: name for name in names})
    options = dict(suffixes=[".py"], exclude=["*/test*/*", "*/lib2to3/"], held_out=0)
    _, train, _ = tokenized([directory], tmp_path / "out", tokenizer_file, **options)
    assert set(train) == {b"a.py", b"deep/contest/d.py", b"deep/test_e.py"}
    _, train, _ = tokenized([directory / "a.txt"], tmp_path / "named", tokenizer_file, **options)
    assert train == [b"a.txt"]


def test_a_text_that_spells_the_end_of_text_stays_text(tmp_path, tokenizer_file):
    directory = tree(tmp_path / "in", {"a.txt": f"before{END_OF_TEXT}after"})
    _, train, _ = tokenized(
        [directory], tmp_path / "out", tokenizer_file, held_out=0
    )  # which looks for the token inside
    assert train == [f"before{END_OF_TEXT}after".encode()]


def test_truncation_and_padding_of_a_tokenizer_file_do_not_matter(tmp_path, tokenizer_file):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    directory = tree(tmp_path / "in", {"a.txt": "some longer text " * 9, "b.txt": "b"})
    options = dict(held_out=0, end_of_text=END_OF_TEXT)
    _, train, _ = tokenized([directory], tmp_path / "out", tmp_path / "tokenizer.json", **options)
    assert train == [b"some longer text " * 9, b"b"]


def test_a_large_vocabulary_takes_wider_integers(tmp_path):
    vocabulary = {f"w{number}": number for number in range(70_000)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    directory = tree(tmp_path / "in", {"a.txt": "w69998 w7"})
    info = tokenize(
        [directory], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", held_out=0, end_of_text="w69999"
    )
    assert (info.dtype, info.vocab_size, info.max_token_id) == ("uint32", 70_000, 69_999)
    assert Documents(tmp_path / "out", "train")[0].tolist() == [69_998, 7, 69_999]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"eos_token": {"content": "<|endoftext|>", "special": true}}'},
        {"tokenizer_config.json": '{"eos_token": null}', "config.json": '{"eos_token_id": 1}'},
        {"config.json": '{"vocab_size": 600}', "generation_config.json": '{"eos_token_id": [1, 0]}'},
    ],
    ids=["added token", "config", "generation config"],
)
@pytest.mark.parametrize("place", [".", "tokenizer"])
def test_the_end_of_text_is_what_the_files_beside_the_tokenizer_say(tmp_path, tokenizer_file, files, place):
    model = tmp_path / "model"
    tree(model / place, {**files, "tokenizer.json": tokenizer_file.read_bytes()})
    info = tokenize([tree(tmp_path / "in", {"a.txt": "a"})], tmp_path / "out", tokenizer=model)
    assert info.end_of_text == 1
    assert info.tokenizer_sha256 == hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("files", "end_of_text", "message"),
    [
        ({}, None, "no end-of-text token"),
        ({"config.json": '{"eos_token_id": []}'}, None, "no end-of-text token"),
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, None, "'</s>', which the tokenizer does not have"),
        ({"config.json": '{"eos_token_id": 700}'}, None, "700, which the tokenizer does not have"),
        ({}, -1, "-1, which the tokenizer does not have"),
        ({"config.json": "[]"}, None, "not a JSON object"),
        ({"tokenizer.json": "{}"}, 1, "cannot read the tokenizer"),
    ],
)
def test_a_tokenizer_without_a_usable_end_of_text_is_refused(tmp_path, tokenizer_file, files, end_of_text, message):
    model = tree(tmp_path / "model", {"tokenizer.json": tokenizer_file.read_bytes(), **files})
    directory = tree(tmp_path / "in", {"a.txt": "a"})
    with pytest.raises(InputError, match=message):
        tokenize([directory], tmp_path / "out", tokenizer=model, end_of_text=end_of_text)


def test_every_wrong_argument_is_named(tmp_path, tokenizer_file):
    tree(tmp_path / "in", {"a.txt": "a"})
    with pytest.raises(InputError) as error:
        tokenize(
            [tmp_path / "in", tmp_path / "nowhere"],
            tmp_path / "in" / "out",
            tokenizer=tokenizer_file,
            held_out=1.0,
            seed=-1,
            suffixes=["py"],
            shard_size=0,
        )
    assert len(error.value.problems) == 6
    with pytest.raises(InputError, match="no inputs"):
        tokenize([], tmp_path / "out", tokenizer=tokenizer_file)
    with pytest.raises(InputError, match="no tokenizer"):
        tokenize([tmp_path / "in"], tmp_path / "out", tokenizer=tmp_path / "in")


def test_an_output_that_exists_is_kept_unless_told_otherwise(tmp_path, tokenizer_file):
    directory, output = tree(tmp_path / "in", {"a.txt": "a"}), tree(tmp_path / "out", {"mine": "text"})
    with pytest.raises(InputError, match="exists already"):
        tokenize([directory], output, tokenizer=tokenizer_file)
    assert digests(output).keys() == {"mine"}
    tokenize([directory], output, tokenizer=tokenizer_file, overwrite=True, held_out=0)
    assert load_info(output).splits["train"].documents == 1


@pytest.mark.parametrize("call", ["ArrayRecordWriter", "np.save"])
def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path, tokenizer_file, monkeypatch, call):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"upjax.data.shards.{call}", full)
    directory = tree(tmp_path / "in", {"a.txt": "a"})
    with pytest.raises(InputError, match="No space left on device"):
        tokenize([directory], tmp_path / "out", tokenizer=tokenizer_file)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_real_failed_write_leaves_nothing_under_the_final_name(corpus, tmp_path, tokenizer_file):
    # A limit on the size of files fails writes within ArrayRecord as a full disk does.
    script = f"""
import resource, signal
from upjax.data import tokenize
from upjax.errors import InputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    tokenize([{str(corpus)!r}], {str(tmp_path / "out")!r}, tokenizer={str(tokenizer_file)!r})
except InputError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"refused: cannot write {tmp_path / 'out'}")
    assert "File too large" in done.stdout
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_the_integers_of_a_record_are_little_endian(tmp_path, tokenizer_file):
    info = tokenize([tree(tmp_path / "in", {"a.txt": "a"})], tmp_path / "out", tokenizer=tokenizer_file, held_out=0)
    reader = ArrayRecordReader(str(tmp_path / "out" / info.splits["train"].shards[0].file))
    letter = tokenizers.Tokenizer.from_file(str(tokenizer_file)).token_to_id("a")
    assert reader.read([0])[0] == (1).to_bytes(8, "little") + letter.to_bytes(2, "little") + (1).to_bytes(2, "little")
    reader.close()
    assert np.load(tmp_path / "out" / "train-lengths.npy").tolist() == [2]
