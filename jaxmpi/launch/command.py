"""`jaxmpi train`: build, print and run the launcher's command line. Nothing here imports JAX.

Open MPI and Slurm need flags that depend on the machine: root, cores, PMIx. A run that outlives ranks needs one more,
as its experiment decides (`experiment_facts`). The line is printed without the values of launcher variables, which may
be secret. A supervisor (`supervisor`) then runs it; a single worker without restarts replaces this process.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxmpi.checkpoint import run_directory
from jaxmpi.config import experiment_file
from jaxmpi.config.flags import summary
from jaxmpi.config.schema import Experiment
from jaxmpi.core.env import getting_mpi
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.launch.experiment_facts import facts_of, facts_of_flags
from jaxmpi.launch.options import USAGE, Options, parse
from jaxmpi.launch.supervisor import PROBE_S, supervise, without_hosts
from jaxmpi.runtime import failures, job_folder, process


def main(argv: list[str]) -> NoReturn:
    """Launch an experiment, or print the usage.

    Raises:
        UsageError: an option that there is not, or a value that cannot be.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nfields used most:\n{summary()}")
        raise SystemExit(0)
    options = parse(experiment_file.take_run(argv))
    experiment_file.refuse_early(options.train_args, file_is_here=options.are_ranks_here)
    if run_dir := experiment_file.split_from(argv)[1]:
        say_other_ranks(Path(run_dir), options.workers)
    launch(options)


def launch(options: Options) -> NoReturn:
    """Print the line and supervise it; exec one worker without restarts."""
    words = options.train_args[1:]
    if experiment_file.HELP & {*words}:
        os.execv(sys.executable, [sys.executable, "-m", "jaxmpi.train", *options.train_args])
    host = {"cores": process.cores(), "is_root": os.geteuid() == 0}
    is_alone = options.workers == 1 and not options.launcher_args
    if not is_alone and options.launcher == "mpirun" and not has_network():
        raise UsageError(
            "no network interface is up, not even the loopback, and Open MPI needs one: ip link set lo up, or train in "
            "one process, with --devices K for K workers"
        )
    facts = facts_of_flags(words)
    may_outlive = not is_alone and options.launcher == "mpirun" and has_ulfm(version_of(find("mpirun")))
    if options.restarts or may_outlive:
        facts = facts_of(options.train_args, file_is_here=options.are_ranks_here, processes=options.workers)
    if options.are_ranks_here:  # so this rank 0 would say the same, seconds later
        with run_directory.as_usage_errors():
            if facts.resume:
                resumed = Experiment(resume=True, run_dir=facts.run_dir)
                run_directory.find_run_to_resume(resumed, Path(options.train_args[0]).stem)
            elif facts.run_dir and not facts.from_start:
                run_directory.refuse_run(Path(facts.run_dir))

    def print_line(job: Options) -> list[str]:
        line = command(job, **host, outlives_ranks=facts.outlives_ranks)
        try:
            print("+ " + without_values(line, job.launcher_args), flush=True)
        except OSError:  # as `| head` leaves it
            failures.drop_unread_stream(sys.stdout)
        return line

    if is_alone and not options.restarts:
        line = print_line(options)
        os.execv(line[0], line)
    raise SystemExit(supervise(options, facts, print_line, lambda name: answers(name, options, **host)))


def say_other_ranks(run_dir: Path, ranks: int) -> None:
    """Say that the run of `--from` had another number of ranks: `-n` is no field of it."""
    before = experiment_file.read_config(run_dir).get("ranks", ranks)  # older runs do not say it
    if before != ranks:
        print(f"jaxmpi: {run_dir} had -n {before}, this run has -n {ranks}", file=sys.stderr, flush=True)


def has_network() -> bool:
    """Return True if an interface of this host, or container, has an address, as far as Linux says."""
    addresses = Path("/proc/net/fib_trie")  # of this network namespace; /sys/class/net may be another's
    return not addresses.exists() or "LOCAL" in addresses.read_text()


# ---------------------------------------------------------------- the line


def command(
    options: Options, *, cores: int, is_root: bool, outlives_ranks: bool = False, module: str = "jaxmpi.train"
) -> list[str]:
    """The line to run `python -m module` on every rank.

    Args:
        options: of the launcher.
        cores: of this host.
        is_root: the user is root.
        outlives_ranks: the job is to go on without ranks that die, if this MPI can.
        module: what ranks run.

    Raises:
        UsageError: the launcher is unknown or not installed.
    """
    rank = [sys.executable, "-m", module, *options.train_args]
    if options.workers <= 1 and not options.launcher_args:
        return rank
    line = lookup({"mpirun": mpirun, "srun": srun}, options.launcher, "launcher")
    return [*line(options, cores, is_root, outlives_ranks), *options.launcher_args, *rank]


def mpirun(options: Options, cores: int, is_root: bool, outlives_ranks: bool = False) -> list[str]:
    """Mpirun's line, with Open MPI's flags for this machine and run."""
    path = find("mpirun")
    plain = [path, "-n", str(options.workers)]
    version = version_of(path)
    if "Open MPI" not in version and "prte" not in version.lower():
        return plain
    return [
        *plain,
        *(["--allow-run-as-root"] if is_root else []),
        *(["--oversubscribe"] if options.workers > cores // 2 else []),  # slots are physical cores
        *["--bind-to", "none"],  # the ranks divide the cores among themselves
        *(["--with-ft", "ulfm"] if outlives_ranks and has_ulfm(version) else []),
    ]


@functools.cache
def version_of(mpirun: str) -> str:
    """Text of `mpirun --version`."""
    return subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout


def has_ulfm(version: str) -> bool:
    """Return True for Open MPI 5 and later, which can outlive ranks."""
    release = re.search(r"(\d+)\.\d+", version)
    return ("Open MPI" in version or "prte" in version.lower()) and release is not None and int(release[1]) >= 5


def srun(options: Options, cores: int, is_root: bool, outlives_ranks: bool) -> list[str]:
    """Slurm's launcher, through PMIx; ranks that are left 60 s after one has died are ended.

    `--kill-on-bad-exit` would end them at once, but also ranks that have saved and leave with 75 a moment apart.
    """
    return [find("srun"), "-n", str(options.workers), "--mpi=pmix", "--wait=60"]


def find(launcher: str) -> str:
    """Path of a launcher, beside this Python (a wheel's) or on PATH."""
    sibling = Path(sys.executable).parent / launcher
    path = str(sibling) if sibling.exists() else shutil.which(launcher)
    if path is None:
        raise UsageError(
            f"no {launcher} beside {sys.executable} or on PATH; {getting_mpi()}. "
            "One process needs none: -n 1, or --devices K for K workers"
        )
    return path


SETTING = re.compile(r"(^|[,;=])([A-Za-z_]\w*)=[^,;]*")  # NAME=value, of a rank's environment
SETS = ("-genv", "-env")  # take a name, then a value


def without_values(line: Sequence[str], launcher_args: Sequence[str]) -> str:
    """The line without the values of launcher variables, which may be secret."""
    hidden = [SETTING.sub(r"\1\2=...", arg) for arg in launcher_args]
    hidden = ["..." if i > 1 and hidden[i - 2] in SETS else arg for i, arg in enumerate(hidden)]
    size = len(launcher_args)
    starts = (i for i in range(len(line)) if [*line[i : i + size]] == [*launcher_args])
    at = next(starts, len(line))
    return shlex.join([*line[:at], *hidden, *line[at + size :]] if size else line)


def answers(host: str, options: Options, *, cores: int, is_root: bool) -> bool:
    """Return True if a process can be started on a host."""
    settings = without_hosts(options.launcher_args)  # how to reach hosts, such as a port of ssh
    start = mpirun(options._replace(workers=1), cores, is_root)
    line = [*start, *settings, "--host", f"{host}:1", "true"]
    try:
        result = subprocess.run(job_folder.remove_leftovers_first(line), capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0
