"""Sums between hosts, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out what `sum_recorder` has recorded. It knows no algorithm, only steps.

- In a program, a handler sums vectors in the program's own thread (`summed`).
- Beside a program the communication thread carries buckets on (`go_on`). There some ranks may be in C and others in
  Python: the messages are the same.
"""

import ctypes
import functools
import itertools
import zlib
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.table import PACKAGED_STRATEGIES, HostSum, parse, rows_of
from jaxmpi.allreduce.host_comm import WINDOW, HostComm
from jaxmpi.allreduce.sum_recorder import CODED, LINE_BYTES, NAMES, RecordedSteps, recorded
from jaxmpi.allreduce.wires import BLOCK, PACKAGED_WIRES
from jaxmpi.comm import c_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.call_comparison import comparison_of
from jaxmpi.comm.control import MpiProcesses
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
    STEPS=",".join(NAMES),
    WIRES=",".join(CODED.values()),
    BLOCK=BLOCK,
    WINDOW=WINDOW,
    LINE_BYTES=LINE_BYTES,
    MOST_RECORDS=MOST_RECORDS,
    NO_MEMORY=NO_MEMORY,
    YIELDS=YIELDS,
    PAUSE_US=PAUSE_US,
)
_sums_p = SOURCE.primitive(is_in_place=True)
FUNCTIONS = "Isend", "Irecv", "Testsome"  # in the order of `struct setup`
ODD = 0x5A17  # in MPI_ERROR, to see where it is
_numbers = itertools.count()  # numbers of programs' records
_programs = dict[int, MpiComm]()  # by number, whose ranks sum
_seen = dict[int, Any]()  # rows of strategies and wires, by their identities, which thus stay theirs
_seen.update({id(row): row for row in (*PACKAGED_STRATEGIES.values(), *PACKAGED_WIRES.values())})
_ours = frozenset(_seen)  # the package's


class SumRecord:
    """The steps of a sum of f32[n] on this rank, for C."""

    def __init__(self, made: RecordedSteps, mpi: Any, what: Any) -> None:
        """Take steps, their communicator, and names that tell it from others."""
        from mpi4py import MPI

        self.digest = zlib.crc32(repr(what).encode()) >> 1
        self.struct = _record_type()(*made.words(), self.digest, MPI._handleof(mpi))
        self._kept = made, mpi
        self.number: int | None = None  # for programs

    def numbered(self) -> int:
        """Number by which programs call it."""
        if self.number is None:
            self.number = next(_numbers)
            if self.number < MOST_RECORDS:
                SOURCE.library().jaxmpi_sum_record(self.number, ctypes.byref(self.struct))
        return self.number


class CompiledSum:
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


def record_of(strategy: str, comm: HostComm, half: str, n: int) -> SumRecord | None:
    """The record of a strategy's sum of f32[n], or of a half.

    None if C cannot carry it out.
    """
    return _record(_rows(strategy), strategy, comm, half, n)


def _rows(strategy: str) -> tuple[int, ...]:
    """Identities of a strategy's rows and wire, which may be replaced."""
    parsed = parse(strategy)
    found = *rows_of(parsed.name.partition(":")[0]), parsed.wire
    _seen.update({id(row): row for row in found})
    return tuple(map(id, found))


@functools.cache
def _record(rows: tuple[int, ...], strategy: str, comm: HostComm, half: str, n: int) -> SumRecord | None:
    is_ours, total = _ours.issuperset(rows), HostSum.named(strategy, comm, half)
    if (why := _why_python(in_programs=False)) or not (steps := recorded(total, n, is_ours)):
        if why.startswith(c_handlers.TROUBLE) and comm.hosts.index(comm.hosts[comm.mpi.rank]) == comm.mpi.rank:
            _say(why)
        return None
    return SumRecord(steps, comm.mpi, (strategy, half, n, comm.numbers))


def _why_python(in_programs: bool) -> str:
    """Reason why this rank cannot sum in C; empty if it can."""
    return SOURCE.unavailable_reason(in_programs) or "errors of lost ranks are Python's" * survives_losses()


@functools.cache
def _say(reason: str) -> None:
    """Print, once, why Python sums; the first rank of a host does."""
    c_handlers.say_once("sum between hosts", reason)


class Pace(ctypes.Structure):
    """How often C looks at messages; another thread may change it meanwhile.

    `is_woken` makes it return. A look that finds nothing is followed by `yields` more, and then by pauses.
    """

    _fields_ = tuple((name, c_int32) for name in ("is_woken", "yields", "pause_us"))


# ---------------------------------------------------------------- in a program


def is_far(comm: Comm) -> TypeGuard[MpiComm]:
    """Return True for MPI ranks on several hosts."""
    return isinstance(comm, MpiComm) and len(set(comm.hosts)) > 1


def summed(vectors: Sequence[jax.Array], strategy: str, comm: Comm, half: str = "") -> list[jax.Array] | None:
    """Sums f32[n], or halves of them, in the program's thread.

    Several are under way at once. None if a program or the communication thread must make them. That is the same on all
    ranks, which trace it together.
    """
    if not (is_far(comm) and vectors and parse(strategy).has_sum_on_host(comm.hosts)):
        return None
    if not (found := _numbers_of(comm, _rows(strategy), strategy, half, tuple(x.size for x in vectors))):
        return None
    words = len(vectors), min(comm.processes.tags, np.iinfo(np.int32).max), *found
    return _sums_p.bind(*vectors, results=c_handlers.shaped(*vectors), effect=comm.effect, words=words)


@functools.cache
def _numbers_of(
    comm: MpiComm, rows: tuple[int, ...], strategy: str, half: str, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Numbers of the records by which programs sum f32[n]s, then their digests.

    None of them unless C can carry out all of them on all ranks, which come here together.
    """
    del rows  # rows of `strategy`, by which this is kept
    among = _comm_of_programs(comm)
    records = [record for n in sizes if among and (record := record_of(strategy, among, half, n))]
    numbers = tuple(record.numbered() for record in records)
    has_tags = sum(record.struct.count for record in records) <= comm.processes.tags  # one for each part
    is_able = len(numbers) == len(sizes) and max(numbers) < MOST_RECORDS and has_tags
    if comm.processes.allreduce_sum(np.array([is_able]))[0] < comm.size:
        return ()
    _control_of_programs(comm)
    _programs.update({number: comm for number in numbers})
    return *numbers, *(record.digest for record in records)


@functools.cache
def _comm_of_programs(comm: MpiComm) -> HostComm | None:
    """A communicator for programs' sums; None unless all ranks have C.

    All ranks come here together.
    """
    if any(comm.processes.allgather_object(_why_python(in_programs=True))):
        return None
    mpi = comm.processes.clone()
    comparison_of(comm).name_errors_of(mpi)
    return HostComm(mpi, comm.order, comm.hosts)


@functools.cache
def _control_of_programs(comm: MpiComm) -> MpiProcesses:
    """By which ranks that wait find out who is late.

    All make it together.
    """
    return comm.processes.on_own_communicator()


@ctypes.CFUNCTYPE(None, c_int32, c_double)
def _waits(number: int, waited_s: float) -> None:
    """End the job if a rank has waited too long."""
    try:
        comm = _programs[number]
        control = _control_of_programs(comm)
        if waited_s > TIMEOUT_S or control.is_asked():
            late = control.in_job(control.late())
            raise TrainingError(
                f"an exchange has waited {waited_s:.0f} s for rank {late}; all ranks must exchange as often "
                f"(JAXMPI_EXCHANGE_TIMEOUT_S sets the time){comm.processes.roll.where(late)}"
            )
    except BaseException as error:  # ctypes would swallow it, and the program wait on
        failures.fail(error, None)


@c_handlers.Failed
def _failed(number: int, code: int) -> None:
    """End the job: no memory, or MPI's error in a program."""
    from mpi4py import MPI

    why = NO_MEMORY_LINE if code == NO_MEMORY else f"MPI: {MPI.Get_error_string(code)}"
    try:
        if code != NO_MEMORY:
            comparison_of(_programs[number]).name_error(code)  # not every MPI calls the communicator's handler
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
    held = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return held.index(np.int32(ODD).tobytes())
