"""Reads by threads: files that stay open for reads at an offset, values kept while used, a function over items.

Files are read, not mapped: one that shrinks under the run would kill it by SIGBUS, and no error would name the file.
"""

import collections
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
MOST_OPEN = 64  # files at once, of a source: several loaders, each in a file or between two


class LastUsed(Generic[T]):
    """Values by number, loaded by one thread when first asked for; the last `limit` are kept. A pickle begins empty."""

    def __init__(self, load: Callable[[int], T], limit: int) -> None:
        self._load, self._limit = load, limit
        self._values: collections.OrderedDict[int, Future[T]] = collections.OrderedDict()  # last used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LastUsed, (self._load, self._limit)

    def __getitem__(self, number: int) -> T:
        with self._lock:
            is_new = number not in self._values
            value = self._values.setdefault(number, Future())
            self._values.move_to_end(number)
            if len(self._values) > self._limit:
                self._values.popitem(last=False)
        if is_new:
            try:
                value.set_result(self._load(number))
            except BaseException as error:
                with self._lock:
                    self._values.pop(number, None)
                value.set_exception(error)
        return value.result()


class Descriptor:
    """An open file for several threads, closed with its last reference."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class OpenFiles:
    """Files by number, opened when first read; the last MOST_OPEN stay open."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._open = LastUsed(partial(_open, self.paths), MOST_OPEN)

    def read(self, file: int, into: np.ndarray, offset: int) -> np.ndarray:
        """Fill C-ordered `into` from byte `offset` and return it; raise `OSError`, also if the file is too short."""
        descriptor, remaining = self._open[file], into.reshape(-1).view(np.uint8).data
        while remaining and (got := os.preadv(descriptor.number, [remaining], offset + into.nbytes - len(remaining))):
            remaining = remaining[got:]
        if remaining:
            raise OSError(f"{self.paths[file]} ends {len(remaining)} bytes before byte {offset + into.nbytes}")
        return into


def _open(paths: Sequence[str], file: int) -> Descriptor:
    descriptor = Descriptor(os.open(paths[file], os.O_RDONLY | os.O_CLOEXEC))
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead
    return descriptor


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
