"""Inside a job: rounds in which every contender runs once, on all ranks together."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from jaxmpi import runtime
from jaxmpi.bench import contenders
from jaxmpi.bench.contenders import COPY, LINK, Contender, Inputs, Run
from jaxmpi.bench.figures import Json
from jaxmpi.bench.options import Case, Plan
from jaxmpi.bench.peers import PEERS, peer
from jaxmpi.config import check
from jaxmpi.data.segments import read
from jaxmpi.processes import MpiProcesses, Processes

SAMPLE_S = 0.02  # a shorter exchange is repeated up to this
MOST_REPEATS = 1000


def measure(plan: Plan, control: Processes, turns: AbstractContextManager) -> list[Json]:
    """Seconds of every contender in every round, case by case; all ranks get the same."""
    several_hosts = isinstance(control, MpiProcesses) and len(set(control.hosts)) > 1
    check(several_hosts or plan.rate_mbit is None, "--rate-mbit: all ranks are on one host, and no link is in use")
    peers = plan.peers if isinstance(control, MpiProcesses) else ()
    if isinstance(control, MpiProcesses):
        for name in peers:
            PEERS[name].connect(control)
    elif plan.peers and control.rank == 0:
        print("one rank: nothing travels, and no peer runs", flush=True)
    yardsticks = [] if control.size == 1 else [LINK] if several_hosts else [COPY]
    field = [*map(contenders.ours, plan.strategies), *map(peer, peers), *yardsticks]
    check(bool(field), "one rank and no strategies: nothing to time")
    return [measure_case(case, field, plan, control, turns) for case in plan.cases]


def measure_case(
    case: Case, field: Sequence[Contender], plan: Plan, control: Processes, turns: AbstractContextManager
) -> Json:
    """One case: a first call of each contender with its result checked, warm-up, rounds that count."""
    if control.rank == 0:
        print(f"{case.name}, {control.size} ranks: {len(field)} contenders, {plan.rounds} rounds", flush=True)
    inputs, runs = Inputs(case.shapes, control), {}
    with turns:
        for contender in field:
            runtime.doing(f"{case.name}, {contender.name}, first call")
            runs[contender.name] = run = contender.start(inputs)
            contenders.check_result(contender, run(), control)
    repeats = dict.fromkeys(runs, 1)
    samples: list[dict[str, Sample]] = []
    for i in range(plan.warm_up + plan.rounds):
        with turns:
            samples.append(one_round(rotated(list(runs), i), runs, repeats, case, control))
        if i == plan.warm_up - 1:
            repeats = {name: repeats_for(samples[-1][name].seconds, control) for name in runs}
    counted = samples[plan.warm_up :]
    return {
        "case": case.name,
        "is_tree": case.is_tree,
        "floats": case.floats,
        "leaves": len(case.shapes),
        "ranks": control.size,
        "hosts": len(set(control.hosts)) if isinstance(control, MpiProcesses) else 1,
        "seconds": {name: slowest([s[name].seconds for s in counted], control) for name in runs},
        "picked": inputs.picked,
        "sent": {name: sent_by_hosts([s[name].sent for s in counted], control) for name in runs},
    }


class Sample(NamedTuple):
    """One contender in one round, on this rank."""

    seconds: float
    sent: float  # bytes that this host's cards sent, an exchange


def one_round(
    order: Sequence[str], runs: dict[str, Run], repeats: dict[str, int], case: Case, control: Processes
) -> dict[str, Sample]:
    """A sample of each contender in this order."""
    samples = {}
    for name in order:
        runtime.doing(f"{case.name}, {name}")
        samples[name] = sample(runs[name], repeats[name], control)
    return samples


def sample(run: Run, repeats: int, control: Processes) -> Sample:
    """Time so many exchanges in a row; the first is not counted where there are several."""
    control.barrier()  # polled: whoever waits leaves the cores to others
    before = card_bytes()
    if repeats > 1:
        run()  # ranks leave the barrier up to a millisecond apart
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = (time.perf_counter() - begin) / repeats
    control.barrier()  # what this rank has sent may still wait for its card
    return Sample(seconds, (card_bytes() - before) / (repeats + (repeats > 1)))


def rotated(names: list[str], places: int) -> list[str]:
    """The names, beginning so many places on."""
    at = places % len(names)
    return names[at:] + names[:at]


def repeats_for(seconds: float, control: Processes) -> int:
    """Exchanges to be timed in a row, the same on all ranks."""
    most = max(float(text) for text in control.gather(str(seconds)))
    return min(MOST_REPEATS, max(1, math.ceil(SAMPLE_S / most)))


def slowest(seconds: Sequence[float], control: Processes) -> list[float]:
    """Of each round the time of the slowest rank."""
    return [max(column) for column in zip(*map(json.loads, control.gather(json.dumps(seconds))), strict=True)]


def sent_by_hosts(sent: Sequence[float], control: Processes) -> Json:
    """Medians over rounds, of every host and of the one that sends most; None on one host, whose card has no part."""
    if not isinstance(control, MpiProcesses) or len(set(control.hosts)) == 1:
        return {"sent_bytes": None, "sent_bytes_by_host": None}
    medians = [float(text) for text in control.gather(str(statistics.median_high(sent)))]
    ranks = range(control.size)  # of a host's ranks one may have looked late
    each = [max(medians[r] for r in ranks if control.hosts[r] == host) for host in sorted(set(control.hosts))]
    return {"sent_bytes": max(each), "sent_bytes_by_host": each}


def card_bytes() -> int:
    """Bytes that this host's network cards have sent since it started."""
    cards = [line.split(":") for line in read(Path("/proc/self/net/dev")).splitlines()[2:]]
    return sum(int(counts.split()[8]) for card, counts in cards if card.strip() != "lo")
