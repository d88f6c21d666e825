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
from jaxmpi.trainer.callbacks import Moment, call_each
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.step import EvalMetrics

CALLS = "what a callback calls"


class EvalState(NamedTuple):
    """A model that is evaluated, on this process's devices."""

    params: PyTree
    model_state: PyTree


def evaluate(run: Run, state: TrainState, step: int) -> tuple[dict[str, float], str]:
    """Figures of every validation example once, over all workers; and why a callback ends the run, or empty."""
    subject = eval_state(run, state)
    with progress.phase("evaluating"):
        figures = gather_figures(batch_metrics(run, subject, step), run.workers)
    return figures, conclude(run, subject, step, figures)


def eval_state(run: Run, state: TrainState) -> EvalState:
    """Params as the rule evaluates them, and model state as `batch_statistics` says."""
    functions = run.functions
    return EvalState(functions.eval_params(state.params, state.rule_state), functions.mean_state(state.model_state))


def batch_metrics(run: Run, subject: EvalState, step: int) -> Iterator[EvalMetrics]:
    """Metrics of this process's validation batches."""
    with contextlib.closing(run.plan.validation.batches()) as batches:
        for batch in batches:
            failures.set_phase(f"evaluation after step {step}", failures.LONG)  # for the watchdog: it makes progress
            fault_injection.inject_at("eval", step)
            yield run.functions.eval_step(*subject, batch)


def gather_figures(metrics: Iterable[EvalMetrics], workers: Workers) -> dict[str, Any]:
    """Figures over all workers' batches, `eval_count` of examples first, then the loss; all ranks call it."""
    sums: dict[str, np.ndarray] = {}  # f64[2, ...]: sums and what divides them, over this process's batches
    for batch in metrics:
        for name, ratio in batch.items():
            rows = np.stack([local_rows(value, workers).sum(axis=0, dtype=np.float64) for value in ratio])
            sums[name] = sums.get(name, 0) + rows
    names = sorted(sums, key=lambda name: name != "loss")
    flat = np.concatenate([sums[name].ravel() for name in names] or [np.zeros(0)])
    parts = np.split(workers.processes.allreduce_sum(flat), np.cumsum([sums[name].size for name in names])[:-1])
    totals = {name: part.reshape(sums[name].shape) for name, part in zip(names, parts, strict=False)}
    count = totals.pop("count", np.zeros(2))[0]
    figures: dict[str, Any] = {"eval_count": int(count)}
    return figures | ({f"eval_{name}": quotient(*total) for name, total in totals.items()} if count else {})


def quotient(sums: np.ndarray, counts: np.ndarray) -> float:
    """Divide sums by counts; average the columns that have a count."""
    counted = np.atleast_1d(counts) != 0
    if not counted.any():
        return float("nan")
    return float(np.mean(np.atleast_1d(sums)[counted] / np.atleast_1d(counts)[counted]))


def conclude(run: Run, subject: EvalState, step: int, figures: dict[str, Any]) -> str:
    """Record the figures, and call the user's callbacks; why one of them ends the run, or empty."""
    place = {"epoch": run.plan.epoch(step), "examples": run.plan.examples(step)}
    run.recorder.evaluation(step=step, tokens_per_byte=run.plan.validation.tokens_per_byte, **place, **figures)
    return call_callbacks(run, step, figures, subject) if run.experiment.callbacks else ""


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
    for callback in run.experiment.callbacks:
        if moment.rank and callback.first_rank_only:
            continue
        name = type(callback).__name__
        failures.set_phase(f"callback {name} after step {step}", failures.LONG)
        call_each([callback], "after_evaluation", moment, is_asynchronous=bool(run.workers.asynchronous))
        if not callback.first_rank_only:
            control.assert_same(CALLS, {"next": f"the end of {name}.after_evaluation"})
    if reasons and run.workers.asynchronous:
        raise UsageError("Moment.stop: got an asynchronous rule, whose workers end at train_for")
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
