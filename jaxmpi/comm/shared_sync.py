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
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError, check
from jaxmpi.core.futex import fence, sleep_on, wake
from jaxmpi.core.shared_memory import folder, reserve
from jaxmpi.runtime import job_folder
from jaxmpi.runtime.process import stat_of

SEGMENT_BYTES = 46 << 20  # bytes of shared memory at most, whatever the vectors' sizes
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
        """Take a new table of zeros, and mark this rank as present.

        Args:
            what: all of them do together, for messages.
        """
        self.rank, self.size, self.timeout_s, self.what = rank, size, timeout_s, what
        self.words = memoryview(memory)[: table_bytes(size)].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.failed = size * ROW
        self.call = 0
        # With a core for every rank a peer comes in microseconds. Else who sleeps at once is woken first; who yields
        # has to wait for all that others run on the core.
        self.yields = 0 if size > (os.cpu_count() or 1) else 20
        self.words[rank * ROW + PID_SPACE] = job_folder.pid_space()
        self.words[rank * ROW + PID] = os.getpid()

    def check_all_here(self) -> None:
        """Refuse ranks that share no memory."""
        strangers = [rank for rank in range(self.size) if not self.words[rank * ROW + PID]]
        check(
            not strangers,
            f"local ranks {strangers} share no memory with local rank {self.rank} under {folder()}, though MPI says "
            "that they are on one host; start all of them in one container, or use another strategy, such as asa",
        )

    def begin(self, header: tuple[int, int, int]) -> None:
        """Start a call with a header: digest, numbers of vectors and floats."""
        self._check_none_failed()
        self.call += 1
        start = self.rank * ROW + HEADER + 3 * (self.call % 2)
        for i, word in enumerate(header):
            self.words[start + i] = word

    def header(self, rank: int) -> list[int]:
        """Header of a rank that has come to this call."""
        start = rank * ROW + HEADER + 3 * (self.call % 2)
        return [*self.words[start : start + 3]]

    def check_same(self, rank: int) -> None:
        """Refuse a rank that has come to this call with something else."""
        mine, theirs = self.header(self.rank), self.header(rank)
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
        while (seen := self.words[word]) < value:
            self.words[word + 1] = 1
            sleep_on(self.address + 8 * word, seen, pause_s)
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
        self._check_alive(rank)
        late = [other for other in range(self.size) if arrived[other] < self.call]
        self._check_time(late or [rank], waited_s)

    def _check_alive(self, rank: int) -> None:
        if self._has_ended(rank):
            raise TrainingError(f"local rank {rank} has ended; local rank {self.rank} waited for it in {self.what}")

    def _check_time(self, late: Sequence[int], waited_s: float) -> None:
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


class SharedMemoryFile(NamedTuple):
    """A file to map."""

    path: str  # empty if there is none
    size_bytes: int = 0
    chunk: int = 0  # floats of a chunk in it
    trouble: str = ""  # why there is none


def map_together(host: HostProcesses, make: Callable[[], SharedMemoryFile]) -> tuple[mmap.mmap, int]:
    """Zeroed memory that a host's ranks share, and its floats a chunk.

    A rank that cannot map it gets memory of its own, so that all ranks go on to find out.
    """
    host.host_barrier()  # all are here, so the file's name lasts for a moment only
    # Forked workers' lines carry JSON, in which a tuple is a list.
    made = SharedMemoryFile(*host.bcast_from_host_leader(make))
    check(bool(made.path), made.trouble)
    try:
        try:
            with open(made.path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), made.size_bytes)
        except OSError:  # the first call finds that ranks do not see each other
            memory = mmap.mmap(-1, made.size_bytes)
        host.host_barrier()
    finally:
        if host.local_rank == 0:
            forget(made.path)
    return memory, made.chunk


def forget(path: str) -> None:
    """Let the memory go with the last that has mapped it."""
    if path.startswith("/proc/"):
        os.close(int(os.path.basename(path)))
    else:
        os.unlink(path)


def reserved_anywhere(size_bytes: int, spare_bytes: int = 0) -> SharedMemoryFile:
    """A file of that size in memory, else one without a name.

    A container often has 64 MiB for the first.

    Args:
        size_bytes: of the file.
        spare_bytes: that are left there for others.
    """
    made = reserved(size_bytes, spare_bytes)
    if made.path or not hasattr(os, "memfd_create"):
        return made
    handle = os.memfd_create("jaxmpi")
    try:
        reserve(handle, size_bytes)
    except OSError:
        os.close(handle)
        return made
    return SharedMemoryFile(f"/proc/{os.getpid()}/fd/{handle}", size_bytes)


def reserved(size_bytes: int, spare_bytes: int = 0) -> SharedMemoryFile:
    """A file of that size in memory, if there is room."""
    try:
        if spare_bytes and shutil.disk_usage(folder()).free < size_bytes + spare_bytes:
            return SharedMemoryFile("", trouble="the rest is for sums")
        handle, path = tempfile.mkstemp(prefix="jaxmpi-", dir=folder())
    except OSError as error:
        return SharedMemoryFile("", trouble=str(error.strerror))
    try:
        reserve(handle, size_bytes)
        return SharedMemoryFile(path, size_bytes)
    except OSError as error:
        os.unlink(path)
        return SharedMemoryFile("", trouble=str(error.strerror))
    finally:
        os.close(handle)
