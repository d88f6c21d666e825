"""Sums between processes, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out schedules (`schedules`), of which it knows only the steps.

- In a program a handler sums vectors in the program's own thread (`summed`).
- Beside a program the communication thread carries buckets on (`go_on`).

Without a C compiler on all ranks neither is there: programs then sum by mpi4jax's calls, with the same bits.
"""

import ctypes
import functools
import hashlib
import sys
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.table import parse
from jaxmpi.allreduce.schedules import LINE_BYTES, MEMORIES, STEPS, WINDOW, Group
from jaxmpi.allreduce.wires import WIRE_CONSTANTS
from jaxmpi.comm import c_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.diagnosis import comparison_of
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import survives_losses
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError
from jaxmpi.runtime import failures, progress
from jaxmpi.runtime.progress import Span

EXCHANGE = "an exchange"
NO_MEMORY = -1  # a number that is no error of MPI's
NO_MEMORY_LINE = "there is no memory for the messages of a sum"
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
# A program that waits looks at once again, as MPI's calls do; after a while it leaves its core to others.
YIELDS, PAUSE_US = 300, 50
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_wires.h")],
    STEPS=",".join(STEPS),
    MEMORIES=",".join(MEMORIES),
    WINDOW=WINDOW,
    LINE_BYTES=LINE_BYTES,
    NO_MEMORY=NO_MEMORY,
    YIELDS=YIELDS,
    PAUSE_US=PAUSE_US,
    **WIRE_CONSTANTS,
)
_sums_p = SOURCE.primitive()
FUNCTIONS = "Isend", "Irecv", "Testsome"  # in the order of `struct setup`
ODD = 0x5A17  # in MPI_ERROR, to see where it is
MOST_SPANS = 4096  # as in C
_engines = dict[int, "HostEngine"]()  # of communicators that were not freed
_last = [-1]  # number of an engine; the next one's is the same on all its ranks


def unavailable_reason(comm: MpiComm) -> str:
    """Why C cannot sum on all of these ranks; empty if it can. All come here together at first."""

    def agreed() -> str:
        reasons = comm.processes.allgather_object(SOURCE.unavailable_reason(in_programs=False) or "")
        first = next((rank for rank, why in enumerate(reasons) if why.startswith(c_handlers.TROUBLE)), None)
        if first == comm.rank:
            line = f"sums between processes are mpi4jax's, since {reasons[comm.rank]}"
            print(f"jaxmpi: {failures.describe_rank()}: {line}", file=sys.stderr, flush=True)
        return next(filter(None, reasons), "")

    return comm.cached("why there is no host engine", agreed)


class SumRecord:
    """The schedule of a sum of f32[n] on this rank, for C."""

    def __init__(self, group: Group, strategy: str, half: str, n: int) -> None:
        """Make the schedule of a strategy, or of a half of it: `scatter` or `gather`."""
        schedule = parse(strategy).schedule(n, group, half)
        self._kept = steps, parts = schedule.arrays()
        self.count = len(parts)  # parts, each of which has a tag; equal on all ranks
        self.struct = _structs()[0](
            steps.ctypes.data,
            parts.ctypes.data,
            len(parts),
            group.window,
            -(-schedule.scratch_bytes // LINE_BYTES) * LINE_BYTES,
            n,
        )


class HostEngine:
    """Sums of a communicator's ranks, by messages on a communicator of mpi4py of its own."""

    def __init__(self, comm: MpiComm) -> None:
        """Make communicators; all ranks come here together."""
        self.comm, self.control = comm, comm.processes.on_own_communicator()  # by which ranks find out who is late
        self.mpi, self.group = self.control.clone(), Group(comm.rank, comm.order, comm.hosts)
        self.record = functools.cache(functools.partial(SumRecord, self.group))  # (strategy, half, n) -> SumRecord
        self.tags = min(comm.processes.tags, np.iinfo(np.int32).max)
        self._plans = dict[int, Any]()  # `struct plan` by key, each with what it points to
        self.number = _last[0] = 1 + max(comm.processes.allgather_object(_last[0]))
        _engines[self.number] = self

    def plan(self, strategy: str, half: str, sizes: Sequence[int]) -> int:
        """The key by which a program finds its sums, the same on all ranks; -1 if they have more parts than tags."""
        from mpi4py import MPI

        about = self.number, strategy, half, tuple(sizes), self.group.numbers
        key = int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:8], "little") >> 1
        records = [self.record(strategy, half, n) for n in sizes]
        if sum(record.count for record in records) > self.tags:
            return -1
        if key not in self._plans:
            pointers = (c_void_p * len(records))(*(ctypes.addressof(record.struct) for record in records))
            facts = key, len(records), self.tags, ctypes.addressof(pointers), 0, self.number, MPI._handleof(self.mpi)
            self._plans[key] = _structs()[1](*facts), pointers, records
            SOURCE.library().jaxmpi_sum_add_plan(ctypes.byref(self._plans[key][0]))
        return key

    def close(self) -> None:
        """Let programs that still call it end with an error."""
        _closed.append(self._plans)  # C never forgets a plan
        for struct, *_ in self._plans.values():
            struct.is_closed = 1
        del _engines[self.number]


_closed: list[dict[int, Any]] = []


class HostSum:
    """A sum that C carries out in the thread that calls it."""

    def __init__(self, engine: HostEngine, key: int, x: np.ndarray, first_tag: int) -> None:
        """Begin to sum f32[n], C-contiguous, in place, by a plan of one vector.

        Nothing is sent before `go_on`. Part i has tag first_tag + i modulo tags.
        """
        self._library = SOURCE.library()
        plan, _, [record] = engine._plans[key]
        self._kept, at = (plan, record, x), c_void_p(x.ctypes.data)
        made = self._library.jaxmpi_sum_begin(
            ctypes.byref(record.struct), ctypes.byref(plan), at, at, c_int64(first_tag)
        )
        self._sum = c_void_p(made)
        if not self._sum:
            raise MemoryError(NO_MEMORY_LINE)

    def has_ended(self) -> bool:
        """Return True once the sum is there; nothing may be called afterwards."""
        return bool(self._library.jaxmpi_sum_ended(self._sum))


class Pace(ctypes.Structure):
    """How often C looks at messages; another thread may change it meanwhile.

    `is_woken` makes it return. A look that finds nothing is followed by `yields` more, and then by pauses.
    """

    _fields_ = tuple((name, c_int32) for name in ("is_woken", "yields", "pause_us"))


# ---------------------------------------------------------------- in a program


def is_far(comm: Comm) -> TypeGuard[MpiComm]:
    """Return True for MPI ranks on several hosts."""
    return isinstance(comm, MpiComm) and len(set(comm.hosts)) > 1


def program_engine(comm: MpiComm) -> HostEngine | None:
    """The engine of this communicator's programs; None unless all ranks have C. All come here together at first."""

    def made() -> HostEngine | None:
        reason = SOURCE.unavailable_reason() or "errors of lost ranks are Python's" * survives_losses()
        if unavailable_reason(comm) or any(comm.processes.allgather_object(reason)):
            return None
        engine = HostEngine(comm)
        comparison_of(comm).name_errors_of(engine.mpi)
        return engine

    return comm.cached("host engine", made)


def summed(vectors: Sequence[jax.Array], strategy: str, comm: Comm, half: str = "") -> list[jax.Array] | None:
    """Sums f32[n], or halves of them, in the program's thread.

    Several are under way at once. None if C has them not, on all ranks alike, which trace the program together.
    """
    if not (isinstance(comm, MpiComm) and comm.size > 1 and vectors and parse(strategy).is_in_c(comm.hosts)):
        return None
    if not (engine := program_engine(comm)):
        return None
    if (key := engine.plan(strategy, half, [x.size for x in vectors])) < 0:
        return None
    halves = tuple(np.array([key], np.int64).view(np.int32).tolist())
    return _sums_p.bind(*vectors, results=c_handlers.shaped(*vectors), effect=comm.effect, words=halves)


def _read_spans() -> tuple[list[Span], list[Span]]:
    """Waits for sums in programs: those that ended since the last call, and one under way."""
    taken, since_ns = np.empty((MOST_SPANS, 2), np.int64), c_int64()
    count = SOURCE.library().jaxmpi_sum_spans(c_void_p(taken.ctypes.data), ctypes.byref(since_ns))
    running = [Span("wait", EXCHANGE, since_ns.value / 1e9, since_ns.value / 1e9)] if since_ns.value else []
    return [Span("wait", EXCHANGE, begin / 1e9, end / 1e9) for begin, end in taken[:count].tolist()], running


@ctypes.CFUNCTYPE(None, c_int32, c_double)
def _waits(number: int, waited_s: float) -> None:
    """End the job if a rank has waited too long."""
    try:
        engine = _engines[number]
        if waited_s > TIMEOUT_S or engine.control.is_asked():
            raise late_error(engine.control, "an exchange", waited_s, engine.comm.processes)
    except BaseException as error:  # ctypes would swallow it, and the program wait on
        failures.fail(error, None)


def late_error(control: MpiProcesses, what: str, waited_s: float, waiting: MpiProcesses) -> TrainingError:
    """The error of what has waited too long, with the ranks that are late; all ranks that wait find them together.

    Args:
        waiting: whose calls say where late ranks wait.
    """
    late = control.in_job(control.late())
    return TrainingError(
        f"{what} has waited {waited_s:.0f} s for rank {late}; all ranks must exchange as often "
        f"(JAXMPI_EXCHANGE_TIMEOUT_S sets the time){waiting.waits.where(late)}"
    )


@c_handlers.Failed
def _failed(number: int, code: int) -> None:
    """End the job: no memory, or MPI's error in a program."""
    from mpi4py import MPI

    why = NO_MEMORY_LINE if code == NO_MEMORY else f"MPI: {MPI.Get_error_string(code)}"
    try:
        if code != NO_MEMORY:
            comparison_of(_engines[number].comm).name_error(code)  # not every MPI calls the communicator's handler
    finally:
        failures.fail(TrainingError(f"an exchange between processes: {why}"), None)


# ---------------------------------------------------------------- on the communication thread


def go_on(most_s: float, pace: Pace) -> bool:
    """Carry all sums on, until one has ended.

    Returns True if messages have come or gone.

    Args:
        most_s: seconds after which it returns anyway.
        pace: of its looks.

    Raises:
        MPI.Exception: of a message.
        MemoryError: there is no memory for one.
    """
    from mpi4py import MPI

    has_moved = c_int32()
    if code := SOURCE.library().jaxmpi_sums_go_on(int(1e6 * most_s), ctypes.byref(pace), ctypes.byref(has_moved)):
        raise MemoryError(NO_MEMORY_LINE) if code == NO_MEMORY else MPI.Exception(code)
    return bool(has_moved)


@functools.cache
def _structs() -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """`struct record` and `struct plan` of the library, which has got `struct setup`."""
    from mpi4py import MPI

    library, handle = SOURCE.library(), c_handlers.handle_type()

    class Setup(ctypes.Structure):
        _fields_ = (
            ("functions", c_void_p * len(FUNCTIONS)),
            *((name, c_int64) for name in ("status_bytes", "error_at", "in_status")),
            *(("failed", c_handlers.Failed), ("waits", type(_waits))),
            ("byte", handle),
        )

    class RecordStruct(ctypes.Structure):
        _fields_ = (
            *((name, c_void_p) for name in ("steps", "parts")),
            *((name, c_int64) for name in ("count", "window", "scratch_bytes", "floats")),
        )

    class PlanStruct(ctypes.Structure):
        _fields_ = (
            *((name, c_int64) for name in ("key", "count", "tags")),
            ("records", c_void_p),
            *((name, c_int32) for name in ("is_closed", "engine")),
            ("comm", handle),
            ("next", c_void_p),
        )

    assert ctypes.sizeof(Setup) == library.jaxmpi_sum_setup_bytes()
    assert ctypes.sizeof(RecordStruct) == library.jaxmpi_sum_record_bytes()
    assert ctypes.sizeof(PlanStruct) == library.jaxmpi_sum_plan_bytes()
    library.jaxmpi_sum_begin.restype = c_void_p
    setup = Setup(failed=_failed, waits=_waits, byte=MPI._handleof(MPI.BYTE), in_status=MPI.ERR_IN_STATUS)
    setup.functions[:] = c_handlers.addresses(FUNCTIONS)
    setup.status_bytes, setup.error_at = MPI._sizeof(MPI.Status), _place_of_error()
    library.jaxmpi_sum_setup(ctypes.byref(setup))
    progress.add_reader(_read_spans)
    return RecordStruct, PlanStruct


def _place_of_error() -> int:
    """Bytes before MPI_ERROR in MPI_Status, which differ between MPI libraries."""
    from mpi4py import MPI

    status = MPI.Status()
    status.error = ODD
    content = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return content.index(np.int32(ODD).tobytes())
