"""Cases, strategies, peers and rounds of a benchmark.

Rank 0 makes the plan and sends it to all ranks as JSON. So they run the same contenders in the same order.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.bench import contenders
from jaxmpi.bench.contenders import Shape
from jaxmpi.bench.options import select_peers
from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import check_writable
from jaxmpi.core.shared_memory import available_bytes as free_bytes
from jaxmpi.runtime import process

# The lengths of Baidu's test of its ring allreduce, up to 64 Mi floats (Gibiansky 2017).
BAIDU = (0, 32, 256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23, 1 << 26)
MULTIPLES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20}


class Case(NamedTuple):
    """Operand of an exchange: a vector, or a tree."""

    name: str
    is_tree: bool
    shapes: list[Shape]

    @property
    def floats(self) -> int:
        """Number of floats in all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class BenchPlan:
    """Contents of a job; equal on all ranks."""

    strategies: tuple[str, ...]
    peers: tuple[str, ...]
    cases: tuple[Case, ...]
    rounds: int
    warm_up: int
    rate_mbit: float | None
    experiment: str = ""  # file whose strategies, wires and compressors ranks know

    @classmethod
    def from_json(cls, value: Any) -> "BenchPlan":
        """Build a plan from the JSON of its `dataclasses.asdict`."""
        return cls(**(value | {"cases": tuple(Case(*case) for case in value["cases"])}))


def floats(text: str) -> int:
    """Parse `64Mi` as a number of floats.

    Raises:
        UsageError: it is no number, or 2^31 and more, which MPI cannot count.
    """
    match = re.fullmatch(r"(\d+)(Ki|Mi|)", text)
    number = int(match[1]) * MULTIPLES[match[2]] if match else -1
    if not 0 <= number < 2**31:
        raise UsageError(f"--sizes: got {text!r}; expected floats below 2^31, such as 4096, 64Ki or 64Mi")
    return number


def check_options(options: argparse.Namespace) -> None:
    """Check what the options name, before ranks start.

    Raises:
        UsageError: unknown strategies or peers; a file that cannot be read or written.
    """
    add_rows(experiment_of(options))
    for name in options.strategies:
        contenders.find_contender(name)
    if not (select_peers(options.peers) or options.strategies):
        raise UsageError("nothing to time: neither strategies nor peers")
    for size in options.sizes or ():
        floats(size)
    if options.out:
        check_writable(options.out)


def experiment_of(options: argparse.Namespace) -> str:
    """The experiment file; empty without one."""
    return str(experiment_file.locate(options.experiment).resolve()) if options.experiment else ""


def make_plan(options: argparse.Namespace, ranks: int) -> BenchPlan:
    """The plan for the options, without cases that exceed this host's memory; for trees it runs `jaxmpi.models`.

    Raises:
        UsageError: unknown models, or no case is left.
    """
    experiment = experiment_of(options)
    models = options.tree or ([experiment] if experiment and options.sizes is None else [])
    named = options.sizes or (BAIDU if options.sizes is not None or not models else ())
    cases = [Case(f"{n:,} floats", False, [(n,)]) for n in (floats(str(size)) for size in named)]
    shown = {experiment: options.experiment}
    cases += [Case(shown.get(name, name), True, list(tree.values())) for name, tree in trees(models).items()]
    plan = BenchPlan(
        strategies=tuple(dict.fromkeys(options.strategies)),
        peers=select_peers(options.peers),
        cases=tuple(cases),
        rounds=options.rounds,
        warm_up=options.warm_up,
        rate_mbit=options.rate_mbit,
        experiment=experiment,
    )
    placement = process.launched()
    local, free = placement.local_size if placement else ranks, free_bytes()
    for case in cases:
        if (needed := needed_bytes(case, local)) > free:
            print(f"{case.name}: left out: {local} ranks need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    fitting = tuple(case for case in cases if needed_bytes(case, local) <= free)
    if not fitting:
        raise UsageError("no case fits into memory")
    return dataclasses.replace(plan, cases=fitting)


@functools.cache
def add_rows(experiment: str) -> None:
    """Run an experiment file, once, for the rows that it adds."""
    if experiment:
        experiment_file.load(Path(experiment))


def trees(names: Sequence[str]) -> dict[str, dict[str, Shape]]:
    """Gradient shapes by model, from another process: here JAX starts after MPI."""
    models = list(dict.fromkeys(names))
    if not models:
        return {}
    line = [sys.executable, "-m", "jaxmpi.models", "--tree", *models]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))} | {"JAX_PLATFORMS": "cpu"}
    job = subprocess.run(line, capture_output=True, text=True, env=environ)
    last = job.stderr.strip().splitlines()[-1:] or [f"exit code {job.returncode}"]
    if job.returncode:
        raise UsageError(f"--tree: {last[0].removeprefix('error: ')}")
    shapes = json.loads(job.stdout)
    return {model: {path: tuple(shape) for path, shape in tree.items()} for model, tree in shapes.items()}


# ---------------------------------------------------------------- memory

RANK_BYTES = 900_000_000  # of a process without any case, with torch in it
# As big as a case, in a rank: three forms of its data, and four that `auto` works on before it has chosen. Compressors
# take two more. With nine, AlexNet on 8 ranks was left out on a machine of 24 GB that has room for it.
ARRAYS = 7


def needed_bytes(case: Case, ranks: int) -> int:
    """Bytes of these ranks at most."""
    return ranks * (RANK_BYTES + ARRAYS * 4 * case.floats)
