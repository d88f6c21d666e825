"""Collectives of forked processes through shared memory, inside jit, without MPI.

Workers of `jaxmpi.fork` are no MPI ranks, yet functions on them may call `jaxmpi.exchange`, with any strategy and wire.
They share a host, so two operations through shared memory suffice: a sum in rank order (`SharedSum`) and an allgather
of rows. All other collectives pick what they need out of the rows, which moves more bytes than messages would; so `shm`
is the strategy to use. Programs reach the memory through host callbacks with an ordered effect. So all workers make the
calls in one order.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.base import Pairs, SoloComm
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.comm.shared_sync import ARRIVED, SharedCounters, digest
from jaxmpi.core.pytrees import PyTree
from jaxmpi.functions.transport import SocketTransport, as_bytes
from jaxmpi.runtime import host_callbacks


@dataclass(frozen=True)
class ForkEffect(host_callbacks.OrderedEffect):
    """Effect that keeps the sums of one fork in order.

    Each fork has its own, so that a failed sum leaves nothing to the next fork.
    """

    number: int


host_callbacks.admit(ForkEffect(0))


class ForkComm(SoloComm):
    """Communicator of workers that are forked processes of one host.

    Sums are `SharedSum`'s; all else is made of rows that every worker sees. So any strategy and any wire give what they
    give elsewhere. `shm` is the fastest: the others are made for messages.
    """

    def __init__(self, line: SocketTransport, number: int) -> None:
        self.rank, self.size = line.rank, line.size  # pyright: ignore[reportAttributeAccessIssue]
        self.hosts, self.order = (0,) * self.size, tuple(range(self.size))  # pyright: ignore[reportAttributeAccessIssue]
        if self.size > 1:
            self.effect, self.rows_name = ForkEffect(number), f"rows of fork {number}"
            instead = f'take devices of one process: JAX_NUM_CPU_DEVICES={self.size} and fork(kind="devices")'
            self.shared = SharedSum(line, f"sum of fork {number}", effect=self.effect, instead=instead)
            rows = self.shared.rows.view(np.uint8)  # rows of even and of odd calls, one a worker
            self.rows = SharedMemoryAllgather(self.shared.board, rows)
            host_callbacks.register(self.rows_name, self.rows)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        return self.shared.sum(vectors, divisor) if self.size > 1 else super().sum_on_host(vectors, divisor)

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        return self.shared.scatter(vectors, divisor) if self.size > 1 else super().scatter_on_host(vectors, divisor)

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        return self.shared.gather(vectors) if self.size > 1 else super().gather_on_host(vectors)

    def sum_on_host_now(self, arrays: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The same outside jit, done when it returns."""
        return self.shared.sum_now(arrays, divisor)

    def allgather(self, x: PyTree) -> PyTree:
        def rows(leaf: jax.Array) -> jax.Array:
            like = jax.ShapeDtypeStruct((self.size, *leaf.shape), leaf.dtype)
            return host_callbacks.call(self.rows_name, [leaf], [like], effect=self.effect)[0]

        return jax.tree.map(rows, x) if self.size > 1 else super().allgather(x)

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self.sum_on_host([x])[0]

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        return self.scatter_on_host([x])[0]

    def alltoall(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda rows: rows[:, self.rank], self.allgather(x))

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        source = {destination: source for source, destination in pairs}.get(self.rank)
        take = lambda rows: jnp.zeros_like(rows[0]) if source is None else rows[source]  # noqa: E731
        return jax.tree.map(take, self.allgather(x))

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return jax.tree.map(lambda rows: rows[root], self.allgather(x))

    def close(self) -> None:
        """Unmap the shared memory."""
        if self.size > 1:
            host_callbacks.forget(self.rows_name)
            self.shared.close()
            del self.shared, self.rows


class SharedMemoryAllgather:
    """Allgather of bytes through shared memory, in pieces that fit a row."""

    def __init__(self, board: SharedCounters, rows: np.ndarray) -> None:
        """Take who waits for whom, and u8[2, workers, n] of shared memory."""
        self.board, self.rows, self.room = board, rows, rows.shape[2]

    def __call__(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """The function that programs call: results[0][r] <- operands[0] of worker r.

        All workers call it together, with the same sizes, in the same order. Any dtype and shape will do.
        """
        mine, every = as_bytes(operands[0]), as_bytes(results[0]).reshape(self.board.size, -1)
        with self._fail_on_error():
            for start in range(0, mine.size, self.room):
                piece = mine[start : start + self.room]
                every[:, start : start + self.room] = self._gather_chunk(piece, piece.size)[:, : piece.size]

    def gather(self, data: np.ndarray, is_wanted: bool) -> list[np.ndarray] | None:
        """Every worker's u8[n] of any n, if wanted; a collective call outside jit."""
        size = np.array([data.size]).view(np.uint8)
        first = self.room - size.size  # bytes of data in the first piece, which also says how many bytes there are
        with self._fail_on_error():
            rows = self._gather_chunk(np.concatenate([size, data[:first]]), -1)
            sizes = rows[:, : size.size].copy().view(np.int64)[:, 0].tolist()
            out = [np.empty(n, np.uint8) for n in sizes] if is_wanted else None
            start, end, rows = 0, first, rows[:, size.size :]
            while True:
                for whole, row in zip(out or (), rows, strict=False):
                    whole[start:end] = row[: whole[start:end].size]
                if end >= max(sizes):
                    return out
                start, end = end, end + self.room
                rows = self._gather_chunk(data[start:end], -1)

    @contextlib.contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        """Let the others know if this worker does not go on."""
        try:
            yield
        except BaseException:
            self.board.fail()
            raise

    def _gather_chunk(self, mine: np.ndarray, size: int) -> np.ndarray:
        """All workers' rows, u8[workers, n], valid until the call after the next.

        `size` must be the same on all. A row is free: all have come to the call before this one, and so have left the
        one before that.
        """
        board = self.board
        board.begin((digest((size,), 0.0), 1, size))
        rows = self.rows[board.call % 2]
        rows[board.rank, : mine.size] = mine
        board.post(ARRIVED, board.call)
        for rank in range(board.size):
            board.wait(rank, ARRIVED, board.call)
            board.check_same(rank)
        return rows
