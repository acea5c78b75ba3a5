"""Real text, a real tokenizer trained on it, and datasets made of both or of numbered tokens."""

import itertools
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from upjax.data import DatasetInfo, tokenize
from upjax.data.dataset import INFO_FILE, info_json
from upjax.data.shards import SplitWriter

END_OF_TEXT = "<|endoftext|>"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Some packages of the standard library, about a megabyte in about a hundred files."""
    directory = tmp_path_factory.mktemp("text") / "corpus"
    for package in ("asyncio", "email", "json", "logging", "importlib"):
        source = Path(sysconfig.get_paths()["stdlib"]) / package
        shutil.copytree(source, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture(scope="session")
def tokenizer_file(corpus, tmp_path_factory) -> Path:
    """A byte-level BPE with an end-of-text token, saved as a Hugging Face tokenizer directory."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|pad|>", END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((corpus / "json").glob("*.py"))], trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    (file.parent / "tokenizer_config.json").write_text(f'{{"eos_token": "{END_OF_TEXT}"}}')
    return file


@pytest.fixture(scope="session")
def dataset(corpus, tokenizer_file, tmp_path_factory) -> Path:
    """The corpus tokenized, in several shards."""
    output = tmp_path_factory.mktemp("dataset") / "corpus"
    tokenize([corpus], output, tokenizer=tokenizer_file, held_out=0.2, shard_size=100_000)
    return output


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., list[list[int]]]:
    """A function that writes a dataset of documents of these lengths, a few a shard, and returns their tokens.

    No token occurs twice, so that a token tells where it stood. Document number n counts as 100 + n bytes of text.
    """

    def write(path: Path, lengths: Sequence[int], *, split: str = "train", end_of_text: int = 0) -> list[list[int]]:
        tokens = itertools.count(1)
        documents = [list(itertools.islice(tokens, length)) for length in lengths]
        path.mkdir()
        writers = {name: SplitWriter(path, name, dtype="uint32", shard_size=200) for name in ("train", "held_out")}
        for number, document in enumerate(documents):
            writers[split].write(document, num_bytes=100 + number)
        info = DatasetInfo(
            tokenizer_sha256="0" * 64,
            vocab_size=sum(lengths) + 1,
            end_of_text=end_of_text,
            max_token_id=sum(lengths),
            dtype="uint32",
            seed=0,
            held_out=0.0,
            splits={name: writer.finish() for name, writer in writers.items()},
            duplicates=0,
            empty=0,
            unreadable=(),
        )
        (path / INFO_FILE).write_text(info_json(info))
        return documents

    return write
