"""The protocol of a communicator inside jit, and the one of a single worker.

Strategies are written against `Comm` alone: its collectives, rank, size, and which host each worker is on. So the same
sum runs over MPI (`mpi`), along an axis of `vmap` or `shard_map` (`axis`), among ranks that may die
(`mpi_fault_tolerant`), or in one worker, for which all is the identity.
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
from jaxmpi.runtime.launchers import my_rank

Pairs = Sequence[tuple[int, int]]  # (source, destination), static
Turn = Callable[[jax.Array, PyTree], PyTree]  # of a loop: number of the turn, carry -> carry


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
        """Leaves [size, ...]: row i goes to worker i, row j of the result came from worker j."""
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
        """Sums of f32 arrays of any shapes over workers that share one host, in rank order, over `divisor`.

        Raises:
            UsageError: there are several hosts.
        """
        ...

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """f32[size m] -> f32[m] each: this worker's slice of the sum that `sum_on_host` gives, in the same bits."""
        ...

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """f32[m] -> f32[size m] each: the slices of all workers, which share one host."""
        ...

    def assert_same(self, mine: Fingerprint) -> None:
        """Refuse to go on if the fingerprint differs between ranks; all of them must call it."""
        ...

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` for a program that does not communicate; if ranks share a host, one compiles for all."""
        ...


class NoPart:
    """A rank's own place outside a communicator that others have split off: false, of size 0, refused by every call.

    None would be the world.
    """

    size = 0

    def __bool__(self) -> Literal[False]:
        """False: `if part:` is true on the ranks that take part."""
        return False


def check_has_part(comm: Any) -> None:
    """Refuse a communicator of ours or of mpi4py that this rank has no part in."""
    check(
        comm is None or bool(comm),
        f"comm: rank {my_rank()}: got a communicator in which this rank has no part, as of "
        "split(None); expected the call on the ranks that have one: if part: ...",
    )


def color_of(color: Any) -> int | str | None:
    """A color of `split`: a whole number of Python, NumPy or JAX as Python's, "host", or None.

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

    def split(self, color: SupportsIndex | str | None, key: int = 0) -> "SoloComm | NoPart":
        """The one worker again, or `NoPart` if it takes none."""
        del key
        return NoPart() if color_of(color) is None else self

    def allreduce(self, x: jax.Array) -> jax.Array:
        """X itself."""
        return x

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """X itself."""
        return x

    def alltoall(self, x: PyTree) -> PyTree:
        """X itself."""
        return x

    def allgather(self, x: PyTree) -> PyTree:
        """X as the one row."""
        return jax.tree.map(lambda leaf: leaf[None], x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """X if the pair (0, 0) is given, else zeros."""
        return x if (0, 0) in tuple(pairs) else jax.tree.map(jnp.zeros_like, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """X itself."""
        return x

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`."""
        return lax.fori_loop(0, turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The vectors over `divisor`."""
        return [vector / divisor for vector in vectors]

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The vectors over `divisor`."""
        return self.sum_on_host(vectors, divisor)

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """The vectors themselves."""
        return [*vectors]

    def assert_same(self, mine: Fingerprint) -> None:
        """One rank agrees with itself."""

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


ONE_HOST = "strategy shm sums in the memory of one host; got workers on {hosts} hosts: use hier-ring or asa"


def check_one_host(hosts: Sequence[int]) -> None:
    """Refuse what only the workers of one host can do."""
    check(len(set(hosts)) == 1, ONE_HOST.format(hosts=len(set(hosts))))


def ring_order(hosts: Sequence[int]) -> tuple[int, ...]:
    """Ranks by host, then by rank: a ring in this order uses each link between hosts once."""
    return tuple(sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank)))
