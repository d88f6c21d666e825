"""Recursive halving, then doubling, between partners. Thakur et al. 2005, section 4."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.allreduce.algorithms.spec import ALL, Net, StrategySpec, add, code, crossings, turn
from jaxmpi.allreduce.building_blocks import pad, ring_index, spread
from jaxmpi.allreduce.schedules import Group, Schedule, Span, in_columns
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm, Pairs
from jaxmpi.core.pytrees import PyTree


def pairwise(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Halve and add between partners, then double on the way back.

    With p the largest power of two <= w: sends 2 (p - 1) / p of the vector in 2 log2 p messages; the w - p places above
    fold theirs in before and get the sum after, whole. Rounds log2 p + 1 times, and once more for the fold. Partners
    are 1, 2, 4, ... places apart, so neighbours exchange the largest halves. Thakur et al. 2005, section 4; for any w
    what Theano-MPI's copper did for 2, 4, 8 and 16.
    """
    levels = comm.size.bit_length() - 1
    p, order, place = 1 << levels, comm.order, ring_index(comm)
    folds = [(order[i], order[i - p]) for i in range(p, comm.size)]
    partners = [[(order[i], order[i ^ (1 << level)]) for i in range(p)] for level in range(levels)]
    rows = pad(x, p).reshape(p, -1)  # each is encoded by itself
    if folds:
        rows = rows + wire.decode(comm.permute(wire.encode(rows), folds))
    # A worker rounds only the half that it sends, and adds what comes to its own, unrounded. Each half is kept by one
    # partner, so every entry is summed once, and its bits are the same wherever the sum goes.
    row = 0  # the row that is summed here
    for level, pairs in enumerate(partners):
        halves, side = rows.reshape(2, -1, rows.shape[-1]), (place >> level) & 1
        rows = halves[side] + wire.decode(comm.permute(wire.encode(halves[1 - side]), pairs))
        row = 2 * row + side
    blocks = jax.tree.map(lambda leaf: spread(leaf, p, row), wire.encode(rows[0]))
    for level, pairs in reversed(list(enumerate(partners))):
        blocks = double(blocks, comm, pairs, row, p >> (level + 1))
    if folds:
        result = comm.permute(blocks, [(low, high) for high, low in folds])
        blocks = jax.tree.map(functools.partial(jnp.where, place >= p), result, blocks)
    return wire.decode(blocks).reshape(-1)[: x.size]


def double(blocks: PyTree, comm: Comm, pairs: Pairs, mine: jax.Array | int, count: int) -> PyTree:
    """Send the `count` rows around `mine`; receive the partner's beside them."""
    start = mine // count * count
    outgoing = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, count), blocks)
    received = comm.permute(outgoing, pairs)
    return jax.tree.map(
        lambda leaf, rows: lax.dynamic_update_slice_in_dim(leaf, rows, start ^ count, 0), blocks, received
    )


def schedule_pairwise(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """The sum of `pairwise` over a power of two of ranks."""
    partners = [group.order[group.place ^ 1 << level] for level in range(group.size.bit_length() - 1)]
    kept_rows = list(range(group.size))  # rows that are still summed here
    for level, partner in enumerate(partners):
        low, high = kept_rows[: len(kept_rows) // 2], kept_rows[len(kept_rows) // 2 :]
        outgoing, kept_rows = (low, high) if group.place >> level & 1 else (high, low)
        with schedule.scratch():
            received = [schedule.message(rows[i].floats) for i in kept_rows]
            for i, message in zip(outgoing, received, strict=True):
                schedule.receive(message, partner)
                schedule.send(schedule.encode(rows[i]), partner)
            schedule.wait()
            for i, message in zip(kept_rows, received, strict=True):
                schedule.add(rows[i], [message, rows[i]])
    with schedule.scratch():
        results = {kept_rows[0]: schedule.encode(rows[kept_rows[0]])}
        schedule.decode(results[kept_rows[0]], rows[kept_rows[0]])
        for partner in reversed(partners):
            incoming = {i ^ len(results): schedule.landing(rows[i ^ len(results)]) for i in sorted(results)}
            for _, received in sorted(incoming.items()):
                schedule.receive(received, partner)
            for _, result in sorted(results.items()):
                schedule.send(result, partner)
            schedule.wait()
            for i, received in incoming.items():
                schedule.decode(received, rows[i])
            results |= incoming


def pairwise_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of halving and doubling.

    2 log2 p rounds of n / 2, n / 4, ...; if w > p two more of n. Thakur et al. 2005, section 4.5.
    """
    levels = net.workers.bit_length() - 1
    seconds = 0.0
    for level in range(levels):
        half = n / 2 ** (level + 1)
        seconds += 2 * turn(net, half, wire, crossings(net.hosts, net.slots, 1 << level))
        seconds += add(net, half) + code(net, 2 * half, wire)
    if net.workers > 1 << levels:
        fold = turn(net, n, wire, net.slots if net.hosts > 1 else 0)
        seconds += 2 * fold + add(net, n) + code(net, n, wire)
    return seconds


TREE = StrategySpec(
    pairwise,
    ALL,
    crosses=True,
    parts=functools.partial(in_columns, sum=schedule_pairwise),
    fits_parts=lambda hosts: len(hosts).bit_count() == 1,
    seconds=pairwise_seconds,
    pieces=lambda hosts: math.lcm(len(hosts), 1 << len(hosts).bit_length() - 1),
)
