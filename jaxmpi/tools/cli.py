"""`jaxmpi COMMAND ...`: a table of commands, each imported when called."""

import importlib
import sys

from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.runtime import failures, interrupts

COMMANDS = {  # name: (description, function)
    "train": ("train an experiment with N workers; prints the launcher's line", "launch.start:main"),
    "run": ("a script of your own under mpirun: an error on one rank ends the job, named", "launch.script:main"),
    "bench": ("time exchanges beside other libraries' and the bound", "bench.__main__:main"),
    "plan": ("predicted step time and best strategy for 2 to 4,096 workers", "tools.scaling_plan:main"),
    "forecast": ("memory of each worker, part by part, before a run is started", "trainer.memory_forecast:main"),
    "report": ("one HTML page, and pictures, of one run or several", "observe.report:main"),
    "doctor": ("MPI, cores, network, devices, a test of the exchange, and what to change", "tools.doctor:main"),
    "data": ("pack any source into few files; check them; words of a text", "data.command:main"),
    "export": (
        "a run's model as a program for JAX alone, an Orbax folder or safetensors",
        "trainer.exported_program:main",
    ),
    "evaluate": ("a run's model on its validation data", "trainer.finished_runs:evaluate_main"),
    "predict": ("a run's outputs for every validation example, as a NumPy file", "trainer.finished_runs:predict_main"),
    "models": ("table of the models that come with jaxmpi", "models.__main__:main"),
    "experiments": (
        "the experiments that come with jaxmpi, by name; a copy of one",
        "tools.experiments:main",
    ),
}


def main() -> None:
    """Entry point of the `jaxmpi` command."""
    failures.open_streams()
    try:
        try:
            run(sys.argv[1:])
        except UsageError as error:
            print(f"jaxmpi: error: {error}", file=sys.stderr)
            sys.exit(failures.MISUSED)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as after `| head`
        failures.to_nowhere(sys.stdout)
        sys.exit(1)


def run(argv: list[str]) -> None:
    """Run a command of the table.

    Raises:
        UsageError: there is no such command, or it was asked for what cannot be.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = [f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items()]
        print("\n".join(["usage: jaxmpi COMMAND ... | --version", "", *rows, "", "jaxmpi COMMAND --help tells more"]))
        return
    if argv[0] in ("-V", "--version"):
        from jaxmpi.runtime.provenance import versions  # noqa: PLC0415 - other commands start faster without it

        print("  ".join(f"{package} {version}" for package, version in versions().items()))
        return
    module, _, function = lookup(COMMANDS, argv[0], "command")[1].partition(":")
    interrupts.leave_on_interrupt()  # while it is imported, which may take a second
    getattr(importlib.import_module(f"jaxmpi.{module}"), function)(argv[1:])


if __name__ == "__main__":
    main()
