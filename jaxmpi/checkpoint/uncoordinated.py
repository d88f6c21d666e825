"""Checkpoints of asynchronous workers, which write parts at their own steps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.checkpoint.manifests import own_file
from jaxmpi.checkpoint.write import Retention, commit, make_aside, write_leaves, write_text
from jaxmpi.core.pytrees import PyTree


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
        name = own_file(worker)
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
        for name in map(own_file, range(self.workers)):
            index = aside / f"{name}.json"
            files[name] = json.loads(index.read_text()) if index.exists() else write_leaves(aside / name, {}, step)
        for left in aside.glob("worker_*.json*"):
            left.unlink()
        facts = {"workers": self.workers, "score": score, "files": files, "extra": dict(extra)}
        commit(self.folder, step, facts, self.keep)
