"""Places of a call's arguments among the parameters of the user's function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.random_keys import unpacked

OF_THE_CALL = ("batch", "batch_local", "slices", "output_subset")  # keywords that say how a function is called
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Form(NamedTuple):
    """One way to call a function.

    The form and the leaves' shapes and dtypes together determine the program.
    """

    structure: Any  # tree structure of all arguments, in a tuple
    keywords: tuple[str, ...]  # names of the last arguments, which are passed by name
    outputs: tuple[int, ...]  # numbers of the outputs that are computed

    def call(self, function: Callable, flat: Sequence[Any]) -> PyTree:
        """The user's function of its leaves."""
        args = unpacked(jax.tree.unflatten(self.structure, flat))
        first = len(args) - len(self.keywords)
        return function(*args[:first], **dict(zip(self.keywords, args[first:], strict=True)))


def signature_parameters(function: Callable, name: str) -> Mapping[str, inspect.Parameter]:
    """The function's parameters.

    Raises:
        UsageError: Python does not know them.
    """
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: its parameters have no names that Python knows: give arguments by position"
        ) from error


def sort_by_parameter(inputs: Mapping[str, Any], function: Callable, name: str) -> dict[str, Any]:
    """Inputs by name, in the order of the function's parameters.

    Raises:
        UsageError: no such parameter, or one that cannot be passed by name.
    """
    known = signature_parameters(function, name)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    by_name = [p for p, is_ in known.items() if is_.kind in (BY_POSITION[1], inspect.Parameter.KEYWORD_ONLY)]
    for key in inputs:
        check(key not in OF_THE_CALL, f"inputs: got {key!r}, a keyword of every call; expected another parameter name")
        check(takes_any or key in by_name, f"inputs: got {key!r}; expected parameters of {name}: {', '.join(by_name)}")
    places = list(known)
    return dict(sorted(inputs.items(), key=lambda item: places.index(item[0]) if item[0] in places else len(places)))


def bind_arguments(
    name: str, function: Callable, free: Sequence[int], keywords: Sequence[str], args: Sequence, named: dict[str, Any]
) -> list[Any]:
    """A call's arguments for the free places of the function, in order.

    Args:
        name: of the function, for messages.
        function: whose parameters name the places if `keywords` do not.
        free: places that take an argument.
        keywords: names of all places; empty: those of the function's parameters.
        args: of the call, by position.
        named: of the call, by name.

    Raises:
        UsageError: too many, too few, one twice, or one that no place has the name of.
    """
    if not named and len(args) == len(free):
        return list(args)
    given = dict(zip(free, args, strict=False))
    if named:
        names = keywords or [p for p, is_ in signature_parameters(function, name).items() if is_.kind in BY_POSITION]
        places = {key: place for place, key in enumerate(names) if place in free}
        for key, value in named.items():
            expected = f"expected one of {', '.join(places)}"
            check(key in places, f"{name}: got an argument {key!r}; {expected}; inputs as a dict may name others")
            check(places[key] not in given, f"{name}: got {key!r} by position and by name; expected it once")
            given[places[key]] = value
    got = len(args) + len(named)
    check(
        got == len(free) == len(given),
        f"{name}: got {got} arguments; expected {len(free)}, one for every scatter and broadcast",
    )
    return [given[place] for place in free]
