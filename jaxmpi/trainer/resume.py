"""The initial or restored state, and what checkpoints hold besides it.

A resumed synchronous run is to continue bit for bit, and a checkpoint of another run is to be refused. So JSON values
stand beside the state: the exchange in use, the learning rate, positions of streams, and states of callbacks. The
fields that make a run the same run (`identity`) are among them too. All ranks take the same checkpoint and compare
params by hash (`starting_states`). Other settings may change between the parts of a run; the changes are printed and
recorded (`say_changes`). With `continue_from` a run begins with the weights and moments of another one, at another
effective batch. A run directory that has gone is not made anew, since another job may be given its name: the run is
saved elsewhere and ends (docs/decisions/0010).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.manager import warn
from jaxmpi.checkpoint.restore import Saved, Slicing, restore
from jaxmpi.comm.topology import Workers, take
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.pytrees import named_leaves, tree_digest
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe.recorder import Recorder
from jaxmpi.optim import optimizers
from jaxmpi.rules.asynchronous.start import AsyncStart, load_start
from jaxmpi.rules.base import Rule
from jaxmpi.runtime import failures
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.build import Functions, initial_states
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.training_plan import Job, TrainingPlan


def extra_of(job: Job, functions: Functions, elapsed_s: float) -> dict[str, Any]:
    """JSON values that a checkpoint keeps beside the state."""
    sharding = functions.rule.sharding
    return {
        "elapsed_s": elapsed_s,
        "scaled_for": job.plan.scaled_for,
        "exchange": {
            "asked": functions.asked,
            "strategy": functions.strategy,
            "bucket_bytes": job.experiment.exchange.bucket_bytes,
            "overlap": job.experiment.exchange.overlap,
        },
        "experiment": identity(job),
        "monitor": f"{job.experiment.monitor_mode} {job.experiment.monitor}",
        **({"chunks": list(sharding.zero.shard_indices), "cut": sharding.zero.sharding.name} if sharding else {}),
        "settings": run_directory.settings(job.experiment),
    }


def identity(job: Job) -> dict[str, Any]:
    """Fields that make a run the same run."""
    return run_directory.identity(job.experiment, job.plan.clock.effective_batch, job.plan.data)


def restored(
    folder: Path,
    states: dict[int, TrainState],
    workers: Workers,
    rule: Rule,
    now: dict[str, Any],
    but: Sequence[str] = (),
) -> Saved | None:
    """A run directory's newest checkpoint, the same on all ranks, or None.

    Args:
        states: of this process's workers, in the place of which it is read.
        now: `identity` of the run that goes on with it.
        but: fields of `now` that may differ.

    Raises:
        UsageError: it is another run's.
    """
    place = rule.sharding and rule.sharding.zero.shared_params
    is_leader = workers.processes.local_rank == 0
    saved = restore(
        folder / "checkpoints",
        states,
        workers.processes,
        workers=workers.size,
        replicated=rule.state_is_replicated,
        same_params=rule.params_are_replicated,
        slicing=slicing_of(rule, next(iter(states.values()))),
        reads_params=is_leader or not place,
        say=warn if workers.processes.rank == 0 else lambda text: None,
    )
    workers.processes.assert_same("the checkpoint to resume from", {"step": saved.step if saved else 0})
    if saved and place:
        [(worker, state)] = saved.states.items()
        saved = saved._replace(states={worker: state._replace(params=place.fill(state.params))})
    if saved:
        params = next(iter(saved.states.values())).params if rule.params_are_replicated else {}
        workers.processes.assert_same(f"params at step {saved.step}", {"sha256": tree_digest(params)})
        run_directory.refuse_other_run(saved.extra.get("experiment", {}), now, but)
    return saved


def slicing_of(rule: Rule, state: TrainState) -> Slicing | None:
    """How workers hold the rule's state; None if parts are their own."""
    if rule.sharding:
        held = rule.sharding.of_state().from_checkpoint
        whole = dict(named_leaves(jax.eval_shape(rule.init, state.params)))
        return Slicing(whole, rule.sharding.zero.shard_indices, held)
    return Slicing(dict(named_leaves(state.rule_state))) if rule.state_is_replicated else None


def continued(
    source: Path, states: dict[int, TrainState], workers: Workers, rule: Rule, plan: TrainingPlan, now: dict[str, Any]
) -> Saved:
    """Another run's newest checkpoint, at this run's step of as many examples.

    Weights, moments and model state are taken as they are. The step, and the optimizer's own by which its learning
    rate goes, count steps of this run's effective batch.

    Args:
        source: the other run's directory, as `run_directory.check_source` accepts it.
        now: `identity` of this run.

    Raises:
        UsageError: more than the effective batch and the micro-batch differ, or no checkpoint is whole.
    """
    saved = restored(source, states, workers, rule, now, run_directory.BATCHES)
    if saved is None:
        raise UsageError(f"continue_from: {str(source)!r} has no checkpoint")
    step = step_for(saved.step, saved.extra["experiment"]["effective batch"], plan)
    moved = {
        worker: state._replace(
            step=np.full_like(state.step, step),
            rule_state=jax.tree.map(np.asarray, optimizers.set_step(state.rule_state, step)),
        )
        for worker, state in saved.states.items()
    }
    return saved._replace(states=moved, step=step, step_there=saved.step)


def step_for(step: int, effective_batch: int, plan: TrainingPlan) -> int:
    """The plan's last step with no more examples than another run's `step`.

    Args:
        effective_batch: the other run's.
    """
    epochs, batches = divmod(step, math.ceil(len(plan.feed.source) / effective_batch))
    return epochs * plan.clock.steps_per_epoch + batches * effective_batch // plan.clock.effective_batch


# ---------------------------------------------------------------- state in and out


def starting_states(job: Job, rule: Rule, folder: Path) -> tuple[dict[int, TrainState], Saved | AsyncStart | None]:
    """State 0, or a resumed checkpoint's; asynchronous workers have a start each.

    A run that continues another begins with that one's newest checkpoint, until it has one of its own.
    """
    experiment, workers = job.experiment, job.workers
    states, now = initial_states(job, rule), identity(job)
    if experiment.resume and workers.processes.rank == 0:
        for path in run_directory.lost(folder):
            warn(f"passed over: {path}: gone, though the record has it as saved")
    if rule.asynchronous:
        say = warn if workers.processes.rank == 0 else lambda text: None
        state, folder = states[workers.mine[0]], folder / "checkpoints"
        start = load_start(folder, state, workers, rule.asynchronous, experiment.resume, say)
        run_directory.refuse_other_run(start.extra.get("experiment", {}), now)
        return states, start
    saved = restored(folder, states, workers, rule, now) if experiment.resume else None
    if saved is None and experiment.continue_from:
        saved = continued(Path(experiment.continue_from), states, workers, rule, job.plan, now)
    return (saved.states if saved else states), saved


def say_changes(job: Job, recorder: Recorder, extra: dict[str, Any], start: int) -> None:
    """Say and record which settings, or learning rate, differ from the checkpoint's.

    A decay that spans the run has another rate at the same step if the run becomes longer or shorter.
    """
    found = run_directory.changes(extra.get("settings"), run_directory.settings(job.experiment))
    lr, before = job.plan.lr_of(start + 1), extra.get("lr")
    if None not in (before, lr) and before != lr:
        found[f"learning rate of step {start + 1}"] = (before, lr)
    if found:
        shown = lambda value: f"{value:.6g}" if isinstance(value, float) else value  # noqa: E731
        lines = (f"changed since the checkpoint: {k}: was {shown(a)}, is {shown(b)}" for k, (a, b) in found.items())
        recorder.say("\n".join(lines))
        recorder.write("changed", step=start, changes={k: {"was": a, "is": b} for k, (a, b) in found.items()})


def go_on(job: Job, saved: Saved | AsyncStart | None, at_start: Sequence[Sequence[Any]] = ()) -> None:
    """Restore this process's data and callbacks from a checkpoint.

    Args:
        at_start: states of the callbacks if there is no checkpoint.
    """
    extra, feed = saved.extra if saved else {}, job.plan.feed
    # Corrupt examples of all workers, as the first rank's own: they are summed.
    feed.skipped = extra.get("skipped", 0) if job.workers.processes.rank == 0 else 0
    is_other = isinstance(saved, Saved) and saved.step_there is not None  # True: of the run that this one continues
    feed.go_to(saved.step if saved else 0, extra.get("streams", []))
    kept = extra.get("callbacks", [])
    callbacks.restore(job.experiment.callbacks, kept if saved and not is_other else at_start)
    if is_other:
        callbacks.carry_rate(job.experiment.callbacks, kept)


def save(run: Run, state: TrainState, step: int, score: float | None, *, is_last: bool) -> None:
    """A checkpoint; it is written while the run goes on.

    Args:
        is_last: no step follows before it is written.

    Raises:
        TrainingError: the one before could not be written, or params or other state were not finite; or the run
            directory is gone, moved or replaced.
    """
    failures.set_phase(f"checkpoint of step {step}", failures.LONG)
    if fate := run.saver.fate():  # once the checkpoint before is written
        end_elsewhere(run, state, step, fate)
    note_saved(run)
    if not run.functions.exchanges:
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    run.saver.save(states_to_save(run, state), extra_to_save(run, step), score, is_last=is_last)


def note_saved(run: Run) -> None:
    """`note_whole` of a checkpoint that a thread has written meanwhile."""
    if (step := run.saver.taken()) is not None:
        note_whole(run, step)


def note_whole(run: Run, step: int) -> None:
    """Record a checkpoint that has become whole, and call the callbacks.

    By the record a resumed run knows which checkpoints are lost.
    """
    run.recorder.write("checkpoint", step=step)
    folder = run.folder / "checkpoints" / f"step_{step:08d}"
    callbacks.each(run.callbacks, "after_checkpoint", step, folder, is_asynchronous=bool(run.workers.asynchronous))


def states_to_save(run: Run, state: TrainState) -> dict[int, TrainState]:
    """States of this process's workers for a checkpoint, in host memory."""
    states, sharding = take(state, run.workers), run.functions.rule.sharding
    if sharding is None:
        return states
    of_state, indices = sharding.of_state(), sharding.zero.shard_indices
    return {
        worker: each._replace(rule_state=of_state.to_checkpoint(each.rule_state, indices[worker]))
        for worker, each in states.items()
    }


def extra_to_save(run: Run, step: int) -> dict[str, Any]:
    """JSON values of `step`'s checkpoint, beside its state; all ranks call it."""
    control = run.workers.processes
    skipped = int(control.allreduce_sum(np.array([run.plan.feed.skipped], np.float64))[0])
    extra = extra_of(run, run.functions, run.recorder.elapsed_s())
    states = callbacks.states(run.experiment.callbacks, control)
    memory = run.plan.feed.memory
    kept = {"skipped": skipped, "lr": run.plan.lr_of(step + 1), "callbacks": states}
    kept |= {"group_size": memory.sampler.parts} if memory else {}
    if not run.plan.feed.has_epochs:
        every = control.allgather_object(run.plan.feed.positions(step))
        kept["streams"] = [position for each in every for position in each]
    return extra | kept


def end_elsewhere(run: Run, state: TrainState, step: int, fate: str) -> NoReturn:
    """Save elsewhere a run that has lost its directory, and end it.

    Its directory is not made anew: another job may be given that name, and would resume from this run's params.

    Raises:
        AgreedError: what has become of the directory, and where the run is saved.
    """
    text = f"run directory {str(run.folder)!r} {fate}"
    if not run.functions.exchanges:
        raise AgreedError(f"{text}; strategy none saves nothing")
    place = run.saver.save_elsewhere(states_to_save(run, state), extra_to_save(run, step), run.recorder.copy_to)
    raise AgreedError(f"{text}; saved at step {step} in {str(place)!r}: go on with --resume --run-dir {place}")
