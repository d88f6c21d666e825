"""Command-line flags made from the fields of dataclasses, in groups.

Every setting needs a flag with help text, without a second list that repeats the fields. The flags therefore come from
the dataclass fields, and the help texts from the comments at them. Tyro parses the command line; it is given a
dataclass made for it, whose parts are the groups of `GROUPS`. Building a parser of all flags takes as long as many an
import, so the first attempt knows only the flags that are named. Only `--help` or a mistake builds the full parser.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Mapping, Sequence
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
    "checkpoint": (*("keep-checkpoints", "keep-best", "monitor", "monitor-mode", "from-start", "params"),),
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
Tables = Mapping[str, Mapping[str, Any]]  # by flag: the table that it names a row of, for --help


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
    def shown(self) -> Any:
        """The value, or the name of an object set in Python; objects among words are left out."""
        value = self.value
        if self.objects:
            return tuple(each for each in value if isinstance(each, str))
        plain = value is None or isinstance(value, (bool, int, float, str, tuple, list))
        return value if plain else getattr(value, "name", type(value).__name__)

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


# ---------------------------------------------------------------- parsed


def parse_flags(base: Experiment, argv: Sequence[str], tables: Tables, prog: str, description: str) -> Experiment:
    """The experiment with the fields of the command line.

    Raises:
        UsageError: a field out of range.
        SystemExit: as `parse_values`.
    """
    values = parse_values(base, argv, tables, prog, description)
    for name, flag in flags(base).items():
        if name in values and flag.objects:  # the objects of an experiment file stay
            values[name] = (*values[name], *flag.objects)
    return replace_fields(base, values)


def parse_values(base: Experiment, argv: Sequence[str], tables: Tables, prog: str, description: str) -> dict[str, Any]:
    """Values of the command line by flag, of those that change.

    Raises:
        SystemExit: a value of another type, after tyro has said so; or --help.
    """
    known = flags(base)
    named = {name for word in flag_names(argv) for name in (word, strip_no_prefix(word))}
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            parser = make_parser({name: flag for name, flag in known.items() if name in named}, tables, with_help=False)
            got: Any = tyro.cli(parser, args=argv, prog=prog)
    except SystemExit:  # it says so again, in full
        got = tyro.cli(make_parser(known, tables, with_help=True), args=argv, prog=prog, description=description)
    values = {}
    for group in dataclasses.fields(got):
        for f in dataclasses.fields(getattr(got, group.name)):
            name = f.metadata["flag"]
            value, before = getattr(getattr(got, group.name), f.name), known[name].shown
            if value is not before and value != before:
                values[name] = value
    return values


def make_parser(known: Mapping[str, Flag], tables: Tables, *, with_help: bool) -> type:
    """A dataclass of the groups that have flags among those known, each with its flags, for tyro."""
    groups: dict[str, list[str]] = {group: [name for name in names if name in known] for group, names in GROUPS.items()}
    listed = {name for names in GROUPS.values() for name in names}
    for name in known:
        if name not in listed:
            groups.setdefault(name.rpartition(".")[0] or "other", []).append(name)
    parts = []
    for group, names in groups.items():
        if names:
            part = make_group(group, names, known, tables, with_help)
            parts.append((identifier(group), part, dataclasses.field(default_factory=part)))
    return dataclasses.make_dataclass("Flags", parts)


def make_group(group: str, names: Iterable[str], known: Mapping[str, Flag], tables: Tables, with_help: bool) -> type:
    """A dataclass of one heading's flags, spelled as in their parts."""
    fields = []
    for name in names:
        flag = known[name]
        words = literal_words(flag.hint)
        shown = words or tuple(tables.get(name, ()))
        arg = tyro.conf.arg(
            name=name,
            prefix_name=False,
            help=flag.help if with_help else "",  # read from the source
            metavar=f"{{{','.join(shown)}}}" if shown else None,
        )
        # The words of a `Literal` are checked by the experiment, with a better message than the parser's.
        hint = str if flag.hint is Any or words else flag.hint
        default = dataclasses.field(default_factory=functools.partial(getattr, flag, "shown"), metadata={"flag": name})
        fields.append((identifier(name), Annotated[hint, arg], default))
    about = ABOUT.get(group) or inspect.getdoc(type(flag.part)) or ""
    return dataclasses.make_dataclass(group, fields, namespace={"__doc__": about.partition("\n")[0]})


def summary() -> str:
    """Lines on the first group's flags, shown if no experiment is named."""
    known, names = flags(Experiment()), GROUPS["common"]
    width = max(map(len, names))
    return "\n".join(f"  --{name:{width}}  {known[name].help}" for name in names)


def identifier(name: str) -> str:
    """A flag's name as Python spells names."""
    return name.replace("-", "_").replace(".", "__")


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


# ---------------------------------------------------------------- names on a command line


def unknown_flags(argv: Sequence[str], experiment: Experiment) -> list[str]:
    """Names of flags, `--name` or `--no-name`, that the experiment does not have."""
    known = {"help", *flags(experiment)}
    return [name for name in flag_names(argv) if name not in known and strip_no_prefix(name) not in known]


def flag_names(argv: Sequence[str]) -> list[str]:
    """Names of the flags on a command line."""
    return [arg[2:].split("=")[0].replace("_", "-") for arg in argv if arg.startswith("--")]


def takes_value(arg: str) -> bool:
    """Return True for a flag whose value is the next argument."""
    flag = flags(Experiment()).get(strip_no_prefix(arg[2:].replace("_", "-")))
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
