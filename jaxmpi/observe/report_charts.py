"""Figures of a report: their list, page data, and static pictures.

A report shows the same figures on an HTML page and in files. Each line chart is described once, as a `Chart`. The page
draws it from JSON, and `pictures` draws it with matplotlib. A long record has more lines than a figure can show. Plain
decimation would miss spikes, so each bin of a line keeps its least and its greatest value.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.observe import plots
from jaxmpi.observe.plots import Areas, Bars, Lines, Map, Panel, Quantity
from jaxmpi.observe.record_format import PARTS
from jaxmpi.observe.record_reader import XS, Record, Table, as_number, average_neighbours, known_means

BINS = 800  # bins of a line on the page, each with its least and its greatest value; fewer if there are many runs
LEAST_BINS = 100
ALL_BINS = 3 * BINS  # bins of a line, in all runs together
POINTS = 400  # points of a line in a picture: extremes of stretches; of a stacked area, means of neighbours
MOST_BUCKETS = 40  # drawn; the slowest
MOST_NAMED = 10  # slow ranks
MOST_WORKERS = 64  # workers whose steps are drawn, at most
STACKED = tuple(part for part in PARTS if part != "hidden")
AXES = {
    "step": Quantity("step", base=None),
    "epoch": Quantity("epoch", base=None),
    "elapsed_s": Quantity("seconds of training", base=None),
}
SHOWN_ELSEWHERE = {"wait_s", "skipped", *PARTS}  # as parts of a step, or as notes


class Series(NamedTuple):
    """A field of a record, drawn for every run."""

    table: str  # name of a table of the record: train, evaluations, shuffles or workers
    field: str
    label: str = ""  # beside the run's name; empty if a chart has one series
    factor: float = 1.0


class Chart(NamedTuple):
    """Lines of all runs that have the fields."""

    section: str
    title: str
    quantity: Quantity
    series: tuple[Series, ...]
    note: str = ""  # about the title


# ---------------------------------------------------------------- which there are


TOPS = {"top1": "top-1", "top5": "top-5"}


def charts(records: Sequence[Record]) -> list[Chart]:
    """Charts of which any record has a value, in page order."""
    loss = Series("train", "loss", "training"), Series("evaluations", "eval_loss", "held out")
    tops = tuple(Series("evaluations", f"eval_{name}", label, 100) for name, label in TOPS.items())
    is_measured = any(record.facts.get("peak") == "measured" for record in records)
    peak, goodput = "of a peak that was measured" * is_measured, "seconds of compute over seconds since the start"
    noise = "the batch beyond which examples tell less"
    described = [
        Chart("learning", "Loss", Quantity("loss"), loss),
        Chart("learning", "Accuracy", Quantity("accuracy", "%", base=None, low=None), tops),
    ]
    for field in custom_figures(records):
        quantity = Quantity(field.removeprefix("eval_"), base=None, low=None)
        described.append(Chart("learning", figure_title(field), quantity, (Series("evaluations", field),)))
    for field in filter(is_speed, curve_fields(records, "train")):
        described.append(of_step("speed", f"Speed, {speed_unit(field)}", Quantity(speed_unit(field), base=None), field))
    described += [
        of_step("speed", "Model FLOP/s", Quantity("all workers", "FLOP/s", base=None), "model_flops_per_s"),
        of_step("speed", "Model FLOPs utilisation", Quantity("MFU", "%", base=None), "mfu", 100, peak),
        of_step("speed", "Time of a step", Quantity("time", "s", base=None), "step_s"),
        of_step("speed", "Goodput", Quantity("share", "%", base=None), "goodput", 100, goodput),
        of_step("course", "Learning rate", Quantity("learning rate"), "lr"),
        of_step("course", "Norm of a worker's gradients", Quantity("norm"), "gradient_norm"),
        of_step("course", "Noise scale", Quantity("examples"), "noise_scale", 1, noise),
        Chart("course", "Shuffles of data in memory", Quantity("time", "s"), (Series("shuffles", "shuffle_s"),)),
        Chart("course", "What shuffles move", Quantity("bytes of all", "B"), (Series("shuffles", "moved_bytes"),)),
    ]
    drawn = {(series.table, series.field) for chart in described for series in chart.series}
    for table, section in (("train", "more"), ("workers", "workers")):
        for field in curve_fields(records, table):
            if (table, field) in drawn or field in SHOWN_ELSEWHERE or field.startswith("worker_steps."):
                continue
            unit = "s" if field.endswith("_s") else "B" if field.endswith("_bytes") else ""
            title, quantity = field.removesuffix("_s").replace("_", " "), Quantity(field, unit, base=None, low=None)
            described.append(Chart(section, title, quantity, (Series(table, field),)))
    return [
        chart for chart in described if any(has_values(record, each) for record in records for each in chart.series)
    ]


def of_step(section: str, title: str, quantity: Quantity, field: str, factor: float = 1.0, note: str = "") -> Chart:
    """A chart of one field of progress lines."""
    return Chart(section, title, quantity, (Series("train", field, "", factor),), note)


def is_speed(field: str) -> bool:
    """Return True for examples of any kind a second."""
    return field.endswith("_per_s") and field != "model_flops_per_s"


def speed_unit(field: str) -> str:
    """`images/s` of `images_per_s`."""
    return field.removesuffix("_per_s").replace("_", " ") + "/s"


def figure_title(field: str) -> str:
    """`bits per byte` of `eval_bits_per_byte`."""
    return field.removeprefix("eval_").replace("_", " ")


def curve_fields(records: Sequence[Record], table: str) -> list[str]:
    """Names of a table's figures in any record."""
    return list(dict.fromkeys(name for record in records for name in getattr(record, table) if name not in XS))


def custom_figures(records: Sequence[Record]) -> list[str]:
    """Figures of evaluations without a fixed chart, such as `eval_mae`."""
    fixed = {"eval_loss", *(f"eval_{name}" for name in TOPS)}
    return sorted(name for name in curve_fields(records, "evaluations") if name[:5] == "eval_" and name not in fixed)


def has_values(record: Record, series: Series) -> bool:
    """Return True if a record has a value of a series."""
    values = getattr(record, series.table).get(series.field)
    return values is not None and not np.isnan(values).all()


# ---------------------------------------------------------------- data for the page


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart as the page's script reads it."""
    return {
        "section": chart.section,
        "title": chart.title,
        "unit": chart.quantity.unit,
        "note": chart.note,
        "isLog": chart.quantity.base is not None,
        "series": [{"table": each.table, "label": each.label} for each in chart.series],
    }


def run_data(record: Record, runs: int, shown: Sequence[Chart]) -> dict[str, Any]:
    """One run of `runs` as the page's script reads it; `charts` has the series of each chart."""
    bins = min(BINS, max(LEAST_BINS, ALL_BINS // runs))
    workers = range(min(MOST_WORKERS, len(record.worker_steps)))
    return {
        "name": record.name,
        "charts": [[series_data(record, series, bins) for series in chart.series] for chart in shown],
        "parts": parts_data(record, bins),
        "isLate": "unknown" in record.exchange_time,  # an exchange counts as compute until it is known
        "workerSteps": [*map(int, record.worker_steps)],
        "workers": [series_data(record, Series("workers", f"worker_steps.{i}"), bins) for i in workers],
        "slowest": {
            "lines": len(record.slowest),
            "ranks": Counter(filter(None, record.slowest)).most_common(MOST_NAMED),
        },
        "map": map_data(record, runs),
        "buckets": slowest_buckets(record),
    }


def series_data(record: Record, series: Series, bins: int) -> dict[str, Any] | None:
    """Known columns `x` and values `y` of the lines to draw; of long records the means of bins, too; or None."""
    table: Table = getattr(record, series.table)
    if not has_values(record, series):
        return None
    values = series.factor * table[series.field]
    lines = choose_lines(values, bins)
    data: dict[str, Any] = {"x": x_columns(table, lines), "y": json_numbers(values[lines])}
    if len(values) > 2 * bins:
        edges = bin_edges(len(values), bins)
        means = np.repeat(known_means(values, edges), np.diff([*edges, len(values)]))
        data["mean"] = json_numbers(means[lines])
    return data


def x_columns(table: Table, lines: np.ndarray) -> dict[str, list[Any]]:
    """The known columns of `x` of these lines."""
    return {x: json_numbers(table[x][lines]) for x in XS if x in table and not np.isnan(table[x][lines]).all()}


def bin_edges(lines: int, bins: int) -> np.ndarray:
    """First lines of bins."""
    return np.linspace(0, lines, bins + 1).astype(int)[:-1]


def choose_lines(values: np.ndarray, bins: int) -> np.ndarray:
    """Lines to draw: all if few, else each bin's least and greatest.

    The first and the last are kept, too; gaps within a series as one line, and none if all values are NaN.
    """
    known = ~np.isnan(values)
    if not known.any():
        return np.empty(0, int)
    if len(values) <= 2 * bins:
        return np.arange(len(values))
    edges = bin_edges(len(values), bins)
    low, high = np.where(known, values, np.inf), np.where(known, values, -np.inf)
    ends = [*edges[1:], len(values)]
    extremes = [(a + low[a:b].argmin(), a + high[a:b].argmax()) for a, b in zip(edges, ends, strict=True)]
    return np.unique([0, *np.ravel(extremes), len(values) - 1])


def parts_data(record: Record, bins: int) -> dict[str, Any] | None:
    """Parts of a step by line; of long records, each bin's extremes."""
    train = record.train
    known = np.flatnonzero(~np.isnan(train["compute"]))
    parts = [part for part in PARTS if not np.isnan(train[part]).all()]
    if len(known) < 2 or not parts:
        return None
    kept = known[np.unique(np.concatenate([choose_lines(train[part][known], bins // 4) for part in parts]))]
    y = {part: json_numbers(np.nan_to_num(train[part][kept])) for part in parts}
    return {"x": x_columns(train, kept), "y": y}


def map_data(record: Record, runs: int) -> dict[str, Any] | None:
    """Ranks' own times over their median; None without two lines and ranks."""
    relative = over_median(record)
    if relative is None:
        return None
    return {
        "relative": json_numbers(average_neighbours(relative, max(20, 1000 // runs)).T.ravel()),
        "ranks": relative.shape[1],
        "each": record.own_ranks,
        "ends": known_steps(record)[[0, -1]].tolist(),
    }


def json_numbers(values: np.ndarray) -> list[float | int | None]:
    """Whole numbers as they are, others with six significant digits, as a record has them; NaN as null."""
    return [
        None if value != value else int(value) if value % 1 == 0 else float(f"{value:.6g}") for value in values.tolist()
    ]


# ---------------------------------------------------------------- static pictures


def pictures(records: Sequence[Record], shown: Sequence[Chart]) -> dict[str, list[Panel]]:
    """Panels of all runs together, by file: learning, speed and course."""
    by_x = {f"by_{x}": panels(records, shown, "learning", x) for x in XS}
    return by_x | {section: panels(records, shown, section, "step") for section in ("speed", "course")}


def panels(records: Sequence[Record], shown: Sequence[Chart], section: str, x: str) -> list[Panel]:
    """A section's panels with data, logarithmic only if values are > 0."""
    result: list[Panel] = []
    for chart in shown:
        drawn: dict[str, Sequence[plots.Point]] = {}
        for series in chart.series if chart.section == section else ():
            for record in records:
                if line := points(record, series, x):
                    drawn[", ".join(filter(None, (record.name, series.label)))] = line
        if drawn:
            is_positive = all(value > 0 for line in drawn.values() for _, value in line)
            y = chart.quantity if is_positive else chart.quantity._replace(base=None)
            title = f"{chart.title}{': ' * bool(chart.note)}{chart.note}, by {AXES[x].name}"
            result.append(Lines(title, AXES[x], y, drawn))
    return result


def points(record: Record, series: Series, x: str) -> list[plots.Point]:
    """(x, y) of lines that have both; in long records only extremes."""
    table: Table = getattr(record, series.table)
    if series.field not in table:
        return []
    kept = choose_lines(table[series.field], POINTS // 2)
    xs, ys = table[x][kept].tolist(), (series.factor * table[series.field][kept]).tolist()
    return [(a, b) for a, b in zip(xs, ys, strict=True) if a == a and b == b]


def run_pictures(record: Record) -> dict[str, list[Panel]]:
    """Panels of one run, by file: anatomy of the steps, ranks, buckets."""
    return {"anatomy": areas(record), "ranks": rank_map(record), "buckets": bucket_bars(record)}


def areas(record: Record) -> list[Panel]:
    """Parts of a step, stacked, over the steps."""
    known = ~np.isnan(record.train["compute"])
    steps = average_neighbours(record.train["step"][known], POINTS).tolist()
    parts = {}
    for part in STACKED:
        if not np.isnan(record.train[part]).all():
            values = average_neighbours(record.train[part][known], POINTS)
            parts[part] = np.nan_to_num(values).tolist()
    title = f"{record.name}: where a step's time goes"
    title += "; before it is known, an exchange is in compute" * ("unknown" in record.exchange_time)
    return [Areas(title, AXES["step"], Quantity("time a step", "s"), steps, parts)] if len(steps) > 1 else []


def known_steps(record: Record) -> np.ndarray:
    """Steps of the lines that have one."""
    return record.train["step"][~np.isnan(record.train["step"])]


def over_median(record: Record) -> np.ndarray | None:
    """f64[columns, ranks]: each rank's own time over the ranks' median, or None."""
    own = record.own
    if own.shape[0] < 2 or own.shape[1] < 2 or not len(known_steps(record)):
        return None
    median = np.median(own, axis=1, keepdims=True)
    return np.divide(own, median, out=np.ones_like(own), where=median > 0)


def rank_map(record: Record) -> list[Panel]:
    """Map of each rank's own time over the median, by step."""
    relative, each = over_median(record), record.own_ranks
    if relative is None:
        return []
    title = f"{record.name}: a rank's own time, over the median of ranks"
    title += f"; the slowest of every {each}" * (each > 1)
    ends, value = known_steps(record)[[0, -1]].tolist(), Quantity("times the median")
    return [Map(title, AXES["step"], Quantity("rank"), value, ends, relative.T.tolist(), each)]


def slowest_buckets(record: Record) -> list[list[Any]]:
    """[label, seconds in flight, seconds waited for] of the slowest buckets."""
    whole = [[label, as_number(busy), as_number(waited)] for label, busy, waited in record.buckets]
    return sorted(whole, key=lambda row: -max(row[1], row[2]))[:MOST_BUCKETS]


def bucket_bars(record: Record) -> list[Panel]:
    """Seconds that every bucket is in flight, and waited for."""
    result: list[Panel] = []
    for column, kind in enumerate(("in flight", "waited for"), 1):
        rows = [(row[0][:48], row[column]) for row in slowest_buckets(record) if row[column] > 0]
        bars = [(label, seconds, seconds, seconds) for label, seconds in rows]
        if bars:
            title, time = f"{record.name}: buckets {kind}, on rank 0", Quantity("time a step", "s", base=None)
            result.append(Bars(title, time, bars))
    return result
