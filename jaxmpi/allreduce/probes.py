"""A probe for `jaxmpi plan`: prices on a set of hosts, and its file.

It holds link prices, and the seconds of strategies by length of the vector. Factors between these seconds and the cost
model's correct the model for other lengths and numbers of hosts. A strategy that was not measured gets the median
factors, else it would look better than all that were.
"""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmpi.allreduce import cost_model, measuring
from jaxmpi.allreduce.autotune import candidates
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.measuring import from_rank_0
from jaxmpi.allreduce.prices import Link, Net
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError, check
from jaxmpi.runtime import caches

FORMAT = 2


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
    control, key = comm.processes, measuring.identity(comm)
    cached = from_rank_0(control, lambda: as_json(read(key)))
    known = from_json(cached) if cached else Probe(measuring.measure_net(comm), {})
    prices, seconds = dict(known.net.codec_s_per_float), dict(known.seconds)
    new_wires = [wire for wire in wires if wire not in prices]
    if not new_wires:
        return known
    for wire in new_wires:
        prices[wire] = measuring.codec_seconds(comm, known.net, wire)
    net = known.net._replace(codec_s_per_float=prices)
    for wire in new_wires:
        for name in candidates(comm.hosts, [wire]):
            if name in cost_model.candidates(net, [wire]) and name not in seconds:
                try:
                    lengths = from_rank_0(control, lambda name=name: measuring.lengths_for(net, name))
                    seconds[name] = {n: measuring.time_strategy(comm, name, n) for n in lengths}
                except UsageError:  # on all ranks alike: no room for shared memory, as in a small container
                    continue
    known = Probe(net, seconds)
    if control.rank == 0:
        save(key, known)
    return known


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
        value = json.loads(caches.json_file("probes", key).read_text())
        check(value["format"] == FORMAT and value["key"] == key, "of another kind")
        return from_json(value)
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        print(f"jaxmpi: the saved probe cannot be used ({error}); probing again", file=sys.stderr)
        return None


def newest() -> tuple[dict[str, Any], Probe] | None:
    """The last readable saved probe on this machine, with its `identity`."""
    folder = caches.cache_folder("probes")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            value = json.loads(path.read_text())
            check(value["format"] == FORMAT, "of another kind")
            return value["key"], from_json(value)
        except DAMAGED:  # `read` says so if it matters
            continue
    return None


def save(key: Mapping[str, Any], probe: Probe) -> None:
    """Cache a probe."""
    caches.write_json("probes", key, {"format": FORMAT, "net": probe.net._asdict(), "seconds": probe.seconds})
