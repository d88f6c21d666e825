"""The exchange of a tree: tree -> buckets -> strategy(wire) -> tree.

Data-parallel training needs the mean or sum of a tree over workers, inside jit and outside, whatever the algorithm.
`exchange` fuses small leaves into buckets, has the strategy sum each bucket, and splits the sums. The division is
chosen here alone: strategies that each divide will one day divide differently. MPI's messages do not say which exchange
they belong to. So ranks compare trees and options first, and programs compare which exchange they have reached
(docs/decisions.md, 3). `exchange_gradients` is the same as an Optax transformation, whose state has room for what a
compressor leaves out.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmpi.allreduce import compression
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import allowed_wires, choose, is_auto, size_class
from jaxmpi.allreduce.buckets import INSIDE, Alignment, Order, Programs, assign_buckets, fuse, in_buckets, no_jit, split
from jaxmpi.allreduce.building_blocks import allgather, halves, mean_of_halves
from jaxmpi.allreduce.call_order import call_places, caller, compare_when_run, jit_in_turn, joint_call, number_of
from jaxmpi.allreduce.compression import Collectives
from jaxmpi.allreduce.derivative import block_transforms, differentiable
from jaxmpi.allreduce.dispatch import OnCommThread, sums
from jaxmpi.comm.agreement import Fingerprint, check_may_send, fingerprint
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, workers_of
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.pytrees import PyTree, is_complex, join_complex, signature, split_complex
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
    A complex leaf is exchanged as two leaves, its real and its imaginary part, with their bits. Gradients of complex
    params are those of `jax.grad`, dL/dx - i dL/dy: conjugate them, before or after, for a step of descent.

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
    comm = workers_of(comm)
    if not isinstance(comm, AxisComm):
        check_may_send("jaxmpi.exchange")
    with joint_call(comm) as is_nested:
        check_op(op)
        check_bucket_bytes(bucket_bytes)
        check_strategy(strategy)
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return tree
        if has_complex := any(map(is_complex, leaves)):
            tree = split_complex(tree)
            structure = jax.tree.structure(tree)
        leaves = as_numbers(tree, op, comm)
        if is_auto(strategy):
            strategy = resolve_auto(comm, strategy, bucket_bytes, [np.size(leaf) for leaf in leaves])
        choice = Choice(strategy=parse(strategy).name, op=op, comm=comm, bucket_bytes=bucket_bytes, order=order)
        run = lambda leaves: choice.run(leaves, structure, is_nested)  # noqa: E731
        is_differentiable = comm.size > 1 and any(isinstance(leaf, Tracer) for leaf in leaves)
        total = jax.tree.unflatten(structure, differentiable(choice, leaves, run) if is_differentiable else run(leaves))
        return join_complex(total) if has_complex else total


def check_op(op: str) -> None:
    """Refuse what is neither mean nor sum."""
    lookup({"mean": 0, "sum": 0}, op, "op")


def check_strategy(strategy: str) -> None:
    """Refuse what is neither a strategy nor `auto[:wire]`."""
    if compression.is_compressor(strategy):
        raise UsageError(
            f"got strategy {strategy!r}: a compressor owes what it leaves out, and exchange has nowhere to keep that; "
            f"use exchange_gradients({strategy!r}), which holds it in its state"
        )
    allowed_wires(strategy) if is_auto(strategy) else parse(strategy)


def resolve_auto(
    comm: Comm, strategy: str, bucket_bytes: int | None, sizes: Sequence[int], among: tuple[str, ...] = ()
) -> str:
    """The strategy that `auto` takes for these workers, algorithms and size class.

    Communicates at the first call of a size class only; rank 0 then prints the choice. All ranks have trees of the same
    sizes, so all know the class.
    """
    if not isinstance(comm, MpiComm):
        return choose(comm, sizes, strategy, bucket_bytes).strategy

    def choose_and_print() -> str:
        with jax.ensure_compile_time_eval():  # exchanges run now, though the caller's program may only be traced
            result = choose(comm, sizes, strategy, bucket_bytes, among)
        if comm.rank == 0:
            print(f"jaxmpi: {result.why}", flush=True)
        return result.strategy

    return comm.cached(("auto", strategy, bucket_bytes, among, size_class(sizes)), choose_and_print)


_constant = jax.jit(lambda: np.int32(0))  # a call takes 4 us, an addition outside jit 120


def is_traced(leaves: Sequence[Any]) -> bool:
    """Return True if a program is being traced, even with constant leaves."""
    return isinstance(_constant(), Tracer) or any(isinstance(leaf, Tracer) for leaf in leaves)


# ---------------------------------------------------------------- how


class Choice(NamedTuple):
    """How to exchange, and with whom."""

    strategy: str  # in full: asa:32
    op: Op
    comm: Comm
    bucket_bytes: int | None
    order: Order | None = None
    on_comm_thread: OnCommThread | None = None  # on the communication thread

    def run(self, leaves: list[jax.Array], structure: Any, is_nested: bool = False) -> list[jax.Array]:
        """The exchange of a tree's leaves, inside or outside jit, without a derivative.

        Args:
            is_nested: this is inside another exchange, which is compared as a whole.
        """
        if is_traced(leaves):
            with agree_while_tracing(self, jax.tree.unflatten(structure, leaves), is_nested):
                return self.program(leaves)(leaves)
        if self.comm.size == 1:
            return self.program(leaves)([jnp.asarray(leaf) for leaf in leaves])
        key = self, structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        facts, run = make_once(self.comm, _outside_jit, *key)
        self.comm.assert_same(facts)  # at every call: two ranks may come with two trees that both keep
        return run(leaves)

    def program(self, like: Sequence[Any], programs: Programs = INSIDE) -> Callable[[list], list]:
        """Leaves of these shapes -> buckets -> means or sums -> leaves."""
        if self.comm.size == 1:
            is_whole = self.op == "mean"
            return lambda leaves: [x / 1 if is_whole and x.dtype not in FLOATS else x for x in leaves]
        alignment, buckets = self.alignment, self.buckets(like)
        unfused = [[i] for i, leaf in enumerate(like) if leaf.dtype not in FLOATS]

        def fuse_bucket(leaves: list[jax.Array]) -> jax.Array:
            return fuse(leaves, alignment) if len(leaves) > 1 else leaves[0]

        def split_bucket(x: jax.Array, bucket: Sequence[int]) -> list[jax.Array]:
            return split(x, [like[i] for i in bucket], alignment) if len(bucket) > 1 else [x]

        return in_buckets([*buckets, *unfused], fuse_bucket, self.exchange_vectors, split_bucket, programs)

    def exchange_vectors(self, vectors: list[jax.Array]) -> list[jax.Array]:
        """Every array's mean or sum over workers; means of integers are floats.

        Shapes stay, and so do all other dtypes.
        """
        divisor = self.comm.size if self.op == "mean" else 1
        short = [x.astype(jnp.float32) for x in vectors if x.dtype in FLOATS]
        totals = iter(sums(short, self.strategy, self.comm, divisor, self.on_comm_thread) if short else [])
        return [next(totals).astype(x.dtype) if x.dtype in FLOATS else self.reduce_in_own_dtype(x) for x in vectors]

    def reduce_in_own_dtype(self, x: jax.Array) -> jax.Array:
        """The mean or sum, added in the array's type; means never wrap."""
        if self.op == "sum":
            return self.comm.allreduce(x)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return mean_of_halves(self.comm.allreduce(halves(x)), self.comm.size, x.dtype)
        return self.comm.allreduce(x) / self.comm.size

    def tangents(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The exchange of tangents or cotangents: along an axis by the comm's own sum, in 32 bits."""
        if isinstance(self.comm, MpiComm):
            return exchange(leaves, self.strategy, self.op, self.comm, self.bucket_bytes, self.order)
        divisor = self.comm.size if self.op == "mean" else 1
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
        return [(self.comm.allreduce(x) / divisor).astype(leaf.dtype) for x, leaf in zip(wide, leaves, strict=True)]

    def fingerprint(self, tree: PyTree, what: str = "exchange") -> Fingerprint:
        """Facts that must be equal on all ranks, named `what` in messages."""
        order = self.order and self.order.leaves(len(jax.tree.leaves(tree)))
        options = {"strategy": self.strategy, "op": self.op, "bucket_bytes": self.bucket_bytes, "order": order}
        # Without the lines, two programs of equal shapes that ranks trace in another order would be paired for good.
        if what == TRACED and isinstance(self.comm, MpiComm):
            options |= call_places()
        return fingerprint(what, {**options, "leaf": signature(tree)})

    def describe(self, leaves: Sequence[Any]) -> str:
        """Describe the exchange of these leaves, for messages."""
        return f"{self.strategy}, {self.op} of {sum(map(np.size, leaves)):,} floats in {len(leaves)} leaves"

    def buckets(self, leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[list[int]]:
        """Buckets of leaves that travel together, by index.

        Leaves that are summed in their own type, since 32 bits would falsify them, are in none. A strategy that takes
        all leaves at once gains nothing from fusing them.
        """
        bucket_bytes = 0 if parse(self.strategy).spec.means else self.bucket_bytes
        sizes = [leaf.size if leaf.dtype in FLOATS else 0 for leaf in leaves]
        return assign_buckets(sizes, bucket_bytes, self.order and self.order.leaves(len(leaves)))

    @property
    def alignment(self) -> Alignment:
        """Where leaves begin in buckets."""
        strategy = parse(self.strategy)
        return Alignment(strategy.wire.block, (strategy.spec.pieces or len)(self.comm.hosts))


def _outside_jit(choice: Choice, structure: Any, like: tuple) -> tuple[Fingerprint, Callable[[list], list]]:
    """What ranks compare at every call, and the three programs, compiled once for these shapes."""
    programs = Programs(choice.comm.jit, jit_in_turn, choice.comm.jit)
    return choice.fingerprint(jax.tree.unflatten(structure, like)), choice.program(like, programs)


def make_once(comm: Comm, make: Callable[..., Any], *key: Any) -> Any:
    """`make(*key)`, made once. What is kept for MPI ranks goes when their communicator is freed."""
    if isinstance(comm, MpiComm):
        return comm.cached((make, *key), lambda: make(*key))
    return _made_elsewhere(make, *key)


_made_elsewhere = functools.cache(lambda make, *key: make(*key))


@contextmanager
def agree_while_tracing(choice: Choice, tree: PyTree, is_nested: bool) -> Iterator[None]:
    """Ranks compare an exchange that they trace; their programs compare, when they run, which one they have come to.

    Refuse everything before this: outside jit `jax.vmap` runs the beginning of the comparison at once, and a beginning
    without its end holds up all later exchanges.
    """
    choice.comm.assert_same(choice.fingerprint(tree, TRACED))
    number = None if is_nested else number_of(choice.comm, f"{choice.describe(jax.tree.leaves(tree))}, {caller()}")
    with compare_when_run(choice.comm, number):
        yield


# ---------------------------------------------------------------- what is taken


def as_numbers(tree: PyTree, op: str, comm: Comm) -> list[Any]:
    """The leaves as arrays that `exchange` takes.

    Raises:
        UsageError: one is neither an array of floats nor a number, or is a number that its dtype, or its sum over
            workers, cannot hold (path). Arrays of integers are usually counters or PRNG keys, which should not be
            averaged.
    """
    leaves, is_over_mpi = [], isinstance(comm, MpiComm) and comm.size > 1
    for name, leaf in _leaves_by_path(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype in FLOATS:  # programs take NumPy's arrays as fast as JAX's
            check_unmasked(name, leaf)
            leaves.append(leaf)
            continue
        is_number = isinstance(leaf, (int, float, np.integer, np.bool_))
        if not is_number and getattr(leaf, "dtype", None) not in (*FLOATS, jnp.float64):
            raise _not_taken(name, leaf, "floats: cast it, leave it out, or take jaxmpi.collectives.allreduce")
        is_bool = isinstance(leaf, (bool, np.bool_))
        array = to_jax(name, int(leaf) if is_bool else leaf, op, comm.size)
        if is_over_mpi:
            check_on_one_device(name, array)
        leaves.append(array.astype(jnp.int32) if is_bool else array)
    return leaves


def check_leaves(tree: PyTree) -> None:
    """Refuse leaves that a 32-bit sum would falsify."""
    for name, leaf in _leaves_by_path(tree):
        check_unmasked(name, leaf)
        if getattr(leaf, "dtype", None) not in FLOATS:
            raise _not_taken(name, leaf, "float32, bfloat16 or float16: cast it, or leave it out")


def _leaves_by_path(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path_text = jax.tree_util.keystr(path, simple=True, separator="/") or "(the tree itself)"
        check_not_float0(f"exchange: leaf {path_text!r}", leaf)
        yield f"exchange: leaf {path_text!r}", leaf


def _not_taken(name: str, leaf: Any, expected: str) -> UsageError:
    return UsageError(f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}; expected {expected}")


# ---------------------------------------------------------------- for Optax


def exchange_gradients(
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformation:
    """`exchange` as an Optax transformation: the updates' mean or sum over workers.

    First in a chain it makes any optimizer data-parallel:
    `optax.chain(exchange_gradients("ring16"), optax.adamw(1e-3))`.

    Arguments are those of `exchange`. The strategy may also be a compressor, `lowrank<r>` or `topk<p>`, alone or with
    the strategy for what it sends: `lowrank4`, `topk1/ring32`. Without a compressor the state is empty. That of a
    compressor has each worker's own residual; for `lowrank<r>` it also has the last factors, equal on all workers.
    Communicates, raises: as `exchange`.
    """
    check_op(op)
    if not compression.is_compressor(strategy):
        check_strategy(strategy)
        return optax.stateless(lambda updates, params: exchange(updates, strategy, op, comm, bucket_bytes))
    compressor, inner = compression.parse(strategy)

    @functools.cache
    def collectives(workers: Comm, is_inside: bool) -> Collectives:
        """A compressor's collectives: in a program that is being traced, or as programs of their own."""
        mean = functools.partial(exchange, strategy=inner.name, comm=workers, bucket_bytes=bucket_bytes)
        rows = functools.partial(allgather, comm=workers)
        if is_inside:
            return Collectives(mean, rows, inner.wire, local=no_jit)
        return Collectives(mean, jit_in_turn(rows), inner.wire, local=functools.cache(workers.jit))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        workers: Comm = workers_of(comm)
        choice = Choice(strategy, op, workers, bucket_bytes)
        with joint_call(workers) as is_nested:
            check_leaves(updates)
            if workers.size == 1:
                return compression.flush_residual(updates, state)
            if is_traced(jax.tree.leaves((updates, state))):
                updates = jax.tree.map(lambda x: block_transforms(x, workers), updates)
                with agree_while_tracing(choice, updates, is_nested):
                    total, state = compressor.compress(updates, state, collectives(workers, True))
            else:
                workers.assert_same(choice.fingerprint(updates))
                total, state = compressor.compress(updates, state, collectives(workers, False))
        return total if op == "mean" else jax.tree.map(lambda x: x * workers.size, total), state

    return optax.GradientTransformation(lambda params: compressor.init(params), update)
