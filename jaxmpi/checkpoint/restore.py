"""A run's state from the newest checkpoint that is whole on all ranks.

Leaves are raw bytes without pickle. They are read only if the manifest and the running model agree on paths, shapes and
dtypes, and used only if their checksums match. On another number of workers a worker's own leaves are the mean of all
workers'. The checkpoint may hold a rule's state otherwise than the run does: whole, or sliced by entries or by leaves,
with masters of the params or without. Then it is put together and resharded.
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

from jaxmpi.checkpoint.manifests import COUNT, Damaged, candidates, open_regular, read_manifest, undamaged, worker_file
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.sharding import MASTERS, OF_TX, read_whole
from jaxmpi.core.train_state import TrainState

T = TypeVar("T")


class Slicing(NamedTuple):
    """A rule's state on workers: whole, or sliced leaf by leaf (`core.sharding`)."""

    whole: dict[str, Any]  # its leaves or their shapes, by name
    chunks: tuple[int, ...] = ()  # by worker: the number of its slice; none: it is whole
    # (state of the same form, number of the slice, name -> leaf of the whole state) -> the state of that slice
    held: Callable[[PyTree, int, Callable[[str], np.ndarray]], PyTree] | None = None


class Saved(NamedTuple):
    """A restored checkpoint."""

    states: dict[int, TrainState]  # by worker
    step: int
    extra: dict[str, Any]
    workers: int  # that wrote it
    step_there: int | None = None  # its step in the run that wrote it, if another run continues that


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
    """Read this process's workers from the newest checkpoint whole on all ranks.

    None if there is no checkpoint.

    Args:
        like: states of the same structure, shapes and dtypes, as the run starts with.
        slicing: how the rule's state is held now. One that was held otherwise is put together and cut anew.
        reads_params: False for a process that needs no params: it gets their shapes. It reads them all the same if
            one of checkpoint and run keeps masters.
        admits: raises UsageError for a checkpoint that is not to be read, by its extra values and number of workers.
        say: receives a line for each damaged checkpoint that is skipped.

    Communicates, raises: see `first_whole`.
    """

    def read(path: Path) -> Saved:
        manifest = read_manifest(path)
        admits(manifest["extra"], manifest["workers"])
        if reads_params or has_masters(manifest, slicing):
            return read_all(path, manifest, like)
        bare = {worker: state._replace(params=()) for worker, state in like.items()}
        saved = read_all(path, drop_field(manifest, "params"), bare)
        shapes = {worker: jax.eval_shape(lambda params: params, state.params) for worker, state in like.items()}
        return saved._replace(
            states={worker: state._replace(params=shapes[worker]) for worker, state in saved.states.items()}
        )

    def read_all(path: Path, manifest: dict, like: Mapping[int, TrainState]) -> Saved:
        if slicing and needs_resharding(manifest, next(iter(like.values())), slicing):
            states = {
                worker: reshard(path, manifest, worker, state, slicing, workers) for worker, state in like.items()
            }
            return Saved(states, manifest["step"], manifest["extra"], manifest["workers"])
        halved = {worker: halves(state, replicated, same_params) for worker, state in like.items()}
        states = {worker: read_worker(path, manifest, worker, workers, *parts) for worker, parts in halved.items()}
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
    names = on_all_ranks(processes, lambda: [path.name for path in candidates(folder)] if is_first else [])[0]
    damage: list[str] = []
    for name in reversed(names):
        saved, problem = try_read(folder / name, read)
        told = enumerate(processes.allgather_object(problem))
        problems = [(processes.in_job([rank])[0], *row) for rank, row in told if row]
        if not problems:
            return saved
        others = [text for _, is_damage, text in problems if not is_damage]
        check(not others, others[0] if others else "")
        rank, _, text = problems[0]
        damage.append(f"{text} (read by rank {rank})")
        say(f"passed over: {damage[-1]}")
    check(not damage, f"no checkpoint in {folder} is whole:\n  " + "\n  ".join([*damage, AGAIN]))
    return None


AGAIN = "bring them back, or begin again at step 0 with --from-start in place of --resume, which keeps what is there"


def try_read(path: Path, read: Callable[[Path], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """Read a checkpoint; return (it, None) or (None, (is damaged, error text))."""
    try:
        return read(path), None
    except OSError as error:
        return None, (True, f"{path}: cannot be read: {error}")
    except UsageError as error:
        return None, (isinstance(error, Damaged), str(error))
    except Exception as error:  # what the tree's own classes raise when they are rebuilt; all ranks are to hear of it
        return None, (False, f"{path}: cannot be read: {error!r:.400}")


def halves(state: TrainState, replicated: bool, same_params: bool = True) -> tuple[PyTree, PyTree]:
    """(fields equal on all workers, this worker's own fields), as dicts."""
    fields, equal = state._asdict(), equal_fields(replicated, same_params)
    return {k: fields[k] for k in equal}, {k: v for k, v in fields.items() if k not in equal}


def equal_fields(replicated: bool, same_params: bool = True) -> tuple[str, ...]:
    """Fields that are equal on all workers, and so are written once."""
    return ("step", *(("params",) if same_params else ()), *(("rule_state",) if replicated else ()))


def is_at(name: str, where: str) -> bool:
    """Return True if a path is this field, or below it."""
    return name == where or name.startswith(f"{where}/")


def read_worker(path: Path, manifest: dict, worker: int, workers: int, common: PyTree, own: PyTree) -> TrainState:
    """Read a worker's `halves` from common.bin and its own file.

    For another number of workers its own half is the mean of all files; its random stream is that of `own`.
    """
    fields = read_file(path, manifest, "common.bin", common)
    if manifest["workers"] == workers:
        return TrainState(**fields | read_file(path, manifest, worker_file(worker), own))
    return TrainState(**fields | read_mean_over_workers(path, manifest, own) | {"key": own["key"]})


def read_mean_over_workers(path: Path, manifest: dict, own: PyTree) -> PyTree:
    """Read the mean of workers' own files.

    So batch statistics, moments and the residuals of error feedback keep their means over workers. Leaves that are not
    floats are worker 0's.
    """
    count = manifest["workers"]
    first = read_file(path, manifest, worker_file(0), own)
    total = jax.tree.map(lambda x: x.astype(np.float64) if is_float(x) else x, first)
    for other in range(1, count):
        more = read_file(path, manifest, worker_file(other), own)
        total = jax.tree.map(lambda x, y: x + y if is_float(y) else x, total, more)
    return jax.tree.map(lambda x, y: (x / count).astype(y.dtype) if is_float(y) else x, total, first)


def is_float(leaf: np.ndarray) -> bool:
    """Return True if a leaf holds floating-point numbers, including those of ml_dtypes."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def read_file(path: Path, manifest: dict, name: str, like: PyTree) -> PyTree:
    """Read one file of a checkpoint, in the structure of `like`."""
    index = manifest["files"].get(name)
    undamaged(index is not None, f"{path}: no {name} in the manifest")
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
    size = math.prod(shape) * dtype.itemsize
    known = (dtype.kind in "biufc" or jnp.issubdtype(dtype, jnp.number)) and str(dtype) == row["dtype"]
    # An empty array may have other axes longer than NumPy allows.
    known = known and len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) < COUNT
    undamaged(known and size <= os.fstat(file.fileno()).st_size, f"{path}: {row['path']:.80}: damaged, no such leaf")
    return jax.ShapeDtypeStruct(tuple(row["shape"]), dtype)


def read_leaf(path: Path, file: BufferedReader, name: str, row: dict[str, Any] | None, like: Any) -> np.ndarray:
    """Read one leaf; raise if its shape, dtype or checksum is wrong."""
    expected = f"{np.dtype(like.dtype)}{list(like.shape)}"
    got = f"{row['dtype']}{row['shape']}" if row else "nothing"
    if row is None or got != expected:
        raise UsageError(
            f"{path}: {name}: got {got:.80}, expected {expected}: it was saved from another model or optimizer"
        )
    size = math.prod(like.shape) * np.dtype(like.dtype).itemsize
    whole = row["offset"] + size <= os.fstat(file.fileno()).st_size
    undamaged(whole, f"{path}: {name}: the file ends before the leaf does")
    array = np.empty(like.shape, like.dtype)
    raw = array.reshape(-1).view(np.uint8).data
    file.seek(row["offset"])
    undamaged(file.readinto(raw) == raw.nbytes, f"{path}: {name}: cannot be read in full")
    undamaged(zlib.crc32(raw) == row["crc32"], f"{path}: {name}: damaged, its checksum does not match")
    return array


RULE_STATE = "rule_state"


def masters_in(names: Iterable[str]) -> str:
    """Path of the field above a rule's masters; empty without masters."""
    fields = (RULE_STATE, f"{RULE_STATE}/of_rule")  # the second beside an average
    names = list(names)
    return next((at for at in fields if any(is_at(name, f"{at}/{MASTERS}") for name in names)), "")


def path_in_checkpoint(name: str, here: str, there: str) -> str:
    """A leaf's path in a checkpoint, by its path in a run."""
    if bool(here) == bool(there):
        return name
    if there:
        at = there
        return f"{at}/{OF_TX}{name.removeprefix(at)}" if is_at(name, at) else name
    if is_at(name, f"{here}/{MASTERS}"):
        return f"params{name.removeprefix(f'{here}/{MASTERS}')}"
    return f"{here}{name.removeprefix(f'{here}/{OF_TX}')}" if is_at(name, f"{here}/{OF_TX}") else name


def needs_resharding(manifest: dict, like: TrainState, slicing: Slicing) -> bool:
    """Return True if checkpoint and run hold the rule's state differently."""
    by_leaves = manifest["extra"].get("cut") == "leaves"
    own = {row["path"] for row in manifest["files"][worker_file(0) if slicing.chunks else "common.bin"]}
    names = {f"{RULE_STATE}/{name}" for name, _ in named_leaves(like.rule_state)}
    return (
        by_leaves
        or tuple(manifest["extra"].get("chunks", ())) != slicing.chunks
        or masters_in(own) != masters_in(names)
        or not names <= own
    )


def reshard(path: Path, manifest: dict, worker: int, like: TrainState, slicing: Slicing, workers: int) -> TrainState:
    """Read a worker's state; recut the rule's part from the checkpoint's form.

    All else is as in `read_worker`.
    """
    common, own = halves(like._replace(rule_state=()), False)
    state = read_worker(path, drop_field(manifest, RULE_STATE), worker, workers, common, own)
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
    whole = {name: (path_in_checkpoint(name, here, there), leaf) for name, leaf in named}
    if slicing.held:
        get = lambda name: found(*whole[f"{RULE_STATE}/{name}"])  # noqa: E731
        return state._replace(rule_state=slicing.held(like, slicing.chunks[worker], get))
    leaves = [found(*each) for each in whole.values()]
    return state._replace(rule_state=jax.tree.unflatten(jax.tree.structure(like), leaves))


def drop_field(manifest: dict, field: str) -> dict:
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
        self.files = [worker_file(worker) for worker in np.argsort(chunks)] if chunks else ["common.bin"]
        self.path = path
        self.rows = {file: {row["path"]: row for row in manifest["files"].get(file, ())} for file in self.files}

    def read(self, name: str, like: Any) -> np.ndarray:
        """Read a leaf by its path, of this shape and dtype."""
        having = [file for file in self.files if name in self.rows[file]] or self.files[:1]
        first = self.rows[having[0]].get(name)
        if len(having) < len(self.files) or (first and tuple(first["shape"]) == tuple(like.shape)):
            return self._read_one(having[0], name, like)
        return read_whole(like, len(self.files), lambda slot, s: self._read_one(self.files[slot], name, s))

    def _read_one(self, file: str, name: str, like: Any) -> np.ndarray:
        with open_regular(self.path / file) as opened:
            return read_leaf(self.path / file, opened, name, self.rows[file].get(name), like)
