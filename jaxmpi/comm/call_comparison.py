"""Numbers of calls, which ranks compare, and what C is told of a communicator (`compiled_calls.c`).

Messages between ranks have no names. If ranks run two programs with equal shapes in different orders, each takes one's
numbers for the other's. So an exchange gets a number when ranks trace it, which they do together. The number is sent
beside the data, before the exchange's first message, and received behind its last. Numbers that differ show in one of
three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program returns.
- A message is longer than expected: MPI reports it to an error handler, which reads the others' numbers.
- A rank waits for messages that never come, which `diagnosis` finds.

A comparison before the first message would be simpler, but ranks would meet once more in every step: that took 1.07 to
1.15 of a step of 4 ms, and a call into Python instead of C 1.10. From its begin to its end an exchange has the
process's turn, since JAX orders the programs of one thread only, and two that exchange at once would receive each
other's messages. Without a C compiler on all ranks calls are compared only while they are traced.
"""

import ctypes
import functools
import mmap
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.comm import c_handlers
from jaxmpi.comm.agreement import different_calls, fresh_number
from jaxmpi.comm.diagnosis import CallId
from jaxmpi.comm.polling import PROBES
from jaxmpi.comm.shared_sync import map_together
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures, host_callbacks

# ---------------------------------------------------------------- the C half

KINDS = BEGIN, END, RUN, *OPERATIONS = (
    *("begin", "end", "run", "allreduce", "reduce", "scan", "bcast", "allgather", "gather", "scatter", "alltoall"),
)
OPS = "SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR"
FUNCTIONS = "Send", "Recv", "Iprobe", "Reduce_local"  # in the order of `struct setup`
MOST_COMPARISONS, TYPES = 1 << 20, 64
PLACE_WORDS, NUMBERS_WORDS = 72, 8  # of each of a rank's two places: for a number and a short array; for numbers alone
ROUNDS_WORDS = 8  # a cache line for the count of rounds through slots
SLOT_BYTES = 256 << 10  # bytes of a chunk: a core's second-level cache holds it with what is made of it
SLOTS_BYTES = 4 << 20  # bytes of all ranks' slots, about: with many ranks each has less
LEAST_BYTES = 16 << 10  # bytes of a slot at least
LONG_SCAN_BYTES, LEAST_ROW_BYTES = 8192, 1024  # MPI takes less time for longer scans, and for shorter parts of rows
MOST_SHARED = 16  # communicators with slots: a script may split a thousand times
TURN_BIT, MOST_TURNS = 24, 128  # of a number that is sent: the exchange's in the bits below, its turn in those above
SOURCE = c_handlers.CSource(
    Path(__file__).with_name("compiled_calls.c"),
    [Path(__file__).with_name("compiled_slots.h")],
    KINDS=",".join(map(str.upper, KINDS)),
    OPS=len(OPS),
    MOST_COMPARISONS=MOST_COMPARISONS,
    TYPES=TYPES,
    ROUNDS_WORDS=ROUNDS_WORDS,
    TURN_BIT=TURN_BIT,
    MOST_TURNS=MOST_TURNS,
    MOST_PASSED=1 << 20,  # runs of an executable between two exchanges; ids of two executables are further apart
    NUMBERS_WITH_TURNS=1 << 12,  # exchanges whose turns are kept
)
_call_p = SOURCE.primitive()
Differs = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_int32))


@functools.cache
def _setup_type() -> type[ctypes.Structure]:
    """`struct setup`."""
    handle = c_handlers.handle_type()

    class Setup(ctypes.Structure):
        _fields_ = (
            ("functions", c_void_p * len(FUNCTIONS)),
            ("differs", Differs),
            ("failed", c_handlers.Failed),
            *((name, c_void_p) for name in ("board", "slots")),
            *((name, handle) for name in ("messages", "int32")),
            ("types", handle * TYPES),
            ("ops", handle * len(OPS)),
            ("item_bytes", c_int64 * TYPES),
            *((name, c_int64) for name in ("slot_bytes", "part_bytes")),
            *((name, c_int32) for name in ("rank", "size", "place_words")),
        )

    return Setup


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


# ---------------------------------------------------------------- which exchange each rank has come to

_comparisons: list["CallComparison"] = []  # of communicators that were not freed


def comparison_of(comm: Any) -> "CallComparison":
    """The comparison of an `MpiComm`; all ranks call it together the first time."""
    return comm.cached("comparison", lambda: CallComparison(comm))


class CallComparison:
    """The exchanges and collectives that a communicator's ranks have come to, compared in C."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._library, self._slot_bytes = comm, None, 0
        self._index = fresh_number("comparison", comm.processes.allgather_object)
        number = comm.processes.waits.number  # in the order in which communicators are made
        self._where = f"communicator {number} of {comm.size} ranks" if number else "the job"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._named: list[Any] = []  # communicators of mpi4py whose errors it names
        self._published: np.ndarray | None = None  # on one host: numbers, by rank and place
        facts = [SOURCE.trouble(), SOURCE.unavailable_reason() is None, len(_comparisons) < MOST_SHARED]
        troubles, in_programs, has_room = zip(*comm.processes.allgather_object(facts), strict=True)
        self._in_c = all(in_programs)  # whether programs of all ranks call C, not through Python
        if any(troubles):
            c_handlers.say_once(comm, troubles, "programs call mpi4jax, and do not compare their calls")
            return
        self._open(has_slots=self._in_c and all(has_room))
        comm.processes.waits.comparison = self
        self.name_errors_of(comm.mpi)
        _comparisons.append(self)

    def _open(self, has_slots: bool) -> None:
        """Tell C of MPI and of this communicator, and register what programs call in Python's place."""
        from mpi4py import MPI

        comm, self._library = self._comm, SOURCE.library()
        self._library.jaxmpi_held.restype = c_int64
        setup: Any = _setup_type()()
        self._setup: Any = setup  # kept: C has the addresses of its functions from it
        setup.functions[:] = c_handlers.addresses(FUNCTIONS)
        setup.differs, setup.failed = Differs(self._differs), c_handlers.Failed(self._failed)
        setup.rank, setup.size, setup.place_words = comm.rank, comm.size, PLACE_WORDS if has_slots else NUMBERS_WORDS
        # Numbers are the only messages between two ranks there that have tag 0.
        setup.messages, setup.int32 = map(MPI._handleof, (comm.processes.world, MPI.INT32_T))
        for number, dtype in host_callbacks.DTYPES.items():
            setup.item_bytes[number] = dtype.itemsize
            if dtype.isbuiltin == 1 and dtype != np.float16:  # others are sent as integers
                setup.types[number] = MPI._handleof(MPI.Datatype.fromcode(dtype.char))
        for number, op in enumerate(OPS):
            setup.ops[number] = MPI._handleof(getattr(MPI, op))
        if len(set(comm.hosts)) == 1:
            self._share_memory(has_slots)
        self._library.jaxmpi_open(self._index, ctypes.byref(setup))
        # Programs whose arrays C cannot see, as a GPU's, call it through Python.
        begin, end = self._library.jaxmpi_begin_call, self._library.jaxmpi_end_call
        self._names = f"jaxmpi: a call begins {self._index}", f"jaxmpi: a call ends {self._index}"
        for name, function in zip(self._names, (begin, end), strict=True):
            run = lambda operands, results, number, function=function: function(self._index, number)  # noqa: E731
            host_callbacks.register(name, run, ends_job=True)

    def _share_memory(self, has_slots: bool) -> None:
        """Map a board of numbers, and slots behind it; if not all ranks can, numbers are messages."""
        size, setup, slot_bytes = self._comm.size, self._setup, 0
        row_words = 2 * setup.place_words + ROUNDS_WORDS
        board_bytes = _whole_pages(size * row_words * 8)
        if has_slots:
            slot_bytes = _whole_pages(max(LEAST_BYTES, min(SLOT_BYTES, SLOTS_BYTES // (2 * size))))
        part_bytes = _whole_pages(slot_bytes // size)
        with suppress(UsageError):
            memory = map_together(self._comm.processes, board_bytes + size * (2 * slot_bytes + part_bytes), "calls")
            rows = np.frombuffer(memory, np.int64, size * row_words).reshape(size, row_words)
            self._published, self._slot_bytes = rows[:, : 2 * setup.place_words : setup.place_words], slot_bytes
            setup.board = rows.ctypes.data
            setup.slots, setup.slot_bytes, setup.part_bytes = setup.board + board_bytes, slot_bytes, part_bytes

    def has_slots_for(self, kind: str, row_bytes: int) -> bool:
        """Return True, on all ranks alike, if `call` can do an operation, and MPI would not do it sooner.

        Args:
            row_bytes: of an array of one rank for one rank, or for all.
        """
        if not self._slot_bytes or kind not in OPERATIONS:
            return False
        part_bytes = self._slot_bytes // self._comm.size
        is_row_short = kind not in ("alltoall", "scatter") or row_bytes <= part_bytes or part_bytes >= LEAST_ROW_BYTES
        return is_row_short and (kind != "scan" or row_bytes <= LONG_SCAN_BYTES)

    def close(self) -> None:
        """Let go of the memory; a program that still calls it gets an error."""
        if self._library is not None:
            self._library.jaxmpi_close(self._index)
            self._published = self._setup = None
            for name in self._names:
                host_callbacks.forget(name)
            _comparisons.remove(self)

    # ------------------------------------------------------------ in a program

    def number(self, text: str) -> int | None:
        """The next traced exchange's number; None if programs compare nothing."""
        if self._library is None:
            return None
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._where} ({text})"
        return number

    def begin(self, number: int) -> None:
        """Wait for the turn, and publish the number with the turn of its program.

        It needs nothing of the data, so it is the first that a program does: of two programs the one that was
        dispatched first has its turn first.
        """
        self._bind(BEGIN, number, root=int(self._in_c))

    def end(self, number: int) -> None:
        """Compare with the others' numbers, and give the turn away."""
        self._bind(END, number)

    def call(self, kind: str, number: int, x: jax.Array, shape: Sequence[int], op: int, root: int) -> jax.Array:
        """An operation through shared memory, which publishes its number and compares in the same handler.

        Args:
            kind: one that has slots.
            x: in a dtype that MPI has.
            shape: of the result, which has x's dtype.
            op: its place in OPS.
        """
        self._bind(BEGIN, number, op=1, root=int(self._in_c))
        return self._bind(kind, number, op, root, [x], [jax.ShapeDtypeStruct(tuple(shape), x.dtype)])[0]

    def _bind(
        self, kind: str, number: int, op: int = 0, root: int = 0, operands: Sequence = (), results: Sequence = ()
    ) -> list:
        effect = self._comm.effect
        if kind in (BEGIN, END) and not self._in_c and SOURCE.unavailable_reason():
            return host_callbacks.call(self._names[kind == END], [], [], effect=effect, number=number)
        words = (self._index, number, KINDS.index(kind), op, root)
        in_main = (self._index, number, KINDS.index(RUN), 0, 0) if kind == BEGIN and root else ()
        results = c_handlers.shaped(*results)
        return _call_p.bind(*operands, results=results, effect=effect, words=words, words_in_main=in_main)

    # ------------------------------------------------------------ outside, of the program that runs

    def text(self, number: int) -> str:
        """Describe an exchange, which this rank may not have traced yet."""
        number %= 1 << TURN_BIT
        return self._texts.get(number, f"exchange {number} of {self._where}")

    def current(self) -> CallId | None:
        """The exchange of this process's programs that has the turn."""
        packed = self._library.jaxmpi_held(self._index) if self._library else 0
        return CallId(packed >> 32, packed & 0xFFFFFFFF) if packed else None

    def waiting(self) -> int:
        """Number of an exchange that waits for the turn, or 0."""
        return self._library.jaxmpi_waits(self._index) if self._library else 0

    def refusal(self, mine: int, theirs: Sequence[int]) -> UsageError:
        """The error that ranks are in different exchanges: this rank's, and all ranks', 0 where it is not known."""
        numbers, me = self._comm.processes.numbers, self._comm.rank
        calls = {numbers[rank]: number for rank, number in enumerate(theirs) if number} | {numbers[me]: mine}
        texts = {rank: self.text(number) for rank, number in calls.items()}
        if len(set(texts.values())) > 1:
            return UsageError(different_calls(texts))
        shown = ", ".join(f"rank {rank} at turn {number >> TURN_BIT}" for rank, number in sorted(calls.items())[:8])
        return UsageError(
            f"ranks came to {self.text(mine)!r} at different turns: {shown} (modulo {MOST_TURNS}); a turn is a run of "
            "its program, and some rank has run the program without it. Expected the exchange in the same runs on all "
            "ranks: keep it out of a lax.cond that only some ranks take; of optax.apply_if_finite around "
            "exchange_gradients make optax.chain(exchange_gradients(), optax.apply_if_finite(...))"
        )

    def _differs(self, mine: int, theirs: Any) -> None:
        """Called by C at different numbers."""
        failures.fail(self.refusal(mine, theirs[: self._comm.size]), None)

    def _failed(self, mine: int, code: int) -> None:
        """End the job with MPI's error."""
        from mpi4py import MPI

        failures.fail(TrainingError(f"{self.text(mine)}: MPI: {MPI.Get_error_string(code)}"), None)

    # ------------------------------------------------------------ errors of MPI

    def name_errors_of(self, mpi: Any) -> None:
        """Have a communicator's errors name ranks at other exchanges."""
        if self._library is not None:
            self._named.append(mpi)
            mpi.Set_errhandler(_error_handler())

    def name_error(self, code: int) -> None:
        """End the job if MPI's error is that exchanges differ; called before mpi4jax ends it."""
        from mpi4py import MPI

        kind, call = MPI.Get_error_class(code), self.current()
        if kind not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS) or not call:  # of one message, or of one among several
            return
        theirs = [self._sent_number(rank, call.count) for rank in range(self._comm.size)]
        if set(theirs) - {0, call.number}:
            failures.fail(self.refusal(call.number, theirs), None)
        if kind == MPI.ERR_TRUNCATE:
            text = f"{self.text(call.number)} got a longer message than it expects: another rank is at another exchange"
            failures.fail(UsageError(text), None)

    def _sent_number(self, rank: int, count: int) -> int:
        """Number that a rank has sent, which nobody will receive, or 0."""
        if self._published is not None:
            published = int(self._published[rank, count % 2])
            return published >> 32 if published & 0xFFFFFFFF == count else 0
        theirs, messages = np.zeros(1, np.int32), self._comm.processes.world
        if any(messages.Iprobe(rank, 0) for _ in range(PROBES)):
            messages.Recv(theirs, rank, 0)
        return int(theirs[0])


@functools.cache
def _error_handler() -> Any:
    """One for all communicators, since mpi4py has room for 32."""
    from mpi4py import MPI

    def name_error(mpi: Any, code: int) -> None:
        for comparison in _comparisons:
            if mpi in comparison._named:
                comparison.name_error(code)

    return MPI.Comm.Create_errhandler(name_error)
