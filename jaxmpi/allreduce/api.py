"""The exchange of a tree: tree -> buckets -> strategy(wire) -> tree.

Data-parallel training needs the mean or sum of a tree over workers, inside jit and outside, whatever the algorithm.
`exchange` fuses small leaves into buckets, has the strategy sum each bucket, and splits the sums. The division is
chosen here alone: strategies that each divide will one day divide differently. MPI's messages do not say which exchange
they belong to. So ranks compare trees and options first, and programs compare which exchange they have reached
(docs/decisions/0003). Outside jit an exchange is three programs, and only the middle one communicates; it is small,
since every rank must compile it (docs/decisions/0007). `exchange_gradients` is the same as an Optax transformation,
whose state has room for what a compressor leaves out.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmpi.allreduce import compression
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import AutotuneResult, allowed_wires, choose, is_auto, size_class
from jaxmpi.allreduce.buckets import Alignment, Order, assign_buckets, fuse, split, split_all
from jaxmpi.allreduce.building_blocks import allgather, halves, mean_of_halves
from jaxmpi.allreduce.call_order import caller, callers, columns, compared, in_turn, number_of, one_thread
from jaxmpi.allreduce.compression import Peers
from jaxmpi.allreduce.derivative import NOT_MAPPED, differentiable
from jaxmpi.allreduce.dispatch import sums
from jaxmpi.comm.agreement import Fingerprint, check_may_send, fingerprint, refuse_together
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, workers_of
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.pytrees import PyTree, signature
from jaxmpi.core.to_jax import check_not_float0, check_on_one_device, to_jax

Op = Literal["mean", "sum"]
BUCKET_BYTES = 4 << 20  # small leaves are fused up to this; a leaf at least as big travels as it is
TRACED = "exchange in a program that ranks trace together, for the same shapes"
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def exchange(
    tree: PyTree,
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    order: Order | None = None,
) -> PyTree:
    """The mean or sum of a tree, bitwise equal on all workers.

    mean: (1/w) sum_i tree_i ;  sum: sum_i tree_i ;  both added in f32.

    Works inside and outside jit, on any pytree of float32, bfloat16 and float16 leaves of any size. It keeps their
    dtypes and shapes. Numbers of Python and NumPy may be among them, as metrics are, and float64. Such a leaf may be no
    float of 16 or 32 bits for JAX. Then `exchange` sums it in its own type, whatever the strategy. Means of integers
    are floats, whose sums do not wrap; a whole number that may wrap in a sum is refused: `jaxmpi.metrics.sum` is exact.

    Derivative and transpose: an exchange of tangents or cotangents, by the same strategy and wire; along an `AxisComm`
    in 32 bits, by `vjp` but not by `linear_transpose`.

    Args:
        tree: this worker's leaves; the same structure, shapes and dtypes on every worker.
        strategy: `algorithm[:wire]` or an alias, as asa32 (default), ring16, tree:bf16, color4:8, hier-ring:16; all are
            in `algorithms.STRATEGIES`. `auto` (32 bits) and `auto:<wire>` (that wire, too): the fastest for trees of
            about this size, timed at the first exchange and cached (docs/plan.md).
        op: mean or sum.
        comm: who takes part; default: all ranks of the MPI job, or one worker if there is no launcher.
        bucket_bytes: small leaves are fused up to this many bytes; None is one flat buffer for all leaves.
        order: in which leaves come to exist; buckets are then those of `overlap.exchange`. Default: as in the tree.

    Communicates: a comparison of structure and options between ranks, then the strategy once a bucket. Inside jit these
    are compared while tracing; whenever the program runs, ranks compare which exchange they have come to. Ranks
    at different ones end the job, and say which; docs/exchange.md has those that cannot be told apart.

    Raises:
        UsageError: an unknown strategy, wire or op; a compressor, which `exchange_gradients` takes; a leaf that is no
            float (by path); a whole number that its dtype, or for a sum that of all workers, does not hold (path);
            ranks whose trees or options differ (rank, path, got, expected); a call by one thread while another is in
            one; over MPI ranks under `jax.vmap`; a bucket of 2^31 floats over MPI.
    """
    check_op(op)
    check_bucket_bytes(bucket_bytes)
    check_strategy(strategy)
    structure, comm = jax.tree.structure(tree), workers_of(comm)
    if not structure.num_leaves:
        return tree
    if not isinstance(comm, AxisComm):
        check_may_send("jaxmpi.exchange")
    with one_thread(comm) as is_part:
        with refuse_together(comm.assert_same):
            leaves = as_numbers(tree, op, comm)
        tree = jax.tree.unflatten(structure, leaves)
        if is_auto(strategy):
            strategy, bucket_bytes, *_ = settle(comm, strategy, bucket_bytes, [np.size(leaf) for leaf in leaves])
        choice = Choice(strategy=parse(strategy).name, op=op, comm=comm, bucket_bytes=bucket_bytes, order=order)
        if comm.size > 1 and any(isinstance(leaf, Tracer) for leaf in leaves):
            exchanged = differentiable(choice, leaves, lambda held: choice.held(held, tree, is_part))
            return jax.tree.unflatten(structure, exchanged)
        return jax.tree.unflatten(structure, choice.held(leaves, tree, is_part))


def count_of(leaves: Sequence[Any]) -> str:
    """How much is exchanged, in words."""
    return f"{sum(map(np.size, leaves)):,} floats in {len(leaves)} leaves"


def check_strategy(strategy: str) -> None:
    """Refuse what is neither a strategy nor `auto[:wire]`."""
    check(
        not compression.is_compressor(strategy),
        f"got strategy {strategy!r}: a compressor owes what it leaves out, and exchange has nowhere to keep that; "
        f"use exchange_gradients({strategy!r}), which holds it in its state",
    )
    if is_auto(strategy):
        allowed_wires(strategy)
    else:
        parse(strategy)


def settle(
    comm: Comm, strategy: str, bucket_bytes: int | None, sizes: Sequence[int], among: tuple[str, ...] = ()
) -> AutotuneResult:
    """The choice of `auto` for these workers, algorithms and size class.

    Communicates at the first call of a size class only; rank 0 then prints the choice. All ranks have trees of the same
    sizes, so all know the class.
    """
    if not isinstance(comm, MpiComm):
        return choose(comm, sizes, strategy, bucket_bytes)

    def chosen() -> AutotuneResult:
        with jax.ensure_compile_time_eval():  # exchanges run now, though the caller's program may only be traced
            result = choose(comm, sizes, strategy, bucket_bytes, among)
        if comm.rank == 0:
            print(f"jaxmpi: {result.why}", flush=True)
        return result

    return comm.cached(("auto", strategy, bucket_bytes, among, size_class(sizes)), chosen)


_constant = jax.jit(lambda: np.int32(0))  # a call takes 4 us, an addition outside jit 120


def is_traced(leaves: Sequence[Any]) -> bool:
    """Return True if a program is being traced, even with constant leaves."""
    return isinstance(_constant(), Tracer) or any(isinstance(leaf, Tracer) for leaf in leaves)


class Choice(NamedTuple):
    """How to exchange, and with whom."""

    strategy: str  # in full: asa:32
    op: Op
    comm: Comm
    bucket_bytes: int | None
    order: Order | None = None

    def of(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """`exchange` of these leaves, for its derivative."""
        return exchange(leaves, self.strategy, self.op, self.comm, self.bucket_bytes, self.order)

    def in_f32(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """`of` by the comm's own allreduce, for derivatives along an axis."""
        divisor = self.comm.size if self.op == "mean" else 1
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
        return [(self.comm.allreduce(x) / divisor).astype(leaf.dtype) for x, leaf in zip(wide, leaves, strict=True)]

    def held(self, leaves: list[jax.Array], tree: PyTree, is_part: bool) -> list[jax.Array]:
        """The exchange of leaves, inside or outside jit, without a derivative.

        Args:
            is_part: this is inside another exchange, which is compared as a whole.
        """
        if not is_traced(leaves):
            return jax.tree.leaves(_outside_jit_of(self)(jax.tree.unflatten(jax.tree.structure(tree), leaves)))
        self.comm.assert_same(self.fingerprint(tree, TRACED))
        number = None if is_part else number_of(self.comm, f"{self.what(leaves)}, {caller()}")
        leaves = [not_mapped(leaf) if over_mpi(self.comm) else leaf for leaf in leaves]  # a refused call began nothing
        with compared(self.comm, number):
            return self.inside_jit(leaves)

    def fingerprint(self, tree: PyTree, what: str = "exchange") -> Fingerprint:
        """Facts that must be equal on all ranks, named `what` in messages."""
        ready = self.ready(len(jax.tree.leaves(tree)))
        options = {"strategy": self.strategy, "op": self.op, "bucket_bytes": self.bucket_bytes, "order": ready}
        # Else two programs of equal shapes that ranks trace in another order would be one exchange for good.
        if what == TRACED and isinstance(self.comm, MpiComm):
            options |= {"at": callers(), "columns": columns()}
        return fingerprint(what, {**options, "leaf": signature(tree)})

    def what(self, leaves: Sequence[Any]) -> str:
        """Describe the exchange of these leaves, for messages."""
        return f"{self.strategy}, {self.op} of {count_of(leaves)}"

    def ready(self, count: int) -> list[int] | None:
        """Leaves in the order in which they come to exist, or None."""
        return self.order.leaves(count) if self.order else None

    def buckets(self, leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[list[int]]:
        """Buckets of leaves that travel together, by index.

        Leaves that are summed in their own type are in none. A strategy that takes all leaves at once gains nothing
        from fusing them.
        """
        bucket_bytes = 0 if parse(self.strategy).spec.means else self.bucket_bytes
        sizes = [leaf.size if leaf.dtype in FLOATS else 0 for leaf in leaves]
        return assign_buckets(sizes, bucket_bytes, self.ready(len(leaves)))

    @property
    def alignment(self) -> Alignment:
        """Where leaves begin in buckets."""
        strategy = parse(self.strategy)
        return Alignment(strategy.wire.block, (strategy.spec.pieces or len)(self.comm.hosts))

    def inside_jit(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Leaves -> buckets -> sums -> leaves, in the caller's program."""
        if self.comm.size == 1:
            return [self.alone(leaf) for leaf in leaves]
        buckets, own, alignment = self.buckets(leaves), in_own_type(leaves), self.alignment
        flats = [fuse([leaves[i] for i in bucket], alignment) for bucket in buckets]
        vectors = self.exchanged([*flats, *(leaves[i] for i in own)])
        out = split_all(vectors[: len(buckets)], leaves, buckets, alignment)
        for i, total in zip(own, vectors[len(buckets) :], strict=True):
            out[i] = total
        return out

    def alone(self, leaf: jax.Array) -> jax.Array:
        """One worker's part of a leaf."""
        return leaf if leaf.dtype in FLOATS or self.op == "sum" else leaf / 1

    def exchanged(self, vectors: list[jax.Array]) -> list[jax.Array]:
        """Every vector's mean or sum over workers; means of integers are floats.

        Shapes stay, and so do all other dtypes.
        """
        divisor = self.comm.size if self.op == "mean" else 1
        short = [x.astype(jnp.float32) for x in vectors if x.dtype in FLOATS]
        totals = iter(sums(short, self.strategy, self.comm, divisor) if short else [])
        return [next(totals).astype(x.dtype) if x.dtype in FLOATS else self.exact(x) for x in vectors]

    def exact(self, x: jax.Array) -> jax.Array:
        """The mean or sum, added in the array's type; means never wrap."""
        if self.op == "sum":
            return self.comm.allreduce(x)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return mean_of_halves(self.comm.allreduce(halves(x)), self.comm.size, x.dtype)
        return self.comm.allreduce(x) / self.comm.size


def _outside_jit_of(choice: Choice) -> Callable[[PyTree], PyTree]:
    if isinstance(choice.comm, MpiComm):  # what is kept for it goes with it
        return choice.comm.cached(choice, lambda: _outside_jit(choice))
    return _outside_jit_elsewhere(choice)


def _outside_jit(choice: Choice) -> Callable[[PyTree], PyTree]:
    """The exchange outside jit, compiled once a structure, compared at every call."""
    programs: dict[Any, tuple[Fingerprint, Callable[[list[jax.Array]], list[jax.Array]]]] = {}

    def call(tree: PyTree) -> PyTree:
        if choice.comm.size == 1:
            return jax.tree.map(lambda leaf: choice.alone(jnp.asarray(leaf)), tree)
        leaves, structure = jax.tree.flatten(tree)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        agreed = programs[key][0] if key in programs else choice.fingerprint(tree)
        choice.comm.assert_same(agreed)  # two ranks may call with two trees that both have used before
        if key not in programs:
            like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
            programs[key] = agreed, _three_programs(choice, like)
        return jax.tree.unflatten(structure, programs[key][1](leaves))

    return call


_outside_jit_elsewhere = functools.cache(_outside_jit)


def _three_programs(choice: Choice, like: list[jax.ShapeDtypeStruct]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Fuse, exchange, split: three jits, of which only the middle one communicates.

    A program that communicates is compiled by every rank for itself. Here it sees nothing but vectors, which keeps it
    small; the other two are compiled once a host. A leaf that is alone in its bucket passes by without a copy.
    """
    buckets = choice.buckets(like)
    alone = [bucket[0] for bucket in buckets if len(bucket) == 1]
    alone += in_own_type(like)
    fused = [bucket for bucket in buckets if len(bucket) > 1]
    groups = [[like[i] for i in bucket] for bucket in fused]
    alignment = choice.alignment

    def split_groups(flats: list[jax.Array]) -> list[list[jax.Array]]:
        return [split(flat, group, alignment) for flat, group in zip(flats, groups, strict=True)]

    fuse_each = choice.comm.jit(lambda groups: [fuse(group, alignment) for group in groups])
    exchange_each, split_each = in_turn(choice.exchanged), choice.comm.jit(split_groups)

    def run(leaves: list[jax.Array]) -> list[jax.Array]:
        flats = fuse_each([[leaves[i] for i in bucket] for bucket in fused]) if fused else []
        vectors = exchange_each([*flats, *(leaves[i] for i in alone)])
        parts = split_each(vectors[: len(fused)]) if fused else []
        out = list(leaves)
        for bucket, part in [
            *zip(fused, parts, strict=True),
            *(([i], [x]) for i, x in zip(alone, vectors[len(fused) :], strict=True)),
        ]:
            for i, leaf in zip(bucket, part, strict=True):
                out[i] = leaf
        return out

    return run


def check_op(op: str) -> None:
    """Refuse what is neither mean nor sum."""
    lookup({"mean": 0, "sum": 0}, op, "op")


def in_own_type(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[int]:
    """Which leaves no strategy sums, since 32 bits would falsify them."""
    return [i for i, leaf in enumerate(leaves) if leaf.dtype not in FLOATS]


def as_numbers(tree: PyTree, op: str, comm: Comm) -> list[Any]:
    """The leaves as arrays that `exchange` takes.

    Raises:
        UsageError: one is neither an array of floats nor a number, or is a number that its dtype, or its sum over
            workers, cannot hold (path). Arrays of integers are usually counters or PRNG keys, which should not be
            averaged.
    """
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_not_float0(_leaf(path), leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype in FLOATS:  # programs take NumPy's arrays as fast as JAX's
            check_unmasked(_leaf(path), leaf)
            leaves.append(leaf)
            continue
        is_number = isinstance(leaf, (int, float, np.integer, np.bool_))
        if not is_number and getattr(leaf, "dtype", None) not in (*FLOATS, jnp.float64):
            raise _not_taken(path, leaf, "floats: cast it, leave it out, or take jaxmpi.collectives.allreduce")
        is_bool = isinstance(leaf, (bool, np.bool_))
        array = to_jax(_leaf(path), int(leaf) if is_bool else leaf, op, comm.size)
        if over_mpi(comm):
            check_on_one_device(_leaf(path), array)
        leaves.append(array.astype(jnp.int32) if is_bool else array)
    return leaves


def _leaf(path: Any) -> str:
    where = jax.tree_util.keystr(path, simple=True, separator="/") or "(the tree itself)"
    return f"exchange: leaf {where!r}"


def _not_taken(path: Any, leaf: Any, expected: str) -> UsageError:
    return UsageError(f"{_leaf(path)} is {getattr(leaf, 'dtype', type(leaf).__name__)}; expected {expected}")


def check_leaves(tree: PyTree) -> None:
    """Refuse leaves that a 32-bit sum would falsify."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_not_float0(_leaf(path), leaf)
        check_unmasked(_leaf(path), leaf)
        if getattr(leaf, "dtype", None) not in FLOATS:
            raise _not_taken(path, leaf, "float32, bfloat16 or float16: cast it, or leave it out")


@jax.custom_jvp
def not_differentiable(x: jax.Array) -> jax.Array:
    """The identity, for which no derivative is offered."""
    return x


@not_differentiable.defjvp
def _refuse(primals: tuple, tangents: tuple) -> NamedTuple:
    raise UsageError(
        "an exchange by a compressor or beside a program cannot be differentiated; take jax.grad first, then exchange "
        "the gradients, or differentiate jaxmpi.exchange"
    )


@jax.custom_batching.custom_vmap
def not_mapped(x: jax.Array) -> jax.Array:
    """The identity, which `jax.vmap` cannot map."""
    return x


@not_mapped.def_vmap
def _refuse_to_map(*_: Any) -> NamedTuple:
    raise UsageError(NOT_MAPPED)


def over_mpi(comm: Comm) -> bool:
    """Return True if an exchange sends messages between processes."""
    return isinstance(comm, MpiComm) and comm.size > 1


def guarded(leaf: jax.Array, comm: Comm) -> jax.Array:
    """The leaf, which refuses derivatives and, over MPI, `jax.vmap`."""
    leaf = not_differentiable(leaf)
    return not_mapped(leaf) if over_mpi(comm) else leaf


def exchange_gradients(
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformation:
    """`exchange` as an Optax transformation: the updates' mean or sum over workers.

    First in a chain it makes any optimizer data-parallel:
    `optax.chain(exchange_gradients("ring16"), optax.adamw(1e-3))`.

    Arguments are those of `exchange`. The strategy may also be a compressor, lowrank<r> or topk<p>, alone or with the
    strategy for what still travels: `lowrank4`, `topk1/ring32`. Its state is empty; the state of a compressor has what
    each worker still owes, which is the worker's own. For lowrank<r> that state also has the last factors, equal on all
    workers. Communicates, raises: as `exchange`.
    """
    check_op(op)
    if compression.is_compressor(strategy):
        return compressed(strategy, op, comm, bucket_bytes)
    check_strategy(strategy)
    return optax.stateless(lambda updates, params: exchange(updates, strategy, op, comm, bucket_bytes))


def compressed(spelling: str, op: Op, comm: Comm | None, bucket_bytes: int | None) -> optax.GradientTransformation:
    """A compressor as an Optax transformation; one worker alone compresses nothing."""
    compressor, strategy = compression.parse(spelling)
    mean = functools.partial(exchange, strategy=strategy.name, bucket_bytes=bucket_bytes)

    @jax.jit
    def run(updates: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        workers: Comm = workers_of(comm)
        rows = functools.partial(allgather, comm=workers)
        peers = Peers(functools.partial(mean, comm=workers), rows, strategy.wire, local=lambda function: function)
        return compressor.compress(updates, state, peers)

    @functools.cache
    def outside_jit(workers: Comm) -> Peers:
        rows = in_turn(functools.partial(allgather, comm=workers))
        return Peers(functools.partial(mean, comm=workers), rows, strategy.wire, local=functools.cache(workers.jit))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        workers: Comm = workers_of(comm)
        check_leaves(updates)
        if workers.size == 1:
            return compression.paid(updates, state)
        choice, traced = Choice(spelling, op, workers, bucket_bytes), is_traced(jax.tree.leaves((updates, state)))
        with one_thread(workers) as is_part:
            workers.assert_same(choice.fingerprint(updates, TRACED if traced else "exchange"))
            if traced:
                what = f"{choice.what(jax.tree.leaves(updates))}, {caller()}"
                number = None if is_part else number_of(workers, what)
                updates = jax.tree.map(lambda x: guarded(x, workers), updates)
                with compared(workers, number):
                    total, state = run(updates, state)
            else:
                total, state = compressor.compress(updates, state, outside_jit(workers))
        return total if op == "mean" else jax.tree.map(lambda x: x * workers.size, total), state

    return optax.GradientTransformation(lambda params: compressor.init(params), update)
