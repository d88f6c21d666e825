"""Parts of the algorithms: padding, chunks, rotations, gathers; communicators inside hosts and between them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Comm, Pairs, Turn, add_rows
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree


def pad(x: jax.Array, multiple: int) -> jax.Array:
    """f32[n] with zeros up to a multiple."""
    missing = -x.size % multiple
    return jnp.pad(x, (0, missing)) if missing else x


def take(tree: PyTree, row: Any) -> PyTree:
    """One row of every leaf."""
    return jax.tree.map(lambda leaf: leaf[row], tree)


def put(tree: PyTree, row: Any, value: PyTree) -> PyTree:
    """Every leaf with one row replaced, unless it is out of bounds."""
    return jax.tree.map(lambda leaf, new: leaf.at[row].set(new, mode="drop"), tree, value)


def spread(leaf: jax.Array, rows: int, row: jax.Array | int) -> jax.Array:
    """[...] as one row of zeros [rows, ...]."""
    return jnp.zeros((rows, *leaf.shape), leaf.dtype).at[row].set(leaf)


def place_of(comm: Comm) -> jax.Array:
    """i32: the place of this worker's rank in `comm.order`."""
    return jnp.asarray(np.argsort(comm.order).astype(np.int32))[comm.rank]


def shift(comm: Comm, places: int) -> Pairs:
    """All send to the worker so many places on."""
    return [(comm.order[i], comm.order[(i + places) % comm.size]) for i in range(comm.size)]


def gather_round(mine: PyTree, comm: Comm, row: Callable[[Any], Any]) -> PyTree:
    """Gather all workers' `mine` as rows by passing them round the ring.

    Row `row(i)` is that of the worker i places back.
    """

    def step(i: jax.Array, carry: tuple) -> tuple:
        rows, travelling = carry
        travelling = comm.permute(travelling, shift(comm, 1))
        return put(rows, row(i + 1), travelling), travelling

    rows = jax.tree.map(lambda leaf: spread(leaf, comm.size, row(0)), mine)
    return comm.loop(comm.size - 1, step, (rows, mine))[0]


def alltoall(x: PyTree, comm: Comm) -> PyTree:
    """`comm.alltoall`; between hosts w - 1 rotations, one partner at a time."""
    return alltoall_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.alltoall(x)


def allgather(x: PyTree, comm: Comm) -> PyTree:
    """`comm.allgather`; between hosts w - 1 rotations by one place."""
    return allgather_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.allgather(x)


def alltoall_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """`comm.alltoall` of leaves [w, ...], one partner at a time."""
    size, place, places = comm.size, place_of(comm), np.argsort(comm.order).astype(np.int32)
    leaving = take(x, jnp.asarray(comm.order)[(place + jnp.arange(size)) % size])  # row i: for the worker i places on
    arrived = [take(leaving, 0)]
    arrived += [comm.permute(take(leaving, i), shift(comm, i)) for i in range(1, size)]
    return take(jax.tree.map(lambda *rows: jnp.stack(rows), *arrived), (place - jnp.asarray(places)) % size)


def allgather_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """`comm.allgather` in which a link between hosts carries each row once."""
    order, place = jnp.asarray(comm.order), place_of(comm)
    return gather_round(x, comm, lambda back: order[(place - back) % comm.size])


class SubComm(Comm):
    """Every group of ranks as a Comm of its own, at once."""

    def __init__(self, comm: Comm, groups: Sequence[Sequence[int]], hosts: tuple[int, ...]) -> None:
        """Take groups of equal size, each rank in one, and ranks' hosts."""
        self.comm, self.groups, self.hosts = comm, groups, hosts
        self.size = len(groups[0])
        self.order = tuple(range(self.size))
        self.ranks = np.argsort(np.concatenate(groups)).astype(np.int32) % self.size

    @property
    def rank(self) -> jax.Array:
        return jnp.asarray(self.ranks)[self.comm.rank]

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`permute` of the whole, in all groups at once."""
        return self.comm.permute(x, [(group[source], group[to]) for group in self.groups for source, to in pairs])

    def alltoall(self, x: PyTree) -> PyTree:
        return alltoall_by_rotation(x, self)

    def allgather(self, x: PyTree) -> PyTree:
        return allgather_by_rotation(x, self)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """The rows of all, added in rank order."""
        return add_rows(self.allgather(x))

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return take(self.allgather(x), root)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        return self.comm.loop(turns, turn, carry)

    def assert_same(self, mine: Fingerprint) -> None:
        self.comm.assert_same(mine)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        return self.comm.jit(function, donate_argnums)


UNEVEN = (
    "strategy hier-<cross>: got hosts with {counts} ranks; expected equally many on each. Start the same number of "
    "ranks on every host, or use ring or tree"
)


def split_by_host(comm: Comm) -> tuple[Comm, Comm]:
    """Comms of each host's ranks, and of equal places on all hosts.

    With one host the first is `comm` itself.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    hosts = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    counts = [len(ranks) for ranks in hosts]
    check(len(set(counts)) == 1, UNEVEN.format(counts=", ".join(map(str, counts))))
    across = list(zip(*hosts, strict=True))
    inside = SubComm(comm, hosts, (0,) * counts[0]) if len(hosts) > 1 else comm
    return inside, SubComm(comm, across, tuple(range(len(hosts))))
