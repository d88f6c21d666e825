"""Limit on the number of ranks by this machine's memory."""

from collections.abc import Sequence

from jaxmpi.allreduce.working_memory import at_work
from jaxmpi.bench.options import PEERS
from jaxmpi.bench.plan import Case
from jaxmpi.core.shared_memory import available_bytes as free_bytes

BASE_BYTES, TORCH_BYTES = 450_000_000, 400_000_000  # bytes of a process without any case, and of torch in it
AT_WORK_PEERS = 1  # arrays as big as a case that a peer has beside its operands
Job = tuple[Sequence[str], Sequence[str]]  # strategies and peers of one job


def rank_bytes(floats: int, job: Job) -> int:
    """Bytes of a rank: its inputs, if used, and its working arrays."""
    strategies, peers = job
    kinds = [PEERS[name].op for name in peers]
    kept = (bool(strategies) or "mean" in kinds) + ("sum" in kinds) + any(PEERS[name].receives for name in peers)
    busiest = max([*map(at_work, strategies), *(AT_WORK_PEERS for _ in peers)], default=0)
    return BASE_BYTES + TORCH_BYTES * ("torch" in peers) + round((kept + busiest) * 4 * floats)


def need_bytes(case: Case, jobs: Sequence[Job], ranks: int) -> int:
    """Bytes of these ranks of each job.

    MPI's allreduce takes two more arrays a job with peers, for all ranks together.
    """
    each = sum(rank_bytes(case.floats, job) for job in jobs)
    return ranks * each + sum(2 * 4 * case.floats for _, peers in jobs if peers)


def fitting(case: Case, jobs: Sequence[Job], wanted: int) -> int:
    """Ranks of each job, at most `wanted`, that fit in free memory."""
    free = free_bytes()
    return next((ranks for ranks in range(wanted, 0, -1) if need_bytes(case, jobs, ranks) <= free), 0)


def left_out(case: Case, jobs: Sequence[Job], ranks: int) -> str:
    """A line on a case that does not fit in free memory."""
    many = f"{len(jobs)} x {ranks}" if len(jobs) > 1 else f"{ranks}"
    need_gb = need_bytes(case, jobs, ranks) / 1e9
    return f"{case.name}: left out: {many} ranks need {need_gb:.1f} GB, and {free_bytes() / 1e9:.1f} GB are free"
