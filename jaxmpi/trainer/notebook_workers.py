"""A run in processes of its own, from a script or notebook.

`cloudpickle` writes the experiment for the workers, so functions and classes of the notebook go with it. It lies in a
folder in the run directory that only this user can read. Once all workers have read it they remove it. When they have
ended the folder is gone, whatever ended this process: no file that stays is ever unpickled. `jaxmpi train -n N` starts
them, as on the command line. Their terminal is this process's output.
"""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle

from jaxmpi.checkpoint import run_directory
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.files import write_whole
from jaxmpi.core.train_state import TrainState
from jaxmpi.recover import decisions
from jaxmpi.runtime import failures, process
from jaxmpi.trainer.callbacks import Callback, Moment

FILE = "from_python.py"
TEXT = '''"""An experiment that Python gave to jaxmpi.Trainer(experiment, workers=N)."""

from pathlib import Path

import cloudpickle

experiment = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''
# `preexec_fn` would fork a process with JAX's threads, of which JAX warns.
START = """
import os, shutil, sys
from jaxmpi.runtime import process
parent, folder = int(sys.argv.pop(1)), os.path.dirname(sys.argv[-1])
process.end_with_parent(parent)
from jaxmpi.tools import cli
try:
    cli.main()
finally:
    if os.getppid() != parent:  # which would have removed it
        shutil.rmtree(folder, ignore_errors=True)
"""
TOLD_LINES = 30  # last lines of the workers' output that an error shows


class KeepFigures(Callback):
    """Write each evaluation's figures for the waiting process; remove the pickle."""

    def __init__(self, file: Path, pickle: Path) -> None:
        """Args: file: whose folder is there; pickle: of the experiment."""
        self.file, self.pickle = file, pickle

    def at_start(self, step: int, state: TrainState) -> None:
        """Remove the pickle, which all workers have read and compared by now."""
        self.pickle.unlink(missing_ok=True)

    def after_evaluation(self, moment: Moment) -> None:
        """Write them, on the first rank."""
        if moment.rank == 0:
            write_whole(self.file, json.dumps(moment.figures).encode())


def fit(experiment: Experiment, workers: int) -> dict[str, float]:
    """Train in `workers` processes; return the last figures, empty without a step.

    Ctrl-C lets the run save and end, and is raised here then.

    Args:
        experiment: with a run directory.
        workers: > 1.

    Raises:
        UsageError: the experiment cannot go to other processes, or they refuse it.
        TrainingError: they ended with an error.
        decisions.Preempted: they were asked to leave, and have saved the run.
    """
    with run_directory.usable():
        Path(experiment.run_dir).mkdir(parents=True, exist_ok=True)
        here = tempfile.TemporaryDirectory(
            prefix="from_python_", dir=experiment.run_dir
        )  # which other users cannot read
    with here as folder:
        result = Path(folder) / "figures.json"
        callbacks = (*experiment.callbacks, KeepFigures(result, (Path(folder) / FILE).with_suffix(".pickle")))
        file = written(dataclasses.replace(experiment, callbacks=callbacks, fallback=None), Path(folder))
        line = [sys.executable, "-c", START, str(os.getpid()), "train", "-n", str(workers), str(file)]
        env = {name: value for name, value in os.environ.items() if name not in process.VARIABLES}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        code, said = run(line, env)
        if code == failures.MISUSED:
            begin = max((i for i, text in enumerate(said) if "error: " in text), default=0)
            told = "\n".join([said[begin].partition("error: ")[2] or said[begin], *said[begin + 1 :]]) if said else ""
            raise UsageError(f"{workers} workers refused it: {told}")
        if code == failures.PREEMPTED:
            raise decisions.Preempted
        if code:
            last = "\n  ".join(said)
            raise TrainingError(f"{workers} workers ended with code {code}; their last lines:\n  {last}")
        return json.loads(result.read_text()) if result.exists() else {}


def written(experiment: Experiment, folder: Path) -> Path:
    """The experiment as a file of a folder.

    Raises:
        UsageError: it holds what cannot be pickled.
    """
    try:
        pickled = cloudpickle.dumps(experiment)
    except Exception as error:  # whatever an object of the user's raises
        raise UsageError(
            f"the experiment cannot go to other processes: {type(error).__name__}: {error}; make that object inside a "
            "function that the experiment holds, or train with Experiment(devices=K) in this process"
        ) from error
    file = folder / FILE
    file.with_suffix(".pickle").write_bytes(pickled)
    file.write_text(TEXT)
    return file


def run(line: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a job and show its output; return code and last lines."""
    said: collections.deque[str] = collections.deque(maxlen=TOLD_LINES)
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    job = subprocess.Popen(line, env=env, text=True, errors="replace", start_new_session=True, **pipes)
    assert job.stdout is not None
    is_interrupted = False
    with job.stdout as lines:
        while True:
            try:
                for text in lines:
                    said.append(text.rstrip())
                    print(text, end="", flush=True)
                job.wait()
                break
            except KeyboardInterrupt:  # a second one does not wait for the checkpoint
                os.killpg(job.pid, signal.SIGTERM if is_interrupted else signal.SIGINT)
                is_interrupted = True
            except BaseException:
                os.killpg(job.pid, signal.SIGTERM)
                raise
    if is_interrupted:
        raise KeyboardInterrupt
    return job.returncode, list(said)
