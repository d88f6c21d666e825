"""Checkpoints in the background: training waits only for copies in memory.

Writing a checkpoint to disk takes long, and training need not wait for it. `Saver` copies the state in host memory, and
a thread writes the copy over a communicator of its own. Without `MPI_THREAD_MULTIPLE` threads may not send, so `save`
waits for the write. A write error is raised in a later call, so callers poll a `Saver`. All ranks save the same
checkpoints in the same order. A state with NaN or infinite numbers is refused, since no run could resume from it.
"""

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.restore import halves
from jaxmpi.checkpoint.write import Files, Retention, files_of, save
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.files import HeldFolder
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState


class Saver:
    """Background writer of one checkpoint at a time."""

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
        """Clone a communicator if threads may send, else write in the foreground.

        Args:
            home: the run directory.
            replicated: the rule's state is equal on all workers.
            same_params: likewise for params.
        """
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
            extra: JSON values kept beside.
            score: checkpoints with the lowest are kept as the best.
            is_last: that memory stays as it is until `wait`, so it is not copied.
        """
        self.wait()
        step = int(next(iter(states.values())).step)
        files = files_of(states, *self._equal)
        files = files if is_last else jax.tree.map(lambda x: np.array(x, order="C"), files)
        write = threading.Thread(target=self._write, args=(files, step, extra, score), name=f"jaxmpi-save-{step}")
        self._thread, self._is_whole = write, False
        write.start()
        if not self._processes.may_overlap:
            self.wait()

    def _write(self, files: Files, step: int, extra: dict[str, Any], score: float | None) -> None:
        try:
            with written(step, self.home):
                self._save(self._folder, files, step, extra, score)
            self._is_whole, self._saved = True, step
        except BaseException as error:
            self._error = error

    def _save(self, folder: Path, files: Files, step: int, extra: dict[str, Any], score: float | None) -> None:
        check_finite(files, step, self._folder)
        facts = {"workers": self._workers, "extra": extra, "keep": self._keep, "score": score}
        save(folder, files, self._processes, step=step, **facts)

    def fate(self) -> str:
        """Predicate about the run directory if a rank lost it; else empty.

        Communicates: a gather of short texts; all ranks call it, and return the same.
        """
        self.wait()
        return next(filter(None, self._processes.allgather_object(self.home.fate())), "")

    def save_elsewhere(
        self, states: Mapping[int, TrainState], extra: dict[str, Any], copy: Callable[[Path], None]
    ) -> Path:
        """Save in the foreground, in the run directory's `refuge`; return that directory.

        Args:
            states: of this process's workers, in host memory.
            copy: puts the record into a new directory.
        """
        place = str(refuge(self.home, copy)) if self._processes.rank == 0 else ""
        place = Path(self._processes.bcast_object(place))
        step = int(next(iter(states.values())).step)
        with written(step, self.home):
            self._save(place / "checkpoints", files_of(states, *self._equal), step, extra, None)
        return place

    def last_good(self) -> str:
        """Name of the newest checkpoint, for errors."""
        return last_good(self._folder)

    def poll(self) -> None:
        """Raise the error of a write since the last call.

        Raises:
            TrainingError: a checkpoint cannot be written, or its state is not finite; those before it stay.
        """
        if self._error:
            error, self._error = self._error, None
            raise error

    def taken(self) -> int | None:
        """Step of the checkpoint completed since the last call; else None."""
        step, self._saved = self._saved, None
        return step

    def abandon(self) -> bool:
        """Drop the write whose messages have failed; return True if incomplete."""
        if self._thread:
            self._thread.join()
        is_half, self._thread, self._error, self._is_whole = not self._is_whole, None, None, True
        return is_half

    def wait(self) -> None:
        """Wait until the current write is on disk, then `poll`."""
        while self._thread and self._thread.is_alive():
            self._thread.join(0.5)  # so that signal handlers run
        self._thread = None
        self.poll()


@contextlib.contextmanager
def written(step: int, home: HeldFolder) -> Iterator[None]:
    """Turn OSError into an error that names the last good checkpoint.

    Raises:
        TrainingError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        fate = f" (run directory {str(home.path)!r} {home.fate()})" if home.fate() else ""
        kept = last_good(home.path / "checkpoints")
        raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}{fate}; {kept}") from error


def refuge(home: HeldFolder, copy: Callable[[Path], None]) -> Path:
    """The run directory's new place, or a new directory to save in.

    Args:
        copy: puts the record into a new directory.

    Raises:
        TrainingError: none can be made.
    """
    if place := home.place():
        return place
    try:
        for number in itertools.count(1):
            place = home.path.with_name(f"{home.path.name}-saved-{number}")
            with contextlib.suppress(FileExistsError):
                place.mkdir(parents=True)
                copy(place)
                return place
    except OSError as error:
        text = f"run directory {str(home.path)!r} {home.fate()}, and there is no place for another: {error}"
        raise TrainingError(f"{text}; the run is not saved") from error
    raise AssertionError  # numbers do not end


def check_finite(files: Files, step: int, folder: Path, way_out: str = "") -> None:
    """Refuse to write a state from which no run could resume.

    Raises:
        TrainingError: the first leaf with NaN or infinite numbers, which complex ones may have as well.
    """
    for file, tree in files.items():
        for path, leaf in named_leaves(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
                raise TrainingError(
                    f"{path} of {file} is not finite after step {step}: not saved, earlier checkpoints stay; "
                    f"{last_good(folder)}{way_out}"
                )


def last_good(folder: Path) -> str:
    """Name of the newest checkpoint, for errors."""
    kept = manifests.found(folder)
    return f"last good checkpoint: {kept[-1] if kept else 'none yet'}"


def total_bytes(states: Mapping[int, TrainState], replicated: bool, workers: int, same_params: bool = True) -> int:
    """Bytes of a checkpoint of all workers."""
    common, own = halves(next(iter(states.values())), replicated, same_params)
    size = lambda tree: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    return size(common) + workers * size(own)


def check_disk(folder: Path, needed_bytes: int, free_bytes: int) -> None:
    """Refuse to start if the disk cannot hold two checkpoints.

    Raises:
        UsageError: bytes needed and free.
    """
    if free_bytes < 2 * needed_bytes:
        raise UsageError(
            f"{folder}: {free_bytes / 1e6:.0f} MB are free, two checkpoints take {2 * needed_bytes / 1e6:.0f} MB: "
            "the last good one stays until the next is whole; make room, or name another --run-dir"
        )


def warn(text: str) -> None:
    """Print a line on standard error."""
    print(f"jaxmpi: {text}", file=sys.stderr, flush=True)
