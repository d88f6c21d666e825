"""A `jax.distributed` job that MPI sets up, and its devices' mesh.

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

from jaxmpi.comm.axis import AxisComm, GlooComm
from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.runtime import process

CONNECT_S = 3.0  # for a rank to reach rank 0 at one of its addresses
HEARTBEAT_S = 600  # a job may be stopped for minutes; that a rank has died the launcher says at once
LOOPBACK = "127.0.0.1"


def global_mesh(axis: str = "workers", devices: int = 1) -> tuple[Mesh, AxisComm]:
    """All processes' devices along one axis, and a Comm for `shard_map`.

    Worker rank * devices + i is device i of process `rank`. Starts `jax.distributed`, so it must come before anything
    that starts a device; without a launcher it is a mesh of this process's devices.

    Args:
        axis: the name of the axis.
        devices: of each process, >= 1.

    Communicates: over MPI who is here and where rank 0 listens; then all connect to it.

    Raises:
        UsageError: the device has started, or there are too few; ranks that are absent, ask for something else, or do
            not reach rank 0; a host's name that gloo cannot use.
    """
    control = processes()
    process.make_cpu_devices(devices)
    if isinstance(control, MpiProcesses):
        control.assert_same("the mesh of all devices", {"axis": axis, "devices": devices})
        start(control)
        check_gloo(control)
    by_rank = [sorted(jax.local_devices(rank), key=lambda device: device.id) for rank in range(control.size)]
    check_devices([len(row) for row in by_rank], devices)
    chosen = np.array([row[:devices] for row in by_rank]).reshape(-1)
    hosts = tuple(host for host in control.hosts for _ in range(devices))
    mesh = Mesh(chosen, (axis,))
    if control.size == 1 or jax.default_backend() != "cpu":
        return mesh, AxisComm(axis, len(chosen), hosts)
    return mesh, GlooComm(axis, len(chosen), hosts)


def local_mesh(axis: str, devices: int) -> Mesh:
    """This process's first devices along one axis; others take as many.

    Communicates: how many there are.

    Raises:
        UsageError: on all ranks alike: a process has too few.
    """
    process.make_cpu_devices(devices)
    here = sorted(jax.local_devices(), key=lambda device: device.id)
    check_devices([*map(int, processes().allgather_object(len(here)))], devices)
    return Mesh(np.array(here[:devices]), (axis,))


def check_devices(have: Sequence[int], devices: int) -> None:
    """Raise `UsageError` if a rank has fewer devices than asked for."""
    check(min(have) >= devices, f"got --devices {devices}; rank {np.argmin(have)} has {min(have)}")


def start(control: MpiProcesses) -> None:
    """`jax.distributed.initialize` with MPI's rank and size, unless already done.

    Raises:
        UsageError: a rank does not reach rank 0, or has used its device already.
    """
    if not jax.distributed.is_initialized():
        address = coordinator(control)
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
    got = f"process {jax.process_index()} of {jax.process_count()}"
    check(
        got == f"process {control.rank} of {control.size}",
        f"jax.distributed calls rank {control.rank} of {control.size} {got}; start it with MPI's rank and size, or "
        "leave it to jaxmpi",
    )


def coordinator(control: MpiProcesses) -> str:
    """`10.0.0.1:40123`: where rank 0 will listen, tried out by all ranks.

    Raises:
        UsageError: ranks that reach none of its addresses.
    """
    one_host = len(set(control.hosts)) == 1
    with socket.create_server(("", 0), backlog=control.size) if control.rank == 0 else contextlib.nullcontext() as here:
        port = here.getsockname()[1] if here else 0
        offered = [f"{address}:{port}" for address in ([LOOPBACK] if one_host else addresses())] if here else []
        offered = control.bcast_object(offered)
        reached = [address for address in offered if here or reaches(address)]
        every = control.allgather_object(reached)
    common = [address for address in offered if all(address in reached for reached in every)]
    cut_off = [rank for rank, reached in enumerate(every) if not set(reached) & set(offered[:1])]
    check(
        bool(common),
        f"ranks {cut_off} do not reach rank 0, which listens on {', '.join(offered) or 'no address'} "
        f"({socket.gethostname() if here else 'its host'}); open the network between the hosts, or use --comm mpi",
    )
    return common[0]


def reaches(address: str) -> bool:
    """Return True if somebody listens there."""
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


def addresses() -> list[str]:
    """IPv4 addresses of this host, its name's first; no loopback ones."""
    siocgifaddr = 0x8915  # linux/sockios.h
    found = [own_address()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(asked, siocgifaddr, struct.pack("256s", interface.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]


def own_address() -> str:
    """The address of this host's name; empty if unknown."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def check_gloo(control: MpiProcesses) -> None:
    """Refuse hosts whose names have no network address, where gloo listens."""
    if jax.default_backend() != "cpu" or len(set(control.hosts)) == 1:
        return
    every = control.allgather_object(own_address())
    alone = {rank: address for rank, address in enumerate(every) if address.startswith("127.") or not address}
    check(
        not alone,
        f"the host names of ranks {list(alone)} stand for {sorted(set(alone.values()))}, where gloo would listen and "
        "no other host comes; give them their network's address in /etc/hosts, or use --comm mpi",
    )
