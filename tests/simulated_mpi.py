"""MPI's messages without MPI: between ranks in any order, or straight to a server of the center."""

import random
import time
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.rules.asynchronous.center import CenterServer
from jaxmpi.rules.asynchronous.transport import HEADER_BYTES


class Network:
    """MPI's messages between ranks, delivered in order by pair and tag, each when chance has it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sent: defaultdict[Any, deque[np.ndarray]] = defaultdict(deque)
        self.receives: defaultdict[Any, deque[Receive]] = defaultdict(deque)

    def at(self, rank: int) -> "Endpoint":
        return Endpoint(self, rank)


class Receive(NamedTuple):
    """A posted receive."""

    network: Network
    key: tuple
    buffer: np.ndarray

    def Test(self) -> bool:
        sent, posted = self.network.sent[self.key], self.network.receives[self.key]
        if posted[0] is not self or not sent or self.network.rng.random() < 0.5:
            return False
        message = sent.popleft()
        posted.popleft()
        self.buffer[: message.size] = message
        return True


class Endpoint(NamedTuple):
    """A rank's communicator."""

    network: Network
    rank: int

    def Isend(self, message: np.ndarray, to: int, tag: int) -> "Endpoint":
        self.network.sent[self.rank, to, tag].append(message.copy())
        return self

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Receive:
        key = source, self.rank, tag
        receive = Receive(self.network, key, buffer)
        self.network.receives[key].append(receive)
        return receive

    def Test(self) -> bool:
        return True


class Line:
    """A worker's communicator to a server in this process, which after so many answers gives none for some time."""

    def __init__(self, server: CenterServer, rank: int = 0, answers: int = -1, silent_s: float = 0.0) -> None:
        self.server, self.rank, self.left, self.silent_s, self.until_s = server, rank, answers, silent_s, np.inf

    def Isend(self, message: np.ndarray, to: int, tag: int) -> Any:
        kind, number = message[:HEADER_BYTES].view(np.int64).tolist()
        self.server.take(self.rank, kind, number, message[HEADER_BYTES:])
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Any:
        return SimpleNamespace(Test=lambda: self.receive(buffer))

    def receive(self, buffer: np.ndarray) -> bool:
        if self.left == 0 and self.until_s == np.inf:
            self.until_s = time.monotonic() + self.silent_s
        answers = self.server._answers[self.rank]
        if not answers or (self.left == 0 and time.monotonic() < self.until_s):
            return False
        self.left -= self.left > 0
        answer = answers.popleft()
        buffer[: answer.size] = answer
        return True
