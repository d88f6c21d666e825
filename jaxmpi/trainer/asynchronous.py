"""The trainer's loop under asynchronous rules: workers that share no step.

A slow worker holds up all others if every step exchanges. Under these rules each worker runs the trainer's loop alone.
Every tau steps it exchanges with the center, or after some steps it pushes its params to another worker
(`jaxmpi.rules.asynchronous`). Its reports to server 0 take the place of collectives, and the answers carry the progress
of all. Worker 0 also leads: it logs, evaluates and saves by the examples of all workers.

A checkpoint has two phases, since workers do not meet. Worker 0 orders it, and each worker writes its part when it next
reports. When all have written, worker 0 adds the center and completes the checkpoint. Evaluations are ordered likewise
(`shared_evaluation`).
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator, Sequence
from operator import and_, gt, or_
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi.checkpoint.manager import Retention, UncoordinatedCheckpoint, refuge, warn, written
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import to_device
from jaxmpi.config.durations import step_range
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import StepTimer, summary_asynchronous
from jaxmpi.observe.trace import UncoordinatedTrace
from jaxmpi.optim import optimizers
from jaxmpi.recover import decisions
from jaxmpi.rules.asynchronous.center import LEAVE, AllWorkers, Counters, Order, Status
from jaxmpi.rules.asynchronous.coordinator import HeartbeatMonitor, start_limit_s, take_part
from jaxmpi.rules.asynchronous.start import AsyncStart, on_device
from jaxmpi.rules.asynchronous.worker import AsyncWorker
from jaxmpi.runtime import failures
from jaxmpi.runtime.progress import drain, phase
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.evaluate import rate_factor, score
from jaxmpi.trainer.loop import Position, RunProgress, run_steps
from jaxmpi.trainer.progress import SUMS, Done
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.shared_evaluation import SharedEvaluation
from jaxmpi.trainer.state import note_whole, run_facts
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents

MANY = 50  # steps of a worker by the median, before one that has made few is named
LOOK_S = 0.02  # between reports of a worker that only waits for the others


def run_asynchronously(run: Run, start: AsyncStart, hosts: Sequence[str]) -> dict[str, float]:
    """This rank's part, to the end; the last evaluation on worker 0.

    Args:
        hosts: names by rank.

    Raises:
        TrainingError: the center or worker 0 is gone, or the loss is not finite.
        decisions.Preempted: the run was asked to leave, and has been saved.
    """
    config, rule = run.experiment, run.functions.rule.asynchronous
    assert rule is not None
    trace = UncoordinatedTrace(step_range(config.trace, "trace"), run.workers.processes, run.folder / "trace.json")
    wire = run.plan.strategy.partition(":")[2]  # all that these rules take of a strategy
    target = run.plan.examples(run.plan.clock.total_steps)
    monitor = HeartbeatMonitor(config.stall_timeout_s, config.on_stall, hosts, lambda: run.notice.given)
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


class AsyncCoordinator:
    """The loop's coordinator for this rank's worker."""

    is_asynchronous = True
    is_stopped = False

    def __init__(
        self,
        run: Run,
        start: AsyncStart,
        worker: AsyncWorker,
        trace: UncoordinatedTrace,
        server: threading.Thread | None = None,
    ) -> None:
        """Take up what the run starts with; `server` keeps a shard of the center on this rank."""
        # Votes and evaluations are this rank's.
        solo = dataclasses.replace(run.plan, workers=run.workers._replace(processes=SoloProcesses()))
        leaves = [path for path, _ in named_leaves(start.state.params)]
        votes = decisions.StepConsensus(solo.workers.processes, run.notice, leaves)
        recorder = StderrRecorder(None) if worker.number else run.recorder
        guard = dataclasses.replace(run.guard, votes=votes, plan=solo, recorder=recorder)
        self.run, self.control = dataclasses.replace(run, plan=solo, guard=guard), run.workers.processes
        self.start, self.worker, self.trace, self.server = start, worker, trace, server
        self.timer = StepTimer(worker.workers, to_device(run.workers))
        keep = Retention(run.experiment.keep_checkpoints, run.experiment.keep_best)
        self.parts = UncoordinatedCheckpoint(run.folder / "checkpoints", worker.workers, keep)
        self.evaluation = SharedEvaluation(self.run, worker)
        self.report_every = run.experiment.log_every
        if not worker.rule.is_gossip:
            self.report_every = min(self.report_every, worker.tau)
        self.is_left = False  # the run is to be resumed later
        self._waited = 0, 0.0  # the feed's running totals at the last report
        self._pending: list[tuple[int, Metrics | None]] = []  # since the last report

    def begin(self, position: Position) -> TrainState:
        """Compile, one rank of a host first, and wait for all workers."""
        run = self.run
        state, self.source = on_device(position.state), run.plan.feed.batches(position.step)
        self.first = next(self.source)
        train_step, limit_s = run.functions.train_step, start_limit_s(run.experiment.stall_timeout_s)
        with phase("tracing and compiling the step"):
            self.step = self.control.leader_first(lambda: train_step.lower(state, self.first).compile(), limit_s)
        with phase("compiling the evaluation"):  # else one would fall behind while it compiles
            self.control.leader_first(lambda: self.evaluation.compile(state), limit_s)
            run.plan.lr_of(1)  # as progress lines do
        with phase("waiting for all workers to be ready"):
            self.worker.wait_for_start()
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
        exchanges = not worker.rule.is_gossip and worker.clock % worker.tau == 0
        if not exchanges and worker.clock % self.report_every:
            return state, RunProgress(step)
        self._count(step)
        leave = bool(run.notice.given)
        state, status = worker.exchange(state, leave=leave) if exchanges else (state, worker.report(leave=leave))
        self._obey(state, status)
        self.is_left = status.stop == LEAVE
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
        """Count the pending steps, and where their time went."""
        feed, before = self.run.plan.feed, self._waited
        sums = np.sum([self._step_sums(*pending) for pending in self._pending], axis=0)
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

    def _step_sums(self, step: int, metrics: Metrics | None) -> np.ndarray:
        """f64[SUMS] of a step, checked as finite before it reaches the center.

        Raises:
            TrainingError: it is not, and `on_nonfinite` does not leave it out.
        """
        assert metrics is not None
        is_made = self.run.guard.passes(step, metrics)
        self.run.guard.settle()
        return self.run.log.sums(step, metrics) if is_made else np.zeros(SUMS)

    def _obey(self, state: TrainState, status: Status) -> None:
        """Do this worker's parts of a checkpoint and an evaluation that worker 0 has ordered."""
        self.worker.write_if_ordered(self.parts, self.run.saver.home, state, status)
        self.evaluation.evaluate_if_ordered(status.evaluate)

    def pause(self, state: TrainState) -> None:
        """Nothing: no message of this worker waits for others."""

    def compare(self, step: int, state: TrainState) -> None:
        """Nothing: its params are its own."""

    def leave(self, step: int, state: TrainState) -> None:
        """Nothing: the answer to a report ends the run."""

    # Nothing is ever due on a worker but worker 0.
    def log(self, step: int, state: TrainState) -> None: ...

    def evaluate(self, step: int, state: TrainState) -> None: ...

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None: ...

    def settle(self, step: int, due: DueEvents) -> None:
        """Restart the timer, since record and checkpoints are no training; exchanges have been counted."""
        self.timer.restart()

    def finish(self, state: TrainState) -> dict[str, float]:
        """Make the last exchange, evaluation and checkpoint, all workers doing their parts.

        Returns: the last evaluation, on worker 0.

        Raises:
            decisions.Preempted: the run is to be resumed later.
        """
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
            self._obey(state, status)
        return {}


# ---------------------------------------------------------------- worker 0


class AsyncLeader(AsyncCoordinator):
    """Worker 0's coordinator: it leads all, by their examples."""

    def __init__(self, run: Run, start: AsyncStart, worker: AsyncWorker, *more: Any) -> None:
        """Go on from the start of the run."""
        super().__init__(run, start, worker, *more)
        self.logged = AllWorkers({}, start.counters, np.zeros((worker.workers, len(Counters._fields))), [])
        self.workers = self.logged  # as the last answer has them
        self.saved = start.counters  # when the last checkpoint was begun
        self.done = start.step  # the last step for which it is known what is due
        self.evaluated, self.order = -1, Order(0, start.step)  # step of the last evaluation; the last checkpoint
        self.is_writing = False  # a checkpoint, whose parts workers still write
        self.states: list[list[Any]] = []  # states of callbacks, when the last checkpoint was begun
        self.overdue = DueEvents(log=True)  # the run starts with a progress line
        self.behind: frozenset[int] = frozenset()  # workers that were, at the last line
        self.result: dict[str, float] = {}

    def progress(self, step: int, state: TrainState, status: Status) -> RunProgress:
        """Complete what all workers have done parts of; return what is due.

        At the end nothing is due: see `complete_run`.
        """
        assert status.workers is not None
        self.workers, step = status.workers, self.run.plan.step(status.examples)
        if outcome := self.evaluation.conclude_if_complete(self.workers):
            self.result, self.evaluated = outcome.figures, self.evaluation.order.step
        is_saved = all(report.saved >= self.order.number for report in self.workers.reports.values())
        if self.is_writing and is_saved and not self.evaluation.is_open:  # which may be its score
            is_scored = self.evaluated == self.order.step
            self.complete(self.parts, state, score(self.run.experiment, self.result) if is_scored else None)
            self.is_writing = False
            note_whole(self.run, self.order.step)
        if status.stop:
            return RunProgress(step, is_over=True)
        due, self.done = self.run.plan.timetable.between(self.done, step), step
        due = DueEvents(*map(or_, due, self.overdue))
        may = DueEvents(log=self.has_news(), evaluate=not self.evaluation.is_open, save=not self.is_writing)
        now = DueEvents(*map(and_, due, may))
        self.overdue = DueEvents(*map(gt, due, now))._replace(compare=False)
        return RunProgress(step, now)

    def has_news(self) -> bool:
        """Return True if any worker stepped since the last progress line."""
        return self.workers.counters.examples > self.logged.counters.examples

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Have all workers write their parts of a checkpoint.

        Raises:
            TrainingError: it cannot be written; or the run directory is gone, moved or replaced: then the center is
                saved elsewhere.
        """
        self.order, self.saved, home = Order(self.order.number + 1, step), self.workers.counters, self.run.saver.home
        if fate := home.fate():
            self.save_elsewhere(state, fate)
        self.states = callbacks.states(self.run.experiment.callbacks, self.run.workers.processes)
        with written(step, home):
            self.parts.begin(step)
        self.is_writing, self.worker.save_order = True, self.order

    def save_elsewhere(self, state: TrainState, fate: str) -> NoReturn:
        """Save the center elsewhere, to resume from, and end the run."""
        home, step = self.run.saver.home, self.order.step
        place = refuge(home, self.run.recorder.copy_to)
        parts = self.parts._replace(folder=place / "checkpoints")
        with written(step, home):
            parts.begin(step)
        self.complete(parts, state, None)
        raise TrainingError(
            f"run directory {str(home.path)!r} {fate}; the center is saved at step {step} in {str(place)!r}: go on "
            f"with --resume --run-dir {place}"
        )

    def complete(self, parts: UncoordinatedCheckpoint, state: TrainState, score: float | None) -> None:
        """Complete a checkpoint's parts with the shared params and JSON values."""
        run, step = self.run, self.order.step
        extra = run_facts(run)
        extra |= {"tally": [*map(float, self.saved)], "lr": run.plan.lr_of(step + 1), "callbacks": self.states}
        with written(step, run.saver.home):
            parts.end(step, {"center": self.shared(state)}, extra, score)

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate the center; in gossip worker 0's params, until the end."""
        self.evaluation.begin(step, state._replace(params=on_device(self.shared(state))))

    def shared(self, state: TrainState) -> PyTree:
        """The params that stand for all workers'."""
        is_own = self.worker.rule.is_gossip and not self.worker.is_done
        return jax.tree.map(np.asarray, state.params) if is_own else self.worker.center()

    def log(self, step: int, state: TrainState) -> None:
        """Write lines about all workers' steps; the learning rate is worker 0's."""
        recorder, before, self.logged = self.run.recorder, self.logged, self.workers
        now, alive = self.workers.counters, len(self.workers.reports)
        since = Counters(*(a - b for a, b in zip(now, before.counters, strict=True)))
        spent = dict(zip(Counters._fields, (self.workers.by_worker - before.by_worker).T, strict=True))
        worker_steps = self.workers.by_worker[:, Counters._fields.index("steps")].astype(int).tolist()
        done = Done(
            epoch=now.examples / len(self.run.plan.feed.source),
            examples=int(now.examples),
            loss=since.loss / since.examples,
            gradient_norm=(since.square / max(since.steps, 1.0)) ** 0.5,
            wait_s=now.wait_s / max(alive, 1),
            skipped=int(now.skipped),
        )
        anatomy = summary_asynchronous(spent) if spent["steps"].any() else None
        self.run.log.write(step, done, anatomy, rate_factor(self.run, state), worker_steps=worker_steps)
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
        behind = find_stragglers({number: worker_steps[number] for number in self.workers.reports})
        for number in sorted(behind.keys() - self.behind):
            recorder.say(
                f"{recorder.name(number)} has fallen behind: {worker_steps[number]} steps, {behind[number]:g} by the "
                "median"
            )
        self.behind = frozenset(behind)
        if alive < len(before.reports):
            recorder.say(f"{len(before.reports) - alive} of {len(before.reports)} workers gone; the others go on")

    def complete_run(self, state: TrainState) -> dict[str, float]:
        """Wait for all last exchanges; make the last evaluation and checkpoint; let all go."""
        run, workers = self.run, self.worker.workers
        while self.is_writing or self.evaluation.is_open or not all(r.is_done for r in self.workers.reports.values()):
            self.wait(state)
        step = run.plan.step(self.workers.counters.examples)
        if self.has_news():
            self.log(step, state)
        is_due = run.plan.timetable.between(self.done, step).evaluate or self.overdue.evaluate
        if step == run.plan.clock.total_steps or is_due:
            self.evaluate(step, state)
        while self.evaluation.is_open:
            self.wait(state)
        self.save(step, state, is_last=True)
        while self.is_writing:
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
        self.worker.write_if_ordered(self.parts, self.run.saver.home, state, status)
        self.progress(self.order.step, state, status)


def find_stragglers(worker_steps: dict[int, int]) -> dict[int, float]:
    """Return the workers below half the median of steps, and that median.

    If the median is below MANY nobody is behind: all are within the steps of one report.
    """
    median = float(np.median([*worker_steps.values()])) if worker_steps else 0.0
    return {number: median for number, made in worker_steps.items() if median >= MANY and made < median / 2}
