"""Shares of a host's cores among processes that do not wait for each other, with real processes on one core."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems show no times of other processes"),
]

LIMIT_S = 60.0  # of a worker
# Steps of 2 ms of CPU time and perhaps a nap, until all have run so long together; whatever else the core has to do.
# argv: nice, nap, seconds of all; input: "fair" or not, and all addresses.
WORKER = """
import contextlib, json, os, sys, time
from jaxmpi.runtime.fair_cores import FairCores
nice, nap_s, budget_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.nice(nice)
cores = FairCores()
print(json.dumps(cores.address), flush=True)
is_fair, everybody = json.loads(input())
cores.begin(everybody if is_fair else [])
clocks = [~pid << 3 | 2 for pid, *_ in everybody]
began_s, steps, slept_s, first_s = sum(map(time.clock_gettime, clocks)), 0, 0.0, time.monotonic()
with contextlib.suppress(OSError):  # another has ended first
    while sum(map(time.clock_gettime, clocks)) - began_s < budget_s:
        until_s = time.process_time() + 0.002
        while time.process_time() < until_s:
            pass
        steps += 1
        time.sleep(nap_s)
        wait_s = cores.sleep_s()
        time.sleep(wait_s)
        slept_s += wait_s
print(steps, slept_s, time.monotonic() - first_s)
"""


@contextmanager
def begun(kinds: Sequence[tuple[int, float]], is_fair: bool, budget_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Workers of (nice, nap) on one core, which begin together."""
    core = {min(os.sched_getaffinity(0))}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (*kind, budget_s))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    ]
    try:
        for worker in workers:
            os.sched_setaffinity(worker.pid, core)
        addresses = ",".join([worker.stdout.readline() for worker in workers if worker.stdout])
        for worker in workers:
            assert worker.stdin
            worker.stdin.write(f"[{str(is_fair).lower()}, [{addresses}]]".replace("\n", "") + "\n")
            worker.stdin.flush()
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def ended(worker: subprocess.Popen[str]) -> tuple[int, float]:
    """Steps of a worker, and the part of its time that it slept for others."""
    out, _ = worker.communicate(timeout=LIMIT_S)
    steps, slept_s, took_s = out.split()
    return int(steps), float(slept_s) / float(took_s)


@pytest.mark.parametrize(("is_fair", "budget_s"), [(False, 1.0), (True, 3.0)])
def test_a_worker_to_which_the_system_gives_less_makes_as_many_steps_as_others_if_they_take_turns(
    is_fair: bool, budget_s: float
) -> None:
    with begun([(0, 0.0), (0, 0.0), (3, 0.0)], is_fair, budget_s) as workers:
        steps = [ended(worker)[0] for worker in workers]
    shares = [len(steps) * n / sum(steps) for n in steps]
    assert (max(abs(share - 1) for share in shares) < 0.1) is is_fair, shares


def test_nobody_waits_for_a_worker_that_is_stopped_or_sleeps() -> None:
    with begun([(0, 0.0), (0, 0.005), (0, 0.0)], True, 3.0) as (worker, _, stopped):
        time.sleep(0.3)
        stopped.send_signal(signal.SIGSTOP)
        steps, slept = ended(worker)
    assert steps > 500  # 1500 steps are a third of them each with equal shares
    assert slept < 0.1  # most of it before that; beside other programs all takes longer
