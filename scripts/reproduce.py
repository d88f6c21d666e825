"""Tables and figures of the papers, as ratios, ours beside theirs.

    python scripts/reproduce.py table2                               what models cost
    python scripts/reproduce.py table3 -n 8                          exchange of models' gradients, by strategy
    python scripts/reproduce.py ring --hosts 8 --rate 200mbit        the same on an emulated cluster
    python scripts/reproduce.py speedup --workers 1 2 4 8            images/s of two models; with --hosts a host each
    python scripts/reproduce.py table3 --show                        only the lines that it would run
    python scripts/reproduce.py all --quick                          every one of them, small: to see that all run

It runs the project's other scripts and compares their results; it measures nothing itself. It writes NAME.csv,
NAME.png, and NAME.md with machine, date and a remark on differences, into --out (runs/papers); `all` writes all.md,
too, and goes on past one that cannot run here.
"""

import argparse
import collections
import contextlib
import csv
import datetime
import functools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import ROOT

from jaxmpi.core.errors import UsageError, check
from jaxmpi.observe import plots
from jaxmpi.observe.plots import Bars, Lines, Panel, Quantity

PYTHON = sys.executable
TO_END_S = 10.0  # for a line's ranks to end
SLOW, FAST = "200mbit", "10gbit"  # links of emulated hosts
MODELS = ("alexnet", "googlenet")  # of table 1 of Ma et al.
Values = dict[str, float]  # by quantity
RowOf1 = tuple[str, int, int]  # of that table: model, images a worker, bits of a float that travels


class Job(NamedTuple):
    """A table or figure of a paper."""

    source: str
    # commands; {out} in one stands for a new file, {kept} for one that goes on from an earlier call
    lines: Callable[[argparse.Namespace], list[list[str]]]
    read: Callable[[list[str], list[str]], Values]  # their output, and the text of their files -> ours
    theirs: Callable[[argparse.Namespace], Values]  # the paper's figures for as many workers
    remark: str  # on differences
    over_hosts: bool = True  # may run on emulated ones
    # a picture of a figure; without it bars of all quantities that the paper has
    panels: Callable[[list[str], list[str]], list[Panel]] | None = None


# ---------------------------------------------------------------- commands


def bench(options: argparse.Namespace, *args: str) -> list[str]:
    """`jaxmpi bench` on ranks of this machine, or on emulated hosts."""
    rest = [*args, "--warm-up", str(options.warm_up), "--rounds", str(options.rounds), "--out", "{out}"]
    if not options.hosts:
        return [PYTHON, "-m", "jaxmpi.bench", "-n", str(options.n), *rest]
    return [*on_hosts(options, options.hosts), "mpirun", "-n", str(options.hosts), PYTHON, "-m", "jaxmpi.bench", *rest]


def on_hosts(options: argparse.Namespace, hosts: int) -> list[str]:
    """Start of a line that runs on emulated hosts; otherwise empty."""
    return harness.cluster(hosts, options.rate or SLOW) if options.hosts and hosts > 1 else []


def trainings(options: argparse.Namespace) -> list[list[str]]:
    """Train rows of table 1 with each number of workers.

    Emulated hosts have one worker each. A row with one number in the paper runs with 1 worker and with the most.
    """
    length = "10st" if options.quick else "30st"
    fixed = ["--train-for", length, "--eval-every", "0st", "--checkpoint-every", "0st", "--run-dir", "{out}"]
    train = [PYTHON, "-m", "jaxmpi.tools.cli", "train", "-n"]
    workers = from_one(options, (1, options.hosts) if options.hosts else (1, 2) if options.quick else (1, 2, 4, 8))

    def of_row(name: str, batch: int, bits: int) -> list[str]:
        sizes = ["--local-batch", str(batch // EIGHTH), "--exchange.strategy", f"asa{bits}"]
        return [f"experiments/{name.lower()}.py", *sizes, *fixed]

    return [
        [*on_hosts(options, n), *train, str(n), *of_row(name, batch, bits)]
        for (name, batch, bits), paper in chosen(options).items()
        for n in (workers if len(paper) > 1 else dict.fromkeys((1, max(workers))))
        if bits == WIDE or n > 1  # one worker sends nothing, so it is the same at all widths
    ]


def from_one(options: argparse.Namespace, usual: Sequence[int]) -> list[int]:
    """Numbers of workers whose speeds are set over that of one.

    Raises:
        UsageError: one is not among them.
    """
    asked = options.workers or usual
    got = " ".join(map(str, asked))
    check(1 in asked, f"--workers: got {got}; expected 1 among them, whose speed is the base")
    return sorted(set(asked))


def accuracies(options: argparse.Namespace) -> list[list[str]]:
    """Train with each number of workers, and with 16 bits.

    Recorded runs are not repeated.
    """
    more = ["--set", "train-for=60st", "--out", "{out}"] if options.quick else ["--out", "{kept}"]
    return [script("study", name, "--seeds", str(options.seeds), *more) for name in FIGURES]


def costs(options: argparse.Namespace) -> list[list[str]]:
    """Time exchanges of gradients, then one worker's steps, as in table 3."""
    end = "_tiny" if options.quick else ""
    models = [f"{name}{end}" for name in dict.fromkeys(name for name, _ in TABLE3)]
    steps = {batch: [f"{name}{end}" for name, each in TABLE3 if each == batch] for _, batch in TABLE3}
    exchanges = bench(options, "--tree", *models, "--strategies", *EXCHANGES, "--peers", "none")
    return [exchanges] + [
        script("zoo_steps", "-n", "1", "--local-batch", str(batch), "--models", *names, "--json", "{out}")
        for batch, names in steps.items()
    ]


def language(options: argparse.Namespace) -> list[list[str]]:
    """Time steps of a language model on emulated hosts."""
    hosts = map(str, from_one(options, (1, 2) if options.quick else (1, 2, 4, 8)))
    size = ["--shrink", "64" if options.quick else "2", "--rounds", str(min(options.rounds, 5))]
    return [script("bench_language", "--hosts", *hosts, "--rate", options.rate or FAST, *size, "--json", "{out}")]


def shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle with few and many workers, and all sources."""
    many = options.hosts or options.n
    workers = [str(n) for n in dict.fromkeys((2, many))]
    images = "48" if options.quick else "200"
    return [
        script("bench_shuffle", "shuffle", *layout(options, workers), "--rounds", str(options.rounds)),
        script("bench_shuffle", "sources", "--images", images, "--rounds", str(min(options.rounds, 3))),
    ]


def layout(options: argparse.Namespace, workers: Sequence[str]) -> list[str]:
    """Options of `bench_shuffle.py`: on hosts or here, and how many MB."""
    if options.hosts:
        return ["--hosts", *workers, "--rate", options.rate or SLOW, "--mb", "40"]
    return ["--ranks", *workers, *(["--mb", "8"] if options.quick else [])]


def group_shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle with half the workers and all, by group size."""
    many = options.hosts or options.n
    workers = [str(n) for n in dict.fromkeys((max(many // 2, 2), many))]
    return [script("bench_shuffle", "shuffle", *layout(options, workers), "--rounds", str(options.rounds))]


IBM_S = {"resnet50": "ResNet-50", "googlenetbn": "GoogLeNetBN"}  # recipes


def epochs(what: str, options: argparse.Namespace) -> list[list[str]]:
    """Train in two layouts of devices, or with data in several places."""
    here = max(options.n // 2, 1) if what == "devices" else options.n
    ranks, rate = options.hosts or here, ["--rate", options.rate or SLOW] if options.hosts else []
    short = ["--images", "96", "--train-for", "2ep"] if options.quick else []
    short += ["--images", "160"] if what == "together" and not options.quick else []  # a step takes seconds
    line = ("--ranks", str(ranks), "--rounds", str(min(options.rounds, 5)), *rate, *short)
    return [script("bench_epoch", what, "--recipe", recipe, *line) for recipe in IBM_S]


def rings(options: argparse.Namespace) -> list[list[str]]:
    """Sum a vector by 2 ranks, 4, ..., and by all."""
    args = ("--sizes", "600000" if options.quick else "6000000", "--strategies", *RING, "--peers", "none")
    return [bench(counted(options, n), *args) for n in up_to(options.hosts or options.n)]


def up_to(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most`."""
    return [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]


def counted(options: argparse.Namespace, n: int) -> argparse.Namespace:
    """The options with another number of hosts or ranks."""
    return argparse.Namespace(**vars(options) | {"hosts" if options.hosts else "n": n})


def functions(options: argparse.Namespace) -> list[list[str]]:
    """Scale ResNet-50 over functions.

    One worker is the base of the picture's lines.
    """
    short = ["--steps", "2", "--batch", "4"] if options.quick else []
    return [script("bench_functions", "resnet", "--workers", *map(str, from_one(options, (1, 2))), *short)]


def script(name: str, *args: str) -> list[str]:
    """Command line of a script beside this one."""
    return [PYTHON, f"scripts/{name}.py", *args]


# ---------------------------------------------------------------- results


def medians(text: str) -> dict[str, Values]:
    """Seconds by case and contender of a file of `jaxmpi bench`."""
    cases = json.loads(text)["cases"]
    return {case["case"]: {row["by"]: statistics.median(row["seconds"]) for row in case["rows"]} for case in cases}


def over(first: str, second: str, *more: str) -> Callable[[list[str], list[str]], Values]:
    """The time of `first` over those of the others, by case."""

    def read(printed: list[str], files: list[str]) -> Values:
        found = medians(files[0])
        return {
            f"{case}, {first} / {other}": seconds[first] / seconds[other]
            for case, seconds in found.items()
            for other in (second, *more)
            if first in seconds and other in seconds
        }

    return read


def parameters(printed: list[str], files: list[str]) -> Values:
    """Parameters by model, of `jaxmpi models`."""
    rows = [re.split(r"[│|]", line) for line in printed[0].splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    counts = {c[0]: float(c[2].replace(",", "")) for c in cells if len(c) == 6 and c[1].isdigit()}
    return {f"{model}, parameters": counts[model] for model in ("alexnet", "googlenet", "vgg16")}


def speedups(printed: list[str], files: list[str]) -> Values:
    """Images/s over those of one worker with as many images, of records."""
    return {name: rate for of in speedups_by_row(files) for name, rate in named_speedups(*of).items()}


def speedups_by_row(files: list[str]) -> list[tuple[RowOf1, dict[int, float]]]:
    """Speed-ups by workers, from records, for each recorded row of `SPEEDUPS`."""
    rates: dict[RowOf1, dict[int, float]] = {}
    for text in files:
        rows = [json.loads(line) for line in text.splitlines()]
        run = next(row for row in rows if row["kind"] == "run")
        of = run["experiment"]
        name = next(name for name, *_ in SPEEDUPS if of["model"].startswith(name.lower()))
        bits = int(of["exchange"]["strategy"].removeprefix("asa"))
        paces = [row["images_per_s"] for row in rows if row["kind"] == "train"][1:]
        rates.setdefault((name, EIGHTH * of["local_batch"], bits), {})[run["workers"]] = statistics.median(paces)
    return [
        (row, {workers: rate / rates[row[0], row[1], WIDE][1] for workers, rate in of_row.items() if workers > 1})
        for row, of_row in rates.items()
    ]


def named_speedups(row: RowOf1, of_workers: dict[int, float]) -> Values:
    """A row's speed-ups by quantity: `AlexNet, 8 workers of 32, 16 bits`."""
    name, batch, bits = row
    return {f"{name}, {n} workers of {batch}{at_width(bits)}": value for n, value in of_workers.items()}


def at_width(bits: int) -> str:
    """A name's suffix for the width in bits; empty for 32."""
    return "" if bits == WIDE else f", {bits} bits"


def chosen(options: argparse.Namespace) -> dict[RowOf1, dict[int, float]]:
    """The paper's rows for the models asked for."""
    return {row: of for row, of in SPEEDUPS.items() if row[0].lower() in options.models}


ERROR = ", standard error"  # end of the name of what a page shows behind the mean
TOP5_ERROR = ", top-5 error %"
# Theano-MPI's tables 1 and 3. FIGURES: study, the paper's name, its images a worker over ours.
FIGURES = {"figure4": ("AlexNet", 8), "figure5": ("GoogLeNet", 4)}
TOP5 = {
    "AlexNet": {
        "1 worker of 128 at 0.01": 19.8,
        "2 workers of 128 at 0.01": 19.8,
        "4 workers of 128 at 0.01": 20.4,
        "8 workers of 128 at 0.005": 20.7,
        "8 workers of 32 at 0.005": 19.9,
        "8 workers of 32 at 0.005, 16 bits": 20.3,
    },
    "GoogLeNet": {
        "1 worker of 32 at 0.01": 10.07,
        "2 workers of 32 at 0.007": 10.20,
        "4 workers of 32 at 0.005": 10.48,
        "8 workers of 32 at 0.005": 10.65,
        "8 workers of 32 at 0.005, 16 bits": 11.75,
    },
}
RING = ("root", "ring32")
EXCHANGES = ("ar", "asa32", "asa16")
THEIRS = 8  # workers
TABLE3 = {  # seconds of 5,120 images: training with one worker and with eight, and the exchanges
    ("alexnet", 128): (31.2, 3.90, (2.01, 0.75, 0.47)),
    ("alexnet", 32): (36.40, 4.56, (8.03, 2.94, 1.83)),
    ("googlenet", 32): (134.9, 16.82, (2.07, 1.96, 1.76)),
    ("vgg16", 32): (405.2, 51.79, (41.41, 8.60, 4.84)),
}


SPEEDUPS: dict[RowOf1, dict[int, float]] = {  # table 1, by workers; of 32 images over one worker's, table 3
    ("AlexNet", 128, 32): {2: 1.7, 4: 3.4, 8: 6.7},
    ("AlexNet", 32, 32): {8: 4.9},
    ("AlexNet", 32, 16): {8: 5.7},
    ("GoogLeNet", 32, 32): {2: 1.9, 4: 3.7, 8: 7.2},
    ("GoogLeNet", 32, 16): {8: 7.3},
}
EIGHTH, WIDE = 8, 32  # the paper's images a worker over ours; bits of a float


def scaling_by_workers(printed: list[str], files: list[str]) -> list[Panel]:
    """Speed-up by workers, theirs and ours, a panel a model."""
    ours, panels = dict(speedups_by_row(files)), []
    workers, over = Quantity("workers", base=None), Quantity("images/s over one worker's", base=None)
    for model in dict.fromkeys(name for name, *_ in ours):
        series = {
            f"{row[1]} images a worker{at_width(row[2])}, {who}": [(1.0, 1.0), *((float(n), s) for n, s in of.items())]
            for row, paper in SPEEDUPS.items()
            for who, of in (("the paper", paper), ("ours", ours.get(row, {})))
            if row[0] == model and of
        }
        panels.append(Lines(f"{model}; images a worker as the paper counts them", workers, over, series))
    return panels


def cells_of(text: str, model: str, factor: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Lines of `study.py` by cell and seed, without runs that diverged."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in map(json.loads, text.splitlines()):
        cell, batch = row["cell"], factor * int(row["cell"].get("local-batch", 8))
        workers = f"{cell['workers']} worker{'s' * (cell['workers'] != '1')} of {batch} at {cell['optim.lr']}"
        wire = ", 16 bits" * (cell.get("exchange.strategy") == "asa16")
        name = f"{model}, {workers}{wire}"
        of_cell = found.setdefault(name, {})
        check(
            all(run["cell"] == cell for run in of_cell.values()),
            f"{name}: got runs of several settings; remove the file of earlier ones, kept_*.jsonl in --out",
        )
        if "failed" not in row:
            of_cell[row["seed"]] = row
    return found


def mean_curve(runs: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Top-5 error in percent by epoch, mean over seeds."""
    points = zip(*(run["top5_curve"] for run in runs), strict=False)
    return [(at[0][0], statistics.mean(error for _, error in at)) for at in points]


def lost_points(narrow: dict[int, dict[str, Any]], wide: dict[int, dict[str, Any]], top: str) -> list[float]:
    """Points of accuracy that 16 bits cost, seed by seed."""
    return [100 * (run[top] - narrow[seed][top]) for seed, run in wide.items() if seed in narrow]


def over_seeds(name: str, values: Sequence[float]) -> Values:
    """A mean, and its standard error unless there is one seed only."""
    error = {f"{name}{ERROR}": statistics.stdev(values) / len(values) ** 0.5} if len(values) > 1 else {}
    return {name: statistics.mean(values)} | error


def over_one(error: Values, base: str) -> Values:
    """Top-5 errors over that of `base`, with standard errors of independent means."""
    ratios: Values = {}
    one, error_of_one = error[f"{base}{TOP5_ERROR}"], error.get(f"{base}{TOP5_ERROR}{ERROR}")
    for key, value in error.items():
        name = key.removesuffix(TOP5_ERROR)
        if key == name or name == base or not one:
            continue
        ratio, own = value / one, error.get(f"{key}{ERROR}")
        ratios[f"{name}, over 1 worker"] = ratio
        if own is not None and error_of_one is not None:
            ratios[f"{name}, over 1 worker{ERROR}"] = math.hypot(own / one, ratio * error_of_one / one)
    return ratios


def errors_by_cell(printed: list[str], files: list[str]) -> Values:
    """Top-5 and top-1 error by cell, and points that 16 bits cost.

    Errors are means over seeds; top-5 errors also come as ratios to one worker's.
    """
    ours: Values = {}
    for (model, factor), text in zip(FIGURES.values(), files, strict=True):
        cells = {name: runs for name, runs in cells_of(text, model, factor).items() if runs}
        error: Values = {}
        for name, runs in cells.items():
            error |= over_seeds(f"{name}{TOP5_ERROR}", [run["top5_curve"][-1][1] for run in runs.values()])
            error |= over_seeds(f"{name}, top-1 error %", [100 * (1 - run["eval_top1"]) for run in runs.values()])
        base = next((name for name in cells if "1 worker " in name), "")
        ours |= error | (over_one(error, base) if base else {})
        narrow = next((name for name in cells if name.endswith("16 bits")), "")
        wide = cells.get(narrow.removesuffix(", 16 bits"), {})
        for top in ("top5", "top1") if narrow else ():
            lost = lost_points(cells[narrow], wide, f"eval_{top}")
            name = f"{model}, points of {top.replace('p', 'p-')} lost by 16 bits"
            ours |= over_seeds(name, lost) if lost else {}
    return ours


def paper_of_top5(options: argparse.Namespace) -> Values:
    """The paper's top-5 errors, their ratios, and points that 16 bits cost."""
    theirs: Values = {}
    for model, errors in TOP5.items():
        base = next(iter(errors.values()))
        theirs |= {f"{model}, {name}{TOP5_ERROR}": value for name, value in errors.items()}
        theirs |= {f"{model}, {name}, over 1 worker": value / base for name, value in [*errors.items()][1:]}
        lost = errors["8 workers of 32 at 0.005, 16 bits"] - errors["8 workers of 32 at 0.005"]
        theirs[f"{model}, points of top-5 lost by 16 bits"] = lost
    return theirs


def curves(printed: list[str], files: list[str]) -> list[Panel]:
    """Figures 4 and 5: our errors by epoch; errors over one worker's."""
    ours, theirs, panels = errors_by_cell(printed, files), paper_of_top5(argparse.Namespace()), []
    epochs, error = Quantity("epoch", base=None), Quantity("top-5 error, %", base=None)
    for (model, factor), text in zip(FIGURES.values(), files, strict=True):
        cells = {name: runs for name, runs in cells_of(text, model, factor).items() if runs}
        series = {name.removeprefix(f"{model}, "): mean_curve([*runs.values()]) for name, runs in cells.items()}
        if series:  # else all runs diverged
            panels.append(Lines(f"{model}, ours; images a worker as the paper counts them", epochs, error, series))
    by_workers, whiskers = {}, {}
    for model, batch in (("AlexNet", 128), ("GoogLeNet", 32)):
        keys = [key for key in TOP5[model] if f"s of {batch} at" in key and "bits" not in key]
        names = {float(key[0]): f"{model}, {key}, over 1 worker" for key in keys}
        for who, values in (("the paper", theirs), ("ours", ours)):
            known = [(n, values[name]) for n, name in names.items() if name in values]
            by_workers |= {f"{model}, {who}": [(1.0, 1.0), *known]} if known else {}
        errors = [ours.get(f"{name}{ERROR}", 0.0) for name in names.values() if name in ours]
        whiskers |= {f"{model}, ours": [0.0, *errors]} if any(errors) else {}
    over = Quantity("top-5 error over one worker's", base=None, low=None)
    title = "error by workers; whiskers: standard errors"
    return [*panels, Lines(title, Quantity("workers", base=None), over, by_workers, errors=whiskers)]


def costs_of(printed: list[str], files: list[str]) -> Values:
    """Table 3: exchange ratios, seconds of 5,120 images, and speed-ups."""
    exchange = {case.removesuffix("_tiny"): by for case, by in medians(files[0]).items()}
    workers = int(json.loads(files[0])["cases"][0]["ranks"])
    ours = {f"{model}, ar / {other}": by["ar"] / by[other] for model, by in exchange.items() for other in EXCHANGES[1:]}
    steps = {
        (name.removesuffix("_tiny"), batch): found["ranks"][0]["seconds"][-1]
        for batch, text in zip(dict.fromkeys(batch for _, batch in TABLE3), files[1:], strict=True)
        for name, found in json.loads(text).items()
    }
    for (model, batch), step in steps.items():
        rounds = 5120 / batch / workers
        shared = tuple(rounds * exchange[model][name] for name in EXCHANGES)
        ours |= row_of_table3(model, batch, workers, step * 5120 / batch, step * rounds, shared)
    return ours


def row_of_table3(model: str, batch: int, workers: int, alone: float, train: float, shared: Sequence[float]) -> Values:
    """Seconds of 5,120 images, and speed-ups over one worker's training."""
    name = f"{model}-{batch}b"
    row = {f"{name}, training with 1 worker, s": alone, f"{name}, with {workers}, s": train}
    for by, seconds in zip(EXCHANGES, shared, strict=True):
        row |= {f"{name}, {by}, s": seconds, f"{name}, {by}, speed-up": alone / (train + seconds)}
        row |= {f"{name}, {by} / training": seconds / train}
    return row


def paper_of_table3(options: argparse.Namespace) -> Values:
    """The paper's table 3, in part unless there are 8 workers.

    With other numbers it has one worker's training and ratios of exchanges only.
    """
    theirs, is_theirs = {}, (options.hosts or options.n) == THEIRS
    for (model, batch), (alone, train, shared) in TABLE3.items():
        ar, asa32, asa16 = shared
        if (model, batch) != ("alexnet", 32):
            theirs |= {f"{model}, ar / asa32": ar / asa32, f"{model}, ar / asa16": ar / asa16}
        row = row_of_table3(model, batch, THEIRS, alone, train, shared)
        theirs |= {name: value for name, value in row.items() if is_theirs or name.endswith("with 1 worker, s")}
    return theirs


def figure3(printed: list[str], files: list[str]) -> list[Panel]:
    """Figure 3: exchange over training of AlexNet with 128 images a worker."""
    workers = int(json.loads(files[0])["cases"][0]["ranks"])
    both = {"the paper": paper_of_table3(argparse.Namespace(hosts=0, n=workers)), "ours": costs_of(printed, files)}
    names = {by: f"alexnet-128b, {by} / training" for by in EXCHANGES}
    of = {f"{by}, {who}": each[name] for by, name in names.items() for who, each in both.items() if name in each}
    bars = [(name, value, value, value) for name, value in of.items()]
    return [Bars("Figure 3: AlexNet, 128 images a worker", Quantity("exchange over training", base=None), bars)]


def over_ring(printed: list[str], files: list[str]) -> Values:
    """Time through one rank over that of a ring, by ranks."""
    found = {json.loads(text)["cases"][0]["ranks"]: next(iter(medians(text).values())) for text in files}
    return {f"root / ring32, {n}": by["root"] / by["ring32"] for n, by in found.items()}


def formula_of_ring(options: argparse.Namespace) -> Values:
    """The article's N / 2."""
    return {f"root / ring32, {n}": n / 2 for n in up_to(options.hosts or options.n)}


def ring_by_ranks(printed: list[str], files: list[str]) -> list[Panel]:
    """The same ratio by ranks, beside both formulas."""
    ours = [(float(name.split()[-1]), value) for name, value in over_ring(printed, files).items()]
    series = {
        "the article, N / 2: one rank receives": [(n, n / 2) for n, _ in ours],
        "N: it also sends the sum back": [(n, n) for n, _ in ours],
        "ours": ours,
    }
    over = Quantity("time through one rank over a ring's", base=None)
    return [Lines("a sum of 32-bit floats", Quantity("ranks", base=None), over, series)]


OF_40 = 370 / 675  # ms of a step with 1 and with 40 workers, Gibiansky 2017


def samples(printed: list[str], files: list[str]) -> Values:
    """Samples/s of `bench_language.py` over those of one host, measured and predicted."""
    one, *others = sorted(json.loads(files[0])["rows"], key=lambda row: row["hosts"])
    ours: Values = {}
    for row in others:
        hosts = int(row["hosts"])
        for name, kind in (("shared", ""), ("own", "own cores")):
            behind, beside = row[kind or "behind"], row[f"{kind}, beside" if kind else "beside"]
            predicted = row[f"{kind}, predicted" if kind else "predicted"]
            ours[f"{hosts} hosts / 1, {name} cores"] = behind / one[kind or "behind"]
            ours[f"{hosts} hosts / 1, {name} cores, overlap"] = beside / one[kind or "behind"]
            ours[f"{hosts} hosts, predicted / measured, {name} cores"] = predicted / behind
    most = others[-1]
    of_one = most["hosts"] * one["own cores"]
    ours["samples/s of a worker, most / 1"] = most["own cores, beside"] / of_one
    ours["samples/s of a worker, most / 1, without overlap"] = most["own cores"] / of_one
    ours["samples/s of a worker, most / 1, without overlap, predicted"] = most["own cores, predicted"] / of_one
    return ours


def scaling_of_samples(printed: list[str], files: list[str]) -> list[Panel]:
    """Samples/s over one host's, by hosts: measured, predicted and the paper's."""
    rows = json.loads(files[0])["rows"]
    at = [float(row["hosts"]) for row in rows]
    drawn = {
        "shared cores": ("behind", "behind"),
        "own cores": ("own cores", "own cores"),
        "own cores, with overlap": ("own cores, beside", "own cores"),
        "own cores, predicted": ("own cores, predicted", "own cores"),
    }
    series = {
        name: [(n, row[of] / rows[0][base]) for n, row in zip(at, rows, strict=True)]
        for name, (of, base) in drawn.items()
    }
    series["the paper, between 1 and 40"] = [(n, 1 + (n - 1) * (40 * OF_40 - 1) / 39) for n in at]
    over = Quantity("samples/s over one host's", base=None)
    return [Lines("a language model over a ring", Quantity("hosts", base=None), over, series)]


def tables(text: str) -> list[list[str]]:
    """Cells of a text's Markdown rows, with heads, without separator lines."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if set(row[0]) != {"-"}]


def memory(printed: list[str], files: list[str]) -> Values:
    """Ratios of the shuffle over all workers and of epochs from memory."""
    whole = {row[0]: row for row in tables(printed[0])[1:] if row[0] == row[1]}
    few, many = min(whole, key=int), max(whole, key=int)
    rates = {row[0]: float(row[1].replace(",", "")) for row in tables(printed[1])[1:]}
    kept = rates["memory, packed at 256 px"]
    ours = {f"shuffle, {n} workers, bare Alltoallv / ours": float(row[-1]) for n, row in whole.items()}
    return ours | {
        f"shuffle, {many} workers / {few}": float(whole[many][3]) / float(whole[few][3]),
        "reading an epoch, memory / files": rates["folder"] / kept,
        "reading an epoch, memory / files with 10 ms a read": rates["folder, reads take longer"] / kept,
    }


def by_groups(printed: list[str], files: list[str]) -> Values:
    """Ratios of a shuffle's memory and time, by groups and by workers."""
    whole, groups = rows_by_groups(printed)
    few, many = min(whole), max(whole)
    ours: Values = {}
    for i, what in enumerate(("MB a worker", "shuffle")):
        ours |= {f"{many} workers / {few}, {what}": whole[many][i] / whole[few][i]} if many > few else {}
        ours |= {f"{many} workers, {n} groups / 1, {what}": row[i] / whole[many][i] for n, row in groups.items()}
    return ours


def rows_by_groups(printed: list[str]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """MB a worker and seconds of a shuffle.

    By workers in one group, and by groups of all workers.
    """
    rows = [[float(cell) for cell in row[:4]] for row in tables(printed[0])[1:] if row[3] != "indices only"]
    whole = {int(ranks): row for ranks, group, *row in rows if group == ranks}
    many = max(whole)
    return whole, {int(many / group): row for ranks, group, *row in rows if ranks == many and group < many}


def figures7_to_9(printed: list[str], files: list[str]) -> list[Panel]:
    """Memory and shuffle by groups over those of one group.

    The paper's figures have no numbers. Beside ours are the arithmetic of its layout, and its words on time.
    """
    whole, groups = rows_by_groups(printed)
    workers = max(whole)
    rows = {1: whole[workers]} | dict(sorted(groups.items()))
    at, panels = Quantity("groups", base=None), list[Panel]()
    layout = [(float(n), float(n)) for n in rows]
    words = [(n, 1.0) for n, _ in layout]
    theirs = ("memory of a worker", "by the layout", layout), ("time of a shuffle", "the paper: not much better", words)
    for i, (what, name, line) in enumerate(theirs):
        series = {name: line, "ours": [(float(n), row[i] / rows[1][i]) for n, row in rows.items()]}
        panels.append(Lines(f"{workers} workers", at, Quantity(f"{what} over one group's", base=None), series))
    return panels


def held(options: argparse.Namespace) -> Values:
    """Bytes of each worker: one copy over the workers of a group."""
    many = options.hosts or options.n
    few = max(many // 2, 2)
    groups = [n for n in range(2, many // 2 + 1) if many % n == 0]
    by_workers = {f"{many} workers / {few}, MB a worker": few / many} if many > few else {}
    return by_workers | {f"{many} workers, {n} groups / 1, MB a worker": float(n) for n in groups}


def epoch_ratios(names: dict[str, tuple[str, str]], printed: list[str], files: list[str]) -> Values:
    """Time of one contender's epoch over another's, by name, of `bench_epoch.py`."""
    ratios: Values = {}
    for model, text in zip(IBM_S.values(), printed, strict=True):
        seconds = {row[0]: float(row[1]) for row in tables(text)[1:]}
        for name, pair in names.items():
            above, below = (next(s for key, s in seconds.items() if key.startswith(prefix)) for prefix in pair)
            ratios[f"{model}, {name}"] = above / below
    return ratios


def scaling(printed: list[str], files: list[str]) -> Values:
    """Speed-ups over the number of workers, and shares of the time.

    They are of the job of `bench_functions.py resnet` with the most workers.
    """
    rows = rows_of_functions(printed)
    workers = max(int(name.split()[-1]) for name in rows if name.startswith("weak"))
    weak, strong = rows[f"weak, {workers}"], rows.get(f"strong, {workers}")
    ours = {"weak scaling, speed-up over workers": weak[1] / workers}
    ours |= {"strong scaling, speed-up over workers": strong[1] / workers} if strong else {}
    parts = dict(zip(("shuffle", "straggler", "all-reduce"), weak[3:], strict=True))
    return ours | {f"weak scaling, {part} of the time": value / weak[0] for part, value in parts.items()}


def rows_of_functions(printed: list[str]) -> dict[str, list[float]]:
    """Numbers of `bench_functions.py resnet` by row."""
    return {row[0].removesuffix(" (beyond the cores)"): [*map(float, row[1:])] for row in tables(printed[0])[1:]}


AT_8 = {"weak": 7.5, "strong": 5.0}  # speed-ups of 8 workers, Stooke and Abbeel 2017
SHARES = {"shuffle": 1.6 / 52.6, "straggler": 1.0 / 52.6, "all-reduce": 0.46 / 52.6}  # their Table 1


def functions_by_workers(printed: list[str], files: list[str]) -> list[Panel]:
    """Figure 2: speed-ups by workers. Table 1: parts of the time."""
    rows, series = rows_of_functions(printed), {}
    for kind, theirs in AT_8.items():
        ours = [(float(name.split()[-1]), row[1]) for name, row in rows.items() if name.startswith(f"{kind}, ")]
        series |= {f"{kind}, the paper": [(1.0, 1.0), (8.0, theirs)]}
        series |= {f"{kind}, ours": [*([] if kind == "weak" else [(1.0, rows["weak, 1"][1])]), *ours]} if ours else {}
    speedup = Quantity("speed-up over one worker of plain JAX", base=None)
    of = scaling(printed, files)
    bars = [
        (f"{part}, {who}", value, value, value)
        for part, theirs in SHARES.items()
        for who, value in (("the paper", theirs), ("ours", of[f"weak scaling, {part} of the time"]))
    ]
    time = Bars("weak scaling with the most workers", Quantity("share of the time", base=None), bars, colours=2)
    return [Lines("ResNet-50 over functions", Quantity("workers", base=None), speedup, series), time]


JOBS = {
    "table1": Job(
        "Ma et al. 2016, Table 1, Figs. 4 and 5: top-5 error by workers, and with 16 bits",
        accuracies,
        errors_by_cell,
        paper_of_top5,
        "Theirs are ImageNet's 1000 classes after 62 and 70 epochs; ours ten classes of silhouettes, small variants of "
        "the models, 12 epochs, an eighth (AlexNet) and a quarter (GoogLeNet) of the images a worker, at the paper's "
        "rates. So compare errors over one worker's. Of 1,947 held-out images one is 0.05 points.",
        over_hosts=False,
        panels=curves,
    ),
    "table2": Job(
        "Ma et al. 2016, Table 2: parameters of the models",
        lambda o: [[PYTHON, "-m", "jaxmpi.models"]],
        parameters,
        lambda o: {
            "alexnet, parameters": 60_965_224,
            "googlenet, parameters": 13_378_280,
            "vgg16, parameters": 138_357_544,
        },
        "Counts must be the same: the layers are those of the papers.",
        over_hosts=False,
    ),
    "table3": Job(
        "Ma et al. 2016, Table 3, Fig. 3: training and exchange of 5,120 images, 8 workers",
        costs,
        costs_of,
        paper_of_table3,
        "Their Allreduce went through the host and summed there; ours is Open MPI 5's own, tuned. Inside one host 16 "
        "bits cost conversions and save memory traffic only. Training is one worker's on all cores of this machine, "
        "divided by the workers: as if each had such a machine, which the exchange, on shared cores, has not. With "
        "another number of workers the paper has no seconds and no speed-ups.",
        panels=figure3,
    ),
    "speedup": Job(
        "Ma et al. 2016, Table 1: speed-up of AlexNet and GoogLeNet, and with 16 bits",
        trainings,
        speedups,
        lambda o: {name: value for of in chosen(o).items() for name, value in named_speedups(*of).items()},
        "Theirs had a GPU a worker; ours are AlexNet's small variant and GoogLeNet at 64 px on digits, with an eighth "
        "of the images a worker. Workers that share a machine's cores cannot go beyond its cores.",
        panels=scaling_by_workers,
    ),
    "ring": Job(
        "Gibiansky 2017: everything through one rank over the ring, by its formula N / 2",
        rings,
        over_ring,
        formula_of_ring,
        "Their formula counts what the one rank receives; ours sends the sum back after that, which makes N. "
        "Inside one host links are memory, which ranks share.",
        panels=ring_by_ranks,
    ),
    "baidu": Job(
        "Gibiansky 2017: samples/s of a language model over a ring, measured and predicted",
        language,
        samples,
        lambda o: {"samples/s of a worker, most / 1": OF_40},
        "Theirs are 300 million params, 40 GPUs on 5 nodes, 370 ms a step alone and 650 to 700 ms with all, and they "
        "overlap; ours 75 million, half of all sizes, without overlap: of the whole size two hosts fit into 20 GB. "
        "Emulated hosts share one machine's cores; with own cores: one host's computing time for all. Predicted by a "
        "probe on two hosts.",
        over_hosts=False,
        panels=scaling_of_samples,
    ),
    "multicolor": Job(
        "Kumar et al. 2018: multi-colour trees over Open MPI's Allreduce, GoogLeNetBN",
        lambda o: [bench(o, "--tree", "googlenetbn", "--strategies", "ar", "color4:32", "--peers", "none")],
        over("color4:32", "ar"),
        lambda o: {"googlenetbn, color4:32 / ar": 0.45},
        "Theirs took 50 to 60 % less time on 16 nodes with RDMA; a tree inside one host only adds copies.",
    ),
    "dimd": Job(
        "Kumar et al. 2018: data in memory, and its shuffle",
        shuffles,
        memory,
        lambda o: {"reading an epoch, memory / files": 0.67},
        "Theirs is the whole epoch of GoogLeNetBN on a cluster's file system (ResNet-50: 0.75); ours reading and "
        "decoding alone, files in the page cache. Their shuffle of 220 GB took 4.2 s on 32 nodes and less with more.",
    ),
    "groups": Job(
        "Kumar et al. 2018, Figs. 7 to 9: time and memory of the shuffle, by workers and groups",
        group_shuffles,
        by_groups,
        held,
        "Memory follows from the layout. The paper's shuffle takes less time with more workers (4.2 s for 220 GB on 32 "
        "nodes), and about as long with groups, since all its links are alike.",
        panels=figures7_to_9,
    ),
    "epoch": Job(
        "Kumar et al. 2018, Figs. 10 and 11: an epoch with and without data in memory",
        functools.partial(epochs, "data"),
        functools.partial(
            epoch_ratios,
            {
                "an epoch, memory / files": ("memory", "files"),
                "an epoch, memory / files with 10 ms a read": ("memory", "files with"),
                "an epoch, packed / files": ("packed", "files"),
            },
        ),
        lambda o: {"ResNet-50, an epoch, memory / files": 0.75, "GoogLeNetBN, an epoch, memory / files": 0.67},
        "Theirs read ImageNet-1k from a cluster's file system; ours are small models of the kind, so that cores have "
        "time for data, and files in the page cache.",
    ),
    "devices": Job(
        "Kumar et al. 2018, Fig. 12: an epoch with a better use of a node's devices",
        functools.partial(epochs, "devices"),
        functools.partial(
            epoch_ratios, {"an epoch, a process for several devices / for one": ("a process for", "a process a")}
        ),
        lambda o: {
            "ResNet-50, an epoch, a process for several devices / for one": 0.82,
            "GoogLeNetBN, an epoch, a process for several devices / for one": 0.85,
        },
        "Theirs improved one layout, Torch's data-parallel table; ours compares algorithm 1, one process a node, with "
        "one process a device. Our devices are CPU devices that share cores.",
    ),
    "together": Job(
        "Kumar et al. 2018, Table 1: an epoch with data in memory and trees over one with neither",
        functools.partial(epochs, "together"),
        functools.partial(epoch_ratios, {"an epoch, both / neither": ("memory and", "files and")}),
        lambda o: {"ResNet-50, an epoch, both / neither": 1 / 2.2, "GoogLeNetBN, an epoch, both / neither": 1 / 1.65},
        "Theirs is throughput, 110 to 130 and 58 to 72 % more (here 120 and 65), on 8 to 32 nodes with a better use of "
        "devices as well, over open code with Open MPI. Ours are the same models for images of 64 px, 8 a worker.",
    ),
    "synkhronos": Job(
        "Stooke and Abbeel 2017, Figs. 2 and 3, Table 1",
        functions,
        scaling,
        lambda o: {
            **{f"{kind} scaling, speed-up over workers": of_8 / 8 for kind, of_8 in AT_8.items()},
            **{f"weak scaling, {part} of the time": share for part, share in SHARES.items()},
        },
        "Theirs are 8 GPUs with NVLink and a batch of 64 each; ours cores of one processor, which share its memory, "
        "and a batch of 8: an all-reduce is a larger part of a step.",
        over_hosts=False,
        panels=functions_by_workers,
    ),
}


# ---------------------------------------------------------------- running, writing


def run(job: Job, options: argparse.Namespace, folder: Path) -> tuple[Values, list[Panel], list[str], str]:
    """Run the lines; return our values, panels, the lines, and when.

    Raises:
        UsageError: a script is not there, failed, took too long, or printed what cannot be read.
    """
    lines, printed, files = [], [], []
    for i, template in enumerate(job.lines(options)):
        out = folder / (f"kept_{i + 1}.jsonl" if "{kept}" in template else f"of_line_{i + 1}")
        if out.is_dir():  # of an earlier call
            shutil.rmtree(out)
        if "{kept}" not in template:
            out.unlink(missing_ok=True)
        line = [str(out) if arg in ("{out}", "{kept}") else arg for arg in template]
        lines.append(shlex.join(line).replace(PYTHON, "python").replace(f"{ROOT}/", ""))
        missing = [arg for arg in line if arg.startswith("scripts/") and not (ROOT / arg).is_file()]
        check(
            not missing, f"{', '.join(missing)}: not there in this version; it belongs to another part of the project"
        )
        print("+ " + lines[-1], flush=True)
        if options.show:
            continue
        printed.append(output_of(line, options.timeout_s, lines[-1]))
        files += [text for text in (written(out),) if text]
    if options.show:
        return {}, [], lines, ""
    kept = [written(path) for path in sorted(folder.glob("kept_*.jsonl")) if not options.quick]
    try:
        values, panels = job.read(printed, files), job.panels(printed, files) if job.panels else []
        return values, panels, lines, days_of(kept) or f"{datetime.date.today()}"
    except (ArithmeticError, LookupError, StopIteration, ValueError) as error:
        raise UsageError(f"{lines} printed what cannot be read: {error!r}") from error


def days_of(kept: Sequence[str]) -> str:
    """Days and commits of recorded runs; some may be of earlier days."""
    runs = collections.Counter(
        (row.get("day", "before runs had a day"), row.get("commit", "")[:8])
        for text in kept
        for row in map(json.loads, text.splitlines())
    )
    return ", ".join(f"{day} ({n} runs at {commit or 'no commit'})" for (day, commit), n in sorted(runs.items()))


def output_of(line: list[str], timeout_s: float, shown: str) -> str:
    """Run a line; return its output, or end its ranks after `timeout_s`.

    Raises:
        UsageError: it failed, or took too long.
    """
    job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(job.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=TO_END_S)
        raise UsageError(f"took longer than {timeout_s:g} s (--timeout-s): {shown}") from error
    except BaseException:  # as Ctrl-C, which another session does not get
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        raise
    check(job.returncode == 0, f"ended with code {job.returncode}: {shown}")
    return printed


def written(out: Path) -> str:
    """Text that a line wrote: a file, or a run directory's record."""
    file = out / "record.jsonl" if out.is_dir() else out
    return file.read_text() if file.is_file() else ""


def rows_of(theirs: Values, ours: Values) -> list[dict[str, Any]]:
    """Ours beside theirs, and the ratio."""
    return [
        {"quantity": name, "paper": paper, "ours": mine, "ours / paper": mine / paper if mine and paper else None}
        for name in dict.fromkeys([*theirs, *ours])
        for paper, mine in [(theirs.get(name), ours.get(name))]
    ]


def write(
    name: str,
    job: Job,
    rows: Sequence[dict[str, Any]],
    panels: Sequence[Panel],
    lines: Sequence[str],
    when: str,
    folder: Path,
) -> None:
    """Write a CSV, a page, and a picture of panels or bars."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["quantity", "paper", "ours", "ours / paper"])
        table.writeheader()
        table.writerows(rows)
    of = {f"{row['quantity']}, {who}": row[who] for row in rows if row["ours / paper"] for who in ("paper", "ours")}
    if panels or of:
        bars = [(text, value, value, value) for text, value in of.items()]
        plots.save(panels or [Bars(job.source, Quantity("", base=None), bars, colours=2)], folder / f"{name}.png")
    (folder / f"{name}.md").write_text(page(name, job, rows, lines, when))


def page(name: str, job: Job, rows: Sequence[dict[str, Any]], lines: Sequence[str], when: str) -> str:
    """A section of docs/papers.md; standard errors stand behind what they are of."""
    errors = {row["quantity"].removesuffix(ERROR): row["ours"] for row in rows if row["quantity"].endswith(ERROR)}
    shown = []
    for row in rows:
        cells = [shown_value(row[key]) for key in ("quantity", "paper", "ours", "ours / paper")]
        cells[2] += f" ± {errors[row['quantity']]:.2g}" if row["quantity"] in errors else ""
        shown += [] if row["quantity"].endswith(ERROR) else [cells]
    table = harness.table(("quantity", "paper", "ours", "ours / paper"), shown)
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, {platform.system()}, {when}."
    commands = [f"    {line}" for line in lines]
    return "\n".join(
        [f"## {name}: {job.source}", "", *commands, "", *([table] if rows else []), "", f"{job.remark} {machine}", ""]
    )


def shown_value(value: Any) -> str:
    """Format with three digits; whole numbers whole."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = harness.parser(__doc__)
    parser.add_argument("name", choices=[*JOBS, "all"], help="a table or figure, or all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round and one seed: a try, no figures")
    parser.add_argument("-n", type=int, help="ranks of this machine (default: 8; --quick: 4)")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        help="of speedup and baidu (default: 1 2 4 8; speedup: 1 and --hosts), of synkhronos (1 2)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of speedup (default: both)")
    parser.add_argument("--seeds", type=int, help="of table1 (default: 3; --quick: 1)")
    parser.add_argument("--hosts", type=int, default=0, help="emulated hosts, a rank each, instead of -n")
    parser.add_argument("--rate", default="", help=f"of each emulated host's link (default: {SLOW}; baidu: {FAST})")
    parser.add_argument("--rounds", type=int, help="of exchanges (default: 10; --quick: 1)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before, of exchanges")
    parser.add_argument("--timeout-s", type=float, default=7200, help="of each line")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "papers", help="folder for what comes of it")
    parser.add_argument("--show", action="store_true", help="print the lines, run nothing")
    options = parser.parse_args(argv)
    for name, (whole, quick) in {"n": (8, 4), "seeds": (3, 1), "rounds": (10, 1)}.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    options.out = (options.out / "quick" if options.quick else options.out).resolve()
    return options


def reproduce(name: str, options: argparse.Namespace) -> str:
    """Run one, write its results, and return its page; empty with --show.

    Raises:
        UsageError: a line failed, or it does not run on hosts.
    """
    job, folder = JOBS[name], options.out / name
    job = job._replace(remark=f"A try with --quick, so figures mean nothing. {job.remark}") if options.quick else job
    check(job.over_hosts or not options.hosts, f"--hosts: {name} runs on this machine alone; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    ours, panels, lines, when = run(job, options, folder)
    if options.show:
        return ""
    write(name, job, rows_of(job.theirs(options), ours), panels, lines, when, folder)
    return (folder / f"{name}.md").read_text()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one, or all; write the results."""
    options = parse(argv)
    pages = []
    for name in JOBS if options.name == "all" else [options.name]:
        try:
            pages.append(reproduce(name, options))
        except UsageError as error:
            if options.name != "all":
                sys.exit(f"reproduce: error: {error}")
            pages.append(f"## {name}: {JOBS[name].source}\n\nDid not run here: {error}\n")
        print(pages[-1], flush=True)
    failed = [page for page in pages if "Did not run here: " in page]
    if options.name == "all" and not options.show:
        (options.out / "all.md").write_text("\n".join(pages))
        print(f"{len(pages) - len(failed)} of {len(pages)} ran; {options.out / 'all.md'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
