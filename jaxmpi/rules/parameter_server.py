"""The center of asynchronous rules: a protocol as pure functions of messages.

The center is f32[n], cut into shards, one a server, and these into segments, one a message. A worker sends all segments
one after another. Servers answer segment by segment, and each answer is the segment as it was before the server used
what came. So a link is busy both ways, nobody waits for another worker, and both ends know the same old pair. A
worker's counts go into a report to server 0, which keeps the progress of all workers and answers with it. Server 0 also
keeps what workers post for each other. An example is the params of an evaluation in which all take part.

    worker -> server   i64[2] (kind, number), then the segment as its wire has it, the report, f64, or a piece of a post
    server -> worker   the segment before, the progress of all, f64, or a piece of a post; in the order of its messages
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxmpi.allreduce.schedules import MESSAGE_BYTES
from jaxmpi.allreduce.wires import BLOCK, WIRES, HostWire, host_wire

PUSH, READ, REPORT, POST, FETCH, END, LEAVE = range(7)  # kinds of messages; LEAVE ends a run that is to be resumed
HEADER_BYTES = 16
PIECE_BYTES = 16  # bytes of i64[2] (worker whose post it is, bytes of the piece) before a piece of a post
PIECES = 64  # a shard is cut into so many segments at least, for then the answer trails by little
LEAST = 64 * BLOCK  # floats of a segment: shorter ones cost more in looks for messages than they save
WINDOW = 8  # messages to one server that may be unanswered
LONGEST = 16  # staleness beyond which exchanges are counted together
Serve = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
Numbers = TypeVar("Numbers", "Counters", "TimeSpent")


class ServerLayout(NamedTuple):
    """How f32[n] is cut for servers and messages, equal on all ranks."""

    n: int
    servers: int
    wire: str

    def bounds(self, server: int) -> tuple[int, int]:
        """The shard of a server, [begin, end)."""
        block = WIRES[self.wire].block  # so that no block of the wire lies in two leaves of `Flat`
        blocks = -(-self.n // block)
        begin, end = (min(self.n, block * (blocks * s // self.servers)) for s in (server, server + 1))
        return begin, end

    def width(self) -> int:
        """Floats of a segment: whole wire blocks, at most one message."""
        most = (MESSAGE_BYTES - HEADER_BYTES) // self.host_wire().size_bytes(BLOCK) * BLOCK
        piece = -(-self.n // (self.servers * PIECES * BLOCK)) * BLOCK
        return min(most, max(LEAST, piece))

    def segments(self, server: int) -> list[tuple[int, int]]:
        """[begin, end) of each, in the shard of a server."""
        begin, end = self.bounds(server)
        return [(at, min(at + self.width(), end)) for at in range(begin, end, self.width())]

    def host_wire(self) -> HostWire:
        """Codec from floats to bytes."""
        return host_wire(self.wire)

    def message_bytes(self) -> int:
        """Bytes of the longest message either way."""
        report_bytes = 8 * REPORT_FLOATS
        return HEADER_BYTES + max(self.host_wire().size_bytes(self.width()), report_bytes)

    def pieces(self, size_bytes: int) -> list[tuple[int, int]]:
        """[begin, end) of the pieces in which a post travels."""
        most = self.message_bytes() - HEADER_BYTES - PIECE_BYTES
        return [(at, min(at + most, size_bytes)) for at in range(0, size_bytes, most)]


# ---------------------------------------------------------------- the progress of all


def _plus(own: Numbers, other: Sequence[float]) -> Numbers:
    """The sum, number by number."""
    return type(own)(*(a + b for a, b in zip(own, other, strict=True)))


class Counters(NamedTuple):
    """Work of workers, in numbers that add up."""

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
    plus = _plus


class TimeSpent(NamedTuple):
    """Seconds of a worker by part, named as in `observe.record_format.PARTS`.

    `steps` and `gone` are no seconds.
    """

    steps: float = 0.0
    data: float = 0.0
    transfer: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0  # params on their way to others and back, and what is made of them
    sync: float = 0.0  # waits for the answer to a report: long if the worker is too far ahead of the slowest
    other: float = 0.0
    gone: float = 0.0  # 1: the worker is gone, and made these steps before
    plus = _plus


class WorkerReport(NamedTuple):
    """A worker's report to server 0, beside new `Counters` and its `TimeSpent`."""

    clock: float  # its steps in this job
    saved: float  # the number of the last checkpoint that it has written its part of
    is_done: float = 0.0  # it has made its last exchange
    evaluated: float = 0.0  # the number of the last evaluation of which it has posted its part
    save: float = 0.0  # worker 0 only: the checkpoint that all are to write
    evaluate: float = 0.0  # worker 0 only: the evaluation in which all are to take part
    leave: float = 0.0  # the run is to stop before its end
    closing: float = 0.0  # worker 0 only: all is over


class GlobalStatus(NamedTuple):
    """State of the run in server 0's answer."""

    stop: float  # 1: enough examples have been seen; 2: the run is to be left and resumed later
    save: float  # the checkpoint that all are to write
    closing: float  # 1: all is over; 2: worker 0 is gone, which keeps the record
    saved: float  # workers that have written their part of it
    alive: float
    done: float  # workers that have made their last exchange
    evaluate: float  # the evaluation in which all are to take part
    evaluated: float  # workers that have posted their part of it


class ServerAnswer(NamedTuple):
    """Server 0's answer to a worker's report."""

    status: GlobalStatus
    counters: Counters  # sums over all workers
    staleness: tuple[float, ...]  # exchanges by how many others came between, [LONGEST + 1]
    times: np.ndarray  # f64[workers, TimeSpent]: where the time of all has gone; to worker 0 alone, else empty


ANSWER_FLOATS = len(GlobalStatus._fields) + len(Counters._fields) + LONGEST + 1
REPORT_FLOATS = len(WorkerReport._fields) + len(Counters._fields) + len(TimeSpent._fields)


class GlobalProgress:
    """Progress of all workers at server 0; when to stop, wait, save."""

    def __init__(self, workers: int, target: float, bound: int, counters: Counters | None = None) -> None:
        """Begin with no reports.

        Args:
            target: examples of all workers after which they stop.
            bound: steps that a worker may be ahead of the slowest before its report is not answered; 0: none.
            counters: of the parts of the run before.
        """
        self.workers, self.target, self.bound, self.counters = workers, target, bound, counters or Counters()
        self.reports = {worker: WorkerReport(0.0, 0.0) for worker in range(workers)}  # the last of each that is there
        self.absent = set(range(workers))  # workers that have not reported yet; nobody is answered before all have
        self.told: set[int] = set()  # workers that have been sent the end
        self.staleness = Counter[int]()
        self.spent = np.zeros((workers, len(TimeSpent._fields)))
        self._exchanges, self._last = 0, dict[int, int]()
        self._held: set[int] = set()
        self.save = self.evaluate = self.closing = self.leaving = self.stop = 0.0

    def exchange_begins(self, worker: int) -> None:
        """Count how many exchanges of others came since this worker's last."""
        if worker in self._last:  # the first is not late for anything
            self.staleness[min(self._exchanges - self._last[worker], LONGEST)] += 1
        self._exchanges += 1
        self._last[worker] = self._exchanges

    def report(
        self, worker: int, report: WorkerReport, counters: Sequence[float], spent: Sequence[float] = TimeSpent()
    ) -> None:
        """Note a worker's report; `answers` gives its answer when that is due."""
        self.absent.discard(worker)
        self.counters = self.counters.plus(counters)
        self.spent[worker] += spent
        self.reports[worker] = report
        self.leaving = max(self.leaving, report.leave)
        if worker == 0:
            self.save, self.closing = max(self.save, report.save), max(self.closing, report.closing)
            self.evaluate = max(self.evaluate, report.evaluate)
        self._held.add(worker)

    def drop_worker(self, worker: int) -> None:
        """Wait no more for a worker that is gone; its exchanges count."""
        self.reports.pop(worker, None)
        self.absent.discard(worker)
        self._held.discard(worker)
        self.spent[worker, TimeSpent._fields.index("gone")] = 1.0
        if worker == 0:
            self.closing = 2.0

    def answers(self) -> Iterator[tuple[int, ServerAnswer]]:
        """Answers that are due; none until every live worker has reported once.

        So workers begin together, but for late ones that are excused.
        """
        if self.absent and not self.closing:
            return
        at_work = [report.clock for report in self.reports.values() if not report.is_done]
        slowest = min(at_work, default=float("inf"))
        for worker in sorted(self._held):
            report = self.reports[worker]
            is_ahead = self.bound and not report.is_done and report.clock > slowest + self.bound
            if not is_ahead or self.closing:
                self._held.discard(worker)
                self.told |= {worker} if self.closing else set()
                yield worker, self.answer(worker)

    def answer(self, worker: int) -> ServerAnswer:
        """The answer to a worker's report: status and progress of all."""
        reports = self.reports.values()
        saved = sum(report.saved >= self.save for report in reports)
        done = sum(report.is_done for report in reports)
        # The first reason holds, so that all leave with the same exit code.
        self.stop = self.stop or float(self.counters.examples >= self.target) or 2.0 * self.leaving
        evaluated = sum(report.evaluated >= self.evaluate for report in reports)
        status = GlobalStatus(
            stop=self.stop,
            save=self.save,
            closing=self.closing,
            saved=saved,
            alive=len(reports),
            done=done,
            evaluate=self.evaluate,
            evaluated=evaluated,
        )
        staleness = tuple(float(self.staleness[late]) for late in range(LONGEST + 1))
        return ServerAnswer(status, self.counters, staleness, (self.spent if worker == 0 else self.spent[:0]).copy())

    def unevaluated_workers(self) -> set[int]:
        """Workers that have yet to post their part of an evaluation."""
        return {worker for worker, report in self.reports.items() if report.evaluated < self.evaluate}

    def expected_workers(self) -> set[int]:
        """Workers expected to send next: none that is held back or gone."""
        return set(self.reports) - self._held - self.told

    def is_over(self) -> bool:
        """Return True if the end has been sent to all workers."""
        return bool(self.closing) and self.told >= set(self.reports)


# ---------------------------------------------------------------- a server


class Server:
    """One shard of the center; server 0 also keeps all workers' progress."""

    def __init__(
        self, layout: ServerLayout, number: int, center: np.ndarray, serve: Serve, progress: GlobalProgress | None
    ) -> None:
        """Take the shard.

        Args:
            center: f32[of the shard], changed in place.
            serve: the rule's.
            progress: of all workers, at server 0; None at the others.
        """
        begin, _ = layout.bounds(number)
        self.segments = [(a - begin, b - begin) for a, b in layout.segments(number)]
        self.layout, self.center, self.serve, self.progress = layout, center, serve, progress
        self.out: dict[int, deque[np.ndarray]] = {}  # by worker: answers not yet sent
        self.posts: dict[int, bytearray] = {}  # by worker: the last thing that it has posted
        self.is_closed = self.is_left = False

    def take(self, worker: int, message: np.ndarray) -> None:
        """Take a worker's message, u8[..]; put all answers due into `out`."""
        kind, number = message[:HEADER_BYTES].view(np.int64).tolist()
        body = message[HEADER_BYTES:]
        if kind in (END, LEAVE):
            self.is_closed, self.is_left = True, kind == LEAVE
            self.out.setdefault(worker, deque()).append(np.empty(0, np.uint8))
        elif kind == REPORT:
            self._report(worker, body)
        elif kind in (POST, FETCH):
            self.out.setdefault(worker, deque()).append(self._post(worker, kind, number, body))
        else:
            self._segment(worker, kind, number, body)

    def drop_worker(self, worker: int) -> None:
        """A worker is gone."""
        self.out.pop(worker, None)
        if self.progress:
            self.is_closed |= worker == 0  # nobody else would say so; the others get it from server 0's answers
            self.progress.drop_worker(worker)
            self._answer()

    def drop_stragglers(self, workers: Iterable[int]) -> None:
        """Let others begin without late workers, which may still come."""
        if self.progress:
            self.progress.absent -= set(workers)
            self._answer()

    def is_over(self) -> bool:
        """Return True if no worker will come and all answers are out."""
        has_ended = self.is_closed and (self.progress is None or self.progress.is_over())
        return has_ended and not any(self.out.values())

    def _segment(self, worker: int, kind: int, number: int, body: np.ndarray) -> None:
        begin, end = self.segments[number]
        wire, part = self.layout.host_wire(), self.center[begin:end]
        before = wire.encode(part)
        before = before.copy() if wire.is_exact else before  # a view, else
        if kind == PUSH:
            if number == 0 and self.progress:
                self.progress.exchange_begins(worker)
            self.serve(part, wire.decode(body[: wire.size_bytes(end - begin)]), wire.decode(before))
        self.out.setdefault(worker, deque()).append(before)

    def _post(self, worker: int, kind: int, begin: int, body: np.ndarray) -> np.ndarray:
        """Keep a piece or return one, zeros if it is not posted."""
        whose, size = body[:PIECE_BYTES].view(np.int64).tolist()
        if kind == FETCH:
            piece = bytes(self.posts.get(whose, b"")[begin : begin + size])
            return np.frombuffer(piece.ljust(size, b"\0"), np.uint8)
        kept = self.posts.setdefault(worker, bytearray())
        kept[begin : begin + size] = body[PIECE_BYTES : PIECE_BYTES + size].tobytes()
        return np.empty(0, np.uint8)

    def _report(self, worker: int, body: np.ndarray) -> None:
        assert self.progress is not None
        values = body[: 8 * REPORT_FLOATS].view(np.float64).tolist()
        cut, end = len(WorkerReport._fields), len(WorkerReport._fields) + len(Counters._fields)
        self.progress.report(worker, WorkerReport(*values[:cut]), values[cut:end], values[end:])
        self._answer()

    def _answer(self) -> None:
        assert self.progress is not None
        for worker, answer in self.progress.answers():
            numbers = np.array([*answer.status, *answer.counters, *answer.staleness, *answer.times.ravel()], np.float64)
            self.out.setdefault(worker, deque()).append(numbers.view(np.uint8))


# ---------------------------------------------------------------- a worker


class OutgoingMessage(NamedTuple):
    """A message, and how long its answer will be."""

    server: int
    message: np.ndarray  # u8[..]
    answer_bytes: int


class ServerExchange:
    """A worker's exchange with all servers: messages to send, given the answers."""

    def __init__(
        self,
        layout: ServerLayout,
        kind: int,
        vector: np.ndarray | None,
        report: Sequence[float] | None,
        workers: int = 0,
        post: np.ndarray | None = None,
        whose: int = 0,
    ) -> None:
        """Begin an exchange.

        Args:
            kind: PUSH or READ; with neither vector nor report: POST, FETCH, or END or LEAVE, which let servers go.
            vector: f32[n] to push; only its shape counts if the center is read; None: a report only.
            report: the numbers of a WorkerReport, Counters and TimeSpent, for server 0; the last thing sent to it.
            workers: of the job, if worker 0 reports, who gets their times.
            post: u8[..] to POST, or that what is fetched is written to.
            whose: the worker whose post to FETCH.
        """
        self.layout, self._wire = layout, layout.host_wire()
        nothing = np.empty(0, np.float32)
        self.seen = nothing if vector is None else np.empty(layout.n, np.float32)
        self.sent = nothing if vector is None else vector if self._wire.is_exact else np.empty_like(vector)
        self.answer: ServerAnswer | None = None
        self.sent_bytes = 0
        self._answer_bytes = 8 * (ANSWER_FLOATS + workers * len(TimeSpent._fields))
        self._post, self._whose = np.empty(0, np.uint8) if post is None else post, whose
        self._todo = [deque(self._messages(server, kind, vector, report)) for server in range(layout.servers)]
        self._open: list[deque[Any]] = [deque() for _ in range(layout.servers)]

    def ready(self) -> Iterator[OutgoingMessage]:
        """Messages that may be sent now; the caller sends all in order."""
        for server, (todo, open_) in enumerate(zip(self._todo, self._open, strict=True)):
            while todo and len(open_) < WINDOW:
                make, where, answer_bytes = todo.popleft()
                message = make()
                self.sent_bytes += message.size
                open_.append(where)
                yield OutgoingMessage(server, message, answer_bytes)

    def take(self, server: int, answer: np.ndarray) -> None:
        """Take the answer, u8[..], to the oldest open message to a server."""
        where = self._open[server].popleft()
        if where == REPORT:
            self.answer = unpack_answer(answer)
        elif isinstance(where, slice):
            self._post[where] = answer
        elif where not in (POST, END):
            self.seen[slice(*where)] = self._wire.decode(answer)

    def pending_servers(self) -> list[int]:
        """Servers whose answers are still to come."""
        return [server for server, open_ in enumerate(self._open) if open_]

    def lacks_only_report(self) -> bool:
        """Return True if only the answer to the report is missing."""
        return not any(self._todo) and [where for open_ in self._open for where in open_] == [REPORT]

    def is_over(self) -> bool:
        """Return True if everything is said and answered."""
        return not any(self._todo) and not any(self._open)

    def _messages(self, server: int, kind: int, vector: np.ndarray | None, report: Any) -> Iterator[tuple]:
        if vector is not None:
            for number, (begin, end) in enumerate(self.layout.segments(server)):
                make = lambda number=number, begin=begin, end=end: self._segment(kind, number, vector, begin, end)  # noqa: E731
                yield make, (begin, end), self._wire.size_bytes(end - begin)
        if server == 0 and report is not None:
            numbers = np.array(report, np.float64).view(np.uint8)
            yield lambda: pack_message(REPORT, 0, numbers), REPORT, self._answer_bytes
        for begin, end in self.layout.pieces(self._post.size) if server == 0 else []:
            make = lambda begin=begin, end=end: self._piece(kind, begin, end)  # noqa: E731
            yield make, slice(begin, end) if kind == FETCH else POST, (end - begin) * (kind == FETCH)
        if kind in (END, LEAVE):
            yield lambda: pack_message(kind, 0, np.empty(0, np.uint8)), END, 0

    def _piece(self, kind: int, begin: int, end: int) -> np.ndarray:
        head = np.array([self._whose, end - begin], np.int64).view(np.uint8)
        return pack_message(kind, begin, np.concatenate([head, self._post[begin:end]]) if kind == POST else head)

    def _segment(self, kind: int, number: int, vector: np.ndarray, begin: int, end: int) -> np.ndarray:
        if kind == READ:
            return pack_message(READ, number, np.empty(0, np.uint8))
        body = self._wire.encode(vector[begin:end])
        if self.sent is not vector:
            self.sent[begin:end] = self._wire.decode(body)  # values as the server will decode them
        return pack_message(kind, number, body)


def pack_message(kind: int, number: int, body: np.ndarray) -> np.ndarray:
    """A message, u8[..]."""
    return np.concatenate([np.array([kind, number], np.int64).view(np.uint8), body])


def unpack_answer(answer: np.ndarray) -> ServerAnswer:
    """An answer to a report out of u8[..]."""
    numbers = answer.view(np.float64).tolist()
    status, rest = numbers[: len(GlobalStatus._fields)], numbers[len(GlobalStatus._fields) :]
    counters, rest = rest[: len(Counters._fields)], rest[len(Counters._fields) :]
    times = np.reshape(rest[LONGEST + 1 :], (-1, len(TimeSpent._fields)))
    return ServerAnswer(GlobalStatus(*status), Counters(*counters), tuple(rest[: LONGEST + 1]), times)
