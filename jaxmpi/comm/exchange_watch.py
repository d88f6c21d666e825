"""Who is absent from an exchange: a thread of each rank that looks at where its own programs are, and asks the others.

A program leaves a message to its own process while it is in an exchange (see `call_order`). The thread takes that
message, reads it and puts it back. If it finds the same exchange twice it tells the other ranks, so that each knows who
waits with it; those who say nothing within the time limit are absent. Ranks in step never send anything here.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.polling import WaitClock
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures
from jaxmpi.runtime.mpi_end import before_mpi_ends

FREE, WAITS, HELD = range(3)  # tags: nobody has the turn; an exchange waits for it; an exchange has it
LOOK_S = 0.5  # between looks
PROBES = 3  # MPICH fetches a message in the first, and finds it in the next
SAID_AFTER_S = 20.0  # that an exchange waits for other ranks, or for another one of its process
Call = tuple[int, int]  # number of an exchange, and how many this process has begun


class ExchangeWatch:
    """The thread, and what it knows."""

    def __init__(self, processes: MpiProcesses, turn: Any, text: Callable[[int], str]) -> None:
        """Start it; all ranks come here together.

        Args:
            processes: who exchanges.
            turn: communicator of these processes, on which each one's programs leave it messages.
            text: describes an exchange by its number.
        """
        self._rank, self._size, self._turn, self._text = processes.rank, processes.size, turn, text
        self._numbers = processes.numbers  # of the job's ranks, for messages: these may be a part of them
        self._others = processes.clone()
        self._heard: dict[int, Call] = {}  # by rank, where it last said that it waits
        self._sent: list[tuple[Any, np.ndarray]] = []  # requests, and what they send
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmpi absent ranks", daemon=True)
        if processes.may_overlap:  # else MPI may not be called beside a program that exchanges
            self._thread.start()
            before_mpi_ends(self._stop)

    def held(self) -> Call | None:
        """The exchange that this process is in; None if it is in none."""
        return self._peek(HELD)

    def _peek(self, tag: int) -> Call | None:
        """The message under a tag, which stays where it is."""
        for _ in range(PROBES):
            if (found := self._turn.Improbe(self._rank, tag)) is not None:
                message = np.zeros(2, np.int32)
                found.Recv(message)
                self._turn.Send(message, self._rank, tag)
                return int(message[0]), int(message[1])
        return None

    def _stop(self) -> None:
        """End the thread at exit, once programs that still exchange have ended; if they never do, it ends the job."""
        with contextlib.suppress(Exception):  # of a program: mpi4jax's hook raises it again
            jax.effects_barrier()
        self._is_ending.set()
        self._thread.join()

    def _run(self) -> None:
        """Look now and then; an error ends the job."""
        seen, waited, has_told = None, WaitClock(), False
        said: set[str] = set()
        while not self._is_ending.wait(LOOK_S):
            held = self.held()
            self._listen()  # also while this rank waits for nobody, or what others say would pile up
            if held is None or held != seen:
                seen, has_told, said = held, False, set()
                waited.restart()
                continue
            waited_s = waited.look()
            try:
                if not has_told:
                    self._tell(held)
                    has_told = True
                self._check_same(held)
                for late in filter(None, (self._check_absent(held, waited_s), self._check_turn(held, waited_s))):
                    if late not in said:
                        print(f"jaxmpi: {failures.who()}: {late}", file=sys.stderr, flush=True)
                    said.add(late)
            except (UsageError, TrainingError) as error:
                failures.fail(error, None)

    def _tell(self, held: Call) -> None:
        """Let the others know where this rank waits."""
        message = np.array(held, np.int32)
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        for rank in set(range(self._size)) - {self._rank}:
            self._sent.append((self._others.Isend(message, rank), message))

    def _listen(self) -> None:
        """Hear where the others wait."""
        from mpi4py import MPI

        status = MPI.Status()
        while (found := self._others.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            message = np.zeros(2, np.int32)
            found.Recv(message)
            self._heard[status.Get_source()] = int(message[0]), int(message[1])

    def _check_same(self, held: Call) -> None:
        """Raise `UsageError` if another rank waits in another exchange."""
        calls = {self._rank: held, **{rank: call for rank, call in self._heard.items() if call[1] == held[1]}}
        if len(set(calls.values())) > 1:
            named = {self._numbers[rank]: self._text(number) for rank, (number, _) in calls.items()}
            raise UsageError(different_calls(named))

    def _check_absent(self, held: Call, waited_s: float) -> str:
        """Who has not come to this exchange for SAID_AFTER_S, in a sentence; empty if all have.

        Raises:
            TrainingError: they have not come within the time limit.
        """
        others = set(range(self._size)) - {self._rank}
        absent = [self._numbers[rank] for rank in sorted(others) if self._heard.get(rank) != held]
        if absent and waited_s > TIMEOUT_S:
            raise TrainingError(
                f"rank {self._numbers[self._rank]} waited {waited_s:.0f} s in {self._text(held[0])} for rank "
                f"{', '.join(map(str, absent))}; all ranks must come to it as often (JAXMPI_EXCHANGE_TIMEOUT_S sets "
                "the time)"
            )
        if not absent or waited_s < SAID_AFTER_S:
            return ""
        late = ", ".join(map(str, absent))
        return f"waits in {self._text(held[0])} for rank {late}, for {SAID_AFTER_S:g} s now; all ranks must call it"

    def _check_turn(self, held: Call, waited_s: float) -> str:
        """Which exchange of this process waits for this one for SAID_AFTER_S, in a sentence; empty if none does.

        Raises:
            TrainingError: the other exchange has not ended within the time limit.
        """
        if waited_s < SAID_AFTER_S or not (waits := self._peek(WAITS)):
            return ""
        why = (
            f"{self._text(waits[0])} waits for {self._text(held[0])}, which has begun in this process and not ended; "
            "if its program has failed, or a callback in it exchanges, it never will"
        )
        if waited_s > SAID_AFTER_S + TIMEOUT_S:
            raise TrainingError(f"{why} (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)")
        return why
