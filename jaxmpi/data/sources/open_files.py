"""Files that stay open for reads at an offset, and spans of them that are kept while used.

Files are read, not mapped: one that shrinks under the run would kill it by SIGBUS, and no error would name the file.
"""

import collections
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
SPAN_BYTES = 64 << 20  # bytes of a file that are read in one go at most, or one example if it is longer
KEPT_BYTES = 4 * SPAN_BYTES  # bytes of spans kept by a loader process or all threads of a worker; two spans at least
MOST_OPEN = 64  # files at once, of a source: several loaders, each in a file or between two


class LastUsed(Generic[T]):
    """Values by number, loaded by one thread when first asked for; the last `most` are kept. A pickle begins empty."""

    def __init__(self, load: Callable[[int], T], most: int) -> None:
        self._load, self._most = load, most
        self._kept: collections.OrderedDict[int, Future[T]] = collections.OrderedDict()  # last used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LastUsed, (self._load, self._most)

    def __getitem__(self, number: int) -> T:
        with self._lock:
            is_new = number not in self._kept
            value = self._kept.setdefault(number, Future())
            self._kept.move_to_end(number)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        if is_new:
            try:
                value.set_result(self._load(number))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(number, None)
                value.set_exception(error)
        return value.result()


class Descriptor:
    """An open file for several threads, closed with its last reference."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


def _open(paths: Sequence[str], file: int) -> Descriptor:
    descriptor = Descriptor(os.open(paths[file], os.O_RDONLY | os.O_CLOEXEC))
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead
    return descriptor


class OpenFiles:
    """Files by number, opened when first read; the last MOST_OPEN stay open."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._open = LastUsed(partial(_open, self.paths), MOST_OPEN)

    def read(self, file: int, into: np.ndarray, offset: int) -> np.ndarray:
        """Fill C-ordered `into` from byte `offset` and return it; raise `OSError`, also if the file is too short."""
        descriptor, left = self._open[file], into.reshape(-1).view(np.uint8).data
        while left and (got := os.preadv(descriptor.number, [left], offset + into.nbytes - len(left))):
            left = left[got:]
        if left:
            raise OSError(f"{self.paths[file]} ends {len(left)} bytes before byte {offset + into.nbytes}")
        return into


def open_spans(opened: OpenFiles, places: np.ndarray) -> LastUsed[np.ndarray]:
    """Spans of files as u8[length], read-only, each read in one go.

    Args:
        opened: the files.
        places: i64[spans, 3], of each its file, its first byte and its length.
    """
    longest = max(int(places[:, 2].max(initial=1)), 1)
    return LastUsed(partial(_read_span, opened, places), max(KEPT_BYTES // longest, 2))


def _read_span(opened: OpenFiles, places: np.ndarray, span: int) -> np.ndarray:
    file, offset, length = places[span].tolist()
    content = opened.read(file, np.empty(length, np.uint8), offset)
    content.flags.writeable = False
    return content
