"""Ranks that keep the center, connections to them, and their heartbeat monitor."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.config.schema import ON_STALL
from jaxmpi.core.errors import check
from jaxmpi.recover import decisions
from jaxmpi.recover.watchdog import STALLED
from jaxmpi.rules.base import Asynchronous
from jaxmpi.rules.gossip_transport import GossipThread
from jaxmpi.rules.parameter_server import GlobalProgress, Server, ServerLayout
from jaxmpi.rules.parameter_server_transport import ServerChannel, ServerEndpoint
from jaxmpi.runtime import failures
from jaxmpi.trainer.async_start import AsyncStart
from jaxmpi.trainer.run import Run


class Connections(NamedTuple):
    """How this rank reaches the others."""

    layout: ServerLayout
    channels: Sequence[ServerChannel]  # channels of a worker, one to each server
    endpoint: ServerEndpoint | None  # if this rank keeps a shard
    gossiper: GossipThread | None


def requested_wire(run: Run) -> str:
    """The requested strategy's wire, all that an asynchronous rule takes of it."""
    return run.plan.strategy.partition(":")[2]


def connect(run: Run, start: AsyncStart) -> Connections:
    """Channels, shards and communicators; all ranks call it together.

    Raises:
        UsageError: MPI allows one thread at a time only.
    """
    config, rule, workers = run.experiment.rule, run.functions.rule.asynchronous, run.workers
    control = workers.processes
    assert rule is not None
    assert isinstance(control, MpiProcesses)
    check(
        control.may_overlap,
        "MPI gives MPI_THREAD_SERIALIZED; asynchronous rules exchange from threads of their own and need "
        "MPI_THREAD_MULTIPLE: use an MPI with full thread support, or rule gradients",
    )
    to_center, between_workers = control.clone(), control.clone()
    rank, servers, n = control.rank, max(config.servers, 1), start.center.size
    first = workers.size if config.servers else 0  # rank of server 0
    # At the end of gossip each worker sends alpha w and alpha, in 32 bits whatever the wire.
    layout = ServerLayout(n + 1, 1, "32") if rule.is_gossip else ServerLayout(n, servers, requested_wire(run))
    endpoint = None
    if 0 <= rank - first < servers:
        target = run.plan.examples(run.plan.clock.total_steps)
        progress = GlobalProgress(workers.size, target, config.staleness, start.counters) if rank == first else None
        server = open_server(layout, rank - first, rule, start.center, progress)
        endpoint = ServerEndpoint(to_center, server, range(workers.size), layout.message_bytes())
    if rank >= workers.size:
        return Connections(layout, [], endpoint, None)
    channels = [ServerChannel(to_center, first + s) for s in range(servers)]
    body_bytes = ServerLayout(n, 1, requested_wire(run)).host_wire().size_bytes(n)
    gossiper = GossipThread(between_workers, rank, workers.size, body_bytes) if rule.is_gossip else None
    return Connections(layout, channels, endpoint, gossiper)


def open_server(
    layout: ServerLayout, number: int, rule: Asynchronous, center: np.ndarray, progress: GlobalProgress | None
) -> Server:
    """A shard of the center; in gossip zeros, to which workers add."""
    begin, end = layout.bounds(number)
    shard = np.zeros(end - begin, np.float32) if rule.is_gossip else center[begin:end].copy()
    return Server(layout=layout, number=number, center=shard, serve=rule.serve, progress=progress)


def start_limit_s(stall_timeout_s: float) -> float:
    """Seconds in which a worker must compile and get its first batch."""
    return failures.LONG * (stall_timeout_s or AGREE_TIMEOUT_S)


@dataclass
class HeartbeatMonitor:
    """Server 0's watch over workers that hang, and over signals to leave.

    No other rank would notice a worker that hangs. A worker reports every tau steps or so. A worker that evaluates is
    given more time, and worker 0, which saves, always.
    """

    stall_timeout_s: float  # without a message of a worker; 0: no limit
    on_stall: str
    hosts: Sequence[str]  # by rank
    told: set[int] = field(default_factory=set)

    def limit_s(self, worker: int, progress: GlobalProgress) -> float:
        """How long a worker may say nothing."""
        if worker in progress.absent:
            return start_limit_s(self.stall_timeout_s)
        has_more_to_do = worker == 0 or worker in progress.unevaluated_workers()
        return (self.stall_timeout_s or math.inf) * (failures.LONG if has_more_to_do else 1.0)

    def look(self, endpoint: ServerEndpoint, is_called_away: bool) -> None:
        """Name silent workers, pass on signals, and end the job on `abort`."""
        progress = endpoint.server.progress
        if progress is None:
            return
        if is_called_away:
            progress.leaving = 1.0
        late = {w: s for w, s in endpoint.silent_s().items() if s > self.limit_s(w, progress)}
        self.told &= set(late)
        if late.keys() <= self.told:
            return
        self.told |= set(late)
        names = ", ".join(f"rank {worker} on {self.hosts[worker]}" for worker in late)
        sys.stderr.write(
            f"jaxmpi: watchdog of {failures.describe_rank()}: no progress for {max(late.values()):.0f} s; late: "
            f"{names}; other workers go on, but no checkpoint is made\n"
            f"jaxmpi: on_stall {self.on_stall}: {ON_STALL[self.on_stall]}\n"
        )
        if self.on_stall == "abort":
            failures.end_job(STALLED)
        endpoint.server.drop_stragglers(late.keys() & progress.absent)


def serve(run: Run, endpoint: ServerEndpoint, monitor: HeartbeatMonitor) -> None:
    """Serve to the end, in this thread.

    Raises:
        decisions.Preempted: on a rank that only serves, if the run is to be resumed later.
    """
    endpoint.run(lambda: monitor.look(endpoint, run.notice.given))
    if endpoint.server.is_left and run.workers.processes.rank >= run.workers.size:
        raise decisions.Preempted
