"""`jaxmpi COMMAND ...`: a table of commands, each imported when called.

If a command needs JAX, another module parses its options before, since importing JAX takes half a second.
"""

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.runtime import failures, process


class CommandSpec(NamedTuple):
    """A command, by `module:function` below `jaxmpi`."""

    summary: str
    run: str  # function of the command line's words, or of the result of `options`
    options: str = ""  # parses the words without JAX


COMMANDS = {
    "train": CommandSpec("train an experiment with N workers; prints the launcher's line", "launch.command:main"),
    "run": CommandSpec(
        "a script of your own with N ranks; an error on one ends the job, named",
        "launch.script:main",
    ),
    "sweep": CommandSpec(
        "train all combinations of some fields' values with several seeds; a table", "tools.sweep:main"
    ),
    "bench": CommandSpec(
        "time exchanges beside other libraries' and the bound",
        "bench.__main__:run",
        "bench.options:parse",
    ),
    "plan": CommandSpec(
        "predicted step time and best strategy for 2 to 4,096 workers",
        "tools.scaling_plan:main",
        "tools.options:plan",
    ),
    "forecast": CommandSpec(
        "memory of each worker, part by part, before a run is started",
        "trainer.memory:main",
        "trainer.options:forecast",
    ),
    "report": CommandSpec("one HTML page, and pictures, of one run or several", "observe.report:main"),
    "doctor": CommandSpec(
        "MPI, cores, network, devices, a test of the exchange, and what to change",
        "tools.doctor:main",
        "tools.options:doctor",
    ),
    "data": CommandSpec("pack any source into few files; check them; words and tokens of a text", "data.command:main"),
    "export": CommandSpec(
        "a run's model as a program for JAX alone, an Orbax folder or safetensors",
        "trainer.finished:export",
        "trainer.options:export",
    ),
    "evaluate": CommandSpec(
        "a run's model on its validation data",
        "trainer.finished:evaluate",
        "trainer.options:evaluate",
    ),
    "predict": CommandSpec(
        "a run's outputs for every validation example, as a NumPy file",
        "trainer.finished:predict",
        "trainer.options:predict",
    ),
    "models": CommandSpec("table of the models that come with jaxmpi", "models.__main__:run", "tools.options:models"),
    "experiments": CommandSpec(
        "the experiments that come with jaxmpi, by name; a copy of one",
        "tools.experiments:main",
    ),
    "completion": CommandSpec("a script by which bash and zsh complete all this", "tools.completion:main"),
}


def main() -> None:
    """Entry point of the `jaxmpi` command."""
    failures.open_streams()
    process.set_home()
    try:
        try:
            run(sys.argv[1:])
        except UsageError as error:
            if process.my_rank() != 0:  # rank 0 most likely says the same, and its launcher ends the job
                time.sleep(failures.RANK_0_FIRST_S)
            print(f"jaxmpi: error: {error}", file=sys.stderr)
            sys.exit(failures.MISUSED)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as after `| head`
        failures.redirect_to_devnull(sys.stdout)
        sys.exit(1)


def run(argv: list[str]) -> None:
    """Run a command of the table.

    Raises:
        UsageError: there is no such command, or one of its options cannot be.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
        print("\n".join(["usage: jaxmpi COMMAND ... | --version", "", *rows, "", "jaxmpi COMMAND --help tells more"]))
        return
    if argv[0] in ("-V", "--version"):
        from jaxmpi.runtime.provenance import versions  # noqa: PLC0415 - other commands start faster without it

        print("  ".join(f"{package} {version}" for package, version in versions().items()))
        return
    command, words = lookup(COMMANDS, argv[0], "command"), argv[1:]
    failures.leave_on_interrupt()  # while it is imported, which may take a second
    options = import_function(command.options)(words) if command.options else words
    import_function(command.run)(options)


def import_function(path: str) -> Callable[[Any], Any]:
    """The function at `module:function`."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(f"jaxmpi.{module}"), function)


if __name__ == "__main__":
    main()
