"""The trainer from Python: a script under mpirun, or a notebook with several devices of one process."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.control import processes
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.core.train_state import Batch
from jaxmpi.recover import decisions
from jaxmpi.runtime import device_setup
from jaxmpi.trainer import exported, main
from jaxmpi.trainer.finished import Finished, open_finished


class Trainer:
    """An experiment to train, evaluate and ask for predictions. All ranks call each method.

        trainer = jaxmpi.Trainer(experiment)
        figures = trainer.fit()
        outputs = trainer.predict({"image": images})

    Make one before the first JAX array, so that each rank gets its cores and its device.

    Args:
        experiment: as an experiment file holds it.
        name: of the run directory, if the experiment names none.

    Attributes:
        run_dir: where the run is written; what `evaluate` and `predict` read. Of a run that was trained before, give
            the experiment its `run_dir`, and leave `fit` out.

    Raises:
        UsageError: no experiment; by the methods, what `python -m jaxmpi.train` refuses.
    """

    def __init__(self, experiment: Experiment, name: str = "run") -> None:
        check(isinstance(experiment, Experiment), f"Trainer: got {experiment!r}; expected a jaxmpi.config.Experiment")
        control = processes()
        device_setup.make_cpu_devices(experiment.devices)
        folder = experiment.run_dir
        if not folder:
            with run_directory.usable():
                folder = control.bcast_object(str(run_directory.fresh(name)) if control.rank == 0 else "")
        self.experiment, self.name = dataclasses.replace(experiment, run_dir=folder), name
        self.run_dir = Path(folder)

    def fit(self) -> dict[str, float]:
        """Train to the end; the figures of the last evaluation.

        Asked to leave, by SIGTERM or Ctrl-C, it saves and ends the program with the code that says so.
        """
        self.__dict__.pop("_finished", None)
        try:
            return main.train(self.experiment, self.name)
        except decisions.Preempted as left:
            sys.exit(left.code)

    def evaluate(self, *, step: int | None = None, best: bool = False) -> dict[str, float]:
        """Figures of the validation data, by the newest checkpoint, that of a step, or the best by `monitor`."""
        return open_finished(self.experiment, self.run_dir, step=step, best=best).evaluate()

    def predict(self, batch: Batch) -> Any:
        """Outputs of the task by the newest checkpoint, for a batch of this process's own: dict of arrays [batch, ...].

        Images come as the data source gives them: u8 is normalised with the experiment's mean and deviation.
        """
        return self._finished.predict(batch)

    def export(
        self,
        file: str | Path,
        *,
        step: int | None = None,
        best: bool = False,
        platforms: Sequence[str] = (),
        batch: int = 0,
    ) -> None:
        """Write the trained model with its program for JAX alone: `jaxmpi export RUN model.jaxexport`.

        Args:
            file: to write, by rank 0; and `file.json`, what goes in and out.
            step: of the checkpoint; default: the newest.
            best: the best checkpoint by `monitor`.
            platforms: to lower for; default: those of cpu, cuda and tpu for which the model can be lowered.
            batch: examples of a call; default: any number, if the model can be traced so.
        """
        exported.check_asked(Path(file), platforms)
        run = open_finished(self.experiment, self.run_dir, step=step, best=best)
        exported.write(run, Path(file), platforms=platforms, batch=batch)

    @cached_property
    def _finished(self) -> Finished:
        return open_finished(self.experiment, self.run_dir)
