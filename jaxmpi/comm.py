"""Who exchanges with whom: collectives over all workers, inside jit.

Importing mpi4jax starts MPI, so it happens inside functions.
"""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state

from jaxmpi.config import check
from jaxmpi.hostsum import SharedSum
from jaxmpi.processes import MpiProcesses, Statement, processes
from jaxmpi.programs import shared_jit

PyTree = Any
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

    def sign(self, statement: Statement) -> None:
        """Refuse to go on where the statement differs between ranks; all of them must make one."""
        ...

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` for a program that does not communicate; where ranks share a host, one compiles for all."""
        ...


class SoloComm:
    """One worker: every collective is the identity. Needs no MPI."""

    size = 1
    rank = 0
    order = (0,)
    hosts = (0,)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """X itself."""
        return x

    def alltoall(self, x: PyTree) -> PyTree:
        """X itself."""
        return x

    def allgather(self, x: PyTree) -> PyTree:
        """X as the one row."""
        return jax.tree.map(lambda leaf: leaf[None], x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """X where the pair (0, 0) is given, else zeros."""
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

    def sign(self, statement: Statement) -> None:
        """One rank agrees with itself."""

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


class AxisComm:
    """Workers along a named axis of `vmap` or `shard_map`, through `lax` collectives."""

    def __init__(self, axis: str, size: int, hosts: tuple[int, ...] | None = None) -> None:
        """Take the axis's name and size, known before tracing, and which host each worker counts to; default: one."""
        self.axis, self.size = axis, size
        self.hosts = hosts or (0,) * size
        self.order = ring_order(self.hosts)

    @property
    def rank(self) -> jax.Array:
        """The traced index along the axis."""
        return lax.axis_index(self.axis)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """`lax.psum`."""
        return lax.psum(x, self.axis)

    def alltoall(self, x: PyTree) -> PyTree:
        """`lax.all_to_all` over the leading axis."""
        return jax.tree.map(lambda leaf: lax.all_to_all(leaf, self.axis, 0, 0), x)

    def allgather(self, x: PyTree) -> PyTree:
        """`lax.all_gather`."""
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`lax.ppermute`, completed to a permutation (`vmap` refuses a partial one) and masked."""
        full = complete(pairs, self.size)
        receives = np.zeros(self.size, bool)
        receives[[destination for _, destination in pairs]] = True
        mine = jnp.asarray(receives)[self.rank]

        def one(leaf: jax.Array) -> jax.Array:
            moved = lax.ppermute(leaf, self.axis, full)
            return moved if receives.all() else jnp.where(mine, moved, jnp.zeros_like(moved))

        return jax.tree.map(one, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """Row `root` of an all-gather."""
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis)[root], x)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`."""
        return lax.fori_loop(0, turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Rows of an all-gather, added one after another."""
        check_one_host(self.hosts)
        return [add_rows(rows) / divisor for rows in self.allgather(list(vectors))]

    def sign(self, statement: Statement) -> None:
        """One program for all workers: nothing can differ, but there may be others than are counted on.

        Raises:
            UsageError: the axis has another size.
        """
        have = lax.axis_size(self.axis)
        check(have == self.size, f"got {self.size} workers along axis {self.axis!r}, which has {have}; give that size")

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


def add_rows(rows: jax.Array) -> jax.Array:
    """Sum f32[w, n] over its first axis, row after row.

    XLA:CPU walks `rows.sum(0)` column by column, a hundred times slower.
    """
    return lax.scan(lambda total, row: (total + row, None), rows[0], rows[1:], unroll=8)[0]


class GlooComm(AxisComm):
    """Workers along an axis over several processes' CPUs: one collective at a time, in one order on all of them.

    gloo's messages have no names, and XLA lets programs whose results do not need each other overlap where one of them
    holds a loop: then ranks would take one's message for another's. So each collective's input here is made to need the
    result of the one before it in the same trace.
    """

    _last: ClassVar[tuple[Any, PyTree]] = (None, None)  # a trace, and the newest result in it, of all Comms

    def _done(self, result: PyTree) -> PyTree:
        GlooComm._last = (get_opaque_trace_state(), result)
        return result

    def _in_turn(self, move: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._done(move(self._after_last(leaf))), x)

    def _after_last(self, x: PyTree) -> PyTree:
        trace, result = self._last
        return after(x, result) if trace == get_opaque_trace_state() else x

    def allreduce(self, x: jax.Array) -> jax.Array:
        """`lax.psum`."""
        return self._in_turn(super().allreduce, x)

    def alltoall(self, x: PyTree) -> PyTree:
        """`lax.all_to_all` over the leading axis."""
        return self._in_turn(super().alltoall, x)

    def allgather(self, x: PyTree) -> PyTree:
        """`lax.all_gather`."""
        return self._in_turn(super().allgather, x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`lax.ppermute`."""
        move = super().permute
        return self._in_turn(lambda leaf: move(leaf, pairs), x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """Row `root` of an all-gather."""
        move = super().bcast
        return self._in_turn(lambda leaf: move(leaf, root), x)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`, as a whole one collective among the others."""
        return self._done(super().loop(turns, turn, self._after_last(carry)))


def after(x: PyTree, result: PyTree) -> PyTree:
    """X, every bit of it, but to be had only once `result` is there; no compiler sees that it does not need it."""
    first = [as_integers(leaf.reshape(-1)[0]).astype(jnp.uint32) for leaf in jax.tree.leaves(result) if leaf.size]
    never = [lax.population_count(bits) >> 6 for bits in first]  # zero: 32 bits are no 64

    def waiting(leaf: jax.Array) -> jax.Array:
        bits = as_integers(leaf)
        for zero in never:
            bits = bits | zero.astype(bits.dtype)
        return lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(waiting, x)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of numbers of 8, 16 or 32 bits."""
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def ring_order(hosts: Sequence[int]) -> tuple[int, ...]:
    """Ranks by host, then by rank: a ring in this order uses each link between hosts once."""
    return tuple(sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank)))


def complete(pairs: Pairs, size: int) -> list[tuple[int, int]]:
    """`pairs` plus pairs among the workers left over, so that each sends and receives once."""
    sources = sorted(set(range(size)) - {source for source, _ in pairs})
    destinations = sorted(set(range(size)) - {destination for _, destination in pairs})
    return [*pairs, *zip(sources, destinations, strict=True)]


def check_one_host(hosts: Sequence[int]) -> None:
    """Refuse what only the workers of one host can do."""
    check(
        len(set(hosts)) == 1,
        f"strategy shm sums in the memory of one host; got workers on {len(set(hosts))} hosts: use hier-ring or asa",
    )


class RankComm:
    """Workers are MPI ranks, each a process that drives one device: what their Comms have in common."""

    def __init__(self, processes: MpiProcesses, mpi: Any) -> None:
        """`mpi` is this Comm's alone: mpi4py and mpi4jax must never share a communicator."""
        self.processes, self.mpi = processes, mpi
        self.rank: int = processes.rank
        self.size: int = processes.size
        self.hosts = processes.hosts
        self.order = ring_order(self.hosts)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`."""
        return lax.fori_loop(0, turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Through shared memory, all vectors in one call."""
        check_one_host(self.hosts)
        return self._shared_sum.sum(vectors, divisor)

    def sum_on_host_now(self, arrays: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The same outside jit, done when it returns."""
        check_one_host(self.hosts)
        return self._shared_sum.sum_now(arrays, divisor)

    @functools.cached_property
    def _shared_sum(self) -> SharedSum:
        """Made at the first use, at which all ranks trace the same program."""
        return self._make_shared_sum()

    def _make_shared_sum(self) -> SharedSum:
        raise NotImplementedError

    def sign(self, statement: Statement) -> None:
        """Compare over the control plane: microseconds where ranks are in step."""
        self.processes.compare(statement)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """One rank a host traces and compiles, the others take its program. Ranks must call it together."""
        return shared_jit(function, donate_argnums, self.processes)


_numbers = itertools.count()  # of Comms that sum in shared memory, the same on all ranks


class MpiComm(RankComm):
    """mpi4jax's collectives inside jit."""

    def __init__(self, processes: MpiProcesses) -> None:
        """Clone the world."""
        super().__init__(processes, processes.world.Clone())

    def allreduce(self, x: jax.Array) -> jax.Array:
        """`MPI_Allreduce`, sum."""
        import mpi4jax
        from mpi4py import MPI

        return mpi4jax.allreduce(x, op=MPI.SUM, comm=self.mpi)

    def alltoall(self, x: PyTree) -> PyTree:
        """`MPI_Alltoall`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.alltoall(leaf, comm=self.mpi)), x)

    def allgather(self, x: PyTree) -> PyTree:
        """`MPI_Allgather`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.allgather(leaf, comm=self.mpi)), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half of it that this rank has a part in."""
        import mpi4jax

        source = next((s for s, d in pairs if d == self.rank), None)
        destination = next((d for s, d in pairs if s == self.rank), None)

        def move(leaf: jax.Array) -> jax.Array:
            if source is not None and destination is not None:
                return mpi4jax.sendrecv(leaf, leaf, source=source, dest=destination, comm=self.mpi)
            if destination is not None:
                mpi4jax.send(leaf, dest=destination, comm=self.mpi)
            if source is not None:
                return mpi4jax.recv(leaf, source=source, comm=self.mpi)
            return jnp.zeros_like(leaf)

        return jax.tree.map(through_bits(move), x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """`MPI_Bcast`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.bcast(leaf, root, comm=self.mpi)), x)

    def _make_shared_sum(self) -> SharedSum:
        """In order among mpi4jax's collectives."""
        [effect] = jax.make_jaxpr(self.allreduce)(0.0).effects
        return SharedSum(self.processes, f"sum of comm {next(_numbers)}", effect=effect)


def through_bits(move: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`move` for 16-bit floats too: MPI has no such type, so their bits travel as uint16."""

    def moved(leaf: jax.Array) -> jax.Array:
        if leaf.dtype not in (jnp.float16, jnp.bfloat16):
            return move(leaf)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(leaf, jnp.uint16)), leaf.dtype)

    return moved


# ---------------------------------------------------------------- the world


def is_cuda_aware() -> bool:
    """Whether mpi4jax hands device pointers to MPI, as MPI4JAX_USE_CUDA_MPI asks it to.

    Raises:
        UsageError: it is asked to, but was built without CUDA.
    """
    import mpi4jax

    asked = os.environ.get("MPI4JAX_USE_CUDA_MPI", "0").lower() in ("1", "true", "on")
    check(
        not asked or mpi4jax.has_cuda_support(), "MPI4JAX_USE_CUDA_MPI is set, but this mpi4jax was built without CUDA"
    )
    return asked


# With a message, for this thread: why the world may not exchange here. A part of what JAX keeps traces by, so that a
# function of the user's own jit is traced anew in it.
refusing_world = jax.make_user_context(default_value="")


def workers_of(comm: Comm | None) -> Comm:
    """Who exchanges: the caller's choice, else the world.

    Raises:
        UsageError: it is the world, in a function whose workers are others.
    """
    chosen = comm or world()
    why = refusing_world.value
    check(not why or chosen is not world(), why)
    return chosen


@functools.cache
def world() -> MpiComm | SoloComm:
    """All workers of this job, one a process."""
    control = processes()
    return MpiComm(control) if isinstance(control, MpiProcesses) else SoloComm()
