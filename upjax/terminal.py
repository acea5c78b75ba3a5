"""What commands print: results to stdout, as a table or as JSON; all else to stderr."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

errors = Console(stderr=True)


def show(results: Mapping[str, Any], *, as_json: bool, title: str = "") -> None:
    """Prints results to stdout: one JSON object, or a table of names and values."""
    if as_json:
        print(json.dumps(_strict(results), default=str))
        return
    table = Table(title=title or None, show_header=False, title_justify="left")
    for name, value in flat(results):
        table.add_row(name, readable(value))
    Console().print(table)


def readable(value: Any) -> str:
    """Returns a value as people read it: thousands apart, small floats in powers of ten."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return (
            f"{value:.4g}"
            if value == 0 or 1e-3 <= abs(value) < 1e4
            else f"{value:,.0f}"
            if value >= 1e4
            else f"{value:.2e}"
        )
    if isinstance(value, list | tuple):
        shown = ", ".join(readable(item) for item in value[:16])
        return f"{shown}, ... ({len(value)})" if len(value) > 16 else shown
    return str(value)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal's stderr that something long is going on."""
    if errors.is_terminal:
        with errors.status(what):
            yield
    else:
        errors.print(what, highlight=False)
        yield


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the stage that long work is in; stderr shows it, with the seconds so far."""
    began, last = time.perf_counter(), ""
    with errors.status("") if errors.is_terminal else contextlib.nullcontext() as status:

        def say(stage: str) -> None:
            nonlocal last
            seconds = f"{time.perf_counter() - began:.0f} s"
            if status is not None:
                status.update(f"{stage} ({seconds})")
            elif stage != last:
                errors.print(f"{stage} ({seconds})", highlight=False)
            last = stage

        yield say


def flat(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings by dotted name."""
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _strict(value: Any) -> Any:
    """Returns `value` with null for NaN and infinities, which JSON has not."""
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
