"""JSON values of any origin: parsed within limits, as flat tables, their differences, and trees of flat tables."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import read_plain

MALFORMED = (ValueError, RecursionError, MemoryError)  # what `json.loads` raises for text of any origin
MOST_LEVELS = 64  # of lists and objects within each other: code that walks a value recurses once a level


def parse_json(text: bytes | str, name: str | Path) -> Any:
    """Parse a text that a stranger may have written.

    Args:
        name: of the text, for the error.

    Raises:
        UsageError: it is no JSON, too large for memory, or nested more deeply than MOST_LEVELS.
    """
    try:
        value = json.loads(text)
    except MALFORMED as error:
        raise UsageError(f"{name}: damaged, it is no JSON ({type(error).__name__}: {error})") from error
    check(depth(value) <= MOST_LEVELS, f"{name}: damaged, got JSON nested more than {MOST_LEVELS} levels deep")
    return value


def depth(value: Any) -> int:
    """How many lists and objects of a JSON value are within each other."""
    levels, level = 0, [value]
    while parts := [part for part in level if isinstance(part, (dict, list, tuple))]:
        levels += 1
        level = [node for part in parts for node in (part.values() if isinstance(part, dict) else part)]
    return levels


def read_json(path: Path, most_bytes: int, expected: str) -> Any:
    """Parse a plain file as `parse_json` does.

    Raises:
        UsageError: as `read_plain` and `parse_json`.
    """
    return parse_json(read_plain(path, most_bytes, expected), path)


def nest(leaves: Mapping[str, Any], split: Callable[[str], list[str]], source: Any = "leaves") -> dict[str, Any]:
    """The nested dicts that have these leaves at the paths into which `split` cuts their names.

    Raises:
        UsageError: two names are one path, or one is a leaf and a node: a leaf would be lost.
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = split(name)
        check(len(parents) < MOST_LEVELS, f"{source}: {name:.80}: got more than {MOST_LEVELS} levels of names")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            check(isinstance(place, dict), f"{source}: {name}: both a leaf and a node of the tree")
        check(last not in place, f"{source}: {name}: both a leaf and a node of the tree, or twice in it")
        place[last] = leaf
    return tree


def differences(rank: int, got: str, first: int, expected: str) -> list[str]:
    """JSON differences, as `rank 3: path: got X, expected Y (rank 0)`."""
    wants, gets = flatten_json(json.loads(expected)), flatten_json(json.loads(got))
    lines = [
        f"  rank {rank}: {path}: got {gets.get(path, 'nothing')}, expected {wants.get(path, 'nothing')} (rank {first})"
        for path in [*wants, *(p for p in gets if p not in wants)]
        if wants.get(path) != gets.get(path)
    ]
    return lines or [f"  rank {rank}: order: got {', '.join(gets)}; expected {', '.join(wants)} (rank {first})"]


def flatten_json(value: Any, path: str = "") -> dict[str, Any]:
    """Paths such as `optim.lr` to plain values; lists are values."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, part in value.items() for k, v in flatten_json(part, f"{path}.{key}".strip(".")).items()}
