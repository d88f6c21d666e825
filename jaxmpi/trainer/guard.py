"""The guard of a run: votes on non-finite losses, and the recovery."""

from dataclasses import dataclass

import numpy as np

from jaxmpi.checkpoint.manager import Saver
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe.recorder import Recorder
from jaxmpi.recover.decisions import NonFiniteStep, Recovery, StepConsensus, not_finite
from jaxmpi.recover.replica_check import compare_replicas
from jaxmpi.runtime import failures
from jaxmpi.trainer.build import Functions
from jaxmpi.trainer.step import Metrics


@dataclass
class Guard:
    """Checks of a run's steps and state, and the decision that follows."""

    votes: StepConsensus
    recovery: Recovery
    workers: Workers
    functions: Functions
    saver: Saver
    recorder: Recorder

    def passes(self, step: int, metrics: Metrics | None) -> bool:
        """Vote on a step, even on one that was left out.

        Returns: True if the step was made.

        Raises:
            TrainingError, RollBack: what all ranks agree to do about the step before.
        """
        if metrics is None:
            self._mind(self.votes.cast(step, None, 0, True))
            return False
        losses = local_rows(metrics.loss, self.workers)
        finite = local_rows(metrics.finite, self.workers).reshape(len(losses), -1)
        applied = metrics.applied is None or bool(local_rows(metrics.applied, self.workers).all())
        odd = [(i, bad) for i, bad in enumerate(map(not_finite, losses, finite)) if bad is not None]
        place, bad = odd[0] if odd else (0, None)
        self._mind(self.votes.cast(step, bad, self.workers.mine[place], applied))
        return applied and bool(np.isfinite(losses).all())

    def settle(self) -> None:
        """Count the open vote, and do what is agreed.

        Raises:
            TrainingError, RollBack: as agreed.
        """
        self._mind(self.votes.count())

    def _mind(self, failure: NonFiniteStep | None) -> None:
        if failure is not None:
            failures.set_phase(f"step {failure.step}")
            self.saver.wait()  # so that the last good checkpoint is whole, and the one named
            tail = f"{self.saver.last_good()}. Lower the learning rate, warm up or clip"
            self.recorder.say(self.recovery.of(failure, tail))
            self.recorder.write("skipped", step=failure.step, why=str(failure))

    def compare(self, state: TrainState, step: int) -> None:
        """Compare what is to be equal on all workers by its fingerprints.

        Raises:
            TrainingError, RollBack: a worker's differs.
        """
        rule = self.functions.rule
        kept = {"params": state.params} if rule.params_are_replicated else {}
        kept |= {"rule": state.rule_state} if rule.state_is_replicated else {}
        if self.workers.size == 1 or not kept or not self.functions.exchanges:
            return
        text = compare_replicas(
            kept, self.functions.fingerprints(kept), self.workers.mine, self.workers.processes, step
        )
        if text:
            self.saver.wait()
            self.recovery.of_difference(f"{text}; {self.saver.last_good()}")
