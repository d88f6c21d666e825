"""Command-line flags made from the fields of dataclasses, in groups.

Every setting needs a flag with help text, without a second list that repeats the fields. The flags therefore come from
the dataclass fields, and the help texts from the comments beside them. Tyro parses the command line, and lists flags by
part of a dataclass. It is given a dataclass made for it, whose parts are the groups of `GROUPS`. Building a parser of
all flags is slow, so the first attempt knows only the flags that are named. Only `--help` or a mistake builds the full
parser.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import tyro

from jaxmpi.config.schema import WORDS, Experiment
from jaxmpi.config.validate import literal_words

# Headings of --help, and the flags below each. Those that stand in none are listed by their part.
GROUPS = {
    "common": (
        *("train-for", "local-batch", "effective-batch", "optim.lr", "rule.name", "exchange.strategy", "data.dir"),
        *("run-dir", "resume", "checkpoint-every", "eval-every", "devices", "seed"),
    ),
    "step": ("micro-batch", "compute-dtype", "batch-statistics", "comm"),
    "record": ("log-every", "quiet", "sinks", "trace", "profile"),
    "checkpoint": (
        *("keep-checkpoints", "keep-best", "monitor", "monitor-mode", "from-start", "continue-from", "params"),
    ),
    "failure": (
        *("on-nonfinite", "recover-limit", "replica-check-every", "on-rank-loss", "stall-timeout-s", "on-stall"),
        "inject",
    ),
}
ABOUT = {
    "common": "Those used most; the others follow by part.",
    "step": "How a step is computed.",
    "record": "What is shown and recorded.",
    "checkpoint": "What is kept, and what a run begins with.",
    "failure": "What happens when a step, a worker or a machine fails.",
}


class Flag(NamedTuple):
    """A field that a flag sets."""

    part: Any  # the dataclass it is of
    name: str
    hint: Any  # its type, with annotations

    @property
    def value(self) -> Any:
        """The value without the flag."""
        return getattr(self.part, self.name)

    @property
    def objects(self) -> tuple[Any, ...]:
        """Objects among the words of its value, which no flag can name."""
        is_mixed = WORDS in getattr(self.hint, "__metadata__", ())
        return tuple(each for each in self.value if not isinstance(each, str)) if is_mixed else ()

    @property
    def help(self) -> str:
        """The text of the comment at the field."""
        return comments(type(self.part)).get(self.name, "")

    def metavar(self, rows: Mapping[str, Any]) -> str | None:
        """The words that it takes, as `{abort,warn}`; None if it takes any.

        Args:
            rows: the table that the field names a row of; empty if it names none.
        """
        words = literal_words(self.hint) or tuple(rows)
        return f"{{{','.join(words)}}}" if words else None


def flags(part: Any, prefix: str = "") -> dict[str, Flag]:
    """Command-line names of a dataclass's fields, such as `optim.bias-lr-factor`.

    Args:
        part: an instance: a rule of the user's own may have settings of its own, in a class derived from RuleConfig.
    """
    names: dict[str, Flag] = {}
    hints = get_type_hints(type(part), include_extras=True)
    for f in dataclasses.fields(part):
        name = prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[f.name]):
            names |= flags(getattr(part, f.name), f"{name}.")
        elif tyro.conf.Suppress not in getattr(hints[f.name], "__metadata__", ()):
            names[name] = Flag(part, f.name, hints[f.name])
    return names


@functools.cache
def comments(part: type) -> dict[str, str]:
    """The comment of each field: behind it, or else above it."""
    found: dict[str, str] = {}
    for cls in reversed(part.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(cls))
            tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
            [definition] = ast.parse(source).body
        except (OSError, TypeError):  # made without a file, or in C
            continue
        except (SyntaxError, tokenize.TokenError):  # in a function, with lines of a text that are not indented
            continue
        said = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        alone = {line for line in said if source.splitlines()[line - 1].lstrip().startswith("#")}
        for node in getattr(definition, "body", []):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                lines = [node.end_lineno] if node.end_lineno in said else range(first, node.lineno)
                found[node.target.id] = " ".join(said[line] for line in lines)
    return found


def parse_flags(
    base: Experiment, argv: Sequence[str], tables: Mapping[str, Mapping[str, Any]], prog: str, description: str
) -> Experiment:
    """The experiment with the fields of the command line.

    Raises:
        UsageError: a field out of range.
        SystemExit: as `parse_value`.
    """
    given = parse_value(base, argv, tables, prog, description)
    kept = {name: (*given[name], *flag.objects) for name, flag in flags(base).items() if name in given and flag.objects}
    return replace_fields(base, given | kept)


def parse_value(
    base: Experiment, argv: Sequence[str], tables: Mapping[str, Mapping[str, Any]], prog: str, description: str
) -> dict[str, Any]:
    """Values of the command line by flag, which tyro parses.

    It is given the flags that are named, without their help: to build a parser of all takes as long as many an import.
    For --help, and if there is a mistake that it has to explain, it is given all, with help.

    Args:
        tables: those that a flag names a row of, by flag, for --help.

    Raises:
        SystemExit: a value of another type, after tyro has said so; or --help.
    """
    known = flags(base)
    shown = {name: shown_value(flag) for name, flag in known.items()}
    named = {name for word in flag_names(argv) for name in (word, strip_no_prefix(word))}
    few = {name: flag for name, flag in known.items() if name in named}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            values = split_values(few, shown, tables, argv, with_help=False, prog=prog)
    except SystemExit:  # it says so again, in full
        values = split_values(known, shown, tables, argv, with_help=True, prog=prog, description=description)
    return {name: new for name, new in values.items() if new is not shown[name] and new != shown[name]}


def split_values(
    known: Mapping[str, Flag],
    shown: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str],
    *,
    with_help: bool,
    prog: str,
    description: str = "",
) -> dict[str, Any]:
    """Values of these flags by the command line.

    Args:
        known: flags that it may have.
        shown: their values without it.
        tables: as in `parse_flags`.
        with_help: with the texts of --help.
        prog: the program's line, for messages.
        description: what it does, for --help.

    Raises:
        SystemExit: a mistake, or --help.
    """
    groups = {group: names for group, names in group_flags(known).items() if names}
    parts = []
    for group, names in groups.items():
        part = group_class(group, names, known, shown, tables, with_help)
        parts.append((identifier(group), part, dataclasses.field(default_factory=part)))
    got: Any = tyro.cli(dataclasses.make_dataclass("Flags", parts), args=argv, prog=prog, description=description)
    return {
        name: getattr(getattr(got, identifier(group)), identifier(name))
        for group, names in groups.items()
        for name in names
    }


def group_flags(known: Mapping[str, Flag]) -> dict[str, list[str]]:
    """Names of flags by heading, in the order of --help."""
    heading = {name: group for group, names in GROUPS.items() for name in names}
    groups: dict[str, list[str]] = {group: [name for name in names if name in known] for group, names in GROUPS.items()}
    for name in known:
        if name not in heading:
            groups.setdefault(name.rpartition(".")[0] or "other", []).append(name)
    return groups


def group_class(
    group: str,
    names: Sequence[str],
    known: Mapping[str, Flag],
    shown: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    with_help: bool,
) -> type:
    """A dataclass with one heading's fields, spelled as in their parts."""
    fields = []
    for name in names:
        flag = known[name]
        text = flag.help if with_help else ""  # read from the source
        arg = tyro.conf.arg(name=name, prefix_name=False, help=text, metavar=flag.metavar(tables.get(name, {})))
        # The words of a `Literal` are checked by the experiment, with a better message than the parser's.
        hint = str if flag.hint is Any or literal_words(flag.hint) else flag.hint
        default = dataclasses.field(default_factory=functools.partial(shown.__getitem__, name))
        fields.append((identifier(name), Annotated[hint, arg], default))
    about = ABOUT.get(group) or inspect.getdoc(type(known[names[0]].part)) or ""
    return dataclasses.make_dataclass(group, fields, namespace={"__doc__": about.partition("\n")[0]})


def summary() -> str:
    """Lines on the first group's flags, shown if no experiment is named."""
    known, names = flags(Experiment()), GROUPS["common"]
    width = max(map(len, names))
    return "\n".join(f"  --{name:{width}}  {known[name].help}" for name in names)


def identifier(name: str) -> str:
    """A flag's name as Python spells names."""
    return name.replace("-", "_").replace(".", "__")


def shown_value(flag: Flag) -> Any:
    """A field's value, or the name of an object set in Python.

    Objects among words are left out.
    """
    value = flag.value
    if flag.objects:
        return tuple(each for each in value if isinstance(each, str))
    plain = value is None or isinstance(value, (bool, int, float, str, tuple, list))
    return value if plain else getattr(value, "name", type(value).__name__)


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


def unknown_flags(argv: Sequence[str], experiment: Experiment) -> list[str]:
    """Names of flags, `--name` or `--no-name`, that the experiment does not have."""
    known = {"help", *flags(experiment)}
    return [name for name in flag_names(argv) if name not in known and strip_no_prefix(name) not in known]


def flag_names(argv: Sequence[str]) -> list[str]:
    """Names of the flags on a command line."""
    return [arg[2:].split("=")[0].replace("_", "-") for arg in argv if arg.startswith("--")]


def takes_value(arg: str) -> bool:
    """Return True for a flag whose value is the next argument."""
    name = arg[2:].replace("_", "-")
    flag = flags(Experiment()).get(strip_no_prefix(name))
    return arg.startswith("--") and "=" not in arg and not (flag and flag.hint is bool)


def strip_no_prefix(name: str) -> str:
    """`rule.force` for `rule.no-force`."""
    head, dot, last = name.rpartition(".")
    return head + dot + last.removeprefix("no-")


def to_json(experiment: Experiment) -> dict[str, Any]:
    """The configuration as plain JSON values; Python objects appear by name."""

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
