"""A strategy over the vectors of an exchange: all at once, by the communication thread, or one after another."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmpi import engine
from jaxmpi.comm import Comm, MpiComm, world
from jaxmpi.engine import Calls, travelled
from jaxmpi.strategies import Strategy, parse


def sums(vectors: Sequence[jax.Array], name: str, comm: Comm, divisor: float = 1) -> list[jax.Array]:
    """Sums over workers, by a strategy in full such as asa:32, of f32 arrays of any shape; over `divisor`."""
    strategy, flat = parse(name), [x.reshape(-1) for x in vectors]
    if strategy.means:
        return strategy.means(list(vectors), comm, divisor)
    if is_carried(name, comm):
        labels = [f"bucket {i + 1} of {len(flat)}" for i in range(len(flat))]
        plan = {"strategy": name, "floats of buckets": [x.size for x in flat]}
        totals = travelled(flat, Calls.of(name, comm, plan, flat, labels, portable=False))
    else:
        totals = [sum_bucket(x, strategy, comm) for x in flat]
    return [(total / divisor).reshape(x.shape) for x, total in zip(vectors, totals, strict=True)]


def is_carried(name: str, comm: Comm) -> bool:
    """Whether the communication thread makes the sums: between hosts it has many messages under way at once."""
    is_far = isinstance(comm, MpiComm) and comm is world() and len(set(comm.hosts)) > 1
    return is_far and not engine.why_not(name, comm)


def sum_bucket(flat: jax.Array, strategy: Strategy, comm: Comm) -> jax.Array:
    """The strategy over f32[n], padded to a multiple of the number of workers; nothing travels from one to itself."""
    if comm.size == 1:
        return flat
    missing = -flat.size % comm.size
    padded = jnp.pad(flat, (0, missing)) if missing else flat
    return strategy.sum(padded, comm, strategy.wire)[: flat.size]
