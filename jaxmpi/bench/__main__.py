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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from jaxmpi.bench import results
from jaxmpi.bench.options import parse
from jaxmpi.bench.plan import BenchPlan, Case, add_rows, describe_left_out, fitting_ranks, make_plan
from jaxmpi.bench.results import Json
from jaxmpi.bench.rounds import measure
from jaxmpi.comm.job import Processes, processes
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.launch import command
from jaxmpi.launch.options import Options
from jaxmpi.runtime import failures, job_folder, process, provenance


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
    """Start ranks and show their results; if this process is ended early, except by SIGKILL, those so far.

    Raises:
        UsageError: as `make_plan`; or no case fits.
        TrainingError: a job failed.
    """
    jax.config.update("jax_platforms", "cpu")  # an experiment file may make arrays, and ranks need the GPU's memory
    plan, wanted = make_plan(options), options.n or 2
    if wanted > 1 and (options.launcher != "mpirun" or options.launcher_args):
        # Ranks may be on other hosts, whose memory is not known here: rank 0 makes the same plan and reports.
        return run_job(wanted, options, options.words)
    cases_by_ranks: dict[int, list[Case]] = {}
    for case in plan.cases:
        ranks = fitting_ranks(case, plan, wanted)
        if ranks < min(2, wanted):
            print(describe_left_out(case, plan, min(2, wanted)))
        else:
            cases_by_ranks.setdefault(ranks, []).append(case)
    if not cases_by_ranks:
        raise UsageError("no case fits into memory")
    measured: list[Json] = []
    is_whole = False
    try:
        for ranks, cases in cases_by_ranks.items():
            with tempfile.TemporaryDirectory() as folder:
                part, result = Path(folder) / "plan", Path(folder) / "result"
                part.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(plan, cases=tuple(cases)))))
                try:
                    run_job(ranks, options, ["--job", str(part), str(result)])
                finally:
                    measured += json.loads(result.read_text()) if result.exists() else []
        is_whole = True
    finally:
        if measured:
            report(measured, options, ["jaxmpi", "bench", *options.words], is_whole)


def run_job(ranks: int, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Print the launcher's line for ranks of this module, and run it.

    Raises:
        TrainingError: it failed.
    """
    try:
        more = tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {options.launcher_args!r}: {error}") from error
    launcher = Options(ranks, options.launcher, more, tuple(arguments))
    line = command.command(launcher, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.bench")
    requests = failures.Requests()
    signal.signal(signal.SIGTERM, lambda number, _: requests.add(number) and sys.exit(128 + number))  # `finally` runs
    print("+ " + shlex.join(line), flush=True)
    job = subprocess.Popen(job_folder.remove_leftovers_first(line))
    try:
        code = job.wait()
    finally:
        if job.poll() is None:
            job.terminate()  # a launcher ends its ranks
            job.wait()
    if code:
        raise TrainingError(f"a job ended with exit code {code}; see above")


# ---------------------------------------------------------------- inside: one rank


def run_rank(options: argparse.Namespace) -> None:
    """Run as a rank of a job; rank 0 reports the results, or leaves them for who started the job."""
    failures.install_excepthooks()
    process.prepare()
    control = processes()
    if options.n not in (None, control.size):
        raise UsageError(f"-n: got {options.n} in a job of {control.size} ranks; leave it out")
    with failures.at_work():
        plan = agreed_plan(options, control)

        def keep(so_far: list[Json]) -> None:
            if options.job:
                replace_text(Path(options.job[1]), json.dumps(so_far))
            elif options.out:
                write(options.out, results.case_figures(so_far, options.rate_mbit), sys.argv, is_whole=False)

        runs = measure(plan, control, keep)
        if control.rank == 0 and not options.job:
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
            if options.job:
                answer = {"plan": json.loads(Path(options.job[0]).read_text())}
            else:
                answer = {"plan": dataclasses.asdict(plan_that_fits(options))}
        except UsageError as error:
            answer = {"error": str(error)}
    answer = control.bcast_object(answer)
    if "error" in answer:
        raise UsageError(answer["error"])
    plan = BenchPlan.from_json(answer["plan"])
    add_rows(plan.experiment)
    return plan


def plan_that_fits(options: argparse.Namespace) -> BenchPlan:
    """The options' plan, without cases that exceed this host's memory."""
    here = process.launched()
    local = here.local_size if here else 1
    plan = make_plan(options)
    fits = [case for case in plan.cases if fitting_ranks(case, plan, local) >= local]
    for case in plan.cases:
        if case not in fits:
            print(describe_left_out(case, plan, local), flush=True)
    if not fits:
        raise UsageError("no case fits into memory")
    return dataclasses.replace(plan, cases=tuple(fits))


# ---------------------------------------------------------------- results


def report(runs: Sequence[Json], options: argparse.Namespace, line: Sequence[str], is_whole: bool) -> None:
    """Show the table; write the JSON file and the plot."""
    cases = results.case_figures(runs, options.rate_mbit)
    if not is_whole:
        print("ended early; what was measured so far:", flush=True)
    table = results.table(cases)
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)  # no number is cut short
    console.print(table)
    for text in results.bound_lines(cases):
        console.print(text, highlight=False)
    if options.out:
        write(options.out, cases, line, is_whole)
    if options.plot:
        results.draw(cases, options.plot)


def write(out: Path, cases: Sequence[Json], line: Sequence[str], is_whole: bool) -> None:
    """Write all figures, with the facts on which they depend, as JSON."""
    versions = provenance.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    facts = {
        "command": shlex.join(line),
        "versions": versions,
        "commit": provenance.commit(None),
        "cores": process.cores(),
        "processor": platform.machine(),
        "system": platform.platform(),
        "allocator": os.environ.get("JAXMPI_ALLOCATOR", "jaxmpi"),
    }
    replace_text(out, json.dumps({**facts, "is_whole": is_whole, "cases": cases}, indent=1) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Replace a regular file atomically; write others, such as /dev/stdout, in place."""
    if file.exists() and not file.is_file():
        file.write_text(text)
        return
    partial = file.with_name(file.name + ".new")
    partial.write_text(text)
    partial.replace(file)


if __name__ == "__main__":
    main()
