"""A worker's part of a data set in memory, brought to where the epoch's order wants it by a thread of its own.

A worker reads the records of others on its host out of their memory. Those of other hosts travel by MPI_Ialltoallv over
a communicator of the group's own, made when all ranks open their data, and used by one thread at a time. The thread
sleeps between looks at it: it must not spin on a core that computes.
"""

import collections
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxmpi.comm.control import MpiProcesses, Processes
from jaxmpi.comm.polling import WaitClock
from jaxmpi.comm.topology import Workers
from jaxmpi.config.data import Data
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError
from jaxmpi.data.group_cache import (
    Arena,
    GroupSampler,
    MemorySource,
    Move,
    check_group,
    check_room,
    holders_by_place,
    holders_by_slice,
    members,
    room,
    shuffled,
    slices,
)
from jaxmpi.data.sampler import Sampler
from jaxmpi.data.sources.base import Source
from jaxmpi.input_pipeline.peer_memory import PeerArena, PeerMemory, addresses

THREAD = "jaxmpi shuffle"
POLL_S = 0.0002  # between looks at what travels
AHEAD = 2  # segments under way: one is copied together while the one before travels
FORBIDDEN = (
    "jaxmpi: data in memory: this host does not let workers read each other's memory (kernel.yama.ptrace_scope, or a "
    "container's rules), so shuffles go by MPI and take up to twice as long"
)
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)


class MemoryShuffle:
    """Store that keeps the records of one split in memory on the workers that read them.

    Args:
        source: whose memory is filled.
        control: of all ranks.
        own: i64[k], the records to load for good; None where they are shuffled over a group.
        group: communicator of mpi4py, this object's alone; None if nothing travels.
        sampler: the order of the split, of any worker.
        each: workers of a process.
        in_background: whether MPI may be called from a thread beside others.
    """

    def __init__(
        self,
        source: MemorySource,
        control: Processes,
        own: np.ndarray | None,
        group: Any,
        sampler: Sampler,
        each: int = 1,
        in_background: bool = True,
    ) -> None:
        self.source, self.control, self.own, self.sampler, self.each = source, control, own, sampler, each
        self.group: Any = group
        self.shuffle_s: list[float] = []  # seconds that each shuffle has taken
        self.sent_bytes: list[int] = []  # by this worker in each, what stayed here included
        if group is not None:
            first = control.rank - group.rank
            self.neighbours = PeerMemory(group, control.hosts[first : first + group.size])
            if self.neighbours.is_forbidden and control.rank == 0:
                print(FORBIDDEN, file=sys.stderr)
        self._is_loaded = False
        self._epoch, self._last = -1, None  # that is read, and the last that will be
        self._placed: int | None = None  # the epoch in whose places records lie or will; None: as they were loaded
        # Shuffles, which keep this object alive until they are done; the thread does not.
        self._wanted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._end: weakref.finalize | None = None
        if group is not None and in_background:
            thread = threading.Thread(target=_work, args=(self._wanted,), name=THREAD, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _stop, thread, self._wanted)

    def stop(self) -> None:
        """End the thread once what it has begun is done."""
        if self._end:
            self._end()

    def close(self) -> None:
        """`stop`, and give the communicator back; all ranks come here together."""
        self.stop()
        if self.group is not None:
            self.group.Free()
            self.group = None

    def begin(self, step: int, stop: int | None) -> None:
        """Have in memory what is read from `step` on, until `stop`; all ranks come here together.

        Communicates, the first time: what memory is needed and left, an allgather over all ranks; lengths, labels and
        marks of the records, an allgather over the group.

        Raises:
            UsageError: on all ranks alike: a host has too little memory for its ranks.
        """
        if not self._is_loaded:
            self._load()
            self._is_loaded = True
        per_epoch = max(self.sampler.steps_per_epoch, 1)
        self._epoch, self._last = -1, None if stop is None else (stop - 1) // per_epoch
        self._want(step // per_epoch)

    def reached(self, epoch: int) -> None:
        """Say that all batches before this epoch have been made; bring what the next one needs."""
        if epoch != self._epoch and self.group is not None:
            self._epoch = epoch
            is_last = self._last is not None and epoch >= self._last
            if is_last or not self._want(epoch + 1):
                self.source.forget()

    def _load(self) -> None:
        if self.own is not None:
            return self.source.load(self.own, self._check_room)
        group, source = self.group, self.source
        begins = slices(len(source), group.size)
        source.load(np.arange(begins[group.rank], begins[group.rank + 1]), self._check_room)
        self._wait(group.Ibarrier())  # others read slower
        for values in (source.lengths, source.labels, source.is_corrupt.view(np.uint8)):
            mine = values[begins[group.rank] : begins[group.rank + 1]].copy()
            group.Allgatherv(mine, [values, (np.diff(begins).tolist(), begins[:-1])])
        self._check_room(source.lengths.sum() / group.size, source.newest().bytes.size)  # now all lengths are known

    def _check_room(self, part_bytes: float, held_bytes: float) -> None:
        mine = room(part_bytes, held_bytes, copies=1 if self.group is None else 2)
        rows, control = mine[None], self.control
        if isinstance(control, MpiProcesses):
            rows = np.empty((control.size, mine.size))
            self._wait(control.world.Iallgather(mine, rows), "ranks to say what memory they need")  # some read slower
        check_room(rows, control.hosts)

    def _want(self, epoch: int) -> bool:
        """Have the records brought to where this epoch wants them; whether any move."""
        if self.group is None:
            return False
        assert isinstance(self.sampler, GroupSampler)
        placed = self.sampler.moved(epoch)
        if placed == self._placed:
            return False
        self.source.promise()
        bring = partial(self._bring, placed, self._placed)
        if self._end:
            self._wanted.put(bring)
        else:
            bring()
        self._placed = placed
        return True

    # ------------------------------------------------------------ the thread's own

    def _bring(self, epoch: int, before: int | None) -> None:
        """Shuffle records from where those of one epoch lie to where those of another do."""
        assert isinstance(self.sampler, GroupSampler)
        group, source = self.group, self.source
        begin = time.perf_counter()
        order, parts = self.sampler.places(epoch), group.size
        whose = members(len(source), self.sampler.effective_batch, parts * self.each) // self.each
        if before is None:
            holders = holders_by_slice(len(source), parts)
        else:
            holders = holders_by_place(self.sampler.places(before), whose)
        arena, moves = shuffled(source, order, holders, whose, group.rank, parts, source.forget())
        source.expect(arena.records)
        self._fill(arena, moves)
        self._wait(group.Ibarrier())  # others may still read what this member forgets next
        source.take(arena)
        self.shuffle_s.append(time.perf_counter() - begin)
        self.sent_bytes.append(sum(int(move.sent_bytes.sum()) for move in moves))

    def _fill(self, arena: Arena, moves: list[Move]) -> None:
        under_way: collections.deque[tuple[Any, np.ndarray]] = collections.deque()
        old, at, is_far = self._old(), 0, ~self.neighbours.near
        for move in moves:
            received = arena.bytes[at : at + int(move.received_bytes.sum())]
            at += received.size
            begins = np.cumsum(move.received_bytes) - move.received_bytes
            if is_far.any():
                under_way.append(self._sent(move, is_far, received, begins))
            for m, near in old.items():
                near.gather(move.received[move.source == m], received[begins[m] : begins[m] + move.received_bytes[m]])
            if len(under_way) == AHEAD:
                self._wait(under_way.popleft()[0])
        while under_way:
            self._wait(under_way.popleft()[0])

    def _old(self) -> dict[int, Arena | PeerArena]:
        """The complete arenas of this member and those near it."""
        group, source, neighbours = self.group, self.source, self.neighbours
        rows = np.empty((group.size, 4), np.int64)
        self._wait(group.Iallgather(addresses(source.newest()), rows))
        near = np.roll(np.flatnonzero(neighbours.near), -group.rank)  # not all read the same one first
        old = {m: PeerArena(int(neighbours.pids[m]), rows[m], source.lengths) for m in near.tolist() if m != group.rank}
        return old | {group.rank: source.newest()}

    def _sent(self, move: Move, is_far: np.ndarray, received: np.ndarray, begins: np.ndarray) -> tuple[Any, np.ndarray]:
        """The request under way that sends records to members far away and receives theirs; and what it sends."""
        sent = self.source.newest().gather(move.sent[is_far[move.to]])
        leaving, coming = move.sent_bytes * is_far, move.received_bytes * is_far
        return self.group.Ialltoallv(message(sent, leaving), message(received, coming, begins)), sent

    def _wait(self, request: Any, what: str = "workers of its group; all must read as many epochs") -> None:
        waited = WaitClock()
        while not request.Test():
            if waited.look() > TIMEOUT_S:
                raise TrainingError(
                    f"the data set in memory has waited {TIMEOUT_S:.0f} s for the other {what} "
                    "(JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
                )
            time.sleep(POLL_S)


def _work(wanted: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (bring := wanted.get()) is not None:
        bring()
        del bring  # else an idle thread keeps the records alive


def _stop(thread: threading.Thread, wanted: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    wanted.put(None)
    if thread is not threading.current_thread():  # it is where the object has ended with its last shuffle
        thread.join()


def message(raw: np.ndarray, size_bytes: np.ndarray, place: np.ndarray | None = None) -> list:
    """u8 as MPI takes it, with the bytes of each member, side by side or at a place; all of them below 2^31."""
    return [raw, (size_bytes, np.cumsum(size_bytes) - size_bytes if place is None else place), "B"]


def keep(
    source: Source,
    data: Data,
    seed: int,
    effective_batch: int,
    train: bool,
    workers: Workers,
    multiple: int = 1,
) -> tuple[MemoryShuffle, tuple[Sampler, ...]]:
    """A source's records in the memory of this job, not yet loaded, and the order in which its workers read them.

    Examples of an evaluation are read in one order for ever: each worker keeps those that it reads.

    Communicates: makes a communicator of each group; two allgathers over it.

    Raises:
        UsageError: the workers cannot be split into groups of that size.
    """
    n, size, each = len(source), workers.size, len(workers.mine)
    parts = check_group(data.group_size, size, each) if train else 1
    options = {"shuffle": train, "multiple": multiple, "parts": parts, "period": data.shuffle_period}
    samplers = tuple(GroupSampler(n, effective_batch, rank, size, seed, **options) for rank in workers.mine)
    control, inside = workers.processes, MemorySource(source, data)
    if not train:
        own = np.flatnonzero(np.isin(members(n, effective_batch, size), workers.mine))
        return MemoryShuffle(inside, control, own, None, samplers[0]), samplers
    if not isinstance(control, MpiProcesses) or parts <= each:
        return MemoryShuffle(inside, control, np.arange(n), None, samplers[0]), samplers
    group = control.world.Split(control.rank // (parts // each), control.rank)
    return MemoryShuffle(inside, control, None, group, samplers[0], each, control.may_overlap), samplers
