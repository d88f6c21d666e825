"""Facts of an experiment by which its job is launched and restarted.

A job whose rule is asynchronous goes on without a rank that dies, but mpirun must be told so when it starts. Only
running the experiment file shows its rule, and the launcher, which lives as long as the job, should hold neither the
file's memory nor a device. So another process runs the file (`python -m` of this module) and answers in a file. That
takes a second, and is left out for a text that surely changes no such fact, as most do. Tried and dropped: patterns
that read the rule in the text, which some forms escaped.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.config import experiment_file
from jaxmpi.config.flags import words_by_flag
from jaxmpi.config.schema import local_batch
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.runtime import process

TIMEOUT_S = 60.0  # for an experiment file to run
# Words in a line or a file by which these facts may change, and those by which code runs that is not in sight.
TELLING = (
    *("rule", "shrink", "rank_loss", "rank-loss", "run_dir", "run-dir", "resume", "from_start", "from-start"),
    *("**", "eval", "exec", "getattr", "setattr", "import_module", "__import__", "runpy", "pickle", "experiment_file"),
)
PLAIN = sys.stdlib_module_names | {"jaxmpi", "jax", "numpy", "flax", "optax"}  # these know nothing of a user's


class ExperimentFacts(NamedTuple):
    """Facts of an experiment, with the fields of the command line; a dry run has a directory of its own."""

    outlives_ranks: bool = False  # by its rule, or by `on_rank_loss`
    run_dir: str = ""
    resume: bool = False
    from_start: bool = False


def facts_of(train_args: Sequence[str], *, file_is_here: bool = True, processes: int = 0) -> ExperimentFacts:
    """Facts of the experiment that these arguments of the trainer name.

    Args:
        train_args: arguments of the trainer.
        file_is_here: ranks run on this host, so that a mistake here is one there.
        processes: that will train; 0 if their number is not known.

    Returns: those of the command line alone if the file cannot be run; a line then says why.

    Raises:
        UsageError: the file, or a field, is wrong, or the workers do not divide a batch.
    """
    file = experiment_file.locate(train_args[0])
    try:
        if not may_differ(train_args, file.read_text("utf-8-sig", errors="replace")):
            return ExperimentFacts()
    except OSError:  # ranks on other hosts may read it
        return facts_of_flags(train_args[1:])
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder) / "answer", Path(folder) / "output"
        code = run_in_another_process([str(processes), str(answer), *train_args], output)
        facts: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        text = output.read_text(errors="replace")
    if facts and "error" not in facts:
        return ExperimentFacts(**facts)
    if facts and file_is_here:
        raise UsageError(facts["error"])
    last = text.strip().splitlines()[-1:] or [f"exit code {code}"]
    why = facts.get("error", f"has run for {TIMEOUT_S:.0f} s" if code is None else f"{last[0]:.200}")
    print(
        f"jaxmpi: {file}: cannot be run by the launcher: {why}; starting a job that a dead rank ends; run_dir, resume "
        "and from_start count on the command line alone",
        file=sys.stderr,
    )
    return facts_of_flags(train_args[1:])


def facts_of_flags(argv: Sequence[str]) -> ExperimentFacts:
    """What flags alone say; the last one of a name counts."""
    facts = ExperimentFacts()
    for flag, words in words_by_flag(argv):
        field = flag.removeprefix("no-").replace("-", "_")
        if field == "run_dir":
            facts = facts._replace(run_dir=words[0])
        elif field in ("resume", "from_start"):
            facts = facts._replace(**{field: not flag.startswith("no-")})
        elif flag == "dry-run":
            return ExperimentFacts()
    return facts


def run_in_another_process(words: Sequence[str], output: Path) -> int | None:
    """Run `main` in a process that ends with this one.

    Its output goes to a file, since a process that it starts would keep a pipe open.

    Returns: its exit code; None if it has run for too long.
    """
    line = [sys.executable, "-m", "jaxmpi.launch.experiment_facts", str(os.getpid()), *words]
    environ = {"JAX_PLATFORMS": "cpu"} | os.environ  # a GPU's memory is the ranks'
    with output.open("wb") as out:
        child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ)
        try:
            return child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            child.kill()
            child.wait()


def may_differ(train_args: Sequence[str], text: str) -> bool:
    """Return True unless the text of the experiment file surely changes no such fact."""
    words = " ".join([*train_args[1:], text]).lower()
    modules = [f"{m[1]}.{m[2]}" for m in re.finditer(r"^\s*from\s+(\S+)\s+import\s+(\w+)", text, re.M)]
    modules += [m.split()[0] for line in re.findall(r"^\s*import\s+(\w.*)", text, re.M) for m in line.split(",")]
    is_foreign = any(m.split(".")[0] not in PLAIN or m.startswith("jaxmpi.experiments") for m in modules)
    return is_foreign or any(word in words for word in TELLING)


def main(parent: str, processes: str, answer: str, *train_args: str) -> None:
    """Run the experiment file, and write its facts, or the user's error, as JSON."""
    from jaxmpi.rules.registry import RULES  # noqa: PLC0415 - the launcher itself imports no JAX

    process.end_with_parent(int(parent))
    try:
        experiment, _ = experiment_file.parse([*train_args])
        rule = lookup(RULES, experiment.rule.name, "rule")
        workers = int(processes) * experiment.devices - experiment.rule.servers * rule.is_asynchronous
        if workers > 0 and not experiment.resume:  # a run that goes on may have other workers, with uneven shares
            local_batch(experiment, workers)
        facts = {
            "outlives_ranks": rule.is_asynchronous or experiment.on_rank_loss == "shrink",
            "run_dir": "" if experiment.dry_run else experiment.run_dir,
            "resume": experiment.resume and not experiment.dry_run,
            "from_start": experiment.from_start,
        }
    except UsageError as error:
        facts = {"error": str(error)}
    Path(answer).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
