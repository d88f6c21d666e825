"""ZeRO: an exchange in two halves, between which each worker updates its shard of the params.

    shard of the mean gradient <- reduce-scatter ;  update of that shard ;  whole params <- all-gather

A bucket is w rows, and row c has shard c of every tensor. So an entry is summed by the worker, and in the order, as if
its tensor were sent alone: over wire 32 these are the bits of `exchange` with `bucket_bytes=4`. With asa and hier-asa,
which add in rank order everywhere, they are those of any buckets. A coarser wire carries gradients only, and rounds
once less than in `exchange`. Whole tensors are sent as one vector of w shards; asa and hier-asa keep the bits here.

With several devices a process the halves stand between programs, for one over several devices would call MPI once a
device. P processes of K devices are w = P K workers. Every device packs its gradients into vectors of w rows; the first
device adds them up in order; the strategy's first half leaves K rows of the sum with each process, one for each device.
So a process sends what it sends without sharding. Rows lie as `hier-<strategy>` gives them to workers, so over wire 32
these are its bits with one process a device, and those of `over_local_devices`.

Tried and dropped: chunks of vectors as arguments of the optimizer's program, in place of shards. XLA rounds moments
otherwise if it reads them out of a longer vector. So workers' bits were no more those of an unsharded update. Exchange
and optimizer in one program, which every rank compiles: as fast, and 75 s for the first update of GoogLeNet.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.spec import Halves, is_one
from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import Choice, Op, agree_while_tracing, check_op, is_traced, make_once
from jaxmpi.allreduce.buckets import INSIDE, Jit, Order, Programs, assign_buckets, in_buckets, no_jit
from jaxmpi.allreduce.building_blocks import spread
from jaxmpi.allreduce.call_order import jit_in_turn, joint_call
from jaxmpi.allreduce.comm_thread import RANK, all_reduce_on_comm_thread
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.derivative import block_transforms
from jaxmpi.allreduce.dispatch import check_counts, try_host_all_reduce
from jaxmpi.allreduce.early_scatter import scattering
from jaxmpi.allreduce.host_engine import CHUNK, is_far
from jaxmpi.allreduce.local_devices import UNFUSED, Devices, Layout, layout_of
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm.agreement import Fingerprint, HostProcesses
from jaxmpi.comm.base import Comm
from jaxmpi.comm.shared_params import SharedParams
from jaxmpi.comm.shared_sum import call_sum
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.pytrees import PyTree, clipped
from jaxmpi.core.sharding import (
    ElementSharding,
    TensorShard,
    TensorSharding,
    cut,
    join,
    shard_rows,
    shard_shape,
    unshard,
)
from jaxmpi.runtime import host_callbacks

# Buckets of shards in programs of their own: inside a host a message costs less than packing tensors.
ONE_HOST_BUCKET_BYTES = 1 << 20
SCATTER, GATHER, NORM = "reduce-scatter", "allgather:", "norm"  # halves; the wire follows GATHER


class Zero(NamedTuple):
    """The two halves of an exchange, between which workers have shards.

    Both work inside and outside jit; over a `mesh` outside only, on trees whose leaves have a leading axis of this
    process's devices. All workers call them together, with trees of the same structure.
    """

    choice: Choice  # its workers are processes
    sharding: ElementSharding | TensorSharding
    clip_norm: float = 0.0  # largest norm of the whole mean or summed gradient; 0: no clipping
    gives_square: bool = False  # `scatter` gives |g|^2 of the whole mean gradient g, before clipping
    gather_wire: str = "32"  # of new params; with a coarser one of their changes
    shared_params: SharedParams | None = None  # the one copy of params that a host's workers have
    early: bool = False  # `scatter` gets shards, from the program of the gradients
    mesh: Mesh | None = None  # of one axis: this process's devices, as many as of every other process

    @property
    def comm(self) -> Comm:
        return self.choice.comm

    @property
    def devices(self) -> int:
        return self.mesh.size if self.mesh else 1

    @property
    def size(self) -> int:
        return self.comm.size * self.devices

    @property
    def halves(self) -> Halves:
        halves = parse(self.choice.strategy).spec.halves
        assert halves
        return halves

    @property
    def overlaps(self) -> bool:
        """Whether buckets are sent while the program computes gradients."""
        return self.choice.order is not None

    @property
    def keeps_masters(self) -> bool:
        """Whether workers keep 32-bit shards of params, and rounded changes are sent."""
        return self.gather_wire != "32" and self.comm.size > 1

    @property
    def shard_indices(self) -> tuple[int, ...]:
        """By worker: the index of its shard."""
        by_rank = self.halves.chunks(self.comm)
        return tuple(place * self.comm.size + index for index in by_rank for place in range(self.devices))

    def shard_index(self) -> jax.Array:
        """i32[]: the index of this worker's shard; i32[devices] over a mesh."""
        if self.mesh:
            return indices_of_devices(self)
        rank = self.comm.rank
        if self.overlaps:  # one rank of a host traces for all
            [rank] = host_callbacks.call(RANK, [], [jax.ShapeDtypeStruct((), jnp.int32)], effect=None)
        indices = self.shard_indices
        return jnp.int32(indices[rank]) if isinstance(rank, int) else jnp.asarray(indices, jnp.int32)[rank]

    def scatter(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """This worker's shard of the mean or sum, and f32[] |mean|^2.

        The square is 0 if neither `clip_norm` nor `gives_square` is set.

        Communicates: the strategy's first half once a bucket, with shm once in all; with `clip_norm` or `gives_square`
        w floats as well. Only these if `early`.
        """
        if self.early and not (self.clip_norm or self.gives_square):
            return grads, jnp.zeros(())
        shard, square = self._run(NORM if self.early else SCATTER, grads, grads)
        return as_tree(shard, grads), square

    def gather(self, shard: PyTree, like: PyTree, wire: str = "32") -> PyTree:
        """All workers' shards as a tree like `like`, bitwise equal on all.

        Communicates: the strategy's second half once a bucket, with shm once in all.
        """
        return as_tree(self._run(GATHER + wire, shard, like), like)

    def gather_params(self, shard: PyTree, params: PyTree) -> PyTree:
        """The new params from all workers' shards, in shared memory or gathered."""
        return self.shared_params.update(shard) if self.shared_params else self.gather(shard, params)

    def scatter_early(self, gradients: Callable[..., tuple], sum_name: str) -> Callable[..., tuple]:
        """Replace a function's first result, gradients, by this worker's shard of their mean.

        For use inside jit. Each bucket goes into the sum as soon as the program has computed it, and is free behind it.

        Args:
            gradients: a function of any arguments.
            sum_name: of the sum in shared memory, as of `RankComm.shared_sum`.

        Communicates: through shared memory, once a bucket. The program is the same on all ranks.
        """
        divisor = self.size if self.choice.op == "mean" else 1

        def scatter(leaves: list[jax.Array], live_values: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            passed_values: list[jax.Array] = []

            def send(flats: list[jax.Array]) -> list[jax.Array]:
                chunks, passed_values[:] = call_sum(sum_name, self.size, flats, divisor, "scatter", live_values)
                return chunks

            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
            return ElementVectors(shapes, self.size, [[*range(len(leaves))]]).scatter(send)(leaves), passed_values

        return scattering(gradients, self.choice.bucket_bytes, scatter)

    def _run(self, half: str, given: PyTree, like: PyTree) -> Any:
        """Run a half on lists of leaves: a user's tree need not be sent with a program to other ranks of a host."""
        leaves = jax.tree.leaves(given)
        leaves_or_shard = given if isinstance(given, TensorShard) else leaves
        axes = 1 if self.mesh else 0
        shapes = tuple(jax.ShapeDtypeStruct(x.shape[axes:], x.dtype) for x in jax.tree.leaves(like))
        if self.mesh:
            return over_devices(self, half, shapes)(leaves_or_shard)
        with joint_call(self.comm) as is_nested:
            if not is_traced(leaves):
                given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
                lasting = self._replace(shared_params=None)  # programs outlive a run, whose params go with it
                key = lasting, half, jax.tree.structure(given), tuple(jax.tree.leaves(given)), shapes
                facts, run = make_once(self.comm, outside_jit, *key)
                self.comm.assert_same(facts)
                return run(leaves_or_shard)
            run = self._half(half, shapes, INSIDE)
            leaves_or_shard = jax.tree.map(lambda x: block_transforms(x, self.comm), leaves_or_shard)
            if self.overlaps:  # ranks compare the plan when they run it
                return run(leaves_or_shard)
            with agree_while_tracing(self._named_choice(half), given, is_nested):
                return run(leaves_or_shard)

    def _named_choice(self, half: str) -> Choice:
        """The exchange as ranks compare it, and as messages name it."""
        clips = f", clip_norm {float(self.clip_norm)!r}" if self.clip_norm else ""
        owners = f"{self.sharding.owners}" if isinstance(self.sharding, TensorSharding) else ""
        assignment = f", dealt {zlib.crc32(owners.encode()):08x}" if owners else ""
        return self.choice._replace(strategy=f"{self.choice.strategy}, {half}{clips}{assignment}")

    def _half(self, half: str, like: Sequence[jax.ShapeDtypeStruct], programs: Programs) -> Callable[[Any], Any]:
        """A half for lists of leaves of these shapes."""
        if half.startswith(GATHER):
            wire = half.removeprefix(GATHER)
            if self.size == 1:
                return programs.exchange(lambda shards: shards)
            return self._vectors(like).gather(lambda chunks: self._all_gather(chunks, wire), programs)
        if self.size == 1:
            return programs.exchange(self._clipping(no_jit, lambda square: square))

        def total(square: jax.Array) -> jax.Array:  # added in one order on all workers
            if not self.overlaps:
                return self.comm.allgather(square).sum()
            [by_index] = self._all_gather([square.reshape(1)], "32")
            return by_index.reshape(-1)[jnp.asarray(self.shard_indices)].sum()

        clip = self._clipping(programs.before, programs.exchange(total))
        if half == NORM:
            return clip
        scatter = self._vectors(like).scatter(self._reduce_scatter, programs)
        return lambda grads: clip(scatter(grads))

    def _clipping(self, jit: Jit, total: Callable[[jax.Array], jax.Array]) -> Callable[[Any], tuple[Any, jax.Array]]:
        """A function that clips a shard by the norm over all workers, and gives that norm before, squared."""
        if not (self.clip_norm or self.gives_square):
            return lambda shard: (shard, jnp.zeros(()))
        square_of_shard = jit(lambda shard: sum((jnp.square(x).sum() for x in jax.tree.leaves(shard)), jnp.zeros(())))
        scale = jit(lambda shard, square: clipped(shard, jnp.sqrt(square), self.clip_norm))

        def run(shard: Any) -> tuple[Any, jax.Array]:
            square = total(square_of_shard(shard))
            return scale(shard, square) if self.clip_norm else shard, square

        return run

    def _vectors(self, like: Sequence[jax.ShapeDtypeStruct]) -> "ElementVectors | TensorVectors":
        block = math.lcm(parse(self.choice.strategy).wire.block, WIRES[self.gather_wire].block)
        if isinstance(self.sharding, TensorSharding):
            return TensorVectors(self.sharding)
        buckets = self.choice.buckets([*like]) if self.overlaps else None
        buckets = buckets or assign_buckets([leaf.size for leaf in like], self.choice.bucket_bytes)
        return ElementVectors(tuple(like), self.size, buckets, block)

    def _reduce_scatter(self, flats: list[jax.Array]) -> list[jax.Array]:
        """f32[n] -> f32[n / w]: this worker's chunk of mean or sum."""
        comm, strategy = self.comm, self.choice.strategy
        divisor = comm.size if self.choice.op == "mean" else 1
        if (sums := self._on_host(strategy, "scatter", flats)) is not None:
            return [total.reshape(comm.size, -1)[self.shard_index()] / divisor for total in sums]
        check_counts(flats, strategy, comm)
        if self.halves.means and flats:
            return self.halves.means(flats, comm, divisor)
        # Divided as sums without halves are. XLA may divide by a constant as the product with its inverse, which rounds
        # otherwise.
        return [self.halves.scatter(x, comm, parse(strategy).wire) / divisor for x in flats]

    def _all_gather(self, chunks: list[jax.Array], wire: str) -> list[jax.Array]:
        """f32[m] -> f32[w, m] each: all workers' chunks, by index."""
        comm, strategy = self.comm, f"{self.choice.strategy.partition(':')[0]}:{wire}"
        if self.overlaps or is_far(comm):  # the communication thread works in a whole vector
            flats = [spread(chunk, comm.size, self.shard_index()).reshape(-1) for chunk in chunks]
            rows = self._on_host(strategy, "gather", flats)
        else:  # one after another: together, or with zeros around them, they took up to 1.5 times as long
            rows_by_chunk = [self._on_host(strategy, CHUNK, [chunk]) for chunk in chunks]
            rows = None if None in rows_by_chunk else [row for chunk_rows in rows_by_chunk for row in chunk_rows or ()]
        if rows is None:
            if self.halves.wholes and chunks:
                rows = self.halves.wholes(chunks, comm)
            else:
                rows = [self.halves.gather(chunk, comm, WIRES[wire]) for chunk in chunks]
        return [row.reshape(comm.size, -1) for row in rows]

    def _on_host(self, strategy: str, half: str, flats: list[jax.Array]) -> list[jax.Array] | None:
        """A half outside XLA; None where a program makes it."""
        if not (self.overlaps or self.halves.scatter_part):
            return None
        if self.overlaps:
            return all_reduce_on_comm_thread(flats, strategy, self.comm, half, portable=True)
        return try_host_all_reduce(flats, strategy, self.comm, half)


def outside_jit(zero: Zero, half: str, structure: Any, shapes: tuple, like: tuple) -> tuple[Fingerprint, Callable]:
    """What ranks compare before a half outside jit, and its programs, for leaves of these shapes."""
    facts = zero._named_choice(half).fingerprint(jax.tree.unflatten(structure, shapes))
    if isinstance(zero.sharding, TensorSharding):  # in one program nothing is there twice
        return facts, jit_in_turn(zero._half(half, like, INSIDE))
    size_bytes = zero.choice.bucket_bytes
    if size_bytes is not None and is_one(zero.comm.hosts):
        zero = zero._replace(choice=zero.choice._replace(bucket_bytes=min(size_bytes, ONE_HOST_BUCKET_BYTES)))
    return facts, zero._half(half, like, Programs(zero.comm.jit, jit_in_turn, zero.comm.jit))


def as_tree(leaves: Any, like: PyTree) -> Any:
    """A tree like another one, of its leaves; a `TensorShard` as it is."""
    return leaves if isinstance(leaves, TensorShard) else jax.tree.unflatten(jax.tree.structure(like), leaves)


# ---------------------------------------------------------------- sharded trees as vectors of w chunks f32[m]

Vectors = list[jax.Array]
Send = Callable[[Vectors], Vectors]  # f32[w m] -> f32[m] each, or the other way as f32[w, m]


class ElementVectors(NamedTuple):
    """A vector for each bucket: row c of [w, m] has shard c of each tensor."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    workers: int
    buckets: list[list[int]]  # empty tensors are in none
    block: int = 1  # floats that share a scale on the wire

    def scatter(self, send: Send, programs: Programs = INSIDE) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shards."""

        def pack(group: Vectors) -> jax.Array:
            return join([shard_rows(x, self.workers) for x in group], self.block).reshape(-1)

        def unpack(chunk: jax.Array, bucket: Sequence[int]) -> Vectors:
            shapes = [shard_shape(self.leaves[i].shape, self.workers) for i in bucket]
            parts = cut(chunk, [*map(math.prod, shapes)], self.block)
            return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]

        return in_buckets(self.buckets, pack, send, unpack, programs)

    def gather(self, send: Send, programs: Programs = INSIDE) -> Callable[[Any], Vectors]:
        """This worker's shards -> leaves."""

        def pack(group: Vectors) -> jax.Array:
            return join([x.reshape(-1) for x in group], self.block)

        def unpack(rows: jax.Array, bucket: Sequence[int]) -> Vectors:
            sizes = [math.prod(shard_shape(self.leaves[i].shape, self.workers)) for i in bucket]
            return [unshard(x, self.leaves[i]) for x, i in zip(cut(rows, sizes, self.block), bucket, strict=True)]

        return in_buckets(self.buckets, pack, send, unpack, programs)


class TensorVectors(NamedTuple):
    """One vector of whole tensors, in whose rows are the workers' shards: so only the ends of shards are padded."""

    sharding: TensorSharding

    def scatter(self, send: Send, programs: Programs = INSIDE) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shard."""
        pack = lambda leaves: [self.sharding.shard_rows(leaves).reshape(-1)]  # noqa: E731
        return programs.compose(pack, send, lambda chunks: TensorShard({"float32": chunks[0]}))

    def gather(self, send: Send, programs: Programs = INSIDE) -> Callable[[Any], Vectors]:
        """This worker's shard -> leaves."""
        return programs.compose(lambda shard: [shard.flat], send, lambda rows: self.sharding.unshard(rows[0]))


# ---------------------------------------------------------------- several devices a process


@functools.cache
def indices_of_devices(zero: Zero) -> jax.Array:
    """i32[devices]: the indices of this process's shards."""
    assert zero.mesh
    first = int(zero.comm.rank) * zero.devices
    indices = np.array(zero.shard_indices[first : first + zero.devices], np.int32)
    return jax.device_put(indices, Devices(zero.mesh).sharding)


@functools.cache
def over_devices(zero: Zero, half: str, like: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[Any], Any]:
    """A half of trees with a leading axis of devices, whose other axes are these."""
    assert zero.mesh
    processes, devices, vectors = zero.comm.size, Devices(zero.mesh), zero._vectors(like)
    between = Zero(zero.choice._replace(op="sum", bucket_bytes=UNFUSED), ElementSharding(processes))
    divisor = zero.size if zero.choice.op == "mean" else 1

    def layout(x: jax.Array) -> Layout:
        return layout_of(x.size, zero.devices, processes, zero.choice.strategy)

    def programs(receive: Callable[[jax.Array], jax.Array]) -> Programs:  # it is in the program that unpacks
        after = devices.programs.after
        return devices.programs._replace(after=lambda unpack: after(lambda vectors: unpack([*map(receive, vectors)])))

    def gather_chunks(chunks: Sequence[jax.Array], wire: str) -> list[jax.Array]:
        """This process's chunks, flat -> f32[w m] each, flat on every device, as they were sent."""
        chunks = jax.device_put([*chunks], devices.devices[0])
        shapes = [jax.ShapeDtypeStruct((processes * x.size,), x.dtype) for x in chunks]
        return devices.on_all(between.gather(chunks, shapes, wire))

    if half.startswith(GATHER):
        rows = programs(lambda x: layout(x).restore(x).reshape(zero.size, -1))
        return vectors.gather(lambda chunks: gather_chunks(chunks, half.removeprefix(GATHER)), rows)
    add = zero.comm.jit(lambda by_device: [layout(x[0]).interleave(functools.reduce(jnp.add, x)) for x in by_device])

    def scatter_sums(flats: list[jax.Array]) -> list[jax.Array]:
        sums, _ = between.scatter(add(devices.on_first(flats)))
        return jax.device_put(sums, devices.sharding)  # row i of [K m] to device i

    def sum_by_worker(by_index: jax.Array) -> jax.Array:
        by_worker = by_index.reshape(processes, zero.devices)[np.array(zero.halves.chunks(zero.comm))]
        return by_worker.reshape(-1).sum()[None]

    total = devices.jit_each(sum_by_worker, first=False, last=False)
    scatter = vectors.scatter(scatter_sums, programs(lambda x: x / divisor))
    clip = zero._clipping(devices.jit_each, lambda squares: total(gather_chunks([squares], "32")[0]))
    return lambda grads: clip(scatter(grads))


# ---------------------------------------------------------------- of a run's options


def make_zero(
    strategy: str,
    op: Op,
    comm: Comm,
    bucket_bytes: int | None,
    sharding: ElementSharding | TensorSharding | None = None,
    clip_norm: float = 0.0,
    gives_square: bool = False,
    gather_wire: str = "32",
    host: HostProcesses | None = None,
    order: Order | None = None,
    early: bool = False,
    mesh: Mesh | None = None,
) -> Zero:
    """The halves of a strategy's exchange over these workers.

    Args:
        sharding: over all workers; default: by element.
        host: the ranks of the one host there is, if they are to share their params.
        order: in which gradients come to exist in the program that exchanges them, if buckets are to be sent meanwhile;
            the caller has seen that they can.
        early, mesh: as of `Zero`.

    Raises:
        UsageError: a strategy without halves, with those that have; an unknown wire; a norm below 0.
    """
    check_op(op)
    check_bucket_bytes(bucket_bytes)
    lookup(WIRES, gather_wire, "wire")
    if clip_norm < 0:
        raise UsageError(f"clip_norm: got {clip_norm}; expected a largest norm >= 0, 0 for none")
    able = ", ".join(with_halves(comm.hosts, gather_wire))
    spec = None if is_compressor(strategy) else parse(strategy).spec
    if not (spec and spec.halves and spec.fits(comm.hosts)):
        raise UsageError(
            f"got strategy {strategy!r} for sharded updates; expected one whose sum is a reduce-scatter and an "
            f"allgather, for ranks on these hosts: {able}, or auto"
        )
    if gather_wire not in spec.halves.gathers:
        raise UsageError(
            f"got gather_wire {gather_wire} with strategy {strategy!r}, whose new params never leave the memory of the "
            f"host, in 32 bits; leave it out, or take {able}"
        )
    choice = Choice(strategy=parse(strategy).name, op=op, comm=comm, bucket_bytes=bucket_bytes, order=order)
    workers = comm.size * (mesh.size if mesh else 1)
    if sharding is None or workers == 1:
        sharding = ElementSharding(workers)
    if isinstance(sharding, TensorSharding):
        sharding = sharding._replace(block=math.lcm(parse(strategy).wire.block, WIRES[gather_wire].block))
    zero = Zero(choice, sharding, clip_norm, gives_square, gather_wire, early=early, mesh=mesh)
    if host:
        zero = zero._replace(shared_params=SharedParams(host, sharding, zero.shard_indices[host.local_rank]))
    return zero
