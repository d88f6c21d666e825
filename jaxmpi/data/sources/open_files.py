"""Files that stay open for reads at an offset: no copy in memory, no file opened twice in a row.

Files are read, not mapped: one that shrinks under the run would kill it by SIGBUS, with no word about the file.
"""

import collections
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_OPEN = 64  # files at once, of a source: several loaders, each in a file or between two


class OpenFiles:
    """Files by number, opened when they are first read; the last MOST_OPEN stay open. Pickled as their paths.

    Args:
        paths: of the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._open: collections.OrderedDict[int, _Descriptor] = collections.OrderedDict()  # last used last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.paths,)

    def read(self, file: int, into: np.ndarray, offset: int) -> int:
        """Fill a C-ordered array from `offset` bytes on; how many bytes the file lacks for that.

        Raises:
            OSError: the file cannot be opened or read.
        """
        return self._descriptor(file).read(into, offset)

    def _descriptor(self, file: int) -> "_Descriptor":
        with self._lock:
            if file not in self._open:
                self._open[file] = _Descriptor(self.paths[file])
                if len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)  # it is closed once no other thread reads it
            self._open.move_to_end(file)
            return self._open[file]


class _Descriptor:
    """An open file, closed with the last reference to it; read from several threads at once.

    Raises:
        OSError: it cannot be opened.
    """

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
