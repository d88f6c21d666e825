"""Checkpoints of a loop's own trees, in the trainer's format.

A checkpoint is atomic and checksummed, and can be restored on any number of ranks.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import jax
import numpy as np

from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.checkpoint import format
from jaxmpi.checkpoint.manager import not_finite, of_step
from jaxmpi.comm.control import processes
from jaxmpi.core.errors import AgreedError, UsageError, check
from jaxmpi.core.pytrees import PyTree, as_given, has_ranks_own, path_name
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
    """Checkpoints of your own loop; all ranks call the methods together."""

    def __init__(self, folder: str | Path, keep: int = 2, *, check_finite: bool = True) -> None:
        """Name a folder; nothing is read or written.

        Args:
            folder: that all ranks see.
            keep: how many of the newest stay, >= 1.
            check_finite: refuse to save trees with NaN or infinite numbers. False for trees to which such belong, as
                `best = inf` of a loop that has seen no loss yet.
        """
        check(keep >= 1, f"jaxmpi.Checkpoints: keep: got {keep}; expected >= 1, as keep=1_000_000 to keep all")
        self._folder, self._keep, self._check_finite = Path(folder), keep, check_finite

    def save(self, step: SupportsInt, shared: PyTree, own: PyTree = (), extra: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, in the foreground; return its folder.

        Args:
            step: its number, >= 0.
            shared: a tree of arrays, equal on all ranks; rank 0's is written.
            own: each rank's own tree, as debts of `lowrank` and `topk`, running statistics, keys, the state of
                `jaxmpi.sharded`; of the same structure and shapes on all. All are written.
            extra: JSON values kept beside, rank 0's.

        Communicates: gathers of short texts and of the files' indices.

        Raises:
            UsageError: a state of `jaxmpi.sharded` in `shared`, or several of several strategies; a step below 0; extra
                values that JSON does not have.
            TrainingError: on all ranks alike: a number is not finite, or a file cannot be written, by rank and path;
                earlier checkpoints stay.
        """
        check_may_send("jaxmpi.Checkpoints.save")
        control, number = processes(), int(step)
        check(number >= 0, f"jaxmpi.Checkpoints.save: step: got {number}; expected >= 0")
        _check_json(extra)
        cuts, state = _cuts(shared, own, control.size), _state(number, shared, own, control.size)
        files = format.files_of({control.rank: state}, replicated=CHUNKS not in cuts)
        told = control.allgather_object(self._problem(files, number, control.rank))
        if problems := [text for text in told if text]:
            raise AgreedError(problems[0])
        facts = {"step": number, "workers": control.size, "extra": {OF_USER: extra or {}, **cuts}}
        return format.save(self._folder, files, control, **facts, keep=format.Retention(self._keep), agrees=True)

    def _problem(self, files: format.Files, step: int, rank: int) -> str:
        """Why this rank cannot write; empty if it can."""
        try:
            if rank == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"rank {rank}: the checkpoint of step {step} cannot be written: {error}"
        if not (odd := not_finite(files) if self._check_finite else ""):
            return ""
        way_out = "leave it out, or Checkpoints(folder, check_finite=False)"
        return f"rank {rank}: {odd}{of_step(step, self._folder)}; {way_out}"

    def restore(self, shared: PyTree, own: PyTree = ()) -> Restored | None:
        """Return the newest checkpoint that is whole on all ranks, or None.

        None stands for a folder without a checkpoint; if all are damaged, this raises.

        On another number of ranks `own` is the mean of all ranks' own for floats, and rank 0's else; keys stay those
        given here. The state of `jaxmpi.sharded` is put together and cut anew, for another strategy as well.

        Args:
            shared: a tree like that which was saved, for structure, shapes and dtypes. Leaves that are JAX arrays here
                are returned as such, others as NumPy arrays.
            own: likewise.

        Communicates: a gather of rank 0's list, and one for each checkpoint that is tried.

        Raises:
            UsageError: on all ranks alike: it is of another tree (path, got, expected), all are damaged, or states of
                `jaxmpi.sharded` cannot become those of this run: whole tensors, and slices over a part of the ranks,
                need as many ranks and the strategy as before, all of them the optimizer and `gather_wire`.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = processes()
        like = {control.rank: _state(0, shared, own, control.size)}
        cuts, sliced = _cuts(shared, own, control.size), _sliced(own, control.size)
        slicing = None
        if sliced:
            held = lambda mine, chunk, read: Entries(control.size).restored(None, mine, chunk, read)  # noqa: E731
            slicing = format.Slicing([_whole(state) for state in sliced], sliced[0].chunks, held)
        saved = format.restore(
            self._folder,
            like,
            control,
            workers=control.size,
            replicated=not sliced,
            slicing=slicing,
            admits=partial(_check_cuts, cuts, control.size, self._folder),
        )
        if saved is None:
            return None
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, _with_slices(own, state, control.size)), given)
        if saved.workers != control.size:
            mine = jax.tree.map(lambda x, here: here if is_key_data(x) else x, mine, given[1], is_leaf=is_key_data)
        extra = saved.extra.get(OF_USER, saved.extra)  # those of 0.1 have the user's alone
        return Restored(saved.step, unpacked(common), unpacked(mine), extra)


def _check_json(extra: Any) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"jaxmpi.Checkpoints.save: extra: {error}; expected what JSON has: numbers of Python, as float(loss), "
            "strings, lists and dicts"
        ) from error


OF_USER, CHUNKS, CUT, SHARDED = "of user", "chunks", "cut", "sharded"  # in a manifest's extra values


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedState)


def _is_sliced(x: Any, size: int) -> bool:
    """Return True for a `jaxmpi.sharded` state with slices on all ranks."""
    return isinstance(x, ShardedState) and not x.is_dealt and len(x.chunks) == size


def _sliced(tree: PyTree, size: int) -> list[ShardedState]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_sharded) if _is_sliced(x, size)]


def _cuts(shared: PyTree, own: PyTree, size: int) -> dict[str, Any]:
    """The cuts of `jaxmpi.sharded` states in `own`, for the manifest.

    Raises:
        UsageError: one is in the shared tree, of which rank 0's is written; or they are cut in two ways.
    """
    check(not has_ranks_own(shared), "shared: got a state of jaxmpi.sharded, which is each rank's own; give it in own")
    found, orders = [], set()
    for path, state in jax.tree_util.tree_leaves_with_path(own, is_leaf=_is_sharded):
        if not _is_sharded(state):
            continue
        is_sliced, order = _is_sliced(state, size), [int(chunk) for chunk in state.chunks]
        orders |= {tuple(order)} if is_sliced else set()
        whole = [[name, list(shape)] for name, shape in state.whole]
        kept = [] if is_sliced else [size, order, list(state.owners)]  # what must be as it was
        found.append([path_name(path), whole, kept])
    check(len(orders) < 2, "own: got states of jaxmpi.sharded of several strategies; give them to several Checkpoints")
    return {SHARDED: found} | ({CHUNKS: [*orders.pop()], CUT: "entries"} if orders else {})


def _check_cuts(cuts: dict[str, Any], size: int, folder: Path, extra: dict[str, Any], workers: int) -> None:
    """Refuse a checkpoint whose `jaxmpi.sharded` states do not fit this run.

    Raises:
        UsageError: they are of other trees; or are not slices over all ranks, and were cut otherwise.
    """
    there, here = extra.get(SHARDED, []) if OF_USER in extra else [], cuts[SHARDED]
    saved_by = f"{folder}: got states of jaxmpi.sharded, saved by {workers} ranks"
    leaves = [[f"{at}/{name} {shape}" for at, whole, _ in rows for name, shape in whole] for rows in (there, here)]
    got, expected = (next((x for x in a if x not in b), "no other") for a, b in (leaves, leaves[::-1]))
    way_out = (
        "take the same trees, optimizer and gather_wire; in less than 32 bits one rank has another form than several"
    )
    check(leaves[0] == leaves[1], f"{saved_by}, with {got}; expected {expected}: {way_out}")
    places = [[row[0] for row in rows] for rows in (there, here)]
    check(places[0] == places[1], f"{saved_by} at {places[0]}; expected them at {places[1]}: take the same trees")
    # Before 0.2 a row of whole tensors had no owners.
    kept = [
        [row[2][:2] if len(old[2]) == 2 else row[2] for row, old in zip(rows, there, strict=True)]
        for rows in (there, here)
    ]
    way_out = "whole tensors, and slices over a part of the ranks, need as many ranks and the strategy as before"
    check(kept[0] == kept[1], f"{saved_by} as {kept[0]}; expected {kept[1]} on {size}: {way_out}")


def _whole(state: ShardedState) -> PyTree:
    """Shapes of the whole of which a rank has slices."""
    leaves, structure = jax.tree.flatten(packed(state.own))
    shapes = zip(state.whole, leaves, strict=True)
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, x.dtype) for (_, shape), x in shapes])


def _with_slices(own: PyTree, state: TrainState, size: int) -> PyTree:
    """A rank's own tree as read, with slices from their own field."""
    is_sliced, slices = partial(_is_sliced, size=size), iter(state.rule_state)
    put = lambda mine, read: replace(mine, own=next(slices)) if is_sliced(mine) else read  # noqa: E731
    return jax.tree.map(put, own, state.model_state["arrays"], is_leaf=is_sliced)


def _state(step: int, shared: PyTree, own: PyTree, size: int) -> TrainState:
    """A `TrainState` of NumPy arrays; slices of `jaxmpi.sharded` are its `rule_state`."""
    is_sliced = partial(_is_sliced, size=size)
    rest = jax.tree.map(lambda x: () if is_sliced(x) else x, packed(own), is_leaf=is_sliced)
    slices = [state.own for state in _sliced(packed(own), size)]
    common, mine, slices = jax.tree.map(np.asarray, (packed(shared), rest, slices))
    return TrainState(np.array(step, np.int64), common, {"arrays": mine}, slices, np.zeros(0, np.uint32))
