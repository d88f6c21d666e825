"""A probe for `jaxmpi plan`: prices measured on a set of hosts, and its file.

It holds link prices, and the seconds of strategies by length of the vector. Factors between these seconds and the cost
model's correct the model for other lengths and numbers of hosts. A strategy that was not measured gets the median
factors, else it would look better than all that were.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import cost_model
from jaxmpi.allreduce.algorithms.spec import Link, Net
from jaxmpi.allreduce.autotune import candidates
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.measuring import BUDGET_S, cores_of_a_host, from_rank_0, identity, slowest
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import compile_cache

FORMAT = 2
SHORT = 1 << 12  # floats a worker, of the shorter vector that strategies are timed with
LONGEST = 1 << 22  # floats of the longer one at most
LONG_SHARE = 0.04  # share of the budget: predicted seconds of the longer vector at most
REPEATS = 3


class Probe(NamedTuple):
    """Measurements on a set of hosts."""

    net: Net
    seconds: dict[str, dict[int, float]]  # strategy in full -> floats -> seconds of the slowest rank

    def fits(self) -> dict[str, Fit]:
        """The measured strategies' factors."""
        return {name: cost_model.fit(self.net, name, times) for name, times in self.seconds.items() if times}

    def fits_of_all(self, names: Sequence[str]) -> dict[str, Fit]:
        """The measured factors; for other strategies, the median of those.

        Formulas leave out what all strategies pay here, such as cores that ranks share. So one that was not measured
        would look better than all that were.
        """
        found = self.fits()
        if not found:
            return {}
        typical = Fit(*(statistics.median(parts) for parts in zip(*found.values(), strict=True)))
        return dict.fromkeys(names, typical) | found


def probe(comm: MpiComm, wires: Sequence[str]) -> Probe:
    """The cached probe, completed for these wires; the same on all ranks.

    Communicates: a measurement of a few seconds, unless nothing is missing.
    """
    control, key = comm.processes, identity(comm)
    cached = from_rank_0(control, lambda: as_json(read(key)))
    known = from_json(cached) if cached else Probe(measure_net(comm), {})
    prices, seconds = dict(known.net.codec_s_per_float), dict(known.seconds)
    new_wires = [wire for wire in wires if wire not in prices]
    if not new_wires:
        return known
    for wire in new_wires:
        prices[wire] = codec_seconds(comm, known.net, wire)
    net = known.net._replace(codec_s_per_float=prices)
    for wire in new_wires:
        for name in candidates(comm.hosts, [wire]):
            if name in cost_model.candidates(net, [wire]) and name not in seconds:
                try:
                    lengths = from_rank_0(control, lambda name=name: lengths_for(net, name))
                    seconds[name] = {n: time_strategy(comm, name, n) for n in lengths}
                except UsageError:  # on all ranks alike: no room for shared memory, as in a small container
                    continue
    known = Probe(net, seconds)
    if control.rank == 0:
        save(key, known)
    return known


# ---------------------------------------------------------------- measured


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
    """Seconds of the slowest rank for each call on n floats.

    The first call, which compiles, is not among them.
    """
    x = jax.block_until_ready(jnp.ones(n, jnp.float32))
    jax.block_until_ready(run(x))
    return [slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS)]


# ---------------------------------------------------------------- on disk


def as_json(probe: Probe | None) -> dict[str, Any] | None:
    """Convert to plain values."""
    return None if probe is None else {"net": probe.net._asdict(), "seconds": probe.seconds}


def from_json(value: Any) -> Probe:
    """The inverse of `as_json`.

    Raises:
        ValueError, TypeError, KeyError or AttributeError: it is none.
    """
    net = dict(value["net"])
    net["inside"], net["between"] = Link(*net["inside"]), Link(*net["between"])
    times = value["seconds"].items()
    return Probe(Net(**net), {name: {int(n): float(s) for n, s in each.items()} for name, each in times})


# Errors of a file that is damaged, or of another version.
DAMAGED = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)


def read(key: Mapping[str, Any]) -> Probe | None:
    """The saved probe; None if missing, damaged, or with JAXMPI_PROBE=fresh."""
    if os.environ.get("JAXMPI_PROBE") == "fresh":
        return None
    try:
        value = json.loads(compile_cache.json_file("probes", key).read_text())
        if value["format"] != FORMAT or value["key"] != key:
            raise ValueError("of another kind")
        return from_json(value)
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        print(f"jaxmpi: the saved probe cannot be used ({error}); probing again", file=sys.stderr)
        return None


def newest() -> tuple[dict[str, Any], Probe] | None:
    """The last readable saved probe on this machine, with its `identity`."""
    folder = compile_cache.cache_folder("probes")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            value = json.loads(path.read_text())
            if value["format"] == FORMAT:
                return value["key"], from_json(value)
        except DAMAGED:  # `read` says so if it matters
            continue
    return None


def save(key: Mapping[str, Any], probe: Probe) -> None:
    """Cache a probe."""
    compile_cache.write_json("probes", key, {"format": FORMAT, "net": probe.net._asdict(), "seconds": probe.seconds})
