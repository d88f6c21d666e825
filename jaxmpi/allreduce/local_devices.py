"""An exchange between processes that each drive several devices.

Devices of a process add theirs first. Then one message a process goes by the strategy. At the end all devices get the
sum (Kumar et al. 2018, IBM, algorithm 1). A program over several devices would call MPI once a device, so the exchange
stands between programs:

1. on every device: leaves -> buckets;
2. on the first device: the devices' buckets are added in order;
3. on the first device: the strategy over processes, as in `jaxmpi.exchange` outside jit;
4. on every device: buckets -> leaves.

Over wire 32 these are the bits of `hier-<strategy>` with one process a device: the same additions in the same order,
since the vector that travels lies as that strategy would cut it. So are those of asa and ring over bf16. Wires 16 and 8
scale other blocks, and tree rounds by other cuts if there are more than two processes.

Step 3 could have a reduce-scatter between the devices before it and an all-gather behind it. On CPU devices these took
longer than copies to the first device and back.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmpi.allreduce.algorithms import exchanges, parse
from jaxmpi.allreduce.api import Choice, check_leaves, exchange
from jaxmpi.allreduce.buckets import Programs, fuse, in_buckets, no_jit, split
from jaxmpi.allreduce.building_blocks import pad
from jaxmpi.core.pytrees import PyTree

UNFUSED = 4  # bucket bytes: buckets are not fused again


def over_local_devices(choice: Choice, mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """A function that exchanges a tree over all devices of all processes.

    It gives the mean or sum, the same bits on every device, and is called outside jit. Leaves are [devices, ...] over
    the mesh, whose devices are this process's, equally many in all; float32, bfloat16 or float16. With strategy none
    every device keeps its own, as in `jaxmpi.exchange`.

    Args:
        choice: strategy, operation and buckets; its `comm` is between processes.
        mesh: of one axis.

    Communicates: as `jaxmpi.exchange` over processes, of one device's floats. All call it together.

    Raises:
        UsageError: as `jaxmpi.exchange`.
    """
    devices = Devices(mesh)

    @functools.cache
    def exchange_of(structure: Any, like: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[list[jax.Array]], list]:
        check_leaves(jax.tree.unflatten(structure, like))
        buckets, count, alignment = choice.buckets(like), devices.mesh.size, choice.alignment
        alignment = alignment._replace(pieces=count * alignment.pieces)
        divisor = choice.comm.size * count if choice.op == "mean" else 1

        def layout(n: int) -> Layout:
            return layout_of(n, count, choice.comm.size, choice.strategy)

        def unpack(total: jax.Array, bucket: Sequence[int]) -> list[jax.Array]:
            shapes = [like[i] for i in bucket]
            n = alignment.size([leaf.size for leaf in shapes])
            return split(layout(n).restore(total)[:n] / divisor, shapes, alignment)

        @choice.comm.jit
        def add_each(by_device: list[list[jax.Array]]) -> list[jax.Array]:
            sums = [functools.reduce(jnp.add, each) for each in by_device]
            return [layout(x.size).interleave(x) for x in sums]

        def totals(vectors: list[jax.Array]) -> list[jax.Array]:
            sums = add_each(devices.on_first(vectors))
            return devices.on_all(exchange(sums, choice.strategy, "sum", choice.comm, UNFUSED))

        return in_buckets(buckets, functools.partial(fuse, alignment=alignment), totals, unpack, devices.programs)

    def call(tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        like = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves)
        return jax.tree.unflatten(structure, exchange_of(structure, like)(leaves)) if leaves else tree

    if exchanges(choice.strategy):
        return call
    workers = choice.comm.size * mesh.size if choice.op == "sum" else 1  # none calls its own a mean
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * workers, tree)) if workers > 1 else lambda tree: tree


class Devices(NamedTuple):
    """This process's devices."""

    mesh: Mesh

    @property
    def sharding(self) -> NamedSharding:
        """A leading axis of these devices."""
        return NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))

    @property
    def devices(self) -> list[Any]:
        """By place."""
        return list(self.mesh.devices.flat)

    def jit_each(
        self, function: Callable, donate_argnums: tuple[int, ...] = (), *, first: bool = True, last: bool = True
    ) -> Callable:
        """A program on each device.

        Args:
            first: arguments have a leading axis of devices, which the function does not see; else they are flat.
            last: likewise of results.
        """

        def on_one(*args: Any) -> Any:
            results = function(*(jax.tree.map(lambda x: x[0], args) if first else args))
            return jax.tree.map(lambda x: x[None], results) if last else results

        spec = self.sharding.spec
        mapped = jax.shard_map(on_one, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate_argnums)

    @property
    def programs(self) -> Programs:
        """Those of an exchange: it packs and unpacks on each device, and sends between the two."""
        before, after = functools.partial(self.jit_each, last=False), functools.partial(self.jit_each, first=False)
        return Programs(before, no_jit, after, lone_pass=False)

    def on_first(self, vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Flat vectors of all devices on the first one: by vector, then by device."""
        parts = [sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0) for x in vectors]
        return jax.device_put([[shard.data for shard in each] for each in parts], self.devices[0])

    def on_all(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Flat vectors of one device copied to all."""
        copies = [[jax.device_put(x, device) for device in self.devices] for x in vectors]
        shapes = [(self.mesh.size * x.size,) for x in vectors]
        return [
            jax.make_array_from_single_device_arrays(shape, self.sharding, each)
            for shape, each in zip(shapes, copies, strict=True)
        ]


class Layout(NamedTuple):
    """How K devices' f32[n] lie in the vector that P processes exchange."""

    devices: int
    length: int  # floats of a device's part: as many as `hier-<strategy>` would send for it
    parts: int  # into which the strategy cuts each
    width: int  # floats of each of these

    def interleave(self, x: jax.Array) -> jax.Array:
        """f32[n] -> f32[m]: part c holds part c of every device."""
        rows = pad(x, self.devices * self.length).reshape(self.devices, -1)
        rows = jax.vmap(lambda row: pad(row, self.parts * self.width))(rows)
        return rows.reshape(self.devices, self.parts, -1).swapaxes(0, 1).reshape(-1)

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse, with padding: f32[m] -> f32[devices * length]."""
        rows = x.reshape(self.parts, self.devices, -1).swapaxes(0, 1).reshape(self.devices, -1)
        return rows[:, : self.length].reshape(-1)


def layout_of(n: int, devices: int, processes: int, strategy: str) -> Layout:
    """The layout of n floats, cut as the strategy does."""
    length = processes * -(-n // (devices * processes))
    cut = parse(strategy).spec.cut
    return Layout(devices, length, *(cut(length, processes) if cut else (processes, length // processes)))
