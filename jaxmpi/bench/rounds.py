"""Rounds of a job: all ranks run each contender once a round.

Short exchanges are repeated until a sample is long enough to time. The slowest rank's time counts. Rank 0
stores the results so far every few seconds, for a job that is ended early.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from jaxmpi.bench import contenders
from jaxmpi.bench.baselines import CALLS, peer
from jaxmpi.bench.contenders import COPY, LINK, Contender, Inputs, Run
from jaxmpi.bench.plan import BenchPlan, Case
from jaxmpi.bench.results import Json
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import check
from jaxmpi.core.shared_memory import read
from jaxmpi.runtime import failures

SAMPLE_S = 0.02  # a shorter exchange is repeated to fill it
MOST_REPEATS = 1000
PROGRESS_S = 2.0  # between lines of progress, at least


class BenchProgress:
    """Progress and partial results on rank 0, for jobs that end early."""

    def __init__(self, control: Processes, keep: Callable[[list[Json]], None]) -> None:
        """Take the function that stores cases; the last may be incomplete."""
        self.is_on, self.keep = control.rank == 0, keep
        self.begin = time.monotonic()
        self.next_line = self.begin

    def show(self, text: str) -> None:
        """Print a line, unless one was just printed."""
        now = time.monotonic()
        if self.is_on and now >= self.next_line:
            print(f"{text}, {now - self.begin:.0f} s", flush=True)
            self.next_line = now + PROGRESS_S


def measure(
    plan: BenchPlan, control: Processes, turns: AbstractContextManager, keep: Callable[[list[Json]], None]
) -> None:
    """Time every contender in every round, case by case.

    Args:
        plan: equal on all ranks.
        control: the ranks.
        turns: entered for every round, if another job measures too.
        keep: called on rank 0 with the cases so far: after a case's first round that counts, then every 2 s, and when
            the case is done.
    """
    several_hosts = isinstance(control, MpiProcesses) and len(set(control.hosts)) > 1
    check(several_hosts or plan.rate_mbit is None, "--rate-mbit: all ranks are on one host, and no link is in use")
    peers = plan.peers if isinstance(control, MpiProcesses) else ()
    if isinstance(control, MpiProcesses):
        for name in peers:
            CALLS[name].connect(control)
    elif plan.peers and control.rank == 0:
        print("one rank: nothing travels, and no peer runs", flush=True)
    yardsticks = [] if control.size == 1 else [LINK] if several_hosts else [COPY]
    field = [*map(contenders.own_contender, plan.strategies), *map(peer, peers), *yardsticks]
    check(bool(field), "one rank and no strategies: nothing to time")
    progress, done = BenchProgress(control, keep), []
    for case in plan.cases:
        done.append(measure_case(case, field, plan, control, turns, progress, done))


def measure_case(
    case: Case,
    field: Sequence[Contender],
    plan: BenchPlan,
    control: Processes,
    turns: AbstractContextManager,
    progress: BenchProgress,
    before: Sequence[Json],
) -> Json:
    """Measure a case: checked first calls, warm-up, then rounds that count."""
    if control.rank == 0:
        print(f"{case.name}, {control.size} ranks: {len(field)} contenders, {plan.rounds} rounds", flush=True)
    inputs, runs = Inputs(case.shapes, control), {}
    with turns:
        for contender in field:
            failures.set_phase(f"{case.name}, {contender.name}, first call")
            progress.show(f"{case.name}: first call of {contender.name}")
            runs[contender.name] = run = contender.start(inputs)
            contenders.check_result(contender, run(), control)
    repeats = dict.fromkeys(runs, 1)
    rounds: list[Round] = []
    facts = {
        "case": case.name,
        "is_tree": case.is_tree,
        "floats": case.floats,
        "leaves": len(case.shapes),
        "ranks": control.size,
        "hosts": len(set(control.hosts)) if isinstance(control, MpiProcesses) else 1,
    }
    so_far: Json = {}
    next_kept = -math.inf
    for i in range(plan.warm_up + plan.rounds):
        with turns:
            mine = one_round(rotate(list(runs), i), runs, repeats, case, control)
        if i < plan.warm_up:
            progress.show(f"{case.name}: warm-up {i + 1} of {plan.warm_up}")
            if i == plan.warm_up - 1:
                repeats = {name: repeats_for(mine[name].seconds, control) for name in runs}
            continue
        rounds.append(gather_samples(mine, control))
        is_last = i == plan.warm_up + plan.rounds - 1
        if control.rank == 0 and (is_last or time.monotonic() >= next_kept):
            so_far = facts | {"picked": inputs.picked} | summarize_rounds(list(runs), rounds, control)
            progress.keep([*before, so_far])
            next_kept = time.monotonic() + PROGRESS_S
            medians = (f"{name} {1e3 * statistics.median(s):.4g}" for name, s in so_far["seconds"].items())
            progress.show(
                f"{case.name}: round {len(rounds)} of {plan.rounds}; medians so far, ms: {', '.join(medians)}"
            )
    return so_far


class ContenderMeasurement(NamedTuple):
    """Measurement of one contender in one round, on this rank."""

    seconds: float
    sent: float  # bytes that this host's cards sent, an exchange


def one_round(
    order: Sequence[str], runs: dict[str, Run], repeats: dict[str, int], case: Case, control: Processes
) -> dict[str, ContenderMeasurement]:
    """Take a sample of each contender in this order."""
    samples = {}
    for name in order:
        failures.set_phase(f"{case.name}, {name}")
        samples[name] = sample(runs[name], repeats[name], control)
    return samples


def sample(run: Run, repeats: int, control: Processes) -> ContenderMeasurement:
    """Time `repeats` exchanges in a row, after an untimed one if several."""
    control.barrier()  # polled, so waiting ranks leave the cores to others
    before = card_bytes()
    if repeats > 1:
        run()  # ranks leave the barrier up to a millisecond apart
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = (time.perf_counter() - begin) / repeats
    control.barrier()  # messages that this rank has sent may still wait for its card
    return ContenderMeasurement(seconds, (card_bytes() - before) / (repeats + (repeats > 1)))


def rotate(names: list[str], places: int) -> list[str]:
    """Rotate the names by so many places."""
    at = places % len(names)
    return names[at:] + names[:at]


def repeats_for(seconds: float, control: Processes) -> int:
    """Exchanges to time in a row, the same number on all ranks."""
    most = max(control.allgather_object(seconds))
    return min(MOST_REPEATS, max(1, math.ceil(SAMPLE_S / most)))


Round = dict[str, list["ContenderMeasurement"]]  # by contender, of all ranks


def gather_samples(mine: dict[str, ContenderMeasurement], control: Processes) -> Round:
    """Gather every rank's samples of a round on all ranks."""
    each = control.allgather_object({name: [*sample] for name, sample in mine.items()})
    return {name: [ContenderMeasurement(*samples[name]) for samples in each] for name in mine}


def summarize_rounds(names: Sequence[str], rounds: Sequence[Round], control: Processes) -> Json:
    """The slowest rank's seconds of each round, and hosts' median sent bytes."""
    return {
        "seconds": {name: [max(sample.seconds for sample in each[name]) for each in rounds] for name in names},
        "sent": {name: sent_by_hosts([each[name] for each in rounds], control) for name in names},
    }


def sent_by_hosts(rounds: Sequence[Sequence[ContenderMeasurement]], control: Processes) -> Json:
    """Hosts' median sent bytes, and the largest; both None on one host."""
    if not isinstance(control, MpiProcesses) or len(set(control.hosts)) == 1:
        return {"sent_bytes": None, "sent_bytes_by_host": None}
    ranks = range(control.size)
    medians = [statistics.median_high(samples[r].sent for samples in rounds) for r in ranks]
    # One of a host's ranks may have read the counter late.
    each = [max(medians[r] for r in ranks if control.hosts[r] == host) for host in sorted(set(control.hosts))]
    return {"sent_bytes": max(each), "sent_bytes_by_host": each}


def card_bytes() -> int:
    """Bytes that this host's network cards have sent since it started."""
    cards = [line.split(":") for line in read(Path("/proc/self/net/dev")).splitlines()[2:]]
    return sum(int(counts.split()[8]) for card, counts in cards if card.strip() != "lo")
