"""The compiled functions of a run, made from its plan, and what is left open before they can be.

A step is *fused*, one jit with the exchange inside, or *split*: gradients, exchange and update are three jits. Only a
fused step can exchange buckets during the backward pass. But a program that holds a communicator is never found in the
compile cache, so every rank would compile the whole model for itself: eight ranks on two cores take eight times as
long. Hence several ranks on CPUs split the step unless the exchange runs beside it (docs/decisions.md, 7), and so do
processes of several devices, between whose programs MPI is called, and ranks that share one copy of the params.

All of this is decided before anything is compiled, alike on all ranks, with a line for the log for each choice. The
exchange that `auto` found is kept by checkpoints, so that a resumed run continues bit for bit.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce import algorithms, comm_thread, compression, overlap
from jaxmpi.allreduce.algorithms.table import algorithms_in_c, with_halves
from jaxmpi.allreduce.api import BUCKET_BYTES, Choice, Op, exchange, exchange_gradients
from jaxmpi.allreduce.autotune import choose, is_auto
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.local_devices import Devices, over_local_devices
from jaxmpi.allreduce.sharded import check_floats
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.shared_compile import compiled_for
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, mean_of_floats, size_bytes
from jaxmpi.core.sharding import ElementSharding, TensorSharding
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.flops import StepFlops
from jaxmpi.optim import optimizers
from jaxmpi.recover.replica_check import fingerprints_by
from jaxmpi.rules import base, registry
from jaxmpi.rules.averaged import averaged, schedule_free
from jaxmpi.rules.base import Rule
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.plan import Plan

SAVED_BYTES = BUCKET_BYTES  # `auto` sums gradients as they come if a worker then holds this much less of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functions:
    """The compiled functions of a run."""

    rule: Rule
    train_step: Callable[[TrainState, Batch], tuple[TrainState, steps.Metrics]]
    compile_step: Callable[[TrainState, Batch], jax.stages.Compiled]  # its largest program, which it then runs
    is_fused: bool  # that program is the whole step; else it is the gradients
    eval_step: Callable[[PyTree, PyTree, Batch], tuple[steps.FigureSums, Any]]  # with outputs for `whole_set`
    mean_state: Callable[[PyTree], PyTree]  # model state, its floating-point leaves averaged over workers
    eval_params: Callable[[PyTree, PyTree], PyTree]  # (params, rule state) -> params to evaluate
    fingerprints: Callable[[PyTree], np.ndarray]  # u32[workers of this process, leaves]
    predict: Callable[[PyTree, PyTree, Batch], Any]  # of one worker: (params, model state, batch) -> outputs
    form: str  # which jits the step is made of, for the log
    flops: StepFlops  # FLOPs of a worker's gradients


def build_functions(plan: Plan) -> Functions:
    """The step, evaluation and comparison for these workers; all ranks call it."""
    experiment, workers = plan.experiment, plan.workers
    form, order, flops = choose_form(plan), Order(), StepFlops()
    # One rank of a host compiles for all.
    jit = Devices(workers.mesh).jit_each if workers.mesh else workers.comm.jit
    exchanges, forward = exchange_for(plan, order, form), forward_of(plan)
    with_figures = experiment.train_metrics and not workers.asynchronous
    gradients = steps.local_gradients(forward, plan.micro_batch, with_figures=with_figures)
    skips, shrinks = experiment.on_nonfinite == "skip", experiment.on_rank_loss == "shrink"
    if skips:
        gradients = steps.poison_nonfinite(gradients)
    gradients = order.record(gradients, flops.count)
    is_synchronised = experiment.batch_statistics == "synchronised"
    if form.is_split:
        pieces = jit
        if skips or shrinks:
            # The state before a step may still be the outcome, so nothing is donated.
            pieces = lambda function, donate_argnums=(), **options: jit(function, **options)  # noqa: E731
        rule = build_rule(plan, exchanges._replace(jit=pieces))
        if form.is_early:
            assert isinstance(workers.comm, RankComm)
            assert exchanges.zero
            gradients = exchanges.zero.scatter_early(gradients, workers.comm.shared_sum.name)
        # Synchronised batch statistics put a communicator into the gradients, so each rank compiles its own.
        program = jax.jit(gradients) if is_synchronised else jit(gradients)
        arguments = lambda state, batch: (state.params, state.model_state, batch, state.key, state.step)  # noqa: E731
        guard = jit(steps.revert_if_nonfinite) if skips else None
        shared = order.share(program, workers.processes)
        train_step = partial(steps.train_step, gradients=shared, rule=rule, guard=guard)
        jits = "gradients with their sum, and update" if form.is_early else "gradients, exchange and update"
        devices = f", of {workers.devices} devices of each process" if workers.devices > 1 else ""
        words = f"split form: {jits} are jits of their own{devices}"
    else:
        rule = build_rule(plan, exchanges)
        if workers.comm.size == 1:  # there is no exchange that should start early
            gradients = steps.after_all_gradients(gradients)
        guard = steps.revert_if_nonfinite if skips else None
        step = partial(steps.train_step, gradients=gradients, rule=rule, guard=guard)
        # A program that holds a communicator is compiled by each rank for itself.
        jit_step = jit if workers.mesh or (form.overlaps and not is_synchronised) else jax.jit
        program = train_step = jit_step(step, donate_argnums=() if shrinks else (0,))
        arguments = lambda state, batch: (state, batch)  # noqa: E731
        words = "fused form: one jit" + (f" over {workers.size} devices" if workers.mesh else "")
    eval_params = rule.eval_params or (lambda params, rule_state: params)
    mean = over_devices("asa:32", "mean", plan) or partial(exchange, strategy="asa32", comm=workers.comm)
    mean_state = partial(mean_of_floats, mean=mean)
    if experiment.batch_statistics == "local":
        mean_state = lambda state: state  # noqa: E731 - each worker's own
    if not form.is_split and (workers.mesh or (form.overlaps and rule.sharding and rule.eval_params)):
        # Over a mesh exchanges are in programs. A host's first rank traces the step, and so knows the order by which a
        # sharded average is gathered beside a program.
        eval_params = jit(eval_params)
        mean_state = jit(mean_state) if workers.mesh else mean_state
    return Functions(
        rule=rule,
        train_step=train_step,
        compile_step=lambda state, batch: compiled_for(program, arguments(state, batch)),
        is_fused=not form.is_split,
        eval_step=jit(partial(steps.eval_step, forward, with_outputs=bool(experiment.whole_set))),
        mean_state=mean_state,
        eval_params=eval_params,
        fingerprints=fingerprints_by(jit, workers),
        predict=steps.jit_predict(forward),  # not shared by ranks: one of them may call it alone
        form=f"{words}; {form.why}",
        flops=flops,
    )


def forward_of(plan: Plan) -> steps.Forward:
    """The plan's task with its dtype and batch statistics."""
    synchronised = plan.experiment.batch_statistics == "synchronised"
    return steps.Forward(
        plan.task,
        jnp.dtype(plan.experiment.compute_dtype),
        partial(exchange, strategy="asa32", comm=plan.workers.comm) if synchronised else None,
    )


# ---------------------------------------------------------------- the form of the step


class StepForm(NamedTuple):
    """The form of a run's step."""

    is_split: bool  # gradients, exchange and update are jits of their own; else all are one
    overlaps: bool = False  # buckets are sent during the backward pass
    is_early: bool = False  # gradients go into a sum in shared memory as they come: they never exist together
    why: str = ""  # the exchange is hidden or not, for the log


def choose_form(plan: Plan) -> StepForm:
    """The form that suits these workers."""
    word, obstacle, in_memory = plan.experiment.exchange.overlap, overlap_obstacle(plan), shares_params(plan)
    saved = size_bytes(plan.param_shapes) * (plan.workers.size - 1) // plan.workers.size
    if in_memory and word == "auto" and not obstacle and saved < SAVED_BYTES:
        obstacle = f"{saved / 1e6:.3g} MB of gradients less are less than a bucket of {SAVED_BYTES / 1e6:.3g}"
    hides, why = overlap.resolve(word, plan.strategy, plan.workers.comm, obstacle, in_memory=in_memory)
    if in_memory:
        return StepForm(is_split=True, is_early=hides, why=why)
    return StepForm(is_split=is_split(plan) and not hides, overlaps=hides, why=why)


def is_split(plan: Plan) -> bool:
    """Return True if the step is split unless its exchange is hidden."""
    workers = plan.workers
    is_on_cpu = workers.mesh is None and workers.comm.size > 1 and jax.default_backend() == "cpu"
    return workers.devices > 1 or is_on_cpu


def shares_params(plan: Plan, strategy: str = "") -> bool:
    """Return True if sharded updates write the one copy of the params that the host's ranks share.

    The ranks read these params between programs, so the step is split. The params before a step must not be needed any
    more. With `--comm xla` a step is one program over all devices.
    """
    experiment, strategy = plan.experiment, strategy or plan.experiment.exchange.strategy
    if experiment.exchange.shard_update != "on" or plan.workers.size == 1 or experiment.comm == "xla":
        return False
    if compression.is_compressor(strategy) or is_auto(strategy) or experiment.exchange.gather_wire != "32":
        return False
    needs_previous = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    is_near = algorithms.in_shared_memory(strategy) and jax.default_backend() == "cpu"
    return is_near and not needs_previous and is_split(plan) and experiment.devices == 1


def overlap_obstacle(plan: Plan) -> str:
    """Why this step cannot hide an exchange; empty if it can."""
    experiment, workers = plan.experiment, plan.workers
    if workers.devices > 1:
        return f"the {workers.devices} devices of a process add up their gradients before it"
    if experiment.exchange.shard_update == "on" and (reason := shards_obstacle(plan, experiment.exchange.strategy)):
        return reason
    if experiment.on_rank_loss == "shrink":
        return "a step ends before the vote on it (on_rank_loss shrink)"
    if registry.is_periodic(experiment.rule):
        return f"rule {experiment.rule.name} exchanges every so many steps only, and no gradients"
    if compression.is_compressor(experiment.exchange.strategy):
        return "a compressor exchanges more than once, one after another"
    if plan.micro_batch not in (0, plan.local_batch):
        return "with gradient accumulation gradients are complete only after the last micro-batch"
    return ""


def shards_obstacle(plan: Plan, strategy: str) -> str:
    """Why the halves of a sharded exchange cannot run while the step computes; empty if they can."""
    experiment, workers = plan.experiment, plan.workers
    if compression.is_compressor(strategy):
        return ""  # refused for itself
    name = "asa:32" if is_auto(strategy) else algorithms.parse(strategy).name
    halves, algorithm = algorithms.parse(name).spec.halves, name.partition(":")[0]
    is_synchronised, is_shared = experiment.batch_statistics == "synchronised", shares_params(plan, name)
    if is_shared and not is_synchronised:
        if isinstance(sharding_of(plan), TensorSharding):
            return f"optimizer {experiment.optim.name} takes whole tensors, of which gradients are dealt together"
        return ""
    if not halves:
        return ""  # refused for itself
    if not is_shared and not halves.scatter_part:
        if nowhere := comm_thread.unavailable_reason("asa:32", workers.comm):
            return nowhere
        return f"the halves of {algorithm} do not run beside a program; those of asa, ring and hier do"
    if is_synchronised:
        return "batch statistics are synchronised in the program that would scatter gradients"
    return comm_thread.unavailable_reason(f"{algorithm}:{experiment.exchange.gather_wire}", workers.comm) or ""


def sharding_of(plan: Plan) -> ElementSharding | TensorSharding:
    """How sharded updates divide the params among workers."""
    check_floats(plan.param_shapes)
    return optimizers.sharding_for(plan.experiment.optim, plan.lr, plan.param_shapes, plan.workers.size)


# ---------------------------------------------------------------- the exchange


def choose_exchange(plan: Plan, stored: run_directory.StoredSettings | None) -> Plan:
    """The plan with its strategy settled, and a note for each choice; all ranks call it.

    A resumed run keeps what `auto` found before, if these ranks can have it. Else the candidates are timed.

    Communicates: exchanges of `allreduce.autotune`, if `auto` is to be found.
    """
    exchange, comm = plan.experiment.exchange, plan.workers.comm
    if registry.is_asynchronous(plan.experiment.rule):
        return plan.with_exchange(strategy=center_strategy(exchange.strategy))
    if exchange.overlap == "on" and not plan.experiment.micro_batch and plan.micro_batch not in (0, plan.local_batch):
        # Options of the job that began the run must not end a smaller one, whose workers have more examples.
        plan = plan.with_exchange(overlap="off").with_note(f"overlap off: in micro-batches of {plan.micro_batch}")
        exchange = plan.experiment.exchange
    if not is_auto(exchange.strategy):
        return plan
    kept, dropped = run_directory.stored_exchange(stored, exchange), ""
    if kept:
        if can_keep(plan, kept["strategy"]):
            off = ", overlap off" if kept["overlap"] != exchange.overlap else ""
            return plan.with_exchange(**kept).with_note(f"{exchange.strategy}: {kept['strategy']}{off}, as before")
        dropped = f"{kept['strategy']}, as before, cannot be here; "
    is_sharded = exchange.shard_update == "on"
    candidates = with_halves(comm.hosts, exchange.gather_wire) if is_sharded else ()
    hidden: tuple[str, ...] = ()  # candidates that can run during the backward pass
    if overlap.resolve(exchange.overlap, "asa:32", comm, overlap_obstacle(plan))[0]:
        hidden = algorithms_in_c(comm.hosts)
        if is_sharded:
            hidden = tuple(name for name in candidates if not shards_obstacle(plan, name))
    sizes = [leaf.size for leaf in jax.tree.leaves(plan.param_shapes)]
    found = choose(comm, sizes, exchange.strategy, exchange.bucket_bytes, hidden or candidates)
    options: dict[str, Any] = {}
    if hidden and exchange.overlap == "auto" and not found.overlap:
        found = choose(comm, sizes, exchange.strategy, exchange.bucket_bytes, candidates)
        options["overlap"] = "off"
        dropped += "overlap off, since most of an exchange is work for cores, which compute already; "
    plan = plan.with_exchange(strategy=found.strategy, **options)
    return plan.with_note(dropped + found.why)


def can_keep(plan: Plan, name: str) -> bool:
    """Return True if these ranks and options allow the strategy that `auto` found before."""
    exchange, comm = plan.experiment.exchange, plan.workers.comm
    strategy, algorithm = algorithms.parse(name), name.partition(":")[0]
    must_hide = comm.size > 1 and exchange.overlap == "on"
    if exchange.shard_update == "on":
        is_able = algorithm in with_halves(comm.hosts, exchange.gather_wire)
        is_able = is_able and not (must_hide and shards_obstacle(plan, algorithm))
    else:
        is_able = not must_hide or strategy.is_in_c(comm.hosts)
    return is_able and strategy.spec.fits(comm.hosts)


def center_strategy(name: str) -> str:
    """The strategy of params between asynchronous workers and their center, in the requested wire."""
    wire = name.partition(":")[2] or "32" if is_auto(name) else algorithms.parse(name).name.partition(":")[2]
    return f"root:{wire}"


def exchange_for(plan: Plan, order: Order, form: StepForm | None = None) -> base.Exchange:
    """The exchange of this run, during the backward pass or after it."""
    experiment, workers, strategy = plan.experiment, plan.workers, plan.strategy
    bucket_bytes, overlaps = experiment.exchange.bucket_bytes, form is not None and form.overlaps
    options: dict[str, Any] = {"strategy": strategy, "bucket_bytes": bucket_bytes, "comm": workers.comm}
    if overlaps:
        comm_thread.exchange_handlers()  # all ranks make them together; programs that come from another rank find them
    if experiment.exchange.shard_update == "on" and workers.size > 1:
        zero = make_zero(
            strategy,
            "mean",
            workers.comm,
            bucket_bytes,
            sharding_of(plan),
            clip_norm=experiment.optim.clip_norm,
            gives_square=measures_noise(plan),
            mesh=workers.mesh if workers.devices > 1 else None,
            gather_wire=experiment.exchange.gather_wire,
            host=workers.processes if shares_params(plan) else None,
            order=order if overlaps else None,
            early=shares_params(plan) and (form or choose_form(plan)).is_early,
        )
        return base.Exchange(partial(exchange, **options), partial(exchange, **options, op="sum"), zero=zero)
    if compression.is_compressor(strategy):
        refused = partial(exchange, **options)
        return base.Exchange(refused, refused, gradients=exchange_gradients(**options))
    mean, total = (over_devices(strategy, op, plan, order) for op in ("mean", "sum"))
    if mean and total:
        return base.Exchange(mean, total)
    options["order"] = order
    # A program with other communicators in it cannot be exported.
    portable = experiment.batch_statistics != "synchronised"
    exchange_tree = partial(overlap.exchange, portable=portable) if overlaps else exchange
    return base.Exchange(partial(exchange_tree, op="mean", **options), partial(exchange_tree, op="sum", **options))


def over_devices(strategy: str, op: Op, plan: Plan, order: Order | None = None) -> Callable[[PyTree], PyTree] | None:
    """Exchange of trees over all devices of all processes; None if each process drives one."""
    workers, bucket_bytes = plan.workers, plan.experiment.exchange.bucket_bytes
    if workers.devices == 1 or workers.mesh is None:
        return None
    choice = Choice(strategy=strategy, op=op, comm=workers.comm, bucket_bytes=bucket_bytes, order=order)
    return over_local_devices(choice, workers.mesh)


# ---------------------------------------------------------------- the rule


def build_rule(plan: Plan, exchanges: base.Exchange) -> Rule:
    """The rule over this run's optimizer and exchange.

    A sharded exchange clips by itself, since no worker holds the whole mean gradient.
    """
    experiment, params = plan.experiment, plan.param_shapes
    optim = experiment.optim
    if exchanges.zero and (mask := optim.decay_mask):
        found: list[PyTree] = []  # a mask goes by shapes, which shards do not have
        jax.eval_shape(lambda tree: found.append(mask(tree)), params)
        optim = dataclasses.replace(optim, decay_mask=lambda _: found[0])
    tx = optimizers.optimizer(optim, plan.lr, clips=not exchanges.zero)
    is_averaged = optimizers.is_averaged(tx, params)
    scaling = [type(callback).__name__ for callback in experiment.callbacks if callback.scales_rate]
    if is_averaged:
        given = {"exchange.shard_update": exchanges.zero, "optim.ema": optim.ema} | dict.fromkeys(scaling, True)
        if unfit := [name for name, is_given in given.items() if is_given]:
            raise UsageError(
                f"{', '.join(unfit)}: got optimizer {optim.name}, which is schedule-free: it evaluates an average of "
                "its own, of whole params, made for one rate; leave it out"
            )
    if scaling:
        tx = optax.chain(tx, optimizers.scale_by_rate_factor())
    rule = registry.build(
        dataclasses.replace(experiment.rule, noise_scale=measures_noise(plan)),
        tx,
        exchanges,
        optimizer=optim.name + " with clip_norm" * bool(optim.clip_norm),
        linear=optimizers.is_linear(experiment.optim),
    )
    name = experiment.rule.name
    if is_averaged:
        exchanges_gradients = registry.RULES[name].takes_compressors
        return schedule_free(rule, exchanges.jit, name, exchanges_gradients=exchanges_gradients)
    return averaged(rule, optim.ema, exchanges.jit, name) if optim.ema else rule


def measures_noise(plan: Plan) -> bool:
    """Return True if the noise scale is measured: several workers have equal shares of a batch."""
    workers = plan.workers.size
    return plan.experiment.rule.noise_scale and workers > 1 and plan.clock.effective_batch % workers == 0


def rule_state_shapes(rule: Rule, params: PyTree) -> PyTree:
    """Shapes of the rule's state of one worker."""
    if rule.sharding:
        return jax.eval_shape(rule.sharding.init, params, jax.ShapeDtypeStruct((), np.int32))
    return jax.eval_shape(rule.init, params)
