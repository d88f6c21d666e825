"""Costs of messages, additions and encodings, for the algorithms' cost formulas.

The alpha-beta-gamma model (Thakur et al. 2005, section 3.2): a message of m bytes takes alpha + beta m, adding m bytes
takes gamma m. Here a message has another price inside a host than between hosts. Between hosts the ranks of a host
share its card. Work on a host's cores takes longer if the host has more ranks than cores.

w workers on h hosts of s slots each; n floats of b bytes on the wire. All ranks work at once, so a round costs what it
costs the slowest rank.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.wires import BLOCK, WIRES
from jaxmpi.core.errors import lookup


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
    """The most ranks of a host whose partner is on another.

    Partners are `distance` places apart, as in recursive halving.
    """
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
