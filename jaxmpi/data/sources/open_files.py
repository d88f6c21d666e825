"""Files that stay open for reads at an offset.

So no file is copied into memory, or opened twice in a row. Files are read, not mapped: one that shrinks under the run
would kill it by SIGBUS, and no error would name the file.
"""

import collections
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

SPAN_BYTES = 64 << 20  # bytes of a file that are read in one go at most, or one example if it is longer
KEPT_BYTES = 4 * SPAN_BYTES  # bytes of spans kept by a loader process or all threads of a worker; two spans at least
MOST_OPEN = 64  # files at once, of a source: several loaders, each in a file or between two


class OpenFiles:
    """Files by number, opened when first read; the last MOST_OPEN stay open."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._open: collections.OrderedDict[int, _Descriptor] = collections.OrderedDict()  # last used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.paths,)

    def read(self, file: int, into: np.ndarray, offset: int) -> int:
        """Fill C-ordered `into` from byte `offset`; return the number of missing bytes, or raise `OSError`."""
        with self._lock:
            if file not in self._open:
                self._open[file] = _Descriptor(self.paths[file])
                if len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)  # it is closed once no other thread reads it
            self._open.move_to_end(file)
            descriptor = self._open[file]
        return descriptor.read(into, offset)


class Spans:
    """Spans of files, each read in one go and kept while used.

    Args:
        opened: the files.
        places: i64[spans, 3], of each its file, its first byte and its length.
    """

    def __init__(self, opened: OpenFiles, places: np.ndarray) -> None:
        self.opened, self.places = opened, places
        self.most = max(KEPT_BYTES // max(int(places[:, 2].max(initial=1)), 1), 2)
        self._kept: collections.OrderedDict[int, Future[np.ndarray]] = collections.OrderedDict()  # last used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Spans, (self.opened, self.places)

    def read(self, span: int) -> np.ndarray:
        """u8[length], shared and read-only; read once if several threads want it at the same time.

        Raises:
            OSError: it cannot be read, or the file has become shorter.
        """
        with self._lock:
            found = self._kept.get(span)
            is_mine = found is None
            found = self._kept.setdefault(span, found or Future())
            self._kept.move_to_end(span)
            if len(self._kept) > self.most:
                self._kept.popitem(last=False)
        if is_mine:
            try:
                found.set_result(self._read(span))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(span, None)
                found.set_exception(error)
        return found.result()

    def _read(self, span: int) -> np.ndarray:
        file, offset, length = self.places[span].tolist()
        content = np.empty(length, np.uint8)
        if missing := self.opened.read(file, content, offset):
            raise OSError(f"{self.opened.paths[file]} ends {missing} bytes before byte {offset + length}")
        content.flags.writeable = False
        return content


class _Descriptor:
    """An open file for several threads, closed with its last reference."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead

    def read(self, into: np.ndarray, offset: int) -> int:
        left = into.reshape(-1).view(np.uint8).data
        while left and (got := os.preadv(self.number, [left], offset + into.nbytes - len(left))):
            left = left[got:]
        return len(left)
