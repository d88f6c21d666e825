"""Tables and figures of the papers by one command each, as ratios, ours beside theirs.

    python scripts/reproduce.py table2                               what models cost
    python scripts/reproduce.py table3 -n 8                          exchange of models' gradients, by strategy
    python scripts/reproduce.py ring --hosts 8 --rate 200mbit        the same on an emulated cluster
    python scripts/reproduce.py speedup --workers 1 2 4 8            images/s of GoogLeNet; with --hosts a host each
    python scripts/reproduce.py table3 --show                        only the lines that it would run

It runs the project's other scripts and compares their results; it measures nothing itself. It writes NAME.csv,
NAME.png, and NAME.md with machine, date and a remark on differences, into --out (runs/papers).
"""

import argparse
import csv
import datetime
import functools
import json
import os
import platform
import re
import shlex
import shutil
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
from jaxmpi.observe.plots import Bars, Quantity

PYTHON = sys.executable
Values = dict[str, float]  # by quantity


class Job(NamedTuple):
    """A table or figure of a paper."""

    source: str
    lines: Callable[[argparse.Namespace], list[list[str]]]  # commands; {out} in one stands for a file
    read: Callable[[list[str], list[str]], Values]  # their output, and the text of their files -> ours
    theirs: Callable[[argparse.Namespace], Values]  # the paper's figures for as many workers
    remark: str  # on differences
    over_hosts: bool = True  # may run on emulated ones


# ---------------------------------------------------------------- commands


def bench(options: argparse.Namespace, *args: str) -> list[str]:
    """`jaxmpi bench` on ranks of this machine, or on emulated hosts."""
    rest = [*args, "--warm-up", str(options.warm_up), "--rounds", str(options.rounds), "--out", "{out}"]
    if not options.hosts:
        return [PYTHON, "-m", "jaxmpi.bench", "-n", str(options.n), *rest]
    return [*on_hosts(options, options.hosts), "mpirun", "-n", str(options.hosts), PYTHON, "-m", "jaxmpi.bench", *rest]


def on_hosts(options: argparse.Namespace, hosts: int) -> list[str]:
    """Start of a line that runs on emulated hosts; empty on this machine."""
    return harness.cluster(hosts, options.rate) if options.hosts and hosts > 1 else []


def trainings(options: argparse.Namespace) -> list[list[str]]:
    """GoogLeNet with each number of workers, the same local batch; on emulated hosts one a host."""
    fixed = ["experiments/googlenet.py", "--local-batch", "4", "--train-for", "30st", "--eval-every", "0st"]
    fixed += ["--checkpoint-every", "0st", "--run-dir", "{out}"]
    train = [PYTHON, "-m", "jaxmpi.tools.cli", "train", "-n"]
    workers = options.workers or ([1, options.hosts] if options.hosts else [1, 2])
    return [[*on_hosts(options, n), *train, str(n), *fixed] for n in workers]


def accuracies(options: argparse.Namespace) -> list[list[str]]:
    """Train on digits with every synchronous rule, with 32 and 16 bits."""
    n = options.hosts or options.n
    grid = script("study", "--launch", "--workers", str(n), "--seeds", "1", "--out", "{out}", "--vary")
    rules = (["rule.name=awagd,gradients"], ["rule.name=subgd", f"optim.lr={0.02 / n}"])  # SUBGD sums updates
    return [[*on_hosts(options, n), *grid, "exchange.strategy=asa32,asa16", *rule] for rule in rules]


def shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle with few and many workers, and all sources."""
    many = options.hosts or options.n
    workers = [str(n) for n in dict.fromkeys((2, many))]
    where = ["--hosts", *workers, "--rate", options.rate, "--mb", "40"] if options.hosts else ["--ranks", *workers]
    return [
        script("bench_shuffle", "shuffle", *where, "--rounds", str(options.rounds)),
        script("bench_shuffle", "sources", "--images", "200", "--rounds", str(min(options.rounds, 3))),
    ]


def group_shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle with half of the workers and with all, for every size of group."""
    many = options.hosts or options.n
    workers = [str(n) for n in dict.fromkeys((max(many // 2, 2), many))]
    where = ["--hosts", *workers, "--rate", options.rate, "--mb", "40"] if options.hosts else ["--ranks", *workers]
    return [script("bench_shuffle", "shuffle", *where, "--rounds", str(options.rounds))]


def epochs(what: str, options: argparse.Namespace) -> list[list[str]]:
    """Train in two layouts of as many workers, with two devices a process in one, or from several places."""
    here = max(options.n // 2, 1) if what == "devices" else options.n
    ranks, rate = options.hosts or here, ["--rate", options.rate] if options.hosts else []
    return [script("bench_epoch", what, "--ranks", str(ranks), "--rounds", str(min(options.rounds, 5)), *rate)]


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
    """Images/s over those of the first run, of records."""
    rates = {}
    for text in files:
        rows = [json.loads(line) for line in text.splitlines()]
        workers = next(row["workers"] for row in rows if row["kind"] == "run")
        paces = [row["images_per_s"] for row in rows if row["kind"] == "train"][1:]
        rates[workers] = statistics.median(paces)
    base = rates[min(rates)]
    return {f"{workers} workers": rate / base for workers, rate in rates.items() if workers != min(rates)}


def sixteen_bits(printed: list[str], files: list[str]) -> Values:
    """Points of top-1 that 16 bits cost, by rule, of `study.py`."""
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    top1: dict[str, Values] = {row["cell"]["rule.name"]: {} for row in rows}
    for row in rows:
        check("eval_top1" in row, f"{row['cell']}: {row.get('failed')}")
        top1[row["cell"]["rule.name"]][row["cell"]["exchange.strategy"]] = 100 * row["eval_top1"]
    return {
        f"digits, {rule}, points of top-1 lost by 16 bits": cells["asa32"] - cells["asa16"]
        for rule, cells in top1.items()
    }


def tables(text: str) -> list[list[str]]:
    """Cells of the Markdown rows in a text, with heads, without the lines under them."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if set(row[0]) != {"-"}]


def memory(printed: list[str], files: list[str]) -> Values:
    """The shuffle over all workers, beside the bare call and by workers; time of an epoch from memory."""
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
    """Memory and time of a shuffle with several groups over those with one, and with all workers over half of them."""
    rows = [[float(cell) for cell in row[:4]] for row in tables(printed[0])[1:] if row[3] != "indices only"]
    whole = {int(ranks): row for ranks, group, *row in rows if group == ranks}
    few, many = min(whole), max(whole)
    groups = {int(many / group): row for ranks, group, *row in rows if ranks == many and group < many}
    ours = {}
    for i, what in enumerate(("MB a worker", "shuffle")):
        ours |= {f"{many} workers / {few}, {what}": whole[many][i] / whole[few][i]} if many > few else {}
        ours |= {f"{many} workers, {n} groups / 1, {what}": row[i] / whole[many][i] for n, row in groups.items()}
    return ours


def held(options: argparse.Namespace) -> Values:
    """Bytes of each worker: one copy over the workers of a group."""
    many = options.hosts or options.n
    few = max(many // 2, 2)
    groups = [n for n in range(2, many // 2 + 1) if many % n == 0]
    by_workers = {f"{many} workers / {few}, MB a worker": few / many} if many > few else {}
    return by_workers | {f"{many} workers, {n} groups / 1, MB a worker": float(n) for n in groups}


def epoch_ratios(names: dict[str, tuple[str, str]], printed: list[str], files: list[str]) -> Values:
    """Time of one contender's epoch over another's, by name, of `bench_epoch.py`."""
    seconds = {row[0]: float(row[1]) for row in tables(printed[0])[1:]}
    found = {
        name: [next(s for key, s in seconds.items() if key.startswith(prefix)) for prefix in pair]
        for name, pair in names.items()
    }
    return {name: above / below for name, (above, below) in found.items()}


def scaling(printed: list[str], files: list[str]) -> Values:
    """Speed-up over workers, and parts of the time, with the most workers, of `bench_functions.py resnet`."""
    rows = {row[0].removesuffix(" (beyond the cores)"): list(map(float, row[1:])) for row in tables(printed[0])[1:]}
    workers = max(int(name.split()[-1]) for name in rows if name.startswith("weak"))
    weak, strong = rows[f"weak, {workers}"], rows.get(f"strong, {workers}")
    ours = {"weak scaling, speed-up over workers": weak[1] / workers}
    ours |= {"strong scaling, speed-up over workers": strong[1] / workers} if strong else {}
    parts = dict(zip(("shuffle", "straggler", "all-reduce"), weak[3:], strict=True))
    return ours | {f"weak scaling, {part} of the time": value / weak[0] for part, value in parts.items()}


JOBS = {
    "table1": Job(
        "Ma et al. 2016, Table 1: accuracy with 16 bits on the wire",
        accuracies,
        sixteen_bits,
        lambda o: {"AlexNet, points of top-5 lost by 16 bits": 0.4, "GoogLeNet, points of top-5 lost by 16 bits": 1.1},
        "Theirs are two models on ImageNet, 8 workers; ours one small CNN on digits by rule, where one example is 0.28 "
        "points. No row of ours is one of theirs.",
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
        "Ma et al. 2016, Table 3: MPI's Allreduce over ASA, 8 workers",
        lambda o: [
            bench(
                o, "--tree", "alexnet", "googlenet", "vgg16", "--strategies", "ar", "asa32", "asa16", "--peers", "none"
            )
        ],
        over("ar", "asa32", "asa16"),
        lambda o: {
            "alexnet, ar / asa32": 2.68,
            "alexnet, ar / asa16": 4.28,
            "googlenet, ar / asa32": 1.06,
            "googlenet, ar / asa16": 1.18,
            "vgg16, ar / asa32": 4.82,
            "vgg16, ar / asa16": 8.56,
        },
        "Their Allreduce went through the host and summed there; ours is Open MPI 5's own, tuned. Inside one host 16 "
        "bits cost conversions and save memory traffic only.",
    ),
    "speedup": Job(
        "Ma et al. 2016, Table 1: speed-up of GoogLeNet",
        trainings,
        speedups,
        lambda o: {"2 workers": 1.9, "4 workers": 3.7, "8 workers": 7.2},
        "Theirs sent 32 bits (16 bits: 7.3 with 8 workers), as ours do, and had a GPU a worker. Workers that share a "
        "machine's cores cannot go beyond its cores.",
    ),
    "ring": Job(
        "Gibiansky 2017: everything through one rank over the ring, by its formula N / 2",
        lambda o: [bench(o, "--sizes", "6000000", "--strategies", "root", "ring32", "--peers", "none")],
        lambda printed, files: {
            name.split(", ")[1]: value for name, value in over("root", "ring32")(printed, files).items()
        },
        lambda o: {"root / ring32": (o.hosts or o.n) / 2},
        "Their formula counts what the one rank receives; ours sends the sum back after that, which makes N. "
        "Inside one host links are memory, which ranks share.",
    ),
    "multicolor": Job(
        "Kumar et al. 2017: multi-colour trees over Open MPI's Allreduce, GoogLeNetBN",
        lambda o: [bench(o, "--tree", "googlenetbn", "--strategies", "ar", "color4:32", "--peers", "none")],
        over("color4:32", "ar"),
        lambda o: {"googlenetbn, color4:32 / ar": 0.45},
        "Theirs took 50 to 60 % less time on 16 nodes with RDMA; a tree inside one host only adds copies.",
    ),
    "dimd": Job(
        "Kumar et al. 2017: data in memory, and its shuffle",
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
    ),
    "epoch": Job(
        "Kumar et al. 2018, Figs. 10 and 11: an epoch of ResNet-50 with and without data in memory",
        functools.partial(epochs, "data"),
        functools.partial(
            epoch_ratios,
            {
                "an epoch, memory / files": ("memory", "files"),
                "an epoch, memory / files with 10 ms a read": ("memory", "files with"),
                "an epoch, packed / files": ("packed", "files"),
            },
        ),
        lambda o: {"an epoch, memory / files": 0.75},
        "Theirs read ImageNet-1k from a cluster's file system (GoogLeNetBN: 0.67); ours a small ResNet, so that cores "
        "have time for data, and files in the page cache.",
    ),
    "devices": Job(
        "Kumar et al. 2018, Fig. 12: an epoch of ResNet-50 with a better use of a node's devices",
        functools.partial(epochs, "devices"),
        functools.partial(
            epoch_ratios, {"an epoch, a process for several devices / for one": ("a process for", "a process a")}
        ),
        lambda o: {"an epoch, a process for several devices / for one": 0.82},
        "Theirs improved one layout, Torch's data-parallel table (GoogLeNetBN: 0.85); ours compares algorithm 1, one "
        "process a node, with one process a device. Our devices are CPU devices that share cores.",
    ),
    "synkhronos": Job(
        "Stooke and Abbeel 2017, Figs. 2 and 3, Table 1",
        lambda o: [script("bench_functions", "resnet", "--workers", *map(str, o.workers or (1, 2)))],
        scaling,
        lambda o: {
            "weak scaling, speed-up over workers": 7.5 / 8,
            "strong scaling, speed-up over workers": 5 / 8,
            "weak scaling, shuffle of the time": 1.6 / 52.6,
            "weak scaling, straggler of the time": 1.0 / 52.6,
            "weak scaling, all-reduce of the time": 0.46 / 52.6,
        },
        "Theirs are 8 GPUs with NVLink and a batch of 64 each; ours cores of one processor, which share its memory, "
        "and a batch of 8: an all-reduce is a larger part of a step.",
        over_hosts=False,
    ),
}


# ---------------------------------------------------------------- running, writing


def run(job: Job, options: argparse.Namespace, folder: Path) -> tuple[Values, list[str], list[str]]:
    """Run the lines; return our values, the lines, and their output.

    Raises:
        UsageError: a script is not there, or failed.
    """
    lines, printed, files = [], [], []
    for i, template in enumerate(job.lines(options)):
        out = folder / f"of_line_{i + 1}"
        if out.is_dir():  # of an earlier call
            shutil.rmtree(out)
        out.unlink(missing_ok=True)
        line = [str(out) if arg == "{out}" else arg for arg in template]
        lines.append(shlex.join(line).replace(PYTHON, "python").replace(f"{ROOT}/", ""))
        missing = [arg for arg in line if arg.startswith("scripts/") and not (ROOT / arg).is_file()]
        check(
            not missing, f"{', '.join(missing)}: not there in this version; it belongs to another part of the project"
        )
        print("+ " + lines[-1], flush=True)
        if options.show:
            continue
        ended = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=options.timeout_s)
        check(ended.returncode == 0, f"ended with code {ended.returncode}: {lines[-1]}")
        printed.append(ended.stdout)
        files += [text for text in (written(out),) if text]
    return ({} if options.show else job.read(printed, files)), lines, printed


def written(out: Path) -> str:
    """Text that a line wrote: a file, or the record of a run directory."""
    file = out / "record.jsonl" if out.is_dir() else out
    return file.read_text() if file.is_file() else ""


def rows_of(theirs: Values, ours: Values) -> list[dict[str, Any]]:
    """Ours beside theirs, and the ratio."""
    return [
        {"quantity": name, "paper": paper, "ours": mine, "ours / paper": mine / paper if mine and paper else None}
        for name in dict.fromkeys([*theirs, *ours])
        for paper, mine in [(theirs.get(name), ours.get(name))]
    ]


def write(name: str, job: Job, rows: Sequence[dict[str, Any]], lines: Sequence[str], folder: Path) -> None:
    """Write a CSV, a page, and a plot if there is anything to compare."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["quantity", "paper", "ours", "ours / paper"])
        table.writeheader()
        table.writerows(rows)
    ratios = [(row["quantity"], *[row["ours / paper"]] * 3) for row in rows if row["ours / paper"]]
    if ratios:
        ratio = Quantity("ours over the paper's", base=None)
        plots.save([Bars(job.source, ratio, ratios, bound=1.0)], folder / f"{name}.png")
    (folder / f"{name}.md").write_text(page(name, job, rows, lines))


def page(name: str, job: Job, rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """A section of docs/papers.md."""
    shown = [[shown_value(row[key]) for key in ("quantity", "paper", "ours", "ours / paper")] for row in rows]
    table = harness.table(("quantity", "paper", "ours", "ours / paper"), shown)
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, {platform.system()}, {datetime.date.today():%Y-%m-%d}."
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
    parser.add_argument("name", choices=JOBS, help="a table or figure")
    parser.add_argument("-n", type=int, default=8, help="ranks of this machine")
    parser.add_argument("--workers", type=int, nargs="+", help="of speedup, synkhronos (default: 1 2; 1 and --hosts)")
    parser.add_argument("--hosts", type=int, default=0, help="emulated hosts, a rank each, instead of -n")
    parser.add_argument("--rate", default="200mbit", help="of each emulated host's link")
    parser.add_argument("--rounds", type=int, default=10, help="of exchanges")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before, of exchanges")
    parser.add_argument("--timeout-s", type=float, default=3600, help="of each line")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "papers", help="folder for what comes of it")
    parser.add_argument("--show", action="store_true", help="print the lines, run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one, and write its results."""
    options = parse(argv)
    job = JOBS[options.name]
    folder = options.out / options.name
    try:
        check(job.over_hosts or not options.hosts, f"--hosts: {options.name} runs on this machine alone; leave it out")
        folder.mkdir(parents=True, exist_ok=True)
        ours, lines, printed = run(job, options, folder)
    except UsageError as error:
        sys.exit(f"reproduce: error: {error}")
    if options.show:
        return
    if not ours:
        print("\n".join(printed))
    rows = rows_of(job.theirs(options), ours)
    write(options.name, job, rows, lines, folder)
    print((folder / f"{options.name}.md").read_text())


if __name__ == "__main__":
    main()
