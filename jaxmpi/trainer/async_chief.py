"""The record, evaluations and checkpoints of asynchronous workers, made by worker 0.

A checkpoint has two phases, since workers do not meet. Worker 0 announces it through server 0, and each worker writes
its part when it next reports. When all have written, worker 0 adds the center and completes the checkpoint.

Evaluations are shared, because a worker that evaluated alone would fall behind the others, and the further the more of
them there are. Worker 0 posts at server 0 the center as it is now and its own model state; each worker evaluates its
batches at its next report and posts the sums, which worker 0 adds up. The part of a worker that has died is worker 0's.
"""

import itertools
import time
from collections.abc import Sequence
from operator import and_, gt, or_
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi.checkpoint.manager import refuge, written
from jaxmpi.checkpoint.write import UncoordinatedCheckpoint
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import TrainState
from jaxmpi.data.sources.grain_datasets import StreamSource
from jaxmpi.observe.step_timing import summary_asynchronous
from jaxmpi.rules.parameter_server import Counters, ServerAnswer, TimeSpent
from jaxmpi.trainer import callbacks
from jaxmpi.trainer.async_start import AsyncStart, on_device
from jaxmpi.trainer.async_worker import AsyncWorker
from jaxmpi.trainer.evaluate import (
    Evaluation,
    Subject,
    concluded,
    flat,
    judged,
    like,
    means_of,
    rate_factor,
    score,
    subject_of,
    sums_of,
)
from jaxmpi.trainer.loop import RunProgress
from jaxmpi.trainer.progress import Done
from jaxmpi.trainer.run import Run
from jaxmpi.trainer.state import note_whole, run_facts
from jaxmpi.trainer.timetable import DueEvents

MANY = 50  # steps of a worker by the median, before one that has made few is named
LOOK_S = 0.02  # between reports of a worker that has nothing left to do but wait for the others


class SharedEvaluation:
    """One worker's part in evaluations, and worker 0's in all of them.

    Communicates K bytes from worker 0 to server 0 and from there to each worker, and each worker's sums.
    """

    def __init__(self, run: Run, worker: AsyncWorker) -> None:
        """Divide the batches; a stream's, read from its beginning, are worker 0's.

        Args:
            run: whose control plane is this rank's alone.
        """
        feed = run.plan.validation
        self.run, self.worker = run, worker
        batches = feed.samplers[0].steps_per_epoch
        bounds = [-(-batches * number // worker.workers) for number in range(worker.workers + 1)]
        self.parts: list[tuple[int, int | None]] = [*itertools.pairwise(bounds)]
        if isinstance(feed.source, StreamSource):
            self.parts = [(0, None), *[(0, 0)] * (worker.workers - 1)]
        self.step = 0  # that which is evaluated; worker 0 only, as all that follows
        self.is_open = False  # parts are to come
        self._number, self._sums = 0.0, dict[str, np.ndarray]()
        self._subject: Subject | None = None

    def compile(self, state: TrainState) -> None:
        """Judge one batch, so that all is compiled that an evaluation takes."""
        subject = subject_of(self.run, state)
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), subject)
        for metrics in judged(self.run, subject, 0, 0, 1):
            jax.block_until_ready(metrics)

    def requests(self) -> dict[str, float]:
        """The next report's words to all workers: to judge their parts."""
        return {"evaluate": self._number} if self.is_open else {}

    def begin(self, step: int, state: TrainState) -> None:
        """Worker 0: post the subject, request all parts, and judge its own."""
        self.step, self.is_open, self._subject = step, True, subject_of(self.run, state)
        self._number = step + 1 + self.worker.is_done / 2  # that of the end may be of the same step
        self.worker.post(pack_leaves(self._subject))
        self.worker.report(self.requests())
        self._sums = self._evaluate(self._subject, step, self.worker.number)
        self.worker.evaluated = self._number

    def evaluate_shard(self, answer: ServerAnswer) -> None:
        """Judge this worker's part, if asked for, and post its sums."""
        number = answer.status.evaluate
        if number <= self.worker.evaluated:
            return
        if self.parts[self.worker.number] != (0, 0):
            subject = on_device(self._fetch_subject())
            sums = self._evaluate(subject, int(number) - 1, self.worker.number)
            self.worker.post(np.append(number, flat(sums)).view(np.uint8))
        self.worker.evaluated = number

    def conclude_if_complete(self, answer: ServerAnswer) -> Evaluation | None:
        """Worker 0: the outcome, once all workers have posted their parts."""
        if not self.is_open or answer.status.evaluate < self._number or answer.status.evaluated < answer.status.alive:
            return None
        assert self._subject is not None
        subject, totals, self.is_open, self._subject = self._subject, self._sums, False, None
        for number in range(1, self.worker.workers if totals else 1):
            values = self.worker.fetch(number, 8 * (1 + flat(totals).size)).view(np.float64)
            is_there = values[0] == self._number
            part = like(self._sums, values[1:]) if is_there else self._evaluate(subject, self.step, number)
            totals = {name: total + part.get(name, 0) for name, total in totals.items()}
        return concluded(self.run, subject, self.step, means_of(totals))

    def _evaluate(self, subject: Subject, step: int, number: int) -> dict[str, np.ndarray]:
        """Sums over the part of a worker."""
        begin, end = self.parts[number]
        return {} if begin == end else sums_of(judged(self.run, subject, step, begin, end), self.run.workers)

    def _fetch_subject(self) -> Subject:
        """The subject that worker 0 has posted."""
        leaves, structure = jax.tree.flatten(self._like)
        ends = np.cumsum([leaf.size * leaf.dtype.itemsize for leaf in leaves])
        parts = np.split(self.worker.fetch(0, int(ends[-1]) if leaves else 0), ends[:-1])
        return structure.unflatten(
            part.view(leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        )


def pack_leaves(tree: Subject) -> np.ndarray:
    """u8[..]: the bytes of all leaves."""
    leaves = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves or [np.empty(0, np.uint8)])


class AsyncLeader:
    """Duties of worker 0, due by the examples of all workers."""

    def __init__(
        self,
        run: Run,
        worker: AsyncWorker,
        parts: UncoordinatedCheckpoint,
        start: AsyncStart,
        evaluation: SharedEvaluation,
    ) -> None:
        """Go on from the start of the run.

        Args:
            run: whose control plane is this rank's alone.
            parts: of checkpoints.
        """
        self.run, self.worker, self.parts, self.evaluation = run, worker, parts, evaluation
        self.before = self.at = start.counters  # at the last progress line; when the last checkpoint was begun
        self.done = start.step  # the last step for which it is known what is due
        self.evaluated, self.begun = -1, start.step  # steps
        self.number = 0.0  # number of the last checkpoint: its step + 1, 1/2 more at the end, maybe of the same step
        self.is_writing = False  # a checkpoint, whose parts workers still write
        self.states: list[list[Any]] = []  # states of callbacks, when the last checkpoint was begun
        self.overdue = DueEvents(log=True)  # the run starts with a progress line
        self.alive, self.times = 0, np.zeros((worker.workers, len(TimeSpent._fields)))  # as at the last line
        self.behind: frozenset[int] = frozenset()  # workers that were, at the last line
        self.result: dict[str, float] = {}
        self.answer: ServerAnswer | None = None  # the last

    def requests(self) -> dict[str, float]:
        """The next report's requests to all workers: parts of checkpoint and evaluation."""
        return self.evaluation.requests() | ({"save": self.number} if self.is_writing else {})

    def progress(self, state: TrainState, answer: ServerAnswer) -> RunProgress:
        """Complete what all workers have done parts of; return what is due.

        At the end nothing is due: see `finish`.
        """
        self.answer, step = answer, self.run.plan.step(answer.counters.examples)
        if outcome := self.evaluation.conclude_if_complete(answer):
            self.result, self.evaluated = outcome.figures, self.evaluation.step
        is_saved = answer.status.save == self.number and answer.status.saved >= answer.status.alive
        if self.is_writing and is_saved and not self.evaluation.is_open:  # which may be its score
            self.commit(state)
        if answer.status.stop:
            return RunProgress(step, is_over=True)
        due, self.done = self.run.plan.timetable.between(self.done, step), step
        due = DueEvents(*map(or_, due, self.overdue))
        may = DueEvents(log=self.has_news(), evaluate=not self.evaluation.is_open, save=not self.is_writing)
        now = DueEvents(*map(and_, due, may))
        self.overdue = DueEvents(*map(gt, due, now))._replace(compare=False)
        return RunProgress(step, now)

    def has_news(self) -> bool:
        """Return True if any worker stepped since the last progress line."""
        assert self.answer is not None
        return self.answer.counters.examples > self.before.examples

    def save(self, step: int, state: TrainState) -> None:
        """Have all workers write their parts of a checkpoint.

        Raises:
            TrainingError: it cannot be written; or the run directory is gone, moved or replaced: then the center is
                saved elsewhere.
        """
        assert self.answer is not None
        self.begun, self.at, home = step, self.answer.counters, self.run.saver.home
        if fate := home.fate():
            self.save_elsewhere(state, fate)
        self.states = callbacks.states(self.run.experiment.callbacks, self.run.workers.processes)
        with written(step, home):
            self.parts.begin(step)
        self.is_writing = True
        self.number = step + 1 + self.worker.is_done / 2

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate the center; in gossip worker 0's params, until the end."""
        self.evaluation.begin(step, state._replace(params=on_device(self.shared(state))))

    def commit(self, state: TrainState) -> None:
        """Make a checkpoint of the parts."""
        is_of_it = self.evaluated == self.begun
        self.complete(self.parts, state, score(self.run.experiment, self.result) if is_of_it else None)
        self.is_writing = False
        note_whole(self.run, self.begun)

    def complete(self, parts: UncoordinatedCheckpoint, state: TrainState, score: float | None) -> None:
        """Complete a checkpoint's parts with the shared params and JSON values."""
        run = self.run
        extra = run_facts(run)
        extra |= {"tally": [*map(float, self.at)], "lr": run.plan.lr_of(self.begun + 1), "callbacks": self.states}
        with written(self.begun, run.saver.home):
            parts.end(self.begun, {"center": self.shared(state)}, extra, score)

    def save_elsewhere(self, state: TrainState, fate: str) -> NoReturn:
        """Save the center elsewhere, to resume from, and end the run."""
        home = self.run.saver.home
        place = refuge(home, self.run.recorder.copy_to)
        parts = self.parts._replace(folder=place / "checkpoints")
        with written(self.begun, home):
            parts.begin(self.begun)
        self.complete(parts, state, None)
        raise TrainingError(
            f"run directory {str(home.path)!r} {fate}; the center is saved at step {self.begun} in "
            f"{str(place)!r}: go on with --resume --run-dir {place}"
        )

    def shared(self, state: TrainState) -> PyTree:
        """The params that stand for all workers'."""
        is_own = self.worker.rule.is_gossip and not self.worker.is_done
        return jax.tree.map(np.asarray, state.params) if is_own else self.worker.center()

    def log(self, step: int, state: TrainState) -> None:
        """Write lines about all workers' steps; the learning rate is worker 0's."""
        assert self.answer is not None
        answer, recorder, examples = self.answer, self.run.recorder, len(self.run.plan.feed.source)
        now, alive = answer.counters, int(answer.status.alive)
        since = Counters(*(a - b for a, b in zip(now, self.before, strict=True)))
        before, self.times = self.times, answer.times
        spent = dict(zip(TimeSpent._fields, (self.times - before).T, strict=True))
        made = dict(zip(TimeSpent._fields, self.times.T, strict=True))
        worker_steps = made["steps"].astype(int).tolist()
        done = Done(
            epoch=now.examples / examples,
            examples=int(now.examples),
            loss=since.loss / since.examples,
            gradient_norm=(since.square / max(since.steps, 1.0)) ** 0.5,
            wait_s=now.wait_s / max(alive, 1),
            skipped=int(now.skipped),
        )
        seen = summary_asynchronous(spent) if spent["steps"].any() else None
        self.run.log.write(step, done, seen, rate_factor(self.run, state), worker_steps=worker_steps)
        recorder.write(
            "workers",
            step=step,
            alive=alive,
            exchanges=int(now.exchanges),
            exchange_s=now.exchange_s,
            sent_bytes=int(now.sent_bytes),
            distance=since.distance / max(since.exchanges, 1),
            staleness=[int(count) for count in answer.staleness],
            worker_steps=worker_steps,
        )
        behind = find_stragglers(worker_steps, made["gone"] > 0)
        for number in sorted(behind.keys() - self.behind):
            recorder.say(
                f"{recorder.name(number)} has fallen behind: {worker_steps[number]} steps, {behind[number]:g} by the "
                "median"
            )
        self.behind = frozenset(behind)
        if alive < self.alive:
            recorder.say(f"{self.alive - alive} of {self.alive} workers gone; the others go on")
        self.before, self.alive = now, alive

    def finish(self, state: TrainState) -> None:
        """Wait for all last exchanges; then make the last evaluation and checkpoint."""
        assert self.answer is not None
        run, workers = self.run, self.worker.workers
        while self.is_writing or self.evaluation.is_open or self.answer.status.done < self.answer.status.alive:
            self.wait(state)
        step = run.plan.step(self.answer.counters.examples)
        if self.has_news():
            self.log(step, state)
        is_due = run.plan.timetable.between(self.done, step).evaluate or self.overdue.evaluate
        if step == run.plan.clock.total_steps or is_due:
            self.evaluate(step, state)
        while self.evaluation.is_open:
            self.wait(state)
        self.save(step, state)
        while self.is_writing:
            self.wait(state)
        if traced := self.worker.tracer.merge(workers):
            run.recorder.say(traced)
        if self.answer.status.stop == 2:
            run.notice.say_saved(run.recorder.say, step, run.folder)
        if lost := workers - int(self.answer.status.alive):
            run.recorder.say(f"finished with {workers - lost} of {workers} workers")

    def wait(self, state: TrainState) -> None:
        """Report, write the checkpoint part asked for, and complete what is whole."""
        time.sleep(LOOK_S)
        answer = self.worker.report(self.requests())
        self.worker.write_if_asked(self.parts, self.run.saver.home, state, answer)
        self.progress(state, answer)


def find_stragglers(worker_steps: Sequence[int], is_gone: Sequence[bool] | np.ndarray) -> dict[int, float]:
    """Return the workers below half the median of steps, and that median.

    The median counts only workers that are there. If it is below MANY nobody is behind: all are within the steps of one
    report.
    """
    there = {number: made for number, made in enumerate(worker_steps) if not is_gone[number]}
    median = float(np.median([*there.values()])) if there else 0.0
    return {number: median for number, made in there.items() if median >= MANY and made < median / 2}
