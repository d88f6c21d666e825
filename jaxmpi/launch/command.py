"""`jaxmpi train -n N`: build, print and run the launcher's command line.

Open MPI and Slurm need flags that depend on the machine (root, cores, PMIx).
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxmpi.config import experiment_file
from jaxmpi.core.env import getting_mpi
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.launch.options import Options
from jaxmpi.launch.supervisor import PROBE_S, SupervisedJob, keep_going, without
from jaxmpi.runtime import affinity, failures, job_folder


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
    """Mpirun's line, with Open MPI's flags for this machine and run."""
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
    """Return True if the run and this Open MPI can outlive workers.

    A run can by its rule, or by `--on-rank-loss shrink`; Open MPI from version 5 on.
    """
    release = re.search(r"(\d+)\.\d+", version)
    if not train_args or release is None or int(release[1]) < 5:
        return False
    text, table = text_of(train_args), {}
    names = named_rules(train_args, text)
    if names:
        table = rules()
    is_known = names is not None and all(name in table and not table[name].is_asynchronous for name in names)
    if is_known and "shrink" not in " ".join([*train_args, text]):
        return False  # most runs need not wait for the experiment file here
    experiment, _ = experiment_file.parse(list(train_args))
    rule = lookup(rules(), experiment.rule.name, "rule")
    return rule.is_asynchronous or experiment.on_rank_loss == "shrink"


def named_rules(train_args: Sequence[str], text: str) -> set[str] | None:
    """Names of all rules that an experiment can have, by the syntax of its text.

    None: the text does not show them. It gives a name that is no literal, derives from RuleConfig, adds a rule to the
    table, or imports another experiment or a package that may do so.
    """
    given = re.findall(r"(?:^|\s)--rule\.name[= ](\S+)", " ".join(train_args))
    if given:
        return {given[-1]}
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):  # as the trainer will report
        return set()
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" if not node.level else "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and name_of(node.func) == "RuleConfig"]
    named = [call.args[:1] or [word.value for word in call.keywords if word.arg in ("name", None)] for call in calls]
    if (
        any(module.split(".")[0] not in PLAIN or module.startswith("jaxmpi.experiments") for module in modules)
        or any(alias.asname and alias.name == "RuleConfig" for alias in aliases)
        or sum(name_of(node) in ("RuleConfig", "RULES") for node in nodes) > len(calls)
        or any(not isinstance(name, ast.Constant) for names in named for name in names)
    ):
        return None
    return {str(name.value) for names in named for name in names if isinstance(name, ast.Constant)}


PLAIN = sys.stdlib_module_names | {"jaxmpi", "jax", "numpy", "flax", "optax"}  # these know no rules of a user's


def name_of(node: ast.AST) -> str:
    """The last name of `a` or `a.b`; empty for other nodes."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def rules() -> dict[str, Any]:
    """The table of rules."""
    from jaxmpi.rules.registry import RULES  # noqa: PLC0415 - imports JAX, for which other MPIs than Open MPI 5 need not wait

    return RULES


def with_fields_of_file(train_args: Sequence[str]) -> tuple[str, ...]:
    """Arguments with the file's fields that count for the first start only.

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
    """The experiment file's text; empty if unreadable, as the trainer will report."""
    try:
        return experiment_file.located(train_args[0]).read_text(errors="replace") if train_args else ""
    except OSError:
        return ""


def srun(options: Options, cores: int, is_root: bool) -> list[str]:
    """Slurm's launcher, through PMIx."""
    return [find("srun"), "-n", str(options.workers), "--mpi=pmix"]


def find(launcher: str) -> str:
    """Path of a launcher, beside this Python (a wheel's) or on PATH."""
    beside = Path(sys.executable).parent / launcher
    path = str(beside) if beside.exists() else shutil.which(launcher)
    if path is None:
        raise UsageError(
            f"no {launcher} beside {sys.executable} or on PATH; {getting_mpi()}. "
            "One process needs none: -n 1, or --devices K for K workers"
        )
    return path


def launch(options: Options) -> NoReturn:
    """Print the line and supervise it; exec one worker without restarts."""
    facts = {"cores": affinity.cores(), "is_root": os.geteuid() == 0}

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
    """The line without the values of launcher variables, which may be secret."""
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
