"""Text files to a tokenized dataset: shards of documents, a train and a held-out split, and dataset.json."""

import collections
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from upjax.data.dataset import INFO_FILE, DatasetInfo, info_json
from upjax.data.shards import SplitWriter
from upjax.data.sources import Document, find_files, read_documents
from upjax.data.tokenizer import load_tokenizer
from upjax.errors import InputError, Problems
from upjax.files import staged_directory, write_text

BATCH_BYTES = 4 << 20
"""Text that is encoded at once: enough to keep every core busy, little enough to bound the memory."""


def tokenize(
    inputs: Sequence[Path | str],
    output: Path | str,
    *,
    tokenizer: Path | str,
    held_out: float = 0.05,
    seed: int = 0,
    suffixes: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    end_of_text: str | int | None = None,
    strict: bool = False,
    shard_size: int = 256 << 20,
    overwrite: bool = False,
    progress: bool = True,
) -> DatasetInfo:
    """Writes a dataset of all documents below `inputs` to the directory `output` and returns what is in it.

    A file is a document, and so is the "text" of each line of a .jsonl file. An end-of-text token ends each. About the
    share `held_out` of the files goes to the held-out split, drawn by a hash of `seed` and the file's path below its
    input, so that more files do not move the others. Empty documents and exact copies of earlier ones are left out and
    counted. What is not UTF-8 text is listed in the info, or, with `strict`, raises InputError with the list.

    Memory holds one batch of documents, and a digest and a length of each document before it. How many cores encode is
    a setting of the tokenizers library (RAYON_NUM_THREADS). A bar goes to stderr where that is a terminal.
    """
    inputs, output = [Path(path) for path in inputs], Path(output)
    _check(inputs, output, held_out=held_out, seed=seed, suffixes=suffixes, shard_size=shard_size)
    text_tokenizer = load_tokenizer(tokenizer, end_of_text)
    dtype = "uint16" if text_tokenizer.vocab_size <= 1 << 16 else "uint32"
    files = lambda: find_files(inputs, suffixes, exclude)
    unreadable: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    max_token_id = text_tokenizer.end_of_text

    with _write_errors(output), staged_directory(output, overwrite=overwrite) as staging:
        writers = {
            name: SplitWriter(staging, name, dtype=dtype, shard_size=shard_size) for name in ("train", "held_out")
        }
        with _bar(sum(file.size for file in files()), shown=progress) as advance:
            documents = (document for file in files() for document in read_documents(file, unreadable.append))
            for batch in _batches(_distinct(documents, counts)):
                for document, tokens in zip(batch, text_tokenizer.encode([d.text for d in batch]), strict=True):
                    tokens.append(text_tokenizer.end_of_text)
                    max_token_id = max(max_token_id, max(tokens))
                    writers[_split(document.key, held_out, seed)].write(tokens, document.num_bytes)
                    advance(document.num_bytes)
        if strict and unreadable:
            raise InputError("some of the input is not UTF-8 text", unreadable)
        info = DatasetInfo(
            tokenizer_sha256=text_tokenizer.sha256,
            vocab_size=text_tokenizer.vocab_size,
            end_of_text=text_tokenizer.end_of_text,
            max_token_id=max_token_id,
            dtype=dtype,
            seed=seed,
            held_out=held_out,
            splits={name: writer.finish() for name, writer in writers.items()},
            duplicates=counts["duplicates"],
            empty=counts["empty"],
            unreadable=tuple(unreadable),
        )
        if not any(split.documents for split in info.splits.values()):
            raise InputError(f"no documents in {', '.join(map(str, inputs))}", [*unreadable, f"{info.empty} are empty"])
        write_text(staging / INFO_FILE, info_json(info))
    return info


def _check(inputs, output: Path, *, held_out, seed, suffixes, shard_size) -> None:
    """Raises InputError with every argument of `tokenize` that cannot be."""
    problems = Problems("cannot tokenize")
    if not inputs:
        problems.add("no inputs")
    for path in inputs:
        if not path.exists():
            problems.add(f"input {path} does not exist")
        elif path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            problems.add(f"output {output} lies inside input {path}")
    if not 0 <= held_out < 1:
        problems.add(f"held_out is a share, 0 <= held_out < 1, got {held_out}")
    if seed < 0:
        problems.add(f"seed must not be negative, got {seed}")
    if shard_size < 1:
        problems.add(f"shard_size is a number of bytes, got {shard_size}")
    for suffix in suffixes or ():
        if not suffix.startswith("."):
            problems.add(f"suffix {suffix!r} does not start with a dot")
    problems.raise_if_any()


def _distinct(documents: Iterable[Document], counts: collections.Counter[str]) -> Iterator[Document]:
    """Yields each text once and counts what is left out."""
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
        if not document.text:
            counts["empty"] += 1
        elif digest in seen:
            counts["duplicates"] += 1
        else:
            seen.add(digest)
            yield document


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields the documents in lists of about BATCH_BYTES of text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _split(key: str, held_out: float, seed: int) -> str:
    """Returns the split of the document with `key`, which depends on nothing but the arguments."""
    draw = int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest(), "big")
    return "held_out" if draw < held_out * 2**64 else "train"


@contextlib.contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that moves a progress bar on by a number of bytes."""
    console = Console(stderr=True)
    columns = TextColumn("tokenize"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("tokenize", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@contextlib.contextmanager
def _write_errors(output: Path) -> Iterator[None]:
    """Turns a failed write, of a full disk say, into InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {output}: {error}") from error
