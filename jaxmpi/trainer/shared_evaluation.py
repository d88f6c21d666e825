"""Evaluations that asynchronous workers share.

A worker that evaluated alone would fall behind the others. So worker 0 posts the center and its own model state at
server 0, each worker evaluates its part of the batches at its next report and posts the sums, and worker 0 adds them
up. The part of a worker that has died is worker 0's.
"""

import itertools

import jax
import numpy as np

from jaxmpi.core.train_state import TrainState
from jaxmpi.data.sources.grain_datasets import StreamSource
from jaxmpi.rules.asynchronous.center import AllWorkers, Order
from jaxmpi.rules.asynchronous.start import on_device
from jaxmpi.rules.asynchronous.worker import AsyncWorker
from jaxmpi.trainer.evaluate import (
    EvalState,
    Evaluation,
    batch_metrics,
    conclude,
    eval_state,
    flatten_sums,
    sum_metrics,
    to_means,
    unflatten_sums,
)
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
        # Worker 0's alone:
        self.subject: EvalState | None = None  # that of the evaluation that is open
        self.order = Order()  # the last evaluation
        self._sums = dict[str, np.ndarray]()

    @property
    def is_open(self) -> bool:
        """Return True if parts are to come."""
        return self.subject is not None

    def compile(self, state: TrainState) -> None:
        """Evaluate one batch, so that all is compiled that an evaluation takes."""
        subject = eval_state(self.run, state)
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), subject)
        for metrics in batch_metrics(self.run, subject, 0, 0, 1):
            jax.block_until_ready(metrics)

    def begin(self, step: int, state: TrainState) -> None:
        """Worker 0: post what is evaluated, order all parts, and evaluate its own."""
        worker, self.subject = self.worker, eval_state(self.run, state)
        self.order = worker.evaluate_order = Order(self.order.number + 1, step)
        leaves = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(self.subject)]
        worker.client.post(np.concatenate(leaves or [np.empty(0, np.uint8)]))
        worker.report()
        self._sums = self._evaluate(self.subject, step, worker.number)
        worker.evaluated = self.order.number

    def evaluate_if_ordered(self, order: Order) -> None:
        """Evaluate this worker's part, and post its sums."""
        worker = self.worker
        if order.number <= worker.evaluated:
            return
        if self.parts[worker.number] != (0, 0):
            sums = self._evaluate(on_device(self._fetch_subject()), order.step, worker.number)
            worker.client.post(np.append(float(order.number), flatten_sums(sums)).view(np.uint8))
        worker.evaluated = order.number

    def conclude_if_complete(self, workers: AllWorkers) -> Evaluation | None:
        """Worker 0: the outcome, once all workers have posted their parts; that of a dead one is evaluated here."""
        reports, number = workers.reports.values(), self.order.number
        if self.subject is None or any(report.evaluated < number for report in reports):
            return None
        subject, totals, self.subject = self.subject, self._sums, None
        for other in range(1, self.worker.workers if totals else 1):
            values = self.worker.client.fetch(other, 8 * (1 + flatten_sums(totals).size)).view(np.float64)
            is_posted = values[0] == number
            sums = (
                unflatten_sums(self._sums, values[1:]) if is_posted else self._evaluate(subject, self.order.step, other)
            )
            totals = {name: total + sums.get(name, 0) for name, total in totals.items()}
        return conclude(self.run, subject, self.order.step, to_means(totals))

    def _evaluate(self, subject: EvalState, step: int, number: int) -> dict[str, np.ndarray]:
        """Sums over the part of a worker."""
        begin, end = self.parts[number]
        return {} if begin == end else sum_metrics(batch_metrics(self.run, subject, step, begin, end), self.run.workers)

    def _fetch_subject(self) -> EvalState:
        leaves, structure = jax.tree.flatten(self._like)
        ends = np.cumsum([leaf.size * leaf.dtype.itemsize for leaf in leaves])
        parts = np.split(self.worker.client.fetch(0, int(ends[-1]) if leaves else 0), ends[:-1])
        return structure.unflatten(
            part.view(leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        )
