"""Communicators of one host's workers, or of one worker of each."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.building_blocks import allgather_by_rotation, alltoall_by_rotation, take
from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Comm, Pairs, Turn, add_rows
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree


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
