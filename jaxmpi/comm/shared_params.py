"""One copy of params a host, in shared memory, for sharded updates.

With sharded updates each rank makes the new values of a shard and reads those of all others. On one host the second
half of the exchange, in which all ranks get a copy of everything, can be left out: each rank writes its shard to memory
that all of them have mapped, and all compute on what lies there. So w ranks hold n params instead of w n, and no new
params beside the old ones.

XLA takes arrays over this memory as they lie, and counts on their not changing. They change only while nobody reads
them. So in each step every rank deletes its arrays of the step before. It waits until nothing in its process holds the
memory under them: no program, no NumPy view, no other array. Then it waits for all ranks, writes its shard, and waits
for all once more. Whoever has kept an array gets an error when it is used; whoever has kept a view of one gets an error
at once, on all ranks, before anything is written.

Tried and dropped: one array for all steps, which would change under callbacks that keep it. To wait for all arrays of
the process instead: a program whose result is dropped still reads, and NumPy's views are no arrays of JAX.
"""

import gc
import math
import time
import weakref

import jax
import numpy as np

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.comm.shared_sync import ARRIVED, TIMEOUT_S, SharedCounters, map_together, table_bytes
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.sharding import ElementSharding, TensorSharding

ALIGNED = 64  # bytes, at which devices on the host take an array as it lies
LET_GO_S = 10.0  # in which what reads params must come to its end


class SharedParams:
    """Float32 params that a host's ranks share, each writing its shard."""

    def __init__(self, host: HostProcesses, sharding: ElementSharding | TensorSharding, index: int) -> None:
        """Take the sharding of params over the ranks of this host, and the index of this rank's shard; map nothing."""
        self._host, self._sharding, self._index = host, sharding, index
        self._views: PyTree = None  # which stay here, to be written
        self._arrays: list[jax.Array] = []  # that are read now
        self._readers: list[weakref.ref[np.ndarray]] = []  # a view under each, which dies when nothing reads it

    def fill(self, params: PyTree) -> PyTree:
        """The host's first rank's params, as arrays in shared memory.

        All ranks of the host call it together; the others' params may be `jax.ShapeDtypeStruct`. Arrays of before are
        deleted, unless these are the ones: then they are there already.

        Raises:
            UsageError: no room for them, or ranks that share no memory; on all ranks alike. As `update`.
        """
        if self._views is None:
            self._map(params)
        leaves = jax.tree.leaves(params)
        if self._arrays and all(mine is leaf for mine, leaf in zip(self._arrays, leaves, strict=True)):
            return params
        self._delete_arrays()
        if self._host.local_rank == 0:
            jax.tree.map(np.copyto, self._views, params)
        return self._new_arrays()

    def update(self, shard: PyTree) -> PyTree:
        """Params with all ranks' new shards; arrays of before are deleted.

        Communicates: through shared memory; two waits for all ranks of the host.

        Raises:
            UsageError: this process still holds a view of the params of before.
            TrainingError: another rank does.
        """
        jax.block_until_ready(shard)
        self._delete_arrays()
        self._sharding.write(self._views, shard, self._index)
        return self._new_arrays()

    def _map(self, params: PyTree) -> None:
        leaves, structure = jax.tree.flatten(params)
        sizes = [-(-4 * math.prod(leaf.shape) // ALIGNED) * ALIGNED for leaf in leaves]
        rank, ranks = self._host.local_rank, self._host.local_size
        ends = np.cumsum([table_bytes(ranks), *sizes]).tolist()

        memory = map_together(self._host, ends[-1], "params; use another strategy: asa")
        purpose = "an update of shared params"
        self._board = SharedCounters(memory=memory, rank=rank, size=ranks, timeout_s=TIMEOUT_S, what=purpose)
        views = [
            np.frombuffer(memory, np.float32, math.prod(leaf.shape), at).reshape(leaf.shape)
            for at, leaf in zip(ends, leaves, strict=False)
        ]
        self._views = jax.tree.unflatten(structure, views)

    def _delete_arrays(self) -> None:
        """Delete the arrays of before; return when no rank reads them."""
        for array in self._arrays:
            array.delete()
        self._arrays = []
        # Not `polling.wait`: programs let go within microseconds, so pauses begin there and double; a collection is too
        # long for every look, and comes after a second.
        begin, pause_s = time.monotonic(), 1e-5
        while any(view() is not None for view in self._readers):
            if time.monotonic() - begin > LET_GO_S:
                self._refuse_readers()
            if pause_s > LET_GO_S / 8:
                gc.collect()  # a view in a cycle is nobody's
            time.sleep(pause_s)
            pause_s *= 2
        self._wait_for_all()

    def _refuse_readers(self) -> None:
        named = zip(named_leaves(self._views), self._readers, strict=True)
        if in_use := [name or "params" for (name, _), view in named if view() is not None]:
            self._board.fail()
            raise UsageError(
                f"local rank {self._host.local_rank}: got {in_use[0]} of the params before this step still in use "
                f"after {LET_GO_S:.0f} s, as by a view that np.asarray(x) gives; the ranks of this host share their "
                "params, which change now: keep copies, np.array(x), or use another strategy, such as asa"
            )

    def _wait_for_all(self) -> None:
        self._board.call += 1
        self._board.post(ARRIVED, self._board.call)
        self._board.wait_for_all(ARRIVED, self._board.call)

    def _new_arrays(self) -> PyTree:
        """Arrays over what is there once all ranks have written."""
        self._wait_for_all()
        views, structure = jax.tree.flatten(self._views)
        arrays = [leaf.view() for leaf in views]
        self._readers, self._arrays = (
            [weakref.ref(leaf) for leaf in arrays],
            [jax.dlpack.from_dlpack(x) for x in arrays],
        )
        return jax.tree.unflatten(structure, self._arrays)
