"""Reads records of runs, for `jaxmpi report`.

A record that is still being written is read up to its last whole line. Damaged lines are counted and left out. A
record may come from a stranger, so any value may be missing, huge or of another type.

If a record is long, most lines of steps are read for their numbers alone. Such a line is cut before its lists, and all
that are cut are parsed at once: each by itself takes twice as long.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.core.errors import check
from jaxmpi.core.files import read_plain
from jaxmpi.core.json_tree import MALFORMED
from jaxmpi.observe.record_format import FORMAT, PARTS, SOURCES
from jaxmpi.observe.samples import Sample, newest

MOST_LINES = 4_000  # lines of steps that are read in full; in a longer record the others have their numbers only
COLUMNS = 200  # columns of a map at most
MOST_RANKS = 1 << 20
MOST = 1e100  # so that sums of drawn values are finite
MOST_RECORD_BYTES = 1 << 30  # a million lines of 64 ranks
MOST_DEEP = 32  # nested objects in a line
MOST_FIELDS = 100  # fields with numbers in lines of a kind
MOST_FUNCTIONS = 1000  # rows of a profile
FIGURES = {float, int, bool}  # types of a value that a curve can show
# A line of a step as the recorder writes it: its numbers, then its lists, if any.
STEP = re.compile(
    rb'(\{"kind": "train"[^][{}]*)'
    rb'(?:, "anatomy": \{[^}]*\}, "own_s": \[[^]]*\](?:, "own_ranks": \d+)?, "slowest": "[^"\\]*")?\}'
)
XS = ("step", "epoch", "elapsed_s")
NO_FIGURES = {*XS, "kind", "examples", "own_ranks", "eval_count"}  # numbers of a line that no curve shows

Table = dict[str, np.ndarray]  # f64[lines] each, NaN if a line has none


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run's record, parsed."""

    name: str
    facts: dict[str, Any]  # fields of the line of kind `run`, the last one if the run was resumed
    train: Table  # parts as `compute`
    evaluations: Table
    shuffles: Table  # shuffles of data in memory
    workers: Table  # lines of asynchronous rules; the steps of worker 3 as `worker_steps.3`
    own: np.ndarray  # f64[lines, ranks], NaN if unknown
    own_ranks: int  # neighbouring ranks in a column of `own`, which holds the slowest
    buckets: list[list[Any]]  # rows of the last line of kind `exchange`: label, seconds in flight, seconds waited for
    functions: list[dict[str, float | str]]  # rows of the last line of kind `functions`: name and figures of each
    exchange_time: dict[str, int]  # lines by source of the exchange times
    slowest: list[str]  # the rank that others waited for, by line that has an anatomy; empty if none
    notes: list[str]  # warnings for the page
    samples: Sequence[Sample] = ()  # texts and pictures, the newest of each name

    @property
    def worker_steps(self) -> list[float]:
        """Steps by worker in the last `workers` line; empty if incomplete."""
        steps = [values[-1] for name, values in self.workers.items() if name.startswith("worker_steps.")]
        return [float(made) for made in steps] if all(made >= 0 for made in steps) else []


# ---------------------------------------------------------------- reading


def read(folder: Path, name: str = "") -> Record:
    """Read the record of a run directory.

    Raises:
        UsageError: it cannot be read, is not a record, or holds no line yet.
    """
    path = folder / "record.jsonl"
    lines = read_plain(path, MOST_RECORD_BYTES, "the record of a run, no link; name a run directory").split(b"\n")
    rows, broken = parse_lines(lines, parse_thinned_lines(lines))
    check(bool(rows), f"{str(path)!r} holds no line yet; wait for the first step, or name another run")
    facts = next((row for row in reversed(rows) if row.get("kind") == "run"), {})
    trains = drop_first_timings(rows)
    return Record(
        name=name or folder.name,
        facts=facts,
        train=step_table(trains),
        evaluations=table([row for row in rows if row.get("kind") == "eval"]),
        shuffles=table([row for row in rows if row.get("kind") == "shuffle"]),
        workers=worker_table([row for row in rows if row.get("kind") == "workers"]),
        own=own_time_matrix(trains),
        own_ranks=max(
            1, *(per for row in trains if isinstance(per := row.get("own_ranks"), int) and per <= MOST_RANKS), 1
        ),
        buckets=last_buckets(rows),
        functions=last_functions(rows),
        exchange_time=Counter(
            known for row in trains if "anatomy" in row and (known := row.get("exchange_time")) in SOURCES
        ),
        slowest=[row["slowest"] for row in trains if "own_s" in row and isinstance(row.get("slowest"), str)],
        notes=collect_notes(facts, broken, [row.get("kind") for row in rows]),
        samples=newest(folder, rows),
    )


def read_study(path: Path) -> list[Record]:
    """Read a file of `scripts/study.py`, a run's settings and evaluations per line.

    Raises:
        UsageError: it cannot be read, or holds no line of a study.
    """
    lines = read_plain(path, MOST_RECORD_BYTES, "a file of scripts/study.py, or a run directory").split(b"\n")
    rows = [row for row in parse_lines(lines, {})[0] if isinstance(row.get("cell"), dict) and "experiment" in row]
    check(bool(rows), f"{str(path)!r} holds no line of a study; name a file of scripts/study.py, or a run directory")
    files = {str(row["experiment"]) for row in rows}
    varied = [name for name in dict.fromkeys(k for row in rows for k in row["cell"]) if varies(name, rows)]
    return [study_record(row, varied, len(files) > 1) for row in rows]


def varies(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if lines of a study differ in a flag."""
    return len({str(row["cell"].get(name)) for row in rows}) > 1


def study_record(row: Mapping[str, Any], varied: Sequence[str], is_one_of_many: bool) -> Record:
    """A line of a study as a record without steps."""
    cell, file = row["cell"], str(row["experiment"])
    words = [f"{name} {cell[name]}" for name in varied if name in cell]
    name = ", ".join([*([Path(file).stem] if is_one_of_many else []), *words, f"seed {row.get('seed', '')}"])
    curve = [pair for pair in as_list(row.get("curve")) if isinstance(pair, list) and len(pair) == 2]
    rows = [{"epoch": epoch, "eval_loss": loss} for epoch, loss in curve]
    if rows:
        rows[-1] |= {k: v for k, v in row.items() if k.startswith("eval_") or k == "elapsed_s"}
    others = {name: value for name, value in cell.items() if name != "workers"}
    facts = {"experiment": {"file": file, **others, "seed": row.get("seed")}, "workers": cell.get("workers", "")}
    return Record(
        name=name,
        facts=facts,
        train=step_table([]),
        evaluations=table(rows),
        shuffles=table([]),
        workers=worker_table([row] if "worker_steps" in row else []),
        own=np.empty((0, 0)),
        own_ranks=1,
        buckets=[],
        functions=[],
        exchange_time={},
        slowest=[],
        notes=[f"failed: {row['failed']}"] if "failed" in row else [],
    )


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def parse_thinned_lines(lines: Sequence[bytes]) -> dict[int, dict[str, Any]]:
    """Numbers of lines of steps beyond MOST_LINES, by index.

    Every n-th line of a step is left out, and so are the last two lines. Lines of another form than the recorder's are
    left out as well.
    """
    steps = [i for i, line in enumerate(lines[:-2]) if line.startswith(b'{"kind": "train"')]
    per = -(-len(steps) // MOST_LINES) or 1
    cut = {i: found[1] + b"}" for place, i in enumerate(steps) if place % per and (found := STEP.fullmatch(lines[i]))}
    text = b"[" + b",".join(cut.values()) + b"]"
    rows = load_json(text)
    if not isinstance(rows, list) or len(rows) != len(cut):  # one is damaged, which hides all others
        rows = [*map(load_json, cut.values())]
    rows = rows if is_printable(text) else replace_surrogates(rows)
    return {i: row for i, row in zip(cut, rows, strict=True) if isinstance(row, dict)}


def load_json(text: bytes) -> Any:
    """The JSON value of a text; None if it is damaged."""
    try:
        return json.loads(text)
    except MALFORMED:
        return None


def drop_first_timings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of steps; a start's first, which includes compilation, loses its times."""
    kept, is_first = [], True
    for row in rows:
        if row.get("kind") == "train":
            dropped = ("anatomy", "own_s", "step_s") if is_first else ()
            kept.append({k: v for k, v in row.items() if k not in dropped} if is_first else row)
        is_first = row.get("kind") == "run" or (is_first and row.get("kind") != "train")
    return kept


def parse_lines(lines: Sequence[bytes], known: Mapping[int, dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Parse whole lines; return their objects and the number of malformed ones.

    Args:
        lines: of the file; the last may be partial.
        known: lines that have been read, by index.
    """
    rows, broken = [], 0
    for i, line in enumerate(lines):
        if i in known:
            rows.append(known[i])
            continue
        try:
            row = json.loads(line) if line else None
            row = row if is_printable(line) and is_flat(line) else replace_surrogates(row)
        except MALFORMED:
            broken += i < len(lines) - 1
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, broken


def is_printable(text: bytes) -> bool:
    """Return True if this JSON cannot contain a lone surrogate."""
    return text.isascii() and b"\\u" not in text


def is_flat(text: bytes) -> bool:
    """Return True if this JSON cannot be nested deeper than MOST_DEEP."""
    return text.count(b"{") + text.count(b"[") <= MOST_DEEP


def replace_surrogates(value: Any, deep: int = 0) -> Any:
    """Make the texts of a JSON value printable: lone surrogates become `?`.

    Raises:
        ValueError: it is nested deeper than lines of a record are.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if not isinstance(value, (list, dict)):
        return value
    check(deep < MOST_DEEP, "too deep")
    if isinstance(value, list):
        return [replace_surrogates(each, deep + 1) for each in value]
    return {replace_surrogates(name): replace_surrogates(each, deep + 1) for name, each in value.items()}


def collect_notes(facts: Mapping[str, Any], broken: int, kinds: Sequence[Any]) -> list[str]:
    """Notes on missing data, with the reason."""
    version, is_profile = facts.get("format", 1), all(kind == "functions" for kind in kinds)
    order = (version > FORMAT) - (version < FORMAT) if isinstance(version, int) else 1
    return [
        *([f"{broken} lines are damaged and left out"] if broken else []),
        *(["no line tells the configuration"] if not facts and not is_profile else []),
        *([f"record of format {version}, older than {FORMAT}: no anatomy"] if facts and order < 0 else []),
        *([f"record of format {version}, newer than {FORMAT}: what is new is left out"] if order > 0 else []),
        *([f"{kinds.count('skipped')} steps were not finite and left out"] if "skipped" in kinds else []),
        *([f"{kinds.count('lost')} times ranks were lost"] if "lost" in kinds else []),
        *([f"{kinds.count('rollback')} times back to a checkpoint"] if "rollback" in kinds else []),
        *(["no step yet"] if "train" not in kinds and not is_profile else []),
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Numbers of all lines by name, with XS first."""
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in NO_FIGURES and name not in PARTS]
    places = {name: column([row.get(name) for row in rows]) for name in XS}
    figures = {name: column([row.get(name) for row in rows]) for name in names[:MOST_FIELDS]}
    return places | {name: values for name, values in figures.items() if not np.isnan(values).all()}


def column(values: Sequence[Any]) -> np.ndarray:
    """`as_number` of each, fast if all are numbers or unknown."""
    types = {*map(type, values)}
    if not types & FIGURES:
        return np.full(len(values), np.nan)
    try:
        made = np.array(values if types <= {*FIGURES, type(None)} else [*map(as_number, values)], float)
    except OverflowError:  # an integer beyond all floats
        made = np.array([*map(as_number, values)])
    return np.where(np.abs(made) <= MOST, made, np.nan)


def step_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Numbers of lines of steps; a step's parts as medians over ranks."""
    known = [i for i, row in enumerate(rows) if row.get("anatomy")]  # few of a long record
    parts = {part: np.full(len(rows), math.nan) for part in PARTS}
    for part, values in parts.items():
        values[known] = [part_median(rows[i]["anatomy"], part) for i in known]
    return table(rows) | parts


def worker_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Numbers of lines of asynchronous workers, with the steps of each worker."""
    lists = [as_list(row.get("worker_steps")) for row in rows]
    count = len(lists[-1]) if lists else 0
    steps = np.array([[as_number(v) for v in made] if len(made) == count else [math.nan] * count for made in lists])
    return table(rows) | {f"worker_steps.{i}": steps[:, i] for i in range(count)}


def as_number(value: Any) -> float:
    """Convert to float; NaN if not a finite number up to MOST."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else math.nan


def part_median(anatomy: Any, part: str) -> float:
    """Median out of a part's [least, median, most, rank]; NaN if missing."""
    spread = anatomy.get(part) if isinstance(anatomy, dict) else None
    return as_number(spread[1]) if isinstance(spread, list) and len(spread) > 1 else math.nan


def last_buckets(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[label, seconds in flight, seconds waited for] of the last `exchange` line."""
    last = next((row.get("buckets") for row in reversed(rows) if row.get("kind") == "exchange"), None)
    whole = [row for row in last if isinstance(row, list) and len(row) == 3] if isinstance(last, list) else []
    return [row for row in whole if isinstance(row[0], str) and as_number(row[1]) >= 0 and as_number(row[2]) >= 0]


def last_functions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float | str]]:
    """Rows of the last profile of calls: `function` and numeric figures."""
    profiles = (row.get("functions") for row in reversed(rows) if row.get("kind") == "functions")
    named = [row for row in as_list(next(profiles, None)) if isinstance(row, dict) and "function" in row]
    return [
        {"function": str(row["function"])} | {name: as_number(v) for name, v in row.items() if type(v) in FIGURES}
        for row in named[:MOST_FUNCTIONS]
    ]


def own_time_matrix(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """f64[columns, ranks]: a step's seconds without waits for others; neighbouring lines averaged."""
    lists = [values for row in rows if isinstance(values := row.get("own_s"), list)]
    ranks = max(map(len, lists), default=0)
    full = [[as_number(value) for value in values] for values in lists if ranks and len(values) == ranks]
    return average_neighbours(np.array(full, float).reshape(len(full), ranks), COLUMNS)


def average_neighbours(values: np.ndarray, most: int) -> np.ndarray:
    """At most `most` means of known neighbours along axis 0, or NaN."""
    per = -(-len(values) // most)
    if per <= 1:
        return values
    starts = np.arange(0, len(values), per)
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(float), starts)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
