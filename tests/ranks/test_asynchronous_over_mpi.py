"""Messages of asynchronous rules between real processes: run by tests/test_mpirun.py."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import jaxmpi
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.rules.gosgd import RandomGossip
from jaxmpi.rules.gossip_transport import MOST, GossipThread
from jaxmpi.rules.parameter_server import (
    END,
    PUSH,
    READ,
    Counters,
    GlobalProgress,
    Server,
    ServerExchange,
    ServerLayout,
    TimeSpent,
    WorkerReport,
)
from jaxmpi.rules.parameter_server_transport import ServerChannel, ServerEndpoint, run_exchange
from tolerances import U

COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
N, ROUNDS = 300_001, 4  # floats: more messages than may be unanswered at once


def control() -> MpiProcesses:
    made = processes()
    assert isinstance(made, MpiProcesses)
    return made


def total(x: np.ndarray) -> np.ndarray:
    return control().allreduce_sum(np.asarray(x, np.float64))


@pytest.mark.parametrize(("servers", "wire"), [(0, "32"), (1, "16"), (0, "8")])
def test_center_and_workers_keep_their_sum(servers, wire):
    """Each comes as often as it likes; rank 0's server is a thread, or the last rank serves alone."""
    mpi, workers, where = control().clone(), SIZE - servers, SIZE - 1 if servers else 0
    layout = ServerLayout(N, 1, wire)
    counter: Any = None
    thread = None
    if where == RANK:
        server = Server(layout, 0, np.ones(N, np.float32), elastic, GlobalProgress(workers, 1e9, 0))
        counter = ServerEndpoint(mpi, server, range(workers), layout.message_bytes())
        thread = threading.Thread(target=counter.run)
        thread.start()
    w = np.random.default_rng(RANK).standard_normal(N).astype(np.float32) * (workers > RANK)
    before = total(w)
    seen = np.zeros(N, np.float32)
    if workers > RANK:
        line = ServerChannel(mpi, where)
        told = workers if RANK == 0 else 0
        for _ in range(ROUNDS):
            exchange = ServerExchange(layout, PUSH, w, None)
            run_exchange(exchange, [line])
            assert exchange.sent_bytes >= layout.host_wire().size_bytes(N)
            w = w - np.float32(0.5) * (exchange.sent - exchange.seen)
        if RANK == 0:
            until(line, layout, told, lambda status: status.done == workers - 1)
            exchange = ServerExchange(layout, READ, np.empty(N, np.float32), None)
            run_exchange(exchange, [line])
            seen = exchange.seen if wire == "32" else seen
        until(line, layout, told, lambda status: status.closing, is_done=1, closing=float(RANK == 0))
        if RANK == 0:
            run_exchange(ServerExchange(layout, END, None, None), [line])
    if thread:
        thread.join(30)
        assert not thread.is_alive()
        if wire != "32":
            seen = counter.server.center  # as it is, not as it travels
    held = total(w) + total(seen)
    # Each of the exchanges rounds w and c twice, numbers below 8.
    np.testing.assert_allclose(held, before + 1, atol=4 * ROUNDS * workers * U * 8)


def elastic(center, sent, seen):
    center += np.float32(0.5) * (sent - seen)


def until(line, layout, told, holds, **report) -> None:
    """Report until the status say so; nobody speaks any more after hearing the end. Worker 0 is told all times."""
    while True:
        exchange = ServerExchange(
            layout, PUSH, None, [*WorkerReport(ROUNDS, 0, **report), *Counters(), *TimeSpent()], told
        )
        run_exchange(exchange, [line])
        assert exchange.answer
        if holds(exchange.answer.status):
            return
        time.sleep(0.005)


def test_all_push_to_each_other_at_once_and_nothing_is_lost():
    """Messages of 1.2 MB, which MPI sends only when the receiver is ready: blocking sends would wait for ever."""
    begin = time.monotonic()
    gossiper = GossipThread(control().clone(), RANK, SIZE, 4 * N)
    gossip = RandomGossip(RANK, SIZE, 1.0, seed=3)
    w = np.full(N, RANK, np.float32)

    def merge() -> None:
        nonlocal w
        while gossiper.arrived:
            push = gossiper.arrived.popleft()
            w = gossip.merge(w, push.body.view(np.float32), push.share)

    for _ in range(10):
        push = gossip.draw()
        assert push  # p is 1
        gossiper.push(push.to, push.share, w.copy().view(np.uint8))
        merge()
    gossiper.end()
    merge()
    weight, mean = total(np.array([gossip.weight]))[0], total(gossip.weight * w.astype(np.float64))
    assert abs(weight - 1) <= 40 * SIZE * 2.0**-52
    # At most 10 SIZE merges of 4 roundings each, of numbers below SIZE.
    np.testing.assert_allclose(mean, (SIZE - 1) / 2, atol=10 * SIZE * 4 * U * SIZE)
    assert time.monotonic() - begin < 60


def test_a_worker_that_takes_nothing_is_pushed_nothing_more_and_no_memory_fills():
    """All push for a second and take nothing, as in an evaluation; in the end nothing is lost."""
    gossiper, gossip = GossipThread(control().clone(), RANK, SIZE, 4 * N), RandomGossip(RANK, SIZE, 1.0, seed=3)
    body, pushed, end_s = np.full(N, RANK, np.float32).view(np.uint8), 0, time.monotonic() + 1
    while time.monotonic() < end_s:
        if push := gossip.draw(gossiper.closed_peers()):
            gossiper.push(push.to, push.share, body)
            pushed += 1
        time.sleep(0.001)
    control().barrier()  # whoever ends takes what it is sent
    # Of each other: what has arrived there, one on its way to it, and what waits here.
    assert 0 < pushed <= (SIZE - 1) * (2 * MOST + 1) * (SIZE - 1)
    assert len(gossiper.arrived) <= MOST * (SIZE - 1) + SIZE - 2
    gossiper.end()
    weight = gossip.weight + sum(push.share for push in gossiper.arrived)
    whole, lost = total(np.array([weight, pushed - len(gossiper.arrived)]))
    assert abs(whole - 1) <= 20 * SIZE**2 * 2.0**-52  # a rounding for every push, at both ends
    assert lost == 0
