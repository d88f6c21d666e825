"""The state of a run, in and out: initialised, restored, placed on devices, saved.

`initial_states` makes the params on rank 0, sends them to all ranks and compares their hashes. A resumed synchronous
run continues bit for bit, and a checkpoint of another run is refused. So a checkpoint keeps JSON values next to the
state: the exchange in use, the learning rate, positions of streams, states of callbacks, and the fields that make a run
the same run. Other settings may change between the parts of a run; `say_changes` prints and records them. With
`continue_from` a run begins with the weights and moments of another run, at another effective batch. A run directory
that has disappeared is not made anew, since another job may be given its name: the run is saved elsewhere and ends
(docs/decisions/0010).
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.export import SUFFIX, Loaded, load, params_from_orbax
from jaxmpi.checkpoint.manager import warn
from jaxmpi.checkpoint.restore import Saved, Slicing, restore
from jaxmpi.comm.topology import put, take
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves, tree_digest, zeros_for
from jaxmpi.core.train_state import TrainState, create
from jaxmpi.observe.recorder import Recorder
from jaxmpi.optim import optimizers
from jaxmpi.rules.asynchronous.start import AsyncStart, load_start
from jaxmpi.rules.base import Rule
from jaxmpi.runtime import failures
from jaxmpi.runtime.allocator import give_back_freed_memory
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.plan import Plan
from jaxmpi.trainer.run import Run

States = dict[int, TrainState]  # by worker: those of this process


def starting_states(plan: Plan, rule: Rule, folder: Path) -> tuple[States, Saved | AsyncStart | None]:
    """State 0, or a resumed checkpoint's; asynchronous workers have a start each. All ranks call it.

    A run that continues another begins with that run's newest checkpoint, until it has one of its own.
    """
    experiment, workers = plan.experiment, plan.workers
    states, now = initial_states(plan, rule), identity(plan)
    is_first = workers.processes.rank == 0
    if rule.asynchronous:
        say = warn if is_first else lambda text: None
        checkpoints = folder / "checkpoints"
        start = load_start(checkpoints, states[workers.mine[0]], workers, rule.asynchronous, experiment.resume, say)
        run_directory.refuse_other_run(start.extra.get("experiment", {}), now)
        return states, start
    saved = restore_run(folder, states, plan, rule, now) if experiment.resume else None
    if saved is None and experiment.continue_from:
        saved = continue_run(Path(experiment.continue_from), states, plan, rule, now)
    return (saved.states if saved else states), saved


def initial_states(plan: Plan, rule: Rule) -> States:
    """State 0 of this process's workers, with the model of rank 0.

    Communicates: params and model state of rank 0 go to all ranks, which compare the params by hash.
    """
    experiment, workers, control = plan.experiment, plan.workers, plan.workers.processes
    shared = rule.sharding and rule.sharding.zero.shared_params
    if control.rank == 0:
        params, model_state = jax.tree.map(jnp.asarray, plan.init(jax.random.key(experiment.seed)))
        if experiment.params:
            params, model_state = load_params(experiment.params, params, model_state)
    else:
        params = plan.param_shapes if shared else zeros_for(plan.param_shapes)
        model_state = zeros_for(plan.shapes[1])
    if shared:  # all workers are on one host, and none has a copy
        params, model_state = shared.fill(params), control.bcast(model_state)
    else:
        params, model_state = control.bcast((params, model_state))
    control.assert_same("initial params", {"sha256": tree_digest(params)})
    on_host = partial(jax.tree.map, np.asarray)
    if rule.sharding is None:
        rule_states = dict.fromkeys(workers.mine, on_host(workers.comm.jit(rule.init)(params)))
    else:
        init, chunks = workers.comm.jit(rule.sharding.init), rule.sharding.zero.shard_indices
        rule_states = {worker: on_host(init(params, np.int32(chunks[worker]))) for worker in workers.mine}
    return {
        worker: create(params, model_state, rule_states[worker], seed=experiment.seed, worker=worker)
        for worker in workers.mine
    }


def load_params(path: str, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Params and model state of a .safetensors file or an Orbax folder, structured as those given."""
    try:
        if Path(path).suffix == SUFFIX:
            model = load(Path(path))
            loaded = Loaded(*model.like(params, model_state), bool(model.model_state))
        else:
            loaded = params_from_orbax(Path(path), params, model_state)
    except UsageError as error:
        raise type(error)(f"--params: {error}") from error
    if not loaded.has_state and jax.tree.leaves(model_state):
        text = "bare params, so the model state begins as the model's own"
        print(f"jaxmpi: --params: {path}: {text}", file=sys.stderr, flush=True)
    return loaded.params, loaded.model_state


def place_states(run: Run, states: States) -> TrainState:
    """This process's workers on its devices; `states` is emptied, since a state would else take its memory twice."""
    sharding = run.functions.rule.sharding
    if shared := sharding and sharding.zero.shared_params:
        [worker] = run.workers.mine
        params = shared.fill(states[worker].params)
        states[worker] = states[worker]._replace(params=())
        state = put(states, run.workers)._replace(params=params)
    else:
        state = put(states, run.workers)
    give_back_freed_memory()
    return state


# ---------------------------------------------------------------- restored


def identity(plan: Plan) -> dict[str, Any]:
    """Fields that make a run the same run."""
    return run_directory.identity(plan.experiment, plan.clock.effective_batch, plan.data)


def restore_run(
    folder: Path, states: States, plan: Plan, rule: Rule, now: dict[str, Any], may_differ: Sequence[str] = ()
) -> Saved | None:
    """The newest checkpoint in a run directory, the same on all ranks, or None.

    Args:
        states: of this process's workers, in the place of which it is read.
        now: `identity` of the run that continues with it.
        may_differ: fields of `now`.
    """
    workers, control = plan.workers, plan.workers.processes
    shared = rule.sharding and rule.sharding.zero.shared_params
    saved = restore(
        folder / "checkpoints",
        states,
        control,
        workers=workers.size,
        replicated=rule.state_is_replicated,
        same_params=rule.params_are_replicated,
        slicing=slicing_of(rule, next(iter(states.values()))),
        reads_params=control.local_rank == 0 or not shared,
        say=warn if control.rank == 0 else lambda text: None,
    )
    control.assert_same("the checkpoint to resume from", {"step": saved.step if saved else 0})
    if saved is None:
        return None
    if shared:
        [(worker, state)] = saved.states.items()
        saved = saved._replace(states={worker: state._replace(params=shared.fill(state.params))})
    params = next(iter(saved.states.values())).params if rule.params_are_replicated else {}
    control.assert_same(f"params at step {saved.step}", {"sha256": tree_digest(params)})
    run_directory.refuse_other_run(saved.extra.get("experiment", {}), now, may_differ)
    return saved


def slicing_of(rule: Rule, state: TrainState) -> Slicing | None:
    """How workers hold the rule's state in checkpoints; None if each has its own."""
    if rule.sharding:
        from_checkpoint = rule.sharding.of_state().from_checkpoint
        return Slicing(
            dict(named_leaves(jax.eval_shape(rule.init, state.params))),
            rule.sharding.zero.shard_indices,
            from_checkpoint,
        )
    return Slicing(dict(named_leaves(state.rule_state))) if rule.state_is_replicated else None


def continue_run(source: Path, states: States, plan: Plan, rule: Rule, now: dict[str, Any]) -> Saved:
    """The newest checkpoint of another run, at this run's step of as many examples.

    Weights, moments and model state stay as they are. The step, and the optimizer's own step by which its learning rate
    goes, count steps of this run's effective batch.
    """
    saved = restore_run(source, states, plan, rule, now, run_directory.BATCHES)
    if saved is None:
        raise UsageError(f"continue_from: {str(source)!r} has no checkpoint")
    step = step_of_examples(saved.step, saved.extra["experiment"]["effective batch"], plan)
    moved = {
        worker: state._replace(
            step=np.full_like(state.step, step),
            rule_state=jax.tree.map(np.asarray, optimizers.set_step(state.rule_state, step)),
        )
        for worker, state in saved.states.items()
    }
    return saved._replace(states=moved, step=step, step_there=saved.step)


def step_of_examples(step: int, effective_batch: int, plan: Plan) -> int:
    """The plan's last step with no more examples than `step` steps of another effective batch."""
    epochs, batches = divmod(step, math.ceil(len(plan.feed.source) / effective_batch))
    return epochs * plan.clock.steps_per_epoch + batches * effective_batch // plan.clock.effective_batch


def is_of_another_run(saved: Saved | AsyncStart | None) -> bool:
    """Return True for the checkpoint of a run that this one continues."""
    return isinstance(saved, Saved) and saved.step_there is not None


def restore_feed_and_callbacks(
    plan: Plan, saved: Saved | AsyncStart | None, at_start: Sequence[Sequence[Any]] = ()
) -> None:
    """Take this process's data and callbacks to where a checkpoint left them.

    Args:
        at_start: states of the callbacks if there is no checkpoint.
    """
    extra, feed = saved.extra if saved else {}, plan.feed
    # The corrupt examples of all workers count as rank 0's: progress lines add up the ranks'.
    feed.skipped = extra.get("skipped", 0) if plan.workers.processes.rank == 0 else 0
    feed.go_to(saved.step if saved else 0, extra.get("streams", []))
    kept = extra.get("callbacks", [])
    own = plan.experiment.callbacks
    callbacks.restore(own, at_start if saved is None or is_of_another_run(saved) else kept)
    if is_of_another_run(saved):
        callbacks.carry_rate(own, kept)


def say_changes(plan: Plan, recorder: Recorder, extra: dict[str, Any], start: int) -> None:
    """Print and record which settings, or learning rate, differ from those of the checkpoint.

    A decay that spans the run has another rate at the same step if the run becomes longer or shorter.
    """
    found = run_directory.changes(extra.get("settings"), run_directory.settings(plan.experiment))
    lr, before = plan.lr_of(start + 1), extra.get("lr")
    if None not in (before, lr) and before != lr:
        found[f"learning rate of step {start + 1}"] = (before, lr)
    if not found:
        return
    for name, values in found.items():
        was, now = (f"{value:.6g}" if isinstance(value, float) else value for value in values)
        recorder.say(f"changed since the checkpoint: {name}: was {was}, is {now}")
    recorder.write("changed", step=start, changes={name: {"was": a, "is": b} for name, (a, b) in found.items()})


# ---------------------------------------------------------------- saved


def save(run: Run, state: TrainState, step: int, score: float | None, *, is_last: bool) -> None:
    """Begin a checkpoint, which is written while steps continue.

    Args:
        is_last: no step follows before it is written.
    """
    failures.set_phase(f"checkpoint of step {step}", failures.LONG)
    if fate := run.saver.fate():  # once the checkpoint before is written
        end_elsewhere(run, state, step, fate)
    note_saved(run)
    if not run.plan.exchanges:
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    run.saver.save(states_to_save(run, state), extra_to_save(run, step), score, is_last=is_last)


def note_saved(run: Run) -> None:
    """`note_whole` of a checkpoint that a thread has finished meanwhile."""
    if (step := run.saver.taken()) is not None:
        note_whole(run, step)


def note_whole(run: Run, step: int) -> None:
    """Record that a checkpoint is complete, and call the callbacks.

    By the record a resumed run knows which checkpoints are lost.
    """
    run.recorder.write("checkpoint", step=step)
    folder = run.folder / "checkpoints" / f"step_{step:08d}"
    callbacks.call_each(run.callbacks, "after_checkpoint", step, folder, is_asynchronous=bool(run.workers.asynchronous))


def states_to_save(run: Run, state: TrainState) -> States:
    """States of this process's workers for a checkpoint, in host memory."""
    states, sharding = take(state, run.workers), run.functions.rule.sharding
    if sharding is None:
        return states
    of_state, indices = sharding.of_state(), sharding.zero.shard_indices
    return {
        worker: each._replace(rule_state=of_state.to_checkpoint(each.rule_state, indices[worker]))
        for worker, each in states.items()
    }


def run_facts(run: Run) -> dict[str, Any]:
    """JSON values that every checkpoint of a run keeps."""
    plan, exchange, sharding = run.plan, run.experiment.exchange, run.functions.rule.sharding
    return {
        "elapsed_s": run.recorder.elapsed_s(),
        "scaled_for": plan.scaled_for,
        "exchange": {
            "asked": plan.requested,
            "strategy": plan.strategy,
            "bucket_bytes": exchange.bucket_bytes,
            "overlap": exchange.overlap,
        },
        "experiment": identity(plan),
        "monitor": f"{run.experiment.monitor_mode} {run.experiment.monitor}",
        **({"chunks": list(sharding.zero.shard_indices), "cut": sharding.zero.sharding.name} if sharding else {}),
        "settings": run_directory.settings(run.experiment),
    }


def extra_to_save(run: Run, step: int) -> dict[str, Any]:
    """JSON values of `step`'s checkpoint, next to its state; all ranks call it."""
    control, feed = run.workers.processes, run.plan.feed
    extra = run_facts(run) | {
        "skipped": int(control.allreduce_sum(np.array([feed.skipped], np.float64))[0]),
        "lr": run.plan.lr_of(step + 1),
        "callbacks": callbacks.states(run.experiment.callbacks, control),
    }
    if feed.memory:
        extra["group_size"] = feed.memory.sampler.parts
    if not feed.has_epochs:
        every = control.allgather_object(feed.positions(step))
        extra["streams"] = [position for each in every for position in each]
    return extra


def end_elsewhere(run: Run, state: TrainState, step: int, fate: str) -> NoReturn:
    """Save a run that has lost its directory elsewhere, and end it."""
    text = f"run directory {str(run.folder)!r} {fate}"
    if not run.plan.exchanges:
        raise AgreedError(f"{text}; strategy none saves nothing")
    place = run.saver.save_elsewhere(states_to_save(run, state), extra_to_save(run, step), run.recorder.copy_to)
    raise AgreedError(f"{text}; saved at step {step} in {str(place)!r}: go on with --resume --run-dir {place}")
