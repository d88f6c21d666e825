"""Who waits for whom, and who is late: ranks at different calls are named within a limit.

A thread of each rank looks at this rank's waits twice a second. A wait that it finds a second time is sent to the ranks
that should wait with it, so each knows who does, and the others are absent. If these do not come, a line names them
with the places that they are at in their scripts. Programs wait in MPI without a limit, so the thread keeps theirs.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.comm.agreement import fresh_number
from jaxmpi.comm.polling import PROBES, WaitClock
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.frames import is_users, line_of, module_of
from jaxmpi.runtime import failures
from jaxmpi.runtime.process import my_rank

# ---------------------------------------------------------------- waits

# Ways in which a rank waits. In COMPARED (an exchange in a program), CONTROL (outside programs) and BESIDE (while one
# runs) all ranks make the same calls in the same order. PARTNER is a message.
COMPARED, CONTROL, BESIDE, PARTNER = range(4)
EXCHANGE_TIMEOUT = "JAXMPI_EXCHANGE_TIMEOUT_S"


class CallId(NamedTuple):
    """Numbers by which ranks know a call that they make together."""

    number: int  # of an exchange in programs, else 0
    count: int  # how many of its way this process has begun


@dataclass(eq=False, kw_only=True, slots=True)
class Wait:
    """A wait of this rank for others, as long as it lasts."""

    way: int
    call: CallId  # zeros for a message, of which no call is known to be the other half
    what: str
    partners: tuple[int, ...]  # numbers in the job of the ranks that it waits for
    limit_s: float = TIMEOUT_S
    is_in_program: bool = False  # then the monitor keeps the limit, since MPI has none
    thread: int | None = None  # the Python thread that waits
    clock: WaitClock | None = None  # since the monitor has found it first
    is_sent: bool = False
    are_asked: bool = False  # whether absent ranks were asked where they are
    is_printed: bool = False

    def text(self) -> str:
        """Describe the wait, with the user's line if a Python thread waits."""
        at = line_of_thread(self.thread) if self.thread else ""
        return f"{self.what}, {at}" if at and at.partition(" in ")[0] not in self.what else self.what

    def expected(self) -> str:
        """What the others must do."""
        return "the other rank must call its part" if self.way == PARTNER else "all ranks must call it as often"


def message_lost(description: str, where: str) -> TrainingError:
    """The error of a message not exchanged in time, with ranks' places."""
    return TrainingError(
        f"{description} has waited {TIMEOUT_S:.0f} s; no message has come or gone: the other rank must call its part "
        f"({EXCHANGE_TIMEOUT} sets the time){where}"
    )


class WaitRegistry:
    """Waits between a communicator's ranks, as this rank knows them; all ranks make it together.

    Args:
        numbers: of its ranks in the job.
        may_watch: MPI may be called concurrently with a program that exchanges; else waits are noted and nobody looks.
    """

    def __init__(self, comm: Any, numbers: Sequence[int], may_watch: bool) -> None:
        # Its name in messages, the same on all its ranks, and no other registry of any of them has it.
        self.number = fresh_number("waits", comm.allgather)
        self.numbers, self.may_watch = tuple(numbers), may_watch
        self.others = tuple(number for number in self.numbers if number != self.numbers[comm.rank])
        self.comparison: Any = None  # the communicator's `CallComparison`, once it is made
        # Messages that programs wait for now, by a key of this call of the program, and no other.
        self.messages: Callable[[], dict[int, Wait]] = dict
        self._counts: Counter[int] = Counter()  # calls begun, by way
        self._waits: set[Wait] = set()  # of Python threads
        self._program_waits: dict[Any, Wait] = {}  # by an exchange's `CallId` or a message's key
        if may_watch:
            watch().add(self)

    @contextmanager
    def waiting(self, kind: int, description: str, limit_s: float = TIMEOUT_S) -> Iterator[None]:
        """Note that this rank waits for all others until the block ends.

        Args:
            kind: CONTROL or BESIDE.
            limit_s: after which the caller gives up.
        """
        self._counts[kind] += 1
        thread = threading.get_ident() if kind == CONTROL else None
        call = CallId(0, self._counts[kind])
        wait = Wait(way=kind, call=call, what=description, limit_s=limit_s, partners=self.others, thread=thread)
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def all_waits(self) -> list[Wait]:
        """All waits of this process, programs' as of the last look."""
        return [*self._waits, *self._program_waits.values()]

    def find_program_waits(self) -> None:
        """Update the waits of this process's programs; one that lasts stays the same object."""
        waits: dict[Any, Wait] = {}
        if call := self.comparison.current() if self.comparison else None:
            text = self.comparison.text(call.number)
            waits[call] = Wait(way=COMPARED, call=call, what=text, partners=self.others, is_in_program=True)
        waits |= self.messages()
        self._program_waits = {key: self._program_waits.get(key, wait) for key, wait in waits.items()}


# ---------------------------------------------------------------- the thread that looks at them

WAITS, PLACE = TAGS = 1, 2  # tags of messages between monitors
LOOK_S = 0.5  # between looks of the monitor
SAID_AFTER_S = 20.0  # until ranks that are absent are asked where they are
ANSWER_S = 2.5  # for them to answer, before the wait is printed
PLACE_BYTES = 256  # bytes of a rank's answer at most
NAMED = 8  # absent ranks whose names and places are printed


class WaitMonitor:
    """Thread that looks at the waits of this process, and tells the job's other ranks of them.

    It knows ranks by their numbers in the job, and calls by their registry's number, way and count, so all
    communicators share its own.
    """

    def __init__(self) -> None:
        self.has_ended = False  # the script
        self.hosts: dict[int, str] = {}  # ` on HOST` by rank, once they are known
        self._registries: list[WaitRegistry] = []
        self._calls: dict[tuple[int, int, int], CallId] = {}  # by registry, way and rank: where it last said it waits
        self._places: dict[int, str] = {}  # by rank, where it said that it is
        self._ended: set[int] = set()  # ranks whose scripts have ended
        self._to_tell: set[int] = set()  # ranks that wait, and hear if this one's script ends
        self._requests: list[tuple[Any, np.ndarray]] = []  # requests, and what they send
        self._looks = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmpi absent ranks", daemon=True)

    def start(self, comm: Any) -> None:
        """Start the thread, which has this communicator of the job's ranks for itself."""
        self._comm = comm
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before MPI ends."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def add(self, registry: WaitRegistry) -> None:
        """Look at this communicator, too."""
        self._registries.append(registry)

    def remove(self, registry: WaitRegistry) -> None:
        """Look at it no more; on return no look is under way."""
        with self._looks:
            if registry in self._registries:
                self._registries.remove(registry)

    def place(self) -> str:
        """This rank's place in its script, for messages of other ranks."""
        waits = [wait for registry in self._registries for wait in registry.all_waits() if wait.clock is not None]
        if waits:
            return f"waits in {waits[0].text()}"
        main = threading.main_thread().ident
        compiles = any(module_of(frame) == "jax._src.compiler" for frame in _frames_of(main))
        at = line_of_thread(main)
        return f"{'compiles' if compiles else 'is'} at {at}" if at else "runs no line of a script"

    def names(self, numbers: Sequence[int]) -> str:
        """Name ranks with their hosts."""
        named = [f"rank {rank}{self.hosts.get(rank, '')}" for rank in numbers[:NAMED]]
        return ", ".join([*named, *[f"{len(numbers) - NAMED} more"] * (len(numbers) > NAMED)]) or "a rank"

    def where(self, numbers: Sequence[int]) -> str:
        """Say where ranks are, by their numbers in the job; empty if not yet asked."""
        named = [rank for rank in numbers[:NAMED] if rank in self._places]
        return "".join(f"; rank {rank}{self.hosts.get(rank, '')} {self._places[rank]}" for rank in named)

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                with self._looks:
                    self._look()
            except (UsageError, TrainingError) as error:
                failures.fail(error, None)

    def _look(self) -> None:
        """Receive, answer, and judge this rank's waits.

        Raises:
            UsageError: ranks wait in different exchanges.
            TrainingError: a rank that is waited for has ended, or has not come within the time limit.
        """
        self._receive()
        if self.has_ended:
            for rank in self._to_tell:
                self._send(rank, PLACE, np.zeros(0, np.uint8))
            self._to_tell = set()
            return
        for registry in [*self._registries]:
            registry.find_program_waits()
            for wait in registry.all_waits():
                if wait.clock is None:
                    wait.clock = WaitClock()
                else:  # the same in two looks
                    self._judge(registry, wait, wait.clock.look())

    def _receive(self) -> None:
        from mpi4py import MPI

        self._requests = [(request, message) for request, message in self._requests if not request.Test()]
        status, misses = MPI.Status(), 0
        while misses < PROBES:
            probes = (self._comm.Improbe(MPI.ANY_SOURCE, tag, status) for tag in TAGS)
            if (probe := next(filter(None, probes), None)) is None:
                misses += 1
                continue
            message, rank = np.zeros(status.Get_count(), np.uint8), status.Get_source()
            probe.Recv(message)
            if status.Get_tag() == WAITS:
                registry, kind, number, count, asks = message.view(np.int32).tolist()
                self._calls[registry, kind, rank] = CallId(number, count)
                self._to_tell.add(rank)
                if asks:
                    self._send(rank, PLACE, np.frombuffer(self.place().encode()[:PLACE_BYTES], np.uint8))
            elif message.size:
                self._places[rank] = message.tobytes().decode(errors="replace")
            else:
                self._ended.add(rank)

    def _send(self, rank: int, tag: int, message: np.ndarray) -> None:
        self._requests.append((self._comm.Isend(message, rank, tag), message))

    def _tell(self, registry: WaitRegistry, wait: Wait, ranks: Sequence[int], asks: bool) -> None:
        message = np.array([registry.number, wait.way, *wait.call, asks], np.int32).view(np.uint8)
        for rank in ranks:
            self._send(rank, WAITS, message)

    def _judge(self, registry: WaitRegistry, wait: Wait, waited_s: float) -> None:
        """Tell the others of a wait, and print or raise what is wrong with it."""
        if not wait.is_sent:
            self._tell(registry, wait, wait.partners, asks=False)
            wait.is_sent = True
        calls = {rank: self._calls.get((registry.number, wait.way, rank)) for rank in wait.partners}
        if wait.way == COMPARED:
            latest_calls = [calls.get(rank) for rank in registry.numbers]
            theirs = [call.number if call and call.count == wait.call.count else 0 for call in latest_calls]
            if set(theirs) - {0, wait.call.number}:
                raise registry.comparison.refusal(wait.call.number, theirs)
        # Of a message all partners count as absent.
        absent = [rank for rank in wait.partners if wait.way == PARTNER or calls[rank] != wait.call]
        whom, where = f"for rank {', '.join(map(str, absent))}", self.where(absent)
        if absent and self._ended.issuperset(absent):
            raise TrainingError(
                f"rank {my_rank()} waits in {wait.text()} {whom}, whose script has ended; {wait.expected()}"
            )
        if wait.is_in_program and waited_s > wait.limit_s:
            self._refuse_time(registry, wait, f"{waited_s:.0f} s", whom if absent else "", where)
        if not wait.are_asked and waited_s > min(SAID_AFTER_S, wait.limit_s / 2):
            wait.are_asked = True
            self._places |= dict.fromkeys(absent, "does not answer")
            self._tell(registry, wait, absent, asks=True)
        is_for_watchdog = wait.way == CONTROL and failures.job.working  # the trainer's, which says it itself
        if absent and waited_s > SAID_AFTER_S + ANSWER_S and not is_for_watchdog and not wait.is_printed:
            line = f"waits in {wait.text()} {whom}, for {SAID_AFTER_S:g} s now; {wait.expected()}"
            print(f"jaxmpi: {failures.describe_rank()}: {line}{where}", file=sys.stderr, flush=True)
            wait.is_printed = True

    def _refuse_time(self, registry: WaitRegistry, wait: Wait, waited: str, whom: str, where: str) -> None:
        """Raise `TrainingError`: a program has waited for longer than the limit."""
        sets = f"({EXCHANGE_TIMEOUT} sets the time)"
        if wait.way == PARTNER:
            raise message_lost(wait.what, where)
        if whom:
            raise TrainingError(
                f"rank {my_rank()} waited {waited} in {wait.what} {whom}; all ranks must come to it as often "
                f"{sets}{where}"
            )
        if number := registry.comparison.waiting():
            # All ranks may be in it: XLA leaves out the call that ends an exchange if another part of a program fails.
            raise TrainingError(
                f"{registry.comparison.text(number)} waits for {wait.what}, which has begun in this process and not "
                f"ended; if its program has failed, or a callback in it exchanges, it never will {sets}"
            )


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
