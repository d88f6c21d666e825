"""Arguments of a call among the parameters of the user's function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmpi.core.errors import UsageError

CALL_KEYWORDS = ("batch", "batch_local", "slices", "output_subset")  # of every call


def sort_by_parameter(inputs: Mapping[str, Any], function: Callable, name: str) -> dict[str, Any]:
    """Inputs by name, in the order of the function's parameters."""
    known = _parameters(function, name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    by_name = [key for key, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in inputs:
        if key in CALL_KEYWORDS:
            raise UsageError(f"inputs: got {key!r}, a keyword of every call; expected another parameter name")
        if not takes_any and key not in by_name:
            raise UsageError(f"inputs: got {key!r}; expected parameters of {name}: {', '.join(by_name)}")
    order = [*known, *inputs]
    return dict(sorted(inputs.items(), key=lambda item: order.index(item[0])))


def bind_arguments(
    name: str,
    function: Callable,
    free: Sequence[int],
    keywords: Sequence[str],
    args: Sequence,
    named: Mapping[str, Any],
) -> list[Any]:
    """A call's arguments for the free places of the function, in order.

    `keywords` name all places; if there are none, the function's parameters do.
    """
    given = dict(zip(free, args, strict=False))
    if named:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = keywords or [key for key, p in _parameters(function, name).items() if p.kind in positional]
        places = {key: place for place, key in enumerate(names) if place in free}
        for key, value in named.items():
            if key not in places:
                expected = f"expected one of {', '.join(places)}"
                raise UsageError(f"{name}: got an argument {key!r}; {expected}; inputs as a dict may name others")
            if places[key] in given:
                raise UsageError(f"{name}: got {key!r} by position and by name; expected it once")
            given[places[key]] = value
    got = len(args) + len(named)
    if not got == len(free) == len(given):
        raise UsageError(f"{name}: got {got} arguments; expected {len(free)}, one for every scatter and broadcast")
    return [given[place] for place in free]


def _parameters(function: Callable, name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: its parameters have no names that Python knows: give arguments by position"
        ) from error
