"""Cases, strategies, peers and rounds of a benchmark.

Rank 0 makes the plan and sends it to all ranks as JSON. So they run the same contenders in the same order.
"""

import argparse
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

from jaxmpi.allreduce.working_memory import at_work
from jaxmpi.bench import contenders
from jaxmpi.bench.contenders import Shape
from jaxmpi.bench.options import PEERS, select_peers
from jaxmpi.config import experiment_file
from jaxmpi.core.errors import check
from jaxmpi.core.files import check_writable
from jaxmpi.core.shared_memory import available_bytes as free_bytes
from jaxmpi.observe import plots

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
    def of_json(cls, value: Any) -> "BenchPlan":
        """Build a plan from the JSON of its `dataclasses.asdict`."""
        return cls(**(value | {"cases": tuple(Case(*case) for case in value["cases"])}))


def floats(text: str) -> int:
    """Parse `64Mi` as a number of floats.

    Raises:
        UsageError: it is no number, or 2^31 and more, which MPI cannot count.
    """
    match = re.fullmatch(r"(\d+)(Ki|Mi|)", text)
    number = int(match[1]) * MULTIPLES[match[2]] if match else -1
    check(0 <= number < 2**31, f"--sizes: got {text!r}; expected floats below 2^31, such as 4096, 64Ki or 64Mi")
    return number


def make_plan(options: argparse.Namespace) -> BenchPlan:
    """The plan for the options; for trees it runs `python -m jaxmpi.models`.

    Raises:
        UsageError: unknown strategies, peers or models; a file that cannot be read or written.
    """
    experiment = str(experiment_file.locate(options.experiment).resolve()) if options.experiment else ""
    add_rows(experiment)
    for name in options.strategies:
        contenders.own_contender(name)
    peers = select_peers(options.peers)
    check(bool(peers or options.strategies), "nothing to time: neither strategies nor peers")
    check(bool(peers) or not options.as_it_comes, "--as-it-comes times peers, and there are none")
    if options.out:
        check_writable(options.out)
    if options.plot:
        plots.check_file(options.plot)
    models = options.tree or ([experiment] if experiment and options.sizes is None else [])
    named = options.sizes or (BAIDU if options.sizes is not None or not models else ())
    cases = [Case(f"{n:,} floats", False, [(n,)]) for n in (floats(str(size)) for size in named)]
    shown = {experiment: options.experiment}
    cases += [Case(shown.get(name, name), True, list(tree.values())) for name, tree in trees(models).items()]
    check(options.plot is None or any(case.floats for case in cases), "--plot: no case has any floats to draw")
    strategies = tuple(dict.fromkeys(options.strategies))
    return BenchPlan(
        strategies=strategies,
        peers=peers,
        cases=tuple(cases),
        rounds=options.rounds,
        warm_up=options.warm_up,
        rate_mbit=options.rate_mbit,
        experiment=experiment,
    )


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
    check(job.returncode == 0, f"--tree: {last[0].removeprefix('error: ')}")
    printed = json.loads(job.stdout)
    return {model: {path: tuple(shape) for path, shape in tree.items()} for model, tree in printed.items()}


# ---------------------------------------------------------------- as many ranks as memory holds

BASE_BYTES, TORCH_BYTES = 450_000_000, 400_000_000  # bytes of a process without any case, and of torch in it
AT_WORK_PEERS = 1  # arrays as big as a case that a peer has beside its operands
Job = tuple[Sequence[str], Sequence[str]]  # strategies and peers of one job


def rank_bytes(floats: int, job: Job) -> int:
    """Bytes of a rank: its inputs, if used, and its working arrays."""
    strategies, peers = job
    kinds = [PEERS[name].op for name in peers]
    kept = (bool(strategies) or "mean" in kinds) + ("sum" in kinds) + any(PEERS[name].receives for name in peers)
    busiest = max([*map(at_work, strategies), *(AT_WORK_PEERS for _ in peers)], default=0)
    return BASE_BYTES + TORCH_BYTES * ("torch" in peers) + round((kept + busiest) * 4 * floats)


def need_bytes(case: Case, jobs: Sequence[Job], ranks: int) -> int:
    """Bytes of these ranks of each job.

    MPI's allreduce takes two more arrays a job with peers, for all ranks together.
    """
    each = sum(rank_bytes(case.floats, job) for job in jobs)
    return ranks * each + sum(2 * 4 * case.floats for _, peers in jobs if peers)


def fitting_ranks(case: Case, jobs: Sequence[Job], wanted: int) -> int:
    """Ranks of each job, at most `wanted`, that fit in free memory."""
    free = free_bytes()
    return next((ranks for ranks in range(wanted, 0, -1) if need_bytes(case, jobs, ranks) <= free), 0)


def describe_left_out(case: Case, jobs: Sequence[Job], ranks: int) -> str:
    """A line on a case that does not fit in free memory."""
    many = f"{len(jobs)} x {ranks}" if len(jobs) > 1 else f"{ranks}"
    need_gb = need_bytes(case, jobs, ranks) / 1e9
    return f"{case.name}: left out: {many} ranks need {need_gb:.1f} GB, and {free_bytes() / 1e9:.1f} GB are free"
