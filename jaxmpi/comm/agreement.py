"""Fingerprints of calls and values that must be equal on all ranks."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxmpi.core.errors import AgreedError, TrainingError, UsageError, check

T = TypeVar("T")


class Ranks(Protocol):
    """What `on_all_ranks` needs of a control plane."""

    size: int

    def allgather_object(self, value: Any) -> list[Any]: ...
    def in_job(self, ranks: Any) -> list[int]: ...


def on_all_ranks(ranks: Ranks, act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return all ranks' results; if it raises on one rank, all ranks raise.

    Without this agreement the others would send their next message to a rank that has left.

    Args:
        act: returns a JSON value and sends no messages.

    Raises:
        UsageError: the first failing rank's.
        AgreedError: in place of any other exception of the first failing rank.
    """
    made, failure, error = None, None, None
    try:
        made = act()
    except Exception as caught:
        is_said = isinstance(caught, (UsageError, TrainingError))
        error, failure = caught, [isinstance(caught, UsageError), f"{caught}" if is_said else f"{caught!r:.400}"]
    every = ranks.allgather_object([failure, made])
    for rank, (failed, _) in enumerate(every):
        if failed:
            if failed[0] and ranks.size == 1:
                raise UsageError(failed[1]) from error
            kind = UsageError if failed[0] else AgreedError
            raise kind(f"rank {ranks.in_job([rank])[0]}: {failed[1]}") from error
    return [each for _, each in every]


class Fingerprint(NamedTuple):
    """A JSON value and its name, with the SHA-256 digest of both."""

    what: str
    value: Any
    digest: bytes


def different_calls(calls: Mapping[int, str]) -> str:
    """Describe, by rank, the calls that differ from the lowest rank's."""
    first = min(calls)
    odd = [rank for rank, call in sorted(calls.items()) if call != calls[first]]
    others = ", ".join(f"rank {rank} to {calls[rank]!r}" for rank in odd[:8])
    order = "all must make the same calls in the same order"
    return f"ranks came to different calls: rank {first} to {calls[first]!r}, {others}; {order}"


def fingerprint(what: str, value: Any) -> Fingerprint:
    """A value with its digest, for one comparison or many."""
    try:
        text = json.dumps(value)  # order counts: leaves travel in it
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: ranks cannot compare it: {error}; give numbers, texts, lists, dicts") from error
    return Fingerprint(what, value, hashlib.sha256(f"{what}\0{text}".encode()).digest())


@contextmanager
def refuse_together(compare: Callable[[Fingerprint], None]) -> Iterator[None]:
    """Have the other ranks of a call raise as well if this rank refuses what it was given.

    They compare the call next. Without an answer from this rank they would wait until the time limit.
    """
    try:
        yield
    except UsageError as error:
        with suppress(UsageError):  # the others raise it: ranks differ
            compare(fingerprint(str(error), None))
        raise


_here = threading.local()  # a thread that writes a checkpoint has messages of its own


@contextlib.contextmanager
def without_messages(who: str, why: str, instead: str) -> Iterator[None]:
    """Refuse messages of this thread while this lasts.

    Args:
        who: for the error, such as `callback Confusion: before_step`.
        why: there may be none.
        instead: the way out.
    """
    before = getattr(_here, "refusal", None)
    _here.refusal = who, why, instead
    try:
        yield
    finally:
        _here.refusal = before


def check_may_send(what: str) -> None:
    """Raise `UsageError` if this thread may not communicate now.

    Args:
        what: is about to, for the error.
    """
    who, why, instead = getattr(_here, "refusal", None) or ("", "", "")
    check(not who, f"{who}: got {what} {why}; expected no messages: {instead}")


class HostProcesses(Protocol):
    """The ranks of this host, which share memory, programs and bucket order."""

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        ...

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        ...

    def host_barrier(self) -> None:
        """Wait for all ranks of this host."""
        ...

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """Give all ranks of this host the value that its first makes."""
        ...
