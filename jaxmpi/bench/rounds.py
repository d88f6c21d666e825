"""Rounds of a job: all ranks run each contender once a round.

Short exchanges are repeated until a sample is long enough to time. The slowest rank's time counts.
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
from jaxmpi.runtime import failures

SAMPLE_S = 0.02  # a shorter exchange is repeated to fill it
MOST_REPEATS = 1000


def measure(plan: BenchPlan, control: Processes, keep: Callable[[list[Json]], None]) -> list[Json]:
    """Time every contender in every round, case by case; the cases' seconds, on rank 0.

    Args:
        plan: equal on all ranks.
        control: the ranks.
        keep: called on rank 0 with the cases so far, after each.
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
    results: list[Json] = []
    for case in plan.cases:
        results.append(measure_case(case, field, plan, control))
        if control.rank == 0:
            keep(results)
    return results


def measure_case(case: Case, field: Sequence[Contender], plan: BenchPlan, control: Processes) -> Json:
    """Measure a case: checked first calls, warm-up, then rounds that count."""
    if control.rank == 0:
        print(f"{case.name}, {control.size} ranks: {len(field)} contenders, {plan.rounds} rounds", flush=True)
    inputs, runs = Inputs(case.shapes, control), {}
    for contender in field:
        failures.set_phase(f"{case.name}: first call of {contender.name}")
        runs[contender.name] = run = contender.start(inputs)
        contenders.check_result(contender, run(), control)
    names, repeats, rounds = list(runs), dict.fromkeys(runs, 1), []
    for i in range(plan.warm_up + plan.rounds):
        first = i % len(names)
        samples = {}
        for name in names[first:] + names[:first]:
            failures.set_phase(f"{case.name}: {name}, round {i + 1 - plan.warm_up} of {plan.rounds}")
            samples[name] = sample(runs[name], repeats[name], control)
        every = control.allgather_object({name: [*one] for name, one in samples.items()})
        of_ranks = {name: [Sample(*samples[name]) for samples in every] for name in names}
        if i >= plan.warm_up:
            rounds.append(of_ranks)
        elif i == plan.warm_up - 1:
            slowest = {name: max(sample.seconds for sample in of_ranks[name]) for name in names}
            repeats = {name: min(MOST_REPEATS, max(1, math.ceil(SAMPLE_S / slowest[name]))) for name in names}
    return {
        "case": case.name,
        "is_tree": case.is_tree,
        "floats": case.floats,
        "leaves": len(case.shapes),
        "ranks": control.size,
        "hosts": len(set(control.hosts)) if isinstance(control, MpiProcesses) else 1,
        "picked": inputs.picked,
        "seconds": {name: [max(sample.seconds for sample in of_ranks[name]) for of_ranks in rounds] for name in names},
        "sent": {name: sent_by_hosts([of_ranks[name] for of_ranks in rounds], control) for name in names},
    }


class Sample(NamedTuple):
    """Measurement of one contender in one round, on one rank."""

    seconds: float
    sent_bytes: float  # bytes that this host's cards sent, an exchange


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


def sent_by_hosts(rounds: Sequence[Sequence[Sample]], control: Processes) -> Json:
    """Hosts' median sent bytes, and the largest; both None on one host."""
    if not isinstance(control, MpiProcesses) or len(set(control.hosts)) == 1:
        return {"sent_bytes": None, "sent_bytes_by_host": None}
    ranks = range(control.size)
    medians = [statistics.median_high(samples[r].sent_bytes for samples in rounds) for r in ranks]
    # One of a host's ranks may have read the counter late.
    host_bytes = [max(medians[r] for r in ranks if control.hosts[r] == host) for host in sorted(set(control.hosts))]
    return {"sent_bytes": max(host_bytes), "sent_bytes_by_host": host_bytes}


def card_bytes() -> int:
    """Bytes that this host's network cards have sent since it started."""
    cards = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for card, counts in cards if card.strip() != "lo")
