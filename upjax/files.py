"""Outputs that appear under their final name only when they are whole."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from upjax.errors import InputError


@contextlib.contextmanager
def staged_directory(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `path` that is moved to `path` when the block ends well.

    When the block raises, the directory is removed and `path` is as it was. A stale one of a killed process is
    removed on the next try. Raises InputError when `path` exists and `overwrite` is False.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite:
        raise InputError(f"output {path} exists already; remove it, choose another, or pass --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        _sync(staging)
        if path.exists():
            replaced = path.with_name(f".{path.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
            staging.rename(path)
            shutil.rmtree(replaced)
        else:
            staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Writes `text` to `path`, which holds either its old content or all of the new one at any instant."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.unfinished")
    try:
        with staging.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def _sync(directory: Path) -> None:
    """Flushes every file below `directory` to the disk, so that the rename never outlives its content."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
