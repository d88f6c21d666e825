"""A run: its plan with everything that is open while it lasts; and the guard that votes on steps and compares workers.

`open_run` is called again whenever ranks that died are left out, with the plan of those that remain.
"""

import contextlib
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import Retention, Saver, check_disk, total_bytes
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.durations import step_range
from jaxmpi.config.schema import Experiment
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe.flops import total_peak
from jaxmpi.observe.gradient_noise import Noise
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.trace import Profiler, Tracer
from jaxmpi.recover import decisions, shrink, signals
from jaxmpi.recover.replica_check import compare_replicas
from jaxmpi.recover.watchdog import watching
from jaxmpi.runtime import failures
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.build import Functions
from jaxmpi.trainer.callbacks import Callback, InjectFaults, ProfilerCallback
from jaxmpi.trainer.memory import WorkerMemory
from jaxmpi.trainer.plan import Plan
from jaxmpi.trainer.progress import ProgressLog
from jaxmpi.trainer.step import Metrics


@dataclass
class Guard:
    """Checks of a run's steps and state, and the decision that follows."""

    plan: Plan
    functions: Functions
    votes: decisions.StepConsensus
    recovery: decisions.Recovery
    saver: Saver
    recorder: Recorder

    def passes(self, step: int, metrics: Metrics | None) -> bool:
        """Vote on a step, even on one that was left out; True if it was made."""
        if metrics is None:
            self._react(self.votes.cast(step, None, 0, True))
            return False
        workers = self.plan.workers
        losses = local_rows(metrics.loss, workers)
        finite = local_rows(metrics.finite, workers).reshape(len(losses), -1)
        applied = metrics.applied is None or bool(local_rows(metrics.applied, workers).all())
        found = [(i, bad) for i, bad in enumerate(map(decisions.not_finite, losses, finite)) if bad is not None]
        place, bad = found[0] if found else (0, None)
        self._react(self.votes.cast(step, bad, workers.mine[place], applied))
        return applied and bool(np.isfinite(losses).all())

    def settle(self) -> None:
        """Count the open vote, and do what is agreed."""
        self._react(self.votes.count())

    def _react(self, failure: decisions.NonFiniteStep | None) -> None:
        if failure is not None:
            failures.set_phase(f"step {failure.step}")
            self.saver.wait()  # so that the last good checkpoint is complete, and is the one named
            tail = f"{self.saver.last_good()}. Lower the learning rate, warm up or clip"
            self.recorder.say(self.recovery.decide(failure, tail))
            self.recorder.write("skipped", step=failure.step, why=str(failure))

    def compare(self, state: TrainState, step: int) -> None:
        """Compare what is to be equal on all workers by its fingerprints."""
        rule, workers = self.functions.rule, self.plan.workers
        replicated = {"params": state.params} if rule.params_are_replicated else {}
        replicated |= {"rule": state.rule_state} if rule.state_is_replicated else {}
        if workers.size == 1 or not replicated or not self.plan.exchanges:
            return
        fingerprints = self.functions.fingerprints(replicated)
        text = compare_replicas(replicated, fingerprints, workers.mine, workers.processes, step)
        if text:
            self.saver.wait()
            self.recovery.decide_on_difference(f"{text}; {self.saver.last_good()}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a coordinator needs besides the state."""

    plan: Plan
    functions: Functions
    home: HeldFolder  # the run directory
    recorder: Recorder
    saver: Saver
    notice: signals.PreemptionNotice
    guard: Guard
    log: ProgressLog
    profiler: Profiler
    shrinking: shrink.ShrinkCoordinator | None  # between ranks that continue without each other
    callbacks: Sequence[Callback]
    callback_states: Sequence[Sequence[Any]]  # of the user's own, at the start
    memory: WorkerMemory | None  # bytes that a worker holds, by kind; None under asynchronous rules
    is_measured: bool = False  # False: the first step's program is still to be measured

    @property
    def experiment(self) -> Experiment:
        return self.plan.experiment

    @property
    def workers(self) -> Workers:
        return self.plan.workers

    @property
    def folder(self) -> Path:
        return self.home.path


def open_run(
    plan: Plan,
    *,
    functions: Functions,
    home: HeldFolder,
    recorder: Recorder,
    states: dict[int, TrainState],
    notice: signals.PreemptionNotice,
    recovery: decisions.Recovery,
    profiler: Profiler,
    shrinking: shrink.ShrinkCoordinator | None,
    callback_states: Sequence[Sequence[Any]],
    memory: WorkerMemory | None,
    is_measured: bool = False,
) -> Run:
    """All that the loop needs for these workers; all ranks call it."""
    experiment, workers, rule, control = plan.experiment, plan.workers, functions.rule, plan.workers.processes
    equal = {"replicated": rule.state_is_replicated, "same_params": rule.params_are_replicated}
    if control.rank == 0 and plan.exchanges:
        needed_bytes = total_bytes(states, workers=workers.size, **equal)
        check_disk(home.path / "checkpoints", needed_bytes, shutil.disk_usage(home.path).free)
    keep = Retention(experiment.keep_checkpoints, experiment.keep_best)
    saver = Saver(home, control, workers=workers.size, keep=keep, **equal)
    leaves = [path for path, _ in named_leaves(next(iter(states.values())).params)]
    hosts = control.allgather_object(socket.gethostname())
    log = ProgressLog(
        plan=plan,
        recorder=recorder,
        tracer=Tracer(step_range(experiment.trace, "trace"), control, hosts, home.path / "trace.json"),
        noise=Noise(workers.size, plan.clock.effective_batch // workers.size) if rule.measured else None,
        flops=functions.flops,
        peak=total_peak(workers, experiment.compute_dtype),
    )
    return Run(
        plan=plan,
        functions=functions,
        home=home,
        recorder=recorder,
        saver=saver,
        notice=notice,
        guard=Guard(plan, functions, decisions.StepConsensus(control, notice, leaves), recovery, saver, recorder),
        log=log,
        profiler=profiler,
        shrinking=shrinking,
        callbacks=[InjectFaults(), ProfilerCallback(profiler), *callbacks.of_rank(experiment.callbacks, control.rank)],
        callback_states=callback_states,
        memory=memory,
        is_measured=is_measured,
    )


def watch(plan: Plan) -> contextlib.AbstractContextManager[str]:
    """The watchdog of these workers.

    Asynchronous runs have none: a rank that only serves makes no steps, and server 0 knows who is late.
    """
    experiment, workers = plan.experiment, plan.workers
    if workers.asynchronous:
        return contextlib.nullcontext("")
    is_fault_tolerant = experiment.on_rank_loss == "shrink"
    return watching(workers.processes, experiment.stall_timeout_s, experiment.on_stall, is_fault_tolerant)
