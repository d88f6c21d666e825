"""Settings from environment variables, checked."""

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
        sys.exit(f"jaxmpi: error: {variable}: got {text!r}; expected seconds > 0")
    return seconds


def installing(package: str) -> str:
    """The command that installs a package into this environment, which has no pip of its own if uv made it."""
    return f"{'pip' if importlib.util.find_spec('pip') else 'uv pip'} install '{package}'"
