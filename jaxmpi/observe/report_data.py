"""What a report shows: its charts, and the figures of each run as JSON.

The page draws them with its script. A long record has more lines than a figure can show. Plain decimation would miss
spikes, so each bin of a line keeps its least and its greatest value.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.observe.record_format import PARTS
from jaxmpi.observe.record_reader import XS, Record, as_list, average_neighbours, known_means

BINS = 800  # bins of a line on the page, each with its least and its greatest value; fewer if there are many runs
LEAST_BINS = 100
ALL_BINS = 3 * BINS  # bins of a line, in all runs together
MOST_WORKERS = 64  # workers whose steps are drawn, at most
SHOWN_ELSEWHERE = {"wait_s", "skipped", *PARTS}  # as parts of a step, or as notes
WORKER = "worker_steps."  # and a worker's number: the name of a column


class Series(NamedTuple):
    """A field of a record, drawn for every run."""

    table: str  # of the record: train, evaluations, shuffles or workers
    field: str
    label: str = ""  # beside the run's name; empty if a chart has one series


class Chart(NamedTuple):
    """Lines of all runs that have the fields."""

    section: str
    title: str
    series: Sequence[Series]
    unit: str = ""
    factor: float = 1.0
    is_log: bool = False  # if the values span a factor of 10
    note: str = ""  # beside the title


# ---------------------------------------------------------------- which there are


TOPS = {"eval_top1": "top-1", "eval_top5": "top-5"}
FIXED = {"eval_loss", *TOPS}  # figures of evaluations that have a chart of their own


def charts(records: Sequence[Record]) -> list[Chart]:
    """Charts of which any record has a value, in page order."""

    def chart(section: str, title: str, field: str, unit: str = "", table: str = "train", **more: Any) -> Chart:
        return Chart(section, title, [Series(table, field)], unit, **more)

    def chart_sets(title: str, figure: str, in_training: str, **more: Any) -> Chart:
        held_out = (Series("evaluations", prefix + figure, words) for prefix, words in sets.items())
        return Chart("learning", title, [Series("train", in_training, "training"), *held_out], **more)

    names = dict.fromkeys(str(name) for record in records for name in as_list(record.facts.get("validation_sets")))
    sets = {"eval_": "held out", **{f"eval_{name}_": f"held out, {name}" for name in names}}
    figures = {label: field.removeprefix("eval_") for field, label in TOPS.items()}
    set_charts = [
        chart_sets("Loss", "loss", "loss", is_log=True),
        *(
            chart_sets(f"Accuracy, {label}", name, f"train_{name}", unit="%", factor=100)
            for label, name in figures.items()
        ),
    ]
    drawn = {series.field for entry in set_charts for series in entry.series}
    sources = {str(record.facts.get("peak")) for record in records}
    workers = [Series("workers", f"{WORKER}{i}", f"worker {i}") for i in range(MOST_WORKERS)]
    workers = [series for series in workers if any(has_values(record, series) for record in records)]
    peak = " or ".join(f"of a peak {source}" for source in sorted(sources) if source.startswith("measured"))
    goodput = "seconds of compute over seconds since the first start"
    described = [
        *set_charts,
        *(figure_chart(name) for name in custom_figures(records) if name not in drawn),
        *(chart("speed", f"Speed, {speed_unit(name)}", name) for name in fields(records, "train") if is_speed(name)),
        chart("speed", "Model FLOP/s", "model_flops_per_s", "FLOP/s"),
        chart("speed", "Model FLOPs utilisation", "mfu", "%", factor=100, note=peak),
        chart("speed", "Time of a step", "step_s", "s", is_log=True),
        chart("speed", "Goodput", "goodput", "%", factor=100, note=goodput),
        chart("course", "Learning rate", "lr", is_log=True),
        chart("course", "Norm of a worker's gradients", "gradient_norm", is_log=True),
        chart("course", "Noise scale", "noise_scale", is_log=True, note="the batch beyond which examples tell less"),
        chart("course", "Shuffles of data in memory", "shuffle_s", "s", "shuffles", is_log=True),
        chart("course", "What shuffles move", "moved_bytes", "B", "shuffles", is_log=True),
        Chart("workers", "Steps by worker", workers),
    ]
    drawn = SHOWN_ELSEWHERE | {series.field for entry in described for series in entry.series}
    for table, section in (("train", "more"), ("workers", "workers")):
        for field in fields(records, table):
            if field not in drawn and not field.startswith(WORKER):
                unit = "s" if field.endswith("_s") else "B" if field.endswith("_bytes") else ""
                described.append(chart(section, field.removesuffix("_s").replace("_", " "), field, unit, table))
    return [entry for entry in described if any(has_values(r, series) for r in records for series in entry.series)]


def is_speed(field: str) -> bool:
    """Return True for examples of any kind a second."""
    return field.endswith("_per_s") and field != "model_flops_per_s"


def speed_unit(field: str) -> str:
    """`images/s` of `images_per_s`."""
    return field.removesuffix("_per_s").replace("_", " ") + "/s"


def words_of(field: str) -> str:
    """`bits per byte` of `eval_bits_per_byte`."""
    return field.removeprefix("eval_").replace("_", " ")


def figure_chart(field: str) -> Chart:
    """A figure such as `eval_mae`, and the same of training."""
    in_training = Series("train", f"train_{field.removeprefix('eval_')}", "training")
    return Chart("learning", words_of(field), [in_training, Series("evaluations", field, "held out")])


def fields(records: Sequence[Record], table: str) -> list[str]:
    """Names of a table's figures in any record."""
    return list(dict.fromkeys(name for record in records for name in getattr(record, table) if name not in XS))


def custom_figures(records: Sequence[Record]) -> list[str]:
    """Figures of evaluations without a fixed chart, such as `eval_mae`."""
    return sorted(name for name in fields(records, "evaluations") if name[:5] == "eval_" and name not in FIXED)


def has_values(record: Record, series: Series) -> bool:
    """Return True if a record has a value of a series."""
    values = getattr(record, series.table).get(series.field)
    return values is not None and not np.isnan(values).all()


# ---------------------------------------------------------------- the data


def report_data(records: Sequence[Record]) -> dict[str, Any]:
    """Charts and runs as the page's script reads them."""
    shown = charts(records)
    described = [
        {
            "section": chart.section,
            "title": chart.title,
            "unit": chart.unit,
            "note": chart.note,
            "isLog": chart.is_log,
            "series": [{"table": series.table, "label": series.label} for series in chart.series],
        }
        for chart in shown
    ]
    return {"charts": described, "runs": [run_data(record, len(records), shown) for record in records]}


def run_data(record: Record, runs: int, shown: Sequence[Chart]) -> dict[str, Any]:
    """One run of `runs`; `charts` has the series of each chart."""
    bins = min(BINS, max(LEAST_BINS, ALL_BINS // runs))
    return {
        "name": record.name,
        "charts": [[series_data(record, series, bins, chart.factor) for series in chart.series] for chart in shown],
        "parts": parts_data(record, bins),
        "isLate": record.is_late,
        "map": map_data(record, max(20, 1000 // runs)),
    }


def series_data(record: Record, series: Series, bins: int, factor: float = 1.0) -> dict[str, Any] | None:
    """Known columns `x` and values `y` of the lines to draw; of long records the means of bins, too; or None."""
    if not has_values(record, series):
        return None
    table = getattr(record, series.table)
    values = factor * table[series.field]
    lines = choose_lines(values, bins)
    data: dict[str, Any] = {"x": x_columns(table, lines), "y": json_numbers(values[lines])}
    if len(values) > 2 * bins:
        edges = bin_edges(len(values), bins)
        means = np.repeat(known_means(values, edges), np.diff([*edges, len(values)]))
        data["mean"] = json_numbers(means[lines])
    return data


def x_columns(table: Mapping[str, np.ndarray], lines: np.ndarray) -> dict[str, list[Any]]:
    """The known columns of `x` of these lines."""
    return {x: json_numbers(table[x][lines]) for x in XS if x in table and not np.isnan(table[x][lines]).all()}


def bin_edges(lines: int, bins: int) -> np.ndarray:
    """First lines of bins."""
    return np.linspace(0, lines, bins + 1).astype(int)[:-1]


def choose_lines(values: np.ndarray, bins: int) -> np.ndarray:
    """Lines to draw: all if few, else each bin's least and greatest, and the first and the last."""
    if len(values) <= 2 * bins:
        return np.arange(len(values))
    is_known, edges = ~np.isnan(values), bin_edges(len(values), bins)
    low, high = np.where(is_known, values, np.inf), np.where(is_known, values, -np.inf)
    ends = [*edges[1:], len(values)]
    extremes = [(a + low[a:b].argmin(), a + high[a:b].argmax()) for a, b in zip(edges, ends, strict=True)]
    return np.unique([0, *np.ravel(extremes), len(values) - 1])


def parts_data(record: Record, bins: int) -> dict[str, Any] | None:
    """Parts of a step by line; of long records, each bin's extremes."""
    train = record.train
    timed_rows = np.flatnonzero(~np.isnan(train["compute"]))
    parts = [part for part in PARTS if not np.isnan(train[part]).all()]
    if len(timed_rows) < 2 or not parts:
        return None
    rows = timed_rows[np.unique(np.concatenate([choose_lines(train[part][timed_rows], bins // 4) for part in parts]))]
    y = {part: json_numbers(np.nan_to_num(train[part][rows])) for part in parts}
    return {"x": x_columns(train, rows), "y": y}


def map_data(record: Record, columns: int) -> dict[str, Any] | None:
    """Ranks' own times over their median; None without two lines and ranks."""
    own_times, steps = record.own_times, record.train["step"][~np.isnan(record.train["step"])]
    if own_times.shape[0] < 2 or own_times.shape[1] < 2 or not len(steps):
        return None
    median = np.median(own_times, axis=1, keepdims=True)
    relative = np.divide(own_times, median, out=np.ones_like(own_times), where=median > 0)
    return {
        "relative": json_numbers(average_neighbours(relative, columns).T.ravel()),
        "ranks": relative.shape[1],
        "each": record.own_ranks,
        "ends": [*map(int, steps[[0, -1]])],
    }


def json_numbers(values: np.ndarray) -> list[float | int | None]:
    """Whole numbers as they are, others with six significant digits, as a record has them; NaN as null."""
    return [
        None if value != value else int(value) if value % 1 == 0 else float(f"{value:.6g}") for value in values.tolist()
    ]
