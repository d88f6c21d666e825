"""A probe: measurements on a set of hosts, and its file.

`auto` needs to know how fast messages and strategies are here, and measuring takes seconds. So a probe is kept in a
file, named by a hash of hosts, ranks, cores, device and versions. It holds link prices, and the seconds of strategies
by length of the vector. Factors between these seconds and the cost model's correct the model for other lengths. A
strategy that was not measured gets the median factors, else it would look better than all that were. The file may be
damaged or forged, so every number is checked. A probe that cannot be read is measured again.
"""

import hashlib
import importlib.metadata
import json
import os
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxmpi.allreduce import cost_model
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.prices import Link, Net
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import read_plain
from jaxmpi.runtime import affinity, caches

FORMAT = 1
MOST_BYTES = 1 << 20  # bytes of a saved probe at most; a few thousand are used
MOST = 1e9  # largest count or time in a saved probe; its least time is 1 / MOST
MOST_RANKS = 1 << 20  # hosts or ranks of a saved probe at most


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


def cores_of_a_host(comm: MpiComm) -> float:
    """Cores that a host's ranks may use, on the host with fewest."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = affinity.quota_cores(affinity.QUOTA, os.cpu_count() or 1)
    every = comm.processes.allgather_object([mine, quota])
    sets: dict[int, set[int]] = {}
    for host, (cores, _) in zip(comm.hosts, every, strict=True):
        sets.setdefault(host, set()).update(cores)
    return float(min(*map(len, sets.values()), *(limit for _, limit in every)))


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


# Errors that reading can raise.
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
