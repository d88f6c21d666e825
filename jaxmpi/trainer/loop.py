"""The training loop of all rules: a step, then what is due.

A coordinator has all that differs between rules. Workers in lock step exchange inside each step, and vote on it
(`lock_step`); asynchronous workers exchange between steps, each for itself. A list of callbacks has what happens around
a step whatever the rule.
"""

import contextlib
from collections.abc import Generator, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.monitoring

from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.runtime import failures
from jaxmpi.runtime.progress import phase
from jaxmpi.trainer.callbacks import Callback, before_step, call_each
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents


class Position(NamedTuple):
    """Start of the loop."""

    step: int  # last step that this process's workers have made; 0: none
    state: TrainState  # after it
    overdue: DueEvents = DueEvents()  # was due after the step, and has not been done


class RunProgress(NamedTuple):
    """How far a run has come."""

    step: int  # step of the run, to which `due` refers; asynchronous workers have a count of their own besides
    due: DueEvents = DueEvents()
    is_over: bool = False


class Coordinator:
    """A rule's steps, and this process's part of what is due."""

    is_asynchronous = False  # True if workers do not wait for each other
    is_stopped = False  # True if a callback ended the run at the last evaluation, whose step is saved as the last
    timer: StepTimer  # splits the time of a step into its parts

    def begin(self, position: Position) -> TrainState:
        """Prepare for the first step; return the state to start from."""
        raise NotImplementedError

    def batches(self) -> Generator[Batch, None, None]:
        """Batches of this process's workers from the position on."""
        raise NotImplementedError

    def update(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics | None]:
        """One step; no metrics if it was left out."""
        raise NotImplementedError

    def after_step(self, step: int, state: TrainState, metrics: Metrics | None) -> tuple[TrainState, RunProgress]:
        """Read metrics that are ready, and exchange what the step did not."""
        raise NotImplementedError

    def pause(self, state: TrainState) -> None:
        """Wait for the step and its messages, before the control plane sends."""

    def compare(self, step: int, state: TrainState) -> None:
        """Compare what is to be equal on all workers."""

    def log(self, step: int, state: TrainState) -> None:
        """Write a progress line."""

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate the params that stand for all workers'."""

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Begin a checkpoint; with `is_last` no step follows before it is written."""

    def leave(self, step: int, state: TrainState) -> None:
        """End the run once its checkpoint is on disk."""

    def after_actions(self, step: int, due: DueEvents) -> None:
        """Called last, when everything due has been done."""

    def finish(self, state: TrainState) -> dict[str, float]:
        """Finish after the last step; return the last evaluation, empty if unknown."""
        raise NotImplementedError


def run_steps(coordinator: Coordinator, callbacks: Sequence[Callback], position: Position) -> dict[str, float]:
    """Steps position.step + 1 to the last; the last evaluation."""
    timer, first = coordinator.timer, position.step + 1
    state = coordinator.begin(position)
    call = partial(call_each, callbacks, is_asynchronous=coordinator.is_asynchronous)
    call("at_start", position.step, state)
    do_due(coordinator, position.step, position.overdue, state)
    with contextlib.closing(coordinator.batches()) as batches, contextlib.ExitStack() as at:
        at.enter_context(phase("waiting for the first batch"))
        steps = timer.batches(batches, first) if not coordinator.is_stopped else ()
        for step, batch in enumerate(steps, first):
            if step == first:
                at.close()
                at.enter_context(phase("compiling and making the first step"))
            failures.set_phase(f"step {step}", failures.LONG_FACTOR if step == first else 1.0)
            compiled_before = len(compilations())
            state, batch = before_step(callbacks, step, state, batch, coordinator.is_asynchronous)
            state, metrics = coordinator.update(step, state, batch)
            call("after_dispatch", step, state)
            is_compiled = step == first or len(compilations()) > compiled_before
            timer.started(next(iter(jax.tree.leaves(state.params)), state.step), compiled=is_compiled)
            state, progress = coordinator.after_step(step, state, metrics)
            do_due(coordinator, progress.step, progress.due, state)
            at.close()
            if progress.is_over or coordinator.is_stopped:
                break
    figures = coordinator.finish(state)
    call("at_end", figures)
    return figures


@cache
def compilations() -> list[float]:
    """Seconds of each program that this process compiles from the first call on: of some rules not all at step 1."""
    durations: list[float] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    return durations


def do_due(coordinator: Coordinator, step: int, due: DueEvents, state: TrainState) -> None:
    """Do what is due after a step."""
    if due.compare or due.log or due.evaluate:
        coordinator.pause(state)
    if due.compare:
        coordinator.compare(step, state)
    if due.log:
        coordinator.log(step, state)
    if due.evaluate:
        coordinator.evaluate(step, state)
    if coordinator.is_stopped and not due.compare:  # no checkpoint of replicas that differ
        coordinator.compare(step, state)
    if due.save or coordinator.is_stopped:
        coordinator.save(step, state, is_last=due.leave or coordinator.is_stopped)
    if due.leave:
        coordinator.leave(step, state)
    coordinator.after_actions(step, due)
