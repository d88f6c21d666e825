"""Ma et al. 2016: tables 1 to 3, figures 3 to 5."""

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import harness
from papers import ERROR, PYTHON, PaperTable, Values, bench, from_one, medians, on_hosts, script

from jaxmpi.core.errors import check
from jaxmpi.observe.plots import Bars, Lines, Panel, Quantity

MODELS = ("alexnet", "googlenet")  # models of table 1
RowOf1 = tuple[str, int, int]  # row of table 1: model, images a worker, bits of a float that travels
TOP5_ERROR = ", top-5 error %"
# Tables 1 and 3. FIGURES: study, the paper's name, its images a worker over ours.
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


# ---------------------------------------------------------------- commands


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


def chosen(options: argparse.Namespace) -> dict[RowOf1, dict[int, float]]:
    """The paper's rows for the models asked for."""
    return {row: of for row, of in SPEEDUPS.items() if row[0].lower() in options.models}


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


# ---------------------------------------------------------------- table 2


def parameters(printed: list[str], files: list[str]) -> Values:
    """Parameters by model, of `jaxmpi models`."""
    rows = [re.split(r"[│|]", line) for line in printed[0].splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    counts = {c[0]: float(c[2].replace(",", "")) for c in cells if len(c) == 6 and c[1].isdigit()}
    return {f"{model}, parameters": counts[model] for model in ("alexnet", "googlenet", "vgg16")}


# ---------------------------------------------------------------- speed-ups of table 1


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


# ---------------------------------------------------------------- errors of table 1, figures 4 and 5


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


def learned(runs: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Runs by seed that are 2 points above chance, a tenth."""
    return {seed: run for seed, run in runs.items() if run["eval_top1"] > 0.12}


def errors_by_cell(printed: list[str], files: list[str]) -> Values:
    """Top-5 and top-1 error by cell, and points that 16 bits cost.

    Errors are means over seeds; top-5 errors also come as ratios to one worker's. If a seed has stayed at chance, the
    others have rows of their own.
    """
    ours: Values = {}
    for (model, factor), text in zip(FIGURES.values(), files, strict=True):
        cells = {name: runs for name, runs in cells_of(text, model, factor).items() if runs}
        error: Values = {}
        for cell, every in cells.items():
            able = learned(every)
            of_some = {f"{cell}, seeds that learned": able} if 0 < len(able) < len(every) else {}
            for name, runs in {cell: every, **of_some}.items():
                error |= over_seeds(f"{name}{TOP5_ERROR}", [run["top5_curve"][-1][1] for run in runs.values()])
                error |= over_seeds(f"{name}, top-1 error %", [100 * (1 - run["eval_top1"]) for run in runs.values()])
        base = next((name for name in cells if "1 worker " in name), "")
        ours |= error | (over_one(error, base) if base else {})
        narrow = next((name for name in cells if name.endswith("16 bits")), "")
        wide = cells.get(narrow.removesuffix(", 16 bits"), {})
        for top in ("top5", "top1") if narrow else ():
            lost = lost_points(learned(cells[narrow]), learned(wide), f"eval_{top}")
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
        found = {name.removeprefix(f"{model}, "): [*runs.values()] for name, runs in cells.items()}
        series = {name: harness.mean_curve(run["top5_curve"] for run in runs) for name, runs in found.items()}
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


# ---------------------------------------------------------------- table 3, figure 3


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


JOBS = {
    "table1": PaperTable(
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
    "table2": PaperTable(
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
    "table3": PaperTable(
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
    "speedup": PaperTable(
        "Ma et al. 2016, Table 1: speed-up of AlexNet and GoogLeNet, and with 16 bits",
        trainings,
        speedups,
        lambda o: {name: value for of in chosen(o).items() for name, value in named_speedups(*of).items()},
        "Theirs had a GPU a worker; ours are AlexNet's small variant and GoogLeNet at 64 px on digits, with an eighth "
        "of the images a worker. Workers that share a machine's cores cannot go beyond its cores.",
        panels=scaling_by_workers,
    ),
}
