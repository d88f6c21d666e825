"""The spine: from an experiment to a trained model, top to bottom, once.

    python -m jaxmpi.train EXPERIMENT.py [--field value ...]              one worker
    mpirun -n 8 python -m jaxmpi.train EXPERIMENT.py [--field value ...]  eight

"Step k" is the state after k updates. Blocks that only rank 0 runs say so; all others run on all ranks.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import (
    asynchronous,
    checkpoint,
    compressors,
    config,
    faults,
    guard,
    hostcomm,
    optim,
    orbax,
    overlap,
    rules,
    rundir,
    runtime,
    spans,
    strategies,
)
from jaxmpi import experiment as experiments
from jaxmpi import saver as savers
from jaxmpi import step as steps
from jaxmpi.anatomy import Anatomy, Summary, Window, flat, summary
from jaxmpi.buckets import Order
from jaxmpi.comm import Comm
from jaxmpi.config import Experiment, step_range
from jaxmpi.courier import courier
from jaxmpi.exchange import exchange, exchange_gradients
from jaxmpi.feed import Feed, open_feed
from jaxmpi.modelcheck import check_model
from jaxmpi.noise import Means, Noise
from jaxmpi.plan import choose, is_auto
from jaxmpi.processes import MpiProcesses, Processes, SoloProcesses, named_leaves, processes
from jaxmpi.programs import loaded_jit
from jaxmpi.recorder import FORMAT, Recorder, cut_record
from jaxmpi.rules import Rule
from jaxmpi.sinks import TensorBoard
from jaxmpi.state import TrainState, create
from jaxmpi.terminal import open_terminal
from jaxmpi.trace import Profiler, Tracer
from jaxmpi.watchdog import watching
from jaxmpi.workers import Workers, alone, gather_apart, gather_workers, put, rows, take, to_device

PyTree = Any


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.train EXPERIMENT.py [--field value ...]`."""
    runtime.install_excepthooks()
    runtime.prepare()  # before the experiment file, which may touch the device
    experiment, path = experiments.parse(list(sys.argv[1:] if argv is None else argv))
    runtime.make_cpu_devices(experiment.devices)
    control = processes()
    with runtime.at_work():
        code = 0
        try:
            train(experiment, path.stem, experiments.project_root(path), digest=experiments.file_digest(path))
        except guard.Preempted:
            code = runtime.PREEMPTED
        control.leave(code)
    if code:
        sys.exit(code)


# ---------------------------------------------------------------- the parts of a run


class Functions(NamedTuple):
    """The compiled pieces of a run."""

    rule: Rule
    train_step: Callable[[TrainState, steps.Batch], tuple[TrainState, steps.Metrics]]
    eval_step: Callable[[PyTree, PyTree, steps.Batch], steps.EvalMetrics]
    mean_state: Callable[[PyTree], PyTree]  # model state, its floating-point leaves averaged over workers
    eval_params: Callable[[PyTree, PyTree], PyTree]  # (params, rule state) -> params to evaluate
    fingerprints: Callable[[PyTree], jax.Array]  # of what is equal on all workers
    strategy: str
    form: str  # which jits the step is made of, for the log
    asked: str = ""  # the strategy as the experiment has it, where it may be `auto`
    why: str = ""  # what `auto` came to, for the log
    lone: "Lone | None" = None  # where nothing else tells the time of an exchange


class Lone(NamedTuple):
    """A step that exchanges nothing; what it gives is thrown away."""

    step: Callable[[TrainState, steps.Batch], Any]  # may donate its state
    is_compiled: bool  # by the first step of the run


def settle_exchange(
    experiment: Experiment, plan: "Plan", workers: Workers, kept: rundir.Stored | None
) -> tuple[Experiment, str]:
    """`auto` as a strategy and a bucket size: those of the run that is resumed, so that it goes on bit for bit, or
    those that a probe finds; and a line that says why, empty where nothing was left open.
    """
    asked = experiment.exchange
    if rules.is_asynchronous(experiment.rule):
        return dataclasses.replace(experiment, exchange=dataclasses.replace(asked, strategy=to_center(asked))), ""
    if not is_auto(asked.strategy):
        return experiment, ""
    stored = rundir.settled_exchange(kept, asked.strategy)
    if stored:
        exchange = dataclasses.replace(asked, **stored)
        return dataclasses.replace(experiment, exchange=exchange), f"{asked.strategy}: {exchange.strategy}, as before"
    params, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), experiment.model.example())
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    is_beside, _ = overlap.chosen(asked.overlap, "asa:32", workers.comm, unfit_for_overlap(experiment, plan))
    hosts = workers.comm.hosts
    beside = tuple(name for name in hostcomm.HOST_SUMS if hostcomm.has(strategies.parse(name), hosts))
    among = beside if is_beside else ()  # what can run beside the backward pass
    verdict = choose(workers.comm, sizes, asked.strategy, asked.bucket_bytes, among)
    exchange = dataclasses.replace(asked, strategy=verdict.strategy, bucket_bytes=verdict.bucket_bytes)
    return dataclasses.replace(experiment, exchange=exchange), verdict.why


def to_center(asked: config.ExchangeConfig) -> str:
    """The way of params between workers and a center, in the wire that is asked for.

    Raises:
        UsageError: a strategy that is none, or keeps something back.
    """
    if is_auto(asked.strategy):
        return f"root:{asked.strategy.partition(':')[2] or '32'}"
    config.check(
        not compressors.is_compressor(asked.strategy) and not asked.strategy.startswith("none"),
        f"exchange.strategy: got {asked.strategy} with an asynchronous rule, which takes its wire only: give a "
        "strategy with one of the wires 32, 16, bf16, 8",
    )
    return f"root:{strategies.parse(asked.strategy).name.partition(':')[2]}"


def build_functions(experiment: Experiment, workers: Workers, plan: "Plan") -> Functions:
    """The step in the form that suits these workers.

    fused: one jit; only here can the exchange run beside the backward pass. split: gradients, exchange and update are
    jits of their own, so that one rank per host compiles the two big ones and the others read them from the cache; a
    jit that holds a communicator can never be read from it. So with synchronised batch statistics every rank compiles
    the gradients for itself.
    """
    gradients, evaluate = pieces(experiment, workers, plan)
    order, once = Order(), workers.comm.jit
    to_share: Callable = jax.jit if experiment.batch_statistics == "synchronised" else once
    spelling = experiment.exchange.strategy
    strategy = spelling if compressors.is_compressor(spelling) else strategies.parse(spelling).name
    asked, unfit = experiment.exchange.overlap, unfit_for_overlap(experiment, plan)
    is_beside, why = overlap.chosen(asked, strategy, workers.comm, unfit)
    mean_state = partial(mean_of_floats, comm=workers.comm) if experiment.batch_statistics != "local" else own_state
    exchange_of = partial(exchange_for, experiment, workers, strategy, order)
    keeps = experiment.recover == "skip"
    if is_split(experiment, workers) and not is_beside:
        keep_operands = partial(jit_kept, once) if keeps else once
        mute = rules.Mute()
        rule = build_rule(experiment, plan, workers, mute.of(exchange_of(False))._replace(jit=keep_operands))
        compiled = order.shared(to_share(order.of(gradients)), workers.processes)
        checked = once(steps.or_before) if keeps else None
        step = partial(steps.train_step, gradients=compiled, rule=rule, guard=checked)
        form = f"split form: gradients, exchange and update are jits of their own; {why}"
        eval_params, lone = rule.eval_params or own_params, Lone(mute.during(step), True)
        hashed = once(guard.fingerprints)
        return Functions(rule, step, once(evaluate), mean_state, eval_params, hashed, strategy, form, lone=lone)
    rule = build_rule(experiment, plan, workers, exchange_of(is_beside))
    eval_params = rule.eval_params or own_params
    checked = steps.or_before if keeps else None
    step = partial(steps.train_step, gradients=order.of(gradients), rule=rule, guard=checked)
    still = rules.Mute(is_on=True).of(exchange_of(False))
    quiet = partial(steps.train_step, gradients=gradients, rule=build_rule(experiment, plan, workers, still))
    if workers.mesh is None:
        jitted = (to_share if is_beside else jax.jit)(step, donate_argnums=(0,))
        form, lone = f"fused form: one jit; {why}", None if is_beside else Lone(jax.jit(quiet), False)
        hashed = once(guard.fingerprints)
        return Functions(rule, jitted, once(evaluate), mean_state, eval_params, hashed, strategy, form, lone=lone)
    over = partial(over_mesh, mesh=workers.mesh, control=workers.processes)
    form = f"fused form: one jit over {workers.size} devices; {why}"
    evaluate, mean, params, hashed = map(over, (evaluate, mean_state, eval_params, guard.fingerprints))
    train_step, lone = over(step, donate=(0,)), Lone(over(quiet), False)
    return Functions(rule, train_step, evaluate, mean, params, hashed, strategy, form, lone=lone)


def jit_kept(jit: Callable, function: Callable, **options: Any) -> Callable:
    """A jit without donation: what went in may still be the outcome."""
    return jit(function, **{name: value for name, value in options.items() if name != "donate_argnums"})


def over_mesh(
    function: Callable, mesh: jax.sharding.Mesh, control: Processes, donate: tuple[int, ...] = ()
) -> Callable:
    """`steps.over_devices`; where ranks share a host's cores one of them compiles for all."""
    jitted = steps.over_devices(function, mesh, donate)
    if isinstance(control, MpiProcesses) and jax.default_backend() == "cpu":
        return loaded_jit(jitted, list(mesh.devices.flat), control)
    return jitted


def exchange_for(
    experiment: Experiment, workers: Workers, strategy: str, order: Order, is_beside: bool
) -> rules.Exchange:
    """The exchange of this run, beside the program or in it."""
    size_bytes = experiment.exchange.bucket_bytes
    options: dict[str, Any] = {"strategy": strategy, "bucket_bytes": size_bytes, "comm": workers.comm}
    if compressors.is_compressor(strategy):
        refused = partial(exchange, **options)
        return rules.Exchange(refused, refused, gradients=exchange_gradients(**options))
    options["order"] = order
    alone: dict[str, Any] = {"portable": experiment.batch_statistics != "synchronised"}
    share = partial(overlap.exchange, **alone) if is_beside else exchange
    is_late = experiment.exchange.overlap == "delayed"
    if is_beside:
        courier()  # all ranks start it together; programs that come from another rank find it
    return rules.Exchange(
        partial(share, op="mean", **options),
        partial(share, op="sum", **options),
        gradients=overlap.delayed_gradients(**options, **alone) if is_late else None,
    )


def unfit_for_overlap(experiment: Experiment, plan: "Plan") -> str:
    """Why this step cannot hide an exchange; empty where it can."""
    if experiment.form == "split":
        return "the step is split (form split)"
    if rules.is_periodic(experiment.rule):
        return f"rule {experiment.rule.name} exchanges every so many steps only, and no gradients"
    if compressors.is_compressor(experiment.exchange.strategy):
        return "a compressor exchanges more than once, one after another"
    fits = plan.micro_batch in (0, plan.feed.samplers[0].local_batch) or experiment.exchange.overlap == "delayed"
    return "" if fits else "gradients come to exist with the last micro-batch only"


def mean_of_floats(tree: PyTree, comm: Comm) -> PyTree:
    """Floating-point leaves averaged over workers in 32 bits, whatever the run's wire; others as they are."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    for i, leaf in zip(floats, exchange([leaves[i] for i in floats], "asa32", comm=comm), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def own_state(tree: PyTree) -> PyTree:
    """Model state as it is: every worker evaluates with its own."""
    return tree


def own_params(params: PyTree, rule_state: PyTree) -> PyTree:
    """Params as they are: equal on all workers."""
    return params


def pieces(experiment: Experiment, workers: Workers, plan: "Plan") -> tuple[Callable, Callable]:
    """The local gradients and the evaluation step, not yet compiled."""
    is_synchronised = experiment.batch_statistics == "synchronised"
    forward = steps.Forward(
        experiment.model,
        experiment.loss or steps.cross_entropy,
        experiment.data,
        jnp.bfloat16 if experiment.compute_dtype == "bfloat16" else jnp.float32,
        partial(exchange, strategy="asa32", comm=workers.comm) if is_synchronised else None,
    )
    return steps.local_gradients(forward, plan.micro_batch), partial(steps.eval_step, forward)


def is_split(experiment: Experiment, workers: Workers) -> bool:
    """Whether the step is split: by default where several ranks would compile one program on the same cores."""
    if experiment.form != "auto" or workers.mesh is not None:
        return experiment.form == "split" and workers.mesh is None
    return workers.comm.size > 1 and jax.default_backend() == "cpu"


def build_rule(experiment: Experiment, plan: "Plan", workers: Workers, exchange: rules.Exchange) -> Rule:
    """The rule over this run's optimizer and exchange.

    Noise is measured between several workers with equal shares: with one there is none to see.
    """
    asked, is_even = experiment.rule, plan.clock.effective_batch % workers.size == 0
    return rules.build(
        dataclasses.replace(asked, noise_scale=asked.noise_scale and workers.size > 1 and is_even),
        optim.optimizer(experiment.optim, plan.lr),
        exchange,
        optimizer=experiment.optim.name,
        linear=optim.is_linear(experiment.optim),
    )


def initial_states(experiment: Experiment, workers: Workers, rule: Rule) -> dict[int, TrainState]:
    """State 0 of this process's workers: params of rank 0 on all ranks, compared by hash."""
    example = experiment.model.example()
    key = jax.random.key(experiment.seed)
    if workers.processes.rank == 0:
        made = experiment.model.init(key, jnp.zeros(example.shape, example.dtype))
        params, model_state = jax.tree.map(jnp.asarray, made)  # in JAX's types, as the other ranks know them
        params = orbax.load(Path(experiment.params), params) if experiment.params else params
    else:
        shapes = jax.eval_shape(experiment.model.init, key, example)
        params, model_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    params, model_state = workers.processes.bcast((params, model_state))
    workers.processes.same("initial params", {"sha256": tree_digest(params)})
    rule_state = jax.tree.map(np.asarray, workers.comm.jit(rule.init)(params))
    return {
        worker: create(params, model_state, rule_state, seed=experiment.seed, worker=worker) for worker in workers.mine
    }


def tree_digest(tree: PyTree) -> str:
    """SHA-256 over the bytes of all leaves."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# ---------------------------------------------------------------- the run


class Plan(NamedTuple):
    """An experiment's durations and rates in numbers."""

    feed: Feed
    validation: Feed
    clock: optim.Clock
    eval_every: int  # steps
    save_every: int  # steps
    compare_every: int  # steps
    lr: optax.Schedule  # by step, scaling included
    headline: str
    data: dict[str, Any]  # what tells it from other data, wherever it lies
    scaled_for: int  # workers that the run began with, by which lr is scaled
    micro_batch: int  # examples of an accumulation slice; 0: no accumulation

    def examples(self, step: int) -> int:
        """Examples that all workers have seen after `step` steps: a short last step of an epoch counts as it is."""
        epochs, batches = divmod(step, self.clock.steps_per_epoch)
        return epochs * len(self.feed.source) + batches * self.clock.effective_batch

    def epoch(self, step: int) -> float:
        """Epochs after `step` steps."""
        return step / self.clock.steps_per_epoch


def make_plan(experiment: Experiment, workers: Workers, scaled_for: int = 0) -> Plan:
    """Batches, steps and learning rate.

    Args:
        scaled_for: workers that the run began with; 0: these.

    Raises:
        UsageError: a batch that does not divide, data that is missing, a learning-rate scaling the rule refuses.
    """
    scaled_for = scaled_for or workers.size
    is_other = scaled_for != workers.size
    local_batch = config.local_batch(experiment, workers.size, uneven=is_other)
    effective_batch = experiment.effective_batch if is_other else local_batch * workers.size
    micro_batch = experiment.micro_batch or slice_of(local_batch, -(-effective_batch // scaled_for))
    feed = open_feed(experiment, "train", effective_batch, workers, micro_batch)
    # Workers that do not meet cannot share an evaluation.
    evaluating, batch = (alone(workers), local_batch) if workers.apart else (workers, effective_batch)
    validation = open_feed(experiment, "validation", batch, evaluating, crew=feed.crew)
    facts = {"train": feed.facts(), "validation": validation.facts()}
    workers.processes.same("the data", facts)
    epoch_steps = feed.samplers[0].steps_per_epoch
    total_steps = max(config.steps(experiment.train_for, epoch_steps, effective_batch), 1)
    clock = optim.Clock(epoch_steps, effective_batch, total_steps)
    factor, scaling = rules.scale_lr(experiment.rule.name, experiment.optim.lr_scaling, scaled_for)
    if is_other and rules.RULES[experiment.rule.name].sums_updates:
        factor *= scaled_for / workers.size  # fewer updates are summed, each of more examples
    lr = experiment.optim.lr
    headline = (
        f"{experiment.model.name}: {workers.size} workers x local batch {local_batch} = effective batch "
        f"{effective_batch}; {len(feed.source)} examples, {epoch_steps} steps an epoch, {total_steps} steps\n"
        f"lr {lr:g} x {factor:g} ({scaling}) = {lr * factor:g}"
    )
    if is_other:
        headline += f", as with the {scaled_for} workers that the run began with" + (
            f"; in slices of {micro_batch}" * bool(micro_batch)
        )
    return Plan(
        feed,
        validation,
        clock,
        clock.steps(experiment.eval_every) or total_steps,
        clock.steps(experiment.checkpoint_every) or total_steps,
        clock.steps(experiment.compare_every) or total_steps,
        optim.schedule(experiment.schedule, clock, lr * factor, scaled_for),
        headline,
        {"the data": facts},
        scaled_for,
        micro_batch,
    )


def slice_of(local_batch: int, before: int) -> int:
    """Examples of a slice where a worker has more to do than `before`, so that it needs no more memory; else 0."""
    slices = -(-local_batch // before)
    return -(-local_batch // slices) if slices > 1 else 0


def train(experiment: Experiment, name: str, root: Path | None = None, digest: str = "") -> dict[str, float]:
    """Train, evaluate, record, checkpoint. All ranks call it.

    Args:
        experiment: what to run.
        name: of the run directory where the experiment names none.
        root: the project's folder, whose commit is recorded.
        digest: of the experiment file, compared over ranks.

    Returns: the last evaluation: eval_loss, eval_top1, eval_top5, eval_count; empty where no step was left to do.

    Raises:
        UsageError: the experiment cannot run as asked, or ranks differ.
        TrainingError: a loss or gradient is not finite, workers' params differ, too much data is skipped, or a
            checkpoint cannot be written.
        guard.Preempted: a signal asked to leave, and the run has been saved.
    """
    runtime.doing("start", runtime.LONG)
    notice = guard.Notice()
    try:
        return train_until(notice, experiment, name, root, digest)
    finally:
        notice.close()


def train_until(
    notice: guard.Notice, experiment: Experiment, name: str, root: Path | None, digest: str
) -> dict[str, float]:
    """`train`, until it is noticed that it is to leave."""
    is_apart = rules.is_asynchronous(experiment.rule)
    gather = partial(gather_apart, experiment.rule.servers) if is_apart else partial(gather_workers, experiment.devices)
    workers = gather(experiment.comm)
    ranks = workers.processes.size if is_apart else workers.size
    rules.check_ranks(experiment.rule, ranks, experiment.optim.name)
    if is_apart:
        check_apart(experiment)
    rundir.agree_on(experiment, workers.processes, digest)
    rules.check_recover(experiment.rule, experiment.recover)
    if workers.processes.rank == 0:  # a model that does not fit ends the job here, with one message
        check_model(experiment.model, experiment.loss, experiment.compute_dtype)
    kept = stored_by_first(experiment, name, workers)
    experiment = rundir.as_begun(experiment, kept, workers.size)
    begun = kept.scaled_for if kept else workers.size
    plan = make_plan(experiment, workers, begun)
    for text in experiment.inject:
        faults.parse(text, max(begun, workers.size))
    asked = experiment.exchange.strategy
    experiment, why = settle_exchange(experiment, plan, workers, kept)
    functions = build_functions(experiment, workers, plan)._replace(asked=asked)
    rules.check_wire(experiment.rule, functions.strategy)
    with (
        # A rank that only serves gets no further, and one that dies is no reason to end: nobody waits for either.
        watching(workers.processes, 0 if is_apart else experiment.stall_s, experiment.on_stall) as unwatched,
        rundir.agreed_run_dir(experiment, name, workers.processes) as folder,
        plan.feed.crew,
    ):
        functions = functions._replace(why="\n".join(filter(None, (why, unwatched))))
        faults.order(experiment.inject, max(begun, workers.size), workers.mine, folder)
        return run_in(folder, experiment, workers, plan, functions, root, notice)


def check_apart(experiment: Experiment) -> None:
    """Refuse what needs all workers together.

    Raises:
        UsageError: with an asynchronous rule, by field.
    """
    for name, value, instead in (
        ("recover", "rollback", "skip or stop"),
        ("batch_statistics", "synchronised", "averaged or local"),
        ("form", "split", "auto"),
    ):
        got = getattr(experiment, name)
        config.check(got != value, f"{name}: got {got} with an asynchronous rule, whose workers do not meet; {instead}")
    memory = experiment.data.memory
    config.check(
        memory != "partition",
        "data.memory: got partition with an asynchronous rule, whose workers do not meet to shuffle; take another",
    )


def stored_by_first(experiment: Experiment, name: str, workers: Workers) -> rundir.Stored | None:
    """What rank 0 reads of the run that is resumed."""
    text = json.dumps(rundir.stored(experiment, name)) if workers.processes.rank == 0 else ""
    row = json.loads(workers.processes.gather(text)[0])
    return rundir.Stored(*row) if row else None


def run_in(
    folder: Path,
    experiment: Experiment,
    workers: Workers,
    plan: Plan,
    functions: Functions,
    root: Path | None,
    notice: guard.Notice,
) -> dict[str, float]:
    """Start or resume in a run directory, and go on to the end."""
    is_first = workers.processes.rank == 0
    states, saved = starting_states(experiment, workers, functions.rule, folder, plan)
    start = saved.step if saved else 0
    if experiment.resume and is_first:
        cut_record(folder / "record.jsonl", start)
    hosts = workers.processes.gather(socket.gethostname())
    elapsed_s = saved.extra.get("elapsed_s", 0.0) if saved else 0.0
    bytes_each = plan.feed.bytes_each
    recorder = open_recorder(experiment, folder, elapsed_s, hosts, bytes_each) if is_first else Recorder(None)
    if is_first:
        facts = rundir.facts_of(experiment, workers, functions.strategy, functions.form, root) | {
            "asked": functions.asked,
            "format": FORMAT,
        }
        (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
        recorder.write("run", **facts)
    place = f"resumed at step {start}" if start else "no checkpoint in it: from the start"
    recorder.say(f"run directory {folder}" + f", {place}" * experiment.resume)
    recorder.say(f"{plan.headline}; rule {experiment.rule.name}, strategy {functions.strategy}\n{functions.form}")
    if functions.why:
        recorder.say(functions.why)
    if start >= plan.clock.total_steps:
        recorder.say(f"nothing left to do: train_for ends at step {plan.clock.total_steps}")
    leaves = [path for path, _ in named_leaves(next(iter(states.values())).params)]
    run = Run(
        *(experiment, workers, plan, functions, recorder, folder),
        open_saver(experiment, workers, functions, folder, states),
        guard.Votes(workers.processes, notice, leaves),
        guard.Recovery(experiment.recover, experiment.recover_limit),
        Tracer(step_range(experiment.trace, "trace"), workers.processes, hosts, folder / "trace.json"),
        Profiler(step_range(experiment.profile, "profile"), folder / "profile"),
        Noise(workers.size, plan.clock.effective_batch // workers.size) if functions.rule.measured else None,
    )
    if isinstance(saved, asynchronous.Start):
        with contextlib.closing(recorder):
            return asynchronous.run(apart(run, saved, notice)) if start < plan.clock.total_steps else {}
    return run_to_end(run, states, start)


def apart(run: "Run", start: asynchronous.Start, notice: guard.Notice) -> asynchronous.Job:
    """The run of workers that do not wait for each other, as this rank has it."""
    plan, feed, functions = run.plan, run.plan.feed, run.functions
    solo = run.workers._replace(processes=SoloProcesses())  # votes and evaluations are this rank's
    leaves = [path for path, _ in named_leaves(start.state.params)]
    by_itself = run._replace(workers=solo, votes=guard.Votes(solo.processes, notice, leaves))

    def sums(step: int, metrics: steps.Metrics) -> np.ndarray:
        total = finite_sums(step, metrics, by_itself)
        mind(by_itself, by_itself.votes.count())  # before anything that is not finite can reach the center
        return total

    duties = asynchronous.Duties(
        functions.train_step,
        sums,
        feed.batches,
        lambda: (feed.skipped, feed.wait_s),
        lambda: notice.given,
        lambda state, step: evaluate(by_itself, state, step),
        lambda step: np.asarray(plan.lr(max(step - 1, 0))).item(),
        lambda: extra_of(run),
        lambda skipped, epochs: guard.check_budget(skipped, len(feed.source), epochs, run.experiment.data.max_skipped),
    )
    course = asynchronous.Course(
        plan.clock.effective_batch,
        len(feed.source),
        plan.clock.steps_per_epoch,
        plan.clock.total_steps,
        plan.examples(plan.clock.total_steps),
        run.experiment.log_every,
        plan.eval_every,
        plan.save_every,
    )
    keep = checkpoint.Kept(run.experiment.keep_checkpoints, run.experiment.keep_best)
    home = checkpoint.Apart(run.folder / "checkpoints", run.workers.size, keep)
    run.recorder.start_window(int(start.tally.examples))
    wire = functions.strategy.partition(":")[2]
    return asynchronous.Job(
        run.experiment.rule, functions.rule, run.workers, wire, course, start, duties, run.recorder, home
    )


def open_saver(
    experiment: Experiment, workers: Workers, functions: Functions, folder: Path, states: dict[int, TrainState]
) -> savers.Saver:
    """What writes checkpoints.

    Raises:
        UsageError: the disk has no room for two.
    """
    replicated, checkpoints = functions.rule.state_is_replicated, folder / "checkpoints"
    same_params = functions.rule.params_are_replicated
    if workers.processes.rank == 0 and not functions.strategy.startswith("none"):
        needed_bytes = savers.total_bytes(states, replicated, workers.size, same_params)
        savers.check_disk(checkpoints, needed_bytes, shutil.disk_usage(folder).free)
    keep = checkpoint.Kept(experiment.keep_checkpoints, experiment.keep_best)
    equal = {"replicated": replicated, "same_params": same_params}
    return savers.Saver(checkpoints, workers.processes, workers=workers.size, keep=keep, **equal)


def open_recorder(
    experiment: Experiment, folder: Path, elapsed_s: float, hosts: Sequence[str], bytes_each: int
) -> Recorder:
    """The record, the sinks and the terminal; hosts are names by rank."""
    sinks = [*experiment.sinks, *([TensorBoard(folder / "tensorboard")] if experiment.tensorboard else [])]
    return Recorder(folder, elapsed_s, open_terminal(experiment.quiet), sinks, hosts, bytes_each)


class Run(NamedTuple):
    """All that the loop needs beside the state."""

    experiment: Experiment
    workers: Workers
    plan: Plan
    functions: Functions
    recorder: Recorder
    folder: Path
    saver: savers.Saver
    votes: guard.Votes
    recovery: guard.Recovery
    tracer: Tracer
    profiler: Profiler
    noise: Noise | None  # where the rule measures it


def run_to_end(run: Run, states: dict[int, TrainState], start: int) -> dict[str, float]:
    """The loop, again from the newest checkpoint as often as `recover` has it go back."""
    try:
        while True:
            try:
                return loop(run, put(states, run.workers), start)
            except guard.RollBack as back:
                states, start = rolled_back(run, back)
    finally:
        run.profiler.close()
        run.recorder.close()


def rolled_back(run: Run, back: guard.RollBack) -> tuple[dict[int, TrainState], int]:
    """The newest checkpoint's states and step; the record is cut there."""
    run.votes.count()  # on a step that counts no more
    run.saver.wait()
    experiment = dataclasses.replace(run.experiment, resume=True)
    states, saved = starting_states(experiment, run.workers, run.functions.rule, run.folder, run.plan)
    start = saved.step if saved else 0
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    return states, start


def loop(run: Run, state: TrainState, start: int) -> dict[str, float]:
    """Steps start + 1 to the last; progress, evaluations and checkpoints when they are due."""
    plan, last = run.plan, run.plan.clock.total_steps
    run.recorder.start_window(plan.examples(start))
    pending: list[tuple[int, steps.Metrics | None]] = []  # dispatched, not yet looked at
    sums, result = np.zeros(SUMS), {}  # since the last progress line
    anatomy, lone_due = Anatomy(run.workers.size, to_device(run.workers)), first_lone(run, start)
    with contextlib.closing(plan.feed.batches(start, last)) as batches:
        for k, batch in enumerate(anatomy.batches(batches, start + 1), start + 1):
            runtime.doing(f"step {k}", runtime.LONG if k == start + 1 else 1.0)
            run.saver.poll()
            leaving = run.votes.leaving
            state, batch = faults.reach("step", k, (state, batch))
            run.profiler.before(k)
            state, metrics = update(run, k, state, batch)
            run.profiler.after(k, state)
            anatomy.started(next(iter(jax.tree.leaves(state.params)), state.step), compiled=k == start + 1)
            pending.append((k, metrics))
            log_due = k == start + 1 or k % run.experiment.log_every == 0 or k == last
            eval_due = k % plan.eval_every == 0 or k == last
            save_due = k % plan.save_every == 0 or k == last or leaving
            compare_due = k % plan.compare_every == 0 or save_due
            # One step late, so that the device never waits for the log.
            while len(pending) > (0 if log_due or save_due or compare_due else 1):
                sums += finite_sums(*pending.pop(0), run)
            if log_due or eval_due or compare_due:
                jax.block_until_ready(state)  # the control plane speaks only when the exchange is silent
                anatomy.pause()
                mind(run, run.votes.count())
            if compare_due:
                compare(run, state, k)
            if log_due:
                seen = log(run, k, sums, anatomy.window())
                sums = np.zeros(SUMS)
                if k >= lone_due and seen.source in ("unknown", "estimated"):
                    anatomy.lone(lone_s(run, state, batch))
                    lone_due = k + run.experiment.lone_every
                    anatomy.restart()
                if k == start + 1:
                    anatomy.restart()  # ranks are through with compiling at different times
            if eval_due:
                result = evaluate(run, state, k)
            if save_due:
                save(run, state, k, result.get("eval_loss") if eval_due else None)
            if leaving:
                leave(run, k)
            if eval_due or save_due:
                run.recorder.start_window(plan.examples(k))
                anatomy.restart()
    run.saver.wait()
    return result


def first_lone(run: Run, start: int) -> float:
    """The step after which the first one without exchange is due; infinite where none is."""
    lone, every = run.functions.lone, run.experiment.lone_every
    if lone is None or not every or run.functions.strategy.startswith("none"):
        return float("inf")
    return start + (min(every, run.experiment.log_every + 1) if lone.is_compiled else every)


def lone_s(run: Run, state: TrainState, batch: steps.Batch) -> float:
    """Seconds of a step without exchange, on a copy of the state."""
    lone, seconds = run.functions.lone, 0.0
    assert lone is not None
    for _ in range(1 if lone.is_compiled else 2):
        with spans.span("other", "step without exchange"):
            scratch = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            begin = time.perf_counter()
            jax.block_until_ready(lone.step(scratch, batch))
            seconds = time.perf_counter() - begin
    return seconds


def update(run: Run, step: int, state: TrainState, batch: steps.Batch) -> tuple[TrainState, steps.Metrics | None]:
    """One step, or only its number where it failed twice: then there are no metrics."""
    if step in run.recovery.left_out:
        return state._replace(step=state.step + 1), None
    return run.functions.train_step(state, batch)


def leave(run: Run, step: int) -> None:
    """End a run that was asked to.

    Raises:
        guard.Preempted: once its checkpoint is on disk.
    """
    run.saver.wait()
    run.recorder.say(f"asked to leave: saved at step {step}; go on with --resume --run-dir {run.folder}")
    raise guard.Preempted


SUMS = 6  # over workers: loss, examples, |g_i|^2; and where |g|^2 was measured |g_i|^2, |g|^2, steps


def finite_sums(step: int, metrics: steps.Metrics | None, run: Run) -> np.ndarray:
    """f64[SUMS] of this process's workers, of a step that was made; and this process's vote on it.

    Raises:
        TrainingError, guard.RollBack: what all ranks agree to do about the step before.
    """
    if metrics is None:
        mind(run, run.votes.cast(step, None, 0, True))
        return np.zeros(SUMS)
    losses, counts = (rows(value, run.workers).astype(np.float64) for value in (metrics.loss, metrics.count))
    finite = rows(metrics.finite, run.workers).reshape(len(losses), -1)
    applied = metrics.applied is None or bool(rows(metrics.applied, run.workers).all())
    odd = [(i, bad) for i, bad in enumerate(map(not_finite, losses, finite)) if bad is not None]
    place, bad = odd[0] if odd else (0, None)
    mind(run, run.votes.cast(step, bad, run.workers.mine[place], applied))
    made = applied and np.isfinite(losses).all()
    squares = rows(metrics.squares, run.workers).astype(np.float64)
    if not made:
        return np.zeros(SUMS)
    return np.array([losses.sum(), counts.sum(), squares.sum(), *measured_sums(step, metrics, run, squares)])


def measured_sums(step: int, metrics: steps.Metrics, run: Run, squares: np.ndarray) -> list[float]:
    """|g_i|^2, |g|^2 and 1, over this process's workers; zeros where workers' gradients are not of as many examples."""
    is_whole = run.plan.examples(step) - run.plan.examples(step - 1) == run.plan.clock.effective_batch
    if metrics.mean_square is None or not is_whole:
        return [0.0] * 3
    return [squares.sum(), rows(metrics.mean_square, run.workers).sum(dtype=np.float64), float(squares.size)]


def not_finite(loss: float, finite: np.ndarray) -> int | None:
    """What of a worker's step is not finite, as a vote says it; None where all is."""
    if not np.isfinite(loss):
        return guard.LOSS
    return None if finite.all() else int(np.argmin(finite)) + 1


def mind(run: Run, failure: guard.Failure | None) -> None:
    """Do what is agreed about a step that failed."""
    if failure is not None:
        runtime.doing(f"step {failure.step}")
        run.saver.wait()  # so that the last good checkpoint is whole, and the one named
        tail = f"{savers.last_good(run.folder / 'checkpoints')}. Lower the learning rate, warm up or clip"
        run.recorder.say(run.recovery.of(failure, tail))
        run.recorder.write("skipped", step=failure.step, why=str(failure))


def compare(run: Run, state: TrainState, step: int) -> None:
    """Compare what is equal on all workers by its fingerprints.

    Raises:
        TrainingError, guard.RollBack: a worker's differs.
    """
    if run.functions.strategy.startswith("none"):
        return
    rule = run.functions.rule
    kept = {"params": state.params} if rule.params_are_replicated else {}
    kept |= {"rule": state.rule_state} if rule.state_is_replicated else {}
    if not kept:
        return
    found = rows(run.functions.fingerprints(kept), run.workers).reshape(len(run.workers.mine), -1)
    text = guard.compare_replicas(kept, found, run.workers.mine, run.workers.processes, step)
    if text:
        run.saver.wait()
        run.recovery.of_difference(f"{text}; {savers.last_good(run.folder / 'checkpoints')}")


def log(run: Run, step: int, sums: np.ndarray, window: Window) -> Summary:
    """A progress line: the mean loss of all workers' examples since the last one, and where the time went.

    Raises:
        TrainingError: more data is skipped than may be.
    """
    feed = run.plan.feed
    mine = np.array([*sums, feed.skipped, feed.wait_s])
    every = run.workers.processes.rows(np.concatenate([mine, flat(window)]))
    loss, count, squares, *measured, skipped, wait_s = every[:, : len(mine)].sum(axis=0).tolist()
    seen = summary(every[:, len(mine) :], window.steps)
    run.recorder.train(
        step=step,
        total_steps=run.plan.clock.total_steps,
        epoch=run.plan.epoch(step),
        examples=run.plan.examples(step),
        loss=float(loss / count) if count else float("nan"),
        lr=np.asarray(run.plan.lr(step - 1)).item(),
        wait_s=float(wait_s) / run.workers.size,
        skipped=int(skipped),
        gradient_norm=(squares / run.workers.size / max(window.steps, 1)) ** 0.5,
        anatomy=seen,
        images=run.plan.examples(step) - run.plan.examples(step - window.steps),
        noted=window.spans,
        **noise_of(run, *measured),
    )
    if traced := run.tracer.add(window.spans, step, step == run.plan.clock.total_steps):
        run.recorder.say(traced)
    epochs_begun = -(-step // run.plan.clock.steps_per_epoch)
    guard.check_budget(int(skipped), len(feed.source), epochs_begun, run.experiment.data.max_skipped)
    return seen


def noise_of(run: Run, local: float, mean: float, count: float) -> dict[str, float]:
    """Fields of the record on the noise of gradients, where it was measured."""
    return run.noise.fields(Means(local / count, mean / count)) if run.noise and count else {}


def evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """Every validation example once, over all workers; model state as `batch_statistics` says, params as the rule."""
    runtime.doing(f"evaluation after step {step}", runtime.LONG)
    model_state = run.functions.mean_state(state.model_state)
    params = run.functions.eval_params(state.params, state.rule_state)
    sums = np.zeros(len(steps.EvalMetrics._fields))
    for batch in run.plan.validation.batches():
        runtime.doing(f"evaluation after step {step}", runtime.LONG)  # another batch, so it gets on
        metrics = run.functions.eval_step(params, model_state, batch)
        sums += np.array([rows(value, run.workers).sum(dtype=np.float64) for value in metrics])
    loss, top1, top5, count = run.workers.processes.sum(sums).tolist()
    means: dict[str, Any] = {"eval_count": int(count)}
    if count:
        means |= {"eval_loss": loss / count, "eval_top1": top1 / count, "eval_top5": top5 / count}
    run.recorder.evaluation(step=step, epoch=run.plan.epoch(step), examples=run.plan.examples(step), **means)
    return means


# ---------------------------------------------------------------- state in and out


def starting_states(
    experiment: Experiment, workers: Workers, rule: Rule, folder: Path, plan: Plan
) -> tuple[dict[int, TrainState], checkpoint.Saved | asynchronous.Start | None]:
    """State 0, or that of the newest checkpoint where the run is resumed; workers apart have a start each."""
    states = initial_states(experiment, workers, rule)
    say = warn if workers.processes.rank == 0 else lambda text: None
    if rule.asynchronous:
        state = states[workers.mine[0]]
        folder = folder / "checkpoints"
        start = asynchronous.starting(folder, state, workers, rule.asynchronous, experiment.resume, say)
        now = rundir.identity(experiment, plan.clock.effective_batch, plan.data)
        rundir.refuse_other_run(start.extra.get("experiment", {}), now)
        return states, start
    if not experiment.resume:
        return states, None
    saved = checkpoint.restore(
        folder / "checkpoints",
        states,
        workers.processes,
        workers=workers.size,
        replicated=rule.state_is_replicated,
        same_params=rule.params_are_replicated,
        say=say,
    )
    workers.processes.same("the checkpoint to resume from", {"step": saved.step if saved else 0})
    if saved:
        params = next(iter(saved.states.values())).params if rule.params_are_replicated else {}
        workers.processes.same(f"params at step {saved.step}", {"sha256": tree_digest(params)})
        now = rundir.identity(experiment, plan.clock.effective_batch, plan.data)
        rundir.refuse_other_run(saved.extra.get("experiment", {}), now)
    return (saved.states if saved else states), saved


def warn(text: str) -> None:
    """A line on standard error."""
    print(f"jaxmpi: {text}", file=sys.stderr, flush=True)


def save(run: Run, state: TrainState, step: int, score: float | None) -> None:
    """A checkpoint; it is written while the run goes on.

    Raises:
        TrainingError: the one before could not be written, or params or other state were not finite.
    """
    if run.functions.strategy.startswith("none"):
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    runtime.doing(f"checkpoint of step {step}", runtime.LONG)
    run.saver.save(take(state, run.workers), extra_of(run), score)


def extra_of(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps beside the state."""
    return {
        "elapsed_s": run.recorder.elapsed_s(),
        "scaled_for": run.plan.scaled_for,
        "exchange": {
            "asked": run.functions.asked,
            "strategy": run.functions.strategy,
            "bucket_bytes": run.experiment.exchange.bucket_bytes,
        },
        "experiment": rundir.identity(run.experiment, run.plan.clock.effective_batch, run.plan.data),
    }


if __name__ == "__main__":
    main()
