"""Checks that the dataclasses of settings share: words and ranges of their fields."""

import functools
import re
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxmpi.core.errors import UsageError, lookup

T = TypeVar("T")
IN_PYTHON, REPEATABLE = "in Python", "repeatable"
InPython = Annotated[T, IN_PYTHON]  # a field that an experiment file sets and no flag can
Repeatable = Annotated[T, REPEATABLE]  # a tuple to which each use of its flag adds


@functools.cache
def literals(part: type) -> dict[str, tuple[str, ...]]:
    """Words of each field of a dataclass that is annotated as `Literal`."""
    words_by_field = {name: literal_words(hint) for name, hint in get_type_hints(part, include_extras=True).items()}
    return {name: words for name, words in words_by_field.items() if words}


@functools.cache
def whole_numbers(part: type) -> tuple[str, ...]:
    """Fields of a dataclass that are annotated as `int`, but not as `float`."""
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(part, include_extras=True).items()}
    return tuple(name for name, kind in kinds.items() if int in kind and float not in kind)


def literal_words(hint: Any) -> tuple[str, ...]:
    """The words of a `Literal`; none of another annotation."""
    return get_args(hint) if get_origin(hint) is Literal else ()


RANGE = re.compile(r"([\[(])(\S+), (\S+)([])])|(>=?) (\d+)")


def check_fields(part: Any, prefix: str = "", **ranges: str) -> None:
    """Check a dataclass's fields, with Python's numbers in place of NumPy's and JAX's, which JSON cannot have.

    Args:
        prefix: of the fields' names, such as `data.`.
        ranges: of numbers, such as `>= 1` or `[0, 1): why`; None is in each.

    Raises:
        UsageError: a `Literal` field has none of its words, a number is not whole, or out of its range.
    """
    for field in fields(part):
        value = getattr(part, field.name)
        is_plain = type(value) is tuple  # not a model, which has names
        object.__setattr__(part, field.name, tuple(map(_python_number, value)) if is_plain else _python_number(value))
    for name, words in literals(type(part)).items():
        lookup(dict.fromkeys(words), getattr(part, name), prefix + name)
    for name in whole_numbers(type(part)):
        if isinstance(value := getattr(part, name), float):
            raise UsageError(f"{prefix}{name}: got {value}; expected a whole number")
    for name, text in ranges.items():
        value = getattr(part, name)
        if value is not None and (isinstance(value, bool | str) or not is_in(value, text)):
            raise UsageError(f"{prefix}{name}: got {value}; expected {text}")


def is_in(value: float, text: str) -> bool:
    """Return True for a number in the range with which a text begins; NaN is in none."""
    match = RANGE.match(text)
    assert match, text
    left_bracket, low, high, right, sign, minimum = match.groups()
    if sign:
        return value > int(minimum) or (sign == ">=" and value == int(minimum))
    is_above = value > float(low) or (left_bracket == "[" and value == float(low))
    return is_above and (value < float(high) or (right == "]" and value == float(high)))


def _python_number(value: Any) -> Any:
    is_number = getattr(value, "ndim", None) == 0 and hasattr(value, "dtype") and hasattr(value, "item")
    return value.item() if is_number else value
