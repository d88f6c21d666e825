"""A loop's own trees, saved and restored in the trainer's format: atomic, checksummed, for any number of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.checkpoint import format
from jaxmpi.checkpoint.manager import not_finite, of_step
from jaxmpi.comm.control import processes
from jaxmpi.core.errors import AgreedError, check
from jaxmpi.core.pytrees import PyTree, as_given
from jaxmpi.core.random_keys import is_key_data, packed, unpacked
from jaxmpi.core.slices import Entries
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
            own: each rank's own tree, as debts of `lowrank` and `topk`, running statistics, keys, the state of
                `jaxmpi.sharded`; of the same structure and shapes on all. All are written.
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
        cuts = _cuts(shared, own)
        files = format.files_of({control.rank: _state(step, shared, own)}, replicated=CHUNKS not in cuts)
        odd = control.allgather_object(not_finite(files) if self._check_finite else "")
        if any(odd):
            rank = next(rank for rank, path in enumerate(odd) if path)
            way_out = "leave it out, or Checkpoints(folder, check_finite=False)"
            raise AgreedError(f"rank {rank}: {odd[rank]}{of_step(step, self._folder)}; {way_out}")
        facts = {"step": step, "workers": control.size, "extra": {OF_USER: extra or {}, **cuts}}
        return format.save(self._folder, files, control, **facts, keep=format.Retention(self._keep))

    def restore(self, shared: PyTree, own: PyTree = ()) -> Restored | None:
        """The newest checkpoint that is whole on all ranks; None if there is none.

        On another number of ranks `own` is the mean of all ranks' own for floats, and rank 0's else; keys stay those
        given here. The state of `jaxmpi.sharded` is put together and cut anew, for another strategy as well.

        Args:
            shared: a tree like that which was saved, for structure, shapes and dtypes. Leaves that are JAX arrays here
                are returned as such, others as NumPy arrays.
            own: likewise.

        Communicates: a gather of rank 0's list, and one for each checkpoint that is tried.

        Raises:
            UsageError: on all ranks alike: it is of another tree (path, got, expected), all are damaged, or whole
                tensors of `jaxmpi.sharded` were dealt otherwise.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = processes()
        like = {control.rank: _state(0, shared, own)}
        cuts, sliced = _cuts(shared, own), _sliced(own)
        slicing = None
        if sliced:
            held = lambda mine, chunk, read: Entries(control.size).restored(None, mine, chunk, read)  # noqa: E731
            slicing = format.Slicing([_whole(state) for state in sliced], sliced[0].chunks, held)
        saved = format.restore(
            self._folder, like, control, workers=control.size, replicated=not sliced, slicing=slicing
        )
        if saved is None:
            return None
        check(
            saved.extra.get(DEALT) == cuts.get(DEALT),
            f"{self._folder}: got whole tensors of jaxmpi.sharded, dealt to {saved.workers} workers in the order "
            f"{saved.extra.get(DEALT)}; expected {control.size} in the order {cuts.get(DEALT)}: take as many workers, "
            "and the strategy, as before",
        )
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, _with_slices(own, state)), given)
        if saved.workers != control.size:
            mine = jax.tree.map(lambda x, here: here if is_key_data(x) else x, mine, given[1], is_leaf=is_key_data)
        return Restored(saved.step, unpacked(common), unpacked(mine), saved.extra.get(OF_USER, saved.extra))


OF_USER, CHUNKS, CUT, DEALT = "of user", "chunks", "cut", "dealt"  # in a manifest's extra values


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedState)


def _is_sliced(x: Any) -> bool:
    return isinstance(x, ShardedState) and x.shapes is not None


def _sliced(tree: PyTree) -> list[ShardedState]:
    """States of `jaxmpi.sharded` in a tree that are slices of every leaf."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_sharded) if _is_sliced(x)]


def _cuts(shared: PyTree, own: PyTree) -> dict[str, Any]:
    """How states of `jaxmpi.sharded` in a rank's own tree are cut, for the manifest.

    Raises:
        UsageError: one is in the shared tree, of which rank 0's is written; or they are cut in two ways.
    """
    misplaced = any(map(_is_sharded, jax.tree.leaves(shared, is_leaf=_is_sharded)))
    check(not misplaced, "shared: got a state of jaxmpi.sharded, which is each rank's own; give it in own")
    states = [x for x in jax.tree.leaves(own, is_leaf=_is_sharded) if _is_sharded(x)]
    orders = {x.chunks for x in states}
    check(len(orders) < 2, "own: got states of jaxmpi.sharded of several strategies; give them to several Checkpoints")
    found: dict[str, Any] = {}
    for state in states:
        order = [int(chunk) for chunk in state.chunks]
        found |= {CHUNKS: order, CUT: "entries"} if _is_sliced(state) else {DEALT: order}
    return found


def _whole(state: ShardedState) -> PyTree:
    """Shapes of the whole of which a rank has slices."""
    assert state.shapes is not None
    leaves, structure = jax.tree.flatten(state.own)
    shapes = zip(state.shapes, leaves, strict=True)
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in shapes])


def _with_slices(own: PyTree, state: TrainState) -> PyTree:
    """A rank's own tree as it was read: slices are a field of their own."""
    slices = iter(state.rule_state)
    put = lambda mine, read: replace(mine, own=next(slices)) if _is_sliced(mine) else read  # noqa: E731
    return jax.tree.map(put, own, state.model_state["arrays"], is_leaf=_is_sliced)


def _state(step: int, shared: PyTree, own: PyTree) -> TrainState:
    """A state like the trainer's, with arrays of NumPy; slices of `jaxmpi.sharded` are where it has its optimizer's."""
    rest = jax.tree.map(lambda x: () if _is_sliced(x) else x, packed(own), is_leaf=_is_sliced)
    slices = [state.own for state in _sliced(own)]
    common, mine, slices = jax.tree.map(np.asarray, (packed(shared), rest, slices))
    return TrainState(np.array(step, np.int64), common, {"arrays": mine}, slices, np.zeros(0, np.uint32))
