"""A clock for all ranks together, for `autotune`, and a probe of hosts for `jaxmpi plan`.

A probe has prices of messages, additions and calls, and the seconds of some strategies by length of the vector. Factors
between these seconds and the cost model's correct the model for other lengths and numbers of hosts. Formulas leave out
what all strategies pay here, such as cores that ranks share. So a strategy that was not measured gets the median
factors, else it would look better than all that were.
"""

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import cost_model
from jaxmpi.allreduce.algorithms.spec import Link, Net
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import compile_cache, process
from jaxmpi.runtime.provenance import versions

BUDGET_S = seconds_from("JAXMPI_PROBE_S", 2)  # seconds after which no other turn of the candidates begins
PROBED = "shm", "asa", "ring", "ar", "hier-ring", "tree", "color4"  # strategies whose seconds a probe has
SHORT = 1 << 12  # floats a worker, of the shorter vector that strategies are timed with
LONGEST = 1 << 22  # floats of the longer one at most
LONG_SHARE = 0.04  # share of the budget: predicted seconds of the longer vector at most
REPEATS = 3
DAMAGED = (OSError, RuntimeError, ValueError, TypeError, KeyError)  # a file of another version, or no cache folder


# ---------------------------------------------------------------- clock


def identity(comm: MpiComm) -> dict[str, Any]:
    """Facts for which measurements hold: hosts, slots, cores, versions, backend."""
    names = comm.processes.allgather_object(socket.gethostname())
    return {
        "hosts": {name: names.count(name) for name in sorted(set(names))},
        "cores": cores_of_a_host(comm),
        "versions": versions() | {"mpi": comm.processes.library},
        "device": jax.default_backend(),
    }


def cores_of_a_host(comm: MpiComm) -> float:
    """Cores that a host's ranks may use, on the host with fewest."""
    mine = process.core_mask() or list(range(os.cpu_count() or 1))
    cores_by_rank = comm.processes.allgather_object([mine, process.quota_cores()])
    sets: dict[int, set[int]] = {}
    for host, (cores, _) in zip(comm.hosts, cores_by_rank, strict=True):
        sets.setdefault(host, set()).update(cores)
    return float(min(*map(len, sets.values()), *(limit for _, limit in cores_by_rank)))


def slowest(control: Processes, work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank needs, all beginning together."""
    control.barrier()
    begin = time.perf_counter()
    work()
    return max(control.allgather_object(time.perf_counter() - begin))


def from_rank_0(control: MpiProcesses, make: Callable[[], Any]) -> Any:
    """A JSON value that rank 0 makes, on all ranks."""
    return control.bcast_object(make() if control.rank == 0 else None)


# ---------------------------------------------------------------- probe


class Probe(NamedTuple):
    """Measurements on a set of hosts."""

    net: Net
    seconds: dict[str, dict[int, float]]  # strategy in full -> floats -> seconds of the slowest rank

    def fits_of_all(self, names: Sequence[str]) -> dict[str, Fit]:
        """The measured factors; for other strategies, the median of those."""
        fits = {name: cost_model.fit(self.net, name, times) for name, times in self.seconds.items() if times}
        if not fits:
            return {}
        typical = Fit(*(statistics.median(parts) for parts in zip(*fits.values(), strict=True)))
        return dict.fromkeys(names, typical) | fits


def probe(comm: MpiComm, wires: Sequence[str]) -> Probe:
    """The cached probe with these wires; the same on all ranks.

    Communicates: a measurement of a few seconds, unless it is cached. JAXMPI_PROBE=fresh measures again.
    """
    control, key = comm.processes, identity(comm)
    cached = from_rank_0(
        control, lambda: compile_cache.read_json("probes", key, lambda value: as_json(from_json(value)))
    )
    if cached and set(wires) <= set(cached["net"]["codec_s_per_float"]):
        return from_json(cached)
    net = measure_net(comm)
    result = Probe(net._replace(codec_s_per_float={wire: codec_seconds(comm, net, wire) for wire in wires}), {})
    for name in cost_model.candidates(result.net, wires):
        if name.partition(":")[0] in PROBED:
            with suppress(UsageError):  # on all ranks alike: no room for shared memory, as in a small container
                lengths = from_rank_0(control, lambda name=name: lengths_for(result.net, name))
                result.seconds[name] = {n: time_strategy(comm, name, n) for n in lengths}
    if control.rank == 0:
        compile_cache.write_json("probes", key, as_json(result))
    return result


def newest() -> tuple[dict[str, Any], Probe] | None:
    """The last readable probe that this machine has cached, with its `identity`."""
    folder = compile_cache.cache_folder("probes")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True):
        with suppress(*DAMAGED):
            value = json.loads(path.read_text())
            return value["key"], from_json(value)
    return None


def as_json(probe: Probe) -> dict[str, Any]:
    """Convert to plain values."""
    return {"net": probe.net._asdict(), "seconds": probe.seconds}


def from_json(value: Any) -> Probe:
    """The inverse of `as_json`."""
    net = dict(value["net"])
    net["inside"], net["between"] = Link(*net["inside"]), Link(*net["between"])
    times = value["seconds"].items()
    return Probe(Net(**net), {name: {int(n): float(s) for n, s in seconds.items()} for name, seconds in times})


# ---------------------------------------------------------------- what a probe measures


def measure_net(comm: MpiComm) -> Net:
    """Measure messages, additions and calls on these hosts."""
    control = comm.processes
    hosts = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    slots, none = max(map(len, hosts)), Link(0.0, 0.0)
    is_even = len({len(host) for host in hosts}) == 1
    net = Net(len(hosts), slots, none, none, cores=cores_of_a_host(comm))._replace(even=is_even)
    peers = control.world.Clone()  # neither the control plane's nor mpi4jax's
    inside = measure_link(control, peers, hosts) if slots > 1 else none
    between = measure_link(control, peers, [[host[0] for host in hosts]]) if len(hosts) > 1 else none
    peers.Free()
    total, x = np.zeros(LONGEST, np.float32), np.ones(LONGEST, np.float32)
    addition_s = min(slowest(control, lambda: np.add(total, x, out=total)) for _ in range(REPEATS))
    return net._replace(
        inside=Link(inside.alpha_s / net.crowd, inside.beta_s_per_byte / net.crowd),
        between=between,
        gamma_s_per_byte=addition_s / x.nbytes / net.crowd,
        call_s=min(times_of(comm, jax.jit(lambda x: x + 1), 1)),
    )


def measure_link(control: MpiProcesses, peers: Any, rings: Sequence[Sequence[int]]) -> Link:
    """Measure a message from each rank to the next of its ring.

    All rings send at once. The longest message takes a share of the budget, if that is no more than 16 MiB.
    """
    mine = next((ring for ring in rings if control.rank in ring and len(ring) > 1), None)
    long_s = from_rank_0(control, lambda: LONG_SHARE * BUDGET_S)

    def seconds(size: int, repeats: int) -> float:
        outgoing, incoming = np.zeros(size, np.uint8), np.empty(size, np.uint8)

        def work() -> None:
            peers.Barrier()
            if mine:
                place = mine.index(control.rank)
                for _ in range(repeats):
                    peers.Sendrecv(outgoing, mine[(place + 1) % len(mine)], 0, incoming, mine[place - 1])

        return slowest(control, work)

    seconds(8, 4)  # opens connections
    alpha, size = seconds(8, 64) / 64, 1 << 20
    while seconds(size, 1) < long_s and size < 1 << 24:
        size *= 2
    once_s, thrice_s = seconds(size, 1), seconds(size, 3)  # seconds that both begin with fall out
    message_s = (thrice_s - once_s) / 2
    if message_s <= alpha:  # other work has hidden the difference; no link is infinitely fast, so all time is counted
        return Link(alpha, thrice_s / 3 / size)
    return Link(alpha, (message_s - alpha) / size)


def codec_seconds(comm: MpiComm, net: Net, wire: str) -> float:
    """Seconds a float to encode and decode, on a core."""
    if wire == "32":
        return 0.0
    n = 1 << 20
    return min(times_of(comm, comm.jit(lambda x: WIRES[wire].decode(WIRES[wire].encode(x))), n)) / n / net.crowd


def lengths_for(net: Net, strategy: str) -> tuple[int, int]:
    """Floats of a short and a long vector, multiples of the workers."""
    short, long = net.workers * max(1, min(SHORT, LONGEST // (16 * net.workers))), LONGEST
    while long > 4 * short and cost_model.predict(net, long, strategy) > LONG_SHARE * BUDGET_S:
        long //= 2
    return short, max(4 * short, long - long % net.workers)


def time_strategy(comm: MpiComm, name: str, n: int) -> float:
    """Median seconds of the slowest rank for a sum of n floats.

    The least would be of the sum that found a link idle, and promise more than a run then gets.
    """
    return statistics.median(times_of(comm, jax.jit(lambda x: sums([x], name, comm)[0]), n))


def times_of(comm: MpiComm, run: Callable[[jax.Array], Any], n: int) -> list[float]:
    """Seconds of the slowest rank for each call on n floats, without the first, which compiles."""
    x = jax.block_until_ready(jnp.ones(n, jnp.float32))
    jax.block_until_ready(run(x))
    return [slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS)]
