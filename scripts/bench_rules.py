"""Cost of asynchronous rules' exchanges with the center, without a model.

    python scripts/bench_rules.py [--rate 200mbit] [--floats 2000000] [--rounds 5] [--only link servers]

| job | what is timed | goal |
|---|---|---|
| link | one worker and one server, a link each: an exchange, beside K / rate for K bytes | <= 1.1 |
| servers | 4 workers and 4 servers, beside 4 workers and 1: exchanges a second | >= 3 |
| slow | 4 workers, one five times slower: steps a second of the others, beside all equal; gosgd and BSP too | >= 0.9 |
| idle | a server with 4 workers that do not come: its share of a core | < 0.05 |

Sleeping stands for computing. One rank a host; all but `slow` and `idle` run on hosts of scripts/cluster.py.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import harness
import numpy as np
import optax
from cluster import bits_per_s

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.rules.asynchronous.center import CenterClient, CenterLayout, CenterServer, GlobalProgress
from jaxmpi.rules.asynchronous.gossip import GossipThread
from jaxmpi.rules.asynchronous.rules import RandomGossip, easgd
from jaxmpi.rules.asynchronous.transport import Backoff, Responder
from jaxmpi.rules.base import Exchange

STEP_S = 0.02  # seconds of computing a step, in `slow`
SLOW = 5  # times as long, for the slow worker
IDLE_S = 4.0


class Job(NamedTuple):
    """Ranks to start, and the meaning of their figures."""

    ranks: int
    servers: int
    is_on_cluster: bool = True
    how: tuple[str, ...] = ()


JOBS: dict[str, tuple[Job, ...]] = {
    "link": (Job(2, 1),),
    "servers": (Job(5, 1), Job(8, 4)),
    "slow": tuple(Job(4, 0, False, how) for how in ((), ("slow",), ("gossip",), ("gossip", "slow"), ("slow", "bsp"))),
    "idle": (Job(5, 1, False),),
}


# ---------------------------------------------------------------- on a rank


class Rank:
    """This rank as a worker, or as a server in a thread."""

    def __init__(self, servers: int, floats: int) -> None:
        """Set up; collective over all ranks."""
        control = harness.control()
        self.control, self.number = control, control.rank
        self.workers = control.size - servers
        self.layout = CenterLayout(floats, max(servers, 1), "32")
        alone = Exchange(lambda tree: tree, lambda tree: tree)
        rule = easgd(optax.sgd(0.1), alone, RuleConfig("easgd")).asynchronous
        assert rule is not None
        self.rule, self.cpu_s, self._is_over = rule, 0.0, threading.Event()
        mpi, first = control.clone(), self.workers if servers else 0
        shard = self.number - first
        if 0 <= shard < max(servers, 1):
            begin, end = self.layout.shard(shard)
            progress = GlobalProgress(self.workers, 1e18, 0) if shard == 0 else None
            center = np.zeros(end - begin, np.float32)
            server = CenterServer(self.layout, shard, center, rule.apply, self.workers, progress)
            responder = Responder(mpi, server, range(self.workers))
            self._thread = threading.Thread(target=self._serve, args=(responder, Backoff()), daemon=True)
            self._thread.start()
        else:
            self._thread = None
        self.client = CenterClient(mpi, self.layout, range(first, first + max(servers, 1)))
        self.w = np.ones(floats, np.float32)
        control.barrier()

    @property
    def is_worker(self) -> bool:
        """Return True if this rank trains."""
        return self.number < self.workers

    def _serve(self, responder: Responder, backoff: Backoff) -> None:
        begin = time.thread_time()
        while not self._is_over.is_set():
            backoff.after(responder.poll())
            self.cpu_s = time.thread_time() - begin

    def gossip(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """(exchange, end) of this worker, which pushes to others without a center."""
        wire, rule = self.layout.host_wire(), RandomGossip(self.number, self.workers, 1.0, 0)
        thread = GossipThread(self.control.clone(), self.number, self.workers, wire.size_bytes(len(self.w)))

        def exchange() -> None:
            while thread.arrived:
                arrived = thread.arrived.popleft()
                self.w = rule.merge(self.w, wire.decode(arrived.body, len(self.w)), arrived.share)
            if push := rule.draw(thread.closed_peers()):
                thread.push(push.to, push.share, wire.encode(self.w))

        return exchange, thread.end

    def exchange(self) -> float:
        """Exchange once with the center; return seconds."""
        begin = time.perf_counter()
        made = self.client.exchange(self.w)
        self.w, _ = self.rule.pull(self.w, self.w, made.pushed, made.seen)
        return time.perf_counter() - begin

    def leave(self, figure: float) -> list[float]:
        """Gather all ranks' figures, when all are done."""
        figures = self.control.allgather_object(figure)
        self._is_over.set()
        if self._thread:
            self._thread.join()
        return figures


def on_rank(name: str, servers: int, floats: int, rounds: int, how: list[str]) -> list[float]:
    """Be a rank: run its part; return every rank's figures."""
    rank = Rank(servers, floats)
    figure = 0.0
    if not rank.is_worker and name == "idle":
        time.sleep(IDLE_S)
        figure = rank.cpu_s / IDLE_S
    elif rank.is_worker:
        figure = FIGURES[name](rank, rounds, how)
    return rank.leave(figure)


def steps_per_s(rank: Rank, rounds: int, how: list[str]) -> float:
    """Steps a second with an exchange after each, or BSP's sum."""
    step_s = STEP_S * (SLOW if "slow" in how and rank.number == rank.workers - 1 else 1)
    exchange, end = rank.gossip() if "gossip" in how else (rank.exchange, lambda: None)
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < 100 * STEP_S if "bsp" not in how else steps < 100 // SLOW:
        time.sleep(step_s)
        if "bsp" in how:
            rank.control.allreduce_sum(rank.w[:1])
        else:
            exchange()
        steps += 1
    rate = steps / (time.perf_counter() - begin)
    end()
    return rate


FIGURES: dict[str, Callable[[Rank, int, list[str]], float]] = {
    "link": lambda rank, rounds, how: statistics.median(rank.exchange() for _ in range(rounds)),
    # Of one worker, while the others exchange too.
    "servers": lambda rank, rounds, how: rounds / harness.seconds(lambda: [rank.exchange() for _ in range(rounds)]),
    "slow": steps_per_s,
    "idle": lambda rank, rounds, how: time.sleep(IDLE_S) or 0.0,
}


# ---------------------------------------------------------------- outside


def run(job: Job, name: str, options: argparse.Namespace) -> list[float]:
    """Run a job; return every rank's figures."""
    floats, rate = (options.floats, options.rate) if job.is_on_cluster else (1000, "")
    arguments, env = (name, job.servers, floats, options.rounds, job.how), {"JAX_PLATFORMS": "cpu"}
    return harness.on_ranks(on_rank, *arguments, ranks=job.ranks, rate=rate, env=env, timeout_s=300)


def show(name: str, figures: list[list[float]], options: argparse.Namespace) -> str:
    """A line on a job."""
    workers = [[figure for figure in job if figure] for job in figures]
    if name == "link":
        bound_s = 32 * options.floats / bits_per_s(options.rate)
        return f"{workers[0][0]:.3f} s an exchange, K / rate {bound_s:.3f} s: {workers[0][0] / bound_s:.3f}, goal 1.1"
    if name == "servers":
        one, four = map(sum, workers)
        return f"{one:.2f} exchanges a second with 1 server, {four:.2f} with 4: {four / one:.2f}, goal 3"
    if name == "slow":
        equal, slow, push_equal, push_slow, bsp = (statistics.mean(job[:3]) for job in figures)
        stays = f"{slow / equal:.2f}, by gosgd {push_slow / push_equal:.2f}"
        return f"{stays} of the others' throughput stays, goal 0.9; by BSP {bsp / equal:.2f}"
    return f"{figures[0][-1]:.1%} of a core, goal 5 %"


def main() -> None:
    """Run the jobs, and print a line on each."""
    parser = harness.parser(__doc__, rate="200mbit", rounds=5)
    parser.add_argument("--floats", type=int, default=2_000_000, help="of the params (default: 2,000,000)")
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=list(JOBS), help="which jobs")
    options = parser.parse_args()
    for name in options.only:
        print(f"{name}: {show(name, [run(job, name, options) for job in JOBS[name]], options)}", flush=True)


if __name__ == "__main__":
    main()
