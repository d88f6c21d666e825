"""New params of sharded updates, gathered behind the next forward pass.

    step t:  slices <- slices + tx(reduce-scatter of gradients) ;  each bucket of slices is sent
    step t + 1:  each bucket of params is collected just before the forward pass first uses one of them

This is exact: every step is taken at the params of the step before. A gather at the end of the step gives the same bits
if XLA fuses the two programs alike. Between two steps a worker has its slices (`UnderWay`), and whole params travel.
Whoever looks at params between steps takes `whole_params`. A checkpoint has those, so it is that of any other run.

XLA runs an operation once its operands are there. A call that waits for params and has no other operands would run
first, for all params. So the program of the gradients is traced, and written again equation by equation. The call that
waits for a bucket stands before the first equation that needs the bucket. The call also takes an entry of that
equation's other operands, which come of the layers before. Equations of params and constants alone, such as casts, are
written where their results are first needed. ZeRO, Rajbhandari et al. 2020, prefetches params for stage 3 in this
order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.comm_thread_calls import TICKET, Calls
from jaxmpi.allreduce.comm_thread_handlers import COLLECT, LATE, OPEN, SEND
from jaxmpi.allreduce.early_scatter import run_equation
from jaxmpi.allreduce.shards import Shards
from jaxmpi.allreduce.slice_vectors import cut, joined
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.slices import Entries, shape_of_slice, whole_of
from jaxmpi.runtime import host_callbacks


class UnderWay(NamedTuple):
    """Params between two steps, each worker's own."""

    slices: PyTree  # this worker's, of all leaves
    number: jax.Array  # u32[]: under which whole params travel; if nothing does, they are sent again


class SlicedEntries(Entries):
    """The cut of trees of which a worker has its slices only."""

    def own(self, tree: PyTree, chunk: Any) -> PyTree:
        """The slices, which these are."""
        return tree


class SlicedShards(Shards):
    """`Shards` for a rule on this worker's slices: updates gather nothing."""

    @property
    def cut(self) -> Entries:
        """How trees are cut: they are."""
        return SlicedEntries(self.comm.size)

    def renewed(self, slices: PyTree, params: PyTree) -> PyTree:
        return slices


class LateGather:
    """A gather of params that goes on in the next step.

    A run has one, which all ranks make together.
    """

    def __init__(self, shards: Shards, like: PyTree) -> None:
        """Take halves that run beside the step, and the shapes of params."""
        self.shards, self.like = shards, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        self.sliced = SlicedShards(*shards)  # for the rule of the step
        self.number = next(LATE)
        self._turns: dict[int, int] = {}  # turn of each bucket, by order of first use; found while the step is traced

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of params."""
        return jax.tree.leaves(self.like)

    def begun(self, params: PyTree) -> UnderWay:
        """Params of which nothing travels; no communication. The next step sends them."""
        return UnderWay(self.shards.own(params), jnp.zeros(TICKET.shape, TICKET.dtype))

    def whole_params(self, params: UnderWay) -> PyTree:
        """Whole params, the same bits on all workers.

        Communicates: waits for what travels, or sends it if nothing does.
        """
        return jax.tree.unflatten(jax.tree.structure(self.like), Arrivals(self, params).all())

    def gradients(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """`function(params, *others)` of params under way, waited for at first use.

        Communicates: as `whole_params`.
        """

        def of_under_way(params: UnderWay, *others: PyTree) -> PyTree:
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(self.like, *others)
            arrivals = Arrivals(self, params)  # only now is the order of gradients known, by which buckets are filled
            waiting = [Result(Later(arrivals.of(i)), 0) for i in range(len(self.leaves))]
            results = evaluated(traced.jaxpr, traced.consts, [*waiting, *jax.tree.leaves(others)])
            arrivals.all()
            self._turns = {bucket: turn for turn, bucket in enumerate(arrivals.order)}
            return jax.tree.unflatten(jax.tree.structure(shapes), [now(result, []) for result in results])

        return of_under_way

    def update(self, function: Callable[..., tuple]) -> Callable[..., tuple]:
        """Make an update of slices an update of params under way.

        `function(grads, state, slices) -> (slices, ...)` is an update with `sliced`.

        Communicates: as the function; and sends the new slices, for the next step.
        """

        def sending(grads: PyTree, state: PyTree, params: UnderWay) -> tuple:
            calls = self.calls()
            [ticket] = host_callbacks.call(OPEN, [], [TICKET], effect=calls.effect, **calls.opened(calls.segments))
            slices, *more = function(grads, state, params.slices)
            number, part, after = params.number + 1, self.shards.chunk(), ticket
            for i, (chunk, bucket) in enumerate(zip(self.chunks(slices), calls.buckets, strict=True)):
                named = {"late": self.number, "turn": 1 + self._turns[i], **bucket}
                [after] = host_callbacks.call(SEND, [chunk, after, number, part], [TICKET], effect=None, **named)
            return UnderWay(slices, number + (after - ticket)), *more

        return sending

    def chunks(self, slices: PyTree) -> list[jax.Array]:
        """f32[m] each: this worker's part of each bucket."""
        own = [leaf.reshape(-1) for leaf in jax.tree.leaves(slices)]
        return [joined([own[i] for i in bucket]) for bucket in self.shards.choice.buckets(self.leaves)]

    def widths(self, bucket: Sequence[int]) -> list[int]:
        """Entries of a slice of each leaf of a bucket."""
        return [math.prod(shape_of_slice(self.leaves[i].shape, self.shards.size)) for i in bucket]

    def calls(self) -> Calls:
        """The calls that carry the buckets."""
        sizes = [self.shards.size * sum(self.widths(bucket)) for bucket in self.shards.choice.buckets(self.leaves)]
        flats = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        algorithm = parse(self.shards.choice.strategy).name.partition(":")[0]
        return self.shards.calls(f"{algorithm}:{self.shards.gather_wire}", "gather", flats)


class Arrivals:
    """Params that travel; each bucket is waited for at its first use."""

    def __init__(self, gather: LateGather, params: UnderWay) -> None:
        """Nothing is waited for yet."""
        self.gather, self.params, self.calls = gather, params, gather.calls()
        self.buckets, self.chunks = gather.shards.choice.buckets(gather.leaves), gather.chunks(params.slices)
        self.part = gather.shards.chunk()
        opened = self.calls.opened(self.calls.segments)
        [self.ticket] = host_callbacks.call(OPEN, [], [TICKET], effect=self.calls.effect, **opened)
        # Empty leaves do not travel.
        self.whole = {i: jnp.zeros(x.shape, x.dtype) for i, x in enumerate(gather.leaves) if not x.size}
        self.order: list[int] = []  # numbers of buckets, as they were asked for

    def of(self, i: int) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Function that gives leaf i, not before other arrays are there."""
        return lambda before: [self.leaf(i, before)]

    def leaf(self, i: int, before: Sequence[jax.Array]) -> jax.Array:
        """Leaf i, not before other arrays are there."""
        if i not in self.whole:
            [b] = [b for b, bucket in enumerate(self.buckets) if i in bucket]
            chunk, size = self.chunks[b], self.gather.shards.size
            plain = [x for x in before if x.size and host_callbacks.can_go(x.dtype)]
            entries = [jax.lax.slice(x, [0] * x.ndim, [1] * x.ndim) for x in plain]
            [whole] = host_callbacks.call(
                COLLECT,
                [chunk, self.params.number, self.ticket, self.part, *entries],
                [jax.ShapeDtypeStruct((size * chunk.size,), chunk.dtype)],
                effect=self.calls.effect,
                late=self.gather.number,
                again=0,
                **self.calls.buckets[b],
            )
            parts = cut(whole.reshape(size, -1), self.gather.widths(self.buckets[b]))
            for k, part in zip(self.buckets[b], parts, strict=True):
                self.whole[k] = whole_of(part, self.gather.leaves[k])
            self.order.append(b)
        return self.whole[i]

    def all(self) -> list[jax.Array]:
        """All leaves."""
        return [self.leaf(i, []) for i in range(len(self.gather.leaves))]


# ---------------------------------------------------------------- a program, equation by equation


class Later:
    """Values that are computed once, when one of them is first needed."""

    def __init__(self, make: Callable[[Sequence[jax.Array]], list[Any]]) -> None:
        """Take the function that gives the values.

        Args:
            make: gets arrays that are to be there before what it waits for.
        """
        self._make, self._values = make, None

    def values(self, before: Sequence[jax.Array]) -> list[Any]:
        """The values, from the first call on."""
        if self._values is None:
            self._values = self._make(before)
        return self._values


class Result(NamedTuple):
    """One of the values that are computed later."""

    later: Later
    place: int


def now(x: Any, before: Sequence[jax.Array]) -> Any:
    """The value."""
    return x.later.values(before)[x.place] if isinstance(x, Result) else x


def evaluated(jaxpr: jax.extend.core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Results of a program, some of whose arguments come later.

    Each is asked for by the first equation that also has an operand which is there; jitted functions are looked into.
    """
    constants = [Result(Later(lambda _, value=value: [value]), 0) for value in consts]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jax.extend.core.Literal) else known[var]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        waits = [x for x in operands if isinstance(x, Result)]
        there = [x for x in operands if isinstance(x, jax.Array)]  # literals are not
        if waits and equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            results = evaluated(inner.jaxpr, inner.consts, operands)
        elif there or equation.effects:
            results = run_equation(equation, [now(x, there) for x in operands])
        else:
            later = Later(lambda before, eq=equation, xs=operands: run_equation(eq, [now(x, before) for x in xs]))
            results = [Result(later, place) for place in range(len(equation.outvars))]
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
