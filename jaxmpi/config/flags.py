"""Command-line flags made from the dataclasses' fields."""

import dataclasses
from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np
import tyro

from jaxmpi.config.schema import Experiment


def flags(part: Any, prefix: str = "") -> dict[str, Any]:
    """Command-line names of a dataclass's fields, such as `optim.bias-lr-factor`.

    Args:
        part: an instance: a rule of the user's own may have settings of its own, in a class derived from RuleConfig.
    """
    names: dict[str, Any] = {}
    hints = get_type_hints(type(part), include_extras=True)
    for f in dataclasses.fields(part):
        name = prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[f.name]):
            names |= flags(getattr(part, f.name), f"{name}.")
        elif tyro.conf.Suppress not in getattr(hints[f.name], "__metadata__", ()):
            names[name] = f
    return names


def unknown_flags(argv: Sequence[str], experiment: Experiment) -> list[str]:
    """Names given as `--name` or `--no-name` that no field of the experiment has."""
    given = [arg[2:].split("=")[0].replace("_", "-") for arg in argv if arg.startswith("--")]
    known = {"help", *flags(experiment)}
    return [name for name in given if name not in known and without_no(name) not in known]


def with_objects(part: Any, original: Any) -> Any:
    """`part` with those of `original`'s values that only Python can set, such as the model.

    The command line sees an experiment without them: its parser would take an array's class for a group of options.
    """
    hints = get_type_hints(type(part), include_extras=True)
    values = {}
    for f in dataclasses.fields(part):
        if tyro.conf.Suppress in getattr(hints[f.name], "__metadata__", ()):
            values[f.name] = getattr(original, f.name)
        elif dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = with_objects(getattr(part, f.name), getattr(original, f.name))
    return dataclasses.replace(part, **values)


def takes_value(arg: str) -> bool:
    """Return True for a flag whose value is the next argument."""
    name = arg[2:].replace("_", "-")
    field = flags(Experiment()).get(without_no(name))
    return arg.startswith("--") and "=" not in arg and not (field and field.type is bool)


def without_no(name: str) -> str:
    """`rule.force` for `rule.no-force`."""
    head, dot, last = name.rpartition(".")
    return head + dot + last.removeprefix("no-")


def resolved(experiment: Experiment) -> dict[str, Any]:
    """The configuration as plain JSON values; what only Python can set appears by its name."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("jaxmpi.config."):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) <= 100:
            return [plain(v) for v in value]
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__)

    return {k: v for k, v in plain(experiment).items() if k != "fallback"}
