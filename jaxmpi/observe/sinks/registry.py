"""Sinks by name; a function of a line needs no row."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.observe.sinks.base import Background, Sink, attempt
from jaxmpi.observe.sinks.files import Csv, TensorBoard
from jaxmpi.observe.sinks.services import Mlflow, Wandb


class SinkSpec(NamedTuple):
    """A row of `SINKS`."""

    open: Callable[[Path], Sink]  # opens the sink for a run directory
    summary: str
    package: str = ""  # that it imports
    install: str = ""  # that has the package
    in_background: bool = False  # opened and written by a thread, because it waits for a server or a database


SINKS: dict[str, SinkSpec] = {
    "csv": SinkSpec(Csv, "tables in csv/, one for each kind of line"),
    "mlflow": SinkSpec(Mlflow, "a run of MLflow, by MLFLOW_TRACKING_URI", "mlflow", "jaxmpi[mlflow]", True),
    "tensorboard": SinkSpec(TensorBoard, "events in tensorboard/", "tensorboardX", "jaxmpi[tensorboard]", True),
    "wandb": SinkSpec(
        Wandb, "a run of Weights & Biases, offline without an API key", "wandb", "jaxmpi[wandb]", in_background=True
    ),
}


def check_sinks(sinks: Sequence[str | Sink]) -> None:
    """Check that words have a row and its package is installed.

    Raises:
        UsageError: one has not: got, expected, way out.
    """
    for name in sinks:
        if not isinstance(name, str):
            continue
        spec = lookup(SINKS, name, "sink")
        module = importlib.util.find_spec(spec.package) if spec.package else None
        if spec.package and (module is None or module.origin is None):  # a folder such as `./wandb` has no origin
            raise UsageError(
                f"sinks: got {name!r}; expected the package {spec.package}, which is not installed: "
                f"{installing(spec.install)}, or leave {name} out"
            )


def open_sinks(sinks: Sequence[str | Sink], run_dir: Path) -> list[Sink]:
    """Open the sinks of a run; report and skip any that fails."""
    opened: list[Sink] = []
    for sink in sinks:
        if not isinstance(sink, str):
            opened.append(sink)
            continue
        spec, make = SINKS[sink], partial(SINKS[sink].open, run_dir)
        if spec.in_background:
            opened.append(Background(sink, make))
        else:
            attempt(sink, "could not be opened and gets no lines", lambda make=make: opened.append(make()))
    return opened
