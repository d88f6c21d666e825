"""The trainer as a Python class, for scripts under mpirun and notebooks."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.job import processes
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.core.train_state import Batch
from jaxmpi.recover import decisions
from jaxmpi.runtime import process
from jaxmpi.trainer import exported_program, main, notebook_workers
from jaxmpi.trainer.finished_runs import Finished, open_finished
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
        UsageError: no experiment, or other workers than the launcher's; by the methods, what `python -m jaxmpi.train`
            refuses.
    """

    def __init__(self, experiment: Experiment, name: str = "run", *, workers: int | None = None) -> None:
        check(isinstance(experiment, Experiment), f"Trainer: got {experiment!r}; expected a jaxmpi.config.Experiment")
        is_number = workers is None or (type(workers) is int and workers >= 1)
        check(is_number, f"Trainer: workers: got {workers!r}; expected a whole number >= 1, or None")
        control = processes()
        check(
            control.size == 1 or workers in (None, control.size),
            f"Trainer: workers: got {workers}; the launcher started {control.size} ranks: leave workers out",
        )
        process.take_devices(experiment.devices)
        folder = experiment.run_dir
        if not folder:
            with run_directory.usable():
                folder = control.bcast_object(str(run_directory.fresh(name)) if control.rank == 0 else "")
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
                return notebook_workers.fit(self.experiment, self.started)
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
            platforms: to lower for; default: those of cpu, cuda and tpu for which the model can be lowered.
            batch: examples of a call; default: any number, if the model can be traced so.
        """
        check_program_file(Path(file), platforms)
        run = open_finished(self.experiment, self.run_dir, step=step, best=best)
        exported_program.write(run, Path(file), platforms=platforms, batch=batch)
