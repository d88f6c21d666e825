"""Fingerprints of calls and values that must be equal on all ranks before they communicate."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmpi.core.errors import UsageError


class Fingerprint(NamedTuple):
    """A JSON value that must be the same on all ranks, under a name, with the 32 bytes that stand for both."""

    what: str
    value: Any
    digest: bytes


def different_calls(calls: Mapping[int, str]) -> str:
    """Name the calls, by rank, to which ranks have come so far; some differ from the first of these ranks'."""
    first = min(calls)
    odd = [rank for rank, call in sorted(calls.items()) if call != calls[first]]
    others = ", ".join(f"rank {rank} to {calls[rank]!r}" for rank in odd[:8])
    order = "all must make the same calls in the same order"
    return f"ranks came to different calls: rank {first} to {calls[first]!r}, {others}; {order}"


def fingerprint(what: str, value: Any) -> Fingerprint:
    """A value with its digest, to be compared once or at every step."""
    try:
        text = json.dumps(value)  # order counts: leaves travel in it
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: ranks cannot compare it: {error}; give numbers, texts, lists, dicts") from error
    return Fingerprint(what, value, hashlib.sha256(f"{what}\0{text}".encode()).digest())
