"""The protocol of communicators inside jit, and a single worker's communicator.

Strategies are written against `Comm` alone: its collectives, rank, size, and which host each worker is on. So the same
sum runs over MPI (`mpi`) and along an axis of `vmap` or `shard_map` (`axis`). It also runs among ranks that may die
(`mpi_fault_tolerant`), and in one worker, for which all is the identity.
"""

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.process import my_rank

Pairs = Sequence[tuple[int, int]]  # (source, destination), static
Turn = Callable[[jax.Array, PyTree], PyTree]  # turn of a loop: (number of the turn, carry) -> carry


class Comm(Protocol):
    """Collectives over `size` workers. A strategy sees nothing else of the world.

    `rank` may be a traced value, so no Python branch may depend on it. All workers call the same
    collectives in the same order.
    """

    @property
    def size(self) -> int:
        """Number of workers."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks by host, then local rank: neighbours in a ring."""
        ...

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of every rank, numbered in order of first appearance."""
        ...

    @property
    def rank(self) -> int | jax.Array:
        """This worker's number, in [0, size)."""
        ...

    def allreduce(self, x: jax.Array) -> jax.Array:
        """Sum over workers; f32 in, f32 out."""
        ...

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """f32[size m] -> f32[m]: the sum over workers of slice `rank`."""
        ...

    def alltoall(self, x: PyTree) -> PyTree:
        """Exchange rows of leaves [size, ...], row i with worker i."""
        ...

    def allgather(self, x: PyTree) -> PyTree:
        """Leaves [...] to [size, ...], row j from worker j."""
        ...

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """Send along static pairs; a worker that receives nothing gets zeros."""
        ...

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """The value of worker `root`."""
        ...

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop` from 0 over turns that communicate."""
        ...

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Sum f32 arrays over one host's workers in rank order, then divide.

        Raises:
            UsageError: there are several hosts.
        """
        ...

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """f32[size m] -> f32[m]: this worker's slice of `sum_on_host`, bit for bit."""
        ...

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """f32[m] -> f32[size m] each: the slices of one host's workers."""
        ...

    def assert_same(self, mine: Fingerprint) -> None:
        """Refuse fingerprints that differ between ranks; all ranks must call it."""
        ...

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` of a program that does not communicate, compiled once a host."""
        ...


class NullComm:
    """The communicator of a rank that took no part in a split.

    It is false, has size 0, and every call refuses it. None would be the world.
    """

    size = 0

    def __bool__(self) -> Literal[False]:
        """False: `if part:` is true on the ranks that take part."""
        return False


def check_member(comm: Any) -> None:
    """Refuse a communicator, also mpi4py's, in which this rank has no part."""
    check(
        comm is None or bool(comm),
        f"comm: rank {my_rank()}: got a communicator in which this rank has no part, as of "
        "split(None); expected the call on the ranks that have one: if part: ...",
    )
    check(
        not getattr(comm, "is_freed", False),
        f"comm: rank {my_rank()}: got a communicator that was freed; expected one before its free()",
    )


def color_of(color: Any) -> int | str | None:
    """Convert a color of `split` to an int, "host" or None.

    Raises:
        UsageError: it is none of these.
    """
    found = color
    if not (color is None or isinstance(color, str)):
        with contextlib.suppress(TypeError):
            found = operator.index(color)
    check(
        found is None or found == "host" or (isinstance(found, int) and found >= 0),
        f"split: color: rank {my_rank()}: got {color!r}; expected a number from 0 on, 'host', or None to take no part",
    )
    return found


class SoloComm:
    """One worker: every collective is the identity. Needs no MPI."""

    size = 1
    rank = 0
    order = (0,)
    hosts = (0,)

    def split(self, color: SupportsIndex | str | None, key: int = 0) -> "SoloComm | NullComm":
        """The one worker again, or `NullComm` if it takes none."""
        del key
        return NullComm() if color_of(color) is None else self

    def free(self) -> None:
        """Nothing: one worker has nothing to free."""

    def allreduce(self, x: jax.Array) -> jax.Array:
        return x

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        return x

    def alltoall(self, x: PyTree) -> PyTree:
        return x

    def allgather(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[None], x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        return x if (0, 0) in tuple(pairs) else jax.tree.map(jnp.zeros_like, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return x

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        return lax.fori_loop(0, turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        return [vector / divisor for vector in vectors]

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        return self.sum_on_host(vectors, divisor)

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        return [*vectors]

    def assert_same(self, mine: Fingerprint) -> None:
        """One rank agrees with itself."""

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        return jax.jit(function, donate_argnums=donate_argnums)


ONE_HOST = "strategy shm sums in the memory of one host; got workers on {hosts} hosts: use hier-ring or asa"


def check_one_host(hosts: Sequence[int]) -> None:
    """Refuse what only the workers of one host can do."""
    check(len(set(hosts)) == 1, ONE_HOST.format(hosts=len(set(hosts))))


def ring_order(hosts: Sequence[int]) -> tuple[int, ...]:
    """Ranks by host, then rank, so that rings leave each host once."""
    return tuple(sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank)))
