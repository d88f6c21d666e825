"""Params and model state to and from Orbax, for other programs.

Orbax is a dependency of Flax. No run is resumed from its folders. A folder holds `{"params": ..., "model_state": ...}`,
nested dicts of arrays. A trained model needs no more to give the logits of the run's evaluation. It gives them in the
library in which it was written (docs/models.md). `--params` also takes a folder of bare params, as other programs write
them.

Orbax keeps no checksums and lets shapes of NumPy leaves differ. So `leaves` reads and checks a run's checkpoint, and
every imported leaf is checked here.
"""

import math
import os
import shutil
import stat
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from optax.contrib import schedule_free_eval_params

from jaxmpi.checkpoint.leaves import described, is_at, is_float, read_leaf
from jaxmpi.checkpoint.manifests import Damaged, open_regular, read_manifest, undamaged
from jaxmpi.checkpoint.recut import WholeLeaves
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, mismatches, named_leaves

WAY_OUT = "name a folder that `jaxmpi export` has written"
ANOTHER_MODEL = (
    "give the model the names, sizes and dtypes that it was trained with (config.json of the run has its experiment), "
    "or take the params of another run"
)
SEPARATOR = "/"  # between a leaf's names, as in params/conv1/kernel
CENTERS = ("center", "rule_state/center", "rule_state/average")  # asynchronous rules', easgd_sync's, optim.ema
SCHEDULE_FREE = ("b1", "weight_sum", "step_count", "max_lr")  # leaves of Optax's ScheduleFreeState beside z


def export(tree: PyTree, folder: Path) -> None:
    """Write nested dicts of arrays as an Orbax folder.

    The folder gets its name only when it is whole. If it cannot be written, nothing remains.

    Raises:
        UsageError: the folder exists or cannot be written.
    """
    try:
        check(not os.path.lexists(folder), f"{folder} exists; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(tree, folder)
    except UsageError:
        raise
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        text = str(error) if isinstance(error, OSError) else f"{error!s:.400}".splitlines()[0]
        raise UsageError(
            f"{folder}: cannot be written: {text}; nothing of it is left: name another folder, or make room"
        ) from error


def write(tree: PyTree, folder: Path) -> None:
    """Write a tree beside the folder, then rename it."""
    import orbax.checkpoint as ocp  # seconds to import

    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        # Not StandardCheckpointer: it writes in a thread, and blocks forever if that cannot make the folder.
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(aside.absolute() / "model", args=ocp.args.StandardSave(tree))  # pyright: ignore[reportCallIssue]
        (aside / "model").rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def model_of(path: Path) -> dict[str, np.ndarray]:
    """Params and model state of a checkpoint, by path, as evaluated.

    Params are the center or the average, if the rule or its optimizer has one, else the workers' mean. In the model
    state, floating-point leaves are the workers' mean and others worker 0's. Under asynchronous rules worker 0
    evaluates, so all of it is worker 0's. Sizes are bounded by those of the files.

    Raises:
        UsageError: it is damaged, or a leaf's dtype is not known.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    centers = ((where, name) for where in CENTERS for name in files if rows_below(files[name], where))
    where, name = next(centers, ("params", ""))
    if name and name != "common.bin" and manifest["extra"].get("chunks"):
        params = whole_average(path, manifest, where)
    else:
        params = leaves_of(path, name, files[name], where) if name else averages_of(path, files)
    first = {name: files[name] for name in sorted(files) if rows_below(files[name], "model_state")}
    if where == "center":
        first = dict([*first.items()][:1])
    state = mean_of(path, first, "model_state")
    return {f"params{rest}": leaf for rest, leaf in params.items()} | {
        f"model_state{rest}": leaf for rest, leaf in state.items()
    }


def whole_average(path: Path, manifest: dict[str, Any], where: str) -> dict[str, np.ndarray]:
    """The average of params, put together from the workers' shares."""
    with open_regular(path / "common.bin") as file:
        rows = rows_below(manifest["files"]["common.bin"], "params")
        likes = {row["path"].removeprefix("params"): described(path, file, row) for row in rows}
    leaves = WholeLeaves(path, manifest)
    return {rest: leaves.read(where + rest, like) for rest, like in likes.items()}


def averages_of(path: Path, files: dict[str, list[dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Mean of the workers' params, with schedule-free y replaced by x.

    Raises:
        Damaged: its z are not of these params.
    """
    params = mean_of(path, files, "params")
    kept: dict[str, str] = {}  # where in the state, by the first file that has it
    for name, rows in files.items():
        names = {row["path"] for row in rows}
        for where in (full.removesuffix("/b1") for full in names if full.endswith("/b1")):
            if {f"{where}/{field}" for field in SCHEDULE_FREE} <= names:
                kept.setdefault(where, name)
    for where, name in kept.items():
        [b1] = leaves_of(path, name, files[name], f"{where}/b1").values()
        z = leaves_of(path, name, files[name], f"{where}/z")
        fits = all(leaf in params and params[leaf].shape == z[leaf].shape for leaf in z) and not b1.shape
        undamaged(fits, f"{path / name}: damaged, {where}/z is not of these params")
        state: Any = SimpleNamespace(b1=b1, z=z)  # all fields of Optax's class that it looks at
        x = schedule_free_eval_params(state, {leaf: params[leaf] for leaf in z})
        params |= {leaf: value.astype(params[leaf].dtype) for leaf, value in x.items()}
    return params


def rows_below(rows: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Entries of an index with leaves in this field of the state."""
    return [row for row in rows if is_at(row["path"], where)]


def mean_of(path: Path, files: dict[str, list[dict[str, Any]]], where: str) -> dict[str, np.ndarray]:
    """Mean of floating-point leaves below `where` over files; others are the first's."""
    each = [leaves_of(path, name, rows, where) for name, rows in files.items() if rows_below(rows, where)]
    if len(each) < 2:
        return each[0] if each else {}
    mean = dict(each[0])
    for name, leaf in mean.items():
        if is_float(leaf):
            total = sum((other[name] for other in each), np.zeros(leaf.shape))  # float64
            mean[name] = (total / len(each)).astype(leaf.dtype)
    return mean


def leaves_of(path: Path, name: str, rows: list[dict[str, Any]], where: str) -> dict[str, np.ndarray]:
    """A file's leaves below `where`, by the rest of their paths.

    Raises:
        Damaged: leaves overlap or have the same name, or one is damaged.
    """
    rows = rows_below(rows, where)
    with open_regular(path / name) as file:
        likes = {row["path"]: described(path / name, file, row) for row in rows}
        size = sum(math.prod(like.shape) * like.dtype.itemsize for like in likes.values())
        is_whole = len(likes) == len(rows) and size <= os.fstat(file.fileno()).st_size
        undamaged(is_whole, f"{path / name}: damaged, leaves lie over each other")
        read = partial(read_leaf, path / name, file)
        leaves = {row["path"]: read(row["path"], row, likes[row["path"]]) for row in rows}
    return {path.removeprefix(where): leaf for path, leaf in leaves.items()}


def nested(leaves: dict[str, np.ndarray]) -> PyTree:
    """Turn paths into nested dicts; an escaped slash stays in its name."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = [part.replace("\0", SEPARATOR) for part in path.replace("\\/", "\0").split(SEPARATOR)]
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
            check(isinstance(place, dict), f"{path}: both a leaf and a node of the tree")
        place[last] = leaf
    return tree


class Loaded(NamedTuple):
    """Params and model state that a run begins with."""

    params: PyTree
    model_state: PyTree
    has_state: bool  # the folder held the model state; else it is the model's own


def load(folder: Path, params: PyTree, model_state: PyTree) -> Loaded:
    """Params and model state from an Orbax folder, structured as those given.

    Args:
        params: their leaves have the shapes and dtypes that the folder's must have.
        model_state: likewise; what the run begins with if the folder holds bare params.

    Raises:
        UsageError: it cannot be read, or a leaf is absent, of another shape or type, or unknown: path, got, expected.
    """
    import orbax.checkpoint as ocp

    check(folder.is_dir(), f"no folder {str(folder)!r}; name one that `jaxmpi export` or Orbax has written")
    refuse_ways_out(folder)
    try:
        with ocp.StandardCheckpointer() as reader:
            told = reader.metadata(folder.absolute())
            sizes = getattr(told, "item_metadata", told)
            has_state = not is_bare(sizes, params)
            like = {"params": params, "model_state": model_state} if has_state else params
            check_leaves(folder, sizes, like)
            check_chunks(folder, sizes)
            tree = reader.restore(folder.absolute())
    except (UsageError, Damaged):
        raise
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        raise UsageError(f"{folder}: cannot be read: {error!s:.400}; {WAY_OUT}") from error
    check_leaves(folder, tree, like)
    leaves = dict(named_leaves(tree))
    got = jax.tree.unflatten(jax.tree.structure(like), [np.asarray(leaves[name]) for name, _ in named_leaves(like)])
    return Loaded(got["params"], got["model_state"], True) if has_state else Loaded(got, model_state, False)


def read(folder: Path) -> PyTree:
    """Nested dicts of an Orbax folder's arrays, bare params as `params`.

    Raises:
        UsageError: it cannot be read.
    """
    import orbax.checkpoint as ocp

    refuse_ways_out(folder)
    try:
        with ocp.StandardCheckpointer() as reader:
            check_chunks(folder, getattr(sizes := reader.metadata(folder.absolute()), "item_metadata", sizes))
            tree = jax.tree.map(np.asarray, reader.restore(folder.absolute()))
    except UsageError:
        raise
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        raise UsageError(f"{folder}: cannot be read: {error!s:.400}; {WAY_OUT}") from error
    return tree if isinstance(tree, dict) and tree.keys() <= {"params", "model_state"} else {"params": tree}


def is_bare(tree: PyTree, params: PyTree) -> bool:
    """Return True if a folder's tree holds bare params, without model state."""
    got, bare = ({name for name, _ in named_leaves(part)} for part in (tree, params))
    return got == bare or not {name.split(SEPARATOR)[0] for name in got} <= {"params", "model_state"}


def refuse_ways_out(folder: Path) -> None:
    """Raise `UsageError` unless a folder holds only regular files and folders."""
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            mode = os.lstat(os.path.join(path, name)).st_mode
            holds = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            check(holds, f"{path}/{name}: got something other than a regular file or a folder; {WAY_OUT}")


def check_chunks(folder: Path, sizes: PyTree) -> None:
    """Raise `UsageError` if a chunk, read whole, is larger than its leaf."""
    for name, leaf in named_leaves(sizes):
        storage = getattr(leaf, "storage", None)
        for shape in (getattr(storage, "chunk_shape", None), getattr(storage, "write_shape", None)):
            holds = shape is None or math.prod(shape) <= max(1, math.prod(leaf.shape))
            text = f"got chunks of {[*(shape or ())]}, expected {[*leaf.shape]} at most"
            check(holds, f"{folder}: {name}: {text}; {WAY_OUT}")


def check_leaves(source: Path, tree: PyTree, like: PyTree) -> None:
    """Raise `UsageError` if read or unread leaves differ from those of `like`."""
    lines = mismatches(dict(named_leaves(tree)), dict(named_leaves(like)))
    check(not lines, "\n  ".join([f"{source} is not of this model:", *lines, ANOTHER_MODEL]))
