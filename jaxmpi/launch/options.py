"""Options of `jaxmpi train`, for the launcher and for the trainer.

Nothing here imports JAX, so a mistyped line ends at once.
"""

import os
import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from jaxmpi.config import experiment_file
from jaxmpi.config.flags import flags
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError, nearest

USAGE = """usage: jaxmpi train [-n N] [--restarts R] [--elastic MIN:MAX] [--launcher mpirun|srun]
                    [--launcher-args "..."] [--field value ...] EXPERIMENT.py [--field value ...]
       jaxmpi train [-n N] ... --from RUN [--field value ...]

Train an experiment with N workers: print the launcher's line, run it, and say how it ended.

  -n N               workers, one process each; without it one worker, no MPI
  --restarts R       start again from the newest good checkpoint if a rank dies, R times at most (default 0)
  --elastic MIN:MAX  start with MAX workers, again with those that are left, MIN at least; the effective batch stays
  --launcher NAME    mpirun (default) or srun (default inside a Slurm job of several hosts)
  --launcher-args    more arguments for it, such as "--hostfile hosts"
  --from RUN         the experiment file and flags of a run; others given here count; with --resume it goes on
  --field value      any field of the experiment: jaxmpi train EXPERIMENT.py --help lists them

EXPERIMENT.py is a file, or a name that `jaxmpi experiments` lists.
example: jaxmpi train -n 4 digits --train-for 2ep"""


class Options(NamedTuple):
    """Options of the launcher; the rest goes to the trainer."""

    workers: int
    launcher: str
    launcher_args: tuple[str, ...]
    train_args: tuple[str, ...]
    restarts: int = 0
    min_workers: int = 0  # workers with which a restart may go on; 0: as many as before

    @property
    def are_ranks_here(self) -> bool:
        """True if all ranks run on this host: arguments of the launcher's own may name others."""
        return self.launcher == "mpirun" and not self.launcher_args


def parse(argv: list[str], environ: Mapping[str, str] = os.environ, command: str = "train") -> Options:
    """Parse the launcher's options before the experiment file; others are the trainer's.

    Raises:
        UsageError: an option without its value, or an invalid number of workers.
    """
    values = {"-n": "", "--launcher": default_launcher(environ), "--launcher-args": "", "--restarts": "0"}
    values |= {"--elastic": ""}
    argv = [*split_n(argv[0]), *argv[1:]] if argv else argv
    fields: list[str] = []  # words about the experiment's fields that come before its file
    while argv and argv[0] not in ("-h", "--help"):
        if experiment_file.is_experiment(argv[0], fields[-1] if fields else ""):
            break
        if argv[0] not in values:
            fields, argv = [*fields, argv[0]], argv[1:]
            continue
        if len(argv) == 1:
            raise UsageError(f"{argv[0]} needs a value\n{USAGE}")
        values[argv[0]], argv = argv[1], argv[2:]
    odd = [arg for arg in fields if arg.startswith("-") and not is_field(arg)]
    if odd and fields[0].startswith("-"):
        spellings = {**values, **{f"--{name}": None for name in flags(Experiment())}}
        raise UsageError(f"got {odd[0]}; {nearest(odd[0], spellings)}\n{USAGE}")
    argv = experiment_file.file_first([*fields, *argv])
    if late := [option for option in values if option in {arg.partition("=")[0] for arg in argv}]:
        raise UsageError(f"{late[0]} stands before the experiment: jaxmpi {command} {late[0]} ... EXPERIMENT.py")
    min_workers, max_workers = elastic(values["--elastic"])
    workers = values["-n"] or str(max_workers or 1)
    if not is_number(workers) or int(workers) < 1:
        raise UsageError(f"-n: got {workers!r}; expected a number of workers >= 1")
    if min_workers and not min_workers <= int(workers) <= max_workers:
        raise UsageError(f"-n: got {workers}; expected {min_workers} to {max_workers}, as --elastic says")
    if not is_number(values["--restarts"]):
        raise UsageError(f"--restarts: got {values['--restarts']!r}; expected a number >= 0")
    try:
        launcher_args = shlex.split(values["--launcher-args"])
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {values['--launcher-args']!r}: {error}") from error
    if min_workers and values["--restarts"] == "0":
        raise UsageError("--elastic says with how many workers to start again; give --restarts, too")
    names = (values["--launcher"], tuple(launcher_args), tuple(argv))
    return Options(int(workers), *names, restarts=int(values["--restarts"]), min_workers=min_workers)


def is_field(arg: str) -> bool:
    """Return True for a flag of the experiment."""
    try:
        experiment_file.refuse_unknown([arg])
    except UsageError:
        return False
    return True


def elastic(text: str) -> tuple[int, int]:
    """(fewest, most) workers from `4:8`; zeros if it is not given.

    Raises:
        UsageError: it is no pair of numbers, the first not above the second.
    """
    if not text:
        return 0, 0
    minimum, _, maximum = text.partition(":")
    if not (is_number(minimum) and is_number(maximum) and 1 <= int(minimum) <= int(maximum)):
        raise UsageError(f"--elastic: got {text!r}; expected MIN:MAX workers, such as 4:8")
    return int(minimum), int(maximum)


def is_number(text: str) -> bool:
    """Return True for a whole number of plausible size."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def default_launcher(environ: Mapping[str, str]) -> str:
    """`srun` inside a Slurm job of several hosts, else `mpirun`."""
    return "mpirun" if environ.get("SLURM_JOB_NUM_NODES", "1") in ("", "1") else "srun"


def split_n(option: str) -> list[str]:
    """Split `-n8`, which mpirun takes too, into `-n 8`."""
    return ["-n", option[2:]] if option.startswith("-n") and option[2:].isdigit() else [option]
