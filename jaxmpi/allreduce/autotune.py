"""`auto`: the fastest strategy by a probe of a few seconds.

Messages are timed first, inside hosts and between them. With what they cost, `cost_model` puts all strategies in order;
the first few are then timed for real, and the fastest of those is taken: the model proposes, the measurement decides.
`measuring` has those measurements. `probes` keeps them for each set of hosts.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxmpi.allreduce import cost_model, probes
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.measuring import BASELINE, BUCKETS, AutotuneRequest, from_rank_0, measured
from jaxmpi.allreduce.prices import Net
from jaxmpi.allreduce.probes import Probe
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.agreement import fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import lookup

MARGIN = 0.05  # a smaller gain changes nothing


class Verdict(NamedTuple):
    """The choice of `auto`."""

    strategy: str  # in full: asa:32
    bucket_bytes: int | None
    overlap: bool  # True if exchanging beside the backward pass can pay: cores are free while messages travel
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
    key = probes.identity(comm)
    if known is None and (saved := from_rank_0(comm.processes, lambda: probes.as_json(probes.read(key)))):
        known = probes.from_json(saved)
    return measured(comm, known, key, request)


def decide(probe: Probe, request: AutotuneRequest, asked: str, buckets: Sequence[int | None], took_s: float) -> Verdict:
    """The best of what was measured."""
    net, fits, sizes = probe.net, probe.fits(), request.sizes
    names = [name for name in request.strategies(net) if name in fits]
    seconds = {name: cost_model.step_seconds(net, sizes, name, buckets[0], fits) for name in names}
    fastest, *others = sorted(seconds, key=seconds.__getitem__)
    first = fastest if seconds[fastest] < (1 - MARGIN) * seconds.get(BASELINE, math.inf) else BASELINE
    overlap = cost_model.can_overlap(net, max(sizes, default=0), first)
    bucket_bytes = buckets[0] if overlap else best_bucket(net, sizes, first, buckets, fits)
    best_s = cost_model.step_seconds(net, sizes, first, bucket_bytes, fits)
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
    seconds = {size: cost_model.step_seconds(net, sizes, strategy, size, fits) for size in buckets}
    best = min(buckets, key=seconds.__getitem__)
    return best if seconds[best] < (1 - MARGIN) * seconds[buckets[0]] else buckets[0]
