"""Who exchanges with whom: the data plane inside jit (`Comm`) and the control plane between processes.

The only file that imports mpi4py and mpi4jax, and inside functions: importing them starts MPI.
"""

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import runtime
from jaxmpi.config import TrainingError, UsageError, check
from jaxmpi.programs import shared_jit

PyTree = Any
Pairs = Sequence[tuple[int, int]]  # (source, destination), static

POLL_S = 0.001  # between looks at a pending message: a blocking MPI call would spin on a core
AGREE_TIMEOUT_S = float(os.environ.get("JAXMPI_AGREE_TIMEOUT_S", "300"))
MAX_BYTES = 1 << 30  # of one MPI message: counts are C ints


class Comm(Protocol):
    """Collectives over `size` workers. A strategy sees nothing else of the world.

    `rank` may be a traced value, so no Python branch may depend on it. All workers call the same
    collectives in the same order.
    """

    @property
    def size(self) -> int:
        """Number of workers."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks by host, then local rank: neighbours in a ring."""
        ...

    @property
    def rank(self) -> int | jax.Array:
        """This worker's number, in [0, size)."""
        ...

    def allreduce(self, x: jax.Array) -> jax.Array:
        """Sum over workers; f32 in, f32 out."""
        ...

    def alltoall(self, x: PyTree) -> PyTree:
        """Leaves [size, ...]: row i goes to worker i, row j of the result came from worker j."""
        ...

    def allgather(self, x: PyTree) -> PyTree:
        """Leaves [...] to [size, ...], row j from worker j."""
        ...

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """Send along static pairs; a worker that receives nothing gets zeros."""
        ...

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """The value of worker `root`."""
        ...

    def sign(self, what: str, value: Any) -> None:
        """Refuse to go on where `value` differs between ranks."""
        ...

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` for a program that does not communicate; where ranks share a host, one compiles for all."""
        ...


class SoloComm:
    """One worker: every collective is the identity. Needs no MPI."""

    size = 1
    rank = 0
    order = (0,)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """X itself."""
        return x

    def alltoall(self, x: PyTree) -> PyTree:
        """X itself."""
        return x

    def allgather(self, x: PyTree) -> PyTree:
        """X as the one row."""
        return jax.tree.map(lambda leaf: leaf[None], x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """X where the pair (0, 0) is given, else zeros."""
        return x if (0, 0) in tuple(pairs) else jax.tree.map(jnp.zeros_like, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """X itself."""
        return x

    def sign(self, what: str, value: Any) -> None:
        """One rank agrees with itself."""

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


class AxisComm:
    """Workers along a named axis of `vmap` or `shard_map`, through `lax` collectives."""

    def __init__(self, axis: str, size: int) -> None:
        """Take the axis's name and its size, which must be known before tracing."""
        self.axis, self.size, self.order = axis, size, tuple(range(size))

    @property
    def rank(self) -> jax.Array:
        """The traced index along the axis."""
        return lax.axis_index(self.axis)

    def allreduce(self, x: jax.Array) -> jax.Array:
        """`lax.psum`."""
        return lax.psum(x, self.axis)

    def alltoall(self, x: PyTree) -> PyTree:
        """`lax.all_to_all` over the leading axis."""
        return jax.tree.map(lambda leaf: lax.all_to_all(leaf, self.axis, 0, 0), x)

    def allgather(self, x: PyTree) -> PyTree:
        """`lax.all_gather`."""
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`lax.ppermute`, completed to a permutation (`vmap` refuses a partial one) and masked."""
        full = complete(pairs, self.size)
        receives = np.zeros(self.size, bool)
        receives[[destination for _, destination in pairs]] = True
        mine = jnp.asarray(receives)[self.rank]

        def one(leaf: jax.Array) -> jax.Array:
            moved = lax.ppermute(leaf, self.axis, full)
            return moved if receives.all() else jnp.where(mine, moved, jnp.zeros_like(moved))

        return jax.tree.map(one, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """Row `root` of an all-gather."""
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis)[root], x)

    def sign(self, what: str, value: Any) -> None:
        """One program for all workers: nothing can differ."""

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


def complete(pairs: Pairs, size: int) -> list[tuple[int, int]]:
    """`pairs` plus pairs among the workers left over, so that each sends and receives once."""
    sources = sorted(set(range(size)) - {source for source, _ in pairs})
    destinations = sorted(set(range(size)) - {destination for _, destination in pairs})
    return [*pairs, *zip(sources, destinations, strict=True)]


class MpiComm:
    """Workers are MPI ranks; mpi4jax's collectives inside jit. One process drives one device."""

    def __init__(self, processes: "MpiProcesses") -> None:
        """Clone the world: mpi4py and mpi4jax must never share a communicator."""
        self.processes = processes
        self.mpi = processes.world.Clone()
        self.rank: int = processes.rank
        self.size: int = processes.size
        self.order = processes.order

    def allreduce(self, x: jax.Array) -> jax.Array:
        """`MPI_Allreduce`, sum."""
        import mpi4jax
        from mpi4py import MPI

        return mpi4jax.allreduce(x, op=MPI.SUM, comm=self.mpi)

    def alltoall(self, x: PyTree) -> PyTree:
        """`MPI_Alltoall`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.alltoall(leaf, comm=self.mpi)), x)

    def allgather(self, x: PyTree) -> PyTree:
        """`MPI_Allgather`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.allgather(leaf, comm=self.mpi)), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half of it that this rank has a part in."""
        import mpi4jax

        source = next((s for s, d in pairs if d == self.rank), None)
        destination = next((d for s, d in pairs if s == self.rank), None)

        def move(leaf: jax.Array) -> jax.Array:
            if source is not None and destination is not None:
                return mpi4jax.sendrecv(leaf, leaf, source=source, dest=destination, comm=self.mpi)
            if destination is not None:
                mpi4jax.send(leaf, dest=destination, comm=self.mpi)
            if source is not None:
                return mpi4jax.recv(leaf, source=source, comm=self.mpi)
            return jnp.zeros_like(leaf)

        return jax.tree.map(through_bits(move), x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        """`MPI_Bcast`."""
        import mpi4jax

        return jax.tree.map(through_bits(lambda leaf: mpi4jax.bcast(leaf, root, comm=self.mpi)), x)

    def sign(self, what: str, value: Any) -> None:
        """Compare over the control plane; a value once agreed on is not compared again."""
        self.processes.same(what, value)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """One rank a host traces and compiles, the others take its program. Ranks must call it together."""
        return shared_jit(function, donate_argnums, self.processes)


def through_bits(move: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`move` for 16-bit floats too: MPI has no such type, so their bits travel as uint16."""

    def moved(leaf: jax.Array) -> jax.Array:
        if leaf.dtype not in (jnp.float16, jnp.bfloat16):
            return move(leaf)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(leaf, jnp.uint16)), leaf.dtype)

    return moved


# ---------------------------------------------------------------- control plane


class SoloProcesses:
    """The control plane of a single process."""

    rank, size, local_rank, local_size = 0, 1, 0, 1

    def same(self, what: str, value: Any) -> None:
        """One rank agrees with itself."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def host_barrier(self) -> None:
        """Nobody to wait for."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The values themselves."""
        return values

    def bcast(self, tree: PyTree, root: int = 0) -> PyTree:
        """The tree itself."""
        return tree

    def gather(self, text: str) -> list[str]:
        """The one text."""
        return [text]


class MpiProcesses:
    """The control plane: small messages between processes, polled, with time limits that name who is late."""

    def __init__(self) -> None:
        """Start MPI, check it against the launcher, install the hooks."""
        from mpi4py import MPI

        check_launcher(runtime.launched(), MPI.COMM_WORLD.size, MPI.Get_library_version())
        self.world = MPI.COMM_WORLD.Clone()
        self.rank, self.size = self.world.rank, self.world.size
        self._exit = self.world.Clone()  # of its own: a rank may be at its end while others still talk
        runtime.install_hooks(runtime.Job(self.rank, self.size, abort, self._wait_at_exit))
        self._local = self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = self._local.rank, self._local.size
        self.order = ring_order(self.gather(socket.gethostname()), self._gather_ints(self.local_rank))
        self._agreed: set[bytes] = set()

    def _wait_at_exit(self, timeout_s: float) -> bool:
        return wait(self._exit.Ibarrier(), timeout_s)

    def barrier(self) -> None:
        """Wait for all ranks without spinning; an error after AGREE_TIMEOUT_S."""
        if not wait(self.world.Ibarrier(), AGREE_TIMEOUT_S):
            raise TrainingError(f"not all ranks came to where this one is within {AGREE_TIMEOUT_S:.0f} s")

    def host_barrier(self) -> None:
        """Wait for all ranks of this host."""
        wait(self._local.Ibarrier(), float("inf"))

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank of this host makes, on all its ranks; they wait without spinning.

        The value travels pickled, between ranks of one job only.
        """
        value = make() if self.local_rank == 0 else None
        self.host_barrier()
        return self._local.bcast(value)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum over ranks of f64[n]."""
        total = np.empty_like(values, np.float64)
        wait(self.world.Iallreduce(np.ascontiguousarray(values, np.float64), total), float("inf"))
        return total

    def _gather_ints(self, value: int) -> list[int]:
        out = np.empty(self.size, np.int64)
        self.world.Allgather(np.array([value], np.int64), out)
        return out.tolist()

    def gather(self, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self.barrier()
        mine = np.frombuffer(text.encode(), np.uint8)
        sizes = self._gather_ints(mine.size)
        out = np.empty(sum(sizes), np.uint8)
        self.world.Allgatherv(mine, (out, sizes))
        ends = np.cumsum(sizes)
        return [out[end - n : end].tobytes().decode() for end, n in zip(ends, sizes, strict=True)]

    def bcast(self, tree: PyTree, root: int = 0) -> PyTree:
        """The arrays of rank `root`; every rank gives a tree of the same structure, shapes and dtypes."""
        self.same("the tree to broadcast", signature(tree))
        self.barrier()  # polled: MPI_Bcast would spin until the root is there

        def one(leaf: Any) -> np.ndarray:
            array = np.array(leaf, order="C")  # a copy: JAX's own buffers are read-only
            raw = array.reshape(-1).view(np.uint8)
            for start in range(0, raw.size, MAX_BYTES):
                self.world.Bcast(raw[start : start + MAX_BYTES], root)
            return array

        return jax.tree.map(one, tree)

    def same(self, what: str, value: Any, timeout_s: float | None = None) -> None:
        """Compare a JSON value over all ranks, through rank 0.

        Raises:
            UsageError: ranks differ (rank, path, got, expected) or are absent when time is up, on all ranks alike.
        """
        text = json.dumps(value, sort_keys=True)
        digest = hashlib.sha256(f"{what}\0{text}".encode()).digest()
        if digest in self._agreed:
            return
        verdict = self._verdict(digest, timeout_s or AGREE_TIMEOUT_S)
        if verdict["late"]:
            raise UsageError(f"{what}: rank {verdict['late']} did not answer in time; all ranks must call it")
        if verdict["odd"]:
            odd = verdict["odd"]
            texts = self.gather(text)
            lines = [line for rank in odd[:8] for line in differences(rank, texts[0], texts[rank])]
            raise UsageError(f"{what} differs between ranks:\n" + "\n".join(lines[:24]))
        self._agreed.add(digest)

    def _verdict(self, digest: bytes, timeout_s: float) -> dict[str, list[int]]:
        """Rank 0 collects digests and tells all who differs from it and who is late."""
        mine = np.frombuffer(digest, np.uint8)
        if self.rank == 0:
            verdict = self._collect(mine, timeout_s)
            text = json.dumps(verdict).encode()
            data = np.frombuffer(text.ljust(4096), np.uint8)
            for rank in set(range(1, self.size)) - set(verdict["late"]):
                self.world.Send(data, rank, tag=2)
            return verdict
        self.world.Send(mine, 0, tag=1)  # 32 bytes: sent at once, whoever is late
        data = np.empty(4096, np.uint8)
        if not wait(self.world.Irecv(data, 0, tag=2), timeout_s + 5):
            return {"late": [0], "odd": []}
        return json.loads(data.tobytes())

    def _collect(self, mine: np.ndarray, timeout_s: float) -> dict[str, list[int]]:
        rows = np.zeros((self.size, mine.size), np.uint8)
        rows[0] = mine
        requests = {rank: self.world.Irecv(rows[rank], rank, tag=1) for rank in range(1, self.size)}
        deadline = time.monotonic() + timeout_s
        while requests and time.monotonic() < deadline:
            requests = {rank: request for rank, request in requests.items() if not request.Test()}
            time.sleep(POLL_S)
        late = sorted(requests)
        odd = [r for r in range(self.size) if r not in requests and (rows[r] != mine).any()]
        return {"late": late[:200], "odd": odd[:200]}


def wait(request: Any, timeout_s: float) -> bool:
    """Poll an MPI request with a sleep; False where time ran out."""
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def abort(code: int) -> NoReturn:
    """End every rank of the job."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # not reached where MPI keeps its word


def check_launcher(launch: runtime.Launch | None, mpi_size: int, library: str) -> None:
    """Stop where the launcher started N ranks and MPI sees one: the commonest failure on clusters."""
    check(
        launch is None or launch.size == mpi_size,
        f"the launcher ({launch.launcher if launch else ''}) started {launch.size if launch else 1} ranks, but MPI "
        f"({library.split(',')[0].strip()}) sees {mpi_size}: they are of different families. "
        "Use this library's own mpirun, or rebuild mpi4py and mpi4jax with the mpicc of the launcher's MPI",
    )


def ring_order(hosts: list[str], local_ranks: list[int]) -> tuple[int, ...]:
    """Ranks by host, in order of first appearance, then by local rank: each link between hosts is used once."""
    first = {host: hosts.index(host) for host in set(hosts)}
    return tuple(sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], local_ranks[rank])))


def differences(rank: int, expected: str, got: str) -> list[str]:
    """Lines `rank 3: path: got X, expected Y (rank 0)` for two JSON values."""
    ours, theirs = flatten_json(json.loads(expected)), flatten_json(json.loads(got))
    return [
        f"  rank {rank}: {path}: got {theirs.get(path, 'nothing')}, expected {ours.get(path, 'nothing')} (rank 0)"
        for path in [*ours, *(p for p in theirs if p not in ours)]
        if ours.get(path) != theirs.get(path)
    ]


def flatten_json(value: Any, path: str = "") -> dict[str, Any]:
    """Paths such as `optim.lr` to plain values; lists are values."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, part in value.items() for k, v in flatten_json(part, f"{path}.{key}".strip(".")).items()}


def signature(tree: PyTree) -> dict[str, str]:
    """Path to `float32[3,3,64]` of every leaf: what must agree before arrays travel."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# ---------------------------------------------------------------- the world


def is_cuda_aware() -> bool:
    """Whether mpi4jax hands device pointers to MPI, as MPI4JAX_USE_CUDA_MPI asks it to.

    Raises:
        UsageError: it is asked to, but was built without CUDA.
    """
    import mpi4jax

    asked = os.environ.get("MPI4JAX_USE_CUDA_MPI", "0").lower() in ("1", "true", "on")
    check(
        not asked or mpi4jax.has_cuda_support(), "MPI4JAX_USE_CUDA_MPI is set, but this mpi4jax was built without CUDA"
    )
    return asked


Processes = SoloProcesses | MpiProcesses


@functools.cache
def processes() -> Processes:
    """The control plane of this job; starts MPI where a launcher started several ranks.

    Raises:
        UsageError: mpi4py is missing, or the launcher and MPI disagree on the number of ranks.
    """
    launch = runtime.launched()
    if launch is None or launch.size == 1:
        return SoloProcesses()
    runtime.prepare()
    try:
        import mpi4jax  # noqa: F401
        import mpi4py.MPI  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{launch.launcher} started {launch.size} ranks, but {error.name} cannot be imported ({error}); "
            "install it with: uv sync --group mpi, or pip install 'jaxmpi[mpi]' against the cluster's mpicc"
        ) from error
    return MpiProcesses()


@functools.cache
def world() -> MpiComm | SoloComm:
    """All workers of this job, one a process."""
    control = processes()
    return MpiComm(control) if isinstance(control, MpiProcesses) else SoloComm()


def broadcast(tree: PyTree, root: int = 0) -> PyTree:
    """The tree of rank `root` on every rank, as NumPy arrays; dtypes and shapes as given.

    Communicates: one broadcast a leaf over all ranks, after a comparison of structure, shapes and dtypes.

    Raises:
        UsageError: ranks gave trees of different structure; rank, path, got, expected.
    """
    return processes().bcast(tree, root)
