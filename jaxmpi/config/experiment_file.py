"""An experiment file and the command line, as one `Experiment`.

An experiment is a Python file, since it can build any model; it runs as code. Flags set all fields but Python objects,
with the file's values as defaults. So the file is loaded before the flags are parsed. Some mistakes are refused before
JAX is imported (`refuse_early`): a missing file, an unknown flag, a value of another type. All ranks parse the same
line and find the same error: rank 0 prints it, and the others only if rank 0 does not. A name that is no file may be
one of the experiments that ship with jaxmpi (docs/decisions/0022).
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from jaxmpi.config import flags
from jaxmpi.config.data import Data, data_dir
from jaxmpi.config.schema import Experiment
from jaxmpi.core import errors
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures, process
from jaxmpi.runtime.progress import terminal_columns
from jaxmpi.runtime.provenance import PACKAGE, project_root


def parse(argv: list[str], tables: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Experiment, Path]:
    """The experiment file named first, with the command line's overrides.

    Args:
        argv: the experiment, and flags.
        tables: those that a flag names a row of, by flag, for --help.
    """
    argv = file_first([hyphens(arg) for arg in argv])
    given = argv[0] if argv else ""
    path = locate(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    if path and path != Path(given):
        say_once(f"no file {given!r} here: this is the experiment of that name that comes with jaxmpi, {path}")
    base = choose(load(path), argv) if path else Experiment()
    if path and any(arg.startswith(("--local-batch", "--effective-batch")) for arg in argv):
        base = dataclasses.replace(base, local_batch=0, effective_batch=0)  # the flag replaces either
    names = {arg.split("=")[0] for arg in argv}
    is_empty = "--data.mean-image=" in argv or ("--data.mean-image", "") in itertools.pairwise(argv)
    if path and "--data.mean-image" in names and not is_empty:
        base = dataclasses.replace(base, data=adapt_to_mean_image(base.data, names))
    elif path and "--data.mean" in names:
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, mean_image=""))
    for name in flags.unknown_flags(argv, base):
        raise unknown_field_error(name, flags.flags(base))
    description = f"Train {path or 'an experiment'}. Every field can be given here; defaults are the experiment's."
    experiment = say_on_first_rank(lambda: flags.parse_flags(base, argv, tables or {}, PROG, description))
    if path is None:
        raise UsageError(NO_FILE)
    return experiment, path


def adapt_to_mean_image(data: Data, names: set[str]) -> Data:
    """The experiment's data without all that `--data.mean-image` replaces.

    These are its mean of each channel, and crops that are scaled. The flag replaces scaled crops because a mean has its
    pixels in one place. Crops then have one size, as in Theano-MPI (Ma et al. 2016, algorithm 1). The data's `std`
    stays: initialisations go by it.
    """
    area = data.crop_area
    if area and "--data.crop-area" not in names:
        say_once(f"--data.mean-image: training takes crops of {data.crop} px, not scaled ones of area {area}")
        area = ()
    return dataclasses.replace(data, mean=(), crop_area=area)


def refuse_early(argv: Sequence[str], *, file_is_here: bool = True) -> None:
    """Refuse mistakes that show before the experiment's file is loaded.

    Args:
        argv: arguments of the trainer.
        file_is_here: its ranks, which read the file, are on this host.
    """
    argv = refuse_unknown(argv)
    if not {"-h", "--help"}.isdisjoint(argv):
        return
    name, *fields = file_first(argv) or [""]
    if not (bool(name) and not name.startswith("-")):
        raise errors.UsageError(NO_FILE)
    if file_is_here:
        check_file(locate(name))
    if not any(field.startswith("rule.") for field in flags.flag_names(fields)):  # a user's may be of other types
        say_on_first_rank(lambda: flags.parse_values(Experiment(), fields, {}, PROG, ""))


def refuse_unknown(argv: Sequence[str]) -> list[str]:
    """The arguments with hyphens in their flags, if all are an experiment's.

    A rule of the user's own may have settings of its own, so `--rule.field` waits for the file.
    """
    known, argv = Experiment(), [hyphens(arg) for arg in argv]
    for name in flags.unknown_flags(argv, known):
        if not name.startswith("rule."):
            raise unknown_field_error(name, flags.flags(known))
    return argv


def unknown_field_error(name: str, known: Mapping[str, Any]) -> UsageError:
    """The error of an unknown flag: the nearest, and the part's fields."""
    part = name.partition(".")[0]
    beside = ", ".join(sorted(field for field in known if field.startswith(f"{part}.")))
    listed = f"there are: {beside}; " if beside else ""
    return UsageError(f"unknown field --{name}; {errors.hint(name, known)}{listed}--help lists all")


def say_once(text: str) -> None:
    """A line on standard error, of one rank."""
    if process.my_rank() == 0:
        sys.stderr.write(f"jaxmpi: {text}\n")


def file_first(argv: Sequence[str]) -> list[str]:
    """The arguments with the experiment moved in front of the flags."""
    pairs = enumerate(zip(argv, ("", *argv), strict=False))
    at = next((i for i, (arg, before) in pairs if is_experiment(arg, before)), 0)
    return [*argv[at : at + 1], *argv[:at], *argv[at + 1 :]]


def is_experiment(arg: str, before: str) -> bool:
    """Return True for a Python file or a shipped experiment's name.

    Args:
        before: the argument to its left; empty if there is none. If it is a flag that takes a value, `arg` is no name.
    """
    return (arg.endswith(".py") and not arg.startswith("-")) or (
        arg in find_shipped() and not flags.takes_value(before)
    )


PROGRAMS = ("collectives/", "functions/")  # begin the names of files that run without the trainer


@functools.cache
def shipped_experiments() -> dict[str, Path]:
    """Experiment files shipped with jaxmpi, by names such as `papers/alexnet`."""
    folder = (PACKAGE / "experiments").resolve()  # in a clone a link
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.py"))}


def find_shipped() -> dict[str, Path]:
    """Those of them that can be trained."""
    return {name: path for name, path in shipped_experiments().items() if not name.startswith(PROGRAMS)}


def locate(name: str) -> Path:
    """The file at this path, else the shipped experiment of this name.

    `experiments/digits.py` is such a name as well as `digits`, so that a line of the docs runs without a clone.
    """
    path = Path(name)
    return path if path.is_file() else find_shipped().get(name.removeprefix("experiments/").removesuffix(".py"), path)


NO_FILE = "name an experiment file first: python -m jaxmpi.train experiments/digits.py"
PROG = "python -m jaxmpi.train EXPERIMENT.py"
T = TypeVar("T")


def say_on_first_rank(parse: Callable[[], T]) -> T:
    """Return what `parse` does.

    Rank 0 prints what it says of a mistake; another rank prints it only if rank 0 does not.
    """
    said, is_first = io.StringIO(), process.my_rank() == 0
    with contextlib.ExitStack() as stack:
        # The parser colours what it says if stdout is a terminal, which under Open MPI it always is.
        if not (is_first and terminal_columns(sys.stdout) and sys.stderr.isatty() and not os.environ.get("NO_COLOR")):
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
        try:
            return parse()
        except SystemExit as end:
            stack.close()
            if is_first:
                print_help(said.getvalue(), sys.stderr if end.code else sys.stdout)
            if not isinstance(end.code, int) or end.code == 0 or process.launched_workers() == 1:
                raise
            if is_first:
                failures.end_job(end.code)  # now: to take Python down takes a second, and others would say it too
            raise UsageError(said.getvalue()) from end


def print_help(text: str, stream: TextIO) -> None:
    """Print a text to a stream whose reader may end early (`head`)."""
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        failures.redirect_to_devnull(stream)


def hyphens(arg: str) -> str:
    """Spell a flag with hyphens, `--local-batch=8` for `--local_batch=8`; keep its value."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def check_file(path: Path) -> None:
    """Refuse what is no Python file."""
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder; in it: {', '.join(sorted(p.name for p in path.glob('*.py')))}")
    if not path.is_file():
        here = {p.name: p for p in path.parent.glob("*.py")} if path.parent.is_dir() else {}
        nearest = [f"in {path.parent}: {errors.nearest(path.name, here)}"] * bool(here)
        nearest.append(f"with jaxmpi come: {errors.nearest(str(path).removesuffix('.py'), find_shipped())}")
        raise UsageError(f"no experiment file {str(path)!r}; {'; '.join(nearest)}")
    if path.suffix != ".py":
        raise errors.UsageError(f"{str(path)!r}: expected a Python file, such as experiments/digits.py")


def load(path: Path) -> Experiment:
    """The module-level `experiment` of a file. The file is code and runs.

    Its project root comes first on sys.path. Its own folder comes last, so that it hides no module of that name.
    """
    check_file(path)
    root = str(project_root(path))
    if root not in sys.path:
        sys.path.insert(0, root)
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look classes up by module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(f"{path}: {error}{nearest_import(error)}") from error
    except SystemExit as end:
        raise UsageError(f"{path}: ends the program, sys.exit({end.code!r}); expected a module to import") from end
    except Exception as error:
        if process.my_rank() == 0:
            raise
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error  # rank 0 shows where
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UsageError(f"{path}: expected a module-level `experiment = Experiment(...)`")
    return experiment


def nearest_import(error: ImportError) -> str:
    """Suggest the nearest module or name; empty if its package is missing."""
    from_module = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    wanted, parent = from_module.groups() if from_module else (error.name or "").rpartition(".")[::-2]
    module = sys.modules.get(parent)
    if module is None:
        return ""
    files = [file.stem for folder in getattr(module, "__path__", []) for file in Path(folder).glob("[!_]*.py")]
    own = [k for k, value in vars(module).items() if getattr(value, "__module__", "") == parent and k[0] != "_"]
    return f"; {errors.nearest(wanted, dict.fromkeys([*files, *own]))}"


def choose(experiment: Experiment, argv: list[str]) -> Experiment:
    """The experiment, or its fallback if no folder or source is given."""
    given = any(arg.split("=")[0] in ("--data.dir", "--data.source") for arg in argv)
    if experiment.fallback is None or given or data_dir(experiment.data):
        return experiment
    if process.my_rank() == 0:
        print(
            f"no data folder (--data.dir or JAXMPI_DATA): training {experiment.fallback.model.name} on the embedded "
            f"{experiment.fallback.data.source}, with a recipe of its own\n",
            end="",  # one write, since a thread prints phases of the start
            flush=True,
        )
    return experiment.fallback
