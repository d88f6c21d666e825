"""Parts of the algorithms: padding, chunks, rotations, gathers; communicators of hosts; means of integers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.comm.base import Comm, Pairs, Turn, add_rows
from jaxmpi.core.errors import UsageError
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


def ring_index(comm: Comm) -> jax.Array:
    """i32: the place of this worker's rank in `comm.order`."""
    return jnp.asarray(np.argsort(comm.order).astype(np.int32))[comm.rank]


def ring_permutation(comm: Comm, places: int) -> Pairs:
    """All send to the worker so many places on."""
    return [(comm.order[i], comm.order[(i + places) % comm.size]) for i in range(comm.size)]


def ring_all_gather(chunk: PyTree, comm: Comm, row: Callable[[Any], Any]) -> PyTree:
    """Gather all workers' `chunk` as rows by passing them round the ring.

    Row `row(i)` is that of the worker i places back.
    """

    def step(i: jax.Array, carry: tuple) -> tuple:
        rows, message = carry
        message = comm.permute(message, ring_permutation(comm, 1))
        return put(rows, row(i + 1), message), message

    rows = jax.tree.map(lambda leaf: spread(leaf, comm.size, row(0)), chunk)
    return comm.loop(comm.size - 1, step, (rows, chunk))[0]


def alltoall(x: PyTree, comm: Comm) -> PyTree:
    """`comm.alltoall`; between hosts w - 1 rotations, one partner at a time."""
    return alltoall_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.alltoall(x)


def allgather(x: PyTree, comm: Comm) -> PyTree:
    """`comm.allgather`; between hosts w - 1 rotations by one place."""
    return allgather_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.allgather(x)


def alltoall_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """`comm.alltoall` of leaves [w, ...], one partner at a time."""
    size, place, places = comm.size, ring_index(comm), np.argsort(comm.order).astype(np.int32)
    outgoing = take(x, jnp.asarray(comm.order)[(place + jnp.arange(size)) % size])  # row i: for the worker i places on
    received = [take(outgoing, 0)]
    received += [comm.permute(take(outgoing, i), ring_permutation(comm, i)) for i in range(1, size)]
    return take(jax.tree.map(lambda *rows: jnp.stack(rows), *received), (place - jnp.asarray(places)) % size)


def allgather_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """`comm.allgather` in which a link between hosts carries each row once."""
    order, place = jnp.asarray(comm.order), ring_index(comm)
    return ring_all_gather(x, comm, lambda distance: order[(place - distance) % comm.size])


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

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        return self.comm.loop(turns, turn, carry)


def split_by_host(comm: Comm) -> tuple[Comm, SubComm]:
    """Comms of each host's ranks, and of equal places on all hosts.

    With one host the first is `comm` itself.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    hosts = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    counts = [len(ranks) for ranks in hosts]
    if len(set(counts)) > 1:
        raise UsageError(
            f"strategy hier-<cross>: got hosts with {', '.join(map(str, counts))} ranks; expected equally many on "
            "each. Start the same number of ranks on every host, or use ring or tree"
        )
    between = list(zip(*hosts, strict=True))
    inside = SubComm(comm, hosts, (0,) * counts[0]) if len(hosts) > 1 else comm
    return inside, SubComm(comm, between, tuple(range(len(hosts))))


# ---------------------------------------------------------------- means of integers

# A sum in the integers' own type wraps, and float32 does not hold all integers of 32 bits. JAX outside its x64 mode has
# no wider type. So integers travel as two halves of their bits. Sums of halves fit for up to 2^14 workers, and are
# divided as integers.
MOST_HALVES = 1 << 14  # workers


def halves(x: jax.Array) -> jax.Array:
    """Integers [...] as their high and low halves, [..., 2].

    Those of fewer than 32 bits stay whole, as i32[...].
    """
    bits = jnp.iinfo(x.dtype).bits
    if bits < 32:
        return x.astype(jnp.int32)
    signed = jnp.int32 if bits == 32 else jnp.int64
    low = x & x.dtype.type(2 ** (bits // 2) - 1)
    return jnp.stack([(x >> (bits // 2)).astype(signed), low.astype(signed)], -1)


def mean_of_halves(total: jax.Array, workers: int, dtype: jax.typing.DTypeLike, is_whole: bool = False) -> jax.Array:
    """The mean of integers from the sum of their `halves`.

    It is a float within 2 ulp or, if `is_whole`, the mean's whole part, an integer. That is exact: it and the rest
    come from divisions of integers.
    """
    real = jnp.result_type(float)
    if jnp.iinfo(dtype).bits < 32:
        return lax.div(total, jnp.full_like(total, workers)) if is_whole else total.astype(real) / workers
    shift = jnp.iinfo(dtype).bits // 2
    if workers > MOST_HALVES:
        description = f"a mean of {jnp.dtype(dtype)}"
        raise UsageError(f"{description}: got {workers} workers; expected at most {MOST_HALVES}: cast to floats")
    high, rest = jnp.divmod(total[..., 0], workers)
    low, rest = jnp.divmod((rest << shift) + total[..., 1], workers)
    quotient = (high.astype(dtype) << shift) + low.astype(dtype)
    rounds_up = ((quotient < 0) & (rest > 0)).astype(dtype)  # towards 0: parts of two signs would cancel
    quotient, rest = quotient + rounds_up, rest - rounds_up.astype(rest.dtype) * workers
    return quotient if is_whole else quotient.astype(real) + rest.astype(real) / workers
