"""The center of asynchronous rules: its servers, and how workers exchange with them.

The center is f32[n], cut into shards, one a server, and these into segments, one a message. A worker pushes all
segments one after another. Servers answer segment by segment, and each answer is the segment as it was before the push
was applied. So a link is busy both ways, nobody waits for another worker, and both ends know the same old pair.

Workers meet nowhere else. So each reports to server 0 what it has done, and the answer has what all have done and what
worker 0 orders: a checkpoint, or the end.
"""

import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.allreduce.wires import BLOCK, WIRES, host_wire
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.asynchronous import transport
from jaxmpi.rules.asynchronous.transport import HEADER_BYTES, NOTHING, Backoff, RankLost, Request, carry_out
from jaxmpi.runtime import failures

PUSH, READ, REPORT, END = range(4)  # kinds of requests
LONGEST = 16  # staleness beyond which exchanges are counted together
ENOUGH, LEAVE = 1, 2  # reasons to stop
OVER, ABANDONED = 1, 2  # ways to close; ABANDONED: worker 0 is gone


class CenterLayout(NamedTuple):
    """How f32[n] is cut for servers and messages, equal on all ranks."""

    n: int
    servers: int
    wire: str

    def shard(self, server: int) -> tuple[int, int]:
        """The shard of a server, [begin, end)."""
        block = WIRES[self.wire].block
        blocks = -(-self.n // block)
        begin, end = (min(self.n, block * (blocks * s // self.servers)) for s in (server, server + 1))
        return begin, end

    def segments(self, server: int) -> list[tuple[int, int]]:
        """[begin, end) of each segment in the shard of a server: whole blocks of the wire, one message."""
        begin, end = self.shard(server)
        width = (transport.MESSAGE_BYTES - HEADER_BYTES) // host_wire(self.wire).size_bytes(BLOCK) * BLOCK
        return [(at, min(at + width, end)) for at in range(begin, end, width)]


# ---------------------------------------------------------------- what is reported


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
    closing: int = 0


class AllWorkers(NamedTuple):
    """What worker 0 is told of all."""

    reports: dict[int, Report]  # the last of each worker that is alive
    counters: Counters  # sums over all workers
    by_worker: np.ndarray  # f64[workers, Counters]: since the job's start
    staleness: list[int]  # exchanges by how many others came between, [LONGEST + 1]


class Status(NamedTuple):
    """Server 0's answer to a report."""

    stop: int  # 0, ENOUGH or LEAVE
    closing: int  # 0, OVER or ABANDONED
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
        self.staleness = [0] * (LONGEST + 1)
        self.stop = self.closing = 0
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
            self.staleness[min(self._exchanges - self._last[worker], LONGEST)] += 1
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
            self.closing = ABANDONED

    def answers(self) -> Iterator[tuple[int, Status]]:
        """Answers that are due.

        None is until all workers that are alive have reported once: so they begin together.
        """
        if self.absent and not self.closing:
            return
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
        # The first reason holds, so that all leave with the same exit code.
        self.stop = self.stop or (ENOUGH if counters.examples >= self.target else LEAVE if self.leaving else 0)
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


# ---------------------------------------------------------------- a server


class CenterServer:
    """One shard of the center; server 0 also keeps all workers' progress."""

    def __init__(
        self,
        layout: CenterLayout,
        number: int,
        center: np.ndarray,
        apply: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
        workers: int,
        progress: GlobalProgress | None = None,
    ) -> None:
        """Take the shard.

        Args:
            center: f32[of the shard], changed in place.
            apply: the rule's.
            progress: of all workers, at server 0.
        """
        begin, _ = layout.shard(number)
        self.segments = [(a - begin, b - begin) for a, b in layout.segments(number)]
        self.wire, self.center, self.apply, self.progress = host_wire(layout.wire), center, apply, progress
        self.answers: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)  # by worker, not yet sent
        self.is_left = False  # the run is to be resumed
        self._alive, self._is_closed = set(range(workers)), False

    def take(self, worker: int, kind: int, number: int, body: np.ndarray) -> None:
        """Take a worker's request; put all answers due into `answers`."""
        if kind == REPORT:
            assert self.progress is not None
            self.progress.report(worker, pickle.loads(body.data))
            self._answer_reports()
            return
        answer = NOTHING
        if kind in (PUSH, READ):
            answer = self._serve_segment(worker, kind, number, body)
        else:
            self._is_closed, self.is_left = True, number == LEAVE
        self.answers[worker].append(answer)

    def drop(self, worker: int) -> None:
        """A worker is gone."""
        self.answers.pop(worker, None)
        self._alive.discard(worker)
        # Worker 0 would have ended a server that does not know the progress of all; so would any other, if it is last.
        self._is_closed |= not self._alive or (worker == 0 and self.progress is not None)
        if self.progress:
            self.progress.drop(worker)
            self._answer_reports()

    def begin_without(self, workers: Iterable[int]) -> None:
        """Let the others begin; these may still come."""
        if self.progress:
            self.progress.absent -= set(workers)
            self._answer_reports()

    def is_over(self) -> bool:
        """Return True if no worker will come any more."""
        return self._is_closed and (self.progress is None or self.progress.is_over())

    def _serve_segment(self, worker: int, kind: int, number: int, body: np.ndarray) -> np.ndarray:
        begin, end = self.segments[number]
        segment = self.center[begin:end]
        before = self.wire.encode(segment)
        if self.wire.is_exact:  # a view, which the push changes
            before = before.copy()
        if kind == PUSH:
            if number == 0 and self.progress:
                self.progress.count_exchange(worker)
            n = end - begin
            pushed = self.wire.decode(body[: self.wire.size_bytes(n)], n)
            self.apply(segment, pushed, self.wire.decode(before, n))
        return before

    def _answer_reports(self) -> None:
        assert self.progress is not None
        for worker, status in self.progress.answers():
            self.answers[worker].append(np.frombuffer(pickle.dumps(status), np.uint8))


# ---------------------------------------------------------------- a worker


class Exchange:
    """A worker's exchange with all servers: its requests, and what their answers give."""

    def __init__(
        self, layout: CenterLayout, vector: np.ndarray | None, report: Report | None, kind: int = PUSH, workers: int = 0
    ) -> None:
        """Begin an exchange.

        Args:
            vector: f32[n] to push; its values do not count if `kind` is READ; None: a report only.
            report: for server 0; the last thing sent to it.
            workers: of the job, if worker 0 reports, who is told of all.
        """
        self.layout, self.kind, self.report, self._wire = layout, kind, report, host_wire(layout.wire)
        self._vector = np.empty(0, np.float32) if vector is None else vector
        self._segments = [layout.segments(s) if vector is not None else [] for s in range(layout.servers)]
        # Both ends compute with what the wire has made of the numbers, so sums are conserved to rounding.
        self.pushed = self._vector if self._wire.is_exact else np.empty_like(self._vector)
        self.seen = np.empty_like(self._vector)  # the center before the push
        self.status: Status | None = None
        self.sent_bytes, self.report_wait_s = 0, 0.0  # seconds in which only the answer to the report was missing
        self._missing, self._complete_s = sum(map(len, self._segments)), time.perf_counter()
        self._status_bytes = 2048 + 1024 * workers  # at most

    def requests(self, server: int) -> Iterator[Request]:
        """Requests to a server; segments are encoded when they are sent."""
        for number, (begin, end) in enumerate(self._segments[server]):
            body = NOTHING
            if self.kind == PUSH:
                body = self._wire.encode(self._vector[begin:end])
                if not self._wire.is_exact:
                    self.pushed[begin:end] = self._wire.decode(body, end - begin)
            self.sent_bytes += HEADER_BYTES + body.size
            take = partial(self._take_segment, begin, end)
            yield Request(self.kind, number, body, self._wire.size_bytes(end - begin), take)
        if server == 0 and self.report is not None:
            body = np.frombuffer(pickle.dumps(self.report), np.uint8)
            yield Request(REPORT, 0, body, self._status_bytes, self._take_status)

    def lacks_only_report(self) -> bool:
        """Return True if only the answer to the report is missing."""
        return self.report is not None and self.status is None and not self._missing

    def _take_segment(self, begin: int, end: int, answer: np.ndarray) -> None:
        self.seen[begin:end] = self._wire.decode(answer, end - begin)
        self._missing -= 1
        self._complete_s = time.perf_counter()

    def _take_status(self, answer: np.ndarray) -> None:
        self.status = pickle.loads(answer.data)
        self.report_wait_s = time.perf_counter() - self._complete_s


class CenterClient:
    """A worker's requests to all servers, each to its end."""

    def __init__(self, mpi: Any, layout: CenterLayout, servers: Sequence[int], workers: int = 0) -> None:
        """Use the servers' communicator.

        Args:
            servers: their ranks.
            workers: of the job, at worker 0, who is told of all.
        """
        self.mpi, self.layout, self.servers, self.workers = mpi, layout, servers, workers

    def exchange(self, vector: np.ndarray | None, report: Report | None = None, kind: int = PUSH) -> Exchange:
        """Push f32[n], or read the center, and report.

        Raises:
            TrainingError: a server is gone, or has not answered within JAXMPI_EXCHANGE_TIMEOUT_S. The limit is six
                times that if only the answer to the report is missing.
        """
        exchange = Exchange(self.layout, vector, report, kind, self.workers)
        requests = {rank: exchange.requests(server) for server, rank in enumerate(self.servers)}
        self._wait(requests, exchange.lacks_only_report)
        return exchange

    def read(self) -> np.ndarray:
        """The center, f32[n]."""
        return self.exchange(np.empty(self.layout.n, np.float32), kind=READ).seen

    def end(self, is_left: bool) -> None:
        """Let servers go; with `is_left` the run is to be resumed."""
        self._wait({rank: [Request(END, LEAVE if is_left else OVER)] for rank in self.servers})

    def _wait(
        self, requests: Mapping[int, Iterable[Request]], lacks_only_report: Callable[[], bool] = lambda: False
    ) -> None:
        backoff = Backoff()
        try:
            with np.errstate(all="ignore"):  # NaN and infinity pass through; the loss shows them
                for moved in carry_out(self.mpi, requests):
                    backoff.after(moved)
                    # Where only the report's answer is missing, the slowest worker is waited for.
                    limit_s = transport.TIMEOUT_S * (failures.LONG if lacks_only_report() else 1.0)
                    if time.monotonic() - backoff.moved_s > limit_s:
                        raise TrainingError(
                            f"the center has not answered for {limit_s:g} s; its rank is stuck, or with rule.staleness "
                            "the slowest worker is (JAXMPI_EXCHANGE_TIMEOUT_S sets the time, "
                            f"{transport.TIMEOUT_S:g} s now)"
                        )
        except RankLost as lost:
            raise TrainingError(
                f"rank {lost.rank}, which keeps the center, is gone; go on from the last checkpoint with --resume"
            ) from lost
