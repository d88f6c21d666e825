"""`jaxmpi bench`: time an exchange beside other libraries and the lower bound.

Outside MPI this starts one job for every number of ranks and shows the results; under a launcher it is a rank itself.
In a round every contender runs once on the same data. Each round starts with the next contender in order. The slowest
rank counts.
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

import jax
from rich.console import Console

from jaxmpi.bench import results
from jaxmpi.bench.jobs import Turns, job_line, run_jobs, wait_for
from jaxmpi.bench.options import parse
from jaxmpi.bench.plan import BenchPlan, Case, add_rows, describe_left_out, fitting_ranks, make_plan
from jaxmpi.bench.results import AS_IT_COMES, TUNED, Json
from jaxmpi.bench.rounds import measure
from jaxmpi.comm.job import Processes, processes
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.runtime import failures, process, provenance

TWO_JOBS = "two jobs take turns through files, on one machine; leave the launcher to jaxmpi bench -n N"


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.bench [-n N] [options]`, alone or under a launcher."""
    if process.launched_workers() > 1:
        failures.install_excepthooks()  # one of several ranks says what is wrong
        return run(parse(sys.argv[1:] if argv is None else argv))
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"jaxmpi: error: {error}", file=sys.stderr)
        sys.exit(failures.MISUSED)
    run(options)


def run(options: argparse.Namespace) -> None:
    """`jaxmpi bench`, as a rank or to start ranks."""
    if options.job or process.launched_workers() > 1:
        return run_rank(options)
    try:
        start(options)
    except (UsageError, TrainingError) as error:
        print(f"jaxmpi: error: {error}", file=sys.stderr)
        sys.exit(failures.exit_code(error))
    except KeyboardInterrupt:
        sys.exit(failures.INTERRUPTED)


# ---------------------------------------------------------------- outside


def start(options: argparse.Namespace) -> None:
    """Start ranks and show their results.

    Raises:
        UsageError: as `make_plan`; or no case fits.
        TrainingError: a job failed.
    """
    jax.config.update("jax_platforms", "cpu")  # an experiment file may make arrays, and ranks need the GPU's memory
    plan, ranks = make_plan(options), options.n or 2
    if ranks == 1 or (options.launcher == "mpirun" and not options.launcher_args):
        return run_here(plan, ranks, options, ["jaxmpi", "bench", *options.words])
    check(not options.as_it_comes, f"--as-it-comes: {TWO_JOBS}")
    # Ranks may be on other hosts: rank 0 makes the same plan and reports.
    wait_for([(job_line(ranks, options, options.words), {})])


def run_here(plan: BenchPlan, wanted: int, options: argparse.Namespace, command: Sequence[str]) -> None:
    """Run cases with up to `wanted` ranks, as memory allows; show results.

    If this process is ended early, except by SIGKILL, it shows the results so far.
    """
    jobs, least = [(plan.strategies, plan.peers), *([((), plan.peers)] if options.as_it_comes else [])], min(2, wanted)
    cases_by_ranks: dict[int, list[Case]] = {}
    for case in plan.cases:
        ranks = fitting_ranks(case, jobs, wanted)
        if ranks < least:
            print(describe_left_out(case, jobs, least))
        else:
            cases_by_ranks.setdefault(ranks, []).append(case)
    check(bool(cases_by_ranks), "no case fits into memory")
    parts = {ranks: dataclasses.replace(plan, cases=tuple(cases)) for ranks, cases in cases_by_ranks.items()}
    found: list[Json] = []
    is_whole = False
    try:
        for ranks, part in parts.items():
            run_jobs(part, ranks, options, found)
        is_whole = True
    finally:
        if found:
            report(found, options, command, is_whole)


# ---------------------------------------------------------------- inside: one rank


def run_rank(options: argparse.Namespace) -> None:
    """Run as a rank of a job; rank 0 reports the results."""
    failures.install_excepthooks()
    process.prepare()
    control = processes()
    check(options.n in (None, control.size), f"-n: got {options.n} in a job of {control.size} ranks; leave it out")
    with failures.at_work():
        plan = agreed_plan(options, control)
        allocator = AS_IT_COMES if os.environ.get("JAXMPI_ALLOCATOR") == "system" else TUNED
        turns = Turns(Path(options.job[0]).parent, allocator, control) if options.job else contextlib.nullcontext()
        runs: list[Json] = []

        def keep(so_far: list[Json]) -> None:
            runs[:] = [run | {"allocator": allocator} for run in so_far]
            if options.job:
                replace_text(Path(options.job[1]), json.dumps(runs))
            elif options.out:
                write(options.out, results.case_figures(runs, options.rate_mbit), sys.argv, is_whole=False)

        measure(plan, control, turns, keep)
        if control.rank == 0 and isinstance(turns, Turns):
            turns.end()
        elif control.rank == 0:
            report(runs, options, sys.argv, is_whole=True)
        control.barrier()


def agreed_plan(options: argparse.Namespace, control: Processes) -> BenchPlan:
    """Broadcast rank 0's plan to all ranks.

    Raises:
        UsageError: on all ranks, if rank 0 could make none; on a rank that cannot read its experiment file.
    """
    answer = {}
    if control.rank == 0:
        try:
            made = (
                json.loads(Path(options.job[0]).read_text())
                if options.job
                else dataclasses.asdict(plan_that_fits(options))
            )
            answer = {"plan": made}
        except UsageError as error:
            answer = {"error": str(error)}
    answer = control.bcast_object(answer)
    check("plan" in answer, answer.get("error", ""))
    plan = BenchPlan.of_json(answer["plan"])
    add_rows(plan.experiment)
    return plan


def plan_that_fits(options: argparse.Namespace) -> BenchPlan:
    """The options' plan, without cases that exceed this host's memory."""
    here = process.launched()
    local = here.local_size if here else 1
    check(not options.as_it_comes, f"--as-it-comes: {TWO_JOBS}")
    plan = make_plan(options)
    jobs = [(plan.strategies, plan.peers)]
    fits = [case for case in plan.cases if fitting_ranks(case, jobs, local) >= local]
    for case in plan.cases:
        if case not in fits:
            print(describe_left_out(case, jobs, local), flush=True)
    check(bool(fits), "no case fits into memory")
    return dataclasses.replace(plan, cases=tuple(fits))


# ---------------------------------------------------------------- results


def report(runs: Sequence[Json], options: argparse.Namespace, command: Sequence[str], is_whole: bool) -> None:
    """Show the table; write the JSON file and the plot."""
    cases = results.case_figures(runs, options.rate_mbit)
    if not is_whole:
        print("ended early; what was measured so far:", flush=True)
    table = results.table(cases)
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)  # no number is cut short
    console.print(table)
    for line in results.bound_lines(cases):
        console.print(line, highlight=False)
    if options.out:
        write(options.out, cases, command, is_whole)
    if options.plot:
        results.draw(cases, options.plot)


def write(out: Path, cases: Sequence[Json], command: Sequence[str], is_whole: bool) -> None:
    """Write all figures, as JSON."""
    replace_text(out, json.dumps({**facts(command), "is_whole": is_whole, "cases": cases}, indent=1) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Replace a regular file atomically; write others, such as /dev/stdout, in place."""
    if file.exists() and not file.is_file():
        file.write_text(text)
        return
    beside = file.with_name(file.name + ".new")
    beside.write_text(text)
    beside.replace(file)


def facts(command: Sequence[str]) -> Json:
    """Facts on which a figure depends."""
    found = provenance.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return {
        "command": shlex.join(command),
        "versions": found,
        "commit": provenance.commit(None),
        "cores": process.cores(),
        "processor": platform.machine(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    main()
