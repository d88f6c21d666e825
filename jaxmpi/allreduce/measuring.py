"""Measurements of a probe: which are worth their time, and how.

Timing every strategy at every length would take longer than a probe may. The probe first measures links, additions and
calls, from which the cost model predicts all strategies. It then times up to four candidates of each wire and the
baseline, at a short and a long vector. Strategies predicted 1.5 times as slow as the best are left out. A strategy's
time is the median over repeats of the slowest rank. The least would promise more than a run then gets.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import cost_model, probes
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.prices import Link, Net
from jaxmpi.allreduce.probes import Probe
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import UsageError

BUDGET_S = seconds_from("JAXMPI_PROBE_S", 2)  # seconds of a probe; measurements that have begun by then are finished
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)  # bytes; the first stays unless another gains autotune.MARGIN
SHORT = 1 << 12  # floats a worker, of the shorter vector that strategies are timed with
LONGEST = 1 << 22  # floats of the longer one at most
LONG_SHARE = 0.04  # share of the budget: predicted seconds of the longer vector at most
REPEATS = 3
HOPELESS = 1.5  # a prediction of so many times the best one's is not worth a measurement
TIE = 1.1  # two predictions of so little between them do not say which is faster
ENOUGH = 4  # strategies of a wire to measure
BASELINE = "asa:32"  # strategy that others must beat by autotune.MARGIN


class AutotuneRequest(NamedTuple):
    """The exchange to choose for, and the strategies that may be used."""

    sizes: tuple[int, ...]  # floats of every leaf
    wires: tuple[str, ...] = ("32",)
    among: tuple[str, ...] = ()  # algorithms; none: all

    def strategies(self, net: Net) -> list[str]:
        """Names of strategies that may be used, with wires, such as ring:16."""
        names = cost_model.candidates(net, self.wires)
        return [name for name in names if not self.among or name.partition(":")[0] in self.among]


def measured(comm: MpiComm, probe: Probe | None, key: dict[str, Any], request: AutotuneRequest) -> Probe:
    """Measure the best candidates for this request, and save what is new.

    If these leaves' size class is known, only what cannot be missed is added: the next run shall choose as this one
    does. A probe for a scalar has not timed the strategies for long vectors, so another class has its own candidates.
    """
    is_known = probe is not None and probe.knows(request.sizes)
    control, end = comm.processes, time.perf_counter() + (0.0 if is_known else BUDGET_S)
    known = probe or Probe(measure_net(comm), {})
    prices = known.net.codec_s_per_float
    codecs = {wire: codec_seconds(comm, known.net, wire) for wire in request.wires if wire not in prices}
    known = known._replace(net=known.net._replace(codec_s_per_float={**prices, **codecs}))
    count = sum(map(len, known.seconds.values()))
    while True:
        late = time.perf_counter() > end
        following = from_rank_0(control, lambda late=late: next_to_measure(known, request, late))
        if following is None:
            break
        name, n = following
        times = known.seconds.setdefault(name, {})
        try:
            times[n] = time_strategy(comm, name, n)
        except UsageError:  # on all ranks alike: no room for shared memory, as in a small container
            times.clear()
    if not is_known:
        known = known._replace(classes=(*known.classes, probes.size_class(request.sizes)))
    if control.rank == 0 and (codecs or not is_known or sum(map(len, known.seconds.values())) > count):
        probes.save(key, known)
    return known


def next_to_measure(probe: Probe, request: AutotuneRequest, time_is_up: bool) -> tuple[str, int] | None:
    """The next strategy and number of floats to time, or None.

    None if all that count are measured, or there is no time. All strategies at the length that says more about these
    leaves come first, then all at the other. The baseline and the first of every wire are measured in any case. The
    second of every wire is measured if it is predicted to take about as long.
    """
    names = request.strategies(probe.net)
    expected = {name: cost_model.step_seconds(probe.net, request.sizes, name, BUCKETS[0]) for name in names}
    rows = ranked(probe, request, expected)
    turns = itertools.zip_longest(*rows)
    names = list(dict.fromkeys([BASELINE, *(name for row in turns for name in row if name)]))
    needed = set(names[: 1 + len(request.wires)])
    if not probe.knows(request.sizes):
        needed |= {row[1] for row in rows if len(row) > 1 and expected[row[1]] <= TIE * expected[row[0]]}
    lengths = {name: lengths_for(probe.net, name) for name in names}
    is_short = max(request.sizes, default=0) < 4 * short_for(probe.net)
    for turn in (0, 1):
        for name in names:
            n = lengths[name][turn if is_short else 1 - turn]
            is_needed = turn == 0 and name in needed and name not in probe.seconds
            if n not in probe.seconds.get(name, {}) and (is_needed or not time_is_up):
                return name, n
    return None


def ranked(probe: Probe, request: AutotuneRequest, expected: dict[str, float]) -> list[list[str]]:
    """Rank the few strategies of each wire worth a measurement, best first.

    If the leaves' size class is known, what is measured already goes before the rest. Words that could not be
    measured are left out.

    Args:
        expected: seconds of a step's exchange by strategy.
    """
    settled = probe.seconds if probe.knows(request.sizes) else {}
    hopeless = HOPELESS * min(expected.values())
    ordered = sorted(expected, key=lambda name: (name not in settled, expected[name]))
    able = [name for name in ordered if probe.seconds.get(name) != {}]
    hopeful = [name for name in able if name in settled or expected[name] <= hopeless]
    return [[name for name in hopeful if name.endswith(f":{wire}")][:ENOUGH] for wire in request.wires]


def lengths_for(net: Net, strategy: str) -> tuple[int, int]:
    """Floats of a short and a long vector, multiples of the workers."""
    short, long = short_for(net), LONGEST
    while long > 4 * short and cost_model.predict(net, long, strategy) > LONG_SHARE * BUDGET_S:
        long //= 2
    return short, max(4 * short, long - long % net.workers)


def short_for(net: Net) -> int:
    """Floats of the shorter vector that the probe times."""
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
    net = Net(len(ranks), slots, Link(0.0, 0.0), Link(0.0, 0.0), cores=probes.cores_of_a_host(comm))
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
