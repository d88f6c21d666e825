"""Sums over a host's ranks in shared memory: NumPy, callable from jit.

A chain. The vectors, end to end, are cut into chunks small enough to stay in the processor's caches. Rank 0 copies a
chunk into a slot of shared memory. Rank 1 adds its own, and so on to the last rank. Then every rank copies the result
out, divided if a mean is asked for. All work at once, each on another chunk. So a rank reads its operands from memory
once and writes its results once, in two passes; slices that are copied in, summed and copied out take three. The order
of additions is that of the ranks, however the vectors are cut: the same bits on all ranks and in every run.

A sum has two halves as well. `scatter` is the chain in which a rank copies out its own slice only. `gather` has each
rank copy its slice into the slots, from which the others copy it. So a slice may be updated once, between them.
"""

import functools
import math
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.comm.shared_sync import (
    ARRIVED,
    COPIED,
    SUMMED,
    TIMEOUT_S,
    SharedCounters,
    digest,
    map_together,
    table_bytes,
)
from jaxmpi.core.errors import UsageError, check
from jaxmpi.runtime import host_callbacks, progress

CHUNK = 128 << 10  # floats: 512 KiB, of which a core's second-level cache holds one or two
SHORT = 32 << 10  # floats of a chunk at least, if vectors are too short to give every rank four longer ones
SMALL = 256 << 10  # floats of all ranks together, up to which every rank sums everything: one wait, not one a rank
LEAST = 1 << 10  # of which a chunk's floats are a multiple, with many ranks fewer than CHUNK
MOST_BYTES = 44 << 20  # of all slots


# ---------------------------------------------------------------- the sum


class SharedSum:
    """Sums of float32 vectors over a host's ranks, bitwise equal on all."""

    def __init__(
        self,
        host: HostProcesses,
        name: str,
        timeout_s: float = TIMEOUT_S,
        effect: Any = host_callbacks.ORDERED,
        instead: str = "use another strategy: asa",
    ) -> None:
        """Map the shared memory; the host's ranks must call it together.

        Args:
            name: of the Python function that programs call; the same on all ranks, and new.
            timeout_s: how long a rank waits in a sum for a rank that does not move.
            effect: what orders sums among other calls in programs, as of `host_callbacks.call`.
            instead: the way out if there is no room for shared memory.

        Raises:
            UsageError: no room for shared memory, or ranks that cannot share it; on all ranks alike.
        """
        self.name, self.effect = name, effect
        self.rank, self.size = host.local_rank, host.local_size
        self.slots = max(16, 2 * self.size)  # half of them lie between the first rank and the last
        self.chunk = min(CHUNK, MOST_BYTES // (4 * self.slots * LEAST) * LEAST)
        size_bytes = table_bytes(self.size) + 4 * (2 * SMALL + self.slots * self.chunk)
        memory = map_together(host, size_bytes, f"sums; {instead}")
        self.board = SharedCounters(memory, self.rank, self.size, timeout_s)
        self.small = SMALL // self.size // 16 * 16
        rows_floats, ring_floats = 2 * self.size * self.small, self.slots * self.chunk
        floats = np.frombuffer(memory, np.float32, rows_floats + ring_floats, table_bytes(self.size))
        self.rows = floats[:rows_floats].reshape(2, self.size, self.small)  # rows of even and of odd calls
        self.ring = floats[rows_floats:].reshape(self.slots, self.chunk)
        # The last rank can divide for all, in cache, but others with cores of their own wait for it meanwhile.
        self.each_divides = self.size <= 3 * (os.cpu_count() or 1)
        self.lock = threading.Lock()  # programs of several threads are in no order
        self.chunk_count = 0  # chunks, in all calls so far
        self.free = self.slots  # chunks whose slots are not in use, as far as rank 0 knows
        host_callbacks.register(name, self.add)

    def close(self) -> None:
        """Let go of the name; the memory goes with the object."""
        host_callbacks.forget(self.name)

    def sum(self, vectors: Sequence[jax.Array], divisor: float = 1, half: str = "") -> list[jax.Array]:
        """Sum f32 arrays over this host's ranks, inside or outside jit, with the bits of additions in rank order.

        Args:
            vectors: the same shapes on every rank.
            divisor: 1 for sums, the number of ranks for means; divides the f32 sum.
            half: as of `Comm.sum_on_host`.

        Communicates: one call in all, through shared memory. Raises, if results are waited for: as `add`.
        """
        odd = [f"{x.dtype}{list(x.shape)}" for x in vectors if x.dtype != np.float32]
        check(not odd, f"a {half or 'sum'} over this host got {', '.join(odd)}; expected float32: cast before")
        return call_sum(self.name, self.size, vectors, divisor, half, effect=self.effect)[0]

    def add(
        self,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        divisor: float = 1,
        half: str = "",
        through: int = 0,
    ) -> None:
        """results[i] <- (sum over ranks of operands[i]) / divisor.

        f32, C-contiguous, any shape, any number of floats; a result may be its operand. All ranks must call it, in the
        same order. Waits without spinning.

        Args:
            half: scatter or gather, instead of a sum.
            through: of the operands, the last so many come out as they went in.

        Raises:
            UsageError: no f32, or ranks gave different sizes or divisors, or came to different halves.
            TrainingError: a rank has ended, failed, or not moved within the time limit; it is named.
        """
        try:
            sum_count = len(operands) - through
            for source, to in zip(operands[sum_count:], results[sum_count:], strict=True):
                if source.ctypes.data != to.ctypes.data:  # XLA may have given them one buffer
                    np.copyto(to, source)
            vectors, totals = [flat(x) for x in operands[:sum_count]], [flat(x) for x in results[:sum_count]]
            if half:  # slices, one a rank, on the side of which this rank has its own alone with None for the others
                whole, mine = (vectors, totals) if half == "scatter" else (totals, vectors)
                whole = [row for vector in whole for row in vector.reshape(self.size, -1)]
                mine = [chunk if rank == self.rank else None for chunk in mine for rank in range(self.size)]
                vectors, totals = (whole, mine) if half == "scatter" else (mine, whole)
            whole = totals if half == "gather" else vectors  # arrays that all have a size: none is None
            sizes = tuple(x.size for x in whole if x is not None)
            is_fit = len(vectors) == len(totals) and all(
                x is None or x.size == size for x, size in zip((*vectors, *totals), 2 * sizes, strict=True)
            )
            check(is_fit, f"operands have sizes {[x.size for x in operands]}, results {[x.size for x in results]}")
            # NaN and infinity pass through to all ranks.
            with progress.span("wait", f"{half or 'sum'} in shared memory"), self.lock, np.errstate(all="ignore"):
                self.board.begin((digest(sizes, float(divisor), half), len(sizes), sum(sizes)))
                self._run(vectors, totals, sizes, np.float32(divisor), half)
        except BaseException:
            self.board.fail()
            raise

    def _run(
        self, vectors: "Vectors", totals: "Vectors", sizes: tuple[int, ...], divisor: np.float32, half: str
    ) -> None:
        if half != "gather" and sum(sizes) <= self.small and len(chunks := cut(sizes, self.small)) <= 1:
            return self._together(vectors, totals, chunks[0] if chunks else Chunk((), 0), divisor)
        four_a_rank = -(-sum(sizes) // (4 * self.size * LEAST)) * LEAST
        chunks = cut(sizes, min(self.chunk, max(four_a_rank, SHORT)))
        self.board.post(ARRIVED, self.board.call)
        bring = self._bring_slice if half == "gather" else self._add_to_chain
        lag, first = self.size, self.chunk_count  # the last rank of a chain has added to chunk j - size before chunk j
        for j in range(len(chunks) + lag):
            if j >= lag:
                self._take(first + j - lag, chunks[j - lag], totals, divisor, half)
            if j < len(chunks):
                bring(first + j, chunks[j], vectors, divisor)
        self.chunk_count += len(chunks)

    def _together(self, vectors: "Vectors", totals: "Vectors", chunk: "Chunk", divisor: np.float32) -> None:
        """Every rank sums all ranks' rows, where it wants the sum.

        Rows are free: all ranks have come to a call since their last use.
        """
        call = self.board.call
        rows = self.rows[call % 2, :, : chunk.floats]
        copy_in(vectors, chunk, rows[self.rank])
        self.board.post(ARRIVED, call)
        for rank in range(self.size):
            self.board.meet(rank, ARRIVED, call)
        wanted = [piece.place for piece in chunk.pieces if totals[piece.vector] is not None]
        total = np.empty_like(rows[0])
        for columns in [slice(None)] if len(wanted) == len(chunk.pieces) else wanted:
            np.copyto(total[columns], rows[0][columns])
            for row in rows[1:]:
                total[columns] += row[columns]
        copy_out(total, chunk, totals, divisor)

    def _add_to_chain(self, k: int, chunk: "Chunk", vectors: "Vectors", divisor: np.float32) -> None:
        """This rank's step of the chain, for the k-th chunk of all."""
        slot = self.ring[k % self.slots]
        if self.rank == 0:
            self._wait_for_slot(k)
            copy_in(vectors, chunk, slot)
        else:
            self.board.meet(self.rank - 1, SUMMED, k + 1)
            for number, part, place in chunk.pieces:
                if (vector := vectors[number]) is not None:
                    np.add(slot[place], vector[part], slot[place])
        if self.rank == self.size - 1 and not self.each_divides and divisor != 1:
            divide, number = division(float(divisor))
            divide(slot[: chunk.floats], number, slot[: chunk.floats])
        self.board.post(SUMMED, k + 1)

    def _bring_slice(self, k: int, chunk: "Chunk", vectors: "Vectors", divisor: np.float32) -> None:
        """This rank's pieces of the k-th chunk, for the others to copy."""
        if any(vectors[piece.vector] is not None for piece in chunk.pieces):
            self._wait_for_slot(k)
            copy_in(vectors, chunk, self.ring[k % self.slots])
            self.board.post(SUMMED, k + 1)

    def _take(self, k: int, chunk: "Chunk", totals: "Vectors", divisor: np.float32, half: str) -> None:
        """Copy the k-th chunk out; no rank waits for a result that it does not want."""
        wanted = {piece.vector for piece in chunk.pieces if totals[piece.vector] is not None}
        for rank in {vector % self.size for vector in wanted} if half == "gather" else [self.size - 1][: len(wanted)]:
            self.board.meet(rank, SUMMED, k + 1)
        copy_out(self.ring[k % self.slots], chunk, totals, divisor if self.each_divides else None)
        self.board.post(COPIED, k + 1)

    def _wait_for_slot(self, k: int) -> None:
        """Return when all ranks have finished with chunk k's slot."""
        if k >= self.free:
            self.free = self.slots + self.board.wait_for_all(COPIED, k + 1 - self.slots)


def call_sum(
    name: str,
    size: int,
    vectors: Sequence[jax.Array],
    divisor: float = 1,
    half: str = "",
    through: Sequence[jax.Array] = (),
    effect: Any = host_callbacks.ORDERED,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`SharedSum.sum` by name, in a program that one rank may compile for its host; and `through`.

    Args:
        name: of the `SharedSum` in each process that runs the program.
        through: arrays of any type that come out as they went in, if XLA can in the same buffers; what is computed of
            these results is computed behind the call.
        effect: of the `SharedSum`; by default calls are in order among such calls of all programs, not among mpi4jax's.
    """
    for x in vectors if half == "scatter" else ():
        check(x.size % size == 0, f"a scatter over {size} ranks got {x.size} floats; expected a multiple")
    shape = {"scatter": lambda x: (x.size // size,), "gather": lambda x: (x.size * size,)}.get(half, np.shape)
    like = [jax.ShapeDtypeStruct(shape(x), np.float32) for x in vectors]
    like += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in through]
    pairs = [(i, i) for i in range(len(vectors), len(like))]
    options = {"divisor": float(divisor), "half": half, "through": len(through)}
    results = host_callbacks.call(name, [*vectors, *through], like, pairs, effect, **options)
    return results[: len(vectors)], results[len(vectors) :]


Vectors = Sequence[np.ndarray | None]  # None: another rank's, or not wanted here


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
    """Cut vectors, end to end, into chunks of at most `chunk` floats."""
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


def copy_in(vectors: Vectors, chunk: Chunk, slot: np.ndarray) -> None:
    """A chunk of the vectors to the slot."""
    for number, part, place in chunk.pieces:
        if (vector := vectors[number]) is not None:
            np.copyto(slot[place], vector[part])


def copy_out(slot: np.ndarray, chunk: Chunk, totals: Vectors, divisor: np.float32 | None) -> None:
    """Copy the slot, divided if there is a divisor, to the results."""
    divide, number = division(float(divisor or 1))
    for vector, part, place in chunk.pieces:
        if (total := totals[vector]) is None:
            continue
        if divisor is None or divisor == 1:
            np.copyto(total[part], slot[place])
        else:
            divide(slot[place], number, total[part])


@functools.lru_cache(maxsize=64)
def division(divisor: float) -> tuple[np.ufunc, np.float32]:
    """Choose the division; for powers of two, a quicker, bitwise equal product."""
    is_power = math.frexp(divisor)[0] == 0.5 and 2.0**-126 <= abs(divisor) <= 2.0**126
    return (np.multiply, np.float32(1 / divisor)) if is_power else (np.divide, np.float32(divisor))


def flat(array: np.ndarray) -> np.ndarray:
    """An array as f32[n], without a copy."""
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise UsageError(
            f"a sum over this host got {array.dtype}{list(array.shape)} with strides {array.strides}; "
            "expected float32, C-contiguous"
        )
    return array.reshape(-1)
