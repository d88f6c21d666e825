"""The workers of a job: which of them this process runs, and how their states come to its devices and back."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm import AxisComm, Comm, is_cuda_aware, world
from jaxmpi.config import check
from jaxmpi.processes import Processes, processes
from jaxmpi.state import TrainState
from jaxmpi.step import AXIS, stack

PyTree = Any


class Workers(NamedTuple):
    """The workers of this job, and which of them this process runs."""

    comm: Comm
    processes: Processes
    mine: tuple[int, ...]
    mesh: jax.sharding.Mesh | None  # of local devices, where this process runs several workers

    @property
    def size(self) -> int:
        """All workers."""
        return self.comm.size


def gather_workers(devices: int) -> Workers:
    """One worker a process, or one a local device.

    Raises:
        UsageError: several devices in several processes, or fewer devices than asked for.
    """
    control = processes()
    if devices == 1:
        return Workers(world(), control, (control.rank,), None)
    check(
        control.size == 1,
        f"got --devices {devices} under a launcher with {control.size} ranks; "
        "one process drives one device there: leave --devices out, or the launcher",
    )
    have = jax.local_device_count()
    check(have >= devices, f"got --devices {devices}; this machine has {have}")
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))
    return Workers(AxisComm(AXIS, devices), control, tuple(range(devices)), mesh)


def to_device(workers: Workers) -> Callable[[PyTree], PyTree] | None:
    """What takes a batch to the memory of this process's devices; None on CPUs, which work in the host's."""
    if jax.default_backend() == "cpu":
        return None
    spread = workers.mesh and jax.sharding.NamedSharding(workers.mesh, jax.sharding.PartitionSpec(AXIS))
    return partial(jax.device_put, device=spread or jax.local_devices()[0])


def put(states: dict[int, TrainState], workers: Workers) -> TrainState:
    """This process's workers on its devices, bound to them as results are; copies, since the step donates its state."""
    if workers.mesh is None:
        return jax.device_put(jax.tree.map(jnp.array, states[workers.mine[0]]), jax.local_devices()[0])
    spread = jax.sharding.NamedSharding(workers.mesh, jax.sharding.PartitionSpec(AXIS))
    return jax.device_put(stack([states[worker] for worker in workers.mine]), spread)


def take(state: TrainState, workers: Workers) -> dict[int, TrainState]:
    """The inverse of `put`, in host memory."""
    host = jax.tree.map(np.asarray, state)
    if workers.mesh is None:
        return {workers.mine[0]: host}
    return {worker: jax.tree.map(lambda x, i=i: x[i], host) for i, worker in enumerate(workers.mine)}


def transport(workers: Workers) -> str:
    """What the exchange ran over."""
    if workers.size == 1:
        return "none: one worker"
    if workers.mesh is not None:
        return "XLA collectives between devices of one process"
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu:
        return "MPI, from host memory"
    return "MPI, CUDA-aware" if is_cuda_aware() else "MPI, through the host"
