"""A run's state from the newest checkpoint that is whole on all ranks.

Leaves are raw bytes without pickle. They are read only if the manifest and the running model agree on paths, shapes and
dtypes, and used only if their checksums match. On another number of workers a worker's own leaves are the mean of all
workers'. The checkpoint may hold a rule's state otherwise than the run does: whole, or in shards of elements or of
leaves, with masters of the params or without. Then it is put together and resharded.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint.manifests import (
    AGAIN,
    COUNT,
    Damaged,
    check_undamaged,
    checkpoint_folders,
    open_regular,
    read_manifest,
    worker_file,
)
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.sharding import MASTERS, OF_TX, read_whole
from jaxmpi.core.train_state import TrainState

T = TypeVar("T")
RULE_STATE = "rule_state"


class Slicing(NamedTuple):
    """A rule's state on workers: whole, or sharded leaf by leaf (`core.sharding`)."""

    whole: dict[str, Any]  # its leaves or their shapes, by name
    chunks: tuple[int, ...] = ()  # by worker: the number of its shard; none: it is whole
    # (state of the same form, number of the shard, name -> leaf of the whole state) -> the state of that shard
    read_shard: Callable[[PyTree, int, Callable[[str], np.ndarray]], PyTree] | None = None


class Saved(NamedTuple):
    """A restored checkpoint."""

    states: dict[int, TrainState]  # by worker
    step: int
    extra: dict[str, Any]
    workers: int  # that wrote it


def restore(
    folder: Path,
    like: Mapping[int, TrainState],
    processes: Processes,
    *,
    workers: int,
    replicated: bool,
    same_params: bool = True,
    slicing: Slicing | None = None,
    reads_params: bool = True,
    admits: Callable[[dict[str, Any], int], None] = lambda extra, workers: None,
    say: Callable[[str], None] = print,
) -> Saved | None:
    """Read this process's workers from the newest checkpoint whole on all ranks; None if there is no checkpoint.

    Args:
        like: states of the same structure, shapes and dtypes, as the run starts with.
        replicated: the rule's state is equal on all workers.
        same_params: likewise for params.
        slicing: how the rule's state is held now. One that was held otherwise is put together and resharded.
        reads_params: False for a process that needs no params: it gets their shapes. It reads them all the same if
            one of checkpoint and run keeps masters.
        admits: raises UsageError for a checkpoint that is not to be read, by its extra values and number of workers.
        say: receives a line for each damaged checkpoint that is skipped.

    Communicates, raises: see `first_whole`.
    """

    def read_state(path: Path, manifest: dict, worker: int, state: TrainState) -> TrainState:
        if slicing and _is_held_otherwise(manifest, next(iter(like.values())), slicing):
            common, local = halves(state._replace(rule_state=()), False)
            rest = _read_worker(path, _without(manifest, RULE_STATE), worker, workers, common, local)
            return _with_rule_state(rest, state.rule_state, slicing, worker, WholeLeaves(path, manifest))
        return _read_worker(path, manifest, worker, workers, *halves(state, replicated, same_params))

    def read(path: Path) -> Saved:
        manifest = read_manifest(path)
        admits(manifest["extra"], manifest["workers"])
        whole_paths = [f"{RULE_STATE}/{name}" for name in slicing.whole] if slicing else []
        states, is_read = {}, reads_params or _masters_in(whole_paths) or _masters_in(_names(manifest))
        for worker, state in like.items():
            if is_read:
                states[worker] = read_state(path, manifest, worker, state)
            else:
                bare = read_state(path, _without(manifest, "params"), worker, state._replace(params=()))
                states[worker] = bare._replace(params=jax.eval_shape(lambda params: params, state.params))
        return Saved(states, manifest["step"], manifest["extra"], manifest["workers"])

    return first_whole(folder, processes, read, say)


def first_whole(folder: Path, processes: Processes, read: Callable[[Path], T], say: Callable[[str], None]) -> T | None:
    """Return `read` of the newest checkpoint whole on all ranks, or None.

    Args:
        say: receives a line for each damaged checkpoint that is skipped.

    Communicates: a gather of rank 0's list, then one of short texts for each checkpoint that is tried.

    Raises:
        UsageError: it is of another model or optimizer (path, got, expected), or all are damaged (leaf); on all ranks.
    """
    is_first = processes.rank == 0
    names = on_all_ranks(processes, lambda: [path.name for path in checkpoint_folders(folder)] if is_first else [])[0]
    damage: list[str] = []
    for name in reversed(names):
        path, saved, problem = folder / name, None, None  # (is it damaged, the error's text)
        try:
            saved = read(path)
        except OSError as error:
            problem = True, f"{path}: cannot be read: {error}"
        except UsageError as error:
            problem = isinstance(error, Damaged), str(error)
        except (
            Exception
        ) as error:  # what the tree's own classes raise when they are rebuilt; all ranks are to hear of it
            problem = False, f"{path}: cannot be read: {error!r:.400}"
        problems = [(rank, *row) for rank, row in enumerate(processes.allgather_object(problem)) if row]
        if not problems:
            return saved
        for _, is_damage, text in problems:
            check(is_damage, text)
        rank, _, text = problems[0]
        damage.append(f"{text} (read by rank {processes.in_job([rank])[0]})")
        say(f"passed over: {damage[-1]}")
    check(not damage, f"no checkpoint in {folder} is whole:\n  " + "\n  ".join([*damage, AGAIN]))
    return None


def halves(state: TrainState, replicated: bool, same_params: bool = True) -> tuple[PyTree, PyTree]:
    """(fields equal on all workers, which are written once; this worker's own fields), as dicts."""
    equal = ("step", *(("params",) if same_params else ()), *((RULE_STATE,) if replicated else ()))
    fields = state._asdict()
    return {k: fields[k] for k in equal}, {k: v for k, v in fields.items() if k not in equal}


def is_at(name: str, where: str) -> bool:
    """Return True if a path is this field, or below it."""
    return name == where or name.startswith(f"{where}/")


def is_float(leaf: np.ndarray) -> bool:
    """Return True if a leaf holds floating-point numbers, including those of ml_dtypes."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _names(manifest: dict) -> list[str]:
    return [row["path"] for rows in manifest["files"].values() for row in rows]


def _without(manifest: dict, field: str) -> dict:
    """The manifest without the leaves of a field of the state."""
    files = {name: [row for row in rows if not is_at(row["path"], field)] for name, rows in manifest["files"].items()}
    return {**manifest, "files": files}


# ---------------------------------------------------------------- files


def _read_worker(path: Path, manifest: dict, worker: int, workers: int, common: PyTree, local: PyTree) -> TrainState:
    """Read a worker's `halves` from common.bin and its own file.

    For another number of workers its own half is the mean of all files: so batch statistics, moments and the residuals
    of error feedback keep their means. Leaves that are not floats are worker 0's; its random stream is that of `local`.
    """
    fields, count = read_file(path, manifest, "common.bin", common), manifest["workers"]
    if count == workers:
        return TrainState(**fields | read_file(path, manifest, worker_file(worker), local))
    first = read_file(path, manifest, worker_file(0), local)
    total = jax.tree.map(lambda x: x.astype(np.float64) if is_float(x) else x, first)
    for other in range(1, count):
        more = read_file(path, manifest, worker_file(other), local)
        total = jax.tree.map(lambda x, y: x + y if is_float(y) else x, total, more)
    mean = jax.tree.map(lambda x, y: (x / count).astype(y.dtype) if is_float(y) else x, total, first)
    return TrainState(**fields | mean | {"key": local["key"]})


def read_file(path: Path, manifest: dict, name: str, like: PyTree) -> PyTree:
    """Read one file of a checkpoint, in the structure of `like`."""
    index = manifest["files"].get(name)
    check_undamaged(index is not None, f"{path}: no {name} in the manifest")
    return read_leaves(path / name, index, like)


def read_leaves(path: Path, index: list[dict[str, Any]], like: PyTree) -> PyTree:
    """Read leaves in the structure of `like`; sizes are checked first."""
    rows = {row["path"]: row for row in index}
    expected = named_leaves(like)
    unknown = sorted(set(rows) - {name for name, _ in expected})
    check(not unknown, f"{path}: got leaves that this model does not have: {', '.join(unknown[:5])}")
    with open_regular(path) as file:
        leaves = [read_leaf(path, file, name, rows.get(name), leaf) for name, leaf in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_leaf(path: Path, file: BufferedReader, name: str, row: dict[str, Any] | None, like: Any) -> np.ndarray:
    """Read one leaf; raise if its shape, dtype or checksum is wrong."""
    expected = f"{np.dtype(like.dtype)}{list(like.shape)}"
    got = f"{row['dtype']}{row['shape']}" if row else "nothing"
    if row is None or got != expected:
        raise UsageError(
            f"{path}: {name}: got {got:.80}, expected {expected}: it was saved from another model or optimizer"
        )
    size = math.prod(like.shape) * np.dtype(like.dtype).itemsize
    is_there = row["offset"] + size <= os.fstat(file.fileno()).st_size
    check_undamaged(is_there, f"{path}: {name}: the file ends before the leaf does")
    array = np.empty(like.shape, like.dtype)
    raw = array.reshape(-1).view(np.uint8).data
    file.seek(row["offset"])
    check_undamaged(file.readinto(raw) == raw.nbytes, f"{path}: {name}: cannot be read in full")
    check_undamaged(zlib.crc32(raw) == row["crc32"], f"{path}: {name}: damaged, its checksum does not match")
    return array


def leaf_spec(path: Path, file: BufferedReader, row: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """A leaf's shape and dtype by its index entry, without a model.

    Raises:
        Damaged: a dtype that is not numeric, or more bytes than the file holds.
    """
    try:
        dtype = np.dtype(jnp.dtype(row["dtype"]))
    except (TypeError, ValueError):  # unknown dtype
        dtype = np.dtype(object)
    shape = row["shape"]
    is_valid = (dtype.kind in "biufc" or jnp.issubdtype(dtype, jnp.number)) and str(dtype) == row["dtype"]
    # An empty array may have other axes longer than NumPy allows.
    is_valid = is_valid and len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) < COUNT
    size, has = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
    check_undamaged(is_valid and size <= has, f"{path}: {row['path']:.80}: damaged, no such leaf")
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


# ---------------------------------------------------------------- a rule's state, resharded


def _masters_in(names: Iterable[str]) -> str:
    """Path of the field above a rule's masters; empty without masters."""
    fields, names = (RULE_STATE, f"{RULE_STATE}/of_rule"), list(names)  # the second beside an average
    return next((at for at in fields if any(is_at(name, f"{at}/{MASTERS}") for name in names)), "")


def _is_held_otherwise(manifest: dict, like: TrainState, slicing: Slicing) -> bool:
    saved = {row["path"] for row in manifest["files"][worker_file(0) if slicing.chunks else "common.bin"]}
    names = {f"{RULE_STATE}/{name}" for name, _ in named_leaves(like.rule_state)}
    return (
        manifest["extra"].get("cut") == "leaves"
        or tuple(manifest["extra"].get("chunks", ())) != slicing.chunks
        or _masters_in(saved) != _masters_in(names)
        or not names <= saved
    )


class WholeLeaves:
    """Whole leaves of a checkpoint's rule state, however it is held.

    A leaf is whole in one worker's file, whole in all of them, or each file has a shard.
    """

    def __init__(self, path: Path, manifest: dict) -> None:
        chunks = manifest["extra"].get("chunks", [])
        self.names = _names(manifest)
        self._files = [worker_file(worker) for worker in np.argsort(chunks)] if chunks else ["common.bin"]
        self._path = path
        self._rows = {file: {row["path"]: row for row in manifest["files"].get(file, ())} for file in self._files}

    def read(self, name: str, like: Any) -> np.ndarray:
        """Read a leaf by its path, of this shape and dtype."""
        having = [file for file in self._files if name in self._rows[file]] or self._files[:1]
        first = self._rows[having[0]].get(name)
        if len(having) < len(self._files) or (first and tuple(first["shape"]) == tuple(like.shape)):
            return self._read_one(having[0], name, like)
        return read_whole(like, len(self._files), lambda number, s: self._read_one(self._files[number], name, s))

    def _read_one(self, file: str, name: str, like: Any) -> np.ndarray:
        with open_regular(self._path / file) as opened:
            return read_leaf(self._path / file, opened, name, self._rows[file].get(name), like)


def _with_rule_state(state: TrainState, like: PyTree, slicing: Slicing, worker: int, saved: WholeLeaves) -> TrainState:
    """A worker's state with its part of the rule's, like the given shapes.

    If the run has masters and the checkpoint has none, or the other way round, masters are the params.
    """
    wanted = {name: (f"{RULE_STATE}/{name}", leaf) for name, leaf in slicing.whole.items()}
    target, source = _masters_in(path for path, _ in wanted.values()), _masters_in(saved.names)
    params = {f"params/{name}" if name else "params": leaf for name, leaf in named_leaves(state.params)}
    if source and not target:
        masters = [saved.read(name.replace("params", f"{source}/{MASTERS}", 1), leaf) for name, leaf in params.items()]
        state = state._replace(params=jax.tree.unflatten(jax.tree.structure(state.params), masters))

    def get(name: str) -> np.ndarray:
        path, leaf = wanted[name]
        path = _saved_path(path, target, source)
        return params[path] if path in params else saved.read(path, leaf)

    if slicing.read_shard:
        return state._replace(rule_state=slicing.read_shard(like, slicing.chunks[worker], get))
    return state._replace(rule_state=jax.tree.unflatten(jax.tree.structure(like), [get(name) for name in wanted]))


def _saved_path(name: str, target: str, source: str) -> str:
    """A leaf's path in a checkpoint, by its path in a run and by where both have masters."""
    if bool(target) == bool(source):
        return name
    if source:
        return f"{source}/{OF_TX}{name.removeprefix(source)}" if is_at(name, source) else name
    if is_at(name, f"{target}/{MASTERS}"):
        return f"params{name.removeprefix(f'{target}/{MASTERS}')}"
    return f"{target}{name.removeprefix(f'{target}/{OF_TX}')}" if is_at(name, f"{target}/{OF_TX}") else name
