"""The state of a run, in and out: initialised, restored, placed on devices, saved.

`initial_states` makes the params on rank 0, sends them to all ranks and compares their hashes. A resumed synchronous
run continues bit for bit, and a checkpoint of another run is refused. So a checkpoint keeps JSON values next to the
state: the exchange in use, the learning rate, positions of streams, states of callbacks, and the fields that make a run
the same run. Other settings may change between the parts of a run; `say_changes` prints and records
them. A run directory that has disappeared is not made anew, since another job may be given its name: the run ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.export import load
from jaxmpi.checkpoint.exported_files import SUFFIX, Loaded, params_from_orbax
from jaxmpi.checkpoint.manager import warn
from jaxmpi.checkpoint.restore import Saved, Slicing, restore
from jaxmpi.comm.topology import put, take
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves, tree_digest, zeros_for
from jaxmpi.core.train_state import TrainState, create
from jaxmpi.observe.recorder import Recorder
from jaxmpi.rules.asynchronous.worker import AsyncStart, load_start
from jaxmpi.rules.base import Rule
from jaxmpi.runtime import failures
from jaxmpi.runtime.process import give_back_freed_memory
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.plan import Plan
from jaxmpi.trainer.run import Run

States = dict[int, TrainState]  # by worker: those of this process


def starting_states(plan: Plan, rule: Rule, folder: Path) -> tuple[States, Saved | AsyncStart | None]:
    """State 0, or a resumed checkpoint's; asynchronous workers have a start each. All ranks call it."""
    experiment, workers, control = plan.experiment, plan.workers, plan.workers.processes
    states = initial_states(plan, rule)
    if rule.asynchronous:
        say = warn if control.rank == 0 else lambda text: None
        own, checkpoints = states[workers.mine[0]], folder / "checkpoints"
        start = load_start(checkpoints, own, workers, rule.asynchronous, experiment.resume, say)
        run_directory.refuse_other_run(start.extra.get("experiment", {}), identity(plan))
        return states, start
    saved = restore_run(folder, states, plan, rule) if experiment.resume else None
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
            params, model_state = load_params(Path(experiment.params), params, model_state)
    else:
        params = plan.param_shapes if shared else zeros_for(plan.param_shapes)
        model_state = zeros_for(plan.shapes[1])
    if shared:  # all workers are on one host, and none has a copy
        params, model_state = shared.fill(params), control.bcast(model_state)
    else:
        params, model_state = control.bcast((params, model_state))
    control.assert_same("initial params", {"sha256": tree_digest(params)})
    jit, sharding = workers.comm.jit, rule.sharding
    if sharding is None:
        common = jax.tree.map(np.asarray, jit(rule.init)(params))
        rule_states = dict.fromkeys(workers.mine, common)
    else:
        init, indices = jit(sharding.init), sharding.zero.shard_indices
        rule_states = {i: jax.tree.map(np.asarray, init(params, np.int32(indices[i]))) for i in workers.mine}
    return {i: create(params, model_state, rule_states[i], seed=experiment.seed, worker=i) for i in workers.mine}


def load_params(path: Path, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Params and model state of a .safetensors file or an Orbax folder, structured as those given."""
    try:
        if path.suffix == SUFFIX:
            model = load(path)
            loaded = Loaded(*model.like(params, model_state), bool(model.model_state))
        else:
            loaded = params_from_orbax(path, params, model_state)
    except UsageError as error:
        raise type(error)(f"--params: {error}") from error
    if not loaded.has_state and jax.tree.leaves(model_state):
        warn(f"--params: {path}: bare params, so the model state begins as the model's own")
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


def restore_run(folder: Path, states: States, plan: Plan, rule: Rule) -> Saved | None:
    """The newest checkpoint in a run directory, the same on all ranks, or None; read in place of these states."""
    workers, control, first = plan.workers, plan.workers.processes, next(iter(states.values()))
    sharding, slicing = rule.sharding, None  # how workers hold the rule's state; None if each has its own
    shared = sharding and sharding.zero.shared_params
    if sharding:
        whole = dict(named_leaves(jax.eval_shape(rule.init, first.params)))
        slicing = Slicing(whole, sharding.zero.shard_indices, sharding.with_state().from_checkpoint)
    elif rule.state_is_replicated:
        slicing = Slicing(dict(named_leaves(first.rule_state)))
    saved = restore(
        folder / "checkpoints",
        states,
        control,
        workers=workers.size,
        replicated=rule.state_is_replicated,
        same_params=rule.params_are_replicated,
        slicing=slicing,
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
    run_directory.refuse_other_run(saved.extra.get("experiment", {}), identity(plan))
    return saved


def restore_feed_and_callbacks(
    plan: Plan, saved: Saved | AsyncStart | None, at_start: Sequence[Sequence[Any]] = ()
) -> None:
    """Take this process's data and callbacks to where a checkpoint left them."""
    extra, feed = saved.extra if saved else {}, plan.feed
    # The corrupt examples of all workers count as rank 0's: progress lines add up the ranks'.
    feed.skipped = extra.get("skipped", 0) if plan.workers.processes.rank == 0 else 0
    feed.go_to(saved.step if saved else 0, extra.get("streams", []))
    callbacks.restore(plan.experiment.callbacks, extra.get("callbacks", []) if saved else at_start)


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


def begin_checkpoint(run: Run, state: TrainState, step: int, score: float | None, *, is_last: bool) -> None:
    """Begin a checkpoint, which is written while steps continue; all ranks call it."""
    failures.set_phase(f"checkpoint of step {step}", failures.LONG_FACTOR)
    if fate := run.saver.fate():  # once the checkpoint before is written
        raise AgreedError(f"run directory {str(run.folder)!r} {fate}: nothing is saved at step {step}")
    note_saved(run)
    if not run.plan.exchanges:
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    control, feed, sharding = run.workers.processes, run.plan.feed, run.functions.rule.sharding
    states = take(state, run.workers)  # of this process's workers, in host memory
    if sharding:
        state_sharding, indices = sharding.with_state(), sharding.zero.shard_indices
        states = {
            worker: each._replace(rule_state=state_sharding.to_checkpoint(each.rule_state, indices[worker]))
            for worker, each in states.items()
        }
    extra = run_facts(run, step) | {
        "skipped": int(control.allreduce_sum(np.array([feed.skipped], np.float64))[0]),
        "callbacks": callbacks.states(run.experiment.callbacks, control),
    }
    if feed.memory:
        extra["group_size"] = feed.memory.sampler.parts
    if not feed.has_epochs:
        every = control.allgather_object(feed.positions(step))
        extra["streams"] = [position for each in every for position in each]
    run.saver.save(states, extra, score, is_last=is_last)


def note_saved(run: Run, step: int | None = None) -> None:
    """Record a checkpoint that is complete, by default one that a thread has finished meanwhile; call the callbacks.

    By the record a resumed run knows which checkpoints are lost.
    """
    step = run.saver.take_newest_step() if step is None else step
    if step is not None:
        run.recorder.write("checkpoint", step=step)
        folder, is_asynchronous = run.folder / "checkpoints" / f"step_{step:08d}", bool(run.workers.asynchronous)
        callbacks.call_each(run.callbacks, "after_checkpoint", step, folder, is_asynchronous=is_asynchronous)


def run_facts(run: Run, step: int) -> dict[str, Any]:
    """JSON values that every checkpoint of a run keeps next to the state."""
    plan, exchange, sharding = run.plan, run.experiment.exchange, run.functions.rule.sharding
    kept = {"bucket_bytes": exchange.bucket_bytes, "overlap": exchange.overlap}
    class_names = [*map(str, getattr(plan.feed.source, "names", ()))]
    return {
        "elapsed_s": run.recorder.elapsed_s(),
        "scaled_for": plan.scaled_for,
        "exchange": {"asked": plan.requested, "strategy": plan.strategy, **kept},
        "experiment": identity(plan),
        "monitor": f"{run.experiment.monitor_mode} {run.experiment.monitor}",
        **({"chunks": list(sharding.zero.shard_indices), "cut": sharding.zero.sharding.name} if sharding else {}),
        "settings": run_directory.settings(run.experiment),
        **({"class_names": class_names} if class_names else {}),  # which `jaxmpi evaluate` compares with its data's
        "lr": plan.lr_of(step + 1),
    }
