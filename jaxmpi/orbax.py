"""Params to and from Orbax, which Flax brings along: for other programs, never for going on with a run.

    jaxmpi export RUN_DIR FOLDER [--step K]                      params of a checkpoint as an Orbax folder
    python -m jaxmpi.train EXPERIMENT.py --params FOLDER         begin a run with params from one

Orbax keeps no checksums and lets shapes of NumPy leaves differ, so a checkpoint of a run is read and checked by
checkpoint.py, and every leaf that comes in is checked here.
"""

import argparse
import math
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi import checkpoint
from jaxmpi.checkpoint import Damaged, read_manifest
from jaxmpi.config import UsageError, check
from jaxmpi.processes import named_leaves

PyTree = Any
SEPARATOR = "/"  # between a leaf's names, as in params/conv1/kernel
CENTERS = ("center", "rule_state/center")  # of asynchronous rules, of easgd_sync


def export(run_dir: Path, folder: Path, step: int | None = None) -> int:
    """Write the params of a checkpoint as an Orbax folder of nested dicts; the step.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or the folder exists.
    """
    import orbax.checkpoint as ocp  # seconds to import

    kept = {checkpoint.step_of(path): path for path in checkpoint.found(run_dir / "checkpoints")}
    check(bool(kept), f"{run_dir}: no checkpoint; name a run directory")
    step = max(kept) if step is None else step
    check(step in kept, f"--step: got {step}; there are {', '.join(map(str, kept))}")
    check(not folder.exists(), f"{folder} exists; name a new folder")
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.absolute(), nested(params_of(kept[step])))
    return step


def params_of(path: Path) -> dict[str, np.ndarray]:
    """Params of a checkpoint by path: the center, or else the workers' params, the mean where they have their own.

    Their sizes are bounded by the file's.

    Raises:
        UsageError: it is damaged, or a leaf's type is not known.
    """
    files = read_manifest(path)["files"]
    for where in CENTERS:
        for name, rows in files.items():
            if held := [row for row in rows if row["path"].startswith(where + SEPARATOR)]:
                return leaves_of(path, name, held, where)
    named = {name: [row for row in rows if row["path"].startswith("params")] for name, rows in files.items()}
    first, *others = [leaves_of(path, name, rows, "params") for name, rows in named.items() if rows] or [{}]
    if not others:
        return first
    sums = {name: sum((more[name] for more in others), leaf.astype(np.float64)) for name, leaf in first.items()}
    return {name: (sums[name] / (1 + len(others))).astype(leaf.dtype) for name, leaf in first.items()}


def leaves_of(path: Path, name: str, rows: list[dict[str, Any]], where: str) -> dict[str, np.ndarray]:
    """Leaves in one file of a checkpoint, by their paths below `where`; together no larger than the file.

    Raises:
        Damaged: leaves lie over each other, or have the same name; or one is damaged.
    """
    with checkpoint.open_regular(path / name) as file:
        likes = {row["path"]: checkpoint.described(path / name, file, row) for row in rows}
        size = sum(math.prod(like.shape) * like.dtype.itemsize for like in likes.values())
        is_whole = len(likes) == len(rows) and size <= os.fstat(file.fileno()).st_size
        checkpoint.undamaged(is_whole, f"{path / name}: damaged, leaves lie over each other")
        read = partial(checkpoint.read_leaf, path / name, file)
        leaves = {row["path"]: read(row["path"], row, likes[row["path"]]) for row in rows}
    return {path.removeprefix(where).removeprefix(SEPARATOR): leaf for path, leaf in leaves.items()}


def nested(leaves: dict[str, np.ndarray]) -> PyTree:
    """Paths to nested dicts; a slash within a name stays, without its backslash."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = [part.replace("\0", SEPARATOR) for part in path.replace("\\/", "\0").split(SEPARATOR)]
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
            check(isinstance(place, dict), f"{path}: both a leaf and a node of the tree")
        place[last] = leaf
    return tree


def load(folder: Path, like: PyTree) -> PyTree:
    """Params from an Orbax folder in the structure of `like`, whose leaves have shapes and dtypes.

    Raises:
        UsageError: it cannot be read, or a leaf is absent, of another shape or type, or unknown: path, got, expected.
    """
    import jax
    import orbax.checkpoint as ocp

    check(folder.is_dir(), f"--params: no folder {str(folder)!r}; name one that `jaxmpi export` or Orbax has written")
    refuse_ways_out(folder)
    try:
        with ocp.StandardCheckpointer() as reader:
            told = reader.metadata(folder.absolute())
            sizes = getattr(told, "item_metadata", told)
            check_leaves(folder, sizes, like)
            check_chunks(folder, sizes)
            tree = reader.restore(folder.absolute())
    except (UsageError, Damaged):
        raise
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        raise UsageError(f"--params: {folder}: cannot be read: {error!s:.400}") from error
    check_leaves(folder, tree, like)
    leaves = dict(named_leaves(tree))
    return jax.tree.unflatten(jax.tree.structure(like), [np.asarray(leaves[name]) for name, _ in named_leaves(like)])


def refuse_ways_out(folder: Path) -> None:
    """Raise `UsageError` unless all in a folder are files and folders: a link may lead anywhere, a pipe never ends."""
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            mode = os.lstat(os.path.join(path, name)).st_mode
            holds = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            check(holds, f"--params: {path}/{name}: got something other than a regular file or a folder")


def check_chunks(folder: Path, sizes: PyTree) -> None:
    """Raise `UsageError` where a chunk, which is read whole, is larger than its leaf."""
    for name, leaf in named_leaves(sizes):
        storage = getattr(leaf, "storage", None)
        for shape in (getattr(storage, "chunk_shape", None), getattr(storage, "write_shape", None)):
            holds = shape is None or math.prod(shape) <= max(1, math.prod(leaf.shape))
            text = f"chunks of {[*(shape or ())]}, expected {[*leaf.shape]} at most"
            check(holds, f"--params: {folder}: {name}: {text}")


def check_leaves(folder: Path, tree: PyTree, like: PyTree) -> None:
    """Raise `UsageError` where leaves are not those of `like`: before they are read, then as read."""
    got = {name: f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for name, leaf in named_leaves(tree)}
    expected = {name: f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for name, leaf in named_leaves(like)}
    lines = [
        f"{name}: got {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in dict.fromkeys([*expected, *got])
        if got.get(name) != expected.get(name)
    ]
    check(not lines, f"--params: {folder} is not of this model:\n  " + "\n  ".join(lines[:12]))


def main(argv: list[str]) -> None:
    """`jaxmpi export RUN_DIR FOLDER [--step K]`."""
    asked = parser().parse_args(argv)
    step = export(asked.run_dir, asked.folder, asked.step)
    print(f"{asked.folder}: params at step {step}")


def parser() -> argparse.ArgumentParser:
    """Options of `jaxmpi export`."""
    options = argparse.ArgumentParser(prog="jaxmpi export", description="Params of a checkpoint as an Orbax folder.")
    options.add_argument("run_dir", type=Path, help="run directory")
    options.add_argument("folder", type=Path, help="new folder to write")
    options.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    return options
