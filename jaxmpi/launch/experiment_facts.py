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
from typing import NamedTuple

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures

TIMEOUT_S = 60.0  # for an experiment file to run
# Words in a line or a file by which these facts may change, and those by which code runs that is not in sight.
TELLING = (
    *("rule", "rank_loss", "rank-loss", "run_dir", "run-dir", "resume", "from_start", "from-start"),
    *("**", "eval", "exec", "getattr", "setattr", "import_module", "__import__", "runpy", "experiment_file"),
)
PLAIN = sys.stdlib_module_names | {"jaxmpi", "jax", "numpy", "flax", "optax"}  # these know nothing of a user's


class ExperimentFacts(NamedTuple):
    """Facts of an experiment, with the fields of the command line."""

    outlives_ranks: bool  # by its rule, or by `on_rank_loss`
    run_dir: str
    resume: bool
    from_start: bool


def facts_of(train_args: Sequence[str]) -> ExperimentFacts | None:
    """Facts of the experiment that these arguments of the trainer name.

    None: it has no other facts than a new run of a synchronous rule, or they could not be found out.

    Raises:
        UsageError: the file, or a field, is wrong.
        SystemExit: the same, if the other process has said so.
    """
    file = experiment_file.located(train_args[0]) if train_args else Path()
    if not file.is_file() or not may_differ(train_args, file.read_text("utf-8-sig", errors="replace")):
        return None  # ranks on other hosts may have the file
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        line = [sys.executable, "-m", "jaxmpi.launch.read_experiment", str(answer), *train_args]
        environ = {"JAX_PLATFORMS": "cpu"} | os.environ  # a GPU's memory is the ranks'
        try:
            done = subprocess.run(line, capture_output=True, env=environ, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(
                f"jaxmpi: {file} has run for {TIMEOUT_S:.0f} s: starting without its facts; for an asynchronous rule "
                'give --launcher-args "--with-ft ulfm"',
                file=sys.stderr,
            )
            return None
        if answer.exists():
            facts = json.loads(answer.read_text())
            if "error" in facts:
                raise UsageError(facts["error"])
            return ExperimentFacts(**facts)
    if done.returncode == failures.MISUSED:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise SystemExit(failures.MISUSED)
    return None  # an error of the file's own, which the ranks show


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
