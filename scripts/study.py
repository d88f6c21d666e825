"""Grid of runs with several seeds: accuracy by setting, with error bars.

    python scripts/study.py batch wires periods elastic text --seeds 5 --out runs/study.jsonl [--png runs/study.png]
    python scripts/study.py --experiment experiments/digits.py --workers 1 8 --vary local-batch=8,64 optim.lr=0.02,0.1

A study of STUDIES by name, or a grid: all combinations of --workers and of the values of --vary, which takes any flag
of the trainer. Every run becomes a line of --out when it is done, and recorded runs are not repeated. So a stopped
study goes on, and one with more seeds only adds them. A run that diverges is a line too, counted as failed and left
out of means. The others are compared with the first cell, seed by seed: the same seed gives the same initial params and
the same order of examples. If --train-for varies, a second table has the shortest runs that are no worse than the first
cell's.

--beside N has N processes compute beside the runs, as other users' would. Lines of --out do not say so: give it a file
of its own.

Workers are devices of one process. With --launch, and in `elastic` and `strategies`, they are ranks under mpirun, which
asynchronous rules and strategies of MPI need.
"""

import argparse
import contextlib
import dataclasses
import datetime
import io
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import ROOT

from jaxmpi.comm.job import processes
from jaxmpi.config import experiment_file
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import NotFinite
from jaxmpi.observe import plots
from jaxmpi.rules import registry
from jaxmpi.runtime import device_setup, failures, launchers, prepare, provenance
from jaxmpi.trainer import main as trainer_main

Cell = dict[str, str]  # flag of the trainer to value; "workers" among them


class Grid(NamedTuple):
    """All combinations of values, and the settings common to them."""

    vary: Mapping[str, Sequence[str]]
    common: Mapping[str, str]

    def cells(self) -> list[Cell]:
        """Cells in the order of the values, the last flag fastest."""
        names = list(self.vary)
        every = itertools.product(*self.vary.values())
        return [{**self.common, **dict(zip(names, values, strict=True))} for values in every]


class Study(NamedTuple):
    """A question and its grids, whose first cell is the reference."""

    question: str
    experiment: str
    grids: Sequence[Grid]
    launched: bool = False  # as ranks, because asynchronous rules need them

    def cells(self) -> list[Cell]:
        """Cells of all grids."""
        return [cell for grid in self.grids for cell in grid.cells()]


DIGITS = "experiments/digits.py"
EIGHT = {"workers": "8", "local-batch": "8", "train-for": "20ep", "eval-every": "5ep"}
PERIODS = ("1", "2", "5", "10", "20", "45")
STRATEGIES = ("ar", "asa32", "asa16", "ring32")
ADAMW = {"optim.name": "adamw", "optim.lr": "0.004", "train-for": "300st"}
STUDIES = {
    "batch": Study(
        "Does 8 x b cost accuracy against 1 x b? The same epochs; the rate as it is, and times 8.",
        DIGITS,
        [
            Grid({}, EIGHT | {"workers": "1", "local-batch": "8", "optim.lr": "0.02"}),
            Grid({"optim.lr": ("0.02", "0.05", "0.16")}, EIGHT),
        ],
    ),
    "wires": Study(
        "What do coarser exchanges cost?",
        DIGITS,
        [Grid({"exchange.strategy": ("asa32", "asa16", "asabf16", "asa8", "lowrank4", "topk10")}, EIGHT)],
    ),
    "periods": Study(
        "How far can H grow?",
        DIGITS,
        [
            Grid({}, EIGHT | {"rule.name": "gradients", "optim.lr": "0.05"}),
            Grid({"rule.local-steps": PERIODS}, EIGHT | {"rule.name": "local_sgd", "optim.lr": "0.05"}),
            # The outer optimizer multiplies what workers move by eta / (1 - mu) = 7 in the long run.
            Grid({"rule.local-steps": PERIODS[2:]}, EIGHT | {"rule.name": "diloco", "optim.lr": "0.007"}),
        ],
    ),
    "strategies": Study(
        "Does every rule learn over every strategy? SUBGD sums updates, so it runs 1/4 of the learning rate.",
        DIGITS,
        [
            Grid({"exchange.strategy": STRATEGIES}, {"workers": "4", "rule.name": "subgd", "optim.lr": "0.005"}),
            Grid({"rule.name": ("awagd", "gradients"), "exchange.strategy": STRATEGIES}, {"workers": "4"}),
        ],
        launched=True,
    ),
    "elastic": Study(
        "Which alpha and tau for EASGD?",
        DIGITS,
        [
            Grid({}, FOUR := {"workers": "4", "local-batch": "8", "train-for": "20ep", "eval-every": "5ep"}),
            Grid(
                {"rule.tau": ("1", "4", "16"), "rule.alpha": ("0.1", "0.25", "0.5", "0.9")},
                FOUR | {"rule.name": "easgd"},
            ),
        ],
        launched=True,
    ),
    "text": Study(
        "How far can H grow on text? Bits per byte.",
        "experiments/gpt.py",
        [
            Grid({"rule.name": ("gradients",)}, TEXT := {"workers": "4", "local-batch": "8", "train-for": "400st"}),
            Grid({"rule.local-steps": ("10", "50")}, TEXT | {"rule.name": "local_sgd"}),
            # A third of the rate, as its outer optimizer makes more of it.
            Grid({"rule.local-steps": ("10", "50")}, TEXT | {"rule.name": "diloco", "optim.lr": "0.0007"}),
        ],
    ),
    "muon": Study(
        "How many of AdamW's 300 steps does Muon need? Each at the rate that is best with seed 100. Bits per byte.",
        "experiments/gpt.py",
        [
            Grid({}, {**(ONE := {"workers": "1", "local-batch": "8", "optim.b2": "0.95"}), **ADAMW}),
            Grid({"train-for": ("225st", "150st")}, ONE | {"optim.name": "muon", "optim.lr": "0.04"}),
        ],
    ),
    "figure4": Study(
        "Ma et al. 2016, figure 4 and table 1: what do more workers and 16 bits cost AlexNet, at the paper's rates?",
        "experiments/scaling/alexnet.py",
        [
            Grid({"workers": ("1", "2", "4")}, {"local-batch": "16", "optim.lr": "0.01"}),
            Grid({}, {"workers": "8", "local-batch": "16", "optim.lr": "0.005"}),
            Grid({"exchange.strategy": ("asa32", "asa16")}, {"workers": "8", "local-batch": "4", "optim.lr": "0.005"}),
        ],
    ),
    "figure5": Study(
        "Ma et al. 2016, figure 5 and table 1: what do more workers and 16 bits cost GoogLeNet, at the paper's rates?",
        "experiments/scaling/googlenet.py",
        [
            Grid({}, {"workers": "1", "optim.lr": "0.01"}),
            Grid({}, {"workers": "2", "optim.lr": "0.007"}),
            Grid({}, {"workers": "4", "optim.lr": "0.005"}),
            Grid({"exchange.strategy": ("asa32", "asa16")}, {"workers": "8", "optim.lr": "0.005"}),
        ],
    ),
    "alexnet": Study(
        "Does the paper's AlexNet learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/alexnet.py",
        [Grid({}, TWO := {"workers": "2"}), Grid({"data.std": ("0.376",)}, TWO)],
    ),
    "vgg16": Study(
        "Does the paper's VGG-16 learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/vgg16.py",
        [Grid({}, TWO), Grid({"data.std": ("0.376",)}, TWO)],
    ),
    "googlenet": Study(
        "Does the paper's GoogLeNet learn? At a rate for 10 classes, and at the paper's for 2 workers.",
        "experiments/papers/googlenet.py",
        [Grid({}, TWO), Grid({"optim.lr": ("0.007",)}, TWO)],
    ),
    "resnet50": Study("Does the paper's ResNet-50 learn?", "experiments/papers/resnet50.py", [Grid({}, TWO)]),
    "googlenetbn": Study("Does the paper's GoogLeNetBN learn?", "experiments/papers/googlenetbn.py", [Grid({}, TWO)]),
}


# ---------------------------------------------------------------- runs


def run_cell(experiment: str, cell: Cell, seeds: Sequence[int], out: str, launched: bool) -> None:
    """Be a process of a cell's job: run its seeds in order.

    Rank 0 appends a line for each.
    """
    flags = {name: value for name, value in cell.items() if name != "workers"}
    line = [experiment, *itertools.chain(*((f"--{name}", value) for name, value in flags.items()))]
    failures.install_excepthooks()
    prepare.prepare()
    with contextlib.redirect_stdout(io.StringIO()):
        chosen, path = experiment_file.parse([*line, *([] if launched else ["--devices", cell["workers"]])])
    device_setup.make_cpu_devices(chosen.devices)
    with failures.at_work():
        for seed in seeds:
            row = {"experiment": experiment, "cell": cell, "seed": seed} | run_now()
            run_seed(dataclasses.replace(chosen, seed=seed), path.stem, row, Path(out))


def run_now() -> dict[str, str]:
    """The day and the commit of a run that begins."""
    return {"day": f"{datetime.date.today()}", "commit": provenance.commit(ROOT)}


def run_seed(chosen: Experiment, name: str, row: dict[str, Any], out: Path) -> None:
    """Run one seed; append `row` with its outcome to OUT.

    Raises:
        NotFinite: it diverged, which the line records.
    """
    try:
        with shared_folder() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer_main.train(dataclasses.replace(chosen, run_dir=str(folder), resume=False), name)
            row |= outcome(folder)
    except NotFinite as error:
        row["failed"] = str(error)
        if launchers.my_rank() == 0 or registry.is_asynchronous(chosen.rule):  # there one worker alone notices it
            append(out, row)
        raise
    if launchers.my_rank() == 0:
        append(out, row)


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a line; begin a new one after a cut-off line."""
    is_cut = out.exists() and out.read_bytes()[-1:] not in (b"", b"\n")
    with out.open("a") as file:
        file.write("\n" * is_cut + json.dumps(row) + "\n")


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for a run, the same for all ranks: rank 0's."""
    control = processes()
    with tempfile.TemporaryDirectory() as mine:
        yield Path(control.bcast_object(mine))
        control.barrier()


def outcome(folder: Path) -> dict[str, Any]:
    """Outcome by a run's record: last evaluation and curve, or the failure."""
    rows = harness.record(folder)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    steps = [row for row in rows if row["kind"] == "train"]
    if evaluations[-1]["eval_loss"] is None:
        return {"failed": "the held-out loss is not finite"}
    curve = [[row["epoch"], row["eval_loss"]] for row in evaluations]
    kept = {name: value for name, value in evaluations[-1].items() if name.startswith("eval_")}
    if "eval_top5" in kept:
        kept["top5_curve"] = [[row["epoch"], 100 * (1 - row["eval_top5"])] for row in evaluations]
    apart = [row for row in rows if row["kind"] == "workers"]
    if apart:
        kept["worker_steps"] = apart[-1]["worker_steps"]
    return {**kept, "curve": curve, "loss": steps[-1]["loss"], "elapsed_s": evaluations[-1]["elapsed_s"]}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Have processes compute meanwhile."""
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Read the recorded lines; skip one that was cut off."""
    rows = []
    for line in out.read_text().splitlines() if out.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def run_missing(study: Study, seeds: Sequence[int], out: Path, launched: bool) -> None:
    """Run every cell and seed that has no line yet.

    A run that diverges ends its job; the other seeds get another job.

    Raises:
        SystemExit: a job failed for another reason; its message is above.
    """
    cells = study.cells()
    for number, cell in enumerate(cells, 1):
        before = found(rows_of(out), study, cell)
        while missing := sorted(set(seeds) - {row["seed"] for row in before}):
            print(f"{number}/{len(cells)} {title(cell, study)}: seeds {missing}", file=sys.stderr, flush=True)
            job = (study.experiment, cell, missing, str(out), launched)
            try:
                harness.on_ranks(run_cell, *job, ranks=int(cell["workers"]) if launched else 0)
                break
            except harness.JobFailed as error:
                rows = found(rows_of(out), study, cell)
                if not any("failed" in row for row in rows[len(before) :]):
                    raise SystemExit(f"study.py: the job of {cell} failed; its message is above") from error
                before = rows


def found(rows: Sequence[dict[str, Any]], study: Study, cell: Cell) -> list[dict[str, Any]]:
    """The lines of a cell."""
    return [row for row in rows if row["experiment"] == study.experiment and row["cell"] == cell]


def finished(rows: Sequence[dict[str, Any]], study: Study, cell: Cell) -> dict[int, dict[str, Any]]:
    """The lines of a cell by seed, but for runs that diverged."""
    return {row["seed"]: row for row in found(rows, study, cell) if "failed" not in row}


# ---------------------------------------------------------------- tables and plots


class Summary(NamedTuple):
    """A cell's metric over its seeds, and its difference from the reference."""

    title: str
    unit: str  # unit of the mean
    seeds: int  # that finished
    failed: int
    mean: float
    error: float  # standard error
    difference: float
    difference_error: float
    elapsed_s: float  # seconds of a run, to its last evaluation, mean over seeds
    shares: list[float]  # shares of the steps, by worker, mean over seeds; none if workers run in lock-step
    farthest: float  # largest distance of a run's worker steps from an equal share, as a part of that; 0 in lock-step

    @property
    def within(self) -> str:
        """Yes or no: the difference is within two standard errors; or unknown."""
        if not math.isfinite(self.difference_error):
            return "unknown"
        return "yes" if abs(self.difference) <= 2 * self.difference_error else "no"


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """The mean, or NaN, and its standard error, infinite for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values) if values else math.nan, error


def metric(row: Mapping[str, Any]) -> float:
    """A run's bits per byte of text, or top-1 error in percent."""
    return row.get("eval_bits_per_byte", 100 * (1 - row["eval_top1"]))


def summaries(study: Study, rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """Summaries of all cells that have been run, in order."""
    run = [cell for cell in study.cells() if found(rows, study, cell)]
    reference = finished(rows, study, run[0]) if run else {}
    is_text = any("eval_bits_per_byte" in row for cell in run for row in found(rows, study, cell))
    unit, made = "bits per byte" if is_text else "error of top-1, %", []
    for cell in run:
        by_seed = finished(rows, study, cell)
        failed = len({row["seed"] for row in found(rows, study, cell)} - set(by_seed))
        values = [metric(row) for row in by_seed.values()]
        apart = [metric(by_seed[seed]) - metric(reference[seed]) for seed in by_seed if seed in reference]
        shares = [
            [n / sum(row["worker_steps"]) for n in row["worker_steps"]]
            for row in by_seed.values()
            if "worker_steps" in row
        ]
        by_worker = [statistics.mean(share) for share in zip(*shares, strict=True)]
        farthest = max((abs(len(share) * part - 1) for share in shares for part in share), default=0.0)
        elapsed_s, _ = mean_of([row["elapsed_s"] for row in by_seed.values()])
        counts = (title(cell, study), unit, len(values), failed)
        made.append(Summary(*counts, *mean_of(values), *mean_of(apart), elapsed_s, by_worker, farthest))
    return made


def title(cell: Cell, study: Study) -> str:
    """Settings that distinguish a cell from the others of its study."""
    cells = study.cells()
    names = [name for name in dict.fromkeys(itertools.chain(*cells)) if len({each.get(name) for each in cells}) > 1]
    return ", ".join(f"{name} {cell[name]}" for name in names if name in cell) or "the experiment as it is"


def table(study: Study, made: Sequence[Summary]) -> str:
    """Markdown table of the cells."""
    of_mean = made[0].unit if made else "-"
    headings = ("cell", "seeds", of_mean, "difference", "within 2 standard errors", "a run")
    lines = [f"{study.question} `{study.experiment}`", "", harness.table(headings)]
    for i, row in enumerate(made):
        seeds = f"{row.seeds}, {row.failed} failed" if row.failed else row.seeds
        compared = [with_error(row.difference, row.difference_error, "+"), row.within] if i else ["reference", ""]
        shares = " ".join(f"{100 * share:.0f}" for share in row.shares)
        apart = f"; shares of workers {shares} %, farthest from equal {100 * row.farthest:.0f} %" if shares else ""
        asked = row.title + apart
        took = f"{row.elapsed_s:.0f} s" if row.seeds else "-"
        lines.append(harness.row([asked, seeds, with_error(row.mean, row.error), *compared, took]))
    return "\n".join(lines)


LENGTH = "train-for"


def fewest(study: Study, rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The smallest share of the reference's length that suffices, by seed.

    A share suffices if the cell is no worse than the first cell; it is infinite if none does. Cells that differ in
    their length alone are one. Empty if all cells have one length.
    """
    run = [cell for cell in study.cells() if found(rows, study, cell)]
    shares: dict[str, dict[int, float]] = {}
    if len({cell.get(LENGTH) for cell in run}) < 2:
        return shares
    reference = finished(rows, study, run[0])
    for cell in run[1:]:
        of_cell = shares.setdefault(title({k: v for k, v in cell.items() if k != LENGTH}, study), {})
        for seed, row in finished(rows, study, cell).items():
            if seed in reference:
                share = row["curve"][-1][0] / reference[seed]["curve"][-1][0]
                is_worse = metric(row) > metric(reference[seed])
                of_cell[seed] = min(of_cell.get(seed, math.inf), math.inf if is_worse else share)
    return shares


def table_of_fewest(shares: Mapping[str, Mapping[int, float]]) -> str:
    """Markdown table of `fewest`."""
    seeds = sorted(set(itertools.chain(*shares.values())))
    told = lambda share: f"{share:.2f}" if math.isfinite(share) else "none is"  # noqa: E731
    lines = [
        [name, *(told(of_cell[seed]) if seed in of_cell else "-" for seed in seeds)] for name, of_cell in shares.items()
    ]
    return harness.table(
        ["share of the first one's length that is no worse", *(f"seed {seed}" for seed in seeds)], lines
    )


def with_error(value: float, error: float, sign: str = "") -> str:
    """A mean and its standard error, in a table."""
    return "-" if math.isnan(value) else f"{value:{sign}.3f} ± {error:.3f}"


def panels(study: Study, rows: Sequence[dict[str, Any]], made: Sequence[Summary]) -> list[plots.Panel]:
    """The metric with standard errors, and the mean held-out loss by epoch."""
    bars = []
    for row in made:
        error = row.error if math.isfinite(row.error) else 0.0
        bars += [(row.title, row.mean, max(row.mean - error, 0.0), row.mean + error)] if row.seeds else []
    series = {}
    for cell in study.cells():
        curves = [row["curve"] for row in finished(rows, study, cell).values()]
        if curves and min(map(len, curves)) > 1:
            series[title(cell, study)] = harness.mean_curve(curves)
    drawn: list[plots.Panel] = [plots.Bars(study.question, plots.Quantity("held out", base=None), bars)]
    if series:
        x, y = plots.Quantity("epoch", base=None), plots.Quantity("loss", base=None)
        drawn.append(plots.Lines("held-out loss", x, y, series))
    return drawn


def parse() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], help="by name")
    parser.add_argument("--experiment", help=f"of a grid (default: {DIGITS})")
    parser.add_argument("--workers", nargs="+", help="of a grid (default: 8)")
    parser.add_argument("--vary", nargs="+", metavar="FLAG=VALUE,...", help="of a grid")
    parser.add_argument("--set", nargs="+", default=[], metavar="FLAG=VALUE", help="in every cell, as train-for=2ep")
    parser.add_argument("--seeds", type=int, default=5, help="how many of every cell, one after another")
    parser.add_argument("--first-seed", type=int, default=0, help="another one to tune with than to report")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study.jsonl", help="a line a run")
    parser.add_argument("--png", type=Path, help="file for the plots")
    parser.add_argument("--launch", action="store_true", help="ranks under mpirun instead of devices of one process")
    parser.add_argument("--beside", type=int, default=0, help="processes that compute beside the runs")
    parser.add_argument("--show", action="store_true", help="tables of what is there; run nothing")
    options = parser.parse_args()
    if wrong := refused(options):
        parser.error(wrong)
    options.out = options.out.resolve()  # jobs run in ROOT
    if options.experiment and not (ROOT / options.experiment).is_file():
        options.experiment = str(Path(options.experiment).resolve())
    return options


OWN = ("seed", "run-dir", "resume", "devices")  # flags that a study sets itself


def refused(options: argparse.Namespace) -> str:
    """The first error in the command line; empty if there is none."""
    of_grid = [name for name in ("experiment", "workers", "vary") if getattr(options, name) is not None]
    if options.set and not options.studies:
        return "--set: it is of a study by name; a grid has --vary"
    if options.studies and of_grid:
        return f"--{of_grid[0]}: it is of a grid, and {options.studies[0]} is one of its own; leave one of them out"
    for text in options.vary or ():
        name, _, values = text.partition("=")
        if not values:
            return f"--vary: got {text!r}; expected FLAG=VALUE or FLAG=VALUE,VALUE"
        if name in OWN:
            return f"--vary: got {name}, which the study sets; --seeds and --workers are its own options"
    for text in options.set:
        name, _, value = text.partition("=")
        if not value or name in (*OWN, "workers"):
            return f"--set: got {text!r}; expected FLAG=VALUE of a flag that the study does not set"
    for number in options.workers or ():
        if not number.isdecimal() or int(number) < 1:
            return f"--workers: got {number}; expected whole numbers >= 1"
    if options.first_seed < 0:
        return f"--first-seed: got {options.first_seed}; expected >= 0"
    if options.beside < 0:
        return f"--beside: got {options.beside}; expected >= 0"
    return f"--seeds: got {options.seeds}; expected >= 1" if options.seeds < 1 else ""


def with_settings(study: Study, settings: Mapping[str, str]) -> Study:
    """The study with these values in every cell, instead of its own."""
    grids = [
        Grid({name: values for name, values in grid.vary.items() if name not in settings}, {**grid.common, **settings})
        for grid in study.grids
    ]
    return study._replace(grids=grids)


def asked(options: argparse.Namespace) -> list[Study]:
    """The named studies, or a grid."""
    if options.studies:
        settings = dict(text.split("=", 1) for text in options.set)
        return [with_settings(STUDIES[name], settings) for name in options.studies]
    pairs = (text.partition("=")[::2] for text in options.vary or ())
    vary = {"workers": options.workers or ["8"]} | {name: values.split(",") for name, values in pairs}
    return [Study("A grid.", options.experiment or DIGITS, [Grid(vary, {})])]


def main() -> None:
    """Run what is missing, print tables."""
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn: list[plots.Panel] = []
    for study in asked(options):
        if not options.show:
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            with busy(options.beside):
                run_missing(study, seeds, options.out, options.launch or study.launched)
        rows = rows_of(options.out)
        made = summaries(study, rows)
        print(table(study, made) + "\n", flush=True)
        if shares := fewest(study, rows):
            print(table_of_fewest(shares) + "\n", flush=True)
        drawn += panels(study, rows, made) if made else []
    if options.png and drawn:
        plots.save(drawn, options.png)


if __name__ == "__main__":
    main()
