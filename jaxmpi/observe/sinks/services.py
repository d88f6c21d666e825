"""Sinks that are trackers of experiments: Weights & Biases, MLflow.

Each is set up by its own variables of the environment, such as WANDB_PROJECT or MLFLOW_TRACKING_URI. It says nothing on
the run's terminal. The line of kind `run` becomes the run's configuration. The run's identity is kept in the run
directory, so that a resumed run goes on there.
"""

import atexit
import html
import logging
import os
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from jaxmpi.core.json_tree import flatten_json
from jaxmpi.observe.sinks.base import Row, importing, numbers, read_state, write_state

PROJECT = "jaxmpi"  # unless the service's own variable names another
MOST_TEXT = 500  # characters of a parameter
MOST_PARAMS, MOST_METRICS = 100, 1000  # that MLflow takes in one call


class Wandb:
    """A run of Weights & Biases, online or offline.

    Without an API key or with WANDB_MODE=offline the run is written to `wandb/`, for `wandb sync`.
    """

    def __init__(self, run_dir: Path) -> None:
        """Begin the run, or go on with it."""
        self.is_finished = False
        os.environ.setdefault("WANDB_SILENT", "true")  # before the import: it prints before it has its settings
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with importing:
            import wandb

        hooks = sys.excepthook, sys.exit
        service = wandb.setup().ensure_service()
        sys.excepthook, sys.exit = hooks  # which it has replaced; the run's own end the job
        atexit.register(self._leave, service)  # before the service's own hook
        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:  # without a key it would ask for one
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            id=read_state(run_dir).get("wandb") or uuid.uuid4().hex[:8],
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run_dir),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self.run.define_metric("*", step_metric="step")  # its own steps may not go back
        write_state(run_dir, "wandb", self.run.id)
        self.run_dir, self._picture = run_dir, wandb.Image
        self._text = lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>")

    def __call__(self, row: Row) -> None:
        """Log the numbers of a line by its step, and samples."""
        if row["kind"] == "run":
            facts = {name: value for name, value in row.items() if name != "kind"}
            self.run.config.update(facts, allow_val_change=True)
        elif row["kind"] == "sample":
            shown = self._text(row["text"]) if "text" in row else self._picture(str(self.run_dir / row["file"]))
            self.run.log({"step": row["step"], f"sample/{row['name']}": shown})
        elif "step" in row:
            self.run.log({"step": row["step"], **numbers(row)})

    def close(self, exit_code: int = 0) -> None:
        """Send what is left."""
        self.run.finish(exit_code=exit_code)
        self.is_finished = True

    def fail(self) -> None:
        """Send what is left, and mark the run as failed."""
        self.close(exit_code=1)

    def _leave(self, service: Any) -> None:
        """At exit, end a service whose own hook would wait without limit."""
        if not self.is_finished and service.owns_service:
            service._cleanup()  # nothing public removes that hook, nor ends the process at once
            service._proc._process.kill()


class Mlflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI or MLflow's default has it."""

    def __init__(self, run_dir: Path) -> None:
        """Begin the run, or go on with it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with importing:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # which the import has changed
        self.metric, self.param, self.client = Metric, Param, MlflowClient()
        self.run_dir, self.run_id, self._metrics = run_dir, read_state(run_dir).get("mlflow", ""), []
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self.client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self.client.create_experiment(name)
        self.run_id = self.client.create_run(experiment, run_name=run_dir.name).info.run_id
        write_state(run_dir, "mlflow", self.run_id)

    def __call__(self, row: Row) -> None:
        """Take a line's numbers, the configuration as parameters, samples as artifacts."""
        if row["kind"] == "run":
            logged_params = self.client.get_run(self.run_id).data.params  # MLflow changes none
            named = {allowed_key(path): str(value) for path, value in flatten_json(row).items() if path != "kind"}
            new = [self.param(name, text[:MOST_TEXT]) for name, text in named.items() if name not in logged_params]
            for begin in range(0, len(new), MOST_PARAMS):
                self.client.log_batch(self.run_id, params=new[begin : begin + MOST_PARAMS])
        elif row["kind"] == "sample" and "text" in row:
            self.client.log_text(self.run_id, row["text"], f"samples/{row['name']}_{row['step']:08d}.txt")
        elif row["kind"] == "sample":
            self.client.log_artifact(self.run_id, str(self.run_dir / row["file"]), "samples")
        elif "step" in row:
            now_ms = int(1e3 * time.time())
            self._metrics += [
                self.metric(allowed_key(name), value, now_ms, row["step"]) for name, value in numbers(row).items()
            ]

    def flush(self) -> None:
        """Write several lines' numbers at once, in a tenth of the time."""
        for begin in range(0, len(self._metrics), MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=self._metrics[begin : begin + MOST_METRICS])
        self._metrics = []

    def close(self, status: str = "FINISHED") -> None:
        """Mark the run as finished."""
        self.flush()
        self.client.set_terminated(self.run_id, status)

    def fail(self) -> None:
        """Mark the run as failed."""
        self.close(status="FAILED")


def allowed_key(name: str) -> str:
    """A name with `_` for the characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)
