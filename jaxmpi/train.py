"""The spine: from an experiment to a trained model, top to bottom, once.

    python -m jaxmpi.train EXPERIMENT.py [--field value ...]              one worker
    mpirun -n 8 python -m jaxmpi.train EXPERIMENT.py [--field value ...]  eight

"Step k" is the state after k updates. Blocks that only rank 0 runs say so; all others run on all ranks.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import checkpoint, compressors, config, hostcomm, optim, overlap, rules, rundir, runtime, strategies
from jaxmpi import experiment as experiments
from jaxmpi import step as steps
from jaxmpi.buckets import Order
from jaxmpi.comm import Comm
from jaxmpi.config import Experiment, TrainingError
from jaxmpi.courier import courier
from jaxmpi.exchange import exchange, exchange_gradients
from jaxmpi.feed import Feed, open_feed
from jaxmpi.modelcheck import check_model
from jaxmpi.noise import Means, Noise
from jaxmpi.plan import choose, is_auto
from jaxmpi.processes import named_leaves, processes
from jaxmpi.recorder import Recorder, cut_record
from jaxmpi.rules import Rule
from jaxmpi.state import TrainState, create
from jaxmpi.workers import Workers, gather_workers, put, take

PyTree = Any


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.train EXPERIMENT.py [--field value ...]`."""
    runtime.install_excepthooks()
    runtime.prepare()  # before the experiment file, which may touch the device
    experiment, path = experiments.parse(list(sys.argv[1:] if argv is None else argv))
    runtime.make_cpu_devices(experiment.devices)
    control = processes()
    with runtime.at_work():
        train(experiment, path.stem, experiments.project_root(path), digest=experiments.file_digest(path))
        control.barrier()


# ---------------------------------------------------------------- the parts of a run


class Functions(NamedTuple):
    """The compiled pieces of a run."""

    rule: Rule
    train_step: Callable[[TrainState, steps.Batch], tuple[TrainState, steps.Metrics]]
    eval_step: Callable[[PyTree, PyTree, steps.Batch], steps.EvalMetrics]
    mean_state: Callable[[PyTree], PyTree]  # model state, its floating-point leaves averaged over workers
    eval_params: Callable[[PyTree, PyTree], PyTree]  # (params, rule state) -> params to evaluate
    strategy: str
    form: str  # which jits the step is made of, for the log
    asked: str = ""  # the strategy as the experiment has it, where it may be `auto`
    why: str = ""  # what `auto` came to, for the log


def settle_exchange(experiment: Experiment, name: str, workers: Workers) -> tuple[Experiment, str]:
    """`auto` as a strategy and a bucket size: those of the run that is resumed, so that it goes on bit for bit, or
    those that a probe finds; and a line that says why, empty where nothing was left open.
    """
    asked = experiment.exchange
    if not is_auto(asked.strategy):
        return experiment, ""
    text = json.dumps(rundir.stored_exchange(experiment, name)) if workers.processes.rank == 0 else ""
    stored = json.loads(workers.processes.gather(text)[0])
    if stored:
        exchange = dataclasses.replace(asked, **stored)
        return dataclasses.replace(experiment, exchange=exchange), f"{asked.strategy}: {exchange.strategy}, as before"
    params, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), experiment.model.example())
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    is_beside, _ = overlap.chosen(asked.overlap, "asa:32", workers.comm, unfit_for_overlap(experiment, workers))
    among = tuple(hostcomm.HOST_SUMS) if is_beside else ()  # what can run beside the backward pass
    verdict = choose(workers.comm, sizes, asked.strategy, asked.bucket_bytes, among)
    exchange = dataclasses.replace(asked, strategy=verdict.strategy, bucket_bytes=verdict.bucket_bytes)
    return dataclasses.replace(experiment, exchange=exchange), verdict.why


def build_functions(experiment: Experiment, workers: Workers, plan: "Plan") -> Functions:
    """The step in the form that suits these workers.

    fused: one jit; only here can the exchange run beside the backward pass. split: gradients, exchange and update are
    jits of their own, so that one rank per host compiles the two big ones and the others read them from the cache; a
    jit that holds a communicator can never be read from it. So with synchronised batch statistics every rank compiles
    the gradients for itself.
    """
    gradients, evaluate = pieces(experiment, workers)
    order, once = Order(), workers.comm.jit
    to_share: Callable = jax.jit if experiment.batch_statistics == "synchronised" else once
    spelling = experiment.exchange.strategy
    strategy = spelling if compressors.is_compressor(spelling) else strategies.parse(spelling).name
    asked, unfit = experiment.exchange.overlap, unfit_for_overlap(experiment, workers)
    is_beside, why = overlap.chosen(asked, strategy, workers.comm, unfit)
    mean_state = partial(mean_of_floats, comm=workers.comm) if experiment.batch_statistics != "local" else own_state
    exchange_of = partial(exchange_for, experiment, workers, strategy, order)
    if is_split(experiment, workers) and not is_beside:
        rule = build_rule(experiment, plan, workers, exchange_of(False)._replace(jit=once))
        compiled = order.shared(to_share(order.of(gradients)), workers.processes)
        step = partial(steps.train_step, gradients=compiled, rule=rule)
        form = f"split form: gradients, exchange and update are jits of their own; {why}"
        return Functions(rule, step, once(evaluate), mean_state, rule.eval_params or own_params, strategy, form)
    rule = build_rule(experiment, plan, workers, exchange_of(is_beside))
    eval_params = rule.eval_params or own_params
    step = partial(steps.train_step, gradients=order.of(gradients), rule=rule)
    if workers.mesh is None:
        jitted = (to_share if is_beside else jax.jit)(step, donate_argnums=(0,))
        return Functions(rule, jitted, once(evaluate), mean_state, eval_params, strategy, f"fused form: one jit; {why}")
    over = partial(steps.over_devices, mesh=workers.mesh)
    form = f"fused form: one jit over {workers.size} devices; {why}"
    train_step, evaluate = over(step, donate=(0,)), over(evaluate)
    return Functions(rule, train_step, evaluate, over(mean_state), over(eval_params), strategy, form)


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


def unfit_for_overlap(experiment: Experiment, workers: Workers) -> str:
    """Why this step cannot hide an exchange; empty where it can."""
    if experiment.form == "split":
        return "the step is split (form split)"
    if rules.is_periodic(experiment.rule):
        return f"rule {experiment.rule.name} exchanges every so many steps only, and no gradients"
    if compressors.is_compressor(experiment.exchange.strategy):
        return "a compressor exchanges more than once, one after another"
    is_whole = experiment.micro_batch in (0, config.local_batch(experiment, workers.size))
    fits = is_whole or experiment.exchange.overlap == "delayed"
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


def pieces(experiment: Experiment, workers: Workers) -> tuple[Callable, Callable]:
    """The local gradients and the evaluation step, not yet compiled."""
    is_synchronised = experiment.batch_statistics == "synchronised"
    forward = steps.Forward(
        experiment.model,
        experiment.loss or steps.cross_entropy,
        experiment.data,
        jnp.bfloat16 if experiment.compute_dtype == "bfloat16" else jnp.float32,
        partial(exchange, strategy="asa32", comm=workers.comm) if is_synchronised else None,
    )
    return steps.local_gradients(forward, experiment.micro_batch), partial(steps.eval_step, forward)


def is_split(experiment: Experiment, workers: Workers) -> bool:
    """Whether the step is split: by default where several ranks would compile one program on the same cores."""
    if experiment.form != "auto" or workers.mesh is not None:
        return experiment.form == "split" and workers.mesh is None
    return workers.size > 1 and jax.default_backend() == "cpu"


def build_rule(experiment: Experiment, plan: "Plan", workers: Workers, exchange: rules.Exchange) -> Rule:
    """The rule over this run's optimizer and exchange; with one worker there is no noise between several."""
    asked = experiment.rule
    return rules.build(
        dataclasses.replace(asked, noise_scale=asked.noise_scale and workers.size > 1),
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
    lr: optax.Schedule  # by step, scaling included
    headline: str
    data: dict[str, Any]  # what tells it from other data, wherever it lies

    def examples(self, step: int) -> int:
        """Examples that all workers have seen after `step` steps: a short last step of an epoch counts as it is."""
        epochs, batches = divmod(step, self.clock.steps_per_epoch)
        return epochs * len(self.feed.source) + batches * self.clock.effective_batch

    def epoch(self, step: int) -> float:
        """Epochs after `step` steps."""
        return step / self.clock.steps_per_epoch


def make_plan(experiment: Experiment, workers: Workers) -> Plan:
    """Batches, steps and learning rate.

    Raises:
        UsageError: a batch that does not divide, data that is missing, a learning-rate scaling the rule refuses.
    """
    local_batch = config.local_batch(experiment, workers.size)
    feed = open_feed(experiment, "train", local_batch, workers)
    validation = open_feed(experiment, "validation", local_batch, workers)
    facts = {"train": feed.facts(), "validation": validation.facts()}
    workers.processes.same("the data", facts)
    epoch_steps, effective_batch = feed.samplers[0].steps_per_epoch, local_batch * workers.size
    total_steps = max(config.steps(experiment.train_for, epoch_steps, effective_batch), 1)
    clock = optim.Clock(epoch_steps, effective_batch, total_steps)
    factor, scaling = rules.scale_lr(experiment.rule.name, experiment.optim.lr_scaling, workers.size)
    lr = experiment.optim.lr
    headline = (
        f"{experiment.model.name}: {workers.size} workers x local batch {local_batch} = effective batch "
        f"{effective_batch}; {len(feed.source)} examples, {epoch_steps} steps an epoch, {total_steps} steps\n"
        f"lr {lr:g} x {factor:g} ({scaling}) = {lr * factor:g}"
    )
    return Plan(
        feed,
        validation,
        clock,
        clock.steps(experiment.eval_every) or total_steps,
        clock.steps(experiment.checkpoint_every) or total_steps,
        optim.schedule(experiment.schedule, clock, lr * factor, workers.size),
        headline,
        {"the data": facts},
    )


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
        TrainingError: the loss is not finite.
    """
    runtime.doing("start")
    workers = gather_workers(experiment.devices)
    rundir.agree_on(experiment, workers.processes, digest)
    if workers.processes.rank == 0:  # a model that does not fit ends the job here, with one message
        check_model(experiment.model, experiment.loss, experiment.compute_dtype)
    plan = make_plan(experiment, workers)
    asked = experiment.exchange.strategy
    experiment, why = settle_exchange(experiment, name, workers)
    functions = build_functions(experiment, workers, plan)._replace(asked=asked, why=why)
    rules.check_wire(experiment.rule, functions.strategy)
    with rundir.agreed_run_dir(experiment, name, workers.processes) as folder:
        return run_in(folder, experiment, workers, plan, functions, root)


def run_in(
    folder: Path, experiment: Experiment, workers: Workers, plan: Plan, functions: Functions, root: Path | None
) -> dict[str, float]:
    """Start or resume in a run directory, and go on to the end."""
    is_first = workers.processes.rank == 0
    states, saved = starting_states(experiment, workers, functions.rule, folder, plan)
    start = saved.step if saved else 0
    if experiment.resume and is_first:
        cut_record(folder / "record.jsonl", start)
    elapsed_s = saved.extra.get("elapsed_s", 0.0) if saved else 0.0
    recorder = Recorder(folder if is_first else None, elapsed_s, bytes_each=plan.feed.bytes_each)
    if is_first:
        facts = rundir.facts_of(experiment, workers, functions.strategy, functions.form, root) | {
            "asked": functions.asked
        }
        (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
        recorder.write("run", **facts)
    place = f"resumed at step {start}" if saved else "no checkpoint in it: from the start"
    recorder.say(f"run directory {folder}" + f", {place}" * experiment.resume)
    recorder.say(f"{plan.headline}; rule {experiment.rule.name}, strategy {functions.strategy}\n{functions.form}")
    if functions.why:
        recorder.say(functions.why)
    if start >= plan.clock.total_steps:
        recorder.say(f"nothing left to do: train_for ends at step {plan.clock.total_steps}")
    try:
        noise = Noise(workers.size, plan.clock.effective_batch // workers.size) if functions.rule.measured else None
        return loop(Run(experiment, workers, plan, functions, recorder, folder, noise), put(states, workers), start)
    finally:
        recorder.close()


class Run(NamedTuple):
    """All that the loop needs beside the state."""

    experiment: Experiment
    workers: Workers
    plan: Plan
    functions: Functions
    recorder: Recorder
    folder: Path
    noise: Noise | None = None  # where the rule measures it


def loop(run: Run, state: TrainState, start: int) -> dict[str, float]:
    """Steps start + 1 to the last; progress, evaluations and checkpoints when they are due."""
    plan, last = run.plan, run.plan.clock.total_steps
    run.recorder.start_window(plan.examples(start))
    pending: list[tuple[int, steps.Metrics]] = []  # dispatched, not yet looked at
    sums, result = np.zeros(SUMS), {}  # since the last progress line
    for k, batch in enumerate(plan.feed.batches(start, last), start + 1):
        runtime.doing(f"step {k}")
        state, metrics = run.functions.train_step(state, batch)
        pending.append((k, metrics))
        log_due = k == start + 1 or k % run.experiment.log_every == 0 or k == last
        eval_due = k % plan.eval_every == 0 or k == last
        save_due = k % plan.save_every == 0 or k == last
        # One step late, so that the device never waits for the log.
        while len(pending) > (0 if log_due or save_due else 1):
            sums += finite_sums(*pending.pop(0), run)
        if log_due or eval_due or save_due:
            jax.block_until_ready(state)  # the control plane speaks only when the exchange is silent
        if log_due:
            log(run, k, sums)
            sums = np.zeros(SUMS)
        if eval_due:
            result = evaluate(run, state, k)
        if save_due:
            save(run, state, k)
        if eval_due or save_due:
            run.recorder.start_window(plan.examples(k))
    return result


SUMS = 5  # loss, examples, |g_i|^2, |g|^2, steps in which these two were measured: over workers


def finite_sums(step: int, metrics: steps.Metrics, run: Run) -> np.ndarray:
    """f64[SUMS] of this process's workers.

    Raises:
        TrainingError: a loss is NaN or infinite; the checkpoints so far stay.
    """
    losses = np.atleast_1d(np.asarray(metrics.loss, np.float64))
    for worker, loss in zip(run.workers.mine, losses, strict=True):
        if not np.isfinite(loss):
            raise TrainingError(
                f"the loss of worker {worker} is {loss} at step {step}; {last_good(run)}. "
                "Lower the learning rate, warm up or clip"
            )
    is_whole = run.plan.examples(step) - run.plan.examples(step - 1) == run.plan.clock.effective_batch
    squares = metrics.squares if is_whole else None  # workers' gradients are means over as many examples each
    measured = [*squares, np.ones(losses.shape)] if squares else [0.0] * 3
    return np.array([np.asarray(x, np.float64).sum() for x in (losses, metrics.count, *measured)])


def log(run: Run, step: int, sums: np.ndarray) -> None:
    """A progress line: the mean loss of all workers' examples since the last one."""
    feed = run.plan.feed
    loss, count, *squares, skipped, wait_s = run.workers.processes.sum(np.array([*sums, feed.skipped, feed.wait_s]))
    run.recorder.train(
        step=step,
        total_steps=run.plan.clock.total_steps,
        epoch=run.plan.epoch(step),
        examples=run.plan.examples(step),
        loss=float(loss / count),
        lr=np.asarray(run.plan.lr(step - 1)).item(),
        wait_s=float(wait_s) / run.workers.size,
        skipped=int(skipped),
        **noise_of(run, *squares),
    )


def noise_of(run: Run, local: float, mean: float, count: float) -> dict[str, float]:
    """Fields of the record on the noise of gradients, where it was measured."""
    return run.noise.fields(Means(local / count, mean / count)) if run.noise and count else {}


def evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """Every validation example once, over all workers; model state as `batch_statistics` says, params as the rule."""
    runtime.doing(f"evaluation after step {step}")
    model_state = run.functions.mean_state(state.model_state)
    params = run.functions.eval_params(state.params, state.rule_state)
    sums = np.zeros(len(steps.EvalMetrics._fields))
    for batch in run.plan.validation.batches():
        metrics = run.functions.eval_step(params, model_state, batch)
        sums += np.array([np.asarray(value, np.float64).sum() for value in metrics])
    loss, top1, top5, count = run.workers.processes.sum(sums).tolist()
    means: dict[str, Any] = {"eval_count": int(count)}
    if count:
        means |= {"eval_loss": loss / count, "eval_top1": top1 / count, "eval_top5": top5 / count}
    run.recorder.evaluation(step=step, epoch=run.plan.epoch(step), examples=run.plan.examples(step), **means)
    return means


# ---------------------------------------------------------------- state in and out


def starting_states(
    experiment: Experiment, workers: Workers, rule: Rule, folder: Path, plan: Plan
) -> tuple[dict[int, TrainState], checkpoint.Saved | None]:
    """State 0, or that of the newest checkpoint where the run is resumed."""
    states = initial_states(experiment, workers, rule)
    if not experiment.resume:
        return states, None
    saved = checkpoint.restore(
        folder / "checkpoints",
        states,
        workers=workers.size,
        replicated=rule.state_is_replicated,
        same_params=rule.params_are_replicated,
    )
    workers.processes.same("the checkpoint to resume from", {"step": saved.step if saved else 0})
    if saved:
        params = next(iter(saved.states.values())).params if rule.params_are_replicated else {}
        workers.processes.same(f"params at step {saved.step}", {"sha256": tree_digest(params)})
        now = rundir.identity(experiment, plan.clock.effective_batch, plan.data)
        rundir.refuse_other_run(saved.extra.get("experiment", {}), now)
    return (saved.states if saved else states), saved


def save(run: Run, state: TrainState, step: int) -> None:
    """A checkpoint, unless an update has made params or other state that are not finite.

    Raises:
        TrainingError: they are not; the checkpoints so far stay.
    """
    if run.functions.strategy.startswith("none"):
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    runtime.doing(f"checkpoint of step {step}")
    states = take(state, run.workers)
    for worker, of_worker in states.items():
        for path, leaf in named_leaves(of_worker):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(leaf).all():
                raise TrainingError(
                    f"{path} of worker {worker} is not finite after step {step}: not saved, earlier checkpoints stay"
                )
    try:
        write(run, states)
    except OSError as error:
        raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}; {last_good(run)}") from error


def last_good(run: Run) -> str:
    """The newest checkpoint, for errors."""
    kept = checkpoint.found(run.folder / "checkpoints")
    return f"last good checkpoint: {kept[-1] if kept else 'none yet'}"


def write(run: Run, states: dict[int, TrainState]) -> None:
    """A checkpoint of these states."""
    checkpoint.save(
        run.folder / "checkpoints",
        states,
        run.workers.processes,
        workers=run.workers.size,
        replicated=run.functions.rule.state_is_replicated,
        same_params=run.functions.rule.params_are_replicated,
        extra={
            "elapsed_s": run.recorder.elapsed_s(),
            "exchange": {
                "asked": run.functions.asked,
                "strategy": run.functions.strategy,
                "bucket_bytes": run.experiment.exchange.bucket_bytes,
            },
            "experiment": rundir.identity(run.experiment, run.plan.clock.effective_batch, run.plan.data),
        },
        keep=run.experiment.keep_checkpoints,
    )


if __name__ == "__main__":
    main()
