"""Reads records of runs, for `jaxmpi report`.

A record that is still being written is read up to its last whole line. Damaged lines are counted and left out. A
record may come from a stranger, so any value may be missing, huge or of another type.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import read_plain
from jaxmpi.core.json_tree import MALFORMED, parse_json
from jaxmpi.observe.record_format import FORMAT, PARTS, SAMPLES

COLUMNS = 200  # columns of a map at most
MOST_RANKS = 1 << 20
MOST = 1e100  # so that sums of drawn values are finite
MOST_RECORD_BYTES = 1 << 30  # a million lines of 64 ranks
MOST_FIELDS = 100  # fields with numbers in lines of a kind
MOST_SAMPLES = 50
MOST_TEXT = 10_000  # characters of a sample
MOST_PICTURE_BYTES = 1 << 22
XS = ("step", "epoch", "elapsed_s")
NO_FIGURES = {
    *XS,
    *PARTS,
    "compute_s",
    "kind",
    "examples",
    "own_ranks",
    "eval_count",
}  # fields of a line that no curve shows

Table = dict[str, np.ndarray]  # f64[lines] each, NaN if a line has none
Row = Mapping[str, Any]


class Sample(NamedTuple):
    """The newest sample of a name."""

    name: str
    step: Any
    text: str = ""
    picture: bytes = b""  # PNG


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run's record, parsed."""

    name: str
    facts: dict[str, Any]  # fields of the line of kind `run`, the last one if the run was resumed
    train: Table  # parts as `compute`
    evaluations: Table
    shuffles: Table  # shuffles of data in memory
    workers: Table  # lines of asynchronous rules; the steps of worker 3 as `worker_steps.3`
    own_times: np.ndarray  # f64[lines, ranks], NaN if unknown
    notes: list[str]  # warnings for the page
    own_ranks: int = 1  # neighbouring ranks in a column of `own`, which holds the slowest
    buckets: list[list[Any]] = field(default_factory=list)  # label, seconds in flight, seconds waited for: the last
    is_late: bool = False  # an exchange counts as compute in some lines, until it is known
    slowest: list[str] = field(default_factory=list)  # by line with an anatomy, who was waited for; empty if nobody
    samples: Sequence[Sample] = ()  # texts and pictures, the newest of each name


# ---------------------------------------------------------------- reading


def read(folder: Path, name: str = "") -> Record:
    """Read the record of a run directory.

    Raises:
        UsageError: it cannot be read, is not a record, or holds no line yet.
    """
    path = folder / "record.jsonl"
    rows, broken = parse_lines(path, "the record of a run, no link; name a run directory")
    if not rows:
        raise UsageError(f"{str(path)!r} holds no line yet; wait for the first step, or name another run")
    by_kind = {kind: [row for row in rows if row.get("kind") == kind] for kind in ("eval", "shuffle", "workers")}
    facts = next((row for row in reversed(rows) if row.get("kind") == "run"), {})
    trains = drop_first_timings(rows)
    per = [count for row in trains if isinstance(count := row.get("own_ranks"), int) and 1 <= count <= MOST_RANKS]
    return Record(
        name=name or folder.name,
        facts=facts,
        train=step_table(trains),
        evaluations=table(by_kind["eval"]),
        shuffles=table(by_kind["shuffle"]),
        workers=worker_table(by_kind["workers"]),
        own_times=own_time_matrix(trains),
        own_ranks=max(per, default=1),
        buckets=last_buckets(rows),
        is_late=any(row.get("exchange_time") == "unknown" for row in trains),
        slowest=[row["slowest"] for row in trains if "own_s" in row and isinstance(row.get("slowest"), str)],
        notes=collect_notes(facts, broken, [row.get("kind") for row in rows]),
        samples=newest_samples(folder, rows),
    )


def parse_lines(path: Path, expected: str) -> tuple[list[dict[str, Any]], int]:
    """Parse the whole lines of a file; return their objects and the number of malformed lines."""
    lines = read_plain(path, MOST_RECORD_BYTES, expected).split(b"\n")
    rows, broken = [], 0
    for i, line in enumerate(lines):
        try:
            row = parse_json(line, path) if line else None
        except (*MALFORMED, UsageError):
            broken += i < len(lines) - 1  # the last may be partial
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, broken


def drop_first_timings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of steps; a start's first, which includes compilation, loses its times."""
    cleaned_rows, is_first = [], True
    for row in rows:
        if row.get("kind") == "run":
            is_first = True
        elif row.get("kind") == "train":
            timings = ("anatomy", "own_s", "step_s")
            cleaned_rows.append({k: v for k, v in row.items() if k not in timings} if is_first else row)
            is_first = False
    return cleaned_rows


def collect_notes(facts: Row, broken: int, kinds: Sequence[Any]) -> list[str]:
    """Notes on missing data, with the reason."""
    version = facts.get("format", 1)
    order = (version > FORMAT) - (version < FORMAT) if isinstance(version, int) else 1
    notes = {
        f"{broken} lines are damaged and left out": broken,
        "no line tells the configuration": not facts,
        f"record of format {version}, older than {FORMAT}: no anatomy": facts and order < 0,
        f"record of format {version}, newer than {FORMAT}: what is new is left out": order > 0,
        f"{kinds.count('skipped')} steps were not finite and left out": "skipped" in kinds,
        f"{kinds.count('lost')} times ranks were lost": "lost" in kinds,
        f"{kinds.count('rollback')} times back to a checkpoint": "rollback" in kinds,
        "no step yet": "train" not in kinds,
    }
    return [note for note, holds in notes.items() if holds]


# ---------------------------------------------------------------- fields of lines


def table(rows: Sequence[Row]) -> Table:
    """Numbers of all lines by name, with XS first."""
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in NO_FIGURES]
    columns = {name: np.array([as_number(row.get(name)) for row in rows]) for name in (*XS, *names[:MOST_FIELDS])}
    return {name: values for name, values in columns.items() if name in XS or not np.isnan(values).all()}


def step_table(rows: Sequence[Row]) -> Table:
    """Numbers of lines of steps; a step's parts as medians over ranks."""
    parts = {part: np.full(len(rows), math.nan) for part in PARTS}
    for i, row in enumerate(rows):
        anatomy = row.get("anatomy")
        if not isinstance(anatomy, dict):
            continue
        for part in PARTS:
            spread = as_list(anatomy.get(part))  # least, median, most, rank
            parts[part][i] = as_number(spread[1]) if len(spread) > 1 else math.nan
    return table(rows) | parts


def worker_table(rows: Sequence[Row]) -> Table:
    """Numbers of lines of asynchronous workers, with the steps of each worker."""
    lists = [as_list(row.get("worker_steps")) for row in rows]
    count = len(lists[-1]) if lists else 0
    steps = np.array([[as_number(v) for v in line] if len(line) == count else [math.nan] * count for line in lists])
    return table(rows) | {f"worker_steps.{i}": steps[:, i] for i in range(count)}


def own_time_matrix(rows: Sequence[Row]) -> np.ndarray:
    """f64[columns, ranks]: a step's seconds without waits for others; neighbouring lines averaged."""
    lists = [values for row in rows if isinstance(values := row.get("own_s"), list)]
    ranks = max(map(len, lists), default=0)
    full = [[as_number(value) for value in values] for values in lists if ranks and len(values) == ranks]
    return average_neighbours(np.array(full, float).reshape(len(full), ranks), COLUMNS)


def last_buckets(rows: Sequence[Row]) -> list[list[Any]]:
    """[label, seconds in flight, seconds waited for] of the last `exchange` line."""
    last = next((row for row in reversed(rows) if row.get("kind") == "exchange"), {})
    whole = [row for row in as_list(last.get("buckets")) if isinstance(row, list) and len(row) == 3]
    return [row for row in whole if isinstance(row[0], str) and as_number(row[1]) >= 0 and as_number(row[2]) >= 0]


def newest_samples(folder: Path, rows: Iterable[Row]) -> list[Sample]:
    """The newest sample of each name, without pictures that cannot be read."""
    last = {str(row.get("name", "")): row for row in rows if row.get("kind") == "sample"}
    samples = []
    for name, row in [*last.items()][:MOST_SAMPLES]:
        if isinstance(row.get("text"), str):
            samples.append(Sample(name, row.get("step"), text=row["text"][:MOST_TEXT]))
        elif re.fullmatch(rf"{SAMPLES}/[\w-]+\.png", str(row.get("file"))):  # a stranger may name any file
            try:
                raw = read_plain(folder / row["file"], MOST_PICTURE_BYTES, "a picture")
            except UsageError:
                continue
            samples.append(Sample(name, row.get("step"), picture=raw))
    return samples


def as_number(value: Any) -> float:
    """Convert to float; NaN if not a finite number up to MOST."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else math.nan


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def average_neighbours(values: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` means of known neighbours along axis 0, or NaN."""
    per = -(-len(values) // limit)
    return known_means(values, np.arange(0, len(values), per)) if per > 1 else values


def known_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Means of the known values of the stretches that begin there along axis 0, or NaN."""
    is_known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    counts = np.add.reduceat(is_known.astype(float), starts)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
