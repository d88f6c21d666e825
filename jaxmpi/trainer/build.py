"""The parts of a run: its plan in numbers, its compiled functions, its state 0.

An experiment has epochs, rates and the name of a strategy. A run needs numbers of steps, compiled programs and arrays
on devices. `make_plan` opens the data and turns durations and rates into steps. `build_functions` joins task, rule and
exchange into a step: one program, or gradients, exchange and update apart. Several ranks on CPUs get the split one by
default. Every rank must compile a program that holds a communicator, so that one is kept small (docs/decisions/0007).
`initial_states` makes the params on rank 0, sends them to all ranks and compares their hashes.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce import algorithms, comm_thread_calls, compression, overlap
from jaxmpi.allreduce.algorithms.table import fitting_on_host, with_halves
from jaxmpi.allreduce.api import BUCKET_BYTES, Choice, Op, exchange, exchange_gradients
from jaxmpi.allreduce.autotune import choose, is_auto
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.comm_thread_handlers import exchange_handlers
from jaxmpi.allreduce.late_gather import LateGather, UnderWay
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.allreduce.sharded import Shards, check_floats, shards_of
from jaxmpi.allreduce.sharded_local_devices import ShardsOfDevices
from jaxmpi.checkpoint import orbax_export, run_directory, trained
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses, Processes
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.shared_compile import compiled_for, loaded_jit
from jaxmpi.comm.topology import Workers, alone
from jaxmpi.config import durations, exchange_config, schema
from jaxmpi.config.optim import Optim
from jaxmpi.config.schema import Experiment
from jaxmpi.core import errors, train_state
from jaxmpi.core.deals import Deal, deal
from jaxmpi.core.pytrees import PyTree, mean_of_floats, size_bytes, tree_digest
from jaxmpi.core.train_state import TrainState, create
from jaxmpi.input_pipeline.device_feed import DeviceFeed, dealt_anew, open_feed
from jaxmpi.observe.flops import StepFlops
from jaxmpi.observe.step_timing import ComputeOnlyStep
from jaxmpi.optim import optimizers, schedules
from jaxmpi.recover.replica_check import fingerprints_by
from jaxmpi.rules import base, registry
from jaxmpi.rules.averaged import averaged, schedule_free
from jaxmpi.rules.base import Rule
from jaxmpi.runtime import host_callbacks
from jaxmpi.tasks.base import Task
from jaxmpi.tasks.registry import task_of
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.compatibility import AVERAGES, LATE, NothingLate, UnfitForOverlap, check_compatible
from jaxmpi.trainer.timetable import Timetable

# ---------------------------------------------------------------- its plan


class TrainingPlan(NamedTuple):
    """An experiment's durations and rates in numbers."""

    task: Task
    feed: DeviceFeed
    validation: DeviceFeed
    clock: schedules.Clock
    timetable: Timetable
    lr: optax.Schedule  # by step, scaling included
    has_lr: bool  # else the user's own optimizer has its rates to itself
    headline: str
    data: dict[str, Any]  # what distinguishes it from other data, wherever it lies
    scaled_for: int  # workers that the run began with, by which lr is scaled
    micro_batch: int  # examples of an accumulation slice; 0: no accumulation

    def examples(self, step: int) -> int:
        """Examples that all workers have seen after `step` steps: a short last step of an epoch counts as it is."""
        epochs, batches = divmod(step, self.clock.steps_per_epoch)
        return epochs * len(self.feed.source) + batches * self.clock.effective_batch

    def step(self, examples: float) -> int:
        """The last step after which all workers have seen no more than these examples."""
        epochs, rest = divmod(int(examples), len(self.feed.source))
        return min(epochs * self.clock.steps_per_epoch + rest // self.clock.effective_batch, self.clock.total_steps)

    def epoch(self, step: int) -> float:
        """Epochs after `step` steps; 0 if the data has none."""
        return step / self.clock.steps_per_epoch if self.feed.has_epochs else 0.0

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Params and model state of state 0."""
        return self.task.init(key, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.feed.example()))

    def params(self) -> PyTree:
        """Shapes of the params."""
        return jax.eval_shape(self.init, jax.random.key(0))[0]

    def lr_of(self, step: int) -> float | None:
        """The learning rate by which a step is made, counted from 1, if it is known."""
        return np.asarray(self.lr(max(step - 1, 0))).item() if self.has_lr else None


def make_plan(
    experiment: Experiment, workers: Workers, scaled_for: int = 0, before: TrainingPlan | None = None
) -> TrainingPlan:
    """Batches, steps and learning rate; `feed.model` is the experiment's, made to fit the data's classes.

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
        feed, validation = dealt_anew(before.feed, workers, micro_batch), dealt_anew(before.validation, workers)
        facts = before.data["the data"]
    else:
        feed = open_feed(experiment, "train", effective_batch, workers, micro_batch)
        experiment = dataclasses.replace(experiment, model=feed.model)
        # Workers that do not meet cannot share an evaluation.
        evaluating, batch = (alone(workers), local_batch) if workers.apart else (workers, effective_batch)
        validation = open_feed(experiment, "validation", batch, evaluating, pool=feed.pool)
        facts = {"train": feed.facts(), "validation": validation.facts()}
        workers.processes.assert_same("the data", facts)
    task, name = task_of(experiment), experiment.model.name if experiment.model else experiment.task.name
    check_durations(experiment, feed)
    epoch_steps = feed.samplers[0].steps_per_epoch
    total_steps = max(durations.steps(experiment.train_for, epoch_steps, effective_batch), 1)
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
        task,
        feed,
        validation,
        clock,
        Timetable(
            compare_every=clock.steps(experiment.replica_check_every) or total_steps,
            log_every=experiment.log_every,
            eval_every=clock.steps(experiment.eval_every) or total_steps,
            save_every=clock.steps(experiment.checkpoint_every) or total_steps,
            total_steps=total_steps,
        ),
        schedules.schedule(experiment.schedule, clock, lr * factor, scaled_for, factor),
        not optimizers.has_own_rate(experiment.optim),
        headline,
        {"the data": facts},
        scaled_for,
        micro_batch,
    )


def by_batch(optim: Optim, local_batch: float) -> float:
    """The factor on lr for so many examples a worker, as the run began."""
    return local_batch / optim.lr_for_batch if optim.lr_for_batch else 1.0


def check_durations(experiment: Experiment, feed: DeviceFeed) -> None:
    """Raise `UsageError` if a duration or a schedule counts epochs of data that has none."""
    if feed.has_epochs:
        return
    schedule, instead = experiment.schedule, "whose epochs have no known length: give steps, as in 500st"
    names = ("train_for", "eval_every", "checkpoint_every", "replica_check_every")
    given = {name: getattr(experiment, name) for name in names}
    given |= {"schedule.warmup": schedule.warmup, "schedule.span": schedule.span}
    given |= {"schedule.boundaries": " ".join(schedule.boundaries)}
    for name, value in given.items():
        errors.check("ep" not in value, f"{name}: got {value} with {feed.source.name}, a stream, {instead}")
    by_epoch = schedule.decay == "poly_epoch" or schedule.warmup_shape == "geometric"
    errors.check(not by_epoch, f"schedule: got one that changes once an epoch with {feed.source.name}, {instead}")


def worker_words(workers: Workers) -> str:
    """How many workers there are, and of how many processes if these drive several devices each."""
    each, processes = len(workers.mine), workers.processes.size
    product = f"{processes} processes x {each} devices = " if each > 1 and processes > 1 else ""
    return f"{product}{workers.size} workers"


def data_words(feed: DeviceFeed) -> str:
    """How many examples the data has."""
    if not feed.has_epochs:
        return f"{feed.samplers[0].name} without a known end"
    return f"{len(feed.source)} examples, {feed.samplers[0].steps_per_epoch} steps an epoch"


def slice_of(local_batch: int, before: int) -> int:
    """Examples of a slice if a worker has more to do than `before`, so that it needs no more memory; else 0."""
    slices = -(-local_batch // before)
    return -(-local_batch // slices) if slices > 1 else 0


# ---------------------------------------------------------------- its functions

# `auto` shards updates if a worker saves so much of the optimizer's state, and sums gradients early if so much of them.
SAVED_BYTES = BUCKET_BYTES


class Ahead(NamedTuple):
    """The largest program of a step, before it runs: it is compiled once, here or with the step."""

    compiled: Callable[[TrainState, train_state.Batch], jax.stages.Compiled]
    is_whole: bool  # of the whole step; else of its gradients


class Functions(NamedTuple):
    """The compiled pieces of a run."""

    rule: Rule
    train_step: Callable[[TrainState, train_state.Batch], tuple[TrainState, steps.Metrics]]
    eval_step: Callable[[PyTree, PyTree, train_state.Batch], steps.EvalMetrics]
    mean_state: Callable[[PyTree], PyTree]  # model state, its floating-point leaves averaged over workers
    eval_params: Callable[[PyTree, PyTree], PyTree]  # (params, rule state) -> params to evaluate
    fingerprints: Callable[[PyTree], np.ndarray]  # u32[workers of this process, leaves]
    predict: Callable[
        [PyTree, PyTree, train_state.Batch], Any
    ]  # of one worker: (params, model state, batch) -> outputs
    strategy: str
    form: str  # which jits the step is made of, for the log
    flops: StepFlops  # of a worker's gradients
    ahead: Ahead
    asked: str = ""  # the strategy as the experiment has it, perhaps `auto`
    why: str = ""  # what `auto` came to, for the log
    compute_only: ComputeOnlyStep | None = None  # if nothing else shows the time of an exchange
    settled: Callable[[TrainState], TrainState] = lambda state: state  # whose params are whole, for those who look

    @property
    def exchanges(self) -> bool:
        """Return True if workers exchange anything; with strategy none their params drift apart."""
        return not self.strategy.startswith("none")


def settle_exchange(
    experiment: Experiment, plan: TrainingPlan, workers: Workers, kept: run_directory.StoredSettings | None
) -> tuple[Experiment, str]:
    """`auto` as a strategy, a bucket size and overlap, and a line that says why; empty if nothing was left open.

    They are those of the run that is resumed, so that it goes on bit for bit; if there are none, or these ranks
    cannot have them, those that a probe finds.
    """
    asked = experiment.exchange
    if registry.is_asynchronous(experiment.rule):
        return dataclasses.replace(experiment, exchange=dataclasses.replace(asked, strategy=to_center(asked))), ""
    if not is_auto(asked.strategy):
        return experiment, ""
    stored = run_directory.settled_exchange(kept, asked)
    unfit = partial(unfit_slices_of, experiment, workers, plan) if asked.shard_update == "on" else None
    if stored and can_go_on(stored["strategy"], asked, workers.comm, unfit):
        exchange = dataclasses.replace(asked, **stored)
        off = ", overlap off" if exchange.overlap != asked.overlap else ""
        why = f"{asked.strategy}: {exchange.strategy}{off}, as before"
        return dataclasses.replace(experiment, exchange=exchange), why
    sizes = [leaf.size for leaf in jax.tree.leaves(plan.params())]
    is_beside, _ = overlap.chosen(asked.overlap, "asa:32", workers.comm, unfit_for_overlap(experiment, workers, plan))
    alone = with_halves(workers.comm.hosts) if unfit else ()
    beside = tuple(name for name in alone if not unfit(name)) if unfit else fitting_on_host(workers.comm.hosts)
    exchange, why = probed(asked, workers.comm, sizes, beside if is_beside else (), alone)
    gone = f"{stored['strategy']}, as before, cannot be here; " if stored else ""
    return dataclasses.replace(experiment, exchange=exchange), gone + why


def settle_shards(experiment: Experiment, plan: TrainingPlan, workers: Workers) -> tuple[Experiment, str]:
    """`--exchange.shard-update auto` as on or off, and a line that says why; empty if it was not left open.

    On if it can be, each worker holds at least SAVED_BYTES less, and rows of whole tensors have not too much padding.
    Communicates nothing: all ranks know the same.
    """
    if experiment.exchange.shard_update != "auto":
        return experiment, ""
    on, off = (with_shards(experiment, word) for word in ("on", "off"))
    why, strategy = why_whole(on, plan, workers), on.exchange.strategy
    if not why and not shares_params(on, workers, strategy) and chosen_overlap(off, workers, plan, strategy)[0]:
        unfit = unfit_slices(on, workers, plan)
        why = f"the exchange goes on beside the backward pass, and sharded it could not: {unfit}" if unfit else ""
    if not why:
        whole, own = (state_bytes(each, plan, workers) for each in (off, on))
        dealt, most = deal_of(on, plan, workers), most_padding(whole / size_bytes(plan.params()), workers.size)
        if dealt and dealt.padding > most:
            filled = f"filled up by {dealt.padding:.0%} of the params, above {most:.0%}".replace("%", " %")
            why = f"rows of whole tensors would be {filled}: more would be copied than updates save"
        elif whole - own >= SAVED_BYTES:
            of = f"{own / 1e6:.3g} of {whole / 1e6:.3g} MB of the optimizer's state"
            return on, f"exchange.shard_update auto: on, each of {workers.size} workers holds {of}"
        else:
            saved = f"{(whole - own) / 1e6:.3g} MB of the optimizer's state"
            why = f"each worker would hold {saved} less, which is less than a bucket of {SAVED_BYTES / 1e6:.3g}"
    return off, f"exchange.shard_update auto: off, {why}"


def most_padding(arrays: float, workers: int) -> float:
    """Padding of rows, as a share of n params, with which a step of w workers copies as much as without sharding.

        8 p (w - 1) / w = (3 + 2 s) (1 - (1 + p) / w)

    Padding p n travels in both halves, read and written by who sends and by who receives. An update reads and writes
    gradients, params twice and s arrays of state twice, of which a row is left.

    Args:
        arrays: s, of the optimizer's state, in params.
    """
    passes = 3 + 2 * arrays
    return passes * (workers - 1) / (8 * (workers - 1) + passes)


def with_shards(experiment: Experiment, word: str) -> Experiment:
    """The experiment with sharded updates on or off; without them nothing is gathered, and nobody needs a copy."""
    whole = {} if word == "on" else {"gather": "in-step", "gather_wire": "32", "buddy": 0}
    return dataclasses.replace(
        experiment, exchange=dataclasses.replace(experiment.exchange, shard_update=word, **whole)
    )


def why_whole(on: Experiment, plan: TrainingPlan, workers: Workers) -> str:
    """Why each worker updates all params; empty if updates can be sharded.

    Args:
        on: the experiment with sharded updates, its strategy chosen.
    """
    if workers.size == 1:
        return "there is one worker"
    try:
        check_compatible(on)
        build_rule(on, plan, workers, exchange_for(on, plan, workers, on.exchange.strategy, Order(), False))
        chosen_overlap(on, workers, plan, on.exchange.strategy)
    except errors.UsageError as error:
        return str(error)
    return ""


def state_bytes(experiment: Experiment, plan: TrainingPlan, workers: Workers) -> int:
    """Bytes of the rule's state that one worker holds."""
    exchange = exchange_for(experiment, plan, workers, experiment.exchange.strategy, Order(), False)
    state = rule_state(build_rule(experiment, plan, workers, exchange), plan.params())
    return size_bytes(state)


def rule_state(rule: Rule, params: PyTree) -> PyTree:
    """Shapes of the rule's state of one worker."""
    if rule.sharding:
        return jax.eval_shape(rule.sharding.init, params, jax.ShapeDtypeStruct((), np.int32))
    return jax.eval_shape(rule.init, params)


def probed(
    asked: exchange_config.ExchangeConfig,
    comm: Comm,
    sizes: Sequence[int],
    beside: Sequence[str],
    alone: Sequence[str] = (),
) -> tuple[exchange_config.ExchangeConfig, str]:
    """Let a probe choose for these leaves, and say why: among strategies that overlap, if overlap pays.

    Args:
        beside: algorithms that can travel beside the step; none if overlap is off.
        alone: those that can be without overlap; none given: all.
    """
    verdict = choose(comm, sizes, asked.strategy, asked.bucket_bytes, beside or alone)
    if beside and asked.overlap == "auto" and asked.gather != "late" and not verdict.overlap:
        without, why = probed(dataclasses.replace(asked, overlap="off"), comm, sizes, (), alone)
        return without, f"{why}; overlap off: most of an exchange is work for cores, which compute already"
    return dataclasses.replace(asked, strategy=verdict.strategy, bucket_bytes=verdict.bucket_bytes), verdict.why


def can_go_on(
    name: str, asked: exchange_config.ExchangeConfig, comm: Comm, unfit: Callable[[str], str] | None = None
) -> bool:
    """Return True if a strategy that `auto` took before is possible on these ranks, with the overlap asked for now.

    Args:
        unfit: of sharded updates: why the halves of an algorithm cannot travel beside the step.
    """
    strategy, algorithm = algorithms.parse(name), name.partition(":")[0]
    must = comm.size > 1 and (asked.overlap in ("on", "delayed") or asked.gather == "late")
    if unfit:
        is_able = bool(strategy.spec.halves) and not (must and unfit(algorithm))
    else:
        is_able = not must or strategy.has_sum_on_host(comm.hosts)
    return is_able and strategy.spec.fits(comm.hosts)


def to_center(asked: exchange_config.ExchangeConfig) -> str:
    """The way of params between workers and a center, in the wire that is asked for."""
    if is_auto(asked.strategy):
        return f"root:{asked.strategy.partition(':')[2] or '32'}"
    return f"root:{algorithms.parse(asked.strategy).name.partition(':')[2]}"


def build_functions(experiment: Experiment, workers: Workers, plan: TrainingPlan) -> Functions:
    """The step in the form that suits these workers.

    fused: one jit; only here can the exchange run beside the backward pass. split: gradients, exchange and update are
    jits of their own, so that one rank per host compiles the two big ones and the others read them from the cache; a
    jit that holds a communicator can never be read from it. So with synchronised batch statistics every rank compiles
    the gradients for itself.
    """
    gradients, evaluate, predict = pieces(experiment, workers, plan)
    order, flops = Order(), StepFlops()
    over = partial(over_mesh, mesh=workers.mesh, control=workers.processes) if workers.mesh else jax.jit
    once: Callable = over if workers.devices > 1 else workers.comm.jit
    to_share: Callable = jax.jit if experiment.batch_statistics == "synchronised" else once
    spelling = experiment.exchange.strategy
    strategy = spelling if compression.is_compressor(spelling) else algorithms.parse(spelling).name
    is_early, why = is_scattered_early(experiment, workers, plan, strategy)
    shares = shares_params(experiment, workers, strategy)
    is_beside, why_beside = chosen_overlap(experiment, workers, plan, strategy)
    why = why if shares else why_beside
    is_late = experiment.exchange.gather == "late" and workers.size > 1
    if is_late:
        unfit = "" if is_beside else why
        unfit = NothingLate.SHARED if shares else unfit
        unfit = unfit or NothingLate.WHOLE * bool(deal_of(experiment, plan, workers))
        unfit = unfit or NothingLate.GPUS * bool(host_callbacks.why_copies())
        errors.check(not unfit, LATE.format(reason=unfit))
    share = exchange_of_devices("asa:32", "mean", workers) or partial(exchange, strategy="asa32", comm=workers.comm)
    mean_state = partial(mean_of_floats, share=share) if experiment.batch_statistics != "local" else own_state
    exchange_of = partial(exchange_for, experiment, plan, workers, strategy, order)
    skips = experiment.on_nonfinite == "skip"
    keeps = skips or experiment.on_rank_loss == "shrink"  # the state before a step, until that step counts
    gradients = steps.marked(gradients) if skips else gradients
    made = partial(Functions, predict=predict, strategy=strategy, flops=flops)
    if is_split(experiment, workers) and not is_beside:
        keep_operands = partial(jit_kept, once) if keeps else once
        no_exchange = base.NoExchange()
        exchange_now = exchange_of(False)
        rule = build_rule(experiment, plan, workers, no_exchange.of(exchange_now._replace(jit=keep_operands)))
        gradients = order.of(gradients, flops.count)
        if is_early:
            assert isinstance(workers.comm, RankComm)
            assert isinstance(exchange_now.shards, Shards)
            gradients = exchange_now.shards.scattering(gradients, workers.comm.sum_name)
        differentiated = to_share(gradients)
        compiled = order.shared(differentiated, workers.processes)
        checked = once(steps.or_before) if skips else None
        step = partial(steps.train_step, gradients=compiled, rule=rule, guard=checked)
        each = f", of {workers.devices} devices of each process" * (workers.devices > 1)
        jits = "gradients with their sum, and update" if is_early else "gradients, exchange and update"
        return made(
            rule=rule,
            train_step=step,
            eval_step=once(evaluate),
            mean_state=mean_state,
            eval_params=rule.eval_params or own_params,
            fingerprints=fingerprints_by(once, workers),
            form=f"split form: {jits} are jits of their own{each}; {why}",
            ahead=Ahead(partial(compiled_gradients, differentiated), False),
            compute_only=None if is_early else ComputeOnlyStep(no_exchange.during(step), True),
        )
    gradients = steps.in_place(gradients) if workers.comm.size == 1 else gradients  # no exchange is to begin early
    rule = build_rule(experiment, plan, workers, exchange_of(is_beside))
    eval_params, guard = rule.eval_params or own_params, steps.or_before if skips else None
    step = partial(steps.train_step, gradients=order.of(gradients, flops.count), rule=rule, guard=guard)
    still = base.NoExchange(is_on=True).of(exchange_of(False))
    quiet = partial(steps.train_step, gradients=gradients, rule=build_rule(experiment, plan, workers, still))
    if workers.mesh is None:
        donated = () if experiment.on_rank_loss == "shrink" else (0,)
        jitted = (to_share if is_beside else jax.jit)(step, donate_argnums=donated)
        # One rank of a host traces the step, and so knows the order by which an average is gathered beside a program.
        each, mean, params = (
            once,
            mean_state,
            once(eval_params) if is_beside and rule.sharding and rule.eval_params else eval_params,
        )
        compute_only, form = None if is_beside else ComputeOnlyStep(jax.jit(quiet), False), "one jit"
    else:
        jitted = over(step, donate_argnums=(0,))
        each, mean, params = over, over(mean_state), over(eval_params)
        compute_only, form = ComputeOnlyStep(over(quiet), False), f"one jit over {workers.size} devices"
    functions = made(
        rule=rule,
        train_step=jitted,
        eval_step=each(evaluate),
        mean_state=mean,
        eval_params=params,
        fingerprints=fingerprints_by(each, workers),
        form=f"fused form: {form}; {why}",
        ahead=Ahead(partial(compiled_step, jitted), True),
        compute_only=compute_only,
    )
    if not is_late:
        return functions
    shards = exchange_of(is_beside).shards
    assert isinstance(shards, Shards)
    gather = LateGather(shards, plan.params())
    inner = build_rule(experiment, plan, workers, exchange_of(is_beside)._replace(shards=gather.sliced))
    return with_late_gather(functions, inner, gather, order.of(gradients, flops.count), to_share)


def with_late_gather(
    made: Functions, inner: Rule, gather: LateGather, gradients: Callable, jit: Callable[..., Callable]
) -> Functions:
    """The functions of a step that leaves its new params under way, and takes whole ones as well.

    Args:
        made: with the gather in the step.
        inner: the rule with `gather.sliced`.
        gradients: the step's, not compiled.
        jit: for its programs.
    """
    measured = inner.measured and gather.update(inner.measured)
    rule = inner._replace(update=gather.update(inner.update), measured=measured)
    step = partial(steps.train_step, gradients=gather.gradients(gradients), rule=rule)
    jitted, begin, settle = jit(step, donate_argnums=(0,)), jit(gather.begun), jit(gather.settled)

    def begun(state: TrainState) -> TrainState:
        return state if isinstance(state.params, UnderWay) else state._replace(params=begin(state.params))

    def settled(state: TrainState) -> TrainState:
        return state._replace(params=settle(state.params)) if isinstance(state.params, UnderWay) else state

    return made._replace(
        train_step=lambda state, batch: jitted(begun(state), batch),
        ahead=Ahead(lambda state, batch: compiled_step(jitted, begun(state), batch), True),
        settled=settled,
        form=f"{made.form}; new params are gathered behind the next forward pass",
    )


def compiled_gradients(gradients: Callable, state: TrainState, batch: train_state.Batch) -> jax.stages.Compiled:
    """The program of the split form's gradients."""
    return compiled_for(gradients, (state.params, state.model_state, batch, state.key, state.step))


def compiled_step(step: Callable, state: TrainState, batch: train_state.Batch) -> jax.stages.Compiled:
    """The program of the fused form."""
    return compiled_for(step, (state, batch))


def jit_kept(jit: Callable, function: Callable, **options: Any) -> Callable:
    """A jit without donation: what went in may still be the outcome."""
    return jit(function, **{name: value for name, value in options.items() if name != "donate_argnums"})


def over_mesh(
    function: Callable, mesh: jax.sharding.Mesh, control: Processes, donate_argnums: tuple[int, ...] = ()
) -> Callable:
    """`steps.over_devices`; if ranks share a host's cores one of them compiles for all."""
    jitted = steps.over_devices(function, mesh, donate_argnums)
    if isinstance(control, MpiProcesses) and control.local_size > 1 and jax.default_backend() == "cpu":
        return loaded_jit(jitted, list(mesh.devices.flat), control)
    return jitted


def exchange_for(
    experiment: Experiment, plan: TrainingPlan, workers: Workers, strategy: str, order: Order, is_beside: bool
) -> base.Exchange:
    """The exchange of this run, beside the program or in it."""
    size_bytes = experiment.exchange.bucket_bytes
    options: dict[str, Any] = {"strategy": strategy, "bucket_bytes": size_bytes, "comm": workers.comm}
    dealt = deal_of(experiment, plan, workers) if experiment.exchange.shard_update == "on" else None
    if experiment.exchange.shard_update == "on" and workers.size > 1:
        is_early, _ = is_scattered_early(experiment, workers, plan, strategy)
        shards = shards_of(
            strategy,
            "mean",
            workers.comm,
            size_bytes,
            clip_norm=experiment.optim.clip_norm,
            gives_square=sees_noise(experiment, plan, workers),
            deal=dealt if workers.devices == 1 else None,
            gather_wire=experiment.exchange.gather_wire,
            host=workers.processes if shares_params(experiment, workers, strategy) else None,
            beside=order if is_beside else None,
            early=is_early,
        )
        if is_beside:
            exchange_handlers()
        if workers.devices > 1 and workers.mesh:
            shards = ShardsOfDevices(of=shards, mesh=workers.mesh, deal=dealt)
        return base.Exchange(partial(exchange, **options), partial(exchange, **options, op="sum"), shards=shards)
    if compression.is_compressor(strategy):
        refused = partial(exchange, **options)
        return base.Exchange(refused, refused, gradients=exchange_gradients(**options))
    options["order"] = order
    alone: dict[str, Any] = {"portable": experiment.batch_statistics != "synchronised"}
    share = partial(overlap.exchange, **alone) if is_beside else exchange
    is_late = experiment.exchange.overlap == "delayed"
    mean, sum_up = (exchange_of_devices(strategy, op, workers, size_bytes, order) for op in ("mean", "sum"))
    if mean and sum_up:
        return base.Exchange(mean, sum_up)
    if is_beside:
        exchange_handlers()  # all ranks make them together; programs that come from another rank find it
    return base.Exchange(
        partial(share, op="mean", **options),
        partial(share, op="sum", **options),
        gradients=overlap.delayed_gradients(**options, **alone) if is_late else None,
    )


def shares_params(experiment: Experiment, workers: Workers, strategy: str) -> bool:
    """Return True if sharded updates write params where all ranks of the one host read them, between programs.

    Not if the params before a step are needed until it counts.
    """
    if experiment.exchange.shard_update != "on" or workers.size == 1:
        return False
    if compression.is_compressor(strategy):
        return False
    keeps = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    is_exact = experiment.exchange.gather_wire == "32"
    is_in_reach = algorithms.parse(strategy).name == "shm:32" and jax.default_backend() == "cpu"
    return is_in_reach and is_exact and not keeps and is_split(experiment, workers) and experiment.devices == 1


def is_scattered_early(experiment: Experiment, workers: Workers, plan: TrainingPlan, strategy: str) -> tuple[bool, str]:
    """Return True if gradients go into the sum of shared params' slices as they come, and a line that says why.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    if not shares_params(experiment, workers, strategy):
        return False, ""
    asked, unfit = experiment.exchange.overlap, unfit_for_overlap(experiment, workers, plan)
    saved = size_bytes(plan.params()) * (workers.size - 1) // workers.size
    if asked == "auto" and not unfit and saved < SAVED_BYTES:
        unfit = f"{saved / 1e6:.3g} MB of gradients less are less than a bucket of {SAVED_BYTES / 1e6:.3g}"
    return overlap.chosen_in_memory(asked, unfit)


def deal_of(experiment: Experiment, plan: TrainingPlan, workers: Workers) -> Deal | None:
    """Which worker updates which leaves, if the optimizer needs whole ones; None if it can update slices of all.

    Raises:
        UsageError: it can do neither, or params are not float32.
    """
    optim, params = experiment.optim, plan.params()
    check_floats(params)
    tx = optimizers.optimizer(dataclasses.replace(optim, clip_norm=0.0), plan.lr)
    if optimizers.cut_of(optim, tx, params) == "entries":
        return None
    row = optimizers.OPTIMIZERS.get(optim.name)
    return deal(params, workers.size, row.cost if row else math.prod)


def exchange_of_devices(
    strategy: str, op: Op, workers: Workers, bucket_bytes: int | None = BUCKET_BYTES, order: Order | None = None
) -> Callable[[PyTree], PyTree] | None:
    """The exchange of trees over this process's devices with all others'; None if each process drives one.

    Args: strategy: in full, as asa:32.
    """
    if workers.devices == 1 or workers.mesh is None:
        return None
    return over_local_devices(Choice(strategy, op, workers.comm, bucket_bytes, order), workers.mesh)


def unfit_for_overlap(experiment: Experiment, workers: Workers, plan: TrainingPlan) -> str:
    """Why this step cannot hide an exchange; empty if it can."""
    if workers.devices > 1:
        return UnfitForOverlap.DEVICES.format(devices=workers.devices)
    if experiment.exchange.shard_update == "on" and (reason := unfit_slices(experiment, workers, plan)):
        return reason
    if experiment.step_mode == "split":
        return UnfitForOverlap.SPLIT
    if experiment.on_rank_loss == "shrink":
        return UnfitForOverlap.VOTES
    if registry.is_periodic(experiment.rule):
        return UnfitForOverlap.PERIODIC.format(rule=experiment.rule.name)
    if compression.is_compressor(experiment.exchange.strategy):
        return UnfitForOverlap.COMPRESSOR
    fits = plan.micro_batch in (0, plan.feed.samplers[0].local_batch) or experiment.exchange.overlap == "delayed"
    return "" if fits else UnfitForOverlap.MICRO_BATCHES


def unfit_slices_of(experiment: Experiment, workers: Workers, plan: TrainingPlan, algorithm: str) -> str:
    """`unfit_slices` with this algorithm."""
    exchange = dataclasses.replace(experiment.exchange, strategy=f"{algorithm}:32")
    return unfit_slices(dataclasses.replace(experiment, exchange=exchange), workers, plan)


def unfit_slices(experiment: Experiment, workers: Workers, plan: TrainingPlan) -> str:
    """Why the halves of a sharded exchange cannot travel beside the step; empty if they can."""
    asked = experiment.exchange
    if compression.is_compressor(asked.strategy):
        return ""  # refused for itself
    name = "asa:32" if is_auto(asked.strategy) else algorithms.parse(asked.strategy).name
    if shares_params(experiment, workers, name):
        if experiment.batch_statistics == "synchronised":
            return UnfitForOverlap.SCATTERS
        if deal_of(experiment, plan, workers):
            return UnfitForOverlap.WHOLE.format(optimizer=experiment.optim.name)
        return host_callbacks.unavailable_reason() or ""
    halves, algorithm = algorithms.parse(name).spec.halves, name.partition(":")[0]
    if not (halves and halves.on_host):
        return UnfitForOverlap.HALVES.format(algorithm=algorithm)
    if experiment.batch_statistics == "synchronised":
        return UnfitForOverlap.SLICES
    return comm_thread_calls.unavailable_reason(f"{algorithm}:{asked.gather_wire}", workers.comm) or ""


def own_state(tree: PyTree) -> PyTree:
    """Model state as it is: every worker evaluates with its own."""
    return tree


def own_params(params: PyTree, rule_state: PyTree) -> PyTree:
    """Params as they are: equal on all workers."""
    return params


def pieces(experiment: Experiment, workers: Workers, plan: TrainingPlan) -> tuple[Callable, Callable, Callable]:
    """The local gradients and the evaluation step, not yet compiled; predictions, compiled when they are called."""
    is_synchronised = experiment.batch_statistics == "synchronised"
    forward = steps.Forward(
        plan.task,
        jnp.bfloat16 if experiment.compute_dtype == "bfloat16" else jnp.float32,
        partial(exchange, strategy="asa32", comm=workers.comm) if is_synchronised else None,
    )
    predict = jax.jit(partial(steps.predict, forward))  # not `comm.jit`: one rank alone may ask
    return steps.local_gradients(forward, plan.micro_batch), partial(steps.eval_step, forward), predict


def chosen_overlap(experiment: Experiment, workers: Workers, plan: TrainingPlan, strategy: str) -> tuple[bool, str]:
    """Return True if buckets travel beside the step's program, and a line that says why.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    if shares_params(experiment, workers, strategy):
        return False, ""
    unfit = unfit_for_overlap(experiment, workers, plan)
    return overlap.chosen(experiment.exchange.overlap, strategy, workers.comm, unfit)


def is_one_program(experiment: Experiment, workers: Workers, plan: TrainingPlan, strategy: str) -> bool:
    """Return True if the step has the fused form."""
    return not is_split(experiment, workers) or chosen_overlap(experiment, workers, plan, strategy)[0]


def is_split(experiment: Experiment, workers: Workers) -> bool:
    """Return True if the step is split: by default if several ranks would compile one program on the same cores.

    With several devices a process it always is: MPI is called between programs over them.
    """
    if workers.devices > 1:
        return True
    if experiment.step_mode != "auto" or workers.mesh is not None:
        return experiment.step_mode == "split" and workers.mesh is None
    return workers.comm.size > 1 and jax.default_backend() == "cpu"


def sees_noise(experiment: Experiment, plan: TrainingPlan, workers: Workers) -> bool:
    """Return True if noise is measured, between several workers with equal shares: with one there is none to see."""
    is_even = plan.clock.effective_batch % workers.size == 0
    return experiment.rule.noise_scale and workers.size > 1 and is_even


def build_rule(experiment: Experiment, plan: TrainingPlan, workers: Workers, exchange: base.Exchange) -> Rule:
    """The rule over this run's optimizer and exchange.

    The halves of a sharded exchange clip, since no worker holds the whole mean gradient.
    """
    asked, optim, params = experiment.rule, experiment.optim, plan.params()
    if exchange.shards:
        of_whole = optim.decay_mask and optim.decay_mask(params)  # by shapes that slices have not
        optim = dataclasses.replace(optim, clip_norm=0.0, decay_mask=of_whole and (lambda _: of_whole))
    tx = optimizers.optimizer(optim, plan.lr)
    optimizers.check_takes_gradients(experiment.optim, tx, params)
    ema, is_averaged = experiment.optim.ema, optimizers.is_averaged(tx, params)
    scalers = [type(callback).__name__ for callback in experiment.callbacks if callback.scales_rate]
    beside = f"optim.ema {ema}" if ema else ", ".join(scalers)
    errors.check(not (is_averaged and beside), AVERAGES.format(asked=beside, optimizer=experiment.optim.name))
    if scalers:
        tx = optax.chain(tx, optimizers.by_rate_factor())
    rule = registry.build(
        dataclasses.replace(asked, noise_scale=sees_noise(experiment, plan, workers)),
        tx,
        exchange,
        optimizer=experiment.optim.name + " with clip_norm" * bool(experiment.optim.clip_norm),
        linear=optimizers.is_linear(experiment.optim, tx, params),
    )
    if is_averaged:
        exchanges_gradients = registry.RULES[asked.name].takes_compressors
        return schedule_free(rule, exchange.jit, asked.name, exchanges_gradients=exchanges_gradients)
    return averaged(rule, ema, exchange.jit, asked.name) if ema else rule


def rate_words(experiment: Experiment, factor: float, scaling: str) -> str:
    """How the learning rate of each worker comes about."""
    lr = experiment.optim.lr
    if optimizers.has_own_rate(experiment.optim):
        return f"learning rates are those of optimizer {experiment.optim.name}"
    if experiment.schedule.rate:
        return f"lr as schedule.rate says, x {factor:g} ({scaling})"
    return f"lr {lr:g} x {factor:g} ({scaling}) = {lr * factor:g}"


# ---------------------------------------------------------------- its state 0


def given_model(where: Path, params: PyTree, model_state: PyTree) -> orbax_export.Loaded:
    """Params and model state of a file or a folder, in the structures of those given.

    Raises:
        UsageError: it cannot be read, or is not of this model.
    """
    if where.suffix != trained.SUFFIX:
        return orbax_export.load(where, params, model_state)
    model = trained.load(where)
    return orbax_export.Loaded(*model.like(params, model_state), bool(model.model_state))


def initial_states(experiment: Experiment, workers: Workers, plan: TrainingPlan, rule: Rule) -> dict[int, TrainState]:
    """State 0 of this process's workers: params and model state of rank 0 on all ranks, params compared by hash."""
    key, place = jax.random.key(experiment.seed), rule.sharding and rule.sharding.shards.shared_params
    shapes = jax.eval_shape(plan.init, key)
    if workers.processes.rank == 0:
        params, model_state = jax.tree.map(jnp.asarray, plan.init(key))  # in JAX's types, as the other ranks know them
        if experiment.params:
            try:
                params, model_state, has_state = given_model(Path(experiment.params), params, model_state)
            except errors.UsageError as error:
                raise type(error)(f"--params: {error}") from error
            if not has_state and jax.tree.leaves(model_state):
                text = "bare params, so the model state begins as the model's own"
                print(f"jaxmpi: --params: {experiment.params}: {text}", file=sys.stderr, flush=True)
    else:
        params = shapes[0] if place else empty(shapes[0])
        model_state = empty(shapes[1])
    if place:  # all workers are on one host, and none has a copy
        params, model_state = place.filled(params), workers.processes.bcast(model_state)
    else:
        params, model_state = workers.processes.bcast((params, model_state))
    workers.processes.assert_same("initial params", {"sha256": tree_digest(params)})
    states_of = rule_states(rule, workers, params)
    return {
        worker: create(params, model_state, states_of[worker], seed=experiment.seed, worker=worker)
        for worker in workers.mine
    }


def empty(shapes: PyTree) -> PyTree:
    """NumPy arrays to be filled."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def rule_states(rule: Rule, workers: Workers, params: PyTree) -> dict[int, PyTree]:
    """The rule's state 0 of each of this process's workers, in host memory."""
    on_host = partial(jax.tree.map, np.asarray)
    if rule.sharding is None:
        state = on_host(workers.comm.jit(rule.init)(params))
        return dict.fromkeys(workers.mine, state)
    init, chunks = workers.comm.jit(rule.sharding.init), rule.sharding.chunks
    return {worker: on_host(init(params, np.int32(chunks[worker]))) for worker in workers.mine}
