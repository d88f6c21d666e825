"""A user's function found again by its name in another process."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.core.errors import UsageError

SCRIPT = "__jaxmpi_main__"  # module name of the master's script on a worker; not __main__: guarded code does not run


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
    found = get_by_qualname(sys.modules.get(module), name)
    is_wrapped = found is not function
    if (is_wrapped and getattr(found, "__wrapped__", None) is not function) or (module == "__main__" and not script):
        raise UsageError(
            f"function {name or function!r} calls back into Python, so that its program cannot travel, and other "
            "processes cannot find it by name: define it at the top of a module or script, or run the script on every "
            "rank (mpirun without jaxmpi.fork)"
        )
    return FunctionName(module, name, script and str(Path(script).resolve()), is_wrapped)


def import_function(name: FunctionName) -> Callable:
    """Find a function by its name; its module or script is imported.

    A script runs, except for code under `if __name__ == "__main__"`.
    """
    try:
        module = load_script(name.script) if name.script else importlib.import_module(name.module)
    except SystemExit as error:  # no Exception: the worker would end
        raise UsageError(
            f"{name.script or name.module} ends its process ({error.code}) where it is imported to find "
            f'{name.qualname}: put what ends it under if __name__ == "__main__":'
        ) from error
    found = get_by_qualname(module, name.qualname)
    if found is None:
        raise UsageError(f"{name.module} has no {name.qualname}")
    return found.__wrapped__ if name.is_wrapped else found


def get_by_qualname(module: Any, name: str) -> Any:
    """The object of a qualified name; None if there is none."""
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), module)


def load_script(path: str) -> Any:
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
