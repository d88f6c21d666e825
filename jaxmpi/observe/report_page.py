"""The page of a report: headlines, groups of runs by settings, tables.

The page is one file that needs no network: its style, its scripts and its data are in it. `page/` holds them as files
of their own, with uPlot, which draws the curves. The content security policy of the page lets no other script run.
"""

import base64
import datetime
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from itertools import chain
from string import Template
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.json_tree import flatten_json
from jaxmpi.observe.record_reader import Record, Table, as_number
from jaxmpi.observe.report_data import TOPS, custom_figures, is_speed, report_data, speed_unit, words_of

MOST_S = 1e10  # seconds of a run; a stranger's record may say more
PREFIXES = ((1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"))
MOST_NAMED = 4  # runs in the title
MOST_WORDS = 60  # letters of a name made of settings
MOST_BUCKETS = 40  # drawn; the slowest
MOST_SLOW = 10  # ranks that others waited for
SECTIONS = {
    "learning": "Loss and figures",
    "speed": "Speed and parts of a step",
    "course": "Learning rate and gradients",
    "ranks": "Ranks and exchange",
    "workers": "Asynchronous workers",
    "more": "More fields of the record",
}
DECISIVE = (  # facts that are equal in runs of one group
    *("experiment", "workers", "strategy", "effective_batch"),
    *("experiment_file", "commit", "versions", "backend"),
)
OF_ONE_RUN = ("seed", "run_dir", "resume")  # settings in which runs of one group may differ


def page(records: Sequence[Record]) -> str:
    """The whole page of these runs."""
    grouped = group_runs(records)
    has_seeds = len(grouped) < len(records)
    named = [entry.name for entry in (grouped if has_seeds else records)]
    title = ", ".join(named[:MOST_NAMED]) + f" and {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
    notes = [f"{record.name}: {note}" for record in records for note in record.notes]
    groups = [group._asdict() for group in grouped] if has_seeds else []
    page_data = {**report_data(records), "sections": SECTIONS, "groups": groups}
    style, script, uplot = map(read_asset, ("report.css", "report.js", "uplot/uPlot.iife.min.js"))
    styles = read_asset("uplot/uPlot.min.css") + style
    # Names come from records, perhaps of a stranger. Should escaping ever fail, the browser runs these scripts only.
    scripts = " ".join(f"'sha256-{digest(text)}'" for text in (uplot, script))
    return Template(read_asset("template.html")).substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest(styles)}'; script-src {scripts}; img-src data:",
        title=escape(title),
        made=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        styles=styles,
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        overview=overview(records, grouped if has_seeds else []),
        sections="".join(chart_section(name, heading, records) for name, heading in SECTIONS.items()),
        samples="".join(sample_figures(record, len(records)) for record in records if record.samples),
        differences=differences(records) if len(records) > 1 else "",
        configuration=configuration(records),
        # No name in it may end the script element, as `</script>` would.
        data=json.dumps(page_data, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c"),
        uplot=uplot,
        script=script,
    )


def read_asset(name: str) -> str:
    """A file of the page."""
    return resources.files("jaxmpi.observe").joinpath("page", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """SHA-256 in base64."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows as HTML, named by the first column; a wide table scrolls."""
    cells = [f"<th scope=row>{escape(row[0])}</th>" + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) for row in rows]
    top = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f'<div class="table {kind}" tabindex=0><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# ---------------------------------------------------------------- runs that differ by seed only


class Group(NamedTuple):
    """Runs of equal settings and program but different seeds, or one run."""

    name: str
    runs: list[int]


def group_runs(records: Sequence[Record]) -> list[Group]:
    """Runs grouped by settings, named by their differences; apart if seeds repeat."""
    settings = [run_settings(record) for record in records]
    members: dict[str, list[int]] = {}
    for i, record in enumerate(records):
        without_seed = json.dumps(settings[i], sort_keys=True) if record.facts else f"run {i}"
        members.setdefault(without_seed, []).append(i)
    grouped: list[list[int]] = []
    for runs in members.values():
        seeds = {json.dumps(fact(records[i], "experiment", "seed")) for i in runs}
        grouped += [runs] if len(seeds) == len(runs) else [[i] for i in runs]
    grouped.sort()  # by the first run, in the order of the command line
    firsts = [settings[runs[0]] for runs in grouped]
    odd = [path for path in dict.fromkeys(chain(*firsts)) if len({first.get(path) for first in firsts}) > 1]
    named = []
    for runs, first in zip(grouped, firsts, strict=True):
        words = [f"{path.removeprefix('experiment.')} {first[path].strip(chr(34))}" for path in odd if path in first]
        name = ", ".join(words)
        is_short = len(runs) > 1 and 0 < len(name) <= MOST_WORDS
        named.append(Group(name if is_short else records[runs[0]].name, runs))
    return named


def run_settings(record: Record) -> dict[str, str]:
    """Settings and program that decide on a run, without seed and place."""
    left_out = {f"experiment.{name}" for name in OF_ONE_RUN}
    facts = {
        path: value
        for path, value in flat_facts(record).items()
        if path not in left_out and path.partition(".")[0] in DECISIVE
    }
    if "commit" in facts:  # files that differ from it may be a run's own output; the experiment file has a digest
        facts["commit"] = facts["commit"].replace('+"', '"')
    return facts


def fact(record: Record, *path: str) -> Any:
    """A fact by its path; empty if there is none."""
    value: Any = record.facts
    for key in path:
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value


def flat_facts(record: Record) -> dict[str, str]:
    """Facts by path, as text."""
    return {path: json.dumps(value) for path, value in flatten_json(record.facts).items() if path != "kind"}


# ---------------------------------------------------------------- overview


def overview(records: Sequence[Record], grouped: Sequence[Group]) -> str:
    """Tiles of one run; tables of several, and of their groups."""
    figures = custom_figures(records)
    headline_rows = [[tile for tile in headlines(record, figures) if tile.value] for record in records]
    if len(records) == 1:
        tiles = []
        for tile in headline_rows[0]:
            wide, words = " wide" * (len(tile.value) > 24), tile.more or tile.note
            more = f"<dd class=more>{escape(words)}</dd>" * bool(words)
            tiles.append(
                f'<div class="tile{wide}"><dt>{escape(tile.name)}</dt><dd>{escape(tile.value)}</dd>{more}</div>'
            )
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    columns = {tile.name: tile.note for row in headline_rows for tile in row}
    head = ["run", *(f"{name}, {note}" if note else name for name, note in columns.items())]
    rows = []
    for record, row in zip(records, headline_rows, strict=True):
        shown = {tile.name: f"{tile.value} ({tile.more})" if tile.more else tile.value for tile in row}
        rows.append([record.name, *(shown.get(name, "") for name in columns)])
    each_run = table(head, rows, "runs")
    if not grouped:
        return each_run
    return mean_over_seeds(records, grouped) + f"<details><summary>Every run</summary>{each_run}</details>"


def mean_over_seeds(records: Sequence[Record], grouped: Sequence[Group]) -> str:
    """Table of the groups' last evaluations: mean and standard error over seeds."""
    tops = {name: (f"{label}, %", 100.0) for name, label in TOPS.items()}
    others = {name: (words_of(name), 1.0) for name in custom_figures(records)}
    figures = {
        name: shown
        for name, shown in (tops | others | {"eval_loss": ("held-out loss", 1.0)}).items()
        if any(name in record.evaluations for record in records)
    }
    rows = []
    for group in grouped:
        cells = [group.name, str(len(group.runs))]
        for name, (_, factor) in figures.items():
            histories = [known_values(records[i].evaluations, name) for i in group.runs]
            ends = [factor * float(values[-1]) for values in histories if len(values)]
            words = [f"{statistics.mean(ends):.4g}"] if ends else []
            words += [f"± {statistics.stdev(ends) / math.sqrt(len(ends)):.2g}"] if len(ends) > 1 else []
            words += [f"({len(histories) - len(ends)} without)"] if len(ends) < len(histories) else []
            cells.append(" ".join(words))
        rows.append(cells)
    head = ["mean ± standard error over seeds", "runs", *(title for title, _ in figures.values())]
    return table(head, rows, "runs")


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
    train, steps = record.train, value_of(record.train, "step")
    source = str(record.facts.get("peak"))
    measured = f" as {source}" * source.startswith("measured")
    rule, strategy = fact(record, "experiment", "rule", "name"), record.facts.get("strategy", "")
    elapsed_s = max([*known_values(train, "elapsed_s"), *known_values(record.evaluations, "elapsed_s")], default=0.0)
    took = f"{elapsed_s:.3g} s" if elapsed_s < 60 else str(datetime.timedelta(seconds=round(min(elapsed_s, MOST_S))))
    return [
        *figure_headline(record, "top-1", "eval_top1", 100, " %"),
        *(headline for name in figures for headline in figure_headline(record, words_of(name), name)),
        *figure_headline(record, "held-out loss", "eval_loss"),
        Headline("training loss", value_of(train, "loss"), note="last"),
        Headline("time", took * bool(elapsed_s), f"{steps} steps" * bool(steps)),
        *(
            Headline(speed_unit(name), value_of(train, name, np.median), note="median")
            for name in filter(is_speed, train)
        ),
        Headline("model FLOP/s", value_of(train, "model_flops_per_s", np.median), note="median"),
        Headline("MFU", value_of(train, "mfu", np.median, 100, " %"), note="median, of the peak" + measured),
        Headline("learning rate", value_of(train, "lr", np.max), f"last {value_of(train, 'lr')}", note="at most"),
        Headline("workers", str(record.facts.get("workers", "")), str(record.facts.get("backend", ""))),
        Headline("rule, strategy", ", ".join(filter(None, map(str, (rule, strategy))))),
        Headline("goodput", value_of(train, "goodput", factor=100, unit=" %"), note="of the time is compute"),
    ]


def figure_headline(record: Record, title: str, name: str, factor: float = 1.0, unit: str = "") -> list[Headline]:
    """A figure's last value, with its best or, if it is unknown which is better, its extremes."""
    values = factor * known_values(record.evaluations, name)
    if not len(values):
        return [Headline(title, "")]
    better = {"eval_loss": "min", "eval_bits_per_byte": "min", "eval_top1": "max", "eval_top5": "max"}.get(name)
    if fact(record, "experiment", "monitor") == name:
        better = fact(record, "experiment", "monitor_mode")
    last, low, high = (format_value(value, unit) for value in (values[-1], values.min(), values.max()))
    more = {"min": f"best {low}", "max": f"best {high}"}.get(str(better), f"from {low} to {high}")
    return [Headline(title, last, more)]


def known_values(table: Table, name: str) -> np.ndarray:
    """The values of a field that are known."""
    values = table.get(name, np.empty(0))
    return values[~np.isnan(values)]


def value_of(
    table: Table, name: str, chosen: Callable = lambda values: values[-1], factor: float = 1.0, unit: str = ""
) -> str:
    """The last known value, or another one of them; empty if there is none."""
    values = known_values(table, name)
    return format_value(factor * float(chosen(values)), unit) if len(values) else ""


def format_value(value: float, unit: str) -> str:
    """Format a value: two decimals and the unit, or about six digits."""
    if unit:
        return f"{value:.2f}{unit}"
    size = abs(value)
    prefix = next(((limit, letter) for limit, letter in PREFIXES if limit <= size < 1000 * limit), None)
    if prefix:
        return f"{value / prefix[0]:.4g} {prefix[1]}"
    return f"{value:,.0f}" if 1000 <= size < 1e6 else f"{value:.6g}"


# ---------------------------------------------------------------- sections


def chart_section(name: str, heading: str, records: Sequence[Record]) -> str:
    """A section that the page's script fills with charts; bars of each run are in that of ranks already."""
    cards = "".join(rank_bars(record, len(records)) for record in records) if name == "ranks" else ""
    filled = ' class="filled"' if cards else ""
    head = f'<section id="{name}" aria-labelledby="{name}-title"{filled}><h2 id="{name}-title">{heading}</h2>'
    return f'{head}<div class="charts">{cards}</div></section>'


def rank_bars(record: Record, runs: int) -> str:
    """Cards of the ranks that others waited for, and of the time of an exchange by bucket; nothing if unknown."""
    of_run = f" of {record.name}" * (runs > 1)
    slowest = Counter(filter(None, record.slowest)).most_common(MOST_SLOW)
    waits = [(name, (float(times),), f"{times} lines") for name, times in slowest]
    note = f"the slowest rank, if 10 % above the median, in {len(record.slowest)} lines"
    sizes = [(label, (as_number(busy), as_number(waited))) for label, busy, waited in record.buckets]
    longest = sorted(sizes, key=lambda row: -max(row[1]))[:MOST_BUCKETS]
    buckets = [(label, both, f"{1e3 * max(both):.3g} ms") for label, both in longest]
    return bars(f"Ranks that others waited for{of_run}", note, waits) + bars(
        f"Exchange by bucket, on rank 0{of_run}", "a step: in flight; below, the time that a rank waits for it", buckets
    )


def bars(title: str, note: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """A card of named bars, one below another for each value of a row; nothing without rows."""
    if not rows:
        return ""
    largest = max(value for _, values, _ in rows for value in values) or 1.0
    lines = []
    for name, values, text in rows:  # the page's policy allows no style of an element's own, so no width of a box
        meters = "".join(f'<meter max="{largest:.6g}" value="{value:.6g}"></meter>' for value in values)
        lines.append(f"<tr><th scope=row>{escape(name)}</th><td>{meters}</td><td>{text}</td></tr>")
    return (
        f'<article class="card bars"><div class="head"><h3>{escape(title)}</h3></div><div class="key">{note}</div>'
        f"<table>{''.join(lines)}</table></article>"
    )


def sample_figures(record: Record, runs: int) -> str:
    """The newest texts and pictures of a run."""
    shown = []
    for sample in record.samples:
        title = escape(f"{sample.name}, step {sample.step}")
        body = f"<pre>{escape(sample.text)}</pre>"
        if sample.picture:
            body = f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(sample.picture).decode()}">'
        shown.append(f"<figure><figcaption>{title}</figcaption>{body}</figure>")
    of_run = f" of {escape(record.name)}" * (runs > 1)
    return f'<section class="samples filled"><h2>Samples{of_run}</h2><div>{"".join(shown)}</div></section>'


def differences(records: Sequence[Record]) -> str:
    """Facts that differ between runs."""
    facts = [flat_facts(record) for record in records]
    paths = dict.fromkeys(path for settings in facts for path in settings)
    rows = [[path, *(settings.get(path, "") for settings in facts)] for path in paths]
    odd = [row for row in rows if len(set(row[1:])) > 1]
    head = '<section id="differences"><h2>Settings that differ</h2>'
    return head + table(["", *(record.name for record in records)], odd) + "</section>"


def configuration(records: Sequence[Record]) -> str:
    """All facts of all runs, each folded; many runs in one fold."""
    folds = []
    for record in records:
        facts = table(["setting", "value"], [[path, value] for path, value in flat_facts(record).items()])
        title = f"{escape(record.name)}: configuration and versions"
        folds.append(f"<details><summary>{title}</summary>{facts}</details>")
    html = "".join(folds)
    return f"<details><summary>{len(records)} runs</summary>{html}</details>" if len(records) > MOST_NAMED else html
