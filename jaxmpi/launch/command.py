"""`jaxmpi train -n N`: build, print and run the launcher's command line for this machine.

Open MPI and Slurm need flags that depend on the machine (root, cores, PMIx). Options before the experiment file are the
launcher's, except fields of the experiment; all from the file on is the trainer's.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from jaxmpi.config import experiment_file
from jaxmpi.config.flags import flags, summary, unknown_flags
from jaxmpi.config.renamed import with_new_names
from jaxmpi.config.schema import Experiment
from jaxmpi.core.env import getting_mpi
from jaxmpi.core.errors import UsageError, lookup, nearest
from jaxmpi.launch.supervisor import PROBE_S, SupervisedJob, keep_going, without
from jaxmpi.rules import registry
from jaxmpi.runtime import affinity, failures, job_folder

USAGE = """usage: jaxmpi train [-n N] [--restarts R] [--elastic MIN:MAX] [--launcher mpirun|srun]
                    [--launcher-args "..."] [--comm mpi|xla] [--field value ...] EXPERIMENT.py [--field value ...]

Train an experiment with N workers: print the launcher's line, run it, and say how it ended.

  -n N               workers, one process each; without it one worker, no MPI
  --restarts R       start again from the newest good checkpoint if a rank dies, R times at most (default 0)
  --elastic MIN:MAX  start with MAX workers, again with those that are left, MIN at least; the effective batch stays
  --launcher NAME    mpirun (default) or srun (default inside a Slurm job of several hosts)
  --launcher-args    more arguments for it, such as "--hostfile hosts"
  --comm NAME        as the field of that name, which may also stand behind the experiment
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
    least: int = 0  # workers with which a restart may go on; 0: as many as before


def parse(argv: list[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Parse options before the experiment file; its fields, and all from the file on, are the trainer's.

    Raises:
        UsageError: an option without its value, or an invalid number of workers.
    """
    values = {"-n": "", "--launcher": default_launcher(environ), "--launcher-args": "", "--restarts": "0"}
    values |= {"--elastic": "", "--comm": ""}
    argv = with_new_names(argv, lambda text: print(f"jaxmpi: {text}", file=sys.stderr))
    argv = [*split_n(argv[0]), *argv[1:]] if argv else argv
    fields: list[str] = []  # of the experiment, given before its file
    while argv and argv[0] not in ("-h", "--help"):
        if experiment_file.is_experiment(argv[0], fields[-1] if fields else ""):
            break
        if argv[0] not in values:
            fields, argv = [*fields, argv[0]], argv[1:]
            continue
        if len(argv) == 1:
            raise UsageError(f"{argv[0]} needs a value\n{USAGE}")
        values[argv[0]], argv = argv[1], argv[2:]
    # A rule of the user's own has fields that only its file knows.
    checked = [arg for arg in fields if not arg.startswith("--rule.")]
    odd = [arg for arg in checked if arg.startswith("-") and (arg[:2] != "--" or unknown_flags([arg], Experiment()))]
    if odd and fields[0].startswith("-"):
        known = {**values, **{f"--{name}": None for name in flags(Experiment())}}
        raise UsageError(f"got {odd[0]}; {nearest(odd[0], known)}\n{USAGE}")
    argv = experiment_file.file_first([*fields, *argv])
    if "-n" in argv:
        raise UsageError("-n comes before the experiment: jaxmpi train -n 8 EXPERIMENT.py")
    least, most = elastic(values["--elastic"])
    workers = values["-n"] or str(most or 1)
    if not is_number(workers) or int(workers) < 1:
        raise UsageError(f"-n: got {workers!r}; expected a number of workers >= 1")
    if least and not least <= int(workers) <= most:
        raise UsageError(f"-n: got {workers}; expected {least} to {most}, as --elastic says")
    if not is_number(values["--restarts"]):
        raise UsageError(f"--restarts: got {values['--restarts']!r}; expected a number >= 0")
    comm = ("--comm", values["--comm"]) if values["--comm"] and argv else ()
    try:
        launcher_args = shlex.split(values["--launcher-args"])
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {values['--launcher-args']!r}: {error}") from error
    if least and values["--restarts"] == "0":
        raise UsageError("--elastic says with how many workers to start again; give --restarts, too")
    names = (values["--launcher"], tuple(launcher_args), (*argv[:1], *comm, *argv[1:]))
    return Options(int(workers), *names, restarts=int(values["--restarts"]), least=least)


def elastic(text: str) -> tuple[int, int]:
    """(fewest, most) workers from `4:8`; zeros if it is not given.

    Raises:
        UsageError: it is no pair of numbers, the first not above the second.
    """
    if not text:
        return 0, 0
    least, _, most = text.partition(":")
    if not (is_number(least) and is_number(most) and 1 <= int(least) <= int(most)):
        raise UsageError(f"--elastic: got {text!r}; expected MIN:MAX workers, such as 4:8")
    return int(least), int(most)


def is_number(text: str) -> bool:
    """Return True for a whole number of plausible size."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def default_launcher(environ: Mapping[str, str]) -> str:
    """`srun` inside a Slurm job of several hosts, else `mpirun`."""
    return "mpirun" if environ.get("SLURM_JOB_NUM_NODES", "1") in ("", "1") else "srun"


def split_n(option: str) -> list[str]:
    """Split `-n8`, which mpirun takes too, into `-n 8`."""
    return ["-n", option[2:]] if option.startswith("-n") and option[2:].isdigit() else [option]


def command(options: Options, *, cores: int, is_root: bool, module: str = "jaxmpi.train") -> list[str]:
    """The line to run `python -m module` on every rank.

    Raises:
        UsageError: the launcher is unknown or not installed.
    """
    rank = [sys.executable, "-m", module, *options.train_args]
    if options.workers <= 1 and not options.launcher_args:
        return rank
    line = lookup({"mpirun": mpirun, "srun": srun}, options.launcher, "launcher")
    return [*line(options, cores, is_root), *options.launcher_args, *rank]


def mpirun(options: Options, cores: int, is_root: bool) -> list[str]:
    """Mpirun's line; Open MPI needs flags to accept root and more ranks than physical cores, other MPIs none."""
    path = find("mpirun")
    plain = [path, "-n", str(options.workers)]
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    if "Open MPI" not in version and "prte" not in version.lower():
        return plain
    return [
        *plain,
        *(["--allow-run-as-root"] if is_root else []),
        *(["--oversubscribe"] if options.workers > cores // 2 else []),  # slots are physical cores
        *["--bind-to", "none"],  # the ranks divide the cores among themselves
        *(["--with-ft", "ulfm"] if outlives_ranks(options.train_args, version) else []),
    ]


def outlives_ranks(train_args: Sequence[str], version: str) -> bool:
    """Return True if the run survives dead workers, by its rule or `--on-rank-loss shrink`, if this Open MPI can."""
    release = re.search(r"(\d+)\.\d+", version)
    if not train_args or release is None or int(release[1]) < 5:
        return False
    text = " ".join([*train_args, "\n", text_of(train_args)])
    if "shrink" not in text and has_known_rule(text):
        return False  # most runs need not wait for the experiment file here
    experiment, _ = experiment_file.parse(list(train_args))
    return registry.is_asynchronous(experiment.rule) or experiment.on_rank_loss == "shrink"


def has_known_rule(text: str) -> bool:
    """Return True if command line and experiment file show that the rule is one of jaxmpi's synchronous ones.

    A file that imports from elsewhere, or from another experiment, or adds a rule to the table, may have any rule.
    """
    names = re.findall(r"(?:RuleConfig\(\s*(?:name\s*=\s*)?|--rule\.name[= ])[\"']?(\w+)", text)
    imported = set(re.findall(r"^\s*(?:from|import)\s+(jaxmpi\.experiments|\w+)", text, re.MULTILINE))
    own = imported - sys.stdlib_module_names - {"jaxmpi", "jax", "numpy", "flax", "optax"} or "RULES" in text
    return not own and all(name in registry.RULES and not registry.RULES[name].is_asynchronous for name in names)


def with_fields_of_file(train_args: Sequence[str]) -> tuple[str, ...]:
    """Arguments with what the experiment file says of where and how the run begins: it counts for the first start only.

    Raises:
        UsageError: the file or a flag is wrong.
    """
    if not re.search("run_dir|resume|from_start", text_of(train_args)):
        return tuple(train_args)  # most runs need not wait for the experiment file here
    experiment, _ = experiment_file.parse(list(train_args))
    for flag in ("--run-dir", "--resume", "--no-resume", "--from-start", "--no-from-start"):
        train_args = without(train_args, flag, takes_value=flag == "--run-dir")
    fields = [*(["--run-dir", experiment.run_dir] if experiment.run_dir else []), *["--resume"] * experiment.resume]
    return (*train_args, *fields, *["--from-start"] * experiment.from_start)


def text_of(train_args: Sequence[str]) -> str:
    """The experiment file, as far as it can be read; the trainer says what is wrong with it."""
    try:
        return experiment_file.located(train_args[0]).read_text(errors="replace") if train_args else ""
    except OSError:
        return ""


def srun(options: Options, cores: int, is_root: bool) -> list[str]:
    """Slurm's launcher, through PMIx."""
    return [find("srun"), "-n", str(options.workers), "--mpi=pmix"]


def find(launcher: str) -> str:
    """Path of a launcher: beside this Python, where a wheel's mpirun is, or on PATH."""
    beside = Path(sys.executable).parent / launcher
    path = str(beside) if beside.exists() else shutil.which(launcher)
    if path is None:
        raise UsageError(
            f"no {launcher} beside {sys.executable} or on PATH; {getting_mpi()}. "
            "One process needs none: -n 1, or --devices K for K workers"
        )
    return path


def main(argv: list[str]) -> NoReturn:
    """Print the line and supervise it; for one worker without restarts, exec the trainer."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nfields used most:\n{summary()}")
        raise SystemExit(0)
    options, facts = parse(argv), {"cores": affinity.cores(), "is_root": os.geteuid() == 0}

    def printed(workers: int, launcher_args: Sequence[str], train_args: Sequence[str]) -> list[str]:
        asked = options._replace(workers=workers, launcher_args=tuple(launcher_args), train_args=tuple(train_args))
        line = command(asked, **facts)
        try:
            print("+ " + shown(line, launcher_args), flush=True)
        except OSError:  # as `| head` leaves it
            failures.unheard(sys.stdout)
        return line

    if options.workers == 1 and not options.restarts:
        line = printed(1, options.launcher_args, options.train_args)
        os.execv(line[0], line)
    train_args = with_fields_of_file(options.train_args) if options.restarts else options.train_args
    parts = (options.launcher_args, train_args)
    asked = SupervisedJob(options.workers, options.least or options.workers, options.restarts, *parts)
    raise SystemExit(keep_going(asked, printed, lambda host: answers(host, options, **facts)))


SETTING = re.compile(r"(^|[,;=])([A-Za-z_]\w*)=[^,;]*")  # NAME=value, of a rank's environment
SETS = ("-genv", "-env")  # take a name, then a value


def shown(line: Sequence[str], launcher_args: Sequence[str]) -> str:
    """The line as printed: values of variables in launcher arguments, which may be secret, are left out."""
    hidden = [SETTING.sub(r"\1\2=...", arg) for arg in launcher_args]
    hidden = ["..." if i > 1 and hidden[i - 2] in SETS else arg for i, arg in enumerate(hidden)]
    size = len(launcher_args)
    starts = (i for i in range(len(line)) if [*line[i : i + size]] == [*launcher_args])
    at = next(starts, len(line))
    return shlex.join([*line[:at], *hidden, *line[at + size :]] if size else line)


def answers(host: str, options: Options, *, cores: int, is_root: bool) -> bool:
    """Return True if a process can be started on a host."""
    settings = without(without(options.launcher_args, "--host"), "-H")  # how to reach hosts, such as a port of ssh
    line = [*mpirun(options._replace(workers=1), cores, is_root), *settings, "--host", f"{host}:1", "true"]
    try:
        return subprocess.run(job_folder.over_leftovers(line), capture_output=True, timeout=PROBE_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False
