"""Data in memory over a group of workers: who has which record, and their shuffle while the epoch before is read.

Workers form groups of S. Each group has one full copy of the data, each worker 1/S of it. Every place of the epoch's
order has an index within its step; in every group, member m has the records at the places whose index is m modulo S.
Worker r reads the places whose index is r modulo the number of workers, which S divides. So a worker has what it
reads, and all groups together read each record once.

Records are sent by MPI_Ialltoallv over a communicator of the group's own, which one thread at a time uses. The thread
sleeps between looks at it: it must not spin on a core that computes.

A shuffle costs copies. A member copies the records that it sends together, segment by segment, and MPI copies them into
the arena of their new owner. Of records that are sent from where they lie the first copy falls away, but on one host a
message for each took 1.2 to 1.5 times as long with 110 kB a record and 6 times with 2 kB, and a datatype of MPI that
names them all 2 to 10 times: Open MPI reads only contiguous bytes out of another process.
"""

import collections
import functools
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.polling import WaitClock
from jaxmpi.comm.topology import Workers
from jaxmpi.config.data import Data
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data import memory_source
from jaxmpi.data.memory_source import Arena, MemorySource
from jaxmpi.data.sampler import Sampler, random_bits
from jaxmpi.data.sources.base import Source
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES
from jaxmpi.runtime import progress

SEGMENT_BYTES = 32 << 20  # a worker's part of what is sent at once


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """The order of examples that move between the workers of a group of `parts` every `period` epochs (0: once).

    At the first of these epochs the order is that of `Sampler`. In the others each member's records are permuted among
    themselves, by (seed, epoch, member): it then depends on the group's size too. A turn is an epoch.
    """

    parts: int = 1
    period: int = 1

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed; empty if nothing does."""
        is_plain = self.period == 1 or self.parts == 1 or not self.shuffle
        return "" if is_plain else f"shuffled over {self.parts} workers every {self.period} epochs"

    def turn_of_step(self, step: int) -> int:
        """The turn in which `step` is read."""
        return step // max(self.steps_per_epoch, 1)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """i64[n]: the epoch's whole order, if examples are shuffled."""
        first = self.shuffle_of_turn(epoch)
        if epoch == first:
            return super()._order(epoch, 0, self.examples)
        return permute_within_parts(self.examples, self.effective_batch, self.seed, epoch, self.parts, first)

    def shuffle_of_turn(self, turn: int) -> int:
        """The turn whose shuffle brought the records that are read in this one."""
        if self.parts == 1:
            return turn  # nothing needs to move
        return turn - turn % self.period if self.period else 0

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self.epoch_order(epoch)[begin:end] if self.shuffle else super()._order(epoch, begin, end)


@functools.lru_cache(maxsize=2)
def permute_within_parts(examples: int, batch: int, seed: int, epoch: int, parts: int, first: int) -> np.ndarray:
    """i64[n]: the order of epoch `first`, permuted within each member's places by (seed, epoch, member)."""
    order = Sampler(examples, examples, seed=seed)._order(first, 0, examples).copy()
    owners = place_owners(examples, batch, parts)
    for part in range(parts):
        places = np.flatnonzero(owners == part)
        keys = random_bits(len(places), seed, epoch, stream=3, index=part)
        order[places] = order[places[np.argsort(keys, kind="stable")]]
    order.flags.writeable = False
    return order


def place_owners(examples: int, batch: int, group: int) -> np.ndarray:
    """i32[n]: the group member that has each place of an order; members take the places of each step in turn."""
    return (np.arange(examples) % batch % group).astype(np.int32)


def record_owners(order: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """i32[n]: the member that has each record, from the one that has each place."""
    by_record = np.empty(len(order), np.int32)
    by_record[order] = owners
    return by_record


def slice_bounds(examples: int, parts: int) -> np.ndarray:
    """i64[parts + 1]: member m reads the records from bound m up to the next from files."""
    return np.arange(parts + 1) * examples // parts


def slice_owners(examples: int, parts: int) -> np.ndarray:
    """i32[n]: the member that reads each record from files."""
    return np.repeat(np.arange(parts, dtype=np.int32), np.diff(slice_bounds(examples, parts)))


class Move(NamedTuple):
    """One member's sends and receives in one segment of a shuffle, by member, and in the order of places."""

    sent: list[np.ndarray]  # i64[k], records that go to each member
    sent_bytes: np.ndarray  # i64[parts]
    received: list[np.ndarray]  # i64[k], records that come from each member
    received_bytes: np.ndarray  # i64[parts]


def plan_moves(
    order: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    lengths: np.ndarray,
    me: int,
    parts: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> list[Move]:
    """A shuffle in segments, equally many for every member: Algorithm 2 of IBM's DIMD (Kumar et al. 2018).

    A segment is a run of places of the new order whose records have about `parts` x `segment_bytes`. It begins below
    2^30 bytes and no record is longer than that, so no count of MPI passes 2^31.

    Args:
        order: i64[n], records in the order of the new epoch.
        before: i32[n], the member that has each record.
        after: i32[n], the member that is to have the record of each place.
        lengths: i64[n], bytes of each record.
        me: one of `parts` members, each in a process of its own.
    """
    assert lengths.max(initial=0) <= MAX_RECORD_BYTES
    segments = (np.cumsum(lengths[order]) - lengths[order]) // min(parts * segment_bytes, MAX_RECORD_BYTES)
    moves = []
    for number in range(int(segments[-1]) + 1 if len(order) else 0):
        places = slice(*np.searchsorted(segments, [number, number + 1]))
        records, sources, targets = order[places], before[order[places]], after[places]
        sent_records = [records[(sources == me) & (targets == member)] for member in range(parts)]
        received = [records[(sources == member) & (targets == me)] for member in range(parts)]
        sent_bytes, received_bytes = (
            np.array([lengths[r].sum() for r in by_member]) for by_member in (sent_records, received)
        )
        moves.append(Move(sent_records, sent_bytes, received, received_bytes))
    return moves


# ---------------------------------------------------------------- the shuffle


THREAD = "jaxmpi shuffle"
POLL_S = 0.0002  # between looks at what is sent
AHEAD = 2  # segments sent concurrently: one is copied together while the one before is sent
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)


class Shuffle(NamedTuple):
    """Time and traffic of one shuffle."""

    seconds: float
    moved_bytes: int  # that came to this process from others


def describe_memory(sampler: GroupSampler, is_auto: bool, worker_bytes: float, load_s: float, moves: bool) -> str:
    """Where the records are, and when they move, for the user."""
    auto = " (auto)" if is_auto else ""
    if sampler.parts == 1:
        how = f"each has all of it (groups of 1 worker{auto}), and indices are shuffled"
    elif not moves:
        how = f"groups of {sampler.parts} workers{auto} have one copy each, in one process, which shuffles indices"
    else:
        rhythm = {0: "once", 1: "every epoch"}.get(sampler.period, f"every {sampler.period} epochs")
        how = f"groups of {sampler.parts} workers{auto} have one copy each, shuffled {rhythm}"
    return f"training data in memory, {worker_bytes / 1e6:,.1f} MB a worker: {how}; loaded in {load_s:.1f} s"


@dataclass(eq=False)
class MemoryShuffle:
    """Store of one split's records, on the workers that read them."""

    source: MemorySource  # whose memory is filled
    control: Processes  # of all ranks
    fixed: np.ndarray | None  # i64[k], the records to load for good; None if they are shuffled over a group
    group: Any  # communicator of mpi4py, this object's alone; None if no records move
    sampler: GroupSampler  # the order of the split, of any worker
    each: int = 1  # workers of a process
    in_background: bool = True  # whether MPI may be called from a thread concurrently with others

    def __post_init__(self) -> None:
        self.load_s = 0.0  # seconds that loading took
        self.shuffles: list[Shuffle] = []  # that are done
        self._is_loaded = False
        self._turn, self._last_turn = -1, None
        self._placed: int | None = None  # the shuffle whose records are here or will be; None: as they were loaded
        # That of the last shuffle, which keeps this object alive until it is done. The process must not end before: MPI
        # would be finalized under it.
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _join, self._threads)

    def stop(self) -> None:
        """Wait for the shuffles that have begun."""
        _join(self._threads)

    def close(self) -> None:
        """`stop`, and give the communicator back; all ranks call it together."""
        self.stop()
        if self.group is not None:
            self.group.Free()
            self.group = None

    def begin(self, step: int, stop: int | None) -> None:
        """Load what is read from `step` to `stop`; all ranks call it together, and raise `NoRoom` together.

        Communicates, the first time: what memory is needed and left, an allgather over all ranks; lengths, labels and
        marks of the records, an allgather over the group.
        """
        self.load()
        if self.group is not None:
            self._turn, self._last_turn = -1, None if stop is None else self.sampler.turn_of_step(stop - 1)
            self._bring(self.sampler.turn_of_step(step))

    def reached(self, step: int) -> None:
        """Note that batches have reached `step`, and bring the next turn's records; on all ranks at the same steps."""
        if self.group is None or (turn := self.sampler.turn_of_step(step)) == self._turn:
            return
        self._turn = turn
        is_last = self._last_turn is not None and turn >= self._last_turn
        if is_last or not self._bring(turn + 1):
            self.source.forget()

    def load(self) -> bool:
        """Load this process's part once, on all ranks together; return True if this call did. Raises as `begin`."""
        if self._is_loaded:
            return False
        begin = time.perf_counter()
        group, source = self.group, self.source
        if self.fixed is not None:
            source.load(self.fixed, self._check_room)
        else:
            bounds = slice_bounds(len(source), group.size)
            first, end = bounds[group.rank : group.rank + 2].tolist()
            source.load(np.arange(first, end), self._check_room)
            self._wait(group.Ibarrier(), "workers of its group, which still read their parts")
            for values in (source.lengths, source.labels, source.is_corrupt.view(np.uint8)):
                group.Allgatherv(values[first:end].copy(), [values, (np.diff(bounds).tolist(), bounds[:-1].tolist())])
            # Now all lengths are known.
            self._check_room(source.lengths.sum() / group.size, source.newest().bytes.size)
        self.load_s, self._is_loaded = time.perf_counter() - begin, True
        return True

    def _check_room(self, part_bytes: float, loaded_bytes: float) -> None:
        local = memory_source.need_and_left(part_bytes, loaded_bytes, 1 if self.group is None else 2)
        rows, control = local[None], self.control
        if isinstance(control, MpiProcesses):
            rows = np.empty((control.size, local.size))
            self._wait(control.world.Iallgather(local, rows), "ranks to say what memory they need")  # some read slower
        memory_source.check_room(rows, control.hosts)

    def _bring(self, turn: int) -> bool:
        placed = self.sampler.shuffle_of_turn(turn)
        if placed == self._placed:
            return False
        self.source.promise()
        work, self._placed = partial(self._shuffle, placed, self._placed, [*self._threads]), placed
        if self.in_background:
            self._threads[:] = [threading.Thread(target=work, name=THREAD, daemon=True)]
            self._threads[0].start()
        else:
            work()
        return True

    # ------------------------------------------------------------ in the thread

    def _shuffle(self, shuffle: int, before: int | None, last: list[threading.Thread]) -> None:
        """Move records from their owners after shuffle `before`, once it is done, to those of `shuffle`."""
        _join(last)
        group, source, sampler = self.group, self.source, self.sampler
        begin = time.perf_counter()
        order = sampler.epoch_order(shuffle)
        targets = place_owners(len(source), sampler.effective_batch, sampler.parts) // self.each
        if before is None:
            owners = slice_owners(len(source), group.size)
        else:
            owners = record_owners(sampler.epoch_order(before), targets)
        moves = plan_moves(order, owners, targets, source.lengths, group.rank, group.size)
        old = source.newest()
        arena = new_arena(source, moves)
        self._fill(arena, old, moves)
        source.take(arena, promised=True)
        end = time.perf_counter()
        moved_bytes = sum(int(move.received_bytes.sum() - move.received_bytes[group.rank]) for move in moves)
        self.shuffles.append(Shuffle(end - begin, moved_bytes))
        progress.record_span("shuffle", f"shuffle {len(self.shuffles)}, {moved_bytes / 1e6:.3g} MB", begin, end)

    def _fill(self, arena: Arena, old: Arena, moves: list[Move]) -> None:
        pending: collections.deque[tuple[Any, np.ndarray]] = collections.deque()  # requests, and what they send
        me, end = self.group.rank, 0
        others = np.arange(self.group.size) != me
        for move in moves:
            # MPI's offsets are C ints: they count from a segment's begin, since an arena may have more than 2 GiB.
            begin, end = end, end + int(move.received_bytes.sum())
            received, offsets = arena.bytes[begin:end], np.cumsum(move.received_bytes) - move.received_bytes
            payload = np.empty(int(move.sent_bytes[others].sum()), np.uint8)
            old.copy_to(payload, np.concatenate([*move.sent[:me], *move.sent[me + 1 :]]))
            target = alltoallv_buffer(received, move.received_bytes * others, offsets)
            pending.append(
                (self.group.Ialltoallv(alltoallv_buffer(payload, move.sent_bytes * others), target), payload)
            )
            old.copy_to(received[offsets[me] :], move.received[me])
            if len(pending) == AHEAD:
                self._wait(pending.popleft()[0])
        while pending:
            self._wait(pending.popleft()[0])

    def _wait(
        self,
        request: Any,
        peers: str = "workers of its group; all must read as many epochs, or call shuffle() as often",
    ) -> None:
        # Not `polling.wait`: MPI moves records on in a look only, so looks come five times as often; and this thread
        # runs concurrently with the steps, whose cores it leaves them without a first spin.
        waited = WaitClock()
        while not request.Test():
            if waited.look() > TIMEOUT_S:
                raise TrainingError(
                    f"the data set in memory has waited {TIMEOUT_S:.0f} s for the other {peers} "
                    "(JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
                )
            time.sleep(POLL_S)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():  # it is if the object has ended with its last shuffle
            thread.join()


def new_arena(source: MemorySource, moves: list[Move]) -> Arena:
    """The empty arena that these moves fill in order, in pages that nobody reads any more if they are enough."""
    spare = source.forget()
    part_bytes = sum(int(move.received_bytes.sum()) for move in moves)
    spare_bytes = len(spare) * memory_source.SPARE // (memory_source.SPARE + 1) if spare else 0
    memory_source.check_alone(part_bytes, spare_bytes)  # others may have taken memory since
    return Arena(np.concatenate([records for move in moves for records in move.received]), source.lengths, spare)


def alltoallv_buffer(raw: np.ndarray, size_bytes: np.ndarray, begins: np.ndarray | None = None) -> list:
    """u8 as MPI takes it, with each member's bytes and offsets, side by side if there are no `begins`."""
    return [raw, (size_bytes, np.cumsum(size_bytes) - size_bytes if begins is None else begins), "B"]


def keep_in_memory(
    source: Source,
    data: Data,
    seed: int,
    effective_batch: int,
    train: bool,
    workers: Workers,
    multiple: int = 1,
    sampler: type[GroupSampler] = GroupSampler,
) -> tuple[MemoryShuffle, tuple[GroupSampler, ...]]:
    """A store for a source's records, not yet loaded, and its samplers.

    Examples of an evaluation are read in one order always: each worker keeps those that it reads.

    Communicates: makes a communicator of each group; two allgathers over it. With `data.group_size` auto, rank 0 also
    sends the mean length of a sample that it reads. All ranks then gather the memory that is left on each host.

    Raises:
        UsageError: the workers cannot be split into groups of that size.
    """
    n, size, per_process, control = len(source), workers.size, len(workers.mine), workers.processes
    inside = MemorySource(source, data)
    options: dict[str, Any] = {"shuffle": train, "multiple": multiple, "period": data.shuffle_period}
    parts = 1
    if train and data.group_size == "auto":
        mean_bytes = float(control.bcast_object(inside.mean_bytes() if control.rank == 0 else 0.0))
        available = control.allgather_array(np.array([available_bytes()]))[:, 0]
        parts = memory_source.smallest_group(n * mean_bytes, available, control.hosts, per_process)
    elif train:
        parts = memory_source.check_group(int(data.group_size), size, per_process)
    samplers = tuple(sampler(n, effective_batch, rank, size, seed, **options, parts=parts) for rank in workers.mine)
    if not train:
        fixed = np.flatnonzero(np.isin(place_owners(n, effective_batch, size), workers.mine))
        return MemoryShuffle(inside, control, fixed, None, samplers[0]), samplers
    if not isinstance(control, MpiProcesses) or parts <= per_process:
        return MemoryShuffle(inside, control, np.arange(n), None, samplers[0]), samplers
    group = control.world.Split(control.rank // (parts // per_process), control.rank)
    return MemoryShuffle(inside, control, None, group, samplers[0], per_process, control.may_overlap), samplers
