"""Harness of this folder's programs: options, jobs, turns, intervals, tables and files.

A measurement is a function of a program. `on_ranks` calls it in a job of its own, and returns the result of rank 0. The
job runs on ranks of this machine, or on a rank a host of an emulated cluster. Arguments and results are JSON.

    def job(batch: int) -> dict[str, list[float]]:  # on every rank
        return harness.take_turns({"ours": ..., "theirs": ...}, rounds=20, warm_up=2)

    figures = harness.on_ranks(job, 32, ranks=4, rate="200mbit")

Contenders take turns, round by round, so that a drift of the machine falls on all of them.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxmpi.runtime import job_folder, process

if TYPE_CHECKING:
    from jaxmpi.comm.control import MpiProcesses
    from jaxmpi.comm.topology import Workers
    from jaxmpi.config.schema import Experiment
    from jaxmpi.core.train_state import TrainState
    from jaxmpi.trainer.build import Functions
    from jaxmpi.trainer.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
TO_END_S = 10.0  # for a job's processes
NOT_PERMITTED = 77  # exit code of scripts/cluster.py if there can be no cluster; test suites take it for "skipped"
K = TypeVar("K")
T = TypeVar("T")
Run = Callable[[], Any]


OPTIONS = {  # that several programs share, and their help
    "ranks": "ranks of a job",
    "hosts": "emulated hosts",
    "slots": "ranks of an emulated host",
    "rate": "of each emulated host's link, as 200mbit; without one ranks run on this machine",
    "rounds": "measured rounds",
    "json": "file for the figures",
}


def parser(doc: str | None, **shared: Any) -> argparse.ArgumentParser:
    """Parser of a program's options; its help begins with the program's docstring.

    Args:
        doc: the docstring.
        shared: defaults by name of OPTIONS; a list stands for an option that takes several numbers.
    """
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in shared.items():
        kind = Path if name == "json" else str if name == "rate" else positive
        text = f"{OPTIONS[name]} (default: {default})" if default else OPTIONS[name]
        nargs = "+" if isinstance(default, list) else None
        arguments.add_argument(f"--{name}", type=kind, default=default, nargs=nargs, help=text)
    return arguments


def positive(text: str) -> int:
    """A whole number of at least 1, the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected a whole number >= 1")
    return int(text)


# ---------------------------------------------------------------- jobs


class JobFailed(SystemExit):
    """A job's error, printed above; code 77 means no emulated cluster."""


def on_ranks(
    job: Callable[..., T],
    *arguments: Any,
    ranks: int = 0,
    rate: str = "",
    slots: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> T:
    """Call a program's function on every rank; return rank 0's result.

    Args:
        job: function at the top of a file in this folder.
        arguments: for it, such as JSON can hold.
        ranks: of the job; 0 for a single process without MPI.
        rate: of each host's link, such as `200mbit`: the ranks run on emulated hosts. Without it they run here.
        slots: ranks of an emulated host.
        env: variables of the job beyond this process's.
        timeout_s: longest duration of the job.

    Raises:
        JobFailed: the job has ended with another code than 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        line = [*launcher(ranks, rate, slots), *call(job, *arguments, out=out)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        # What a rank prints is kept apart from a program's tables.
        ended = subprocess.run(
            job_folder.remove_leftovers_first(line), cwd=ROOT, env=environ, stdout=sys.stderr, timeout=timeout_s
        )
        if ended.returncode == NOT_PERMITTED and rate:
            raise JobFailed(NOT_PERMITTED)
        if ended.returncode:
            raise JobFailed(f"{job.__name__}{arguments} ended with code {ended.returncode}; its message is above")
        return json.loads(out.read_text())


def launcher(ranks: int, rate: str, slots: int) -> list[str]:
    """Start of a job's line, before the command of a rank."""
    from jaxmpi.launch import command
    from jaxmpi.launch.options import Options
    from jaxmpi.runtime import process

    if not ranks:
        return []
    if not rate:
        return command.mpirun(Options(ranks, "mpirun", (), ()), process.cores(), os.geteuid() == 0)
    return [*cluster(ranks // slots, rate, slots), command.find("mpirun"), "-n", str(ranks)]


def cluster(hosts: int, rate: str, slots: int = 1) -> list[str]:
    """Start of a line that runs its command on emulated hosts."""
    line = [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--hosts", str(hosts), "--rate", rate]
    return [*line, "--slots", str(slots), "--"]


def call(job: Callable[..., Any], *arguments: Any, out: str | Path = os.devnull) -> list[str]:
    """Command line that calls `job`; rank 0 writes the result to `out`."""
    program, encoded = Path(inspect.getfile(job)).stem, json.dumps(arguments)
    return [sys.executable, str(ROOT / "scripts" / "harness.py"), program, job.__name__, encoded, str(out)]


def end(job: subprocess.Popen[str]) -> None:
    """End a job that has its own session; kill the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=TO_END_S)


def control() -> "MpiProcesses":
    """This rank's control plane of a job of several ranks."""
    from jaxmpi.comm.control import MpiProcesses
    from jaxmpi.comm.job import processes

    control = processes()
    assert isinstance(control, MpiProcesses)
    return control


def build_training(config: "Experiment", workers: "Workers") -> "tuple[Plan, Functions, TrainState]":
    """The trainer's (plan, functions, initial state) of an experiment."""
    from jaxmpi.comm.topology import put
    from jaxmpi.trainer.build import build_functions
    from jaxmpi.trainer.plan import make_plan
    from jaxmpi.trainer.state import initial_states

    plan = make_plan(config, workers)
    functions = build_functions(plan)
    return plan, functions, put(initial_states(plan, functions.rule), workers)


# ---------------------------------------------------------------- figures


def seconds(work: Run) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def together(work: Run) -> float:
    """This rank's seconds of a call that all ranks begin together."""
    from jaxmpi.comm.job import processes

    processes().barrier()
    return seconds(work)


def result(work: Run) -> Any:
    """A call's result: the clock of runs that return their own figure."""
    return work()


def take_turns(
    runs: dict[K, Run], rounds: int, warm_up: int = 0, clock: Callable[[Run], Any] = seconds, swap: bool = False
) -> dict[K, list[Any]]:
    """Figures of runs that take turns, round by round.

    Args:
        runs: by name.
        rounds: that count.
        warm_up: rounds before them, in which programs compile and caches fill.
        clock: calls a run and returns its figure.
        swap: reverse the order in the first round, and in every other after it.
    """
    results: dict[K, list[Any]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name in reversed(runs) if swap and turn % 2 == 0 else runs:
            results[name].append(clock(runs[name]))
    return {name: figures[warm_up:] for name, figures in results.items()}


def interval(values: Any, digits: int, unit: str = "") -> str:
    """Median and its 95 % confidence interval."""
    from jaxmpi.bench.results import median_interval

    median, low, high = median_interval(values)
    return f"{median:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


# ---------------------------------------------------------------- results


def record(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run directory's record."""
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(headings: Sequence[str], rows: Iterable[Iterable[object]] = ()) -> str:
    """A Markdown table, or its head alone for rows printed later."""
    return "\n".join([row(headings), "|" + "---|" * len(headings), *map(row, rows)])


def save(file: Path | None, figures: Any) -> None:
    """Write figures as JSON, if a file is named."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def main() -> None:
    """Be a job's process: call the function; write rank 0's result."""
    program, name, arguments, out = sys.argv[1:]
    result = getattr(importlib.import_module(program), name)(*json.loads(arguments))
    if process.my_rank() == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
