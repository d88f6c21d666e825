"""Which rank trains and which keeps the center; and server 0's watch over workers that hang."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import ON_STALL
from jaxmpi.core.errors import UsageError
from jaxmpi.rules.asynchronous.center import CenterClient, CenterLayout, CenterServer, GlobalProgress
from jaxmpi.rules.asynchronous.gossip import GossipThread
from jaxmpi.rules.asynchronous.start import AsyncStart
from jaxmpi.rules.asynchronous.transport import MESSAGE_BYTES, Responder
from jaxmpi.rules.asynchronous.worker import AsyncWorker
from jaxmpi.rules.base import Asynchronous
from jaxmpi.runtime import failures

STALLED = 1  # exit code of a job that `on_stall` ends: to start again may help


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
        progress = GlobalProgress(size, target, config.staleness, start.counters) if rank == first else None
        begin, end = layout.shard(rank - first)
        shard = np.zeros(end - begin, np.float32) if rule.is_gossip else start.center[begin:end].copy()
        server = CenterServer(layout, rank - first, shard, rule.apply, size, progress)
        responder = Responder(to_center, server, range(size), MESSAGE_BYTES)

        def keep_shard() -> bool:
            responder.run(server.is_over, lambda: monitor.look(server, responder))
            return server.is_left

        serve = keep_shard
    if rank < size:
        client = CenterClient(to_center, layout, range(first, first + servers), 0 if rank else size)
        body_bytes = CenterLayout(n, 1, wire).host_wire().size_bytes(n)
        thread = GossipThread(between_workers, rank, size, body_bytes) if rule.is_gossip else None
        worker = AsyncWorker(rank, size, rule, start, client, tau=config.tau, wire=wire, gossip_thread=thread)
    return worker, serve


def start_limit_s(stall_timeout_s: float) -> float:
    """Seconds in which a worker must compile and get its first batch."""
    return failures.LONG * (stall_timeout_s or AGREE_TIMEOUT_S)


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

    def limit_s(self, worker: int, progress: GlobalProgress) -> float:
        """How long a worker may send nothing."""
        if worker in progress.absent:
            return start_limit_s(self.stall_timeout_s)
        return (self.stall_timeout_s or math.inf) * (failures.LONG if worker == 0 else 1.0)

    def look(self, server: CenterServer, responder: Responder) -> None:
        """Name silent workers, pass on signals, and end the job on `abort`."""
        progress = server.progress
        if progress is None:
            return
        progress.leaving |= self.must_leave()
        silent_s = responder.silent_s(progress.expected_workers())
        late = {worker: s for worker, s in silent_s.items() if s > self.limit_s(worker, progress)}
        self.named &= late.keys()
        if late.keys() <= self.named:
            return
        self.named |= late.keys()
        names = ", ".join(f"rank {worker} on {self.hosts[worker]}" for worker in late)
        sys.stderr.write(
            f"jaxmpi: watchdog of {failures.describe_rank()}: no progress for {max(late.values()):.0f} s; late: "
            f"{names}; other workers go on, but no checkpoint is made\n"
            f"jaxmpi: on_stall {self.on_stall}: {ON_STALL[self.on_stall]}\n"
        )
        if self.on_stall == "abort":
            failures.end_job(STALLED)
        server.begin_without(late.keys() & progress.absent)
