"""Devices of one process as workers, who sum in one program."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmpi.allreduce.api import Op, exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.functions.transport import CallReport
from jaxmpi.functions.worker import Device, Leaves, WorkerSlot
from jaxmpi.functions.worker_group import WorkerGroup

AXIS = "workers"


class DeviceGroup(WorkerGroup):
    """One worker a local device."""

    is_one_process = True

    def __init__(self, devices: list[Device]) -> None:
        """Take the devices, by rank."""
        super().__init__()
        self.size = len(devices)
        self.slots = [WorkerSlot(rank, device) for rank, device in enumerate(devices)]
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.default_strategy = "shm" if devices[0].platform == "cpu" else "ar"

    def gather_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """All workers are in this process: nothing travels."""
        return mine

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` under shard_map, rank r on device r; empty leaves stay unchanged."""
        full = [i for i, x in enumerate(mine[0]) if x.size]
        if self.size == 1 or not full:
            return mine
        sharding = NamedSharding(self.mesh, P(AXIS))
        rows = [[mine[rank][i][None] for i in full] for rank in range(self.size)]
        whole = [
            jax.make_array_from_single_device_arrays((self.size, *shards[0].shape[1:]), sharding, list(shards))
            for shards in zip(*rows, strict=True)
        ]
        totals = exchange_over_devices(self.mesh, self.size, op, strategy)(whole)  # pyright: ignore[reportArgumentType]
        made = dict(zip(full, totals, strict=True))
        return {
            rank: [device_shard(made[i], rank) if i in made else x for i, x in enumerate(leaves)]
            for rank, leaves in mine.items()
        }

    def gather_arrays(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """All workers are in this process: nothing travels."""
        return [mine[rank] for rank in range(self.size)]


@functools.cache
def exchange_over_devices(mesh: Mesh, size: int, op: Op, strategy: str) -> Callable[[Leaves], Leaves]:
    """`exchange` of arrays that carry a first axis of workers."""
    comm = AxisComm(AXIS, size)

    def of_one(leaves: Leaves) -> Leaves:
        return [x[None] for x in exchange([x[0] for x in leaves], strategy, op, comm)]

    return jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def device_shard(array: jax.Array, rank: int) -> jax.Array:
    """Row `rank`, on its device."""
    [shard] = [shard for shard in array.addressable_shards if (shard.index[0].start or 0) == rank]
    return shard.data[0]
