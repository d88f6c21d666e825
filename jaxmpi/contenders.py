"""What `jaxmpi bench` times: strategies, and other libraries' allreduce on the same bytes.

Importing torch takes seconds and jax.distributed must start before the device, so both happen inside functions.
"""

import functools
import importlib.util
import math
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmpi import compressors, strategies
from jaxmpi.comm import world
from jaxmpi.config import TrainingError, UsageError, lookup
from jaxmpi.exchange import Op, exchange, exchange_gradients
from jaxmpi.processes import MpiProcesses, Processes

Arrays = Sequence[Any]  # f32 each, of NumPy, JAX or torch
Run = Callable[[], Arrays]  # one exchange, finished when it returns
Shape = tuple[int, ...]

PATTERN = np.arange(-6, 7, dtype=np.float32)  # whole numbers: sums are exact in any order
ROUGH = 0.1  # of the largest entry: more than a wire rounds away, less than a wrong sum is off
COPY_BYTES = 64 << 20  # of one copy, beyond the caches where several ranks copy
LINK_BYTES = 2 << 20  # of one message between hosts
BASE_BYTES, TORCH_BYTES = 400 << 20, 400 << 20  # of a process, without any case


class Inputs:
    """This rank's data of one case, each form made when it is first asked for."""

    def __init__(self, shapes: Sequence[Shape], control: Processes) -> None:
        """Take the leaves' shapes."""
        self.shapes, self.control = [tuple(shape) or (1,) for shape in shapes], control
        self.floats = sum(math.prod(shape) for shape in shapes)

    @functools.cached_property
    def leaves(self) -> list[jax.Array]:
        """The tree's leaves, f32."""
        return [jnp.array(pattern(self.control.rank, shape)) for shape in self.shapes]

    @functools.cached_property
    def flat(self) -> jax.Array:
        """f32[n]: the easier work of one array with as many floats."""
        return jnp.array(pattern(self.control.rank, (self.floats,)))

    @functools.cached_property
    def work(self) -> np.ndarray:
        """f32[n] to receive into, or to sum in place."""
        return np.array(self.flat)


def pattern(rank: int, shape: Shape) -> np.ndarray:
    """f32[shape] of a rank: -6 ... 6 over and over, each rank's a place on."""
    floats = math.prod(shape)
    return np.tile(np.roll(PATTERN, rank), -(-floats // PATTERN.size))[:floats].reshape(shape)


class Contender(NamedTuple):
    """Something to time."""

    name: str
    is_peer: bool
    op: Op | None  # what it gives; None: no exchange
    start: Callable[[Inputs], Run]


def strategy(name: str) -> Contender:
    """`jaxmpi.exchange` of the tree, mean, in jit."""

    def start(inputs: Inputs) -> Run:
        run = jax.jit(lambda leaves: exchange(leaves, name))
        return lambda: jax.block_until_ready(run(inputs.leaves))

    return Contender(name, False, None if name.startswith("none") else "mean", start)


def compressor(name: str) -> Contender:
    """`jaxmpi.exchange_gradients` of the tree, state kept; what it owes makes it no plain mean."""

    def start(inputs: Inputs) -> Run:
        tx = exchange_gradients(name)
        state = tx.init(inputs.leaves)

        def run() -> Arrays:
            nonlocal state
            updates, state = tx.update(inputs.leaves, state)
            return jax.block_until_ready(updates)

        return run

    return Contender(name, False, None, start)


def ours(name: str) -> Contender:
    """The strategy or compressor of this name.

    Raises:
        UsageError: there is none.
    """
    if compressors.is_compressor(name):
        compressors.parse(name)
        return compressor(name)
    strategies.parse(name)
    return strategy(name)


def check_result(contender: Contender, arrays: Arrays, control: Processes) -> None:
    """Refuse to time what gives another sum.

    Raises:
        TrainingError: an entry is off by more than wires round.
    """
    if contender.op is None:
        return
    weight = 1 / control.size if contender.op == "mean" else 1
    expected = weight * np.sum([np.roll(PATTERN, rank) for rank in range(control.size)], 0)
    allowed = ROUGH * weight * control.size * float(PATTERN.max())
    for i, array in enumerate(arrays):
        error = largest_error(np.asarray(array).reshape(-1), expected)
        if not error <= allowed:  # NaN is none
            raise TrainingError(f"{contender.name}: array {i} is off by {error:g}; expected at most {allowed:g}")


def largest_error(got: np.ndarray, period: np.ndarray) -> float:
    """How far f32[n] is from a period repeated; in pieces, for memory is short here."""
    piece = period.size << 16
    long = np.tile(period, min(piece, got.size) // period.size + 1)
    errors = [
        np.abs(part - long[: part.size]).max() for part in (got[i : i + piece] for i in range(0, got.size, piece))
    ]
    return float(np.max(errors, initial=0.0))  # NaN stays


# ---------------------------------------------------------------- peers


class Peer(NamedTuple):
    """Another library's way: the package it needs, what it gives, and how to start it."""

    package: str
    op: Op  # mean of the tree, or the easier work: sum of one flat array
    connect: Callable[[MpiProcesses], None]  # once a job, before the device starts
    start: Callable[[Inputs], Run]


def nothing_to_connect(control: MpiProcesses) -> None:
    """It uses MPI, which has started."""


def mpi4py_allreduce(inputs: Inputs) -> Run:
    """One flat NumPy array into another, without jit or division."""
    sent, received = np.asarray(inputs.flat), inputs.work
    control = of_several(inputs)

    def run() -> Arrays:
        control.world.Allreduce(sent, received)
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
    """`lax.psum` of the tree over all processes' devices, mean: JAX's own road."""
    control, axis = of_several(inputs), PartitionSpec("workers")
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
    import torch.distributed as dist

    address = f"tcp://{meeting_point(control)}"
    dist.init_process_group("gloo", init_method=address, rank=control.rank, world_size=control.size)


def torch_allreduce(inputs: Inputs) -> Run:
    """`torch.distributed.all_reduce` of one flat tensor in place, without division."""
    import torch
    import torch.distributed as dist

    inputs.work[:] = np.asarray(inputs.flat)
    tensor = torch.from_numpy(inputs.work)

    def run() -> Arrays:
        dist.all_reduce(tensor)  # again and again: sums grow to infinity, which takes no longer to add
        return [inputs.work]

    return run


PEERS = {
    "mpi4py": Peer("mpi4py", "sum", nothing_to_connect, mpi4py_allreduce),
    "mpi4jax": Peer("mpi4jax", "mean", nothing_to_connect, mpi4jax_tree),
    "mpi4jax-flat": Peer("mpi4jax", "sum", nothing_to_connect, mpi4jax_flat),
    "psum": Peer("jax", "mean", connect_jax, psum),
    "torch": Peer("torch", "sum", connect_torch, torch_allreduce),
}


def importable(names: Sequence[str]) -> tuple[str, ...]:
    """The peers of these names, or those of `all` that are installed; `none` is none.

    Raises:
        UsageError: an unknown name, or one whose package is not installed.
    """
    if tuple(names) in (("all",), ("none",)):
        return tuple(name for name in PEERS if names[0] == "all" and installed(name))
    for name in names:
        package = lookup(PEERS, name, "peer (all and none stand alone)").package
        if not installed(name):
            raise UsageError(f"peer {name!r} needs {package}, which is not installed: install it, or leave {name} out")
    return tuple(dict.fromkeys(names))


def installed(peer: str) -> bool:
    """Whether a peer's package can be found; importing it may start MPI."""
    return importlib.util.find_spec(PEERS[peer].package) is not None


def rank_bytes(floats: int, peers: Sequence[str]) -> int:
    """Memory of a rank that measures a case, as measured: docs/exchange.md.

    Leaves, and three times as much while a strategy works; peers that take one flat array keep two of them.
    """
    flat = any(PEERS[name].op == "sum" for name in peers)
    return BASE_BYTES + TORCH_BYTES * ("torch" in peers) + (4 + 2 * flat) * 4 * floats


def peer(name: str) -> Contender:
    """A peer of the table."""
    row = PEERS[name]
    return Contender(name, True, row.op, row.start)


def of_several(inputs: Inputs) -> MpiProcesses:
    """The control plane of a job with several ranks: peers have nothing to do with one."""
    assert isinstance(inputs.control, MpiProcesses)
    return inputs.control


def meeting_point(control: MpiProcesses) -> str:
    """`host:port`, free on rank 0's host, for libraries that make connections of their own."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        host = socket.gethostname() if len(set(control.hosts)) > 1 else "127.0.0.1"
        return control.gather(f"{host}:{probe.getsockname()[1]}")[0]


# ---------------------------------------------------------------- yardsticks


def copying(inputs: Inputs) -> Run:
    """Copy COPY_BYTES on every rank at once, and wait for all: the speed of this host's memory."""
    control = of_several(inputs)
    source = np.ones(COPY_BYTES // 4, np.float32)
    target = np.empty_like(source)

    def run() -> Arrays:
        np.copyto(target, source)
        control.world.Barrier()  # ranks that share a core may copy one after another
        return []

    return run


def linking(inputs: Inputs) -> Run:
    """Send LINK_BYTES from the first rank of every host to that of the next: the speed of a link."""
    control = of_several(inputs)
    firsts = [control.hosts.index(host) for host in sorted(set(control.hosts))]
    sent = np.ones(LINK_BYTES, np.uint8)
    received = np.empty_like(sent)
    place = firsts.index(control.rank) if control.rank in firsts else None

    def run() -> Arrays:
        if place is not None:
            to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
            control.world.Sendrecv(sent, to, recvbuf=received, source=source)
        return []

    return run


COPY = Contender("copy", False, None, copying)
LINK = Contender("link", False, None, linking)
