"""The specification of a strategy: its sums, wires, workers and cost."""

import collections
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax

from jaxmpi.allreduce.prices import Net
from jaxmpi.allreduce.schedules import Group, Part, Schedule, Span, SumSchedule
from jaxmpi.allreduce.wires import WIRES, Wire
from jaxmpi.comm.base import Comm

Sum = Callable[[jax.Array, Comm, Wire], jax.Array]
Means = Callable[[list[jax.Array], Comm, float], list[jax.Array]]
Wholes = Callable[[list[jax.Array], Comm], list[jax.Array]]
Cost = Callable[[Net, float, str], float]  # (network, floats, wire) -> seconds
ALL = WIRES.keys()  # and what is added later


class Halves(NamedTuple):
    """A sum as a reduce-scatter and an allgather, its two halves.

    `gather(scatter(x))` are the bits of `sum`, except for a library's own, which may add in another order. The second
    half may take another wire than the first.
    """

    scatter: Callable[..., jax.Array]  # (f32[n], comm, wire) -> f32[n / w], the sum over workers of this one's chunk
    gather: Callable[..., jax.Array]  # (f32[n / w], comm, wire) -> f32[n]
    chunks: Callable[..., tuple[int, ...]]  # (comm) -> by rank, which chunk is its own
    means: Means | None = None  # the first half of all vectors at once, as of StrategySpec.means
    wholes: Wholes | None = None  # the second half of all at once; as `means`, for all wires in `gathers` alike
    scatter_part: Callable[..., None] | None = None  # a SumSchedule: makes this worker's chunk the sum
    gather_part: Callable[..., None] | None = None  # a SumSchedule: makes all chunks what their workers have
    gathers: Collection[str] = ALL  # wires that the second half takes

    def scattered(self, vectors: list[jax.Array], comm: Comm, wire: Wire, divisor: float) -> list[jax.Array]:
        """f32[n] -> f32[n / w] each: this worker's summed chunk, over `divisor`.

        Chunks are divided as sums without halves are. XLA may divide by a constant as the product with its inverse,
        which rounds otherwise.
        """
        if self.means and vectors:
            return self.means(vectors, comm, divisor)
        return [self.scatter(x, comm, wire) / divisor for x in vectors]

    def gathered(self, chunks: list[jax.Array], comm: Comm, wire: Wire) -> list[jax.Array]:
        """f32[n / w] -> f32[n] each: the chunks of all workers."""
        if self.wholes and chunks:
            return self.wholes(chunks, comm)
        return [self.gather(chunk, comm, wire) for chunk in chunks]

    def across(self, cross: "Halves") -> "Halves":
        """Those of `hier-<cross>`, with the halves between hosts filled in."""
        return Halves(
            functools.partial(self.scatter, cross=cross),
            functools.partial(self.gather, cross=cross),
            functools.partial(self.chunks, cross=cross),
            scatter_part=_across(self.scatter_part, cross.scatter_part),
            gather_part=_across(self.gather_part, cross.gather_part),
        )


def _across(half: Callable[..., None] | None, cross: SumSchedule | None) -> SumSchedule | None:
    return functools.partial(half, cross=cross) if half and cross else None


def both_halves(scatter: SumSchedule, gather: SumSchedule) -> SumSchedule:
    """The sum that has these halves."""

    def run(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
        scatter(rows, group, schedule)
        gather(rows, group, schedule)

    return run


def own_chunks(comm: Comm) -> tuple[int, ...]:
    """Worker i has chunk i."""
    return tuple(range(comm.size))


class StrategySpec(NamedTuple):
    """A strategy: `sum` and its wires; all else is optional.

    `<k>` or `<cross>` of a name is a keyword of `sum`, `parts`, `seconds`, `cut` and `pieces`, filled in by `find`.
    """

    sum: Callable[..., jax.Array]  # a Sum
    wires: Collection[str]
    crosses: bool = False  # True if it needs nothing but `permute`, and so can be the <cross> of hier-<cross>
    means: Means | None = None  # sums over a divisor of f32 arrays of any shapes at once, if that is faster
    fits: Callable[[Sequence[int]], bool] = lambda hosts: True  # by the hosts of all ranks
    parts: Callable[..., Iterator[Part]] | None = None  # a `schedules.Parts`: the bits of `sum`, in C
    fits_parts: Callable[[Sequence[int]], bool] = lambda hosts: True  # by the hosts of all ranks
    seconds: Callable[..., float] | None = None  # a Cost; without one `auto` and `jaxmpi plan` leave it out
    is_candidate: Callable[[Net], bool] = lambda net: True  # True if `auto` may take it
    halves: Halves | None = None  # if other work can come between reduce-scatter and allgather
    # (n, workers) -> number and floats of parts, each of which is added in one order; without one as many as workers
    cut: Callable[..., tuple[int, int]] | None = None
    # by the hosts of all ranks: equal pieces into which a bucket is cut, so that each can be whole blocks of a wire;
    # without one as many as workers
    pieces: Callable[..., int] | None = None
    spelled: tuple[str, ...] = ()  # names to try if the name has a blank
    exchanges: bool = True  # else each worker keeps its own, and params drift apart
    in_shared_memory: bool = False  # by `SharedSum`, so that ranks of a host may share their params
    arrays_at_work: float = 4  # as big as the gradients, results included: scripts/exchange_memory.py


def is_even(hosts: Sequence[int]) -> bool:
    """Return True if all hosts have equally many ranks."""
    return len(set(collections.Counter(hosts).values())) == 1


def is_one(hosts: Sequence[int]) -> bool:
    """Return True if all ranks are on one host."""
    return len(set(hosts)) == 1
