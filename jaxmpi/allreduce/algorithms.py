"""How a bucket is summed. One function and one row of the table each, to be compared side by side.

A strategy takes f32[n], n % comm.size == 0, and gives the sum over workers, bitwise equal on all of them; it adds in
f32 whatever the wire. It sees only a Comm, whose rank may be a traced value: no Python branch on rank. Loops over
packets and round a ring are `lax` loops, so that a step at 64 ranks traces and compiles as fast as one at 2.

What a sum was encoded to is what all workers decode, the one that made it included: so all hold the same bits. A
place is an index into `comm.order`: ranks of one host are neighbours.
"""

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.allreduce.building_blocks import allgather, alltoall, gather_round, pad, place_of, shift, spread
from jaxmpi.allreduce.color_trees import MAX_COLOURS, Sum, coloured_trees
from jaxmpi.allreduce.subgroups import split_by_host
from jaxmpi.allreduce.wires import WIRES, Wire
from jaxmpi.comm.axis import add_rows
from jaxmpi.comm.base import Comm, Pairs
from jaxmpi.core.errors import UsageError, check, lookup, nearest
from jaxmpi.core.pytrees import PyTree

Means = Callable[[list[jax.Array], Comm, float], list[jax.Array]]


def allreduce(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Whatever the MPI library's (or XLA's) own allreduce does; 32 bits only."""
    del wire
    return comm.allreduce(x)


def alltoall_sum_allgather(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """ASA: each worker sums its own slice of all workers' vectors, in rank order, then shares it.

    Sends 2 (w - 1) / w of the vector; rounds twice (slices sent, sum sent). Ma et al. 2016, section 3.2.
    """
    parts = wire.decode(alltoall(wire.encode(x.reshape(comm.size, -1)), comm))  # f32[w, n/w]: my slice of each worker
    mine = add_rows(parts)
    return wire.decode(allgather(wire.encode(mine), comm)).reshape(-1)


def ring(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Scatter-reduce, then allgather, around the ring of ranks ordered by host.

    Sends 2 (w - 1) / w of the vector in 2 (w - 1) messages; rounds once per hop while summing and once after.
    The second half forwards the encoded chunk. Gibiansky 2017.
    """
    size, chunks, place = comm.size, x.reshape(comm.size, -1), place_of(comm)

    def reduce_step(i: jax.Array, partial: jax.Array) -> jax.Array:
        received = wire.decode(comm.permute(wire.encode(partial), shift(comm, 1)))
        return received + chunks[(place - i - 1) % size]

    mine = wire.encode(comm.loop(size - 1, reduce_step, chunks[place]))  # the sum of chunk place + 1
    return wire.decode(gather_round(mine, comm, lambda back: (place + 1 - back) % size)).reshape(-1)


def pairwise(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Halve and add between partners 1, 2, 4, ... places apart, then double the way back.

    With p the largest power of two <= w: sends 2 (p - 1) / p of the vector in 2 log2 p messages; the w - p places
    above fold theirs in before and get the sum after, whole. Rounds log2 p + 1 times, and once more for the fold.
    Neighbours exchange the largest halves. Thakur et al. 2005, section 4; for any w what Theano-MPI's copper did
    for 2, 4, 8 and 16.
    """
    levels = comm.size.bit_length() - 1
    p, order, place = 1 << levels, comm.order, place_of(comm)
    folds = [(order[i], order[i - p]) for i in range(p, comm.size)]
    partners = [[(order[i], order[i ^ (1 << level)]) for i in range(p)] for level in range(levels)]
    rows = pad(x, p).reshape(p, -1)  # each is encoded by itself
    if folds:
        rows = rows + wire.decode(comm.permute(wire.encode(rows), folds))
    mine = 0  # the row that is summed here
    for level, pairs in enumerate(partners):
        halves, side = rows.reshape(2, -1, rows.shape[-1]), (place >> level) & 1
        rows = halves[side] + wire.decode(comm.permute(wire.encode(halves[1 - side]), pairs))
        mine = 2 * mine + side
    blocks = jax.tree.map(lambda leaf: spread(leaf, p, mine), wire.encode(rows[0]))
    for level, pairs in reversed(list(enumerate(partners))):
        blocks = double(blocks, comm, pairs, mine, p >> (level + 1))
    if folds:
        result = comm.permute(blocks, [(low, high) for high, low in folds])
        blocks = jax.tree.map(functools.partial(jnp.where, place >= p), result, blocks)
    return wire.decode(blocks).reshape(-1)[: x.size]


def double(blocks: PyTree, comm: Comm, pairs: Pairs, mine: jax.Array | int, count: int) -> PyTree:
    """Swap the `count` rows around row `mine` for the partner's, which lie beside them."""
    start = mine // count * count
    sent = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, count), blocks)
    received = comm.permute(sent, pairs)
    return jax.tree.map(
        lambda leaf, rows: lax.dynamic_update_slice_in_dim(leaf, rows, start ^ count, 0), blocks, received
    )


def all_to_root(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """All send theirs to rank 0, one after another; it adds in rank order and sends the sum back to each.

    Rank 0 receives and sends w - 1 vectors, the others one each: the naive way, to compare with. Rounds twice.
    """
    sent, total = wire.encode(x), x
    for rank in range(1, comm.size):
        total = total + wire.decode(comm.permute(sent, [(rank, 0)]))
    result = wire.encode(total)
    for rank in range(1, comm.size):
        received = comm.permute(result, [(0, rank)])
        result = jax.tree.map(functools.partial(jnp.where, comm.rank == rank), received, result)
    return wire.decode(result)


def hierarchical(x: jax.Array, comm: Comm, wire: Wire, cross: Sum) -> jax.Array:
    """Sum over each host's s ranks, then `cross` between hosts on each rank's part, then share inside the host.

    Between hosts each rank sends what `cross` sends of n / s floats; inside, 2 (s - 1) / s n floats at 32 bits. Rounds
    as `cross` over the hosts.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    inside, between = split_by_host(comm)
    part = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    total = cross(part, between, wire) if between.size > 1 else part
    return inside.allgather(total).reshape(-1)


def shared_memory(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """One host: ranks add theirs to chunks in shared memory in turn, and copy the result; 32 bits only."""
    del wire
    return comm.sum_on_host([x])[0]


def shared_memory_means(leaves: list[jax.Array], comm: Comm, divisor: float) -> list[jax.Array]:
    """All leaves where they are, in one call: nothing is fused, padded or split."""
    return comm.sum_on_host(leaves, divisor)


def none(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """No exchange: the bound of compute alone. Workers drift apart."""
    del wire
    return x * comm.size


def own_means(leaves: list[jax.Array], comm: Comm, divisor: float) -> list[jax.Array]:
    """A mean is what is there, untouched, so that a step costs what a lone worker's does."""
    return leaves if divisor == comm.size else [none(x, comm, WIRES["32"]) / divisor for x in leaves]


# ---------------------------------------------------------------- the table


class StrategySpec(NamedTuple):
    """A strategy and the wires it can use."""

    sum: Callable[..., jax.Array]  # a Sum, once `<k>` or `<cross>` of the name is filled in
    wires: tuple[str, ...]
    crosses: bool = False  # whether it needs nothing but `permute`, and so can be the <cross> of hier-<cross>
    means: Means | None = None  # sums over a divisor of f32 arrays of any shapes at once, if that is faster
    fits: Callable[[Sequence[int]], bool] = lambda hosts: True  # by the hosts of all ranks


def is_even(hosts: Sequence[int]) -> bool:
    """Return True if all hosts have equally many ranks."""
    return len(set(collections.Counter(hosts).values())) == 1


def is_one(hosts: Sequence[int]) -> bool:
    """Return True if all ranks are on one host."""
    return len(set(hosts)) == 1


ALL = tuple(WIRES)
STRATEGIES: dict[str, StrategySpec] = {
    "ar": StrategySpec(allreduce, ("32",)),
    "asa": StrategySpec(alltoall_sum_allgather, ALL, crosses=True),
    "ring": StrategySpec(ring, ALL, crosses=True),
    "tree": StrategySpec(pairwise, ALL, crosses=True),
    "color<k>": StrategySpec(coloured_trees, ALL, crosses=True),
    "pipering": StrategySpec(functools.partial(coloured_trees, colours=1), ALL, crosses=True),
    "root": StrategySpec(all_to_root, ALL, crosses=True),
    "hier-<cross>": StrategySpec(hierarchical, ALL, fits=is_even),
    "shm": StrategySpec(shared_memory, ("32",), means=shared_memory_means, fits=is_one),
    "none": StrategySpec(none, ("32",), means=own_means),
}
ALIASES = {
    "asa32": "asa:32",
    "asa16": "asa:16",
    "asabf16": "asa:bf16",
    "asa8": "asa:8",
    "ring32": "ring:32",
    "ring16": "ring:16",
    "hier-ring32": "hier-ring:32",
    "hier-ring16": "hier-ring:16",
}


class Strategy(NamedTuple):
    """A spelled-out choice, such as `ring:16`."""

    name: str
    sum: Sum
    wire: Wire
    means: Means | None
    fits: Callable[[Sequence[int]], bool]  # whether it can sum over ranks on these hosts


def parse(spelling: str) -> Strategy:
    """`algorithm[:wire]` or an alias as a Strategy; the wire is 32 if none is given.

    Raises:
        UsageError: the algorithm or the wire is unknown, or the algorithm cannot use the wire.
    """
    check(isinstance(spelling, str), f"strategy: got {spelling!r}; expected a name, such as asa32")
    algorithm, _, wire = ALIASES.get(spelling, spelling).partition(":")
    wire = wire or "32"
    row = find(algorithm)
    encoding = lookup(WIRES, wire, "wire")
    if wire not in row.wires:
        raise UsageError(f"strategy {algorithm!r} cannot use wire {wire!r}; it takes {', '.join(row.wires)}")
    return Strategy(f"{algorithm}:{wire}", row.sum, encoding, row.means, row.fits)


def find(algorithm: str) -> StrategySpec:
    """The row of `ring`, `color4` or `hier-ring`, the last two with their `<k>` and `<cross>` filled in."""
    if colours := re.fullmatch(r"color(\d+)", algorithm):
        k = int(colours[1])
        check(1 <= k <= MAX_COLOURS, f"got strategy {algorithm!r}; expected color1 to color{MAX_COLOURS}")
        row = STRATEGIES["color<k>"]
        return row._replace(sum=functools.partial(row.sum, colours=k))
    if algorithm.startswith("hier-") and "<" not in algorithm:
        cross, row = find(algorithm.removeprefix("hier-")), STRATEGIES["hier-<cross>"]
        able = ", ".join(name for name, other in STRATEGIES.items() if other.crosses)
        check(cross.crosses, f"got strategy {algorithm!r}; between hosts there can be {able}")
        return row._replace(sum=functools.partial(row.sum, cross=cross.sum))
    blanks = [name for name in STRATEGIES if "<" in name and algorithm in (name, name.partition("<")[0].strip("-"))]
    check(not blanks, f"got strategy {algorithm!r}; fill in what is in <> in {blanks}, as in color4 and hier-ring")
    if algorithm not in STRATEGIES:
        raise UsageError(f"unknown strategy {algorithm!r}; {nearest(algorithm.lower(), {**STRATEGIES, **ALIASES})}")
    return STRATEGIES[algorithm]
