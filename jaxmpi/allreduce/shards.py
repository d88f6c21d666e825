"""An exchange in two halves, between which each worker has a slice.

A bucket is w rows, row c with slice c of every leaf (`core.slices`). So an entry is summed by the worker, and in the
order, as if its leaf travelled alone: over wire 32 these are the bits of `exchange` with `bucket_bytes=4`. With asa and
hier-asa, which add in rank order everywhere, they are those of any buckets. A coarser wire carries gradients only, and
rounds once less than in `exchange`.

If workers hold whole leaves (`core.deals`), a bucket is some columns of the matrix of all rows. So only rows' ends are
padded. Both asa and hier-asa keep the bits here, too.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.spec import Halves, is_one
from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import TRACED, Choice, Op, check_op, guarded, is_traced
from jaxmpi.allreduce.buckets import Order, assign_buckets, round_up
from jaxmpi.allreduce.building_blocks import spread
from jaxmpi.allreduce.call_order import caller, compared, in_turn, number_of, one_thread
from jaxmpi.allreduce.comm_thread_programs import RANK, all_reduce_on_comm_thread
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.dispatch import check_counts, try_host_all_reduce
from jaxmpi.allreduce.early_scatter import scattering
from jaxmpi.allreduce.host_engine import is_far
from jaxmpi.allreduce.slice_vectors import MOST_VECTORS, Jit, RowsInColumns, SlicesInBuckets, as_part, cut, joined
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.agreement import Fingerprint, HostProcesses
from jaxmpi.comm.base import Comm
from jaxmpi.comm.shared_params import SharedParams
from jaxmpi.comm.shared_sum import scatter_beside
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.deals import Deal, DealtLeaves, Leaves
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.pytrees import PyTree, clipped
from jaxmpi.core.slices import Entries, rows_of, shape_of_slice
from jaxmpi.runtime import host_callbacks


class Shards(NamedTuple):
    """The two halves of an exchange, between which workers have slices.

    Both halves work inside and outside jit. All workers call them together, with trees of the same structure.
    """

    choice: Choice
    clip_norm: float = 0.0  # largest norm of the whole mean or summed gradient; 0: no clipping
    gives_square: bool = False  # True if `scatter` is to give |g|^2 of the whole mean gradient g, before clipping
    deal: Deal | None = None  # which worker has which leaves; None: each a slice of every leaf
    gather_wire: str = "32"  # wire of new params; with a coarser one, of their changes
    shared_params: SharedParams | None = None  # where workers of one host have one copy of the params
    early: bool = False  # True if `scattering` has made slices of gradients when `scatter` gets them

    @property
    def is_beside(self) -> bool:
        """Return True if buckets travel beside the program that gives gradients."""
        return self.choice.order is not None

    @property
    def comm(self) -> Comm:
        """The workers' Comm."""
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
    def block(self) -> int:
        """Floats that share a scale on the wire of gradients or of new params."""
        return math.lcm(parse(self.choice.strategy).wire.block, WIRES[self.gather_wire].block)

    @property
    def chunks(self) -> tuple[int, ...]:
        """By worker: the number of its slice."""
        return self.halves.chunks(self.comm)

    def chunk(self) -> jax.Array:
        """i32[]: the number of this worker's slice."""
        rank = self.comm.rank
        if self.is_beside:  # one rank of a host traces for all
            [rank] = host_callbacks.call(RANK, [], [jax.ShapeDtypeStruct((), jnp.int32)], effect=None)
        return jnp.int32(self.chunks[rank]) if isinstance(rank, int) else jnp.asarray(self.chunks, jnp.int32)[rank]

    @property
    def cut(self) -> Entries | Leaves:
        """How trees are cut over workers."""
        return Leaves(self.deal) if self.deal else Entries(self.comm.size)

    @property
    def keeps_masters(self) -> bool:
        """Return True if workers keep 32-bit slices, and rounded changes travel."""
        return self.gather_wire != "32" and self.comm.size > 1

    def own(self, tree: PyTree) -> PyTree:
        """This worker's slices of a tree that it holds whole; no communication."""
        return self.cut.own(tree, self.chunk())

    def scatter(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """This worker's slices of the mean or sum, and f32[] |mean|^2.

        The square is 0 if neither `clip_norm` nor `gives_square` is set.

        Communicates: the strategy's first half once a bucket, with shm once in all; with `clip_norm` or `gives_square`
        w floats as well. Only these if `early`: the slices are there, not yet clipped.
        """
        if self.early and not (self.clip_norm or self.gives_square):
            return grads, jnp.zeros(())
        slices, square = self._run(NORM if self.early else SCATTER, grads, grads)
        return of_leaves(slices, grads), square

    def scattering(self, gradients: Callable[..., tuple], sum_name: str) -> Callable[..., tuple]:
        """Replace a function's first result, gradients, by slices of their mean.

        For use inside jit. Each bucket goes into the sum as soon as the program has computed it, and is free behind it.

        Args:
            gradients: a function of any arguments.
            sum_name: of the sum in shared memory, as of `RankComm.sum_name`.

        Communicates: through shared memory, once a bucket. The program is the same on all ranks.
        """
        divisor = self.size if self.choice.op == "mean" else 1

        def scatter(leaves: list[jax.Array], through: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            rows = [rows_of(leaf, self.size) for leaf in leaves]
            flat = joined(rows).reshape(-1)
            mine, through = scatter_beside(sum_name, self.size, flat, divisor, through)
            parts = zip(cut(mine, [row.shape[1] for row in rows]), leaves, strict=True)
            return [part.reshape(shape_of_slice(leaf.shape, self.size)) for part, leaf in parts], through

        scattered = scattering(gradients, self.choice.bucket_bytes, scatter)

        def shaped(x: jax.Array) -> jax.Array:
            return x if x.size else x.reshape(shape_of_slice(x.shape, self.size))  # empty ones do not travel

        @functools.wraps(gradients)
        def slices(*args: PyTree) -> tuple:
            own, *rest = scattered(*args)
            return jax.tree.map(shaped, own), *rest

        return slices

    def gather(self, slices: PyTree, like: PyTree, wire: str = "32") -> PyTree:
        """All workers' slices as a tree like `like`, bitwise equal on all.

        Communicates: the strategy's second half once a bucket, with shm once in all.
        """
        return of_leaves(self._run(GATHER + wire, slices, like), like)

    def renewed(self, slices: PyTree, params: PyTree) -> PyTree:
        """The new params from all workers' slices, in shared memory or gathered."""
        return self.shared_params.renewed(slices) if self.shared_params else self.gather(slices, params)

    def _run(self, half: str, given: PyTree, like: PyTree) -> Any:
        """Run a half as programs of lists of leaves.

        So a user's tree need not travel with a program to the other ranks of a host.
        """
        leaves, structure = jax.tree.flatten(given)
        listed = given if isinstance(given, DealtLeaves) else leaves
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(like)]
        with one_thread(self.comm) as is_part:
            if not is_traced(leaves):
                lasting = self._replace(shared_params=None)  # programs outlive a run, whose params go with it
                mine = agreed(lasting, half, structure, tuple((x.shape, x.dtype) for x in leaves))
                self.comm.assert_same(mine)
                return outside_jit(lasting, half, tuple(shapes))(listed)
            run = self._half(half, shapes, as_part, as_part)
            if self.is_beside:  # ranks compare the plan when they run it
                return run(jax.tree.map(lambda x: guarded(x, self.comm), listed))
            named = self._named(half)
            self.comm.assert_same(named.fingerprint(given, TRACED))
            number = None if is_part else number_of(self.comm, f"{named.what(leaves)}, {caller()}")
            listed = jax.tree.map(lambda x: guarded(x, self.comm), listed)
            with compared(self.comm, number):
                return run(listed)

    def _named(self, half: str) -> Choice:
        """The exchange as ranks compare it, and as messages name it."""
        clips = f", clip_norm {float(self.clip_norm)!r}" if self.clip_norm else ""
        dealt = f", dealt {zlib.crc32(bytes(str(self.deal.owners), 'ascii')):08x}" if self.deal else ""
        return self.choice._replace(strategy=f"{self.choice.strategy}, {half}{clips}{dealt}")

    def _half(self, half: str, like: list[jax.ShapeDtypeStruct], jit: Jit, exchanging: Jit) -> Callable[[Any], Any]:
        """A half for lists of leaves, or `DealtLeaves`, of these shapes.

        Args:
            jit: for the pieces that do not communicate.
            exchanging: for the one that does.
        """
        if self.size == 1:
            return exchanging(as_part if half.startswith(GATHER) else self._clipping(as_part, as_part))
        clip = self._clipping(jit, exchanging)
        if half == NORM:
            return clip
        vectors = self._vectors(like)
        if half == SCATTER:

            def scattered(joined: list[jax.Array]) -> Sequence[jax.Array]:
                return vectors.scattered(self._chunks_of_sums([vectors.flat(x) for x in joined]))

            join, scatter, unpack = vectors.joining(jit), exchanging(scattered), vectors.unpacking(jit)
            return lambda grads: clip(unpack(scatter(join(grads))))

        def gathered(chunks: list[jax.Array]) -> Sequence[jax.Array]:
            return vectors.gathered(self._rows_of_all([x.reshape(-1) for x in chunks], half.removeprefix(GATHER)))

        pack, gather, split = vectors.packing(jit), exchanging(gathered), vectors.splitting(jit)
        return lambda slices: split(gather(pack(slices)))

    def _clipping(self, jit: Jit, exchanging: Jit) -> Callable[[Any], tuple[Any, jax.Array]]:
        """A function that clips slices by the norm over all workers.

        It also gives that norm, before clipping, squared; 0 if neither `clip_norm` nor `gives_square` is set.
        """
        if not (self.clip_norm or self.gives_square):
            return lambda slices: (slices, jnp.zeros(()))

        def clip(slices: Any, square: jax.Array) -> Any:
            return clipped(slices, jnp.sqrt(square), self.clip_norm)

        own, total = jit(squares), exchanging(lambda square: self._of_all(square).sum())  # in one order on all workers
        scale = jit(clip) if self.clip_norm else lambda slices, square: slices

        def run(slices: Any) -> tuple[Any, jax.Array]:
            square = total(own(slices))
            return scale(slices, square), square

        return run

    def _vectors(self, like: PyTree) -> SlicesInBuckets | RowsInColumns:
        order = self.choice if self.is_beside else None  # buckets by the order in which gradients come
        return vectors_of(like, self.size, self.choice.bucket_bytes, self.deal, self.block, order)

    def _chunks_of_sums(self, flats: list[jax.Array]) -> list[jax.Array]:
        """f32[n] -> f32[n / w]: this worker's chunk of mean or sum."""
        comm, strategy = self.comm, self.choice.strategy
        divisor = comm.size if self.choice.op == "mean" else 1
        if (sums := self._on_host(strategy, "scatter", lambda: flats)) is not None:
            return [total.reshape(comm.size, -1)[self.chunk()] / divisor for total in sums]
        check_counts(flats, strategy, comm)
        return self.halves.scattered(flats, comm, parse(strategy).wire, divisor)

    def _rows_of_all(self, chunks: list[jax.Array], wire: str) -> list[jax.Array]:
        """f32[m] -> f32[w, m] each: all workers' chunks, by number."""
        comm, strategy = self.comm, f"{self.choice.strategy.partition(':')[0]}:{wire}"
        rows = self._on_host(
            strategy, "gather", lambda: [spread(chunk, comm.size, self.chunk()).reshape(-1) for chunk in chunks]
        )
        if rows is None:
            rows = self.halves.gathered(chunks, comm, WIRES[wire])
        return [row.reshape(comm.size, -1) for row in rows]

    def _on_host(self, strategy: str, half: str, flats_of: Callable[[], list[jax.Array]]) -> list[jax.Array] | None:
        """A half outside XLA; None where a program makes it."""
        if not (self.is_beside or (is_far(self.comm) and self.halves.scatter_part)):
            return None
        flats = flats_of()
        labels = [f"{half} of bucket {i + 1} of {len(flats)}" for i in range(len(flats))]
        plan = {"strategy": strategy, "half": half, "floats of buckets": [x.size for x in flats]}
        if self.is_beside:
            return all_reduce_on_comm_thread(flats, strategy, self.comm, plan, labels, half=half, portable=True)
        return try_host_all_reduce(flats, strategy, self.comm, plan, labels, half)

    def _of_all(self, x: jax.Array) -> jax.Array:
        """f32[] -> f32[w], by worker."""
        if not self.is_beside:
            return self.comm.allgather(x)
        [by_number] = self._rows_of_all([x.reshape(1)], "32")
        return by_number.reshape(-1)[jnp.asarray(self.chunks)]


def vectors_of(
    like: PyTree,
    workers: int,
    bucket_bytes: int | None,
    deal: Deal | None,
    block: int = 1,
    order: Choice | None = None,
) -> SlicesInBuckets | RowsInColumns:
    """How trees of these shapes travel.

    Args:
        block: floats that share a scale on the wire; none of them lies in two leaves.
        order: whose buckets to take, if not those of the tree.
    """
    if deal:
        width = deal.width if bucket_bytes is None else bucket_bytes // (4 * workers)
        width = round_up(max(1, width, -(-deal.width // MOST_VECTORS)), deal.block)
        starts = range(0, deal.width, width)
        return RowsInColumns(deal, [(start, min(start + width, deal.width)) for start in starts])
    leaves = jax.tree.leaves(like)
    buckets = order.buckets(leaves) if order else assign_buckets([leaf.size for leaf in leaves], bucket_bytes)
    return SlicesInBuckets(tuple(leaves), workers, buckets, block)


@functools.cache
def agreed(shards: Shards, half: str, structure: Any, shapes: tuple) -> Fingerprint:
    """Facts that ranks compare before a half outside jit."""
    return shards._named(half).fingerprint(jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes]))


@functools.cache
def outside_jit(shards: Shards, half: str, like: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[Any], Any]:
    """A half as programs, of trees whose leaves have these shapes."""
    if shards.deal:  # in one program XLA makes columns one after another, which takes a copy of the gradients less
        return in_turn(shards._half(half, [*like], as_part, as_part))
    size_bytes = shards.choice.bucket_bytes
    if size_bytes is not None and is_one(shards.comm.hosts):
        shards = shards._replace(choice=shards.choice._replace(bucket_bytes=min(size_bytes, ONE_HOST_BUCKET_BYTES)))
    return shards._half(half, [*like], shards.comm.jit, in_turn)


def of_leaves(made: Any, like: PyTree) -> Any:
    """A tree like another one, of its leaves; `DealtLeaves` stay."""
    return made if isinstance(made, DealtLeaves) else jax.tree.unflatten(jax.tree.structure(like), made)


def squares(slices: PyTree) -> jax.Array:
    """f32[]: the sum of the squares of all entries."""
    return sum((jnp.square(x).sum() for x in jax.tree.leaves(slices)), jnp.zeros(()))


# The most for slices in programs of their own: inside a host a message costs less than joining leaves
ONE_HOST_BUCKET_BYTES = 1 << 20
SCATTER, GATHER, NORM = "reduce-scatter", "allgather:", "norm"  # halves; behind GATHER stands the wire
NO_HALVES = (
    "got strategy {strategy!r} for sharded updates; expected one whose sum is a reduce-scatter and an allgather: "
    "{able}, or auto"
)
NO_FIT = (
    "got strategy {strategy!r} for sharded updates, which is not for ranks on these hosts; expected {able}, or auto"
)
NO_WIRE = (
    "got gather_wire {wire} with strategy {strategy!r}, whose new params never leave the memory of the host, in 32 "
    "bits; leave it out, or take {able}"
)


def shards_of(
    strategy: str,
    op: Op,
    comm: Comm,
    bucket_bytes: int | None,
    clip_norm: float = 0.0,
    gives_square: bool = False,
    deal: Deal | None = None,
    gather_wire: str = "32",
    host: HostProcesses | None = None,
    beside: Order | None = None,
    early: bool = False,
) -> Shards:
    """The halves of a strategy's exchange over these workers.

    Args:
        host: the ranks of the one host there is, if they are to share their params.
        beside: the order in which gradients come to exist in the program that exchanges them, if buckets are to travel
            meanwhile; the caller has seen that they can.
        early: as of `Shards`.

    Raises:
        UsageError: a strategy without halves, with those that have; an unknown wire.
    """
    check_op(op)
    check_bucket_bytes(bucket_bytes)
    lookup(WIRES, gather_wire, "wire")
    check(clip_norm >= 0, f"clip_norm: got {clip_norm}; expected a largest norm >= 0, 0 for none")
    able = ", ".join(with_halves(comm.hosts, gather_wire))
    spec = None if is_compressor(strategy) else parse(strategy).spec
    halves = spec.halves if spec else None
    if not (spec and halves):
        raise UsageError(NO_HALVES.format(strategy=strategy, able=able))
    check(spec.fits(comm.hosts), NO_FIT.format(strategy=strategy, able=able))
    check(gather_wire in halves.gathers, NO_WIRE.format(wire=gather_wire, strategy=strategy, able=able))
    choice = Choice(strategy=parse(strategy).name, op=op, comm=comm, bucket_bytes=bucket_bytes, order=beside)
    made = Shards(
        choice=choice,
        clip_norm=clip_norm,
        gives_square=gives_square,
        gather_wire=gather_wire,
        early=early,
    )
    if deal and comm.size > 1:
        made = made._replace(deal=deal._replace(block=made.block))
    return made._replace(shared_params=SharedParams(host, made.cut, made.chunks[host.local_rank])) if host else made
