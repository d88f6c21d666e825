"""Fields of settings: those that take one of a few words, and numbers of other libraries.

Users may add to some words, such as names of rules. These words stand in tables of the rooms above, and are checked
there.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from jaxmpi.core.errors import lookup


@dataclass(frozen=True, init=False)
class Choices:
    """Annotation of a field: the words that it takes. `--help` shows them."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)


@functools.cache
def choices(part: type) -> dict[str, tuple[str, ...]]:
    """Words of each field of a dataclass that is annotated with them."""
    extras = {
        name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(part, include_extras=True).items()
    }
    return {name: each.words for name, metadata in extras.items() for each in metadata if isinstance(each, Choices)}


def use_python_numbers(part: Any) -> None:
    """Replace numbers of NumPy or JAX in a dataclass's fields by Python's, which JSON and integer methods need."""
    for each in fields(part):
        value = getattr(part, each.name)
        if type(value) is tuple:  # not a model, which has names
            object.__setattr__(part, each.name, tuple(map(_python_number, value)))
        else:
            object.__setattr__(part, each.name, _python_number(value))


def _python_number(value: Any) -> Any:
    is_number = getattr(value, "ndim", None) == 0 and hasattr(value, "dtype") and hasattr(value, "item")
    return value.item() if is_number else value


def check_choices(part: Any, prefix: str = "") -> None:
    """Raise `UsageError` unless every field annotated with words has one of them.

    Args:
        prefix: of the fields' names, such as `data.`.
    """
    for name, words in choices(type(part)).items():
        lookup(dict.fromkeys(words), getattr(part, name), prefix + name)
