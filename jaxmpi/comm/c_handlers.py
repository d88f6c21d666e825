"""Handlers in C that call this process's MPI library from programs.

A source of the package is compiled at its first use, for the MPI and the XLA that the process has. It gets the
addresses of MPI's functions and MPI's handles from Python. So it needs neither `mpicc` nor a header of MPI's, and calls
the functions that mpi4jax calls, also if a tool has put its own in front of them.
"""

import ctypes
import functools
import importlib
import os
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxmpi.runtime import c_library, host_callbacks

Failed = ctypes.CFUNCTYPE(None, c_int32, c_int32)


def unavailable_reason() -> str | None:
    """Reason why programs cannot call such handlers; None if they can.

    JAXMPI_FFI=python asks for those in Python.
    """
    if why := host_callbacks.why_copies():
        return why
    return "JAXMPI_FFI is python" if os.environ.get("JAXMPI_FFI") == "python" else _not_loaded()


@functools.cache
def _not_loaded() -> str | None:
    try:
        addresses(["Send"])
        for source in sorted(Path(__file__).parent.parent.glob("*/*.c")):
            library(source)
    except Exception as error:  # no compiler, another header, a library without a symbol: Python does it
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def handle_type() -> Any:
    """MPI's handles in C: an int, or a pointer."""
    from mpi4py import MPI

    return c_int32 if MPI._sizeof(MPI.Comm) == ctypes.sizeof(c_int32) else c_void_p


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """A compiled source, whose handler XLA knows from now on."""
    loaded = c_library.load(source, [f"HANDLE={'int' if handle_type() is c_int32 else 'void *'}"])
    jax.ffi.register_ffi_target(target_of(source), jax.ffi.pycapsule(loaded[target_of(source)]), platform="cpu")
    return loaded


def target_of(source: Path) -> str:
    """Name of a source's handler, there and for XLA."""
    return f"jaxmpi_{source.stem}"


@functools.cache
def _scopes() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Where MPI's functions are, in the linker's order."""
    bridge = importlib.import_module("mpi4jax._src.xla_bridge.mpi_xla_bridge_cpu")
    return ctypes.CDLL(None), ctypes.CDLL(bridge.__file__)


def addresses(names: Sequence[str]) -> list[int]:
    """Addresses of MPI's functions, by their names without `MPI_`."""
    found = [next(scope[f"MPI_{name}"] for scope in _scopes() if hasattr(scope, f"MPI_{name}")) for name in names]
    return [ctypes.cast(function, c_void_p).value or 0 for function in found]


def primitive(source: Path) -> Any:
    """A JAX primitive that calls a source's handler: operands -> results.

    Its parameters are `results`, of `ShapedArray`s; `effect`, which orders calls; and `words`, i32 for the handler.
    """
    made = jax.extend.core.Primitive(target_of(source))
    made.multiple_results = True

    def lower(ctx: Any, *operands: Any, results: tuple, effect: Any, words: tuple[int, ...]) -> list:
        return host_callbacks.lower_in_order(ctx, target_of(source), operands, effect, words=np.array(words, np.int32))

    made.def_effectful_abstract_eval(lambda *_, results, effect, words: (list(results), {effect}))
    mlir.register_lowering(made, lower, platform="cpu")
    return made


def shaped(*arrays: Any) -> tuple[ShapedArray, ...]:
    """Shapes and dtypes, as a primitive's `results`."""
    return tuple(ShapedArray(x.shape, x.dtype) for x in arrays)
