"""Sinks for lines of the record: any function of a dict, such as a TensorBoard writer."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError

Sink = Callable[[dict[str, Any]], None]  # takes a line of the record, on rank 0; `close()`, if any, is called last


class TensorBoard:
    """TensorBoard sink: numbers as scalars by step, `train/loss`; needs tensorboardX or torch's writer."""

    def __init__(self, folder: Path) -> None:
        """Begin a log in this folder.

        Raises:
            UsageError: no writer is installed.
        """
        self.writer = writer()(str(folder))

    def __call__(self, row: dict[str, Any]) -> None:
        """Write every number of a line that has a step; parts of a step as `train/anatomy/compute`, their medians."""
        if "step" not in row:
            return
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        for part, (_, median, *_) in row.get("anatomy", {}).items():
            self.writer.add_scalar(f"{row['kind']}/anatomy/{part}", median, row["step"])

    def close(self) -> None:
        """Flush and close the writer."""
        self.writer.close()


def writer() -> Callable[[str], Any]:
    """Return the writer class of the first installed package that has one.

    Raises:
        UsageError: none has.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        try:
            from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError("tensorboard: no writer is installed; pip install tensorboardX") from error
    return SummaryWriter


def send(sinks: list[Sink], row: dict[str, Any]) -> None:
    """Send a line to each sink; drop and report one that fails, so that it does not end the run."""
    for sink in list(sinks):
        try:
            sink(dict(row))
        except (Exception, SystemExit) as error:  # the user's code: the run is worth more than a sink
            sinks.remove(sink)
            tell(sink, f"failed at a line of kind {row.get('kind')} and gets no more lines", error)


def close(sinks: list[Sink]) -> None:
    """Close the sinks that have a `close`."""
    for sink in sinks:
        try:
            getattr(sink, "close", lambda: None)()
        except (Exception, SystemExit) as error:
            tell(sink, "failed while it was closed, and may lack its last lines", error)


def tell(sink: Sink, what: str, error: BaseException) -> None:
    """Report on standard error that a sink failed."""
    name = getattr(sink, "__name__", type(sink).__name__)
    print(
        f"jaxmpi: sink {name} {what}; the run goes on, and its record has all of them: {type(error).__name__}: {error}",
        file=sys.stderr,
        flush=True,
    )
