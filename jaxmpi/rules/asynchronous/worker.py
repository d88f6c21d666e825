"""An asynchronous worker between its steps: exchanges, and reports to server 0.

Workers make different numbers of steps, so no collective can count or stop them. Each worker adds up what it has done
since its last report and sends the sums. Server 0 adds them for all, which gives steps, epochs and the end of the run.
Its answer has this progress, and what the worker has to write. An exchange pushes the rule's vector, keeps
the center as it was before, and merges both. A gossip step merges the pushes that have arrived and may push. `end`
gives the center the last steps, so none is lost.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.wires import host_wire
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import UncoordinatedCheckpoint, written
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.rules.asynchronous.center import ABANDONED, OVER, CenterClient, Counters, Order, Report, Status
from jaxmpi.rules.asynchronous.gossip import GossipThread
from jaxmpi.rules.asynchronous.start import AsyncStart, ParamsVector, on_device
from jaxmpi.rules.base import Asynchronous
from jaxmpi.runtime import failures, progress


class AsyncWorker:
    """One worker between its steps."""

    def __init__(
        self,
        number: int,
        workers: int,
        rule: Asynchronous,
        start: AsyncStart,
        client: CenterClient,
        *,
        tau: int = 1,
        wire: str = "32",
        gossip_thread: GossipThread | None = None,
    ) -> None:
        """Take up what the run starts with.

        Args:
            tau: steps between exchanges with the center.
            wire: of pushes to other workers.
            gossip_thread: if workers meet each other.
        """
        self.number, self.workers, self.rule, self.tau, self.client = number, workers, rule, tau, client
        self.flat, self.wire = ParamsVector.from_params(start.state.params), host_wire(wire)
        self.base = start.center  # f32[n]: the center as this worker last knew it
        self.new = Counters()  # since the last report
        self.clock, self.saved, self.is_done = 0, 0, False
        self.save_order = Order()  # of worker 0, for its next report
        self.gossip_thread, seed = gossip_thread, int(np.asarray(start.state.key)[0]) + start.step
        self.gossip = rule.gossip(number, workers, seed, start.weight) if rule.gossip else None

    @property
    def weight(self) -> float:
        """Alpha of gossip; all workers weigh alike without."""
        return self.gossip.weight if self.gossip else 1 / self.workers

    def count(self, **new: float) -> None:
        """Add to the counters of the next report."""
        self.new = self.new.plus(Counters(**new))

    def wait_for_start(self) -> None:
        """Report ready before the first step, and wait for all workers that are alive."""
        failures.set_phase("start", failures.LONG)
        self.report()
        self.new = Counters()  # the wait is no part of a step
        progress.drain()

    def report(self, *, leave: bool = False, closing: int = 0) -> Status:
        """A report without an exchange."""
        begin = time.perf_counter()
        with progress.span("wait", "the center"):
            exchange = self.client.exchange(None, self._next_report(leave, closing))
        self.count(sync=time.perf_counter() - begin)
        return check_alive(exchange.status)

    def exchange(self, state: TrainState, *, leave: bool = False) -> tuple[TrainState, Status]:
        """Exchange with the center and report; return the state and the answer."""
        begin = time.perf_counter()
        w = self.flat.vector(self.rule.to_center(state.params, state.rule_state))
        with progress.span("wait", "the center"):
            exchange = self.client.exchange(self.rule.push(w, self.base), self._next_report(leave))
        # From the center as it was: afterwards both have moved towards each other.
        distance = float(np.linalg.norm(w - exchange.seen))
        w, self.base = self.rule.pull(w, self.base, exchange.pushed, exchange.seen)
        state = state._replace(params=self._to_params(w, state))
        took_s, wait_s = time.perf_counter() - begin, exchange.report_wait_s
        self.count(exchanges=1, exchange_s=took_s, sent_bytes=exchange.sent_bytes, distance=distance)
        self.count(exchange=took_s - wait_s, sync=wait_s)
        return state, check_alive(exchange.status)

    def gossip_step(self, state: TrainState) -> TrainState:
        """Merge what has arrived, then perhaps push."""
        thread, gossip = self.gossip_thread, self.gossip
        assert thread is not None
        assert gossip is not None
        begin, w = 0.0, None
        while thread.arrived:
            push = thread.arrived.popleft()
            if w is None:
                begin, w = wait_for_step(state), self.flat.vector(state.params)
            pushed = self.wire.decode(push.body, w.size)
            self.count(exchanges=1, distance=float(np.linalg.norm(w - pushed)))
            w = gossip.merge(w, pushed, push.share)
        if w is not None:
            state = state._replace(params=self._to_params(w, state))
        push = None if self.is_done else gossip.draw(thread.closed_peers())
        if push:
            begin = begin or wait_for_step(state)
            body = self.wire.encode(self.flat.vector(state.params) if w is None else w)
            thread.push(*push, body)
            self.count(sent_bytes=body.size)
        if push or w is not None:
            end = time.perf_counter()
            progress.record_span("wait", "gossip", begin, end)
            self.count(exchange_s=end - begin)
        return state

    def end(self, state: TrainState) -> TrainState:
        """Exchange once more if steps came after the last exchange.

        In gossip: merge what is on its way, then lay alpha w and alpha down at the center.
        """
        if self.gossip_thread is None:
            self.is_done = True
            return self.exchange(state)[0] if self.clock % self.tau else state
        # It reports meanwhile, or server 0 would take it for late: another may be evaluating before its own end.
        self.gossip_thread.end(self.report)
        self.is_done = True
        state = self.gossip_step(state)
        weight = np.float32(self.weight)
        with progress.span("wait", "the center"):
            self.client.exchange(np.append(weight * self.flat.vector(state.params), weight))
        return state

    def center(self) -> PyTree:
        """The center's params; in gossip the weighted mean of workers' final params."""
        seen = self.client.read()
        return self.flat.tree(seen[:-1] / seen[-1] if self.rule.is_gossip else seen)

    def write_if_ordered(
        self, parts: UncoordinatedCheckpoint, home: HeldFolder, state: TrainState, status: Status
    ) -> None:
        """This worker's part of a checkpoint that has been begun."""
        number, step = status.save
        if number <= self.saved:
            return
        host = jax.tree.map(np.asarray, state)
        for path, leaf in named_leaves(host):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
                raise TrainingError(f"{path} of worker {self.number} is not finite: not saved, earlier ones stay")
        with written(step, home):
            parts.write_own(step, self.number, {**host._asdict(), "weight": np.array(self.weight)})
        self.saved = number

    def close(self, is_left: bool) -> None:
        """Worker 0: end the run, or leave it to be resumed."""
        self.report(closing=OVER)
        self.client.end(is_left)

    def _next_report(self, leave: bool = False, closing: int = 0) -> Report:
        new, self.new = self.new, Counters()
        return Report(self.clock, new, self.saved, self.is_done, leave, self.save_order, closing)

    def _to_params(self, w: np.ndarray, state: TrainState) -> PyTree:
        return self.rule.from_center(on_device(self.flat.tree(w)), state.rule_state)


def wait_for_step(state: Any) -> float:
    """When the step behind a state is through; waits for it."""
    jax.block_until_ready(state.params)
    return time.perf_counter()


def check_alive(status: Status | None) -> Status:
    """The status, or `TrainingError` if worker 0 is gone."""
    assert status is not None
    if status.closing == ABANDONED:
        raise TrainingError("rank 0, which keeps the record, is gone; go on from the last checkpoint with --resume")
    return status
