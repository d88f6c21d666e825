"""Evaluation by asynchronous workers: each judges its batches at its next report.

A worker that evaluated alone would fall behind the others, and the further the more of them there are. So worker 0
posts at server 0 what is to be judged: the center as it is now, and its own model state. Each worker posts the sums
over its part. When all have, worker 0 adds them up. The part of a worker that has died is worker 0's.
"""

import itertools

import jax
import numpy as np

from jaxmpi.core.train_state import TrainState
from jaxmpi.data.sources.grain_datasets import StreamSource
from jaxmpi.rules.parameter_server import ServerAnswer
from jaxmpi.trainer.async_start import on_device
from jaxmpi.trainer.async_worker import AsyncWorker
from jaxmpi.trainer.evaluate import Evaluation, Subject, concluded, flat, judged, like, means_of, subject_of, sums_of
from jaxmpi.trainer.run import Run


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
