"""Rows of shared memory in which a host's ranks publish their progress.

Ranks that sum in shared memory must know how far the others are, without a message for each chunk. A rank writes
counters in its own row and reads the rows of the others. A waiting rank first yields its core some times, then sleeps
on a futex. Yielding is left out if a host has fewer cores than ranks, since it delays the waiting rank. Each sleep is
at most 50 ms long, because an early wake-up is lost. A rank that waits longer also checks for dead processes, different
calls and the time limit.
"""

import ctypes
import functools
import hashlib
import mmap
import os
from typing import Any

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.futex import fence, sleep_on, wake
from jaxmpi.core.shared_memory import GoneError, Segment, attached
from jaxmpi.runtime import job_folder
from jaxmpi.runtime.process import stat_of

TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)


# ---------------------------------------------------------------- what ranks tell each other


ROW = 16  # words of 8 bytes a rank: two cache lines
# Words of a row. A counter only grows, has one writer, and is followed by a word that says whether somebody sleeps on
# it. The header of a call is three words, those of even and of odd calls lie apart.
ARRIVED, SUMMED, COPIED, PID, PID_SPACE, HEADER = 0, 2, 4, 6, 7, 8


def table_bytes(size: int) -> int:
    """Bytes of ranks' rows and a row for failures, in whole pages."""
    return -(-(size + 1) * ROW * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedCounters:
    """Counters of a host's ranks, and how to wait for them."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float, what: str = "a sum") -> None:
        """Take a new table of zeros, and mark this rank as present; messages say what ranks do together."""
        self.rank, self.size, self.timeout_s, self.what = rank, size, timeout_s, what
        self.words = memoryview(memory)[: table_bytes(size)].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.failed = size * ROW
        self.call = 0
        # With a core for every rank a peer comes in microseconds. Else who sleeps at once is woken first; who yields
        # has to wait for all that others run on the core.
        self.yields = 0 if size > (os.cpu_count() or 1) else 20
        self.words[rank * ROW + PID] = os.getpid()
        self.words[rank * ROW + PID_SPACE] = job_folder.pid_space()  # from now on others may look whether it has ended

    def begin(self, header: tuple[int, int, int]) -> None:
        """Start a call with a header: digest, numbers of vectors and floats."""
        self._check_none_failed()
        self.call += 1
        self._unchecked = {rank for rank in range(self.size) if rank != self.rank}
        start = self.rank * ROW + HEADER + 3 * (self.call % 2)
        for i, word in enumerate(header):
            self.words[start + i] = word

    def check_same(self, rank: int) -> None:
        """Refuse a rank that has come to this call with something else."""
        places = [number * ROW + HEADER + 3 * (self.call % 2) for number in (self.rank, rank)]
        mine, theirs = ([*self.words[place : place + 3]] for place in places)
        odd = " in other parts or with another divisor or half" * (mine[1:] == theirs[1:])
        check(
            mine == theirs,
            f"local rank {rank} sums {theirs[1]} vectors of {theirs[2]} floats in all, local rank {self.rank} "
            f"{mine[1]} of {mine[2]}{odd}; all ranks must sum the same list",
        )

    def post(self, kind: int, value: int) -> None:
        """Set this rank's counter and wake who waits for it."""
        word = self.rank * ROW + kind
        fence()
        self.words[word] = value
        if self.words[word + 1]:
            self.words[word + 1] = 0
            wake(self.address + 8 * word)

    def wait(self, rank: int, kind: int, value: int) -> None:
        """Return when a rank's counter has come to `value`."""
        word, words = rank * ROW + kind, self.words
        if words[word] < value and not self._yielded(word, value):
            self._sleep(rank, word, value)
        fence()

    def meet(self, rank: int, kind: int, value: int) -> None:
        """Return when a rank's counter has come to a value of this call, and the rank has come with the same header.

        A header stays until its rank begins the call after the next, for which this rank must have left this call.
        """
        self.wait(rank, kind, value)
        if rank in self._unchecked:
            self.check_same(rank)
            self._unchecked.remove(rank)

    def wait_for_all(self, kind: int, value: int) -> int:
        """Return the least counter, once all have come to `value`."""
        for rank in range(self.size):
            self.wait(rank, kind, value)
        return min(self.words[kind : self.size * ROW : ROW])

    def _yielded(self, word: int, value: int) -> bool:
        for _ in range(self.yields):
            os.sched_yield()
            if self.words[word] >= value:
                return True
        return False

    def _sleep(self, rank: int, word: int, value: int) -> None:
        """Sleep until woken, with checks: early wake-ups are lost, and ranks die."""
        waited, pause_s = WaitClock(), 0.002
        while (current := self.words[word]) < value:
            self.words[word + 1] = 1
            sleep_on(self.address + 8 * word, current, pause_s)
            self._check_none_failed()
            pause_s, waited_s = min(2 * pause_s, 0.05), waited.look()
            if pause_s == 0.05:
                self._look_around(rank, waited_s)

    def _look_around(self, rank: int, waited_s: float) -> None:
        """Raise if there is nothing to wait for."""
        arrived = [self.words[other * ROW + ARRIVED] for other in range(self.size)]
        for other in range(self.size):
            if arrived[other] == self.call:
                self.check_same(other)
        if self._has_ended(rank):
            raise TrainingError(f"local rank {rank} has ended; local rank {self.rank} waited for it in {self.what}")
        late = [other for other in range(self.size) if arrived[other] < self.call] or [rank]
        if waited_s > self.timeout_s:
            raise TrainingError(
                f"local rank {self.rank} waited {waited_s:.0f} s in {self.what} for local rank "
                f"{', '.join(map(str, late))}; all ranks must come to it as often ("
                "JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
            )

    def fail(self) -> None:
        """Let the others know that this rank will not go on."""
        self.words[self.failed] = self.words[self.failed] or self.rank + 1

    def _check_none_failed(self) -> None:
        if failed := self.words[self.failed]:
            raise TrainingError(
                f"local rank {failed - 1} failed in {self.what} over this host; its own message says why"
            )

    def _has_ended(self, rank: int) -> bool:
        """Return True if a rank's process has ended, where it is visible."""
        if not job_folder.pid_space() or self.words[rank * ROW + PID_SPACE] != job_folder.pid_space():
            return False
        try:
            return stat_of(self.words[rank * ROW + PID])[0] in "ZX"  # dead, though nobody has asked how
        except (FileNotFoundError, ProcessLookupError):  # the second if it ends meanwhile
            return True


@functools.lru_cache(maxsize=64)
def digest(sizes: tuple[int, ...], divisor: float, half: str = "") -> int:
    """Digest of what must be equal on all ranks, in 63 bits."""
    return int.from_bytes(hashlib.sha256(repr((sizes, divisor, half)).encode()).digest()[:8]) >> 1


# ---------------------------------------------------------------- memory


def map_together(host: HostProcesses, size_bytes: int, purpose: str) -> mmap.mmap:
    """Zeroed memory that a host's ranks share; it has no name, and goes with the last that maps it.

    Args:
        purpose: of the memory, and the way out if there is no room, as of `Segment`.

    Raises:
        UsageError: there is no room, or a rank cannot map it; on all ranks alike.
    """
    whole_bytes = size_bytes + host.local_size  # behind the memory a mark of each rank
    segments: list[Segment] = []

    def make() -> Any:
        try:
            segments.append(Segment(whole_bytes, purpose))
            return segments[0].address
        except UsageError as error:
            return str(error)

    address = host.bcast_from_host_leader(make)
    if isinstance(address, str):
        raise UsageError(address)
    try:
        memory = (segments[0] if segments else attached(*address)).bytes
    except GoneError:
        memory = mmap.mmap(-1, whole_bytes)  # of this rank alone, in which the others' marks are missing
    memory[size_bytes + host.local_rank] = 1
    host.host_barrier()  # until then the first rank keeps the segment
    strangers = [rank for rank in range(host.local_size) if not memory[size_bytes + rank]]
    check(
        not strangers,
        f"local ranks {strangers} share no memory with local rank {host.local_rank}, though MPI says that they are on "
        "one host; start all of them in one container, or use another strategy, such as asa",
    )
    return memory
