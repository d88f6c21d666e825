"""Facts of an experiment by which its job is launched and restarted.

A job whose rule is asynchronous goes on without a rank that dies, if mpirun is told so. An experiment file is code, and
only running it shows its rule. The launcher lives as long as the job, and should hold neither the file's memory nor a
device. So another process runs the file (`read_experiment`) and answers by a file. That takes a second. It is left out
for a text that surely changes no such fact, as most do; the words in it were read by patterns before, which some forms
escaped.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures

TIMEOUT_S = 60.0  # for an experiment file to run
# Words in a line or a file by which these facts may change, and those by which code runs that is not in sight.
TELLING = (
    *("rule", "shrink", "rank_loss", "rank-loss", "run_dir", "run-dir", "resume", "from_start", "from-start"),
    *("**", "eval", "exec", "getattr", "setattr", "import_module", "__import__", "runpy", "pickle", "experiment_file"),
)
PLAIN = sys.stdlib_module_names | {"jaxmpi", "jax", "numpy", "flax", "optax"}  # these know nothing of a user's


class ExperimentFacts(NamedTuple):
    """Facts of an experiment, with the fields of the command line."""

    outlives_ranks: bool  # by its rule, or by `on_rank_loss`
    run_dir: str
    resume: bool
    from_start: bool


def facts_of(train_args: Sequence[str], *, file_is_here: bool = True) -> ExperimentFacts | None:
    """Facts of the experiment that these arguments of the trainer name.

    None: these are those of a new run of a synchronous rule, or a line says why they are not known.

    Args:
        train_args: arguments of the trainer.
        file_is_here: ranks run on this host, so that a mistake here is one there.

    Raises:
        UsageError: the file, or a field, is wrong.
        SystemExit: the same, if the other process has said so.
    """
    file = experiment_file.locate(train_args[0]) if train_args else Path()
    try:
        if not may_differ(train_args, file.read_text("utf-8-sig", errors="replace")):
            return None
    except OSError:  # ranks on other hosts may read it
        return None
    with tempfile.TemporaryDirectory() as folder:
        answer, said = Path(folder) / "answer", Path(folder) / "said"
        code = run_apart([str(answer), *train_args], said)
        facts: dict[str, Any] = (
            json.loads(answer.read_text()) if answer.exists() else {"error": f"{file}: {reason(code, said)}"}
        )
        if "error" not in facts:
            return ExperimentFacts(**facts)
        if answer.exists() and file_is_here:
            raise UsageError(facts["error"])
        if code == failures.MISUSED and file_is_here:
            sys.stderr.write(said.read_text(errors="replace"))
            raise SystemExit(failures.MISUSED)
    print(
        f"jaxmpi: {facts['error']}; starting a job that a dead rank ends; run_dir, resume and from_start count on the "
        "command line alone",
        file=sys.stderr,
    )
    return None


def run_apart(words: Sequence[str], said: Path) -> int | None:
    """Run `read_experiment` in a process that ends with this one.

    Its output goes to a file, since a process that it starts would keep a pipe open.

    Returns: its exit code; None if it has run for too long.
    """
    line = [sys.executable, "-m", "jaxmpi.launch.read_experiment", str(os.getpid()), *words]
    environ = {"JAX_PLATFORMS": "cpu"} | os.environ  # a GPU's memory is the ranks'
    with said.open("wb") as output:
        child = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
        )
        try:
            return child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            child.kill()
            child.wait()


def reason(code: int | None, said: Path) -> str:
    """Why there is no answer."""
    if code is None:
        return f"has run for {TIMEOUT_S:.0f} s"
    last = said.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
    return f"cannot be run by the launcher: {last[0]:.200}"


def may_differ(train_args: Sequence[str], text: str) -> bool:
    """Return True unless the text surely changes no such fact.

    Args:
        train_args: arguments of the trainer.
        text: of the experiment file.
    """
    words = " ".join([*train_args[1:], text]).lower()
    if any(word in words for word in TELLING):
        return True
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):
        return True
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    of_names = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for node in of_names for alias in node.names}
    return any(name.split(".")[0] not in PLAIN or name.startswith("jaxmpi.experiments") for name in modules)
