"""Sinks that write files of the run directory: TensorBoard's events, CSV tables."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxmpi.observe.sinks.base import Row, medians, numbers

CUTS = ("rollback", "lost")  # kinds of lines before which the record has dropped others


class TensorBoard:
    """TensorBoard's events in `tensorboard/`: numbers as scalars by step, `train/loss`."""

    def __init__(self, run_dir: Path) -> None:
        """Begin a log in this run directory."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportMissingImports]
        self.run_dir, self.writer = run_dir, SummaryWriter(str(run_dir / "tensorboard"))

    def __call__(self, row: Row) -> None:
        """Write every number of a line that has a step, and samples."""
        if row["kind"] == "sample":
            self._show(row)
        elif "step" in row:
            for name, value in numbers(row).items():
                self.writer.add_scalar(name, value, row["step"])

    def _show(self, row: Row) -> None:
        name = f"sample/{row['name']}"
        if "text" in row:
            return self.writer.add_text(name, f"```\n{row['text']}\n```", row["step"])
        with Image.open(self.run_dir / row["file"]) as picture:
            self.writer.add_image(name, np.asarray(picture.convert("RGB")), row["step"], dataformats="HWC")

    def close(self) -> None:
        """Flush and close the writer."""
        self.writer.close()


class Csv:
    """Tables in `csv/`, one for each kind of line, `csv/train.csv`: a column for each field but lists.

    They always have the lines of the record, and no others: if it has been cut, or if a line brings a new column, they
    are made from it anew.
    """

    def __init__(self, run_dir: Path) -> None:
        """Write the tables of the record so far."""
        self.record, self.folder = run_dir / "record.jsonl", run_dir / "csv"
        self.folder.mkdir(exist_ok=True)
        self.columns: dict[str, list[str]] = {}
        self._from_record()

    def __call__(self, row: Row) -> None:
        """Append a line to the table of its kind."""
        kind, cells = row["kind"], cells_of(row)
        if kind in CUTS or cells.keys() - {*self.columns.get(kind, ())}:
            self._from_record()  # which has this line by now
        elif cells:
            with (self.folder / f"{kind}.csv").open("a", newline="") as file:
                csv.DictWriter(file, self.columns[kind]).writerow(cells)

    def _from_record(self) -> None:
        rows = [json.loads(line) for line in self.record.read_bytes().splitlines()] if self.record.exists() else []
        tables: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            tables.setdefault(row["kind"], []).append(cells_of(row))
        self.columns = {kind: [*dict.fromkeys(name for row in table for name in row)] for kind, table in tables.items()}
        for kind, columns in self.columns.items():
            if columns:
                with (self.folder / f"{kind}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, columns)
                    writer.writeheader()
                    writer.writerows(tables[kind])


def cells_of(row: Row) -> dict[str, Any]:
    """Fields of a line that fit into a cell; none of the `run`, whose configuration is in config.json."""
    if row["kind"] == "run":
        return {}
    plain = {name: value for name, value in row.items() if name != "kind" and not isinstance(value, (list, dict))}
    return plain | medians(row)
