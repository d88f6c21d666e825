"""Sinks that write files of the run directory: TensorBoard's events, CSV tables."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxmpi.observe.sinks.base import Row, importing, medians, numbers

CUTTING = ("rollback", "lost")  # kinds of lines before which the record has dropped others


class TensorBoard:
    """TensorBoard's events in `tensorboard/`: numbers as scalars by step, `train/loss`."""

    def __init__(self, run_dir: Path) -> None:
        """Begin a log in this run directory."""
        with importing:
            from tensorboardX import FileWriter, summary

        self.run_dir, self.summary, self.writer = run_dir, summary, FileWriter(str(run_dir / "tensorboard"))

    def __call__(self, row: Row) -> None:
        """Write a sample, or a step's numbers in one event, for speed."""
        if row["kind"] == "sample":
            self.writer.add_summary(self._sample(row), row["step"])
        elif "step" in row and (named := numbers(row)):
            first, *rest = [self.summary.scalar(name, value) for name, value in named.items()]
            for event in rest:
                first.MergeFrom(event)
            self.writer.add_summary(first, row["step"])

    def _sample(self, row: Row) -> Any:
        name = f"sample/{row['name']}"
        if "text" in row:
            return self.summary.text(name, f"```\n{row['text']}\n```")
        with Image.open(self.run_dir / row["file"]) as picture:
            return self.summary.image(name, np.asarray(picture.convert("RGB")), dataformats="HWC")

    def close(self) -> None:
        """Flush and close the writer."""
        self.writer.close()


class Csv:
    """Tables by kind of line, such as `csv/train.csv`, without the lists.

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
        kind, cells = row["kind"], flatten_row(row)
        # A header cannot be widened in place, nor can lines be taken out.
        if kind in CUTTING or cells.keys() - {*self.columns.get(kind, ())}:
            self._from_record()  # which has this line by now
        elif cells:
            with (self.folder / f"{kind}.csv").open("a", newline="") as file:
                csv.DictWriter(file, self.columns[kind]).writerow(cells)

    def _from_record(self) -> None:
        rows = [json.loads(line) for line in self.record.read_bytes().splitlines()] if self.record.exists() else []
        tables: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            tables.setdefault(row["kind"], []).append(flatten_row(row))
        self.columns = {kind: [*dict.fromkeys(name for row in table for name in row)] for kind, table in tables.items()}
        for kind, columns in self.columns.items():
            if columns:
                with (self.folder / f"{kind}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, columns)
                    writer.writeheader()
                    writer.writerows(tables[kind])


def flatten_row(row: Row) -> dict[str, Any]:
    """Fields that fit into a cell; none of `run` (config.json has them)."""
    if row["kind"] == "run":
        return {}
    plain = {name: value for name, value in row.items() if name != "kind" and not isinstance(value, (list, dict))}
    return plain | medians(row)
