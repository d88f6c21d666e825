"""A rank's examples, random key and output, and loops of uneven length."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.call_order import joint_call
from jaxmpi.comm.agreement import check_may_send, without_messages
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, mean_of_floats
from jaxmpi.data.sampler import Sampler

T = TypeVar("T")


def sampler(examples: int, effective_batch: int, *, seed: int = 0, shuffle: bool = True) -> Sampler:
    """This rank's share of every step's examples.

    A step has the same examples for any number of ranks. `x[sampler(len(x), 64).indices(step).indices]` is a batch,
    shorter at the end of an epoch, and on some ranks by one. For a compiled step
    `indices(step).filled(sampler.local_batch)` gives batches of one length with weights. Otherwise a rank that compiles
    for another length alone waits for the others, which do not. A plain mean of gradients over ranks also weighs
    examples of unequal batches wrongly (docs/own_loop.md has the loop). Communicates nothing.

    Args:
        examples: length of the data set.
        effective_batch: examples of a step over all ranks; `local_batch` of the sampler is the most that a rank gets.
        seed: of the order.
        shuffle: a new order every epoch; without it one epoch, in the order of the data.

    Raises:
        UsageError: a number is out of range.
    """
    control = processes()
    return Sampler(examples, effective_batch, control.rank, control.size, seed=seed, shuffle=shuffle)


def rank_key(seed: int) -> jax.Array:
    """A random key of this rank alone: `fold_in(key(seed), rank)`, from a seed of up to 64 bits.

    Raises:
        UsageError: the seed is no whole number from 0 to 2^64 - 1.
    """
    if isinstance(seed, Tracer):
        return jax.random.fold_in(jax.random.key(seed), processes().rank)
    if not (hasattr(seed, "__index__") and 0 <= operator.index(seed) < 2**64):
        raise UsageError(f"rank_key: seed: got {seed!r}; expected a whole number from 0 to 2^64 - 1")
    low, high = np.uint32(int(seed) % 2**32), np.uint32(int(seed) // 2**32)
    key = jax.random.key(low)  # without 64-bit types JAX takes the low 32 bits alone; so the high ones are folded in
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, processes().rank)


def print0(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """`print` on rank 0, at once."""
    if processes().rank == 0:
        print(*values, sep=sep, end=end, flush=True)


def on_rank0(function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
    """Call a function on rank 0 and return its result; None elsewhere.

    A compiled function that sends must not be called in it. It is refused only while JAX traces it. A program that was
    compiled before runs no Python. It waits for the other ranks until the time limit, which names them.

    Raises:
        UsageError: the function sends a message, for which the other ranks do not come.
    """
    if processes().rank:
        return None
    name = getattr(function, "__qualname__", repr(function))
    with without_messages(f"on_rank0({name})", "on rank 0 alone", "call it on all ranks, before or after"):
        return function(*arguments, **options)


def average_statistics(tree: PyTree) -> PyTree:
    """Average float leaves over ranks, such as BatchNorm's running statistics.

    Other leaves stay each rank's own. Communicates: one exchange, in 32 bits. Raises: as `jaxmpi.exchange`.
    """
    return mean_of_floats(tree, exchange)


def join(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield (batch, is it a new one) until all ranks' batches end.

    A rank whose batches have ended repeats its last one, so that it goes on to take part in exchanges. Give such a
    batch weight 0, and divide sums of gradients by the sum of weights. If a compiled step exchanges, batches must have
    one shape on all ranks, the last ones, too.

    Communicates: 48 bytes a step.

    Raises:
        UsageError: on all ranks alike: some have no batch at all.
    """
    control, source = processes(), iter(batches)
    last: Any = None
    step = 0
    while True:
        check_may_send("jaxmpi.join")
        found = next(source, _END)
        with joint_call(control, "jaxmpi.join"):
            control.assert_same("jaxmpi.join", None)
            are_there = control.allgather_array(np.array([found is not _END], np.float64))[:, 0]
        if not are_there.any():
            return
        absent = np.flatnonzero(are_there == 0).tolist()
        check(step > 0 or not absent, f"jaxmpi.join: got no batch on rank {absent}; expected one or more on each")
        last = last if found is _END else found
        yield last, found is not _END
        step += 1


_END: Any = object()
