"""Checkpoint format: all state for a bit-exact resume, renamed when whole.

    RUN/checkpoints/step_00000125/
        manifest.json       step, workers, and for each file its leaves: path, shape, dtype, offset, crc32; a crc32
        common.bin          state that is equal on all workers
        worker_00003.bin    worker 3's own state

No pickle: leaves are raw bytes. The newest and the best checkpoints are kept. Ranks of a synchronous rule write a
checkpoint together (`save`); asynchronous workers write their parts at steps of their own (`UncoordinatedCheckpoint`).
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.checkpoint.manifests import FORMAT, best_first, found, sealed, step_of, worker_file
from jaxmpi.checkpoint.restore import halves
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.files import sync_file
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.runtime import fault_injection

Files = dict[str, PyTree]  # contents by file name


class Retention(NamedTuple):
    """Number of checkpoints to keep."""

    newest: int
    best: int = 0  # checkpoints of lowest score, beside the newest


def files_of(states: Mapping[int, TrainState], replicated: bool, same_params: bool = True) -> Files:
    """The files that this process writes, with the contents of each.

    Args:
        states: of this process's workers.
        replicated: the rule's state is equal on all workers, and so is written once.
        same_params: likewise for params.
    """
    files = {}
    for worker, state in states.items():
        common, own = halves(state, replicated, same_params)
        files |= {"common.bin": common} if worker == 0 else {}
        files[worker_file(worker)] = own
    return files


def save(
    folder: Path,
    files: Files,
    processes: Processes,
    *,
    step: int,
    workers: int,
    extra: Mapping[str, Any],
    keep: Retention,
    score: float | None = None,
    agrees: bool = False,
) -> Path:
    """Write a checkpoint and drop those beyond `keep`; all ranks call it.

    Args:
        folder: RUN/checkpoints, the same for all ranks.
        files: this process's, of `files_of`.
        extra: JSON values kept beside.
        score: checkpoints with the lowest are kept as the best; None if this step was not evaluated.
        agrees: a rank that cannot write has all ranks raise. Else it raises by itself, and the job ends or goes on
            without it.

    Communicates: three gathers, of outcomes and of the files' indices.

    Raises:
        OSError: on the rank that cannot write; with `agrees` an `AgreedError` on all.
    """
    final, aside = folder / f"step_{step:08d}", folder / f"step_{step:08d}.tmp"
    is_first, index = processes.rank == 0, {}

    def together(act: Callable[[], Any]) -> list[Any]:
        """Call `act` here, wait for the others, and return all ranks' results."""

        def write() -> Any:
            try:
                return act()
            except Exception as error:
                raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}") from error

        return on_all_ranks(processes, write) if agrees else processes.allgather_object(act())

    together(lambda: make_aside(aside) if is_first else None)
    written = together(lambda: {name: write_leaves(aside / name, tree, step) for name, tree in files.items()})
    for each in written:
        index |= each
    facts = {"workers": workers, "score": score, "files": index, "extra": dict(extra)}
    together(lambda: commit(folder, step, facts, keep) if is_first else None)
    fault_injection.inject_at("saved", step, final)
    return final


def commit(folder: Path, step: int, facts: Mapping[str, Any], keep: Retention) -> None:
    """Turn step_N.tmp into a checkpoint, in place of an older one of that step, and drop those beyond `keep`."""
    final, aside = folder / f"step_{step:08d}", folder / f"step_{step:08d}.tmp"
    write_text(aside / "manifest.json", sealed({"format": FORMAT, "step": step, **facts}))
    sync_folder(aside)
    before = final.with_name(f"{final.name}.old.tmp")
    if final.exists():
        final.rename(before)
    aside.rename(final)
    sync_folder(folder)
    if before.exists():
        shutil.rmtree(before)
    upto = [path for path in found(folder) if step_of(path) <= step]
    best = best_first(upto)[: keep.best] if keep.best else []
    for path in upto[: -keep.newest]:
        if path not in best:
            shutil.rmtree(path)


def make_aside(aside: Path) -> None:
    """Make a checkpoint's temporary folder, and remove partial checkpoints of an ended run; links are not followed."""
    aside.parent.mkdir(exist_ok=True)  # without parents: a run directory that was removed stays removed
    for partial in aside.parent.glob("step_*.tmp"):
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)
        else:
            partial.unlink()
    aside.mkdir()


def write_leaves(path: Path, tree: PyTree, step: int) -> list[dict[str, Any]]:
    """Write leaves one after another; return their index."""
    index, offset = [], 0
    with path.open("wb") as file:
        for name, leaf in named_leaves(tree):
            array = np.asarray(leaf, order="C")  # ascontiguousarray would make f32[] an f32[1]
            fault_injection.inject_at("save", step)
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
        sync_file(file)
    return index


def write_text(path: Path, text: str) -> None:
    """Write a text and fsync it."""
    with path.open("w") as file:
        file.write(text)
        sync_file(file)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that the names in it are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class UncoordinatedCheckpoint(NamedTuple):
    """Checkpoint without a barrier, from each worker's file; worker 0 commits it."""

    folder: Path  # RUN/checkpoints
    workers: int
    keep: Retention

    def aside(self, step: int) -> Path:
        """The folder that becomes the checkpoint."""
        return self.folder / f"step_{step:08d}.tmp"

    def begin(self, step: int) -> None:
        """Make the folder; worker 0 calls it before it announces the checkpoint."""
        make_aside(self.aside(step))

    def write_own(self, step: int, worker: int, tree: PyTree) -> None:
        """Write a worker's part, then its index, which marks it as whole."""
        name = worker_file(worker)
        index = write_leaves(self.aside(step) / name, tree, step)
        being_written = self.aside(step) / f"{name}.json.tmp"
        write_text(being_written, json.dumps(index))
        being_written.rename(being_written.with_suffix(""))

    def end(self, step: int, common: PyTree, extra: Mapping[str, Any], score: float | None) -> None:
        """Commit the checkpoint; worker 0 calls it after all live workers' `write_own`.

        Files of workers that have ended are empty.
        """
        aside = self.aside(step)
        files = {"common.bin": write_leaves(aside / "common.bin", common, step)}
        for name in map(worker_file, range(self.workers)):
            index = aside / f"{name}.json"
            files[name] = json.loads(index.read_text()) if index.exists() else write_leaves(aside / name, {}, step)
        for left in aside.glob("worker_*.json*"):
            left.unlink()
        facts = {"workers": self.workers, "score": score, "files": files, "extra": dict(extra)}
        commit(self.folder, step, facts, self.keep)
