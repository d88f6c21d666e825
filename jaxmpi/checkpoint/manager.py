"""Writing checkpoints: all state for a bit-exact resume, in the background, renamed when whole.

Ranks of a synchronous rule write a checkpoint together (`save`), and training waits only for copies in memory: `Saver`
copies the state, and a thread writes the copy over a communicator of its own. Without `MPI_THREAD_MULTIPLE` threads may
not send, so it waits for the write. A write error is raised in a later call, so callers poll a `Saver`. Asynchronous
workers write their parts at steps of their own (`UncoordinatedCheckpoint`). A state with NaN or infinite numbers is
refused, since no run could resume from it. The newest and the best checkpoints are kept. The format: `manifests`.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manifests import FORMAT, best_first, complete_checkpoints, seal_manifest, step_of, worker_file
from jaxmpi.checkpoint.restore import halves
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import TrainingError, UsageError
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
        common, local = halves(state, replicated, same_params)
        files |= {"common.bin": common} if worker == 0 else {}
        files[worker_file(worker)] = local
    return files


# ---------------------------------------------------------------- in the background


class Saver:
    """Background writer of one checkpoint at a time.

    All ranks save the same checkpoints in the same order.

    Args:
        processes: whose communicator is cloned if threads may send; else it writes in the foreground.
        replicated: the rule's state is equal on all workers.
        same_params: params are equal on all workers.
    """

    def __init__(
        self,
        home: HeldFolder,
        processes: Processes,
        *,
        workers: int,
        replicated: bool,
        keep: Retention,
        same_params: bool = True,
    ) -> None:
        self.home, self._folder = home, home.path / "checkpoints"
        self._workers, self._equal, self._keep = workers, (replicated, same_params), keep
        self._processes = processes.on_own_communicator() if processes.may_overlap else processes
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: int | None = None  # step of a whole checkpoint that `taken` has not returned yet
        self._is_whole = True  # the last checkpoint, on this rank

    def save(
        self, states: Mapping[int, TrainState], extra: dict[str, Any], score: float | None, *, is_last: bool = False
    ) -> None:
        """Copy this process's state and start to write; later calls raise errors.

        Args:
            states: of this process's workers, in host memory that may change once this returns.
            score: checkpoints with the lowest are kept as the best.
            is_last: that memory stays as it is until `wait`, so it is not copied.
        """
        self.wait()
        step = int(next(iter(states.values())).step)
        files = files_of(states, *self._equal)
        files = files if is_last else jax.tree.map(lambda x: np.array(x, order="C"), files)

        def write() -> None:
            try:
                self._write(self._folder, files, step, extra, score)
                self._is_whole, self._saved = True, step
            except BaseException as error:
                self._error = error

        self._thread, self._is_whole = threading.Thread(target=write, name=f"jaxmpi-save-{step}"), False
        self._thread.start()
        if not self._processes.may_overlap:
            self.wait()

    def _write(self, folder: Path, files: Files, step: int, extra: dict[str, Any], score: float | None) -> None:
        with written(step, self.home):
            check_finite(files, step, self._folder)
            facts = {"workers": self._workers, "extra": extra, "keep": self._keep, "score": score}
            save(folder, files, self._processes, step=step, **facts)

    def wait(self) -> None:
        """Wait until the current write is on disk, then `poll`."""
        while self._thread and self._thread.is_alive():
            self._thread.join(0.5)  # so that signal handlers run
        self._thread = None
        self.poll()

    def poll(self) -> None:
        """Raise the error of a write since the last call."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def take_newest_step(self) -> int | None:
        """Step of the checkpoint completed since the last call; else None."""
        step, self._saved = self._saved, None
        return step

    def abandon(self) -> bool:
        """Drop the write whose messages have failed; return True if incomplete."""
        if self._thread:
            self._thread.join()
        is_half, self._thread, self._error, self._is_whole = not self._is_whole, None, None, True
        return is_half

    def fate(self) -> str:
        """Predicate about the run directory if a rank lost it; else empty.

        Communicates: a gather of short texts; all ranks call it, and return the same.
        """
        self.wait()
        return next(filter(None, self._processes.allgather_object(self.home.fate())), "")

    def last_good(self) -> str:
        """Name of the newest checkpoint, for errors."""
        return last_good(self._folder)


@contextlib.contextmanager
def written(step: int, home: HeldFolder) -> Iterator[None]:
    """Turn OSError into an error that names the last good checkpoint."""
    try:
        yield
    except OSError as error:
        fate = f" (run directory {str(home.path)!r} {home.fate()})" if home.fate() else ""
        fallback = last_good(home.path / "checkpoints")
        raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}{fate}; {fallback}") from error


def check_finite(files: Files, step: int, folder: Path, way_out: str = "") -> None:
    """Refuse to write a state from which no run could resume."""
    for file, tree in files.items():
        for path, leaf in named_leaves(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
                raise TrainingError(
                    f"{path} of {file} is not finite after step {step}: not saved, earlier checkpoints stay; "
                    f"{last_good(folder)}{way_out}"
                )


def last_good(folder: Path) -> str:
    """Name of the newest checkpoint, for errors."""
    checkpoints = manifests.complete_checkpoints(folder)
    return f"last good checkpoint: {checkpoints[-1] if checkpoints else 'none yet'}"


def total_bytes(states: Mapping[int, TrainState], replicated: bool, workers: int, same_params: bool = True) -> int:
    """Bytes of a checkpoint of all workers."""
    common, local = (
        sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(half))
        for half in halves(next(iter(states.values())), replicated, same_params)
    )
    return common + workers * local


def check_disk(folder: Path, kept: int, saves: float, needed_bytes: int, free_bytes: int) -> None:
    """Refuse to start if the disk cannot hold the checkpoints that are kept, and one that is written.

    Args:
        saves: checkpoints that the run writes at most.
    """
    new = int(min(max(kept - len(manifests.complete_checkpoints(folder)), 0) + 1, saves))
    if free_bytes < new * needed_bytes:
        way_out = ", lower keep_checkpoints or keep_best" * (new > 1)
        raise UsageError(
            f"{folder}: {free_bytes / 1e6:.0f} MB are free, {new} checkpoint{'s' * (new > 1)} that this run holds at "
            f"once take {new * needed_bytes / 1e6:.0f} MB; make room{way_out}, or name another --run-dir"
        )


def warn(text: str) -> None:
    """Print a line on standard error."""
    print(f"jaxmpi: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- to disk


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
        score: checkpoints with the lowest are kept as the best; None if this step was not evaluated.
        agrees: a rank that cannot write has all ranks raise. Else it raises by itself, and the job ends or goes on
            without it.

    Communicates: three gathers, of outcomes and of the files' indices.

    Raises:
        OSError: on the rank that cannot write; with `agrees` an `AgreedError` on all.
    """
    aside, is_first, index = _aside_path(folder, step), processes.rank == 0, {}

    def together(act: Callable[[], Any]) -> list[Any]:
        """Call `act` here, wait for the others, and return all ranks' results."""

        def write() -> Any:
            try:
                return act()
            except Exception as error:
                raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}") from error

        return on_all_ranks(processes, write) if agrees else processes.allgather_object(act())

    together(lambda: _make_aside(aside) if is_first else None)
    for file_index in together(lambda: {name: write_leaves(aside / name, tree, step) for name, tree in files.items()}):
        index |= file_index
    facts = {"workers": workers, "score": score, "files": index, "extra": dict(extra)}
    together(lambda: _commit(folder, step, facts, keep) if is_first else None)
    fault_injection.inject_at("saved", step, aside.with_suffix(""))
    return aside.with_suffix("")


def _aside_path(folder: Path, step: int) -> Path:
    """The folder that becomes the checkpoint `step_N`."""
    return folder / f"step_{step:08d}.tmp"


def _make_aside(aside: Path) -> None:
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
            row = {"path": name, "shape": list(array.shape), "dtype": str(array.dtype)}
            index.append({**row, "offset": offset, "crc32": zlib.crc32(raw)})
            offset += raw.nbytes
        sync_file(file)
    return index


def _commit(folder: Path, step: int, facts: Mapping[str, Any], keep: Retention) -> None:
    """Turn step_N.tmp into a checkpoint, in place of an older one of that step, and drop those beyond `keep`."""
    aside = _aside_path(folder, step)
    final = aside.with_suffix("")
    write_text(aside / "manifest.json", seal_manifest({"format": FORMAT, "step": step, **facts}))
    _sync_folder(aside)
    before = final.with_name(f"{final.name}.old.tmp")
    if final.exists():
        final.rename(before)
    aside.rename(final)
    _sync_folder(folder)
    if before.exists():
        shutil.rmtree(before)
    upto = [path for path in complete_checkpoints(folder) if step_of(path) <= step]
    best = best_first(upto)[: keep.best] if keep.best else []
    for path in upto[: -keep.newest]:
        if path not in best:
            shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """Write a text and fsync it."""
    with path.open("w") as file:
        file.write(text)
        sync_file(file)


def _sync_folder(folder: Path) -> None:
    """Fsync a folder, so that the names in it are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class UncoordinatedCheckpoint(NamedTuple):
    """Checkpoint without a barrier, from each worker's file; worker 0 commits it."""

    folder: Path  # RUN/checkpoints
    workers: int
    keep: Retention

    def begin(self, step: int) -> None:
        """Make the folder; worker 0 calls it before it announces the checkpoint."""
        _make_aside(_aside_path(self.folder, step))

    def write_own(self, step: int, worker: int, tree: PyTree) -> None:
        """Write a worker's part, then its index, which marks it as whole."""
        path = _aside_path(self.folder, step) / worker_file(worker)
        index = write_leaves(path, tree, step)
        being_written = path.with_name(f"{path.name}.json.tmp")
        write_text(being_written, json.dumps(index))
        being_written.rename(being_written.with_suffix(""))

    def end(self, step: int, common: PyTree, extra: Mapping[str, Any], score: float | None) -> None:
        """Commit the checkpoint; worker 0 calls it after all live workers' `write_own`.

        Files of workers that have ended are empty.
        """
        aside = _aside_path(self.folder, step)
        files = {"common.bin": write_leaves(aside / "common.bin", common, step)}
        for name in map(worker_file, range(self.workers)):
            index = aside / f"{name}.json"
            files[name] = json.loads(index.read_text()) if index.exists() else write_leaves(aside / name, {}, step)
        for leftover in aside.glob("worker_*.json*"):
            leftover.unlink()
        facts = {"workers": self.workers, "score": score, "files": files, "extra": dict(extra)}
        _commit(self.folder, step, facts, self.keep)
