"""`jaxmpi sweep`: train every combination of some fields' values with several seeds, and compare what came out.

Each run is a `jaxmpi train` of its own with a run directory of its own, so a run that crashes or diverges leaves the
others alone, and everything that reads runs (report, evaluate, `--from`) reads these. OUT/sweep.jsonl has a line for
each run that has ended, by which a sweep that was stopped goes on where it was. The sweep itself imports no JAX.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.config import experiment_file, flags
from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import write_whole
from jaxmpi.launch import options as launcher
from jaxmpi.observe import report
from jaxmpi.runtime import failures

WORKERS = "n"  # the field of a cell that is no field of the experiment: `jaxmpi train -n`
RESERVED = ("seed", "run-dir", "resume", "from-start")  # which the sweep sets itself
MOST_RUNS = 10_000  # a range such as 1..1000000 is a slip

Cell = dict[str, str]  # field to value


class Sweep(NamedTuple):
    """Runs of one experiment: each cell with each seed."""

    train: Sequence[str]  # words of `jaxmpi train`: the launcher's options, the experiment, fields of all runs
    cells: Sequence[Cell]  # the first is the reference of the table
    seeds: Sequence[int]
    out: Path


def grid(vary: Mapping[str, Sequence[str]]) -> list[Cell]:
    """All combinations of the values, the last field fastest."""
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


# ---------------------------------------------------------------- the command line


def main(argv: Sequence[str]) -> None:
    """Run what is missing, print the table, and draw the runs."""
    parser = Parser(
        "jaxmpi sweep",
        usage="jaxmpi sweep [-n N] EXPERIMENT [--field value ...] --vary FIELD=V1,V2 [FIELD=LOW..HIGH ...]\n"
        "                    [--seeds K] [--first-seed S] [--out FOLDER] [--metric NAME] [--show]",
        description="Train all combinations of the fields' values, and print each one's mean and standard error over "
        "seeds. A sweep that was stopped goes on where it was.",
        epilog="example: jaxmpi sweep digits --vary optim.lr=0.01,0.02 n=1,2 --seeds 3",
    )
    add = parser.add_argument
    add("--vary", type=setting, nargs="+", required=True, metavar="FIELD=VALUES", help="n varies the number of ranks")
    add("--seeds", type=int, default=1, metavar="K", help="runs of each combination (default: 1)")
    add("--first-seed", type=int, default=0, metavar="S", help="to tune with other seeds than those reported")
    add("--out", type=Path, metavar="FOLDER", help="of all run directories (default: runs/sweep-EXPERIMENT)")
    add("--metric", help="figure of the last evaluation to compare (default: the experiment's --monitor)")
    add("--show", action="store_true", help="the table of what is there; train nothing")
    options, train = parser.parse_known_args(list(argv))
    sweep = make_sweep(
        train, dict(options.vary), range(options.first_seed, options.first_seed + options.seeds), options.out
    )
    if not options.show:
        run_missing(sweep)
    print("\n".join(table(summaries(sweep, options.metric))))
    runs = [path.parent for path in sorted(sweep.out.glob("*/record.jsonl"))]
    if runs and not options.show:
        print(f"report: {report.write(runs, sweep.out / 'report')}")


def setting(text: str) -> tuple[str, list[str]]:
    """A field and its values: `optim.lr=0.1,0.2`, or the whole numbers of `rule.tau=1..4`."""
    name, _, values = flags.hyphens(f"--{text}")[2:].partition("=")
    if not values or name in RESERVED:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected FIELD=VALUE,..., not of {', '.join(RESERVED)}")
    if bounds := re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})", values):
        low, high = int(bounds[1]), int(bounds[2])
        if not low <= high < low + MOST_RUNS:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected LOW..HIGH, at most {MOST_RUNS} numbers")
        return name, [str(number) for number in range(low, high + 1)]
    return name, values.split(",")


def make_sweep(
    train: Sequence[str], vary: Mapping[str, Sequence[str]], seeds: Sequence[int], out: Path | None
) -> Sweep:
    """Check all of a sweep's command lines before the first run.

    Raises:
        UsageError: one that `jaxmpi train` would refuse, or too many runs.
    """
    cells = grid(vary)
    if not 1 <= len(cells) * len(seeds) <= MOST_RUNS:
        raise UsageError(f"got {len(cells)} combinations with {len(seeds)} seeds; expected 1 to {MOST_RUNS} runs")
    options = launcher.parse([*train], command="sweep")
    names = [name for name in RESERVED for word in train if re.split("[= ]", flags.hyphens(word))[0] == f"--{name}"]
    if names or (WORKERS in vary and "-n" in train):
        raise UsageError(f"got {' '.join(f'--{name}' for name in names) or '-n, which --vary has'}: the sweep sets it")
    for cell in cells:
        line = launcher.parse(train_words(train, cell))
        experiment_file.refuse_early(line.train_args, file_is_here=line.are_ranks_here)
    name = Path(options.train_args[0]).stem
    return Sweep(train, cells, seeds, out or Path("runs") / f"sweep-{name}")


def train_words(train: Sequence[str], cell: Cell) -> list[str]:
    """Words of `jaxmpi train` with a cell's fields."""
    workers = ["-n", cell[WORKERS]] if WORKERS in cell else []
    return [*workers, *train, *(f"--{name}={value}" for name, value in cell.items() if name != WORKERS)]


# ---------------------------------------------------------------- runs


def run_missing(sweep: Sweep) -> None:
    """Train every cell with every seed that has no line yet. A run that fails gets a line too.

    Raises:
        UsageError: `jaxmpi train` has refused a combination; its message is above.
    """
    try:
        sweep.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {str(sweep.out)!r}: {error.strerror}") from error
    ended = {(row["run"], row["seed"]) for row in read_lines(sweep.out)}
    runs = [(cell, seed) for cell in sweep.cells for seed in sweep.seeds]
    for number, (cell, seed) in enumerate(runs, 1):
        name = cell_name(cell | {"seed": str(seed)})
        if (name, seed) in ended:
            continue
        run_dir = sweep.out / name
        print(f"{number}/{len(runs)} {name}", flush=True)
        line = [*train_words(sweep.train, cell), f"--seed={seed}", f"--run-dir={run_dir}", "--quiet"]
        if (run_dir / "record.jsonl").exists():
            line.append("--resume" if any(run_dir.glob("checkpoints/*")) else "--from-start")
        code = subprocess.run([sys.executable, "-m", "jaxmpi.tools.cli", "train", *line]).returncode
        if code == failures.MISUSED:
            raise UsageError(f"{name}: jaxmpi train has refused it, as it says above")
        if code < 0 or code > 128:  # killed, as by Ctrl-C: this is no outcome, and the run goes on next time
            raise SystemExit(code if code > 0 else 128 - code)
        row = {"run": name, "cell": cell, "seed": seed}
        row |= outcome(run_dir) if code == 0 else {"failed": f"exit code {code}"}
        rows = [*read_lines(sweep.out), row]
        write_whole(sweep.out / "sweep.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def cell_name(cell: Cell) -> str:
    """A cell as a folder's name."""
    return re.sub(r"[^\w.=,+-]", "_", ",".join(f"{name}={value}" for name, value in cell.items()))


def outcome(run_dir: Path) -> dict[str, Any]:
    """The last evaluation of a run, and the metric by which it chose its best checkpoint."""
    rows = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    start = next(row for row in reversed(rows) if row["kind"] == "run")
    last = next(row for row in reversed(rows) if row["kind"] == "eval")
    figures = {name: last[name] for name in last if name.startswith("eval_") or name == "elapsed_s"}
    return {"metric": start["experiment"]["monitor"], **figures}


def read_lines(out: Path) -> list[dict[str, Any]]:
    """Lines of the runs that have ended."""
    path = out / "sweep.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------- the table


class Summary(NamedTuple):
    """A cell's metric over its seeds, and its difference from the first cell, seed by seed."""

    cell: str
    seeds: int
    failed: int
    metric: str
    mean: tuple[float, float]  # with its standard error
    difference: tuple[float, float]
    elapsed_s: float


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, NaN without values, and its standard error, infinite for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values) if values else math.nan, error


def summaries(sweep: Sweep, metric: str | None = None) -> list[Summary]:
    """Summaries of the cells with lines, in order.

    Raises:
        UsageError: the evaluations have no such figure.
    """
    results, reference = list[Summary](), dict[int, float]()
    for cell in sweep.cells:
        rows = [row for row in read_lines(sweep.out) if row["cell"] == cell and row["seed"] in sweep.seeds]
        runs = {row["seed"]: row for row in rows if "failed" not in row}
        names = {metric or row["metric"] for row in runs.values()}
        for row in runs.values():
            if missing := names - row.keys():
                metrics = ", ".join(name for name in row if name.startswith("eval_"))
                raise UsageError(f"--metric: got {missing.pop()!r}; expected one of {metrics}")
        values = {seed: row[name] for seed, row in runs.items() for name in names}
        reference = reference or values
        differences = [values[seed] - reference[seed] for seed in values if seed in reference]
        summary = Summary(
            cell=cell_name(cell) or "as it is",
            seeds=len(runs),
            failed=len({row["seed"] for row in rows} - set(runs)),
            metric=next(iter(names), ""),
            mean=mean_and_error([*values.values()]),
            difference=mean_and_error(differences),
            elapsed_s=mean_and_error([row["elapsed_s"] for row in runs.values()])[0],
        )
        results += [summary] if rows else []
    return results


def table(rows: Sequence[Summary]) -> list[str]:
    """Lines of a Markdown table. A difference is marked if it is above two standard errors."""
    if not rows:
        return ["no run has ended yet"]
    head = ["mean ± standard error", "seeds", rows[0].metric, "difference from the first", "time of a run, s"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        seeds = f"{row.seeds}" + (f", {row.failed} failed" if row.failed else "")
        is_clear = abs(row.difference[0]) > 2 * row.difference[1]
        compared = "" if row is rows[0] else with_error(*row.difference, "+") + " *" * is_clear
        lines.append([row.cell, seeds, with_error(*row.mean), compared, with_error(row.elapsed_s, math.inf)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "| " + " | ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]


def with_error(value: float, error: float, sign: str = "") -> str:
    """A mean, and its standard error if it is known."""
    if math.isnan(value):
        return "-"
    return f"{value:{sign}.4g}" + (f" ± {error:.2g}" if math.isfinite(error) else "")
