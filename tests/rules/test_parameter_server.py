"""The protocol of asynchronous rules under simulated messages: any order of sends and deliveries, workers that die."""

import random
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmpi.allreduce.schedules import MESSAGE_BYTES
from jaxmpi.allreduce.wires import BLOCK, WIRES
from jaxmpi.comm.base import SoloComm
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules import parameter_server, parameter_server_transport
from jaxmpi.rules.asgd import asgd
from jaxmpi.rules.base import Asynchronous, Exchange
from jaxmpi.rules.easgd import easgd
from jaxmpi.rules.gosgd import RandomGossip, gosgd
from jaxmpi.rules.parameter_server import (
    FETCH,
    LONGEST,
    POST,
    PUSH,
    READ,
    Counters,
    GlobalProgress,
    Server,
    ServerAnswer,
    ServerExchange,
    ServerLayout,
    TimeSpent,
    WorkerReport,
)
from tolerances import U

N = BLOCK + 3  # two segments, one of them short
SCHEDULES = 100  # in each of hypothesis's examples
BUILD = {"easgd": easgd, "asgd": asgd}


@pytest.fixture(autouse=True, scope="module")
def short_segments():
    """Make segments of a block at least: schedules of the same messages, in a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_server, "LEAST", BLOCK)
        yield


def begun(workers: int, target: float = 1e9, bound: int = 0) -> GlobalProgress:
    """GlobalStatus of workers that have all come, so that reports are answered."""
    progress = GlobalProgress(workers, target, bound)
    for worker in range(workers):
        progress.report(worker, WorkerReport(0, 0), [*Counters()])
    assert len([*progress.answers()]) == workers
    return progress


def asynchronous(name: str, **options) -> Asynchronous:
    exchange = Exchange(lambda tree: tree, lambda tree: tree, SoloComm().jit)
    rule = BUILD[name](optax.sgd(0.1), exchange, RuleConfig(name, **options)).asynchronous
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


class SimulatedWorker:
    """Learns small integers, so that sums of halves are exact, and meets the center after each."""

    def __init__(self, case: Case, layout: ServerLayout, number: int, start: np.ndarray) -> None:
        self.case, self.layout, self.number = case, layout, number
        self.w, self.base = start.copy(), start.copy()
        self.clock = 0
        self.exchange: Any = None  # a ServerExchange, while there is one
        self.learnt = np.zeros_like(start)

    def begin(self) -> None:
        """A period of training, then an exchange."""
        step = np.full(N, self.number + 1, np.float32)
        self.learnt += step
        self.w = self.w + step
        self.clock += 1
        report = [
            *WorkerReport(self.clock, 0, self.clock == self.case.rounds),
            *Counters(steps=1, examples=10),
            *TimeSpent(steps=1),
        ]
        self.exchange = ServerExchange(self.layout, PUSH, self.case.rule.send(self.w, self.base), report)

    def finish(self) -> ServerAnswer:
        self.w, self.base = self.case.rule.meet(self.w, self.base, self.exchange.sent, self.exchange.seen)
        answer, self.exchange = self.exchange.answer, None
        return answer

    def is_over(self) -> bool:
        return self.clock == self.case.rounds and self.exchange is None


class World:
    """Workers, servers, and the messages between them, in queues that keep their order one by one."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng = case, rng
        layout = ServerLayout(N, case.servers, case.wire)
        start = np.arange(N, dtype=np.float32) % 8
        self.workers = {i: SimulatedWorker(case, layout, i, start) for i in range(case.workers)}
        self.progress = GlobalProgress(case.workers, 10 * case.workers * case.rounds, case.bound)
        self.servers = []
        for s in range(case.servers):
            begin, end = layout.bounds(s)
            progress = self.progress if s == 0 else None
            self.servers.append(Server(layout, s, start[begin:end].copy(), case.rule.serve, progress))
        self.there = {(i, s): deque() for i in self.workers for s in range(case.servers)}
        self.back = {pair: deque() for pair in self.there}

    def actions(self) -> list:
        """Return what can happen next."""
        can = []
        for i, worker in self.workers.items():
            if worker.exchange is None and worker.clock < self.case.rounds:
                can.append(lambda worker=worker: worker.begin())
            elif worker.exchange and worker.exchange.is_over():
                can.append(lambda worker=worker: self.finish(worker))
            elif worker.exchange and any(self.may_send(worker.exchange)):
                can.append(lambda i=i, worker=worker: self.send(i, worker.exchange))
        can += [lambda pair=pair: self.deliver(*pair) for pair, queue in self.there.items() if queue]
        can += [lambda pair=pair: self.answer(*pair) for pair, queue in self.back.items() if queue]
        for s, server in enumerate(self.servers):
            can += [lambda i=i, s=s: self.post(i, s) for i, answers in server.out.items() if answers]
        return can

    def may_send(self, exchange: ServerExchange) -> list[bool]:
        return [bool(todo) and len(open_) < 8 for todo, open_ in zip(exchange._todo, exchange._open, strict=True)]

    def send(self, i: int, exchange: ServerExchange) -> None:
        for sending in exchange.ready():
            self.there[i, sending.server].append(sending.message)

    def deliver(self, i: int, s: int) -> None:
        self.servers[s].take(i, self.there[i, s].popleft())

    def post(self, i: int, s: int) -> None:
        self.back[i, s].append(self.servers[s].out[i].popleft())

    def answer(self, i: int, s: int) -> None:
        self.workers[i].exchange.take(s, self.back[i, s].popleft())

    def finish(self, worker: SimulatedWorker) -> None:
        worker.finish()
        if self.case.bound:
            slowest = min((r.clock for r in self.progress.reports.values() if not r.is_done), default=worker.clock)
            assert worker.clock <= slowest + self.case.bound or worker.is_over()

    def kill(self, i: int) -> None:
        del self.workers[i]
        for s, server in enumerate(self.servers):
            server.drop_worker(i)
            del self.there[i, s], self.back[i, s]

    def run(self) -> None:
        """To the end, in a random order; fails if nobody can do anything any more."""
        dies = self.rng.randrange(40) if self.case.victim >= 0 else -1
        for turn in range(100_000):
            if turn == dies:
                self.kill(self.case.victim)
            can = self.actions()
            if not can:
                break
            self.rng.choice(can)()
        assert all(worker.is_over() for worker in self.workers.values()), "deadlock"

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


@pytest.mark.parametrize("name", BUILD)
@settings(max_examples=34)
@given(options=cases, seed=st.integers(0, 2**32), dies=st.booleans())
def test_no_schedule_deadlocks_and_sums_are_conserved(name, options, seed, dies):
    """With gossip's 3 x 34 x 100 schedules. EASGD: workers and center; ASGD: the center has all that was learnt."""
    case = Case(asynchronous(name), **options, victim=options["workers"] - 1 if dies and options["workers"] > 1 else -1)
    rng = random.Random(seed)
    for _ in range(SCHEDULES):
        world = World(case, rng)
        begun = world.center() * (case.workers + 1 if name == "easgd" else 1)
        learnt = [worker.learnt for worker in world.workers.values()]
        world.run()
        if case.victim >= 0:
            continue
        held = world.center() + (sum(w.w for w in world.workers.values()) if name == "easgd" else 0)
        np.testing.assert_array_equal(held, begun + sum(learnt))
        assert world.progress.counters.examples == 10 * case.workers * case.rounds
        assert world.progress.answer(0).status.stop == 1
        assert sum(world.progress.staleness.values()) == case.workers * (case.rounds - 1)


@pytest.mark.parametrize(("p", "weight", "begun"), [(0.0, 0.0, 0.25), (1.0, 0.5, 0.5)])
def test_the_rule_makes_each_worker_s_part_of_gossip(p, weight, begun):
    """A resumed worker goes on with its weight."""
    rule = gosgd(optax.sgd(0.1), Exchange(lambda g: g, lambda g: g), RuleConfig("gosgd", p=p)).asynchronous
    assert rule
    assert rule.gossip
    part = rule.gossip(1, 4, 7, weight)
    assert part.weight == begun
    push = part.draw(frozenset({0, 2}))
    assert (push and push.to) == (3 if p else None)


@settings(max_examples=34)
@given(workers=st.sampled_from([2, 3, 4, 8]), p=st.floats(0.1, 1), seed=st.integers(0, 2**32))
def test_gossip_keeps_weights_and_the_weighted_mean_in_every_schedule(workers, p, seed):
    rng = random.Random(seed)
    for schedule in range(SCHEDULES):
        gossips = [RandomGossip(i, workers, p, seed + schedule) for i in range(workers)]
        w = [np.full(3, i, np.float32) for i in range(workers)]
        queues = {(i, j): deque() for i in range(workers) for j in range(workers) if i != j}
        left, merges = [6] * workers, 0
        while any(left) or any(queues.values()):
            pair = rng.choice(
                [*(p for p, queue in queues.items() if queue), *((i, i) for i in range(workers) if left[i])]
            )
            if pair[0] == pair[1]:
                i = pair[0]
                left[i] -= 1
                push = gossips[i].draw()
                if push:
                    queues[i, push.to].append((w[i], push.share))
            else:
                sent, share = queues[pair].popleft()
                w[pair[1]] = gossips[pair[1]].merge(w[pair[1]], sent, share)
                merges += 1
            under_way = sum(share for queue in queues.values() for _, share in queue)
            # Each push and merge rounds one addition of float64s below 1.
            assert abs(sum(g.weight for g in gossips) + under_way - 1) <= (merges + 2 * workers) * 2.0**-52
        mean = sum(g.weight * x.astype(np.float64) for g, x in zip(gossips, w, strict=True))
        # A merge makes float32s of two shares, two products and a sum: 4 roundings of numbers below `workers`.
        np.testing.assert_allclose(mean, (workers - 1) / 2, atol=4 * merges * U * workers)


@pytest.mark.parametrize("wire", [*WIRES, "own"])
def test_both_ends_know_what_travelled_whatever_the_wire(wire, monkeypatch):
    """So the sum of worker and center is conserved to rounding of the sum, not of the wire."""
    monkeypatch.setitem(WIRES, "own", WIRES["8"]._replace(code=""))  # a user's, as a program alone
    case = Case(asynchronous("easgd", alpha=0.3), 1, 2, 1, wire=wire)
    world = World(case, random.Random(0))
    rng = np.random.default_rng(0)
    world.workers[0].w = rng.standard_normal(N).astype(np.float32)
    before = world.center() + world.workers[0].w
    world.run()
    moved = np.abs(world.center() - np.arange(N) % 8).max()
    assert moved > 0.1
    after = world.center() + world.workers[0].w - world.workers[0].learnt
    # Two f32 sums, w and c, and those two of the test: each rounds numbers below 16.
    np.testing.assert_allclose(after, before, atol=8 * U * 16)


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_wire_keeps_back_stays_with_an_asgd_worker(wire):
    """After exchanges without learning the center has it all: the residual travels in the end."""
    rule = asynchronous("asgd")
    world = World(Case(rule, 1, 1, 12, wire=wire), random.Random(0))
    worker, start = world.workers[0], world.center()
    learnt = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    worker.w = worker.w + learnt
    world.run()
    expected = start + learnt + 12
    residual = np.abs(worker.w - worker.base).max()
    np.testing.assert_allclose(world.center(), expected, atol=2 * residual + 12 * 4 * U * 32)
    assert residual <= {"32": 0, "16": 2.0**-11, "bf16": 2.0**-8, "8": 1 / 253}[wire] * 32


@pytest.mark.parametrize("wire", ["32", "8"])
@pytest.mark.parametrize("n", [1, 10_000, 3_000_000])
@pytest.mark.parametrize("servers", [1, 3])
def test_segments_cover_the_center_once_and_fit_messages(wire, n, servers):
    layout = ServerLayout(n, servers, wire)
    pieces = [piece for server in range(servers) for piece in layout.segments(server)]
    assert [a for a, _ in pieces] == [0, *(b for _, b in pieces[:-1])]
    assert pieces[-1][1] == n
    assert layout.message_bytes() <= MESSAGE_BYTES
    if n >= 64 * servers * BLOCK:
        assert len(layout.segments(0)) >= 64 * 0.9  # so an answer trails a link's time by 2 % at most


def test_reading_changes_nothing():
    world = World(Case(asynchronous("easgd"), 1, 2, 1), random.Random(0))
    exchange = ServerExchange(ServerLayout(N, 2, "32"), READ, np.empty(N, np.float32), None)
    world.workers[0].exchange, world.workers[0].clock = exchange, 1
    before = world.center()
    while not exchange.is_over():
        world.rng.choice(world.actions())()
    np.testing.assert_array_equal(exchange.seen, before)
    np.testing.assert_array_equal(world.center(), before)


def said(server: Server, worker: int, exchange: ServerExchange) -> ServerExchange:
    """An exchange with one server, to its end."""
    while not exchange.is_over():
        for sending in exchange.ready():
            server.take(worker, sending.message)
        while server.out.get(worker):
            exchange.take(0, server.out[worker].popleft())
    return exchange


def test_worker_0_is_told_where_the_time_of_all_workers_went():
    layout, progress = ServerLayout(N, 1, "32"), begun(3)
    server = Server(layout, 0, np.zeros(N, np.float32), asynchronous("easgd").serve, progress)
    for worker, seconds in ((1, 2.0), (0, 0.5), (1, 4.0)):
        spent = TimeSpent(steps=2, compute=seconds, sync=seconds / 8)
        said(server, worker, ServerExchange(layout, PUSH, None, [*WorkerReport(1, 0), *Counters(), *spent]))
    report = [*WorkerReport(1, 0), *Counters(), *TimeSpent()]
    exchanges = [ServerExchange(layout, PUSH, None, report, workers=told) for told in (3, 0)]
    answers = [said(server, worker, exchange).answer for worker, exchange in enumerate(exchanges)]
    times, none = [answer.times for answer in answers if answer]
    assert none.size == 0
    assert times[:, TimeSpent._fields.index("steps")].tolist() == [2, 4, 0]
    assert times[:, TimeSpent._fields.index("compute")].tolist() == [0.5, 6, 0]
    assert times[:, TimeSpent._fields.index("sync")].tolist() == [0.0625, 0.75, 0]


@pytest.mark.parametrize("pieces", [0, 1, 2.5])
def test_what_a_worker_posts_all_fetch_and_it_may_post_again(pieces):
    layout, rng = ServerLayout(N, 1, "16"), np.random.default_rng(0)
    server = Server(layout, 0, np.zeros(N, np.float32), asynchronous("easgd").serve, begun(3))
    posted = {worker: rng.integers(1, 256, int(pieces * layout.message_bytes()), np.uint8) for worker in (0, 2)}

    def fetched(worker: int, whose: int) -> np.ndarray:
        values = np.empty(int(pieces * layout.message_bytes()), np.uint8)
        said(server, worker, ServerExchange(layout, FETCH, None, None, post=values, whose=whose))
        return values

    assert not fetched(1, 0).any()  # nobody has posted
    for worker, values in posted.items():
        said(server, worker, ServerExchange(layout, POST, None, None, post=np.full_like(values, 7)))
        said(server, worker, ServerExchange(layout, POST, None, None, post=values))
    for worker, whose in ((1, 0), (0, 2), (2, 2)):
        np.testing.assert_array_equal(fetched(worker, whose), posted[whose])
    assert not fetched(0, 1).any()


def test_all_that_live_take_part_in_an_evaluation():
    progress = begun(3)
    progress.report(0, WorkerReport(1, 0, evaluate=5.0), Counters())
    assert progress.unevaluated_workers() == {0, 1, 2}
    progress.report(1, WorkerReport(1, 0, evaluated=5.0), Counters())
    progress.drop_worker(2)
    status = progress.answer(0).status
    assert (status.evaluate, status.evaluated, status.alive) == (5.0, 1, 2)
    assert progress.unevaluated_workers() == {0}


class StraightLine:
    """To a server in this process, which is struck dumb after so many answers for some time."""

    def __init__(self, server: Server, answers: int, dumb_s: float) -> None:
        self.server, self.left, self.dumb_s, self.until_s = server, answers, dumb_s, np.inf

    def send(self, message: np.ndarray, answer_bytes: int) -> None:
        del answer_bytes
        self.server.take(0, message)

    def answer(self) -> np.ndarray | None:
        if self.left == 0 and self.until_s == np.inf:
            self.until_s = time.monotonic() + self.dumb_s
        if not self.server.out.get(0) or (self.left == 0 and time.monotonic() < self.until_s):
            return None
        self.left -= self.left > 0
        return self.server.out[0].popleft()


@pytest.mark.parametrize(("answers", "dumb_s", "is_patient"), [(1, 0.6, False), (2, 0.6, True), (2, 3.0, False)])
def test_the_answer_to_a_report_is_waited_for_longer_than_params(monkeypatch, answers, dumb_s, is_patient):
    """The slowest worker may be evaluating; two answers hold the params, the third is the report's."""
    monkeypatch.setattr(parameter_server_transport, "TIMEOUT_S", 0.2)
    layout, progress = ServerLayout(N, 1, "32"), begun(1)
    server = Server(layout, 0, np.zeros(N, np.float32), asynchronous("easgd").serve, progress)
    exchange = ServerExchange(layout, PUSH, np.ones(N, np.float32), [*WorkerReport(5, 0), *Counters(), *TimeSpent()])
    lines: list[Any] = [StraightLine(server, answers, dumb_s)]  # without MPI
    if is_patient:
        assert parameter_server_transport.run_exchange(exchange, lines) >= dumb_s * 0.9
    else:
        limit_s = 0.2 if answers == 1 else 1.2
        with pytest.raises(TrainingError, match=f"has not answered for {limit_s} s; .* 0.2 s now"):
            parameter_server_transport.run_exchange(exchange, lines)


def test_an_exchange_that_lacks_only_the_report_knows_it():
    """A worker too far ahead is answered on its params at once, on its report later: that is what it waits for."""
    layout, progress = ServerLayout(N, 1, "32"), begun(2, bound=1)
    server = Server(layout, 0, np.zeros(N, np.float32), asynchronous("easgd").serve, progress)
    exchange = ServerExchange(layout, PUSH, np.ones(N, np.float32), [*WorkerReport(5, 0), *Counters(), *TimeSpent()])
    assert not exchange.lacks_only_report()
    for sending in exchange.ready():
        server.take(0, sending.message)
    for _ in range(2):  # segments
        assert not exchange.lacks_only_report()
        exchange.take(0, server.out[0].popleft())
    assert exchange.lacks_only_report()
    assert not server.out[0]
    said(server, 1, ServerExchange(layout, PUSH, None, [*WorkerReport(4, 0), *Counters(), *TimeSpent()]))
    exchange.take(0, server.out[0].popleft())
    assert exchange.is_over()
    assert not exchange.lacks_only_report()


def test_a_worker_ahead_waits_and_goes_on_when_the_slowest_dies():
    progress = begun(3, bound=2)
    new = [*Counters()]
    for clock in (1, 2):
        progress.report(0, WorkerReport(clock, 0), new)
        assert [w for w, _ in progress.answers()] == [0]
    progress.report(0, WorkerReport(3, 0), new)
    progress.report(1, WorkerReport(1, 0), new)
    assert [w for w, _ in progress.answers()] == [1]  # worker 2 has done nothing yet
    progress.drop_worker(2)
    assert [w for w, _ in progress.answers()] == [0]


def test_staleness_counts_what_others_did_between():
    progress = begun(2)
    for worker in [0, 1, 1, 0, *[1] * (LONGEST + 5), 0]:
        progress.exchange_begins(worker)
    assert dict(progress.staleness) == {0: LONGEST + 5 - 1 + 1, 2: 1, 1: 1, LONGEST: 1}


def test_the_end_is_over_when_all_that_are_there_have_heard():
    progress = begun(3)
    new = [*Counters()]
    progress.report(0, WorkerReport(1, 0, 1, closing=1), new)
    assert [w for w, _ in progress.answers()] == [0]
    progress.report(1, WorkerReport(1, 0, 1), new)
    assert [a.status.closing for _, a in progress.answers()] == [1]
    assert not progress.is_over()
    progress.drop_worker(2)
    assert progress.is_over()


def test_when_worker_0_dies_the_others_hear_it():
    progress = begun(2)
    progress.drop_worker(0)
    progress.report(1, WorkerReport(1, 0), [*Counters()])
    assert [a.status.closing for _, a in progress.answers()] == [2]


@pytest.mark.parametrize(("first", "then", "stop"), [("enough", "leave", 1), ("leave", "enough", 2)])
def test_all_workers_stop_for_the_same_reason(first, then, stop):
    """The same code for all ranks that leave.

    Otherwise one rank may leave with the code of a run that is over. Another may leave with that of a run to go on
    with.
    """
    progress = begun(2, target=10)
    said = {
        "enough": (WorkerReport(1, 0), [*Counters(examples=10)]),
        "leave": (WorkerReport(1, 0, leave=1), [*Counters()]),
    }
    heard = []
    for worker, what in enumerate((first, then)):
        progress.report(worker, *said[what])
        heard += [answer.status.stop for _, answer in progress.answers()]
    assert heard == [stop, stop]


def test_a_worker_that_is_done_holds_nobody_back():
    """Its clock stands still, while others come to their end."""
    progress = begun(2, bound=1)
    progress.report(0, WorkerReport(1, 0, is_done=1), [*Counters()])
    progress.report(1, WorkerReport(9, 0), [*Counters()])
    assert [w for w, _ in progress.answers()] == [0, 1]


def test_worker_and_center_go_shares_of_their_own():
    rule = asynchronous("easgd", alpha=0.5, server_alpha=0.25)
    w, center = np.full(3, 8, np.float32), np.full(3, 4, np.float32)
    seen = center.copy()
    rule.serve(center, w, seen)
    moved, _ = rule.meet(w, w, w, seen)
    assert (moved.tolist(), center.tolist()) == ([6] * 3, [5] * 3)


def test_nobody_is_answered_before_all_that_live_have_come():
    """So all workers begin together: one that dies on the way, or is given up, is not waited for."""
    progress, new = GlobalProgress(4, 1e9, bound=0), [*Counters()]
    for worker in (2, 0):
        progress.report(worker, WorkerReport(0, 0), new)
        assert [*progress.answers()] == []
    assert progress.expected_workers() == {1, 3}
    progress.drop_worker(3)
    assert [*progress.answers()] == []
    progress.report(1, WorkerReport(0, 0), new)
    assert [worker for worker, _ in progress.answers()] == [0, 1, 2]
    progress.report(2, WorkerReport(9, 0), new)  # from here on nobody waits
    assert [worker for worker, _ in progress.answers()] == [2]


def test_workers_that_are_late_at_the_start_can_be_begun_without():
    layout, progress = ServerLayout(N, 1, "32"), GlobalProgress(2, 1e9, bound=0)
    server = Server(layout, 0, np.zeros(N, np.float32), asynchronous("easgd").serve, progress)
    exchange = ServerExchange(layout, PUSH, None, [*WorkerReport(0, 0), *Counters(), *TimeSpent()])
    for sending in exchange.ready():
        server.take(0, sending.message)
    assert not server.out.get(0)
    server.drop_stragglers({1})
    assert len(server.out[0]) == 1
    assert progress.expected_workers() == {0, 1}  # it may still come
