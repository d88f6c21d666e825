"""`jaxmpi experiments`: the experiments that ship with jaxmpi, also without a clone."""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.config.experiment_file import PROGRAMS, shipped_experiments
from jaxmpi.core.errors import check, lookup
from jaxmpi.core.files import made_whole


def parser() -> argparse.ArgumentParser:
    """Options of `jaxmpi experiments`."""
    options = argparse.ArgumentParser(
        "jaxmpi experiments",
        description="List the experiments that come with jaxmpi, which `jaxmpi train NAME` runs.",
        epilog="example: jaxmpi experiments --copy digits",
    )
    options.add_argument("--copy", metavar="NAME", help="copy one to experiments/NAME.py of this folder, to change it")
    return options


def main(argv: Sequence[str]) -> None:
    """Print the list, or copy one."""
    name = parser().parse_args(argv).copy
    print(f"copied to {copied(name)}" if name else listed(shipped_experiments()))


def listed(files: dict[str, Path]) -> str:
    """Names, and what each file says of itself; none is run."""
    width = max(map(len, files))
    lines = {name: f"{name:{width}}  {first_line(path)}" for name, path in files.items()}
    programs = [name for name in files if name.startswith(PROGRAMS)]
    trained = [lines[name] for name in files if name not in programs]
    run = f"python -m jaxmpi.experiments.{programs[0].replace('/', '.')}"
    return "\n".join([*trained, "", f"programs without the trainer, run as {run}:", *map(lines.__getitem__, programs)])


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def copied(name: str) -> Path:
    """Copy a shipped file to the same place under ./experiments/.

    Raises:
        UsageError: no such file, or there is one already.
    """
    name = name.removeprefix("experiments/").removesuffix(".py")
    source, path = lookup(shipped_experiments(), name, "experiment"), Path("experiments", f"{name}.py")
    check(not path.exists(), f"{path} is there already; rename it, or train it: jaxmpi train {path}")
    with made_whole(path) as aside:
        aside.write_text(source.read_text())
    return path
