"""Hooks that run before MPI ends: at exit, or in an `MPI.Finalize()` of the script's own."""

import atexit
from collections.abc import Callable
from contextlib import suppress

_hooks: list[Callable[[], None]] = []


def before_mpi_ends(hook: Callable[[], object]) -> None:
    """Call the hook once, when MPI or this process ends, whichever is first; the last one registered comes first."""

    def once() -> None:
        if once in _hooks:
            _hooks.remove(once)
            hook()

    _hooks.append(once)
    atexit.register(once)


def run_hooks() -> None:
    """Call those that have not been called; MPI can still be used in them."""
    while _hooks:
        with suppress(Exception):  # of a program that failed: mpi4jax's hook raises it again at exit
            _hooks[-1]()
