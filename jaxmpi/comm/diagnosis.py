"""A thread that names the ranks for which its process waits.

A rank waits in a program that exchanges, or in a comparison outside jit or while programs are traced. It also waits in
an operation beside a program, or for a message. If the thread finds the same wait in two looks, it sends the wait to
the other ranks. So each rank knows who waits with it; those who say nothing are absent. After `SAID_AFTER_S` it asks
them where they are, and prints a line. A rank may have come to the end of its script. Then it answers with how often it
has come to each kind of wait. If that is less often, it never will, and the job ends at once. Ranks in step send
nothing here.

`call_comparison` knows a program's exchange that has the process's turn. `compiled_messages` knows messages that a
program waits for. Python's waits are noted in a `WaitRegistry`.
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
from typing import Any, NamedTuple, NoReturn, Protocol

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
from jaxmpi.runtime.failures import call_before_finalize
from jaxmpi.runtime.process import launched_workers

TELL, ASK, PLACE, ENDED = TAGS = range(1, 5)  # tags of what watching threads send each other; numbers of calls have 0
COMPARED, CONTROL, BESIDE, PARTNER, MEETING = WAYS = range(5)  # ways in which a rank waits
LOOK_S = 0.5  # between looks
PROBES = 3  # MPI may fetch a message in the first, and find it in the next
SAID_AFTER_S = 20.0  # that an exchange waits for other ranks, or for another one of its process
ANSWER_S = 2.5  # after which a rank that was asked where it is does not answer
PLACE_BYTES = 256  # bytes of a rank's answer at most
NAMED = 8  # absent ranks whose places are said
EXCHANGE_TIMEOUT = "JAXMPI_EXCHANGE_TIMEOUT_S"


class CallId(NamedTuple):
    """Numbers by which ranks know a call that they make together."""

    number: int  # number of an exchange in programs, or of the ranks that meet, else 0
    count: int  # how many of its way this process has begun; of meetings: with these ranks


@dataclass(eq=False, kw_only=True, slots=True)
class Wait:
    """A wait of this rank for others, as long as it lasts."""

    way: int
    call: CallId
    what: str
    limit_s: float
    partners: tuple[int, ...]
    is_in_program: bool = False  # MPI waits, without a limit
    thread: int | None = None  # number of the Python thread that waits
    seconds: WaitClock | None = None  # since the thread has found it first
    is_sent: bool = False
    asked_s: float = 0.0  # after so many seconds of it
    said: set[str] = field(default_factory=set)

    def text(self) -> str:
        """Describe the wait, with the user's line if a Python thread waits."""
        at = line_of_thread(self.thread) if self.thread else ""
        return f"{self.what}, {at}" if at and at.partition(" in ")[0] not in self.what else self.what


def _must(wait: Wait) -> str:
    if wait.way == MEETING:
        return "all its ranks must make their first call on it together"
    return "the other rank must call its part" if wait.way == PARTNER else "all ranks must call it as often"


def message_lost(what: str, where: str) -> TrainingError:
    """The error of a message not exchanged in time, with ranks' places."""
    return TrainingError(
        f"{what} has waited {TIMEOUT_S:.0f} s; no message has come or gone: the other rank must call its part "
        f"({EXCHANGE_TIMEOUT} sets the time){where}"
    )


class Note(NamedTuple):
    """A message that a program exchanges, as found in a look."""

    number: int  # number of its call in this process
    is_known: bool  # from an earlier look
    what: str
    partners: tuple[int, ...]


class ExchangeLookup(Protocol):
    """Lookup of exchanges of this process's programs."""

    def held(self) -> CallId | None:
        """The exchange that has the process's turn."""
        ...

    def waits(self) -> int:
        """Number of an exchange that waits for the turn, or 0."""
        ...

    def begun(self) -> int:
        """How many exchanges have begun."""
        ...

    def text(self, number: int) -> str:
        """Describe an exchange by its number."""
        ...

    def refuse(self, mine: int, theirs: Mapping[int, int]) -> NoReturn:
        """Raise `UsageError` with these ranks' exchanges."""
        ...


class WaitRegistry:
    """Record of waits between a communicator's ranks, as this rank knows them."""

    def __init__(self, comm: Any, numbers: Sequence[int], may_watch: bool) -> None:
        """Have the thread look at it; all ranks come here together.

        Args:
            comm: of mpi4py, the thread's alone.
            numbers: of its ranks in the job, for messages.
            may_watch: MPI may be called beside a program that exchanges; else waits are noted and nobody looks.
        """
        self.comm, self.numbers = comm, tuple(numbers)
        self.rank, self.others = comm.rank, tuple(sorted({*range(comm.size)} - {comm.rank}))
        self.counts = [0] * len(WAYS)
        self.meetings: Counter[int] = Counter()  # by the number of the ranks that meet
        self.may_watch = may_watch
        self.waits: set[Wait] = set()  # waits of Python threads
        self.lookup: ExchangeLookup | None = None
        self.held: Wait | None = None  # wait of a program
        self.notes: Callable[[], list[Note]] | None = None  # those that programs have left now
        self.exchanged: dict[int, Wait] = {}  # messages of programs, by number
        self.waiting_ranks: dict[tuple[int, int], CallId] = {}  # by way and rank, where it last said that it waits
        self.places: dict[int, str] = {}  # by rank, where it said that it is
        self.ended: dict[int, list[int]] = {}  # by rank, how many it had begun of each way when its script ended
        self._to_answer: set[int] = set()  # ranks that wait, and get a message if this one ends
        self._sent: list[tuple[Any, np.ndarray]] = []  # requests, and what they send
        if may_watch:
            watch().add(self)

    @contextmanager
    def waiting(self, way: int, what: str, limit_s: float = TIMEOUT_S, partner: int | None = None) -> Iterator[None]:
        """Note that this rank waits until the block ends.

        Args:
            way: CONTROL or BESIDE, in which all ranks make the same calls in the same order; or PARTNER.
            what: it waits in, for messages.
            limit_s: after which the waiter gives up.
            partner: the rank that a message is from or to; None for any, and for what all take part in.
        """
        self.counts[way] += 1
        partners = self.others if partner is None else (partner,)
        call, thread = CallId(0, self.counts[way]), threading.get_ident() if way == CONTROL else None
        with self._noted(Wait(way=way, call=call, what=what, limit_s=limit_s, partners=partners, thread=thread)):
            yield

    @contextmanager
    def meeting(self, ranks: Sequence[int], what: str, limit_s: float) -> Iterator[Wait]:
        """Note a wait for ranks that have no communicator of ours yet."""
        number = zlib.crc32(np.array(sorted(ranks), np.int32).tobytes()) >> 1  # to fit i32
        self.meetings[number] += 1
        call, partners = CallId(number, self.meetings[number]), tuple(sorted({*ranks} - {self.rank}))
        wait = Wait(way=MEETING, call=call, what=what, limit_s=limit_s, partners=partners, thread=threading.get_ident())
        with self._noted(wait):
            yield wait

    @contextmanager
    def _noted(self, wait: Wait) -> Iterator[None]:
        self.waits.add(wait)
        try:
            yield
        finally:
            self.waits.discard(wait)

    def absent(self, wait: Wait) -> list[int]:
        """Numbers in the job of ranks not known to share a wait."""
        return self._job_numbers([rank for rank in wait.partners if not self._waits_too(rank, wait)])

    def where(self, numbers: Sequence[int]) -> str:
        """Say where ranks were, by job number; empty if not yet asked."""
        told = {self.numbers[rank]: place for rank, place in self.places.items()}
        return "".join(f"; rank {number} {told[number]}" for number in numbers[:NAMED] if number in told)

    # ------------------------------------------------------------ the thread's own

    def look(self, has_ended: bool) -> None:
        """Listen, answer and judge, once a look.

        Raises:
            UsageError: ranks wait in different exchanges.
            TrainingError: a rank that is waited for has ended, or has not come within the time limit.
        """
        self.drain()
        if has_ended:
            self.held, self.exchanged = None, {}
            return self._say_ended()
        self.held, self.exchanged = self._held(), self._exchanged()
        for wait in self.all_waits():
            if wait.seconds is None:
                wait.seconds = WaitClock()
                continue
            self._judge(wait, wait.seconds.look())

    def drain(self) -> bool:
        """Receive what has come; return True if all that was sent is received."""
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._listen()
        return not self._sent

    def _held(self) -> Wait | None:
        """The wait of this process's program; the same object while it lasts."""
        call = self.lookup.held() if self.lookup else None
        if call is None or self.lookup is None:
            return None
        if self.held and self.held.call == call:
            return self.held
        what = self.lookup.text(call.number)
        return Wait(way=COMPARED, call=call, what=what, limit_s=TIMEOUT_S, partners=self.others, is_in_program=True)

    def _exchanged(self) -> dict[int, Wait]:
        """Programs' waits for messages, by number; the same object while one lasts."""
        found = {}
        notes = self.notes() if self.notes else []
        for note in sorted(notes, key=lambda note: note.is_known):  # if two threads are in one call the older counts
            known = self.exchanged.get(note.number) if note.is_known else None
            self.counts[PARTNER] += known is None
            call = CallId(0, self.counts[PARTNER])
            found[note.number] = known or Wait(
                way=PARTNER, call=call, what=note.what, limit_s=TIMEOUT_S, partners=note.partners, is_in_program=True
            )
        return found

    def all_waits(self) -> list[Wait]:
        """All waits of this process, programs' as of the last look."""
        return [*self.waits, *([self.held] if self.held else []), *self.exchanged.values()]

    def _judge(self, wait: Wait, waited_s: float) -> None:
        if not wait.is_sent:
            for rank in wait.partners:
                self._send(rank, TELL, np.array([wait.way, *wait.call], np.int32))
            wait.is_sent = True
        if wait.way == COMPARED:
            self._check_same(wait)
        absent = [rank for rank in wait.partners if not self._waits_too(rank, wait)]
        self._check_ended(wait, absent)
        if not wait.asked_s and waited_s > min(SAID_AFTER_S, wait.limit_s / 2):
            wait.asked_s = waited_s
            for rank in absent:
                self.places[rank] = "does not answer"
                self._send(rank, ASK, np.zeros(1, np.uint8))
        if wait.is_in_program:
            self._check_time(wait, absent, waited_s)
        is_answered = all(self.places.get(rank) != "does not answer" for rank in absent)
        if waited_s > SAID_AFTER_S and (is_answered or waited_s > wait.asked_s + ANSWER_S):
            self._say(wait, self._late(wait, absent), self.where(self._job_numbers(absent)))
            self._say(wait, self._check_turn(wait, waited_s))

    def _waits_too(self, rank: int, wait: Wait) -> bool:
        """Return True if a rank shares the wait; never for a message."""
        return wait.way != PARTNER and self.waiting_ranks.get((wait.way, rank)) == wait.call

    def _check_same(self, wait: Wait) -> None:
        """Raise `UsageError` if another rank waits in another exchange."""
        others = {rank: self.waiting_ranks.get((COMPARED, rank)) for rank in self.others}
        calls = {self.rank: wait.call} | {r: call for r, call in others.items() if call and call[1] == wait.call.count}
        if self.lookup and len(set(calls.values())) > 1:
            self.lookup.refuse(wait.call.number, {rank: call.number for rank, call in calls.items()})

    def _check_ended(self, wait: Wait, absent: Sequence[int]) -> None:
        """Raise `TrainingError` if ranks that must still come have ended.

        Ranks that came to counted calls as often before they ended are left out. For a message all partners must have
        ended.
        """
        is_counted = wait.way not in (PARTNER, MEETING)
        gone = [
            r for r in absent if r in self.ended and not (is_counted and self.ended[r][wait.way] >= wait.call.count)
        ]
        if gone and (wait.way != PARTNER or gone == [*wait.partners]):
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waits in {wait.text()} for rank {self._named(gone)}, whose script has "
                f"ended; {_must(wait)}"
            )

    def _check_time(self, wait: Wait, absent: Sequence[int], waited_s: float) -> None:
        """Raise `TrainingError` if ranks have not come within the time limit."""
        if absent and waited_s > wait.limit_s:
            where = self.where(self._job_numbers(absent))
            if wait.way == PARTNER:
                raise message_lost(wait.what, where)
            raise TrainingError(
                f"rank {self.numbers[self.rank]} waited {waited_s:.0f} s in {wait.what} for rank {self._named(absent)};"
                f" all ranks must come to it as often ({EXCHANGE_TIMEOUT} sets the time){where}"
            )

    def _late(self, wait: Wait, absent: Sequence[int]) -> str:
        """A sentence on absent ranks; empty if none, or if said elsewhere."""
        if not absent or (wait.way == CONTROL and failures.is_at_work()):  # the trainer's watchdog says it
            return ""
        late = f"for rank {self._named(absent)}, for {SAID_AFTER_S:g} s now; {_must(wait)}"
        return f"waits in {wait.text()} {late}"

    def _check_turn(self, wait: Wait, waited_s: float) -> str:
        """Name this process's exchange that waits for this one; empty if none.

        Raises:
            TrainingError: the other exchange has not ended within the time limit.
        """
        if wait.way != COMPARED or not self.lookup or not (waits := self.lookup.waits()):
            return ""
        why = (
            f"{self.lookup.text(waits)} waits for {wait.what}, which has begun in this process and not ended; "
            "if its program has failed, or a callback in it exchanges, it never will"
        )
        if waited_s > SAID_AFTER_S + TIMEOUT_S:
            raise TrainingError(f"{why} ({EXCHANGE_TIMEOUT} sets the time)")
        return why

    def _say(self, wait: Wait, late: str, where: str = "") -> None:
        if late and late not in wait.said:
            print(f"jaxmpi: {failures.describe_rank()}: {late}{where}", file=sys.stderr, flush=True)
            wait.said.add(late)

    def _job_numbers(self, ranks: Sequence[int]) -> list[int]:
        return [self.numbers[rank] for rank in ranks]

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(str, self._job_numbers(ranks)))

    def _send(self, rank: int, tag: int, message: np.ndarray) -> None:
        self._sent.append((self.comm.Issend(message, rank, tag), message))  # done once received, as `drain` must know

    def _listen(self) -> None:
        """Receive the others' waits; send this rank's place to those that ask."""
        from mpi4py import MPI

        status, misses = MPI.Status(), 0
        while misses < PROBES:
            probes = (self.comm.Improbe(MPI.ANY_SOURCE, tag, status) for tag in TAGS)
            if (found := next(filter(None, probes), None)) is None:
                misses += 1
                continue
            message = np.zeros(status.Get_count(), np.uint8)
            found.Recv(message)
            rank, tag = status.Get_source(), status.Get_tag()
            if tag == TELL:
                way, number, count = message.view(np.int32).tolist()
                self.waiting_ranks[way, rank] = CallId(number, count)
                self._to_answer.add(rank)
            elif tag == ASK:
                self._send(rank, PLACE, np.frombuffer(watch().place().encode()[:PLACE_BYTES], np.uint8))
            elif tag == PLACE:
                self.places[rank] = message.tobytes().decode(errors="replace")
            else:
                self.ended[rank] = message.view(np.int32).tolist()

    def _say_ended(self) -> None:
        """Send waiting ranks how often this rank has begun each way."""
        if self._to_answer and self.lookup:
            self.counts[COMPARED] = self.lookup.begun()
        for rank in self._to_answer:
            self._send(rank, ENDED, np.array(self.counts, np.int32))
        self._to_answer = set()


class AbsentRankMonitor:
    """Thread that names absent ranks of this process's communicators."""

    def __init__(self) -> None:
        """Nothing to look at yet."""
        self.has_ended = False  # the script
        self._rolls: list[WaitRegistry] = []
        self._looks = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmpi absent ranks", daemon=True)

    def add(self, roll: WaitRegistry) -> None:
        """Look at this communicator, too."""
        self._rolls.append(roll)
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, roll: WaitRegistry) -> None:
        """Look at it no more; on return no look is under way."""
        with self._looks:
            if roll in self._rolls:
                self._rolls.remove(roll)

    def stop(self) -> None:
        """End the thread, before MPI ends."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def place(self) -> str:
        """This rank's place in its script, for messages of other ranks."""
        waits = [wait for roll in self._rolls for wait in roll.all_waits() if wait.seconds is not None]
        if waits:
            return f"waits in {waits[0].text()}"
        at = line_of_thread(threading.main_thread().ident)
        return f"{'compiles' if _compiles() else 'is'} at {at}" if at else "runs no line of a script"

    def _run(self) -> None:
        """Look now and then; an error ends the job."""
        while not self._is_over.wait(LOOK_S):
            try:
                with self._looks:
                    for roll in list(self._rolls):
                        roll.look(self.has_ended)
            except (UsageError, TrainingError) as error:
                failures.fail(error, None)


@functools.cache
def watch() -> AbsentRankMonitor:
    """This process's."""
    return AbsentRankMonitor()


def _frames_of(thread: int | None) -> Iterator[Any]:
    """Frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread or 0)
    while frame:
        yield frame
        frame = frame.f_back


def line_of_thread(thread: int | None) -> str:
    """The user's line that a thread runs; empty if there is none."""
    return next(map(line_of, filter(is_users, _frames_of(thread))), "")


def _compiles() -> bool:
    frames = _frames_of(threading.main_thread().ident)
    return any(module_of(frame) == "jax._src.compiler" for frame in frames)


DIFFERS = "jaxmpi: a rank has come to another exchange"
_comparisons: list["CallComparison"] = []  # of communicators that were not freed
_indices = [-1]  # numbers of comparisons; a communicator's is the same on all its ranks


class CallComparison:
    """Comparison of the exchanges that a communicator's ranks have come to."""

    def __init__(self, comm: Any) -> None:
        """All ranks come here together."""
        self._comm = comm
        is_world = comm.processes.numbers == tuple(range(launched_workers()))
        self._of = "the job" if is_world else f"a communicator of {comm.size} ranks"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._others = comm.processes.roll.comm  # whose thread has other tags
        reasons, used = zip(*comm.processes.allgather_object([_why_python(), _indices[-1]]), strict=True)
        _indices.append(max(used) + 1)
        self._calls = (
            PythonCalls(comm, self._others, f"{DIFFERS} {_indices[-1]}", self.refuse)
            if any(reasons)
            else CompiledCalls(comm, self._others, _indices[-1], self.differs, self.failed)
        )
        first = next((rank for rank, reason in enumerate(reasons) if reason.startswith(c_handlers.TROUBLE)), None)
        if first == comm.rank:
            c_handlers.say_once("compare and call MPI", reasons[comm.rank])
        self._mpis: list[Any] = []  # communicators whose errors it names
        self.name_errors_of(comm.mpi)
        comm.processes.roll.lookup = self
        _comparisons.append(self)
        _wait_at_exit()

    def close(self) -> None:
        """Let go of what programs call."""
        self._calls.close()
        _comparisons.remove(self)

    def name_errors_of(self, mpi: Any) -> None:
        """Have a communicator's errors name ranks at other exchanges."""
        self._mpis.append(mpi)
        mpi.Set_errhandler(_error_handler())

    def number(self, what: str) -> int:
        """Return the next traced exchange's number."""
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._of} ({what})"
        return number

    def text(self, number: int) -> str:
        """Describe an exchange, which this rank may not have traced yet."""
        number %= 1 << TURN_BIT
        return self._texts.get(number, f"exchange {number} of {self._of}")

    def share_slots(self) -> None:
        """Have operations go through shared memory, if they can.

        All ranks come here together.
        """
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
        if not isinstance(self._calls, CompiledCalls):
            return None
        return NumberedCalls(self._calls, number)

    # ------------------------------------------------------------ for the thread that names absent ranks

    def held(self) -> CallId | None:
        number, count = self._calls.held()
        return CallId(number, count) if number else None

    def waits(self) -> int:
        return self._calls.waits()

    def begun(self) -> int:
        return self._calls.begun()

    # ------------------------------------------------------------ ranks that differ

    def refuse(self, mine: int, theirs: Mapping[int, int]) -> NoReturn:
        """Raise `UsageError` with these ranks' exchanges, by rank in the job."""
        numbers = self._comm.processes.numbers
        calls = {self._comm.rank: mine, **theirs}
        texts = {numbers[rank]: self.text(number) for rank, number in calls.items()}
        if len(set(texts.values())) > 1 or not isinstance(self._calls, CompiledCalls):
            raise UsageError(different_calls(texts))
        own, half = self._calls.turn(mine % (1 << TURN_BIT)), MOST_TURNS // 2
        turns = {
            numbers[rank]: own + ((number >> TURN_BIT) - (mine >> TURN_BIT) + half) % MOST_TURNS - half
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

    def failed(self, mine: int, code: int) -> None:
        """End the job with MPI's error."""
        from mpi4py import MPI

        failures.fail(TrainingError(f"{self.text(mine)}: MPI: {MPI.Get_error_string(code)}"), None)

    def name_error(self, code: int) -> None:
        """End the job if MPI's error is that exchanges differ.

        It is called as MPI's error handler, before mpi4jax ends the job.
        """
        from mpi4py import MPI

        kinds = MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS  # errors of one message, or of one among several
        if MPI.Get_error_class(code) not in kinds or not (held := self.held()):
            return
        others = set(range(self._comm.size)) - {self._comm.rank}
        theirs = {rank: number for rank in others if (number := self._number_of(rank, held.count))}
        if set(theirs.values()) - {held.number}:
            self.differs(held.number, theirs)
        if MPI.Get_error_class(code) != MPI.ERR_TRUNCATE:
            return
        error = UsageError(
            f"{self.text(held.number)} got a longer message than it expects, so another rank has come to another "
            "exchange; all must make the same calls in the same order"
        )
        failures.fail(error, None)

    def _number_of(self, rank: int, count: int) -> int:
        """Number that a rank has sent, which nobody will receive, or 0."""
        if isinstance(self._calls, CompiledCalls) and (published := self._calls.number_of(rank, count)) is not None:
            return published
        theirs = np.zeros(1, np.int32)
        if any(self._others.Iprobe(rank, 0) for _ in range(PROBES)):
            self._others.Recv(theirs, rank, 0)
        return int(theirs[0])


class PythonCalls:
    """Turn and comparison by functions in Python that programs call."""

    def __init__(self, comm: Any, others: Any, name: str, differs: Any) -> None:
        """Nobody has the turn."""
        self._comm, self._others, self._differs = comm, others, differs
        self._ranks = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
        self._turn, self._held, self._waits = threading.Condition(), (0, 0), 0
        self._ticket = self._served = 0  # the next one for the turn, and the one that has the turn
        self._names = f"{name}, begun", f"{name}, ended"
        for name, function in zip(self._names, (self._begin, self._end), strict=True):
            host_callbacks.register(name, function, ends_job=True)
        self._begun = 0

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

    def begun(self) -> int:
        """How many calls have begun."""
        return self._begun

    def _begin(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        with self._turn:
            mine, self._ticket = self._ticket, self._ticket + 1
            while self._served != mine:
                self._waits = number
                self._turn.wait()
            self._waits, self._begun = 0, (self._begun + 1) % (1 << 31)  # which other ranks hear of as i32
            self._held = number, self._begun
        for rank in self._ranks:
            self._others.Send(np.array([number], np.int32), rank)

    def _end(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        theirs = np.zeros((len(self._ranks), 1), np.int32)
        for message, rank in zip(theirs, self._ranks, strict=True):
            self._others.Recv(message, rank, 0)
        if (theirs != number).any():
            self._differs(number, dict(zip(self._ranks, theirs[:, 0].tolist(), strict=True)))
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
            if mpi in comparison._mpis:
                comparison.name_error(code)

    return MPI.Comm.Create_errhandler(name_error)


@functools.cache
def _wait_at_exit() -> None:
    call_before_finalize(_let_programs_end)


def _let_programs_end() -> None:
    """Wait at exit for programs that exchange; `exchange_watch` limits the time."""
    with contextlib.suppress(Exception):  # errors of a program: mpi4jax's hook raises them again
        jax.effects_barrier()


def comparison_of(comm: Any) -> CallComparison:
    """This Comm's comparison; all ranks call it together the first time."""
    return comm.cached("comparison", lambda: CallComparison(comm))
