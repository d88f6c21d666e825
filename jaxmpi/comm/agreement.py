"""Fingerprints of calls and values that must be equal on all ranks, and who may send messages at all."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxmpi.core.errors import AgreedError, TrainingError, UsageError

T = TypeVar("T")


class HostProcesses(Protocol):
    """The ranks of this host, which share memory, programs and bucket order."""

    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    def host_barrier(self) -> None: ...
    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """Give all ranks of this host the value that its first makes."""
        ...


def on_all_ranks(ranks: Any, act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return all ranks' results; if it raises on one rank, all ranks raise.

    Without this agreement the others would send their next message to a rank that has left.

    Args:
        act: returns a JSON value and sends no messages.

    Raises:
        UsageError: the first failing rank's.
        AgreedError: in place of any other exception of the first failing rank.
    """
    result, failure, error = None, None, None
    try:
        result = act()
    except Exception as caught:
        error, failure = caught, describe_failure(caught)
    rows = ranks.allgather_object([failure, result])
    for rank, (failed, _) in enumerate(rows):
        if failed:
            if failed[0] and ranks.size == 1:
                raise UsageError(failed[1]) from error
            raise failure_of_rank(ranks.in_job([rank])[0], *failed) from error
    return [row for _, row in rows]


def describe_failure(error: Exception) -> tuple[bool, str]:
    """An error for other ranks: whether it is the user's, and its sentence."""
    is_sentence = isinstance(error, (UsageError, TrainingError))
    return isinstance(error, UsageError), str(error) if is_sentence else f"{error!r:.400}"


def failure_of_rank(rank: int, is_users: bool, sentence: str) -> UsageError | AgreedError:
    """The error that the other ranks raise for one of this rank."""
    return (UsageError if is_users else AgreedError)(f"rank {rank}: {sentence}")


DIGEST_BYTES = hashlib.sha256().digest_size


class Fingerprint(NamedTuple):
    """A JSON value and its name, with the SHA-256 digest of both."""

    what: str
    value: Any
    digest: bytes


def fingerprint(name: str, value: Any) -> Fingerprint:
    """A value with its digest, for one comparison or many."""
    try:
        text = json.dumps(value)  # the order of keys counts: leaves are sent in it
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: ranks cannot compare it: {error}; give numbers, texts, lists, dicts") from error
    return Fingerprint(name, value, hashlib.sha256(f"{name}\0{text}".encode()).digest())


_last_numbers: dict[str, int] = {}


def fresh_number(kind: str, allgather: Callable[[Any], list[Any]]) -> int:
    """A number from 0 on, the same on all ranks, that none of them has used for this kind of object."""
    _last_numbers[kind] = 1 + max(allgather(_last_numbers.get(kind, -1)))
    return _last_numbers[kind]


def different_calls(calls: Mapping[int, str]) -> str:
    """Describe, by rank, the calls that differ from the lowest rank's."""
    first = min(calls)
    differing = [rank for rank, call in sorted(calls.items()) if call != calls[first]]
    others = ", ".join(f"rank {rank} to {calls[rank]!r}" for rank in differing[:8])
    order = "all must make the same calls in the same order"
    return f"ranks came to different calls: rank {first} to {calls[first]!r}, {others}; {order}"


@contextlib.contextmanager
def refuse_together(ranks: Any) -> Iterator[None]:
    """Have the other ranks of a call raise what this rank raises in the block before it has compared the call.

    They compare it next. Without an answer from this rank they would wait until the time limit.
    """
    before = ranks.message_count
    try:
        yield
    except Exception as error:
        if ranks.message_count == before:
            with contextlib.suppress(Exception):  # where messages are refused as well, this rank's own error counts
                ranks.refuse(error)
        raise


# ---------------------------------------------------------------- code that may not communicate

_thread = threading.local()  # by thread, since one that writes a checkpoint has messages of its own


@contextlib.contextmanager
def without_messages(caller: str, why: str, instead: str) -> Iterator[None]:
    """Refuse messages of this thread in the block, such as a callback's.

    Messages between ranks have no names: one that a callback sends while a step still exchanges could meet that
    exchange on another rank.

    Args:
        caller: for the error, such as `callback Confusion: before_step`.
        why: there may be none.
        instead: the way out.
    """
    before = getattr(_thread, "refusal", None)
    _thread.refusal = caller, why, instead
    try:
        yield
    finally:
        _thread.refusal = before


def check_may_send(operation: str) -> None:
    """Raise `UsageError` if this thread may not communicate now, as `operation` is about to."""
    if refusal := getattr(_thread, "refusal", None):
        caller, why, instead = refusal
        raise UsageError(f"{caller}: got {operation} {why}; expected no messages: {instead}")
