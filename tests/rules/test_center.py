"""Asynchronous rules over a simulated network: any order of sends and deliveries, workers that die."""

import functools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.wires import BLOCK, WIRES
from jaxmpi.checkpoint.manager import Retention, UncoordinatedCheckpoint
from jaxmpi.checkpoint.manifests import complete_checkpoints
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.config.optim import Optim
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.train_state import TrainState
from jaxmpi.optim.optimizers import is_linear, optimizer
from jaxmpi.rules import base, registry
from jaxmpi.rules.asynchronous import transport
from jaxmpi.rules.asynchronous.center import CenterClient, CenterExchange, CenterLayout, CenterServer
from jaxmpi.rules.asynchronous.progress import MOST_STALENESS, Closing, Counters, GlobalProgress, Order, Report, Stop
from jaxmpi.rules.asynchronous.rules import RandomGossip
from jaxmpi.rules.asynchronous.transport import HEADER_BYTES, carry_out
from jaxmpi.rules.asynchronous.worker import start_from_checkpoint
from jaxmpi.rules.base import Asynchronous
from simulated_mpi import Line, Network
from tolerances import U

N = 4 * BLOCK + 3  # two segments on wire 32, one of them short
SCHEDULES = 40  # in each of hypothesis's examples


@pytest.fixture(autouse=True, scope="module")
def short_messages():
    """Segments of few blocks: schedules of the same messages, in a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "MESSAGE_BYTES", HEADER_BYTES + 4 * 4 * BLOCK)
        yield


def build(config: RuleConfig, optim: Optim | None = None, workers: int = 1, lr: float = 0.05) -> base.Rule:
    comm, optim = AxisComm("w", workers) if workers > 1 else SoloComm(), optim or Optim("sgd")
    mean, total = (functools.partial(exchange, op=op, comm=comm) for op in ("mean", "sum"))
    tx = optimizer(optim, lambda step: jnp.float32(lr))
    return registry.build(config, tx, base.Exchange(mean, total), optimizer=optim.name, linear=is_linear(optim))


def asynchronous(name: str, **options: Any) -> Asynchronous:
    rule = build(RuleConfig(name, **options)).asynchronous
    assert rule is not None
    return rule


class Case(NamedTuple):
    """A job to simulate."""

    rule: Asynchronous
    workers: int
    servers: int
    rounds: int  # exchanges of each worker
    bound: int = 0
    victim: int = -1  # a worker that dies at some time
    wire: str = "32"


class World:
    """Workers that learn small integers, so that sums of halves are exact, and servers, all ranks of their own."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng, network = case, rng, Network(rng)
        self.layout = CenterLayout(N, case.servers, case.wire)
        start = np.arange(N, dtype=np.float32) % 8
        self.mpi = [network.at(rank) for rank in range(case.workers + case.servers)]
        self.progress = GlobalProgress(case.workers, 10 * case.workers * case.rounds, case.bound)
        self.servers = []
        for number, mpi in enumerate(self.mpi[case.workers :]):
            begin, end = self.layout.shard(number)
            progress, shard = self.progress if number == 0 else None, start[begin:end].copy()
            self.servers.append(CenterServer(mpi, self.layout, number, shard, case.rule.apply, case.workers, progress))
        self.w = {worker: start.copy() for worker in range(case.workers)}
        self.base = {worker: start.copy() for worker in range(case.workers)}
        self.learnt = np.zeros_like(start)
        self.running = {worker: self.work(worker) for worker in range(case.workers)}

    def exchange(self, worker: int, *args: Any, **options: Any) -> Iterator[Any]:
        exchange = CenterExchange(self.layout, *args, **options)
        requests = {self.case.workers + s: exchange.requests(s) for s in range(self.case.servers)}
        yield from carry_out(self.mpi[worker], requests)
        return exchange

    def work(self, worker: int) -> Iterator[Any]:
        """Steps and exchanges of a worker."""
        case = self.case
        yield from self.exchange(worker, None, Report())  # it is ready
        for clock in range(1, case.rounds + 1):
            step = np.full(N, worker + 1, np.float32)
            self.learnt += step
            self.w[worker] = self.w[worker] + step
            report = Report(clock, Counters(steps=1, examples=10), is_done=clock == case.rounds)
            made = yield from self.exchange(worker, case.rule.push(self.w[worker], self.base[worker]), report)
            self.w[worker], self.base[worker] = case.rule.pull(
                self.w[worker], self.base[worker], made.pushed, made.seen
            )
            if case.bound and not report.is_done:
                others = [r.clock for r in self.progress.reports.values() if not r.is_done]
                assert clock <= min(others, default=clock) + case.bound

    def run(self) -> None:
        """To the end, in a random order; fails if nobody can do anything any more."""
        dies = self.rng.randrange(40) if self.case.victim >= 0 else -1
        for turn in range(20_000):
            if turn == dies:
                self.running.pop(self.case.victim, None)
                for server in self.servers:
                    server.drop(self.case.victim)
            if not self.running:
                return
            actor = self.rng.choice([*self.running, *self.servers])
            if isinstance(actor, CenterServer):
                actor.poll()
            elif next(self.running[actor], None) is None:
                del self.running[actor]
        raise AssertionError("deadlock")

    def center(self) -> np.ndarray:
        return np.concatenate([server.center for server in self.servers])


cases = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 4),
        "servers": st.integers(1, 3),
        "rounds": st.integers(1, 3),
        "bound": st.integers(0, 2),
    }
)


@pytest.mark.parametrize("name", ["easgd", "asgd"])
@settings(max_examples=17)
@given(options=cases, seed=st.integers(0, 2**32), dies=st.booleans())
def test_no_schedule_deadlocks_and_sums_are_conserved(name, options, seed, dies):
    """EASGD: workers and center; ASGD: the center has all that was learnt."""
    case = Case(asynchronous(name), **options, victim=options["workers"] - 1 if dies and options["workers"] > 1 else -1)
    rng = random.Random(seed)
    for _ in range(SCHEDULES):
        world = World(case, rng)
        start = world.center() * (case.workers + 1 if name == "easgd" else 1)
        world.run()
        if case.victim >= 0:
            continue
        total = world.center() + (sum(world.w.values()) if name == "easgd" else 0)
        np.testing.assert_array_equal(total, start + world.learnt)
        assert world.progress.counters.examples == 10 * case.workers * case.rounds
        assert world.progress.stop == Stop.ENOUGH
        assert sum(world.progress.staleness) == case.workers * (case.rounds - 1)


@settings(max_examples=17)
@given(workers=st.sampled_from([2, 3, 4, 8]), p=st.floats(0.1, 1), seed=st.integers(0, 2**32))
def test_gossip_keeps_weights_and_the_weighted_mean_in_every_schedule(workers, p, seed):
    rng = random.Random(seed)
    for schedule in range(SCHEDULES):
        gossips = [RandomGossip(i, workers, p, seed + schedule) for i in range(workers)]
        w = [np.full(3, i, np.float32) for i in range(workers)]
        queues = {(i, j): deque() for i in range(workers) for j in range(workers) if i != j}
        left, merges = [6] * workers, 0
        while any(left) or any(queues.values()):
            ready = [pair for pair, queue in queues.items() if queue]
            sender, receiver = rng.choice([*ready, *((i, i) for i in range(workers) if left[i])])
            if sender == receiver:
                left[sender] -= 1
                if push := gossips[sender].draw():
                    queues[sender, push[0]].append((w[sender], push[1]))
            else:
                pushed, share = queues[sender, receiver].popleft()
                w[receiver] = gossips[receiver].merge(w[receiver], pushed, share)
                merges += 1
            on_their_way = sum(share for queue in queues.values() for _, share in queue)
            # Each push and merge rounds one addition of float64s below 1.
            assert abs(sum(g.weight for g in gossips) + on_their_way - 1) <= (merges + 2 * workers) * 2.0**-52
        mean = sum(g.weight * x.astype(np.float64) for g, x in zip(gossips, w, strict=True))
        # A merge makes float32s of two shares, two products and a sum: 4 roundings of numbers below `workers`.
        np.testing.assert_allclose(mean, (workers - 1) / 2, atol=4 * merges * U * workers)


@pytest.mark.parametrize(("p", "weight", "first"), [(0.0, 0.0, 0.25), (1.0, 0.5, 0.5)])
def test_a_resumed_worker_keeps_its_weight_and_pushes_to_none_that_is_closed(p, weight, first):
    gossip = asynchronous("gosgd", p=p).gossip
    assert gossip
    part = gossip(1, 4, 7, weight)
    assert part.weight == first
    push = part.draw(frozenset({0, 2}))
    assert (push and push[0]) == (3 if p else None)


@pytest.mark.parametrize("wire", [*WIRES, "user"])
def test_both_ends_compute_with_what_the_wire_left(wire, monkeypatch):
    """So the sum of worker and center is conserved to rounding of the sum, not of the wire."""
    monkeypatch.setitem(WIRES, "user", WIRES["8"]._replace(code=""))  # a user's, as a program alone
    world = World(Case(asynchronous("easgd", alpha=0.3), 1, 2, 1, wire=wire), random.Random(0))
    world.w[0] = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    before = world.center() + world.w[0]
    world.run()
    assert np.abs(world.center() - np.arange(N) % 8).max() > 0.1
    # Two f32 sums, w and c, and those two of the test: each rounds numbers below 16.
    np.testing.assert_allclose(world.center() + world.w[0] - world.learnt, before, atol=8 * U * 16)


@pytest.mark.parametrize("wire", WIRES)
def test_an_asgd_worker_keeps_the_residual_of_a_wire(wire):
    """After exchanges without learning the center has it all."""
    world = World(Case(asynchronous("asgd"), 1, 1, 12, wire=wire), random.Random(0))
    start, learnt = world.center(), np.random.default_rng(1).standard_normal(N).astype(np.float32)
    world.w[0] = world.w[0] + learnt
    world.run()
    residual = np.abs(world.w[0] - world.base[0]).max()
    np.testing.assert_allclose(world.center(), start + learnt + 12, atol=2 * residual + 12 * 4 * U * 32)
    assert residual <= {"32": 0, "16": 2.0**-11, "bf16": 2.0**-8, "8": 1 / 253}[wire] * 32


# ---------------------------------------------------------------- one server


def ready(workers: int, target: float = 1e9, bound: int = 0) -> GlobalProgress:
    """Progress of workers that have all come, so that reports are answered."""
    progress = GlobalProgress(workers, target, bound)
    for worker in range(workers):
        progress.report(worker, Report())
    assert len([*progress.answers()]) == workers
    return progress


def serve(progress: GlobalProgress, wire: str = "32") -> CenterServer:
    workers = len(progress.by_worker)
    start = np.arange(N, dtype=np.float32)
    nobody = Network(random.Random(0)).at(0)
    return CenterServer(nobody, CenterLayout(N, 1, wire), 0, start, asynchronous("easgd").apply, workers, progress)


def client(server: CenterServer, rank: int = 0, workers: int = 0, **line: Any) -> CenterClient:
    mpi = Line(server, rank, **line)
    return CenterClient(mpi, CenterLayout(N, 1, "32"), {0: "a"}, workers)


def test_worker_0_alone_is_told_of_all_workers():
    server = serve(ready(3))
    for worker, seconds in ((1, 2.0), (0, 0.5), (1, 4.0)):
        new = Counters(steps=2, compute=seconds, sync=seconds / 8)
        client(server, worker).exchange(None, Report(1, new, saved=worker))
    first, other = (client(server, worker, told).exchange(None, Report(1)).status for worker, told in ((0, 3), (1, 0)))
    assert first
    assert first.workers
    assert other
    assert other.workers is None
    by_name = dict(zip(Counters._fields, first.workers.by_worker.T.tolist(), strict=True))
    assert (by_name["steps"], by_name["compute"], by_name["sync"]) == ([2, 4, 0], [0.5, 6, 0], [0.0625, 0.75, 0])
    assert {worker: report.saved for worker, report in first.workers.reports.items()} == {0: 0, 1: 1, 2: 0}


def test_an_answer_fits_its_buffer_however_many_workers():
    progress = ready(1000)
    for worker in range(1000):
        new = Counters(*np.random.default_rng(worker).standard_normal(len(Counters._fields)))
        progress.report(worker, Report(10**6, new, 10**6, save=Order(10**6, 10**6)))
    server = serve(progress)
    first, other = client(server, 0, 1000), client(server, 1)
    for worker, has_all in ((first, True), (other, False)):
        status = worker.exchange(None, Report()).status
        assert status
        assert bool(status.workers) is has_all


@pytest.mark.parametrize(("answers", "silent_s", "is_patient"), [(1, 0.6, False), (2, 0.6, True), (2, 3.0, False)])
def test_the_answer_to_a_report_is_waited_for_longer_than_params(monkeypatch, answers, silent_s, is_patient):
    """The slowest worker may be evaluating; two answers hold the params, the third is the report's."""
    monkeypatch.setattr(transport, "TIMEOUT_S", 0.2)
    worker = client(serve(ready(1)), answers=answers, silent_s=silent_s)
    if is_patient:
        assert worker.exchange(np.ones(N, np.float32), Report(5)).report_wait_s >= silent_s * 0.9
    else:
        limit_s = 0.2 if answers == 1 else 1.2
        with pytest.raises(TrainingError, match=f"has not answered for {limit_s} s"):
            worker.exchange(np.ones(N, np.float32), Report(5))


# ---------------------------------------------------------------- the progress of all


def says(worker: int, clock: int = 0, **more: Any) -> tuple[int, Report]:
    return worker, Report(clock, **more)


STORIES = {  # how many of the workers have come, the bound; events, a report or a death, and whom each has answered
    "a worker ahead waits, and continues when the slowest dies": (
        *(3, 3, 2),
        [(says(0, 1), [0]), (says(0, 2), [0]), (says(0, 3), []), (says(1, 1), [1]), (2, [0])],
    ),
    "a worker that is done holds nobody back": (*(2, 2, 1), [(says(0, 1, is_done=True), [0]), (says(1, 9), [1])]),
    "nobody is answered before all that are alive have come": (
        *(4, 0, 0),
        [(says(2), []), (says(0), []), (3, []), (says(1), [0, 1, 2]), (says(2, 9), [2])],
    ),
    "the run is over when all that are alive have been told": (
        *(3, 3, 0),
        [(says(0, 1, is_done=True, closing=Closing.OVER), [0]), (says(1, 1, is_done=True), [1]), (2, [])],
    ),
    "the others are told that worker 0 has died": (*(2, 2, 0), [(0, []), (says(1, 1), [1])]),
}


@pytest.mark.parametrize("story", STORIES)
def test_who_is_answered_when(story):
    workers, come, bound, events = STORIES[story]
    progress = ready(workers, bound=bound) if come else GlobalProgress(workers, 1e9, bound)
    closings = set()
    for event, expected in events:
        assert not progress.is_over()
        progress.drop(event) if isinstance(event, int) else progress.report(*event)
        answers = [*progress.answers()]
        assert [worker for worker, _ in answers] == expected
        closings |= {status.closing for _, status in answers}
    closing = Closing.NO
    if "is over" in story:
        closing = Closing.OVER
    elif "worker 0 has died" in story:
        closing = Closing.ABANDONED
    assert closings == {closing}
    assert progress.is_over() == bool(closing)


def test_staleness_counts_exchanges_of_others():
    progress = ready(2)
    for worker in [0, 1, 1, 0, *[1] * (MOST_STALENESS + 5), 0]:
        progress.count_exchange(worker)
    counts = {late: count for late, count in enumerate(progress.staleness) if count}
    assert counts == {0: MOST_STALENESS + 5, 1: 1, 2: 1, MOST_STALENESS: 1}


@pytest.mark.parametrize("reasons", [(Stop.ENOUGH, Stop.LEAVE), (Stop.LEAVE, Stop.ENOUGH)])
def test_all_workers_stop_for_the_same_reason(reasons):
    """Else some would leave with the exit code of a run that is over, and others with that of one to be resumed."""
    progress = ready(2, target=10)
    reports = {Stop.ENOUGH: Report(1, Counters(examples=10)), Stop.LEAVE: Report(1, leave=True)}
    stops = []
    for worker, reason in enumerate(reasons):
        progress.report(worker, reports[reason])
        stops += [status.stop for _, status in progress.answers()]
    assert stops == [reasons[0]] * 2


def test_workers_may_begin_without_one_that_is_late():
    server = serve(GlobalProgress(2, 1e9, bound=0))
    assert server.progress
    assert server.progress.expected_workers() == {0, 1}
    server.progress.report(0, Report())
    assert server.progress.expected_workers() == {1}
    server.begin_without({1})
    assert len(server._answers[0]) == 1
    assert server.progress.expected_workers() == {0, 1}  # it may still come


# ---------------------------------------------------------------- the arithmetic


def gradient(w: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sin(3 * x) + x, w)


def test_worker_and_center_move_by_shares_of_their_own():
    rule = asynchronous("easgd", alpha=0.5, server_alpha=0.25)
    w, center = np.full(3, 8, np.float32), np.full(3, 4, np.float32)
    seen = center.copy()
    rule.apply(center, w, seen)
    moved, _ = rule.pull(w, w, w, seen)
    assert (moved.tolist(), center.tolist()) == ([6] * 3, [5] * 3)


def test_eamsgd_is_the_papers_two_lines_and_w_is_what_is_pushed():
    """v <- delta v - eta g(w + delta v) ;  w <- w + v, and the center pulls at w. Zhang et al. 2015, section 4."""
    delta, eta, alpha = 0.9, 0.05, 0.25
    rule = build(RuleConfig("easgd", alpha=alpha, momentum=delta), lr=eta)
    eamsgd = rule.asynchronous
    assert eamsgd is not None
    w, v, center = np.linspace(-1, 1, 7), np.zeros(7), np.full(7, 0.5)
    params, state = {"a": jnp.asarray(w, jnp.float32)}, rule.init({"a": jnp.asarray(w, jnp.float32)})
    for _ in range(5):
        v = delta * v - eta * (np.sin(3 * (w + delta * v)) + w + delta * v)
        w = w + v
        params, state = rule.update(gradient(params), state, params)
        w = w - alpha * (w - center)
        pushed = np.asarray(eamsgd.to_center(params, state)["a"])
        new, _ = eamsgd.pull(pushed, pushed, pushed, center.astype(np.float32))
        params = eamsgd.from_center({"a": jnp.asarray(new)}, state)
    # 5 steps of some 12 roundings of numbers below 2; errors grow by 1 + delta at most a step, to 2^5.
    np.testing.assert_allclose(eamsgd.to_center(params, state)["a"], w, atol=5 * 12 * U * 2 * 2**5)


@pytest.mark.parametrize("tau", [1, 3])
def test_synchronous_easgd_is_the_papers_and_conserves_the_sum(tau):
    """Zhang et al. 2015, equations 5 and 6 in float64; without gradients the sum of workers and center stays."""
    k, alpha, eta, steps = 4, 0.2, 0.05, 6
    rule = build(RuleConfig("easgd_sync", alpha=alpha, tau=tau), workers=k, lr=eta)
    w, center = np.random.default_rng(0).uniform(-1, 1, (k, 5)), np.zeros(5)
    params: Any = {"a": jnp.asarray(w, jnp.float32)}
    state: Any = jax.vmap(rule.init, axis_name="w")(params)._replace(center={"a": jnp.zeros((k, 5))})
    step = jax.jit(jax.vmap(lambda p, s: rule.update(gradient(p), s, p), axis_name="w"))
    for t in range(steps):
        params, state = step(params, state)
        g, pull = np.sin(3 * w) + w, alpha * (w - center) * (t % tau == 0)
        w, center = w - eta * g - pull, center + pull.sum(0)
    assert rule.eval_params is not None
    evaluated = np.asarray(rule.eval_params(params, state)["a"])
    # Some 10 roundings a step of numbers below 2; a step stretches errors by 1.2 at most.
    np.testing.assert_allclose(params["a"], w, atol=steps * 10 * U * 2 * 1.2**steps)
    np.testing.assert_allclose(evaluated, np.tile(center, (k, 1)), atol=steps * (10 + k) * U * 4 * 1.2**steps)
    assert len({row.tobytes() for row in evaluated}) == 1


def test_a_worker_that_a_checkpoint_does_not_know_begins_at_the_rate_of_the_run(tmp_path):
    """Else it would warm up until its first report, while the others' rate has long fallen."""
    tx = optimizer(Optim("momentum"), lambda step: jnp.float32(0.1) * jnp.asarray(step, jnp.float32))
    params = {"a": np.ones(3, np.float32)}
    fresh = TrainState(np.zeros((), np.int32), params, {}, tx.init(params), np.zeros(2, np.uint32))
    parts = UncoordinatedCheckpoint(tmp_path, 1, Retention(2))
    for times in (1, 2):  # a run that leaves at the step of its last checkpoint writes it again
        parts.begin(7)
        parts.write_own(7, 0, {**jax.tree.map(np.asarray, fresh)._asdict(), "weight": np.array(1.0)})
        parts.end(7, {"center": params}, {"tally": [0.0] * len(Counters._fields), "times": times}, None)
    for worker in range(2):
        start = start_from_checkpoint(complete_checkpoints(tmp_path)[-1], fresh, worker, 2, asynchronous("easgd"))
        assert [int(x) for x in jax.tree.leaves(start.state.rule_state) if x.ndim == 0] == [7]
        assert start.extra["times"] == 2
