"""The interface of communicators inside jit, which is that of a single worker itself.

Strategies are written against `Comm` alone, so the same sum runs over MPI (`mpi`), along an axis of `vmap` or
`shard_map` (`axis`), over groups of ranks, and in one worker, for which every collective is the identity.
"""

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.process import my_rank

Pairs = Sequence[tuple[int, int]]  # (source, destination), static
Turn = Callable[[jax.Array, PyTree], PyTree]  # turn of a loop: (number of the turn, carry) -> carry


class Comm:
    """Collectives over `size` workers. A strategy sees nothing else of the world.

    All workers call the same collectives in the same order. These are one worker's; a communicator of several has its
    own `allreduce`, `alltoall`, `allgather`, `permute` and `assert_same`, from which the rest follows.
    """

    size: int = 1  # number of workers
    rank: int | jax.Array = 0  # this worker's, in [0, size); possibly traced, so no Python branch may depend on it
    order: tuple[int, ...] = (0,)  # ranks by host, then local rank: neighbours in a ring
    hosts: tuple[int, ...] = (0,)  # the host of every rank, numbered in order of first appearance

    def allreduce(self, x: jax.Array) -> jax.Array:
        """Sum over workers; f32 in, f32 out."""
        return x

    def alltoall(self, x: PyTree) -> PyTree:
        """Exchange rows of leaves [size, ...], row i with worker i."""
        return x

    def allgather(self, x: PyTree) -> PyTree:
        """Leaves [...] to [size, ...], row j from worker j."""
        return jax.tree.map(lambda leaf: leaf[None], x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """Send along static pairs; a worker that receives nothing gets zeros."""
        return x if (0, 0) in tuple(pairs) else jax.tree.map(jnp.zeros_like, x)

    def assert_same(self, mine: Fingerprint) -> None:
        """Refuse fingerprints that differ between ranks; all ranks must call it."""

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """f32[size m] -> f32[m]: the sum over workers of chunk `rank`, added in rank order."""
        return add_rows(self.alltoall(x.reshape(self.size, -1)))

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1, half: str = "") -> list[jax.Array]:
        """Sum f32 arrays over one host's workers in rank order, then divide.

        Args:
            half: of the sum alone. scatter: f32[size m] -> f32[m], this worker's chunk of the sum, bit for bit.
                gather: f32[m] -> f32[size m], the chunks of all workers.

        Raises:
            UsageError: there are several hosts.
        """
        check_one_host(self.hosts)
        if half == "gather":
            return [self.allgather(x).reshape(-1) for x in vectors]
        rows = self.alltoall([x.reshape(self.size, -1) for x in vectors]) if half else self.allgather(list(vectors))
        return [add_rows(x) / divisor for x in rows]

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop` from 0 over turns that communicate."""
        return lax.fori_loop(0, turns, turn, carry)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` of a program that does not communicate, compiled once a host."""
        return jax.jit(function, donate_argnums=donate_argnums)


def add_rows(rows: jax.Array) -> jax.Array:
    """Sum f32[w, n] over its first axis, row after row.

    XLA:CPU walks `rows.sum(0)` column by column, a hundred times slower.
    """
    return lax.scan(lambda total, row: (total + row, None), rows[0], rows[1:], unroll=8)[0]


def check_one_host(hosts: Sequence[int]) -> None:
    """Refuse what only the workers of one host can do."""
    if (count := len(set(hosts))) > 1:
        raise UsageError(
            f"strategy shm sums in the memory of one host; got workers on {count} hosts: use hier-ring or asa"
        )


def ring_order(hosts: Sequence[int]) -> tuple[int, ...]:
    """Ranks by host, then rank, so that rings leave each host once."""
    return tuple(sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank)))


class SoloComm(Comm):
    """One worker: every collective is the identity. Needs no MPI."""

    def split(self, color: SupportsIndex | str | None, key: int = 0) -> "SoloComm | NullComm":
        """The one worker again, or `NullComm` if its color is None."""
        del key
        return NullComm() if parse_color(color) is None else self

    def free(self) -> None:
        """Nothing: one worker has nothing to free."""


# ---------------------------------------------------------------- ranks without a part


class NullComm:
    """The communicator of a rank that took no part in a split (MPI_COMM_NULL).

    It is false, has size 0, and every call refuses it. None would be the world.
    """

    size = 0

    def __bool__(self) -> Literal[False]:
        """False: `if part:` is true on the ranks that take part."""
        return False


def check_member(comm: Any) -> None:
    """Refuse a communicator, also mpi4py's, in which this rank has no part."""
    if comm is not None and not comm:
        # mpi4py's are equal once they are null: one that `Free` has left, and what `Split` gives for UNDEFINED.
        of_whom = ", as of split(None)" if isinstance(comm, NullComm) else ", or that was freed (MPI.COMM_NULL)"
        raise UsageError(
            f"comm: rank {my_rank()}: got a communicator in which this rank has no part{of_whom}; expected the call on "
            "the ranks that have one: if part: ..."
        )
    if getattr(comm, "is_freed", False):
        raise UsageError(f"comm: rank {my_rank()}: got a communicator that was freed; expected one before its free()")


def parse_color(color: Any) -> int | str | None:
    """Convert a color of `split` to an int, "host" or None; `UsageError` if it is none of these."""
    parsed = color
    with contextlib.suppress(TypeError):
        parsed = operator.index(color)
    if parsed is None or (isinstance(parsed, str) and parsed == "host") or (isinstance(parsed, int) and parsed >= 0):
        return parsed
    raise UsageError(
        f"split: color: rank {my_rank()}: got {color!r}; expected a number from 0 on, 'host', or None to take no part"
    )
