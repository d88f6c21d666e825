"""What a run leaves in its directory, as tests read it; and a tiny experiment on digits."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.checkpoint import manifests
from jaxmpi.config.schema import Experiment

TINY = """
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.models.cnn import digits_cnn_tiny

experiment = Experiment(
    model=digits_cnn_tiny(),
    data=Data(source="digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.05),
    effective_batch=60, train_for="20st", eval_every="20st", checkpoint_every="10st", log_every=1,
)
"""


def record(run_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    """The record's lines of a kind."""
    rows = map(json.loads, (Path(run_dir) / "record.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def column(run_dir: str | Path, kind: str, name: str) -> list[Any]:
    """A field of the record's lines of a kind."""
    return [row[name] for row in record(run_dir, kind)]


def checkpoint(run_dir: str | Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return Path(run_dir) / "checkpoints" / f"step_{step:08d}"


def saved_leaves(run_dir: str | Path, step: int) -> dict[str, dict[str, np.ndarray]]:
    """The leaves of a checkpoint by file and path, as their bytes lie there."""
    folder = checkpoint(run_dir, step)

    def leaf(file: str, row: dict[str, Any]) -> np.ndarray:
        flat = np.fromfile(folder / file, row["dtype"], math.prod(row["shape"]), offset=row["offset"])
        return flat.reshape(row["shape"])

    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {file: {row["path"]: leaf(file, row) for row in rows} for file, rows in files.items()}


def checkpoint_files(run_dir: str | Path, step: int) -> dict[str, bytes]:
    """Every file of a checkpoint but the manifest, which holds times."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint(run_dir, step).glob("*.bin"))}


def steps_saved(run_dir: str | Path) -> list[int]:
    """Steps of the checkpoints that a run keeps."""
    return [manifests.step_of(path) for path in manifests.complete_checkpoints(Path(run_dir) / "checkpoints")]


def copy_until(run_dir: str | Path, step: int, to: str | Path) -> Path:
    """A copy of a run without its checkpoints after a step, to resume."""
    shutil.copytree(run_dir, to)
    for later in steps_saved(to):
        if later > step:
            shutil.rmtree(checkpoint(to, later))
    return Path(to)


def resumed(run: Experiment, step: int, to: Path) -> Experiment:
    """What goes on with a copy of a run from a step."""
    return dataclasses.replace(run, run_dir=str(copy_until(run.run_dir, step, to)), resume=True)
