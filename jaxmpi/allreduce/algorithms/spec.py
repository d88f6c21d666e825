"""The specification of a strategy: its sums, wires, workers and cost; the prices that cost formulas are made of."""

import collections
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.schedules import Group, Parts, Schedule, Span, SumSchedule, in_columns
from jaxmpi.allreduce.wires import BLOCK, WIRES, Wire
from jaxmpi.comm.base import Comm
from jaxmpi.core.errors import lookup

ALL = WIRES.keys()  # and what is added later
Means = Callable[[list[jax.Array], Comm, float], list[jax.Array]]


class Halves(NamedTuple):
    """A sum as a reduce-scatter and an allgather, its two halves.

    `gather(scatter(x))` equals `sum` bit for bit, except for `ar`, where MPI or XLA chooses the order. The second
    half may take another wire than the first.
    """

    scatter: Callable[..., jax.Array]  # (f32[n], comm, wire) -> f32[n / w], the sum over workers of this one's chunk
    gather: Callable[..., jax.Array]  # (f32[n / w], comm, wire) -> f32[n]
    chunks: Callable[..., tuple[int, ...]] = lambda comm: tuple(range(comm.size))  # by rank, which chunk is its own
    means: Means | None = None  # the first half of all vectors at once, as of StrategySpec.means
    wholes: Callable[[list[jax.Array], Comm], list[jax.Array]] | None = None  # the second half of all, in any wire
    scatter_part: SumSchedule | None = None  # makes this worker's chunk the sum
    gather_part: SumSchedule | None = None  # makes all chunks what their workers have
    gathers: Collection[str] = ALL  # wires that the second half takes


class StrategySpec(NamedTuple):
    """A strategy: `sum` and its wires; all else is optional."""

    sum: Callable[..., jax.Array]  # (f32[n], comm, wire) -> f32[n]
    wires: Collection[str]
    crosses: bool = False  # True if it needs nothing but `permute`, and so can be the <cross> of hier-<cross>
    means: Means | None = None  # sums over a divisor of f32 arrays of any shapes at once, if that is faster
    fits: Callable[[Sequence[int]], bool] = lambda hosts: True  # by the hosts of all ranks
    parts: Parts | None = None  # the bits of `sum`, in C
    fits_parts: Callable[[Sequence[int]], bool] = lambda hosts: True  # likewise
    seconds: Callable[..., float] | None = (
        None  # (net, floats, wire) -> seconds; without one `auto` and `jaxmpi plan` leave it out
    )
    halves: Halves | None = None  # if other work can come between reduce-scatter and allgather
    # (n, workers) -> number and floats of parts, each of which is added in one order; without one as many as workers
    cut: Callable[..., tuple[int, int]] | None = None
    # by the hosts of all ranks: equal pieces into which a bucket is cut, so that each can be whole blocks of a wire;
    # without one as many as workers
    pieces: Callable[..., int] | None = None
    spelled: tuple[str, ...] = ()  # names to try if the name has a blank
    exchanges: bool = True  # else each worker keeps its own, and params drift apart
    in_shared_memory: bool = False  # by `SharedSum`, so that ranks of a host may share their params
    # what the blank of its name stands for -> the row of the name that is filled in
    fill: "Callable[..., StrategySpec] | None" = None


def in_halves(halves: Halves, **facts: Any) -> StrategySpec:
    """The row of a sum that is its two halves, one after the other, in a program and in C."""

    def sum(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
        return halves.gather(halves.scatter(x, comm, wire), comm, wire)

    def schedule(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
        assert halves.scatter_part
        assert halves.gather_part
        halves.scatter_part(rows, group, schedule)
        halves.gather_part(rows, group, schedule)

    return StrategySpec(sum, ALL, parts=functools.partial(in_columns, sum=schedule), halves=halves, **facts)


def is_even(hosts: Sequence[int]) -> bool:
    """Return True if all hosts have equally many ranks."""
    return len(set(collections.Counter(hosts).values())) == 1


def is_one(hosts: Sequence[int]) -> bool:
    """Return True if all ranks are on one host."""
    return len(set(hosts)) == 1


# ---------------------------------------------------------------- prices

# The alpha-beta-gamma model (Thakur et al. 2005, section 3.2): a message of m bytes takes alpha + beta m, adding m
# bytes takes gamma m. Here a message has another price inside a host than between hosts. Between hosts the ranks of a
# host share its card. Work on a host's cores takes longer if the host has more ranks than cores. w workers on h hosts
# of s slots each; n floats of b bytes on the wire. All ranks work at once, so a round costs what it costs the slowest
# rank.


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
    cores: float = math.inf  # cores of a host; less than one if hosts are emulated
    call_s: float = 0.0  # seconds of a program that exchanges, whatever it exchanges
    even: bool = True  # True if all hosts have equally many ranks; else `slots` is the largest number

    @property
    def workers(self) -> int:
        """Workers on all hosts."""
        return self.hosts * self.slots

    @property
    def crowd(self) -> float:
        """How much longer a core's work takes because ranks share cores."""
        return max(1.0, self.slots / self.cores)


def turn(net: Net, floats: float, wire: str, crossing: int) -> float:
    """Seconds of a round in which ranks send and receive `floats` each.

    `crossing` of a host's ranks send from host to host. An encoding of several arrays travels as so many messages.
    """
    count, float_bytes = wire_format(wire)
    inside = (count * net.inside.alpha_s + floats * float_bytes * net.inside.beta_s_per_byte) * net.crowd
    if crossing == 0:
        return inside
    between = count * net.between.alpha_s * net.crowd + crossing * floats * float_bytes * net.between.beta_s_per_byte
    return between if crossing >= net.slots else max(inside, between)


def add(net: Net, floats: float) -> float:
    """Every rank adds so many floats to others."""
    return 4 * floats * net.gamma_s_per_byte * net.crowd


def code(net: Net, floats: float, wire: str) -> float:
    """Every rank encodes so many floats and decodes as many."""
    return floats * net.codec_s_per_float.get(wire, 0.0) * net.crowd


@functools.cache
def crossings(hosts: int, slots: int, distance: int) -> int:
    """The most ranks of a host whose partner in recursive halving, `distance` places apart, is on another."""
    place = np.arange(1 << (hosts * slots).bit_length() - 1)
    host, partner = place // slots, (place ^ distance) // slots
    return int(np.bincount(host[host != partner], minlength=1).max())


@functools.cache
def wire_format(wire: str) -> tuple[int, float]:
    """(arrays, bytes a float) of a wire, scales included."""
    n = 1024 * BLOCK
    leaves = jax.tree.leaves(
        jax.eval_shape(lookup(WIRES, wire, "wire").encode, jax.ShapeDtypeStruct((n,), jnp.float32))
    )
    return len(leaves), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / n
