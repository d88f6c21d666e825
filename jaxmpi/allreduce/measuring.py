"""A clock for all ranks together, and what tells one set of ranks from another; for `autotune` and `probes`."""

import importlib.metadata
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.env import seconds_from
from jaxmpi.runtime import process

BUDGET_S = seconds_from("JAXMPI_PROBE_S", 2)  # seconds in which candidates are timed by turns, about


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
    quota = process.quota_cores()
    every = comm.processes.allgather_object([mine, quota])
    sets: dict[int, set[int]] = {}
    for host, (cores, _) in zip(comm.hosts, every, strict=True):
        sets.setdefault(host, set()).update(cores)
    return float(min(*map(len, sets.values()), *(limit for _, limit in every)))


def slowest(control: Processes, work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank needs, all beginning together."""
    control.barrier()
    begin = time.perf_counter()
    work()
    return max(control.allgather_object(time.perf_counter() - begin))


def from_rank_0(control: MpiProcesses, make: Callable[[], Any]) -> Any:
    """A JSON value that rank 0 makes, on all ranks."""
    return control.bcast_object(make() if control.rank == 0 else None)
