"""Collectives over all workers, inside jit.

Exchange algorithms need MPI's collectives inside compiled programs. `MpiComm` calls mpi4jax there, and sums over a host
use shared memory. Each `MpiComm` clones its communicator, so messages of mpi4py and mpi4jax never meet. MPI lacks
16-bit floats, so moves between ranks send them as uint16. Importing mpi4jax starts MPI, so the imports are inside
functions.
"""

import collections
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import effects

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.axis import CommDefaults
from jaxmpi.comm.base import Comm, NullComm, Pairs, SoloComm, check_member, check_one_host, color_of, ring_order
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.comm.polling import is_mpi_error
from jaxmpi.comm.shared_compile import shared_jit
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import host_callbacks, process


class RankComm(CommDefaults):
    """Base of Comms whose workers are MPI ranks with a device each.

    Its `reduce_scatter` is the default: mpi4jax has no `MPI_Reduce_scatter_block`.
    """

    def __init__(self, processes: MpiProcesses, mpi: Any) -> None:
        """`mpi` is this Comm's alone; mpi4py and mpi4jax never share it."""
        self.processes, self.mpi = processes, mpi
        self.rank: int = processes.rank
        self.size: int = processes.size
        self.hosts = processes.hosts
        self.order = ring_order(self.hosts)
        self._cache: dict[Any, Any] = {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` made for this key, which is dropped, and closed if it has a `close`, with the communicator."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Through shared memory, all vectors in one call."""
        check_one_host(self.hosts)
        return self._shared_sum.sum(vectors, divisor)

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Through shared memory."""
        check_one_host(self.hosts)
        return self._shared_sum.scatter(vectors, divisor)

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Through shared memory."""
        check_one_host(self.hosts)
        return self._shared_sum.gather(vectors)

    def sum_on_host_now(self, arrays: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """The same outside jit, done when it returns."""
        check_one_host(self.hosts)
        return self._shared_sum.sum_now(arrays, divisor)

    @property
    def sum_name(self) -> str:
        """The name by which programs find the sums over this host.

        `shared_sum.scatter_beside` takes it. All ranks come here together for the first time.
        """
        check_one_host(self.hosts)
        return self._shared_sum.name

    @functools.cached_property
    def _shared_sum(self) -> SharedSum:
        """Made at the first use, when all ranks trace the same program."""
        return self._make_shared_sum()

    def _make_shared_sum(self) -> SharedSum:
        raise NotImplementedError

    def assert_same(self, mine: Fingerprint) -> None:
        """Compare over the control plane: microseconds if ranks are in step."""
        self.processes.compare(mine)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` compiled once a host; its ranks make the first call together.

        A first call is one with arguments of a new structure, shapes or dtypes.
        """
        return shared_jit(function, donate_argnums, self.processes)


_sums = [-1]  # numbers of Comms that sum in shared memory


made: list["MpiComm"] = []  # communicators of this process


class MpiComm(RankComm):
    """mpi4jax's collectives inside jit."""

    def __init__(self, processes: MpiProcesses) -> None:
        """Clone the world."""
        super().__init__(processes, processes.clone())
        self.is_freed = False
        self.serial = 0  # of a communicator of mpi4py's
        # For messages between two ranks, of mpi4py and of programs: they match by rank and tag, in each sender's order.
        self.headers, self.arrays = processes.clone(), processes.clone()
        made.append(self)

    def allreduce(self, x: jax.Array) -> jax.Array:
        import mpi4jax
        from mpi4py import MPI

        return mpi4jax.allreduce(x, op=MPI.SUM, comm=self.mpi)

    def alltoall(self, x: PyTree) -> PyTree:
        import mpi4jax

        return jax.tree.map(as_uint16(lambda leaf: mpi4jax.alltoall(leaf, comm=self.mpi)), x)

    def allgather(self, x: PyTree) -> PyTree:
        import mpi4jax

        return jax.tree.map(as_uint16(lambda leaf: mpi4jax.allgather(leaf, comm=self.mpi)), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half that this rank has a part in."""
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

        return jax.tree.map(as_uint16(move), x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        import mpi4jax

        return jax.tree.map(as_uint16(lambda leaf: mpi4jax.bcast(leaf, root, comm=self.mpi)), x)

    def split(self, color: SupportsIndex | str | None, key: int = 0) -> "MpiComm | NullComm":
        """A communicator of the ranks that give the same color.

        A rank that gives None gets `NullComm`: it is false, for `if part: ...`, has size 0, and every call refuses it.
        Ranks are numbered anew, by key, then as here. All ranks of this communicator must call it together, outside
        jit.

        Args:
            color: any number from 0 on, or "host": one communicator for each host.
            key: order of ranks in the new communicator.

        Communicates: an allgather of colors, then `MPI_Comm_split`.

        Raises:
            UsageError: some ranks give "host", others a number.
        """
        from mpi4py import MPI

        check_member(self)
        color = color_of(color)
        self.processes.assert_same("split", None)  # polled: it names who is absent, or at another call
        given = self.processes.allgather_object(color)
        if "host" in given and (others := [rank for rank, each in enumerate(given) if isinstance(each, int)]):
            at_host, at_number = (self.processes.numbers[rank] for rank in (given.index("host"), others[0]))
            got = f"rank {at_host} gave 'host', rank {at_number} the number {given[others[0]]}"
            raise UsageError(f"split: color: {got}; expected 'host' of all ranks with a part, or numbers")
        number = self.hosts[self.rank] if color == "host" else MPI.UNDEFINED if color is None else color
        part = self.processes.world.Split(number, key)
        return MpiComm(self.processes.over(part, is_ours=True)) if part != MPI.COMM_NULL else NullComm()

    def free(self) -> None:
        """Give back what a communicator from `split` holds: MPI's communicators, shared memory and programs.

        All its ranks call it together, outside jit, once their programs that use it have ended. They cannot run again:
        they end with an error. To free it twice does nothing.

        Raises:
            UsageError: it is the world.
        """
        check(self is not world(), "free: got the world; expected a communicator from split()")
        if self.is_freed:
            return
        jax.effects_barrier()
        self.processes.assert_same("free", None)  # polled: it names who is absent
        self.is_freed = True
        self.processes.free()  # first: the thread that watches for absent ranks uses what follows
        for kept in self._cache.values():
            if hasattr(kept, "close"):
                kept.close()
        self._cache.clear()
        if shared_sum := self.__dict__.pop("_shared_sum", None):
            shared_sum.close()
        self.__dict__.pop("reversed_mpi", None)
        made.remove(self)

    def meet_in_reverse(self) -> None:
        """Make `reversed_mpi`, if it is not there; all ranks come here together."""
        _ = self.reversed_mpi

    @functools.cached_property
    def reversed_mpi(self) -> Any:
        """The ranks in reverse order; all call it together the first time."""
        self.processes.assert_same("the ranks in reverse", self.size)  # polled: it names who is absent
        return self.processes.split(0, -self.rank)  # `self.mpi` is the programs', which may be using it now

    def _make_shared_sum(self) -> SharedSum:
        """A sum ordered among mpi4jax's calls, under a name new everywhere.

        One rank of a host traces for all, so the name must be the same on all ranks.
        """
        self.processes.host_barrier()  # it waits longer than others: one rank may compile meanwhile
        _sums.append(max(self.processes.allgather_object(_sums[-1])) + 1)
        return SharedSum(self.processes, f"sum of comm {_sums[-1]}", effect=self.effect)

    @functools.cached_property
    def effect(self) -> Any:
        """mpi4jax's effect, which orders calls; `jax.checkpoint` may repeat them on all ranks."""
        [effect] = jax.make_jaxpr(self.allreduce)(0.0).effects
        effects.remat_allowed_effects.add_type(type(effect))
        return effect


def as_uint16(move: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`move` for 16-bit floats too, which MPI lacks: they travel as uint16."""

    def moved(leaf: jax.Array) -> jax.Array:
        if leaf.dtype not in (jnp.float16, jnp.bfloat16):
            return move(leaf)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(leaf, jnp.uint16)), leaf.dtype)

    return moved


# ---------------------------------------------------------------- the world


def is_cuda_aware() -> bool:
    """Return True if mpi4jax passes MPI device pointers, as MPI4JAX_USE_CUDA_MPI asks.

    Raises:
        UsageError: it is asked to, but was built without CUDA.
    """
    import mpi4jax

    asked = os.environ.get("MPI4JAX_USE_CUDA_MPI", "0").lower() in ("1", "true", "on")
    check(
        not asked or mpi4jax.has_cuda_support(), "MPI4JAX_USE_CUDA_MPI is set, but this mpi4jax was built without CUDA"
    )
    return asked


# With a message, for this thread: why the world may not exchange here. A part of what JAX keeps traces by, so that a
# function of the user's own jit is traced anew in it.
refusing_world = jax.make_user_context(default_value="")


def workers_of(comm: Comm | None) -> Comm:
    """The workers that exchange: the caller's choice, else the world.

    Raises:
        UsageError: it is the world, in a function whose workers are others; this rank has no part in it.
    """
    check_member(comm)
    chosen = comm or world()
    why = refusing_world.value
    check(not why or chosen is not world(), why)
    return chosen


def numbers_of(comm: Comm) -> tuple[int, ...]:
    """The launcher's numbers of a communicator's ranks; none along an axis."""
    if isinstance(comm, RankComm):
        return tuple(comm.processes.numbers)
    return (process.my_rank(),) if isinstance(comm, SoloComm) else ()


def communicator(comm: Any) -> Comm:
    """The `Comm` that a `comm` argument stands for; None is the world.

    A communicator of mpi4py becomes one of ours at its first use. All its ranks call it together then.

    Raises:
        UsageError: it is neither, or this rank has no part in it.
    """
    check_member(comm)
    if comm is None or not hasattr(comm, "Get_attr"):
        chosen = workers_of(comm)
        check(
            isinstance(chosen, (MpiComm, SoloComm)),
            f"comm: got {type(chosen).__name__}; expected jaxmpi.world(), a part of it by split(), or a communicator "
            "of mpi4py; along an axis of vmap or shard_map take the collectives of jax.lax",
        )
        return chosen
    if comm.size == 1:
        return SoloComm()
    from mpi4py import MPI

    control = processes()
    assert isinstance(control, MpiProcesses)
    if comm == MPI.COMM_WORLD:
        return workers_of(None)
    known = comm.Get_attr(_known_by())
    if known is None:
        known = MpiComm(control.over(comm))
        comm.Set_attr(_known_by(), known)
        _free_dropped(known)
    return known


_serials = [0]  # numbers of Comms for mpi4py's communicators; a number and its ranks name one on all of these
_dropped: dict[tuple[int, ...], MpiComm] = {}  # of communicators that the user has freed, by number and ranks


@functools.cache
def _known_by() -> int:
    """MPI's own place for what belongs to a communicator of the user's."""
    from mpi4py import MPI

    def drop(_comm: Any, _key: int, known: MpiComm) -> None:
        _dropped[known.serial, *known.processes.numbers] = known

    return MPI.Comm.Create_keyval(delete_fn=drop)


def _free_dropped(new: MpiComm) -> None:
    """Free what was made for communicators that the user has freed since, if all their ranks are here and know.

    A rank may be at `MPI_Comm_free` before others, and to free ours needs all. So it is done when ranks next come
    together, for another communicator's first use.
    """
    control = new.processes
    mine = [key for key in _dropped if set(key[1:]) <= set(control.numbers)]
    rows = control.allgather_object([_serials[-1], mine])
    new.serial = _serials[-1] = 1 + max(last for last, _ in rows)
    known_by = collections.Counter(tuple(key) for _, keys in rows for key in keys)
    for key in sorted(mine):  # in one order on all ranks
        if known_by[key] == len(key) - 1:
            _dropped.pop(key).free()


@functools.cache
def world() -> MpiComm | SoloComm:
    """All workers of this job, one a process."""
    control = processes()
    return MpiComm(control) if isinstance(control, MpiProcesses) else SoloComm()


Buffers = Sequence[np.ndarray]
_numbers = itertools.count()  # numbers of comms, the same on all ranks


class FaultTolerantComm(RankComm):
    """The ranks of a launcher that goes on without those that die."""

    def __init__(self, processes: MpiProcesses) -> None:
        """Clone the world; all ranks come here together, again after `processes.shrink`."""
        super().__init__(processes, processes.clone())
        self.is_lost = False  # True if a collective has failed, so that results are worth nothing
        self.why = ""  # the error of it
        self._name, self._names = f"fault-tolerant comm {next(_numbers)}", list[str]()
        for move in (self._allreduce, self._alltoall, self._allgather, self._permute, self._bcast):
            self._offer(self._called(move), move)

    def _called(self, move: Callable[..., None]) -> str:
        return f"{self._name}: {move.__name__}"

    def _offer(self, name: str, move: Callable[..., None]) -> None:
        host_callbacks.register(name, functools.partial(self._unless_lost, move))
        self._names.append(name)

    def _unless_lost(self, move: Callable[..., None], operands: Buffers, results: Buffers, **attributes: Any) -> None:
        """Run a move; once a rank is lost, revoke, and give zeros."""
        if not self.is_lost:
            try:
                return move(operands, results, **attributes)
            except Exception as error:
                if not (is_mpi_error(error) or isinstance(error, TrainingError)):
                    raise
                self.is_lost, self.why = True, str(error) or type(error).__name__
                self.processes.revoke()
        for result in results:
            result[...] = np.zeros((), result.dtype)

    def _call(self, move: Callable[..., None], x: jax.Array, shape: tuple[int, ...], **attributes: Any) -> jax.Array:
        return host_callbacks.call(self._called(move), [x], [jax.ShapeDtypeStruct(shape, x.dtype)], **attributes)[0]

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self._call(self._allreduce, x, x.shape)

    def _allreduce(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Allreduce(operands[0], results[0])

    def alltoall(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._alltoall, leaf, leaf.shape), x)

    def _alltoall(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Alltoall(bits(operands[0]), bits(results[0]))

    def allgather(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._allgather, leaf, (self.size, *leaf.shape)), x)

    def _allgather(self, operands: Buffers, results: Buffers) -> None:
        self.mpi.Allgather(bits(operands[0]), bits(results[0]))

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half of it that concerns this rank."""
        source = next((s for s, d in pairs if d == self.rank), -1)
        to = next((d for s, d in pairs if s == self.rank), -1)
        return jax.tree.map(lambda leaf: self._call(self._permute, leaf, leaf.shape, source=source, to=to), x)

    def _permute(self, operands: Buffers, results: Buffers, source: int, to: int) -> None:
        sent, received = bits(operands[0]), bits(results[0])
        if source >= 0 and to >= 0:
            return self.mpi.Sendrecv(sent, to, 0, received, source)
        received[...] = 0
        if to >= 0:
            self.mpi.Send(sent, to)
        if source >= 0:
            self.mpi.Recv(received, source)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return jax.tree.map(lambda leaf: self._call(self._bcast, leaf, leaf.shape, root=root), x)

    def _bcast(self, operands: Buffers, results: Buffers, root: int) -> None:
        np.copyto(results[0], operands[0])
        self.mpi.Bcast(bits(results[0]), root)

    def _make_shared_sum(self) -> SharedSum:
        name = f"{self._name}: sum"
        shared = SharedSum(self.processes, name)
        host_callbacks.forget(name)
        self._offer(name, shared.add)
        return shared

    def close(self) -> None:
        """Let go of what programs call, and of shared memory."""
        for name in self._names:
            host_callbacks.forget(name)
        self.__dict__.pop("_shared_sum", None)


def bits(x: np.ndarray) -> np.ndarray:
    """A view as integers of equal size, for which MPI has types."""
    return x.reshape(-1).view(f"u{x.dtype.itemsize}")
