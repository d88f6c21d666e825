"""Grid of runs with several seeds: accuracy by setting, with error bars.

    python scripts/study.py batch wires periods elastic text --seeds 5 --out runs/study.jsonl
    python scripts/study.py --experiment experiments/digits.py --workers 1 8 --vary local-batch=8,64 optim.lr=0.02,0.1

A study of STUDIES by name, or a grid: all combinations of --workers and of the values of --vary, which takes any flag
of the trainer. Every finished run becomes a line of --out, and recorded runs are not repeated, so a stopped study
continues where it was. A run that diverges is recorded as failed and left out of means. Cells are compared with the
first one, seed by seed: the same seed gives the same initial params and order of examples.

`jaxmpi report runs/study.jsonl` draws the runs. Workers are devices of one process. With --launch, and in `elastic` and
`strategies`, they are ranks under mpirun, which asynchronous rules and strategies of MPI need.
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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import ROOT

from jaxmpi.comm.job import processes
from jaxmpi.config import experiment_file
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import NotFinite
from jaxmpi.rules import registry
from jaxmpi.runtime import failures, process, provenance
from jaxmpi.trainer import main as trainer_main

Cell = dict[str, str]  # flag of the trainer to value; "workers" among them


class Study(NamedTuple):
    """A question and its cells, of which the first is the reference."""

    question: str
    experiment: str
    cells: Sequence[Cell]
    launched: bool = False  # as ranks, because asynchronous rules need them


def grid(common: Cell, vary: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
    """All combinations of values beside common settings, the last flag fastest."""
    combined = itertools.product(*(vary or {}).values())
    return [{**common, **dict(zip(vary or {}, values, strict=True))} for values in combined]


DIGITS = "experiments/digits.py"
EIGHT = {"workers": "8", "local-batch": "8", "train-for": "20ep", "eval-every": "5ep"}
FOUR = EIGHT | {"workers": "4"}
TEXT = {"workers": "4", "local-batch": "8", "train-for": "400st"}
ONE, TWO = {"workers": "1", "local-batch": "8", "optim.b2": "0.95"}, {"workers": "2"}
PERIODS = ("1", "2", "5", "10", "20", "45")
STRATEGIES = ("ar", "asa32", "asa16", "ring32")
ADAMW = {"optim.name": "adamw", "optim.lr": "0.004", "train-for": "300st"}
STUDIES = {
    "batch": Study(
        "Does 8 x b cost accuracy against 1 x b? The same epochs; the rate as it is, and times 8.",
        DIGITS,
        grid(EIGHT | {"workers": "1", "optim.lr": "0.02"}) + grid(EIGHT, {"optim.lr": ("0.02", "0.05", "0.16")}),
    ),
    "wires": Study(
        "What do coarser exchanges cost?",
        DIGITS,
        grid(EIGHT, {"exchange.strategy": ("asa32", "asa16", "asabf16", "asa8", "lowrank4", "topk10")}),
    ),
    "periods": Study(
        "How far can H grow?",
        DIGITS,
        [
            *grid(EIGHT | {"rule.name": "gradients", "optim.lr": "0.05"}),
            *grid(EIGHT | {"rule.name": "local_sgd", "optim.lr": "0.05"}, {"rule.local-steps": PERIODS}),
            # The outer optimizer multiplies what workers move by eta / (1 - mu) = 7 in the long run.
            *grid(EIGHT | {"rule.name": "diloco", "optim.lr": "0.007"}, {"rule.local-steps": PERIODS[2:]}),
        ],
    ),
    "strategies": Study(
        "Does every rule learn over every strategy? SUBGD sums updates, so it runs 1/4 of the learning rate.",
        DIGITS,
        [
            *grid({"workers": "4", "rule.name": "subgd", "optim.lr": "0.005"}, {"exchange.strategy": STRATEGIES}),
            *grid({"workers": "4"}, {"rule.name": ("awagd", "gradients"), "exchange.strategy": STRATEGIES}),
        ],
        launched=True,
    ),
    "elastic": Study(
        "Which alpha and tau for EASGD?",
        DIGITS,
        [
            FOUR,
            *grid(
                FOUR | {"rule.name": "easgd"},
                {"rule.tau": ("1", "4", "16"), "rule.alpha": ("0.1", "0.25", "0.5", "0.9")},
            ),
        ],
        launched=True,
    ),
    "text": Study(
        "How far can H grow on text? Bits per byte.",
        "experiments/gpt.py",
        [
            TEXT | {"rule.name": "gradients"},
            *grid(TEXT | {"rule.name": "local_sgd"}, {"rule.local-steps": ("10", "50")}),
            # A third of the rate, as its outer optimizer makes more of it.
            *grid(TEXT | {"rule.name": "diloco", "optim.lr": "0.0007"}, {"rule.local-steps": ("10", "50")}),
        ],
    ),
    "muon": Study(
        "How many of AdamW's 300 steps does Muon need? Each at the rate that is best with seed 100. Bits per byte.",
        "experiments/gpt.py",
        [ONE | ADAMW, *grid(ONE | {"optim.name": "muon", "optim.lr": "0.04"}, {"train-for": ("225st", "150st")})],
    ),
    "figure4": Study(
        "Ma et al. 2016, figure 4 and table 1: what do more workers and 16 bits cost AlexNet, at the paper's rates?",
        "experiments/scaling/alexnet.py",
        [
            *grid({"local-batch": "16", "optim.lr": "0.01"}, {"workers": ("1", "2", "4")}),
            {"workers": "8", "local-batch": "16", "optim.lr": "0.005"},
            *grid({"workers": "8", "local-batch": "4", "optim.lr": "0.005"}, {"exchange.strategy": ("asa32", "asa16")}),
        ],
    ),
    "figure5": Study(
        "Ma et al. 2016, figure 5 and table 1: what do more workers and 16 bits cost GoogLeNet, at the paper's rates?",
        "experiments/scaling/googlenet.py",
        [
            *({"workers": n, "optim.lr": lr} for n, lr in (("1", "0.01"), ("2", "0.007"), ("4", "0.005"))),
            *grid({"workers": "8", "optim.lr": "0.005"}, {"exchange.strategy": ("asa32", "asa16")}),
        ],
    ),
    "alexnet": Study(
        "Does the paper's AlexNet learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/alexnet.py",
        [TWO, TWO | {"data.std": "0.376"}],
    ),
    "vgg16": Study(
        "Does the paper's VGG-16 learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/vgg16.py",
        [TWO, TWO | {"data.std": "0.376"}],
    ),
    "googlenet": Study(
        "Does the paper's GoogLeNet learn? At a rate for 10 classes, and at the paper's for 2 workers.",
        "experiments/papers/googlenet.py",
        [TWO, TWO | {"optim.lr": "0.007"}],
    ),
    "resnet50": Study("Does the paper's ResNet-50 learn?", "experiments/papers/resnet50.py", [TWO]),
    "googlenetbn": Study("Does the paper's GoogLeNetBN learn?", "experiments/papers/googlenetbn.py", [TWO]),
}


# ---------------------------------------------------------------- runs


def run_cell(experiment: str, cell: Cell, seeds: Sequence[int], out: str, launched: bool) -> None:
    """Be a process of a cell's job: run its seeds in order; rank 0 appends a line for each."""
    line = [experiment, *itertools.chain(*((f"--{name}", value) for name, value in cell.items() if name != "workers"))]
    failures.install_excepthooks()
    process.prepare()
    with contextlib.redirect_stdout(io.StringIO()):
        chosen, path = experiment_file.parse([*line, *([] if launched else ["--devices", cell["workers"]])])
    process.make_cpu_devices(chosen.devices)
    with failures.at_work():
        for seed in seeds:
            row = {"experiment": experiment, "cell": cell, "seed": seed, "day": f"{datetime.date.today()}"}
            row["commit"] = provenance.commit(ROOT)
            run_seed(dataclasses.replace(chosen, seed=seed, resume=False), path.stem, row, Path(out))


def run_seed(chosen: Experiment, name: str, row: dict[str, Any], out: Path) -> None:
    """Run one seed; append `row` with its outcome to OUT.

    Raises:
        NotFinite: it diverged, which the line records.
    """
    control = processes()
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(control.bcast_object(mine))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer_main.train(dataclasses.replace(chosen, run_dir=str(folder)), name)
            row |= outcome(folder)
        except NotFinite as error:
            row["failed"] = str(error)
            # With an asynchronous rule only the worker that diverges notices.
            if process.my_rank() == 0 or registry.is_asynchronous(chosen.rule):
                append(out, row)
            raise
        control.barrier()
    if process.my_rank() == 0:
        append(out, row)


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a line, after a newline if the last line was cut off."""
    is_cut = out.exists() and out.read_bytes()[-1:] not in (b"", b"\n")
    with out.open("a") as file:
        file.write("\n" * is_cut + json.dumps(row) + "\n")


def outcome(folder: Path) -> dict[str, Any]:
    """Last evaluation and curves from a run's record, or the failure."""
    rows = harness.record(folder)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    last = evaluations[-1]
    if last["eval_loss"] is None:
        return {"failed": "the held-out loss is not finite"}
    kept = {name: value for name, value in last.items() if name.startswith("eval_")}
    if "eval_top5" in kept:
        kept["top5_curve"] = [[row["epoch"], 100 * (1 - row["eval_top5"])] for row in evaluations]
    for row in rows:
        if row["kind"] == "workers":
            kept["worker_steps"] = row["worker_steps"]
    curve = [[row["epoch"], row["eval_loss"]] for row in evaluations]
    loss = [row["loss"] for row in rows if row["kind"] == "train"][-1]
    return {**kept, "curve": curve, "loss": loss, "elapsed_s": last["elapsed_s"]}


def read_rows(out: Path, study: Study) -> list[dict[str, Any]]:
    """Recorded lines of a study, without lines that were cut off."""
    rows = []
    for line in out.read_text().splitlines() if out.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if row["experiment"] == study.experiment]


def run_missing(study: Study, seeds: Sequence[int], out: Path, launched: bool) -> None:
    """Run every cell and seed that has no line yet.

    A run that diverges ends its job; the other seeds get another job.

    Raises:
        SystemExit: a job failed for another reason; its message is above.
    """
    cells = study.cells
    for number, cell in enumerate(cells, 1):
        before = [row for row in read_rows(out, study) if row["cell"] == cell]
        while missing := sorted(set(seeds) - {row["seed"] for row in before}):
            print(f"{number}/{len(cells)} {title(cell, study)}: seeds {missing}", file=sys.stderr, flush=True)
            job = (study.experiment, cell, missing, str(out), launched)
            try:
                harness.on_ranks(run_cell, *job, ranks=int(cell["workers"]) if launched else 0)
                break
            except harness.JobFailed as error:
                rows = [row for row in read_rows(out, study) if row["cell"] == cell]
                if not any("failed" in row for row in rows[len(before) :]):
                    raise SystemExit(f"study.py: the job of {cell} failed; its message is above") from error
                before = rows


# ---------------------------------------------------------------- tables


class Summary(NamedTuple):
    """A cell's metric over its seeds, and its difference from the reference."""

    title: str
    runs: dict[int, dict[str, Any]]  # by seed, without those that diverged
    failed: int
    mean: float
    error: float  # standard error
    difference: float
    difference_error: float

    @property
    def within(self) -> str:
        """Whether the difference is within two standard errors."""
        if not math.isfinite(self.difference_error):
            return "unknown"
        return "yes" if abs(self.difference) <= 2 * self.difference_error else "no"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, or NaN, and its standard error, infinite for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values) if values else math.nan, error


def metric(row: Mapping[str, Any]) -> float:
    """A run's bits per byte of text, or top-1 error in percent."""
    return row.get("eval_bits_per_byte", 100 * (1 - row["eval_top1"]))


def summaries(study: Study, rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """Summaries of all cells that have been run, in order."""
    made: list[Summary] = []
    for cell in study.cells:
        recorded = [row for row in rows if row["cell"] == cell]
        if not recorded:
            continue
        runs = {row["seed"]: row for row in recorded if "failed" not in row}
        failed = len({row["seed"] for row in recorded} - set(runs))
        reference = made[0].runs if made else runs
        differences = [metric(runs[seed]) - metric(reference[seed]) for seed in runs if seed in reference]
        means = *mean_and_error([metric(row) for row in runs.values()]), *mean_and_error(differences)
        made.append(Summary(title(cell, study), runs, failed, *means))
    return made


def title(cell: Cell, study: Study) -> str:
    """Settings that distinguish a cell from the others of its study."""
    cells = study.cells
    names = [name for name in dict.fromkeys(itertools.chain(*cells)) if len({each.get(name) for each in cells}) > 1]
    return ", ".join(f"{name} {cell[name]}" for name in names if name in cell) or "the experiment as it is"


def table(study: Study, made: Sequence[Summary]) -> str:
    """Markdown table of the cells."""
    is_text = any("eval_bits_per_byte" in run for row in made for run in row.runs.values())
    unit = "bits per byte" if is_text else "error of top-1, %"
    cells = []
    for i, row in enumerate(made):
        seeds = f"{len(row.runs)}, {row.failed} failed" if row.failed else len(row.runs)
        compared = [with_error(row.difference, row.difference_error, "+"), row.within] if i else ["reference", ""]
        elapsed, _ = mean_and_error([run["elapsed_s"] for run in row.runs.values()])
        took = f"{elapsed:.0f} s" if row.runs else "-"
        cells.append([row.title, seeds, with_error(row.mean, row.error), *compared, took])
    headings = ("cell", "seeds", unit, "difference", "within 2 standard errors", "a run")
    return f"{study.question} `{study.experiment}`\n\n{harness.table(headings, cells)}"


def with_error(value: float, error: float, sign: str = "") -> str:
    """A mean and its standard error, in a table."""
    return "-" if math.isnan(value) else f"{value:{sign}.3f} ± {error:.3f}"


# ---------------------------------------------------------------- the command line

RESERVED = ("seed", "run-dir", "resume", "devices", "workers")  # flags that a study sets itself


def setting(text: str) -> tuple[str, str]:
    """A flag and its value, or values."""
    name, _, value = text.partition("=")
    if not value or name in RESERVED:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected FLAG=VALUE of a flag that the study does not set")
    return name, value


def parse() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], help="by name")
    parser.add_argument("--experiment", help=f"of a grid (default: {DIGITS})")
    parser.add_argument("--workers", type=harness.positive, nargs="+", help="of a grid (default: 8)")
    parser.add_argument("--vary", type=setting, nargs="+", metavar="FLAG=VALUE,...", help="of a grid")
    parser.add_argument(
        "--set", type=setting, nargs="+", default=[], metavar="FLAG=VALUE", help="in every cell of a study by name"
    )
    parser.add_argument("--seeds", type=harness.positive, default=5, help="how many of every cell, one after another")
    parser.add_argument("--first-seed", type=int, default=0, help="to tune with other seeds than those reported")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study.jsonl", help="a line a run")
    parser.add_argument("--launch", action="store_true", help="ranks under mpirun instead of devices of one process")
    parser.add_argument("--show", action="store_true", help="tables of what is there; run nothing")
    options = parser.parse_args()
    if options.studies and (options.experiment or options.workers or options.vary):
        parser.error(f"--experiment, --workers and --vary are of a grid; {options.studies[0]} has its own")
    if options.set and not options.studies:
        parser.error("--set: it is of a study by name; a grid has --vary")
    options.out = options.out.resolve()  # jobs run in ROOT
    return options


def chosen_studies(options: argparse.Namespace) -> list[Study]:
    """The named studies with the values of --set in every cell, or a grid."""
    if options.studies:
        studies = [STUDIES[name] for name in options.studies]
        changed = [[{**cell, **dict(options.set)} for cell in study.cells] for study in studies]
        return [
            study._replace(cells=[cell for i, cell in enumerate(cells) if cell not in cells[:i]])
            for study, cells in zip(studies, changed, strict=True)
        ]
    vary = {"workers": [str(n) for n in options.workers or (8,)]}
    vary |= {name: values.split(",") for name, values in options.vary or ()}
    file = options.experiment or DIGITS
    return [Study("A grid.", file if (ROOT / file).is_file() else str(Path(file).resolve()), grid({}, vary))]


def main() -> None:
    """Run what is missing, print tables."""
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for study in chosen_studies(options):
        if not options.show:
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            run_missing(study, seeds, options.out, options.launch or study.launched)
        rows = read_rows(options.out, study)
        made = summaries(study, rows)
        print(table(study, made) + "\n", flush=True)


if __name__ == "__main__":
    main()
