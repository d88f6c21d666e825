"""`jaxmpi bench`: time an exchange beside other libraries and the lower bound.

Outside MPI this starts a launcher of its ranks; under a launcher it is a rank itself. In a round every contender runs
once on the same data. Each round starts with the next contender in order. The slowest rank counts.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxmpi.bench import results
from jaxmpi.bench.options import parse
from jaxmpi.bench.plan import BenchPlan, add_rows, check_options, make_plan
from jaxmpi.bench.results import Json
from jaxmpi.bench.rounds import measure
from jaxmpi.comm.job import Processes, processes
from jaxmpi.core.errors import UsageError
from jaxmpi.launch import command, supervisor
from jaxmpi.launch.options import Options
from jaxmpi.runtime import failures, process, provenance


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.bench [-n N] [options]`, alone or under a launcher."""
    if process.launched():
        failures.install_excepthooks()  # one of several ranks says what is wrong
    try:
        run(parse(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        if process.launched():
            raise
        print(f"jaxmpi: error: {error}", file=sys.stderr)
        sys.exit(failures.MISUSED)


def run(options: argparse.Namespace) -> None:
    """`jaxmpi bench`: be a rank, or start the launcher of ranks.

    Raises:
        UsageError: as `check_options` and `make_plan`.
    """
    if process.launched() is None and (options.n or 2) > 1:
        check_options(options)
        launcher = Options(options.n or 2, options.launcher, (*shlex.split(options.launcher_args),), (*options.words,))
        line = command.command(launcher, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.bench")
        print("+ " + shlex.join(line), flush=True)
        supervisor.relay(line)
    failures.install_excepthooks()
    process.prepare()
    control = processes()
    if options.n not in (None, control.size):
        raise UsageError(f"-n: got {options.n} in a job of {control.size} ranks; leave it out")
    with failures.at_work():

        def keep(so_far: Sequence[Json]) -> None:
            if options.out:
                write(options.out, results.case_figures(so_far, options.rate_mbit))

        measured = measure(agreed_plan(options, control), control, keep)
        if control.rank == 0:
            report(results.case_figures(measured, options.rate_mbit))
        control.barrier()


def agreed_plan(options: argparse.Namespace, control: Processes) -> BenchPlan:
    """Broadcast rank 0's plan to all ranks.

    Raises:
        UsageError: on all ranks, if rank 0 could make none; on a rank that cannot read its experiment file.
    """
    answer = {}
    if control.rank == 0:
        try:
            check_options(options)  # now: an experiment file may start the device, which comes after MPI
            answer = {"plan": dataclasses.asdict(make_plan(options, control.size))}
        except UsageError as error:
            answer = {"error": str(error)}
    answer = control.bcast_object(answer)
    if "error" in answer:
        raise UsageError(answer["error"])
    plan = BenchPlan.from_json(answer["plan"])
    add_rows(plan.experiment)
    return plan


def report(cases: Sequence[Json]) -> None:
    """Show the tables."""
    console = Console()
    for table in map(results.table, cases):
        console.width = max(console.width, Console(width=1000).measure(table).maximum)  # no number is cut short
        console.print(table)


def write(out: Path, cases: Sequence[Json]) -> None:
    """Write all figures, with the facts on which they depend, as JSON."""
    versions = provenance.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    facts = {
        "command": shlex.join(sys.argv),
        "versions": versions,
        "commit": provenance.commit(None),
        "cores": process.cores(),
        "processor": platform.machine(),
        "system": platform.platform(),
        "allocator": os.environ.get("JAXMPI_ALLOCATOR", "jaxmpi"),
    }
    out.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
