"""Sums between processes, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out schedules (`schedules`), of which it knows only the steps.

- In a program a handler sums vectors in the program's own thread (`summed`).
- Beside a program the communication thread carries buckets on (`go_on`).

Without a C compiler on all ranks neither is there: programs then sum by mpi4jax's calls, with the same bits.
"""

import ctypes
import functools
import itertools
import sys
import zlib
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TypeGuard

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.table import parse
from jaxmpi.allreduce.schedules import LINE_BYTES, STEPS, WINDOW, Group
from jaxmpi.allreduce.wires import WIRE_CONSTANTS
from jaxmpi.comm import c_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.diagnosis import comparison_of
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import survives_losses
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError
from jaxmpi.runtime import failures

MOST_RECORDS, NO_MEMORY = 1 << 16, -1  # records of programs at most; a number that is no error of MPI's
NO_MEMORY_LINE = "there is no memory for the messages of a sum"
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
# A program that waits looks at once again, as MPI's calls do; after a while it leaves its core to others.
YIELDS, PAUSE_US = 300, 50
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_wires.h")],
    STEPS=",".join(STEPS),
    WINDOW=WINDOW,
    LINE_BYTES=LINE_BYTES,
    MOST_RECORDS=MOST_RECORDS,
    NO_MEMORY=NO_MEMORY,
    YIELDS=YIELDS,
    PAUSE_US=PAUSE_US,
    **WIRE_CONSTANTS,
)
_sums_p = SOURCE.primitive(is_in_place=True)
FUNCTIONS = "Isend", "Irecv", "Testsome"  # in the order of `struct setup`
ODD = 0x5A17  # in MPI_ERROR, to see where it is
_numbers = itertools.count()  # numbers of records
_programs = dict[int, "HostEngine"]()  # by number of a record


@functools.cache
def unavailable_reason(comm: MpiComm) -> str:
    """Why C cannot sum on all of these ranks; empty if it can. All come here together at first."""
    reasons = comm.processes.allgather_object(SOURCE.unavailable_reason(in_programs=False) or "")
    first = next((rank for rank, why in enumerate(reasons) if why.startswith(c_handlers.TROUBLE)), None)
    if first == comm.rank:
        line = f"sums between hosts are mpi4jax's, since {reasons[comm.rank]}"
        print(f"jaxmpi: {failures.describe_rank()}: {line}", file=sys.stderr, flush=True)
    return next(filter(None, reasons), "")


class SumRecord:
    """The schedule of a sum of f32[n] on this rank, for C."""

    def __init__(self, engine: "HostEngine", strategy: str, half: str, n: int) -> None:
        """Make the schedule of a strategy, or of a half of it: `scatter` or `gather`."""
        from mpi4py import MPI

        schedule = parse(strategy).schedule(n, engine.group, half)
        self._kept = steps, parts = schedule.arrays()
        self.count = len(parts)  # parts, each of which has a tag; equal on all ranks
        self.digest = zlib.crc32(repr((strategy, half, n, engine.group.numbers)).encode()) >> 1
        self.struct = _record_type()(
            steps.ctypes.data,
            parts.ctypes.data,
            len(parts),
            -(-schedule.scratch_bytes // LINE_BYTES) * LINE_BYTES,
            n,
            self.digest,
            MPI._handleof(engine.mpi),
        )


class HostEngine:
    """Sums of a communicator's ranks, by messages on a communicator of mpi4py of its own."""

    def __init__(self, comm: MpiComm) -> None:
        """Make communicators; all ranks come here together."""
        self.comm, self.control = comm, comm.processes.on_own_communicator()  # by which ranks find out who is late
        self.mpi, self.group = self.control.clone(), Group(comm.rank, comm.order, comm.hosts)
        self.record = functools.cache(functools.partial(SumRecord, self))  # (strategy, half, n) -> SumRecord


class HostSum:
    """A sum that C carries out in the thread that calls it."""

    def __init__(self, record: SumRecord, x: np.ndarray, first_tag: int, tags: int) -> None:
        """Begin to sum f32[n], C-contiguous, in place.

        Nothing is sent before `go_on`. Part i has tag first_tag + i modulo tags.
        """
        self._library, self._kept = SOURCE.library(), (record, x)
        vector, numbers = c_void_p(x.ctypes.data), map(c_int64, (first_tag, tags))
        self._sum = c_void_p(self._library.jaxmpi_sum_begin(ctypes.byref(record.struct), vector, *numbers))
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


@functools.cache
def number_of(engine: HostEngine, record: SumRecord) -> int:
    """The number by which programs know a record."""
    number = next(_numbers)
    if number < MOST_RECORDS:
        SOURCE.library().jaxmpi_sum_record(number, ctypes.byref(record.struct))
        _programs[number] = engine
    return number


@functools.cache
def program_engine(comm: MpiComm) -> HostEngine | None:
    """The engine of this communicator's programs; None unless all ranks have C. All come here together at first."""
    reason = SOURCE.unavailable_reason() or "errors of lost ranks are Python's" * survives_losses()
    if unavailable_reason(comm) or any(comm.processes.allgather_object(reason)):
        return None
    engine = HostEngine(comm)
    comparison_of(comm).name_errors_of(engine.mpi)
    return engine


def summed(vectors: Sequence[jax.Array], strategy: str, comm: Comm, half: str = "") -> list[jax.Array] | None:
    """Sums f32[n], or halves of them, in the program's thread.

    Several are under way at once. None if C has them not, on all ranks alike, which trace the program together.
    """
    if not (is_far(comm) and vectors and parse(strategy).is_in_c(comm.hosts) and (engine := program_engine(comm))):
        return None
    records = [engine.record(strategy, half, x.size) for x in vectors]
    numbers = [number_of(engine, record) for record in records]
    tags = min(comm.processes.tags, np.iinfo(np.int32).max)
    if max(numbers) >= MOST_RECORDS or sum(record.count for record in records) > tags:
        return None
    words = len(vectors), tags, *numbers, *(record.digest for record in records)
    return _sums_p.bind(*vectors, results=c_handlers.shaped(*vectors), effect=comm.effect, words=words)


@ctypes.CFUNCTYPE(None, c_int32, c_double)
def _waits(number: int, waited_s: float) -> None:
    """End the job if a rank has waited too long."""
    try:
        engine = _programs[number]
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
        f"(JAXMPI_EXCHANGE_TIMEOUT_S sets the time){waiting.roll.where(late)}"
    )


@c_handlers.Failed
def _failed(number: int, code: int) -> None:
    """End the job: no memory, or MPI's error in a program."""
    from mpi4py import MPI

    why = NO_MEMORY_LINE if code == NO_MEMORY else f"MPI: {MPI.Get_error_string(code)}"
    try:
        if code != NO_MEMORY:
            comparison_of(_programs[number].comm).name_error(code)  # not every MPI calls the communicator's handler
    finally:
        failures.fail(TrainingError(f"an exchange between hosts: {why}"), None)


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
def _record_type() -> type[ctypes.Structure]:
    """`struct record`, of the library, which has got `struct setup`."""
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
            *((name, c_int64) for name in ("count", "scratch_bytes", "floats", "digest")),
            ("comm", handle),
        )

    assert ctypes.sizeof(Setup) == library.jaxmpi_sum_setup_bytes()
    assert ctypes.sizeof(RecordStruct) == library.jaxmpi_sum_record_bytes()
    library.jaxmpi_sum_begin.restype = c_void_p
    setup = Setup(failed=_failed, waits=_waits, byte=MPI._handleof(MPI.BYTE), in_status=MPI.ERR_IN_STATUS)
    setup.functions[:] = c_handlers.addresses(FUNCTIONS)
    setup.status_bytes, setup.error_at = MPI._sizeof(MPI.Status), _place_of_error()
    library.jaxmpi_sum_setup(ctypes.byref(setup))
    return RecordStruct


def _place_of_error() -> int:
    """Bytes before MPI_ERROR in MPI_Status, which differ between MPI libraries."""
    from mpi4py import MPI

    status = MPI.Status()
    status.error = ODD
    content = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return content.index(np.int32(ODD).tobytes())
