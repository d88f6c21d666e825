"""The plan of a run: an experiment's durations, batches and rates in numbers, for these workers.

An experiment has epochs, a batch over all workers and a rate that may grow with their number. A run needs numbers of
steps, a batch for each worker and a rate for every step. `make_plan` opens the data, whose length turns one into the
other, before anything is compiled. The functions of the step, state 0 and the run are all made from this one record.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce import algorithms
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.comm.topology import Workers, alone
from jaxmpi.config import durations, schema
from jaxmpi.config.optim import Optim
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import Batch
from jaxmpi.data.feed import DeviceFeed, open_feed, open_validation, reshard_feed
from jaxmpi.optim import optimizers, schedules
from jaxmpi.rules import registry
from jaxmpi.tasks.base import Task
from jaxmpi.tasks.registry import make_task
from jaxmpi.trainer.timetable import Timetable

DRY_RUN_STEPS = 2  # the first step may compile another program than those that follow


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an experiment is on these workers."""

    experiment: Experiment  # its model sized to the classes of the data
    workers: Workers
    task: Task
    feed: DeviceFeed
    validation: dict[str, DeviceFeed]  # by the prefix of the set's figures
    shapes: tuple[PyTree, PyTree]  # of params and model state, traced once: GoogLeNet takes a second
    clock: schedules.Clock
    timetable: Timetable
    lr: optax.Schedule  # by step, scaling included
    has_lr: bool  # False: the user's own optimizer was made with its rates
    headline: str
    data: dict[str, Any]  # facts that distinguish the data from other data, wherever it lies
    scaled_for: int  # number of workers with which the run began
    micro_batch: int  # examples of an accumulation slice; 0: no accumulation
    requested: str = ""  # the strategy as the experiment has it, perhaps `auto`
    notes: tuple[str, ...] = ()  # reasons for what was left open, for the log

    @property
    def local_batch(self) -> int:  # examples of a worker and step
        return self.feed.samplers[0].local_batch

    @property
    def param_shapes(self) -> PyTree:
        return self.shapes[0]

    @property
    def strategy(self) -> str:  # in full, as asa:32
        name = self.experiment.exchange.strategy
        return name if is_compressor(name) else algorithms.parse(name).name

    @property
    def exchanges(self) -> bool:  # with strategy none params of workers drift apart
        return algorithms.exchanges(self.strategy)

    def with_fields(self, **fields: Any) -> Self:
        """The plan with other fields of the experiment, which change no number of the plan."""
        return replace(self, experiment=replace(self.experiment, **fields))

    def with_exchange(self, **options: Any) -> Self:
        """The plan with other options of the exchange."""
        return self.with_fields(exchange=replace(self.experiment.exchange, **options))

    def with_note(self, text: str) -> Self:
        """The plan with one more line for the log."""
        return replace(self, notes=(*self.notes, text))

    def examples(self, step: int) -> int:
        """Examples seen by all workers after `step` steps, counting short batches exactly."""
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
        return init_model(self.task, self.feed, key)

    def eval_batches(self, feed: DeviceFeed) -> Generator[Batch, None, None]:
        """The batches of a validation set that an evaluation takes."""
        sampler, text = feed.samplers[0], f"{DRY_RUN_STEPS}st" if self.experiment.dry_run else self.experiment.eval_for
        steps = sampler.steps_per_epoch
        stop = min(steps, durations.duration_steps(text, steps, sampler.effective_batch, steps)) if text else None
        return feed.batches(stop=stop)

    def mode_of(self, figure: str) -> str:
        """`monitor_mode` of the monitored figure, `Task.mode_of` of others, of any validation set."""
        if figure == self.experiment.monitor and self.experiment.monitor_mode != "auto":
            return self.experiment.monitor_mode
        for prefix in self.validation:
            figure = figure.removeprefix(prefix)
        return self.task.mode_of(figure)

    def lr_of(self, step: int) -> float | None:
        """The learning rate of a step, counted from 1, if known."""
        return np.asarray(jax.jit(self.lr)(max(step - 1, 0))).item() if self.has_lr else None


def init_model(task: Task, feed: DeviceFeed, key: jax.Array) -> tuple[PyTree, PyTree]:
    """Params and model state of a task, initialised on zeros shaped as the feed's examples."""
    return task.init(key, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), feed.example()))


def make_plan(experiment: Experiment, workers: Workers, scaled_for: int = 0, before: Plan | None = None) -> Plan:
    """Open the data and work out batches, steps and learning rate; all ranks call it."""
    scaled_for = scaled_for or workers.size
    is_other = scaled_for != workers.size
    local_batch = schema.local_batch(experiment, workers.size, uneven=is_other)
    effective_batch = experiment.effective_batch if is_other else local_batch * workers.size
    # A worker of a smaller job has more examples: in slices, it needs no more memory than before.
    slices = -(-local_batch // -(-effective_batch // scaled_for))
    micro_batch = experiment.micro_batch or (-(-local_batch // slices) if slices > 1 else 0)
    wanted_classes = experiment.model.classes if experiment.model else 0
    if before:
        feed = reshard_feed(before.feed, workers, micro_batch)
        validation = {prefix: reshard_feed(each, workers) for prefix, each in before.validation.items()}
        facts = before.data["the data"]
    else:
        feed = open_feed(experiment, "train", effective_batch, workers, micro_batch)
        experiment = replace(experiment, model=feed.model)
        # Asynchronous workers do not meet, so each evaluates alone.
        evaluating, batch = (alone(workers), local_batch) if workers.asynchronous else (workers, effective_batch)
        validation = open_validation(experiment, batch, evaluating, pool=feed.pool)
        if experiment.monitor == "eval_loss":
            experiment = replace(experiment, monitor=f"{next(iter(validation))}loss")
        held_out = {f"validation{prefix[4:-1]}": each.facts() for prefix, each in validation.items()}
        facts = {"train": feed.facts(), **held_out}
        workers.processes.assert_same("the data", facts)
    task = make_task(experiment)
    check_durations(experiment, feed)
    epoch_steps = feed.samplers[0].steps_per_epoch
    clock, timetable = schedule_events(experiment, epoch_steps, effective_batch)
    run_clock = clock  # schedules are those of the whole run
    if experiment.dry_run:
        last = min(DRY_RUN_STEPS, clock.total_steps)
        run_clock = clock._replace(total_steps=last)
        timetable = timetable._replace(log_every=1, eval_every=last, save_every=last, total_steps=last, periods_s={})
    factor = rate_factor(experiment.optim, effective_batch)
    if is_other and registry.RULES[experiment.rule.name].sums_updates:
        factor *= scaled_for / workers.size  # fewer updates are summed, each of more examples
    # Ranks that traced a large model at once would take each other's cores.
    shapes = (
        before.shapes
        if before
        else workers.processes.bcast_from_host_leader(
            lambda: jax.eval_shape(lambda key: init_model(task, feed, key), jax.random.key(0))
        )
    )
    plan = Plan(
        experiment=experiment,
        workers=workers,
        task=task,
        feed=feed,
        validation=validation,
        shapes=shapes,
        clock=run_clock,
        timetable=timetable,
        lr=schedules.schedule(experiment.schedule, clock, experiment.optim.lr * factor, scaled_for, factor),
        has_lr=not optimizers.has_own_rate(experiment.optim),
        headline="",
        data={"the data": facts},
        scaled_for=scaled_for,
        micro_batch=micro_batch,
        requested=experiment.exchange.strategy,
    )
    return replace(plan, headline=describe(plan, factor, wanted_classes))


def schedule_events(
    experiment: Experiment, steps_per_epoch: int, effective_batch: int
) -> tuple[schedules.Clock, Timetable]:
    """The run's length, and when what is due: in steps, and by the clock where a duration is given in time."""
    given = {
        "compare": experiment.replica_check_every,
        "log": f"{experiment.log_every}st" if isinstance(experiment.log_every, int) else experiment.log_every,
        "evaluate": experiment.eval_every,
        "save": experiment.checkpoint_every,
        "stop": experiment.train_for,
    }
    seconds = {event: durations.duration_seconds(text) for event, text in given.items()}
    total_steps = durations.UNLIMITED
    if seconds["stop"] is None:
        total_steps = max(durations.duration_steps(experiment.train_for, steps_per_epoch, effective_batch), 1)
    clock = schedules.Clock(steps_per_epoch, effective_batch, total_steps)
    steps = {event: clock.steps(text) if seconds[event] is None else 0 for event, text in given.items()}
    timetable = Timetable(
        compare_every=steps["compare"] or total_steps,
        log_every=steps["log"] or total_steps,
        eval_every=steps["evaluate"] or total_steps,
        save_every=steps["save"] or total_steps,
        total_steps=total_steps,
        periods_s={event: period for event, period in seconds.items() if period},
    )
    return clock, timetable


def rate_factor(optim: Optim, effective_batch: int) -> float:
    """The factor on lr: 1, or effective batch / `lr_for_batch`, or its square root."""
    ratio = effective_batch / optim.lr_for_batch if optim.lr_for_batch else 1.0
    return ratio**0.5 if optim.lr_scaling == "sqrt" else ratio


def check_durations(experiment: Experiment, feed: DeviceFeed) -> None:
    """Raise `UsageError` if durations or the schedule count epochs that the data does not have."""
    if feed.has_epochs:
        return
    schedule, names = experiment.schedule, ("train_for", "eval_every", "checkpoint_every", "replica_check_every")
    given = {name: getattr(experiment, name) for name in names}
    given |= {f"schedule.{name}": str(getattr(schedule, name)) for name in ("warmup", "span", "boundaries")}
    if schedule.decay == "poly_epoch" or schedule.warmup_shape == "geometric":
        given["schedule"] = "one that changes once an epoch"
    for name, got in given.items():
        if "ep" in got:
            raise UsageError(
                f"{name}: got {got} with {feed.source.name}, a stream, whose epochs have no known length: give steps, "
                "as in 500st"
            )


def describe(plan: Plan, factor: float, wanted_classes: int) -> str:
    """Model, workers, batches and data; and how the learning rate comes about."""
    experiment, workers, feed, lr = plan.experiment, plan.workers, plan.feed, plan.experiment.optim.lr
    each, processes, model = len(workers.mine), workers.processes.size, experiment.model
    lines = []
    if model and model.classes != wanted_classes:
        lines.append(
            f"{feed.source.name} has {feed.source.classes} classes: {model.name} is made with as many, not with the "
            f"experiment's {wanted_classes}"
        )
    product = f"{processes} processes x {each} devices = " if each > 1 and processes > 1 else ""
    data = f"{len(feed.source)} examples, {plan.clock.steps_per_epoch} steps an epoch"
    if not feed.has_epochs:
        data = f"{feed.samplers[0].name} without a known end"
    is_timed = plan.clock.total_steps == durations.UNLIMITED
    length = f"for {experiment.train_for}" if is_timed else f"{plan.clock.total_steps} steps"
    lines.append(
        f"{model.name if model else experiment.task.name}: {product}{workers.size} workers x local batch "
        f"{plan.local_batch} = effective batch {plan.clock.effective_batch}; {data}, {length}"
    )
    scaling = f" x {factor:g}" if factor != 1 else ""
    if for_batch := experiment.optim.lr_for_batch:
        root = "square root of " if experiment.optim.lr_scaling == "sqrt" else ""
        scaling += f" ({root}batch {plan.clock.effective_batch} / {for_batch})"
    if optimizers.has_own_rate(experiment.optim):
        rate = f"learning rates are those of optimizer {experiment.optim.name}"
    elif experiment.schedule.rate:
        rate = f"lr as schedule.rate says{scaling}"
    else:
        rate = f"lr {lr:g}{scaling} = {lr * factor:g}" if scaling else f"lr {lr:g}"
    if plan.scaled_for != workers.size:
        slices = f"; in slices of {plan.micro_batch}" if plan.micro_batch else ""
        rate += f", as with the {plan.scaled_for} workers that the run began with{slices}"
    return "\n".join([*lines, rate])
