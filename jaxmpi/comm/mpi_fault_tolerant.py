"""Workers that may die: collectives inside jit over mpi4py, whose errors return.

mpi4jax ends the job on any error of MPI. Here a collective that fails because a rank is gone gives zeros, and so does
every one after it: programs run to their end on all ranks that live. A vote throws away their results.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.base import Pairs
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.polling import is_mpi_error
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import host_callbacks

Buffers = Sequence[np.ndarray]
_numbers = itertools.count()  # numbers of comms, the same on all ranks


class FaultTolerantComm(RankComm):
    """The ranks of a launcher that goes on without those that die."""

    def __init__(self, processes: MpiProcesses) -> None:
        """Clone the world; all ranks come here together, again after `processes.shrink`."""
        super().__init__(processes, processes.clone())
        self.is_lost = False  # True if a collective has failed, so that results are worth nothing
        self.why = ""  # the error of it
        self._name, self._names = f"fault-tolerant comm {next(_numbers)}", list[str]()
        for move in (self._allreduce, self._alltoall, self._allgather, self._permute, self._bcast):
            self._offer(self._called(move), move)

    def _called(self, move: Callable[..., None]) -> str:
        return f"{self._name}: {move.__name__}"

    def _offer(self, name: str, move: Callable[..., None]) -> None:
        host_callbacks.register(name, functools.partial(self._unless_lost, move))
        self._names.append(name)

    def _unless_lost(self, move: Callable[..., None], operands: Buffers, results: Buffers, **attributes: Any) -> None:
        """Run a move; once a rank is lost, revoke, and give zeros."""
        if not self.is_lost:
            try:
                return move(operands, results, **attributes)
            except Exception as error:
                if not (is_mpi_error(error) or isinstance(error, TrainingError)):
                    raise
                self.is_lost, self.why = True, str(error) or type(error).__name__
                self.processes.revoke()
        for result in results:
            result[...] = np.zeros((), result.dtype)

    def _call(self, move: Callable[..., None], x: jax.Array, shape: tuple[int, ...], **attributes: Any) -> jax.Array:
        return host_callbacks.call(self._called(move), [x], [jax.ShapeDtypeStruct(shape, x.dtype)], **attributes)[0]

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self._call(self._allreduce, x, x.shape)

    def _allreduce(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Allreduce(operands[0], results[0])

    def alltoall(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._alltoall, leaf, leaf.shape), x)

    def _alltoall(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Alltoall(bits(operands[0]), bits(results[0]))

    def allgather(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._allgather, leaf, (self.size, *leaf.shape)), x)

    def _allgather(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Allgather(bits(operands[0]), bits(results[0]))

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half of it that concerns this rank."""
        source = next((s for s, d in pairs if d == self.rank), -1)
        to = next((d for s, d in pairs if s == self.rank), -1)
        return jax.tree.map(lambda leaf: self._call(self._permute, leaf, leaf.shape, source=source, to=to), x)

    def _permute(self, operands: Buffers, results: Buffers, source: int, to: int) -> None:
        sent, received = bits(operands[0]), bits(results[0])
        if source >= 0 and to >= 0:
            return self.mpi.Sendrecv(sent, to, 0, received, source)
        received[...] = 0
        if to >= 0:
            self.mpi.Send(sent, to)
        if source >= 0:
            self.mpi.Recv(received, source)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._bcast, leaf, leaf.shape, root=root), x)

    def _bcast(self, operands: Buffers, results: Buffers, root: int) -> None:
        np.copyto(results[0], operands[0])
        self.mpi.Bcast(bits(results[0]), root)

    def _make_shared_sum(self) -> SharedSum:
        name = f"{self._name}: sum"
        shared = SharedSum(self.processes, name)
        host_callbacks.forget(name)
        self._offer(name, shared.add)
        return shared

    def close(self) -> None:
        """Let go of what programs call, and of shared memory."""
        for name in self._names:
            host_callbacks.forget(name)
        self.__dict__.pop("_shared_sum", None)


def bits(x: np.ndarray) -> np.ndarray:
    """A view as integers of equal size, for which MPI has types."""
    return x.reshape(-1).view(f"u{x.dtype.itemsize}")
