"""Cost model of an exchange: predicted seconds of every strategy. One function and one row of the table each.

The alpha-beta-gamma model (Thakur et al. 2005, section 3.2): a message of m bytes takes alpha + beta m, adding m bytes
takes gamma m. Here a message has another price inside a host than between hosts, if the ranks of a host share its
card, and what runs on a host's cores takes longer if it has more ranks than cores.

w workers on h hosts of s slots each; n floats of b bytes on the wire. All ranks work at once, so a round costs what it
costs the slowest rank.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.algorithms import find
from jaxmpi.allreduce.color_trees import PRICE
from jaxmpi.allreduce.wires import BLOCK, WIRES
from jaxmpi.comm.shared_sum import CHUNK
from jaxmpi.core.errors import check, lookup


class Link(NamedTuple):
    """Price of a message between two ranks."""

    alpha_s: float  # by itself
    beta_s_per_byte: float  # for each byte


class Net(NamedTuple):
    """Hosts, links and cores of an exchange."""

    hosts: int
    slots: int  # ranks of each host
    inside: Link  # in a host, between two ranks with a core each
    between: Link  # from host to host; beta of the host's card, which its ranks share
    gamma_s_per_byte: float = 0.0  # to add float32 numbers, on a core
    codec_s_per_float: Mapping[str, float] = {}  # by wire: to encode and decode one, on a core
    cores: float = math.inf  # of a host; less than one if hosts are emulated
    call_s: float = 0.0  # of a program that exchanges, whatever it exchanges
    even: bool = True  # whether all hosts have equally many ranks; else `slots` is the largest number

    @property
    def workers(self) -> int:
        """On all hosts."""
        return self.hosts * self.slots

    @property
    def crowd(self) -> float:
        """How much longer a core's work takes because ranks share cores."""
        return max(1.0, self.slots / self.cores)


Cost = Callable[[Net, float, str], float]  # (where, floats, wire) -> seconds


def allreduce(net: Net, n: float, wire: str) -> float:
    """The better of recursive doubling, log2 w rounds of all n, and halving with doubling, as of `pairwise`.

    What good libraries do for short and for long vectors. Thakur et al. 2005, section 4.5.
    """
    levels = range(max(1, math.ceil(math.log2(net.workers))))
    doubling = sum(turn(net, n, wire, crossings(net, 1 << level)) + add(net, n) for level in levels)
    return min(doubling, pairwise(net, n, wire))


def alltoall_sum_allgather(net: Net, n: float, wire: str) -> float:
    """2 (w - 1) rounds of n / w: rotations, which cross hosts with up to s ranks of a host, then a ring with one.

    Rotations as of Thakur et al. 2005, section 4.4 (pairwise exchange) and 4.1 (ring allgather).
    """
    w, part = net.workers, n / net.workers
    rounds = [min(i, w - i, net.slots) if net.hosts > 1 else 0 for i in range(1, w)]
    scatter = sum(rounds.count(c) * turn(net, part, wire, c) for c in set(rounds))
    return scatter + (w - 1) * turn(net, part, wire, ring_crossing(net)) + add(net, n) + code(net, 2 * n, wire)


def ring(net: Net, n: float, wire: str) -> float:
    """2 (w - 1) rounds of n / w: 2 (w - 1) alpha + 2 (w - 1) / w n b beta. Gibiansky 2017."""
    w = net.workers
    rounds = 2 * (w - 1) * turn(net, n / w, wire, ring_crossing(net))
    return rounds + add(net, (w - 1) / w * n) + code(net, 2 * n, wire)


def pairwise(net: Net, n: float, wire: str) -> float:
    """2 log2 p rounds of n / 2, n / 4, ...; where w > p two more of n. Thakur et al. 2005, section 4.5."""
    levels = net.workers.bit_length() - 1
    seconds = 0.0
    for level in range(levels):
        half = n / 2 ** (level + 1)
        seconds += 2 * turn(net, half, wire, crossings(net, 1 << level))
        seconds += add(net, half) + code(net, 2 * half, wire)
    if net.workers > 1 << levels:
        fold = turn(net, n, wire, net.slots if net.hosts > 1 else 0)
        seconds += 2 * fold + add(net, n) + code(net, n, wire)
    return seconds


def all_to_root(net: Net, n: float, wire: str) -> float:
    """2 (w - 1) messages of n, one after another, and as many additions by one rank.

    The growth with w that Gibiansky 2017 begins with.
    """
    alone = net._replace(slots=1)  # who does not send or receive waits, and leaves its core to the others
    inside = (net.slots - 1) * turn(alone._replace(slots=2), n, wire, 0)
    between = (net.workers - net.slots) * turn(alone, n, wire, 1)
    return 2 * (inside + between) + (net.workers - 1) * (add(alone, n) + code(alone, n, wire) / 2)


def coloured_trees(net: Net, n: float, wire: str, colours: int) -> float:
    """Turns: m + 2 H, each of 2 max(k, a) rounds of n / (k m), for m packets a part, trees of height H and arity a.

    Kumar et al. 2018, section 4.2, with the schedule of `color_trees.coloured_trees`: packets without content travel
    too.
    """
    k, arity, height = forest(net.workers, colours)
    packets = max(1, round(math.sqrt(2 * height * n / (k * PRICE))))
    turns, rounds = packets + 2 * height, 2 * max(arity, min(k, net.workers - 1))
    packet = n / (k * packets)
    crossing = ring_crossing(net) if k == 1 else net.slots if net.hosts > 1 else 0
    each = rounds * turn(net, packet, wire, crossing)
    return turns * (each + add(net, (k + rounds / 2) * packet) + code(net, (k + rounds / 2) * packet, wire))


def hierarchical(net: Net, n: float, wire: str, cross: Cost) -> float:
    """Inside, s - 1 rounds of n / s at 32 bits before and after; between, `cross` of n / s by all s ranks at once."""
    host = net._replace(hosts=1)
    inside = 2 * (net.slots - 1) * turn(host, n / net.slots, "32", 0) + add(host, n)
    shared = Link(net.between.alpha_s, net.between.beta_s_per_byte * net.slots)
    across = net._replace(slots=1, between=shared, cores=net.cores / net.slots)
    return inside + (cross(across, n / net.slots, wire) if net.hosts > 1 else 0.0)


def shared_memory(net: Net, n: float, wire: str) -> float:
    """A chain over chunks: every rank adds n floats and copies n out, as a message inside moves n; one wait a link.

    `shared_sum.SharedSum` of long vectors, by rank: it reads its n floats and the slot, writes the slot, which is an
    addition, then reads the slot and writes its result, which is a message's way. Only on one host.
    """
    wait = (net.workers + n / CHUNK) * net.inside.alpha_s
    return (wait + n * wire_format(wire)[1] * net.inside.beta_s_per_byte) * net.crowd + add(net, n)


def none(net: Net, n: float, wire: str) -> float:
    """Nothing travels."""
    del net, n, wire
    return 0.0


# ---------------------------------------------------------------- what they are made of


def turn(net: Net, floats: float, wire: str, crossing: int) -> float:
    """A round in which every rank sends and receives so many floats, `crossing` of a host's ranks from host to host.

    An encoding of several arrays travels as so many messages.
    """
    count, each = wire_format(wire)
    inside = (count * net.inside.alpha_s + floats * each * net.inside.beta_s_per_byte) * net.crowd
    if crossing == 0:
        return inside
    between = count * net.between.alpha_s * net.crowd + crossing * floats * each * net.between.beta_s_per_byte
    return between if crossing >= net.slots else max(inside, between)


def add(net: Net, floats: float) -> float:
    """Every rank adds so many floats to others."""
    return 4 * floats * net.gamma_s_per_byte * net.crowd


def code(net: Net, floats: float, wire: str) -> float:
    """Every rank encodes so many floats and decodes as many."""
    return floats * net.codec_s_per_float.get(wire, 0.0) * net.crowd


def ring_crossing(net: Net) -> int:
    """Ranks of a host whose neighbour, by host, is on another."""
    return int(net.hosts > 1)


def crossings(net: Net, distance: int) -> int:
    """The most ranks of a host whose partner, `distance` places away by recursive halving, is on another host."""
    return _crossings(net.hosts, net.slots, distance)


@functools.cache
def _crossings(hosts: int, slots: int, distance: int) -> int:
    place = np.arange(1 << (hosts * slots).bit_length() - 1)
    host, partner = place // slots, (place ^ distance) // slots
    return int(np.bincount(host[host != partner], minlength=1).max())


@functools.cache
def wire_format(wire: str) -> tuple[int, float]:
    """(arrays, bytes a float) of a wire, scales included."""
    n = 1024 * BLOCK
    sent = jax.tree.leaves(jax.eval_shape(lookup(WIRES, wire, "wire").encode, jax.ShapeDtypeStruct((n,), jnp.float32)))
    return len(sent), sum(leaf.size * leaf.dtype.itemsize for leaf in sent) / n


@functools.cache
def forest(workers: int, colours: int) -> tuple[int, int, int]:
    """(trees, children of a node, height) of `color_trees.plant`, without planting."""
    k = min(colours, workers)
    arity = max(1, -(-(workers - 1) // (workers // k)))
    height, position = 0, workers - 1
    while position > 0:
        height, position = height + 1, (position - 1) // arity
    return k, arity, height


# ---------------------------------------------------------------- the table


class CostSpec(NamedTuple):
    """A strategy's cost, and where `auto` may take it."""

    seconds: Callable[..., float]  # a Cost, once `<k>` or `<cross>` of the name is filled in
    fits: Callable[[Net], bool] = lambda net: True
    spelled: tuple[str, ...] = ()  # what to try if the name has a blank


COSTS: dict[str, CostSpec] = {
    "ar": CostSpec(allreduce, lambda net: False),  # libraries need not repeat it bit for bit, and a resumed run must
    "asa": CostSpec(alltoall_sum_allgather),
    "ring": CostSpec(ring),
    "tree": CostSpec(pairwise),
    "color<k>": CostSpec(coloured_trees, spelled=("color2", "color4")),
    "pipering": CostSpec(functools.partial(coloured_trees, colours=1)),
    "root": CostSpec(all_to_root),
    "hier-<cross>": CostSpec(
        hierarchical,
        lambda net: net.even and net.hosts > 1 and net.slots > 1,
        ("hier-asa", "hier-ring", "hier-tree", "hier-color4"),
    ),
    "shm": CostSpec(shared_memory, lambda net: net.hosts == 1),
    "none": CostSpec(none, lambda net: False),  # it would always win
}


def candidates(net: Net, wires: Sequence[str]) -> list[str]:
    """Strategies in full, such as ring:16, that `auto` may use there with one of these wires."""
    names = [name for key, row in COSTS.items() if row.fits(net) for name in row.spelled or (key,)]
    return [f"{name}:{wire}" for name in names for wire in wires if wire in find(name).wires]


@functools.cache
def cost_of(algorithm: str) -> Cost:
    """The function of `ring`, `color4` or `hier-ring`, the last two with their blanks filled in."""
    find(algorithm)  # which knows how to refuse
    if colours := re.fullmatch(r"color(\d+)", algorithm):
        return functools.partial(COSTS["color<k>"].seconds, colours=int(colours[1]))
    if algorithm.startswith("hier-"):
        return functools.partial(COSTS["hier-<cross>"].seconds, cross=cost_of(algorithm.removeprefix("hier-")))
    return lookup(COSTS, algorithm, "strategy").seconds


class Fit(NamedTuple):
    """How a strategy as measured compares to its formula: factors on its two parts."""

    latency: float = 1.0  # what does not grow with the bytes
    volume: float = 1.0  # what does


Fits = Mapping[str, Fit]


def predict(net: Net, n: float, strategy: str, fits: Fits | None = None) -> float:
    """Seconds to sum n floats by a strategy in full, such as ring:16, within a program; 0 with one worker.

    With `fits` a strategy's own measured factors count.
    """
    latency, volume = parts(net, n, strategy)
    fit = (fits or {}).get(strategy, Fit())
    return fit.latency * latency + fit.volume * volume


def parts(net: Net, n: float, strategy: str) -> tuple[float, float]:
    """(what messages cost by themselves, what their bytes cost), in seconds."""
    if net.workers == 1 or n == 0:
        return 0.0, 0.0
    algorithm, _, wire = strategy.partition(":")
    seconds = cost_of(algorithm)
    free = net._replace(
        inside=Link(net.inside.alpha_s, 0.0),
        between=Link(net.between.alpha_s, 0.0),
        gamma_s_per_byte=0.0,
        codec_s_per_float={},
    )
    latency = seconds(free, n, wire or "32")
    return latency, max(0.0, seconds(net, n, wire or "32") - latency)


def fit(net: Net, strategy: str, measured: Mapping[int, float]) -> Fit:
    """The factors with which the formula gives the measured seconds, by floats, of programs of one sum each.

    Least squares of relative errors; if a factor would be negative, one for both, that of the longest vector.
    """
    check(bool(measured), f"{strategy}: nothing measured")
    seconds = [[max(s - net.call_s, s / 10)] for s in measured.values()]
    rows = np.array([parts(net, n, strategy) for n in measured]) / np.array(seconds)
    if np.linalg.matrix_rank(rows, tol=1e-6) == 2:
        latency, volume = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
        if latency > 0 and volume > 0:
            return Fit(latency, volume)
    longest = float(rows[np.argmax(list(measured))].sum())
    factor = 1 / longest if longest > 0 else 1.0
    return Fit(factor, factor)
