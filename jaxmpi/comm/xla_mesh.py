"""`--comm xla`: a `jax.distributed` job that MPI sets up, and the mesh of its devices.

XLA exchanges by NCCL between GPUs, and by gloo over TCP between CPUs.
"""

import contextlib
import os
import socket
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.process import make_cpu_devices

HEARTBEAT_S = 600  # a job may be stopped for minutes; the launcher says at once that a rank has died


def global_mesh(axis: str = "workers", devices: int = 1) -> tuple[Mesh, AxisComm]:
    """All processes' devices along one axis, and a communicator for `shard_map`.

    Worker rank * devices + i is device i of process `rank`. Starts `jax.distributed`, so it must come before anything
    that starts a device; without a launcher it is a mesh of this process's devices.

    Args:
        devices: of each process, >= 1.

    Communicates: over MPI who is here and where rank 0 listens; then all connect to it.

    Raises:
        UsageError: the device has started, or there are too few; ranks that ask for something else, or do not reach
            rank 0; a host's name that gloo cannot use.
    """
    control = processes()
    make_cpu_devices(devices)
    if isinstance(control, MpiProcesses):
        control.assert_same("the mesh of all devices", {"axis": axis, "devices": devices})
        _start_distributed(control)
    by_rank = [sorted(jax.local_devices(rank), key=lambda device: device.id) for rank in range(control.size)]
    _check_devices([len(row) for row in by_rank], devices)
    chosen = np.array([row[:devices] for row in by_rank]).reshape(-1)
    hosts = tuple(host for host in control.hosts for _ in range(devices))
    uses_gloo = control.size > 1 and jax.default_backend() == "cpu"
    return Mesh(chosen, (axis,)), AxisComm(axis, len(chosen), hosts, one_at_a_time=uses_gloo)


def local_mesh(axis: str, devices: int) -> Mesh:
    """This process's first devices along one axis; others take as many.

    Communicates: how many there are.

    Raises:
        UsageError: on all ranks alike: a process has too few.
    """
    make_cpu_devices(devices)
    local = sorted(jax.local_devices(), key=lambda device: device.id)
    _check_devices(processes().allgather_object(len(local)), devices)
    return Mesh(np.array(local[:devices]), (axis,))


def _check_devices(counts: Sequence[int], devices: int) -> None:
    """Raise `UsageError` if a rank has fewer devices than asked for."""
    if min(counts) < devices:
        raise UsageError(f"got --devices {devices}; rank {np.argmin(counts)} has {min(counts)}")


def _start_distributed(control: MpiProcesses) -> None:
    """`jax.distributed.initialize` with MPI's rank and size, unless already done."""
    if not jax.distributed.is_initialized():
        host, port = control.bcast_object(_free_address(is_one_host=len(set(control.hosts)) == 1))
        address = f"{host}:{port}"
        os.environ["no_grpc_proxy"] = host  # gRPC would ask a proxy that is meant for downloads
        jax.config.update("jax_check_proxy_envs", False)
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
        try:
            jax.distributed.initialize(
                address,
                control.size,
                control.rank,
                cluster_detection_method="deactivate",  # ranks and GPUs are settled
                initialization_timeout=max(1, int(AGREE_TIMEOUT_S)),
                heartbeat_timeout_seconds=HEARTBEAT_S,
                coordinator_bind_address=address,  # on one host nobody else sees it
            )
        except RuntimeError as error:
            raise UsageError(
                f"jax.distributed does not start at {address}, where rank 0 listens: {error}; open the network between "
                "the hosts, or use --comm mpi"
            ) from error
    if (jax.process_index(), jax.process_count()) != (control.rank, control.size):
        raise UsageError(
            f"jax.distributed calls rank {control.rank} of {control.size} process {jax.process_index()} of "
            f"{jax.process_count()}; start it with MPI's rank and size, or leave it to jaxmpi"
        )
    if jax.default_backend() != "cpu" or len(set(control.hosts)) == 1:
        return
    every = control.allgather_object(_named_address())  # where gloo listens
    local = {rank: address for rank, address in enumerate(every) if address.startswith("127.") or not address}
    if local:
        raise UsageError(
            f"the host names of ranks {list(local)} stand for {sorted(set(local.values()))}, where gloo would listen "
            "and no other host comes; give them their network's address in /etc/hosts, or use --comm mpi"
        )


def _free_address(is_one_host: bool) -> tuple[str, int]:
    """An address of this host and a free port there: that of its name, or of the default route if that is loopback."""
    address = "127.0.0.1" if is_one_host else _named_address()
    if not is_one_host and (not address or address.startswith("127.")):  # as Debian has it in /etc/hosts
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # of TEST-NET; a datagram socket sends nothing when it connects
            address = probe.getsockname()[0]
    with socket.create_server(("", 0)) as server:
        return address, server.getsockname()[1]


def _named_address() -> str:
    """The address of this host's name; empty if unknown."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""
