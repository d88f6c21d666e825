"""Lines of the user's code, for messages and comparisons."""

import functools
from pathlib import Path
from types import FrameType

LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


def module_of(frame: FrameType) -> str:
    """Name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs neither library nor generated code."""
    is_library = module_of(frame).partition(".")[0] in LIBRARIES
    return not (is_library or _is_made_or_installed(frame.f_code.co_filename))


@functools.lru_cache(4096)  # paths take microseconds, in each call outside jit
def _is_made_or_installed(file: str) -> bool:
    is_made = file.startswith("<") and not file.startswith(("<string>", "<stdin>", "<ipython", "<python-input"))
    return is_made or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def line_of(frame: FrameType) -> str:
    """Describe a frame as `train.py:12 in step`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
