"""An experiment file and the command line, as one `Experiment`.

An experiment is a Python file, since it can build any model; it runs as code. Flags set all fields but Python objects,
with the file's values as defaults. So the file is loaded before the flags are parsed. Some mistakes are refused before
JAX is imported (`refuse_early`): a missing file, an unknown flag, a value of another type. A name that is no file may
be one of the experiments that ship with jaxmpi (docs/decisions.md, 22).
"""

import dataclasses
import functools
import hmac
import importlib.util
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmpi.config import flags
from jaxmpi.config.data import data_dir
from jaxmpi.config.schema import PARTS, Experiment
from jaxmpi.core.errors import UsageError, hint, nearest
from jaxmpi.core.json_tree import read_json
from jaxmpi.runtime import failures, process, provenance
from jaxmpi.runtime.provenance import PACKAGE, project_root

NO_FILE = "name an experiment first: a file, as experiments/digits.py, or a name that `jaxmpi experiments` lists"
HELP = {"-h", "--help"}
FROM_PYTHON = "from_python.py"  # experiment file of a run that jaxmpi.Trainer started in processes of its own
MOST_CONFIG_BYTES = 1 << 24  # of a run's config.json that is plausible
OF_ONE_RUN = {"run-dir", "resume", "from-start"}  # flags that `--from` does not take over
OF_OBJECTS = ("array", "grain", "mixture")  # sources whose examples are Python objects
PROGRAMS = ("collectives/", "functions/")  # begin the names of files that run without the trainer


def parse(argv: Sequence[str], tables: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Experiment, Path]:
    """The experiment file named among the arguments, with the command line's overrides.

    Args:
        argv: the experiment, and flags.
        tables: those that a flag names a row of, by flag, for --help.
    """
    name, words = _split(argv)
    path, base = locate(name), Experiment()
    if name:
        if path != Path(name):
            _say(f"no file {name!r} here: this is the experiment of that name that comes with jaxmpi, {path}")
        base = _fall_back(load(path), words)
    if HELP & {*words}:
        intro = f"Train {name or 'an experiment'}. Every field can be given here; values are the experiment's."
        _show_help(f"usage: python -m jaxmpi.train EXPERIMENT.py [--field value ...]\n\n{intro}", base, tables or {})
    values = flags.parse_flags(words, flags.flags(base))
    if not name:
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
    if "data.validation-split" in values:
        values = {"data.holdout": 0.0} | values
    if base.data.source in OF_OBJECTS and values.get("data.source", base.data.source) not in OF_OBJECTS:
        values = {"data.train": None, "data.validation": None} | values  # objects are the file's source's
    return flags.replace_fields(base, values), path


def refuse_early(argv: Sequence[str], *, file_is_here: bool = True) -> None:
    """Refuse mistakes that show before the experiment's file is loaded.

    Args:
        argv: arguments of the trainer.
        file_is_here: its ranks, which read the file, are on this host.
    """
    name, words = _split(argv)
    if HELP & {*words}:
        return
    if not name:
        refuse_unknown(words)
        raise UsageError(NO_FILE)
    if file_is_here:
        check_file(locate(name))
    flags.parse_flags(_without_rule(words), flags.flags(Experiment()))


def refuse_unknown(argv: Sequence[str]) -> None:
    """Refuse flags that no experiment has; their values wait for the file."""
    known_flags = flags.flags(Experiment())
    for name, _ in flags.words_by_flag(_without_rule(argv)):
        flags.find_flag(name, known_flags)


# ---------------------------------------------------------------- from a run


def take_run(argv: Sequence[str]) -> list[str]:
    """The arguments with `--from RUN` replaced by the experiment file and the flags with which that run was started.

    A flag that is given besides takes the place of the run's. With `--resume` and no `--run-dir` RUN itself goes on.
    """
    before, run_dir, after = split_from(argv)
    if not run_dir:
        return before
    given_flags = {flags.hyphens(arg)[2:].partition("=")[0].removeprefix("no-") for arg in [*before, *after]}
    if {"local-batch", "effective-batch"} & given_flags:  # either replaces the other
        given_flags |= {"local-batch", "effective-batch"}
    file, *words = command_of(Path(run_dir))
    inherited_args = [
        word
        for name, values in flags.words_by_flag(words)
        if name.removeprefix("no-") not in given_flags | OF_ONE_RUN
        for word in (f"--{name}", *values)
    ]
    if "resume" in given_flags and "run-dir" not in given_flags:
        inherited_args += ["--run-dir", run_dir]
    return [*before, file, *inherited_args, *after]


def split_from(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The arguments before `--from RUN`, RUN, empty if it is not among them, and those behind."""
    at = next((i for i, arg in enumerate(argv) if arg.partition("=")[0] == "--from"), None)
    if at is None:
        return [*argv], "", []
    run_dir, after = argv[at].partition("=")[2], [*argv[at + 1 :]]
    if not run_dir and after:
        run_dir, *after = after
    if not run_dir or run_dir.startswith("-"):
        raise UsageError("--from: got no run directory; expected one, as in --from runs/first")
    return [*argv[:at]], run_dir, after


def command_of(run_dir: Path) -> list[str]:
    """The experiment file of a run, and the flags with which it was started.

    An experiment file is code. One that config.json names may be executed only if it comes with jaxmpi, or if the
    signature shows that this user has begun the run with it.
    """
    config = read_config(run_dir)
    command = file_first(config["command"][1:])
    if not (command and is_experiment(command[0], "")) or Path(command[0]).name == FROM_PYTHON:
        raise UsageError(
            f"{run_dir} was started from Python: name a file that has its `experiment = Experiment(...)`, --experiment "
            "FILE.py, or use jaxmpi.Trainer(experiment) there"
        )
    path = locate(command[0])
    if path.resolve() not in map(Path.resolve, find_shipped().values()):
        mine = provenance.sign([config["command"], config.get("experiment_path")])
        if not (mine and hmac.compare_digest(mine.encode(), str(config.get("signature")).encode())):
            raise UsageError(
                f"{run_dir}/config.json: names {str(path)!r}, which is code, and nothing shows that you have begun "
                "this run here; if you trust the file, name it: --experiment FILE.py, or jaxmpi train FILE.py"
            )
        path = Path(config["experiment_path"])
    if not path.is_file():
        raise UsageError(f"{run_dir} was started with {shlex.join(command)}; {path} is gone: name the file")
    return [str(path), *command[1:]]


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's config.json, which has its command and its experiment."""
    file = run_dir / "config.json"
    if not file.is_file():
        raise UsageError(f"{file}: no such file; name a run directory")
    config = read_json(file, MOST_CONFIG_BYTES, "a run's configuration")
    words = config.get("command") if isinstance(config, dict) and "experiment" in config else None
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise UsageError(f"{file}: damaged: expected a run's command and experiment")
    return config


# ---------------------------------------------------------------- parts of a command line


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
        siblings = {p.name: p for p in path.parent.glob("*.py")} if path.parent.is_dir() else {}
        suggestions = [f"in {path.parent}: {nearest(path.name, siblings)}"] * bool(siblings)
        suggestions.append(f"with jaxmpi come: {nearest(str(path).removesuffix('.py'), find_shipped())}")
        raise UsageError(f"no experiment file {str(path)!r}; {'; '.join(suggestions)}")
    if path.suffix != ".py":
        raise UsageError(f"{str(path)!r}: expected a Python file, such as experiments/digits.py")


def load(path: Path) -> Experiment:
    """The module-level `experiment` of a file. The file is code and runs.

    Its project root comes first on sys.path. Its own folder comes last, so that it hides no module of that name.
    """
    check_file(path)
    root, folder = str(project_root(path)), str(path.resolve().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    if folder not in sys.path:
        sys.path.append(folder)
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
        _refuse_unknown_keyword(path, error)
        if process.my_rank() == 0:
            raise
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error  # rank 0 shows where
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UsageError(f"{path}: expected a module-level `experiment = Experiment(...)`")
    return experiment


def _refuse_unknown_keyword(path: Path, error: Exception) -> None:
    """Say in a sentence that the experiment, or a part of it, has no such field."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    parts = {"": Experiment, **{f"{name}.": part for name, (part, _) in PARTS.items()}}
    for prefix, part in parts.items():
        if found and isinstance(error, TypeError) and found[1] == part.__name__:
            names = sorted(field.name for field in dataclasses.fields(part))
            known = {prefix + name.replace("_", "-"): None for name in names} | flags.flags(Experiment())
            nearest_name = hint(prefix + found[2].replace("_", "-"), known).replace("-", "_")
            raise UsageError(
                f"{path}:{traceback.extract_tb(error.__traceback__)[-1].lineno}: {part.__name__} has no field "
                f"{found[2]!r}; {nearest_name}there are: {', '.join(names)}"
            ) from error


def _fall_back(experiment: Experiment, argv: Sequence[str]) -> Experiment:
    """The experiment, or its fallback if no folder or source is given."""
    has_data_flag = any(arg.split("=")[0] in ("--data.dir", "--data.source") for arg in argv)
    if experiment.fallback is None or has_data_flag or data_dir(experiment.data):
        return experiment
    if process.my_rank() == 0:
        print(
            f"no data folder (--data.dir or JAXMPI_DATA): training {experiment.fallback.model.name} on the embedded "
            f"{experiment.fallback.data.source}, with a recipe of its own\n",
            end="",  # one write, since a thread prints phases of the start
            flush=True,
        )
    return experiment.fallback
