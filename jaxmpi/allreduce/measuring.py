"""Timings of messages, additions and sums on these ranks.

`autotune` times exchanges with these functions. `jaxmpi plan` goes by the prices of links and additions that
`measure_net` finds, and by the seconds of strategies at a short and a long vector.
"""

import importlib.metadata
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import cost_model
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.prices import Link, Net
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.env import seconds_from
from jaxmpi.runtime import process

BUDGET_S = seconds_from("JAXMPI_PROBE_S", 2)  # seconds in which candidates are timed by turns, about
SHORT = 1 << 12  # floats a worker, of the shorter vector that strategies are timed with
LONGEST = 1 << 22  # floats of the longer one at most
LONG_SHARE = 0.04  # share of the budget: predicted seconds of the longer vector at most
REPEATS = 3


def identity(comm: MpiComm) -> dict[str, Any]:
    """Facts for which measurements hold: hosts, slots, cores, versions, backend."""
    names = comm.processes.allgather_object(socket.gethostname())
    versions = {}
    for package in ("jaxmpi", "jax", "mpi4jax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "hosts": {name: names.count(name) for name in sorted(set(names))},
        "cores": cores_of_a_host(comm),
        "versions": versions | {"mpi": comm.processes.library},
        "device": jax.default_backend(),
    }


def cores_of_a_host(comm: MpiComm) -> float:
    """Cores that a host's ranks may use, on the host with fewest."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = process.quota_cores(process.QUOTA, os.cpu_count() or 1)
    every = comm.processes.allgather_object([mine, quota])
    sets: dict[int, set[int]] = {}
    for host, (cores, _) in zip(comm.hosts, every, strict=True):
        sets.setdefault(host, set()).update(cores)
    return float(min(*map(len, sets.values()), *(limit for _, limit in every)))


def lengths_for(net: Net, strategy: str) -> tuple[int, int]:
    """Floats of a short and a long vector, multiples of the workers."""
    short, long = short_for(net), LONGEST
    while long > 4 * short and cost_model.predict(net, long, strategy) > LONG_SHARE * BUDGET_S:
        long //= 2
    return short, max(4 * short, long - long % net.workers)


def short_for(net: Net) -> int:
    """Floats of the shorter vector."""
    return net.workers * max(1, min(SHORT, LONGEST // (16 * net.workers)))


def time_strategy(comm: MpiComm, name: str, n: int) -> float:
    """Median seconds of the slowest rank for a sum of n floats.

    The least would be of the sum that found a link idle, and promise more than a run then gets.
    """
    return statistics.median(times_of(comm, jax.jit(lambda x: sums([x], name, comm)[0]), n))


def times_of(comm: MpiComm, run: Callable[[jax.Array], Any], n: int) -> list[float]:
    """Seconds of the slowest rank for each call on n floats.

    The first call, which compiles, is not among them.
    """
    x = jax.block_until_ready(jnp.ones(n, jnp.float32))
    jax.block_until_ready(run(x))
    return [slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS)]


def slowest(control: Processes, work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank needs, all beginning together."""
    control.barrier()
    begin = time.perf_counter()
    work()
    return max(control.allgather_object(time.perf_counter() - begin))


def measure_net(comm: MpiComm) -> Net:
    """Measure messages, additions and calls on these hosts."""
    control = comm.processes
    ranks = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    slots = max(map(len, ranks))
    net = Net(len(ranks), slots, Link(0.0, 0.0), Link(0.0, 0.0), cores=cores_of_a_host(comm))
    net = net._replace(even=len({len(host) for host in ranks}) == 1)
    long_s = from_rank_0(control, lambda: LONG_SHARE * BUDGET_S)
    peers = control.world.Clone()  # neither the control plane's nor mpi4jax's
    firsts = [[host[0] for host in ranks]]
    inside = measure_link(control, peers, ranks, long_s) if slots > 1 else Link(0.0, 0.0)
    between = measure_link(control, peers, firsts, long_s) if len(ranks) > 1 else Link(0.0, 0.0)
    peers.Free()
    inside = Link(inside.alpha_s / net.crowd, inside.beta_s_per_byte / net.crowd)
    gamma, call = time_addition(control) / net.crowd, time_call(comm)
    return net._replace(inside=inside, between=between, gamma_s_per_byte=gamma, call_s=call)


def measure_link(control: MpiProcesses, peers: Any, rings: Sequence[Sequence[int]], long_s: float) -> Link:
    """Measure a message from each rank to the next of its ring.

    All rings send at once. The longest message takes `long_s`, if that is no more than 16 MiB.
    """
    mine = next((ring for ring in rings if control.rank in ring and len(ring) > 1), None)

    def seconds(size: int, repeats: int) -> float:
        sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)

        def work() -> None:
            peers.Barrier()
            for _ in range(repeats if mine else 0):
                at = mine.index(control.rank) if mine else 0
                ahead, behind = (mine[(at + step) % len(mine)] for step in (1, -1)) if mine else (0, 0)
                peers.Sendrecv(sent, ahead, 0, received, behind)

        return slowest(control, work)

    seconds(8, 4)  # opens connections
    alpha, size = seconds(8, 64) / 64, 1 << 20
    while seconds(size, 1) < long_s and size < 1 << 24:
        size *= 2
    some, more = seconds(size, 1), seconds(size, 3)  # seconds that both begin with fall out
    each = (more - some) / 2
    if each <= alpha:  # other work has hidden the difference; no link is without end, so all of the time is counted
        return Link(alpha, more / 3 / size)
    return Link(alpha, (each - alpha) / size)


def time_addition(control: MpiProcesses) -> float:
    """Seconds a byte to add float32 from memory, all ranks at once."""
    total, x = np.zeros(LONGEST, np.float32), np.ones(LONGEST, np.float32)
    return min(slowest(control, lambda: np.add(total, x, out=total)) for _ in range(REPEATS)) / x.nbytes


def time_call(comm: MpiComm) -> float:
    """Seconds of a program that does next to nothing, on all ranks."""
    return min(times_of(comm, jax.jit(lambda x: x + 1), 1))


def codec_seconds(comm: MpiComm, net: Net, wire: str) -> float:
    """Seconds a float to encode and decode, on a core."""
    if wire == "32":
        return 0.0
    n = 1 << 20
    return min(times_of(comm, comm.jit(lambda x: WIRES[wire].decode(WIRES[wire].encode(x))), n)) / n / net.crowd


def from_rank_0(control: MpiProcesses, make: Callable[[], Any]) -> Any:
    """A JSON value that rank 0 makes, on all ranks."""
    return control.bcast_object(make() if control.rank == 0 else None)
