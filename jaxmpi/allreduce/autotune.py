"""`auto`: the strategy that is fastest for a tree on these ranks, as timed.

Which sum is fastest depends on links, cores, MPI library and lengths in ways that no formula has caught: one predicted
0.31 s for what took 1.3 s. So on the first exchange of a tree the few strategies that fit exchange arrays of its
leaves' sizes, in turn, and all ranks take the one whose slowest rank was fastest. The choice is cached by hosts, ranks,
versions and size. A later run times only the cached strategy. If it takes much longer or shorter than it did, then
something has changed, and all are timed again. Times that vary, as while other processes compute, are not cached.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms import find, parse
from jaxmpi.allreduce.algorithms.table import PACKAGED_STRATEGIES, STRATEGIES
from jaxmpi.allreduce.buckets import assign_buckets, fuse, in_buckets, split
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.allreduce.measuring import BUDGET_S, from_rank_0, identity, slowest
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.agreement import fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.runtime import compile_cache

MOST = 4  # strategies to time
BUCKET_BYTES = 4 << 20  # by default
ON_ONE_HOST = "shm", "asa", "ring", "ar"
ON_SEVERAL = "asa", "ring", "hier-ring", "tree", "color4"
MARGIN = 0.05  # gain for which MPI's own sum is taken, whose bits another version of the library may not repeat
CHANGED = 1.5  # times slower or faster than cached: all are timed again
WARM = 3  # exchanges before timing: a program's first ones touch fresh memory, which can cost more than the sum
HOPELESS = 2.5  # times the fastest one's best warm exchange: a strategy is timed no further
ROUNDS = 3, 9  # at least and at most
STEADY = 1.5  # times its lower quartile: a longer median shows that other processes compute, and is not worth keeping
ARRAYS = 6  # as big as the tree, that timing needs at most


class AutotuneResult(NamedTuple):
    """The choice of `auto`."""

    strategy: str  # in full: asa:32
    overlap: bool  # True if exchanging concurrently with the backward pass can pay: cores are idle during an exchange
    why: str  # one line


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


def size_class(sizes: Sequence[int]) -> tuple[int, int]:
    """Binary digits of the numbers of floats and of leaves; each class has one choice."""
    return sum(map(int, sizes)).bit_length(), len(sizes).bit_length()


def choose(
    comm: Comm,
    sizes: Sequence[int],
    setting: str = "auto",
    bucket_bytes: int | None = BUCKET_BYTES,
    among: Sequence[str] = (),
) -> AutotuneResult:
    """The fastest strategy for these sizes and workers, equal on all ranks.

    Args:
        comm: who exchanges.
        sizes: floats of every leaf.
        setting: `auto`, or `auto:<wire>` if that wire may be used, too.
        bucket_bytes: small leaves are fused up to this many bytes.
        among: algorithms to choose from; none given: all.

    Communicates: a comparison of the arguments, and some exchanges of such a tree.

    Raises:
        UsageError: an unknown wire; ranks that ask for different things.
    """
    wires, sizes = allowed_wires(setting), [int(n) for n in sizes]
    if not isinstance(comm, MpiComm):
        reason = "one worker: nothing is sent" if comm.size == 1 else "no MPI ranks, so nothing is timed"
        return AutotuneResult(f"asa:{wires[-1]}", False, f"{setting}: asa:{wires[-1]}; {reason}")
    request = {"strategy": setting, "bucket_bytes": bucket_bytes, "floats": sizes, "among": [*among]}
    comm.assert_same(fingerprint("auto", request))
    begin, facts = time.perf_counter(), identity(comm)
    trials, names = Trials(comm, sizes, bucket_bytes), candidates(comm.hosts, wires, among)
    key = facts | request | {"floats": size_class(sizes)}
    seconds, provenance = trials.cached_seconds(key, names)
    if not seconds:
        seconds, is_steady = trials.time_all(names)
        provenance += f"timed in {time.perf_counter() - begin:.1f} s"
        if not is_steady:
            provenance += ", and not cached: times vary, as if other processes compute"
        elif comm.rank == 0:
            compile_cache.write_json("auto", key, {"seconds": seconds, "floats": sum(sizes)})
    name, slots = fastest(seconds), max(comm.hosts.count(host) for host in set(comm.hosts))
    pays = len(set(comm.hosts)) > 1 or facts["cores"] >= 2 * slots
    times = ", ".join(f"{each} {seconds[each]:.2g} s" for each in sorted(seconds, key=seconds.__getitem__))
    workload = f"{sum(sizes):,} floats in {len(sizes)} leaves on {len(set(comm.hosts))} x {slots} ranks"
    return AutotuneResult(name, pays, f"{setting}: {name} for {workload}: {times} ({provenance})")


def candidates(hosts: Sequence[int], wires: Sequence[str], among: Sequence[str] = ()) -> list[str]:
    """The strategies to time, in full, each with the shortest wire that may be used; the user's own rows first."""
    names: list[str] = []
    for key, row in STRATEGIES.items():
        if PACKAGED_STRATEGIES.get(key) is not row and row.seconds and row.exchanges:
            names += row.spelled or (key,)
    names += ON_ONE_HOST if len(set(hosts)) == 1 else ON_SEVERAL
    if among:
        names = [name for name in [*names, *among] if name in among]
    elif len(set(hosts)) == len(hosts):  # a hierarchy of hosts with one rank each is that between hosts
        names = [name for name in names if name != "hier-ring"]
    names_with_wires = []
    for name in dict.fromkeys(names):
        able = [wire for wire in wires if wire in find(name).wires]
        if able and find(name).fits(hosts):
            names_with_wires.append(f"{name}:{able[-1]}")
    return names_with_wires[:MOST]


def fastest(seconds: dict[str, float]) -> str:
    """The strategy of the least time; MPI's own only for a clear gain."""
    packaged = {name: s for name, s in seconds.items() if name != "ar:32"} or seconds
    best = min(packaged, key=packaged.__getitem__)
    return best if seconds.get("ar:32", math.inf) > (1 - MARGIN) * seconds[best] else "ar:32"


# ---------------------------------------------------------------- timing


class Trials:
    """Exchanges of a tree of these sizes, timed on all ranks together."""

    def __init__(self, comm: MpiComm, sizes: Sequence[int], bucket_bytes: int | None) -> None:
        """Make the tree, a smaller one if memory is short."""
        self.comm, self.control, self.bucket_bytes, self.floats = comm, comm.processes, bucket_bytes, sum(sizes)
        slots = max(comm.hosts.count(host) for host in comm.hosts)
        room = min(self.control.allgather_object(available_bytes())) / (ARRAYS * slots)
        scale = min(1.0, room / (4 * self.floats or 1))
        self.leaves = [jnp.ones(max(1, int(n * scale)), jnp.float32) for n in sizes]
        self.scale = 1 / scale
        self.programs: dict[str, Callable[[list[jax.Array]], list[jax.Array]]] = {}

    def seconds(self, name: str) -> float:
        """Seconds of the slowest rank for one exchange; the first call compiles as well."""
        if name not in self.programs:
            buckets = assign_buckets(
                [leaf.size for leaf in self.leaves], 0 if parse(name).spec.means else self.bucket_bytes
            )
            means = lambda vectors: sums(vectors, name, self.comm, self.comm.size)  # noqa: E731
            parts = lambda vector, bucket: split(vector, [self.leaves[i] for i in bucket])  # noqa: E731
            self.programs[name] = jax.jit(in_buckets(buckets, fuse, means, parts))
        return self.scale * slowest(self.control, lambda: jax.block_until_ready(self.programs[name](self.leaves)))

    def warm(self, name: str) -> float:
        """Compile, and exchange until memory is warm; the least seconds of an exchange."""
        self.seconds(name)
        return min(self.seconds(name) for _ in range(WARM))

    def cached_seconds(self, key: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, float], str]:
        """The cached seconds by strategy, if the fastest still takes as long; and what to say of them."""
        # Rank 0's cache counts: hosts may have homes of their own.
        stored = from_rank_0(self.control, lambda: compile_cache.read_json("auto", key, read))
        if not stored or (name := fastest(stored["seconds"])) not in names:
            return {}, ""
        cached_s, growth = stored["seconds"][name], self.floats / stored["floats"]  # trees of a class differ in size
        try:
            now_s = self.warm(name)
        except UsageError:  # on all ranks alike: no room for shared memory, as in a small container
            return {}, f"{name} cannot be used now; "
        if cached_s * min(1, growth) / CHANGED <= now_s <= cached_s * max(1, growth) * CHANGED:
            return stored["seconds"], "cached"
        return {}, f"{name} took {cached_s:.2g} s when it was cached and takes {now_s:.2g} s; "

    def time_all(self, names: Sequence[str]) -> tuple[dict[str, float], bool]:
        """Seconds of each strategy by turns; whether those of the fastest are steady. What cannot be used is left out.

        Other processes lengthen most exchanges while they compute, some sixfold. By medians the fastest sum has then
        been passed over for one that takes twice as long, so the lower quartile counts.
        """
        seconds: dict[str, float] = {}
        for name in names:
            with suppress(UsageError):  # as in `cached_seconds`
                seconds[name] = self.warm(name)
        hopeful = [name for name in seconds if seconds[name] <= HOPELESS * min(seconds.values())]
        rounds, begin = list[dict[str, float]](), time.perf_counter()
        is_over = lambda: time.perf_counter() - begin > BUDGET_S  # noqa: E731
        while len(rounds) < (ROUNDS[1] if len(hopeful) > 1 else 1):
            rounds.append({name: self.seconds(name) for name in hopeful})
            if len(rounds) >= ROUNDS[0] and from_rank_0(self.control, is_over):
                break
        for name in hopeful:
            seconds[name] = sorted(each[name] for each in rounds)[len(rounds) // 4]
        least_s = min((seconds[name] for name in hopeful), default=0.0)
        for name in seconds.keys() - set(hopeful):  # that much slower when both were timed, whatever came later
            seconds[name] = max(seconds[name], HOPELESS * least_s)
        best = fastest(seconds)
        return seconds, statistics.median(each[best] for each in rounds) <= STEADY * seconds[best]


def read(value: Any) -> dict[str, Any]:
    """A cached choice; raises whatever Python does if it is none."""
    seconds = {str(name): float(s) for name, s in value["seconds"].items()}
    if not min(seconds.values()) > 0:
        raise ValueError
    return {"seconds": seconds, "floats": max(1, int(value["floats"]))}
