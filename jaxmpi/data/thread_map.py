"""A function over items by threads, its results in order, for work that waits for files or releases the GIL."""

import collections
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
AHEAD = 4  # results in memory, per thread


def in_order(
    work: Callable[[A], B], items: Iterable[A], threads: int, stall_timeout_s: float | None = None
) -> Generator[B]:
    """`map(work, items)` by threads, at most AHEAD results per thread ahead.

    Raises:
        TimeoutError: an item takes longer than `stall_timeout_s`; its thread is left alone, and does not keep the
            process from ending, as one of a pool of `concurrent.futures` would.
    """
    waiting: collections.deque[Future[B]] = collections.deque()
    jobs: queue.SimpleQueue[tuple[Future[B], A] | None] = queue.SimpleQueue()
    for _ in range(threads):
        threading.Thread(target=_serve, args=(work, jobs), name="jaxmpi-pack", daemon=True).start()
    try:
        for item in items:
            waiting.append(Future())
            jobs.put((waiting[-1], item))
            if len(waiting) >= AHEAD * threads:
                yield waiting.popleft().result(stall_timeout_s)
        while waiting:
            yield waiting.popleft().result(stall_timeout_s)
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            jobs.put(None)


def _serve(work: Callable[[A], B], jobs: "queue.SimpleQueue[tuple[Future[B], A] | None]") -> None:
    while (job := jobs.get()) is not None:
        future, item = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:
                future.set_exception(error)
        del job, future, item  # else an idle thread keeps its last record alive
