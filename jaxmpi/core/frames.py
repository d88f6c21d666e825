"""Lines of the user's code, for messages and comparisons."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


def module_of(frame: FrameType) -> str:
    """Name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs neither library nor generated code."""
    name = frame.f_code.co_filename
    return not _is_made_or_installed(name)[1] and is_callers(frame)


def is_callers(frame: FrameType) -> bool:
    """Return True for the user's code, or a package that calls us."""
    made = _is_made_or_installed(frame.f_code.co_filename)[0]
    return not (made or module_of(frame).partition(".")[0] in LIBRARIES)


@functools.lru_cache(4096)  # paths take microseconds, in each call outside jit
def _is_made_or_installed(file: str) -> tuple[bool, bool]:
    is_made = file.startswith("<") and not file.startswith(("<string>", "<stdin>", "<ipython", "<python-input"))
    return is_made, bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def line_of(frame: FrameType) -> str:
    """Describe a frame as `train.py:12 in step`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def calling_frames() -> Iterator[FrameType]:
    """Frames of users, and of packages that call us, from here outwards."""
    frame: Any = sys._getframe(1)
    while frame:
        if is_callers(frame):
            yield frame
        frame = frame.f_back
