"""Sharded updates of processes that each drive several devices.

As in `local_devices` the halves stand between programs, for one over several devices would call MPI once a device. With
P processes of K devices each

1. every device makes vectors of its gradients, w = P K rows each;
2. the first device adds up those of all devices, in order;
3. the strategy's first half leaves K rows of the sum with each process, one for each device;
4. every device updates its slices, and holds the optimizer's state of these alone;
5. the first device joins the new rows, and the second half gives all processes' rows. Then every device gets the tree.

So a process sends what it sends without sharded updates. Rows lie as `hier-<strategy>` deals them to workers. So over
wire 32 these are its bits with one process a device. They are also the bits of `over_local_devices`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmpi.allreduce.local_devices import TRAVELS_ALONE, DeviceRows, in_order
from jaxmpi.allreduce.shards import Shards, of_leaves, squares, vectors_of
from jaxmpi.allreduce.slice_vectors import as_part
from jaxmpi.core.deals import Deal, Leaves
from jaxmpi.core.pytrees import PyTree, clipped
from jaxmpi.core.slices import Entries


@dataclass(frozen=True, kw_only=True)
class ShardsOfDevices:
    """`Shards` over all devices of all processes, called outside jit.

    Arrays have a leading axis of own devices. Strategy, wires and clipping are those of `of`, whose workers are
    processes.
    """

    of: Shards
    mesh: Mesh  # mesh of one axis; this process's devices, as many as of every other process
    deal: Deal | None = None  # over all devices

    @property
    def size(self) -> int:
        """Number of devices of all processes."""
        return self.of.size * self.mesh.size

    @property
    def chunks(self) -> tuple[int, ...]:
        """By device, of one process after another: the number of its slice."""
        return tuple(place * self.of.size + mine for mine in self.of.chunks for place in range(self.mesh.size))

    @property
    def cut(self) -> Entries | Leaves:
        return Leaves(self.aligned_deal) if self.aligned_deal else Entries(self.size)

    @property
    def aligned_deal(self) -> Deal | None:
        return self.deal and self.deal._replace(block=self.of.block)

    @property
    def gives_square(self) -> bool:
        return self.of.gives_square

    @property
    def keeps_masters(self) -> bool:
        return self.of.keeps_masters

    @property
    def gather_wire(self) -> str:
        return self.of.gather_wire

    @property
    def shared_params(self) -> None:
        """Every device has its params."""

    @property
    def early(self) -> bool:
        """Devices have their whole gradients."""
        return False

    @functools.cached_property
    def _numbers(self) -> jax.Array:
        first = int(self.of.comm.rank) * self.mesh.size
        own = np.array(self.chunks[first : first + self.mesh.size], np.int32)
        return jax.device_put(own, self._placed)

    def chunk(self) -> jax.Array:
        """i32[K]: the numbers of own devices' slices."""
        return self._numbers

    def scatter(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """Own devices' slices of the mean or sum, and f32[K] |mean|^2.

        Squares are 0 if neither `clip_norm` nor `gives_square` is set.

        Communicates: the strategy's first half between processes; with `clip_norm` or `gives_square` w floats as well.
        """
        run = self._programs_for(grads)
        totals = run.added([[shard.data for shard in in_order(x)] for x in run.vectors(grads)])
        rows, _ = self._between.scatter(totals)
        slices, square = run.slices(jax.device_put(rows, self._placed))  # row i of [K m] to device i
        if self.of.clip_norm or self.of.gives_square:
            [squares_of_all] = self._of_all([square])
            return run.clipped(slices, squares_of_all)
        return slices, square

    def gather(self, slices: PyTree, like: PyTree, wire: str = "32") -> PyTree:
        """All devices' slices as a tree like `like`, bitwise equal on all.

        Communicates: the strategy's second half between processes.
        """
        run = self._programs_for(like)
        return run.whole(self._of_all(run.of_slices(slices), wire))

    def renewed(self, slices: PyTree, params: PyTree) -> PyTree:
        return self.gather(slices, params)

    @property
    def _placed(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))

    @property
    def _between(self) -> Shards:
        """The halves between processes, of sums over a process's devices."""
        return Shards(self.of.choice._replace(op="sum", bucket_bytes=TRAVELS_ALONE))

    def _of_all(self, rows: Sequence[jax.Array], wire: str = "32") -> list[jax.Array]:
        """Own devices' f32[m] -> f32[w m] on every device, as they travel."""
        devices = [*self.mesh.devices.flat]
        mine, out = jax.device_put([*rows], devices[0]), []
        like = [jax.ShapeDtypeStruct((self.of.size * x.size,), x.dtype) for x in mine]
        for whole in self._between.gather(mine, like, wire):
            copies = [jax.device_put(whole, device) for device in devices]
            shape = (len(devices) * whole.size,)
            out.append(jax.make_array_from_single_device_arrays(shape, self._placed, copies))
        return out

    @functools.cached_property
    def _programs(self) -> Callable[[Any, tuple], "Programs"]:
        return functools.cache(functools.partial(programs, self))

    def _programs_for(self, tree: PyTree) -> "Programs":
        """Those for a tree with a leading axis of devices."""
        leaves, structure = jax.tree.flatten(tree)
        return self._programs(structure, tuple((x.shape[1:], x.dtype) for x in leaves))


class Programs(NamedTuple):
    """The pieces without communication; all but `added` run on every device."""

    vectors: Callable[[PyTree], list[jax.Array]]  # whole tree -> f32[w m] each
    added: Callable[[list[list[jax.Array]]], list[jax.Array]]  # on the first device: sums over devices, as they travel
    slices: Callable[[list[jax.Array]], tuple[PyTree, jax.Array]]  # f32[m] each, sums -> slices of the mean, and |.|^2
    clipped: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]  # with |.|^2 of all devices
    of_slices: Callable[[PyTree], list[jax.Array]]  # -> f32[m] each
    whole: Callable[[list[jax.Array]], PyTree]  # f32[w m] each, as they travel -> whole tree


def programs(shards: ShardsOfDevices, structure: Any, shapes: tuple) -> Programs:
    """Compile the pieces for trees of these shapes."""
    like = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in shapes])
    of, places, processes = shards.of, shards.mesh.size, shards.of.size
    vectors = vectors_of(like, shards.size, of.choice.bucket_bytes, shards.aligned_deal, of.block)
    join, unpack, pack, split = (
        piece(as_part) for piece in (vectors.joining, vectors.unpacking, vectors.packing, vectors.splitting)
    )
    divisor = shards.size if of.choice.op == "mean" else 1
    along, chunks = PartitionSpec(*shards.mesh.axis_names), np.array(of.chunks)

    def over(function: Callable) -> Callable:
        """On each device, without the leading axis of trees."""
        spread = jax.shard_map(function, mesh=shards.mesh, in_specs=along, out_specs=along, check_vma=False)
        return jax.jit(spread)

    def lying(x: jax.Array) -> DeviceRows:
        return DeviceRows.of(x.size, places, processes, of.choice.strategy)

    def added(of_devices: list[list[jax.Array]]) -> list[jax.Array]:
        return [lying(each[0]).as_cut(functools.reduce(jnp.add, each)) for each in of_devices]

    def slices(sums: list[jax.Array]) -> tuple[PyTree, jax.Array]:
        made = of_leaves(unpack(vectors.scattered([each / divisor for each in sums])), like)
        needs_square = of.clip_norm or of.gives_square
        return with_axis(made), (squares(made) if needs_square else jnp.zeros(()))[None]

    def clip(made: PyTree, by_number: jax.Array) -> tuple[PyTree, jax.Array]:
        square = by_number.reshape(processes, places)[chunks].reshape(-1).sum()
        return with_axis(clipped(without_axis(made), jnp.sqrt(square), of.clip_norm)), square[None]

    def whole(travelled: list[jax.Array]) -> PyTree:
        rows = [lying(x).as_it_was(x).reshape(shards.size, -1) for x in travelled]
        return with_axis(of_leaves(split(vectors.gathered(rows)), like))

    add = of.comm.jit(added)
    first = shards.mesh.devices.flat[0]
    return Programs(
        vectors=over(lambda tree: [vectors.flat(x) for x in join(without_axis(tree))]),
        added=lambda parts: add(jax.device_put(parts, first)),
        slices=over(slices),
        clipped=over(clip),
        of_slices=over(lambda tree: [x.reshape(-1) for x in pack(without_axis(tree))]),
        whole=over(whole),
    )


def with_axis(tree: PyTree) -> PyTree:
    """One device's tree, with a leading axis of devices."""
    return jax.tree.map(lambda x: x[None], tree)


def without_axis(tree: PyTree) -> PyTree:
    """The inverse."""
    return jax.tree.map(lambda x: x[0], tree)
