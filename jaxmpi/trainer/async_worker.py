"""An asynchronous worker between its steps: exchanges, and reports to server 0.

Workers make different numbers of steps, so no collective can count or stop them. Each worker adds up what it has done
since its last report and sends the sums. Server 0 adds them for all, which gives steps, epochs and the end of the run.
Its answer has this progress, and what the worker has to write or evaluate. An exchange sends the rule's vector, keeps
the center as it was before, and merges both. A gossip step merges the pushes that have arrived and may send one. `end`
gives the center the last steps, so none is lost.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint.manager import written
from jaxmpi.checkpoint.write import UncoordinatedCheckpoint
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.files import HeldFolder
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe import trace
from jaxmpi.observe.step_timing import Window
from jaxmpi.rules.parameter_server import (
    END,
    FETCH,
    LEAVE,
    POST,
    PUSH,
    READ,
    Counters,
    ServerAnswer,
    ServerExchange,
    ServerLayout,
    TimeSpent,
    WorkerReport,
)
from jaxmpi.rules.parameter_server_transport import run_exchange
from jaxmpi.runtime import failures, progress
from jaxmpi.trainer.async_servers import Connections, requested_wire
from jaxmpi.trainer.async_start import AsyncStart, ParamsVector, on_device
from jaxmpi.trainer.run import Run


class AsyncWorker:
    """One worker's part in a run, between its steps."""

    def __init__(self, run: Run, start: AsyncStart, connections: Connections, tracer: trace.UncoordinatedTrace) -> None:
        """Take up what the run starts with."""
        rule, config = run.functions.rule.asynchronous, run.experiment.rule
        assert rule is not None
        self.rule, self.connections, self.tracer = rule, connections, tracer
        self.number, self.workers = run.workers.mine[0], run.workers.size
        self.flat = ParamsVector.of(start.state.params)
        self.wire = ServerLayout(self.flat.n, 1, requested_wire(run)).host_wire()
        self.base = start.center  # f32[n]: the center as this worker last knew it
        self.new, self.spent = Counters(), TimeSpent()  # since the last report
        self.clock, self.saved, self.evaluated = 0, 0.0, 0.0
        self._held_s = 0.0  # seconds of the last exchange in which only the answer to its report was missing
        self.is_done = False
        self.tau = config.tau
        self._waited = 0, 0.0
        seed = int(np.asarray(start.state.key)[0]) + start.step
        self.gossip = rule.gossip(self.number, self.workers, seed, start.weight) if rule.gossip else None

    @property
    def weight(self) -> float:
        """Alpha of gossip; all workers weigh alike without."""
        return self.gossip.weight if self.gossip else 1 / self.workers

    def count(self, sums: np.ndarray, steps: int, skipped: int, wait_s: float) -> None:
        """Count steps, with sums [loss, examples, |g|^2] and the feed's running totals."""
        loss, examples, square = map(float, sums[:3])
        before, self._waited = self._waited, (skipped, wait_s)
        new = Counters(
            steps=steps,
            examples=examples,
            loss=loss,
            skipped=skipped - before[0],
            wait_s=wait_s - before[1],
            square=square,
        )
        self.new = self.new.plus(new)

    def count_time(self, window: Window) -> None:
        """Count where the time of steps went."""
        alike = {name: window.parts[name] for name in ("data", "transfer", "compute", "other")}
        self.spent = self.spent.plus(TimeSpent(window.steps, exchange=window.parts["exposed"], **alike))

    def wait_for_start(self) -> None:
        """Report ready before the first step, and wait for all live workers."""
        failures.set_phase("start", failures.LONG)
        self._answer(self._server_exchange(PUSH, None, self._report({})))
        progress.drain()  # it is no part of a step

    def report(self, asks: Mapping[str, float]) -> ServerAnswer:
        """A report without an exchange."""
        begin = time.perf_counter()
        exchange = self._server_exchange(PUSH, None, self._report(asks))
        self.spent = self.spent.plus(TimeSpent(sync=time.perf_counter() - begin))
        return self._answer(exchange)

    def exchange(self, state: TrainState, asks: Mapping[str, float]) -> tuple[TrainState, ServerAnswer]:
        """Exchange with the center and report; return the state and the answer."""
        begin = time.perf_counter()
        w = self.flat.vector(self.rule.to_center(state.params, state.rule_state))
        exchange = self._server_exchange(PUSH, self.rule.send(w, self.base), self._report(asks))
        distance = float(np.linalg.norm(w - exchange.seen))
        w, self.base = self.rule.meet(w, self.base, exchange.sent, exchange.seen)
        state = state._replace(params=self._to_params(w, state))
        took_s = time.perf_counter() - begin
        self._count_exchange(distance, exchange.sent_bytes, took_s)
        self.spent = self.spent.plus(TimeSpent(exchange=took_s - self._held_s, sync=self._held_s))
        return state, self._answer(exchange)

    def gossip_step(self, state: TrainState) -> TrainState:
        """Merge what has arrived, then perhaps push."""
        gossiper, gossip = self.connections.gossiper, self.gossip
        assert gossiper is not None
        assert gossip is not None
        begin, w = 0.0, None
        while gossiper.arrived:
            push = gossiper.arrived.popleft()
            if w is None:
                begin, w = wait_for_step(state), self.flat.vector(state.params)
            sent = self.wire.decode(push.body)
            self._count_exchange(float(np.linalg.norm(w - sent)), 0, 0.0)
            w = gossip.merge(w, sent, push.share)
        if w is not None:
            state = state._replace(params=self._to_params(w, state))
        push = None if self.is_done else gossip.draw(gossiper.closed_peers())
        if push:
            begin = begin or wait_for_step(state)
            body = self.wire.encode(self.flat.vector(state.params) if w is None else w)
            gossiper.push(push.to, push.share, body)
            self.new = self.new.plus(Counters(sent_bytes=body.size))
        if push or w is not None:
            progress.record_span("wait", "gossip", begin, time.perf_counter())
            self.new = self.new.plus(Counters(exchange_s=time.perf_counter() - begin))
        return state

    def end(self, state: TrainState) -> TrainState:
        """Exchange once more if steps came after the last exchange.

        In gossip: take what is under way, then lay alpha w and alpha down at the center.
        """
        if self.connections.gossiper is not None:
            self.connections.gossiper.end(lambda: self.report({}))  # not late, though others may be long in coming
        self.is_done = True
        if self.connections.gossiper is None:
            return self.exchange(state, {})[0] if self.clock % self.tau else state
        state = self.gossip_step(state)
        weight = np.float32(self.weight)
        self._server_exchange(PUSH, np.append(weight * self.flat.vector(state.params), weight), None)
        return state

    def center(self) -> PyTree:
        """The center's params; in gossip the weighted mean of workers' final params."""
        seen = self._server_exchange(READ, np.empty(self.connections.layout.n, np.float32), None).seen
        return self.flat.tree(seen[:-1] / seen[-1] if self.rule.is_gossip else seen)

    def post(self, values: np.ndarray) -> None:
        """Leave u8[..] at server 0 for others, replacing this worker's last."""
        self._server_exchange(POST, None, None, post=values)

    def fetch(self, whose: int, size_bytes: int) -> np.ndarray:
        """u8[size_bytes] that a worker left at server 0; zeros if none."""
        values = np.empty(size_bytes, np.uint8)
        self._server_exchange(FETCH, None, None, post=values, whose=whose)
        return values

    def write_if_asked(
        self, parts: UncoordinatedCheckpoint, home: HeldFolder, state: TrainState, answer: ServerAnswer
    ) -> None:
        """This worker's part of a checkpoint that has been begun."""
        save = answer.status.save
        if save <= self.saved:
            return
        step = int(save) - 1
        host = jax.tree.map(np.asarray, state)
        for path, leaf in named_leaves(host):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
                raise TrainingError(f"{path} of worker {self.number} is not finite: not saved, earlier ones stay")
        with written(step, home):
            parts.write_own(step, self.number, {**host._asdict(), "weight": np.array(self.weight)})
        self.saved = save

    def close(self, is_left: bool) -> None:
        """Worker 0: end the run, or leave it to be resumed."""
        self.report({"closing": 1.0})
        self._server_exchange(LEAVE if is_left else END, None, None)

    def _server_exchange(
        self, kind: int, vector: np.ndarray | None, report: Sequence[float] | None, **posted: Any
    ) -> ServerExchange:
        workers = 0 if self.number else self.workers
        exchange = ServerExchange(
            layout=self.connections.layout, kind=kind, vector=vector, report=report, workers=workers, **posted
        )
        with progress.span("wait", "the center"):
            self._held_s = run_exchange(exchange, self.connections.channels)
        return exchange

    def _answer(self, exchange: ServerExchange) -> ServerAnswer:
        assert exchange.answer is not None
        check_alive(exchange.answer)
        return exchange.answer

    def _report(self, asks: Mapping[str, float]) -> list[float]:
        said = [*WorkerReport(self.clock, self.saved, self.is_done, self.evaluated, **asks), *self.new, *self.spent]
        self.new, self.spent = Counters(), TimeSpent()
        return said

    def _to_params(self, w: np.ndarray, state: TrainState) -> PyTree:
        return self.rule.from_center(on_device(self.flat.tree(w)), state.rule_state)

    def _count_exchange(self, distance: float, sent_bytes: int, seconds: float) -> None:
        self.new = self.new.plus(Counters(exchanges=1, exchange_s=seconds, sent_bytes=sent_bytes, distance=distance))


def wait_for_step(state: TrainState) -> float:
    """When the step behind a state is through; waits for it."""
    jax.block_until_ready(state.params)
    return time.perf_counter()


def check_alive(answer: ServerAnswer) -> None:
    """Raise `TrainingError` if worker 0 is gone."""
    if answer.status.closing == 2:
        raise TrainingError("rank 0, which keeps the record, is gone; go on from the last checkpoint with --resume")
