"""A loop's own trees, saved and restored in the trainer's format: atomic, checksummed, for any number of ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.checkpoint import format
from jaxmpi.checkpoint.manager import not_finite, of_step
from jaxmpi.comm.control import processes
from jaxmpi.core.errors import AgreedError
from jaxmpi.core.pytrees import PyTree, as_given
from jaxmpi.core.random_keys import is_key_data, packed, unpacked
from jaxmpi.core.train_state import TrainState
from jaxmpi.runtime.in_flight import check_may_send


class Restored(NamedTuple):
    """A checkpoint of one's own."""

    step: int
    shared: PyTree
    own: PyTree
    extra: dict[str, Any]


class Checkpoints:
    """Checkpoints of a loop of one's own, in a folder that all ranks see. All ranks call the methods together."""

    def __init__(self, folder: str | Path, keep: int = 2, *, check_finite: bool = True) -> None:
        """Name a folder; nothing is read or written.

        Args:
            folder: that all ranks see.
            keep: how many of the newest stay.
            check_finite: refuse to save trees with NaN or infinite numbers. False for trees to which such belong, as
                `best = inf` of a loop that has seen no loss yet.
        """
        self._folder, self._keep, self._check_finite = Path(folder), keep, check_finite

    def save(self, step: int, shared: PyTree, own: PyTree = (), extra: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, in the foreground; return its folder.

        Args:
            step: its number, >= 0.
            shared: a tree of arrays, equal on all ranks; rank 0's is written.
            own: each rank's own tree, as debts of `lowrank` and `topk`, running statistics, keys; of the same structure
                and shapes on all. All are written.
            extra: JSON values kept beside, rank 0's.

        Communicates: barriers, a gather of short texts and one of the files' indices.

        Raises:
            TrainingError: on all ranks alike: a number is not finite, by rank and path; earlier checkpoints stay.
            OSError: it cannot be written; earlier checkpoints stay.
        """
        check_may_send("jaxmpi.Checkpoints.save")
        control = processes()
        if control.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        files = format.files_of({control.rank: _state(step, shared, own)}, replicated=True)
        odd = control.allgather_object(not_finite(files) if self._check_finite else "")
        if any(odd):
            rank = next(rank for rank, path in enumerate(odd) if path)
            way_out = "leave it out, or Checkpoints(folder, check_finite=False)"
            raise AgreedError(f"rank {rank}: {odd[rank]}{of_step(step, self._folder)}; {way_out}")
        facts = {"step": step, "workers": control.size, "extra": extra or {}}
        return format.save(self._folder, files, control, **facts, keep=format.Retention(self._keep))

    def restore(self, shared: PyTree, own: PyTree = ()) -> Restored | None:
        """The newest checkpoint that is whole on all ranks; None if there is none.

        On another number of ranks `own` is the mean of all ranks' own for floats, and rank 0's else; keys stay those
        given here.

        Args:
            shared: a tree like that which was saved, for structure, shapes and dtypes. Leaves that are JAX arrays here
                are returned as such, others as NumPy arrays.
            own: likewise.

        Communicates: a gather of rank 0's list, and one for each checkpoint that is tried.

        Raises:
            UsageError: on all ranks alike: it is of another tree (path, got, expected), or all are damaged.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = processes()
        like = {control.rank: _state(0, shared, own)}
        saved = format.restore(self._folder, like, control, workers=control.size, replicated=True)
        if saved is None:
            return None
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, state.model_state["arrays"]), given)
        if saved.workers != control.size:
            mine = jax.tree.map(lambda x, here: here if is_key_data(x) else x, mine, given[1], is_leaf=is_key_data)
        return Restored(saved.step, unpacked(common), unpacked(mine), saved.extra)


def _state(step: int, shared: PyTree, own: PyTree) -> TrainState:
    """A state like the trainer's, with arrays of NumPy."""
    common, mine = jax.tree.map(np.asarray, (packed(shared), packed(own)))
    return TrainState(np.array(step, np.int64), common, {"arrays": mine}, (), np.zeros(0, np.uint32))
