"""The optimizer between the halves of the exchange: each worker updates a w-th, with a w-th of the optimizer's state.

    mean gradient, a slice each <- reduce-scatter ;  step of that slice ;  whole tree <- allgather, at 32 bits

As many bytes travel as in an allreduce. A bucket is w rows, row c with slice c of every leaf (`core.slices`). So an
entry is summed by the worker, and in the order, as if its leaf travelled alone: over wire 32 these are the bits of
`exchange` with `bucket_bytes=4`. With asa and hier-asa, which add in rank order everywhere, they are those of any
buckets. A coarser wire carries gradients only, and rounds once less than in `exchange`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.spec import Halves
from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import (
    BUCKET_BYTES,
    TRACED,
    Choice,
    Op,
    check_op,
    check_strategy,
    guarded,
    is_traced,
    settle,
)
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.buckets import plan
from jaxmpi.allreduce.call_order import caller, compared, in_turn, number_of, one_thread
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.dispatch import check_counts
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import workers_of
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.slices import (
    check_elementwise,
    check_state_of_slices,
    rows_of,
    shape_of_slice,
    slices_of,
    whole_of,
)


class Shards(NamedTuple):
    """Mean gradients cut over workers, and what is made of them put together again.

    Both halves work inside and outside jit. All workers call them together, with trees of the same structure.
    """

    choice: Choice
    clip_norm: float = 0.0  # largest norm of the whole mean gradient; 0: no clipping
    gives_square: bool = False  # whether `scatter` is to give |g|^2 of the whole mean gradient g, before clipping

    @property
    def comm(self) -> Comm:
        """Who exchanges."""
        return self.choice.comm

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.comm.size

    @property
    def halves(self) -> Halves:
        """Those of the strategy."""
        halves = parse(self.choice.strategy).spec.halves
        assert halves
        return halves

    @property
    def chunks(self) -> tuple[int, ...]:
        """By worker: the number of its slice."""
        return self.halves.chunks(self.comm)

    def chunk(self) -> jax.Array:
        """i32[]: the number of this worker's slice."""
        return jnp.asarray(self.chunks, jnp.int32)[self.comm.rank]

    def own(self, tree: PyTree) -> PyTree:
        """This worker's slices of a tree that it holds whole; no communication."""
        return slices_of(tree, self.chunk(), self.comm.size)

    def scatter(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """This worker's slices of the mean (or sum) over workers, and |mean|^2, f32[], if it is asked for; else 0.

        Communicates: the strategy's first half once a bucket; with `clip_norm` or `gives_square` w floats as well.
        """
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads)
        return self._run("reduce-scatter", grads, like, self._scattered)

    def gather(self, slices: PyTree, like: PyTree) -> PyTree:
        """The whole tree of all workers' slices, in the shapes of `like`; at 32 bits.

        Communicates: the strategy's second half once a bucket.
        """
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        return self._run("allgather", slices, like, functools.partial(self._gathered, like=like))

    def _run(self, half: str, tree: PyTree, like: PyTree, program: Callable[[PyTree], Any]) -> Any:
        leaves, comm = jax.tree.leaves(tree), self.comm
        named = self.choice._replace(strategy=f"{self.choice.strategy}, {half}")
        with one_thread(comm) as is_part:
            traced = is_traced(leaves)
            comm.assert_same(named.fingerprint(tree, TRACED if traced else "exchange"))
            if not traced:
                leaves, structure = jax.tree.flatten(like)
                return outside_jit(self, half, structure, tuple((x.shape, x.dtype) for x in leaves))(tree)
            number = None if is_part else number_of(comm, f"{named.what(leaves)}, {caller()}")
            tree = jax.tree.map(lambda x: guarded(x, comm), tree)
            with compared(comm, number):
                return program(tree)

    def _buckets(self, leaves: Sequence[Any]) -> list[list[int]]:
        return plan([leaf.size for leaf in leaves], self.choice.bucket_bytes) if self.comm.size > 1 else []

    def _scattered(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        leaves, structure = jax.tree.flatten(grads)
        comm, wire = self.comm, parse(self.choice.strategy).wire
        divisor = comm.size if self.choice.op == "mean" else 1
        slices = [leaf.reshape(shape_of_slice(leaf.shape, comm.size)) if not leaf.size else leaf for leaf in leaves]
        for bucket in self._buckets(leaves):
            rows = [rows_of(leaves[i], comm.size) for i in bucket]
            flat = (rows[0] if len(rows) == 1 else jnp.concatenate(rows, 1)).reshape(-1)
            check_counts([flat], self.choice.strategy, comm)
            mine = self.halves.scattered(flat, comm, wire, divisor)
            for i, part in zip(bucket, cut(mine, [row.shape[1] for row in rows]), strict=True):
                slices[i] = part.reshape(shape_of_slice(leaves[i].shape, comm.size))
        square = jnp.zeros(())
        if self.clip_norm or self.gives_square:
            own = sum((jnp.square(x).sum() for x in slices), jnp.zeros(()))
            square = comm.allgather(own).sum()  # in one order on all workers
        if self.clip_norm:
            slices = [clipped(x, jnp.sqrt(square), self.clip_norm) for x in slices]
        return jax.tree.unflatten(structure, slices), square

    def _gathered(self, slices: PyTree, like: PyTree) -> PyTree:
        if self.comm.size == 1:
            return slices
        leaves, structure = jax.tree.flatten(like)
        parts, comm = jax.tree.leaves(slices), self.comm
        out = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]  # empty ones do not travel
        for bucket in self._buckets(leaves):
            flats = [parts[i].reshape(-1) for i in bucket]
            mine = flats[0] if len(flats) == 1 else jnp.concatenate(flats)
            rows = self.halves.gather(mine, comm, WIRES["32"]).reshape(comm.size, -1)
            for i, part in zip(bucket, cut(rows, [flat.size for flat in flats]), strict=True):
                out[i] = whole_of(part, leaves[i])
        return jax.tree.unflatten(structure, out)


@functools.cache
def outside_jit(shards: Shards, half: str, structure: Any, shapes: tuple) -> Callable[[PyTree], Any]:
    """A half as a program of its own."""
    like = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in shapes])
    return in_turn(shards._scattered if half == "reduce-scatter" else functools.partial(shards._gathered, like=like))


def cut(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Pieces of an array along its last axis."""
    ends = np.cumsum(widths)
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]


def clipped(x: jax.Array, norm: jax.Array, largest: float) -> jax.Array:
    """As `optax.clip_by_global_norm` has it, for a norm that is known."""
    return jax.lax.select(jnp.broadcast_to(norm < largest, x.shape), x, (x / norm) * largest)


def shards_of(
    strategy: str, op: Op, comm: Comm, bucket_bytes: int | None, clip_norm: float = 0.0, gives_square: bool = False
) -> Shards:
    """The halves of a strategy's exchange over these workers.

    Raises:
        UsageError: a strategy without halves, with those that have.
    """
    check_op(op)
    check_bucket_bytes(bucket_bytes)
    able = with_halves(comm.hosts)
    halves = None if is_compressor(strategy) else parse(strategy).spec.halves
    check(
        halves is not None,
        f"got strategy {strategy!r} for sharded updates; expected one whose sum is a reduce-scatter and an allgather: "
        f"{', '.join(able)}, or auto",
    )
    return Shards(Choice(parse(strategy).name, op, comm, bucket_bytes), clip_norm, gives_square)


def check_floats(params: PyTree) -> None:
    """Refuse params that are not float32: moments would be rounded by each worker's slice."""
    for name, leaf in named_leaves(params):
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise UsageError(
                f"sharded: {name or '(the tree itself)'} is {getattr(leaf, 'dtype', type(leaf).__name__)}; expected "
                "float32: keep params in 32 bits and cast them inside the loss"
            )


def sharded(
    tx: optax.GradientTransformation,
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """An Optax optimizer whose state is cut over workers, with the exchange around it.

    u <- allgather(tx(slice of (1/w) sum_i g_i)), in place of `optax.chain(exchange_gradients(strategy), tx)`. Each of w
    workers holds a w-th of tx's state. Updates are whole and the same bits on all workers; those of the chain if the
    wire is 32 (`jaxmpi.allreduce.sharded`). With one worker it is tx itself.

    Args:
        tx: treats every entry of a tensor by itself, as Adam, AdamW, momentum, Lion and RMSProp do. It may go by the
            names and the number of axes of tensors, not by their shapes. This is tried out when the state is made.
        strategy: asa, ring or hier-<one of them>, with any wire, which gradients take; or auto.
        op: mean or sum, of gradients.
        comm: as of `exchange`.
        bucket_bytes: as of `exchange`.
        clip_norm: largest global norm of the mean gradient, as `optax.clip_by_global_norm` before tx; 0: any.

    State: tx's for this worker's slices, its own. `init` and `update` need params. Communicates: as much as `exchange`,
    and one float with `clip_norm`.

    Raises:
        UsageError: as `exchange`; a strategy without halves; params that are not float32; an optimizer that mixes
            entries, as LARS, LAMB, Adafactor and Muon.
    """
    check_op(op)
    if not is_compressor(strategy):
        check_strategy(strategy)

    def shards(params: PyTree) -> Shards:
        workers, name, size_bytes = workers_of(comm), strategy, bucket_bytes
        if not is_compressor(name) and is_auto(name):
            sizes = [leaf.size for leaf in jax.tree.leaves(params)]
            name, size_bytes, *_ = settle(workers, name, size_bytes, sizes, with_halves(workers.hosts))
        return shards_of(name, op, workers, size_bytes, clip_norm)

    def init(params: PyTree) -> PyTree:
        of = shards(params)
        check_floats(params)
        check_elementwise(tx, params)
        state = tx.init(of.own(params))
        check_state_of_slices(jax.eval_shape(tx.init, params), state, of.comm.size)
        return state

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        check(params is not None, "sharded: got no params; expected update(grads, state, params)")
        check_floats(updates)
        of = shards(updates)
        mean, _ = of.scatter(updates)
        made, state = tx.update(mean, state, of.own(params))
        return of.gather(made, updates), state

    return optax.GradientTransformation(init, update)
