"""Checkpoints: everything a worker needs to go on bit-exactly, written aside and renamed when whole.

    RUN/checkpoints/step_00000125/
        manifest.json       step, workers, and for each file its leaves: path, shape, dtype, offset, crc32
        common.bin          what is equal on all workers
        worker_00003.bin    what is worker 3's own

No pickle: leaves are raw bytes, read only where the manifest and the running model agree on paths, shapes and dtypes.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.config import UsageError, check
from jaxmpi.processes import Processes, named_leaves
from jaxmpi.state import TrainState

PyTree = Any
FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")


class Saved(NamedTuple):
    """A restored checkpoint."""

    states: dict[int, TrainState]  # by worker
    step: int
    extra: dict[str, Any]


def save(
    folder: Path,
    states: Mapping[int, TrainState],
    processes: Processes,
    *,
    workers: int,
    replicated: bool,
    extra: Mapping[str, Any],
    keep: int,
    same_params: bool = True,
) -> Path:
    """Write a checkpoint of all workers and drop the oldest beyond `keep`. All ranks call it.

    Args:
        folder: RUN/checkpoints, the same for all ranks.
        states: this process's workers.
        replicated: whether the rule's state is equal on all workers; then it is written once.
        same_params: whether params are.
        extra: JSON values kept beside.

    Communicates: a gather of the files' indices, then a barrier.
    """
    step = int(next(iter(states.values())).step)
    final, aside = folder / f"step_{step:08d}", folder / f"step_{step:08d}.tmp"
    if processes.rank == 0:
        for cut_off in folder.glob("step_*.tmp"):
            shutil.rmtree(cut_off)
        aside.mkdir(parents=True)
    processes.barrier()
    files = {}
    for worker, state in states.items():
        common, own = halves(state, replicated, same_params)
        if worker == 0:
            files["common.bin"] = write_leaves(aside / "common.bin", common)
        files[f"worker_{worker:05d}.bin"] = write_leaves(aside / f"worker_{worker:05d}.bin", own)
    every = {name: index for text in processes.gather(json.dumps(files)) for name, index in json.loads(text).items()}
    if processes.rank == 0:
        manifest = {"format": FORMAT, "step": step, "workers": workers, "files": every, "extra": dict(extra)}
        write_text(aside / "manifest.json", json.dumps(manifest))
        sync_folder(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        sync_folder(folder)
        earlier = [path for path in found(folder) if int(path.name.split("_")[1]) < step]
        for old in earlier[: max(0, len(earlier) - keep + 1)]:
            shutil.rmtree(old)
    processes.barrier()
    return final


def halves(state: TrainState, replicated: bool, same_params: bool) -> tuple[PyTree, PyTree]:
    """(what is equal on all workers, what is this worker's own), as dicts of the state's fields."""
    fields = state._asdict()
    equal = ("step", *(("params",) if same_params else ()), *(("rule_state",) if replicated else ()))
    return {k: fields[k] for k in equal}, {k: v for k, v in fields.items() if k not in equal}


def write_leaves(path: Path, tree: PyTree) -> list[dict[str, Any]]:
    """Leaves one after another, and their index."""
    index, offset = [], 0
    with path.open("wb") as file:
        for name, leaf in named_leaves(tree):
            array = np.asarray(leaf, order="C")  # ascontiguousarray would make f32[] an f32[1]
            raw = array.reshape(-1).view(np.uint8).data
            file.write(raw)
            index.append(
                {
                    "path": name,
                    "shape": list(array.shape),
                    "dtype": str(array.dtype),
                    "offset": offset,
                    "crc32": zlib.crc32(raw),
                }
            )
            offset += raw.nbytes
        file.flush()
        os.fsync(file.fileno())
    return index


def write_text(path: Path, text: str) -> None:
    """Write and make sure that it is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make sure that names in the folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def found(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    whole = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / "manifest.json").is_file()]
    return sorted(whole, key=lambda p: int(p.name.split("_")[1]))


def restore(
    folder: Path, like: Mapping[int, TrainState], *, workers: int, replicated: bool, same_params: bool = True
) -> Saved | None:
    """The newest checkpoint for this process's workers, or None where there is none.

    Args:
        like: states of the same structure, shapes and dtypes, as the run starts with.

    Raises:
        UsageError: it is of another model, optimizer or number of workers (path, got, expected), or damaged (leaf).
    """
    whole = found(folder)
    if not whole:
        return None
    path = whole[-1]
    manifest = read_manifest(path)
    check(
        manifest["workers"] == workers,
        f"{path} was written by {manifest['workers']} workers, this run has {workers}; resume with the same number",
    )
    is_equal = replicated, same_params
    states = {worker: restore_worker(path, manifest, worker, state, *is_equal) for worker, state in like.items()}
    return Saved(states, manifest["step"], manifest["extra"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, with everything in it of the kind that `save` writes."""
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(
            f"{file}: damaged, it is no JSON ({error}); remove {path} to go on from the one before"
        ) from error
    got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    check(got == FORMAT, f"{path}: got format {got}; expected {FORMAT}")
    for name, kind in {"step": int, "workers": int, "files": dict, "extra": dict}.items():
        check(isinstance(manifest.get(name), kind), f"{file}: {name}: got {manifest.get(name)!r:.80}; expected {kind}")
    step = int(path.name.removeprefix("step_"))
    check(manifest["step"] == step, f"{file}: step: got {manifest['step']}; expected {step}")
    for name, index in manifest["files"].items():
        rows = index if isinstance(index, list) else [index]
        check(all(map(is_row, rows)), f"{file}: {name}: damaged, not an index of leaves")
    return manifest


_ROW = {"path": str, "shape": list, "dtype": str, "offset": int, "crc32": int}


def is_row(row: Any) -> bool:
    """Whether this can be a leaf's line in the index."""
    typed = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _ROW.items())
    return typed and row["offset"] >= 0


def restore_worker(
    path: Path, manifest: dict, worker: int, like: TrainState, replicated: bool, same_params: bool
) -> TrainState:
    """One worker's state out of common.bin and its own file."""
    common, own = halves(like, replicated, same_params)
    fields: dict[str, Any] = {}
    for name, tree in (("common.bin", common), (f"worker_{worker:05d}.bin", own)):
        index = manifest["files"].get(name)
        check(index is not None, f"{path}: no {name} in the manifest")
        fields |= read_leaves(path / name, index, tree)
    return TrainState(**fields)


def read_leaves(path: Path, index: list[dict[str, Any]], like: PyTree) -> PyTree:
    """Leaves in the structure of `like`; sizes are checked before anything is read."""
    rows = {row["path"]: row for row in index}
    expected = named_leaves(like)
    unknown = sorted(set(rows) - {name for name, _ in expected})
    check(not unknown, f"{path}: got leaves that this model does not have: {', '.join(unknown[:5])}")
    check(path.is_file(), f"{path}: no such file, though the manifest lists it")
    with path.open("rb") as file:
        leaves = [read_leaf(path, file, name, rows.get(name), leaf) for name, leaf in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_leaf(path: Path, file: BufferedReader, name: str, row: dict[str, Any] | None, like: Any) -> np.ndarray:
    """One leaf, if it is what is expected and undamaged."""
    expected = f"{np.dtype(like.dtype)}{list(like.shape)}"
    got = f"{row['dtype']}{row['shape']}" if row else "nothing"
    if row is None or got != expected:
        raise UsageError(
            f"{path}: {name}: got {got}, expected {expected}: it was saved from another model or optimizer"
        )
    array = np.empty(like.shape, like.dtype)
    raw = array.reshape(-1).view(np.uint8).data
    whole = row["offset"] + raw.nbytes <= os.fstat(file.fileno()).st_size
    check(whole, f"{path}: {name}: the file ends before the leaf does")
    file.seek(row["offset"])
    check(file.readinto(raw) == raw.nbytes, f"{path}: {name}: cannot be read in full")
    check(zlib.crc32(raw) == row["crc32"], f"{path}: {name}: damaged, its checksum does not match")
    return array
