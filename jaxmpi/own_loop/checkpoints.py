"""Checkpoints of a loop's own trees, in the trainer's format.

A checkpoint is atomic and checksummed, and can be restored on any number of ranks.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import jax
import numpy as np

from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.checkpoint import format
from jaxmpi.checkpoint.manager import not_finite, of_step
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import Processes, SoloProcesses
from jaxmpi.comm.mpi import MpiComm, communicator
from jaxmpi.core.deals import Leaves
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

    def __init__(
        self, folder: str | Path, keep: int = 2, *, check_finite: bool = True, comm: Comm | None = None
    ) -> None:
        """Name a folder; nothing is read or written.

        Args:
            folder: that all ranks see.
            keep: how many of the newest stay, >= 1.
            check_finite: refuse to save trees with NaN or infinite numbers. False for trees to which such belong, as
                `best = inf` of a loop that has seen no loss yet.
            comm: whose ranks save and restore together: `jaxmpi.world()`, or a part of it, with a folder of its own.
        """
        check(keep >= 1, f"jaxmpi.Checkpoints: keep: got {keep}; expected >= 1, as keep=1_000_000 to keep all")
        self._folder, self._keep, self._check_finite, self._comm = Path(folder), keep, check_finite, comm

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
        control, number = self._processes(), int(step)
        check(number >= 0, f"jaxmpi.Checkpoints.save: step: got {number}; expected >= 0")
        _check_json(extra)
        cuts, shares = _cuts(shared, own, control.size), _shares(own, control.size)
        state = _state(number, shared, own, [share.saved(control.rank) for share in shares], control.size)
        files = format.files_of({control.rank: state}, replicated=not shares)
        told = control.allgather_object(self._problem(files, number, control.rank))
        if problems := [text for text in told if text]:
            raise AgreedError(problems[0])
        facts = {"step": number, "workers": control.size, "extra": {OF_USER: extra or {}, **cuts}}
        return format.save(self._folder, files, control, **facts, keep=format.Retention(self._keep), agrees=True)

    def _processes(self) -> Processes:
        comm = communicator(self._comm)
        return comm.processes if isinstance(comm, MpiComm) else SoloProcesses()

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
                `jaxmpi.sharded` are of another optimizer or `gather_wire`, or of a part of these ranks and cut
                otherwise than here.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = self._processes()
        size, shares, cuts = control.size, _shares(own, control.size), _cuts(shared, own, control.size)
        like = {control.rank: _state(0, shared, own, [packed(share.own) for share in shares], size)}
        slicing = None
        if shares:
            leaves = [(f"{i}/{name}", *leaf) for i, share in enumerate(shares) for name, *leaf in share.whole]
            whole = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in leaves}

            def held(mine: PyTree, chunk: int, read: Callable[[str], np.ndarray]) -> PyTree:
                return [x.restored(control.rank, lambda name, i=i: read(f"{i}/{name}")) for i, x in enumerate(shares)]

            slicing = format.Slicing(whole, tuple(cuts[CHUNKS]), held)
        saved = format.restore(
            self._folder,
            like,
            control,
            workers=size,
            replicated=not shares,
            slicing=slicing,
            admits=partial(_check_cuts, cuts, size, self._folder),
        )
        if saved is None:
            return None
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, _with_shares(own, state, size)), given)
        if saved.workers != size:
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


def _is_share(x: Any, size: int) -> bool:
    """Return True for a `jaxmpi.sharded` state over all ranks."""
    return isinstance(x, ShardedState) and len(x.chunks) == size


def _shares(tree: PyTree, size: int) -> list[ShardedState]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_sharded) if _is_share(x, size)]


def _cuts(shared: PyTree, own: PyTree, size: int) -> dict[str, Any]:
    """The cuts of `jaxmpi.sharded` states in `own`, for the manifest.

    Raises:
        UsageError: one is in the shared tree, of which rank 0's is written; or they are cut in two ways.
    """
    check(not has_ranks_own(shared), "shared: got a state of jaxmpi.sharded, which is each rank's own; give it in own")
    found, orders, shares = [], set(), _shares(own, size)
    for path, state in jax.tree_util.tree_leaves_with_path(own, is_leaf=_is_sharded):
        if not _is_sharded(state):
            continue
        whole = [[name, list(shape), dtype] for name, shape, dtype in state.whole]
        kept = [] if _is_share(state, size) else [len(state.chunks), *state.chunks]  # what must be as it was
        found.append([path_name(path), whole, kept])
    orders = {state.chunks for state in shares if isinstance(state.cut, Entries)}
    check(len(orders) < 2, "own: got states of jaxmpi.sharded of several strategies; give them to several Checkpoints")
    if not shares:
        return {SHARDED: found}
    # Whole tensors are found by their names, in whichever file they are.
    has_tensors = any(isinstance(state.cut, Leaves) for state in shares)
    order = orders.pop() if orders else range(size)
    return {SHARDED: found, CHUNKS: [*map(int, order)], CUT: "leaves" if has_tensors else "entries"}


def _check_cuts(cuts: dict[str, Any], size: int, folder: Path, extra: dict[str, Any], workers: int) -> None:
    """Refuse a checkpoint whose `jaxmpi.sharded` states do not fit this run.

    Raises:
        UsageError: they are of other trees; or are shares of a part of the ranks, and were cut otherwise.
    """
    there, here = extra.get(SHARDED, []) if OF_USER in extra else [], cuts[SHARDED]
    saved_by = f"{folder}: got states of jaxmpi.sharded, saved by {workers} ranks"
    leaves = [
        [f"{at}/{name} {dtype}{s}" for at, whole, _ in rows for name, s, dtype in whole] for rows in (there, here)
    ]
    got, expected = (next((x for x in a if x not in b), "no other") for a, b in (leaves, leaves[::-1]))
    way_out = "take the same trees, optimizer and gather_wire"
    check(leaves[0] == leaves[1], f"{saved_by}, with {got}; expected {expected}: {way_out}")
    places = [[row[0] for row in rows] for rows in (there, here)]
    check(places[0] == places[1], f"{saved_by} at {places[0]}; expected them at {places[1]}: take the same trees")
    kept = [[row[2] for row in rows] for rows in (there, here)]
    way_out = "shares of a part of the ranks need Checkpoints(folder, comm=that part), with a folder for each part"
    check(kept[0] == kept[1], f"{saved_by} as {kept[0]}; expected {kept[1]} on {size}: {way_out}")


def _with_shares(own: PyTree, state: TrainState, size: int) -> PyTree:
    """A rank's own tree as read, with shares from their own field."""
    is_share, shares = partial(_is_share, size=size), iter(state.rule_state)
    put = lambda mine, read: replace(mine, own=next(shares)) if is_share(mine) else read  # noqa: E731
    return jax.tree.map(put, own, state.model_state["arrays"], is_leaf=is_share)


def _state(step: int, shared: PyTree, own: PyTree, shares: list[PyTree], size: int) -> TrainState:
    """A `TrainState` of NumPy arrays; shares of `jaxmpi.sharded` are its `rule_state`."""
    is_share = partial(_is_share, size=size)
    rest = jax.tree.map(lambda x: () if is_share(x) else x, packed(own), is_leaf=is_share)
    common, mine, shares = jax.tree.map(np.asarray, (packed(shared), rest, shares))
    return TrainState(np.array(step, np.int64), common, {"arrays": mine}, shares, np.zeros(0, np.uint32))
