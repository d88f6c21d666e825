"""Command-line flags made from the fields of dataclasses, in groups.

Every setting needs a flag with help text, without a second list that repeats the fields. The flags therefore come from
the dataclass fields, their types from the annotations, and the help texts from the comments at them.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from jaxmpi.config.schema import Experiment
from jaxmpi.config.validate import IN_PYTHON, REPEATABLE, literal_words
from jaxmpi.core.errors import UsageError, hint

# Headings of --help, and the flags below each. Those that stand in none are listed by their part.
GROUPS = {
    "common": (
        *("train-for", "local-batch", "effective-batch", "optim.lr", "rule.name", "exchange.strategy", "data.dir"),
        *("run-dir", "resume", "checkpoint-every", "eval-every", "devices", "seed"),
    ),
    "step": ("micro-batch", "compute-dtype", "batch-statistics", "comm"),
    "record": ("log-every", "quiet", "sinks", "trace", "profile"),
    "checkpoint": (*("keep-checkpoints", "keep-best", "monitor", "monitor-mode", "from-start", "params"),),
    "failure": (
        *("on-nonfinite", "recover-limit", "replica-check-every", "on-rank-loss", "stall-timeout-s", "on-stall"),
        "inject",
    ),
}


OF_LAUNCHER = ("restarts", "elastic", "launcher", "launcher-args")  # options of `jaxmpi train`, before the experiment


class Flag(NamedTuple):
    """A field that a flag sets."""

    part: Any  # the dataclass it is of
    name: str
    type: Any
    is_repeatable: bool  # its values add up if it is given again

    @property
    def value(self) -> Any:
        """The value without the flag."""
        return getattr(self.part, self.name)

    @property
    def help(self) -> str:
        """The text of the comment at the field."""
        return comments(type(self.part)).get(self.name, "")


def flags(part: Any, prefix: str = "") -> dict[str, Flag]:
    """Command-line names of a dataclass's fields, such as `optim.bias-lr-factor`.

    Args:
        part: an instance: a rule of the user's own may have settings of its own, in a class derived from RuleConfig.
    """
    names: dict[str, Flag] = {}
    hints = get_type_hints(type(part), include_extras=True)
    for f in dataclasses.fields(part):
        name, hint = prefix + f.name.replace("_", "-"), hints[f.name]
        is_marked = get_origin(hint) is Annotated
        marks = hint.__metadata__ if is_marked else ()
        if dataclasses.is_dataclass(hint):
            names |= flags(getattr(part, f.name), f"{name}.")
        elif IN_PYTHON not in marks:
            names[name] = Flag(part, f.name, hint.__origin__ if is_marked else hint, REPEATABLE in marks)
    return names


@functools.cache
def comments(part: type) -> dict[str, str]:
    """The comment of each field: behind it, or else above it."""
    help_by_field: dict[str, str] = {}
    for cls in reversed(part.__mro__):
        above: list[str] = []
        with suppress(OSError, TypeError):  # made without a file, or in C
            for line in inspect.getsource(cls).splitlines():
                code, _, comment = line.strip().rpartition("# ")
                if field := re.match(r"(\w+): ", code or comment):
                    help_by_field[field[1]] = comment if code else " ".join(above)
                above = [*above, comment] if line.strip().startswith("#") else []
    return help_by_field


# ---------------------------------------------------------------- a command line


def hyphens(arg: str) -> str:
    """Spell a flag with hyphens, `--local-batch=8` for `--local_batch=8`; keep its value."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def words_by_flag(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags in their order, spelled with hyphens, each with the words up to the next.

    Raises:
        UsageError: a word before the first flag.
    """
    if argv and not argv[0].startswith("--"):
        ranks = "; to start N ranks: jaxmpi train -n N EXPERIMENT.py" * argv[0].startswith("-n")
        raise UsageError(f"got {argv[0]!r}; expected --field value{ranks}")
    starts = [i for i, word in enumerate([*argv, "--"]) if word.startswith("--")]
    for begin, end in itertools.pairwise(starts):
        name, equals, first = hyphens(argv[begin])[2:].partition("=")
        yield name, [first] * bool(equals) + [*argv[begin + 1 : end]]


def find_flag(name: str, known_flags: Mapping[str, Flag]) -> str:
    """The field's name that a flag, `name` or `no-name`, sets.

    Raises:
        UsageError: there is none; the nearest is named, and the part's fields.
    """
    head, dot, last = name.rpartition(".")
    positive = head + dot + last.removeprefix("no-")
    if name in known_flags or (positive in known_flags and known_flags[positive].type is bool):
        return name if name in known_flags else positive
    if name in OF_LAUNCHER:
        raise UsageError(f"--{name} is no field but an option of jaxmpi train: jaxmpi train --{name} ... EXPERIMENT.py")
    siblings = ", ".join(sorted(field for field in known_flags if field.startswith(f"{name.partition('.')[0]}.")))
    listed = f"there are: {siblings}; " if siblings else ""
    raise UsageError(f"unknown field --{name}; {hint(name, known_flags)}{listed}--help lists all")


def parse_flags(argv: Sequence[str], known_flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Values of a command line by flag; of a flag that is given twice, the last one.

    Raises:
        UsageError: an unknown flag, or a value of another type.
    """
    values: dict[str, Any] = {}
    for flag_name, words in words_by_flag(argv):
        name = find_flag(flag_name, known_flags)
        flag = known_flags[name]
        try:
            value = name == flag_name if flag.type is bool and not words else convert(words, flag.type)
        except (ValueError, TypeError):  # also of a type of the user's own
            expected = "no value" if flag.type is bool else type_name(flag.type)
            raise UsageError(
                f"--{flag_name}: got {repr(' '.join(words)) if words else 'nothing'}; expected {expected}"
            ) from None
        if isinstance(value, tuple):  # functions of an experiment file, which no flag can name, stay
            before = values.get(name, ()) if flag.is_repeatable else ()
            value = (*before, *value, *filter(callable, flag.value))
        values[name] = value
    return values


def convert(words: Sequence[str], kind: Any) -> Any:
    """Words as a value of an annotation.

    Raises:
        ValueError, TypeError: they are none.
    """
    several = get_args(kind)
    if get_origin(kind) in (tuple, list):
        is_fixed = several[-1] is not ... and get_origin(kind) is tuple
        kinds = several if is_fixed else several[:1] * len(words)
        return get_origin(kind)(convert([word], member) for word, member in zip(words, kinds, strict=True))
    [word] = words
    if kind in (str, Any) or literal_words(kind):  # whose words the experiment checks, with the nearest
        return word
    if kind is NoneType and word == "None":
        return None
    for member in several:  # of a union
        try:
            return convert(words, member)
        except (ValueError, TypeError):
            continue
    if several or kind in (bool, NoneType):
        raise ValueError
    return kind(word)  # pyright: ignore[reportCallIssue] - no NoneType, by the line above


def type_name(kind: Any) -> str:
    """An annotation as Python spells it."""
    return str(kind) if get_args(kind) else kind.__name__


def replace_fields(part: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass with the values of these flags; other fields keep theirs."""
    new = {}
    for f in dataclasses.fields(part):
        name = prefix + f.name.replace("_", "-")
        if name in values:
            new[f.name] = values[name]
        elif any(other.startswith(f"{name}.") for other in values):
            new[f.name] = replace_fields(getattr(part, f.name), values, f"{name}.")
    return dataclasses.replace(part, **new) if new else part


def takes_value(arg: str) -> bool:
    """Return True for a flag whose value is the next argument."""
    if not arg.startswith("--") or "=" in arg:
        return False
    known_flags = flags(Experiment())
    try:
        return known_flags[find_flag(hyphens(arg)[2:], known_flags)].type is not bool
    except UsageError:  # of a rule of the user's own
        return True


# ---------------------------------------------------------------- help


def help_text(experiment: Experiment, tables: Mapping[str, Mapping[str, Any]], columns: int) -> str:
    """All flags by heading, with their texts and the experiment's values.

    Args:
        tables: by flag, the table that it names a row of.
    """
    known_flags = flags(experiment)
    groups = {group: [*names] for group, names in GROUPS.items()}
    listed = {name for names in GROUPS.values() for name in names}
    for name in known_flags:
        if name not in listed:
            groups.setdefault(name.rpartition(".")[0] or "other", []).append(name)
    lines = []
    for group, names in groups.items():
        lines += ["", f"{group}:"]
        for name in names:
            flag = known_flags[name]
            words = literal_words(flag.type) or tuple(tables.get(name, ()))
            no = f"or --{'.no-'.join(name.rsplit('.', 1)) if '.' in name else f'no-{name}'}"
            kind = f"{{{', '.join(words)}}}" if words else no if flag.type is bool else type_name(flag.type)
            shown = " ".join(map(str, flag.value)) if isinstance(flag.value, tuple) else str(to_json(flag.value))
            text = f"{flag.help} (now {shown})" if shown else flag.help
            for line, indent in ((f"--{name} {kind}", 2), (text, 6)):
                lines += textwrap.wrap(
                    line, columns, initial_indent=" " * indent, subsequent_indent=" " * 6, break_on_hyphens=False
                )
    return "\n".join(lines)


def summary() -> str:
    """Lines on the first group's flags, shown if no experiment is named."""
    known_flags, names = flags(Experiment()), GROUPS["common"]
    width = max(map(len, names))
    return "\n".join(f"  --{name:{width}}  {known_flags[name].help}" for name in names)


def to_json(value: Any) -> Any:
    """A configuration as plain JSON values; Python objects appear by name, and an experiment without its fallback."""
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("jaxmpi.config."):
        names = [f.name for f in dataclasses.fields(value) if f.name != "fallback"]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) <= 100:
        return [to_json(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__)
