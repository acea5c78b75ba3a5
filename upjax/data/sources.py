"""Where text comes from: files, directories of files, and .jsonl files with a document a line."""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from upjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file to read; `key` is its path below the input it was found in, with `/` between the parts."""

    path: Path
    key: str

    @property
    def size(self) -> int:
        """The length of the file, 0 of what is no file."""
        return self.path.stat().st_size if os.path.isfile(self.path) else 0


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and the key by which its split is drawn: that of its file, with the line number in a .jsonl file."""

    key: str
    text: str

    @property
    def num_bytes(self) -> int:
        """The length of the text in UTF-8."""
        return len(self.text.encode())


def find_files(inputs: Sequence[Path], suffixes: Sequence[str] | None, exclude: Sequence[str]) -> Iterator[TextFile]:
    """Yields the files of `inputs` in the order of their names.

    A file that is named itself is taken as it is. Below a directory `suffixes` (None: all) and `exclude` choose; a glob
    of `exclude` is held against "/" + key, and one that matches a directory, written with a closing slash, leaves out
    all that is below it. Links to directories are not followed.
    """

    def excluded(key: str) -> bool:
        return any(fnmatch.fnmatchcase(f"/{key}", pattern) for pattern in exclude)

    for root in inputs:
        if not root.is_dir():
            yield TextFile(root, root.name)
            continue
        for directory, below, names in os.walk(root, onerror=_refuse):
            place = Path(directory).relative_to(root)
            below[:] = sorted(name for name in below if not excluded(f"{(place / name).as_posix()}/"))
            for name in sorted(names):
                key = (place / name).as_posix()
                if not excluded(key) and (suffixes is None or name.endswith(tuple(suffixes))):
                    yield TextFile(root / key, key)


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot list {error.filename}: {error.strerror}") from error


def read_documents(file: TextFile, report: Callable[[str], None]) -> Iterator[Document]:
    """Yields the documents of `file`; what cannot be read as UTF-8 text is passed over and told to `report`."""
    try:
        if not os.path.isfile(file.path):
            report(f"{file.path}: not a file that can be read")
        elif file.path.suffix == ".jsonl":
            yield from _read_lines(file, report)
        else:
            # Bytes, so that line ends stay as they are and the tokens stand for the file exactly.
            yield Document(file.key, file.path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        report(f"{file.path}: {error}")


def _read_lines(file: TextFile, report: Callable[[str], None]) -> Iterator[Document]:
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # JSON can spell lone surrogates, which are no text.
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                report(f'{file.path}:{number}: not a JSON object with a string "text": {error}')
            else:
                yield Document(f"{file.key}:{number}", text)
