"""Requests between ranks over MPI: to a server of the center, or to another worker.

A rank answers the requests of each other one in their order. All sends and receives are non-blocking and polled, and
every receive names its sender. So any rank that comes is served, a rank that dies is known by its own messages, and no
two ranks can wait for each other. A server may be a thread of a worker's process. It then shares the communicator with
that worker, so requests and answers have tags of their own.

    request   i64[2] (kind, number), then a body of u8[..]
    answer    u8[..], as long as the sender of the request has said or shorter
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmpi.comm.polling import is_loss
from jaxmpi.core import scheduling
from jaxmpi.core.env import seconds_from

TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
MESSAGE_BYTES = 63 << 10  # Open MPI sends up to 64 KiB, header included, without asking the receiver first
HEADER_BYTES = 16
WINDOW = 8  # requests to one rank that may be unanswered
REQUEST, ANSWER = range(2)  # tags
SHORTEST_S, LONGEST_S = 0.0003, 0.005  # between looks
PATIENCE = 0.125  # share of the time in which nothing has come, that the next look may be late
LOOK_S = 0.5  # between two calls of a server's `look`
NOTHING = np.empty(0, np.uint8)


class RankLost(Exception):
    """A message shows that a rank is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Request(NamedTuple):
    """A request, and what becomes of its answer."""

    kind: int
    number: int
    body: np.ndarray = NOTHING  # u8[..]
    answer_bytes: int = 0
    take: Callable[[np.ndarray], None] = lambda answer: None


class Backoff:
    """Sleeps between looks, longer if nothing has come for a while."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()

    def after(self, moved: bool) -> None:
        """Sleep, unless a look has found something."""
        now = time.monotonic()
        if moved:
            self.moved_s = now
        else:
            time.sleep(min(max(PATIENCE * (now - self.moved_s), SHORTEST_S), LONGEST_S))


class Outbox:
    """Messages that are being sent; their memory is kept until they are out."""

    def __init__(self, mpi: Any, tag: int) -> None:
        self.mpi, self.tag = mpi, tag
        self._sending: list[tuple[Any, np.ndarray]] = []

    def send(self, message: np.ndarray, rank: int) -> None:
        """Begin to send u8[..], which must not change any more."""
        self._sending.append((self.mpi.Isend(message, rank, self.tag), message))

    def is_empty(self) -> bool:
        """Return True if all messages have left, or their ranks are gone."""
        self._sending = [entry for entry in self._sending if not self._is_complete(entry[0])]
        return not self._sending

    def _is_complete(self, request: Any) -> bool:
        try:
            return request.Test()
        except Exception as error:
            if not is_loss(error):
                raise
            return True


@contextmanager
def naming_lost_rank(rank: int) -> Iterator[None]:
    """Raise `RankLost` for an error of MPI that shows that the rank is gone."""
    try:
        yield
    except Exception as error:
        if not is_loss(error):
            raise
        raise RankLost(rank) from error


# ---------------------------------------------------------------- who asks


def carry_out(mpi: Any, requests: Mapping[int, Iterable[Request]]) -> Iterator[bool]:
    """Send requests to some ranks, at most WINDOW unanswered at each, until all are answered.

    Yields: whether an answer has come since the look before.

    Raises:
        RankLost: one of the ranks is gone.
    """
    outbox = Outbox(mpi, REQUEST)
    ahead = {rank: iter(each) for rank, each in requests.items()}  # bodies are made when they are sent
    unanswered: dict[int, deque[tuple[Any, np.ndarray, Request]]] = {rank: deque() for rank in ahead}
    while True:
        for rank, requests_ahead in ahead.items():
            for request in itertools.islice(requests_ahead, WINDOW - len(unanswered[rank])):
                with naming_lost_rank(rank):
                    answer = np.empty(request.answer_bytes, np.uint8)
                    unanswered[rank].append((mpi.Irecv(answer, rank, ANSWER), answer, request))
                    head = np.array([request.kind, request.number], np.int64).view(np.uint8)
                    outbox.send(np.concatenate([head, request.body]), rank)
        if outbox.is_empty() and not any(unanswered.values()):
            return
        moved = False
        for rank, waiting in unanswered.items():
            with naming_lost_rank(rank):
                while waiting and waiting[0][0].Test():
                    _, answer, request = waiting.popleft()
                    request.take(answer)
                    moved = True
        yield moved


# ---------------------------------------------------------------- who answers


class Handler(Protocol):
    """What serves requests: `take` one, whose answer goes to `answers` now or later; `drop` a rank that is gone."""

    answers: defaultdict[int, deque[np.ndarray]]  # by rank, in the order of its requests

    def take(self, rank: int, kind: int, number: int, body: np.ndarray, /) -> None: ...  # other bytes may follow

    def drop(self, rank: int, /) -> None: ...


class Responder:
    """Serves the requests of some ranks, in the main thread or in one of its own.

    A round takes one request of each rank that has sent any, and rounds begin with another rank each time. A worker of
    this process could call its server instead, and sends messages over MPI as the others do. So a worker's share of the
    service depends neither on its number nor on its way to the server.
    """

    def __init__(self, mpi: Any, handler: Handler, ranks: Iterable[int], message_bytes: int = MESSAGE_BYTES) -> None:
        self.mpi, self.handler = mpi, handler
        self._outbox, self._message_bytes, self._rounds = Outbox(mpi, ANSWER), message_bytes, itertools.count()
        self._coming = {rank: deque(self._post_receive(rank) for _ in range(WINDOW + 1)) for rank in ranks}
        self.heard_s: dict[int, float] = {}  # by rank: the time of the last message from it or to it

    def run(self, is_over: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
        """Serve until it is over and all answers are out.

        Args:
            look: called about twice a second.
        """
        scheduling.take_short_turns()
        backoff = Backoff()
        with np.errstate(all="ignore"):  # NaN and infinity pass through; workers look for them
            looked_s = polled_s = time.monotonic()
            while not (is_over() and self.is_flushed()):
                backoff.after(self.poll())
                now_s, before_s = time.monotonic(), polled_s
                polled_s = now_s
                if now_s - before_s > LOOK_S:  # this process was stopped itself: nobody is late on that account
                    self.heard_s = {rank: s + now_s - before_s for rank, s in self.heard_s.items()}
                if now_s - looked_s > LOOK_S:
                    looked_s = now_s
                    look()

    def poll(self) -> bool:
        """A round; False if nothing has come or left."""
        ranks = list(self._coming)
        first = next(self._rounds) % max(len(ranks), 1)
        moved = [self._unless_lost(rank, self._take_request) for rank in ranks[first:] + ranks[:first]]
        moved += [self._unless_lost(rank, self._send_answers) for rank in ranks]
        self._outbox.is_empty()
        return any(moved)

    def is_flushed(self) -> bool:
        """Return True if all answers have left."""
        return self._outbox.is_empty() and not any(self.handler.answers[rank] for rank in self._coming)

    def silent_s(self, ranks: Iterable[int]) -> dict[int, float]:
        """Seconds since the last message of those of the ranks that await no answer."""
        now_s = time.monotonic()
        awaited = sorted(rank for rank in ranks if not self.handler.answers[rank])
        return {rank: now_s - self.heard_s.setdefault(rank, now_s) for rank in awaited}

    def _take_request(self, rank: int) -> bool:
        coming = self._coming[rank]
        if not coming[0][0].Test():
            return False
        message = coming.popleft()[1]
        self.heard_s[rank] = time.monotonic()
        kind, number = message[:HEADER_BYTES].view(np.int64).tolist()
        self.handler.take(rank, kind, number, message[HEADER_BYTES:])
        coming.append(self._post_receive(rank))  # last: the message of a rank that has died since counts
        return True

    def _send_answers(self, rank: int) -> bool:
        answers = self.handler.answers[rank]
        if not answers:
            return False
        self.heard_s[rank] = time.monotonic()
        while answers:
            self._outbox.send(answers.popleft(), rank)
        return True

    def _post_receive(self, rank: int) -> tuple[Any, np.ndarray]:
        message = np.empty(self._message_bytes, np.uint8)
        return self.mpi.Irecv(message, rank, REQUEST), message

    def _unless_lost(self, rank: int, serve: Callable[[int], bool]) -> bool:
        if rank not in self._coming:  # lost in this round
            return False
        try:
            with naming_lost_rank(rank):
                return serve(rank)
        except RankLost:
            del self._coming[rank]
            self.handler.drop(rank)
            return False
