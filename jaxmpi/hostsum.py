"""Sums over the ranks of one host through shared memory, in NumPy, inside jit through a handler.

A chain. The vectors, end to end, are cut into chunks small enough to stay in the processor's caches. Rank 0 copies a
chunk into a slot of shared memory, rank 1 adds its own, and so on to the last rank; then every rank copies the result
out, divided where a mean is asked for. All work at once, each on another chunk. So a rank reads its operands from
memory once and writes its results once, in two passes; slices that are copied in, summed and copied out take three.
The order of additions is that of the ranks, however the vectors are cut: the same bits on all ranks and in every run.
"""

import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxmpi import handlers, runtime, spans
from jaxmpi.config import TrainingError, UsageError, check, seconds_from

CHUNK = 128 << 10  # floats: 512 KiB, of which a core's second-level cache holds one or two
SHORT = 32 << 10  # floats of a chunk at least, where vectors are too short to give every rank four longer ones
SMALL = 256 << 10  # floats of all ranks together, up to which every rank sums everything: one wait, not one a rank
LEAST = 1 << 10  # floats of a chunk where room is short
SEGMENT_BYTES = 46 << 20  # of shared memory at most, whatever the vectors' sizes
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)


class Host(Protocol):
    """What is needed of the control plane between the ranks of a host."""

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        ...

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        ...

    def host_barrier(self) -> None:
        """Wait for all ranks of this host."""
        ...

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank of this host makes, on all its ranks."""
        ...


# ---------------------------------------------------------------- the sum


class SharedSum:
    """Sums of lists of float32 vectors over all ranks of a host, bitwise equal on all of them."""

    def __init__(self, host: Host, name: str, timeout_s: float = TIMEOUT_S, effect: Any = handlers.ORDERED) -> None:
        """Map the shared memory; all ranks of the host must come here together.

        Args:
            host: the ranks that sum.
            name: of the Python function that programs call; the same on all ranks, and new.
            timeout_s: how long a rank waits in a sum for a rank that does not move.
            effect: what orders sums among other calls in programs, as of `handlers.call`.

        The memory has a name only until all ranks have mapped it, so none is left behind, however a job ends.

        Raises:
            UsageError: no room for shared memory, or ranks that cannot share it; on all ranks alike.
        """
        self.name, self.effect = name, effect
        self.rank, self.size = host.local_rank, host.local_size
        self.slots = max(16, 2 * self.size)  # half of them lie between the first rank and the last
        memory, self.chunk = map_together(host, lambda: make_file(self.size, self.slots))
        self.board = Board(memory, self.rank, self.size, timeout_s)
        host.host_barrier()
        self.board.check_all_here()
        floats = np.frombuffer(memory, np.float32, offset=table_bytes(self.size))
        self.small = SMALL // self.size // 16 * 16
        self.rows, self.ring = np.split(floats, [2 * self.size * self.small])
        self.rows = self.rows.reshape(2, self.size, self.small)  # of even and of odd calls
        self.ring = self.ring[: self.slots * self.chunk].reshape(self.slots, self.chunk)
        # The last rank can divide for all, in cache, but others with cores of their own wait for it meanwhile.
        self.each_divides = self.size <= 3 * (os.cpu_count() or 1)
        self.lock = threading.Lock()  # programs of several threads are in no order
        self.summed = 0  # chunks, in all calls so far
        self.free = self.slots  # chunks whose slots are not in use, as far as rank 0 knows
        handlers.register(name, self.add)

    def close(self) -> None:
        """Let go of the name; the memory goes with the object."""
        handlers.forget(self.name)

    def sum(self, vectors: Sequence[jax.Array], divisor: float = 1, in_place: bool = False) -> list[jax.Array]:
        """Sums over the ranks of this host, divided by `divisor`, of f32 arrays of any shape; inside or outside jit.

        Args:
            vectors: the same shapes on every rank.
            divisor: 1 for sums, the number of ranks for means; divides the f32 sum.
            in_place: whether results may take the place of the vectors, where XLA needs those no longer.

        Communicates: one call in all, through shared memory. Raises, where results are waited for: as `add`.
        """
        odd = [f"{vector.dtype}{list(vector.shape)}" for vector in vectors if vector.dtype != np.float32]
        check(not odd, f"a sum over this host got {', '.join(odd)}; expected float32: cast before")
        like = [jax.ShapeDtypeStruct(vector.shape, vector.dtype) for vector in vectors]
        pairs = [(i, i) for i in range(len(like))] if in_place else []
        return handlers.call(self.name, vectors, like, pairs, self.effect, divisor=float(divisor))

    def sum_now(self, arrays: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """`sum` outside jit, without a program: done when it returns, in order behind the programs begun before.

        To call a program with an ordered effect takes 0.5 ms more, as JAX does that in Python.
        """
        try:
            if not all_is_done():
                return jax.block_until_ready(self.sum(arrays, divisor))
            operands = [np.asarray(x, order="C") for x in arrays]
            results = [aligned(x.shape, np.float32) for x in arrays]
        except BaseException:
            self.board.fail()
            raise
        self.add(operands, results, divisor)
        return jax.device_put(results, [x.sharding for x in arrays])

    def add(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], divisor: float = 1) -> None:
        """results[i] <- (sum_r operands[i] of rank r) / divisor; a result may be its operand.

        f32, C-contiguous, any shape, any number of floats. All ranks must call it, in the same order. Waits without
        spinning.

        Raises:
            UsageError: no f32, or ranks gave different sizes or divisors.
            TrainingError: a rank has ended, failed, or not moved within the time limit; it is named.
        """
        try:
            vectors, totals = [flat(x) for x in operands], [flat(x) for x in results]
            sizes = tuple(vector.size for vector in vectors)
            check(sizes == tuple(total.size for total in totals), f"operands have sizes {sizes}, results others")
            # NaN and infinity pass through to all ranks.
            with spans.span("wait", "sum in shared memory"), self.lock, np.errstate(all="ignore"):
                self.board.begin((digest(sizes, float(divisor)), len(sizes), sum(sizes)))
                self._run(vectors, totals, sizes, np.float32(divisor))
        except BaseException:
            self.board.fail()
            raise

    def _run(self, vectors: list, totals: list, sizes: tuple[int, ...], divisor: np.float32) -> None:
        if sum(sizes) <= self.small and len(chunks := cut(sizes, self.small)) <= 1:
            return self._together(vectors, totals, chunks[0] if chunks else Chunk((), 0), divisor)
        four_a_rank = -(-sum(sizes) // (4 * self.size * LEAST)) * LEAST
        return self._chain(vectors, totals, cut(sizes, min(self.chunk, max(four_a_rank, SHORT))), divisor)

    def _together(self, vectors: list, totals: list, chunk: "Chunk", divisor: np.float32) -> None:
        """Every rank sums all ranks' rows. They are free: all have come to a call since their last use."""
        call = self.board.call
        rows = self.rows[call % 2, :, : chunk.floats]
        copy_in(vectors, chunk, rows[self.rank])
        self.board.post(ARRIVED, call)
        for rank in range(self.size):
            self.board.wait(rank, ARRIVED, call)
            self.board.check_same(rank)
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        copy_out(total, chunk, totals, divisor)

    def _chain(self, vectors: list, totals: list, chunks: tuple["Chunk", ...], divisor: np.float32) -> None:
        """Add to chunk j, copy out chunk j - size, which the last rank has by then."""
        self.board.post(ARRIVED, self.board.call)
        first, lag = self.summed, self.size
        for j in range(len(chunks) + lag):
            if j >= lag:
                slot = self.ring[(first + j - lag) % self.slots]
                self.board.wait(self.size - 1, SUMMED, first + j - lag + 1)
                copy_out(slot, chunks[j - lag], totals, divisor if self.each_divides else None)
                self.board.post(COPIED, first + j - lag + 1)
            if j < len(chunks):
                self._add_mine(first + j, chunks[j], vectors, divisor)
        self.summed += len(chunks)

    def _add_mine(self, k: int, chunk: "Chunk", vectors: list, divisor: np.float32) -> None:
        """The link of the chain that is this rank's, for the k-th chunk of all."""
        slot = self.ring[k % self.slots]
        if self.rank == 0:
            if k >= self.free:
                self.free = self.slots + self.board.wait_for_all(COPIED, k + 1 - self.slots)
            copy_in(vectors, chunk, slot)
        else:
            self.board.wait(self.rank - 1, SUMMED, k + 1)
            if k == self.summed:
                self.board.check_same(self.rank - 1)
            add_to(slot, chunk, vectors)
        if self.rank == self.size - 1 and not self.each_divides and divisor != 1:
            divide, number = division(float(divisor))
            divide(slot[: chunk.floats], number, slot[: chunk.floats])
        self.board.post(SUMMED, k + 1)


def all_is_done() -> bool:
    """Wait for the programs begun; False where one has failed, whose own caller has been told.

    Then only a program knows what is before it.
    """
    try:
        jax.effects_barrier()
    except Exception:  # of any program
        return False
    return True


class Piece(NamedTuple):
    """Part of a vector, and where it lies in a chunk."""

    vector: int
    part: slice
    place: slice


class Chunk(NamedTuple):
    """Pieces side by side."""

    pieces: tuple[Piece, ...]
    floats: int


@functools.lru_cache(maxsize=64)
def cut(sizes: tuple[int, ...], chunk: int) -> tuple[Chunk, ...]:
    """Vectors of these sizes, end to end, as chunks of at most `chunk` floats; pieces start at multiples of 16."""
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    used = 0
    for vector, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + chunk - used)
            pieces.append(Piece(vector, slice(start, stop), slice(used, used + stop - start)))
            used += -(-(stop - start) // 16) * 16  # 64 bytes, as XLA aligns its buffers
            start = stop
            if used >= chunk:
                chunks.append(Chunk(tuple(pieces), chunk))
                pieces, used = [], 0
    return (*chunks, Chunk(tuple(pieces), used)) if pieces else tuple(chunks)


def copy_in(vectors: Sequence[np.ndarray], chunk: Chunk, slot: np.ndarray) -> None:
    """A chunk of the vectors to the slot."""
    for vector, part, place in chunk.pieces:
        np.copyto(slot[place], vectors[vector][part])


def add_to(slot: np.ndarray, chunk: Chunk, vectors: Sequence[np.ndarray]) -> None:
    """Add a chunk of the vectors to the slot."""
    for vector, part, place in chunk.pieces:
        there = slot[place]
        np.add(there, vectors[vector][part], there)


def copy_out(slot: np.ndarray, chunk: Chunk, totals: Sequence[np.ndarray], divisor: np.float32 | None) -> None:
    """The slot, divided where there is a divisor, to its places in the results."""
    if divisor is None or divisor == 1:
        for vector, part, place in chunk.pieces:
            np.copyto(totals[vector][part], slot[place])
        return
    divide, number = division(float(divisor))
    for vector, part, place in chunk.pieces:
        divide(slot[place], number, totals[vector][part])


@functools.lru_cache(maxsize=64)
def division(divisor: float) -> tuple[np.ufunc, np.float32]:
    """How to divide by it: by a power of two the product with its inverse has the same bits, and is quicker."""
    is_power = math.frexp(divisor)[0] == 0.5 and 2.0**-126 <= abs(divisor) <= 2.0**126
    return (np.multiply, np.float32(1 / divisor)) if is_power else (np.divide, np.float32(divisor))


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Fresh memory that JAX takes over as it is: it copies what does not begin at a multiple of 64 bytes."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def flat(array: np.ndarray) -> np.ndarray:
    """An array as f32[n], without a copy."""
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise UsageError(
            f"a sum over this host got {array.dtype}{list(array.shape)} with strides {array.strides}; "
            "expected float32, C-contiguous"
        )
    return array.reshape(-1)


# ---------------------------------------------------------------- what ranks tell each other

ROW = 16  # words of 8 bytes a rank: two cache lines
# Words of a row. A counter only grows, has one writer, and is followed by a word that says whether somebody sleeps on
# it. The header of a call is three words, those of even and of odd calls lie apart.
ARRIVED, SUMMED, COPIED, PID, PID_SPACE, HEADER = 0, 2, 4, 6, 7, 8


def table_bytes(size: int) -> int:
    """Of a row a rank, and one for the word that says who has failed; whole pages."""
    return -(-(size + 1) * ROW * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """Counters of all ranks of a host, and how to wait for them."""

    what = "a sum"  # that ranks wait for each other in, for messages

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        """Take a fresh table, of zeros, and say that this rank is here."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.words = memoryview(memory)[: table_bytes(size)].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.failed = size * ROW
        self.call = 0
        # With a core for every rank a peer comes in microseconds. Else who sleeps at once is woken first; who yields
        # has to wait for all that others run on the core.
        self.yields = 0 if size > (os.cpu_count() or 1) else 20
        self.words[rank * ROW + PID_SPACE] = runtime.pid_space()
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
        """Start a call: say what this rank brings; of a sum the digest, the number of vectors and of floats."""
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
        check(
            mine == theirs,
            f"local rank {rank} sums {theirs[1]} vectors of {theirs[2]} floats in all, local rank {self.rank} "
            f"{mine[1]} of {mine[2]}{' in other parts or with another divisor' * (mine[1:] == theirs[1:])}; "
            "all ranks must sum the same list",
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
        """Return when all ranks' counters have come to `value`: the least of them."""
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
        """Sleep until woken, and look around now and then: a wake-up that comes too early is lost, and ranks die."""
        begin, pause_s = time.monotonic(), 0.002
        while (seen := self.words[word]) < value:
            self.words[word + 1] = 1
            sleep_on(self.address + 8 * word, seen, pause_s)
            self._check_none_failed()
            pause_s = min(2 * pause_s, 0.05)
            if pause_s == 0.05:
                self._look_around(rank, time.monotonic() - begin)

    def _look_around(self, rank: int, waited_s: float) -> None:
        """Raise where there is nothing to wait for."""
        arrived = [self.words[other * ROW + ARRIVED] for other in range(self.size)]
        for other in range(self.size):
            if arrived[other] == self.call:
                self.check_same(other)
        if self._has_ended(rank):
            raise TrainingError(f"local rank {rank} has ended; local rank {self.rank} waited for it in {self.what}")
        if waited_s > self.timeout_s:
            late = [other for other in range(self.size) if arrived[other] < self.call] or [rank]
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
        """Whether a rank's process is gone, as far as this one can see."""
        if not runtime.pid_space() or self.words[rank * ROW + PID_SPACE] != runtime.pid_space():
            return False
        try:
            with open(f"/proc/{self.words[rank * ROW + PID]}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"  # dead, though nobody has asked how
        except FileNotFoundError:
            return True


class Roll(Board):
    """Page in which ranks of a host compare a number before they go on; a wait each, and no message."""

    what = "the comparison of exchanges"

    def __init__(self, host: Host, timeout_s: float = TIMEOUT_S) -> None:
        """Map a page of shared memory; all ranks of the host must come here together.

        Raises:
            UsageError: as of `SharedSum`.
        """
        size_bytes = table_bytes(host.local_size)
        memory, _ = map_together(host, lambda: reserved(size_bytes))
        super().__init__(memory, host.local_rank, host.local_size, timeout_s)
        host.host_barrier()
        self.check_all_here()

    def same(self, number: int) -> bool:
        """Wait for all ranks of the host; whether all have come with this number: one answer for all.

        Raises:
            TrainingError: a rank has ended, or not come within the time limit; it is named.
        """
        self.begin((number, 0, 0))
        self.post(ARRIVED, self.call)
        self.wait_for_all(ARRIVED, self.call)
        return all(self.header(rank)[0] == number for rank in range(self.size))

    def check_same(self, rank: int) -> None:
        """Nothing while ranks still wait: all are to learn of a difference."""


@functools.lru_cache(maxsize=64)
def digest(sizes: tuple[int, ...], divisor: float) -> int:
    """What must be the same on all ranks, in 63 bits."""
    return int.from_bytes(hashlib.sha256(repr((sizes, divisor)).encode()).digest()[:8]) >> 1


# ---------------------------------------------------------------- memory


def folder() -> str:
    """Where files are memory; else where files are."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def segment_bytes(size: int, slots: int, chunk: int) -> int:
    """Of the table, the rows of small sums and the slots."""
    return table_bytes(size) + 4 * (2 * SMALL + slots * chunk)


class Made(NamedTuple):
    """A file to map."""

    path: str  # empty where there is none
    size_bytes: int = 0
    chunk: int = 0  # floats of a chunk in it
    trouble: str = ""  # why there is none


def map_together(host: Host, make: Callable[[], Made]) -> tuple[mmap.mmap, int]:
    """Memory that all ranks of a host share, zeroed, and the floats of a chunk in it.

    A rank that cannot map it gets memory of its own, so that all ranks go on to find out.
    """
    host.host_barrier()  # all are here, so the file's name lasts for a moment only
    made = Made(*host.from_first(make))  # forked workers' lines carry JSON, in which a tuple is a list
    check(bool(made.path), made.trouble)
    try:
        with open(made.path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), made.size_bytes)
    except OSError:  # the first call finds that ranks do not see each other
        memory = mmap.mmap(-1, made.size_bytes)
    host.host_barrier()
    if host.local_rank == 0:
        os.unlink(made.path)
    return memory, made.chunk


def make_file(size: int, slots: int) -> Made:
    """A file for sums, with the longest chunks for which there is room."""
    room = SEGMENT_BYTES - segment_bytes(size, slots, 0)
    chunk, trouble = min(CHUNK, room // (4 * slots * LEAST) * LEAST), ""
    while chunk >= LEAST:
        made = reserved(segment_bytes(size, slots, chunk))
        if made.path:
            return made._replace(chunk=chunk)
        trouble = made.trouble
        chunk = chunk // 2 // LEAST * LEAST
    need = segment_bytes(size, slots, LEAST)
    why = f"no {need} bytes for {size} ranks in {folder()} ({trouble}); enlarge it, or use another strategy: asa"
    return Made("", trouble=why)


def reserved(size_bytes: int) -> Made:
    """A file of that size in memory, if there is room."""
    try:
        handle, path = tempfile.mkstemp(prefix="jaxmpi-", dir=folder())
    except OSError as error:
        return Made("", trouble=str(error.strerror))
    try:
        reserve(handle, size_bytes)
        return Made(path, size_bytes)
    except OSError as error:
        os.unlink(path)
        return Made("", trouble=str(error.strerror))
    finally:
        os.close(handle)


def reserve(handle: int, size_bytes: int) -> None:
    """Give a file its size; memory that is not there must be missed now, not when it is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)
    else:
        os.ftruncate(handle, size_bytes)


# ---------------------------------------------------------------- the kernel

# x86 keeps stores in order, and loads; elsewhere a switch to the scheduler and back does.
fence: Callable[[], None] = (lambda: None) if platform.machine() in ("x86_64", "AMD64", "i686") else os.sched_yield

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}  # the call's number, on Linux
FUTEX_WAIT, FUTEX_WAKE = 0, 1
_syscall = ctypes.CDLL(None).syscall


def futex_number() -> int | None:
    """The call's number where it works."""
    number = FUTEX.get(platform.machine()) if platform.system() == "Linux" else None
    works = number and _syscall(number, ctypes.byref(ctypes.c_uint32()), FUTEX_WAKE, 1, None, None, 0) == 0
    return number if works else None


_number = futex_number()


class Seconds(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def sleep_on(address: int, seen: int, timeout_s: float) -> None:
    """Sleep while the word at `address` has the value `seen`, until woken, or for at most a time below 1 s."""
    if _number is None:
        time.sleep(0.0005)
        return
    low = ctypes.c_uint32(seen & 0xFFFFFFFF)  # the kernel compares 32 bits: the low ones, on these processors
    timeout = ctypes.byref(Seconds(0, int(timeout_s * 1e9)))
    _syscall(_number, ctypes.c_void_p(address), FUTEX_WAIT, low, timeout, None, 0)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    if _number is not None:
        _syscall(_number, ctypes.c_void_p(address), FUTEX_WAKE, 2**31 - 1, None, None, 0)
