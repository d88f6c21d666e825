"""Calls of peers: all-reduces of other libraries.

Importing torch takes seconds and jax.distributed must start before the device, so both happen inside functions.
"""

import socket
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmpi.bench.contenders import Arrays, Contender, Inputs, Run, mpi_control
from jaxmpi.bench.options import PEERS
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import world


class Call(NamedTuple):
    """A call of another library's allreduce."""

    connect: Callable[[MpiProcesses], None]  # once per job, before the device starts
    start: Callable[[Inputs], Run]


def nothing_to_connect(control: MpiProcesses) -> None:
    """Do nothing: the peer uses MPI, which has started."""


def mpi4py_allreduce(inputs: Inputs) -> Run:
    """One flat NumPy array into another, without jit or division."""
    send_buffer, received = np.asarray(inputs.flat), inputs.work
    control = mpi_control(inputs)

    def run() -> Arrays:
        control.world.Allreduce(send_buffer, received)
        return [received]

    return run


def mpi4jax_tree(inputs: Inputs) -> Run:
    """One mpi4jax.allreduce a leaf, mean, in jit."""
    comm = world()
    run = jax.jit(lambda leaves: [comm.allreduce(leaf) / comm.size for leaf in leaves])
    return lambda: jax.block_until_ready(run(inputs.leaves))


def mpi4jax_flat(inputs: Inputs) -> Run:
    """One mpi4jax.allreduce of one flat array, in jit, without division."""
    run = jax.jit(world().allreduce)
    return lambda: [jax.block_until_ready(run(inputs.flat))]


def connect_jax(control: MpiProcesses) -> None:
    """`jax.distributed`, whose CPU collectives are gloo's."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(meeting_point(control), control.size, control.rank)


def psum(inputs: Inputs) -> Run:
    """`lax.psum` of the tree over all processes' devices, mean: JAX's own method."""
    control, axis = mpi_control(inputs), PartitionSpec("workers")
    mesh = Mesh(np.array(jax.devices()), ("workers",))
    spread = NamedSharding(mesh, axis)

    def whole(leaf: jax.Array) -> jax.Array:
        shape = (control.size * leaf.shape[0], *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, spread, [leaf])  # no copy

    def mean(leaves: list[jax.Array]) -> list[jax.Array]:
        return jax.tree.map(lambda leaf: lax.psum(leaf, "workers") / control.size, leaves)

    run = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=axis, out_specs=PartitionSpec()))
    leaves = [whole(leaf) for leaf in inputs.leaves]

    def one() -> Arrays:
        return [leaf.addressable_data(0) for leaf in jax.block_until_ready(run(leaves))]

    return one


def connect_torch(control: MpiProcesses) -> None:
    """A gloo process group."""
    import torch.distributed as dist  # pyright: ignore[reportMissingImports] # not installed by default

    address = f"tcp://{meeting_point(control)}"
    dist.init_process_group("gloo", init_method=address, rank=control.rank, world_size=control.size)


def torch_allreduce(inputs: Inputs) -> Run:
    """`torch.distributed.all_reduce` of one flat tensor in place, without division."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default
    import torch.distributed as dist  # pyright: ignore[reportMissingImports] # not installed by default

    inputs.work[:] = np.asarray(inputs.flat)
    tensor = torch.from_numpy(inputs.work)

    def run() -> Arrays:
        dist.all_reduce(tensor)  # repeated in place: sums grow to infinity, which is as fast to add
        return [inputs.work]

    return run


CALLS = {  # calls of the peers in `options.PEERS`
    "mpi4py": Call(nothing_to_connect, mpi4py_allreduce),
    "mpi4jax": Call(nothing_to_connect, mpi4jax_tree),
    "mpi4jax-flat": Call(nothing_to_connect, mpi4jax_flat),
    "psum": Call(connect_jax, psum),
    "torch": Call(connect_torch, torch_allreduce),
}


def peer(name: str) -> Contender:
    """A peer of the table."""
    return Contender(name, PEERS[name].op, CALLS[name].start)


def meeting_point(control: MpiProcesses) -> str:
    """A free `host:port` of rank 0 for libraries' own connections."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        host = socket.gethostname() if len(set(control.hosts)) > 1 else "127.0.0.1"
        return control.bcast_object(f"{host}:{probe.getsockname()[1]}")
