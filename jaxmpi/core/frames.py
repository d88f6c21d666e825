"""Lines of the user's code, for messages and comparisons."""

import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PLACE_BYTES = 8
LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


def module_of(frame: FrameType) -> str:
    """Name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs neither library nor generated code."""
    return _is_users(frame.f_code, module_of(frame))


@functools.lru_cache(4096)  # paths take microseconds, in each call outside jit
def _is_users(code: CodeType, module: str) -> bool:
    name = code.co_filename
    is_made = name.startswith("<") and not name.startswith(("<string>", "<stdin>", "<ipython"))
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(name).parts))
    return not (is_made or is_installed or module.partition(".")[0] in LIBRARIES)


def line_of(frame: FrameType) -> str:
    """Describe a frame as `train.py:12 in step`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def calling_frames() -> Iterator[FrameType]:
    """The user's frames from this call outwards."""
    frame: Any = sys._getframe(1)
    while frame:
        if is_users(frame):
            yield frame
        frame = frame.f_back


def calling_place() -> bytes:
    """Digest of the user's instructions that have led to this call."""
    steps = [_named(frame.f_code) + frame.f_lasti.to_bytes(4) for frame in calling_frames()]
    return hashlib.blake2b(b"".join(steps), digest_size=PLACE_BYTES).digest()


@functools.lru_cache(4096)
def _named(code: CodeType) -> bytes:
    """A function's file, without its folder, name and first line."""
    return f"{Path(code.co_filename).name}:{code.co_name}:{code.co_firstlineno}\0".encode()
