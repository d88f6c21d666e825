"""Sums between processes, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out schedules (`schedules`), of which it knows only the steps.

- In a program a handler sums vectors in the program's own thread (`summed`).
- Beside a program the communication thread carries buckets on (`comm_thread`).

A program holds the key of a plan, a digest of its sums, by which C finds their schedules, and nothing of the process.

Without a C compiler on all ranks neither is there: programs then sum by mpi4jax's calls, with the same bits.
"""

import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import ShapedArray

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
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures, progress
from jaxmpi.runtime.progress import Span

EXCHANGE = "an exchange"
NO_MEMORY, MOVED = -1, -2  # numbers that are no errors of MPI's
NO_MEMORY_LINE = "there is no memory for the messages of a sum"
MOVED_LINE = "XLA has moved a bucket while it travelled; use --exchange.overlap off, and report this"
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
# A program that waits looks at once again, as MPI's calls do; after a while it leaves its core to others. While nobody
# waits, the communication thread looks every 2 ms: each look takes time of the computation beside it.
YIELDS, PAUSE_US = 300, 50
CALLS = "OPEN", "START", "DONE"  # names in C
OPEN, START, DONE = range(len(CALLS))
TRACKS = "NOTHING", "WAIT_FOR_SUM", "TRAVEL"
CHUNK = "gather from a chunk"  # a half whose operand is this rank's chunk alone
WHOLE, COMPARISON = -1, -2  # in place of a vector's number in a plan
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_wires.h")],
    ("jaxmpi_beside",),
    STEPS=",".join(STEPS),
    MEMORIES=",".join(MEMORIES),
    WINDOW=WINDOW,
    LINE_BYTES=LINE_BYTES,
    CALLS=",".join(CALLS),
    TRACKS=",".join(TRACKS),
    NO_MEMORY=NO_MEMORY,
    MOVED=MOVED,
    COMPARISON=COMPARISON,
    CALM_US=2000,
    HURRY_YIELDS=20,
    MOST_IN_SUMS_US=100_000,
    PATIENT_S=0.5,
    YIELDS=YIELDS,
    PAUSE_US=PAUSE_US,
    **WIRE_CONSTANTS,
)
sums_p, beside_p = SOURCE.primitive(), SOURCE.primitive("jaxmpi_beside")
FUNCTIONS = "Isend", "Irecv", "Testsome", "Iallgather"  # in the order of `struct setup`
ODD = 0x5A17  # in MPI_ERROR, to see where it is
MOST_SPANS = 4096  # as in C
_engines = dict[int, "HostEngine"]()  # of communicators that were not freed
_labels = dict[int, list[str]]()  # of the vectors of plans beside programs, by key
_calls = dict[int, str]()  # what such plans exchange, by a digest of that
beside: list[Any] = []  # the `ExchangeHandlers`, once they are made
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

    def __init__(self, comm: MpiComm, group: Group, strategy: str, half: str, n: int) -> None:
        """Make the schedule of a strategy, or of a half of it: `scatter`, `gather`, or `gather` from a CHUNK."""
        choice, begin = parse(strategy), 0
        if half == CHUNK:
            assert choice.spec.halves
            half, begin = "gather", choice.spec.halves.chunks(comm)[comm.rank] * (n // comm.size)
        schedule = choice.schedule(n, group, half, begin)
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
        self.record = functools.cache(
            functools.partial(SumRecord, comm, self.group)
        )  # (strategy, half, n) -> SumRecord
        self.tags = min(comm.processes.tags, np.iinfo(np.int32).max)
        self._plans = dict[int, Any]()  # `struct plan` by key, each with what it points to
        self.number = _last[0] = 1 + max(comm.processes.allgather_object(_last[0]))
        _engines[self.number] = self

    def parts(self, sums: Sequence[tuple[str, str, int]]) -> int:
        """How many parts, and so tags, sums take; each is (strategy, half, floats)."""
        return sum(self.record(*each).count for each in sums)

    def add_plan(self, key: int, sums: Sequence[tuple[str, str, int]]) -> None:
        """Let programs find sums by this key."""
        from mpi4py import MPI

        if key in self._plans:
            return
        records = [self.record(*each) for each in sums]
        pointers = (c_void_p * len(records))(*(ctypes.addressof(record.struct) for record in records))
        facts = key, len(records), self.parts(sums), self.tags, ctypes.addressof(pointers), 0, self.number
        self._plans[key] = _structs()[1](*facts, MPI._handleof(self.mpi)), pointers, records
        SOURCE.library().jaxmpi_sum_add_plan(ctypes.byref(self._plans[key][0]))

    def close(self) -> None:
        """Let programs that still call it end with an error."""
        _closed.append(self._plans)  # C never forgets a plan
        for struct, *_ in self._plans.values():
            struct.is_closed = 1
        del _engines[self.number]


_closed: list[dict[int, Any]] = []


def key_of(about: Any) -> int:
    """A digest, by which programs know a plan."""
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:8], "little") >> 1


def words_of(key: int) -> tuple[int, int]:
    """A key as words of a call."""
    low, high = np.array([key], np.int64).view(np.int32).tolist()
    return low, high


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
    """Sums f32[n], or halves of them, in the program's thread; with the half CHUNK f32[n / w] -> f32[n].

    Several are under way at once. None if C has them not, on all ranks alike, which trace the program together.
    """
    if not (isinstance(comm, MpiComm) and comm.size > 1 and vectors and parse(strategy).is_in_c(comm.hosts)):
        return None
    if not (engine := program_engine(comm)):
        return None
    sizes = [x.size * comm.size if half == CHUNK else x.size for x in vectors]
    sums = [(strategy, half, n) for n in sizes]
    if engine.parts(sums) > engine.tags:
        return None
    key = key_of((engine.number, sums, engine.group.numbers))
    engine.add_plan(key, sums)
    results = tuple(ShapedArray((n,), np.float32) for n in sizes)
    return sums_p.bind(*vectors, results=results, effect=comm.effect, words=words_of(key))


# ---------------------------------------------------------------- called by C


def name_plan(key: int, whole: str, labels: Sequence[str]) -> int:
    """Name an exchange and its vectors, for spans and messages; the digest by which ranks compare it, or 0."""
    _labels[key] = [*labels]
    call = key_of(whole) if whole else 0
    _calls[call] = whole
    return call


def describe(number: int) -> str:
    """An exchange beside a program by its digest, or the digest's lower 31 bits."""
    found = (whole for call, whole in _calls.items() if call & 0x7FFFFFFF == number & 0x7FFFFFFF)
    return next(found, "another exchange beside a program")


def handle(mpi: Any) -> Any:
    """MPI's handle of a communicator, for C."""
    from mpi4py import MPI

    return c_handlers.handle_type()(MPI._handleof(mpi))


def load() -> None:
    """Compile the engine, and give it what it calls."""
    _structs()


def _name(key: int, index: int) -> str:
    if index == COMPARISON:
        return f"the comparison of {describe(key)}"
    labels = _labels.get(key, [])
    return labels[index] if 0 <= index < len(labels) else EXCHANGE


def _read_spans() -> tuple[list[Span], list[Span]]:
    """Waits of programs for sums, and buckets' ways: those that ended since the last call, and a wait under way."""
    taken = np.empty((MOST_SPANS + 1, 5), np.int64)
    last = taken[MOST_SPANS:]
    count = SOURCE.library().jaxmpi_sum_spans(c_void_p(taken.ctypes.data), c_void_p(last.ctypes.data))
    tracks = "", "wait", "travel"
    ended, running = (
        [
            Span(tracks[track], _name(key, index), begin_ns / 1e9, max(begin_ns, end_ns) / 1e9)
            for track, key, index, begin_ns, end_ns in rows.tolist()
            if track
        ]
        for rows in (taken[:count], last)
    )
    return ended, running


def _ending_job(function: Callable[..., None]) -> Callable[..., None]:
    """An error ends the job: ctypes would swallow it, and the program wait on."""

    @functools.wraps(function)
    def call(*args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.fail(error, error.__traceback__ if not isinstance(error, (TrainingError, UsageError)) else None)

    return call


@ctypes.CFUNCTYPE(None, c_int32, c_int64, c_int64, c_double)
@_ending_job
def _waits(number: int, key: int, index: int, waited_s: float) -> None:
    """End the job if a rank has waited too long."""
    engine = _engines[number]
    is_late = waited_s > TIMEOUT_S and index != COMPARISON  # for which the monitor has the same limit
    if is_late or engine.control.is_asked():
        waiting = engine.comm.processes if index == WHOLE else engine.control
        raise late_error(engine.control, _name(key, index), waited_s, waiting)


@ctypes.CFUNCTYPE(None, c_void_p, c_int64)
@_ending_job
def _learn(text: int, length: int) -> None:
    """Add the plan of a program that calls it for the first time here."""
    beside[0].learn(ctypes.string_at(text, length).decode())


@ctypes.CFUNCTYPE(None, c_int64)
@_ending_job
def _differs(call: int) -> None:
    """End the job, since ranks have come to different exchanges beside programs."""
    beside[0].refuse(call)


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

    ours = {NO_MEMORY: NO_MEMORY_LINE, MOVED: MOVED_LINE}
    why = ours.get(code) or f"MPI: {MPI.Get_error_string(code)}"
    try:
        if code not in ours:
            comparison_of(_engines[number].comm).name_error(code)  # not every MPI calls the communicator's handler
    finally:
        failures.fail(TrainingError(f"an exchange between processes: {why}"), None)


# ---------------------------------------------------------------- structures of C


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
            *(("learn", type(_learn)), ("differs", type(_differs))),
            ("byte", handle),
        )

    class RecordStruct(ctypes.Structure):
        _fields_ = (
            *((name, c_void_p) for name in ("steps", "parts")),
            *((name, c_int64) for name in ("count", "window", "scratch_bytes", "floats")),
        )

    class PlanStruct(ctypes.Structure):
        _fields_ = (
            *((name, c_int64) for name in ("key", "count", "parts", "tags")),
            ("records", c_void_p),
            *((name, c_int32) for name in ("is_closed", "engine")),
            ("comm", handle),
            ("next", c_void_p),
        )

    assert ctypes.sizeof(Setup) == library.jaxmpi_sum_setup_bytes()
    assert ctypes.sizeof(RecordStruct) == library.jaxmpi_sum_record_bytes()
    assert ctypes.sizeof(PlanStruct) == library.jaxmpi_sum_plan_bytes()
    library.jaxmpi_beside_done.restype = c_void_p
    library.jaxmpi_beside_run.restype = None
    calls = {"failed": _failed, "waits": _waits, "learn": _learn, "differs": _differs}
    setup = Setup(**calls, byte=MPI._handleof(MPI.BYTE), in_status=MPI.ERR_IN_STATUS)
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
