"""`jaxmpi report RUN [RUN...]`: an HTML page and plots from the records of one run or several.

The page is self-contained. A record that is still being written is read up to its last whole line. Damaged lines are
counted and left out.
"""

import argparse
import datetime
import html
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import read_plain, refuse_ways_out
from jaxmpi.core.json_tree import flatten_json
from jaxmpi.observe import plots
from jaxmpi.observe.plots import Areas, Bars, Lines, Map, Panel, Quantity
from jaxmpi.observe.recorder import FORMAT
from jaxmpi.observe.step_timing import ESTIMATED, PARTS, SOURCES

MOST_LINES = 8_000  # of steps that are read; in a longer record every n-th
POINTS = 400  # of a line; in a longer record, means of neighbours
COLUMNS = 200  # of a map
MOST_RANKS = 1 << 20
MOST = 1e100  # so that sums of drawn values are finite
MOST_RECORD_BYTES = 1 << 30  # a million lines of 64 ranks
MOST_DEEP = 32  # nested objects in a line
MOST_SHARES = 16  # workers whose steps are listed
MOST_BUCKETS = 40  # drawn; the slowest
STEP, SECONDS = Quantity("step", base=None), Quantity("seconds of training", base=None)
NUMBERS = (
    "step",
    "epoch",
    "elapsed_s",
    "loss",
    "images_per_s",
    "bytes_per_s",
    "lr",
    "gradient_norm",
    "noise_scale",
    "step_s",
    "goodput",
)


class Record(NamedTuple):
    """A run's record, parsed."""

    name: str
    facts: dict[str, Any]  # of the line of kind `run`, the last one if the run was resumed
    train: dict[str, np.ndarray]  # f64[lines] each, NaN if a line has none; parts as `compute`
    own: np.ndarray  # f64[lines, ranks], NaN if unknown
    own_ranks: int  # neighbouring ranks in a column of `own`, which holds the slowest
    evaluations: list[dict[str, Any]]
    buckets: list[list[Any]]  # of the last line of kind `exchange`
    exchange_time: dict[str, int]  # lines by source of the exchange times
    slowest: list[str]  # of every line that has an anatomy: the rank that others waited for, empty if none
    notes: list[str]  # warnings for the page
    worker_steps: list[float] = []  # noqa: RUF012 by worker, of the last line of kind `workers`; never changed


# ---------------------------------------------------------------- reading


def read(folder: Path, name: str = "") -> Record:
    """Read the record of a run directory.

    Raises:
        UsageError: it cannot be read, is not a record, or holds no line yet.
    """
    path = folder / "record.jsonl"
    lines = read_plain(path, MOST_RECORD_BYTES, "the record of a run, no link; name a run directory").split(b"\n")
    rows, broken = parsed(sampled(lines))
    check(bool(rows), f"{str(path)!r} holds no line yet; wait for the first step, or name another run")
    facts = next((row for row in reversed(rows) if row.get("kind") == "run"), {})
    notes = notes_on(facts, broken, [row.get("kind") for row in rows])
    trains = without_starts(rows)
    return Record(
        name or folder.name,
        facts,
        columns(trains),
        own_times(trains),
        max(1, *(per for row in trains if isinstance(per := row.get("own_ranks"), int) and per <= MOST_RANKS), 1),
        [row for row in rows if row.get("kind") == "eval"],
        buckets_of(rows),
        Counter(known for row in trains if "anatomy" in row and (known := row.get("exchange_time")) in SOURCES),
        [row["slowest"] for row in trains if "own_s" in row and isinstance(row.get("slowest"), str)],
        notes,
        steps_of_workers(rows),
    )


def sampled(lines: list[bytes]) -> list[bytes]:
    """Keep every n-th line of more than MOST_LINES steps, and the last two; all lines of other kinds."""
    steps = [i for i, line in enumerate(lines[:-2]) if line.startswith(b'{"kind": "train"')]
    per = -(-len(steps) // MOST_LINES)
    left_out = set(steps) - set(steps[::per]) if per > 1 else set()
    return [line for i, line in enumerate(lines) if i not in left_out]


def without_starts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of steps without the times of the first step of a start, which include compilation."""
    kept, is_first = [], True
    for row in rows:
        if row.get("kind") == "train":
            dropped = ("anatomy", "own_s", "step_s") if is_first else ()
            kept.append({k: v for k, v in row.items() if k not in dropped} if is_first else row)
        is_first = row.get("kind") == "run" or (is_first and row.get("kind") != "train")
    return kept


def parsed(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Parse whole lines; return their objects and the number of malformed lines. The last may be partial."""
    rows, broken = [], 0
    for line in lines:
        try:
            row = plain_text(json.loads(line)) if line else None
        except (ValueError, RecursionError):
            broken += line is not lines[-1]
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, broken


def plain_text(value: Any, deep: int = 0) -> Any:
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
        return [plain_text(each, deep + 1) for each in value]
    return {plain_text(name): plain_text(each, deep + 1) for name, each in value.items()}


def notes_on(facts: Mapping[str, Any], broken: int, kinds: Sequence[Any]) -> list[str]:
    """Notes on missing data, with the reason."""
    version = facts.get("format", 1)
    order = (version > FORMAT) - (version < FORMAT) if isinstance(version, int) else 1
    return [
        *([f"{broken} lines are damaged and left out"] if broken else []),
        *(["no line tells the configuration"] if not facts else []),
        *([f"record of format {version}, older than {FORMAT}: no anatomy"] if facts and order < 0 else []),
        *([f"record of format {version}, newer than {FORMAT}: what is new is left out"] if order > 0 else []),
        *([f"{kinds.count('skipped')} steps were not finite and left out"] if "skipped" in kinds else []),
        *([f"{kinds.count('rollback')} times back to a checkpoint"] if "rollback" in kinds else []),
        *(["no step yet"] if "train" not in kinds else []),
    ]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Numbers of all lines by name; parts of a step are their medians over ranks."""
    found = {name: np.array([number(row.get(name)) for row in rows]) for name in NUMBERS}
    return found | {part: np.array([median_of(row, part) for row in rows]) for part in PARTS}


def number(value: Any) -> float:
    """Convert to float; NaN if it is no number, not finite, or so large that the record is forged."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else math.nan


def median_of(row: Mapping[str, Any], part: str) -> float:
    """Median from [least, median, most, rank] of a part; NaN if a line has none."""
    anatomy = row.get("anatomy")
    spread = anatomy.get(part) if isinstance(anatomy, dict) else None
    return number(spread[1]) if isinstance(spread, list) and len(spread) > 1 else math.nan


def buckets_of(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[label, seconds in flight, seconds waited for] of the last line that has them."""
    last = next((row.get("buckets") for row in reversed(rows) if row.get("kind") == "exchange"), None)
    whole = [row for row in last if isinstance(row, list) and len(row) == 3] if isinstance(last, list) else []
    return [row for row in whole if isinstance(row[0], str) and number(row[1]) >= 0 and number(row[2]) >= 0]


def steps_of_workers(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """`worker_steps` of the last line of kind `workers`; empty if one of them is not a number."""
    last = next((row.get("worker_steps") for row in reversed(rows) if row.get("kind") == "workers"), None)
    steps = [number(made) for made in last] if isinstance(last, list) else []
    return steps if all(made >= 0 for made in steps) else []


def own_times(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """f64[columns, ranks]: seconds of a step in which a rank waits for no other; means of neighbouring lines."""
    lists = [values for row in rows if isinstance(values := row.get("own_s"), list)]
    ranks = max(map(len, lists), default=0)
    full = [[number(value) for value in values] for values in lists if ranks and len(values) == ranks]
    return thinned(np.array(full, float).reshape(len(full), ranks), COLUMNS)


def thinned(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Means of neighbours along the first axis, so that `most` are left; NaN if all neighbours are NaN."""
    per = -(-len(values) // most)
    if per <= 1:
        return values
    starts = np.arange(0, len(values), per)
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(float), starts)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


# ---------------------------------------------------------------- pictures


def points(record: Record, x: str, y: str) -> list[plots.Point]:
    """(x, y) of the lines that have both."""
    xs, ys = (thinned(record.train[name]) for name in (x, y))
    return [(a, b) for a, b in zip(xs.tolist(), ys.tolist(), strict=True) if a == a and b == b]


def evaluated(record: Record, x: str, y: str, factor: float = 1.0) -> list[plots.Point]:
    """(x, y) of the evaluations that have both."""
    both = [(number(row.get(x)), factor * number(row.get(y))) for row in record.evaluations]
    return [(a, b) for a, b in both if a == a and b == b]


def own_figures(records: Sequence[Record]) -> list[str]:
    """Names of figures that tasks give besides those with a picture of their own, such as `eval_mae`."""
    found = {name for record in records for row in record.evaluations for name in row if name.startswith("eval_")}
    return sorted(found - {"eval_count", "eval_loss", "eval_top1", "eval_top5", "eval_bits_per_byte"})


def curves(records: Sequence[Record]) -> dict[str, list[Panel]]:
    """Loss and accuracy by step, epoch and seconds; speed, learning rate, gradients."""

    def by(x: str, axis: Quantity) -> list[Panel]:
        loss = {r.name: points(r, x, "loss") for r in records}
        held_out = {f"{r.name}, held out": evaluated(r, x, "eval_loss") for r in records}
        top1 = {f"{r.name}, top-1": evaluated(r, x, "eval_top1", 100) for r in records}
        top5 = {f"{r.name}, top-5": evaluated(r, x, "eval_top5", 100) for r in records}
        return [
            *lines(f"Loss by {axis.name}", axis, Quantity("loss"), loss | held_out),
            *lines(f"Accuracy by {axis.name}", axis, Quantity("accuracy", "%", base=None, low=None), top1 | top5),
            *itertools.chain.from_iterable(own(name.removeprefix("eval_"), x, axis) for name in own_figures(records)),
        ]

    def own(name: str, x: str, axis: Quantity) -> list[Panel]:
        of_each = {r.name: evaluated(r, x, f"eval_{name}") for r in records}
        return lines(f"{name} by {axis.name}", axis, Quantity(name, base=None, low=None), of_each)

    def of(name: str, title: str, unit: Quantity) -> list[Panel]:
        return lines(title, STEP, unit, {r.name: points(r, "step", name) for r in records})

    pace = [
        *of("images_per_s", "Speed", Quantity("images/s", base=None)),
        *of("bytes_per_s", "Speed, text", Quantity("bytes/s", base=None)),
        *of("goodput", "Goodput: seconds of computing over seconds since the start", Quantity("share", base=None)),
    ]
    course = [
        *of("lr", "Learning rate", Quantity("learning rate")),
        *of("gradient_norm", "Norm of a worker's gradients", Quantity("norm")),
        *of("noise_scale", "Noise scale: the batch beyond which examples tell less", Quantity("examples")),
    ]
    by_x = {"step": STEP, "epoch": Quantity("epoch", base=None), "elapsed_s": SECONDS}
    return {f"by_{x}": by(x, axis) for x, axis in by_x.items()} | {"speed": pace, "course": course}


def lines(title: str, x: Quantity, y: Quantity, series: Mapping[str, Sequence[plots.Point]]) -> list[Panel]:
    """A panel if there is anything to draw; a logarithmic axis only for values > 0."""
    drawn = {name: line for name, line in series.items() if line}
    is_positive = all(value > 0 for line in drawn.values() for _, value in line)
    return [Lines(title, x, y if is_positive else y._replace(base=None), drawn)] if drawn else []


def of_run(record: Record) -> dict[str, list[Panel]]:
    """Anatomy of the steps, ranks, buckets."""
    return {"anatomy": areas(record), "ranks": rank_map(record), "buckets": bucket_bars(record)}


def areas(record: Record) -> list[Panel]:
    """Parts of a step, stacked, over the steps."""
    known = ~np.isnan(record.train["compute"])
    steps = thinned(record.train["step"][known]).tolist()
    parts = {
        f"{'~' * (part in ESTIMATED and 'estimated' in record.exchange_time)}{part}": np.nan_to_num(
            thinned(record.train[part][known])
        ).tolist()
        for part in PARTS
        if part != "hidden" and not np.isnan(record.train[part]).all()
    }
    title = f"{record.name}: where a step's time goes"
    title += "; before it is known, an exchange is in compute" * ("unknown" in record.exchange_time)
    return [Areas(title, STEP, Quantity("time a step", "s"), steps, parts)] if len(steps) > 1 else []


def rank_map(record: Record) -> list[Panel]:
    """Own time of every rank over the median of its time: who is slow, and when."""
    own, steps = record.own, record.train["step"][~np.isnan(record.train["step"])]
    if own.shape[0] < 2 or own.shape[1] < 2 or not len(steps):
        return []
    median = np.median(own, axis=1, keepdims=True)
    relative = np.divide(own, median, out=np.ones_like(own), where=median > 0)
    title = f"{record.name}: a rank's own time, over the median of ranks"
    title += f"; the slowest of every {record.own_ranks}" * (record.own_ranks > 1)
    ends = [float(steps[0]), float(steps[-1])]
    return [
        Map(title, STEP, Quantity("rank"), Quantity("times the median"), ends, relative.T.tolist(), record.own_ranks)
    ]


def bucket_bars(record: Record) -> list[Panel]:
    """Seconds that every bucket is in flight, and waited for."""
    slowest = sorted(record.buckets, key=lambda row: -max(row[1], row[2]))[:MOST_BUCKETS]
    kinds = {"under way": 1, "waited for": 2}
    return [
        Bars(f"{record.name}: buckets {kind}, on rank 0", Quantity("time a step", "s", base=None), shown)
        for kind, i in kinds.items()
        if (shown := [(row[0][:48], row[i], row[i], row[i]) for row in slowest if row[i] > 0])
    ]


# ---------------------------------------------------------------- the page


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } td, th { border-bottom: 1px solid #ddd; padding: .25em .8em .25em 0;
text-align: left; vertical-align: top; overflow-wrap: anywhere; } svg { width: 100%; height: auto; }
.note { background: #fff3cd; padding: .4em .8em; } summary { cursor: pointer; font-weight: 600; }
"""
SECTIONS = {
    "by_step": "Curves by step",
    "by_epoch": "Curves by epoch",
    "by_elapsed_s": "Curves by seconds",
    "speed": "Speed",
    "course": "Learning rate and gradients",
    "anatomy": "Anatomy of a step",
    "ranks": "Ranks",
    "buckets": "Exchange by bucket",
}


def page(records: Sequence[Record], pictures: Mapping[str, Sequence[str]]) -> str:
    """The whole page; pictures are SVG texts by section."""
    title = "jaxmpi: " + ", ".join(record.name for record in records)
    notes = [f"{record.name}: {note}" for record in records for note in record.notes]
    body = [
        f"<h1>{escaped(title)}</h1>",
        *(f'<p class="note">{escaped(note)}</p>' for note in notes),
        table(["", *(r.name for r in records)], overview(records)),
        *(section(name, pictures.get(name, ())) for name in SECTIONS),
        differences(records) if len(records) > 1 else "",
        *(configuration(record) for record in records),
        f"<p>Made {datetime.datetime.now():%Y-%m-%d %H:%M}.</p>",
    ]
    head = f'<meta charset="utf-8"><title>{escaped(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def section(name: str, pictures: Sequence[str]) -> str:
    """A heading with its pictures, or nothing."""
    return f"<h2 id={name}>{SECTIONS[name]}</h2>" + "".join(pictures) if pictures else ""


def overview(records: Sequence[Record]) -> list[list[str]]:
    """The first table, with a row for each fact."""

    def last(record: Record, name: str) -> str:
        known = record.train[name][~np.isnan(record.train[name])]
        return f"{known[-1]:.6g}" if len(known) else ""

    def median(record: Record, name: str) -> str:
        return f"{np.nanmedian(record.train[name]):.6g}" if last(record, name) else ""

    def best(record: Record) -> str:
        found = [value for row in record.evaluations if (value := number(row.get("eval_top1"))) == value]
        return f"{100 * found[-1]:.2f} % (best {100 * max(found):.2f} %)" if found else ""

    def own(record: Record, name: str) -> str:
        found = [value for row in record.evaluations if (value := number(row.get(name))) == value]
        return f"{found[-1]:.6g} (from {min(found):.6g} to {max(found):.6g})" if found else ""

    def exchange_time(record: Record) -> str:
        total = sum(record.exchange_time.values())
        shown = [f"{known} in {lines} of {total} lines" for known, lines in record.exchange_time.items()]
        return "" if set(record.exchange_time) <= {"none"} else ", ".join(shown)

    def slowest(record: Record) -> str:
        named = Counter(filter(None, record.slowest)).most_common(1)
        return "".join(f"{rank}, in {times} of {len(record.slowest)} lines" for rank, times in named)

    def shares(record: Record) -> str:
        each, total = record.worker_steps, sum(record.worker_steps)
        if not total:
            return ""
        shown = [f"{made:.0f} ({100 * made / total:.1f} %)" for made in each[:MOST_SHARES]]
        more = f", ... of {len(each)}: least {min(each):.0f}, most {max(each):.0f}" * (len(each) > MOST_SHARES)
        return ", ".join(shown) + more

    rows: dict[str, Any] = {
        "workers": lambda r: r.facts.get("workers", ""),
        "rule, strategy": lambda r: f"{fact(r, 'experiment', 'rule', 'name')}, {r.facts.get('strategy', '')}",
        "steps": lambda r: last(r, "step"),
        "seconds": lambda r: last(r, "elapsed_s"),
        **{f"{unit}/s, median": partial(median, name=f"{unit}_per_s") for unit in ("images", "bytes")},
        "goodput": lambda r: last(r, "goodput"),
        "loss, last": lambda r: last(r, "loss"),
        "top-1, last": best,
        **{f"{name.removeprefix('eval_')}, last": partial(own, name=name) for name in own_figures(records)},
        "time of exchanges": exchange_time,
        "waited for most often": slowest,
        "steps by worker": shares,
    }
    found = [[name, *(str(value(record)) for record in records)] for name, value in rows.items()]
    return [row for row in found if any(row[1:])]


def fact(record: Record, *path: str) -> Any:
    """A fact by its path; empty if there is none."""
    value: Any = record.facts
    for key in path:
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value


def flat_facts(record: Record) -> dict[str, str]:
    """Facts by path, as text."""
    return {path: json.dumps(value) for path, value in flatten_json(record.facts).items() if path != "kind"}


def differences(records: Sequence[Record]) -> str:
    """Facts that differ between runs."""
    facts = [flat_facts(record) for record in records]
    paths = dict.fromkeys(path for each in facts for path in each)
    rows = [[path, *(each.get(path, "") for each in facts)] for path in paths]
    odd = [row for row in rows if len(set(row[1:])) > 1]
    return "<h2 id=differences>Differences</h2>" + table(["", *(r.name for r in records)], odd)


def configuration(record: Record) -> str:
    """All facts of a run, folded."""
    rows = [[path, value] for path, value in flat_facts(record).items()]
    title = f"{escaped(record.name)}: configuration and versions"
    return f"<details><summary>{title}</summary>{table(['', ''], rows)}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as HTML."""
    cells = ["".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows]
    top = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def escaped(text: Any) -> str:
    """Escape a text for HTML."""
    return html.escape(str(text))


# ---------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    """Options of `jaxmpi report`."""
    options = argparse.ArgumentParser(
        prog="jaxmpi report",
        description="Make an HTML page and plots from the records of one run, or of several to compare them.",
        epilog="example: jaxmpi report runs/first runs/second --out report",
    )
    options.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    options.add_argument("--out", type=Path, help="folder for page and pictures (default: report/ in the first RUN)")
    return options


def main(argv: Sequence[str]) -> None:
    """Read, draw, write, and print the page's path."""
    options = parser().parse_args(argv)
    print(f"report: {write(options.runs, options.out or options.runs[0] / 'report')}")


def write(runs: Sequence[Path], folder: Path) -> Path:
    """Write the page and its pictures to this folder; return the page's path.

    Raises:
        UsageError: a record cannot be read, or nothing can be written there.
    """
    records = [read(run, name) for run, name in zip(runs, names(runs), strict=True)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder) if folder.parent in runs else ():  # a stranger may have made them
            refuse_ways_out(made, repr(str(made)), "a report is not written through those: remove it, or use --out")
        pictures = drawn(records, folder)
        (folder / "index.html").write_text(page(records, pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"nothing can be written to {str(folder)!r}: {error.strerror}; use --out FOLDER") from error
    return folder / "index.html"


def names(runs: Sequence[Path]) -> list[str]:
    """Names of the run directories, numbered if two are equal."""
    short = [plain_text(run.resolve().name) for run in runs]
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]


def drawn(records: Sequence[Record], folder: Path) -> dict[str, list[str]]:
    """Draw pictures by section: return them as SVG, write them as PNG into the folder."""
    pictures: dict[str, list[str]] = {}
    jobs = [(name, name, panels) for name, panels in curves(records).items()]
    for i, record in enumerate(records):
        suffix = f"_{i + 1}" if len(records) > 1 else ""
        jobs += [(name, name + suffix, panels) for name, panels in of_run(record).items()]
    for name, file, panels in jobs:
        if panels:
            pictures.setdefault(name, []).append(plots.save_both(panels, folder / f"{file}.png"))
    return pictures
