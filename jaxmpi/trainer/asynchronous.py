"""The coordinator of asynchronous rules: workers that share no step.

A slow worker holds up all others if every step exchanges. Under these rules each worker runs the trainer's loop alone.
Every tau steps it exchanges with the center, or after some steps it sends its params to another worker.
`AsynchronousWorker` answers the loop's questions as the lock-step coordinator does. Its reports
to server 0 take the place of collectives, and the answers carry the progress of all. Worker 0 is also chief: it logs,
evaluates and saves by the examples of all workers. A rank with a shard of the center serves it in a
thread, or does nothing else.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator, Sequence

import numpy as np

from jaxmpi.checkpoint.manager import warn
from jaxmpi.checkpoint.write import Retention, UncoordinatedCheckpoint
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import to_device
from jaxmpi.config.durations import step_range
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.observe.trace import UncoordinatedTrace
from jaxmpi.optim import optimizers
from jaxmpi.recover import decisions
from jaxmpi.rules.parameter_server import ServerAnswer
from jaxmpi.runtime import failures
from jaxmpi.runtime.progress import drain, phase
from jaxmpi.trainer.async_chief import LOOK_S, AsyncLeader, SharedEvaluation
from jaxmpi.trainer.async_servers import HeartbeatMonitor, connect, serve, start_limit_s
from jaxmpi.trainer.async_start import AsyncStart, on_device
from jaxmpi.trainer.async_worker import AsyncWorker
from jaxmpi.trainer.loop import Position, RunProgress, run_steps
from jaxmpi.trainer.progress import SUMS
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents


def run_asynchronously(run: Run, start: AsyncStart, hosts: Sequence[str]) -> dict[str, float]:
    """This rank's part, to the end; the last evaluation on worker 0.

    Args:
        hosts: names by rank.

    Raises:
        TrainingError: the center or worker 0 is gone, or the loss is not finite.
        decisions.Preempted: the run was asked to leave, and has been saved.
    """
    config = run.experiment
    trace = UncoordinatedTrace(step_range(config.trace, "trace"), run.workers.processes, run.folder / "trace.json")
    connections, thread = connect(run, start), None
    monitor = HeartbeatMonitor(config.stall_timeout_s, config.on_stall, hosts)
    if connections.endpoint and connections.channels:
        parts = run, connections.endpoint, monitor
        thread = threading.Thread(target=serve, args=parts, name="jaxmpi center", daemon=True)
        thread.start()  # before anything is compiled: it names who is late
    if connections.endpoint and not connections.channels:
        serve(run, connections.endpoint, monitor)
        return {}
    worker = AsyncWorker(run, start, connections, trace)
    coordinator = AsynchronousWorker(run=run, start=start, worker=worker, server=thread)
    with contextlib.closing(run.profiler):
        return run_steps(coordinator, run.callbacks, Position(int(start.state.step), start.state))


class StderrRecorder(Recorder):
    """A recorder of a rank without a record; `say` writes to stderr."""

    def say(self, text: str) -> None:
        """A line that names the rank."""
        warn(f"{failures.describe_rank()}: {text}")


class AsynchronousWorker:
    """The loop's coordinator for this rank's worker; worker 0 is also chief."""

    is_asynchronous = True
    is_stopped = False

    def __init__(
        self,
        run: Run,
        start: AsyncStart,
        worker: AsyncWorker,
        server: threading.Thread | None,
    ) -> None:
        """Take up what the run starts with.

        Args:
            server: keeps a shard of the center on this rank.
        """
        # Votes and evaluations are this rank's.
        solo = dataclasses.replace(run.plan, workers=run.workers._replace(processes=SoloProcesses()))
        leaves = [path for path, _ in named_leaves(start.state.params)]
        votes = decisions.StepConsensus(solo.workers.processes, run.notice, leaves)
        recorder = run.recorder if run.workers.processes.rank == 0 else StderrRecorder(None)
        guard = dataclasses.replace(run.guard, votes=votes, plan=solo, recorder=recorder)
        self.run, self.start, self.worker, self.server = run, start, worker, server
        self.alone = dataclasses.replace(run, plan=solo, guard=guard)
        self.timer = StepTimer(run.workers.size, to_device(run.workers))
        keep = Retention(run.experiment.keep_checkpoints, run.experiment.keep_best)
        self.parts = UncoordinatedCheckpoint(run.folder / "checkpoints", run.workers.size, keep)
        self.evaluation = SharedEvaluation(self.alone, worker)
        is_chief = worker.number == 0
        self.chief = (
            AsyncLeader(run=self.alone, worker=worker, parts=self.parts, start=start, evaluation=self.evaluation)
            if is_chief
            else None
        )
        self.report_every = run.experiment.log_every
        if not worker.rule.is_gossip:
            self.report_every = min(self.report_every, worker.tau)
        self.answer: ServerAnswer | None = None  # the last
        self._pending: list[tuple[int, Metrics | None]] = []  # since the last report

    def begin(self, position: Position) -> TrainState:
        """Compile, one rank of a host first, and wait for all workers."""
        run = self.run
        state, self.source = on_device(position.state), run.plan.feed.batches(position.step)
        self.first = next(self.source)
        train_step, limit_s = run.functions.train_step, start_limit_s(run.experiment.stall_timeout_s)
        with phase("tracing and compiling the step"):
            self.step = run.workers.processes.leader_first(
                lambda: train_step.lower(state, self.first).compile(), limit_s
            )
        with phase("compiling the evaluation"):  # else one would fall behind while it compiles
            run.workers.processes.leader_first(lambda: self.evaluation.compile(state), limit_s)
            run.plan.lr_of(1)  # as progress lines do
        with phase("waiting for all workers to be ready"):
            self.worker.wait_for_start()
        if self.chief:
            run.recorder.start_window(int(self.start.counters.examples))
        return state

    def batches(self) -> Generator[Batch, None, None]:
        """Batches without an end."""
        with contextlib.closing(self.source):
            yield self.first
            yield from self.source

    def update(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics | None]:
        return self.step(state, batch)

    def after_step(self, step: int, state: TrainState, metrics: Metrics | None) -> tuple[TrainState, RunProgress]:
        """Gossip, or exchange every tau steps; report, and receive all workers' progress."""
        worker, run = self.worker, self.run
        self._pending.append((step, metrics))
        worker.clock += 1
        if worker.rule.is_gossip:
            state = worker.gossip_step(state)
        meets = not worker.rule.is_gossip and worker.clock % worker.tau == 0
        if not meets and worker.clock % self.report_every:
            return state, RunProgress(step)
        sums = np.sum([self._step_sums(*one) for one in self._pending], axis=0)
        self.timer.pause()
        worker.count(sums, len(self._pending), run.plan.feed.skipped, run.plan.feed.wait_s)
        self._pending.clear()
        window = self.timer.window()
        worker.count_time(window)
        worker.tracer.add(window.spans, worker.number, step)
        asks = (self.chief.requests() if self.chief else {}) | {"leave": float(run.notice.given)}
        state, answer = worker.exchange(state, asks) if meets else (state, worker.report(asks))
        self._serve_requests(state, answer)
        self.answer = answer
        progress = RunProgress(step, is_over=bool(answer.status.stop))
        if self.chief:
            progress = self.chief.progress(state, answer)
        if progress.is_over:
            worker.tracer.add(drain(), worker.number, step, is_end=True)
        else:
            now = run.plan.step(answer.counters.examples)
            state = state._replace(rule_state=optimizers.set_step(state.rule_state, now))
        return state, progress

    def _serve_requests(self, state: TrainState, answer: ServerAnswer) -> None:
        """Do this worker's parts of a checkpoint and an evaluation under way."""
        self.worker.write_if_asked(self.parts, self.run.saver.home, state, answer)
        self.evaluation.evaluate_shard(answer)

    def _step_sums(self, step: int, metrics: Metrics | None) -> np.ndarray:
        """f64[SUMS] of a step, checked as finite before it reaches the center.

        Raises:
            TrainingError: it is not, and `on_nonfinite` does not leave it out.
        """
        assert metrics is not None
        guard = self.alone.guard
        is_made = guard.passes(step, metrics)
        guard.settle()
        return self.run.log.sums(step, metrics) if is_made else np.zeros(SUMS)

    def pause(self, state: TrainState) -> None:
        """Nothing: no message of this worker waits for others."""

    def compare(self, step: int, state: TrainState) -> None:
        """Nothing: its params are its own."""

    def log(self, step: int, state: TrainState) -> None:
        assert self.chief is not None
        self.chief.log(step, state)

    def evaluate(self, step: int, state: TrainState) -> None:
        """Begin one of the center, in which all take part."""
        assert self.chief is not None
        self.chief.evaluate(step, state)

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Announce a checkpoint; each worker writes its part at its next report."""
        assert self.chief is not None
        self.chief.save(step, state)

    def leave(self, step: int, state: TrainState) -> None:
        """Nothing: the answer to a report says it, at the end."""

    def settle(self, step: int, due: DueEvents) -> None:
        """Restart the timer, since record and checkpoints are no training.

        The time of an exchange has been counted.
        """
        self.timer.restart()

    def finish(self, state: TrainState) -> dict[str, float]:
        """Make the last exchange, evaluation and checkpoint, all workers doing their parts.

        Raises:
            decisions.Preempted: the run is to be resumed later.
        """
        worker = self.worker
        assert self.answer is not None
        is_left = self.answer.status.stop == 2
        state = worker.end(state)
        if self.chief:
            self.chief.finish(state)
            worker.close(is_left)
            if self.server:
                self.server.join()
        else:
            answer = worker.report({})
            while not answer.status.closing:
                time.sleep(LOOK_S)
                self._serve_requests(state, answer)
                answer = worker.report({})
        if is_left:
            raise decisions.Preempted
        return self.chief.result if self.chief else {}
