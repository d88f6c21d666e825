"""Start and supervise jobs of ranks, and let two take turns."""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.bench.plan import BenchPlan
from jaxmpi.bench.results import AS_IT_COMES, TUNED, Json
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.shared_memory import read
from jaxmpi.launch import command
from jaxmpi.launch.options import Options
from jaxmpi.runtime import interrupts, job_folder, process

TURN_S = 1800.0  # for the other job's turn to end


def run_jobs(plan: BenchPlan, ranks: int, options: argparse.Namespace, found: list[Json]) -> None:
    """Run a job; append its results to `found`, even if ended early.

    If requested, a second job, of peers only, takes turns with it.

    Raises:
        TrainingError: a job failed.
    """
    allocators = {TUNED: "jaxmpi", **({AS_IT_COMES: "system"} if options.as_it_comes else {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "turn").write_text(f"{TUNED} 0")
        jobs = []
        for allocator, setting in allocators.items():
            part = plan if allocator == TUNED else dataclasses.replace(plan, strategies=())
            (folder / f"{allocator}.plan").write_text(json.dumps(dataclasses.asdict(part)))
            files = [str(folder / f"{allocator}.{end}") for end in ("plan", "result")]
            jobs.append((job_line(ranks, options, ["--job", *files]), {"JAXMPI_ALLOCATOR": setting}))
        try:
            wait_for(jobs)
        finally:
            results = [folder / f"{allocator}.result" for allocator in allocators]
            found += [run for file in results if file.exists() for run in json.loads(file.read_text())]


def job_line(ranks: int, options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """The launcher's line for ranks of this file."""
    try:
        more = tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {options.launcher_args!r}: {error}") from error
    asked = Options(ranks, options.launcher, more, tuple(arguments))
    return command.command(asked, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.bench")


def wait_for(jobs: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Print and run lines concurrently until all end or one fails.

    Raises:
        TrainingError: one failed.
    """
    requests = interrupts.Requests()
    signal.signal(signal.SIGTERM, lambda number, _: requests.add(number) and sys.exit(128 + number))  # `finally` runs
    running = []
    try:
        for line, environ in jobs:
            print("+ " + shlex.join(line), flush=True)
            running.append(subprocess.Popen(job_folder.remove_leftovers_first(line), env=os.environ | environ))
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(0.05)
            codes = [job.poll() for job in running]
            failed = [code for code in codes if code]
            if failed:
                raise TrainingError(f"a job ended with exit code {failed[0]}; see above")
    finally:
        for job in running:
            if job.poll() is None:
                job.terminate()  # launchers end their ranks
                job.wait()


class Turns:
    """Turns of two jobs: a file names the job that may run."""

    def __init__(self, folder: Path, mine: str, control: Processes) -> None:
        """Take the folder that both see, and this job's name."""
        self.folder, self.mine, self.control = folder, mine, control
        self.other = AS_IT_COMES if mine == TUNED else TUNED
        self.alone = not (folder / f"{self.other}.plan").exists()
        self.turn = 0

    def __enter__(self) -> None:
        """Wait for this job's next turn, or until the other has ended."""
        deadline = time.monotonic() + TURN_S
        while not self.alone and read(self.folder / "turn") != f"{self.mine} {self.turn}":
            self.alone = (self.folder / f"{self.other} has ended").exists()
            if time.monotonic() > deadline:
                raise TrainingError(f"the job {self.other!r} has kept its turn for {TURN_S:.0f} s")
            time.sleep(0.01)

    def __exit__(self, error: object, *_: object) -> None:
        """Pass the turn on after all ranks are done, except on error."""
        if error is not None:
            return
        self.control.barrier()
        if self.control.rank == 0:
            (self.folder / "next").write_text(f"{self.other} {self.turn + (self.mine == AS_IT_COMES)}")
            (self.folder / "next").replace(self.folder / "turn")
        self.turn += 1

    def end(self) -> None:
        """Release the other job for good: this one needs no more turns."""
        (self.folder / f"{self.mine} has ended").touch()
