"""Handlers in C that call this process's MPI library from programs.

A source of the package is compiled at its first use, for the MPI and the XLA of the process. It gets the addresses of
MPI's functions and MPI's handles from Python. So it needs neither `mpicc` nor a header of MPI's, and it calls the
functions that mpi4py calls. It does so also if a tool has put its own functions in front of them.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import Any

import jax
from jax.core import ShapedArray

from jaxmpi.runtime import compile_cache, failures, host_callbacks

HEADER = Path(__file__).with_suffix(".h")
TROUBLE = "handlers in C cannot be made"
Failed = ctypes.CFUNCTYPE(None, c_int32, c_int32)  # (number of a call, MPI's error)


@functools.cache
def handle_type() -> Any:
    """MPI's handles in C: an int, or a pointer."""
    from mpi4py import MPI

    return c_int32 if MPI._sizeof(MPI.Comm) == ctypes.sizeof(c_int32) else c_void_p


def find_function(name: str) -> Any:
    """A function of this process's MPI; None if it has none of this name."""
    from mpi4py import MPI

    scopes = ctypes.CDLL(None), ctypes.CDLL(MPI.__file__)  # in the linker's order
    return next((scope[name] for scope in scopes if hasattr(scope, name)), None)


def addresses(names: Sequence[str]) -> list[int]:
    """Addresses of MPI's functions, by their names without `MPI_`."""
    pointers = []
    for name in (f"MPI_{name}" for name in names):
        if (function := find_function(name)) is None:
            raise OSError(f"{name} is in no library that is loaded")
        pointers.append(ctypes.cast(function, c_void_p).value)
    return pointers


class CSource:
    """A source in C with a handler of its name."""

    def __init__(self, path: Path, headers: Sequence[Path] = (), others: Sequence[str] = (), **constants: Any) -> None:
        """Nothing is compiled yet.

        Args:
            headers: that it includes, besides that of all.
            others: names of more handlers in it.
        """
        self._path, self._target, self._constants = path, f"jaxmpi_{path.stem}", constants
        self._headers, self._targets = [HEADER, *headers], [self._target, *others]
        self._loaded: ctypes.CDLL | None = None
        self._trouble: str | None = None
        self._lock = threading.RLock()  # programs are lowered by several threads

    def unavailable_reason(self) -> str | None:
        """Reason why programs cannot call it; None if they can. JAXMPI_FFI=python asks for functions in Python."""
        if host_callbacks.sees_copies():
            return "programs of GPUs call Python"
        return "JAXMPI_FFI is python" if os.environ.get("JAXMPI_FFI") == "python" else self.trouble() or None

    def trouble(self) -> str:
        """Why it cannot be compiled here; empty if it can."""
        with self._lock:
            if self._trouble is None:
                try:
                    addresses(["Send"])
                    self.library()
                    self._trouble = ""
                except Exception as error:  # no compiler, another header, a library without a symbol
                    self._trouble = f"{TROUBLE}: {type(error).__name__}: {error}"
        return self._trouble

    def library(self) -> ctypes.CDLL:
        """The compiled source, whose handler XLA knows from now on."""
        with self._lock:
            if self._loaded is None:
                handle = "int" if handle_type() is c_int32 else "void *"
                loaded = compile_cache.load_c(self._path, self._headers, {"HANDLE": handle, **self._constants})
                for target in self._targets:
                    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(loaded[target]), platform="cpu")
                self._loaded = loaded
            return self._loaded

    def primitive(self, target: str = "") -> Any:
        """A JAX primitive that calls the handler, or another of its handlers, as `host_callbacks.handler_primitive`."""
        return host_callbacks.handler_primitive(target or self._target)


def say_once(comm: Any, troubles: Sequence[str], consequence: str) -> None:
    """Print what programs do without C, on the first rank that has no C; `troubles` of all ranks."""
    if comm.rank == next((rank for rank, trouble in enumerate(troubles) if trouble), None):
        print_once(f"{consequence}, since {troubles[comm.rank]}")


@functools.cache
def print_once(line: str) -> None:
    """Print a line of this rank."""
    print(f"jaxmpi: {failures.describe_rank()}: {line}", file=sys.stderr, flush=True)


def shaped(*arrays: Any) -> tuple[ShapedArray, ...]:
    """Shapes and dtypes, as a primitive's `results`."""
    return tuple(ShapedArray(x.shape, x.dtype) for x in arrays)
