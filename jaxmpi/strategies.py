"""How a bucket is summed. One function and one row of the table each, to be compared side by side.

A strategy takes f32[n], n % comm.size == 0, and gives the sum over workers, bitwise equal on all of them; it adds in
f32 whatever the wire. It sees only a Comm, whose rank may be a traced value: no Python branch on rank. Loops over
packets and round a ring are `lax` loops, so that a step at 64 ranks traces and compiles as fast as one at 2.

What a sum was encoded to is what all workers decode, the one that made it included: so all hold the same bits. A
place is an index into `comm.order`: ranks of one host are neighbours.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.comm import Comm, Pairs, Turn, add_rows
from jaxmpi.config import UsageError, check, lookup, nearest
from jaxmpi.processes import Statement
from jaxmpi.wires import WIRES, Wire

PyTree = Any
Sum = Callable[[jax.Array, Comm, Wire], jax.Array]
Means = Callable[[list[jax.Array], Comm, float], list[jax.Array]]
PRICE = 1 << 13  # floats that would travel in the time that a message costs by itself, roughly, on most networks
MAX_COLOURS = 16


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


def coloured_trees(x: jax.Array, comm: Comm, wire: Wire, colours: int) -> jax.Array:
    """Each of k parts goes up its own tree in packets, summed on the way, and down again from the root.

    Trees as of `Forest`: a worker adds and forwards in one of them at most and is a leaf of all others. So each sends
    about 2 n floats, and a packet takes 2 height messages one after another. Rounds once per edge on the way up and
    once at the root. All edges are busy at once: while a packet climbs, the next follows and earlier ones come down.
    Kumar et al. 2018 (IBM), section 4.2; their pipelined ring is the case of one colour, whose tree is a chain.
    """
    forest, place = plant(comm.size, colours), place_of(comm)
    k, height = len(forest.depth), forest.height
    # m + 2 height turns of PRICE + part / m each are fewest for this m.
    packets = max(1, round(math.sqrt(2 * height * x.size / (k * PRICE))))
    own = pad(x, k * packets).reshape(k, packets, -1)
    depth = jnp.asarray(forest.depth)[:, place]  # of this place in each tree
    home = jnp.asarray(forest.home)[place]  # the one tree in which it has children
    colour = [jnp.asarray(row)[place] for row in forest.colour]  # in each round, the tree in which it has a parent
    climbs = [[(comm.order[child], comm.order[parent]) for _, child, parent in edges] for edges in forest.rounds]
    descents = [[(parent, child) for child, parent in edges] for edges in climbs]

    def landed(t: int | jax.Array, down: PyTree, rows: jax.Array) -> jax.Array:
        packet = t - 1 - height - depth  # what came in the turn before goes where its own was, which has left by now
        place_out = (jnp.arange(k), jnp.where(packet < 0, packets, packet))  # what is no packet falls off the end
        return put(rows, place_out, wire.decode(down))

    def step(t: jax.Array, carry: tuple) -> tuple:
        up, down, rows = carry
        rows = landed(t, down, rows)  # before the rows are read: else XLA would copy them in every turn
        received = jnp.zeros_like(rows[0, 0])
        for i, pairs in enumerate(climbs):
            received = received + wire.decode(comm.permute(take(up, colour[i]), pairs))
        partial = rows[jnp.arange(k), jnp.clip(t - height + depth, 0, packets - 1)]
        up = wire.encode(partial.at[home].add(received))
        arrived = up  # right at a root; all other rows come from parents
        for i, pairs in enumerate(descents):
            arrived = put(arrived, colour[i], comm.permute(take(down, home), pairs))
        return up, arrived, rows

    still, turns = jax.tree.map(jnp.zeros_like, wire.encode(own[:, 0])), packets + 2 * height
    _, down, rows = comm.loop(turns, step, (still, still, own))
    return landed(turns, down, rows).reshape(-1)[: x.size]


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


# ---------------------------------------------------------------- what they are made of


def pad(x: jax.Array, multiple: int) -> jax.Array:
    """f32[n] with zeros up to a multiple."""
    missing = -x.size % multiple
    return jnp.pad(x, (0, missing)) if missing else x


def take(tree: PyTree, row: Any) -> PyTree:
    """One row of every leaf."""
    return jax.tree.map(lambda leaf: leaf[row], tree)


def put(tree: PyTree, row: Any, value: PyTree) -> PyTree:
    """Every leaf with one row replaced; a row that does not exist is dropped."""
    return jax.tree.map(lambda leaf, new: leaf.at[row].set(new, mode="drop"), tree, value)


def spread(leaf: jax.Array, rows: int, row: jax.Array | int) -> jax.Array:
    """[...] as one row of zeros [rows, ...]."""
    return jnp.zeros((rows, *leaf.shape), leaf.dtype).at[row].set(leaf)


def place_of(comm: Comm) -> jax.Array:
    """i32: where this worker's rank is in `comm.order`."""
    return jnp.asarray(np.argsort(comm.order).astype(np.int32))[comm.rank]


def shift(comm: Comm, places: int) -> Pairs:
    """All send to the worker so many places on."""
    return [(comm.order[i], comm.order[(i + places) % comm.size]) for i in range(comm.size)]


def gather_round(mine: PyTree, comm: Comm, row: Callable[[Any], Any]) -> PyTree:
    """All workers' `mine` as rows, passed on round the ring; what comes from i places back is put in row `row(i)`."""

    def step(i: jax.Array, carry: tuple) -> tuple:
        rows, travelling = carry
        travelling = comm.permute(travelling, shift(comm, 1))
        return put(rows, row(i + 1), travelling), travelling

    rows = jax.tree.map(lambda leaf: spread(leaf, comm.size, row(0)), mine)
    return comm.loop(comm.size - 1, step, (rows, mine))[0]


def alltoall(x: PyTree, comm: Comm) -> PyTree:
    """`comm.alltoall`; between hosts w - 1 rotations, so that nobody is sent to by two at once."""
    return alltoall_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.alltoall(x)


def allgather(x: PyTree, comm: Comm) -> PyTree:
    """`comm.allgather`; between hosts w - 1 rotations by one place."""
    return allgather_by_rotation(x, comm) if len(set(comm.hosts)) > 1 else comm.allgather(x)


def alltoall_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """Leaves [w, ...]: row i goes to worker i, row j of the result came from worker j; one partner at a time."""
    size, place, places = comm.size, place_of(comm), np.argsort(comm.order).astype(np.int32)
    leaving = take(x, jnp.asarray(comm.order)[(place + jnp.arange(size)) % size])  # row i: for the worker i places on
    arrived = [take(leaving, 0)]
    arrived += [comm.permute(take(leaving, i), shift(comm, i)) for i in range(1, size)]
    return take(jax.tree.map(lambda *rows: jnp.stack(rows), *arrived), (place - jnp.asarray(places)) % size)


def allgather_by_rotation(x: PyTree, comm: Comm) -> PyTree:
    """Leaves [...] to [w, ...], row j from worker j; each link between hosts carries each row once."""
    order, place = jnp.asarray(comm.order), place_of(comm)
    return gather_round(x, comm, lambda back: order[(place - back) % comm.size])


class Forest(NamedTuple):
    """k spanning trees over w places, and when which edge is used."""

    parent: list[list[int]]  # [k][w]; -1 at a root
    depth: np.ndarray  # i32[k, w]
    height: int
    home: np.ndarray  # i32[w]: the tree in which a place has children; 0 where it has none
    rounds: list[list[tuple[int, int, int]]]  # (tree, child, parent); in a round all send once and receive once at most
    colour: np.ndarray  # i32[rounds, w]: the tree in which a place sends to its parent; k where it does not


@functools.cache
def plant(workers: int, colours: int) -> Forest:
    """IBM's trees, for any number of workers: those with children are others in each tree.

    k = min(colours, w) trees, I = floor(w / k) places each that may have children, arity a = ceil((w - 1) / I). Tree c
    holds places cI, cI + 1, ... modulo w at positions 0, 1, ...; the children of position q are a q + 1 ... a q + a.
    So positions with children are below I, and their places in [cI, (c + 1) I). For 8 places and 4 colours that is
    figure 2 of Kumar et al. 2018.
    """
    k = min(colours, workers)
    interior = workers // k
    arity = max(1, -(-(workers - 1) // interior))
    parent = [[-1] * workers for _ in range(k)]
    depth, home = np.zeros((k, workers), np.int32), np.zeros(workers, np.int32)
    for c in range(k):
        for position in range(1, workers):
            child, above = ((c * interior + q) % workers for q in (position, (position - 1) // arity))
            parent[c][child], home[above] = above, c
            depth[c, child] = depth[c, above] + 1
    edges = [(c, child, above) for c in range(k) for child, above in enumerate(parent[c]) if above >= 0]
    rounds = schedule(edges)
    colour = np.full((len(rounds), workers), k, np.int32)
    for i, used in enumerate(rounds):
        for c, child, _ in used:
            colour[i, child] = c
    return Forest(parent, depth, int(depth.max()), home, rounds, colour)


def schedule(edges: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Edges (tree, child, parent) in rounds, of which in each a place sends once and receives once at most.

    As many rounds as the busiest place has edges (Koenig 1916): an edge whose ends have no free round in common swaps
    two rounds along the path that is in its way.
    """
    taken: dict[tuple[str, int, int], tuple[int, int, int]] = {}  # (end, place, round): the edge

    def ends(edge: tuple[int, int, int]) -> list[tuple[str, int]]:
        return [("child", edge[1]), ("parent", edge[2])]

    def free(end: tuple[str, int]) -> int:
        return next(i for i in range(len(edges)) if (*end, i) not in taken)

    for edge in edges:
        child, end = ends(edge)
        mine, other = free(child), free(end)
        path, at = [], mine
        while (step := taken.get((*end, at))) is not None:
            path.append((step, at))
            [end] = [e for e in ends(step) if e != end]
            at = other if at == mine else mine
        for step, at in path:
            for e in ends(step):
                taken.pop((*e, at), None)
        moved = [(step, other if at == mine else mine) for step, at in path]
        for step, at in [*moved, (edge, mine)]:
            taken |= {(*e, at): step for e in ends(step)}
    count = max((i for _, _, i in taken), default=-1) + 1
    return [[edge for (end, _, at), edge in taken.items() if end == "child" and at == i] for i in range(count)]


class SubComm:
    """Every group of ranks at once as a Comm of its own: static pairs inside a group become pairs of the whole."""

    def __init__(self, comm: Comm, groups: Sequence[Sequence[int]], hosts: tuple[int, ...]) -> None:
        """Take groups of equal size, each rank in one of them, and the host of each rank of a group."""
        self.comm, self.groups, self.hosts = comm, groups, hosts
        self.size = len(groups[0])
        self.order = tuple(range(self.size))
        self.ranks = np.argsort(np.concatenate(groups)).astype(np.int32) % self.size

    @property
    def rank(self) -> jax.Array:
        """This worker's number in its group."""
        return jnp.asarray(self.ranks)[self.comm.rank]

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`permute` of the whole, in all groups at once."""
        return self.comm.permute(x, [(group[source], group[to]) for group in self.groups for source, to in pairs])

    def alltoall(self, x: PyTree) -> PyTree:
        """Rotations."""
        return alltoall_by_rotation(x, self)

    def allgather(self, x: PyTree) -> PyTree:
        """Rotations by one place."""
        return allgather_by_rotation(x, self)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """The rows of all, added in rank order."""
        return add_rows(self.allgather(x))

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """Row `root` of an allgather."""
        return take(self.allgather(x), root)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """As the whole."""
        return self.comm.loop(turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The rows of all, added in rank order; where they are is not asked."""
        return [add_rows(rows) / divisor for rows in self.allgather(list(vectors))]

    def sign(self, statement: Statement) -> None:
        """As the whole."""
        self.comm.sign(statement)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """As the whole."""
        return self.comm.jit(function, donate_argnums)


def split_by_host(comm: Comm) -> tuple[Comm, Comm]:
    """The ranks of each host (of one host: `comm` itself), and those of equal place on all hosts, as Comms.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    hosts = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    counts = [len(ranks) for ranks in hosts]
    check(
        len(set(counts)) == 1,
        f"strategy hier-<cross>: got hosts with {', '.join(map(str, counts))} ranks; expected equally many on each. "
        "Start the same number of ranks on every host, or use ring or tree",
    )
    across = list(zip(*hosts, strict=True))
    inside = SubComm(comm, hosts, (0,) * counts[0]) if len(hosts) > 1 else comm
    return inside, SubComm(comm, across, tuple(range(len(hosts))))


# ---------------------------------------------------------------- the table


class Row(NamedTuple):
    """A strategy and the wires it can use."""

    sum: Callable[..., jax.Array]  # a Sum, once `<k>` or `<cross>` of the name is filled in
    wires: tuple[str, ...]
    crosses: bool = False  # whether it needs nothing but `permute`, and so can be the <cross> of hier-<cross>
    means: Means | None = None  # sums over a divisor of f32 arrays of any shapes at once, where that is faster
    fits: Callable[[Sequence[int]], bool] = lambda hosts: True  # by the hosts of all ranks


def is_even(hosts: Sequence[int]) -> bool:
    """Whether all hosts have equally many ranks."""
    return len(set(collections.Counter(hosts).values())) == 1


def is_one(hosts: Sequence[int]) -> bool:
    """Whether all ranks are on one host."""
    return len(set(hosts)) == 1


ALL = tuple(WIRES)
STRATEGIES: dict[str, Row] = {
    "ar": Row(allreduce, ("32",)),
    "asa": Row(alltoall_sum_allgather, ALL, crosses=True),
    "ring": Row(ring, ALL, crosses=True),
    "tree": Row(pairwise, ALL, crosses=True),
    "color<k>": Row(coloured_trees, ALL, crosses=True),
    "pipering": Row(functools.partial(coloured_trees, colours=1), ALL, crosses=True),
    "root": Row(all_to_root, ALL, crosses=True),
    "hier-<cross>": Row(hierarchical, ALL, fits=is_even),
    "shm": Row(shared_memory, ("32",), means=shared_memory_means, fits=is_one),
    "none": Row(none, ("32",), means=own_means),
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
    """`algorithm[:wire]` or an alias as a Strategy; the wire is 32 where none is given.

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


def find(algorithm: str) -> Row:
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
