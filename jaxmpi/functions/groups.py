"""Workers that carry out commands together: devices of one process, ranks of MPI, or forked processes.

Every command is carried out in the same way by all: each worker computes its part, then reports, then takes part in
exchanges. Nothing is changed and nothing is exchanged before all have reported well; so a failure leaves all workers as
they were.

Workers in other processes get commands from rank 0, or none if all ranks run the script. f32 on one host is
summed without a program. A failed sum leaves workers out of step, and the group ends. Processes by MPI's spawn were
dropped: a child that dies takes its parent along (docs/decisions.md, 17).
"""

import contextlib
import functools
import itertools
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmpi.allreduce.algorithms import in_shared_memory
from jaxmpi.allreduce.api import Op, exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.core.errors import UsageError
from jaxmpi.functions import profiling, shared_array
from jaxmpi.functions.program import ProgramKey, TracedFunction, WorkerProgram
from jaxmpi.functions.reports import CallReport, WorkerFailed, failure_report, judge_reports
from jaxmpi.functions.rows import aligned
from jaxmpi.functions.transport import (
    ForkEffect,
    Message,
    MpiTransport,
    OutOfStep,
    SocketTransport,
    WorkerDied,
    decode_message,
    encode,
)
from jaxmpi.functions.worker import Command, Leaves, Worker

AXIS = "workers"
_handles = itertools.count()


def next_number() -> int:
    """A number for a function or variable: the same on all ranks, which make them in the same order."""
    return next(_handles)


class WorkerGroup:
    """Workers that compute together: devices of this process, whose sums are one program.

    Groups of several processes have one worker in each, and other `gather_reports`, `sum_leaves` and `gather_arrays`.
    """

    is_the_world = False  # True if its workers are the job's ranks, each of which runs the script
    leads = True  # True if results are wanted in this process
    is_serial = False  # True if one process leads and the others wait for its commands
    is_on_one_host = True
    way_out = "the ranks of a job cannot meet again: end it"  # if they are out of step

    def __init__(self, devices: list[Any]) -> None:
        """Take this process's devices, by rank."""
        self.size = len(devices)
        self.workers = [Worker(rank, device) for rank, device in enumerate(devices)]  # of this process
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.default_strategy = "shm" if devices[0].platform == "cpu" else "ar"
        self.functions: weakref.WeakValueDictionary[int, TracedFunction] = weakref.WeakValueDictionary()
        self.is_used = False  # True once a function or variable belongs to it
        self.dropped: list[int] = []  # numbers of functions and variables that nobody asks for any more
        self.unusable = ""  # why it can do no more
        self.is_exchanging = False  # past the reports of a call: what fails now leaves workers at different places
        self.busy = threading.Lock()

    def gather_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report, by rank."""
        return mine

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` of every worker's list of floats, none of them empty: under shard_map, rank r on device r."""
        # Each device's leaf gets a first axis of length 1, and all are one array, sharded along that axis: no byte
        # moves before the exchange.
        sharding = NamedSharding(self.mesh, P(AXIS))
        stacked = [
            jax.make_array_from_single_device_arrays((self.size, *parts[0].shape), sharding, [x[None] for x in parts])
            for parts in zip(*mine.values(), strict=True)
        ]
        totals = _exchange_over_devices(self.mesh, self.size, op, strategy)(stacked)  # pyright: ignore[reportArgumentType]
        shards = [{shard.index[0].start or 0: shard.data[0] for shard in x.addressable_shards} for x in totals]
        return {rank: [shard[rank] for shard in shards] for rank in mine}

    def gather_arrays(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """Every worker's arrays of any lengths, by rank, on the leading process or on all."""
        return [mine[rank] for rank in range(self.size)]

    def send(self, command: Command) -> None:
        """Send a command to the workers that wait, if any do."""
        self.forget_dropped()

    def end(self) -> None:
        """End the workers that wait."""

    @property
    def worker(self) -> Worker:
        """This process's first worker."""
        return self.workers[0]

    def is_local(self, rank: int) -> bool:
        """Return True if the worker is in this process."""
        return any(worker.rank == rank for worker in self.workers)

    def forget_dropped(self, numbers: list[int] | None = None) -> list[int]:
        """Drop variables, and what functions have left; by default what Python has dropped here."""
        if numbers is None:
            numbers, self.dropped = self.dropped, []  # more may follow meanwhile
        for worker in self.workers:
            for number in numbers:
                worker.forget(number)
        return numbers

    def release(self) -> None:
        """Let go of the command that was carried out."""
        for worker in self.workers:
            worker.release()

    def check_usable(self) -> None:
        """Refuse a group that has been closed or broken."""
        if self.unusable:
            raise UsageError(self.unusable)

    def program(self, worker: Worker, key: ProgramKey) -> WorkerProgram | None:
        """The program for arguments of some structure, shapes and dtypes; None: this process has not been sent it."""
        if key[0] in self.functions:
            return self.functions[key[0]].program(*key[1:])
        return worker.sent_program(key)

    def share_programs(self, keys: Sequence[ProgramKey]) -> None:
        """Send programs that workers lack; those of this process have every function in Python."""

    def run_and_report(
        self, label: str, work: Callable[[Worker], CallReport], part: str = "function"
    ) -> list[CallReport]:
        """Do this process's part of a command, and return every worker's report.

        All processes call this together. Each learns of every worker's report, and then all raise (`judge_reports`) or
        all go on. A worker that lacks a program says so, gets it and begins anew, while the others keep what they have
        computed: so nobody keeps a list of which worker has been sent which shapes. In a profile, `part` is this
        process's first worker's, and the others after it count as stragglers.
        """
        self.is_exchanging = False
        reports: dict[int, CallReport] = {}
        errors: dict[int, Exception] = {}

        def attempt(worker: Worker, step: Callable[[Worker], Any]) -> None:
            try:
                reports[worker.rank] = step(worker) or reports[worker.rank]
            # The user's function raises what it likes, and XLA, when its results are waited for: all workers are told.
            except Exception as error:
                reports[worker.rank], errors[worker.rank] = failure_report(error), error

        while True:
            waiting = [worker for worker in self.workers if worker.rank not in reports]
            # JAX dispatches and returns, so devices of one process compute at the same time: all begin before any is
            # waited for.
            with profiling.part(part):
                for worker in waiting:
                    attempt(worker, work)
            for worker in waiting:
                with profiling.part(part if worker is self.worker else "straggler"):
                    if worker.rank not in errors:
                        attempt(worker, lambda worker: jax.block_until_ready(worker.out) and None)
            with profiling.part("straggler"):
                every = self.gather_reports([reports[worker.rank] for worker in self.workers])
            missing = dict.fromkeys(report.detail for report in every if report.kind == "missing")
            if not missing or any(report.kind == "error" for report in every):
                break
            with profiling.part("compile"):
                self.share_programs([*missing])
            reports = {rank: report for rank, report in reports.items() if report.kind != "missing"}
        judge_reports(label, every, errors)
        self.is_exchanging = True
        return every

    def note_failure(self, error: BaseException) -> None:
        """Note after a failed call if another one is possible."""
        # A mistake or a failure that all have learnt from the reports leaves all at the same place. So does what fails
        # before anything is sent. All else stops this worker alone, while the others wait in an exchange.
        is_agreed = isinstance(error, (UsageError, WorkerFailed)) or not (
            self.is_exchanging or isinstance(error, OutOfStep) or not isinstance(error, Exception)
        )
        self.is_exchanging = False
        if not is_agreed and self.size > len(self.workers):  # those of one process are always in step
            way_out = "" if isinstance(error, WorkerDied) else f"; {self.way_out}"
            self.unusable = f"the workers are no longer in step: {str(error) or type(error).__name__:.500}{way_out}"


@functools.cache
def _exchange_over_devices(mesh: Mesh, size: int, op: Op, strategy: str) -> Callable[[Leaves], Leaves]:
    """`exchange` of arrays that carry a first axis of workers."""
    comm = AxisComm(AXIS, size)

    def exchange_shards(leaves: Leaves) -> Leaves:
        return [x[None] for x in exchange([x[0] for x in leaves], strategy, op, comm)]

    return jax.jit(jax.shard_map(exchange_shards, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


# ---------------------------------------------------------------- processes


class ProcessGroup(WorkerGroup):
    """One worker a process; messages carry commands and reports."""

    sums: SharedSum

    def __init__(self, transport: MpiTransport | SocketTransport, is_serial: bool) -> None:
        """Take the transport, and whether rank 0 leads."""
        super().__init__([jax.local_devices()[0]])
        self.transport, self.size, self.is_serial = transport, transport.size, is_serial
        self.worker.rank = transport.rank
        self.leads, self.is_the_world = not is_serial or transport.rank == 0, not is_serial

    def gather_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report; OutOfStep, whatever fails."""
        try:
            return self.transport.gather(mine[0], True) or []
        except OutOfStep:
            raise
        except Exception as error:  # MPI's, or of pickle and memory: this process has missed what the others have
            raise OutOfStep(f"the workers' reports could not be had: {error!r}") from error

    def share_programs(self, keys: Sequence[ProgramKey]) -> None:
        """Send programs from the process that runs the script to all others, which wait for them here.

        They are loaded where workers use them, so that a failure there is reported.
        """
        if self.worker.rank != 0:
            programs = self.transport.receive()
            if isinstance(programs, UsageError):
                raise programs
            self.worker.programs |= programs
            return
        failure = None
        try:
            message: Any = {key: self.functions[key[0]].serialize(*key[1:]) for key in keys}
        except Exception as error:  # what the user's function raises when it is traced: the workers wait to hear of it
            message, failure = UsageError(f"a program cannot be sent: {error}"), error
        self._send_to_others([encode(message)] * (self.size - 1))
        if failure:
            raise failure

    def _send_to_others(self, messages: Sequence[Message]) -> None:
        """Send a message to each other worker, in the order of ranks."""
        self.is_exchanging = bool(messages)  # a failure from here on leaves workers at different places
        for rank, message in enumerate(messages, 1):
            profiling.count_sent_bytes(sum(part.nbytes for part in message))
            self.transport.send(rank, message)
        self.is_exchanging = False

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """Sums of f32 through shared memory, without a program; others as `exchange_leaves`."""
        [(rank, leaves)] = mine.items()
        # A program would be compiled for each tree of shapes, and called with Python's overhead.
        if not in_shared_memory(strategy) or any(x.dtype != jnp.float32 for x in leaves):
            return {rank: self.exchange_leaves(leaves, op, strategy)}
        sums = self.sums
        try:
            return {rank: sum_now(sums, leaves, self.size if op == "mean" else 1)}
        # TrainingError of a late worker, MemoryError, XLA's: whatever it is, the others wait in the sum for this one.
        except Exception as error:
            sums.board.fail()  # the others learn that this worker does not go on
            self.transport.check_alive()
            raise OutOfStep(f"a sum over workers failed: {error!r}") from error

    def exchange_leaves(self, leaves: Leaves, op: Op, strategy: str) -> Leaves:
        """`exchange` of this worker's leaves, outside of programs."""
        raise NotImplementedError

    def gather_arrays(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        return self.transport.gather(mine[self.worker.rank], everywhere or not self.is_serial)

    def send(self, command: Command) -> None:
        """Send a command, to each worker with its own inputs.

        All inputs are encoded before anything is dropped or sent: a failure there leaves the workers as they were.
        """
        self.is_exchanging = False
        inputs = [encode(command.inputs(rank)) for rank in (range(1, self.size) if self.is_serial else ())]
        dropped = self.forget_dropped()
        self._send_to_others([encode((command._replace(inputs=None), rank_inputs, dropped)) for rank_inputs in inputs])

    def receive(self) -> Command:
        """The master's next command.

        Its inputs are a message in the message, decoded where the worker's part asks for them: what cannot be unpickled
        or mapped here is a failure to report.
        """
        command, inputs, dropped = self.transport.receive()
        self.forget_dropped(dropped)
        # Before the inputs are read: an array of theirs may lie at the path of one that has been freed.
        shared_array.unmap_freed()
        return command._replace(inputs=lambda rank: decode_message(inputs))


def sum_now(sums: SharedSum, arrays: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
    """`sums.sum` without a program, done on return, behind programs begun before.

    To call a program with an ordered effect takes 0.5 ms more, as JAX does that in Python.
    """
    try:
        jax.effects_barrier()
    except Exception:  # of any program, whose caller gets it; others may still run: only a program comes behind them
        return jax.block_until_ready(sums.sum(arrays, divisor))
    operands = [np.asarray(x, order="C") for x in arrays]
    results = [aligned(x.shape, np.float32) for x in arrays]
    sums.add(operands, results, divisor)
    return jax.device_put(results, [x.sharding for x in arrays])


class RankGroup(ProcessGroup):
    """Ranks of MPI; rank 0 leads, or all run the same script."""

    transport: MpiTransport

    def __init__(self, transport: MpiTransport, comm: MpiComm, is_serial: bool) -> None:
        """Take the transport of commands, and the communicator of exchanges."""
        super().__init__(transport, is_serial)
        self.comm, self.is_on_one_host = comm, len(set(comm.hosts)) == 1
        self.default_strategy = "shm" if self.is_on_one_host and jax.default_backend() == "cpu" else "asa32"

    @functools.cached_property
    def sums(self) -> SharedSum:
        """The host's sums; ranks on several hosts refuse alike."""
        return self.comm.shared_sum

    def exchange_leaves(self, leaves: Leaves, op: Op, strategy: str) -> Leaves:
        return exchange(leaves, strategy, op, self.comm)

    def end(self) -> None:
        """Make waiting workers drop what they hold, and wait for another fork."""
        if self.is_serial and not self.unusable:
            self.send(Command("close", "close", {}))


class ForkedGroup(ProcessGroup):
    """Processes made by fork, which sum in shared memory; the master knows when one ends."""

    transport: SocketTransport
    cores: Sequence[int] = ()  # that this process had before the fork
    way_out = "jaxmpi.close(), then fork again"

    def __init__(self, transport: SocketTransport, number: int) -> None:
        """Map the memory of this fork; the master and all workers call this together."""
        super().__init__(transport, is_serial=True)
        transport.host_barrier()
        instead = f'take devices of one process: JAX_NUM_CPU_DEVICES={transport.size} and fork(kind="devices")'
        self.sums = SharedSum(transport, f"sum of fork {number}", effect=ForkEffect(number), instead=instead)

    def exchange_leaves(self, leaves: Leaves, op: Op, strategy: str) -> Leaves:
        """Each worker computes the exchange from all workers' leaves: strategies need messages inside of programs."""
        rows = self.transport.gather([np.asarray(x) for x in leaves], True)
        stacked = [np.stack(parts) for parts in zip(*(rows or []), strict=True)]
        return jax.block_until_ready([x[self.worker.rank] for x in _exchange_rows(self.size, op, strategy)(stacked)])

    def end(self) -> None:
        """Workers go; those that do not within a moment are killed."""
        with contextlib.suppress(WorkerDied):  # as it was to
            if not self.unusable:
                self.send(Command("end", "end", {}))
        for connection in self.transport.connections.values():
            connection.close()
        for job in self.transport.jobs.values():
            try:
                job.wait(5)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        self.transport.stop_watching()
        self.sums.close()
        if self.cores:
            os.sched_setaffinity(0, self.cores)


@functools.cache
def _exchange_rows(size: int, op: Op, strategy: str) -> Callable[[list[Any]], Leaves]:
    """`exchange` of arrays whose first axis is the workers, all in this process."""
    comm = AxisComm(AXIS, size)
    return jax.jit(jax.vmap(lambda leaves: exchange(leaves, strategy, op, comm), axis_name=AXIS))
