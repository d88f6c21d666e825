"""Names that fields and flags had in version 0.1.

They are accepted for one more version, with a line that has the new name. Some are switches that a word of another
field stands for now.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxmpi.core.errors import check

T = TypeVar("T")

RENAMED = {
    "compare_every": "replica_check_every",
    "data.stall_s": "data.stall_timeout_s",
    "embedded": "fallback",
    "form": "step_mode",
    "ft": "on_rank_loss",
    "lone_every": "compute_only_every",
    "recover": "on_nonfinite",
    "stall_s": "stall_timeout_s",
}
# Switches that are a word of another field now.
WORDS = {"tensorboard": ("sinks", "tensorboard")}


def takes_old_names(part: str = "") -> Callable[[type[T]], type[T]]:
    """Have a dataclass's `__init__` take the old names of its fields.

    It raises `UsageError` if it is given both names of a field. `dataclasses.replace` hands over every field, of which
    those that the caller did not name are copies: there the old name counts.

    Args:
        part: prefix of its names in the table, such as `data.`.
    """
    old = {
        name.removeprefix(part): new.removeprefix(part)
        for name, new in RENAMED.items()
        if name.rpartition(".")[0] == part.removesuffix(".")
    }

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        fields = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]

        @functools.wraps(init)
        def renaming(self: T, *args: Any, **kwargs: Any) -> None:
            is_replaced = kwargs.keys() >= fields
            for name in old.keys() & kwargs.keys():
                check(
                    is_replaced or old[name] not in kwargs,
                    f"{cls.__name__}: got {name} {kwargs[name]!r} and {old[name]} {kwargs.get(old[name])!r}, which "
                    f"are one field; give {old[name]} alone",
                )
                warnings.warn(f"{cls.__name__}: {name} is {old[name]} now", FutureWarning, stacklevel=2)
                kwargs[old[name]] = kwargs.pop(name)
            for name, (field, word) in WORDS.items():
                if name not in kwargs or field not in fields:
                    continue
                warnings.warn(f"{cls.__name__}: {name} is {field}=({word!r},) now", FutureWarning, stacklevel=2)
                others = tuple(each for each in kwargs.get(field, ()) if each != word)
                kwargs[field] = (*others, word) if kwargs.pop(name) else others
            init(self, *args, **kwargs)

        cls.__init__ = renaming
        return cls

    return decorate


def with_new_names(argv: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The command line with old flags replaced by their new names.

    A flag that is a word now is moved to the end, where its field takes no argument that follows.

    Args:
        argv: flags, with hyphens or underscores in their names.
        say: is given a line for each.

    Raises:
        UsageError: an old flag beside its new name.
    """
    flags = {f"--{old.replace('_', '-')}": f"--{new.replace('_', '-')}" for old, new in RENAMED.items()}
    given = {arg.partition("=")[0].replace("_", "-") for arg in argv}
    found, last = [], []
    for arg in argv:
        name, equals, value = arg.partition("=")
        new = flags.get(name.replace("_", "-"), name)
        if new != name:
            check(new not in given, f"got {name} and {new}, which are one flag; give {new} alone")
            say(f"{name} is {new} now")
        words = as_words(name)
        if words:
            check(not equals, f"got {arg}; {name} takes no value, and is {' '.join(words)} now")
            check(words[0] not in given, f"got {name} and {words[0]}; give {words[0]} alone, with all its words")
            say(f"{name} is {' '.join(words)} now")
            last += words
        else:
            found.append(new + equals + value)
    return [*found, *last]


def as_words(flag: str) -> list[str]:
    """`--sinks tensorboard` for `--tensorboard`, `--sinks` for `--no-tensorboard`, empty for other flags."""
    name = flag.removeprefix("--")
    if not flag.startswith("--") or name.removeprefix("no-") not in WORDS:
        return []
    field, word = WORDS[name.removeprefix("no-")]
    return [f"--{field}"] if name.startswith("no-") else [f"--{field}", word]
