"""Fingerprints of calls and values that must be equal on all ranks."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmpi.core.errors import UsageError
from jaxmpi.core.frames import PLACE_BYTES, calling_place


class Fingerprint(NamedTuple):
    """A JSON value and its name, with the SHA-256 digest of both."""

    what: str
    value: Any
    digest: bytes
    place: bytes = bytes(PLACE_BYTES)  # place of the call in the user's code; it may differ between ranks, but not swap


def different_calls(calls: Mapping[int, str]) -> str:
    """Describe, by rank, the calls that differ from the lowest rank's."""
    first = min(calls)
    odd = [rank for rank, call in sorted(calls.items()) if call != calls[first]]
    others = ", ".join(f"rank {rank} to {calls[rank]!r}" for rank in odd[:8])
    order = "all must make the same calls in the same order"
    return f"ranks came to different calls: rank {first} to {calls[first]!r}, {others}; {order}"


def with_call_site(mine: Fingerprint) -> Fingerprint:
    """A fingerprint with the place in the user's code that runs."""
    return mine._replace(place=calling_place())


def fingerprint(what: str, value: Any) -> Fingerprint:
    """A value with its digest, for one comparison or many."""
    try:
        text = json.dumps(value)  # order counts: leaves travel in it
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: ranks cannot compare it: {error}; give numbers, texts, lists, dicts") from error
    return Fingerprint(what, value, hashlib.sha256(f"{what}\0{text}".encode()).digest())
