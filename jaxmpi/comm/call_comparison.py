"""Comparison of exchanges between ranks; each process runs one at a time.

Messages between ranks have no names. If ranks run two programs with equal shapes in different orders, each takes one's
numbers for the other's. So an exchange gets a number when ranks trace it, which they do
together. This number travels beside the data, from each rank to the others: sent before the exchange's first message,
received behind its last. Unequal numbers show in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program returns.
- A message is longer than what is expected: MPI reports it to a handler, which reads the others' numbers.
- A rank waits for messages that never come: a thread of each rank looks now and then, and sends the others what it
  waits in.

An operation through shared memory (`compiled_slots.h`) compares before it reads another rank's array. A rank that needs
none, as the root of a short bcast, compares when it next waits for all.

A callback in the program may have an exchange's sum before that: it waits for its operands, not for the comparison.

On CPUs all of it is calls into C (`compiled_calls`): no message to this process itself, and on one host none to others.
A step of few milliseconds bears no call into Python, which waits for the interpreter that dispatches the next step: it
took 1.10 of a step of 4 ms. Nor does it bear a wait before the first message, at which ranks must meet once more (1.07
to 1.15). A sum by messages, which needs all ranks anyway, waits for no number. Without a C compiler, and in a program
for a GPU, Python does the same. It is given no array and so copies none.

From its begin to its end an exchange has the process's turn. Else two programs that two threads have dispatched could
exchange at once, and one's messages meet the other's: JAX orders the programs of one thread only.
"""

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi.comm import c_handlers
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.compiled_calls import MOST_COMPARISONS, MOST_TURNS, SOURCE, TURN_BIT, CompiledCalls, NumberedCalls
from jaxmpi.comm.exchange_watch import PROBES, CallId
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.comm.polling import survives_losses
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.mpi_end import call_before_finalize

DIFFERS = "jaxmpi: a rank has come to another exchange"
_comparisons: list["CallComparison"] = []  # of communicators that were not freed
_indices = [-1]  # numbers of comparisons; a communicator's is the same on all its ranks


class CallComparison:
    """Comparison of the exchanges that a communicator's ranks have come to."""

    def __init__(self, comm: MpiComm) -> None:
        """All ranks come here together."""
        self._comm, self._of = comm, "the job" if comm is world() else f"a communicator of {comm.size} ranks"
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

    def __init__(self, comm: MpiComm, others: Any, name: str, differs: Any) -> None:
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


def comparison_of(comm: MpiComm) -> CallComparison:
    """This Comm's comparison; all ranks call it together the first time."""
    return comm.cached("comparison", lambda: CallComparison(comm))
