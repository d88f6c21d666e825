"""Command lines of the `jaxmpi` commands, whose errors read like all others of this package."""

import argparse
import re
from typing import Any, NoReturn

from jaxmpi.core.errors import UsageError, hint

OF_TYPE = re.compile(r"invalid (\w+) value: (.*)")
TYPES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Parser that raises this package's errors, and takes no flag that is cut short."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)
        self.color = False  # of Python 3.14, in usages as well

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`: got, expected, the usage."""
        message = OF_TYPE.sub(lambda found: f"got {found[2]}; expected {TYPES.get(found[1], found[1])}", message)
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2]
            message = f"got {word}; {hint(word, self._option_string_actions)}expected no such argument"
        raise UsageError(f"{message.removeprefix('argument ')}\n{self.format_usage().rstrip()}")
