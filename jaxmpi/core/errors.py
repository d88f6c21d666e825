"""Errors with a message for the user, and checks that raise them."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
# Characters that move a terminal's cursor, change its colours or title, or turn the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text safe for a terminal: a stranger's file names hold any bytes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UsageError(ValueError):
    """A user's error: got, expected, way out; shown without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class TrainingError(RuntimeError):
    """A run that cannot go on; its full message replaces a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AgreedError(TrainingError):
    """An error that all ranks raise together; rank 0 prints it."""


class NotFinite(AgreedError):
    """A loss or gradients that are not finite: the run has diverged."""


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """`table[name]`, or a `UsageError` that lists what exists and suggests the nearest."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise UsageError(f"unknown {kind} {name!r}; {nearest(str(name), table)}")


# Words of other libraries, and the parts of an experiment, for fields of ours, which no spelling leads to.
ELSEWHERE = {
    "learning-rate": "optim.lr",
    "optim.learning-rate": "optim.lr",
    "batch-size": "local-batch",
    "epochs": "train-for",
    "steps": "train-for",
    "max-steps": "train-for",
    "optimizer": "optim.name",
    "output-dir": "run-dir",
    "rule": "rule.name",
    "optim": "optim.name",
    "strategy": "exchange.strategy",
    "exchange": "exchange.strategy",
    "schedule": "schedule.decay",
    "data": "data.source",
}


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """The tail of an error: the nearest known name, and all names."""
    return f"{hint(name, known)}there are: {', '.join(sorted(known))}"


def hint(name: str, known: Mapping[str, Any]) -> str:
    """The nearest known name as a question, whatever the case; empty if none is near."""
    by_lower = {other.lower(): other for other in known} | {
        dashes + other: dashes + field
        for other, field in ELSEWHERE.items()
        for dashes in ("", "--")
        if dashes + field in known
    }
    swapped = [other for other in by_lower if sorted(other) == sorted(name.lower())]  # two edits to difflib
    close = swapped or difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.4)
    return f"did you mean {by_lower[close[0]]!r}? " if close else ""


def check(holds: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `holds`."""
    if not holds:
        raise UsageError(message)
