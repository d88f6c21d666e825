"""The parts of a run: its compiled functions and its state 0.

A run needs compiled programs and arrays on devices. `build_functions` joins task, rule and exchange into a step: one
program, or gradients, exchange and update apart (`step_form.py`). Every rank must compile a program that holds a
communicator, so that one is kept small (docs/decisions/0007). `initial_states` makes the params on rank 0, sends them
to all ranks and compares their hashes.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce import algorithms, compression, overlap
from jaxmpi.allreduce.api import BUCKET_BYTES, Choice, Op, exchange, exchange_gradients
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.comm_thread import exchange_handlers
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.checkpoint.export import SUFFIX, Loaded, load, params_from_orbax
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.shared_compile import compiled_for, loaded_jit
from jaxmpi.comm.topology import Workers
from jaxmpi.core import errors, train_state
from jaxmpi.core.pytrees import PyTree, mean_of_floats, tree_digest, zeros_for
from jaxmpi.core.train_state import TrainState, create
from jaxmpi.observe.flops import StepFlops
from jaxmpi.optim import optimizers
from jaxmpi.recover.replica_check import fingerprints_by
from jaxmpi.rules import base, registry
from jaxmpi.rules.averaged import averaged, schedule_free
from jaxmpi.rules.base import Rule
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.compatibility import AVERAGES, WHOLE_AVERAGES
from jaxmpi.trainer.step_form import StepForm, form_of, is_scattered_early, sharding_of, shares_params
from jaxmpi.trainer.training_plan import Job

# ---------------------------------------------------------------- its functions


class Ahead(NamedTuple):
    """The step's largest program, compiled once, before the step or with it."""

    compiled: Callable[[TrainState, train_state.Batch], jax.stages.Compiled]
    is_whole: bool  # True: program of the whole step; False: of its gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functions:
    """The compiled pieces of a run."""

    rule: Rule
    train_step: Callable[[TrainState, train_state.Batch], tuple[TrainState, steps.Metrics]]
    eval_step: Callable[[PyTree, PyTree, train_state.Batch], steps.EvalMetrics]
    mean_state: Callable[[PyTree], PyTree]  # model state, its floating-point leaves averaged over workers
    eval_params: Callable[[PyTree, PyTree], PyTree]  # (params, rule state) -> params to evaluate
    fingerprints: Callable[[PyTree], np.ndarray]  # u32[workers of this process, leaves]
    predict: Callable[
        [PyTree, PyTree, train_state.Batch], Any
    ]  # function of one worker: (params, model state, batch) -> outputs
    strategy: str
    form: str  # which jits the step is made of, for the log
    flops: StepFlops  # FLOPs of a worker's gradients
    ahead: Ahead
    asked: str = ""  # the strategy as the experiment has it, perhaps `auto`
    why: str = ""  # reasons for the choices of `auto`, for the log

    @property
    def exchanges(self) -> bool:
        """Return True if workers exchange; with strategy none their params drift apart."""
        return algorithms.exchanges(self.strategy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step, of which either form is made."""

    job: Job
    strategy: str  # in full, as asa:32
    form: StepForm
    gradients: Callable  # function of one worker, not compiled; so are the next two
    evaluate: Callable
    predict: Callable
    mean_state: Callable
    skips: bool  # a step whose loss is not finite, and leaves the state as it was
    once: Callable  # a jit of which one rank of a host compiles for all
    to_share: Callable  # the jit for gradients: that one, unless they hold a communicator
    over: Callable  # a jit over all devices, if they have a mesh
    order: Order
    flops: StepFlops

    def exchange(self, is_beside: bool) -> base.Exchange:
        """The exchange, beside the program or in it."""
        return exchange_for(self.job, self.strategy, self.order, is_beside)

    def rule(self, exchange: base.Exchange) -> Rule:
        """The rule over this exchange."""
        return build_rule(self.job, exchange)


def build_functions(job: Job) -> Functions:
    """The step in the form that suits these workers."""
    experiment, workers = job.experiment, job.workers
    gradients, evaluate, predict = local_functions(job)
    skips = experiment.on_nonfinite == "skip"
    over = partial(over_mesh, mesh=workers.mesh, control=workers.processes) if workers.mesh else jax.jit
    once = over if workers.devices > 1 else workers.comm.jit
    spelling = experiment.exchange.strategy
    strategy = spelling if compression.is_compressor(spelling) else algorithms.parse(spelling).name
    form = form_of(job, strategy)
    mean = exchange_of_devices("asa:32", "mean", workers) or partial(exchange, strategy="asa32", comm=workers.comm)
    of = StepParts(
        job=job,
        strategy=strategy,
        form=form,
        gradients=steps.marked(gradients) if skips else gradients,
        evaluate=evaluate,
        predict=predict,
        mean_state=partial(mean_of_floats, mean=mean)
        if experiment.batch_statistics != "local"
        else lambda tree: tree,  # each evaluates with its own
        skips=skips,
        once=once,
        to_share=jax.jit if experiment.batch_statistics == "synchronised" else once,
        over=over,
        order=Order(),
        flops=StepFlops(),
    )
    return split_form(of) if form.is_split else fused_form(of)


def split_form(of: StepParts) -> Functions:
    """The split form: gradients, exchange and update apart.

    With synchronised batch statistics every rank compiles the gradients for itself, since they hold a communicator.
    """
    experiment, workers, once = of.job.experiment, of.job.workers, of.once
    keeps = of.skips or experiment.on_rank_loss == "shrink"  # the state before a step, until that step counts

    def keep_operands(function: Callable, donate_argnums: tuple[int, ...] = (), **options: Any) -> Callable:
        """A jit without donation: what went in may still be the outcome."""
        return once(function, **options)

    exchange_now = of.exchange(False)
    rule = of.rule(exchange_now._replace(jit=keep_operands if keeps else once))
    gradients = of.order.of(of.gradients, of.flops.count)
    if of.form.is_early:
        assert isinstance(workers.comm, RankComm)
        assert exchange_now.zero
        gradients = exchange_now.zero.scatter_early(gradients, workers.comm.sum_name)
    differentiated = of.to_share(gradients)
    compiled = of.order.shared(differentiated, workers.processes)
    checked = once(steps.or_before) if of.skips else None
    step = partial(steps.train_step, gradients=compiled, rule=rule, guard=checked)
    each = f", of {workers.devices} devices of each process" * (workers.devices > 1)
    jits = "gradients with their sum, and update" if of.form.is_early else "gradients, exchange and update"
    return Functions(
        rule=rule,
        train_step=step,
        eval_step=once(of.evaluate),
        mean_state=of.mean_state,
        eval_params=rule.eval_params or own_params,
        fingerprints=fingerprints_by(once, workers),
        predict=of.predict,
        strategy=of.strategy,
        form=f"split form: {jits} are jits of their own{each}; {of.form.why}",
        flops=of.flops,
        ahead=Ahead(
            lambda state, batch: compiled_for(
                differentiated, (state.params, state.model_state, batch, state.key, state.step)
            ),
            False,
        ),
    )


def fused_form(of: StepParts) -> Functions:
    """The fused form: one jit, whose exchange may overlap the backward pass."""
    experiment, workers, is_beside = of.job.experiment, of.job.workers, of.form.is_beside
    # A single worker has no exchange that is to begin early.
    gradients = steps.in_place(of.gradients) if workers.comm.size == 1 else of.gradients
    rule = of.rule(of.exchange(is_beside))
    eval_params, guard = rule.eval_params or own_params, steps.or_before if of.skips else None
    step = partial(steps.train_step, gradients=of.order.of(gradients, of.flops.count), rule=rule, guard=guard)
    if workers.mesh is None:
        donated = () if experiment.on_rank_loss == "shrink" else (0,)
        jitted = (of.to_share if is_beside else jax.jit)(step, donate_argnums=donated)
        # One rank of a host traces the step, and so knows the order by which an average is gathered beside a program.
        each, mean, params = (
            of.once,
            of.mean_state,
            of.once(eval_params) if is_beside and rule.sharding and rule.eval_params else eval_params,
        )
        form = "one jit"
    else:
        jitted = of.over(step, donate_argnums=(0,))
        each, mean, params = of.over, of.over(of.mean_state), of.over(eval_params)
        form = f"one jit over {workers.size} devices"
    return Functions(
        rule=rule,
        train_step=jitted,
        eval_step=each(of.evaluate),
        mean_state=mean,
        eval_params=params,
        fingerprints=fingerprints_by(each, workers),
        predict=of.predict,
        strategy=of.strategy,
        form=f"fused form: {form}; {of.form.why}",
        flops=of.flops,
        ahead=Ahead(lambda state, batch: compiled_for(jitted, (state, batch)), True),
    )


def over_mesh(
    function: Callable, mesh: jax.sharding.Mesh, control: Processes, donate_argnums: tuple[int, ...] = ()
) -> Callable:
    """`steps.over_devices`; if ranks share a host's cores, one compiles for all."""
    jitted = steps.over_devices(function, mesh, donate_argnums)
    if isinstance(control, MpiProcesses) and control.local_size > 1 and jax.default_backend() == "cpu":
        return loaded_jit(jitted, list(mesh.devices.flat), control)
    return jitted


def exchange_for(job: Job, strategy: str, order: Order, is_beside: bool) -> base.Exchange:
    """The exchange of this run, beside the program or in it."""
    experiment, workers = job.experiment, job.workers
    size_bytes = experiment.exchange.bucket_bytes
    options: dict[str, Any] = {"strategy": strategy, "bucket_bytes": size_bytes, "comm": workers.comm}
    if experiment.exchange.shard_update == "on" and workers.size > 1:
        is_early, _ = is_scattered_early(job, strategy)
        zero = make_zero(
            strategy,
            "mean",
            workers.comm,
            size_bytes,
            sharding_of(job),
            clip_norm=experiment.optim.clip_norm,
            gives_square=sees_noise(job),
            gather_wire=experiment.exchange.gather_wire,
            host=workers.processes if shares_params(job, strategy) else None,
            beside=order if is_beside else None,
            early=is_early,
            mesh=workers.mesh if workers.devices > 1 else None,
        )
        if is_beside:
            exchange_handlers()
        return base.Exchange(partial(exchange, **options), partial(exchange, **options, op="sum"), zero=zero)
    if compression.is_compressor(strategy):
        refused = partial(exchange, **options)
        return base.Exchange(refused, refused, gradients=exchange_gradients(**options))
    options["order"] = order
    portable = experiment.batch_statistics != "synchronised"
    exchange_tree = partial(overlap.exchange, portable=portable) if is_beside else exchange
    mean, sum_up = (exchange_of_devices(strategy, op, workers, size_bytes, order) for op in ("mean", "sum"))
    if mean and sum_up:
        return base.Exchange(mean, sum_up)
    if is_beside:
        exchange_handlers()  # all ranks make them together; programs that come from another rank find it
    return base.Exchange(partial(exchange_tree, op="mean", **options), partial(exchange_tree, op="sum", **options))


def exchange_of_devices(
    strategy: str, op: Op, workers: Workers, bucket_bytes: int | None = BUCKET_BYTES, order: Order | None = None
) -> Callable[[PyTree], PyTree] | None:
    """Exchange of trees over all devices; None if each process drives one.

    Args: strategy: in full, as asa:32.
    """
    if workers.devices == 1 or workers.mesh is None:
        return None
    return over_local_devices(
        Choice(strategy=strategy, op=op, comm=workers.comm, bucket_bytes=bucket_bytes, order=order), workers.mesh
    )


def own_params(params: PyTree, rule_state: PyTree) -> PyTree:
    """Params as they are: equal on all workers."""
    return params


def local_functions(job: Job) -> tuple[Callable, Callable, Callable]:
    """The local gradients and evaluation step, uncompiled; predictions as a jit."""
    is_synchronised = job.experiment.batch_statistics == "synchronised"
    forward = steps.Forward(
        job.plan.task,
        jnp.bfloat16 if job.experiment.compute_dtype == "bfloat16" else jnp.float32,
        partial(exchange, strategy="asa32", comm=job.workers.comm) if is_synchronised else None,
    )
    predict = jax.jit(partial(steps.predict, forward))  # not `comm.jit`: one rank alone may ask
    return steps.local_gradients(forward, job.plan.micro_batch), partial(steps.eval_step, forward), predict


def sees_noise(job: Job) -> bool:
    """Return True if noise is measured, between several workers with equal shares."""
    workers = job.workers.size
    return job.experiment.rule.noise_scale and workers > 1 and job.plan.clock.effective_batch % workers == 0


def mask_of(decay_mask: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """A mask of params, which it sees traced, as in an optimizer."""
    found: list[PyTree] = []
    jax.eval_shape(lambda tree: found.append(decay_mask(tree)), params)
    return found[0]


def build_rule(job: Job, exchange: base.Exchange) -> Rule:
    """The rule over this run's optimizer and exchange.

    The halves of a sharded exchange clip, since no worker holds the whole mean gradient.
    """
    experiment, plan = job.experiment, job.plan
    asked, optim, params = experiment.rule, experiment.optim, plan.params()
    if exchange.zero and optim.decay_mask:
        of_whole = mask_of(optim.decay_mask, params)  # by shapes that slices have not
        optim = dataclasses.replace(optim, decay_mask=lambda _: of_whole)
    tx = optimizers.optimizer(optim, plan.lr, clips=not exchange.zero)
    optimizers.check_takes_gradients(experiment.optim, tx, params)
    ema, is_averaged = experiment.optim.ema, optimizers.is_averaged(tx, params)
    scalers = [type(callback).__name__ for callback in experiment.callbacks if callback.scales_rate]
    errors.check(not (is_averaged and exchange.zero), WHOLE_AVERAGES.format(optimizer=experiment.optim.name))
    beside = f"optim.ema {ema}" if ema else ", ".join(scalers)
    errors.check(not (is_averaged and beside), AVERAGES.format(asked=beside, optimizer=experiment.optim.name))
    if scalers:
        tx = optax.chain(tx, optimizers.scale_by_rate_factor())
    rule = registry.build(
        dataclasses.replace(asked, noise_scale=sees_noise(job)),
        tx,
        exchange,
        optimizer=experiment.optim.name + " with clip_norm" * bool(experiment.optim.clip_norm),
        linear=optimizers.is_linear(experiment.optim, tx, params),
    )
    if is_averaged:
        exchanges_gradients = registry.RULES[asked.name].takes_compressors
        return schedule_free(rule, exchange.jit, asked.name, exchanges_gradients=exchanges_gradients)
    return averaged(rule, ema, exchange.jit, asked.name) if ema else rule


def rule_in_program(job: Job) -> Rule:
    """The rule with its exchange in the program, for shapes and refusals."""
    return build_rule(job, exchange_for(job, job.experiment.exchange.strategy, Order(), is_beside=False))


def rule_state(rule: Rule, params: PyTree) -> PyTree:
    """Shapes of the rule's state of one worker."""
    if rule.sharding:
        return jax.eval_shape(rule.sharding.init, params, jax.ShapeDtypeStruct((), np.int32))
    return jax.eval_shape(rule.init, params)


# ---------------------------------------------------------------- its state 0


def given_model(where: Path, params: PyTree, model_state: PyTree) -> Loaded:
    """Params and model state of a file or folder, structured as given.

    Raises:
        UsageError: it cannot be read, or is not of this model.
    """
    if where.suffix != SUFFIX:
        return params_from_orbax(where, params, model_state)
    model = load(where)
    return Loaded(*model.like(params, model_state), bool(model.model_state))


def initial_states(job: Job, rule: Rule) -> dict[int, TrainState]:
    """State 0 of this process's workers, with the model of rank 0.

    Communicates: params and model state of rank 0 go to all ranks, which compare the params by hash.
    """
    experiment, workers, plan = job.experiment, job.workers, job.plan
    key, place = jax.random.key(experiment.seed), rule.sharding and rule.sharding.zero.shared_params
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
        params = shapes[0] if place else zeros_for(shapes[0])
        model_state = zeros_for(shapes[1])
    if place:  # all workers are on one host, and none has a copy
        params, model_state = place.fill(params), workers.processes.bcast(model_state)
    else:
        params, model_state = workers.processes.bcast((params, model_state))
    workers.processes.assert_same("initial params", {"sha256": tree_digest(params)})
    states_of = rule_states(rule, workers, params)
    return {
        worker: create(params, model_state, states_of[worker], seed=experiment.seed, worker=worker)
        for worker in workers.mine
    }


def rule_states(rule: Rule, workers: Workers, params: PyTree) -> dict[int, PyTree]:
    """The rule's state 0 of this process's workers, in host memory."""
    on_host = partial(jax.tree.map, np.asarray)
    if rule.sharding is None:
        state = on_host(workers.comm.jit(rule.init)(params))
        return dict.fromkeys(workers.mine, state)
    init, chunks = workers.comm.jit(rule.sharding.init), rule.sharding.zero.shard_indices
    return {worker: on_host(init(params, np.int32(chunks[worker]))) for worker in workers.mine}
