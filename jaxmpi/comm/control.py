"""The control plane over MPI: the ranks, their small messages outside programs, and who is late.

Before ranks exchange arrays they agree on what they are about to do: configurations, data, shapes, calls. These
messages are MPI's non-blocking operations on communicators of their own, and waits poll and sleep: a blocking call
would spin on a core, could not be given up, and could not say who has not come. When a wait has run out, ranks that are
there say so (`late`), and the error names the others. `SoloProcesses` is the same for one process without MPI.

A rank that dies ends the job, unless the launcher goes on without it (`fault_tolerant`). Importing mpi4py starts MPI,
so it happens inside functions.
"""

import collections
import contextlib
import copy
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi.comm.agreement import (
    DIGEST_BYTES,
    Fingerprint,
    check_may_send,
    describe_failure,
    different_calls,
    failure_of_rank,
    fingerprint,
)
from jaxmpi.comm.diagnosis import CONTROL, WaitRegistry, watch
from jaxmpi.comm.mpi_info import check_launcher, thread_level
from jaxmpi.comm.polling import lost_ranks_left_out, survives_losses, wait
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.json_tree import differences
from jaxmpi.core.pytrees import PyTree, check_arrays, describe_leaf, named_leaves
from jaxmpi.runtime import failures
from jaxmpi.runtime.process import core_mask, divide_mask, launched, my_gpu, share_gpu

LATE_S = 5.0  # for ranks to say that they are here, once one has waited in vain
ECHO_S = 1.0  # for the message that a rank has ended the job to come, once it is seen to be gone
AGREE_TIMEOUT_S = seconds_from("JAXMPI_AGREE_TIMEOUT_S", 300)
MAX_BYTES = 1 << 30  # bytes of one MPI message; counts are C ints
REFUSAL_BYTES = 2048  # bytes of the error by which a rank refuses a call, at most
BARRIER = fingerprint("a barrier", None)
PINGS = 20  # round trips between two clocks
HERE, LEADER, CLOCK = 1, 2, 3  # tags: I am here, and wait; this host's first rank is ready; a rank's clock


class MpiProcesses(SoloProcesses):
    """The ranks of a job, or of a part of it, and messages between them."""

    def __init__(self) -> None:
        """Start MPI, check it against the launcher, install the hooks; all ranks of the job come here."""
        from mpi4py import MPI

        self.library = MPI.Get_library_version().split(",")[0].strip()
        check_launcher(launched(), MPI.COMM_WORLD.size, self.library)
        self.may_overlap = thread_level(MPI) == MPI.THREAD_MULTIPLE
        self.comms: list[Any] = []  # all communicators, which end together when a rank is lost
        self._own_comms: list[Any] = []  # those that were made for `world`, which `free` frees
        self._requests: list[Any] = []  # requests of messages that nobody waits for, kept until the end
        self._registries: list[WaitRegistry] = []
        self.numbers = tuple(range(MPI.COMM_WORLD.size))  # the launcher's, of all ranks
        self.make_communicators(self.clone(MPI.COMM_WORLD))
        if self.may_overlap and not survives_losses():
            watch().start(self.clone())
        self.waits = self._new_registry()
        self.tags = 1 + int(self.world.Get_attr(MPI.TAG_UB) or 0x7FFF)  # that a message may have
        # MPI_Finalize deletes this before it does anything else; then other ranks and threads must be done with MPI.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: failures.run_hooks()), True)
        failures.call_before_finalize(watch().stop)  # runs when all ranks have come to their end, or time is up
        failures.install_hooks(failures.JobControl(self.rank, self.size, self._abort, self._wait_at_exit, self._echoes))
        if not survives_losses():
            failures.call_before_finalize(_let_programs_end)
        divide_mask(self._local.allgather(core_mask()), self.local_rank)
        # One host is one name and one memory, as MPI sees it: clones of a machine have one name.
        facts = self.allgather_object([socket.gethostname(), self._local.allgather(self.rank)[0], my_gpu()])
        names = [(host, first) for host, first, _ in facts]
        watch().hosts = {rank: f" on {host}" for rank, (host, _) in enumerate(names)}
        self.hosts = tuple(sorted(set(names), key=names.index).index(name) for name in names)
        shared = collections.Counter((host, gpu) for host, _, gpu in facts if gpu)
        share_gpu(max(shared.values(), default=1))

    # ------------------------------------------------------------ communicators

    def make_communicators(self, votes: Any) -> None:
        """Make communicators of the ranks of one that these vote on; all of them call it together."""
        self.votes, self.world = votes, self.clone(votes)
        self.rank, self.size = self.world.rank, self.world.size
        self._exit = self.clone()  # apart, since a rank may be at its end while others still talk
        self._local = self._split_host()
        self.local_rank, self.local_size = self._local.rank, self._local.size

    def _keep(self, comm: Any) -> Any:
        self.comms.append(comm)
        self._own_comms.append(comm)
        return comm

    def _split_host(self) -> Any:
        from mpi4py import MPI

        return self._keep(self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))

    def clone(self, comm: Any = None) -> Any:
        """Clone a communicator for one thread alone, on all ranks together."""
        return self._keep((comm or self.world).Clone())

    def _new_registry(self) -> WaitRegistry:
        """Make the record of this communicator's waits, on all its ranks together."""
        may_watch = self.may_overlap and not survives_losses()
        self._registries.append(WaitRegistry(self.world, self.numbers, may_watch))
        return self._registries[-1]

    def on_own_communicator(self) -> "MpiProcesses":
        """A copy with its own communicator for another thread; a collective call."""
        other = copy.copy(self)
        other.world = self.clone()
        other.waits = other._new_registry()
        return other

    def over(self, world: Any, is_ours: bool = False) -> "MpiProcesses":
        """A copy among the ranks of an mpi4py communicator, numbered as there; all of them call it together.

        Args:
            is_ours: nobody else uses it, so that it need not be cloned.

        Raises:
            UsageError: ranks that are not of this job.
            TrainingError: not all have come within AGREE_TIMEOUT_S.
        """
        from mpi4py import MPI

        self._let_exchanges_end()
        ranks = MPI.Group.Translate_ranks(world.group, range(world.size), self.world.group)
        if MPI.UNDEFINED in ranks:
            strangers = list(ranks).count(MPI.UNDEFINED)
            raise UsageError(f"communicator: got {world.size} ranks, of which {strangers} are not of this job")
        numbers = self.in_job(ranks)
        if not wait(world.Ibarrier().Test, AGREE_TIMEOUT_S):  # to clone it would spin, and for ever
            raise TrainingError(
                f"the first call on a communicator of {world.size} ranks has waited {AGREE_TIMEOUT_S:g} s for one of "
                f"rank {sorted(numbers)}; all its ranks must make their first call on it together, also those that a "
                "message does not concern (JAXMPI_AGREE_TIMEOUT_S sets the time)"
            )
        other = copy.copy(self)
        other._own_comms, other._registries = [], []
        other.world = other._keep(world) if is_ours else other.clone(world)
        other.rank, other.size, other.numbers = world.rank, world.size, tuple(numbers)
        other.hosts = tuple(self.hosts[rank] for rank in ranks)
        other._local = other.world if len(set(other.hosts)) == 1 else other._split_host()
        other.local_rank, other.local_size = other._local.rank, other._local.size
        other.waits = other._new_registry()
        return other

    def free(self) -> None:
        """Free the communicators that `over` has made; all its ranks come here together, with no message under way."""
        for registry in self._registries:
            watch().remove(registry)
        for comm in reversed(self._own_comms):
            self.comms.remove(comm)
            comm.Free()
        self._own_comms = []

    # ------------------------------------------------------------ agreement

    def compare(self, mine: Fingerprint) -> None:
        """`assert_same` for a fingerprint made before: 32 bytes a rank, and the values only if digests differ."""
        digests, digest = np.empty((self.size, DIGEST_BYTES), np.uint8), np.frombuffer(mine.digest, np.uint8)
        self._exchange(lambda: self.world.Iallgather(digest, digests), mine.what)
        differing = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
        if not differing:
            return
        if not digests.any(axis=1).all():  # a rank has refused the call, and has sent its error
            texts = np.empty((self.size, REFUSAL_BYTES), np.uint8)
            wait(self.world.Iallgather(np.zeros(REFUSAL_BYTES, np.uint8), texts).Test, float("inf"))
            rank = int(np.flatnonzero(texts.any(axis=1))[0])
            text = texts[rank].tobytes().decode(errors="ignore").rstrip("\0")
            raise failure_of_rank(self.numbers[rank], text[0] == "1", text[1:])
        calls, numbers = self.allgather_object(mine.what), self.numbers
        if len(set(calls)) > 1:
            raise UsageError(different_calls(dict(zip(numbers, calls, strict=True))))
        values = [json.dumps(value) for value in self.allgather_object(mine.value)]
        pairs = [(numbers[rank], values[rank], numbers[0], values[0]) for rank in differing[:8]]
        lines = [line for pair in pairs for line in differences(*pair)]
        raise UsageError(f"{mine.what} differs between ranks:\n" + "\n".join(lines[:24]))

    def refuse(self, error: Exception) -> None:
        """Have the other ranks' next comparison raise an error of this rank, which goes on without waiting for them."""
        self._let_exchanges_end()
        self.message_count += 1
        is_users, sentence = describe_failure(error)
        text = f"{is_users:d}{sentence}".encode(errors="replace")[:REFUSAL_BYTES].ljust(REFUSAL_BYTES, b"\0")
        for mine in (np.zeros(DIGEST_BYTES, np.uint8), np.frombuffer(text, np.uint8)):  # no digest is all zeros
            self._requests.append(self.world.Iallgather(mine, np.empty((self.size, mine.size), np.uint8)))

    # ------------------------------------------------------------ messages

    def barrier(self) -> None:
        """Wait without spinning for all ranks.

        Raises:
            TrainingError: who has not come within AGREE_TIMEOUT_S; so do the messages below.
        """
        self.compare(BARRIER)  # in place of MPI's: it names ranks that are at another call

    def host_barrier(self) -> None:
        """Wait for all ranks of this host, of which one may compile meanwhile: up to 6 AGREE_TIMEOUT_S."""
        limit_s = failures.LONG_FACTOR * AGREE_TIMEOUT_S
        if self.local_size == self.size:
            return self._exchange(self._local.Ibarrier, "a barrier of this host", limit_s)
        self._let_exchanges_end()
        if not wait(self._local.Ibarrier().Test, limit_s):
            neighbors = [self.numbers[rank] for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
            raise TrainingError(f"a barrier of this host: one of ranks {neighbors} did not come within {limit_s:g} s")

    def leader_first(self, make: Callable[[], Any], timeout_s: float) -> Any:
        """Call `make` on this host's first rank, then on the others, which find its cache.

        The leader does not block; followers wait for the leader, and stop waiting if it dies.

        Raises:
            TrainingError: the leader has not made its own in time.
        """
        message = np.zeros(1, np.uint8)
        if self.local_rank == 0:
            result = make()
            for rank in range(1, self.local_size):
                with lost_ranks_left_out():  # a message so short that it leaves at once
                    self._requests.append(self._local.Isend(message, rank, tag=LEADER))
            return result
        with lost_ranks_left_out():
            if not wait(self._local.Irecv(message, 0, tag=LEADER).Test, timeout_s):
                leader = self.numbers[self.hosts.index(self.hosts[self.rank])]
                raise TrainingError(
                    f"late: rank {leader}, the first of this host: {timeout_s:g} s, and it has not compiled what "
                    "others take from the cache then; its process is stuck, or --stall-timeout-s too short"
                )
        return make()

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """Give all ranks of this host the value that its first makes.

        Ranks wait without spinning. The value is pickled, for ranks of one job only.
        """
        value = make() if self.local_rank == 0 else None
        self.host_barrier()
        return self._local.bcast(value)

    def allreduce_sum(self, values: np.ndarray) -> np.ndarray:
        """Sum f64[n] over ranks."""
        mine, total = np.ascontiguousarray(values, np.float64), np.empty_like(values, np.float64)
        self._exchange(lambda: self.world.Iallreduce(mine, total), "a sum over ranks")
        return total

    def iallreduce_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin the maximum of i64[n] over ranks; the function returned waits for it."""
        from mpi4py import MPI

        self._let_exchanges_end()
        largest = np.array(values, np.int64)
        request = self.world.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)

        def result() -> np.ndarray:
            self._exchange(lambda: request, "the vote of all ranks on a step")
            return largest

        return result

    def allgather_array(self, values: np.ndarray) -> np.ndarray:
        """Allgather f64[n], n equal on all, as f64[size, n]."""
        mine = np.ascontiguousarray(values, np.float64)
        every = np.empty((self.size, mine.size), np.float64)
        self._exchange(lambda: self.world.Iallgather(mine, every), "what every rank has seen")
        return every

    def allgather_object(self, value: Any) -> list[Any]:
        self.barrier()
        # Polled as well: a blocking MPI_Allgatherv may give garbage when ranks fail.
        payload, sizes = np.frombuffer(json.dumps(value).encode(), np.uint8), np.empty(self.size, np.int64)
        wait(self.world.Iallgather(np.array([payload.size], np.int64), sizes).Test, float("inf"))
        received = np.empty(sizes.sum(), np.uint8)
        wait(self.world.Iallgatherv(payload, (received, sizes.tolist())).Test, float("inf"))
        return [json.loads(part.tobytes()) for part in np.split(received, np.cumsum(sizes)[:-1])]

    def bcast(self, tree: PyTree, root: int = 0) -> PyTree:
        """The arrays of rank `root`; structure, shapes and dtypes must be equal."""
        if root not in range(self.size):
            raise UsageError(f"broadcast: root: got {root}; expected a rank in [0, {self.size})")
        described = {name: describe_leaf(leaf) for name, leaf in named_leaves(tree)}
        self.assert_same(f"the tree to broadcast from rank {root}", described)
        check_arrays("broadcast", tree)  # after the comparison, so that it raises on all ranks or on none
        arrays = jax.tree.map(lambda leaf: np.array(leaf, order="C"), tree)  # copies: JAX's own buffers are read-only
        self.barrier()  # polled: MPI_Bcast would spin until the root is there
        for array in jax.tree.leaves(arrays):
            raw = array.reshape(-1).view(np.uint8)
            for start in range(0, raw.size, MAX_BYTES):
                self.world.Bcast(raw[start : start + MAX_BYTES], root)
        return arrays

    def pings(self) -> list[tuple[float, float]]:
        link_times, clock = super().pings(), np.zeros(1)
        self.barrier()
        for rank in range(1, self.size):
            if self.rank == 0:
                times = []
                for _ in range(PINGS):
                    begin_s = time.perf_counter()
                    self.world.Send(clock, rank, tag=CLOCK)
                    self.world.Recv(clock, rank, tag=CLOCK)
                    end_s = time.perf_counter()
                    times.append((end_s - begin_s, float(clock[0]) - (begin_s + end_s) / 2))
                link_times[rank] = min(times)
            elif self.rank == rank:
                wait(self.world.Irecv(clock, 0, tag=CLOCK).Test, float("inf"))  # its turn may be long in coming
                for ping in range(PINGS):
                    if ping:
                        self.world.Recv(clock, 0, tag=CLOCK)
                    self.world.Send(np.array([time.perf_counter()]), 0, tag=CLOCK)
        return link_times

    def _let_exchanges_end(self) -> None:
        """Wait for XLA's exchanges if MPI allows one thread at a time.

        Raises:
            UsageError: messages are refused here.
        """
        check_may_send("a message between ranks")
        if not self.may_overlap:
            jax.effects_barrier()

    # ------------------------------------------------------------ late ranks

    def _exchange(self, begin: Callable[[], Any], description: str, limit_s: float = AGREE_TIMEOUT_S) -> None:
        """Begin a message of all ranks, and wait for it.

        Where others go on without a rank that dies, those that are late are killed, and the message fails.
        """
        self._let_exchanges_end()
        self.message_count += 1
        request = begin()
        with self.waits.waiting(CONTROL, description, limit_s):
            if wait(request.Test, limit_s, self.is_asked):
                return
            late = self.late()
        if not (failures.kill_ranks(late) and wait(request.Test, 4 * LATE_S)):
            absent = self.in_job(late)
            names, where = watch().names(absent), watch().where(absent)
            raise TrainingError(f"{description}: {names} did not answer in time; all ranks must call it{where}")

    def late(self) -> list[int]:
        """Ranks that do not wait with this one: all that wait tell all others, within LATE_S."""
        byte, others = np.zeros(1, np.uint8), set(range(self.size)) - {self.rank}  # so short that it leaves at once
        self._requests += [self.world.Isend(byte, rank, tag=HERE) for rank in others]
        came = {rank: self.world.Irecv(np.zeros(1, np.uint8), rank, tag=HERE) for rank in others}

        def silent() -> list[int]:
            return [rank for rank, request in came.items() if request and not request.Test()]

        wait(lambda: not silent(), LATE_S)
        return silent()

    def is_asked(self) -> bool:
        """Return True if another rank has waited in vain: one that waits as well must say so at once, or is late."""
        return self.world.Iprobe(tag=HERE)

    # ------------------------------------------------------------ the end of the job

    def leave(self, code: int = 0) -> None:
        """Wait for all ranks at the end of the job; end here if ranks may be lost, where MPI's own end could hang."""
        if not survives_losses():
            return self.barrier()
        with lost_ranks_left_out():
            wait(self.world.Ibarrier().Test, LATE_S)
        failures.wait_for_ending_thread()
        sys.stdout.flush()
        os._exit(code)

    def _wait_at_exit(self, timeout_s: float) -> bool:
        watch().has_ended = True
        return wait(self._exit.Ibarrier().Test, timeout_s)

    def _abort(self, code: int) -> NoReturn:
        """End every rank of the job.

        If ranks may be lost, MPI_Abort hangs: with communicators revoked, others fail too. If they would go on after
        that, they are killed.
        """
        if not survives_losses():
            abort(code)
        failures.kill_ranks(range(self.size))
        for comm in self.comms:
            comm.Revoke()
        os._exit(code)

    def _echoes(self, error: BaseException | None) -> str | None:
        """Explain an error due to a lost rank; empty if reported already."""
        from mpi4py import MPI

        names = ("ERR_REVOKED", "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")
        classes = [getattr(MPI, name, None) for name in names]
        if not (survives_losses() and isinstance(error, MPI.Exception) and error.Get_error_class() in classes):
            return None
        # The rank that ends the job speaks first, then revokes, then is gone.
        has_spoken = wait(lambda: any(comm.Is_revoked() for comm in self.comms), ECHO_S)
        return "" if has_spoken else "ends, since a rank that it needs is gone"


def _let_programs_end() -> None:
    """Wait at exit for programs that exchange; the monitor limits the time."""
    with contextlib.suppress(Exception):  # errors of a program: mpi4jax's hook raises them again
        jax.effects_barrier()


def abort(code: int) -> NoReturn:
    """End every rank of the job, once this one's output is read."""
    from mpi4py import MPI

    failures.drain_stdio()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # after MPI, or if it does not keep its word
