"""A tokenized dataset on disk: what its dataset.json says, and random access to the documents of a split."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
from array_record.python.array_record_data_source import ArrayRecordDataSource

from upjax.data.shards import Split, decode_num_bytes, decode_tokens, lengths_file
from upjax.errors import InputError, Problems

INFO_FILE = "dataset.json"
SplitName = Literal["train", "held_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What dataset.json holds. Token ids are below `vocab_size`, and the largest that occurs is `max_token_id`."""

    format: Literal[1] = 1
    tokenizer_sha256: str
    vocab_size: int
    end_of_text: int
    max_token_id: int
    dtype: Literal["uint16", "uint32"]
    seed: int
    held_out: float
    splits: dict[SplitName, Split]
    duplicates: int
    empty: int
    unreadable: tuple[str, ...]

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


_INFO = pydantic.TypeAdapter(DatasetInfo)


def info_json(info: DatasetInfo) -> str:
    """Returns the text of dataset.json."""
    return _INFO.dump_json(info, indent=2).decode() + "\n"


def load_info(path: Path | str) -> DatasetInfo:
    """Returns what the dataset at `path` says of itself; InputError lists all that is wrong with it or missing."""
    path = Path(path)
    problems = Problems(f"{path} is not a whole dataset of `upjax tokenize`")
    try:
        info = _INFO.validate_json((path / INFO_FILE).read_bytes())
    except OSError as error:
        raise InputError(f"no dataset at {path}: cannot read {path / INFO_FILE}: {error.strerror}") from error
    except pydantic.ValidationError as error:
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"])) or "the file"
            got = "" if detail["type"] == "missing" else f", got {str(detail['input'])[:80]!r}"
            problems.add(f"{INFO_FILE}: {key}: {detail['msg']}{got}")
        problems.raise_if_any()
    for name, split in info.splits.items():
        for shard in split.shards:
            size = (path / shard.file).stat().st_size if (path / shard.file).is_file() else None
            if size != shard.size:
                found = "is missing" if size is None else f"has {size} bytes"
                problems.add(f"{shard.file} {found}, {INFO_FILE} says {shard.size} bytes")
        if sum(shard.documents for shard in split.shards) != split.documents:
            problems.add(f"{INFO_FILE}: splits.{name}: the shards' documents do not sum to {split.documents}")
        if not (path / lengths_file(name)).is_file():
            problems.add(f"{lengths_file(name)} is missing")
    problems.raise_if_any()
    return info


def check_vocabulary(info: DatasetInfo, vocab_size: int) -> None:
    """Raises InputError when a token of the dataset has no row in an embedding of `vocab_size` rows."""
    if info.max_token_id >= vocab_size:
        raise InputError(
            f"the dataset holds token id {info.max_token_id}, the model has ids below its vocab_size {vocab_size}; "
            "tokenize with the model's own tokenizer"
        )


class Documents:
    """Random access to the documents of one split: item i is the token ids of document i, the end-of-text id last."""

    def __init__(self, path: Path | str, split: str):
        path = Path(path)
        self.info = load_info(path)
        if split not in self.info.splits:
            raise InputError(f"dataset {path} has no split {split!r}, it has {', '.join(self.info.splits)}")
        facts = self.info.splits[split]
        if not facts.documents:
            raise InputError(f"split {split!r} of dataset {path} holds no documents")
        self.lengths = _load_lengths(path / lengths_file(split), facts)
        # With the count given as a range, no shard is opened before it is read.
        self._records: Sequence[bytes] = ArrayRecordDataSource(
            [f"{path / shard.file}[0:{shard.documents}]" for shard in facts.shards]
        )
        # Sequences that follow each other share documents, a long one thousands of times.
        self._record = functools.lru_cache(maxsize=32)(self._records.__getitem__)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return decode_tokens(self._record(int(index)), self.info.dtype)

    def num_bytes(self, index: int) -> int:
        """Returns how many UTF-8 bytes the text of document `index` has."""
        return decode_num_bytes(self._record(int(index)))


def _load_lengths(path: Path, facts: Split) -> np.ndarray:
    """Returns the token count of each document, or raises InputError when the file does not fit dataset.json."""
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if lengths.shape != (facts.documents,) or lengths.dtype != np.int64 or lengths.sum() != facts.tokens:
        raise InputError(
            f"{path} has {lengths.dtype}{lengths.shape} with sum {lengths.sum()}, "
            f"{INFO_FILE} says int64{(facts.documents,)} with sum {facts.tokens}"
        )
    return lengths
