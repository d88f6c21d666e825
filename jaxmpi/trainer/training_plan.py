"""A run's plan: an experiment's durations and rates in numbers.

An experiment has epochs, a batch of all workers and a rate that may grow with them. A run needs numbers of steps, a
batch of each worker and a rate for every step. `make_plan` opens the data, whose length turns one into the other, and
comes before anything is compiled. A run that is resumed by another number of workers keeps its batch and its rates:
`scaled_for` says for how many workers they were made. A `Job` is experiment, workers and plan together: all parts of a
run are made for it.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.comm.topology import Workers, alone
from jaxmpi.config import durations, schema
from jaxmpi.config.optim import Optim
from jaxmpi.config.schema import Experiment
from jaxmpi.core import errors
from jaxmpi.core.pytrees import PyTree
from jaxmpi.data.feed import DeviceFeed, open_feed, reshard_feed
from jaxmpi.optim import optimizers, schedules
from jaxmpi.rules import registry
from jaxmpi.tasks.base import Task
from jaxmpi.tasks.registry import make_task
from jaxmpi.trainer.timetable import Timetable


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """An experiment's durations and rates in numbers."""

    task: Task
    feed: DeviceFeed
    validation: DeviceFeed
    clock: schedules.Clock
    timetable: Timetable
    lr: optax.Schedule  # by step, scaling included
    has_lr: bool  # else the user's own optimizer has its rates to itself
    headline: str
    data: dict[str, Any]  # facts that distinguish it from other data, wherever it lies
    scaled_for: int  # workers that the run began with, by which lr is scaled
    micro_batch: int  # examples of an accumulation slice; 0: no accumulation

    def examples(self, step: int) -> int:
        """Examples seen by all workers after `step` steps, counting short ones exactly."""
        epochs, batches = divmod(step, self.clock.steps_per_epoch)
        return epochs * len(self.feed.source) + batches * self.clock.effective_batch

    def step(self, examples: float) -> int:
        """The last step after which all workers saw at most `examples`."""
        epochs, rest = divmod(int(examples), len(self.feed.source))
        return min(epochs * self.clock.steps_per_epoch + rest // self.clock.effective_batch, self.clock.total_steps)

    def epoch(self, step: int) -> float:
        """Epochs after `step` steps; 0 if the data has none."""
        return step / self.clock.steps_per_epoch if self.feed.has_epochs else 0.0

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Params and model state of state 0."""
        return self.task.init(key, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.feed.example()))

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree]:
        """Shapes of params and model state, traced once.

        GoogLeNet takes a second, and 8 ranks on two cores trace it at the same time.
        """
        return jax.eval_shape(self.init, jax.random.key(0))

    def params(self) -> PyTree:
        """Shapes of the params."""
        return self.shapes[0]

    def lr_of(self, step: int) -> float | None:
        """The learning rate of a step, counted from 1, if known."""
        return np.asarray(self.lr(max(step - 1, 0))).item() if self.has_lr else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Experiment, workers and plan, for which a run's parts are made."""

    experiment: Experiment
    workers: Workers
    plan: TrainingPlan

    def with_fields(self, **fields: Any) -> Self:
        """The same with other fields of the experiment."""
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, **fields))


def with_exchange(job: Job, **options: Any) -> Job:
    """The job with other exchange options, before anything is built for it."""
    return job.with_fields(exchange=dataclasses.replace(job.experiment.exchange, **options))


def make_plan(
    experiment: Experiment, workers: Workers, scaled_for: int = 0, before: TrainingPlan | None = None
) -> TrainingPlan:
    """Batches, steps and learning rate; `feed.model` fits the data's classes.

    Args:
        scaled_for: workers that the run began with; 0: these.
        before: of a run that goes on with fewer workers, whose data is open.

    Raises:
        UsageError: a batch that does not divide, data that is missing, a learning-rate scaling the rule refuses.
    """
    scaled_for = scaled_for or workers.size
    is_other = scaled_for != workers.size
    local_batch = schema.local_batch(experiment, workers.size, uneven=is_other)
    effective_batch = experiment.effective_batch if is_other else local_batch * workers.size
    micro_batch = experiment.micro_batch or slice_of(local_batch, -(-effective_batch // scaled_for))
    asked_classes = experiment.model.classes if experiment.model else 0
    if before:
        feed, validation = reshard_feed(before.feed, workers, micro_batch), reshard_feed(before.validation, workers)
        facts = before.data["the data"]
    else:
        feed = open_feed(experiment, "train", effective_batch, workers, micro_batch)
        experiment = dataclasses.replace(experiment, model=feed.model)
        # Workers that do not meet cannot share an evaluation.
        evaluating, batch = (alone(workers), local_batch) if workers.asynchronous else (workers, effective_batch)
        validation = open_feed(experiment, "validation", batch, evaluating, pool=feed.pool)
        facts = {"train": feed.facts(), "validation": validation.facts()}
        workers.processes.assert_same("the data", facts)
    task, name = make_task(experiment), experiment.model.name if experiment.model else experiment.task.name
    check_durations(experiment, feed)
    epoch_steps = feed.samplers[0].steps_per_epoch
    total_steps = max(durations.duration_steps(experiment.train_for, epoch_steps, effective_batch), 1)
    clock = schedules.Clock(epoch_steps, effective_batch, total_steps)
    factor, scaling = registry.scale_lr(experiment.rule.name, experiment.optim.lr_scaling, scaled_for)
    factor *= by_batch(experiment.optim, effective_batch / scaled_for)
    if experiment.optim.lr_for_batch:
        scaling += f", local batch / {experiment.optim.lr_for_batch}"
    if is_other and registry.RULES[experiment.rule.name].sums_updates:
        factor *= scaled_for / workers.size  # fewer updates are summed, each of more examples
    lr = experiment.optim.lr
    headline = (
        f"{name}: {worker_words(workers)} x local batch {local_batch} = effective batch "
        f"{effective_batch}; {data_words(feed)}, {total_steps} steps\n" + rate_words(experiment, factor, scaling)
    )
    if experiment.model and experiment.model.classes != asked_classes:
        headline = (
            f"{feed.source.name} has {feed.source.classes} classes: {name} is made with as many, not "
            f"with the experiment's {asked_classes}\n{headline}"
        )
    if is_other:
        headline += f", as with the {scaled_for} workers that the run began with" + (
            f"; in slices of {micro_batch}" * bool(micro_batch)
        )
    return TrainingPlan(
        task=task,
        feed=feed,
        validation=validation,
        clock=clock,
        timetable=Timetable(
            compare_every=clock.steps(experiment.replica_check_every) or total_steps,
            log_every=experiment.log_every,
            eval_every=clock.steps(experiment.eval_every) or total_steps,
            save_every=clock.steps(experiment.checkpoint_every) or total_steps,
            total_steps=total_steps,
        ),
        lr=schedules.schedule(experiment.schedule, clock, lr * factor, scaled_for, factor),
        has_lr=not optimizers.has_own_rate(experiment.optim),
        headline=headline,
        data={"the data": facts},
        scaled_for=scaled_for,
        micro_batch=micro_batch,
    )


def job_of(experiment: Experiment, workers: Workers, scaled_for: int = 0, before: TrainingPlan | None = None) -> Job:
    """An experiment's job, its model sized to the data's classes; see `make_plan`."""
    plan = make_plan(experiment, workers, scaled_for, before)
    return Job(experiment=dataclasses.replace(experiment, model=plan.feed.model), workers=workers, plan=plan)


def by_batch(optim: Optim, local_batch: float) -> float:
    """The factor on lr for this local batch, as the run began."""
    return local_batch / optim.lr_for_batch if optim.lr_for_batch else 1.0


NO_EPOCHS = "{field}: got {got} with {source}, a stream, whose epochs have no known length: give steps, as in 500st"


def check_durations(experiment: Experiment, feed: DeviceFeed) -> None:
    """Raise `UsageError` if durations or schedule count epochs that the data lacks."""
    if feed.has_epochs:
        return
    schedule, source = experiment.schedule, feed.source.name
    names = ("train_for", "eval_every", "checkpoint_every", "replica_check_every")
    given = {name: getattr(experiment, name) for name in names}
    given |= {"schedule.warmup": schedule.warmup, "schedule.span": schedule.span}
    given |= {"schedule.boundaries": " ".join(schedule.boundaries)}
    for name, value in given.items():
        errors.check("ep" not in value, NO_EPOCHS.format(field=name, got=value, source=source))
    by_epoch = schedule.decay == "poly_epoch" or schedule.warmup_shape == "geometric"
    changing = NO_EPOCHS.format(field="schedule", got="one that changes once an epoch", source=source)
    errors.check(not by_epoch, changing)


def worker_words(workers: Workers) -> str:
    """The number of workers, and of processes with several devices each."""
    each, processes = len(workers.mine), workers.processes.size
    product = f"{processes} processes x {each} devices = " if each > 1 and processes > 1 else ""
    return f"{product}{workers.size} workers"


def data_words(feed: DeviceFeed) -> str:
    """How many examples the data has."""
    if not feed.has_epochs:
        return f"{feed.samplers[0].name} without a known end"
    return f"{len(feed.source)} examples, {feed.samplers[0].steps_per_epoch} steps an epoch"


def slice_of(local_batch: int, before: int) -> int:
    """Slice size of at most `before`, to bound memory; 0 without slices."""
    slices = -(-local_batch // before)
    return -(-local_batch // slices) if slices > 1 else 0


def rate_words(experiment: Experiment, factor: float, scaling: str) -> str:
    """How the learning rate of each worker comes about."""
    lr = experiment.optim.lr
    if optimizers.has_own_rate(experiment.optim):
        return f"learning rates are those of optimizer {experiment.optim.name}"
    if experiment.schedule.rate:
        return f"lr as schedule.rate says, x {factor:g} ({scaling})"
    return f"lr {lr:g} x {factor:g} ({scaling}) = {lr * factor:g}"
