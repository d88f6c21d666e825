"""Workers of a job: their ranks and devices, and their state's layout.

A worker is a process with one device; or one of several devices of a process, over whose axis the step is mapped; or,
under an asynchronous rule, a process that shares no program with others. `Workers` says which it is, and `put` and
`take` move states between a host and its devices accordingly: several workers of a process are stacked along a leading
axis.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.base import Comm, SoloComm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.fault_tolerant import FaultTolerantComm
from jaxmpi.comm.job import Processes, processes
from jaxmpi.comm.mpi import world
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.xla_mesh import global_mesh, local_mesh
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import TrainState
from jaxmpi.runtime.process import unbind

AXIS = "workers"  # axis of the mesh when one process drives several devices


class Workers(NamedTuple):
    """The workers of this job, and which of them this process runs."""

    comm: Comm
    processes: Processes
    mine: tuple[int, ...]
    mesh: jax.sharding.Mesh | None  # mesh of all workers' devices if XLA exchanges between them; else of this process's
    devices: int = 1  # devices of each process, if `comm` is between processes, whose devices add theirs up before
    asynchronous: int = 0  # all workers, if each runs programs of its own (asynchronous rules) and `comm` is one's

    @property
    def size(self) -> int:
        """All workers."""
        return self.asynchronous or self.comm.size * self.devices


def gather_workers(devices: int, comm: str = "mpi") -> Workers:
    """All workers of the job, one a process or a local device, of which each process has so many.

    Raises:
        UsageError: fewer devices than asked for, or what `global_mesh` raises.
    """
    control = processes()
    control.assert_same("how workers exchange", {"comm": comm, "devices": devices})
    if devices == 1 and (comm == "mpi" or control.size == 1):
        return Workers(world(), control, (control.rank,), None)
    mine = tuple(range(control.rank * devices, (control.rank + 1) * devices))
    if comm == "mpi" and control.size > 1:
        return Workers(world(), control, mine, local_mesh(AXIS, devices), devices=devices)
    mesh, over_axis = global_mesh(AXIS, devices)
    return Workers(over_axis, control, mine, mesh)


def gather_fault_tolerant(control: MpiProcesses) -> Workers:
    """One worker a process, which may die; all alive call it together."""
    comm = FaultTolerantComm(control) if control.size > 1 else SoloComm()
    return Workers(comm, control, (control.rank,), None)


def gather_asynchronous(servers: int) -> Workers:
    """Workers that share no program: all ranks but the last `servers`, which have worker 0's place without its work."""
    control = processes()
    workers = control.size - servers
    jax.devices()  # its threads are as many as cores of its share
    unbind()
    return Workers(SoloComm(), control, (control.rank if control.rank < workers else 0,), None, asynchronous=workers)


def alone(workers: Workers) -> Workers:
    """This process's worker as the only one."""
    return Workers(workers.comm, SoloProcesses(), (0,), None)


# ---------------------------------------------------------------- states of workers on their devices


def to_device(workers: Workers) -> Callable[[PyTree], PyTree] | None:
    """Copy of a batch to this process's device; None on CPUs, and over a mesh, to which batches have come already."""
    if jax.default_backend() == "cpu" or workers.mesh is not None:
        return None
    return partial(jax.device_put, device=jax.local_devices()[0])


def put(states: dict[int, TrainState], workers: Workers) -> TrainState:
    """Copy states to this process's devices, bound to them as results are.

    They are copied, since the step donates its state. `states` is emptied, leaf by leaf: on CPUs a state would take its
    memory twice.
    """
    structure = jax.tree.structure(states[workers.mine[0]])
    remaining = [jax.tree.leaves(states.pop(worker))[::-1] for worker in workers.mine]
    states.clear()
    leaves = []
    for _ in range(len(remaining[0])):
        rows = [rest.pop() for rest in remaining]
        if workers.mesh is None:
            leaf = jax.device_put(jnp.array(rows[0]), jax.local_devices()[0])  # a copy, which a step can take over
        else:
            leaf = shard_rows(rows, workers.mesh)
        leaves.append(jax.block_until_ready(leaf))
    return jax.tree.unflatten(structure, leaves)


def take(state: TrainState, workers: Workers) -> dict[int, TrainState]:
    """The inverse of `put`, in host memory."""
    host = jax.tree.map(partial(local_rows, workers=workers), state)
    return {worker: jax.tree.map(lambda x, i=i: x[i], host) for i, worker in enumerate(workers.mine)}


def shard_rows(trees: Sequence[PyTree], mesh: jax.sharding.Mesh) -> PyTree:
    """Stack this process's trees, one a worker, as arrays over the mesh."""
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    return jax.tree.map(lambda *leaves: jax.make_array_from_process_local_data(along, np.stack(leaves)), *trees)


def local_rows(x: Any, workers: Workers) -> np.ndarray:
    """An array as [workers of this process, ...] in host memory."""
    if workers.mesh is None:
        return np.asarray(x)[None]
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
