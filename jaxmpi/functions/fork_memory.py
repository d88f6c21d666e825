"""Sums and gathers of forked workers, through memory that they share.

Workers of `jaxmpi.fork` are no MPI ranks. They share a host, so a sum in rank order (`SharedSum`) and an allgather of
bytes suffice.
"""

from dataclasses import dataclass

import numpy as np

from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.comm.shared_sync import ARRIVED, digest
from jaxmpi.functions.transport import SocketTransport
from jaxmpi.runtime import host_callbacks


@dataclass(frozen=True)
class ForkEffect(host_callbacks.OrderedEffect):
    """Effect that keeps the sums of one fork in order.

    Each fork has its own, so that a failed sum leaves nothing to the next fork.
    """

    number: int


host_callbacks.admit(ForkEffect(0))


class ForkMemory:
    """Sums and gathers over forked workers, outside jit, without MPI."""

    def __init__(self, transport: SocketTransport, number: int) -> None:
        """Map the memory; all workers of the fork of this number call it together."""
        instead = f'take devices of one process: JAX_NUM_CPU_DEVICES={transport.size} and fork(kind="devices")'
        self.sums = SharedSum(transport, f"sum of fork {number}", effect=ForkEffect(number), instead=instead)
        self.board = self.sums.board
        self.rows = self.sums.rows.view(np.uint8)  # u8[2, workers, n]: of even and of odd calls, one a worker
        self.room = self.rows.shape[2]

    def close(self) -> None:
        """Unmap the memory."""
        self.sums.close()
        del self.sums, self.board, self.rows

    def gather(self, data: np.ndarray, is_wanted: bool) -> list[np.ndarray] | None:
        """Every worker's u8[n] of any n, if wanted; a collective call."""
        size = np.array([data.size]).view(np.uint8)
        start, end = 0, self.room - size.size  # the first piece also says how many bytes there are
        try:
            rows = self._gather_piece(np.concatenate([size, data[:end]]))
            sizes = rows[:, : size.size].copy().view(np.int64)[:, 0].tolist()
            out = [np.empty(n, np.uint8) for n in sizes] if is_wanted else None
            rows = rows[:, size.size :]
            while True:
                for whole, row in zip(out or (), rows, strict=False):
                    whole[start:end] = row[: whole[start:end].size]
                if end >= max(sizes):
                    return out
                start, end = end, end + self.room
                rows = self._gather_piece(data[start:end])
        except BaseException:
            self.board.fail()  # the others learn that this worker does not go on
            raise

    def _gather_piece(self, mine: np.ndarray) -> np.ndarray:
        """All workers' rows, u8[workers, n], valid until the call after the next.

        A row is free: all have come to the call before this one, and so have left the one before that.
        """
        board = self.board
        board.begin((digest((-1,), 0.0), 1, -1))  # the header of no sum
        rows = self.rows[board.call % 2]
        rows[board.rank, : mine.size] = mine
        board.post(ARRIVED, board.call)
        for rank in range(board.size):
            board.wait(rank, ARRIVED, board.call)
            board.check_same(rank)
        return rows
