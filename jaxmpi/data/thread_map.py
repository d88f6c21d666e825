"""A function over items by threads, its results in order.

For work that waits for files or releases the interpreter lock, as decoders do. A thread pool of `concurrent.futures`
would take all items at once. It would also join its threads when the process ends. So a thread that hangs in a read of
a lost file system would keep the process alive.
"""

import collections
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
AHEAD = 4  # examples in memory, per thread


def in_order(
    work: Callable[[A], B], items: Iterable[A], threads: int, stall_timeout_s: float | None = None
) -> Generator[B]:
    """`map(work, items)` by threads, at most AHEAD results per thread ahead.

    Raises:
        TimeoutError: an item takes longer than `stall_timeout_s`; its thread is left alone, and does not keep the
            process from ending.
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
