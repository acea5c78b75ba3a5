"""What a user's mistake looks like: every problem at once, each with its place and both values."""

from collections.abc import Iterable


class InputError(ValueError):
    """A mistake in what the user gave: files, configs or arguments. Commands print it and exit with code 2.

    `problems` holds one line a problem; all that could be found are listed together.
    """

    def __init__(self, summary: str, problems: Iterable[str] = ()):
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n  - ".join((summary, *self.problems)))


class Problems:
    """Collects problems while checking, so that one run names them all."""

    def __init__(self, summary: str):
        self.summary = summary
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def raise_if_any(self) -> None:
        """Raises InputError with every problem found, or does nothing when there is none."""
        if self.found:
            raise InputError(self.summary, self.found)
