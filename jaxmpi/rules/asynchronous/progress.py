"""Progress of asynchronous workers at server 0: what each has done, and when all stop, wait and save.

Workers meet nowhere. So each reports to server 0 what it has done, and the answer has what all have done and what
worker 0 orders: a checkpoint, or the end.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MOST_STALENESS = 16  # staleness beyond which exchanges are counted together


class Stop(enum.IntEnum):
    """Why workers stop."""

    NO = 0
    ENOUGH = 1  # they have made the run's examples
    LEAVE = 2  # to be resumed later


class Closing(enum.IntEnum):
    """How a run closes."""

    NO = 0
    OVER = 1
    ABANDONED = 2  # worker 0 is gone


class Counters(NamedTuple):
    """Work of workers, in numbers that add up. Checkpoints keep them in this order: new ones go to the end."""

    steps: float = 0.0
    examples: float = 0.0
    loss: float = 0.0  # summed over the examples
    skipped: float = 0.0  # corrupt examples
    wait_s: float = 0.0  # for batches
    exchanges: float = 0.0
    exchange_s: float = 0.0
    sent_bytes: float = 0.0  # by workers, which get as many back
    distance: float = 0.0  # L2, of a worker from what it met, summed over exchanges
    square: float = 0.0  # squared norms of gradients, summed over steps
    # seconds by part, named as in `observe.record_format.PARTS`
    data: float = 0.0
    transfer: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0  # params on their way to others and back, and the arithmetic on them
    sync: float = 0.0  # waits for the answer to a report: long if the worker is too far ahead of the slowest
    other: float = 0.0

    def plus(self, other: Sequence[float]) -> "Counters":
        """The sum, number by number."""
        return Counters(*(a + b for a, b in zip(self, other, strict=True)))


class Order(NamedTuple):
    """A checkpoint in which all workers take part."""

    number: int = 0  # by worker 0's count, from 1 on
    step: int = 0


class Report(NamedTuple):
    """A worker's report to server 0."""

    clock: int = 0  # its steps in this job
    new: Counters = Counters()  # since its last report
    saved: int = 0  # number of the last checkpoint that it has written its part of
    is_done: bool = False  # it has made its last exchange
    leave: bool = False  # the run is to stop before its end
    # from worker 0
    save: Order = Order()
    closing: Closing = Closing.NO


class AllWorkers(NamedTuple):
    """What worker 0 is told of all."""

    reports: dict[int, Report]  # the last of each worker that is alive
    counters: Counters  # sums over all workers
    by_worker: np.ndarray  # f64[workers, Counters]: since the job's start
    staleness: list[int]  # exchanges by how many others came between, [MOST_STALENESS + 1]


class Status(NamedTuple):
    """Server 0's answer to a report."""

    stop: Stop
    closing: Closing
    save: Order
    examples: float  # of all workers
    workers: AllWorkers | None  # to worker 0 alone


class GlobalProgress:
    """Progress of all workers at server 0; when to stop, wait, save."""

    def __init__(self, workers: int, target: float, bound: int, before: Counters | None = None) -> None:
        """Begin with no reports.

        Args:
            target: examples of all workers after which they stop.
            bound: steps that a worker may be ahead of the slowest before its report is not answered; 0: none.
            before: counters of the parts of the run before.
        """
        self.target, self.bound, self.before = target, bound, before or Counters()
        self.reports = {worker: Report() for worker in range(workers)}  # the last of each that is alive
        self.absent = set(range(workers))  # workers that have not reported yet
        self.by_worker = np.zeros((workers, len(Counters._fields)))
        self.staleness = [0] * (MOST_STALENESS + 1)
        self.stop, self.closing = Stop.NO, Closing.NO
        self.leaving = False  # set by reports, and by a signal to this rank
        self._exchanges, self._last = 0, dict[int, int]()
        self._unanswered: set[int] = set()
        self._dismissed: set[int] = set()  # workers that have been sent the end

    @property
    def counters(self) -> Counters:
        """Sums over all workers, those that are gone included."""
        return self.before.plus(self.by_worker.sum(axis=0).tolist())

    def count_exchange(self, worker: int) -> None:
        """Count how many exchanges of others came since this worker's last."""
        if worker in self._last:  # the first is not late for anything
            self.staleness[min(self._exchanges - self._last[worker], MOST_STALENESS)] += 1
        self._exchanges += 1
        self._last[worker] = self._exchanges

    def report(self, worker: int, report: Report) -> None:
        """Note a worker's report; `answers` gives its answer when that is due."""
        self.absent.discard(worker)
        self.by_worker[worker] += report.new
        self.reports[worker] = report._replace(new=Counters())
        self.leaving |= report.leave
        self.closing = max(self.closing, report.closing)
        self._unanswered.add(worker)

    def drop(self, worker: int) -> None:
        """Wait no more for a worker that is gone; its exchanges count."""
        self.reports.pop(worker, None)
        self.absent.discard(worker)
        self._unanswered.discard(worker)
        if worker == 0:
            self.closing = Closing.ABANDONED

    def answers(self) -> Iterator[tuple[int, Status]]:
        """Answers that are due.

        None is until all workers that are alive have reported once: so they begin together.
        """
        if self.absent and not self.closing:
            return
        if not self.stop:  # the first reason holds, so that all leave with the same exit code
            is_enough = self.counters.examples >= self.target
            self.stop = Stop.ENOUGH if is_enough else Stop.LEAVE if self.leaving else Stop.NO
        training = [report.clock for report in self.reports.values() if not report.is_done]
        slowest = min(training, default=float("inf"))
        for worker in sorted(self._unanswered):
            report = self.reports[worker]
            is_ahead = self.bound and not report.is_done and report.clock > slowest + self.bound
            if not is_ahead or self.closing:
                self._unanswered.discard(worker)
                if self.closing:
                    self._dismissed.add(worker)
                yield worker, self.status(worker)

    def status(self, worker: int) -> Status:
        """The answer to a worker's report."""
        counters, first = self.counters, self.reports.get(0, Report())
        workers = None
        if worker == 0:
            workers = AllWorkers(dict(self.reports), counters, self.by_worker.copy(), list(self.staleness))
        return Status(self.stop, self.closing, first.save, counters.examples, workers)

    def expected_workers(self) -> set[int]:
        """Workers expected to send next: none that waits for an answer or is gone."""
        return set(self.reports) - self._unanswered - self._dismissed

    def is_over(self) -> bool:
        """Return True if the end has been sent to all workers."""
        return bool(self.closing) and self._dismissed >= set(self.reports)
