"""An experiment file and the command line, as one `Experiment`.

An experiment is a Python file, since it can build any model; it runs as code. Flags set all fields but Python objects,
with the file's values as defaults. So the file is loaded before the flags are parsed. Some mistakes are refused before
JAX is imported (`refuse_early`): a missing file, an unknown flag, a value of another type. A name that is no file may
be one of the experiments that ship with jaxmpi (docs/decisions/0022).
"""

import functools
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmpi.config import flags
from jaxmpi.config.data import data_dir
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError, nearest
from jaxmpi.runtime import failures, process
from jaxmpi.runtime.provenance import PACKAGE, project_root

NO_FILE = "name an experiment file first: python -m jaxmpi.train experiments/digits.py"
HELP = {"-h", "--help"}
PROGRAMS = ("collectives/", "functions/")  # begin the names of files that run without the trainer


def parse(argv: Sequence[str], tables: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Experiment, Path]:
    """The experiment file named among the arguments, with the command line's overrides.

    Args:
        argv: the experiment, and flags.
        tables: those that a flag names a row of, by flag, for --help.
    """
    given, words = _split(argv)
    path, base = locate(given), Experiment()
    if given:
        if path != Path(given):
            _say(f"no file {given!r} here: this is the experiment of that name that comes with jaxmpi, {path}")
        base = _fall_back(load(path), words)
    if HELP & {*words}:
        about = f"Train {given or 'an experiment'}. Every field can be given here; values are the experiment's."
        _show_help(f"usage: python -m jaxmpi.train EXPERIMENT.py [--field value ...]\n\n{about}", base, tables or {})
    values = flags.parse_flags(words, flags.flags(base))
    if not given:
        raise UsageError(NO_FILE)
    if {"local-batch", "effective-batch"} & {*values}:  # either replaces the file's
        values = {"local-batch": 0, "effective-batch": 0} | values
    # A mean image replaces the mean of each channel, and crops that are scaled, since its pixels are in one place:
    # crops then have one size, as in Theano-MPI (Ma et al. 2016, algorithm 1). `std` stays: initialisations go by it.
    if values.get("data.mean-image"):
        if (area := base.data.crop_area) and "data.crop-area" not in values:
            _say(f"--data.mean-image: training takes crops of {base.data.crop} px, not scaled ones of area {area}")
        values = {"data.mean": (), "data.crop-area": ()} | values
    elif "data.mean" in values:
        values = {"data.mean-image": ""} | values
    return flags.replace_fields(base, values), path


def refuse_early(argv: Sequence[str], *, file_is_here: bool = True) -> None:
    """Refuse mistakes that show before the experiment's file is loaded.

    Args:
        argv: arguments of the trainer.
        file_is_here: its ranks, which read the file, are on this host.
    """
    given, words = _split(argv)
    if HELP & {*words}:
        return
    if not given:
        refuse_unknown(words)
        raise UsageError(NO_FILE)
    if file_is_here:
        check_file(locate(given))
    flags.parse_flags(_without_rule(words), flags.flags(Experiment()))


def refuse_unknown(argv: Sequence[str]) -> None:
    """Refuse flags that no experiment has; their values wait for the file."""
    known = flags.flags(Experiment())
    for name, _ in flags.words_by_flag(_without_rule(argv)):
        flags.find_flag(name, known)


def _without_rule(argv: Sequence[str]) -> list[str]:
    """The arguments without `--rule.field`: a rule of the user's own may have other settings, known by its file."""
    pairs = flags.words_by_flag(argv)
    return [word for name, words in pairs if not name.startswith("rule.") for word in (f"--{name}", *words)]


def _split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The experiment, empty if there is none, and the other arguments."""
    argv = file_first(argv)
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)


def _say(text: str) -> None:
    if process.my_rank() == 0:
        print(f"jaxmpi: {text}", file=sys.stderr, flush=True)


def _show_help(usage: str, base: Experiment, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Print all flags on the first rank, and end the process with 0."""
    if process.my_rank() == 0:
        try:
            print(
                usage, flags.help_text(base, tables, shutil.get_terminal_size((100, 0)).columns), sep="\n", flush=True
            )
        except BrokenPipeError:  # its reader has ended early, as `head`
            failures.redirect_to_devnull(sys.stdout)
    sys.exit(0)


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
    is_file = arg.endswith(".py") and not arg.startswith("-")
    return is_file or (arg in find_shipped() and not flags.takes_value(before))


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


def check_file(path: Path) -> None:
    """Refuse what is no Python file."""
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder; in it: {', '.join(sorted(p.name for p in path.glob('*.py')))}")
    if not path.is_file():
        here = {p.name: p for p in path.parent.glob("*.py")} if path.parent.is_dir() else {}
        near = [f"in {path.parent}: {nearest(path.name, here)}"] * bool(here)
        near.append(f"with jaxmpi come: {nearest(str(path).removesuffix('.py'), find_shipped())}")
        raise UsageError(f"no experiment file {str(path)!r}; {'; '.join(near)}")
    if path.suffix != ".py":
        raise UsageError(f"{str(path)!r}: expected a Python file, such as experiments/digits.py")


def load(path: Path) -> Experiment:
    """The module-level `experiment` of a file. The file is code and runs.

    Its project root comes first on sys.path. Its own folder comes last, so that it hides no module of that name.
    """
    check_file(path)
    root, beside = str(project_root(path)), str(path.resolve().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    if beside not in sys.path:
        sys.path.append(beside)
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look classes up by module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(f"{path}: {error}") from error
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


def _fall_back(experiment: Experiment, argv: Sequence[str]) -> Experiment:
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
