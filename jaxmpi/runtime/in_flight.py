"""Code that may not communicate, such as callbacks beside a step.

Messages between ranks have no names: one that a callback sends while a step still exchanges could meet that exchange
on another rank. So the loop marks the callbacks that it calls, and what communicates looks here first.
"""

import contextlib
import threading
from collections.abc import Iterator

from jaxmpi.core.errors import check

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
