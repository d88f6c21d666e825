"""How a bucket is summed. One function and one row of the table each, to be compared side by side.

A strategy takes f32[n], n % comm.size == 0, and gives the sum over workers, bitwise equal on all of them; it adds in
f32 whatever the wire. It sees only a Comm, whose rank may be a traced value: no Python branch on rank. Loops over ranks
are `lax` loops, so that a step at 64 ranks traces and compiles as fast as one at 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.comm import Comm
from jaxmpi.config import UsageError, lookup
from jaxmpi.wires import WIRES, Wire

Sum = Callable[[jax.Array, Comm, Wire], jax.Array]


def allreduce(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Whatever the MPI library's (or XLA's) own allreduce does; 32 bits only."""
    del wire
    return comm.allreduce(x)


def alltoall_sum_allgather(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """ASA: each worker sums its own slice of all workers' vectors, in rank order, then shares it.

    Sends 2 (w - 1) / w of the vector; rounds twice (slices sent, sum sent). Ma et al. 2016, section 3.2.
    """
    parts = wire.decode(comm.alltoall(wire.encode(x.reshape(comm.size, -1))))  # f32[w, n/w]: my slice of each worker
    mine = add_rows(parts)
    return wire.decode(comm.allgather(wire.encode(mine))).reshape(-1)


def ring(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Scatter-reduce, then allgather, around the ring of ranks ordered by host.

    Sends 2 (w - 1) / w of the vector in 2 (w - 1) messages; rounds once per hop while summing and once after.
    The second half forwards the encoded chunk, so that all workers decode the same bits. Gibiansky 2017.
    """
    size, chunks = comm.size, x.reshape(comm.size, -1)
    onward = [(comm.order[i], comm.order[(i + 1) % size]) for i in range(size)]
    place = jnp.argsort(jnp.array(comm.order))[comm.rank]  # mine in the ring

    def reduce_step(i: jax.Array, partial: jax.Array) -> jax.Array:
        received = wire.decode(comm.permute(wire.encode(partial), onward))
        return received + chunks[(place - i - 1) % size]

    mine = wire.encode(lax.fori_loop(0, size - 1, reduce_step, chunks[place]))  # the sum of chunk place + 1

    def gather_step(i: jax.Array, carry: tuple) -> tuple:
        total, travelling = carry
        travelling = comm.permute(travelling, onward)
        return total.at[(place - i) % size].set(wire.decode(travelling)), travelling

    total = jnp.empty_like(chunks).at[(place + 1) % size].set(wire.decode(mine))
    return lax.fori_loop(0, size - 1, gather_step, (total, mine))[0].reshape(-1)


def none(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """No exchange: the bound of compute alone. Workers drift apart."""
    del wire
    return x * comm.size


def add_rows(rows: jax.Array) -> jax.Array:
    """Sum f32[w, n] over its first axis, row after row.

    XLA:CPU walks `rows.sum(0)` column by column, a hundred times slower.
    """
    return lax.scan(lambda total, row: (total + row, None), rows[0], rows[1:], unroll=8)[0]


class Row(NamedTuple):
    """A strategy and the wires it can use."""

    sum: Sum
    wires: tuple[str, ...]


ALL = tuple(WIRES)
STRATEGIES: dict[str, Row] = {
    "ar": Row(allreduce, ("32",)),
    "asa": Row(alltoall_sum_allgather, ALL),
    "ring": Row(ring, ALL),
    "none": Row(none, ("32",)),
}
ALIASES = {
    "asa32": "asa:32",
    "asa16": "asa:16",
    "asabf16": "asa:bf16",
    "ring32": "ring:32",
    "ring16": "ring:16",
}


class Strategy(NamedTuple):
    """A spelled-out choice, such as `ring:16`."""

    name: str
    sum: Sum
    wire: Wire


def parse(spelling: str) -> Strategy:
    """`algorithm[:wire]` or an alias as a Strategy; the wire is 32 where none is given.

    Raises:
        UsageError: the algorithm or the wire is unknown, or the algorithm cannot use the wire.
    """
    algorithm, _, wire = ALIASES.get(spelling, spelling).partition(":")
    wire = wire or "32"
    row = lookup(STRATEGIES, algorithm, "strategy") if spelling not in ALIASES else STRATEGIES[algorithm]
    encoding = lookup(WIRES, wire, "wire")
    if wire not in row.wires:
        raise UsageError(f"strategy {algorithm!r} cannot use wire {wire!r}; it takes {', '.join(row.wires)}")
    return Strategy(f"{algorithm}:{wire}", row.sum, encoding)
