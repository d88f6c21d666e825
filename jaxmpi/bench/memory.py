"""How many ranks this machine has memory for."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.bench.options import Case
from jaxmpi.bench.peers import PEERS

BASE_BYTES, TORCH_BYTES = 400 << 20, 400 << 20  # of a process, without any case


def rank_bytes(floats: int, peers: Sequence[str]) -> int:
    """Memory of a rank that measures a case, as measured: docs/exchange.md.

    Leaves, and three times as much while a strategy works; peers that take one flat array keep two of them.
    """
    flat = any(PEERS[name].op == "sum" for name in peers)
    return BASE_BYTES + TORCH_BYTES * ("torch" in peers) + (4 + 2 * flat) * 4 * floats


def fitting(case: Case, peers: Sequence[str], wanted: int, jobs: int) -> int:
    """The ranks of each job, up to those wanted, for which this machine has memory."""
    return min(wanted, free_bytes() // (jobs * rank_bytes(case.floats, peers)))


def left_out(case: Case, peers: Sequence[str], ranks: int) -> str:
    """A line on a case that memory does not hold."""
    need_gb = ranks * rank_bytes(case.floats, peers) / 1e9
    return f"{case.name}: left out: {ranks} ranks need {need_gb:.1f} GB, and {free_bytes() / 1e9:.1f} GB are free"


def free_bytes() -> int:
    """Memory that new processes may take: of this machine, or of its container where that is less."""
    machine = re.search(r"MemAvailable:\s+(\d+) kB", read(Path("/proc/meminfo")))
    limit, used = (read(Path(f"/sys/fs/cgroup/memory.{name}")).strip() for name in ("max", "current"))
    free = [1024 * int(machine[1])] if machine else []
    free += [int(limit) - int(used)] if limit.isdigit() and used.isdigit() else []
    return min(free, default=sys.maxsize)


def read(file: Path) -> str:
    """A file of the kernel's; nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
