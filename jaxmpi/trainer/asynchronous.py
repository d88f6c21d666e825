"""The trainer's loop under asynchronous rules: workers that share no step.

A slow worker holds up all others if every step exchanges. Under these rules each worker runs the trainer's loop alone.
Every tau steps it exchanges with the center, or after some steps it pushes its params to another worker
(`jaxmpi.rules.asynchronous`). Its reports to server 0 take the place of collectives, and the answers carry the progress
of all. Worker 0 also leads: it logs, evaluates and saves by the examples of all workers.

A checkpoint has two phases, since workers do not meet. Worker 0 orders it, and each worker writes its part when it next
reports. When all have written, worker 0 adds the center and completes the checkpoint. Worker 0 evaluates the center by
itself, while the others go on.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.checkpoint.manager import Retention, UncoordinatedCheckpoint, warn, written
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import to_device
from jaxmpi.config.durations import step_range
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import StepTimer, summary_asynchronous
from jaxmpi.observe.trace import UncoordinatedTrace
from jaxmpi.optim import optimizers
from jaxmpi.recover import decisions
from jaxmpi.rules.asynchronous.progress import AllWorkers, Counters, Order, Status, Stop
from jaxmpi.rules.asynchronous.worker import (
    AsyncStart,
    AsyncWorker,
    HeartbeatMonitor,
    on_device,
    start_limit_s,
    take_part,
)
from jaxmpi.runtime import failures
from jaxmpi.runtime.progress import drain, phase
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.loop import Coordinator, Position, RunProgress, run_steps
from jaxmpi.trainer.run import (
    SUMS,
    Run,
    evaluate,
    rate_factor,
    score,
)
from jaxmpi.trainer.state import note_saved, run_facts
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents

LOOK_S = 0.02  # between reports of a worker that only waits for the others


def run_asynchronously(run: Run, start: AsyncStart) -> dict[str, float]:
    """This rank's part, to the end; the last evaluation on worker 0."""
    config, rule = run.experiment, run.functions.rule.asynchronous
    assert rule is not None
    trace = UncoordinatedTrace(step_range(config.trace, "trace"), run.workers.processes, run.folder / "trace.json")
    wire = run.plan.strategy.partition(":")[2]  # all that these rules take of a strategy
    target = run.plan.examples(run.plan.clock.total_steps)
    monitor = HeartbeatMonitor(config.stall_timeout_s, config.on_stall, run.hosts, lambda: run.notice.is_given)
    worker, serve = take_part(run.workers, config.rule, rule, wire, start, target, monitor)
    if worker is None:
        if serve and serve():
            raise decisions.Preempted
        return {}
    thread = None
    if serve:
        thread = threading.Thread(target=serve, name="jaxmpi center", daemon=True)
        thread.start()  # before anything is compiled: it names who is late
    coordinator = AsyncCoordinator if worker.number else AsyncLeader
    with contextlib.closing(run.profiler):
        position = Position(int(start.state.step), start.state)
        return run_steps(coordinator(run, start, worker, trace, thread), run.callbacks, position)


class StderrRecorder(Recorder):
    """A recorder of a rank without a record; `say` writes to stderr."""

    def say(self, text: str) -> None:
        """A line that names the rank."""
        warn(f"{failures.describe_rank()}: {text}")


class AsyncCoordinator(Coordinator):
    """The coordinator of this rank's worker; nothing is ever due on a worker but worker 0."""

    is_asynchronous = True

    def __init__(
        self,
        run: Run,
        start: AsyncStart,
        worker: AsyncWorker,
        trace: UncoordinatedTrace,
        server: threading.Thread | None = None,
    ) -> None:
        # Votes and evaluations are this rank's.
        solo = dataclasses.replace(run.plan, workers=run.workers._replace(processes=SoloProcesses()))
        recorder = StderrRecorder(None) if worker.number else run.recorder
        self.run = dataclasses.replace(run, plan=solo, recorder=recorder)
        self.control, self.start, self.worker = run.workers.processes, start, worker
        self.trace, self.server = trace, server
        self.timer = StepTimer(worker.workers, to_device(run.workers))
        keep = Retention(run.experiment.keep_checkpoints, run.experiment.keep_best)
        self.parts = UncoordinatedCheckpoint(run.folder / "checkpoints", worker.workers, keep)
        log_every = run.plan.timetable.log_every
        self.report_every = min(log_every, worker.tau or log_every)
        self.is_left = False  # the run is to be resumed later
        self._waited = 0, 0.0  # the feed's running totals at the last report
        self._pending: list[tuple[int, Metrics | None]] = []  # since the last report

    def begin(self, position: Position) -> TrainState:
        """Compile, one rank of a host first, and wait for all workers."""
        run = self.run
        state, self.source = on_device(position.state), run.plan.feed.batches(position.step)
        self.first = next(self.source)
        limit_s = start_limit_s(run.experiment.stall_timeout_s)
        with phase("tracing and compiling the step"):
            self.step = self.control.leader_first(lambda: run.functions.compile_step(state, self.first), limit_s)
        failures.set_phase("start", failures.LONG_FACTOR)
        with phase("waiting for all workers to be ready"):
            self.worker.report()  # which is answered when all that are alive have reported
        self.worker.new = Counters()  # the wait is no part of a step
        drain()
        run.recorder.start_window(int(self.start.counters.examples))
        return state

    def batches(self) -> Generator[Batch, None, None]:
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
        state = worker.meet_others(state)
        exchanges = worker.tau and worker.clock % worker.tau == 0
        if not exchanges and worker.clock % self.report_every:
            return state, RunProgress(step)
        self._count(step)
        leave = bool(run.notice.is_given)
        state, status = worker.exchange(state, leave=leave) if exchanges else (state, worker.report(leave=leave))
        worker.write_if_ordered(self.parts, run.home, state, status)
        self.is_left = status.stop == Stop.LEAVE
        if status.stop:
            self.trace.add(drain(), worker.number, step, is_end=True)
        else:
            now = run.plan.step(status.examples)
            state = state._replace(rule_state=optimizers.set_step(state.rule_state, now))
        return state, self.progress(step, state, status)

    def progress(self, step: int, state: TrainState, status: Status) -> RunProgress:
        """What is due after a report; see `AsyncLeader`."""
        return RunProgress(step, is_over=bool(status.stop))

    def _count(self, step: int) -> None:
        """Count the pending steps, checked as finite before they reach the center, and where their time went."""
        feed, before, sums = self.run.plan.feed, self._waited, np.zeros(SUMS)
        for pending in self._pending:
            sums = sums + self.run.vote_and_sum(*pending)
            self.run.count_vote()
        self.timer.pause()
        window = self.timer.window()
        self.trace.add(window.spans, self.worker.number, step)
        self._waited = feed.skipped, feed.wait_s
        loss, examples, square = map(float, sums[:3])
        self.worker.count(
            steps=len(self._pending),
            examples=examples,
            loss=loss,
            skipped=feed.skipped - before[0],
            wait_s=feed.wait_s - before[1],
            square=square,
            exchange=window.parts["exposed"],
            **{part: window.parts[part] for part in ("data", "transfer", "compute", "other")},
        )
        self._pending.clear()

    def after_actions(self, step: int, due: DueEvents) -> None:
        """Restart the timer, since record and checkpoints are no training; exchanges have been counted."""
        self.timer.restart()

    def finish(self, state: TrainState) -> dict[str, float]:
        """Make the last exchange, evaluation and checkpoint, all workers doing their parts."""
        figures = self.complete_run(self.worker.end(state))
        if self.server:
            self.server.join()
        if self.is_left:
            raise decisions.Preempted
        return figures

    def complete_run(self, state: TrainState) -> dict[str, float]:
        """Do what worker 0 orders, until it closes the run."""
        while not (status := self.worker.report()).closing:
            time.sleep(LOOK_S)
            self.worker.write_if_ordered(self.parts, self.run.home, state, status)
        return {}


# ---------------------------------------------------------------- worker 0


class PendingCheckpoint(NamedTuple):
    """A checkpoint whose parts workers still write, and what it keeps of the moment at which it was begun."""

    order: Order
    extra: dict[str, Any]
    score: float | None


class AsyncLeader(AsyncCoordinator):
    """Worker 0's coordinator: it leads all, by their examples."""

    def __init__(self, run: Run, start: AsyncStart, worker: AsyncWorker, *more: Any) -> None:
        super().__init__(run, start, worker, *more)
        self.logged = AllWorkers({}, start.counters, np.zeros((worker.workers, len(Counters._fields))), [])
        self.workers = self.logged  # as the last answer has them
        self.done = start.step  # the last step for which it is known what is due
        self.checkpoint: PendingCheckpoint | None = None
        self.overdue = DueEvents(log=True)  # the run starts with a progress line
        self.result: dict[str, float] = {}
        self.evaluated = -1  # step of the last evaluation

    def progress(self, step: int, state: TrainState, status: Status) -> RunProgress:
        """Complete a checkpoint of which all workers have written their parts; return what is due.

        At the end nothing is due: see `complete_run`.
        """
        assert status.workers is not None
        self.workers, step = status.workers, self.run.plan.step(status.examples)
        if (pending := self.checkpoint) and all(r.saved >= pending.order.number for r in self.workers.reports.values()):
            with written(pending.order.step, self.run.home):
                center = {"center": self.worker.shared_params(state)}
                self.parts.end(pending.order.step, center, pending.extra, pending.score)
            self.checkpoint = None
            note_saved(self.run, pending.order.step)
        if status.stop:
            return RunProgress(step, is_over=True)
        due, self.done = self.run.plan.timetable.between(self.done, step), step
        due = DueEvents(*map(or_, due, self.overdue))
        now = due._replace(compare=False, log=due.log and self.has_news(), save=due.save and not self.checkpoint)
        self.overdue = DueEvents(log=due.log > now.log, save=due.save > now.save)
        return RunProgress(step, now)

    def has_news(self) -> bool:
        """Return True if any worker stepped since the last progress line."""
        return self.workers.counters.examples > self.logged.counters.examples

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Have all workers write their parts of a checkpoint."""
        run, home, order = self.run, self.run.home, Order(self.worker.save_order.number + 1, step)
        if fate := home.fate():
            raise TrainingError(f"run directory {str(home.path)!r} {fate}: nothing is saved at step {step}")
        states = callbacks.states(run.experiment.callbacks, run.workers.processes)
        with written(step, home):
            self.parts.begin(step)
        extra = run_facts(run, step) | {"tally": [*map(float, self.workers.counters)], "callbacks": states}
        figure = score(run.experiment, self.result) if self.evaluated == step else None
        self.checkpoint, self.worker.save_order = PendingCheckpoint(order, extra, figure), order

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate the center, in gossip worker 0's params until the end; the other workers go on."""
        state = state._replace(params=on_device(self.worker.shared_params(state)))
        # Without reports server 0 would take this worker for late.
        (self.result, _), self.evaluated = evaluate(self.run, state, step, after_batch=self.worker.report), step

    def log(self, step: int, state: TrainState) -> None:
        """Write lines about all workers' steps; the learning rate is worker 0's."""
        recorder, before, self.logged = self.run.recorder, self.logged, self.workers
        now, alive = self.workers.counters, len(self.workers.reports)
        since = Counters(*(a - b for a, b in zip(now, before.counters, strict=True)))
        spent = dict(zip(Counters._fields, (self.workers.by_worker - before.by_worker).T, strict=True))
        worker_steps = self.workers.by_worker[:, Counters._fields.index("steps")].astype(int).tolist()
        self.run.write(
            step,
            summary_asynchronous(spent) if spent["steps"].any() else None,
            rate_factor(self.run, state),
            epoch=now.examples / len(self.run.plan.feed.source),
            examples=int(now.examples),
            loss=since.loss / since.examples,
            gradient_norm=(since.square / max(since.steps, 1.0)) ** 0.5,
            wait_s=now.wait_s / max(alive, 1),
            skipped=int(now.skipped),
            worker_steps=worker_steps,
        )
        recorder.write(
            "workers",
            step=step,
            alive=alive,
            exchanges=int(now.exchanges),
            exchange_s=now.exchange_s,
            sent_bytes=int(now.sent_bytes),
            distance=since.distance / max(since.exchanges, 1),
            staleness=self.workers.staleness,
            worker_steps=worker_steps,
        )
        if gone := sorted(before.reports.keys() - self.workers.reports.keys()):
            names = ", ".join(f"rank {worker} on {self.run.hosts[worker]}" for worker in gone)
            recorder.say(f"{len(gone)} of {len(before.reports)} workers gone, {names}; the others go on")

    def complete_run(self, state: TrainState) -> dict[str, float]:
        """Wait for all last exchanges; make the last evaluation and checkpoint; let all go."""
        run, workers = self.run, self.worker.workers
        while self.checkpoint or not all(report.is_done for report in self.workers.reports.values()):
            self.wait(state)
        step = run.plan.step(self.workers.counters.examples)
        if self.has_news():
            self.log(step, state)
        if step == run.plan.clock.total_steps or run.plan.timetable.between(self.done, step).evaluate:
            self.evaluate(step, state)
        self.save(step, state, is_last=True)
        while self.checkpoint:
            self.wait(state)
        if traced := self.trace.merge(workers):
            run.recorder.say(traced)
        if self.is_left:
            run.notice.say_saved(run.recorder.say, step, run.folder)
        if lost := workers - len(self.workers.reports):
            run.recorder.say(f"finished with {workers - lost} of {workers} workers")
        self.worker.close(self.is_left)
        return self.result

    def wait(self, state: TrainState) -> None:
        """Report, write the checkpoint part that is ordered, and complete what is whole."""
        time.sleep(LOOK_S)
        status = self.worker.report()
        self.worker.write_if_ordered(self.parts, self.run.home, state, status)
        self.progress(self.done, state, status)
