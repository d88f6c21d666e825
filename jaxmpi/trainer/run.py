"""A run's parts, opened together and closed together; the guard votes on losses and compares workers."""

import contextlib
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.checkpoint.manager import Retention, Saver, check_disk, total_bytes
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.durations import step_range
from jaxmpi.config.schema import Experiment
from jaxmpi.core.files import HeldFolder
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe.flops import Peak
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
from jaxmpi.trainer.progress import ProgressLog
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.training_plan import Job


def open_saver(job: Job, functions: Functions, home: HeldFolder, states: dict[int, TrainState]) -> Saver:
    """Open the writer of checkpoints.

    Raises:
        UsageError: the disk has no room for two.
    """
    experiment, workers = job.experiment, job.workers
    replicated = functions.rule.state_is_replicated
    same_params = functions.rule.params_are_replicated
    if workers.processes.rank == 0 and functions.exchanges:
        needed_bytes = total_bytes(states, replicated, workers.size, same_params)
        check_disk(home.path / "checkpoints", needed_bytes, shutil.disk_usage(home.path).free)
    keep = Retention(experiment.keep_checkpoints, experiment.keep_best)
    equal = {"replicated": replicated, "same_params": same_params}
    return Saver(home, workers.processes, workers=workers.size, keep=keep, **equal)


# ---------------------------------------------------------------- the run


def watch(experiment: Experiment, workers: Workers) -> contextlib.AbstractContextManager[str]:
    """The watchdog of these workers.

    A rank that only serves gets no further, and one that dies is no reason to end: server 0 knows who is late.
    """
    if workers.asynchronous:
        return contextlib.nullcontext("")
    is_fault_tolerant = experiment.on_rank_loss == "shrink"
    return watching(workers.processes, experiment.stall_timeout_s, experiment.on_stall, is_fault_tolerant)


def assembled(
    job: Job,
    *,
    home: HeldFolder,
    functions: Functions,
    recorder: Recorder,
    states: dict[int, TrainState],
    notice: signals.PreemptionNotice,
    recovery: decisions.Recovery,
    profiler: Profiler,
    shrinking: shrink.ShrinkCoordinator | None,
    peak: Peak | None,
    at_start: Sequence[Sequence[Any]],
    held: WorkerMemory | None = None,
    is_measured: bool = False,
) -> "Run":
    """All that the loop needs for these workers; all ranks call it."""
    experiment, workers, plan = job.experiment, job.workers, job.plan
    control = workers.processes
    hosts = control.allgather_object(socket.gethostname())
    saver = open_saver(job, functions, home, states)
    leaves = [path for path, _ in named_leaves(next(iter(states.values())).params)]
    votes = decisions.StepConsensus(control, notice, leaves)
    tracer = Tracer(step_range(experiment.trace, "trace"), control, hosts, home.path / "trace.json")
    noise = Noise(workers.size, plan.clock.effective_batch // workers.size) if functions.rule.measured else None
    return Run(
        experiment=experiment,
        workers=workers,
        plan=plan,
        functions=functions,
        recorder=recorder,
        folder=home.path,
        saver=saver,
        notice=notice,
        guard=Guard(votes, recovery, workers, functions, saver, recorder),
        log=ProgressLog(
            plan=plan,
            workers=workers,
            recorder=recorder,
            tracer=tracer,
            noise=noise,
            max_skipped=experiment.data.max_skipped,
            flops=functions.flops,
            peak=peak,
        ),
        profiler=profiler,
        shrinking=shrinking,
        callbacks=[InjectFaults(), ProfilerCallback(profiler), *callbacks.of_rank(experiment.callbacks, control.rank)],
        at_start=at_start,
        held=held,
        is_measured=is_measured,
    )


@dataclass
class Guard:
    """Checks of a run's steps and state, and the decision that follows."""

    votes: decisions.StepConsensus
    recovery: decisions.Recovery
    workers: Workers
    functions: Functions
    saver: Saver
    recorder: Recorder

    def passes(self, step: int, metrics: Metrics | None) -> bool:
        """Vote on a step, even on one that was left out.

        Returns: True if the step was made.

        Raises:
            TrainingError, RollBack: what all ranks agree to do about the step before.
        """
        if metrics is None:
            self._mind(self.votes.cast(step, None, 0, True))
            return False
        losses = local_rows(metrics.loss, self.workers)
        finite = local_rows(metrics.finite, self.workers).reshape(len(losses), -1)
        applied = metrics.applied is None or bool(local_rows(metrics.applied, self.workers).all())
        odd = [(i, bad) for i, bad in enumerate(map(decisions.not_finite, losses, finite)) if bad is not None]
        place, bad = odd[0] if odd else (0, None)
        self._mind(self.votes.cast(step, bad, self.workers.mine[place], applied))
        return applied and bool(np.isfinite(losses).all())

    def settle(self) -> None:
        """Count the open vote, and do what is agreed.

        Raises:
            TrainingError, RollBack: as agreed.
        """
        self._mind(self.votes.count())

    def _mind(self, failure: decisions.NonFiniteStep | None) -> None:
        if failure is not None:
            failures.set_phase(f"step {failure.step}")
            self.saver.wait()  # so that the last good checkpoint is whole, and the one named
            tail = f"{self.saver.last_good()}. Lower the learning rate, warm up or clip"
            self.recorder.say(self.recovery.of(failure, tail))
            self.recorder.write("skipped", step=failure.step, why=str(failure))

    def compare(self, state: TrainState, step: int) -> None:
        """Compare what is to be equal on all workers by its fingerprints.

        Raises:
            TrainingError, RollBack: a worker's differs.
        """
        rule = self.functions.rule
        kept = {"params": state.params} if rule.params_are_replicated else {}
        kept |= {"rule": state.rule_state} if rule.state_is_replicated else {}
        if self.workers.size == 1 or not kept or not self.functions.exchanges:
            return
        text = compare_replicas(
            kept, self.functions.fingerprints(kept), self.workers.mine, self.workers.processes, step
        )
        if text:
            self.saver.wait()
            self.recovery.of_difference(f"{text}; {self.saver.last_good()}")


@dataclass(frozen=True, kw_only=True)
class Run(Job):
    """All that a coordinator needs beside the state."""

    functions: Functions
    recorder: Recorder
    folder: Path
    saver: Saver
    notice: signals.PreemptionNotice
    guard: Guard
    log: ProgressLog
    profiler: Profiler
    shrinking: shrink.ShrinkCoordinator | None  # between ranks that go on without each other
    callbacks: Sequence[Callback]
    at_start: Sequence[Sequence[Any]]  # the states of the user's own
    held: WorkerMemory | None  # bytes that a worker holds, by kind
    is_measured: bool = False  # else it is measured before the first step
