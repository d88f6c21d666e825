"""A strategy's sums of vectors, all at once or one after another."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxmpi.allreduce import comm_thread
from jaxmpi.allreduce.algorithms import Strategy, parse
from jaxmpi.allreduce.building_blocks import pad
from jaxmpi.allreduce.host_engine import all_reduce_in_program, is_far
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core.errors import check

SHORT_BYTES = 1 << 20  # 8 ms at 1 Gbit/s; two changes of threads take up to 2 ms, and are hidden by longer ones
MPI_COUNTS = 2**31  # number below which MPI's counts stay


class OnCommThread(NamedTuple):
    """An exchange by the communication thread, beside its program."""

    labels: tuple[str, ...]  # of its buckets, for messages
    portable: bool  # this and `number` as of `all_reduce_on_comm_thread`
    number: int | None = None


def sums(
    vectors: Sequence[jax.Array], name: str, comm: Comm, divisor: float = 1, on_comm_thread: OnCommThread | None = None
) -> list[jax.Array]:
    """Sums over workers of f32 arrays of any shape, divided by `divisor`.

    Args:
        name: a strategy in full, such as asa:32.
        on_comm_thread: how, if the communication thread is to make them.

    Raises:
        UsageError: an array has more floats than one MPI message may.
    """
    strategy, flat = parse(name), [x.reshape(-1) for x in vectors]
    if strategy.spec.means:
        return strategy.spec.means(list(vectors), comm, divisor)
    if on_comm_thread:
        totals = comm_thread.all_reduce_on_comm_thread(flat, name, comm, **on_comm_thread._asdict())
    else:
        totals = try_host_all_reduce(flat, name, comm)
    if totals is None:
        check_counts(flat, name, comm)
        totals = [sum_bucket(x, strategy, comm) for x in flat]
    return [(total / divisor).reshape(x.shape) for x, total in zip(vectors, totals, strict=True)]


def try_host_all_reduce(vectors: Sequence[jax.Array], name: str, comm: Comm, half: str = "") -> list[jax.Array] | None:
    """Sums between processes, or halves of them, with many messages under way.

    On one host, and short ones between hosts, C makes them in the thread of the program: to hand them to another thread
    takes longer than such a sum. Long ones between hosts are the communication thread's, which has all buckets under
    way at once. If that thread cannot make them, they are C's whatever their length. None if neither can.
    """
    has_thread = is_far(comm) and comm is world() and not comm_thread.unavailable_reason(name, comm)
    if not has_thread or 4 * sum(x.size for x in vectors) <= SHORT_BYTES:
        if totals := all_reduce_in_program(vectors, name, comm, half):
            return totals
    if not has_thread:
        return None
    return comm_thread.all_reduce_on_comm_thread(vectors, name, comm, half)


def sum_bucket(flat: jax.Array, strategy: Strategy, comm: Comm) -> jax.Array:
    """Sum f32[n] by the strategy, padded to a multiple of the workers."""
    if comm.size == 1:
        return flat
    return strategy.spec.sum(pad(flat, comm.size), comm, strategy.wire)[: flat.size]


def check_counts(vectors: Sequence[jax.Array], name: str, comm: Comm) -> None:
    """Refuse what MPI, whose counts are C's int, cannot send at once."""
    longest = max((x.size for x in vectors), default=0)
    check(
        not isinstance(comm, MpiComm) or longest < MPI_COUNTS,
        f"strategy {name}: got a bucket of {longest:,} floats; expected fewer than 2^31 ({MPI_COUNTS:,}), to which MPI "
        "counts: lower bucket_bytes if leaves are fused, cut a longer leaf up, or use asa, ring or, on one host, shm",
    )
