"""Facts of a run for its report: headlines, and all by path."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.json_tree import flatten_json
from jaxmpi.observe import report_charts
from jaxmpi.observe.record_reader import Record, Table

MOST_SHARES = 16  # workers whose steps are listed
PREFIXES = ((1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"))


class Headline(NamedTuple):
    """A fact on the first screen."""

    name: str
    value: str  # empty if unknown
    more: str = ""  # text beside the value, about this run
    note: str = ""  # meaning of the value, the same for all runs


def headlines(record: Record, figures: Sequence[str]) -> list[Headline]:
    """Facts of a run, the most important first.

    Args:
        figures: of evaluations by tasks of one's own, which any of the runs has.
    """
    train, steps = record.train, last_value(record.train, "step")
    measured = " as measured" * (record.facts.get("peak") == "measured")
    rule, strategy = fact(record, "experiment", "rule", "name"), record.facts.get("strategy", "")
    elapsed_s = [*known_values(train, "elapsed_s"), *known_values(record.evaluations, "elapsed_s")]
    lines = f"of {sum(record.exchange_time.values())} lines"
    sources = [f"{source} in {count} {lines}" for source, count in record.exchange_time.items()]
    has_exchange = bool(record.exchange_time.keys() - {"none"})
    [(slowest, times)] = Counter(filter(None, record.slowest)).most_common(1) or [("", 0)]
    return [
        *best(record, "top-1", "eval_top1", 100, " %"),
        *(each for name in figures for each in best(record, report_charts.figure_title(name), name)),
        *best(record, "held-out loss", "eval_loss"),
        Headline("training loss", last_value(train, "loss"), note="last"),
        Headline("time", duration(max(elapsed_s, default=math.nan)), f"{steps} steps" * bool(steps)),
        *(
            Headline(report_charts.speed_unit(name), median_value(train, name), note="median")
            for name in filter(report_charts.is_speed, train)
        ),
        Headline("model FLOP/s", median_value(train, "model_flops_per_s"), note="median"),
        Headline("MFU", median_value(train, "mfu", 100, " %"), note="median, of the peak" + measured),
        Headline("workers", str(record.facts.get("workers", "")), str(record.facts.get("backend", ""))),
        Headline("rule, strategy", ", ".join(filter(None, map(str, (rule, strategy))))),
        Headline("goodput", last_value(train, "goodput", 100, " %"), note="of the time is compute"),
        Headline("time of exchanges", ", ".join(sources) * has_exchange),
        Headline("waited for most often", slowest, f"in {times} of {len(record.slowest)} lines" * bool(slowest)),
        Headline("steps by worker", shares(record)),
    ]


def known_values(table: Table, name: str) -> np.ndarray:
    """The values of a field that are known."""
    values = table.get(name, np.empty(0))
    return values[~np.isnan(values)]


def last_value(table: Table, name: str, factor: float = 1.0, unit: str = "") -> str:
    """The last known value; empty if there is none."""
    values = known_values(table, name)
    return format_value(factor * values[-1], unit) if len(values) else ""


def median_value(table: Table, name: str, factor: float = 1.0, unit: str = "") -> str:
    """The median of the known values; empty if there are none."""
    values = known_values(table, name)
    return format_value(factor * float(np.median(values)), unit) if len(values) else ""


def format_value(value: float, unit: str) -> str:
    """Format a value: two decimals and the unit, or about six digits."""
    if unit:
        return f"{value:.2f}{unit}"
    size = abs(value)
    prefix = next(((limit, letter) for limit, letter in PREFIXES if limit <= size < 1000 * limit), None)
    if prefix:
        return f"{value / prefix[0]:.4g} {prefix[1]}"
    return f"{value:,.0f}" if 1000 <= size < 1e6 else f"{value:.6g}"


def best(record: Record, title: str, name: str, factor: float = 1.0, unit: str = "") -> list[Headline]:
    """A figure's last value, with its best or, if unknown, its extremes."""
    values = factor * known_values(record.evaluations, name)
    if not len(values):
        return [Headline(title, "")]
    shown = [format_value(value, unit) for value in (values[-1], values.min(), values.max())]
    ends = {"min": f"best {shown[1]}", "max": f"best {shown[2]}"}
    return [Headline(title, shown[0], ends.get(better(record, name), f"from {shown[1]} to {shown[2]}"))]


def better(record: Record, name: str) -> str:
    """`max` or `min`, whichever is better of a figure; empty if unknown."""
    if fact(record, "experiment", "monitor") == name:
        return str(fact(record, "experiment", "monitor_mode"))
    return {"eval_loss": "min", "eval_bits_per_byte": "min", "eval_top1": "max", "eval_top5": "max"}.get(name, "")


def duration(seconds: float) -> str:
    """A duration such as `3 min 20 s`; empty for NaN."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def shares(record: Record) -> str:
    """Steps of each asynchronous worker, and its share."""
    each, total = record.worker_steps, sum(record.worker_steps)
    if not total:
        return ""
    shown = [f"{made:.0f} ({100 * made / total:.1f} %)" for made in each[:MOST_SHARES]]
    more = f", ... of {len(each)}: least {min(each):.0f}, most {max(each):.0f}" * (len(each) > MOST_SHARES)
    return ", ".join(shown) + more


def fact(record: Record, *path: str) -> Any:
    """A fact by its path; empty if there is none."""
    value: Any = record.facts
    for key in path:
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value


def flat_facts(record: Record) -> dict[str, str]:
    """Facts by path, as text."""
    return {path: json.dumps(value) for path, value in flatten_json(record.facts).items() if path != "kind"}
