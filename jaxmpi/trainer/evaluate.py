"""Evaluation over all workers, exact for uneven last batches.

Workers have unequal shares at the end of the validation data, so a mean of their means would be wrong. Each rank sums
over its own examples, without those that only fill a batch up. Ranks add sums and counts in float64 and divide once, so
each example counts once for any number of workers. Figures such as F1 are quotients of sums anyway.
Params are those that the rule evaluates, such as a mean or the center. Then the user's callbacks
run; before a sum that one of them makes, ranks compare which call they have reached.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.comm.agreement import check_may_send
from jaxmpi.comm.job import Processes
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.optim.optimizers import rate_factors
from jaxmpi.runtime import failures, fault_injection, progress
from jaxmpi.trainer.callbacks import NO_STOP, Moment, each, of_rank
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.step import EvalMetrics

CALLS = "what a callback calls"


def distance(run: Run, state: TrainState) -> float | None:
    """Summed L2 distance of this process's workers from mean or center.

    The mean or center is that of the last exchange; None if the rule keeps no distance.
    """
    of = run.functions.rule.distance
    return local_rows(of(state.rule_state), run.workers).sum().item() if of else None


def rate_factor(run: Run, state: TrainState) -> float:
    """The factor of the learning rate, by callbacks."""
    return next((local_rows(factor, run.workers).flat[0].item() for factor in rate_factors(state.rule_state)), 1.0)


class Evaluation(NamedTuple):
    """Outcome of an evaluation."""

    figures: dict[str, float]
    stop: str = ""  # why a callback ends the run


def evaluate(run: Run, state: TrainState, step: int) -> Evaluation:
    """Evaluate on every validation example once, over all workers; see `subject_of`."""
    subject = subject_of(run, state)
    with progress.phase("evaluating"):
        means = figures_of(judged(run, subject, step), run.workers)
    return concluded(run, subject, step, means)


class Subject(NamedTuple):
    """A model that is evaluated, on this process's devices."""

    params: PyTree
    model_state: PyTree


def subject_of(run: Run, state: TrainState) -> Subject:
    """Params as the rule evaluates them, and model state as `batch_statistics` says."""
    functions = run.functions
    return Subject(functions.eval_params(state.params, state.rule_state), functions.mean_state(state.model_state))


def judged(run: Run, subject: Subject, step: int, begin: int = 0, end: int | None = None) -> Iterator[EvalMetrics]:
    """Metrics of this process's validation batches [begin, end)."""
    with contextlib.closing(run.plan.validation.batches(begin, end)) as batches:
        for batch in batches:
            failures.set_phase(f"evaluation after step {step}", failures.LONG)  # another batch, so it gets on
            fault_injection.inject_at("eval", step)
            yield run.functions.eval_step(*subject, batch)


def concluded(run: Run, subject: Subject, step: int, means: dict[str, Any]) -> Evaluation:
    """Record the figures, and call the user's callbacks."""
    place = {"epoch": run.plan.epoch(step), "examples": run.plan.examples(step)}
    run.recorder.evaluation(step=step, tokens_per_byte=run.plan.validation.tokens_per_byte, **place, **means)
    return Evaluation(means, told(run, step, means, *subject) if run.experiment.callbacks else "")


def told(run: Run, step: int, figures: dict[str, float], params: PyTree, model_state: PyTree) -> str:
    """Call the user's callbacks; return the first reason to end, or empty.

    All ranks call it; any rank's callback may end the run.

    Raises:
        UsageError: a callback would end the run of workers that do not wait for each other. A callback that makes calls
            on some ranks only raises it as well.
    """
    wanted: list[str] = []
    first = partial(jax.tree.map, lambda x: local_rows(x, run.workers)[0] if run.workers.mesh else x)
    held = first(params), first(model_state)
    moment = Moment(
        step=step,
        epoch=run.plan.epoch(step),
        figures=figures,
        rank=run.workers.processes.rank,
        folder=run.folder,
        params=held[0],
        model_state=held[1],
        predict=lambda batch: run.functions.predict(*held, batch),
        validation=lambda: own_batches(run),
        sum=partial(sum_over_ranks, run),
        say=run.recorder.say,
        write=partial(run.recorder.note, step=step),
        show=partial(run.recorder.sample, step),
        stop=wanted.append,
        mode_of=run.plan.task.mode_of,
    )
    for callback in of_rank(run.experiment.callbacks, moment.rank):
        failures.set_phase(f"callback {type(callback).__name__} after step {step}", failures.LONG)
        each([callback], "after_evaluation", moment, is_asynchronous=bool(run.workers.asynchronous))
        if not callback.first_rank_only:
            run.workers.processes.assert_same(CALLS, {"next": f"the end of {type(callback).__name__}.after_evaluation"})
    check(not (wanted and run.workers.asynchronous), NO_STOP)
    return next(filter(None, run.workers.processes.allgather_object(wanted[0] if wanted else "")), "")


def sum_over_ranks(run: Run, values: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, f64; all ranks call it.

    Raises:
        UsageError: not all do, or their shapes differ.
    """
    own = np.asarray(values, np.float64)
    if run.workers.asynchronous:  # worker 0's callbacks have all batches
        return own
    check_may_send("Moment.sum")
    run.workers.processes.assert_same(CALLS, {"next": f"Moment.sum of an array {list(own.shape)}"})
    return run.workers.processes.allreduce_sum(own.ravel()).reshape(own.shape)


def own_batches(run: Run) -> Iterator[Batch]:
    """This process's rows of the validation batches, in host memory."""
    for batch in run.plan.validation.batches():
        yield jax.tree.map(
            lambda x: local_rows(x, run.workers).reshape(-1, *x.shape[1 + bool(run.workers.mesh) :]), batch
        )


def figures_of(metrics: Iterable[EvalMetrics], workers: Workers) -> dict[str, Any]:
    """Figures over all workers' batches, `eval_count` first; all ranks call it."""
    return means_of(summed(sums_of(metrics, workers), workers.processes))


def sums_of(metrics: Iterable[EvalMetrics], workers: Workers) -> dict[str, np.ndarray]:
    """Sums and counts of each figure, f64[2, ...], over this process's batches."""
    sums: dict[str, np.ndarray] = {}
    for of_batch in metrics:
        for name, ratio in of_batch.items():
            own = np.stack([local_rows(value, workers).sum(axis=0, dtype=np.float64) for value in ratio])
            sums[name] = sums.get(name, 0) + own
    return sums


def means_of(totals: dict[str, np.ndarray]) -> dict[str, Any]:
    """Figures of sums over all workers, `eval_count` of examples first."""
    count = totals.pop("count", np.zeros(2))[0]
    means: dict[str, Any] = {"eval_count": int(count)}
    return means | ({f"eval_{name}": quotient(*total) for name, total in totals.items()} if count else {})


def summed(sums: dict[str, np.ndarray], processes: Processes) -> dict[str, np.ndarray]:
    """Sums over all ranks, which have the same names, the loss first."""
    return like(sums, processes.allreduce_sum(flat(sums)))


def flat(sums: dict[str, np.ndarray]) -> np.ndarray:
    """f64[all]: the sums one behind another, those of the loss first."""
    return np.concatenate([sums[name].ravel() for name in loss_first(sums)] or [np.zeros(0)])


def like(sums: dict[str, np.ndarray], values: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `flat`, given sums of the same names and shapes."""
    names = loss_first(sums)
    parts = np.split(values, np.cumsum([sums[name].size for name in names])[:-1]) if names else []
    return {name: part.reshape(sums[name].shape) for name, part in zip(names, parts, strict=True)}


def loss_first(names: Iterable[str]) -> list[str]:
    """The names in their order, but for the loss, which comes first."""
    return sorted(names, key=lambda name: name != "loss")


def quotient(sums: np.ndarray, counts: np.ndarray) -> float:
    """Divide sums by counts; average the columns that have a count."""
    counted = np.atleast_1d(counts) != 0
    if not counted.any():
        return float("nan")
    return float(np.mean(np.atleast_1d(sums)[counted] / np.atleast_1d(counts)[counted]))


def score(experiment: Experiment, means: dict[str, float]) -> float | None:
    """The figure that orders checkpoints, the lowest best; None without an evaluation."""
    value = means.get(experiment.monitor)
    return -value if value is not None and experiment.monitor_mode == "max" else value
