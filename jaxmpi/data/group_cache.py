"""A data set in the memory of a group of workers.

The functions here say which worker holds which record when, and which records move in a shuffle. Each group of S
workers holds one full copy, each worker 1/S of it. In every group member m holds the records at those places of the
epoch's order that are m modulo S within their step. Worker r reads the places that are r modulo the number of workers
within their step, and S divides that number: so what a worker reads it holds, and all groups together read each record
once.

All here is index arithmetic and memory of one process; what sends the bytes is elsewhere.
"""

import functools
import itertools
import json
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import unreadable
from jaxmpi.data.sampler import Sampler, random_bits
from jaxmpi.data.sources.base import Source, _decoded, pair, where
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES, checked
from jaxmpi.data.thread_map import in_order

SEGMENT_BYTES = 32 << 20  # a worker's part of what travels at once
CHUNK_BYTES = 64 << 20  # of records that have been read and wait for the memory they will lie in
SAMPLE = 256  # records that are read first: from their lengths follows, to some 5 %, how much memory all take
READERS = 4  # threads: files are often on another machine
SHARE = 0.5  # of the memory left that `auto` gives to records: the rest is the run's, and held-out examples'
MORE = 16  # of an arena's pages one in so many is more than it needs
MOST_BYTES = 1 << 30  # of all parts together, and of a record: their sum stays below 2^31, whatever the lengths
TEXT = "data.memory: got partition; {source} is text, which every worker holds in memory as it is; use none"
ENDLESS = "data.memory: got partition; examples of {source} change by epoch, so none can be kept: use none"
NO_GROUP = "data.group_size: got {size} with {workers}; expected one of {fits}"


# ---------------------------------------------------------------- order and places


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """The order of examples that move between workers every `period` epochs.

    At the first of these epochs it is that of `Sampler`. In the others each member's records are permuted among
    themselves, by (seed, epoch, member): so it depends on the group's size, and on nothing else. With period 1 it is
    that of `Sampler` always.

    With `piece_steps` the order is that of `Sampler`, too. Members then keep what they have read from files, and copies
    of the records that they read in the next steps come in pieces.

    Args:
        parts: S, the group's size.
        period: epochs between two shuffles, >= 1; 0: after the first none.
        piece_steps: steps of an epoch whose records come at once; 0: all of them.
    """

    parts: int = 1
    period: int = 1
    piece_steps: int = 0

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed.

        The text is empty if nothing does.
        """
        is_plain = self.period == 1 or self.parts == 1 or not self.shuffle
        return "" if is_plain else f"shuffled over {self.parts} workers every {self.period} epochs"

    def moved(self, epoch: int) -> int:
        """The epoch whose shuffle moved records to their holders in `epoch`."""
        if self.parts == 1:
            return epoch  # nothing needs to move
        return epoch - epoch % self.period if self.period else 0

    def turn_of(self, step: int) -> int:
        """Number of the piece that `step` reads, over all epochs.

        If an epoch's records come at once, it is the number of the epoch.
        """
        epoch, batch = divmod(step, max(self.steps_per_epoch, 1))
        return epoch * self.pieces + batch // self.piece_steps if self.piece_steps else epoch

    @property
    def pieces(self) -> int:
        """Pieces of an epoch."""
        return math.ceil(self.steps_per_epoch / self.piece_steps) if self.piece_steps else 1

    @property
    def copies(self) -> float:
        """The most that a member holds, as a multiple of its part.

        A member holds its part, and the next epoch's or two pieces.
        """
        return 2.0 if not self.piece_steps else 1 + min(2 * self.piece_steps / self.steps_per_epoch, 1)

    def shuffle_of(self, turn: int) -> int:
        """The shuffle whose records a turn reads, numbered by its first turn."""
        return turn if self.piece_steps else self.moved(turn)

    def brought(self, shuffle: int) -> tuple[np.ndarray, np.ndarray]:
        """i64[k], records in epoch order; i32[k], the group's worker that reads each."""
        epoch, piece = divmod(shuffle, self.pieces)
        begin = piece * self.piece_steps * self.effective_batch
        end = min(begin + self.piece_steps * self.effective_batch, self.examples) if self.piece_steps else self.examples
        return self.places(epoch)[begin:end], members(self.examples, self.effective_batch, self.parts)[begin:end]

    def places(self, epoch: int) -> np.ndarray:
        """i64[n]: the epoch's whole order, if examples are shuffled."""
        begun = self._order_of_all(self.moved(epoch))
        if epoch == self.moved(epoch):
            return begun
        return within_parts(self.examples, self.effective_batch, self.seed, epoch, self.parts, self.moved(epoch))

    def _order_of_all(self, epoch: int) -> np.ndarray:
        return super()._order(epoch, 0, self.examples)

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self.places(epoch)[begin:end] if self.shuffle else super()._order(epoch, begin, end)


@functools.lru_cache(maxsize=2)
def within_parts(examples: int, batch: int, seed: int, epoch: int, parts: int, begun: int) -> np.ndarray:
    """i64[n]: the order of epoch `begun`, permuted within each member's places."""
    order = Sampler(examples, examples, seed=seed)._order(begun, 0, examples).copy()
    whose = members(examples, batch, parts)
    by_member = np.argsort(whose, kind="stable")
    for part, own in enumerate(np.split(by_member, np.searchsorted(whose[by_member], np.arange(1, parts)))):
        keys = random_bits(len(own), seed, epoch, stream=3, index=part)
        order[own] = order[own[np.argsort(keys, kind="stable")]]
    order.flags.writeable = False
    return order


def members(examples: int, batch: int, group: int) -> np.ndarray:
    """i32[n]: the group member that holds each place of an order.

    `batch` is the effective batch: the members take the places of each step in turn.
    """
    return (np.arange(examples) % batch % group).astype(np.int32)


def holders_by_place(order: np.ndarray, whose: np.ndarray) -> np.ndarray:
    """i32[n]: the holder of each record, from that of each place."""
    holders = np.empty(len(order), np.int32)
    holders[order] = whose
    return holders


def slices(examples: int, parts: int) -> list[int]:
    """Bounds of the slices of records that members read from files."""
    return [part * examples // parts for part in range(parts + 1)]


def holders_by_slice(examples: int, parts: int) -> np.ndarray:
    """i32[n]: the member that reads record i from files."""
    return np.repeat(np.arange(parts, dtype=np.int32), np.diff(slices(examples, parts)))


class Move(NamedTuple):
    """One member's sends and receives in one segment of a shuffle."""

    sent: np.ndarray  # i64[k], records by destination, then by place
    to: np.ndarray  # i64[k], the member that each goes to
    sent_bytes: np.ndarray  # i64[parts], to each member
    received: np.ndarray  # i64[l], records by source, then by place
    source: np.ndarray  # i64[l], the member that each comes from
    received_bytes: np.ndarray  # i64[parts], from each member


def moves(
    order: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    lengths: np.ndarray,
    me: int,
    parts: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> Iterator[Move]:
    """A shuffle in segments, equally many for every member.

    This is Algorithm 2 of IBM's paper (Kumar et al. 2018). A segment is a run of places of the new order whose records
    have about `parts` x `segment_bytes`, and never 2^31.

    Args:
        order: i64[n], the new epoch's.
        before: i32[n], who holds record i.
        after: i32[n], who is to hold place i of the order.
        lengths: i64[n], bytes of record i, at most 2^30.
        me: this part.
        parts: of the data set, each in a process of its own.
        segment_bytes: of one part, about.
    """
    assert lengths.max(initial=0) <= MAX_RECORD_BYTES == MOST_BYTES
    ends = np.cumsum(lengths[order])
    limit = min(parts * segment_bytes, MOST_BYTES)
    segment = (ends - lengths[order]) // limit
    count = int(segment[-1]) + 1 if len(order) else 0
    leaving, coming = np.flatnonzero(before[order] == me), np.flatnonzero(after == me)
    to = _by_segment(leaving, segment, after[leaving], parts)
    source = _by_segment(coming, segment, before[order[coming]], parts)
    for number in range(count):
        sent, received = (_of_segment(number, places, order, lengths, parts) for places in (to, source))
        yield Move(*sent, *received)


def _by_segment(
    places: np.ndarray, segment: np.ndarray, member: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sort places by their key, segment x parts + member; return both."""
    keys = segment[places] * parts + member
    by_key = np.argsort(keys, kind="stable")
    return places[by_key], keys[by_key]


def _of_segment(
    number: int, sorted_places: tuple[np.ndarray, np.ndarray], order: np.ndarray, lengths: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Records of one segment, the member of each, and bytes by member."""
    places, keys = sorted_places
    begin, end = np.searchsorted(keys, [number * parts, (number + 1) * parts])
    records, member = order[places[begin:end]], keys[begin:end] - number * parts
    size_bytes = np.zeros(parts, np.int64)
    np.add.at(size_bytes, member, lengths[records])
    return records, member, size_bytes


# ---------------------------------------------------------------- the bytes


class Arena:
    """Records in one piece of memory, freed with its last view.

    Args:
        records: i64[k], in the order in which they lie.
        lengths: i64[n], bytes of every record of the data set.
        spare: pages to lie in, if they are enough: new ones must be cleared first, which takes longer than a copy.
    """

    def __init__(self, records: np.ndarray, lengths: np.ndarray, spare: mmap.mmap | None = None) -> None:
        ends = np.cumsum(lengths[records])
        by_number = np.argsort(records)
        self.records = records[by_number]
        self.begins, self.ends = (ends - lengths[records])[by_number], ends[by_number]
        size_bytes = int(ends[-1]) if len(ends) else 0
        self.pages = _pages(size_bytes) if spare is None or len(spare) < size_bytes else spare
        self.bytes = np.frombuffer(self.pages, np.uint8, size_bytes)

    def __contains__(self, record: int) -> bool:
        place = int(np.searchsorted(self.records, record))
        return place < len(self.records) and int(self.records[place]) == record

    def __getitem__(self, record: int) -> np.ndarray:
        """u8[length], a view; of a record that is here."""
        place = int(np.searchsorted(self.records, record))
        return self.bytes[self.begins[place] : self.ends[place]]

    def gather(self, records: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """u8: these records, one after another, copied into `out` if given."""
        places = np.searchsorted(self.records, records)
        begins, ends = self.begins[places].tolist(), self.ends[places].tolist()
        out = np.empty(sum(ends) - sum(begins), np.uint8) if out is None else out
        at = 0
        for begin, end in zip(begins, ends, strict=True):
            out[at : at + end - begin] = self.bytes[begin:end]
            at += end - begin
        return out


def room(part_bytes: float, held_bytes: float, copies: float = 1) -> np.ndarray:
    """f64[2]: bytes that a process still needs, and its machine's free bytes.

    Args:
        copies: of the part; 2 if a shuffle makes another one. As measured a chunk is there beside each, or as much of
            what moves.
    """
    need_bytes = copies * (part_bytes + min(part_bytes, CHUNK_BYTES)) - held_bytes
    return np.array([need_bytes, available_bytes()], np.float64)


class NoRoom(UsageError):
    """Too little memory for parts of the data, on all ranks alike."""


def check_room(rows: np.ndarray, hosts: Sequence[int]) -> None:
    """Refuse parts that together need more memory than their host has left.

    The system would grant the memory, and kill the process that uses it.

    Args:
        rows: f64[ranks, 2], the `room` of each.
        hosts: of each.

    Raises:
        NoRoom: of which rank's machine.
    """
    for here, need_bytes, left_bytes in by_host(rows, hosts):
        whose = f"by {len(here)} rank{'s' * (len(here) > 1)} on rank {here[0]}'s machine"
        _check_left(need_bytes, left_bytes, whose)


def by_host(rows: np.ndarray, hosts: Sequence[int]) -> Iterator[tuple[list[int], float, float]]:
    """Each host's ranks, the bytes they need together, and its bytes left."""
    for host in sorted(set(hosts)):
        here = [rank for rank, its in enumerate(hosts) if its == host]
        yield here, float(rows[here, 0].sum()), float(rows[here, 1].min())


def check_alone(part_bytes: float, held_bytes: float = 0) -> None:
    """Refuse this process's part if it alone exceeds the memory left."""
    need_bytes, left_bytes = room(part_bytes, held_bytes).tolist()
    _check_left(need_bytes, left_bytes, "on this machine")


def _check_left(need_bytes: float, left_bytes: float, whose: str) -> None:
    if need_bytes > left_bytes:
        raise NoRoom(
            f"data.memory: {need_bytes / 1e9:,.1f} GB more are needed {whose}, which has {left_bytes / 1e9:,.1f} GB "
            "left; take more workers on other hosts, a larger data.group_size, smaller images, or data.memory none"
        )


def _pages(size_bytes: int) -> mmap.mmap:
    """Memory from the system itself, in large pages if it has them.

    NumPy's memory would stay with the process when it is freed. The mapping is a little larger than asked for, as
    another epoch's part may need it; unused pages take no memory.
    """
    pages = mmap.mmap(-1, size_bytes + size_bytes // MORE + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def run_of(blobs: Iterator[Any]) -> list[Any]:
    """The next of these, of CHUNK_BYTES together; fewer if they end."""
    run: list[Any] = []
    size_bytes = 0
    while size_bytes < CHUNK_BYTES and (blob := next(blobs, None)) is not None:
        run.append(blob)
        size_bytes += len(blob)
    return run


def _joined(blobs: list) -> np.ndarray:
    """u8: all of them, one after another."""
    size_bytes = sum(map(len, blobs))
    joined = np.frombuffer(_pages(size_bytes), np.uint8, size_bytes)
    at = 0
    for blob in blobs:
        joined[at : at + len(blob)] = np.frombuffer(blob, np.uint8)
        at += len(blob)
    return joined


def bytes_of(array: np.ndarray, where: str) -> bytes:
    """An array as bytes: length of a head, the head, the elements.

    The format is not .npy, whose head is not safe to read in threads of Python 3.11.

    Raises:
        UsageError: the elements are not numbers that NumPy itself has.
    """
    check(array.dtype.kind in "biufc", f"{where}: got {array.dtype}; expected numbers to keep in memory")
    head = json.dumps([array.dtype.str, array.shape]).encode()
    return len(head).to_bytes(4, "little") + head + np.ascontiguousarray(array).tobytes()


def array_of(blob: Any) -> np.ndarray:
    """The inverse of `bytes_of`; a view that cannot be written to."""
    begin = 4 + int.from_bytes(blob[:4], "little")
    dtype, shape = json.loads(bytes(blob[4:begin]))
    array = np.frombuffer(blob, dtype, offset=begin).reshape(shape)
    array.flags.writeable = False
    return array


class MemorySource:
    """Another source's records, kept in memory as compressed as they are.

    Several threads may read the source. A record that is on its way here is waited for. One that neither is here nor
    comes, such as what fills a short batch, is read from the source.

    Args:
        inner: of the records.
        data: `channels`, `resize` and `on_error` are used here.

    Attributes:
        lengths, labels, is_corrupt: i64, i32 and bool[n]; of the records that have been loaded.
        read_again: how often a record was read from the source because it was not in memory.

    Raises:
        UsageError: the source is text.
    """

    in_process = True  # records come and go while it is read

    def __init__(self, inner: Source, data: Data) -> None:
        check(not getattr(inner, "bytes_each", 0), TEXT.format(source=inner.name))
        check(not getattr(inner, "endless", False), ENDLESS.format(source=inner.name))
        self.inner, self.data = inner, data
        self.name, self.classes = inner.name, inner.classes
        self.is_compressed = getattr(inner, "encoded", None) is not None
        self.encoded = self.record if self.is_compressed else None
        n = len(inner)
        self.lengths, self.labels, self.is_corrupt = np.zeros(n, np.int64), np.zeros(n, np.int32), np.zeros(n, bool)
        self.read_again = 0
        self._arenas: tuple[Arena, ...] = ()  # newest first; two while records are shuffled
        self._home: Arena | None = None  # the first, if it stays
        self._coming = np.empty(0, np.int64)  # records on their way, sorted
        self._promised = 0  # shuffles of which is not known yet what they bring
        self._changed = threading.Condition()
        self._changed_s = 0.0  # when, by time.monotonic

    def __len__(self) -> int:
        return len(self.inner)

    def digest(self) -> str:
        """The source's."""
        digest = getattr(self.inner, "digest", None)
        return digest() if digest else ""

    def where(self, index: int) -> str:
        """Name of record `index` in errors."""
        return where(self.inner, index)

    def record(self, index: int) -> tuple[Any, int]:
        """Record `index`, compressed, and its label.

        Raises:
            CorruptExample: it could not be read when it was loaded.
        """
        if self.is_corrupt[index]:
            raise CorruptExample(self.where(index), index, "it was so when it was loaded into memory")
        view = self._view(index)
        return self._read(index) if view is None else (view.data, int(self.labels[index]))

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        blob, label = self.record(index)
        if self.is_compressed:
            return _decoded(blob, self.where(index), index, self.data.channels, self.data.resize), label
        return array_of(blob), label

    def _view(self, index: int) -> np.ndarray | None:
        with self._changed:
            self._changed.wait_for(lambda: self._held(index) is not None or not self._may_come(index))
            arena = self._held(index)
            self.read_again += arena is None
            return None if arena is None else arena[index]

    def _held(self, index: int) -> Arena | None:
        return next((arena for arena in self._arenas if index in arena), None)

    def awaited_s(self, index: int) -> float:
        """The `time.monotonic` until which a reader may have waited for this record."""
        with self._changed:
            is_awaited = self._held(index) is None and self._may_come(index)
            return time.monotonic() if is_awaited else self._changed_s

    def _may_come(self, index: int) -> bool:
        place = int(np.searchsorted(self._coming, index))
        return self._promised > 0 or (place < len(self._coming) and int(self._coming[place]) == index)

    def _read(self, index: int) -> tuple[Any, int]:
        """The source's compressed image, or its array as bytes, and the label.

        Raises:
            UsageError: the label or the array is none that can be kept.
        """
        if self.is_compressed:
            blob, label = self.inner.encoded(index)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            image, label = pair(self.inner, index)
            blob = bytes_of(image, self.where(index))
        return checked(blob, label, self.classes, self.where(index))

    # ------------------------------------------------------------ called by what fills the memory

    def mean_bytes(self) -> float:
        """Mean bytes of a record, by a sample that is not kept.

        Raises: as `load`.
        """
        records = sample_first(np.arange(len(self)))[:SAMPLE]
        return sum(map(len, self._loaded(records.tolist()))) / max(len(records), 1)

    def load(self, records: np.ndarray, check_part: Callable[[float, float], None] = check_alone) -> None:
        """Read these records from the source.

        Args:
            check_part: is asked once, after a sample has been read, with the bytes that all have by it and those that
                are here already; raises if there is no room for them.

        Raises:
            CorruptExample: one is damaged; with `data.on_error` skip it is noted and has no bytes.
            TrainingError: the file system fails, or takes longer than `data.stall_timeout_s` for one of them.
            UsageError: a label is no whole number in range, a record is too long, or there is no room.
        """
        records = sample_first(records)
        blobs = self._loaded(records.tolist())
        sample = run_of(itertools.islice(blobs, SAMPLE))
        chunks = [_joined(sample)]
        part_bytes = len(chunks[0]) / max(len(sample), 1) * len(records)
        del sample  # it is there twice by now
        check_part(part_bytes, len(chunks[0]))
        while len(chunk := _joined(run_of(blobs))):
            chunks.append(chunk)
        arena, at = Arena(records, self.lengths), 0
        while chunks:  # what is copied goes, so that no more than one chunk is there twice
            chunk = chunks.pop(0)
            arena.bytes[at : at + len(chunk)] = chunk
            at += len(chunk)
        self.take(arena)

    def _loaded(self, records: list[int]) -> Iterator[Any]:
        done, stall_timeout_s = 0, self.data.stall_timeout_s
        try:
            for blob in in_order(self._load, records, READERS, stall_timeout_s):
                done += 1
                yield blob
        except TimeoutError as error:
            raise TrainingError(
                f"{self.where(records[done])} (example {records[done]}) has not been read for {stall_timeout_s:g} s; "
                "data.stall_timeout_s sets how long it may take"
            ) from error

    def _load(self, index: int) -> Any:
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

    def promise(self) -> None:
        """Announce that records will come; `expect` says later which."""
        with self._changed:
            self._promised += 1

    def expect(self, records: np.ndarray) -> None:
        """Say which records are on their way, as promised."""
        with self._changed:
            self._promised -= 1
            self._coming = np.sort(records)
            self._wake()

    def take(self, arena: Arena) -> None:
        """Have an arena that is complete."""
        with self._changed:
            self._arenas = (arena, *self._arenas)
            self._coming = np.empty(0, np.int64)
            self._wake()

    def _wake(self) -> None:
        self._changed_s = time.monotonic()
        self._changed.notify_all()

    def newest(self) -> Arena:
        """The arena that came last."""
        return self._arenas[0]

    def keep_first(self) -> None:
        """Keep what has been loaded for good: shuffles bring copies of it."""
        self._home = self._home or self._arenas[-1]

    def origin(self) -> Arena:
        """The arena that a shuffle copies from."""
        return self._home or self.newest()

    def forget(self) -> mmap.mmap | None:
        """Drop all arenas but the newest and the one that stays.

        Return the pages of one that nobody reads any more, or None.
        """
        with self._changed:
            stays = {id(self._arenas[0]), id(self._home)}
            gone = [(weakref.ref(arena.bytes), arena.pages) for arena in self._arenas if id(arena) not in stays]
            self._arenas = tuple(arena for arena in self._arenas if id(arena) in stays)
        return next((pages for view, pages in gone if view() is None), None)


def sample_first(records: np.ndarray) -> np.ndarray:
    """The same records, a random sample first, since neighbours are alike."""
    if len(records) <= SAMPLE:
        return records
    first = np.random.default_rng(0).permutation(len(records))[:SAMPLE]
    return np.concatenate([records[first], np.delete(records, first)])


def shuffled(
    source: MemorySource,
    order: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    me: int,
    parts: int,
    spare: mmap.mmap | None = None,
) -> tuple[Arena, list[Move]]:
    """This part's empty arena, and the moves that fill it in order."""
    planned = list(moves(order, before, after, source.lengths, me, parts))
    part_bytes, held_bytes = sum(int(move.received_bytes.sum()) for move in planned), len(spare) if spare else 0
    check_alone(part_bytes, held_bytes * MORE // (MORE + 1))  # others may have taken memory since
    return Arena(np.concatenate([move.received for move in planned]), source.lengths, spare), planned


def group_sizes(workers: int, each: int = 1) -> list[int]:
    """Sizes of groups that split `workers`, but no process of `each`; ascending."""
    return [d for d in range(1, workers + 1) if workers % d == 0 and (d % each == 0 or each % d == 0)]


def smallest_group(total_bytes: float, copies: float, left: np.ndarray, hosts: Sequence[int], each: int = 1) -> int:
    """The smallest group size that fits SHARE of each host's free memory.

    The smaller a group, the less moves. If none fits, all workers are one group.

    Args:
        total_bytes: of all records.
        copies: of a part, if its records move.
        left: f64[ranks], bytes that the host of each has left.
        hosts: of each rank.
        each: workers of a rank.
    """
    sizes = group_sizes(len(hosts) * each, each)
    for size in sizes:
        parts = max(size // each, 1)
        need_bytes = room(total_bytes / parts, 0, copies if parts > 1 else 1)[0]
        rows = np.stack([np.full(len(left), need_bytes), left], axis=1)
        if all(need <= SHARE * its for _, need, its in by_host(rows, hosts)):
            return size
    return sizes[-1]


def check_group(group: int, workers: int, each: int = 1) -> int:
    """Check and return a group's size; 0 stands for all workers.

    Raises:
        UsageError: the workers cannot be split into groups of that size without cutting a process of `each`.
    """
    size, fits = group or workers, group_sizes(workers, each)
    of = f"{workers} workers" + f", {each} a process" * (each > 1)
    check(size in fits, NO_GROUP.format(size=size, workers=of, fits=", ".join(map(str, fits))))
    return size
