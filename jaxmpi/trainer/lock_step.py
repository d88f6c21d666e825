"""Workers in lock step: exchanges inside steps, metrics read one step later.

Every rank votes on every step. The vote is counted while the next step runs, so neither the device nor the loop waits
for it. With `--on-rank-loss shrink` the vote comes before the next step, while the state before it is still there.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Iterator

import jax
import numpy as np

from jaxmpi.comm.topology import to_device
from jaxmpi.core.errors import AgreedError
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.recover import decisions
from jaxmpi.runtime import progress
from jaxmpi.trainer.evaluate import distance, evaluate, rate_factor, score
from jaxmpi.trainer.loop import Position, RunProgress
from jaxmpi.trainer.memory import (
    WorkerMemory,
    allocated,
    describe_step,
    make_room,
    with_program,
    workers_here,
)
from jaxmpi.trainer.progress import SUMS
from jaxmpi.trainer.resume import note_saved, save
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents


class LockStep:
    """The coordinator of synchronous rules."""

    is_asynchronous = False

    def __init__(self, run: Run, sums: np.ndarray | None = None) -> None:
        """Collective: all ranks make one together.

        Args:
            sums: f64[SUMS], of this process's workers since the last progress line; None: zeros.
        """
        self.run = run
        self.timer = StepTimer(run.workers.size, to_device(run.workers))
        self.sums = np.zeros(SUMS) if sums is None else sums
        self.result: dict[str, float] = {}  # figures of the last evaluation
        self.is_stopped = False  # by a callback
        self._pending: list[tuple[int, Metrics | None]] = []  # dispatched, not yet read
        self._evaluated = -1  # the step of it
        self._held = None if run.is_measured else run.held

    def begin(self, position: Position) -> TrainState:
        """Hold the state, compare it over workers, and start the clock."""
        run, self.start = self.run, position.step
        if run.shrinking:
            run.shrinking.keep(position.step, position.state, self.sums, is_settled=not any(position.overdue))
        with progress.phase("comparing the params of all workers"):
            self.compare(position.step, position.state)  # programs of the comparison are compiled here, once
        run.recorder.start_window(run.plan.examples(position.step))
        return position.state

    def batches(self) -> Generator[Batch, None, None]:
        """To the last step of the run."""
        memory = self.run.plan.feed.memory
        if memory and memory.load():
            self.run.log.loaded(memory, self.start)
        return self.run.plan.feed.batches(self.start, self.run.plan.clock.total_steps)

    def update(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics | None]:
        """One step, or only its number if it has failed twice."""
        run = self.run
        run.saver.poll()
        note_saved(run)
        if step in run.guard.recovery.left_out:
            return state._replace(step=state.step + 1), None
        if self._held:
            self._measure(self._held, state, batch)
        state, metrics = run.functions.train_step(state, batch)
        return state, metrics

    def _measure(self, held: WorkerMemory, state: TrainState, batch: Batch) -> None:
        """Log the first step's memory, and refuse more than is free."""
        run, self._held = self.run, None
        batch_bytes = size_bytes(batch) // (run.workers.size if run.workers.mesh else 1)
        held = with_program(held, run.functions.ahead.compiled(state, batch), batch_bytes)
        self.run = dataclasses.replace(run, held=held, is_measured=True)
        here = workers_here(run.workers)
        free_bytes = available_bytes() + allocated(held, here)
        run.recorder.say(describe_step(held, here, free_bytes))
        make_room(held, run, free_bytes)

    def after_step(self, step: int, state: TrainState, metrics: Metrics | None) -> tuple[TrainState, RunProgress]:
        """Read metrics of the step before, or all if events are due."""
        run, leaving = self.run, self.run.guard.votes.leaving
        due = run.plan.timetable.between(step - 1, step, is_first=step == self.start + 1, leaving=leaving)
        if run.shrinking:
            run.shrinking.keep(step, state, self.sums)
        self._pending.append((step, metrics))
        # One step late, so that the device never waits for the log.
        while len(self._pending) > (0 if due.log or due.compare or run.shrinking else 1):
            with none_under_way(state):
                self.sums = self.sums + self._read(*self._pending.pop(0))
        return state, RunProgress(step, due)

    def _read(self, step: int, metrics: Metrics | None) -> np.ndarray:
        """Vote on a step; return its f64[SUMS], zeros if not made.

        Raises:
            TrainingError, decisions.RollBack: what all ranks agree to do about the step before.
        """
        is_made = self.run.guard.passes(step, metrics)
        return self.run.log.sums(step, metrics) if is_made and metrics is not None else np.zeros(SUMS)

    def pause(self, state: TrainState) -> None:
        """Wait for the device, and for the vote on the last step."""
        jax.block_until_ready(state)
        self.timer.pause()
        self.run.guard.settle()

    def compare(self, step: int, state: TrainState) -> None:
        """Fingerprints of replicated state."""
        self.run.guard.compare(state, step)

    def log(self, step: int, state: TrainState) -> None:
        """Write a line about all workers' steps."""
        run = self.run
        run.log.line(step, self.sums, self.timer.window(), distance(run, state), rate_factor(run, state))
        self.sums = np.zeros(SUMS)

    def evaluate(self, step: int, state: TrainState) -> None:
        (self.result, why), self._evaluated = evaluate(self.run, state, step), step
        if why and step < self.run.plan.clock.total_steps:
            self.is_stopped = True
            self.run.recorder.write("stopped", step=step, why=why)
            self.run.recorder.say(f"stopped at step {step}: {why}")

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """A checkpoint; the saver's thread writes it."""
        run = self.run
        is_last = is_last or step >= run.plan.clock.total_steps
        figure = score(run.experiment, self.result) if self._evaluated == step else None
        save(run, state, step, figure, is_last=is_last)
        if self.run.shrinking:
            self.run.shrinking.is_unsaved = False

    def leave(self, step: int, state: TrainState) -> None:
        """End a run that was asked to.

        Raises:
            decisions.Preempted: once its checkpoint is on disk.
        """
        run = self.run
        run.saver.wait()
        note_saved(run)
        if run.shrinking:
            run.shrinking.vote()
        run.notice.say_saved(run.recorder.say, step, run.folder)
        raise decisions.Preempted

    def settle(self, step: int, due: DueEvents) -> None:
        """Start the clock anew: evaluations, checkpoints and compiling are no training."""
        if due.evaluate or due.save:
            self.run.recorder.start_window(self.run.plan.examples(step))
        if due.evaluate or due.save or step == self.start + 1:
            self.timer.restart()
        if self.run.shrinking:
            self.run.shrinking.settle(self.sums)

    def finish(self, state: TrainState) -> dict[str, float]:
        """Wait until the last checkpoint is on disk."""
        run = self.run
        run.saver.wait()
        note_saved(run)
        if run.shrinking:
            run.shrinking.vote()
            if run.shrinking.control.size < run.shrinking.began:
                run.recorder.say(f"finished with {run.shrinking.control.size} of {run.shrinking.began} workers")
        return self.result


@contextlib.contextmanager
def none_under_way(state: TrainState) -> Iterator[None]:
    """Wait for the last step before raising an error of all ranks.

    The step after the one that failed has been dispatched on all ranks. Code that catches the error may send messages,
    read a checkpoint or call `train` again at once. It would do so beside an exchange that still goes on.
    """
    try:
        yield
    except (AgreedError, decisions.RollBack):
        jax.block_until_ready(state)
        raise
