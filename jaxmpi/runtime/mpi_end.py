"""Hooks that run before MPI ends, at exit or in `MPI.Finalize()`."""

import atexit
from collections.abc import Callable
from contextlib import suppress

_hooks: list[Callable[[], None]] = []
_checks: list[Callable[[], object]] = []


def call_before_finalize(hook: Callable[[], object]) -> None:
    """Call a hook once when MPI or the process ends, newest first."""

    def once() -> None:
        if once in _hooks:
            _hooks.remove(once)
            hook()

    _hooks.append(once)
    atexit.register(once)


def run_hooks() -> None:
    """Call the remaining hooks, in which MPI can still be used."""
    while _hooks:
        with suppress(Exception):  # errors of a program that failed; mpi4jax's hook raises them again at exit
            _hooks[-1]()


def call_after_all_scripts(check: Callable[[], object]) -> None:
    """Call the check when all ranks' scripts have ended, before MPI ends."""
    _checks.append(check)


def run_checks() -> None:
    """Call the checks, when all scripts have ended."""
    for check in _checks:
        check()
