"""`--comm xla`: a `jax.distributed` job that MPI sets up, and the mesh of its devices.

`jax.distributed` needs an address of rank 0 that every other rank can reach. Rank 0 offers its addresses over MPI, and
the others try to connect before one is chosen. XLA then exchanges by NCCL between GPUs, and by gloo over TCP between
CPUs.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.process import make_cpu_devices

CONNECT_S = 3.0  # for a rank to reach rank 0 at one of its addresses
HEARTBEAT_S = 600  # a job may be stopped for minutes; the launcher says at once that a rank has died


def global_mesh(axis: str = "workers", devices: int = 1) -> tuple[Mesh, AxisComm]:
    """All processes' devices along one axis, and a communicator for `shard_map`.

    Worker rank * devices + i is device i of process `rank`. Starts `jax.distributed`, so it must come before anything
    that starts a device; without a launcher it is a mesh of this process's devices.

    Args:
        devices: of each process, >= 1.

    Communicates: over MPI who is here and where rank 0 listens; then all connect to it.

    Raises:
        UsageError: the device has started, or there are too few; ranks that are absent, ask for something else, or do
            not reach rank 0; a host's name that gloo cannot use.
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
        address = _coordinator(control)
        host, port = address.split(":")
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
                coordinator_bind_address=f"{host}:{port}",  # on one host nobody else sees it
            )
        except RuntimeError as error:
            raise UsageError(f"jax.distributed does not start at {address}: {error}") from error
    if (jax.process_index(), jax.process_count()) != (control.rank, control.size):
        raise UsageError(
            f"jax.distributed calls rank {control.rank} of {control.size} process {jax.process_index()} of "
            f"{jax.process_count()}; start it with MPI's rank and size, or leave it to jaxmpi"
        )
    if jax.default_backend() != "cpu" or len(set(control.hosts)) == 1:
        return
    every = control.allgather_object(_named_address())  # where gloo listens
    alone = {rank: address for rank, address in enumerate(every) if address.startswith("127.") or not address}
    if alone:
        raise UsageError(
            f"the host names of ranks {list(alone)} stand for {sorted(set(alone.values()))}, where gloo would listen "
            "and no other host comes; give them their network's address in /etc/hosts, or use --comm mpi"
        )


def _coordinator(control: MpiProcesses) -> str:
    """`10.0.0.1:40123`: where rank 0 will listen, tried out by all ranks."""
    is_first, is_one_host, offered = control.rank == 0, len(set(control.hosts)) == 1, []
    with contextlib.ExitStack() as server:
        if is_first:
            port = server.enter_context(socket.create_server(("", 0), backlog=control.size)).getsockname()[1]
            offered = [f"{address}:{port}" for address in (["127.0.0.1"] if is_one_host else _addresses())]
        offered = control.bcast_object(offered)
        reached = control.allgather_object([address for address in offered if is_first or _reaches(address)])
    for address in offered:
        if all(address in each for each in reached):
            return address
    cut_off = [rank for rank, each in enumerate(reached) if not set(each) & set(offered[:1])]
    raise UsageError(
        f"ranks {cut_off} do not reach rank 0, which listens on {', '.join(offered) or 'no address'}; open the network "
        "between the hosts, or use --comm mpi"
    )


def _reaches(address: str) -> bool:
    """Return True if somebody listens there."""
    host, port = address.split(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), CONNECT_S).close()
        return True
    return False


def _addresses() -> list[str]:
    """IPv4 addresses of this host, its name's first; no loopback ones."""
    siocgifaddr = 0x8915  # linux/sockios.h
    found = [_named_address()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", interface.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]


def _named_address() -> str:
    """The address of this host's name; empty if unknown."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""
