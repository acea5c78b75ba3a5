"""The records of a tokenized dataset and the shards that hold them.

A record is one document: 8 bytes, an unsigned little-endian integer that counts the UTF-8 bytes of its text, then its
token ids, the end-of-text id last, as little-endian integers of the dataset's dtype ("uint16" or "uint32"). Shards are
ArrayRecord files with one record a group, so that any record is read without its neighbours.
"""

import array
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

HEADER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a split; `size` is its length on disk, by which a truncated copy is known."""

    file: str
    documents: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """What a split holds; `bytes` counts the UTF-8 bytes of its texts, `tokens` includes one end-of-text a document."""

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]


def encode_record(tokens: Sequence[int], num_bytes: int, dtype: str) -> bytes:
    """Returns the record of a document whose text has `num_bytes` UTF-8 bytes."""
    return num_bytes.to_bytes(HEADER_BYTES, "little") + np.asarray(tokens, _little_endian(dtype)).tobytes()


def decode_tokens(record: bytes, dtype: str) -> np.ndarray:
    """Returns the token ids of a record, a read-only view of it."""
    return np.frombuffer(record, _little_endian(dtype), offset=HEADER_BYTES)


def decode_num_bytes(record: bytes) -> int:
    """Returns how many UTF-8 bytes the text of a record has."""
    return int.from_bytes(record[:HEADER_BYTES], "little")


def lengths_file(split: str) -> str:
    """Returns the name of the file with the token count of each document of a split, in the order of the shards."""
    return f"{split}-lengths.npy"


class SplitWriter:
    """Writes one split, a shard after the other; a shard ends once its records fill `shard_size` bytes."""

    def __init__(self, directory: Path, split: str, *, dtype: str, shard_size: int):
        self._directory = directory
        self._split = split
        self._dtype = dtype
        self._shard_size = shard_size
        self._writer: ArrayRecordWriter | None = None
        self._documents_of_shards: list[int] = []
        self._shard_bytes = 0
        self._text_bytes = 0
        self._lengths = array.array("Q")

    def write(self, tokens: Sequence[int], num_bytes: int) -> None:
        """Appends one document."""
        record = encode_record(tokens, num_bytes, self._dtype)
        with _os_errors():
            if self._writer is None:
                path = self._unnumbered(len(self._documents_of_shards))
                self._writer = ArrayRecordWriter(str(path), "group_size:1")
                self._documents_of_shards.append(0)
                self._shard_bytes = 0
            self._writer.write(record)
        self._documents_of_shards[-1] += 1
        self._shard_bytes += len(record)
        self._text_bytes += num_bytes
        self._lengths.append(len(tokens))
        if self._shard_bytes >= self._shard_size:
            self._close_shard()

    def finish(self) -> Split:
        """Closes the split, puts the number of shards into their names, and returns what was written."""
        self._close_shard()
        shards = []
        for index, documents in enumerate(self._documents_of_shards):
            file = f"{self._split}-{index:05d}-of-{len(self._documents_of_shards):05d}.array_record"
            path = self._unnumbered(index).rename(self._directory / file)
            shards.append(Shard(file=file, documents=documents, size=path.stat().st_size))
        lengths = np.asarray(self._lengths, np.int64)
        np.save(self._directory / lengths_file(self._split), lengths, allow_pickle=False)
        return Split(documents=len(lengths), tokens=int(lengths.sum()), bytes=self._text_bytes, shards=tuple(shards))

    def _close_shard(self) -> None:
        if self._writer is not None:
            with _os_errors():
                self._writer.close()
            self._writer = None

    def _unnumbered(self, index: int) -> Path:
        return self._directory / f"{self._split}-{index:05d}.array_record"


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turns the RuntimeError with which ArrayRecord reports a failed write, a full disk say, into an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _little_endian(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")
