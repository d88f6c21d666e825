"""Checks that the dataclasses of settings share: words and ranges of fields, and options that do not go together."""

import functools
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from jaxmpi.core.errors import UsageError, lookup

T = TypeVar("T")
IN_PYTHON, REPEATABLE = "in Python", "repeatable"
InPython = Annotated[T, IN_PYTHON]  # a field that an experiment file sets and no flag can
Repeatable = Annotated[T, REPEATABLE]  # a tuple to which each use of its flag adds


@functools.cache
def literals(part: type) -> dict[str, tuple[str, ...]]:
    """Words of each field of a dataclass that is annotated as `Literal`."""
    found = {name: literal_words(hint) for name, hint in get_type_hints(part, include_extras=True).items()}
    return {name: words for name, words in found.items() if words}


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
        UsageError: a `Literal` field has none of its words, or a number is out of its range.
    """
    for each in fields(part):
        value = getattr(part, each.name)
        is_plain = type(value) is tuple  # not a model, which has names
        object.__setattr__(part, each.name, tuple(map(_python_number, value)) if is_plain else _python_number(value))
    for name, words in literals(type(part)).items():
        lookup(dict.fromkeys(words), getattr(part, name), prefix + name)
    for name, text in ranges.items():
        value = getattr(part, name)
        if value is not None and not is_in(value, text):
            raise UsageError(f"{prefix}{name}: got {value}; expected {text}")


def is_in(value: float, text: str) -> bool:
    """Return True for a number in the range with which a text begins; NaN is in none."""
    match = RANGE.match(text)
    assert match, text
    left, low, high, right, sign, least = match.groups()
    if sign:
        return value > int(least) or (sign == ">=" and value == int(least))
    is_above = value > float(low) or (left == "[" and value == float(low))
    return is_above and (value < float(high) or (right == "]" and value == float(high)))


def _python_number(value: Any) -> Any:
    is_number = getattr(value, "ndim", None) == 0 and hasattr(value, "dtype") and hasattr(value, "item")
    return value.item() if is_number else value


# ---------------------------------------------------------------- options that do not go together


WITH = "{field}: got {got} with {words}; {instead}"
PAIR, GIVE_ONE = "got {field} and {words}; {instead}", "give one of them"


class Refusal(NamedTuple):
    """Values of a field that do not go with other options: the words of an error, and a row of docs/combining.md."""

    field: str  # such as `data.memory`
    values: str  # in the docs; `any` is any that is given
    beside: Callable[[Any], object]  # the other options
    words: str  # for them; names in braces are fields
    instead: str
    refuses: Callable[[Any], object] | None = None  # by its value; None: as `values` says
    form: str = WITH


def incompatible(beside: Callable[[Any], object], words: str, *rows: tuple, form: str = WITH) -> tuple[Refusal, ...]:
    """Refusals with the same `beside` and `words`; rows have the other fields."""
    return tuple(Refusal(field, values, beside, words, *rest, form=form) for field, values, *rest in rows)


def refuse_incompatible(rows: Iterable[Refusal], options: Any, part: str = "", **more: Any) -> None:
    """Refuse options that do not go together.

    Args:
        part: of the experiment that they are, such as `exchange.`.
        more: names in the words that are no fields of `options`.

    Raises:
        UsageError: a field, what it does not go with, and the way out.
    """
    for row in rows:
        got = operator.attrgetter(row.field.removeprefix(part))(options)
        is_one = got if row.values == "any" else got in row.values.split(", ")
        if (row.refuses(got) if row.refuses else is_one) and row.beside(options):
            words, instead = (text.format(**vars(options), **more) for text in (row.words, row.instead))
            raise UsageError(row.form.format(field=row.field, got=got, words=words, instead=instead))
