"""The trainer as a Python class, for scripts under mpirun and notebooks.

`Trainer(workers=N)` trains in processes of its own: `cloudpickle` writes the experiment for them, so functions and
classes of a notebook go with it, and `jaxmpi train -n N` starts them, as on the command line. The pickle is in a folder
of the run directory that only this user can read, and is removed when they have ended.
"""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.job import processes
from jaxmpi.config.experiment_file import FROM_PYTHON
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.train_state import Batch
from jaxmpi.recover import decisions
from jaxmpi.runtime import failures, process
from jaxmpi.trainer import finished, main
from jaxmpi.trainer.callbacks import Callback
from jaxmpi.trainer.finished import Finished, open_finished
from jaxmpi.trainer.options import check_program_file


class Trainer:
    """An experiment to train, evaluate and ask for predictions.

        trainer = jaxmpi.Trainer(experiment)
        figures = trainer.fit()
        outputs = trainer.predict({"image": images})

    Under a launcher all ranks call each method. Without one, `workers` has `fit` start as many processes; this one
    then evaluates and predicts by itself. `Experiment(devices=K)` trains K workers in this process. Make a trainer
    before the first JAX array, so that each rank gets its cores and its device.

    Args:
        experiment: as an experiment file holds it.
        name: of the run directory, if the experiment names none.
        workers: processes to train in, started by `mpirun`; None: the launcher's, or this one.

    Attributes:
        run_dir: where the run is written; what `evaluate` and `predict` read. For a run that was trained before, give
            the experiment its `run_dir`, and leave `fit` out.

    Raises:
        UsageError: other workers than the launcher's; by the methods, what `python -m jaxmpi.train` refuses.
    """

    def __init__(self, experiment: Experiment, name: str = "run", *, workers: int | None = None) -> None:
        control = processes()
        if control.size > 1 and workers not in (None, control.size):
            raise UsageError(
                f"Trainer: workers: got {workers}; the launcher started {control.size} ranks: leave workers out"
            )
        process.take_devices(experiment.devices)
        folder = experiment.run_dir
        if not folder:
            with run_directory.as_usage_errors():
                folder = control.bcast_object(str(run_directory.make_new_folder(name)) if control.rank == 0 else "")
        self.experiment, self.name = dataclasses.replace(experiment, run_dir=folder), name
        self.started = workers if workers and control.size == 1 else 1  # processes, by `fit`
        self.run_dir = Path(folder)
        self._opened: dict[tuple[int | None, bool], Finished] = {}

    def fit(self) -> dict[str, float]:
        """Train to the end; the figures of the last evaluation.

        Asked to leave, by SIGTERM or Ctrl-C, it saves and ends the program with the code that says so. With `workers`
        Ctrl-C lets them save and end, and raises KeyboardInterrupt.

        Raises:
            TrainingError: the run failed.
        """
        self._opened.clear()
        try:
            if self.started > 1:
                return fit_in_processes(self.experiment, self.started)
            return main.train(self.experiment, self.name)
        except decisions.Preempted as left:
            sys.exit(left.code)

    def evaluate(self, *, step: int | None = None, best: bool = False) -> dict[str, float]:
        """Evaluate the newest checkpoint, that of `step`, or the best by `monitor`.

        Returns: figures of the validation data. All ranks call it.
        """
        return open_finished(self.experiment, self.run_dir, step=step, best=best).evaluate()

    def predict(self, batch: Batch, *, step: int | None = None, best: bool = False) -> Any:
        """Return the task's outputs for one batch of this process's own.

        The batch is a dict of arrays [batch, ...]. The model is that of the newest checkpoint, of `step`, or the best
        by `monitor`; its program is compiled once. Images come as the data source gives them: u8 is normalised with the
        experiment's mean and deviation.
        """
        if (step, best) not in self._opened:
            self._opened[step, best] = open_finished(self.experiment, self.run_dir, step=step, best=best)
        return self._opened[step, best].predict(batch)

    def export(
        self,
        file: str | Path,
        *,
        step: int | None = None,
        best: bool = False,
        platforms: Sequence[str] = (),
        batch: int = 0,
    ) -> None:
        """Write model and program for JAX alone, as `jaxmpi export RUN model.jaxexport`.

        Args:
            file: to write, by rank 0; and `file.json`, what goes in and out.
            step: of the checkpoint; default: the newest.
            best: the best checkpoint by `monitor`.
            platforms: to lower for; default: cpu, cuda and tpu.
            batch: examples of a call; default: any number.
        """
        check_program_file(Path(file), platforms)
        run = open_finished(self.experiment, self.run_dir, step=step, best=best)
        finished.write_program(run, Path(file), platforms=platforms, batch=batch)


# ---------------------------------------------------------------- processes of its own


EXPERIMENT_FILE = '''"""An experiment that Python gave to jaxmpi.Trainer(experiment, workers=N)."""

from pathlib import Path

import cloudpickle

experiment = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''
# `preexec_fn` would fork a process with JAX's threads, of which JAX warns.
START = """
import sys
from jaxmpi.runtime import process
process.end_with_parent(int(sys.argv.pop(1)))
from jaxmpi.tools import cli
cli.main()
"""
SHOWN_LINES = 30  # last lines of the workers' output that an error shows


class KeepFigures(Callback):
    """Write the last figures for the waiting process."""

    first_rank_only = True

    def __init__(self, file: Path) -> None:
        self.file = file

    def at_end(self, figures: dict[str, float]) -> None:
        self.file.write_text(json.dumps(figures))


def fit_in_processes(experiment: Experiment, workers: int) -> dict[str, float]:
    """Train in `workers` processes; return the last figures, empty without a step.

    Ctrl-C lets the run save and end, and is raised here then.
    """
    with run_directory.as_usage_errors():
        Path(experiment.run_dir).mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(prefix="from_python_", dir=experiment.run_dir)
    with private as folder:
        file, result = Path(folder) / FROM_PYTHON, Path(folder) / "figures.json"
        kept = (*experiment.callbacks, KeepFigures(result))
        try:
            file.with_suffix(".pickle").write_bytes(
                cloudpickle.dumps(dataclasses.replace(experiment, callbacks=kept, fallback=None))
            )
        except Exception as error:  # whatever an object of the user's raises
            raise UsageError(
                f"the experiment cannot go to other processes: {type(error).__name__}: {error}; make that object "
                "inside a function that the experiment holds, or train with Experiment(devices=K) in this process"
            ) from error
        file.write_text(EXPERIMENT_FILE)
        line = [sys.executable, "-c", START, str(os.getpid()), "train", "-n", str(workers), str(file)]
        env = {name: value for name, value in os.environ.items() if name not in process.VARIABLES}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        code, output = run_job(line, env)
        if code == failures.MISUSED:
            text = "\n".join(output).rpartition("error: ")[2]
            raise UsageError(f"{workers} workers refused it: {text}")
        if code == failures.PREEMPTED:
            raise decisions.Preempted
        if code:
            last = "\n  ".join(output)
            raise TrainingError(f"{workers} workers ended with code {code}; their last lines:\n  {last}")
        return json.loads(result.read_text()) if result.exists() else {}


def run_job(line: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a job and show its output; return its code and last lines."""
    output: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    job = subprocess.Popen(line, env=env, text=True, errors="replace", start_new_session=True, **pipes)
    assert job.stdout is not None
    is_interrupted = False
    with job.stdout as lines:
        while True:
            try:
                for text in lines:
                    output.append(text.rstrip())
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
    return job.returncode, list(output)
