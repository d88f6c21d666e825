"""Which call each rank has come to, who waits for whom, and who is late.

Messages between ranks have no names. If ranks run two programs with equal shapes in different orders, each takes one's
numbers for the other's. So an exchange gets a number when ranks trace it, which they do together. The number is sent
beside the data, before the exchange's first message, and received behind its last (`CallComparison`; in C:
`compiled_calls.c`). Numbers that differ show in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program returns.
- A message is longer than expected: MPI reports it to an error handler, which reads the others' numbers.
- A rank waits for messages that never come: a thread of each rank (`WaitMonitor`) finds waits that last, and sends them
  to the other ranks. So each knows who waits with it, and the others are absent.

A comparison before the first message would be simpler, but ranks would meet once more in every step: that took 1.07 to
1.15 of a step of 4 ms, and a call into Python instead of C 1.10. From its begin to its end an exchange has the
process's turn, since JAX orders the programs of one thread only, and two that exchange at once would receive each
other's messages. Without a C compiler on all ranks calls are compared only while they are traced.
"""

import ctypes
import functools
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jaxmpi.comm import c_handlers
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.polling import WaitClock
from jaxmpi.comm.shared_sync import TIMEOUT_S, map_together
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.frames import is_users, line_of, module_of
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.process import launched_workers

# ---------------------------------------------------------------- calls in C

KINDS = BEGIN, END, *OPERATIONS = (
    *("begin", "end", "allreduce", "reduce", "scan", "bcast", "allgather", "gather", "scatter", "alltoall"),
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
    NUMBERS_WITH_TURNS=256,  # exchanges whose turns are kept
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


def _shared_by_all(comm: Any, size_bytes: int) -> mmap.mmap | None:
    """Zeros that all ranks have mapped, who come here together; None if one cannot."""
    start, marks_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, -(-comm.size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = map_together(comm.processes, start + marks_bytes, "calls; use fewer ranks")
    except UsageError:  # no room, of which all ranks hear
        return None
    marks = np.frombuffer(memory, np.uint8, comm.size, start)
    marks[comm.rank] = 1
    comm.processes.barrier()
    return memory if all(comm.processes.allgather_object(bool(marks.all()))) else None


# ---------------------------------------------------------------- which exchange each rank has come to

_comparisons: list["CallComparison"] = []  # of communicators that were not freed
_indices = [-1]  # of comparisons in C; a communicator's is the same on all its ranks


def comparison_of(comm: Any) -> "CallComparison":
    """The comparison of an `MpiComm`; all ranks call it together the first time."""
    return comm.cached("comparison", lambda: CallComparison(comm))


class CallComparison:
    """The exchanges and collectives that a communicator's ranks have come to, compared in C."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._library, self._slot_bytes = comm, None, 0
        is_world = comm.processes.numbers == tuple(range(launched_workers()))
        self._where = "the job" if is_world else f"a communicator of {comm.size} ranks"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._messages = comm.processes.waits.comm  # numbers have tag 0, the monitor's messages have others
        self._named: list[Any] = []  # communicators of mpi4py whose errors it names
        facts = [_indices[-1], SOURCE.trouble(), SOURCE.unavailable_reason() is None]
        used, troubles, in_programs = zip(*comm.processes.allgather_object(facts), strict=True)
        self._in_c = all(in_programs)  # whether programs of all ranks call C, not through Python
        self._index = max(used) + 1
        _indices.append(self._index)
        if any(troubles):
            c_handlers.say_once(comm, troubles, "programs call mpi4jax, and do not compare their calls")
            return
        self._open()
        comm.processes.waits.comparison = self
        self.name_errors_of(comm.mpi)
        _comparisons.append(self)
        _wait_at_exit()

    def _open(self) -> None:
        """Map the board, tell C of MPI, and register what programs call in Python's place."""
        from mpi4py import MPI

        comm, self._library = self._comm, SOURCE.library()
        self._library.jaxmpi_held.restype = c_int64
        has_slots, page = self._in_c and self._index < MOST_SHARED, mmap.PAGESIZE
        words = PLACE_WORDS if has_slots else NUMBERS_WORDS
        row_words = 2 * words + ROUNDS_WORDS
        board_bytes = -(-comm.size * row_words * 8 // page) * page
        slot_bytes = max(LEAST_BYTES, min(SLOT_BYTES, SLOTS_BYTES // (2 * comm.size))) if has_slots else 0
        slot_bytes = -(-slot_bytes // page) * page
        part_bytes = -(-slot_bytes // (comm.size * page)) * page
        is_one_host, size_bytes = len(set(comm.hosts)) == 1, board_bytes + comm.size * (2 * slot_bytes + part_bytes)
        self._memory = _shared_by_all(comm, size_bytes) if is_one_host else None
        self._numbers: np.ndarray | None = None  # [rank, place]
        setup = _setup_type()()
        setup.functions[:] = c_handlers.addresses(FUNCTIONS)
        setup.differs, setup.failed = Differs(self._differs), c_handlers.Failed(self._failed)
        if self._memory:
            rows = np.frombuffer(self._memory, np.int64, comm.size * row_words).reshape(comm.size, row_words)
            self._numbers, self._slot_bytes = rows[:, : 2 * words : words], slot_bytes
            setup.board = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            setup.slots, setup.slot_bytes, setup.part_bytes = setup.board + board_bytes, slot_bytes, part_bytes
        setup.messages, setup.int32 = map(MPI._handleof, (self._messages, MPI.INT32_T))
        for number, dtype in host_callbacks.DTYPES.items():
            setup.item_bytes[number] = dtype.itemsize
            if dtype.isbuiltin == 1 and dtype != np.float16:  # others travel as integers
                setup.types[number] = MPI._handleof(MPI.Datatype.fromcode(dtype.char))
        for number, op in enumerate(OPS):
            setup.ops[number] = MPI._handleof(getattr(MPI, op))
        setup.rank, setup.size, setup.place_words = comm.rank, comm.size, words
        self._kept = setup  # which C has the addresses of its functions from
        self._library.jaxmpi_open(self._index, ctypes.byref(setup))
        # Programs whose arrays C cannot see, as a GPU's, call it through Python.
        begin, end = self._library.jaxmpi_begin_call, self._library.jaxmpi_end_call
        self._names = f"jaxmpi: call begun {self._index}", f"jaxmpi: call ended {self._index}"
        for name, function in zip(self._names, (begin, end), strict=True):
            run = lambda operands, results, number, function=function: function(self._index, number)  # noqa: E731
            host_callbacks.register(name, run, ends_job=True)

    def has_slots_for(self, kind: str, row_bytes: int) -> bool:
        """Return True, on all ranks alike, if `call` can do an operation, and MPI would not do it sooner.

        Args:
            kind: the operation.
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
            self._numbers = self._memory = self._kept = None
            for name in self._names:
                host_callbacks.forget(name)
            _comparisons.remove(self)

    # ------------------------------------------------------------ in a program

    def number(self, what: str) -> int | None:
        """The next traced exchange's number; None if programs compare nothing."""
        if self._library is None:
            return None
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._where} ({what})"
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
        self._bind(BEGIN, number, op=1)
        return self._bind(kind, number, op, root, [x], [jax.ShapeDtypeStruct(tuple(shape), x.dtype)])[0]

    def _bind(
        self, kind: str, number: int, op: int = 0, root: int = 0, operands: Sequence = (), results: Sequence = ()
    ) -> list:
        effect = self._comm.effect
        if kind in (BEGIN, END) and not self._in_c and SOURCE.unavailable_reason():
            return host_callbacks.call(self._names[kind == END], [], [], effect=effect, number=number)
        words = (self._index, number, KINDS.index(kind), op, root)
        return _call_p.bind(*operands, results=c_handlers.shaped(*results), effect=effect, words=words)

    # ------------------------------------------------------------ outside, of the program that runs

    def text(self, number: int) -> str:
        """Describe an exchange, which this rank may not have traced yet."""
        number %= 1 << TURN_BIT
        return self._texts.get(number, f"exchange {number} of {self._where}")

    def current(self) -> "CallId | None":
        """The exchange of this process's programs that has the turn."""
        held = self._library.jaxmpi_held(self._index) if self._library else 0
        return CallId(held >> 32, held & 0xFFFFFFFF) if held else None

    def waits(self) -> int:
        """Number of an exchange that waits for the turn, or 0."""
        return self._library.jaxmpi_waits(self._index) if self._library else 0

    def refuse(self, mine: int, theirs: Mapping[int, int]) -> NoReturn:
        """Raise `UsageError` with these ranks' exchanges, by rank here."""
        numbers, calls = self._comm.processes.numbers, {self._comm.rank: mine, **theirs}
        texts = {numbers[rank]: self.text(number) for rank, number in calls.items()}
        if len(set(texts.values())) > 1:
            raise UsageError(different_calls(texts))
        turns = {numbers[rank]: number >> TURN_BIT for rank, number in calls.items()}
        shown = ", ".join(f"rank {rank} at turn {turn}" for rank, turn in sorted(turns.items())[:8])
        raise UsageError(
            f"ranks came to {texts[numbers[self._comm.rank]]!r} at different turns: {shown} (modulo {MOST_TURNS}); a "
            "turn is a run of its program, and some rank has run the program without it. Expected the exchange in the "
            "same runs on all ranks: keep it out of a lax.cond that only some ranks take; of optax.apply_if_finite "
            "around exchange_gradients make optax.chain(exchange_gradients(), optax.apply_if_finite(...))"
        )

    def _differs(self, mine: int, theirs: Any) -> None:
        """Called by C: `theirs` has a number for each rank, 0 where it is not known."""
        self._refuse_and_end(mine, {rank: theirs[rank] for rank in range(self._comm.size) if theirs[rank]})

    def _refuse_and_end(self, mine: int, theirs: Mapping[int, int]) -> None:
        try:
            self.refuse(mine, theirs)
        except UsageError as error:
            failures.fail(error, None)

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
        theirs = {rank: self._sent_number(rank, call.count) for rank in range(self._comm.size)}
        theirs = {rank: number for rank, number in theirs.items() if number and rank != self._comm.rank}
        if set(theirs.values()) - {call.number}:
            self._refuse_and_end(call.number, theirs)
        if kind == MPI.ERR_TRUNCATE:
            text = f"{self.text(call.number)} got a longer message than it expects: another rank is at another exchange"
            failures.fail(UsageError(text), None)

    def _sent_number(self, rank: int, count: int) -> int:
        """Number that a rank has sent, which nobody will receive, or 0."""
        if self._numbers is not None:
            published = int(self._numbers[rank, count % 2])
            return published >> 32 if published & 0xFFFFFFFF == count else 0
        theirs = np.zeros(1, np.int32)
        if rank != self._comm.rank and any(self._messages.Iprobe(rank, 0) for _ in range(PROBES)):
            self._messages.Recv(theirs, rank, 0)
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


@functools.cache
def _wait_at_exit() -> None:
    """Wait at exit for programs that exchange; the monitor limits the time."""

    def wait() -> None:
        with suppress(Exception):  # errors of a program: mpi4jax's hook raises them again
            jax.effects_barrier()

    failures.call_before_finalize(wait)


# ---------------------------------------------------------------- who waits, and who is late

WAITS, PLACE = TAGS = 1, 2  # tags of messages between monitors; numbers of calls have 0
# Ways in which a rank waits. In COMPARED (an exchange in a program), CONTROL (outside programs) and BESIDE (while one
# runs) all ranks make the same calls in the same order. PARTNER is a message.
COMPARED, CONTROL, BESIDE, PARTNER = range(4)
LOOK_S = 0.5  # between looks of the monitor
PROBES = 3  # MPI may fetch a message in the first, and find it in the next
SAID_AFTER_S = 20.0  # until ranks that are absent are asked where they are
ANSWER_S = 2.5  # for them to answer, before the wait is printed
PLACE_BYTES = 256  # bytes of a rank's answer at most
NAMED = 8  # absent ranks whose places are printed
EXCHANGE_TIMEOUT = "JAXMPI_EXCHANGE_TIMEOUT_S"


class CallId(NamedTuple):
    """Numbers by which ranks know a call that they make together."""

    number: int  # of an exchange in programs, else 0
    count: int  # how many of its way this process has begun


# A message that a program exchanges: its call's number in this process, whether an earlier look has found it, what it
# is, and the ranks that it waits for.
Note = tuple[int, bool, str, tuple[int, ...]]


@dataclass(eq=False, kw_only=True, slots=True)
class Wait:
    """A wait of this rank for others, as long as it lasts."""

    way: int
    call: CallId
    what: str
    partners: tuple[int, ...]
    limit_s: float = TIMEOUT_S
    is_in_program: bool = False  # then the monitor keeps the limit, since MPI has none
    thread: int | None = None  # the Python thread that waits
    clock: WaitClock | None = None  # since the monitor has found it first
    is_sent: bool = False
    is_asked: bool = False  # whether absent ranks were asked where they are
    is_printed: bool = False

    def text(self) -> str:
        """Describe the wait, with the user's line if a Python thread waits."""
        at = line_of_thread(self.thread) if self.thread else ""
        return f"{self.what}, {at}" if at and at.partition(" in ")[0] not in self.what else self.what

    def expected(self) -> str:
        """What the others must do."""
        return "the other rank must call its part" if self.way == PARTNER else "all ranks must call it as often"


def message_lost(what: str, where: str) -> TrainingError:
    """The error of a message not exchanged in time, with ranks' places."""
    return TrainingError(
        f"{what} has waited {TIMEOUT_S:.0f} s; no message has come or gone: the other rank must call its part "
        f"({EXCHANGE_TIMEOUT} sets the time){where}"
    )


class WaitRegistry:
    """Waits between a communicator's ranks, as this rank knows them; all ranks make it together.

    Args:
        comm: of mpi4py, the monitor's alone.
        numbers: of its ranks in the job, for messages.
        may_watch: MPI may be called concurrently with a program that exchanges; else waits are noted and nobody looks.
    """

    def __init__(self, comm: Any, numbers: Sequence[int], may_watch: bool) -> None:
        self.comm, self.numbers, self.may_watch = comm, tuple(numbers), may_watch
        self.rank, self.others = comm.rank, tuple(sorted({*range(comm.size)} - {comm.rank}))
        self.comparison: Any = None  # the `CallComparison`, or another that has `current`, `text`, `waits`, `refuse`
        self.notes: Callable[[], list[Note]] | None = None  # messages that programs wait for now
        self._waiting: dict[tuple[int, int], CallId] = {}  # by way and rank, where it last said that it waits
        self._counts: Counter[int] = Counter()  # calls begun, by way
        self._waits: set[Wait] = set()  # of Python threads
        self._exchange_wait: Wait | None = None  # of a program's exchange
        self._message_waits: dict[int, Wait] = {}  # messages of programs, by number
        self._places: dict[int, str] = {}  # by rank, where it said that it is
        self._ended: set[int] = set()  # ranks whose scripts have ended
        self._to_tell: set[int] = set()  # ranks that wait, and hear if this one's script ends
        self._sent: list[tuple[Any, np.ndarray]] = []  # requests, and what they send
        if may_watch:
            watch().add(self)

    @contextmanager
    def waiting(self, way: int, what: str, limit_s: float = TIMEOUT_S) -> Iterator[Wait]:
        """Note that this rank waits for all others until the block ends.

        Args:
            way: CONTROL or BESIDE.
            what: it waits in, for messages.
            limit_s: after which the caller gives up.
        """
        self._counts[way] += 1
        thread = threading.get_ident() if way == CONTROL else None
        call = CallId(0, self._counts[way])
        wait = Wait(way=way, call=call, what=what, limit_s=limit_s, partners=self.others, thread=thread)
        self._waits.add(wait)
        try:
            yield wait
        finally:
            self._waits.discard(wait)

    def where(self, numbers: Sequence[int]) -> str:
        """Say where ranks are, by job number; empty if not yet asked."""
        places = {self.numbers[rank]: place for rank, place in self._places.items()}
        return "".join(f"; rank {number} {places[number]}" for number in numbers[:NAMED] if number in places)

    def all_waits(self) -> list[Wait]:
        """All waits of this process, programs' as of the last look."""
        return [*self._waits, *([self._exchange_wait] if self._exchange_wait else []), *self._message_waits.values()]

    # ------------------------------------------------------------ called by the monitor

    def look(self, has_ended: bool) -> None:
        """Receive, answer, and judge this rank's waits.

        Raises:
            UsageError: ranks wait in different exchanges.
            TrainingError: a rank that is waited for has ended, or has not come within the time limit.
        """
        self.drain()
        if has_ended:
            for rank in self._to_tell:
                self._send(rank, PLACE, np.zeros(0, np.uint8))
            self._to_tell, self._exchange_wait, self._message_waits = set(), None, {}
            return
        self._find_program_waits()
        for wait in self.all_waits():
            if wait.clock is None:
                wait.clock = WaitClock()
            else:  # the same in two looks
                self._judge(wait, wait.clock.look())

    def drain(self) -> bool:
        """Receive what has come; return True if all that was sent is received."""
        from mpi4py import MPI

        self._sent = [(request, message) for request, message in self._sent if not request.Test()]
        status, misses = MPI.Status(), 0
        while misses < PROBES:
            probes = (self.comm.Improbe(MPI.ANY_SOURCE, tag, status) for tag in TAGS)
            if (found := next(filter(None, probes), None)) is None:
                misses += 1
                continue
            message = np.zeros(status.Get_count(), np.uint8)
            found.Recv(message)
            rank = status.Get_source()
            if status.Get_tag() == WAITS:
                way, number, count, asks = message.view(np.int32).tolist()
                self._waiting[way, rank] = CallId(number, count)
                self._to_tell.add(rank)
                if asks:
                    self._send(rank, PLACE, np.frombuffer(watch().place().encode()[:PLACE_BYTES], np.uint8))
            elif message.size:
                self._places[rank] = message.tobytes().decode(errors="replace")
            else:
                self._ended.add(rank)
        return not self._sent

    def _send(self, rank: int, tag: int, message: np.ndarray) -> None:
        self._sent.append((self.comm.Issend(message, rank, tag), message))  # done once received, as `drain` must know

    def _tell(self, wait: Wait, ranks: Sequence[int], asks: bool) -> None:
        for rank in ranks:
            self._send(rank, WAITS, np.array([wait.way, *wait.call, asks], np.int32).view(np.uint8))

    def _find_program_waits(self) -> None:
        """Update the waits of this process's programs; one that lasts stays the same object."""
        call = self.comparison.current() if self.comparison else None
        if call is None:
            self._exchange_wait = None
        elif self._exchange_wait is None or self._exchange_wait.call != call:
            what = self.comparison.text(call.number)
            self._exchange_wait = Wait(way=COMPARED, call=call, what=what, partners=self.others, is_in_program=True)
        before, self._message_waits = self._message_waits, {}
        notes = self.notes() if self.notes else []
        for number, is_known, what, partners in sorted(notes, key=lambda note: note[1]):  # of two in a call the older
            known = before.get(number) if is_known else None
            facts: dict[str, Any] = {"way": PARTNER, "call": CallId(0, 0), "what": what, "partners": partners}
            self._message_waits[number] = known or Wait(**facts, is_in_program=True)

    def _judge(self, wait: Wait, waited_s: float) -> None:
        if not wait.is_sent:
            self._tell(wait, wait.partners, asks=False)
            wait.is_sent = True
        if wait.way == COMPARED:
            theirs = {rank: self._waiting.get((COMPARED, rank)) for rank in self.others}
            differing = {r: c.number for r, c in theirs.items() if c and c.count == wait.call.count and c != wait.call}
            if differing:
                self.comparison.refuse(wait.call.number, differing)
        absent = self._absent(wait)
        shown, where = ", ".join(map(str, self.absent(wait))), self.where(self.absent(wait))
        if absent and self._ended.issuperset(absent):
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waits in {wait.text()} for rank {shown}, whose script has ended; "
                f"{wait.expected()}"
            )
        if wait.is_in_program and waited_s > wait.limit_s:
            self._refuse_time(wait, shown, waited_s, where)
        if not wait.is_asked and waited_s > min(SAID_AFTER_S, wait.limit_s / 2):
            wait.is_asked = True
            self._places |= dict.fromkeys(absent, "does not answer")
            self._tell(wait, absent, asks=True)
        is_for_watchdog = wait.way == CONTROL and failures.job.working  # the trainer's, which says it itself
        if absent and waited_s > SAID_AFTER_S + ANSWER_S and not is_for_watchdog and not wait.is_printed:
            line = f"waits in {wait.text()} for rank {shown}, for {SAID_AFTER_S:g} s now; {wait.expected()}"
            print(f"jaxmpi: {failures.describe_rank()}: {line}{where}", file=sys.stderr, flush=True)
            wait.is_printed = True

    def _absent(self, wait: Wait) -> list[int]:
        """Partners that are not known to wait with this rank; for a message, all."""
        return [r for r in wait.partners if wait.way == PARTNER or self._waiting.get((wait.way, r)) != wait.call]

    def absent(self, wait: Wait) -> list[int]:
        """Numbers in the job of ranks that are not known to share a wait."""
        return [self.numbers[rank] for rank in self._absent(wait)]

    def _refuse_time(self, wait: Wait, absent: str, waited_s: float, where: str) -> None:
        """Raise `TrainingError`: a program has waited for longer than the limit."""
        if absent and wait.way == PARTNER:
            raise message_lost(wait.what, where)
        if absent:
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waited {waited_s:.0f} s in {wait.what} for rank {absent}; all ranks "
                f"must come to it as often ({EXCHANGE_TIMEOUT} sets the time){where}"
            )
        if number := self.comparison.waits():
            # All ranks may be in it: XLA leaves out the call that ends an exchange if another part of a program fails.
            raise TrainingError(
                f"{self.comparison.text(number)} waits for {wait.what}, which has begun in this process and not "
                f"ended; if its program has failed, or a callback in it exchanges, it never will ({EXCHANGE_TIMEOUT} "
                "sets the time)"
            )


class WaitMonitor:
    """Thread that looks at the waits of this process's communicators."""

    def __init__(self) -> None:
        self.has_ended = False  # the script
        self._registries: list[WaitRegistry] = []
        self._looks = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmpi absent ranks", daemon=True)

    def add(self, registry: WaitRegistry) -> None:
        """Look at this communicator, too."""
        self._registries.append(registry)
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, registry: WaitRegistry) -> None:
        """Look at it no more; on return no look is under way."""
        with self._looks:
            if registry in self._registries:
                self._registries.remove(registry)

    def stop(self) -> None:
        """End the thread, before MPI ends."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def place(self) -> str:
        """This rank's place in its script, for messages of other ranks."""
        waits = [wait for registry in self._registries for wait in registry.all_waits() if wait.clock is not None]
        if waits:
            return f"waits in {waits[0].text()}"
        main = threading.main_thread().ident
        compiles = any(module_of(frame) == "jax._src.compiler" for frame in _frames_of(main))
        at = line_of_thread(main)
        return f"{'compiles' if compiles else 'is'} at {at}" if at else "runs no line of a script"

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                with self._looks:
                    for registry in list(self._registries):
                        registry.look(self.has_ended)
            except (UsageError, TrainingError) as error:
                failures.fail(error, None)


@functools.cache
def watch() -> WaitMonitor:
    """This process's monitor."""
    return WaitMonitor()


def line_of_thread(thread: int | None) -> str:
    """The user's line that a thread runs; empty if there is none."""
    return next(map(line_of, filter(is_users, _frames_of(thread))), "")


def _frames_of(thread: int | None) -> Iterator[Any]:
    """Frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread or 0)
    while frame:
        yield frame
        frame = frame.f_back
