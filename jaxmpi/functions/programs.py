"""A function's program in another process: as StableHLO, or found again by the function's name."""

import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.random_keys import packed

ProgramKey = tuple[int, int, tuple]  # numbers of function and form, shapes and dtypes of the leaves
SCRIPT = "__jaxmpi_main__"  # module name of the master's script on a worker; not __main__: guarded code does not run


class Leaf(NamedTuple):
    """One array that a program returns, and what becomes of it."""

    op: str  # a row of OPS, or empty
    place: str  # result | into | local | update
    target: int  # number of the output, or of the variable
    index: int = 0  # among the leaves of the target
    name: str = ""  # name of the target, for messages


class WorkerProgram(NamedTuple):
    """A user's function for arguments of certain shapes, over flat leaves."""

    run: Callable[..., list[jax.Array]]
    leaves: tuple[Leaf, ...]
    agreed: str  # dtypes and shapes that must be the same on all workers, as JSON
    structures: tuple[Any, ...] = ()  # tree structures of the outputs, then the updates, if the function is in Python


class MissingPrograms(Exception):
    """Workers lack the programs of these keys, as text; the master sends them and repeats the command."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self.keys = keys


def key_text(key: ProgramKey) -> str:
    """The key of a program as text, for a report."""
    return json.dumps([*key[:2], [[list(shape), str(dtype)] for shape, dtype in key[2]]])


def key_from_text(text: str) -> ProgramKey:
    """The inverse of `key_text`."""
    function, form, shapes = json.loads(text)
    return function, form, tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes)


def load_program(leaves: tuple[Leaf, ...], agreed: str, body: bytes, by_name: Any) -> WorkerProgram:
    """A program that came as StableHLO, or by its function's name, form and chosen leaves."""
    if by_name is None:
        return WorkerProgram(jax.jit(jax.export.deserialize(bytearray(body)).call), leaves, agreed)
    name, form, chosen = by_name
    function = import_function(name)

    def compute_chosen(*flat: jax.Array) -> list[jax.Array]:
        results = jax.tree.leaves(packed(form.call(function, flat)))
        return [results[i] for i in chosen]

    return WorkerProgram(jax.jit(compute_chosen), leaves, agreed)


# ---------------------------------------------------------------- functions by name


class FunctionName(NamedTuple):
    """Where another process finds a function."""

    module: str
    qualname: str
    script: str = ""  # path of the script, if that is the module
    is_wrapped: bool = False  # the name is of what wraps the function


def qualified_name(function: Callable) -> FunctionName:
    """How another process finds the function, refused if it cannot."""
    if hasattr(function, "lower"):  # jitted, as all of the program will be
        function = getattr(function, "__wrapped__", function)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    script = str(getattr(sys.modules.get("__main__"), "__file__", "") or "") if module == "__main__" else ""
    found = _get_by_qualname(sys.modules.get(module), name)
    is_wrapped = found is not function
    if (is_wrapped and getattr(found, "__wrapped__", None) is not function) or (module == "__main__" and not script):
        raise UsageError(
            f"function {name or function!r} calls back into Python, so that its program cannot be sent, and other "
            "processes cannot find it by name: define it at the top of a module or script, or run the script on every "
            "rank (mpirun without jaxmpi.fork)"
        )
    return FunctionName(module, name, script and str(Path(script).resolve()), is_wrapped)


def import_function(name: FunctionName) -> Callable:
    """Find a function by its name; its module or script is imported.

    A script runs, except for code under `if __name__ == "__main__"`.
    """
    try:
        module = _load_script(name.script) if name.script else importlib.import_module(name.module)
    except SystemExit as error:  # no Exception: the worker would end
        raise UsageError(
            f"{name.script or name.module} ends its process ({error.code}) where it is imported to find "
            f'{name.qualname}: put what ends it under if __name__ == "__main__":'
        ) from error
    found = _get_by_qualname(module, name.qualname)
    if found is None:
        raise UsageError(f"{name.module} has no {name.qualname}; expected it to be defined when it is imported")
    return found.__wrapped__ if name.is_wrapped else found


def _get_by_qualname(module: Any, name: str) -> Any:
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), module)


def _load_script(path: str) -> Any:
    """The master's script as a module, once."""
    if SCRIPT not in sys.modules:
        spec = importlib.util.spec_from_file_location(SCRIPT, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[SCRIPT] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[SCRIPT]
            raise
    return sys.modules[SCRIPT]
