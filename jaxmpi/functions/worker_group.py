"""The workers of a function, their state, and how results are combined.

Every call is a command that all workers carry out: a part of each worker's own, then reports, then what travels.
Nothing is changed and nothing travels before all have reported well; so a failure leaves all workers as they were.
"""

import contextlib
import functools
import itertools
import json
import os
import subprocess
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmpi.allreduce.api import Op, exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import check_one_host
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.json_tree import differences
from jaxmpi.functions import profiling
from jaxmpi.functions.fork_comm import ForkComm
from jaxmpi.functions.shared_array import FREED, SharedArray
from jaxmpi.functions.transport import (
    CallReport,
    MpiTransport,
    OutOfStep,
    SocketTransport,
    Transport,
    WorkerDied,
    in_order,
    pack,
    unpack,
)

AXIS = "workers"
Leaves = list[jax.Array]
Device = Any  # of JAX


class WorkerFailed(TrainingError):
    """A worker's part failed; the message has its traceback.

    The workers are as before the call.
    """


class SumFailed(OutOfStep):
    """A sum or gather failed, so forked workers are out of step."""


class Missing(Exception):
    """This worker has no program for these shapes; the text names it."""


class MissingPrograms(Exception):
    """Workers lack programs; the master sends these and repeats the command."""

    def __init__(self, wanted: list[str]) -> None:
        super().__init__(wanted)
        self.wanted = wanted


# ---------------------------------------------------------------- commands and what workers hold


class Command(NamedTuple):
    """A command to all workers."""

    kind: str  # of COMMANDS in `commands`
    header: dict[str, Any]  # plain JSON values
    given: Any = None  # what the caller's own workers take directly
    arrays_for: Callable[[int], list[Any]] = lambda rank: []  # arrays that travel to a worker of another process
    received: Iterator[np.ndarray] = iter(())  # in such a worker: those arrays


class Leaf(NamedTuple):
    """One array that a program returns, and what becomes of it."""

    op: str  # a row of OPS, or empty
    place: str  # result | into | local | update
    target: int  # number of the output, or of the variable
    index: int  # among the leaves of the target
    name: str  # of the target, for messages


class WorkerProgram(NamedTuple):
    """A user's function for arguments of certain shapes, over flat leaves."""

    run: Callable[..., Leaves]
    leaves: tuple[Leaf, ...]
    says: str  # dtypes and shapes that must be the same on all workers
    structures: tuple[Any, ...] = ()  # of the outputs, then of the updates, if the function is in Python


NO_PROGRAM = WorkerProgram(lambda: [], (), "")


class WorkerSlot:
    """One worker: its rank, its device, and what it holds."""

    def __init__(self, rank: int, device: Device) -> None:
        self.rank, self.device = rank, device
        self.values: dict[int, Leaves] = {}  # of variables, by number
        self.kept: dict[tuple[int, int], jax.Array] = {}  # broadcast inputs, by function and leaf
        self.programs: dict[str, WorkerProgram] = {}  # that have come from the master
        self.known: dict[tuple, WorkerProgram] = {}  # the same, by function, form and shapes
        self.arrays: dict[str, SharedArray] = {}  # mapped, by key
        self.rest()

    def rest(self) -> None:
        """Let go of the command that was carried out."""
        self.out: Leaves = []  # of the command that is going on
        self.program = NO_PROGRAM  # of the call that is going on
        self.count = 0  # examples of the call that is going on
        self.done: CallReport | None = None  # of the call that is going on, if this worker has done its part

    def put(self, array: Any) -> jax.Array:
        """On this worker's device."""
        return jax.device_put(array, self.device)

    def given(self, array: Any) -> Any:
        """Convert to a program's argument; calls place NumPy's arrays faster than `put`."""
        is_default = self.device is jax.local_devices()[0] and jax.config.jax_default_device is None  # pyright: ignore[reportAttributeAccessIssue]
        return array if is_default and isinstance(array, np.ndarray) else self.put(array)

    def own(self, array: Any) -> jax.Array:
        """The same, in memory that nobody else writes."""
        return jax.device_put(jnp.array(array) if isinstance(array, jax.Array) else np.array(array), self.device)

    def forget(self, number: int) -> None:
        """Drop a variable, or what function -1 - number has left here."""
        if number >= 0:
            self.values.pop(number, None)
            return
        self.kept = {key: value for key, value in self.kept.items() if key[0] != -1 - number}
        self.known = {key: value for key, value in self.known.items() if key[0] != -1 - number}
        self.programs = {key: value for key, value in self.programs.items() if json.loads(key)[0] != -1 - number}

    def held(self, number: int) -> Leaves:
        """The leaves of a variable."""
        check(number in self.values, f"worker {self.rank} holds no variable {number}; it was closed, or never made")
        return self.values[number]


class Library(Protocol):
    """Registry of the functions that this process has in Python."""

    def program(self, form: int, shapes: tuple) -> WorkerProgram:
        """The program for one structure of arguments.

        `shapes` holds (shape, dtype) of each leaf.
        """
        ...

    def travelling(self, form: int, shapes: tuple) -> tuple[dict[str, Any], bytes]:
        """The same for a process without the function: header and body."""
        ...


# ---------------------------------------------------------------- groups


class WorkerGroup:
    """Workers that compute together; some or all of them in this process."""

    size: int
    slots: list[WorkerSlot]  # this process's workers
    is_the_world = False  # whether its workers are the job's ranks, each of which runs the script
    leads = True  # whether results are wanted in this process
    is_serial = False  # whether one process leads and the others wait for its commands
    default_strategy = "asa32"
    way_out = "the ranks of a job cannot meet again: end it"  # if they are out of step

    def __init__(self) -> None:
        self.made = 0  # variables so far, which are numbered alike in all processes
        self.functions: weakref.WeakValueDictionary[int, Library] = weakref.WeakValueDictionary()
        self.is_used = False  # whether functions have been bound to it
        self.dropped: list[int] = []  # variables that nobody asks for any more; functions as -1 - number
        self.gone = ""  # why it can do no more
        self.is_exchanging = False  # past the reports of a call: what fails now leaves workers at different places
        self.busy = threading.Lock()

    # ------------------------------------------------------------ what differs between kinds of groups

    def all_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report, by rank."""
        raise NotImplementedError

    def summed(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` of every worker's list of floats."""
        raise NotImplementedError

    def gathered(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """Every worker's arrays by rank, on the leading process or on all."""
        raise NotImplementedError

    def tell(self, command: Command) -> None:
        """Send a command to the workers that wait, if any do."""
        self.forget(self.newly_dropped())

    def end(self) -> None:
        """End the workers that wait."""

    # ------------------------------------------------------------ what is the same

    @property
    def is_on_one_host(self) -> bool:
        """Return True if all workers see the same memory."""
        return len(set(getattr(getattr(self, "comm", None), "hosts", (0,)))) == 1

    def forget(self, numbers: list[int]) -> None:
        """Let go of what has been dropped."""
        for slot in self.slots:
            for number in numbers:
                slot.forget(number)

    def newly_dropped(self) -> list[int]:
        """Numbers of objects dropped since the last call; more may follow meanwhile."""
        numbers, self.dropped = self.dropped, []
        return numbers

    @property
    def mine(self) -> WorkerSlot:
        """This process's first worker."""
        return self.slots[0]

    def rest(self) -> None:
        """Drop what workers hold of the command that was carried out."""
        for slot in self.slots:
            slot.rest()

    def new_number(self) -> int:
        """A number for a new variable."""
        self.made += 1
        return self.made

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Refuse a second command meanwhile: a nested one would wait for ever."""
        check(
            self.busy.acquire(blocking=False),
            f"{what}: called while another call is under way, from inside of a function or from another thread; calls "
            "go one after another",
        )
        try:
            yield
        finally:
            self.busy.release()

    def check_usable(self) -> None:
        """Refuse a group that has been closed or broken."""
        check(not self.gone, self.gone)

    def program(self, slot: WorkerSlot, function: int, form: int, shapes: tuple) -> WorkerProgram:
        """The function's program for these shapes.

        Raises:
            Missing: this process waits for it.
        """
        if function in self.functions:
            return self.functions[function].program(form, shapes)
        key = function, form, shapes
        if key not in slot.known:
            text = wanted(function, form, shapes)
            if text not in slot.programs:
                raise Missing(text)
            slot.known[key] = slot.programs[text]
        return slot.known[key]

    def attempt(
        self, what: str, work: Callable[[WorkerSlot], CallReport], part: str = "function", waiting: str = "straggler"
    ) -> list[CallReport]:
        """Do this process's part of a command; all raise if one fails.

        All processes call this together. Each learns of every worker's report, and then all raise or all go on.

        Args:
            what: for messages.
            work: of one worker.
            part: of a profile, for this process's first worker; `waiting`: for the others after that.

        Raises:
            UsageError: what was asked cannot be, or workers disagree. WorkerFailed: some workers failed.
            MissingPrograms: workers lack programs.
        """
        self.is_exchanging = False
        reports, errors = [], {}
        with profiling.part(part):
            for slot in self.slots:  # all begin before any is waited for
                report, error = tried(slot, work)
                reports.append(report)
                errors[slot.rank] = error
        for i, slot in enumerate(self.slots):
            if errors[slot.rank] is None:
                with profiling.part(waiting if i else part):
                    _, errors[slot.rank] = tried(slot, finished)
                reports[i] = reports[i] if errors[slot.rank] is None else failure(errors[slot.rank])
        with profiling.part(waiting):
            reports = self.met(reports)
        judge = judged(what, reports, {r: e for r, e in errors.items() if e is not None})
        self.is_exchanging = True
        return judge

    def met(self, mine: list[CallReport]) -> list[CallReport]:
        """`all_reports`, after whose failure the workers may be out of step.

        Raises:
            OutOfStep: whatever failed.
        """
        try:
            return self.all_reports(mine)
        except OutOfStep:
            raise
        except Exception as error:
            raise OutOfStep(f"the workers' reports could not be had: {named(error)}") from error

    def note(self, error: BaseException) -> None:
        """Note after a failed call if another one is possible."""
        agreed = isinstance(error, (UsageError, WorkerFailed)) or not (
            self.is_exchanging or isinstance(error, OutOfStep) or not isinstance(error, Exception)
        )
        self.is_exchanging = False
        if not agreed and self.size > 1 and not isinstance(self, DeviceGroup):
            way_out = "" if isinstance(error, WorkerDied) else f"; {self.way_out}"
            self.gone = f"the workers are no longer in step: {named(error):.500}{way_out}"

    def refuse(self, what: str, error: Exception) -> None:
        """Report that this rank cannot begin, if every rank runs the script."""
        if self.is_serial:
            return
        try:
            reports = self.met([failure(error)] * len(self.slots))
        except BaseException as late:  # Ctrl-C included
            self.note(late)
            raise
        judged(what, reports, {slot.rank: error for slot in self.slots})


def tried(slot: WorkerSlot, work: Callable[[WorkerSlot], CallReport]) -> tuple[CallReport, Exception | None]:
    """A worker's report, and the error if there was one."""
    try:
        return work(slot), None
    except Missing as error:
        return CallReport("missing", str(error)), error
    except Exception as error:
        return failure(error), error


def finished(slot: WorkerSlot) -> CallReport:
    """Wait for what the worker computes."""
    jax.block_until_ready(slot.out)
    return CallReport("ok", "")


def named(error: BaseException) -> str:
    """Its text, or its kind if it has none."""
    return str(error) or type(error).__name__


def failure(error: BaseException | None) -> CallReport:
    """Text of an error; a user's mistake needs no traceback."""
    if isinstance(error, (UsageError, TrainingError)):
        return CallReport("error", str(error))
    return CallReport("error", "".join(traceback.format_exception(error)).rstrip())


def judged(what: str, reports: list[CallReport], errors: dict[int, Exception]) -> list[CallReport]:
    """The reports, if all are well and say the same."""
    failed = [rank for rank, report in enumerate(reports) if report.kind == "error"]
    if failed:
        raise_failure(what, reports, failed, errors)
    lacking = sorted({report.text for report in reports if report.kind == "missing"})
    if lacking:
        raise MissingPrograms(lacking)
    odd = [rank for rank, report in enumerate(reports) if report.text != reports[0].text][:8]
    lines = [line for rank in odd for line in differences(rank, reports[rank].text, 0, reports[0].text)]
    check(not odd, f"{what} differs between workers:\n" + "\n".join(lines[:24]))
    return reports


def raise_failure(what: str, reports: list[CallReport], failed: list[int], errors: dict[int, Exception]) -> None:
    """Raise one error everywhere, the original if no worker did its part."""
    own = [error for rank, error in errors.items() if rank in failed]
    if own and not any(report.kind == "ok" for report in reports):
        raise own[0]
    rank = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    error = WorkerFailed(f"{what}: worker {rank} of {len(reports)}{more} failed:\n{reports[rank].text}")
    raise error from (own[0] if own else None)


def wanted(function: int, form: int, shapes: Iterable[tuple]) -> str:
    """The name of a program in messages."""
    return json.dumps([function, form, [[list(shape), str(dtype)] for shape, dtype in shapes]])


# ---------------------------------------------------------------- processes


class ProcessGroup(WorkerGroup):
    """One worker a process: ranks of MPI, or processes made by fork."""

    def __init__(self, line: Transport, comm: MpiComm | ForkComm, strategy: str, is_serial: bool) -> None:
        """Take the transport of commands, and the communicator of exchanges.

        Args:
            strategy: that sums by default.
            is_serial: whether rank 0 leads; else all run the same script.
        """
        super().__init__()
        self.line, self.comm, self.size, self.is_serial = line, comm, line.size, is_serial
        self.slots = [WorkerSlot(line.rank, jax.local_devices()[0])]
        self.leads, self.is_the_world = not is_serial or line.rank == 0, not is_serial
        self.default_strategy = strategy

    def all_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report, by the transport."""
        return self.line.reports(mine[0])

    def summed(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` outside jit; f32 through shared memory needs no program."""
        [(rank, leaves)] = mine.items()
        if self.size > 1 and strategy in ("shm", "shm:32") and all(x.dtype == jnp.float32 for x in leaves):
            sum_now = self.sum_now
            try:
                return {rank: sum_now(leaves, self.size if op == "mean" else 1)}
            except Exception as error:  # whatever its kind: others wait in the sum, or have learnt of it
                raise OutOfStep(f"a sum over workers failed: {named(error)}") from error
        return {rank: exchange(leaves, strategy, op, self.comm)}

    @functools.cached_property
    def sum_now(self) -> Callable[[Leaves, float], Leaves]:
        """`sum_on_host_now`, after tracing has mapped its memory; all ranks refuse alike."""
        check_one_host(self.comm.hosts)
        jax.eval_shape(self.comm.sum_on_host, [jax.ShapeDtypeStruct((), jnp.float32)])
        return self.comm.sum_on_host_now

    def gathered(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """Every worker's arrays, of any lengths, packed into one message."""
        rows = self.gather_bytes(pack(mine[self.line.rank]), everywhere or not self.is_serial)
        return None if rows is None else [unpack(row) for row in rows]

    def gather_bytes(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """A gather of bytes over MPI."""
        assert isinstance(self.line, MpiTransport)
        return self.line.gather(data, everywhere)

    def tell(self, command: Command) -> None:
        """Send a command, to each worker its own arrays.

        All are made before one is sent: a failure does no harm.
        """
        self.is_exchanging = False
        of_workers = laid_out([command.arrays_for(rank) for rank in range(1, self.size)]) if self.is_serial else []
        dropped = self.newly_dropped()
        self.forget(dropped)
        if self.is_serial:
            freed = list(FREED)
            del FREED[: len(freed)]  # more may come at any time
            header = json.dumps([command.kind, command.header, dropped, freed])
            self.is_exchanging = True
            for rank in range(1, self.size):
                arrays = of_workers.pop(0)
                profiling.sent(header, arrays)
                self.line.tell(rank, header, arrays)

    def hear(self) -> Command:
        """The master's next command."""
        header, arrays = self.line.hear()
        kind, fields, dropped, freed = json.loads(header)
        self.forget(dropped)
        for key in freed:
            self.mine.arrays.pop(key, None)
        return Command(kind, fields, received=iter(arrays))

    def end(self) -> None:
        """Make waiting workers drop what they hold, and wait for another fork."""
        if self.is_serial and not self.gone:
            self.tell(Command("close", {}))


class ForkedGroup(ProcessGroup):
    """Processes made by fork: the master knows when one ends."""

    line: SocketTransport
    comm: ForkComm
    cores: Sequence[int] = ()  # that this process had before the fork
    way_out = "jaxmpi.close(), then fork again"

    def summed(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """The exchange through shared memory, by any strategy."""
        with self._naming("a sum over workers"):
            return jax.block_until_ready(super().summed(mine, op, strategy))

    def gather_bytes(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """A gather of bytes through shared memory."""
        with self._naming("a gather over workers"):
            return self.comm.gather_now(data, everywhere or self.leads)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Report a failed exchange in shared memory, and name an ended worker."""
        try:
            yield
        except Exception as error:
            self.comm.fail()
            self.line.check_alive()
            raise SumFailed(f"{what} failed: {named(error)}") from error

    def end(self) -> None:
        """Workers go; those that do not within a moment are killed."""
        try:
            if not self.gone:
                self.tell(Command("end", {}))
        except WorkerDied:  # as it was to
            pass
        for connection in self.line.ends.values():
            connection.close()
        for job in self.line.jobs.values():
            try:
                job.wait(5)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        self.line.stop_watching()
        self.comm.close()
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def laid_out(of_workers: list[list[Any]]) -> list[list[np.ndarray]]:
    """Workers' arrays, C-contiguous; one for several workers is copied at most once."""
    made: dict[int, np.ndarray] = {}
    for array in itertools.chain(*of_workers):
        if id(array) not in made:
            made[id(array)] = in_order(array)
    return [[made[id(array)] for array in arrays] for arrays in of_workers]


# ---------------------------------------------------------------- devices of one process


class DeviceGroup(WorkerGroup):
    """One worker a local device."""

    def __init__(self, devices: list[Device]) -> None:
        """Take the devices, by rank."""
        super().__init__()
        self.size = len(devices)
        self.slots = [WorkerSlot(rank, device) for rank, device in enumerate(devices)]
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.default_strategy = "shm" if devices[0].platform == "cpu" else "ar"

    def all_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """All workers are in this process: nothing travels."""
        return mine

    def summed(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` under shard_map, rank r on device r; empty leaves stay unchanged."""
        full = [i for i, x in enumerate(mine[0]) if x.size]
        if self.size == 1 or not full:
            return mine
        sharding = NamedSharding(self.mesh, P(AXIS))
        rows = [[mine[rank][i][None] for i in full] for rank in range(self.size)]
        whole = [
            jax.make_array_from_single_device_arrays((self.size, *shards[0].shape[1:]), sharding, list(shards))
            for shards in zip(*rows, strict=True)
        ]
        totals = over_devices(self.mesh, self.size, op, strategy)(whole)  # pyright: ignore[reportArgumentType]
        made = dict(zip(full, totals, strict=True))
        return {
            rank: [shard_of(made[i], rank) if i in made else x for i, x in enumerate(leaves)]
            for rank, leaves in mine.items()
        }

    def gathered(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """All workers are in this process: nothing travels."""
        return [mine[rank] for rank in range(self.size)]


@functools.cache
def over_devices(mesh: Mesh, size: int, op: Op, strategy: str) -> Callable[[Leaves], Leaves]:
    """`exchange` of arrays that carry a first axis of workers."""
    comm = AxisComm(AXIS, size)

    def of_one(leaves: Leaves) -> Leaves:
        return [x[None] for x in exchange([x[0] for x in leaves], strategy, op, comm)]

    return jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def shard_of(array: jax.Array, rank: int) -> jax.Array:
    """Row `rank`, on its device."""
    [shard] = [shard for shard in array.addressable_shards if (shard.index[0].start or 0) == rank]
    return shard.data[0]
