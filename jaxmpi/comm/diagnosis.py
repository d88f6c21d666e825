"""Which call each rank has come to, who waits for whom, and who is late.

Messages between ranks have no names. If ranks run two programs with equal shapes in different orders, each takes one's
numbers for the other's. So an exchange gets a number when ranks trace it, which they do together. The number is sent
beside the data, before the exchange's first message, and received behind its last (`CallComparison`; in C:
`compiled_calls`). Numbers that differ show in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program returns.
- A message is longer than expected: MPI reports it to an error handler, which reads the others' numbers.
- A rank waits for messages that never come: a thread of each rank (`WaitMonitor`) finds waits that last, and sends them
  to the other ranks. So each knows who waits with it, and the others are absent.

A comparison before the first message would be simpler, but ranks would meet once more in every step: that took 1.07 to
1.15 of a step of 4 ms, and a call into Python instead of C 1.10. Without a C compiler, and in programs for a GPU,
Python does the same without arrays. From its begin to its end an exchange has the process's turn, since JAX orders the
programs of one thread only, and two that exchange at once would receive each other's messages.
"""

import contextlib
import functools
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jaxmpi.comm import c_handlers
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.compiled_calls import MOST_COMPARISONS, MOST_TURNS, SOURCE, TURN_BIT, CompiledCalls, NumberedCalls
from jaxmpi.comm.polling import WaitClock, survives_losses
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.frames import is_users, line_of, module_of
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.process import launched_workers

# ---------------------------------------------------------------- which exchange each rank has come to

DIFFERS = "jaxmpi: a rank has come to another exchange"
_comparisons: list["CallComparison"] = []  # of communicators that were not freed
_indices = [-1]  # numbers of comparisons; a communicator's is the same on all its ranks


def comparison_of(comm: Any) -> "CallComparison":
    """The comparison of an `MpiComm`; all ranks call it together the first time."""
    return comm.cached("comparison", lambda: CallComparison(comm))


class CallComparison:
    """Comparison of the exchanges that a communicator's ranks have come to."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        is_world = comm.processes.numbers == tuple(range(launched_workers()))
        self._where = "the job" if is_world else f"a communicator of {comm.size} ranks"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._messages = comm.processes.waits.comm  # numbers have tag 0, the monitor's messages have others
        reasons, used = zip(*comm.processes.allgather_object([_why_python(), _indices[-1]]), strict=True)
        _indices.append(max(used) + 1)
        self._calls = (
            PythonCalls(comm, self._messages, f"{DIFFERS} {_indices[-1]}", self.refuse)
            if any(reasons)
            else CompiledCalls(comm, self._messages, _indices[-1], self.differs, self.failed)
        )
        first = next((rank for rank, reason in enumerate(reasons) if reason.startswith(c_handlers.TROUBLE)), None)
        if first == comm.rank:
            c_handlers.say_once("compare and call MPI", reasons[comm.rank])
        self._named: list[Any] = []  # communicators of mpi4py whose errors it names
        self.name_errors_of(comm.mpi)
        comm.processes.waits.comparison = self
        _comparisons.append(self)
        _wait_at_exit()

    def close(self) -> None:
        """Let go of what programs call."""
        self._calls.close()
        _comparisons.remove(self)

    def number(self, what: str) -> int:
        """Return the next traced exchange's number."""
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._where} ({what})"
        return number

    def text(self, number: int) -> str:
        """Describe an exchange, which this rank may not have traced yet."""
        number %= 1 << TURN_BIT
        return self._texts.get(number, f"exchange {number} of {self._where}")

    def share_slots(self) -> None:
        """Have operations go through shared memory, if they can; all ranks come here together."""
        if isinstance(self._calls, CompiledCalls):
            self._calls.share_slots()

    def begin(self, number: int) -> None:
        """Wait for the turn and send the number.

        It needs nothing of the data, so it is the first that a program does: of two programs the one that was
        dispatched first has its turn first.
        """
        self._calls.begin(number, has_turn=True)

    def end(self, number: int) -> None:
        """Compare with the others' numbers, and give the turn away."""
        self._calls.end(number)

    def compiled(self, number: int) -> NumberedCalls | None:
        """MPI's operations that end with the comparison; None without C."""
        return NumberedCalls(self._calls, number) if isinstance(self._calls, CompiledCalls) else None

    def current(self) -> "CallId | None":
        """The exchange of this process's programs that has the turn."""
        number, count = self._calls.held()
        return CallId(number, count) if number else None

    def waits(self) -> int:
        """Number of an exchange that waits for the turn, or 0."""
        return self._calls.waits()

    def refuse(self, mine: int, theirs: Mapping[int, int]) -> NoReturn:
        """Raise `UsageError` with these ranks' exchanges, by rank here."""
        numbers = self._comm.processes.numbers
        calls = {self._comm.rank: mine, **theirs}
        texts = {numbers[rank]: self.text(number) for rank, number in calls.items()}
        if len(set(texts.values())) > 1 or not isinstance(self._calls, CompiledCalls):
            raise UsageError(different_calls(texts))
        turn, half = self._calls.turn(mine % (1 << TURN_BIT)), MOST_TURNS // 2  # turns are sent modulo MOST_TURNS
        turns = {
            numbers[rank]: turn + ((number >> TURN_BIT) - (mine >> TURN_BIT) + half) % MOST_TURNS - half
            for rank, number in calls.items()
        }
        shown = ", ".join(f"rank {rank} at turn {turn}" for rank, turn in sorted(turns.items())[:8])
        raise UsageError(
            f"ranks came to {texts[numbers[self._comm.rank]]!r} at different turns: {shown}; a turn is a run of its "
            "program, and some rank has run the program without it. Expected the exchange in the same runs on all "
            "ranks: keep it out of a lax.cond that only some ranks take; of optax.apply_if_finite around "
            "exchange_gradients make optax.chain(exchange_gradients(), optax.apply_if_finite(...))"
        )

    def differs(self, mine: int, theirs: Mapping[int, int]) -> None:
        """End the job with these ranks' exchanges."""
        try:
            self.refuse(mine, theirs)
        except UsageError as error:
            failures.fail(error, None)

    # ------------------------------------------------------------ errors of MPI

    def name_errors_of(self, mpi: Any) -> None:
        """Have a communicator's errors name ranks at other exchanges."""
        self._named.append(mpi)
        mpi.Set_errhandler(_error_handler())

    def failed(self, mine: int, code: int) -> None:
        """End the job with MPI's error."""
        from mpi4py import MPI

        failures.fail(TrainingError(f"{self.text(mine)}: MPI: {MPI.Get_error_string(code)}"), None)

    def name_error(self, code: int) -> None:
        """End the job if MPI's error is that exchanges differ; called before mpi4jax ends it."""
        from mpi4py import MPI

        kind, call = MPI.Get_error_class(code), self.current()
        if kind not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS) or not call:  # of one message, or of one among several
            return
        others = set(range(self._comm.size)) - {self._comm.rank}
        theirs = {rank: number for rank in others if (number := self._sent_number(rank, call.count))}
        if set(theirs.values()) - {call.number}:
            self.differs(call.number, theirs)
        if kind == MPI.ERR_TRUNCATE:
            error = UsageError(
                f"{self.text(call.number)} got a longer message than it expects, so another rank has come to another "
                "exchange; all must make the same calls in the same order"
            )
            failures.fail(error, None)

    def _sent_number(self, rank: int, count: int) -> int:
        """Number that a rank has sent, which nobody will receive, or 0."""
        if isinstance(self._calls, CompiledCalls) and (published := self._calls.number_of(rank, count)) is not None:
            return published
        theirs = np.zeros(1, np.int32)
        if any(self._messages.Iprobe(rank, 0) for _ in range(PROBES)):
            self._messages.Recv(theirs, rank, 0)
        return int(theirs[0])


class PythonCalls:
    """Turn and comparison by functions in Python that programs call."""

    def __init__(self, comm: Any, messages: Any, name: str, differs: Callable) -> None:
        self._comm, self._messages, self._differs = comm, messages, differs
        self._others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
        self._turn, self._held, self._waits, self._count = threading.Condition(), (0, 0), 0, 0
        self._ticket = self._served = 0  # the next one for the turn, and the one that has the turn
        self._names = f"{name}, begun", f"{name}, ended"
        for name, function in zip(self._names, (self._begin, self._end), strict=True):
            host_callbacks.register(name, function, ends_job=True)

    def close(self) -> None:
        """Forget the functions; a program that still calls them gets an error."""
        for name in self._names:
            host_callbacks.forget(name)

    def begin(self, number: int, has_turn: bool = False) -> None:
        """Have the program take the turn and send the number."""
        host_callbacks.call(self._names[0], [], [], effect=self._comm.effect, number=number)

    def end(self, number: int) -> None:
        """Have the program compare and give the turn away."""
        host_callbacks.call(self._names[1], [], [], effect=self._comm.effect, number=number)

    def held(self) -> tuple[int, int]:
        """Number under way, and how many have begun; zeros if none."""
        return self._held

    def waits(self) -> int:
        """Number of a call that waits for the turn, or 0."""
        return self._waits

    def _begin(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        with self._turn:
            ticket, self._ticket = self._ticket, self._ticket + 1
            while self._served != ticket:
                self._waits = number
                self._turn.wait()
            self._waits, self._count = 0, (self._count + 1) % (1 << 31)  # which is sent as i32
            self._held = number, self._count
        for rank in self._others:
            self._messages.Send(np.array([number], np.int32), rank)

    def _end(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        theirs = np.zeros((len(self._others), 1), np.int32)
        for message, rank in zip(theirs, self._others, strict=True):
            self._messages.Recv(message, rank, 0)
        if (theirs != number).any():
            self._differs(number, dict(zip(self._others, theirs[:, 0].tolist(), strict=True)))
        with self._turn:
            self._held, self._served = (0, 0), self._served + 1
            self._turn.notify_all()


def _why_python() -> str:
    """Reason why programs cannot compare in C; empty if they can."""
    if not (why := SOURCE.unavailable_reason()) and survives_losses():
        why = "errors of lost ranks are Python's"
    return why or ("there are too many communicators" if _indices[-1] + 1 >= MOST_COMPARISONS else "")


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
        with contextlib.suppress(Exception):  # errors of a program: mpi4jax's hook raises them again
            jax.effects_barrier()

    failures.call_before_finalize(wait)


# ---------------------------------------------------------------- who waits, and who is late

WAITS, ASKS, PLACE, ENDED = TAGS = range(1, 5)  # tags of messages between monitors; numbers of calls have 0
# Ways in which a rank waits. In COMPARED (an exchange in a program), CONTROL (outside programs) and BESIDE (while one
# runs) all ranks make the same calls in the same order. PARTNER is a message, MEETING ranks that have no communicator
# of ours yet.
COMPARED, CONTROL, BESIDE, PARTNER, MEETING = range(5)
LOOK_S = 0.5  # between looks of the monitor
PROBES = 3  # MPI may fetch a message in the first, and find it in the next
SAID_AFTER_S = 20.0  # until a wait is printed
ANSWER_S = 2.5  # after which a rank that was asked where it is counts as silent
PLACE_BYTES = 256  # bytes of a rank's answer at most
NAMED = 8  # absent ranks whose places are printed
EXCHANGE_TIMEOUT = "JAXMPI_EXCHANGE_TIMEOUT_S"
SILENT = "does not answer"


class CallId(NamedTuple):
    """Numbers by which ranks know a call that they make together."""

    number: int  # of an exchange in programs, or of the ranks that meet, else 0
    count: int  # how many of its way this process has begun


class Note(NamedTuple):
    """A message that a program exchanges, as found in a look."""

    number: int  # number of its call in this process
    is_known: bool  # from an earlier look
    what: str
    partners: tuple[int, ...]


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
    asked_s: float = 0.0  # after so many seconds of it
    printed: set[str] = field(default_factory=set)

    def text(self) -> str:
        """Describe the wait, with the user's line if a Python thread waits."""
        at = line_of_thread(self.thread) if self.thread else ""
        return f"{self.what}, {at}" if at and at.partition(" in ")[0] not in self.what else self.what

    def expected(self) -> str:
        """What the others must do."""
        if self.way == MEETING:
            return "all its ranks must make their first call on it together"
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
        self.comparison: CallComparison | None = None
        self.notes: Callable[[], list[Note]] | None = None  # messages that programs wait for now
        self.waiting_ranks: dict[tuple[int, int], CallId] = {}  # by way and rank, where it last said that it waits
        self._counts: Counter[tuple[int, int]] = Counter()  # calls begun, by way and by the ranks that meet
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
    def waiting(
        self,
        way: int,
        what: str,
        limit_s: float = TIMEOUT_S,
        partner: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Iterator[Wait]:
        """Note that this rank waits until the block ends.

        Args:
            way: CONTROL, BESIDE, PARTNER or MEETING.
            what: it waits in, for messages.
            limit_s: after which the caller gives up.
            partner: the rank that a message is from or to; None for any, and for what all take part in.
            ranks: those that meet.
        """
        number, partners = 0, self.others if partner is None else (partner,)
        if ranks is not None:
            number = zlib.crc32(np.array(sorted(ranks), np.int32).tobytes()) >> 1  # to fit i32
            partners = tuple(sorted({*ranks} - {self.rank}))
        self._counts[way, number] += 1
        call = CallId(number, self._counts[way, number])
        thread = threading.get_ident() if way in (CONTROL, MEETING) else None
        wait = Wait(way=way, call=call, what=what, limit_s=limit_s, partners=partners, thread=thread)
        self._waits.add(wait)
        try:
            yield wait
        finally:
            self._waits.discard(wait)

    def absent(self, wait: Wait) -> list[int]:
        """Numbers in the job of ranks that are not known to share a wait."""
        return [self.numbers[rank] for rank in self._absent(wait)]

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
                self._send(rank, ENDED, np.zeros(1, np.uint8))
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
            rank, tag = status.Get_source(), status.Get_tag()
            if tag == WAITS:
                way, number, count = message.view(np.int32).tolist()
                self.waiting_ranks[way, rank] = CallId(number, count)
                self._to_tell.add(rank)
            elif tag == ASKS:
                self._send(rank, PLACE, np.frombuffer(watch().place().encode()[:PLACE_BYTES], np.uint8))
            elif tag == PLACE:
                self._places[rank] = message.tobytes().decode(errors="replace")
            else:
                self._ended.add(rank)
        return not self._sent

    def _send(self, rank: int, tag: int, message: np.ndarray) -> None:
        self._sent.append((self.comm.Issend(message, rank, tag), message))  # done once received, as `drain` must know

    def _find_program_waits(self) -> None:
        """Update the waits of this process's programs; one that lasts stays the same object."""
        call = self.comparison.current() if self.comparison else None
        if call is None or self.comparison is None:
            self._exchange_wait = None
        elif self._exchange_wait is None or self._exchange_wait.call != call:
            what = self.comparison.text(call.number)
            self._exchange_wait = Wait(way=COMPARED, call=call, what=what, partners=self.others, is_in_program=True)
        before, self._message_waits = self._message_waits, {}
        notes = self.notes() if self.notes else []
        for note in sorted(notes, key=lambda note: note.is_known):  # if two threads are in one call the older counts
            known = before.get(note.number) if note.is_known else None
            self._counts[PARTNER, 0] += known is None
            call = CallId(0, self._counts[PARTNER, 0])
            self._message_waits[note.number] = known or Wait(
                way=PARTNER, call=call, what=note.what, partners=note.partners, is_in_program=True
            )

    def _judge(self, wait: Wait, waited_s: float) -> None:
        if not wait.is_sent:
            for rank in wait.partners:
                self._send(rank, WAITS, np.array([wait.way, *wait.call], np.int32))
            wait.is_sent = True
        if wait.way == COMPARED and self.comparison:
            theirs = {rank: self.waiting_ranks.get((COMPARED, rank)) for rank in self.others}
            differing = {r: c.number for r, c in theirs.items() if c and c.count == wait.call.count and c != wait.call}
            if differing:
                self.comparison.refuse(wait.call.number, differing)
        absent = self._absent(wait)
        where = self.where(self.absent(wait))
        shown = ", ".join(map(str, self.absent(wait)))
        if absent and self._ended.issuperset(absent):
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waits in {wait.text()} for rank {shown}, whose script has ended; "
                f"{wait.expected()}"
            )
        if wait.is_in_program:
            self._check_time(wait, shown, waited_s, where)
        if not wait.asked_s and waited_s > min(SAID_AFTER_S, wait.limit_s / 2):
            wait.asked_s = waited_s
            for rank in absent:
                self._places[rank] = SILENT
                self._send(rank, ASKS, np.zeros(1, np.uint8))
        is_answered = all(self._places.get(rank) != SILENT for rank in absent) or waited_s > wait.asked_s + ANSWER_S
        is_for_watchdog = wait.way == CONTROL and failures.job.working  # the trainer's, which says it itself
        if absent and waited_s > SAID_AFTER_S and is_answered and not is_for_watchdog and shown not in wait.printed:
            line = f"waits in {wait.text()} for rank {shown}, for {SAID_AFTER_S:g} s now; {wait.expected()}"
            print(f"jaxmpi: {failures.describe_rank()}: {line}{where}", file=sys.stderr, flush=True)
            wait.printed.add(shown)

    def _absent(self, wait: Wait) -> list[int]:
        """Partners that are not known to wait with this rank; for a message, all."""
        return [
            rank
            for rank in wait.partners
            if wait.way == PARTNER or self.waiting_ranks.get((wait.way, rank)) != wait.call
        ]

    def _check_time(self, wait: Wait, absent: str, waited_s: float, where: str) -> None:
        """Raise `TrainingError` if a program has waited for longer than the limit."""
        if absent and waited_s > wait.limit_s:
            if wait.way == PARTNER:
                raise message_lost(wait.what, where)
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waited {waited_s:.0f} s in {wait.what} for rank {absent}; all ranks "
                f"must come to it as often ({EXCHANGE_TIMEOUT} sets the time){where}"
            )
        is_blocked = wait.way == COMPARED and self.comparison and waited_s > SAID_AFTER_S + wait.limit_s
        if is_blocked and self.comparison and (number := self.comparison.waits()):
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
