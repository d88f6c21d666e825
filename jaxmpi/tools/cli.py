"""`jaxmpi COMMAND ...`; one row of the table a command."""

import os
import sys
from collections.abc import Callable

from jaxmpi.checkpoint import orbax_export
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data import packing
from jaxmpi.launch import command
from jaxmpi.observe import report
from jaxmpi.runtime import failures
from jaxmpi.runtime.provenance import check_models_here, versions
from jaxmpi.tools import doctor, scaling_forecast


def models(argv: list[str]) -> None:
    """`python -m models` of the project in this folder: jaxmpi itself knows no model."""
    check_models_here("models")
    os.execv(sys.executable, [sys.executable, "-m", "models", *argv])


def bench(argv: list[str]) -> None:
    """`python -m jaxmpi.bench`: other commands need not wait for what it imports."""
    os.execv(sys.executable, [sys.executable, "-m", "jaxmpi.bench", *argv])


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "train": ("train an experiment with N workers; prints the launcher's line", command.main),
    "bench": ("time exchanges beside other libraries' and the bound", bench),
    "plan": ("predicted step time and best strategy for 2 to 4,096 workers", scaling_forecast.main),
    "report": ("one HTML page, and pictures, of one run or several", report.main),
    "doctor": ("MPI, cores, network, devices, a test of the exchange, and what to change", doctor.main),
    "data": ("pack any source into few files; check them", packing.main),
    "export": ("params and model state of a checkpoint as an Orbax folder", orbax_export.main),
    "models": ("table of the models in this folder's models/", models),
}


def main() -> None:
    """Entry point of the `jaxmpi` command."""
    argv = sys.argv[1:]
    failures.open_streams()
    if not argv or argv[0] in ("-h", "--help"):
        rows = [f"  {name:8} {text}" for name, (text, _) in COMMANDS.items()]
        print("\n".join(["usage: jaxmpi COMMAND ... | --version", "", *rows]))
        return
    if argv[0] in ("-V", "--version"):
        print("  ".join(f"{package} {version}" for package, version in versions().items()))
        return
    try:
        lookup(COMMANDS, argv[0], "command")[1](argv[1:])
    except UsageError as error:
        print(f"jaxmpi: error: {error}", file=sys.stderr)
        sys.exit(failures.MISUSED)


if __name__ == "__main__":
    main()
