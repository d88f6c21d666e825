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
from jaxmpi.allreduce.buckets import fuse, split
from jaxmpi.allreduce.building_blocks import pad
from jaxmpi.core.pytrees import PyTree

TRAVELS_ALONE = 4  # bytes: buckets are not fused again


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
    programs: dict[Any, Callable[[list[jax.Array]], list[jax.Array]]] = {}

    def call(tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return tree
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in programs:
            check_leaves(tree)
            programs[key] = summed_by(choice, mesh, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves])
        return jax.tree.unflatten(structure, programs[key](leaves))

    return call if exchanges(choice.strategy) or choice.op == "sum" else own


def own(tree: PyTree) -> PyTree:
    """Every device's own, which a strategy that exchanges nothing calls a mean."""
    return tree


def summed_by(
    choice: Choice, mesh: Mesh, like: Sequence[jax.ShapeDtypeStruct]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The exchange of leaves with these shapes behind an axis of devices."""
    if not exchanges(choice.strategy):
        workers = choice.comm.size * mesh.size
        return jax.jit(lambda leaves: [leaf * workers for leaf in leaves])
    buckets, devices = choice.buckets(like), list(mesh.devices.flat)
    along = PartitionSpec(*mesh.axis_names)
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=along, out_specs=along, check_vma=False)
    alignment = choice.alignment._replace(pieces=mesh.size * choice.alignment.pieces)
    sizes = [alignment.size([like[i].size for i in bucket]) for bucket in buckets]
    divisor = choice.comm.size * mesh.size if choice.op == "mean" else 1
    rows = [DeviceRows.of(size, mesh.size, choice.comm.size, choice.strategy) for size in sizes]

    def fused(leaves: list[jax.Array]) -> list[jax.Array]:
        return [fuse([leaves[i][0] for i in bucket], alignment) for bucket in buckets]

    def added(of_devices: list[list[jax.Array]]) -> list[jax.Array]:
        return [row.as_cut(functools.reduce(jnp.add, each)) for row, each in zip(rows, of_devices, strict=True)]

    def means(totals: list[jax.Array]) -> list[list[jax.Array]]:
        flats = [row.as_it_was(total)[:size] / divisor for row, size, total in zip(rows, sizes, totals, strict=True)]
        parts = [split(flat, [like[i] for i in bucket], alignment) for flat, bucket in zip(flats, buckets, strict=True)]
        return jax.tree.map(lambda part: part[None], parts)

    fuse_each, add_each, split_each = jax.jit(over(fused)), choice.comm.jit(added), jax.jit(over(means))
    placed = NamedSharding(mesh, along)

    def run(leaves: list[jax.Array]) -> list[jax.Array]:
        parts = [[shard.data for shard in in_order(vector)] for vector in fuse_each(leaves)]
        totals = exchange(
            add_each(jax.device_put(parts, devices[0])), choice.strategy, "sum", choice.comm, TRAVELS_ALONE
        )
        copies = [[jax.device_put(total, device) for device in devices] for total in totals]
        spread = [
            jax.make_array_from_single_device_arrays((mesh.size * each[0].size,), placed, each) for each in copies
        ]
        out = list(leaves)  # empty ones do not travel
        for bucket, means_of in zip(buckets, split_each(spread), strict=True):
            for i, mean in zip(bucket, means_of, strict=True):
                out[i] = mean
        return out

    return run


def in_order(x: jax.Array) -> list[Any]:
    """The shards of a vector over the mesh, by device."""
    return sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)


class DeviceRows(NamedTuple):
    """The layout in which K devices' f32[n] travels over P processes."""

    devices: int
    length: int  # floats of a device's part: as many as `hier-<strategy>` would send for it
    parts: int  # number of pieces into which the strategy cuts each
    width: int  # floats of each of these

    @classmethod
    def of(cls, n: int, devices: int, processes: int, strategy: str) -> "DeviceRows":
        """Cut n floats as the strategy does."""
        length = processes * -(-n // (devices * processes))
        cut = parse(strategy).spec.cut
        return cls(devices, length, *(cut(length, processes) if cut else (processes, length // processes)))

    def as_cut(self, x: jax.Array) -> jax.Array:
        """f32[n] -> f32[m]: part c holds part c of every device."""
        rows = pad(x, self.devices * self.length).reshape(self.devices, -1)
        rows = jax.vmap(lambda row: pad(row, self.parts * self.width))(rows)
        return rows.reshape(self.devices, self.parts, -1).swapaxes(0, 1).reshape(-1)

    def as_it_was(self, x: jax.Array) -> jax.Array:
        """The inverse, with what was filled in: f32[m] -> f32[devices * length]."""
        return (
            x.reshape(self.parts, self.devices, -1)
            .swapaxes(0, 1)
            .reshape(self.devices, -1)[:, : self.length]
            .reshape(-1)
        )
