"""Sums between hosts, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out what `sum_recorder` has recorded. It knows no algorithm, only steps.

- In a program, a handler sums vectors in the program's own thread, all at once (`summed`).
- Beside a program the communication thread carries buckets on (`go_on`). There ranks may differ: the same messages come
  from the sum in Python.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.table import HostSum, parse
from jaxmpi.allreduce.host_comm import WINDOW, HostComm
from jaxmpi.allreduce.sum_recorder import CODED, NAMES, RecordedSteps, recorded
from jaxmpi.allreduce.wires import BLOCK
from jaxmpi.comm import c_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import TrainingError
from jaxmpi.runtime import failures

MOST_RECORDS = 1 << 16  # of programs
# A program that waits looks at once again, as MPI's calls do; after a while it leaves its core to others.
YIELDS, PAUSE_US = 300, 50
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_wires.h")],
    STEPS=",".join(NAMES),
    WIRES=",".join(CODED.values()),
    BLOCK=BLOCK,
    WINDOW=WINDOW,
    MOST_RECORDS=MOST_RECORDS,
    YIELDS=YIELDS,
    PAUSE_US=PAUSE_US,
)
_sums_p = SOURCE.primitive(is_in_place=True)
FUNCTIONS = "Isend", "Irecv", "Testsome"  # in the order of `struct setup`


_numbers = itertools.count()  # of programs' records


class SumRecord:
    """The steps of a sum of f32[n] on this rank, for C."""

    def __init__(self, made: RecordedSteps, mpi: Any) -> None:
        """Take what was recorded, and the communicator of its messages."""
        from mpi4py import MPI

        self.struct = _structs()[1](*made.words(), MPI._handleof(mpi))
        self._kept = made, mpi
        self.number: int | None = None  # for programs

    def numbered(self) -> int:
        """Number by which programs call it."""
        if self.number is None:
            self.number = next(_numbers)
            if self.number < MOST_RECORDS:
                SOURCE.library().jaxmpi_sum_record(self.number, ctypes.byref(self.struct))
        return self.number

    def begun(self, x: np.ndarray, first_tag: int, tags: int) -> "CompiledSum":
        """Begin to sum f32[n], which is C-contiguous, in place.

        Part i has tag first_tag + i modulo tags.
        """
        return CompiledSum(self, x, first_tag, tags)


class CompiledSum:
    """A sum that C carries out in the thread that calls it."""

    def __init__(self, record: SumRecord, x: np.ndarray, first_tag: int, tags: int) -> None:
        """Nothing is sent before `go_on`."""
        self._library, self._kept = SOURCE.library(), (record, x)
        self._sum = c_void_p(
            self._library.jaxmpi_sum_begin(ctypes.byref(record.struct), c_void_p(x.ctypes.data), first_tag, tags)
        )

    def hold(self, is_held: bool) -> None:
        """Begin no more parts, or begin them again."""
        self._library.jaxmpi_sum_hold(self._sum, int(is_held))

    def has_ended(self) -> bool:
        """Return True once the sum is there; nothing may be called afterwards."""
        return bool(self._library.jaxmpi_sum_ended(self._sum))


@functools.cache
def record_of(strategy: str, comm: HostComm, half: str, n: int) -> SumRecord | None:
    """The record of a strategy's sum of f32[n], or of a half.

    None if C cannot carry it out.
    """
    if SOURCE.unavailable_reason() or not (steps := recorded(HostSum.named(strategy, comm, half), n)):
        return None
    return SumRecord(steps, comm.mpi)


class Pace(ctypes.Structure):
    """How often C looks at messages; another thread may change it meanwhile.

    `is_woken` makes it return. A look that finds nothing is followed by `yields` more, and then by pauses.
    """

    _fields_ = tuple((name, c_int32) for name in ("is_woken", "yields", "pause_us"))


# ---------------------------------------------------------------- in a program


def summed(vectors: Sequence[jax.Array], strategy: str, comm: Comm, half: str = "") -> list[jax.Array] | None:
    """Sums f32[n], or halves of them, in the program's thread.

    All are under way at once. None if a program or the communication thread must make them. That is the same on all
    ranks, which trace it together.
    """
    is_far = isinstance(comm, MpiComm) and len(set(comm.hosts)) > 1
    if not (is_far and vectors and parse(strategy).has_sum_on_host(comm.hosts)):
        return None
    if not (numbers := _numbers_of(comm, strategy, half, tuple(x.size for x in vectors))):
        return None
    words = len(vectors), min(comm.processes.tags, np.iinfo(np.int32).max), *numbers
    return _sums_p.bind(*vectors, results=c_handlers.shaped(*vectors), effect=comm.effect, words=words)


@functools.cache
def _numbers_of(comm: MpiComm, strategy: str, half: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of the records by which programs sum f32[n]s.

    None of them unless C can carry out all of them on all ranks, which come here together.
    """
    among = _comm_of_programs(comm)
    records = [among and record_of(strategy, among, half, n) for n in sizes]
    numbers = tuple(record.numbered() for record in records if record)
    is_able = len(numbers) == len(sizes) and max(numbers) < MOST_RECORDS
    return numbers if comm.processes.allreduce_sum(np.array([is_able]))[0] == comm.size else ()


@functools.cache
def _comm_of_programs(comm: MpiComm) -> HostComm | None:
    """A communicator for programs' sums; None unless all ranks have C.

    All ranks come here together.
    """
    if any(comm.processes.allgather_object(SOURCE.unavailable_reason())):
        return None
    return HostComm(comm.processes.clone(), comm.order, comm.hosts)


# ---------------------------------------------------------------- on the communication thread


def go_on(most_s: float, pace: Pace) -> bool:
    """Carry all sums on, until one has ended.

    Returns True if messages have come or gone.

    Args:
        most_s: seconds after which it returns anyway.
        pace: of its looks.

    Raises:
        TrainingError: MPI's.
    """
    from mpi4py import MPI

    has_moved = c_int32()
    if code := SOURCE.library().jaxmpi_sums_go_on(int(1e6 * most_s), ctypes.byref(pace), ctypes.byref(has_moved)):
        raise TrainingError(f"a message of an exchange beside a program: {MPI.Get_error_string(code)}")
    return bool(has_moved)


@c_handlers.Failed
def _failed(number: int, code: int) -> None:
    """End the job with MPI's error in a program."""
    from mpi4py import MPI

    failures.fail(TrainingError(f"a sum between hosts: MPI: {MPI.Get_error_string(code)}"), None)


@functools.cache
def _structs() -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """`struct setup`, which the library has got, and `struct record`."""
    from mpi4py import MPI

    library, handle = SOURCE.library(), c_handlers.handle_type()

    class Setup(ctypes.Structure):
        _fields_ = (("functions", c_void_p * len(FUNCTIONS)), ("failed", c_handlers.Failed), ("byte", handle))

    class RecordStruct(ctypes.Structure):
        _fields_ = (
            *((name, c_void_p) for name in ("steps", "parts")),
            *((name, c_int64) for name in ("count", "scratch_bytes")),
            ("comm", handle),
        )

    assert ctypes.sizeof(Setup) == library.jaxmpi_sum_setup_bytes()
    assert ctypes.sizeof(RecordStruct) == library.jaxmpi_sum_record_bytes()
    library.jaxmpi_sum_begin.restype = c_void_p
    setup = Setup(byte=MPI._handleof(MPI.BYTE), failed=_failed)
    setup.functions[:] = c_handlers.addresses(FUNCTIONS)
    library.jaxmpi_sum_setup(ctypes.byref(setup))
    return Setup, RecordStruct
