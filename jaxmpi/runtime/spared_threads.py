"""Threads of other libraries, such as trackers, whose errors end no run.

`failures` ends the job for an uncaught error of any other thread. A thread is spared by the one that starts it. So a
thread which the trainer starts meanwhile is not spared.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[BaseException], None]
_reports: weakref.WeakKeyDictionary[threading.Thread, Report] = weakref.WeakKeyDictionary()
_scope = threading.local()
_start = threading.Thread.start


@contextmanager
def spare_threads(report: Report) -> Iterator[None]:
    """Spare threads started by this thread in the block, and their children.

    Args:
        report: is called by a spared thread with its uncaught error.
    """
    threading.Thread.start = start
    before, _scope.report = getattr(_scope, "report", None), report
    try:
        yield
    finally:
        _scope.report = before


def start(self: threading.Thread) -> None:
    """Start a thread as `Thread.start` does, and note if it is spared.

    Python does not keep who has started a thread.
    """
    report = getattr(_scope, "report", None) or error_handler_of(threading.current_thread())
    if report:
        _reports[self] = report
    _start(self)


def error_handler_of(thread: threading.Thread | None) -> Report | None:
    """The function to call with a spared thread's error; else None."""
    return None if thread is None else _reports.get(thread)
