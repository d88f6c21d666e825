"""Decisions of all ranks together: leave, stop, skip or roll back.

A signal to leave or a NaN may reach one rank alone. If that rank acted on it, the others would block in the next
exchange. So ranks vote once a step, by the maximum of two integers: whether a rank is to leave, or else what rank 0
says is due by the clock; and the first worker and leaf that are not finite. The allreduce is nonblocking and completes
while the next step runs. So a decision comes one step late and no device waits for it. `Recovery` turns a failure into
a skipped step, a rollback or the end. It ends the run after too many of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import AgreedError, NotFinite
from jaxmpi.recover.signals import PreemptionNotice
from jaxmpi.runtime import failures

LEAVE = 1 << 16  # above the bits of what is due by the clock: a run that leaves saves anyway
LOSS = 0  # in a ballot: not a leaf of the gradients but the loss; leaf i is i + 1


class RollBack(Exception):
    """Go back to the newest checkpoint; `step` failed (0: no step did)."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


class Preempted(Exception):
    """The run has saved itself on request and can be resumed."""

    code = failures.PREEMPTED  # that a process ends with


class Interrupted(Preempted):
    """`Preempted`, by Ctrl-C."""

    code = failures.INTERRUPTED


# ---------------------------------------------------------------- votes


class NonFiniteStep(NamedTuple):
    """A step that is not finite, as all ranks know it."""

    step: int
    rank: int  # the lowest that has it
    quantity: str  # loss, or the path of a gradient

    def __str__(self) -> str:
        return f"the {self.quantity} of worker {self.rank} is not finite at step {self.step}"


class StepConsensus:
    """One vote a step, counted while the device runs the next step.

    Communicates: the largest of two integers over all ranks, once a step.
    """

    def __init__(
        self,
        processes: Processes,
        notice: PreemptionNotice,
        leaves: list[str],
        due_actions: Callable[[], int] = lambda: 0,
    ) -> None:
        """Take a notice to leave, and what rank 0 has due by the clock.

        Args:
            leaves: the paths of the params.
            due_actions: gives bits below LEAVE; only one rank may give any, since the vote takes the largest number.
        """
        self._processes, self._notice, self._leaves, self._due_actions = processes, notice, leaves, due_actions
        self._open: tuple[int, Callable[[], np.ndarray]] | None = None
        self.leaving = False  # the same on all ranks
        self._timed = 0

    def take_timed(self) -> int:
        """Bits that rank 0 has had due since the last call, the same on all ranks."""
        timed, self._timed = self._timed, 0
        return timed

    def cast(self, step: int, bad: int | None, worker: int, applied: bool) -> NonFiniteStep | None:
        """Vote on a step; what came of the vote before.

        Args:
            bad: what of this process is not finite: LOSS, a leaf + 1, or None.
            worker: of which of its workers.
            applied: whether the update was made.
        """
        before = self.count()
        # One maximum tells all ranks which worker and leaf: 0 if all is well, 1 if only the sum of all gradients is not
        # finite, else the larger the lower the worker and the leaf. It stays below 2^63 with 2^30 workers.
        ballot = 0 if bad is None else (1 << 62) - (worker << 32) - bad
        if bad is None and not applied:
            ballot = 1
        request = LEAVE if self._notice.is_given else self._due_actions()
        self._open = step, self._processes.iallreduce_max(np.array([request, ballot]))
        return before

    def count(self) -> NonFiniteStep | None:
        """Result of the open vote, if there is one."""
        if self._open is None:
            return None
        (step, result), self._open = self._open, None
        request, ballot = result().tolist()
        self.leaving = self.leaving or request == LEAVE
        self._timed |= request % LEAVE
        if ballot == 0:
            return None
        if ballot == 1:
            return NonFiniteStep(step, 0, "sum of all gradients")
        worker, bad = divmod((1 << 62) - ballot, 1 << 32)
        return NonFiniteStep(step, worker, "loss" if bad == LOSS else f"gradient of {self._leaves[bad - 1]}")


class Recovery:
    """Consequence of failures, the same on all ranks; counted over a run."""

    def __init__(self, policy: str, limit: int) -> None:
        """Take a policy of config.RECOVERIES, and how often it may be used."""
        self.policy, self.limit = policy, limit
        self.count = 0
        self.failed: set[int] = set()  # steps that failed once
        self.left_out: set[int] = set()  # steps that failed twice

    def decide(self, failure: NonFiniteStep, tail: str) -> str:
        """A line that says what is done about a failed step.

        Args:
            tail: of the error, with what the user can do.
        """
        self._spend(NotFinite, f"{failure}; {tail}")
        if self.policy == "skip":
            return f"{failure}: skipped"
        (self.left_out if failure.step in self.failed else self.failed).add(failure.step)
        raise RollBack(failure.step, str(failure))

    def decide_on_difference(self, text: str) -> None:
        """Stop or go back after workers' params differ."""
        if self.policy != "rollback":
            raise AgreedError(text)
        self._spend(AgreedError, text)
        raise RollBack(0, text)

    def _spend(self, error: type[AgreedError], text: str) -> None:
        if self.policy == "stop":
            raise error(text)
        self.count += 1
        if self.count > self.limit:
            raise error(f"{text}. This is number {self.count}, recover_limit is {self.limit}")


# ---------------------------------------------------------------- in a run


def not_finite(loss: float, finite: np.ndarray) -> int | None:
    """First non-finite part of a worker's step, for `cast`; else None."""
    if not np.isfinite(loss):
        return LOSS
    return None if finite.all() else int(np.argmin(finite)) + 1


def check_budget(skipped: int, examples: int, epochs_begun: int, share: float) -> None:
    """Stop if more of the data is skipped than `data.max_skipped` allows."""
    allowed = share * examples * epochs_begun
    if skipped > allowed:
        raise AgreedError(
            f"{skipped} corrupt examples were skipped, data.max_skipped allows {allowed:.0f} by now ({share:g} of "
            f"{examples} examples an epoch); mend the data, or allow more"
        )
