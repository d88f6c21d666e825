"""Rows of options that do not go together, and their check.

A row has the words of an error, of which docs/combining.md is made, too.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxmpi.core.errors import UsageError

WITH = "{field}: got {got} with {words}; {instead}"
PAIR, GIVE_ONE = "got {field} and {words}; {instead}", "give one of them"


class Refusal(NamedTuple):
    """Values of a field that do not go with other options."""

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
        UsageError: a field, what it goes not with, and the way out.
    """
    for row in rows:
        got = operator.attrgetter(row.field.removeprefix(part))(options)
        is_one = got if row.values == "any" else got in row.values.split(", ")
        if (row.refuses(got) if row.refuses else is_one) and row.beside(options):
            words, instead = (text.format(**vars(options), **more) for text in (row.words, row.instead))
            raise UsageError(row.form.format(field=row.field, got=got, words=words, instead=instead))
