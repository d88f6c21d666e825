"""The compiled functions of a run, made from its plan.

`build_functions` joins task, rule and exchange into one training step: a single jit (`fused_step`), or gradients,
exchange and update as jits of their own (`split_step`). Which of the two, and why there are two, is in `step_form.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce import compression, overlap
from jaxmpi.allreduce.api import Choice, Op, exchange, exchange_gradients
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.comm_thread import exchange_handlers
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.shared_compile import compiled_for
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, mean_of_floats, size_bytes
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.flops import StepFlops
from jaxmpi.optim import optimizers
from jaxmpi.recover.replica_check import fingerprints_by
from jaxmpi.rules import base, registry
from jaxmpi.rules.averaged import averaged, schedule_free
from jaxmpi.rules.base import Rule
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.conflicts import AVERAGES, WHOLE_AVERAGES, check_compatible
from jaxmpi.trainer.plan import Plan
from jaxmpi.trainer.step_form import (
    SAVED_BYTES,
    StepForm,
    choose_form,
    most_padding,
    sharding_of,
    shards_obstacle,
    shares_params,
    with_sharding,
)

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, steps.Metrics]]
CompileStep = Callable[[TrainState, Batch], jax.stages.Compiled]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functions:
    """The compiled functions of a run."""

    rule: Rule
    train_step: TrainStep
    compile_step: CompileStep  # the step's largest program, which the step then runs
    is_fused: bool  # that program is the whole step; else it is the gradients
    eval_step: Callable[[PyTree, PyTree, Batch], steps.EvalMetrics]
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
    jit = partial(steps.over_devices, mesh=workers.mesh) if workers.mesh else workers.comm.jit
    exchanges = exchange_for(plan, order, form.overlaps)
    forward = forward_of(plan)
    gradients = steps.local_gradients(forward, plan.micro_batch)
    if experiment.on_nonfinite == "skip":
        gradients = steps.poison_nonfinite(gradients)
    make = split_step if form.is_split else fused_step
    rule, train_step, compile_step, programs = make(plan, form, gradients, exchanges, order, flops, jit)
    if experiment.batch_statistics == "local":
        mean_state = keep_state
    else:
        mean = over_devices("asa:32", "mean", plan) or partial(exchange, strategy="asa32", comm=workers.comm)
        mean_state = partial(mean_of_floats, mean=mean)
    eval_params = rule.eval_params or keep_params
    if not form.is_split and (workers.mesh or (form.overlaps and rule.sharding and rule.eval_params)):
        # Over a mesh exchanges are in programs. A host's first rank traces the step, and so knows the order by which a
        # sharded average is gathered beside a program.
        eval_params = jit(eval_params)
        mean_state = jit(mean_state) if workers.mesh else mean_state
    return Functions(
        rule=rule,
        train_step=train_step,
        compile_step=compile_step,
        is_fused=not form.is_split,
        eval_step=jit(partial(steps.eval_step, forward)),
        mean_state=mean_state,
        eval_params=eval_params,
        fingerprints=fingerprints_by(jit, workers),
        predict=jax.jit(partial(steps.predict, forward)),  # not shared by ranks: one of them may call it alone
        form=f"{programs}; {form.why}",
        flops=flops,
    )


def fused_step(
    plan: Plan,
    form: StepForm,
    gradients: Callable,
    exchanges: base.Exchange,
    order: Order,
    flops: StepFlops,
    jit: Callable,
) -> tuple[Rule, TrainStep, CompileStep, str]:
    """The whole step as one jit, whose exchange may run during the backward pass."""
    experiment, workers = plan.experiment, plan.workers
    rule = build_rule(plan, exchanges)
    if workers.comm.size == 1:  # there is no exchange that should start early
        gradients = steps.after_all_gradients(gradients)
    guard = steps.revert_if_nonfinite if experiment.on_nonfinite == "skip" else None
    step = partial(steps.train_step, gradients=order.of(gradients, flops.count), rule=rule, guard=guard)
    if workers.mesh is None and not (form.overlaps and experiment.batch_statistics != "synchronised"):
        jit = jax.jit  # it holds a communicator, so each rank compiles its own
    jitted = jit(step, donate_argnums=() if experiment.on_rank_loss == "shrink" else (0,))
    words = f"fused form: one jit over {workers.size} devices" if workers.mesh else "fused form: one jit"
    return rule, jitted, lambda state, batch: compiled_for(jitted, (state, batch)), words


def split_step(
    plan: Plan,
    form: StepForm,
    gradients: Callable,
    exchanges: base.Exchange,
    order: Order,
    flops: StepFlops,
    jit: Callable,
) -> tuple[Rule, TrainStep, CompileStep, str]:
    """Gradients, exchange and update as jits of their own; only the exchange communicates."""
    experiment, workers = plan.experiment, plan.workers
    skips = experiment.on_nonfinite == "skip"

    def keep_operands(function: Callable, donate_argnums: tuple[int, ...] = (), **options: Any) -> Callable:
        return jit(function, **options)

    # The state before a step may still be the outcome, so nothing is donated.
    keeps = skips or experiment.on_rank_loss == "shrink"
    rule = build_rule(plan, exchanges._replace(jit=keep_operands if keeps else jit))
    gradients = order.of(gradients, flops.count)
    if form.is_early:
        assert isinstance(workers.comm, RankComm)
        assert exchanges.zero
        gradients = exchanges.zero.scatter_early(gradients, workers.comm.shared_sum.name)
    # Synchronised batch statistics put a communicator into the gradients, so each rank compiles its own.
    jitted = jax.jit(gradients) if experiment.batch_statistics == "synchronised" else jit(gradients)
    step = partial(
        steps.train_step,
        gradients=order.shared(jitted, workers.processes),
        rule=rule,
        guard=jit(steps.revert_if_nonfinite) if skips else None,
    )

    def compile_step(state: TrainState, batch: Batch) -> jax.stages.Compiled:
        return compiled_for(jitted, (state.params, state.model_state, batch, state.key, state.step))

    jits = "gradients with their sum, and update" if form.is_early else "gradients, exchange and update"
    devices = f", of {workers.devices} devices of each process" if workers.devices > 1 else ""
    return rule, step, compile_step, f"split form: {jits} are jits of their own{devices}"


def forward_of(plan: Plan) -> steps.Forward:
    """The plan's task with its dtype and batch statistics."""
    synchronised = plan.experiment.batch_statistics == "synchronised"
    return steps.Forward(
        plan.task,
        jnp.bfloat16 if plan.experiment.compute_dtype == "bfloat16" else jnp.float32,
        partial(exchange, strategy="asa32", comm=plan.workers.comm) if synchronised else None,
    )


def keep_params(params: PyTree, rule_state: PyTree) -> PyTree:
    """Params are evaluated as they are."""
    return params


def keep_state(model_state: PyTree) -> PyTree:
    """Each worker evaluates with its own."""
    return model_state


# ---------------------------------------------------------------- the exchange


def exchange_for(plan: Plan, order: Order, overlaps: bool) -> base.Exchange:
    """The exchange of this run, during the backward pass or after it.

    Args:
        order: in which gradients come to exist, known once the step is traced.
    """
    experiment, workers, strategy = plan.experiment, plan.workers, plan.strategy
    bucket_bytes = experiment.exchange.bucket_bytes
    options: dict[str, Any] = {"strategy": strategy, "bucket_bytes": bucket_bytes, "comm": workers.comm}
    if overlaps:
        exchange_handlers()  # all ranks make them together; programs that come from another rank find them
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
            beside=order if overlaps else None,
            early=shares_params(plan) and choose_form(plan).is_early,
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
    if exchanges.zero and optim.decay_mask:
        whole = trace_mask(optim.decay_mask, params)  # a mask goes by shapes, which shards do not have
        optim = dataclasses.replace(optim, decay_mask=lambda _: whole)
    tx = optimizers.optimizer(optim, plan.lr, clips=not exchanges.zero)
    is_averaged = optimizers.is_averaged(tx, params)
    scaling = [type(callback).__name__ for callback in experiment.callbacks if callback.scales_rate]
    if is_averaged and exchanges.zero:
        raise UsageError(WHOLE_AVERAGES.format(optimizer=optim.name))
    if is_averaged and (optim.ema or scaling):
        refused = f"optim.ema {optim.ema}" if optim.ema else ", ".join(scaling)
        raise UsageError(AVERAGES.format(asked=refused, optimizer=optim.name))
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


def trace_mask(decay_mask: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """The mask of params, which the function sees traced, as in an optimizer."""
    found: list[PyTree] = []
    jax.eval_shape(lambda tree: found.append(decay_mask(tree)), params)
    return found[0]


def rule_in_program(plan: Plan) -> Rule:
    """The rule with its exchange in the program, for shapes and refusals."""
    return build_rule(plan, exchange_for(plan, Order(), overlaps=False))


def rule_state_shapes(rule: Rule, params: PyTree) -> PyTree:
    """Shapes of the rule's state of one worker."""
    if rule.sharding:
        return jax.eval_shape(rule.sharding.init, params, jax.ShapeDtypeStruct((), np.int32))
    return jax.eval_shape(rule.init, params)


# ---------------------------------------------------------------- sharded updates, if they are left open


def choose_sharding(plan: Plan) -> Plan:
    """The plan with `--exchange.shard-update auto` settled as on or off, and a note that says why.

    Updates are sharded if they can be, each worker holds at least SAVED_BYTES less, and whole tensors do not need too
    much padding. Communicates nothing: all ranks know the same.
    """
    if plan.experiment.exchange.shard_update != "auto":
        return plan
    on, off = with_sharding(plan, "on"), with_sharding(plan, "off")
    why = sharding_obstacle(on)
    if not why and not shares_params(on) and choose_form(off).overlaps:
        if unfit := shards_obstacle(on, on.experiment.exchange.strategy):
            why = f"the exchange runs during the backward pass, and sharded it could not: {unfit}"
    if not why:
        whole, shard = (size_bytes(rule_state_shapes(rule_in_program(x), x.param_shapes)) for x in (off, on))
        padding, most = sharding_of(on).padding, most_padding(whole / size_bytes(plan.param_shapes), plan.workers.size)
        if padding > most:
            percent = f"{padding:.0%} of the params, above {most:.0%}".replace("%", " %")
            why = f"whole tensors would be padded by {percent}: more would be copied than updates save"
        elif whole - shard < SAVED_BYTES:
            saved = f"{(whole - shard) / 1e6:.3g} MB of the optimizer's state"
            why = f"each worker would hold {saved} less, which is less than a bucket of {SAVED_BYTES / 1e6:.3g}"
        else:
            part = f"{shard / 1e6:.3g} of {whole / 1e6:.3g} MB of the optimizer's state"
            return on.with_note(f"exchange.shard_update auto: on, each of {plan.workers.size} workers holds {part}")
    return off.with_note(f"exchange.shard_update auto: off, {why}")


def sharding_obstacle(on: Plan) -> str:
    """Why each worker updates all params; empty if updates can be sharded.

    Rule and exchange are built once with sharded updates, in shapes alone; their error is the reason.

    Args:
        on: with sharded updates, and its strategy settled.
    """
    if on.workers.size == 1:
        return "there is one worker"
    if on.experiment.on_rank_loss == "shrink":
        return "on_rank_loss shrink would go back to a checkpoint, since a dead worker takes its shard with it"
    try:
        check_compatible(on.experiment)
        rule_state_shapes(rule_in_program(on), on.param_shapes)
        choose_form(on)
    except UsageError as error:
        return str(error)
    return ""
