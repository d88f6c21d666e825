"""Rounds of a job: all ranks run each contender once a round.

Short exchanges are repeated until a sample is long enough to time. The slowest rank's time counts. Rank 0
stores the results so far every few seconds, for a job that is ended early.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmpi.bench import contenders
from jaxmpi.bench.baselines import CALLS, peer
from jaxmpi.bench.contenders import COPY, LINK, Contender, Inputs, Run
from jaxmpi.bench.plan import BenchPlan, Case
from jaxmpi.bench.results import Json
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import UsageError
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


def measure(plan: BenchPlan, control: Processes, keep: Callable[[list[Json]], None]) -> list[Json]:
    """Time every contender in every round, case by case; the cases' seconds, on rank 0.

    Args:
        plan: equal on all ranks.
        control: the ranks.
        keep: called on rank 0 with the cases so far: after a case's first round that counts, then every 2 s, and when
            the case is done.
    """
    several_hosts = isinstance(control, MpiProcesses) and len(set(control.hosts)) > 1
    if plan.rate_mbit is not None and not several_hosts:
        raise UsageError("--rate-mbit: all ranks are on one host, and no link is in use")
    peers = plan.peers if isinstance(control, MpiProcesses) else ()
    if isinstance(control, MpiProcesses):
        for name in peers:
            CALLS[name].connect(control)
    elif plan.peers and control.rank == 0:
        print("one rank: nothing travels, and no peer runs", flush=True)
    yardsticks = [] if control.size == 1 else [LINK] if several_hosts else [COPY]
    field = [*map(contenders.find_contender, plan.strategies), *map(peer, peers), *yardsticks]
    if not field:
        raise UsageError("one rank and no strategies: nothing to time")
    progress, done = BenchProgress(control, keep), []
    for case in plan.cases:
        done.append(measure_case(case, field, plan, control, progress, done))
    return done


def measure_case(
    case: Case,
    field: Sequence[Contender],
    plan: BenchPlan,
    control: Processes,
    progress: BenchProgress,
    before: Sequence[Json],
) -> Json:
    """Measure a case: checked first calls, warm-up, then rounds that count."""
    if control.rank == 0:
        print(f"{case.name}, {control.size} ranks: {len(field)} contenders, {plan.rounds} rounds", flush=True)
    inputs, runs = Inputs(case.shapes, control), {}
    for contender in field:
        failures.set_phase(f"{case.name}, {contender.name}, first call")
        progress.show(f"{case.name}: first call of {contender.name}")
        runs[contender.name] = run = contender.start(inputs)
        contenders.check_result(contender, run(), control)
    names, repeats, rounds, next_kept = list(runs), dict.fromkeys(runs, 1), [], -math.inf
    figures: Json = {}
    facts = {
        "case": case.name,
        "is_tree": case.is_tree,
        "floats": case.floats,
        "leaves": len(case.shapes),
        "ranks": control.size,
        "hosts": len(set(control.hosts)) if isinstance(control, MpiProcesses) else 1,
    }
    for i in range(plan.warm_up + plan.rounds):
        first = i % len(names)
        samples = {}
        for name in names[first:] + names[:first]:
            failures.set_phase(f"{case.name}, {name}")
            samples[name] = sample(runs[name], repeats[name], control)
        if i < plan.warm_up:
            progress.show(f"{case.name}: warm-up {i + 1} of {plan.warm_up}")
            if i == plan.warm_up - 1:
                slowest = control.allgather_object({name: samples[name].seconds for name in names})
                repeats = {name: repeats_for(max(each[name] for each in slowest)) for name in names}
            continue
        every = control.allgather_object({name: [*one] for name, one in samples.items()})
        rounds.append({name: [Sample(*each[name]) for each in every] for name in names})
        is_last = i == plan.warm_up + plan.rounds - 1
        if control.rank == 0 and (is_last or time.monotonic() >= next_kept):
            figures = facts | {"picked": inputs.picked} | summarize_rounds(names, rounds, control)
            progress.keep([*before, figures])
            next_kept = time.monotonic() + PROGRESS_S
            medians = (f"{name} {1e3 * statistics.median(s):.4g}" for name, s in figures["seconds"].items())
            progress.show(
                f"{case.name}: round {len(rounds)} of {plan.rounds}; medians so far, ms: {', '.join(medians)}"
            )
    return figures


class Sample(NamedTuple):
    """Measurement of one contender in one round, on one rank."""

    seconds: float
    sent: float  # bytes that this host's cards sent, an exchange


def sample(run: Run, repeats: int, control: Processes) -> Sample:
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
    return Sample(seconds, (card_bytes() - before) / (repeats + (repeats > 1)))


def repeats_for(seconds: float) -> int:
    """Exchanges to time in a row."""
    return min(MOST_REPEATS, max(1, math.ceil(SAMPLE_S / seconds)))


def summarize_rounds(names: Sequence[str], rounds: Sequence[dict[str, list[Sample]]], control: Processes) -> Json:
    """The slowest rank's seconds of each round, and hosts' median sent bytes."""
    return {
        "seconds": {name: [max(sample.seconds for sample in each[name]) for each in rounds] for name in names},
        "sent": {name: sent_by_hosts([each[name] for each in rounds], control) for name in names},
    }


def sent_by_hosts(rounds: Sequence[Sequence[Sample]], control: Processes) -> Json:
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
