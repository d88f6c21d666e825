"""`jaxmpi completion`: what a shell offers behind `jaxmpi`, as a script of words, so that Tab starts no Python."""

import contextlib
import importlib
import io
import re
from collections.abc import Sequence

from jaxmpi.config import experiment_file
from jaxmpi.config.flags import flags
from jaxmpi.config.schema import Experiment
from jaxmpi.config.validate import literal_words
from jaxmpi.core.errors import UsageError
from jaxmpi.tools.cli import COMMANDS, import_function

USAGE = """usage: jaxmpi completion > FILE

Print a script by which bash and zsh complete commands, flags, experiments and files. For all shells, in ~/.bashrc or
~/.zshrc: eval "$(jaxmpi completion)"

example: jaxmpi completion > ~/.local/share/bash-completion/completions/jaxmpi"""

SCRIPT = """[ -z "$ZSH_VERSION" ] || {{ autoload -U +X compinit bashcompinit && compinit && bashcompinit; }}
_jaxmpi() {{
  local words
  case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}} " in
    "1 "*) words="{commands}" ;;
{cases}
  esac
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _jaxmpi jaxmpi"""

ON_EXPERIMENTS, ON_RUNS = ("train", "sweep", "forecast"), ("evaluate", "predict", "export")  # take fields, too


def main(argv: Sequence[str]) -> None:
    """Print the script, or the usage."""
    if argv not in ([], ["--help"], ["-h"]):
        raise UsageError(f"got {' '.join(argv)}\n{USAGE}")
    behind = {name: words_behind(name) for name in COMMANDS if name != "completion"}
    longer = [f"data {word}" for word in behind["data"] if not word.startswith("-")]  # before the shorter one
    behind = {name: words_behind(*name.split()) for name in longer} | behind
    cases = [f'    *" {name} "*) words="{" ".join(words)}" ;;' for name, words in behind.items()]
    values = [f'    --{flag}) words="{" ".join(words)}" ;;' for flag, words in words_by_flag().items()]
    script = SCRIPT.format(commands=" ".join(COMMANDS), cases="\n".join(cases), values="\n".join(values))
    print(USAGE if argv else script)


def words_by_flag() -> dict[str, list[str]]:
    """The values of each flag that takes only some."""
    words = {name: [*literal_words(flag.type)] for name, flag in flags(Experiment()).items()}
    for name, rows in importlib.import_module("jaxmpi.trainer.main").TABLES.items():  # late, since it imports JAX
        words[name] = [row for row in rows if "<" not in row]  # a blank is the user's to fill
    return {name: values for name, values in words.items() if values}


def words_behind(command: str, *more: str) -> list[str]:
    """The options and commands that a command's help names, and what may be trained."""
    text, spec = io.StringIO(), COMMANDS[command]
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        import_function(spec.options or spec.run)([*more, "--help"])
    words = set(re.findall(r"(?<![\w'\"-])--?[a-z](?:[\w.-]*\w)?", text.getvalue()))
    words |= set(re.findall(rf"^(?:usage:)? +jaxmpi {command} ([a-z]+)", text.getvalue(), re.MULTILINE))
    if command in (*ON_EXPERIMENTS, *ON_RUNS):
        words |= {f"--{name}" for name in flags(Experiment())}
    if command in ON_EXPERIMENTS:
        words |= experiment_file.find_shipped().keys()
    return sorted(words - {"--field"})  # which stands for any
