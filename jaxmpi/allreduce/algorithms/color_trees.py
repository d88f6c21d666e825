"""Multi-colour trees: several spanning trees that each sum a part.

In a single tree the inner workers send and add, while the leaves send once and wait. Kumar et al. 2018, section 4.2,
cut the vector into k parts, each with a tree of its own. A worker is an inner node of one tree at most and a leaf of
all others, so the load is nearly even: each sends at most e/k n floats, for e edges (`most_edges`). That is at most 2 n
if the workers leave a remainder of 0 or 1 by k, and always below 3 n. Parts travel in packets, of which one climbs
while earlier ones come down. Edges of all trees are put into rounds in which a worker sends once and receives once at
most, as a permutation needs: an edge colouring (Koenig 1916). Here the number of workers may be any. One colour is
their pipelined ring.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.algorithms.spec import ALL, Net, StrategySpec, add, code, turn, wire_format
from jaxmpi.allreduce.building_blocks import pad, put, ring_index, take
from jaxmpi.allreduce.schedules import HOST_MESSAGE_BYTES, MESSAGE_BYTES, Group, Part, Schedule, Span, columns
from jaxmpi.allreduce.wires import BLOCK, Wire
from jaxmpi.comm.base import Comm
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import round_up

PRICE = 1 << 13  # floats that would travel in the time that a message costs by itself, roughly, on most networks
MAX_COLOURS = 16


def coloured_trees(x: jax.Array, comm: Comm, wire: Wire, colours: int) -> jax.Array:
    """Sum k parts, each in packets up and down its own tree.

    A packet takes 2 height messages one after another; while it climbs, the next follows and earlier ones come down.
    Rounds once per edge on the way up and once at the root. Kumar et al. 2018 (IBM), section 4.2; their pipelined ring
    is the case of one colour, whose tree is a chain.
    """
    forest, place = build_trees(comm.size, colours), ring_index(comm)
    k, height = len(forest.depth), forest.height
    _, part = coloured_cut(x.size, comm.size, colours)
    packets = packets_of(x.size, k, height)
    rows_of_packets = packets * packet_length(part, packets)
    blocks = jax.vmap(lambda row: pad(row, rows_of_packets))(pad(x, k * part).reshape(k, part)).reshape(k, packets, -1)
    depth = jnp.asarray(forest.depth)[:, place]  # depth of this place in each tree
    interior_tree = jnp.asarray(forest.interior_tree)[place]  # the one tree in which it has children
    colour = [jnp.asarray(row)[place] for row in forest.colour]  # in each round, the tree in which it has a parent
    climbs = [[(comm.order[child], comm.order[parent]) for _, child, parent in edges] for edges in forest.rounds]
    descents = [[(parent, child) for child, parent in edges] for edges in climbs]

    def landed(t: int | jax.Array, down: PyTree, rows: jax.Array) -> jax.Array:
        packet = t - 1 - height - depth  # number of the packet that came in the turn before; own data there has left
        place_out = (jnp.arange(k), jnp.where(packet < 0, packets, packet))  # if there is none, it falls off the end
        return put(rows, place_out, wire.decode(down))

    def step(t: jax.Array, carry: tuple) -> tuple:
        up, down, rows = carry
        rows = landed(t, down, rows)  # before the rows are read: else XLA would copy them in every turn
        received = jnp.zeros_like(rows[0, 0])
        for i, pairs in enumerate(climbs):
            received = received + wire.decode(comm.permute(take(up, colour[i]), pairs))
        partial = rows[jnp.arange(k), jnp.clip(t - height + depth, 0, packets - 1)]
        up = wire.encode(partial.at[interior_tree].add(received))
        next_down = up  # right at a root; all other rows come from parents
        for i, pairs in enumerate(descents):
            next_down = put(next_down, colour[i], comm.permute(take(down, interior_tree), pairs))
        return up, next_down, rows

    zeros, turns = jax.tree.map(jnp.zeros_like, wire.encode(blocks[:, 0])), packets + 2 * height
    _, down, rows = comm.loop(turns, step, (zeros, zeros, blocks))
    return landed(turns, down, rows).reshape(k, -1)[:, :part].reshape(-1)[: x.size]


def coloured_parts(n: int, group: Group, wire: Wire, colours: int) -> Iterator[Part]:
    """Cut the packets of `coloured_trees` into messages, each one part that goes up and down its tree when it can."""
    forest = build_trees(group.size, colours)
    padded = group.size * -(-n // group.size)
    k, part = coloured_cut(padded, group.size, colours)
    packets = packets_of(padded, k, forest.height)
    length = packet_length(part, packets)
    width = message_of(length, columns(wire, group))
    climbs = [functools.partial(up_and_down, forest=forest, tree=c) for c in range(k)]
    for packet in range(0, part, length):
        for start in range(packet, min(part, packet + length), width):
            for c, climb in enumerate(climbs):  # so all trees have as much under way
                begin, end = c * part + start, min(n, c * part + min(start + width, packet + length, part))
                if begin < end:
                    yield Part([(begin, end)], climb)


def up_and_down(rows: Sequence[Span], group: Group, schedule: Schedule, forest: "TreeSchedule", tree: int) -> None:
    """Add the children's parts, exchange with the parent, send the sum down."""
    [row], parent = rows, forest.parent[tree][group.place]
    children = [group.order[child] for child in forest.children[tree][group.place]]
    with schedule.scratch():
        if children:
            received = [schedule.message(row.floats) for _ in children]
            for child, message in zip(children, received, strict=True):
                schedule.receive(message, child)
            schedule.wait()
            total = schedule.floats(row.floats)
            schedule.add(total, received, from_zero=True)  # so no sum is -0
            schedule.add(row, [row, total])
        outgoing = schedule.encode(row)
        if parent >= 0:
            schedule.send(outgoing, group.order[parent])
            schedule.wait()
            outgoing = schedule.landing(row)
            schedule.receive(outgoing, group.order[parent])
            schedule.wait()
        schedule.decode(outgoing, row)
        for child in children:
            schedule.send(outgoing, child)
        schedule.wait()


# ---------------------------------------------------------------- what they are made of


def coloured_cut(n: int, workers: int, colours: int) -> tuple[int, int]:
    """Number of parts, and floats of each: a multiple of the workers.

    So parts of K vectors are together those of one of K n floats. Therefore devices of one process add as ranks do.
    """
    k = min(colours, workers)
    return k, workers * -(-n // (k * workers))


def packets_of(n: float, k: int, height: int) -> int:
    """The cheapest number of packets for each tree: m take m + 2 height turns of PRICE + n / (k m) each."""
    return max(1, round(math.sqrt(2 * height * n / (k * PRICE))))


def packet_length(part: int, packets: int) -> int:
    """Floats of a packet: whole blocks unless it is shorter, so that no block of a wire lies in two leaves."""
    length = -(-part // packets)
    return length if length < BLOCK else min(part, round_up(length, BLOCK))


class TreeSchedule(NamedTuple):
    """k spanning trees over w places, and when which edge is used."""

    parent: list[list[int]]  # [k][w]; -1 at a root
    children: list[list[list[int]]]  # [k][w], in the order of rounds
    depth: np.ndarray  # i32[k, w]
    height: int
    interior_tree: np.ndarray  # i32[w]: the tree in which a place has children; 0 if it has none
    rounds: list[list[tuple[int, int, int]]]  # (tree, child, parent); in a round all send once and receive once at most
    colour: np.ndarray  # i32[rounds, w]: the tree in which a place sends to its parent; k if it does not


@functools.cache
def build_trees(workers: int, colours: int) -> TreeSchedule:
    """IBM's trees for any number of workers, each with other inner nodes.

    k = min(colours, w) trees, I = floor(w / k) places each that may have children, arity a = ceil((w - 1) / I). Tree c
    holds places cI, cI + 1, ... modulo w at positions 0, 1, ...; the children of position q are a q + 1 ... a q + a.
    So positions with children are below I, and their places in [cI, (c + 1) I). For 8 places and 4 colours that is
    figure 2 of Kumar et al. 2018.
    """
    k, arity, height = tree_shape(workers, colours)
    interior = workers // k
    parent = [[-1] * workers for _ in range(k)]
    depth, interior_tree = np.zeros((k, workers), np.int32), np.zeros(workers, np.int32)
    for c in range(k):
        for position in range(1, workers):
            child, parent_place = ((c * interior + q) % workers for q in (position, (position - 1) // arity))
            parent[c][child], interior_tree[parent_place] = parent_place, c
            depth[c, child] = depth[c, parent_place] + 1
    edges = [(c, child, p) for c in range(k) for child, p in enumerate(parent[c]) if p >= 0]
    rounds = schedule(edges)
    children: list[list[list[int]]] = [[[] for _ in range(workers)] for _ in range(k)]
    for edges_at_once in rounds:
        for c, child, parent_place in edges_at_once:
            children[c][parent_place].append(child)
    colour = np.full((len(rounds), workers), k, np.int32)
    for i, edges_at_once in enumerate(rounds):
        for c, child, _ in edges_at_once:
            colour[i, child] = c
    return TreeSchedule(parent, children, depth, height, interior_tree, rounds, colour)


def schedule(edges: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Edges in rounds: in each, places send and receive at most once.

    There are as many rounds as the busiest place has edges (Koenig 1916). The ends of an edge may have no free round in
    common. The edge then swaps two rounds along the path that is in its way. An edge is (tree, child, parent).
    """
    edge_at: dict[tuple[str, int, int], tuple[int, int, int]] = {}  # (end, place, round): the edge

    def ends(edge: tuple[int, int, int]) -> list[tuple[str, int]]:
        return [("child", edge[1]), ("parent", edge[2])]

    def free(end: tuple[str, int]) -> int:
        return next(i for i in range(len(edges)) if (*end, i) not in edge_at)

    for edge in edges:
        child, end = ends(edge)
        first, second = free(child), free(end)
        path, slot = [], first
        while (step := edge_at.get((*end, slot))) is not None:
            path.append((step, slot))
            [end] = [e for e in ends(step) if e != end]
            slot = second if slot == first else first
        for step, slot in path:
            for e in ends(step):
                edge_at.pop((*e, slot), None)
        swapped_path = [(step, second if slot == first else first) for step, slot in path]
        for step, slot in [*swapped_path, (edge, first)]:
            edge_at |= {(*e, slot): step for e in ends(step)}
    count = max((i for _, _, i in edge_at), default=-1) + 1
    return [[edge for (end, _, slot), edge in edge_at.items() if end == "child" and slot == i] for i in range(count)]


def message_of(length: int, limit: int) -> int:
    """Floats of a packet's messages: whole blocks, and as even as possible."""
    messages = max(1, -(-length // limit))
    return max(1, -(-length // messages // BLOCK)) * BLOCK


# ---------------------------------------------------------------- what they cost


def coloured_trees_seconds(net: Net, n: float, wire: str, colours: int) -> float:
    """Seconds of 2 H messages one after another, for height H, and of n / k floats for each edge of the busiest place.

    Other messages travel meanwhile, as those of `coloured_parts`. Kumar et al. 2018, section 4.2.
    """
    k, arity, height = tree_shape(net.workers, colours)
    crossing = 0 if net.hosts == 1 else 1 if k == 1 else net.slots
    message_limit = HOST_MESSAGE_BYTES if net.hosts == 1 else MESSAGE_BYTES
    message = min(n / (k * packets_of(n, k, height)), message_limit / wire_format(wire)[1])
    sent_floats, added_floats = most_edges(net.workers, k, arity) * n / k, arity * n / k
    volume = turn(net, sent_floats, wire, crossing) - turn(net, 0, wire, crossing)
    codec_s = code(net, n + added_floats, wire)
    return 2 * height * turn(net, message, wire, crossing) + volume + add(net, added_floats) + codec_s


def most_edges(workers: int, k: int, arity: int) -> int:
    """Edges over which the busiest place, at position 0 or 1, sends."""
    return max(k - 1 + min(arity, workers - 1), k + min(arity, max(0, workers - 1 - arity)))


@functools.cache
def tree_shape(workers: int, colours: int) -> tuple[int, int, int]:
    """(trees, children of a node, height) of `build_trees`, without building them."""
    k = min(colours, workers)
    arity = max(1, -(-(workers - 1) // (workers // k)))
    height, position = 0, workers - 1
    while position > 0:
        height, position = height + 1, (position - 1) // arity
    return k, arity, height


def color(colours: int) -> StrategySpec:
    """The row of so many colours."""
    return StrategySpec(
        functools.partial(coloured_trees, colours=colours),
        ALL,
        crosses=True,
        parts=functools.partial(coloured_parts, colours=colours),
        seconds=functools.partial(coloured_trees_seconds, colours=colours),
        cut=functools.partial(coloured_cut, colours=colours),
        pieces=lambda hosts: min(colours, len(hosts)) * len(hosts),  # parts of `coloured_cut` times workers
    )


COLOR = color(4)._replace(spelled=("color2", "color4"), fill=color)
PIPELINED_RING = color(1)
