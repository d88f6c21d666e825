"""Transport of gossip: pushes that nobody waits for. Blot et al. 2016."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.allreduce.comm_thread import TIMEOUT_S, some_are_complete
from jaxmpi.allreduce.schedules import MESSAGE_BYTES
from jaxmpi.comm.polling import is_loss
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.parameter_server_transport import Backoff, Outbox
from jaxmpi.runtime import failures

PUSHED, ENDED = range(2)
MOST = 2  # pushes of one worker that another may have yet to take: more would fill the memory of either


class PushMessage(NamedTuple):
    """Params on their way from one worker to another."""

    share: float
    body: np.ndarray  # u8[..], as the wire has it

    def pieces(self) -> list[np.ndarray]:
        """The body in messages."""
        return [self.body[start : start + MESSAGE_BYTES] for start in range(0, max(self.body.size, 1), MESSAGE_BYTES)]


class IncomingPush(NamedTuple):
    """A `PushMessage` that is being received."""

    push: PushMessage
    requests: list[Any]


class GossipThread:
    """A thread that sends and receives params while this rank computes."""

    def __init__(self, mpi: Any, worker: int, workers: int, body_bytes: int) -> None:
        """Start the thread on its own communicator; all workers call it together."""
        self.mpi, self.body_bytes = mpi, body_bytes
        self.arrived: deque[PushMessage] = deque()  # for the main thread to take
        self.ended: set[int] = set()  # workers that will send no more
        self.gone: set[int] = set()
        self._peers = [peer for peer in range(workers) if peer != worker]
        self._to_send: deque[tuple[int, PushMessage | None]] = deque()
        self._outboxes = {peer: Outbox(mpi) for peer in self._peers}
        self._pushed, self._begun, self._out = (dict.fromkeys(self._peers, 0) for _ in range(3))  # pushes so far
        self._is_ending = False
        self._heads = {peer: self._post_header(peer) for peer in self._peers}
        self._coming: dict[int, IncomingPush] = {}
        self._thread = threading.Thread(target=self._run, name="jaxmpi gossip", daemon=True)
        self._thread.start()

    def push(self, to: int, share: float, body: np.ndarray) -> None:
        """Have params carried to another worker; u8[body_bytes] must not change any more."""
        self._pushed[to] += 1
        self._to_send.append((to, PushMessage(share, body)))

    def closed_peers(self) -> frozenset[int]:
        """Workers to push nothing to: gone, or behind with earlier pushes."""
        return frozenset(peer for peer in self._peers if self._pushed[peer] - self._out[peer] >= MOST) | self.gone

    def end(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Push no more, and wait for all others' pushes in `arrived`.

        Args:
            meanwhile: called ten times a second or so: another may be evaluating, or slow.
        """
        self._to_send.extend((peer, None) for peer in self._peers)
        limit_s = TIMEOUT_S * failures.LONG
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive():
            self._thread.join(0.1)
            meanwhile()
            if time.monotonic() > deadline:
                late = sorted(set(self._peers) - self.ended - self.gone)
                raise TrainingError(f"ranks {late} have not ended their gossip for {limit_s:.0f} s")

    def _run(self) -> None:
        scheduling.take_short_turns()
        pauses = Backoff()
        while not (self._is_ending and self.ended | self.gone >= set(self._peers) and self._flush()):
            moved = bool(self._to_send)
            while self._to_send:
                self._is_ending |= self._send(*self._to_send.popleft())
            moved |= any([self._poll(peer) for peer in self._peers if peer not in self.gone | self.ended])
            self._flush()
            pauses.after(moved)

    def _flush(self) -> bool:
        """Return True if all messages to all peers have left."""
        out = [peer for peer, outbox in self._outboxes.items() if outbox.is_empty()]
        self._out |= {peer: self._begun[peer] for peer in out}
        return len(out) == len(self._peers)

    def _send(self, to: int, push: PushMessage | None) -> bool:
        """Begin to send; return True if it is the end."""
        share = push.share if push else 0.0
        messages = [np.array([PUSHED if push else ENDED, share], np.float64).view(np.uint8)]
        messages += push.pieces() if push else []
        for message in messages if to not in self.gone else []:
            self._unless_lost(to, lambda message=message: self._outboxes[to].send(message, to))
        self._begun[to] += push is not None
        return push is None

    def _post_header(self, peer: int) -> tuple[Any, np.ndarray]:
        head = np.empty(2)
        return self.mpi.Irecv(head, peer), head

    def _poll(self, peer: int) -> bool:
        """Poll a peer for the header of a `PushMessage`, then its parts."""
        coming = self._coming.get(peer)
        if coming is None and len(self.arrived) >= MOST * len(self._peers) and not self._is_ending:
            return False  # until the main thread has taken some; at the end it waits for all
        if coming is None:
            return bool(self._unless_lost(peer, lambda: self._take_header(peer)))
        self._unless_lost(peer, lambda: some_are_complete(coming.requests))
        if any(coming.requests) or peer in self.gone:
            return False
        self.arrived.append(coming.push)
        del self._coming[peer]
        self._unless_lost(peer, lambda: self._heads.update({peer: self._post_header(peer)}))
        return True

    def _take_header(self, peer: int) -> bool:
        request, head = self._heads[peer]
        if not request.Test():
            return False
        if head[0] == ENDED:
            self.ended.add(peer)
            return True
        push = PushMessage(float(head[1]), np.empty(self.body_bytes, np.uint8))
        parts = [self.mpi.Irecv(part, peer) for part in push.pieces()]
        self._coming[peer] = IncomingPush(push, parts)
        return True

    def _unless_lost(self, peer: int, act: Callable[[], Any]) -> Any:
        """Result of an act, or None if the peer is gone."""
        try:
            return act()
        except Exception as error:
            if not is_loss(error):
                raise
            self.gone.add(peer)
            self._coming.pop(peer, None)
            return None
