"""Lines of the user's code, for messages."""

from pathlib import Path
from types import FrameType

LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


def module_of(frame: FrameType) -> str:
    """Name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs neither library nor generated code."""
    name = frame.f_code.co_filename
    is_made = name.startswith("<") and not name.startswith(("<string>", "<stdin>", "<ipython"))
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(name).parts))
    return not (is_made or is_installed or module_of(frame).partition(".")[0] in LIBRARIES)


def line_of(frame: FrameType) -> str:
    """Describe a frame as `train.py:12 in step`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
