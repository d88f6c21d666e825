"""Comparison of exchanges between ranks; each process runs one at a time.

Messages between ranks have no names: of two programs with equal shapes, run in another order on another rank, each
would take the other's numbers for its own. So an exchange gets a number when ranks trace it, which they do together,
and this number travels beside the data, from each rank to the others: sent before the exchange's first message,
received behind its last. Unequal numbers show in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program returns.
- A message is longer than what is expected: MPI reports it to a handler, which reads the others' numbers.
- A rank waits for messages that never come: a thread of each rank looks now and then, and tells the others.

Of more than ALL_BELOW ranks each one hears only those 1, 2, 4, ... before it. Equal numbers are equal then, too; of
unequal ones some ranks hear at once, while others have a wrong result for the seconds in which the job ends.

A callback in the program may have its sum before that: it waits for its operands, not for the comparison.

On CPUs all of it is messages of mpi4jax in the program. A step of few milliseconds bears neither a call into Python,
which waits for the interpreter that dispatches the next step (1.10 of a step of 4 ms), nor a wait before the first
message, at which ranks must meet once more (1.07 to 1.15); this is 0.99 to 1.02. A sum, which needs all ranks anyway,
waits for no number. A bcast's root waits until all have come. A program for a GPU makes the same messages from Python:
there mpi4jax would wait for the device's work and copy at each of them, and Python, given no array, does neither.

From its first to its last message an exchange has the process's turn, which is a message to itself: who receives it has
the turn, and sends it again at the end. Else two programs that two threads have dispatched could exchange at once, and
one's messages meet the other's: JAX orders the programs of one thread only.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.exchange_watch import FREE, HELD, PROBES, WAITS, CallId
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.comm.polling import wait
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.mpi_end import before_mpi_ends

DIFFERS = "jaxmpi: a rank has come to another exchange"
ALL_BELOW = 17  # ranks: of more, each hears those at distances 1, 2, 4, ...
KEPT_S = 2.0  # for a message of 8 bytes to be copied, so that its sender goes on
_numbers = itertools.count()  # of comparisons, the same on all ranks


class CallComparison:
    """Comparison of the exchanges that a communicator's ranks have come to.

    A message is i32[2]: the number of an exchange, and how many this process has begun.
    """

    def __init__(self, comm: MpiComm) -> None:
        """All ranks come here together."""
        from mpi4py import MPI

        self._comm, self._of = comm, "the job" if comm is world() else f"a communicator of {comm.size} ranks"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        # It has more than one process: in one of this process alone MPICH copies no message, so a send would wait.
        self._turn = comm.processes.clone()
        self._held = np.zeros(2, np.int32)  # the number under way, of programs for a GPU
        self.is_possible = self._give_first_turn()
        if not self.is_possible:
            return
        self._others = comm.processes.clone()
        self._distances = distances(comm.size)
        self._name = f"{DIFFERS} {next(_numbers)}"
        host_callbacks.register(self._name, self._differs, ends_job=True)
        self._from_python = f"{self._name}, begun", f"{self._name}, ended"
        for name, function in zip(self._from_python, (self._begin, self._end), strict=True):
            host_callbacks.register(name, function, ends_job=True)
        self._on_mpi_error = MPI.Comm.Create_errhandler(self._mpi_failed)
        comm.mpi.Set_errhandler(self._on_mpi_error)
        comm.processes.roll.lookup = self
        before_mpi_ends(_let_programs_end)

    def _give_first_turn(self) -> bool:
        """Leave this process the turn; False if MPI keeps no message.

        All ranks return the same, also if one of them alone fails. Communicates: a sum over ranks.
        """
        message, me = np.zeros(2, np.int32), self._comm.rank
        request = self._turn.Isend(message, me, FREE)
        is_kept = wait(request.Test, KEPT_S)
        if self._comm.processes.allreduce_sum(np.array([is_kept]))[0] == self._comm.size:
            return True
        self._turn.Recv(message, me, FREE)
        request.Wait()
        if me == 0:
            print(
                "jaxmpi: exchanges in programs are not compared between ranks: this MPI keeps no message that a "
                "process sends to itself; all ranks must make the same calls in the same order",
                file=sys.stderr,
                flush=True,
            )
        return False

    def number(self, what: str) -> int | None:
        """Return the next traced exchange's number; None if nothing can be compared."""
        if not self.is_possible:
            return None
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._of} ({what})"
        return number

    def text(self, number: int) -> str:
        """Describe an exchange, which this rank may not have traced yet."""
        return self._texts.get(number, f"exchange {number} of {self._of}")

    def begin(self, number: int) -> jax.Array | None:
        """Wait for the turn and send the number; return `end`'s `held`.

        These messages need nothing of the data, so they are the first that a program does: of two programs the one that
        was dispatched first has its turn first.
        """
        import mpi4jax

        if host_callbacks.why_copies():
            host_callbacks.call(self._from_python[0], [], [], effect=self._comm.effect, number=number)
            return None
        waits = jnp.array([number, 0], jnp.int32)  # how many exchanges there were before comes with the turn
        free = self._to_self(waits, sendtag=WAITS, recvtag=FREE)
        held = jnp.stack([jnp.int32(number), free[1] + 1])
        self._to_self(held, sendtag=HELD, recvtag=WAITS)
        for distance in self._distances:
            mpi4jax.send(held, (self._comm.rank + distance) % self._comm.size, comm=self._others)
        return held

    def end(self, number: int, held: jax.Array | None) -> None:
        """Compare with the others' numbers, and give the turn away."""
        import mpi4jax

        if held is None:
            host_callbacks.call(self._from_python[1], [], [], effect=self._comm.effect, number=number)
            return
        theirs = jnp.stack([mpi4jax.recv(held, rank, comm=self._others)[0] for rank in self._heard()])

        def differs() -> None:
            host_callbacks.call(self._name, [theirs], [], effect=self._comm.effect, number=number)

        lax.cond((theirs == number).all(), lambda: None, differs)
        self._to_self(held, sendtag=FREE, recvtag=HELD)

    def peek(self, tag: int) -> CallId | None:
        """This process's message to itself under a tag, which stays there."""
        for _ in range(PROBES):
            if (found := self._turn.Improbe(self._comm.rank, tag)) is not None:
                message = np.zeros(2, np.int32)
                found.Recv(message)
                self._turn.Send(message, self._comm.rank, tag)
                return CallId(int(message[0]), int(message[1]))
        return None

    def _to_self(self, message: jax.Array, sendtag: int, recvtag: int) -> jax.Array:
        import mpi4jax

        me, tags = self._comm.rank, {"sendtag": sendtag, "recvtag": recvtag}
        return mpi4jax.sendrecv(message, message, source=me, dest=me, comm=self._turn, **tags)

    def _heard(self) -> list[int]:
        """The ranks whose numbers come to this one."""
        return [(self._comm.rank - distance) % self._comm.size for distance in self._distances]

    def _begin(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler for `begin`."""
        _, before = self._swapped(np.array([number, 0], np.int32), sendtag=WAITS, recvtag=FREE)
        held = np.array([number, before + 1], np.int32)
        self._swapped(held, sendtag=HELD, recvtag=WAITS)
        for distance in self._distances:
            self._others.Send(held, (self._comm.rank + distance) % self._comm.size)
        self._held = held

    def _end(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler for `end`."""
        theirs = np.zeros((len(self._distances), 2), np.int32)
        for message, rank in zip(theirs, self._heard(), strict=True):
            self._others.Recv(message, rank)
        if (theirs[:, 0] != number).any():
            self._differs([theirs[:, 0]], results, number)
        self._swapped(self._held, sendtag=FREE, recvtag=HELD)

    def _swapped(self, message: np.ndarray, sendtag: int, recvtag: int) -> np.ndarray:
        """Send this process a message and receive the one of another tag."""
        taken, me = np.zeros(2, np.int32), self._comm.rank
        self._turn.Sendrecv(message, me, sendtag, taken, me, recvtag)
        return taken

    def _differs(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler that programs call after an exchange if another rank's differs."""
        self._refuse(number, dict(zip(self._heard(), operands[0].tolist(), strict=True)))

    def _refuse(self, mine: int, theirs: Mapping[int, int]) -> None:
        """Raise `UsageError` with these ranks' exchanges, by rank in the job."""
        numbers = self._comm.processes.numbers
        calls = {self._comm.rank: mine, **theirs}
        raise UsageError(different_calls({numbers[rank]: self.text(number) for rank, number in calls.items()}))

    def _mpi_failed(self, comm: Any, code: int) -> None:
        """Handler of MPI's errors in an exchange, before mpi4jax ends the job."""
        from mpi4py import MPI

        if MPI.Get_error_class(code) != MPI.ERR_TRUNCATE or not (held := self.peek(HELD)):
            return
        theirs = {rank: number for rank in self._heard() if (number := self._number_of(rank))}
        try:
            if set(theirs.values()) - {held[0]}:
                self._refuse(held[0], theirs)
            raise UsageError(
                f"{self.text(held[0])} got a longer message than it expects, so another rank has come to another "
                "exchange; all must make the same calls in the same order"
            )
        except UsageError as error:
            failures.fail(error, None)

    def _number_of(self, rank: int) -> int:
        """Receive a rank's number, which nobody else will now; 0 if none."""
        theirs = np.zeros(2, np.int32)
        if any(self._others.Iprobe(rank) for _ in range(PROBES)):
            self._others.Recv(theirs, rank)
        return int(theirs[0])


def _let_programs_end() -> None:
    """Wait at exit for programs that exchange; `exchange_watch` limits the time."""
    with contextlib.suppress(Exception):  # of a program: mpi4jax's hook raises it again
        jax.effects_barrier()


def distances(ranks: int) -> list[int]:
    """How far before this rank those are whose numbers it hears."""
    return [*range(1, ranks)] if ranks < ALL_BELOW else [1 << i for i in range((ranks - 1).bit_length())]


@functools.cache
def comparison_of(comm: MpiComm) -> CallComparison:
    """This Comm's comparison; all ranks call it together the first time."""
    return CallComparison(comm)
