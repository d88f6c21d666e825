"""An asynchronous rank: its start, its worker between steps, its shard of the center, and who is late.

Workers make different numbers of steps, so no collective can count or stop them. Each worker adds up what it has done
since its last report and sends the sums. Server 0 adds them for all, which gives steps, epochs and the end of the run.
Its answer has this progress, and what the worker has to write. An exchange pushes the rule's vector, keeps
the center as it was before, and merges both. A gossip step merges the pushes that have arrived and may push. `end`
gives the center the last steps, so none is lost.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.wires import BLOCK, host_wire
from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import UncoordinatedCheckpoint, check_finite, written
from jaxmpi.checkpoint.restore import first_whole, read_file
from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.diagnosis import watch
from jaxmpi.comm.topology import Workers
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import ON_STALL
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.optim import optimizers
from jaxmpi.rules.asynchronous.center import CenterClient, CenterExchange, CenterLayout, CenterServer
from jaxmpi.rules.asynchronous.gossip import GossipThread
from jaxmpi.rules.asynchronous.progress import Closing, Counters, GlobalProgress, Order, Report, Status
from jaxmpi.rules.base import Asynchronous
from jaxmpi.runtime import failures, progress

STALLED = 1  # exit code of a job that `on_stall` ends: to start again may help

# ---------------------------------------------------------------- the start: state 0, or a part of a checkpoint


class ParamsVector(NamedTuple):
    """How a tree of floating-point leaves lies in f32[n].

    Zeros fill up each leaf to whole blocks, the floats that share a scale on wires 16 and 8: no block has two leaves.
    """

    structure: Any
    like: list[jax.ShapeDtypeStruct]

    @classmethod
    def from_params(cls, params: PyTree) -> "ParamsVector":
        """Layout of params.

        Raises:
            UsageError: a leaf is no float32, bfloat16 or float16, by path.
        """
        for name, leaf in named_leaves(params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 4:
                raise UsageError(f"params {name}: got {leaf.dtype}; a center holds float32, bfloat16 or float16")
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])

    @property
    def starts(self) -> list[int]:
        """Where each leaf begins; then n."""
        return np.cumsum([0, *(-(-leaf.size // BLOCK) * BLOCK for leaf in self.like)]).tolist()

    def vector(self, params: PyTree) -> np.ndarray:
        """f32[n], a copy."""
        starts = self.starts
        flat = np.zeros(starts[-1], np.float32)
        for start, leaf in zip(starts, jax.tree.leaves(params), strict=False):
            flat[start : start + leaf.size] = np.asarray(leaf, np.float32).reshape(-1)
        return flat

    def tree(self, vector: np.ndarray) -> PyTree:
        """Params of f32[n] as NumPy arrays; those in f32 share its memory."""
        leaves = [
            vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype, copy=False)
            for start, leaf in zip(self.starts, self.like, strict=False)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def on_device(tree: PyTree) -> PyTree:
    """Copies that are committed to this worker's device, as step results are."""
    return jax.device_put(jax.tree.map(jnp.array, tree), jax.local_devices()[0])


@dataclass
class AsyncStart:
    """Start of a run: state 0, or the part of a checkpoint."""

    center: np.ndarray  # f32[n]
    state: TrainState
    counters: Counters
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    weight: float = 0.0  # weight of this worker in gossip


def load_start(
    folder: Path, state: TrainState, workers: Workers, rule: Asynchronous, resume: bool, say: Callable[[str], None]
) -> AsyncStart:
    """State 0; with `resume` the newest checkpoint, for any number of workers.

    Args:
        folder: RUN/checkpoints.
        say: is called with a line for each damaged one that is passed over.
    """
    read = partial(start_from_checkpoint, state=state, worker=workers.mine[0], workers=workers.size, rule=rule)
    start = first_whole(folder, workers.processes, read, say) if resume else None
    workers.processes.assert_same("the checkpoint to resume from", {"step": start.step if start else 0})
    return start or AsyncStart(ParamsVector.from_params(state.params).vector(state.params), state, Counters())


def start_from_checkpoint(path: Path, state: TrainState, worker: int, workers: int, rule: Asynchronous) -> AsyncStart:
    """A worker's start from its part of a checkpoint, else the center.

    On another number of workers weights of gossip begin anew, so that they sum to 1.
    """
    manifest = manifests.read_manifest(path)
    center = read_file(path, manifest, "common.bin", {"center": state.params})["center"]
    initial, weight = state._replace(step=np.array(manifest["step"], np.int32), params=center), 0.0
    name = manifests.worker_file(worker)
    if manifest["files"].get(name):
        stored = read_file(path, manifest, name, {**state._asdict(), "weight": np.zeros(())})
        weight = float(stored.pop("weight")) * (manifest["workers"] == workers)
        initial = TrainState(**stored)
    if rule.starts_at_center:
        initial = initial._replace(params=center)
    # A new worker's optimizer is at step 0: it would warm up while the others' rate has long fallen.
    initial = initial._replace(rule_state=optimizers.set_step(initial.rule_state, manifest["step"]))
    tally = manifest["extra"].get("tally")
    is_whole = isinstance(tally, list) and len(tally) == len(Counters._fields) and all(type(x) is float for x in tally)
    manifests.check_undamaged(is_whole, f"{path}: tally: got {tally!r:.80}: damaged")
    return AsyncStart(
        center=ParamsVector.from_params(state.params).vector(center),
        state=initial,
        counters=Counters(*tally),
        step=manifest["step"],
        extra=manifest["extra"],
        weight=weight,
    )


# ---------------------------------------------------------------- between steps


class AsyncWorker:
    """One worker between its steps."""

    def __init__(
        self,
        number: int,
        workers: int,
        rule: Asynchronous,
        start: AsyncStart,
        client: CenterClient,
        tau: int,
    ) -> None:
        """Take up what the run starts with.

        Args:
            tau: steps between exchanges with the center; 0: it has none.
        """
        self.number, self.workers, self.rule, self.tau, self.client = number, workers, rule, tau, client
        self.flat = ParamsVector.from_params(start.state.params)
        self.base = start.center  # f32[n]: the center as this worker last knew it
        self.new = Counters()  # since the last report
        self.clock, self.saved, self.is_done = 0, 0, False
        self.save_order = Order()  # of worker 0, for its next report
        self.weight = 1 / workers  # in the mean of all

    def count(self, **new: float) -> None:
        """Add to the counters of the next report."""
        self.new = self.new.plus(Counters(**new))

    def report(self, *, leave: bool = False, closing: Closing = Closing.NO) -> Status:
        """Report without an exchange; return the answer."""
        exchange, status = self._ask(None, leave, closing)
        self.count(sync=exchange.report_wait_s)
        return status

    def exchange(self, state: TrainState, *, leave: bool = False) -> tuple[TrainState, Status]:
        """Exchange with the center and report; return the state and the answer."""
        begin = time.perf_counter()
        w = self.flat.vector(self.rule.to_center(state.params, state.rule_state))
        exchange, status = self._ask(self.rule.push(w, self.base), leave)
        # From the center as it was: afterwards both have moved towards each other.
        distance = float(np.linalg.norm(w - exchange.seen))
        w, self.base = self.rule.pull(w, self.base, exchange.pushed, exchange.seen)
        state = state._replace(params=self._to_params(w, state))
        took_s, wait_s = time.perf_counter() - begin, exchange.report_wait_s
        self.count(exchanges=1, exchange_s=took_s, sent_bytes=exchange.sent_bytes, distance=distance)
        self.count(exchange=took_s - wait_s, sync=wait_s)
        return state, status

    def _ask(
        self, vector: np.ndarray | None, leave: bool, closing: Closing = Closing.NO
    ) -> tuple[CenterExchange, Status]:
        new, self.new = self.new, Counters()
        report = Report(self.clock, new, self.saved, self.is_done, leave, self.save_order, closing)
        with progress.span("wait", "the center"):
            exchange = self.client.exchange(vector, report)
        assert exchange.status
        if exchange.status.closing == Closing.ABANDONED:
            raise TrainingError(
                f"{watch().names([0])}, which keeps the record, is gone; go on from the last checkpoint with --resume"
            )
        return exchange, exchange.status

    def meet_others(self, state: TrainState) -> TrainState:
        """What a worker does with others after a step: nothing, unless it gossips."""
        return state

    def end(self, state: TrainState) -> TrainState:
        """Exchange once more if steps came after the last exchange."""
        self.is_done = True
        return self.exchange(state)[0] if self.clock % self.tau else state

    def shared_params(self, state: TrainState) -> PyTree:
        """The params that stand for all workers': the center's."""
        return self.flat.tree(self.client.read())

    def write_if_ordered(
        self, parts: UncoordinatedCheckpoint, home: HeldFolder, state: TrainState, status: Status
    ) -> None:
        """This worker's part of a checkpoint that has been begun."""
        number, step = status.save
        if number <= self.saved:
            return
        host = jax.tree.map(np.asarray, state)
        check_finite({manifests.worker_file(self.number): host}, step, parts.folder)
        with written(step, home):
            parts.write_own(step, self.number, {**host._asdict(), "weight": np.array(self.weight)})
        self.saved = number

    def close(self, is_left: bool) -> None:
        """Worker 0: end the run, or leave it to be resumed."""
        self.report(closing=Closing.OVER)
        self.client.end(is_left)

    def _to_params(self, w: np.ndarray, state: TrainState) -> PyTree:
        return self.rule.from_center(on_device(self.flat.tree(w)), state.rule_state)


class GossipWorker(AsyncWorker):
    """A worker that pushes to others and merges their pushes; the center is for the end alone."""

    def __init__(self, *more: Any, gossip: Any, thread: GossipThread, wire: str) -> None:
        """Take up what the run starts with.

        Args:
            more: as of `AsyncWorker`.
            gossip: its part, by `Asynchronous.gossip`.
            wire: of pushes.
        """
        super().__init__(*more, tau=0)
        self.gossip, self.thread, self.wire, self.weight = gossip, thread, host_wire(wire), gossip.weight

    def meet_others(self, state: TrainState) -> TrainState:
        """Merge what has arrived, then perhaps push."""
        thread, begin, w = self.thread, 0.0, None
        while thread.arrived:
            push = thread.arrived.popleft()
            if w is None:
                jax.block_until_ready(state.params)  # the step is no part of the exchange
                begin, w = time.perf_counter(), self.flat.vector(state.params)
            pushed = self.wire.decode(push.body, w.size)
            self.count(exchanges=1, distance=float(np.linalg.norm(w - pushed)))
            w = self.gossip.merge(w, pushed, push.share)
        if w is not None:
            state = state._replace(params=self._to_params(w, state))
        target = None if self.is_done else self.gossip.draw(thread.closed_peers())
        if target:
            jax.block_until_ready(state.params)
            begin = begin or time.perf_counter()
            body = self.wire.encode(self.flat.vector(state.params) if w is None else w)
            to, share = target
            thread.push(to, share, body)
            self.count(sent_bytes=body.size)
        self.weight = self.gossip.weight
        if target or w is not None:
            end = time.perf_counter()
            progress.record_span("wait", "gossip", begin, end)
            self.count(exchange_s=end - begin)
        return state

    def end(self, state: TrainState) -> TrainState:
        """Merge what is on its way, then lay alpha w and alpha down at the center."""
        # It reports meanwhile, or server 0 would take it for late: another may be evaluating before its own end.
        self.thread.end(self.report)
        self.is_done = True
        state = self.meet_others(state)
        weight = np.float32(self.weight)
        with progress.span("wait", "the center"):
            self.client.exchange(np.append(weight * self.flat.vector(state.params), weight))
        return state

    def shared_params(self, state: TrainState) -> PyTree:
        """This worker's own until the end; then the weighted mean of all workers' final params."""
        if not self.is_done:
            return jax.tree.map(np.asarray, state.params)
        center = self.client.read()
        return self.flat.tree(center[:-1] / center[-1])


# ---------------------------------------------------------------- which rank trains and which keeps the center


def take_part(
    workers: Workers,
    config: RuleConfig,
    rule: Asynchronous,
    wire: str,
    start: AsyncStart,
    target: float,
    monitor: "HeartbeatMonitor",
) -> tuple[AsyncWorker | None, Callable[[], bool] | None]:
    """This rank's worker, and what keeps its shard of the center, if it has them; all ranks call it together.

    Args:
        wire: of the strategy that was asked for.
        target: examples of all workers after which they stop.

    Returns: the second serves to the end, and returns True if the run is to be resumed.

    Raises:
        UsageError: MPI allows one thread at a time only.
    """
    control, rank, size, n = workers.processes, workers.processes.rank, workers.size, start.center.size
    assert isinstance(control, MpiProcesses)
    if not control.may_overlap:
        raise UsageError(
            "MPI gives MPI_THREAD_SERIALIZED; asynchronous rules exchange from threads of their own and need "
            "MPI_THREAD_MULTIPLE: use an MPI with full thread support, or rule gradients"
        )
    # Communicators of their own, so that no message of another thread is taken for one of these.
    to_center, between_workers = control.clone(), control.clone()
    servers = max(config.servers, 1)
    first = size if config.servers else 0  # rank of server 0
    # At the end of gossip each worker adds alpha w and alpha to zeros, in 32 bits whatever the wire.
    layout = CenterLayout(n + 1, 1, "32") if rule.is_gossip else CenterLayout(n, servers, wire)
    worker = serve = None
    if 0 <= rank - first < servers:
        all_progress = GlobalProgress(size, target, config.staleness, start.counters) if rank == first else None
        begin, end = layout.shard(rank - first)
        shard = np.zeros(end - begin, np.float32) if rule.is_gossip else start.center[begin:end].copy()
        server = CenterServer(to_center, layout, rank - first, shard, rule.apply, size, all_progress)
        serve = partial(server.run, partial(monitor.look, server))
    if rank < size:
        hosts = {server: monitor.hosts[server] for server in range(first, first + servers)}
        client = CenterClient(to_center, layout, hosts, 0 if rank else size)
        if rule.gossip:
            seed = int(np.asarray(start.state.key)[0]) + start.step
            gossip = rule.gossip(rank, size, seed, start.weight)
            thread = GossipThread(between_workers, rank, size, host_wire(wire).size_bytes(n))
            worker = GossipWorker(rank, size, rule, start, client, gossip=gossip, thread=thread, wire=wire)
        else:
            worker = AsyncWorker(rank, size, rule, start, client, config.tau)
    return worker, serve


def start_limit_s(stall_timeout_s: float) -> float:
    """Seconds in which a worker must compile and get its first batch."""
    return failures.LONG_FACTOR * (stall_timeout_s or AGREE_TIMEOUT_S)


@dataclass
class HeartbeatMonitor:
    """Server 0's watch over workers that hang, and over signals to leave.

    No other rank would notice a worker that hangs. A worker reports every tau steps or so. Worker 0, which evaluates
    and saves, is given more time.
    """

    stall_timeout_s: float  # without a message of a worker; 0: no limit
    on_stall: str
    hosts: Sequence[str]  # by rank
    must_leave: Callable[[], bool]  # this rank has been sent a signal
    named: set[int] = field(default_factory=set)

    def look(self, server: CenterServer) -> None:
        """Name silent workers, pass on signals, and end the job on `abort`."""
        progress = server.progress
        if progress is None:
            return
        progress.leaving |= self.must_leave()
        late: dict[int, float] = {}
        for worker, silent_s in server.silent_s(progress.expected_workers()).items():
            limit_s = (self.stall_timeout_s or math.inf) * (failures.LONG_FACTOR if worker == 0 else 1.0)
            if silent_s > (start_limit_s(self.stall_timeout_s) if worker in progress.absent else limit_s):
                late[worker] = silent_s
        is_news, self.named = bool(late.keys() - self.named), set(late)
        if not is_news:
            return
        names = ", ".join(f"rank {worker} on {self.hosts[worker]}" for worker in late)
        sys.stderr.write(
            f"jaxmpi: watchdog of {failures.describe_rank()}: no progress for {max(late.values()):.0f} s; late: "
            f"{names}; other workers go on, but no checkpoint is made\n"
            f"jaxmpi: on_stall {self.on_stall}: {ON_STALL[self.on_stall]}\n"
        )
        if self.on_stall == "abort":
            failures.end_job(STALLED)
        server.begin_without(late.keys() & progress.absent)
