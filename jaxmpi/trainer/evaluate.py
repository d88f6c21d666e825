"""Evaluation over all workers, exact for uneven last batches.

Workers have unequal shares at the end of the validation data, so a mean of their means would be wrong. Each rank sums
over its own examples, without those that only fill a batch up. Ranks add sums and counts in float64 and divide once, so
each example counts once for any number of workers. Params are those that the rule evaluates, such as a mean or the
center. Then the user's callbacks run; before a sum that one of them makes, ranks compare which call they have reached.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.comm.agreement import check_may_send
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.optim.optimizers import rate_factors
from jaxmpi.runtime import failures, fault_injection, progress
from jaxmpi.trainer.callbacks import NO_STOP, Moment, call_each, of_rank
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.step import EvalMetrics

CALLS = "what a callback calls"


class Evaluation(NamedTuple):
    """Outcome of an evaluation."""

    figures: dict[str, float]
    stop: str = ""  # why a callback ends the run


class EvalState(NamedTuple):
    """A model that is evaluated, on this process's devices."""

    params: PyTree
    model_state: PyTree


def evaluate(run: Run, state: TrainState, step: int) -> Evaluation:
    """Evaluate on every validation example once, over all workers; see `eval_state`."""
    subject = eval_state(run, state)
    with progress.phase("evaluating"):
        means = gather_figures(batch_metrics(run, subject, step), run.workers)
    return conclude(run, subject, step, means)


def eval_state(run: Run, state: TrainState) -> EvalState:
    """Params as the rule evaluates them, and model state as `batch_statistics` says."""
    functions = run.functions
    return EvalState(functions.eval_params(state.params, state.rule_state), functions.mean_state(state.model_state))


def batch_metrics(
    run: Run, subject: EvalState, step: int, begin: int = 0, end: int | None = None
) -> Iterator[EvalMetrics]:
    """Metrics of this process's validation batches [begin, end)."""
    with contextlib.closing(run.plan.validation.batches(begin, end)) as batches:
        for batch in batches:
            failures.set_phase(f"evaluation after step {step}", failures.LONG)  # for the watchdog: it makes progress
            fault_injection.inject_at("eval", step)
            yield run.functions.eval_step(*subject, batch)


def conclude(run: Run, subject: EvalState, step: int, means: dict[str, Any]) -> Evaluation:
    """Record the figures, and call the user's callbacks."""
    place = {"epoch": run.plan.epoch(step), "examples": run.plan.examples(step)}
    run.recorder.evaluation(step=step, tokens_per_byte=run.plan.validation.tokens_per_byte, **place, **means)
    return Evaluation(means, call_callbacks(run, step, means, subject) if run.experiment.callbacks else "")


# ---------------------------------------------------------------- callbacks


def call_callbacks(run: Run, step: int, figures: dict[str, float], subject: EvalState) -> str:
    """Call the user's callbacks; return the first reason to end, or empty.

    All ranks call it; any rank's callback may end the run.
    """
    control = run.workers.processes
    reasons: list[str] = []
    params, model_state = jax.tree.map(lambda x: local_rows(x, run.workers)[0] if run.workers.mesh else x, subject)
    moment = Moment(
        step=step,
        epoch=run.plan.epoch(step),
        figures=figures,
        rank=control.rank,
        folder=run.folder,
        params=params,
        model_state=model_state,
        predict=lambda batch: run.functions.predict(params, model_state, batch),
        validation=lambda: own_batches(run),
        sum=partial(sum_over_ranks, run),
        say=run.recorder.say,
        write=partial(run.recorder.note, step=step),
        show=partial(run.recorder.sample, step),
        stop=reasons.append,
        mode_of=run.plan.task.mode_of,
    )
    for callback in of_rank(run.experiment.callbacks, moment.rank):
        name = type(callback).__name__
        failures.set_phase(f"callback {name} after step {step}", failures.LONG)
        call_each([callback], "after_evaluation", moment, is_asynchronous=bool(run.workers.asynchronous))
        if not callback.first_rank_only:
            control.assert_same(CALLS, {"next": f"the end of {name}.after_evaluation"})
    if reasons and run.workers.asynchronous:
        raise UsageError(NO_STOP)
    return next(filter(None, control.allgather_object(reasons[0] if reasons else "")), "")


def sum_over_ranks(run: Run, values: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, f64; all ranks call it."""
    array = np.asarray(values, np.float64)
    if run.workers.asynchronous:  # worker 0's callbacks have all batches
        return array
    check_may_send("Moment.sum")
    run.workers.processes.assert_same(CALLS, {"next": f"Moment.sum of an array {list(array.shape)}"})
    return run.workers.processes.allreduce_sum(array.ravel()).reshape(array.shape)


def own_batches(run: Run) -> Iterator[Batch]:
    """This process's rows of the validation batches, in host memory."""
    axis = 1 + bool(run.workers.mesh)
    for batch in run.plan.validation.batches():
        yield jax.tree.map(lambda x: local_rows(x, run.workers).reshape(-1, *x.shape[axis:]), batch)


# ---------------------------------------------------------------- sums and counts


def gather_figures(metrics: Iterable[EvalMetrics], workers: Workers) -> dict[str, Any]:
    """Figures over all workers' batches, `eval_count` first; all ranks call it."""
    sums = sum_metrics(metrics, workers)
    return to_means(unflatten_sums(sums, workers.processes.allreduce_sum(flatten_sums(sums))))


def sum_metrics(metrics: Iterable[EvalMetrics], workers: Workers) -> dict[str, np.ndarray]:
    """Sums and counts of each figure, f64[2, ...], over this process's batches."""
    sums: dict[str, np.ndarray] = {}
    for batch in metrics:
        for name, ratio in batch.items():
            rows = np.stack([local_rows(value, workers).sum(axis=0, dtype=np.float64) for value in ratio])
            sums[name] = sums.get(name, 0) + rows
    return sums


def to_means(totals: dict[str, np.ndarray]) -> dict[str, Any]:
    """Figures of sums over all workers, `eval_count` of examples first."""
    count = totals.pop("count", np.zeros(2))[0]
    means: dict[str, Any] = {"eval_count": int(count)}
    return means | ({f"eval_{name}": quotient(*total) for name, total in totals.items()} if count else {})


def flatten_sums(sums: dict[str, np.ndarray]) -> np.ndarray:
    """f64[all]: the sums one after another, those of the loss first."""
    return np.concatenate([sums[name].ravel() for name in loss_first(sums)] or [np.zeros(0)])


def unflatten_sums(sums: dict[str, np.ndarray], values: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `flatten_sums`, given sums of the same names and shapes."""
    names = loss_first(sums)
    parts = np.split(values, np.cumsum([sums[name].size for name in names])[:-1]) if names else []
    return {name: part.reshape(sums[name].shape) for name, part in zip(names, parts, strict=True)}


def loss_first(names: Iterable[str]) -> list[str]:
    """Names in their order, after the loss."""
    return sorted(names, key=lambda name: name != "loss")


def quotient(sums: np.ndarray, counts: np.ndarray) -> float:
    """Divide sums by counts; average the columns that have a count."""
    counted = np.atleast_1d(counts) != 0
    if not counted.any():
        return float("nan")
    return float(np.mean(np.atleast_1d(sums)[counted] / np.atleast_1d(counts)[counted]))


# ---------------------------------------------------------------- of a state


def score(experiment: Experiment, means: dict[str, float]) -> float | None:
    """The figure that orders checkpoints, the lowest best; None without an evaluation."""
    value = means.get(experiment.monitor)
    return -value if value is not None and experiment.monitor_mode == "max" else value


def distance(run: Run, state: TrainState) -> float | None:
    """Summed L2 distance of this process's workers from the mean or center of the last exchange.

    None if the rule does not keep one.
    """
    of_state = run.functions.rule.distance
    return local_rows(of_state(state.rule_state), run.workers).sum().item() if of_state else None


def rate_factor(run: Run, state: TrainState) -> float:
    """The factor of the learning rate, by callbacks."""
    return next((local_rows(factor, run.workers).flat[0].item() for factor in rate_factors(state.rule_state)), 1.0)
