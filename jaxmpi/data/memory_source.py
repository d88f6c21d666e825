"""A worker's part of a data set in the memory of one process, and whether a host has room for it.

Records lie as compressed as they are, one after another, in an `Arena`. A `MemorySource` reads them out of it as any
source does. It loads its first arena from another source; later ones are filled by shuffles (`shuffle`), whose records
come from other members of the group, while the arena before is still read.
"""

import itertools
import mmap
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import unreadable
from jaxmpi.data.sources.base import Source, TableSource, pair, where
from jaxmpi.data.sources.packed import check_record
from jaxmpi.data.sources.reading import in_order

BUFFER_BYTES = 64 << 20  # bytes that a process needs beside its records: what a shuffle sends is copied together
FREE_SHARE = 0.5  # share of the free memory that `auto` gives to records; the rest is the run's, and held-out examples'
SAMPLE = 256  # records that are read first: from their lengths follows, to some 5 %, how much memory all take
READERS = 4  # threads: files are often on another machine
SPARE = 16  # an arena has one more byte for so many of its own, since another epoch's part may be a little longer


class NoRoom(UsageError):
    """Too little memory for parts of the data, on all ranks alike."""


class Arena:
    """Records in one piece of memory, which goes back to the system with its last view.

    Args:
        records: i64[k], in the order in which they lie.
        lengths: i64[n], bytes of every record of the data set.
        pages: to lie in, if they are enough: new ones must be cleared first, which takes longer than a copy.
    """

    def __init__(self, records: np.ndarray, lengths: np.ndarray, pages: mmap.mmap | None = None) -> None:
        ends = np.cumsum(lengths[records])
        by_number = np.argsort(records)
        self.records = records[by_number]
        self.begins, self.ends = (ends - lengths[records])[by_number], ends[by_number]
        size_bytes = int(ends[-1]) if len(ends) else 0
        self.pages = map_pages(size_bytes) if pages is None or len(pages) < size_bytes else pages
        self.bytes = np.frombuffer(self.pages, np.uint8, size_bytes)

    def find(self, record: int) -> np.ndarray | None:
        """A record's bytes; None if it is not here."""
        place = int(np.searchsorted(self.records, record))
        is_here = place < len(self.records) and int(self.records[place]) == record
        return self.bytes[self.begins[place] : self.ends[place]] if is_here else None

    def copy_to(self, out: np.ndarray, records: np.ndarray) -> None:
        """Copy these records into `out`, one after another."""
        places, at = np.searchsorted(self.records, records), 0
        for begin, end in zip(self.begins[places].tolist(), self.ends[places].tolist(), strict=True):
            out[at : at + end - begin] = self.bytes[begin:end]
            at += end - begin


def map_pages(size_bytes: int) -> mmap.mmap:
    """Memory from the system itself, in large pages if it has them: NumPy's would stay with the process when freed."""
    pages = mmap.mmap(-1, size_bytes + size_bytes // SPARE + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class MemorySource(TableSource):
    """Another source's records, kept in memory as compressed as they are, for several threads.

    A record that is not here is waited for while a shuffle brings any. One that does not come, such as what fills a
    short batch, is read from the source. Text, and a source whose examples change by epoch, are refused.

    Attributes:
        lengths, labels, is_corrupt: i64, i32 and bool[n]; of the records that have been loaded.
        read_again: how often a record was read from the source because it was not in memory.
    """

    in_process = True  # records come and go while it is read

    def __init__(self, inner: Source, data: Data) -> None:
        if getattr(inner, "bytes_each", 0) or getattr(inner, "endless", False):
            raise UsageError(
                f"data.memory: got partition; {inner.name} is text, which every worker holds in memory as it is, or "
                "its examples change by epoch: use none"
            )
        super().__init__(data)
        self.inner, self.data, n = inner, data, len(inner)
        self.name, self.classes, self.names = inner.name, inner.classes, tuple(getattr(inner, "names", ()))
        self.is_compressed = getattr(inner, "encoded", None) is not None
        self.labels: np.ndarray = np.zeros(n, np.int32)
        self.lengths, self.is_corrupt = np.zeros(n, np.int64), np.zeros(n, bool)
        self.read_again = 0
        self._arenas: tuple[Arena, ...] = ()  # newest first; two while records are shuffled
        self._promised = 0  # shuffles that are not done
        self._changed = threading.Condition()
        self._changed_s = 0.0  # when, by time.monotonic

    def __len__(self) -> int:
        return len(self.inner)

    def digest(self) -> str:
        return getattr(self.inner, "digest", str)()

    def where(self, index: int) -> str:
        return where(self.inner, index)

    def record(self, index: int) -> tuple[Any, int]:
        """Record `index`, compressed, and its label; `CorruptExample` if it could not be read when it was loaded."""
        if self.is_corrupt[index]:
            raise CorruptExample(self.where(index), index, "it was so when it was loaded into memory")
        with self._changed:
            self._changed.wait_for(lambda: self._find(index) is not None or not self._promised)
            view = self._find(index)
            self.read_again += view is None
        return self._read(index) if view is None else (view.data, int(self.labels[index]))

    def cells(self, index: int) -> tuple[Any, int]:
        blob, label = self.record(index)
        return (blob if self.is_compressed else pickle.loads(blob)), label

    def awaited_s(self, index: int) -> float:
        """The `time.monotonic` until which a reader may have waited for this record."""
        with self._changed:
            return time.monotonic() if self._promised and self._find(index) is None else self._changed_s

    def _find(self, index: int) -> np.ndarray | None:
        return next((view for arena in self._arenas if (view := arena.find(index)) is not None), None)

    # ------------------------------------------------------------ loading

    def mean_bytes(self) -> float:
        """Mean bytes of a record, by a sample that is not kept; raises as `load`."""
        records = _sample_first(np.arange(len(self)))[:SAMPLE]
        return sum(map(len, self._read_all(records.tolist()))) / max(len(records), 1)

    def load(self, records: np.ndarray, check_memory: Callable[[float, float], None] | None = None) -> None:
        """Read these records from the source.

        Args:
            check_memory: is called once, after a sample has been read, with the bytes of all these records, estimated
                from the sample, and the bytes that are here already. It raises if there is no room for them. None:
                this process is alone.

        Raises:
            CorruptExample: one is damaged; with `data.on_error` skip it is noted and has no bytes.
            TrainingError: the file system fails, or takes longer than `data.stall_timeout_s` for one of them.
            UsageError: a label is no whole number in range, a record is too long, or there is no room.
        """
        records = _sample_first(records)
        blobs = self._read_all(records.tolist())
        sample = [*itertools.islice(blobs, SAMPLE)]
        sample_bytes = sum(map(len, sample))
        part_bytes = sample_bytes / max(len(sample), 1) * len(records)
        (check_memory or check_alone)(part_bytes, sample_bytes)
        pages, at = map_pages(int(part_bytes)), 0
        for blob in itertools.chain(sample, blobs):
            end = at + len(blob)
            if end > len(pages):  # the estimate was too small; what is not written takes no memory
                pages.resize(2 * end)
            pages[at:end] = blob
            at = end
        self.take(Arena(records, self.lengths, pages))

    def _read_all(self, records: list[int]) -> Iterator[Any]:
        count, stall_timeout_s = 0, self.data.stall_timeout_s
        try:
            for blob in in_order(self._load_one, records, READERS, stall_timeout_s):
                count += 1
                yield blob
        except TimeoutError as error:
            raise TrainingError(
                f"{self.where(records[count])} (example {records[count]}) has not been read for {stall_timeout_s:g} s; "
                "data.stall_timeout_s sets how long it may take"
            ) from error

    def _load_one(self, index: int) -> Any:
        try:
            blob, self.labels[index] = self._read(index)
            self.lengths[index] = len(blob)
            return blob
        except OSError as error:
            raise unreadable(self.where(index), index, error) from error
        except CorruptExample:
            if self.data.on_error != "skip":
                raise
            self.is_corrupt[index] = True
            return b""

    def _read(self, index: int) -> tuple[Any, int]:
        """The source's compressed image, or its array as bytes, and the label."""
        if self.is_compressed:
            blob, label = self.inner.encoded(index)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            image, label = pair(self.inner, index)
            blob = array_to_bytes(image, self.where(index))
        return check_record(blob, label, self.classes, self.where(index))

    # ------------------------------------------------------------ shuffles

    def promise(self) -> None:
        """Announce that a shuffle brings records."""
        with self._changed:
            self._promised += 1

    def take(self, arena: Arena, promised: bool = False) -> None:
        """Read from this arena too, from now on."""
        with self._changed:
            self._arenas = (arena, *self._arenas)
            self._promised -= promised
            self._changed_s = time.monotonic()
            self._changed.notify_all()

    def newest(self) -> Arena:
        """The arena that was taken last."""
        return self._arenas[0]

    def forget(self) -> mmap.mmap | None:
        """Drop all arenas but the newest; return the pages of one that nobody reads any more."""
        with self._changed:
            dropped = [(weakref.ref(arena.bytes), arena.pages) for arena in self._arenas[1:]]
            self._arenas = self._arenas[:1]
        return next((pages for view, pages in dropped if view() is None), None)


def array_to_bytes(array: np.ndarray, where: str) -> bytes:
    """An array of numbers as a record; its inverse is `pickle.loads`."""
    # Not .npy, whose head cannot be read in several threads at once in Python 3.11.
    check_unmasked(where, array)
    if array.dtype.kind not in "biufc":
        raise UsageError(f"{where}: got {array.dtype}; expected numbers to keep in memory")
    return pickle.dumps(array, protocol=5)


def _sample_first(records: np.ndarray) -> np.ndarray:
    """The same records, a random sample first, since neighbours are alike."""
    if len(records) <= SAMPLE:
        return records
    first = np.random.default_rng(0).permutation(len(records))[:SAMPLE]
    return np.concatenate([records[first], np.delete(records, first)])


# ---------------------------------------------------------------- room


def need_and_left(part_bytes: float, loaded_bytes: float = 0, copies: int = 1) -> np.ndarray:
    """f64[2]: bytes that a process still needs, its part `copies` times and to send records; bytes that are left."""
    need_bytes = copies * part_bytes + min(part_bytes, BUFFER_BYTES) - loaded_bytes
    return np.array([need_bytes, available_bytes()], np.float64)


def check_room(rows: np.ndarray, hosts: Sequence[int]) -> None:
    """Raise `NoRoom` for parts that together need more memory than their host has left.

    The system would grant the memory, and kill the process that uses it.

    Args:
        rows: f64[ranks, 2], `need_and_left` of each rank.
        hosts: of the ranks.
    """
    for ranks in _by_host(hosts):
        need, available = rows[ranks, 0].sum(), rows[ranks, 1].min()
        if need > available:
            raise NoRoom(
                f"data.memory: {need / 1e9:,.1f} GB more are needed by {len(ranks)} rank{'s' * (len(ranks) > 1)} "
                f"on rank {ranks[0]}'s machine, which has {available / 1e9:,.1f} GB left; take more workers on other "
                "hosts, a larger data.group_size, smaller images, or data.memory none"
            )


def check_alone(part_bytes: float, loaded_bytes: float = 0) -> None:
    """`check_room` for this process alone."""
    check_room(need_and_left(part_bytes, loaded_bytes)[None], [0])


def _by_host(hosts: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, other in enumerate(hosts) if other == host] for host in sorted(set(hosts))]


def smallest_group(total_bytes: float, available: np.ndarray, hosts: Sequence[int], per_process: int = 1) -> int:
    """The smallest group whose parts fit into FREE_SHARE of each host's free memory; all workers if none does.

    The smaller a group, the fewer records move.

    Args:
        total_bytes: of all records.
        available: f64[ranks], bytes that the host of each has left.
        hosts: of the ranks.
        per_process: workers of a rank.
    """
    sizes = _group_sizes(len(hosts) * per_process, per_process)
    for size in sizes:
        parts = max(size // per_process, 1)
        need = need_and_left(total_bytes / parts, copies=2 if parts > 1 else 1)[0]
        if all(len(ranks) * need <= FREE_SHARE * available[ranks].min() for ranks in _by_host(hosts)):
            return size
    return sizes[-1]


def check_group(group: int, workers: int, per_process: int = 1) -> int:
    """Check and return a group's size; 0 stands for all workers."""
    size, fits = group or workers, _group_sizes(workers, per_process)
    if size not in fits:
        scope = f"{workers} workers" + f", {per_process} a process" * (per_process > 1)
        raise UsageError(f"data.group_size: got {size} with {scope}; expected one of {', '.join(map(str, fits))}")
    return size


def _group_sizes(workers: int, per_process: int) -> list[int]:
    """Sizes of groups that split `workers`, but no process of `per_process`; ascending."""
    return [d for d in range(1, workers + 1) if workers % d == 0 and (d % per_process == 0 or per_process % d == 0)]
