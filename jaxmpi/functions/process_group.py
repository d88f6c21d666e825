"""Workers in processes of their own: MPI's ranks, or forked ones.

A function's workers need two things from other processes: commands with arrays, and sums. The transport carries
commands from rank 0, or none if all ranks run the script. The communicator sums and gathers, with any strategy; f32 on
one host is summed without a program. `send` lays out all arrays before it sends one, so a failure there leaves the
workers as they were. A failed sum leaves workers out of step, and the group ends. Forked workers have sockets, by which
the master names the one that died. Processes by MPI's spawn were dropped: a child that dies takes its parent along
(docs/decisions/0017).
"""

import contextlib
import functools
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.algorithms import in_shared_memory
from jaxmpi.allreduce.api import Op, exchange
from jaxmpi.comm.base import check_one_host
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.functions import profiling
from jaxmpi.functions.fork_comm import ForkComm
from jaxmpi.functions.shared_array import FREED
from jaxmpi.functions.transport import (
    CallReport,
    MpiTransport,
    OutOfStep,
    SocketTransport,
    WorkerDied,
    as_c_contiguous,
    pack,
    unpack,
)
from jaxmpi.functions.worker import Command, Leaves, WorkerSlot, error_text
from jaxmpi.functions.worker_group import WorkerGroup


class SumFailed(OutOfStep):
    """A sum or gather failed, so forked workers are out of step."""


class ProcessGroup(WorkerGroup):
    """One worker a process: ranks of MPI, or processes made by fork."""

    def __init__(
        self, transport: MpiTransport | SocketTransport, comm: MpiComm | ForkComm, strategy: str, is_serial: bool
    ) -> None:
        """Take the transport of commands, and the communicator of exchanges.

        Args:
            strategy: that sums by default.
            is_serial: whether rank 0 leads; else all run the same script.
        """
        super().__init__()
        self.transport, self.comm, self.size, self.is_serial = transport, comm, transport.size, is_serial
        self.slots = [WorkerSlot(transport.rank, jax.local_devices()[0])]
        self.leads, self.is_the_world = not is_serial or transport.rank == 0, not is_serial
        self.default_strategy = strategy

    def gather_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report, by the transport."""
        return self.transport.reports(mine[0])

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` outside jit; f32 through shared memory needs no program."""
        [(rank, leaves)] = mine.items()
        if self.size > 1 and in_shared_memory(strategy) and all(x.dtype == jnp.float32 for x in leaves):
            sum_now = self.sum_now
            try:
                return {rank: sum_now(leaves, self.size if op == "mean" else 1)}
            except Exception as error:  # whatever its kind: others wait in the sum, or have learnt of it
                raise OutOfStep(f"a sum over workers failed: {error_text(error)}") from error
        return {rank: exchange(leaves, strategy, op, self.comm)}

    @functools.cached_property
    def sum_now(self) -> Callable[[Leaves, float], Leaves]:
        """`sum_on_host_now`, after tracing has mapped its memory; all ranks refuse alike."""
        check_one_host(self.comm.hosts)
        jax.eval_shape(self.comm.sum_on_host, [jax.ShapeDtypeStruct((), jnp.float32)])
        return self.comm.sum_on_host_now

    def gather_arrays(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """Every worker's arrays, of any lengths, packed into one message."""
        rows = self.gather_bytes(pack(mine[self.transport.rank]), everywhere or not self.is_serial)
        return None if rows is None else [unpack(row) for row in rows]

    def gather_bytes(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """A gather of bytes over MPI."""
        assert isinstance(self.transport, MpiTransport)
        return self.transport.gather(data, everywhere)

    def send(self, command: Command) -> None:
        """Send a command, to each worker its own arrays.

        All are made before one is sent: a failure does no harm.
        """
        self.is_exchanging = False
        of_workers = as_contiguous([command.arrays_for(rank) for rank in range(1, self.size)]) if self.is_serial else []
        dropped = self.take_dropped()
        self.forget(dropped)
        if self.is_serial:
            freed = list(FREED)
            del FREED[: len(freed)]  # more may come at any time
            header = json.dumps([command.kind, command.header, dropped, freed])
            self.is_exchanging = True
            for rank in range(1, self.size):
                arrays = of_workers.pop(0)
                profiling.count_sent_bytes(header, arrays)
                self.transport.send(rank, header, arrays)

    def receive(self) -> Command:
        """The master's next command."""
        header, arrays = self.transport.receive()
        kind, fields, dropped, freed = json.loads(header)
        self.forget(dropped)
        for key in freed:
            self.own_slot.arrays.pop(key, None)
        return Command(kind, fields, received=iter(arrays))

    def end(self) -> None:
        """Make waiting workers drop what they hold, and wait for another fork."""
        if self.is_serial and not self.gone:
            self.send(Command("close", {}))


class ForkedGroup(ProcessGroup):
    """Processes made by fork: the master knows when one ends."""

    transport: SocketTransport
    comm: ForkComm
    cores: Sequence[int] = ()  # that this process had before the fork
    way_out = "jaxmpi.close(), then fork again"

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """The exchange through shared memory, by any strategy."""
        with self._name_dead_worker("a sum over workers"):
            return jax.block_until_ready(super().sum_leaves(mine, op, strategy))

    def gather_bytes(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """A gather of bytes through shared memory."""
        with self._name_dead_worker("a gather over workers"):
            return self.comm.gather_now(data, everywhere or self.leads)

    @contextlib.contextmanager
    def _name_dead_worker(self, what: str) -> Iterator[None]:
        """Report a failed exchange in shared memory, and name an ended worker."""
        try:
            yield
        except Exception as error:
            self.comm.fail()
            self.transport.check_alive()
            raise SumFailed(f"{what} failed: {error_text(error)}") from error

    def end(self) -> None:
        """Workers go; those that do not within a moment are killed."""
        try:
            if not self.gone:
                self.send(Command("end", {}))
        except WorkerDied:  # as it was to
            pass
        for connection in self.transport.ends.values():
            connection.close()
        for job in self.transport.jobs.values():
            try:
                job.wait(5)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        self.transport.stop_watching()
        self.comm.close()
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def as_contiguous(of_workers: list[list[Any]]) -> list[list[np.ndarray]]:
    """Workers' arrays, C-contiguous; one for several workers is copied at most once."""
    made: dict[int, np.ndarray] = {}
    for array in itertools.chain(*of_workers):
        if id(array) not in made:
            made[id(array)] = as_c_contiguous(array)
    return [[made[id(array)] for array in arrays] for arrays in of_workers]
