"""`jaxmpi experiments`: the experiments that ship with jaxmpi, also without a clone."""

import ast
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.config.experiment_file import PROGRAMS, shipped_experiments
from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.files import made_whole


def main(argv: Sequence[str]) -> None:
    """Print the list, or copy one."""
    parser = Parser(
        "jaxmpi experiments",
        description="List the experiments that come with jaxmpi, which `jaxmpi train NAME` runs.",
        epilog="example: jaxmpi experiments --copy digits",
    )
    parser.add_argument("--copy", metavar="NAME", help="copy one to experiments/NAME.py of this folder, to change it")
    name = parser.parse_args(argv).copy
    print(f"copied to {copy_experiment(name)}" if name else format_list(shipped_experiments()))


def format_list(files: dict[str, Path]) -> str:
    """Names, and the first line of each file's docstring; none is run."""
    width = max(map(len, files))
    texts = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in files.items()}
    lines = {name: f"{name:{width}}  {text.partition(chr(10))[0]}" for name, text in texts.items()}
    programs = [name for name in files if name.startswith(PROGRAMS)]
    experiments = [lines[name] for name in files if name not in programs]
    run = f"python -m jaxmpi.experiments.{programs[0].replace('/', '.')}"
    return "\n".join([*experiments, "", f"programs without the trainer, run as {run}:", *(lines[n] for n in programs)])


def copy_experiment(name: str) -> Path:
    """Copy a shipped file to the same place under ./experiments/.

    Raises:
        UsageError: no such file, or there is one already.
    """
    name = name.removeprefix("experiments/").removesuffix(".py")
    source, path = lookup(shipped_experiments(), name, "experiment"), Path("experiments", f"{name}.py")
    if path.exists():
        raise UsageError(f"{path} is there already; rename it, or train it: jaxmpi train {path}")
    with made_whole(path) as partial:
        partial.write_text(source.read_text())
    return path
