"""JSON values as flat tables, and their differences."""

import json
from typing import Any


def differences(rank: int, got: str, first: int, expected: str) -> list[str]:
    """JSON differences, as `rank 3: path: got X, expected Y (rank 0)`."""
    ours, theirs = flatten_json(json.loads(expected)), flatten_json(json.loads(got))
    lines = [
        f"  rank {rank}: {path}: got {theirs.get(path, 'nothing')}, expected {ours.get(path, 'nothing')} (rank {first})"
        for path in [*ours, *(p for p in theirs if p not in ours)]
        if ours.get(path) != theirs.get(path)
    ]
    return lines or [f"  rank {rank}: order: got {', '.join(theirs)}; expected {', '.join(ours)} (rank {first})"]


def flatten_json(value: Any, path: str = "") -> dict[str, Any]:
    """Paths such as `optim.lr` to plain values; lists are values."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, part in value.items() for k, v in flatten_json(part, f"{path}.{key}".strip(".")).items()}
