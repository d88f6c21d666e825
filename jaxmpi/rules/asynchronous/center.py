"""The center of asynchronous rules: its servers, and how workers exchange with them.

The center is f32[n], cut into shards, one a server, and these into segments, one a message. A worker pushes all
segments one after another. Servers answer segment by segment, and each answer is the segment as it was before the push
was applied. So a link is busy both ways, nobody waits for another worker, and both ends know the same old pair.
"""

import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.allreduce.wires import BLOCK, WIRES, host_wire
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.asynchronous import transport
from jaxmpi.rules.asynchronous.progress import GlobalProgress, Report, Status
from jaxmpi.rules.asynchronous.transport import (
    ANSWER,
    HEADER_BYTES,
    NOTHING,
    REQUEST,
    WINDOW,
    Backoff,
    Outbox,
    RankLost,
    Request,
    carry_out,
    naming_lost_rank,
)
from jaxmpi.runtime import failures

PUSH, READ, REPORT, END = range(4)  # kinds of requests
LOOK_S = 0.5  # between two looks of a server at who is late


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


# ---------------------------------------------------------------- a server


class CenterServer:
    """One shard of the center, in the main thread or in one of its own; server 0 also keeps all workers' progress.

    A round takes one request of each worker that has sent any, and rounds begin with another worker each time. A worker
    of this process could call its server instead, and sends messages over MPI as the others do. So a worker's share of
    the service depends neither on its number nor on its way to the server.
    """

    def __init__(
        self,
        mpi: Any,
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
        self.is_left = False  # the run is to be resumed
        self.mpi, self._outbox, self._rounds = mpi, Outbox(mpi, ANSWER), itertools.count()
        self._answers: dict[int, deque[np.ndarray]] = {worker: deque() for worker in range(workers)}  # not yet sent
        self._coming = {
            worker: deque(self._post_receive(worker) for _ in range(WINDOW + 1)) for worker in range(workers)
        }
        self._heard_s: dict[int, float] = {}  # by worker: the time of the last message from it or to it
        self._is_closed = False

    def run(self, look: Callable[[], None] = lambda: None) -> bool:
        """Serve until no worker will come any more; return True if the run is to be resumed.

        Args:
            look: called about twice a second.
        """
        scheduling.take_short_turns()
        backoff = Backoff()
        with np.errstate(all="ignore"):  # NaN and infinity pass through; workers look for them
            looked_s = polled_s = time.monotonic()
            while not (self.is_over() and self._outbox.is_empty() and not any(self._answers.values())):
                backoff.after(self.poll())
                now_s, before_s = time.monotonic(), polled_s
                polled_s = now_s
                if now_s - before_s > LOOK_S:  # this process was stopped itself: nobody is late on that account
                    self._heard_s = {worker: s + now_s - before_s for worker, s in self._heard_s.items()}
                if now_s - looked_s > LOOK_S:
                    looked_s = now_s
                    look()
        return self.is_left

    def poll(self) -> bool:
        """A round; False if nothing has come or left."""
        workers = list(self._coming)
        first = next(self._rounds) % max(len(workers), 1)
        progressed = False
        for serve, order in ((self._take_request, workers[first:] + workers[:first]), (self._send_answers, workers)):
            for worker in order:
                if worker not in self._coming:  # lost in this round
                    continue
                try:
                    with naming_lost_rank(worker):
                        progressed |= serve(worker)
                except RankLost:
                    self.drop(worker)
        self._outbox.drop_sent()
        return progressed

    def drop(self, worker: int) -> None:
        """A worker is gone."""
        del self._coming[worker], self._answers[worker]
        # Worker 0 would have ended a server that does not know the progress of all; so would any other, if it is last.
        self._is_closed |= not self._coming or (worker == 0 and self.progress is not None)
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

    def silent_s(self, workers: Iterable[int]) -> dict[int, float]:
        """Seconds since the last message of those of the workers that await no answer."""
        now_s = time.monotonic()
        awaited = sorted(worker for worker in workers if not self._answers.get(worker))
        return {worker: now_s - self._heard_s.setdefault(worker, now_s) for worker in awaited}

    def take(self, worker: int, kind: int, number: int, body: np.ndarray) -> None:
        """Take a worker's request; all answers that are due will be sent."""
        if kind == REPORT:
            assert self.progress is not None
            self.progress.report(worker, pickle.loads(body.data))
            self._answer_reports()
        elif kind == END:
            self._is_closed, self.is_left = True, bool(number)
            self._answers[worker].append(NOTHING)
        else:
            self._answers[worker].append(self._serve_segment(worker, kind, number, body))

    def _take_request(self, worker: int) -> bool:
        receives = self._coming[worker]
        if not receives[0][0].Test():
            return False
        message = receives.popleft()[1]
        self._heard_s[worker] = time.monotonic()
        kind, number = message[:HEADER_BYTES].view(np.int64).tolist()
        self.take(worker, kind, number, message[HEADER_BYTES:])  # other bytes may follow the body
        receives.append(self._post_receive(worker))  # last: the message of a worker that has died since counts
        return True

    def _post_receive(self, worker: int) -> tuple[Any, np.ndarray]:
        message = np.empty(transport.MESSAGE_BYTES, np.uint8)
        return self.mpi.Irecv(message, worker, REQUEST), message

    def _send_answers(self, worker: int) -> bool:
        answers = self._answers[worker]
        if not answers:
            return False
        self._heard_s[worker] = time.monotonic()
        while answers:
            self._outbox.send(answers.popleft(), worker)
        return True

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
            self._answers[worker].append(np.frombuffer(pickle.dumps(status), np.uint8))


# ---------------------------------------------------------------- a worker


class CenterExchange:
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

    def __init__(self, mpi: Any, layout: CenterLayout, servers: Mapping[int, str], workers: int = 0) -> None:
        """Use the servers' communicator.

        Args:
            servers: their hosts by rank.
            workers: of the job, at worker 0, who is told of all.
        """
        self.mpi, self.layout, self.servers, self.workers = mpi, layout, servers, workers

    def exchange(self, vector: np.ndarray | None, report: Report | None = None, kind: int = PUSH) -> CenterExchange:
        """Push f32[n], or read the center, and report.

        Raises:
            TrainingError: a server is gone, or has not answered within JAXMPI_EXCHANGE_TIMEOUT_S. The limit is six
                times that if only the answer to the report is missing.
        """
        exchange = CenterExchange(self.layout, vector, report, kind, self.workers)
        requests = {rank: exchange.requests(server) for server, rank in enumerate(self.servers)}
        self._wait(requests, exchange.lacks_only_report)
        return exchange

    def read(self) -> np.ndarray:
        """The center, f32[n]."""
        return self.exchange(np.empty(self.layout.n, np.float32), kind=READ).seen

    def end(self, is_left: bool) -> None:
        """Let servers go; with `is_left` the run is to be resumed."""
        self._wait({rank: [Request(END, int(is_left))] for rank in self.servers})

    def _wait(
        self, requests: Mapping[int, Iterable[Request]], lacks_only_report: Callable[[], bool] = lambda: False
    ) -> None:
        backoff = Backoff()
        try:
            with np.errstate(all="ignore"):  # NaN and infinity pass through; the loss shows them
                for progressed in carry_out(self.mpi, requests):
                    backoff.after(progressed)
                    # Where only the report's answer is missing, the slowest worker is waited for.
                    limit_s = transport.TIMEOUT_S * (failures.LONG_FACTOR if lacks_only_report() else 1.0)
                    if time.monotonic() - backoff.moved_s > limit_s:
                        raise TrainingError(
                            f"the center has not answered for {limit_s:g} s; its rank is stuck, or with rule.staleness "
                            "the slowest worker is (JAXMPI_EXCHANGE_TIMEOUT_S sets the time, "
                            f"{transport.TIMEOUT_S:g} s now)"
                        )
        except RankLost as lost:
            raise TrainingError(
                f"rank {lost.rank} on {self.servers[lost.rank]}, which keeps the center, is gone; go on from the last "
                "checkpoint with --resume"
            ) from lost
