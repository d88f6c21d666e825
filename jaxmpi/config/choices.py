"""Fields that take one of a few words.

Users may add to some words, such as names of rules. These words stand in tables of the rooms above, and are checked
there.
"""

import functools
from dataclasses import dataclass
from typing import Any, get_type_hints

from jaxmpi.core.errors import lookup


@dataclass(frozen=True, init=False)
class OneOf:
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
    return {name: each.words for name, metadata in extras.items() for each in metadata if isinstance(each, OneOf)}


def check_choices(part: Any, prefix: str = "") -> None:
    """Raise `UsageError` unless every field annotated with words has one of them.

    Args:
        prefix: of the fields' names, such as `data.`.
    """
    for name, words in choices(type(part)).items():
        lookup(dict.fromkeys(words), getattr(part, name), prefix + name)
