"""Sums between processes, carried out in C.

A message through Python takes 0.1 ms of a core, and a sum on another thread two changes of threads: more than a short
vector takes on the wire. So C carries out schedules (`schedules`), of which it knows only the steps.

- In a program a handler sums vectors in the program's own thread (`all_reduce_in_program`).
- Beside a program the communication thread carries buckets on (`comm_thread`).

A program holds the key of a plan, a digest of its sums, by which C finds their schedules, and nothing of the process.

Without a C compiler on all ranks neither is there: programs then sum by mpi4jax's calls, with the same bits.
"""

import ctypes
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import ShapedArray

from jaxmpi.allreduce.algorithms.table import parse
from jaxmpi.allreduce.schedules import LINE_BYTES, MEMORIES, STEPS, WINDOW, Group
from jaxmpi.allreduce.wires import WIRE_CONSTANTS
from jaxmpi.comm import c_handlers
from jaxmpi.comm.agreement import fingerprint, fresh_number
from jaxmpi.comm.base import Comm
from jaxmpi.comm.call_comparison import comparison_of
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.diagnosis import watch
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import survives_losses
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures, progress
from jaxmpi.runtime.progress import Span

EXCHANGE = "an exchange"
NO_MEMORY, MOVED = -1, -2  # numbers that are no errors of MPI's
OWN_ERRORS = {
    NO_MEMORY: "there is no memory for the messages of a sum",
    MOVED: "XLA has moved a bucket while it travelled; use --exchange.overlap off, and report this",
}
CALLS = "OPEN", "START", "DONE"  # names in C
OPEN, START, DONE = range(len(CALLS))
TRACKS = "", "wait", "travel"  # of spans: NOTHING, WAIT_FOR_SUM, TRAVEL
CHUNK = "gather from a chunk"  # a half whose operand is this rank's chunk alone
WHOLE = -1  # in place of a vector's number in a plan
MOST_SPANS = 4096
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_wires.h"), Path(__file__).with_name("scheduled_sums.h")],
    ("jaxmpi_beside",),
    STEPS=",".join(STEPS),
    MEMORIES=",".join(MEMORIES),
    WINDOW=WINDOW,
    LINE_BYTES=LINE_BYTES,
    CALLS=",".join(CALLS),
    TRACKS="NOTHING,WAIT_FOR_SUM,TRAVEL",
    **dict(NO_MEMORY=NO_MEMORY, MOVED=MOVED, WHOLE=WHOLE, MOST_SPANS=MOST_SPANS),
    # A program that waits looks at once again, as MPI's calls do; after a while it leaves its core to others. While
    # nobody waits, the communication thread looks every 2 ms: each look takes time of the computation beside it.
    **dict(YIELDS=300, PAUSE_US=50, CALM_US=2000, HURRY_YIELDS=20, MOST_IN_SUMS_US=100_000, PATIENT_S=0.5),
    **WIRE_CONSTANTS,
)
sums_p, beside_p = SOURCE.primitive(), SOURCE.primitive("jaxmpi_beside")
_engines = dict[int, "HostEngine"]()  # by number, of communicators that were not freed
_labels = dict[int, list[str]]()  # of the vectors of plans beside programs, by key


def unavailable_reason(comm: MpiComm) -> str:
    """Why C cannot sum on all of these ranks; empty if it can. All come here together at first."""

    def agreed() -> str:
        reason = SOURCE.unavailable_reason() or "errors of lost ranks are Python's" * survives_losses()
        reasons = comm.processes.allgather_object(reason)
        troubles = [text if text.startswith(c_handlers.TROUBLE) else "" for text in reasons]
        c_handlers.say_once(comm, troubles, "sums between processes are mpi4jax's")
        return next(filter(None, reasons), "")

    return comm.cached("why there is no host engine", agreed)


class HostEngine:
    """Sums of a communicator's ranks, by messages on a communicator of mpi4py of its own."""

    def __init__(self, comm: MpiComm) -> None:
        """Make communicators; all ranks come here together."""
        self.comm, self.control = comm, comm.processes.on_own_communicator()  # by which ranks find out who is late
        self.mpi, self.group = self.control.clone(), Group(comm.rank, comm.order, comm.hosts)
        self.tags = min(comm.processes.tags, np.iinfo(np.int32).max)
        self._schedule = functools.cache(self._make_schedule)
        self._plans = dict[int, Any]()  # by key: the arrays that C reads whenever a program calls it
        self.number = fresh_number("host engine", comm.processes.allgather_object)
        _engines[self.number] = self

    def _make_schedule(self, strategy: str, half: str, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Steps, where each part begins, and bytes of scratch memory, for f32[n] or a half of its sum."""
        choice, begin = parse(strategy), 0
        if half == CHUNK:
            assert choice.spec.halves
            half, begin = "gather", choice.spec.halves.chunks(self.comm)[self.comm.rank] * (n // self.comm.size)
        schedule = choice.schedule(n, self.group, half, begin)
        return *schedule.arrays(), -(-schedule.scratch_bytes // LINE_BYTES) * LINE_BYTES

    def parts(self, sums: Sequence[tuple[str, str, int]]) -> int:
        """How many parts, and so tags, sums take: as many on all ranks. Each is (strategy, half, floats)."""
        return sum(len(self._schedule(*spec)[1]) for spec in sums)

    def learn(self, text: str) -> None:
        """Compare the plan of a program over ranks, which come here together, and let the program find it."""
        plan = json.loads(text)
        facts = {name: [row[i] for row in plan["sums"]] for i, name in enumerate(("strategy", "half", "floats"))}
        self.control.compare(fingerprint("the exchange beside a program", facts))
        key = key_of(text)
        _labels[key] = plan["labels"]
        self.add_plan(key, [(strategy, half, n) for strategy, half, n in plan["sums"]])

    def add_plan(self, key: int, sums: Sequence[tuple[str, str, int]]) -> None:
        """Let programs find sums by this key."""
        from mpi4py import MPI

        if key in self._plans:
            return
        schedules = [self._schedule(*spec) for spec in sums]
        records = np.array(  # `struct record` in C
            [
                (steps.ctypes.data, parts.ctypes.data, len(parts), self.group.window, scratch_bytes)
                for steps, parts, scratch_bytes in schedules
            ],
            np.int64,
        )
        self._plans[key] = records, schedules
        comm = c_handlers.handle_type()(MPI._handleof(self.mpi))
        facts = c_int64(key), c_int32(self.number), comm, c_int64(self.tags), c_int64(len(sums))
        library().jaxmpi_sum_add_plan(*facts, c_void_p(records.ctypes.data))

    def close(self) -> None:
        """Let programs that still call it end with an error."""
        library().jaxmpi_sum_close(c_int32(self.number))
        del _engines[self.number]


def key_of(value: Any) -> int:
    """A digest, by which programs know a plan."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


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

    def open_engine() -> HostEngine | None:
        if unavailable_reason(comm):
            return None
        engine = HostEngine(comm)
        comparison_of(comm).name_errors_of(engine.mpi)
        return engine

    return comm.cached("host engine", open_engine)


def all_reduce_in_program(
    vectors: Sequence[jax.Array], strategy: str, comm: Comm, half: str = ""
) -> list[jax.Array] | None:
    """Sums f32[n], or halves of them, in the program's thread; with the half CHUNK f32[n / w] -> f32[n].

    Several are under way at once. None if C cannot make them; then it is None on all ranks.
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


# ---------------------------------------------------------------- spans of time


def _name(key: int, index: int) -> str:
    labels = _labels.get(key, [])
    return labels[index] if 0 <= index < len(labels) else EXCHANGE


def _read_spans() -> tuple[list[Span], list[Span]]:
    """Waits of programs for sums, and buckets' ways: those that ended since the last call, and a wait under way."""
    buffer = np.empty((MOST_SPANS + 1, 5), np.int64)
    last = buffer[MOST_SPANS:]
    count = library().jaxmpi_sum_spans(c_void_p(buffer.ctypes.data), c_void_p(last.ctypes.data))
    ended_spans, running_spans = (
        [
            Span(TRACKS[track], _name(key, index), begin_ns / 1e9, max(begin_ns, end_ns) / 1e9)
            for track, key, index, begin_ns, end_ns in rows.tolist()
            if track
        ]
        for rows in (buffer[:count], last)
    )
    return ended_spans, running_spans


# ---------------------------------------------------------------- the library, and what it calls


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled engine, which has got MPI's functions and the callbacks below."""
    from mpi4py import MPI

    engine = SOURCE.library()
    callbacks = (_failed, _check_wait, _learn)
    pointers = *c_handlers.addresses(FUNCTIONS), *(ctypes.cast(callback, c_void_p).value for callback in callbacks)
    engine.jaxmpi_sum_setup((c_void_p * len(pointers))(*pointers), c_handlers.handle_type()(MPI._handleof(MPI.BYTE)))
    engine.jaxmpi_beside_run.restype = None
    progress.add_reader(_read_spans)
    return engine


FUNCTIONS = "Isend", "Irecv", "Testsome"  # in the order in `scheduled_sums.h`; the callbacks follow


def _ending_job(function: Callable[..., None]) -> Callable[..., None]:
    """An error ends the job: ctypes would swallow it, and the program wait on."""

    @functools.wraps(function)
    def call(*args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.fail(error, error.__traceback__ if not isinstance(error, (TrainingError, UsageError)) else None)

    return call


@c_handlers.Failed
@_ending_job
def _failed(number: int, code: int) -> None:
    """End the job: no memory, or MPI's error in a program."""
    from mpi4py import MPI

    if code not in OWN_ERRORS:
        comparison_of(_engines[number].comm).name_error(code)  # not every MPI calls the communicator's handler
    reason = OWN_ERRORS.get(code) or f"MPI: {MPI.Get_error_string(code)}"
    raise TrainingError(f"an exchange between processes: {reason}")


@CFUNCTYPE(None, c_int32, c_int64, c_int64, c_double)
@_ending_job
def _check_wait(number: int, key: int, index: int, waited_s: float) -> None:
    """End the job if a rank has waited too long."""
    engine = _engines[number]
    if waited_s > TIMEOUT_S or engine.control.is_asked():
        raise late_error(engine.control, _name(key, index), waited_s)


@CFUNCTYPE(None, c_int32, c_void_p, c_int64)
@_ending_job
def _learn(number: int, text: int, length: int) -> None:
    """Add the plan of a program that calls it for the first time here."""
    _engines[number].learn(ctypes.string_at(text, length).decode())


def late_error(control: MpiProcesses, description: str, waited_s: float) -> TrainingError:
    """The error of what has waited too long, with the ranks that are late; all ranks that wait find them together."""
    late = control.in_job(control.late())
    return TrainingError(
        f"{description} has waited {waited_s:.0f} s for {watch().names(late)}; all ranks must exchange as often "
        f"(JAXMPI_EXCHANGE_TIMEOUT_S sets the time){watch().where(late)}"
    )
