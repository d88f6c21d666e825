"""One copy of the params a host, in memory that its ranks share, for sharded updates on one host.

With sharded updates each rank makes the new values of a slice and reads those of all others. On one host the second
half of the exchange, in which all ranks get a copy of everything, can be left out: each rank writes its slice to memory
that all of them have mapped, and all compute on what lies there. So w ranks hold n params instead of w n, and no new
params beside the old ones.

XLA takes arrays over this memory as they lie, and counts on their not changing. They change only while nobody reads
them. A rank writes when its slice of the gradients' sum is complete: then the programs that made the gradients are over
on all ranks. It waits for its own programs before. And nobody goes on before all have written. Arrays of the step
before are deleted, so whoever has kept one gets an error, not other numbers.

Tried and dropped: one array for all steps, which would change under callbacks that keep it.
"""

import math
import mmap
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.shared_sync import ARRIVED, TIMEOUT_S, Board, Host, Made, map_together, reserved, table_bytes
from jaxmpi.core.deals import Leaves
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.shared_memory import folder
from jaxmpi.core.slices import Entries

ALIGNED = 64  # bytes, at which devices on the host take an array as it lies


class SharedParams:
    """Params of all ranks of a host, float32, of which each writes its slice."""

    def __init__(self, host: Host, cut: Entries | Leaves, number: int) -> None:
        """Nothing is mapped yet.

        Args:
            cut: of params over the ranks of this host.
            number: of this rank's slice.
        """
        self._host, self._cut, self._number = host, cut, number
        self._views: PyTree = None
        self._turns = 0

    def filled(self, params: PyTree) -> PyTree:
        """Params of the host's first rank as arrays in shared memory; all its ranks come here together.

        Raises:
            UsageError: no room for them, or ranks that share no memory; on all ranks alike.
        """
        if self._views is None:
            self._map(params)
        if self._host.local_rank == 0:
            jax.tree.map(np.copyto, self._views, params)
        self._wait_for_all()
        return self._arrays()

    def renewed(self, own: PyTree, before: PyTree) -> PyTree:
        """Params with the new values of all ranks' slices; arrays of before are deleted.

        Args:
            own: this rank's slices.
            before: what `filled` or the last call gave.

        Communicates: through shared memory; a wait for all ranks of the host.
        """
        jax.block_until_ready((own, jax.live_arrays()))  # nothing here reads the params of before any more
        for leaf in jax.tree.leaves(before):
            leaf.delete()
        self._cut.write(self._views, own, self._number)
        self._wait_for_all()
        return self._arrays()

    def _map(self, params: PyTree) -> None:
        leaves, structure = jax.tree.flatten(params)
        sizes = [-(-4 * math.prod(leaf.shape) // ALIGNED) * ALIGNED for leaf in leaves]
        rank, ranks = self._host.local_rank, self._host.local_size
        start = table_bytes(ranks)

        def make() -> Made:
            made = reserved(start + sum(sizes))
            why = f"no {(start + sum(sizes)) >> 20} MiB for params in {folder()} ({made.trouble}); use another strategy"
            return made if made.path else Made("", trouble=f"{why}: asa")

        memory, _ = map_together(self._host, make)
        self._board = Board(memory, rank, ranks, TIMEOUT_S)
        self._host.host_barrier()
        self._board.check_all_here()
        ends = np.cumsum([start, *sizes]).tolist()
        views = [view(memory, at, leaf.shape) for at, leaf in zip(ends, leaves, strict=False)]
        self._views = jax.tree.unflatten(structure, views)

    def _wait_for_all(self) -> None:
        self._turns += 1
        self._board.call = self._turns
        self._board.post(ARRIVED, self._turns)
        self._board.wait_for_all(ARRIVED, self._turns)

    def _arrays(self) -> PyTree:
        return jax.tree.map(jax.dlpack.from_dlpack, self._views)


def view(memory: mmap.mmap, at: int, shape: Any) -> np.ndarray:
    """f32[shape] at a place of the memory, which it keeps alive."""
    return np.frombuffer(memory, np.float32, math.prod(shape), at).reshape(shape)
