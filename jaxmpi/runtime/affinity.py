"""The machine's cores, and the share that a process is bound to."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Number of cores that affinity and a container's quota allow this process."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(mine, quota_cores(QUOTA, mine))


def quota_cores(file: Path, default: int) -> int:
    """Whole cores, at least 1, of a control group's quota; else `default`."""
    try:
        quota, period = file.read_text().split()
        return default if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such control group, or not its format: no quota
        return default


def pin_cores(local_rank: int, local_size: int) -> None:
    """Bind this rank to its share of the host's cores.

    A rank that was given a part of the cores keeps that part. If neither number divides the other, the rank keeps all
    cores. XLA sizes its thread pool by the cores a process may use when its device starts.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == (os.cpu_count() or 1) and local_rank < local_size:
        bind_to_share(mine, local_rank, local_size)


def divide_mask(masks: Sequence[Sequence[int]], local_rank: int) -> None:
    """Take a share of cores that several ranks have, as in containers."""
    mine = masks[local_rank]
    alike = [rank for rank, mask in enumerate(masks) if mask == mine]
    if mine and len(alike) > 1:
        bind_to_share(mine, alike.index(local_rank), len(alike))


def core_mask() -> list[int]:
    """The cores that this process may use; none if they are unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def idle_cores(mine: int, all_cores: int, local_size: int) -> str:
    """Advice if ranks of one core each leave cores idle; else empty.

    Open MPI binds ranks to one core each if it starts one or two of them on a host.
    """
    if mine != 1 or all_cores <= local_size:
        return ""
    return (
        f"each rank may use 1 of the {all_cores} cores of its host, which has {local_size} of the ranks; if the "
        "launcher has bound them: mpirun --bind-to none, or srun --cpus-per-task"
    )


_given: set[int] = set()  # cores that this process had before it took its share


def bind_to_share(mine: Sequence[int], local_rank: int, local_size: int) -> None:
    """The cores of one of `local_size` ranks, if they divide."""
    _given.update(mine)
    if len(mine) % local_size == 0:
        share = len(mine) // local_size
        os.sched_setaffinity(0, mine[local_rank * share : (local_rank + 1) * share])
    elif local_size % len(mine) == 0:
        os.sched_setaffinity(0, {mine[local_rank % len(mine)]})


def unbind() -> None:
    """Undo a share of one core: threads may use all cores again.

    For ranks that do not keep step. A rank of its own pace on a core is not slowed by ranks on another core. So ranks
    that share a core with more ranks, or with a server, would have less of the machine.
    """
    if not _given or len(os.sched_getaffinity(0)) > 1:
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), _given)
