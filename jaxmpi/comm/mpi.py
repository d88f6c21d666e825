"""Communicators over MPI ranks, for collectives inside compiled programs.

`MpiComm` calls handlers in C there, or mpi4jax (`mpi_calls`); sums over a host use shared memory. An error of MPI ends
the job; of ranks that may die `fault_tolerant` has another communicator. Each communicator clones its own from MPI, so
messages of mpi4py and mpi4jax never meet.
"""

import collections
import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import effects

from jaxmpi.comm.agreement import Fingerprint, fresh_number, refuse_together
from jaxmpi.comm.base import Comm, NullComm, Pairs, SoloComm, check_member, check_one_host, parse_color, ring_order
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes, processes
from jaxmpi.comm.mpi_calls import forget, mpi_calls
from jaxmpi.comm.shared_compile import SharedJit
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import host_callbacks
from jaxmpi.runtime.process import my_rank


@functools.cache
def world() -> "MpiComm | SoloComm":
    """All workers of this job, one a process."""
    control = processes()
    return MpiComm(control) if isinstance(control, MpiProcesses) else SoloComm()


class RankComm(Comm):
    """Base of communicators whose workers are MPI ranks with a device each.

    `reduce_scatter` is an alltoall and a sum, since mpi4jax has no `MPI_Reduce_scatter_block`.
    """

    rank: int  # pyright: ignore[reportIncompatibleVariableOverride] # never traced

    def __init__(self, processes: MpiProcesses) -> None:
        self.processes = processes
        self.mpi = processes.clone()  # for the collectives of programs alone
        self.rank, self.size = processes.rank, processes.size
        self.hosts = processes.hosts
        self.order = ring_order(self.hosts)
        self._cache: dict[Any, Any] = {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` made for this key; it is dropped, and closed if it has a `close`, with the communicator."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _move(self, kind: str, x: jax.Array, shape: tuple[int, ...], **options: int) -> jax.Array:
        """Call a collective on one array; the result has this shape and x's dtype."""
        raise NotImplementedError

    def _make_shared_sum(self) -> SharedSum:
        raise NotImplementedError

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self._move("allreduce", x, x.shape)

    def alltoall(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._move("alltoall", leaf, leaf.shape), x)

    def allgather(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._move("allgather", leaf, (self.size, *leaf.shape)), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`MPI_Sendrecv`, or the half that this rank takes part in."""
        source = next((s for s, d in pairs if d == self.rank), -1)
        dest = next((d for s, d in pairs if s == self.rank), -1)
        return jax.tree.map(lambda leaf: self._move("permute", leaf, leaf.shape, source=source, dest=dest), x)

    def assert_same(self, mine: Fingerprint) -> None:
        """Compare over the control plane: microseconds if ranks are in step."""
        self.processes.compare(mine)

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit` compiled once a host; its ranks make the first call of each structure, shape and dtype together."""
        return SharedJit(function, donate_argnums, self.processes)

    # ------------------------------------------------------------ sums in the shared memory of one host

    @property
    def shared_sum(self) -> SharedSum:
        """Made at the first use, when all ranks trace the same program."""
        check_one_host(self.hosts)
        return self.cached("shared sum", self._make_shared_sum)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1, half: str = "") -> list[jax.Array]:
        return self.shared_sum.sum(vectors, divisor, half)


open_comms: list["MpiComm"] = []  # communicators of this process that were not freed


class MpiComm(RankComm):
    """MPI ranks; an error of MPI ends the job."""

    def __init__(self, processes: MpiProcesses) -> None:
        super().__init__(processes)
        self.is_freed = False
        # For messages between two ranks, of mpi4py and of programs: they match by rank and tag, in each sender's order.
        self.headers, self.arrays = processes.clone(), processes.clone()
        open_comms.append(self)

    def _move(self, kind: str, x: jax.Array, shape: tuple[int, ...], **options: int) -> jax.Array:
        from mpi4py import MPI

        calls = mpi_calls()
        if kind == "allreduce":
            return calls.allreduce(x, op=MPI.SUM, comm=self.mpi)
        if x.dtype in (jnp.float16, jnp.bfloat16):  # MPI has no such numbers: they are sent as integers
            moved = self._move(kind, lax.bitcast_convert_type(x, jnp.uint16), shape, **options)
            return lax.bitcast_convert_type(moved, x.dtype)
        if kind != "permute":
            return getattr(calls, kind)(x, comm=self.mpi, **options)
        source, dest = options["source"], options["dest"]
        if source >= 0 and dest >= 0:
            return calls.sendrecv(x, x, source=source, dest=dest, comm=self.mpi)
        if dest >= 0:
            calls.send(x, dest=dest, comm=self.mpi)
        return calls.recv(x, source=source, comm=self.mpi) if source >= 0 else jnp.zeros_like(x)

    @functools.cached_property
    def effect(self) -> Any:
        """mpi4jax's effect, which orders calls; `jax.checkpoint` may repeat them on all ranks."""
        [effect] = jax.make_jaxpr(self.allreduce)(0.0).effects
        effects.remat_allowed_effects.add_type(type(effect))
        # JAX itself refuses such a program on several devices, before anything of ours is lowered; its error lists the
        # effects, so their text is the only place for the way out.
        type(effect).__repr__ = lambda _: host_callbacks.ONE_DEVICE  # pyright: ignore[reportAttributeAccessIssue]
        return effect

    def _make_shared_sum(self) -> SharedSum:
        """A sum ordered among mpi4jax's calls.

        One rank of a host traces for all, so its name must be the same on all ranks, and new on each.
        """
        self.processes.host_barrier()  # it waits longer than others: one rank may compile meanwhile
        number = fresh_number("shared sum", self.processes.allgather_object)
        return SharedSum(self.processes, f"sum of comm {number}", effect=self.effect)

    def split(self, color: SupportsIndex | str | None, key: int = 0) -> "MpiComm | NullComm":
        """A communicator of the ranks that give the same color.

        A rank that gives None gets `NullComm`: it is false, for `if part: ...`, has size 0, and every call refuses it.
        Ranks are numbered anew, by key, then as here. All ranks of this communicator must call it together, outside
        jit.

        Args:
            color: any number from 0 on, or "host": one communicator for each host.
            key: order of ranks in the new communicator.

        Communicates: a comparison of calls, an allgather of kinds of colors, then `MPI_Comm_split`.

        Raises:
            UsageError: no such color; or some ranks give "host", others a number.
        """
        from mpi4py import MPI

        check_member(self)
        with refuse_together(self.processes):
            color, key = parse_color(color), operator.index(key)
        self.processes.assert_same("split", None)  # polled: it names who is absent, or at another call
        if len({isinstance(value, str) for value in self.processes.allgather_object(color) if value is not None}) > 1:
            raise UsageError("split: color: got 'host' and numbers; expected one of both of all ranks that take part")
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
        if self is world():
            raise UsageError("free: got the world; expected a communicator from split()")
        if self.is_freed:
            return
        jax.effects_barrier()
        self.processes.assert_same("free", None)  # polled: it names who is absent
        self.is_freed = True
        self.processes.free()  # first: the thread that watches for absent ranks uses what follows
        forget(self.mpi)
        for resource in self._cache.values():
            if hasattr(resource, "close"):
                resource.close()
        self._cache.clear()
        open_comms.remove(self)


# ---------------------------------------------------------------- what a `comm` argument stands for

# With a message, for this thread: why the world may not exchange here. A part of what JAX keeps traces by, so that a
# function of the user's own jit is traced anew in it.
refusing_world = jax.make_user_context(default_value="")


def workers_of(comm: Any) -> Comm:
    """The workers that exchange: the caller's choice, else the world.

    Raises:
        UsageError: it is the world, in a function whose workers are others; this rank has no part in it.
    """
    check_member(comm)
    chosen = _of_mpi4py(comm) if hasattr(comm, "Get_attr") else comm or world()
    if not isinstance(chosen, Comm):
        raise UsageError(f"comm: got {chosen!r:.80}; expected jaxmpi.world(), a part of it by split(), or an AxisComm")
    if (why := refusing_world.value) and chosen is world():
        raise UsageError(why)
    return chosen


def control_of(comm: Comm) -> Processes:
    """The control plane of a communicator's ranks; along an axis there is one process's."""
    return comm.processes if isinstance(comm, RankComm) else SoloProcesses()


def numbers_of(comm: Comm) -> tuple[int, ...]:
    """The launcher's numbers of a communicator's ranks; none along an axis."""
    if isinstance(comm, RankComm):
        return tuple(comm.processes.numbers)
    return (my_rank(),) if isinstance(comm, SoloComm) else ()


def communicator(comm: Any) -> "MpiComm | SoloComm":
    """`workers_of`, without those along an axis.

    Raises:
        UsageError: as `workers_of`, and for an axis.
    """
    chosen = workers_of(comm)
    if not isinstance(chosen, (MpiComm, SoloComm)):
        raise UsageError(
            f"comm: got {type(chosen).__name__}; expected jaxmpi.world(), a part of it by split(), or a communicator "
            "of mpi4py; along an axis of vmap or shard_map take the collectives of jax.lax"
        )
    return chosen


def _of_mpi4py(comm: Any) -> "MpiComm | SoloComm":
    """Ours for a communicator of mpi4py, made at its first use; all its ranks call it together then."""
    from mpi4py import MPI

    if comm == MPI.COMM_SELF:
        return SoloComm()
    control = processes()  # by all ranks, also one that a split leaves alone: others may start by theirs
    if comm.size == 1:
        return SoloComm()
    assert isinstance(control, MpiProcesses)
    if comm == MPI.COMM_WORLD:
        return world()
    if (ours := comm.Get_attr(_attribute())) is None:
        ours = MpiComm(control.over(comm))
        comm.Set_attr(_attribute(), ours)
        _free_dropped(ours)
    return ours


_dropped: dict[tuple[int, ...], MpiComm] = {}  # of communicators that the user has freed, by number and ranks


@functools.cache
def _attribute() -> int:
    """MPI's key for our communicator as an attribute of the user's."""
    from mpi4py import MPI

    def drop(_comm: Any, _key: int, dropped: MpiComm) -> None:
        _dropped[dropped.processes.waits.number, *dropped.processes.numbers] = dropped

    return MPI.Comm.Create_keyval(delete_fn=drop)


def _free_dropped(new: MpiComm) -> None:
    """Free what was made for communicators that the user has freed since, if all their ranks are here and know.

    A rank may be at `MPI_Comm_free` before others, and to free ours needs all. So it is done when ranks next come
    together, for another communicator's first use.
    """
    present = [key for key in _dropped if set(key[1:]) <= set(new.processes.numbers)]
    counts = collections.Counter(tuple(key) for keys in new.processes.allgather_object(present) for key in keys)
    for key in sorted(present):  # in one order on all ranks
        if counts[key] == len(key) - 1:
            _dropped.pop(key).free()


def is_cuda_aware() -> bool:
    """Return True if mpi4jax passes MPI device pointers, as MPI4JAX_USE_CUDA_MPI asks.

    Raises:
        UsageError: it is asked to, but was built without CUDA.
    """
    is_asked = os.environ.get("MPI4JAX_USE_CUDA_MPI", "0").lower() in ("1", "true", "on")
    if is_asked and not mpi_calls().has_cuda_support():
        raise UsageError("MPI4JAX_USE_CUDA_MPI is set, but this mpi4jax was built without CUDA")
    return is_asked
