"""Room for a part of the data in memory: needed, left, refused.

The parts of a host's processes share its memory. So each process counts what it needs and what its machine has left
(`room`). If several open their data, what they counted is added by host, and all of them refuse together. A group of
workers holds one full copy. In a larger group the part of each worker is smaller, and more of it moves in a shuffle.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.shared_memory import available_bytes

CHUNK_BYTES = 64 << 20  # bytes of a chunk of records as read; while it is copied, it is in memory twice
SHARE = 0.5  # share of the free memory that `auto` gives to records; the rest is the run's, and held-out examples'
NO_GROUP = "data.group_size: got {size} with {workers}; expected one of {fits}"


class NoRoom(UsageError):
    """Too little memory for parts of the data, on all ranks alike."""


def room(part_bytes: float, held_bytes: float, copies: float = 1) -> np.ndarray:
    """f64[2]: bytes that a process still needs, and its machine's free bytes.

    `copies` of the part are counted, 2 if a shuffle makes another one, and with each a chunk, as measured.
    """
    need_bytes = copies * (part_bytes + min(part_bytes, CHUNK_BYTES)) - held_bytes
    return np.array([need_bytes, available_bytes()], np.float64)


def check_room(rows: np.ndarray, hosts: Sequence[int]) -> None:
    """Refuse parts that together need more memory than their host has left.

    The system would grant the memory, and kill the process that uses it.

    Args:
        rows: f64[ranks, 2], the `room` of each.
        hosts: of each.

    Raises:
        NoRoom: of which rank's machine.
    """
    for here, need_bytes, left_bytes in _by_host(rows, hosts):
        whose = f"by {len(here)} rank{'s' * (len(here) > 1)} on rank {here[0]}'s machine"
        _check_left(need_bytes, left_bytes, whose)


def check_alone(part_bytes: float, held_bytes: float = 0) -> None:
    """Refuse this process's part if it alone exceeds the memory left."""
    need_bytes, left_bytes = room(part_bytes, held_bytes).tolist()
    _check_left(need_bytes, left_bytes, "on this machine")


def _by_host(rows: np.ndarray, hosts: Sequence[int]) -> Iterator[tuple[list[int], float, float]]:
    """Each host's ranks, the bytes they need together, and its bytes left."""
    for host in sorted(set(hosts)):
        here = [rank for rank, its in enumerate(hosts) if its == host]
        yield here, float(rows[here, 0].sum()), float(rows[here, 1].min())


def _check_left(need_bytes: float, left_bytes: float, whose: str) -> None:
    if need_bytes > left_bytes:
        raise NoRoom(
            f"data.memory: {need_bytes / 1e9:,.1f} GB more are needed {whose}, which has {left_bytes / 1e9:,.1f} GB "
            "left; take more workers on other hosts, a larger data.group_size, smaller images, or data.memory none"
        )


def _group_sizes(workers: int, each: int) -> list[int]:
    """Sizes of groups that split `workers`, but no process of `each`; ascending."""
    return [d for d in range(1, workers + 1) if workers % d == 0 and (d % each == 0 or each % d == 0)]


def smallest_group(total_bytes: float, copies: float, left: np.ndarray, hosts: Sequence[int], each: int = 1) -> int:
    """The smallest group whose parts fit into SHARE of each host's free memory; all workers if none does.

    The smaller a group, the less moves.

    Args:
        total_bytes: of all records.
        copies: of a part, if its records move.
        left: f64[ranks], bytes that the host of each has left.
        hosts: of each rank.
        each: workers of a rank.
    """
    sizes = _group_sizes(len(hosts) * each, each)
    for size in sizes:
        parts = max(size // each, 1)
        need_bytes = room(total_bytes / parts, 0, copies if parts > 1 else 1)[0]
        rows = np.stack([np.full(len(left), need_bytes), left], axis=1)
        if all(need <= SHARE * its for _, need, its in _by_host(rows, hosts)):
            return size
    return sizes[-1]


def check_group(group: int, workers: int, each: int = 1) -> int:
    """Check and return a group's size; 0 stands for all workers. Processes of `each` workers are not split."""
    size, fits = group or workers, _group_sizes(workers, each)
    what = f"{workers} workers" + f", {each} a process" * (each > 1)
    check(size in fits, NO_GROUP.format(size=size, workers=what, fits=", ".join(map(str, fits))))
    return size
