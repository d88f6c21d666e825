"""A rule's state cut anew, for a run that holds it otherwise.

A checkpoint has it whole, or in slices that are cut by entries or by leaves. It has masters of the params, or none.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.checkpoint.leaves import halves, is_at, read_leaf, worker_of
from jaxmpi.checkpoint.manifests import open_regular, own_file
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.slices import MASTERS, OF_TX, whole_of_slices
from jaxmpi.core.train_state import TrainState

RULE_STATE = "rule_state"


class Slicing(NamedTuple):
    """A rule's state on workers: whole, or sliced leaf by leaf (`core.slices`)."""

    whole: dict[str, Any]  # its leaves or their shapes, by name
    chunks: tuple[int, ...] = ()  # by worker: the number of its slice; none: it is whole
    # (state of the same form, number of the slice, name -> leaf of the whole state) -> the state of that slice
    held: Callable[[PyTree, int, Callable[[str], np.ndarray]], PyTree] | None = None


def masters_in(names: Iterable[str]) -> str:
    """Path of the field above a rule's masters; empty without masters."""
    fields = (RULE_STATE, f"{RULE_STATE}/of_rule")  # the second beside an average
    names = list(names)
    return next((at for at in fields if any(is_at(name, f"{at}/{MASTERS}") for name in names)), "")


def renamed(name: str, here: str, there: str) -> str:
    """A leaf's path in a checkpoint, by its path in a run."""
    if bool(here) == bool(there):
        return name
    if there:
        at = there
        return f"{at}/{OF_TX}{name.removeprefix(at)}" if is_at(name, at) else name
    if is_at(name, f"{here}/{MASTERS}"):
        return f"params{name.removeprefix(f'{here}/{MASTERS}')}"
    return f"{here}{name.removeprefix(f'{here}/{OF_TX}')}" if is_at(name, f"{here}/{OF_TX}") else name


def is_cut_otherwise(manifest: dict, like: TrainState, slicing: Slicing) -> bool:
    """Return True if checkpoint and run hold the rule's state differently."""
    by_leaves = manifest["extra"].get("cut") == "leaves"
    own = {row["path"] for row in manifest["files"][own_file(0) if slicing.chunks else "common.bin"]}
    names = {f"{RULE_STATE}/{name}" for name, _ in named_leaves(like.rule_state)}
    return (
        by_leaves
        or tuple(manifest["extra"].get("chunks", ())) != slicing.chunks
        or masters_in(own) != masters_in(names)
        or not names <= own
    )


def cut_anew(path: Path, manifest: dict, worker: int, like: TrainState, slicing: Slicing, workers: int) -> TrainState:
    """Read a worker's state; recut the rule's part from the checkpoint's form.

    All else is as in `worker_of`.
    """
    common, own = halves(like._replace(rule_state=()), False)
    state = worker_of(path, without(manifest, RULE_STATE), worker, workers, common, own)
    names = (row["path"] for rows in manifest["files"].values() for row in rows)
    return with_rule_state(state, like.rule_state, slicing, worker, names, WholeLeaves(path, manifest).read)


def with_rule_state(
    state: TrainState,
    like: PyTree,
    slicing: Slicing,
    worker: int,
    names: Iterable[str],
    read: Callable[[str, Any], np.ndarray],
) -> TrainState:
    """A worker's state with its part of the rule's, from whole leaves.

    If the run has masters and these leaves have none, or the other way round, masters are the params.

    Args:
        like: shapes of its part.
        names: of all leaves there are.
        read: (name, shape) -> a whole leaf.
    """
    named = [(f"{RULE_STATE}/{name}", leaf) for name, leaf in slicing.whole.items()]
    here = masters_in(name for name, _ in named)
    there = masters_in(names)
    params = {f"params/{name}" if name else "params": leaf for name, leaf in named_leaves(state.params)}

    def found(name: str, leaf: Any) -> np.ndarray:
        return params[name] if name in params else read(name, leaf)

    if there and not here:
        places = [name.replace("params", f"{there}/{MASTERS}", 1) for name in params]
        masters = [read(*each) for each in zip(places, params.values(), strict=True)]
        state = state._replace(params=jax.tree.unflatten(jax.tree.structure(state.params), masters))
    whole = {name: (renamed(name, here, there), leaf) for name, leaf in named}
    if slicing.held:
        get = lambda name: found(*whole[f"{RULE_STATE}/{name}"])  # noqa: E731
        return state._replace(rule_state=slicing.held(like, slicing.chunks[worker], get))
    leaves = [found(*each) for each in whole.values()]
    return state._replace(rule_state=jax.tree.unflatten(jax.tree.structure(like), leaves))


def without(manifest: dict, field: str) -> dict:
    """The manifest without the leaves of a field of the state."""
    files = {name: [row for row in rows if not is_at(row["path"], field)] for name, rows in manifest["files"].items()}
    return {**manifest, "files": files}


def has_masters(manifest: dict, slicing: Slicing | None) -> bool:
    """Return True if the checkpoint or the run keeps masters.

    Then params are made of masters, or masters of params.
    """
    here = [f"{RULE_STATE}/{name}" for name in slicing.whole] if slicing else []
    there = [row["path"] for rows in manifest["files"].values() for row in rows]
    return bool(masters_in(here) or masters_in(there))


class WholeLeaves:
    """Whole leaves of a checkpoint's rule state, however it is held.

    A leaf is whole in one worker's file, whole in all of them, or each file has a slice.
    """

    def __init__(self, path: Path, manifest: dict) -> None:
        """Take the files in the order of their slices."""
        chunks = manifest["extra"].get("chunks", [])
        self.files = [own_file(worker) for worker in np.argsort(chunks)] if chunks else ["common.bin"]
        self.path = path
        self.rows = {file: {row["path"]: row for row in manifest["files"].get(file, ())} for file in self.files}

    def read(self, name: str, like: Any) -> np.ndarray:
        """Read a leaf by its path, of this shape and dtype."""
        having = [file for file in self.files if name in self.rows[file]] or self.files[:1]
        first = self.rows[having[0]].get(name)
        if len(having) < len(self.files) or (first and tuple(first["shape"]) == tuple(like.shape)):
            return self._read_one(having[0], name, like)
        return whole_of_slices(like, len(self.files), lambda slot, s: self._read_one(self.files[slot], name, s))

    def _read_one(self, file: str, name: str, like: Any) -> np.ndarray:
        with open_regular(self.path / file) as opened:
            return read_leaf(self.path / file, opened, name, self.rows[file].get(name), like)
