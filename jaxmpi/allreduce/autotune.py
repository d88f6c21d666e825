"""`auto`: the fastest strategy by a probe of a few seconds.

Messages are timed first, inside hosts and between them. With what they cost, `cost_model` puts all strategies in order;
the first few are then timed for real, and the fastest of those is taken: the model proposes, the measurement decides. A
probe is kept for each set of hosts.
"""

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import cost_model
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.prices import Link, Net, add
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.agreement import fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.files import read_plain
from jaxmpi.runtime import affinity, caches

BUDGET_S = seconds_from("JAXMPI_PROBE_S", 2)  # of a probe; what has begun when it is over is finished
FORMAT = 1
MOST_BYTES = 1 << 20  # of a saved probe; a few thousand are used
MOST = 1e9  # of whatever a saved probe counts or times; its least time is 1 / MOST
MOST_RANKS = 1 << 20  # of a saved probe
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)  # bytes; the first stays unless another gains MARGIN
MARGIN = 0.05
SHORT = 1 << 12  # floats a worker, of the shorter vector that strategies are timed with
LONGEST = 1 << 22  # floats of the longer one at most
LONG_SHARE = 0.04  # of the budget: predicted seconds of the longer vector at most
REPEATS = 3
HOPELESS = 1.5  # a prediction of so many times the best one's is not worth a measurement
TIE = 1.1  # two predictions of so little between them do not say which is faster
ENOUGH = 4  # strategies of a wire to measure
BASELINE = "asa:32"  # what others must beat by MARGIN


class Verdict(NamedTuple):
    """The choice of `auto`."""

    strategy: str  # in full: asa:32
    bucket_bytes: int | None
    overlap: bool  # whether exchanging beside the backward pass can pay: cores are free while messages travel
    why: str  # one line


class AutotuneRequest(NamedTuple):
    """The exchange to choose for, and the strategies that may be used."""

    sizes: tuple[int, ...]  # floats of every leaf
    wires: tuple[str, ...] = ("32",)
    among: tuple[str, ...] = ()  # algorithms; none: all

    def strategies(self, net: Net) -> list[str]:
        """Names of strategies that may be used, with wires, such as ring:16."""
        names = cost_model.candidates(net, self.wires)
        return [name for name in names if not self.among or name.partition(":")[0] in self.among]


class Probe(NamedTuple):
    """Measurements on a set of hosts."""

    net: Net
    seconds: dict[str, dict[int, float]]  # strategy in full -> floats -> seconds of the slowest rank; none: impossible
    classes: tuple[int, ...] = ()  # size classes whose most promising strategies were measured

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

    def knows(self, sizes: Sequence[int]) -> bool:
        """Return True if candidates for leaves of about this size were measured."""
        return size_class(sizes) in self.classes


def size_class(sizes: Sequence[int]) -> int:
    """Binary digits of the number of floats; each class has one choice."""
    return sum(int(n) for n in sizes).bit_length()


def is_auto(spelling: str) -> bool:
    """Return True if a strategy is `auto`, with or without a wire."""
    return isinstance(spelling, str) and spelling.partition(":")[0] == "auto"


def allowed_wires(spelling: str) -> tuple[str, ...]:
    """Wires that may be used: 32, and that of `auto:<wire>`.

    Raises:
        UsageError: an unknown wire.
    """
    wire = spelling.partition(":")[2] or "32"
    lookup(WIRES, wire, "wire")
    return tuple(dict.fromkeys(("32", wire)))


def choose(
    comm: Comm,
    sizes: Sequence[int],
    asked: str = "auto",
    bucket_bytes: int | None = BUCKETS[0],
    among: Sequence[str] = (),
    held: dict[MpiComm, Probe] | None = None,
) -> Verdict:
    """The fastest strategy for these sizes and workers, equal on all ranks.

    Args:
        comm: who exchanges.
        sizes: floats of every leaf.
        asked: `auto`, or `auto:<wire>` if that wire may travel, too.
        bucket_bytes: a size that stays, unless it is the default.
        among: algorithms to choose from, asa one of them; none given: all.
        held: probes of earlier calls of this process, by workers; used before saved ones, and updated.

    Communicates: a comparison of the arguments; the saved probe, or one of a few seconds. Uses saved ones of the same
    hosts, slots, cores and versions, unless JAXMPI_PROBE=fresh. Measures more for a size class that is new to them.

    Raises:
        UsageError: an unknown wire; ranks that ask for different things.
    """
    wires = allowed_wires(asked)
    if not isinstance(comm, MpiComm):
        reason = "one worker: nothing travels" if comm.size == 1 else "no MPI ranks, so nothing is probed"
        return Verdict(f"asa:{wires[-1]}", bucket_bytes, False, f"{asked}: asa:{wires[-1]}; {reason}")
    request = AutotuneRequest(tuple(int(n) for n in sizes), wires, tuple(among))
    comm.assert_same(
        fingerprint("auto", {"strategy": asked, "bucket_bytes": bucket_bytes, "floats": request.sizes, "among": among})
    )
    buckets = BUCKETS if bucket_bytes == BUCKETS[0] else (bucket_bytes,)
    begin = time.perf_counter()
    known = probe(comm, request, held.get(comm) if held else None)
    if held is not None:
        held[comm] = known
    took_s = time.perf_counter() - begin
    return Verdict(*from_rank_0(comm.processes, lambda: decide(known, request, asked, buckets, took_s)))


def probe(comm: MpiComm, request: AutotuneRequest, known: Probe | None = None) -> Probe:
    """The known or saved probe, completed; the same on all ranks.

    Communicates: it is a measurement of a few seconds, unless nothing is missing.
    """
    key = identity(comm)
    if known is None and (saved := from_rank_0(comm.processes, lambda: as_json(read(key)))):
        known = from_json(saved)
    return measured(comm, known, key, request)


def decide(probe: Probe, request: AutotuneRequest, asked: str, buckets: Sequence[int | None], took_s: float) -> Verdict:
    """The best of what was measured."""
    net, fits, sizes = probe.net, probe.fits(), request.sizes
    names = [name for name in request.strategies(net) if name in fits]
    seconds = {name: step_seconds(net, sizes, name, buckets[0], fits) for name in names}
    fastest, *others = sorted(seconds, key=seconds.__getitem__)
    first = fastest if seconds[fastest] < (1 - MARGIN) * seconds.get(BASELINE, math.inf) else BASELINE
    overlap = can_overlap(net, max(sizes, default=0), first)
    bucket_bytes = buckets[0] if overlap else best_bucket(net, sizes, first, buckets, fits)
    best_s = step_seconds(net, sizes, first, bucket_bytes, fits)
    why = (
        f"{asked}: {first}, {size_of(bucket_bytes, first)}: {best_s:.2g} s for {sum(sizes):,} floats in "
        f"{len(sizes)} leaves on {net.hosts} x {net.slots} ranks"
        + "".join(f"; {name} {seconds[name]:.2g} s" for name in [fastest, *others] if name != first)
        + f" (probe: {took_s:.1f} s)"
    )
    return Verdict(first, bucket_bytes, overlap, why)


def size_of(bucket_bytes: int | None, strategy: str) -> str:
    """Name of a bucket size, for messages."""
    if parse(strategy).spec.means:
        return "leaves as they are"
    return "one flat buffer" if bucket_bytes is None else f"buckets of {bucket_bytes / 2**20:g} MiB"


def best_bucket(
    net: Net, sizes: Sequence[int], strategy: str, buckets: Sequence[int | None], fits: cost_model.Fits
) -> int | None:
    """The first bucket size, unless another gives a clearly shorter exchange."""
    seconds = {size: step_seconds(net, sizes, strategy, size, fits) for size in buckets}
    best = min(buckets, key=seconds.__getitem__)
    return best if seconds[best] < (1 - MARGIN) * seconds[buckets[0]] else buckets[0]


def step_seconds(
    net: Net, sizes: Sequence[int], strategy: str, bucket_bytes: int | None, fits: cost_model.Fits | None = None
) -> float:
    """Predicted seconds of one exchange of these leaves, copies for fusing included."""
    if net.workers == 1:
        return 0.0
    if parse(strategy).spec.means:  # takes all leaves at once, where they are
        return net.call_s + cost_model.predict(net, sum(sizes), strategy, fits)
    limit = math.inf if bucket_bytes is None else bucket_bytes
    small = sum(n for n in sizes if 4 * n < limit)
    seconds = net.call_s + sum(cost_model.predict(net, n, strategy, fits) for n in sizes if 4 * n >= limit)
    if small:
        count = max(1, math.ceil(4 * small / limit))
        seconds += count * cost_model.predict(net, small / count, strategy, fits) + 2 * add(net, small)
    return seconds


def can_overlap(net: Net, n: float, strategy: str) -> bool:
    """Return True if a program can compute during an exchange.

    It is a sum of n floats. Either cores are to spare, or most of its time is spent waiting for other hosts.
    """
    whole = cost_model.predict(net, n, strategy)
    free = cost_model.predict(net._replace(between=Link(0.0, 0.0)), n, strategy)
    return net.cores >= 2 * net.slots or (net.hosts > 1 and free < whole / 2)


# ---------------------------------------------------------------- measuring


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
        known = known._replace(classes=(*known.classes, size_class(request.sizes)))
    if control.rank == 0 and (codecs or not is_known or sum(map(len, known.seconds.values())) > count):
        save(key, known)
    return known


def next_to_measure(probe: Probe, request: AutotuneRequest, time_is_up: bool) -> tuple[str, int] | None:
    """The next strategy and number of floats to time, or None.

    None if all that count are measured, or there is no time. All strategies at the length that says more about these
    leaves come first, then all at the other. The baseline and the first of every wire are measured in any case, and the
    second if it is predicted to take about as long.
    """
    names = request.strategies(probe.net)
    expected = {name: step_seconds(probe.net, request.sizes, name, BUCKETS[0]) for name in names}  # by the cost model
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

    If the leaves' size class is known, what is measured already goes before the rest. What could not be measured is
    left out.

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
    run = jax.jit(lambda x: sums([x], name, comm)[0])
    x = jax.block_until_ready(jnp.ones(n, jnp.float32))
    jax.block_until_ready(run(x))
    return statistics.median(slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS))


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
    some, more = seconds(size, 1), seconds(size, 3)  # what both begin with falls out
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
    run, x = jax.jit(lambda x: x + 1), jnp.ones(1, jnp.float32)
    jax.block_until_ready(run(x))
    return min(slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS))


def codec_seconds(comm: MpiComm, net: Net, wire: str) -> float:
    """Seconds a float to encode and decode, on a core."""
    if wire == "32":
        return 0.0
    run, x = comm.jit(lambda x: WIRES[wire].decode(WIRES[wire].encode(x))), jnp.ones(1 << 20, jnp.float32)
    jax.block_until_ready(run(x))
    return (
        min(slowest(comm.processes, lambda: jax.block_until_ready(run(x))) for _ in range(REPEATS)) / x.size / net.crowd
    )


def cores_of_a_host(comm: MpiComm) -> float:
    """Cores that a host's ranks may use, on the host with fewest."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = affinity.quota_cores(affinity.QUOTA, os.cpu_count() or 1)
    every = comm.processes.allgather_object([mine, quota])
    sets: dict[int, set[int]] = {}
    for host, (cores, _) in zip(comm.hosts, every, strict=True):
        sets.setdefault(host, set()).update(cores)
    return float(min(*map(len, sets.values()), *(limit for _, limit in every)))


def from_rank_0(control: MpiProcesses, make: Callable[[], Any]) -> Any:
    """A JSON value that rank 0 makes, on all ranks."""
    return control.bcast_object(make() if control.rank == 0 else None)


# ---------------------------------------------------------------- on disk


def identity(comm: MpiComm) -> dict[str, Any]:
    """Facts for which a probe holds: hosts, slots, cores, versions, backend."""
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


def file_of(key: Mapping[str, Any]) -> Path:
    """Path of the stored probe."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return caches.cache_folder("probes") / f"{digest[:16]}.json"


def as_json(probe: Probe | None) -> dict[str, Any] | None:
    """Convert to plain values."""
    if probe is None:
        return None
    return {"net": probe.net._asdict(), "seconds": probe.seconds, "classes": probe.classes}


def from_json(value: Any) -> Probe:
    """The inverse of `as_json`, with every number looked at.

    Raises:
        ValueError, TypeError, KeyError or AttributeError: it is none.
    """
    net = dict(value["net"])
    net["inside"], net["between"] = Link(*net["inside"]), Link(*net["between"])
    made = Net(**net)
    seconds = {
        parse(name).name: {int(n): float(s) for n, s in times.items()} for name, times in value["seconds"].items()
    }
    numbers = [*made.inside, *made.between, made.gamma_s_per_byte, made.call_s, *made.codec_s_per_float.values()]
    check(all(0 <= x <= MOST for x in numbers), "a price is negative or not finite")
    check(type(made.hosts) is int and type(made.slots) is int, "hosts or ranks are no whole numbers")
    check(made.hosts >= 1 and made.slots >= 1 and made.cores >= 1 / MOST, "no hosts, ranks or cores")
    check(made.hosts <= MOST_RANKS and made.workers <= MOST_RANKS, "too many hosts or ranks")
    times = [(n, s) for each in seconds.values() for n, s in each.items()]
    check(all(1 / MOST <= s <= MOST and 0 < n <= MOST for n, s in times), "a time is not > 0, or none of a vector")
    classes = value.get("classes", [])  # older probes have none
    check(all(type(digits) is int and 0 <= digits <= 64 for digits in classes), "a size class is no number of digits")
    return Probe(made, seconds, tuple(classes))


def check_hosts(hosts: Any) -> None:
    """Refuse what is no table of ranks by printable host name."""
    check(isinstance(hosts, dict), "no hosts")
    check(
        all(name.isprintable() and type(ranks) is int for name, ranks in hosts.items()), "a host has no name or ranks"
    )


# What reading can raise.
DAMAGED = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


def read(key: Mapping[str, Any]) -> Probe | None:
    """The saved probe; None if missing, damaged, or with JAXMPI_PROBE=fresh."""
    if os.environ.get("JAXMPI_PROBE") == "fresh":
        return None
    try:
        path = file_of(key)
        if not os.path.lexists(path):
            return None
        value = json.loads(read_plain(path, MOST_BYTES, "a probe"))
        check(value["format"] == FORMAT and value["key"] == key, "of another kind")
        return from_json(value)
    except DAMAGED as error:
        print(f"jaxmpi: the saved probe cannot be used ({error}); probing again", file=sys.stderr)
        return None


def newest() -> tuple[dict[str, Any], Probe] | None:
    """The last readable saved probe on this machine, with its `identity`."""
    folder = caches.cache_folder("probes")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            value = json.loads(read_plain(path, MOST_BYTES, "a probe"))
            check(value["format"] == FORMAT, "of another kind")
            check_hosts(value["key"]["hosts"])
            return value["key"], from_json(value)
        except DAMAGED:  # `read` says so if it matters
            continue
    return None


def save(key: Mapping[str, Any], probe: Probe) -> None:
    """Save a probe, whole or not at all; print why if not."""
    try:
        path = file_of(key)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps({"format": FORMAT, "key": key, **(as_json(probe) or {})}, indent=1) + "\n")
        aside.replace(path)
    except (OSError, RuntimeError, UsageError) as error:
        print(f"jaxmpi: the probe is not kept: {error}; set XDG_CACHE_HOME", file=sys.stderr)
