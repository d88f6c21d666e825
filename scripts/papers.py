"""Tables of four papers as data: what is run for each, how its output is read, and the paper's own figures.

Ma et al. 2016 (Theano-MPI), Gibiansky 2017 (Baidu's ring), Kumar et al. 2018 (IBM), Stooke and Abbeel 2017
(Synkhronos). `reproduce.py` runs an entry of `TABLES` by its name. How our settings differ: docs/papers.md.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import harness

from jaxmpi.core.errors import UsageError

PYTHON = sys.executable
SLOW = "200mbit"  # links of emulated hosts
ERROR = ", standard error"  # suffix of a quantity that the page shows behind its mean
Options = argparse.Namespace
Values = dict[str, float]  # by quantity


class PaperTable(NamedTuple):
    """A table or figure of a paper."""

    source: str
    commands: Callable[[Options], list[list[str]]]  # {out} stands for a new file, {kept} for one that may exist
    read: Callable[[list[str]], Values]  # each command's file, or what it printed if it has none -> our figures
    paper: Callable[[Options], Values]
    on_hosts: bool = True  # may run on emulated hosts


# ---------------------------------------------------------------- commands


def script(name: str, *args: str) -> list[str]:
    """Command line of another script of this folder."""
    return [PYTHON, f"scripts/{name}.py", *args]


def cluster(options: Options, hosts: int) -> list[str]:
    """Start of a command that runs on emulated hosts; empty without --hosts."""
    return harness.cluster(hosts, options.rate or SLOW) if options.hosts and hosts > 1 else []


def bench(options: Options, ranks: int, *args: str) -> list[str]:
    """`jaxmpi bench` on ranks of this machine, or on emulated hosts."""
    args = (*args, "--peers", "none", "--warm-up", str(options.warm_up), "--rounds", str(options.rounds))
    if not options.hosts:
        return [PYTHON, "-m", "jaxmpi.bench", "-n", str(ranks), *args, "--out", "{out}"]
    launcher = [*cluster(options, ranks), "mpirun", "-n", str(ranks)]
    return [*launcher, PYTHON, "-m", "jaxmpi.bench", *args, "--out", "{out}"]


def ranks_of(options: Options) -> int:
    """Ranks of a job: one per emulated host, or those of this machine."""
    return options.hosts or options.n


def powers_up_to(limit: int) -> list[int]:
    """2, 4, 8, ... below `limit`, and `limit`."""
    return [*(2**i for i in range(1, limit.bit_length()) if 2**i < limit), limit]


def worker_counts(options: Options, default: Sequence[int]) -> list[int]:
    """Numbers of workers to compare with one worker.

    Raises:
        UsageError: one is not among them.
    """
    counts = options.workers or default
    if 1 not in counts:
        raise UsageError(f"--workers: got {counts}; expected 1 among them, whose speed is the base")
    return sorted(set(counts))


def medians(text: str) -> dict[str, Values]:
    """Seconds by case and contender in a file of `jaxmpi bench`."""
    cases = json.loads(text)["cases"]
    return {case["case"]: {row["by"]: statistics.median(row["seconds"]) for row in case["rows"]} for case in cases}


# ---------------------------------------------------------------- Ma et al. 2016

MODELS = ("alexnet", "googlenet")
BITS = {"asa32": "", "asa16": ", 16 bits"}
EIGHTH = 8  # a worker of ours has an eighth of the paper's images
# Study, and how many times our images a worker the paper has; top-5 errors by cell.
FIGURES = {"figure4": ("AlexNet", 8), "figure5": ("GoogLeNet", 4)}
TOP5 = {
    "AlexNet, 1 worker of 128 at 0.01": 19.8,
    "AlexNet, 2 workers of 128 at 0.01": 19.8,
    "AlexNet, 4 workers of 128 at 0.01": 20.4,
    "AlexNet, 8 workers of 128 at 0.005": 20.7,
    "AlexNet, 8 workers of 32 at 0.005": 19.9,
    "AlexNet, 8 workers of 32 at 0.005, 16 bits": 20.3,
    "GoogLeNet, 1 worker of 32 at 0.01": 10.07,
    "GoogLeNet, 2 workers of 32 at 0.007": 10.20,
    "GoogLeNet, 4 workers of 32 at 0.005": 10.48,
    "GoogLeNet, 8 workers of 32 at 0.005": 10.65,
    "GoogLeNet, 8 workers of 32 at 0.005, 16 bits": 11.75,
}
EXCHANGES = ("ar", "asa32", "asa16")
TABLE3 = {  # seconds of 5,120 images: training with one worker and with eight, and the exchanges
    ("alexnet", 128): (31.2, 3.90, (2.01, 0.75, 0.47)),
    ("alexnet", 32): (36.40, 4.56, (8.03, 2.94, 1.83)),
    ("googlenet", 32): (134.9, 16.82, (2.07, 1.96, 1.76)),
    ("vgg16", 32): (405.2, 51.79, (41.41, 8.60, 4.84)),
}
SPEEDUPS = {  # table 1 by model, images and exchange, then by workers; of 32 images over one worker's, table 3
    ("AlexNet", 128, "asa32"): {2: 1.7, 4: 3.4, 8: 6.7},
    ("AlexNet", 32, "asa32"): {8: 4.9},
    ("AlexNet", 32, "asa16"): {8: 5.7},
    ("GoogLeNet", 32, "asa32"): {2: 1.9, 4: 3.7, 8: 7.2},
    ("GoogLeNet", 32, "asa16"): {8: 7.3},
}


def accuracy_runs(options: Options) -> list[list[str]]:
    """Train with each number of workers and with 16 bits; recorded runs are not repeated."""
    more = ["--set", "train-for=60st", "--out", "{out}"] if options.quick else ["--out", "{kept}"]
    return [script("study", name, "--seeds", str(options.seeds), *more) for name in FIGURES]


def runs_by_cell(text: str, model: str, factor: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Lines of a sweep by cell and seed, without runs that diverged."""
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for row in map(json.loads, text.splitlines()):
        cell, batch = row["cell"], factor * int(row["cell"].get("local-batch", 8))
        workers = f"{cell['devices']} worker{'s' * (cell['devices'] != '1')} of {batch} at {cell['optim.lr']}"
        runs = cells.setdefault(f"{model}, {workers}{BITS[cell.get('exchange.strategy', 'asa32')]}", {})
        if any(run["cell"] != cell for run in runs.values()):
            raise UsageError(
                f"{model}, {workers}: got runs of several settings; remove the kept_* folders of earlier ones"
            )
        if "failed" not in row:
            runs[row["seed"]] = row
    return {name: runs for name, runs in cells.items() if runs}


def mean_and_error(name: str, values: Sequence[float]) -> Values:
    """A mean, and its standard error if there are several values."""
    error = {f"{name}{ERROR}": statistics.stdev(values) / len(values) ** 0.5} if len(values) > 1 else {}
    return {name: statistics.mean(values)} | error


def errors(files: list[str]) -> Values:
    """Top-5 and top-1 errors by cell, ratios to one worker's, and points that 16 bits cost.

    If a seed has stayed at chance, the others have rows of their own.
    """
    ours: Values = {}
    for (model, factor), text in zip(FIGURES.values(), files, strict=True):
        cells = runs_by_cell(text, model, factor)
        learned = {
            name: {seed: run for seed, run in runs.items() if run["eval_top1"] > 0.12}  # 2 points above chance
            for name, runs in cells.items()
        }
        some = {
            f"{name}, seeds that learned": learned[name] for name in cells if 0 < len(learned[name]) < len(cells[name])
        }
        for name, runs in (cells | some).items():
            ours |= mean_and_error(f"{name}, top-5 error %", [100 * (1 - run["eval_top5"]) for run in runs.values()])
            ours |= mean_and_error(f"{name}, top-1 error %", [100 * (1 - run["eval_top1"]) for run in runs.values()])
        base = next((name for name in cells if "1 worker " in name), "")
        one = ours.get(f"{base}, top-5 error %", 0.0)
        others = [name for name in (cells | some) if name != base] if one else []
        ours |= {f"{name}, over 1 worker": ours[f"{name}, top-5 error %"] / one for name in others}
        for name in [name for name in cells if name.endswith("16 bits")]:
            pairs = [
                (run, learned[name][seed])
                for seed, run in learned.get(name.removesuffix(", 16 bits"), {}).items()
                if seed in learned[name]
            ]
            for top in ("top5", "top1") if pairs else ():
                lost = [100 * (wide[f"eval_{top}"] - narrow[f"eval_{top}"]) for wide, narrow in pairs]
                ours |= mean_and_error(f"{model}, points of {top.replace('p', 'p-')} lost by 16 bits", lost)
    return ours


def paper_errors(options: Options) -> Values:
    """The paper's top-5 errors, their ratios, and points that 16 bits cost."""
    paper = {f"{name}, top-5 error %": value for name, value in TOP5.items()}
    for model, _ in FIGURES.values():
        one, *others = (name for name in TOP5 if name.startswith(model))
        paper |= {f"{name}, over 1 worker": TOP5[name] / TOP5[one] for name in others}
        wide = f"{model}, 8 workers of 32 at 0.005"
        paper[f"{model}, points of top-5 lost by 16 bits"] = TOP5[f"{wide}, 16 bits"] - TOP5[wide]
    return paper


def parameters(printed: list[str]) -> Values:
    """Parameters by model, printed by `jaxmpi models`."""
    rows = [[cell.strip() for cell in re.split(r"[│|]", line) if cell.strip()] for line in printed[0].splitlines()]
    counts = {row[0]: float(row[2].replace(",", "")) for row in rows if len(row) == 6 and row[1].isdigit()}
    return {f"{model}, parameters": counts[model] for model in ("alexnet", "googlenet", "vgg16")}


def cost_runs(options: Options) -> list[list[str]]:
    """Time the exchanges of gradients, then one worker's steps."""
    end = "_tiny" if options.quick else ""
    models = [f"{name}{end}" for name in dict.fromkeys(name for name, _ in TABLE3)]
    steps = {batch: [f"{name}{end}" for name, size in TABLE3 if size == batch] for _, batch in TABLE3}
    return [bench(options, ranks_of(options), "--tree", *models, "--strategies", *EXCHANGES)] + [
        script("zoo_steps", "-n", "1", "--local-batch", str(batch), "--models", *names, "--json", "{out}")
        for batch, names in steps.items()
    ]


def cost_rows(model: str, batch: int, workers: int, single: float, train: float, exchanges: Sequence[float]) -> Values:
    """Seconds of 5,120 images, and speed-ups over one worker's training."""
    name = f"{model}-{batch}b"
    row = {f"{name}, training with 1 worker, s": single, f"{name}, with {workers}, s": train}
    for by, seconds in zip(EXCHANGES, exchanges, strict=True):
        row |= {f"{name}, {by}, s": seconds, f"{name}, {by}, speed-up": single / (train + seconds)}
        row |= {f"{name}, {by} / training": seconds / train}
    return row


def costs(files: list[str]) -> Values:
    """Ratios of exchanges, seconds of 5,120 images, and speed-ups."""
    exchange = {case.removesuffix("_tiny"): by for case, by in medians(files[0]).items()}
    workers = int(json.loads(files[0])["cases"][0]["ranks"])
    ours = {f"{model}, ar / {other}": by["ar"] / by[other] for model, by in exchange.items() for other in EXCHANGES[1:]}
    for batch, text in zip(dict.fromkeys(batch for _, batch in TABLE3), files[1:], strict=True):
        for name, measured in json.loads(text).items():
            model, step = name.removesuffix("_tiny"), measured["ranks"][0]["seconds"][-1]
            rounds = 5120 / batch / workers
            times = [rounds * exchange[model][by] for by in EXCHANGES]
            ours |= cost_rows(model, batch, workers, step * 5120 / batch, step * rounds, times)
    return ours


def paper_costs(options: Options) -> Values:
    """The paper's table 3; with other than its 8 workers only one worker's training and ratios of exchanges."""
    paper: Values = {}
    for (model, batch), (single, train, (ar, asa32, asa16)) in TABLE3.items():
        if (model, batch) != ("alexnet", 32):
            paper |= {f"{model}, ar / asa32": ar / asa32, f"{model}, ar / asa16": ar / asa16}
        row = cost_rows(model, batch, 8, single, train, (ar, asa32, asa16))
        paper |= {name: s for name, s in row.items() if ranks_of(options) == 8 or name.endswith("with 1 worker, s")}
    return paper


def trainings(options: Options) -> list[list[str]]:
    """Train rows of table 1 with each number of workers, on emulated hosts one worker each.

    A row with one number in the paper runs with 1 worker and with the most.
    """
    fixed = ["--train-for", "10st" if options.quick else "30st", "--eval-every", "0st", "--checkpoint-every", "0st"]
    workers = worker_counts(options, (1, options.hosts) if options.hosts else (1, 2) if options.quick else (1, 2, 4, 8))
    lines = []
    for (model, batch, strategy), paper in SPEEDUPS.items():
        for n in workers if len(paper) > 1 else dict.fromkeys((1, max(workers))):
            # One worker sends nothing, so it is the same on all wires.
            if model.lower() in options.models and (n > 1 or strategy == "asa32"):
                job = [f"experiments/{model.lower()}.py", "--local-batch", str(batch // EIGHTH)]
                job += ["--exchange.strategy", strategy, *fixed, "--run-dir", "{out}"]
                lines.append([*cluster(options, n), PYTHON, "-m", "jaxmpi.tools.cli", "train", "-n", str(n), *job])
    return lines


def named_speedups(model: str, batch: int, strategy: str, by_workers: Mapping[int, float]) -> Values:
    """A row's speed-ups by quantity."""
    return {f"{model}, {n} workers of {batch}{BITS[strategy]}": value for n, value in by_workers.items()}


def speedups(files: list[str]) -> Values:
    """Images/s over those of one worker with as many images, from records."""
    rates: dict[tuple[str, int, str], dict[int, float]] = {}
    for text in files:
        rows = [json.loads(line) for line in text.splitlines()]
        run = next(row for row in rows if row["kind"] == "run")
        experiment = run["experiment"]
        model = next(name for name, *_ in SPEEDUPS if experiment["model"].startswith(name.lower()))
        row = model, EIGHTH * experiment["local_batch"], experiment["exchange"]["strategy"]
        paces = [row["images_per_s"] for row in rows if row["kind"] == "train"][1:]
        rates.setdefault(row, {})[run["workers"]] = statistics.median(paces)
    ours: Values = {}
    for (model, batch, strategy), by_workers in rates.items():
        one = rates[model, batch, "asa32"][1]
        ours |= named_speedups(model, batch, strategy, {n: rate / one for n, rate in by_workers.items() if n > 1})
    return ours


def paper_speedups(options: Options) -> Values:
    """The paper's speed-ups of the models asked for."""
    rows = [(*row, by_workers) for row, by_workers in SPEEDUPS.items() if row[0].lower() in options.models]
    return {name: value for row in rows for name, value in named_speedups(*row).items()}


# ---------------------------------------------------------------- Gibiansky 2017


def ring_runs(options: Options) -> list[list[str]]:
    """Sum a vector by 2 ranks, 4, ..., and by all."""
    args = ("--sizes", "600000" if options.quick else "6000000", "--strategies", "root", "ring32")
    return [bench(options, n, *args) for n in powers_up_to(ranks_of(options))]


def root_over_ring(files: list[str]) -> Values:
    """Time through one rank over that of a ring, by ranks."""
    by_ranks = {json.loads(text)["cases"][0]["ranks"]: next(iter(medians(text).values())) for text in files}
    return {f"root / ring32, {n} workers": by["root"] / by["ring32"] for n, by in by_ranks.items()}


# ---------------------------------------------------------------- Kumar et al. 2018


def shuffle_run(options: Options, workers: Sequence[int]) -> list[str]:
    """Time shuffles of data in memory, on emulated hosts or on ranks of this machine."""
    counts = [str(n) for n in workers]
    size = ["--ranks", *counts, *(["--mb", "8"] if options.quick else [])]
    if options.hosts:
        size = ["--hosts", *counts, "--rate", options.rate or SLOW, "--mb", "40"]
    return script("bench_shuffle", *size, "--rounds", str(options.rounds), "--json", "{out}")


def memory_runs(options: Options) -> list[list[str]]:
    """Time the shuffle with few and many workers, and loaders by format."""
    images, rounds = "48" if options.quick else "200", str(min(options.rounds, 3))
    formats = script("bench_data", "--part", "formats", "--images", images, "--rounds", rounds, "--json", "{out}")
    return [shuffle_run(options, sorted({2, ranks_of(options)})), formats]


def memory_ratios(files: list[str]) -> Values:
    """Ratios of the shuffle over all workers, and of reading an epoch from memory."""
    whole = {row["ranks"]: row for row in json.loads(files[0]) if row["ranks"] == row["group"]}
    low, high = min(whole), max(whole)
    rates = json.loads(files[1])["formats"]
    return {f"shuffle, {n} workers, bare Alltoallv / ours": row["ratio"] for n, row in whole.items()} | {
        f"shuffle, {high} workers / {low}": whole[high]["shuffle_s"] / whole[low]["shuffle_s"],
        "reading an epoch, memory / files": rates["imagefolder"] / rates["packed, in memory"],
    }


def group_workers(options: Options) -> list[int]:
    """Numbers of workers of Figs. 7 and 8: a quarter, half and all."""
    return sorted({max(ranks_of(options) // divisor, 2) for divisor in (4, 2, 1)})


def group_ratios(files: list[str]) -> Values:
    """Ratios of a shuffle's memory and time, by workers and by groups of all workers."""
    rows = [row for row in json.loads(files[0]) if row["shuffle_s"]]
    whole = {row["ranks"]: row for row in rows if row["group"] == row["ranks"]}
    low, high = min(whole), max(whole)
    groups = {high // row["group"]: row for row in rows if row["ranks"] == high > row["group"]}
    ours: Values = {}
    for key, label in (("MB", "MB a worker"), ("shuffle_s", "shuffle")):
        ours |= {f"{high} workers / {low}, {label}": whole[high][key] / whole[low][key]} if high > low else {}
        ours |= {f"{high} workers, {n} groups / 1, {label}": row[key] / whole[high][key] for n, row in groups.items()}
    return ours


def group_layout(options: Options) -> Values:
    """Memory of each worker by the layout: one copy over the workers of a group."""
    high, low = ranks_of(options), min(group_workers(options))
    groups = [n for n in range(2, high // 2 + 1) if high % n == 0]
    by_workers = {f"{high} workers / {low}, MB a worker": low / high} if high > low else {}
    return by_workers | {f"{high} workers, {n} groups / 1, MB a worker": float(n) for n in groups}


# ---------------------------------------------------------------- Stooke and Abbeel 2017


def function_runs(options: Options) -> list[list[str]]:
    """Scale ResNet-50 over functions."""
    short = ["--steps", "2", "--batch", "4"] if options.quick else []
    workers = map(str, worker_counts(options, (1, 2)))
    return [script("bench_functions", "resnet", "--workers", *workers, *short, "--json", "{out}")]


def function_scaling(files: list[str]) -> Values:
    """Speed-ups over the number of workers, and shares of the time, of the job with the most workers."""
    rows = json.loads(files[0])
    workers = max(int(name.split()[-1]) for name in rows if name.startswith("weak"))
    baseline = rows["plain JAX, 1"]["total_s"] / rows["plain JAX, 1"]["examples"]
    ours: Values = {}
    for kind in ("weak", "strong"):
        if row := rows.get(f"{kind}, {workers}"):
            ours[f"{kind} scaling, speed-up over workers"] = baseline / (row["total_s"] / row["examples"]) / workers
    weak = rows[f"weak, {workers}"]
    parts = {"shuffle": "shuffle_s", "straggler": "straggler_s", "all-reduce": "reduce_s"}
    return ours | {f"weak scaling, {part} of the time": weak[key] / weak["total_s"] for part, key in parts.items()}


TABLES = {
    "table1": PaperTable(
        "Ma et al. 2016, Table 1, Figs. 4 and 5: top-5 error by workers, and with 16 bits",
        accuracy_runs,
        errors,
        paper_errors,
        on_hosts=False,
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
        on_hosts=False,
    ),
    "table3": PaperTable(
        "Ma et al. 2016, Table 3, Fig. 3: training and exchange of 5,120 images, 8 workers",
        cost_runs,
        costs,
        paper_costs,
    ),
    "speedup": PaperTable(
        "Ma et al. 2016, Table 1: speed-up of AlexNet and GoogLeNet, and with 16 bits",
        trainings,
        speedups,
        paper_speedups,
    ),
    "ring": PaperTable(
        "Gibiansky 2017: everything through one rank over the ring, by its formula N / 2",
        ring_runs,
        root_over_ring,
        lambda o: {f"root / ring32, {n} workers": n / 2 for n in powers_up_to(ranks_of(o))},
    ),
    "multicolor": PaperTable(
        "Kumar et al. 2018: multi-colour trees over Open MPI's Allreduce, GoogLeNetBN",
        lambda o: [bench(o, ranks_of(o), "--tree", "googlenetbn", "--strategies", "ar", "color4:32")],
        lambda files: {f"{case}, color4:32 / ar": by["color4:32"] / by["ar"] for case, by in medians(files[0]).items()},
        lambda o: {"googlenetbn, color4:32 / ar": 0.45},
    ),
    "dimd": PaperTable(
        "Kumar et al. 2018: data in memory, and its shuffle",
        memory_runs,
        memory_ratios,
        lambda o: {"reading an epoch, memory / files": 0.67},
    ),
    "groups": PaperTable(
        "Kumar et al. 2018, Figs. 7 to 9: time and memory of the shuffle, by workers and groups",
        lambda o: [shuffle_run(o, group_workers(o))],
        group_ratios,
        group_layout,
    ),
    "synkhronos": PaperTable(
        "Stooke and Abbeel 2017, Figs. 2 and 3, Table 1",
        function_runs,
        function_scaling,
        lambda o: {
            "weak scaling, speed-up over workers": 7.5 / 8,
            "strong scaling, speed-up over workers": 5.0 / 8,
            "weak scaling, shuffle of the time": 1.6 / 52.6,
            "weak scaling, straggler of the time": 1.0 / 52.6,
            "weak scaling, all-reduce of the time": 0.46 / 52.6,
        },
        on_hosts=False,
    ),
}
