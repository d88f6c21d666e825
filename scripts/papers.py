"""Common to tables of papers: their kind, commands, readers.

`papers_ma.py`, `papers_gibiansky.py`, `papers_kumar.py` and `papers_stooke.py` have the tables and figures of a source
each: `JOBS`, by name. `reproduce.py` runs them.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import harness

from jaxmpi.core.errors import check
from jaxmpi.observe.plots import Panel

PYTHON = sys.executable
SLOW, FAST = "200mbit", "10gbit"  # links of emulated hosts
ERROR = ", standard error"  # end of the name of what a page shows behind the mean
Values = dict[str, float]  # by quantity


class PaperTable(NamedTuple):
    """A table or figure of a paper."""

    source: str
    # commands; {out} in one stands for a new file, {kept} for one that goes on from an earlier call
    lines: Callable[[argparse.Namespace], list[list[str]]]
    read: Callable[[list[str], list[str]], Values]  # their output, and the text of their files -> ours
    theirs: Callable[[argparse.Namespace], Values]  # the paper's figures for as many workers
    remark: str  # on differences
    over_hosts: bool = True  # may run on emulated ones
    # a picture of a figure; without it bars of all quantities that the paper has
    panels: Callable[[list[str], list[str]], list[Panel]] | None = None


# ---------------------------------------------------------------- commands


def bench(options: argparse.Namespace, *args: str) -> list[str]:
    """`jaxmpi bench` on ranks of this machine, or on emulated hosts."""
    rest = [*args, "--warm-up", str(options.warm_up), "--rounds", str(options.rounds), "--out", "{out}"]
    if not options.hosts:
        return [PYTHON, "-m", "jaxmpi.bench", "-n", str(options.n), *rest]
    return [*on_hosts(options, options.hosts), "mpirun", "-n", str(options.hosts), PYTHON, "-m", "jaxmpi.bench", *rest]


def on_hosts(options: argparse.Namespace, hosts: int) -> list[str]:
    """Start of a line that runs on emulated hosts; otherwise empty."""
    return harness.cluster(hosts, options.rate or SLOW) if options.hosts and hosts > 1 else []


def script(name: str, *args: str) -> list[str]:
    """Command line of a script beside this one."""
    return [PYTHON, f"scripts/{name}.py", *args]


def from_one(options: argparse.Namespace, usual: Sequence[int]) -> list[int]:
    """Numbers of workers whose speeds are set over that of one.

    Raises:
        UsageError: one is not among them.
    """
    asked = options.workers or usual
    got = " ".join(map(str, asked))
    check(1 in asked, f"--workers: got {got}; expected 1 among them, whose speed is the base")
    return sorted(set(asked))


def up_to(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most`."""
    return [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]


def counted(options: argparse.Namespace, n: int) -> argparse.Namespace:
    """The options with another number of hosts or ranks."""
    return argparse.Namespace(**vars(options) | {"hosts" if options.hosts else "n": n})


# ---------------------------------------------------------------- results


def medians(text: str) -> dict[str, Values]:
    """Seconds by case and contender of a file of `jaxmpi bench`."""
    cases = json.loads(text)["cases"]
    return {case["case"]: {row["by"]: statistics.median(row["seconds"]) for row in case["rows"]} for case in cases}


def over(first: str, second: str, *more: str) -> Callable[[list[str], list[str]], Values]:
    """The time of `first` over those of the others, by case."""

    def read(printed: list[str], files: list[str]) -> Values:
        found = medians(files[0])
        return {
            f"{case}, {first} / {other}": seconds[first] / seconds[other]
            for case, seconds in found.items()
            for other in (second, *more)
            if first in seconds and other in seconds
        }

    return read


def tables(text: str) -> list[list[str]]:
    """Cells of a text's Markdown rows, with heads, without separator lines."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if set(row[0]) != {"-"}]
