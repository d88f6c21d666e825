"""Comparison of the exchange that each rank has come to, and one exchange at a time in each process.

Messages between ranks have no names: of two programs with equal shapes, run in another order on another rank, each
would take the other's numbers for its own. So an exchange gets a number when ranks trace it, which they do together,
and this number travels beside the data, from each rank to the next one: sent before the exchange's first message,
received behind its last. All are equal if each equals its neighbour's. What is unequal shows in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before the program of a rank
  behind an unequal one has a result. Others of more than two ranks may have theirs, and wait in the next exchange.
- A message is longer than what is expected: MPI reports it to a handler, which reads the neighbour's number.
- A rank waits for messages that never come: a thread of each rank looks now and then, and tells the others.

All of it is messages of mpi4jax in the program, with no Python, and nobody waits for a number. Both matter for a step
of few milliseconds. A call into Python waits for the interpreter, which dispatches the next step (1.10 of a step of
4 ms); a wait before the first message is one more point at which ranks must meet (1.07 to 1.15); this is 1.00.

From its first to its last message an exchange has the process's turn, which is a message to itself: who receives it has
the turn, and sends it again at the end. Else two programs that two threads have dispatched could exchange at once, and
one's messages meet the other's: JAX orders the programs of one thread only.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.exchange_watch import FREE, HELD, WAITS, ExchangeWatch
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.comm.polling import wait
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures, host_callbacks

DIFFERS = "jaxmpi: a rank has come to another exchange"
KEPT_S = 2.0  # for a message of 8 bytes to be copied, so that its sender goes on
_numbers = itertools.count()  # of comparisons, the same on all ranks


class CallComparison:
    """How the ranks of a job compare which exchange they have come to.

    A message is i32[2]: the number of an exchange, and how many this process has begun.
    """

    def __init__(self, comm: MpiComm) -> None:
        """All ranks come here together."""
        from mpi4py import MPI

        self._comm, self._of = comm, "the job" if comm is world() else f"a communicator of {comm.size} ranks"
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        # Of more than one process: in one of its own MPICH copies no message, so a send would wait for its receiver.
        self._turn = comm.processes.clone()
        self.is_possible = self._give_first_turn()
        if not self.is_possible:
            return
        self._ring = comm.processes.clone()
        self._before, self._next = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self._name = f"{DIFFERS} {next(_numbers)}"
        host_callbacks.register(self._name, self._differs, ends_job=True)
        self._on_mpi_error = MPI.Comm.Create_errhandler(self._mpi_failed)
        comm.mpi.Set_errhandler(self._on_mpi_error)
        self._watch = ExchangeWatch(comm.processes, self._turn, self.text)

    def _give_first_turn(self) -> bool:
        """Leave the message that is the turn; False, on all ranks alike, if MPI keeps none for a process itself."""
        message, me = np.zeros(2, np.int32), self._comm.rank
        request = self._turn.Isend(message, me, FREE)
        is_kept = wait(request, KEPT_S)
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
        """Return the number of the next exchange that is traced; None if nothing can be compared."""
        if not self.is_possible:
            return None
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of {self._of} ({what})"
        return number

    def text(self, number: int) -> str:
        """Describe an exchange; this rank may still be tracing what another runs already."""
        return self._texts.get(number, f"exchange {number} of {self._of}")

    def begin(self, number: int) -> jax.Array:
        """Wait for this process's turn and send the number on; what `end` needs.

        These messages need nothing of the data, so they are the first that a program does: of two programs the one that
        was dispatched first has its turn first.
        """
        import mpi4jax

        waits = jnp.array([number, 0], jnp.int32)  # how many exchanges there were before comes with the turn
        free = self._to_self(waits, sendtag=WAITS, recvtag=FREE)
        held = jnp.stack([jnp.int32(number), free[1] + 1])
        self._to_self(held, sendtag=HELD, recvtag=WAITS)
        mpi4jax.send(held, self._next, comm=self._ring)
        return held

    def end(self, number: int, held: jax.Array) -> None:
        """Compare with the number of the rank before, and give the turn away."""
        import mpi4jax

        theirs = mpi4jax.recv(held, self._before, comm=self._ring)

        def differs() -> None:
            host_callbacks.call(self._name, [theirs], [], effect=self._comm.effect, number=number)

        lax.cond(theirs[0] == number, lambda: None, differs)
        self._to_self(held, sendtag=FREE, recvtag=HELD)

    def _to_self(self, message: jax.Array, sendtag: int, recvtag: int) -> jax.Array:
        import mpi4jax

        me, tags = self._comm.rank, {"sendtag": sendtag, "recvtag": recvtag}
        return mpi4jax.sendrecv(message, message, source=me, dest=me, comm=self._turn, **tags)

    def _differs(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler that programs call behind an exchange if the rank before has come to another one."""
        self._refuse(number, int(operands[0][0]))

    def _refuse(self, mine: int, theirs: int) -> None:
        numbers = self._comm.processes.numbers
        calls = {numbers[self._comm.rank]: self.text(mine), numbers[self._before]: self.text(theirs)}
        raise UsageError(different_calls(calls))

    def _mpi_failed(self, comm: Any, code: int) -> None:
        """Handler that MPI calls in an exchange; after it mpi4jax ends the job, with a message of its own."""
        from mpi4py import MPI

        if MPI.Get_error_class(code) != MPI.ERR_TRUNCATE or not (held := self._watch.held()):
            return
        theirs = np.zeros(2, np.int32)
        is_sent = self._ring.Iprobe(self._before)  # a message longer than expected may be another rank's
        if is_sent:
            self._ring.Recv(theirs, self._before)
        try:
            if is_sent and theirs[0] != held[0]:
                self._refuse(held[0], int(theirs[0]))
            raise UsageError(
                f"{self.text(held[0])} got a longer message than it expects, so another rank has come to another "
                "exchange; all must make the same calls in the same order"
            )
        except UsageError as error:
            failures.fail(error, None)


@functools.cache
def comparison_of(comm: MpiComm) -> CallComparison:
    """This Comm's; all ranks come here together for the first time, as they trace."""
    return CallComparison(comm)
