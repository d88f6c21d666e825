"""Callbacks: code that runs around a run's steps, under any rule.

A run has one list of callbacks: ours, then the user's own. A callback is called on every rank at the same moments, or
on rank 0 alone if it says so. When no step is running it may communicate (`jaxmpi.exchange`, `Moment.sum`), if all
ranks do so alike; during a step that is refused. Its `state` goes into checkpoints, so that a resumed run continues as
if it had not ended.
"""

import contextlib
import copy
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import on_all_ranks, without_messages
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import UsageError, nearest
from jaxmpi.core.pytrees import PyTree, by_path, mismatches
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.model.contract import with_article
from jaxmpi.observe.trace import Profiler
from jaxmpi.optim.optimizers import scale_rate
from jaxmpi.runtime import fault_injection


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a run, on one rank.

    Args:
        step: updates so far.
        epoch: the same in epochs.
        figures: of the last evaluation, such as `eval_loss`, equal on all ranks; empty before the first.
        rank: this process's number.
        folder: the run directory.
        params: what the evaluation used, in its layout on one device.
        model_state: the same.
        predict: (batch) -> outputs of the task, in evaluation.
        validation: () -> this rank's batches of the (first) validation set, `weight` 0 for rows that only fill them up.
        sum: (f64 array) -> its sum over all ranks, which all call it with arrays of one shape.
        say: (text) -> a line on rank 0's terminal.
        write: (kind, **fields) -> a line of the record, of a kind that the trainer does not write.
        show: (name, text or picture) -> a sample for the record, the report and the sinks, by rank 0. A picture is u8
            or bool [height, width] or u8 [height, width, 3]; it is kept as a PNG file in `folder/samples`.
        stop: (why) -> the run ends after this evaluation, with a checkpoint; on all ranks alike.
        mode_of: (figure) -> `max` or `min`: which of its values is the best.
    """

    step: int
    epoch: float
    figures: dict[str, float]
    rank: int
    folder: Path
    params: PyTree
    model_state: PyTree
    predict: Callable[[Batch], Any]
    validation: Callable[[], Iterator[Batch]]
    sum: Callable[[np.ndarray], np.ndarray]
    say: Callable[[str], None]
    write: Callable[..., None]
    show: Callable[[str, str | np.ndarray], None]
    stop: Callable[[str], None]
    mode_of: Callable[[str], str]


class Callback:
    """Code for moments of a run in this process; methods are optional.

    `before_step`, `after_dispatch` and `after_checkpoint` may not communicate, since a step may still exchange.
    """

    first_rank_only = False  # True if rank 0 alone calls its methods, but for `state` and `restore`
    needs_lock_step = False  # True if it makes sense only where workers wait for each other
    scales_rate = False  # True if it changes the learning rate, by `rate_factor` in the optimizer's state

    def at_start(self, step: int, state: TrainState) -> None:
        """Called before the loop starts after `step`, and again after each rollback or loss of ranks."""

    def before_step(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Return the state and batch that the step takes, of the structure and shapes of those given."""
        return state, batch

    def after_dispatch(self, step: int, state: TrainState) -> None:
        """Called after a step's dispatch; the device may still compute `state`."""

    def after_evaluation(self, moment: Moment) -> None:
        """Called after an evaluation, when no step is running; under asynchronous rules on worker 0 alone."""

    def after_checkpoint(self, step: int, folder: Path) -> None:
        """Called when the checkpoint of `step` is complete in `folder`; under asynchronous rules on worker 0 alone."""

    def at_end(self, figures: dict[str, float]) -> None:
        """Called after the last step, evaluation and checkpoint, with the last figures."""

    def state(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Called when the run continues from a checkpoint, with what `state` returned."""


MOMENTS = {name: method for name, method in vars(Callback).items() if name.startswith(("at_", "before_", "after_"))}


class Instruments(Callback):
    """Faults that `--inject` orders for a step, and JAX's profiler over the steps that `--profile` names."""

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler

    def before_step(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        state, batch = fault_injection.inject_at("step", step, (state, batch))
        self.profiler.before(step)
        return state, batch

    def after_dispatch(self, step: int, state: TrainState) -> None:
        self.profiler.after(step, state)


# ---------------------------------------------------------------- by the course of a figure


class Plateau(Callback):
    """Counts evaluations since a figure was at its best.

    Args:
        monitor: figure of the evaluation.
        mode: min or max, its best value; auto: `monitor_mode` if it is the run's `monitor`, else by the task's
            `maximize`.
        patience: evaluations without a better one, at least 1.
        min_delta: by how much a better one is better.
    """

    needs_lock_step = True

    def __init__(
        self, monitor: str = "eval_loss", mode: str = "auto", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        name = type(self).__name__
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"{name}: mode: got {mode!r}; expected auto, min or max")
        if patience < 1:
            raise UsageError(f"{name}: patience: got {patience}; expected evaluations >= 1")
        if not min_delta >= 0:
            raise UsageError(f"{name}: min_delta: got {min_delta}; expected >= 0")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best, self.count = math.inf, 0  # best figure, negated for max; evaluations without a better one

    def after_evaluation(self, moment: Moment) -> None:
        """Count; NaN is never better."""
        if self.monitor == "eval_loss":  # of several validation sets, the first's
            self.monitor = next((name for name in moment.figures if name.endswith("_loss")), self.monitor)
        if self.monitor not in moment.figures:
            known = ", ".join(moment.figures)
            raise UsageError(f"{type(self).__name__}: monitor: got {self.monitor}; this run has {known}")
        mode = moment.mode_of(self.monitor) if self.mode == "auto" else self.mode
        value = moment.figures[self.monitor] * (-1 if mode == "max" else 1)
        if value < self.best - self.min_delta:
            self.best, self.count = value, 0
        else:
            self.count += 1
        if self.count >= self.patience:
            self.count = 0
            self.act_on_plateau(moment)

    def act_on_plateau(self, moment: Moment) -> None:
        """As many evaluations as `patience` were no better."""

    def state(self) -> dict[str, Any]:
        return {"best": self.best if math.isfinite(self.best) else None, "count": self.count}

    def restore(self, state: dict[str, Any]) -> None:
        self.best, self.count = (math.inf if state["best"] is None else state["best"]), state["count"]


class EarlyStop(Plateau):
    """Ends the run once a figure has not improved for `patience` evaluations."""

    def act_on_plateau(self, moment: Moment) -> None:
        moment.stop(f"{self.monitor} has not improved for {self.patience} evaluations")


class ReduceOnPlateau(Plateau):
    """Multiply the learning rate after `patience` evaluations without a better figure.

    Args:
        factor: in (0, 1).
        monitor, mode, patience, min_delta: as `Plateau`.
    """

    scales_rate = True

    def __init__(self, factor: float = 0.1, **plateau: Any) -> None:
        super().__init__(**plateau)
        if not 0 < factor < 1:
            raise UsageError(f"ReduceOnPlateau: factor: got {factor}; expected 0 < factor < 1")
        self.factor, self.due = factor, 1.0  # by `due` the rate is to be multiplied before the next step

    def act_on_plateau(self, moment: Moment) -> None:
        self.due *= self.factor
        moment.say(
            f"{self.monitor} has not improved for {self.patience} evaluations: learning rate x {self.factor:.3g}"
        )

    def before_step(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """The factor goes into the optimizer's state, and so into checkpoints."""
        if self.due != 1:
            state = state._replace(rule_state=scale_rate(state.rule_state, self.due))
            self.due = 1.0
        return state, batch

    def state(self) -> dict[str, Any]:
        return super().state() | {"due": self.due}  # not yet in the optimizer's state

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.due = state["due"]


# ---------------------------------------------------------------- called by a run


def call_each(callbacks: Sequence[Callback], method: str, *args: Any, is_asynchronous: bool = False) -> None:
    """Call a method of all, one after another.

    Args:
        is_asynchronous: workers do not wait for each other.
    """
    for callback in callbacks:
        with message_guard(callback, method, is_asynchronous):
            getattr(callback, method)(*args)


def before_step(
    callbacks: Sequence[Callback], step: int, state: TrainState, batch: Batch, is_asynchronous: bool = False
) -> tuple[TrainState, Batch]:
    """Call `before_step` of all, one after another."""
    leaves, structure = jax.tree.flatten((state, batch))  # kept, since a dict may be changed in place
    for callback in callbacks:
        what = f"callback {type(callback).__name__}: before_step"
        with message_guard(callback, "before_step", is_asynchronous):
            result = callback.before_step(step, state, batch)
        if not (isinstance(result, tuple) and len(result) == 2):
            got = with_article(result)
            raise UsageError(f"{what}: got {got}; expected (state, batch), those given if it only looks")
        before, before_structure, (state, batch) = leaves, structure, result
        leaves, structure = jax.tree.flatten(result)
        if structure == before_structure and all(map(operator.is_, leaves, before)):
            continue
        if callback.first_rank_only:
            raise UsageError(f"{what}: got another state or batch on rank 0 alone; expected those it was given")
        trees = jax.tree.unflatten(before_structure, before), result
        was, now = (by_path({"state": tree[0], "batch": tree[1]}) for tree in trees)
        if lines := mismatches(now, was):
            raise UsageError(f"{what}: {lines[0]}, as it was: a step takes no other")
    return state, batch


DURING_A_STEP = (
    "while a step may still exchange",
    "do it in at_start, after_evaluation or at_end, when nothing is under way",
)
ON_RANK_0 = ("on rank 0 alone", "leave first_rank_only out, so that all ranks do the same")
ASYNCHRONOUS = ("under an asynchronous rule, whose workers do not meet", "take a synchronous rule")


def message_guard(callback: Callback, method: str, is_asynchronous: bool) -> contextlib.AbstractContextManager[None]:
    """While a method runs, refuse the messages that it may not send."""
    is_during_step = method in ("before_step", "after_dispatch", "after_checkpoint")
    if not (is_during_step or callback.first_rank_only or is_asynchronous):
        return contextlib.nullcontext()
    why = ASYNCHRONOUS if is_asynchronous else DURING_A_STEP if is_during_step else ON_RANK_0
    return without_messages(f"callback {type(callback).__name__}: {method}", *why)


# ---------------------------------------------------------------- the user's own


def copy_checked(callbacks: Any) -> tuple[Callback, ...]:
    """Copies of an experiment's callbacks, so that a second run begins anew."""
    if not isinstance(callbacks, (tuple, list)):
        raise UsageError(f"callbacks: got {callbacks!r}; expected a tuple of jaxmpi.Callback objects")
    copies = []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(f"callbacks: got {callback!r}; expected a jaxmpi.Callback object")
        name = type(callback).__name__
        for method in dir(callback):  # one that is never called would go unnoticed
            if method.startswith(("at_", "before_", "after_", "on_")) and method not in MOMENTS:
                raise UsageError(f"callback {name}: got a method {method}; {nearest(method, MOMENTS)}")
        try:
            copies.append(copy.deepcopy(callback))
        except Exception as error:  # whatever an object of the user's raises
            raise UsageError(
                f"callback {name}: {type(error).__name__}: {error}; each run works on a deep copy: what cannot be "
                "copied, such as a file, open it in at_start"
            ) from error
    return tuple(copies)


def states(callbacks: Sequence[Callback], control: Processes) -> list[list[Any]]:
    """[name, state] of each for a checkpoint, copied, since it is written while the run continues; all ranks call it.

    Communicates: errors, if there are callbacks.
    """
    rows: list[list[Any]] = []

    def copy_states() -> None:
        for callback in callbacks:
            name = type(callback).__name__
            try:
                rows.append([name, json.loads(json.dumps(callback.state()))])
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"callback {name}: state: {error}; expected JSON values") from error

    if callbacks:
        on_all_ranks(control, copy_states)
    return rows


def restore(callbacks: Sequence[Callback], rows: Sequence[Sequence[Any]]) -> None:
    """Restore each callback's state in a checkpoint, matched by name and order; one unknown to it stays as is."""
    left = list(rows)
    for callback in callbacks:
        row = next((row for row in left if row[0] == type(callback).__name__), None)
        if row is not None:
            left.remove(row)
            callback.restore(row[1])
