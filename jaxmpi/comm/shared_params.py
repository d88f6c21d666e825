"""One copy of params a host, in shared memory, for sharded updates.

With sharded updates each rank makes the new values of a slice and reads those of all others. On one host the second
half of the exchange, in which all ranks get a copy of everything, can be left out: each rank writes its slice to memory
that all of them have mapped, and all compute on what lies there. So w ranks hold n params instead of w n, and no new
params beside the old ones.

XLA takes arrays over this memory as they lie, and counts on their not changing. They change only while nobody reads
them. So in each step every rank deletes its arrays of the step before. It waits until nothing in its process holds the
memory under them: no program, no NumPy view, no other array. Then it waits for all ranks, writes its slice, and waits
for all once more. Whoever has kept an array gets an error when it is used; whoever has kept a view of one gets an error
at once, on all ranks, before anything is written.

Tried and dropped: one array for all steps, which would change under callbacks that keep it. To wait for all arrays of
the process instead: a program whose result is dropped still reads, and NumPy's views are no arrays of JAX.
"""

import gc
import math
import mmap
import time
import weakref
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.comm.shared_sync import (
    ARRIVED,
    TIMEOUT_S,
    SharedCounters,
    SharedMemoryFile,
    map_together,
    reserved_anywhere,
    table_bytes,
)
from jaxmpi.core.deals import Leaves
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.shared_memory import folder
from jaxmpi.core.slices import Entries

ALIGNED = 64  # bytes, at which devices on the host take an array as it lies
LET_GO_S = 10.0  # in which what reads params must come to its end


class SharedParams:
    """Float32 params that a host's ranks share, each writing its slice."""

    def __init__(self, host: HostProcesses, cut: Entries | Leaves, number: int) -> None:
        """Nothing is mapped yet.

        Args:
            cut: of params over the ranks of this host.
            number: of this rank's slice.
        """
        self._host, self._cut, self._number = host, cut, number
        self._views: PyTree = None  # which stay here, to be written
        self._arrays: list[jax.Array] = []  # that are read now
        self._held: list[weakref.ref[np.ndarray]] = []  # view of each, which goes when nothing reads it any more
        self._turns = 0

    def filled(self, params: PyTree) -> PyTree:
        """The host's first rank's params, as arrays in shared memory.

        All ranks of the host call it together; the others' params may be `jax.ShapeDtypeStruct`. Arrays of before are
        deleted, unless these are the ones: then they are there already.

        Raises:
            UsageError: no room for them, or ranks that share no memory; on all ranks alike. As `renewed`.
        """
        if self._views is None:
            self._map(params)
        leaves = jax.tree.leaves(params)
        if self._arrays and all(here is leaf for here, leaf in zip(self._arrays, leaves, strict=True)):
            return params
        self._let_go()
        if self._host.local_rank == 0:
            jax.tree.map(np.copyto, self._views, params)
        return self._written()

    def renewed(self, own: PyTree) -> PyTree:
        """Params with all ranks' new slices; arrays of before are deleted.

        Args:
            own: this rank's slices.

        Communicates: through shared memory; two waits for all ranks of the host.

        Raises:
            UsageError: this process still holds a view of the params of before.
            TrainingError: another rank does.
        """
        jax.block_until_ready(own)
        self._let_go()
        self._cut.write(self._views, own, self._number)
        return self._written()

    def _map(self, params: PyTree) -> None:
        leaves, structure = jax.tree.flatten(params)
        sizes = [-(-4 * math.prod(leaf.shape) // ALIGNED) * ALIGNED for leaf in leaves]
        rank, ranks = self._host.local_rank, self._host.local_size
        start = table_bytes(ranks)

        def make() -> SharedMemoryFile:
            made = reserved_anywhere(start + sum(sizes))
            size = f"{(start + sum(sizes)) / 1e6:.3g} MB"
            why = f"no {size} for params in {folder()} ({made.trouble}) nor beside it; use another strategy: asa"
            return made if made.path else SharedMemoryFile("", trouble=why)

        memory, _ = map_together(self._host, make)
        self._board = SharedCounters(
            memory=memory, rank=rank, size=ranks, timeout_s=TIMEOUT_S, what="an update of shared params"
        )
        self._host.host_barrier()
        self._board.check_all_here()
        ends = np.cumsum([start, *sizes]).tolist()
        views = [view(memory, at, leaf.shape) for at, leaf in zip(ends, leaves, strict=False)]
        self._views = jax.tree.unflatten(structure, views)

    def _let_go(self) -> None:
        """Delete the arrays of before; return when no rank reads them."""
        for array in self._arrays:
            array.delete()
        self._arrays = []
        # Not `polling.wait`: programs let go within microseconds, so pauses begin there and double; a collection is too
        # long for every look, and comes after a second.
        begin, pause_s = time.monotonic(), 1e-5
        while any(ref() is not None for ref in self._held):
            if time.monotonic() - begin > LET_GO_S:
                self._refuse_held()
            if pause_s > LET_GO_S / 8:
                gc.collect()  # a view in a cycle is nobody's
            time.sleep(pause_s)
            pause_s *= 2
        self._wait_for_all()

    def _refuse_held(self) -> None:
        names = [name or "params" for name, _ in named_leaves(self._views)]
        held = [name for name, ref in zip(names, self._held, strict=True) if ref() is not None]
        if held:
            self._board.fail()
            raise UsageError(
                f"local rank {self._host.local_rank}: got {held[0]} of the params before this step still in use after "
                f"{LET_GO_S:.0f} s, as by a view that np.asarray(x) gives; the ranks of this host share their params, "
                "which change now: keep copies, np.array(x), or use another strategy, such as asa"
            )

    def _wait_for_all(self) -> None:
        self._turns += 1
        self._board.call = self._turns
        self._board.post(ARRIVED, self._turns)
        self._board.wait_for_all(ARRIVED, self._turns)

    def _written(self) -> PyTree:
        """New arrays, once all ranks have written."""
        self._wait_for_all()
        views, structure = jax.tree.flatten(self._views)
        seen = [leaf.view() for leaf in views]
        self._held, self._arrays = [weakref.ref(leaf) for leaf in seen], [jax.dlpack.from_dlpack(x) for x in seen]
        return jax.tree.unflatten(structure, self._arrays)


def view(memory: mmap.mmap, at: int, shape: Any) -> np.ndarray:
    """f32[shape] at a place of the memory, which it keeps alive."""
    return np.frombuffer(memory, np.float32, math.prod(shape), at).reshape(shape)
