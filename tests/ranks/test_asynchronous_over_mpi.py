"""Messages of asynchronous rules between real processes."""

import threading
import time

import numpy as np
import pytest

import jaxmpi
from jaxmpi.allreduce.wires import host_wire
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.rules.asynchronous.center import CenterClient, CenterLayout, CenterServer
from jaxmpi.rules.asynchronous.gossip import GossipThread
from jaxmpi.rules.asynchronous.progress import Closing, GlobalProgress, Report
from jaxmpi.rules.asynchronous.rules import RandomGossip
from tolerances import U

COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
N, ROUNDS = 300_001, 4  # floats: more messages than may be unanswered at once


def control() -> MpiProcesses:
    found = processes()
    assert isinstance(found, MpiProcesses)
    return found


def total(x: np.ndarray) -> np.ndarray:
    return control().allreduce_sum(np.asarray(x, np.float64))


def elastic(center, pushed, seen):
    center += np.float32(0.5) * (pushed - seen)


@pytest.mark.parametrize(("servers", "wire"), [(0, "32"), (1, "16"), (0, "8")])
def test_center_and_workers_keep_their_sum(servers, wire):
    """Rank 0's server is a thread, or the last rank only serves."""
    mpi, workers, where = control().clone(), SIZE - servers, SIZE - 1 if servers else 0
    layout, thread = CenterLayout(N, 1, wire), None
    center = np.ones(N, np.float32)
    if where == RANK:
        server = CenterServer(mpi, layout, 0, center, elastic, workers, GlobalProgress(workers, 1e9, 0))
        thread = threading.Thread(target=server.run)
        thread.start()
    w = np.random.default_rng(RANK).standard_normal(N).astype(np.float32) * (workers > RANK)
    before, seen = total(w), np.zeros(N, np.float32)
    if workers > RANK:
        client = CenterClient(mpi, layout, {where: "a"}, 0 if RANK else workers)
        for _ in range(ROUNDS):
            exchange = client.exchange(w)
            assert exchange.sent_bytes >= host_wire(layout.wire).size_bytes(N)
            w = w - np.float32(0.5) * (exchange.pushed - exchange.seen)
        if RANK == 0:
            while sum(report.is_done for report in report_of_all(client).values()) < workers - 1:
                time.sleep(0.005)
            seen = client.read() if wire == "32" else seen
        while not status(client, Report(ROUNDS, is_done=True, closing=Closing.NO if RANK else Closing.OVER)).closing:
            time.sleep(0.005)
        if RANK == 0:
            client.end(is_left=False)
    if thread:
        thread.join(30)
        assert not thread.is_alive()
        if wire != "32":
            seen = center  # as it is, not as it is sent
    # Each of the exchanges rounds w and c twice, numbers below 8.
    np.testing.assert_allclose(total(w) + total(seen), before + 1, atol=4 * ROUNDS * workers * U * 8)


def status(client, report):
    answer = client.exchange(None, report).status
    assert answer
    return answer


def report_of_all(client):
    return status(client, Report(ROUNDS)).workers.reports


def test_simultaneous_pushes_lose_nothing():
    """Blocking sends would wait for ever: MPI sends messages so long only when the receiver is ready."""
    begin = time.monotonic()
    thread, gossip = GossipThread(control().clone(), RANK, SIZE, 4 * N), RandomGossip(RANK, SIZE, 1.0, seed=3)
    w = np.full(N, RANK, np.float32)

    def merge() -> None:
        nonlocal w
        while thread.arrived:
            push = thread.arrived.popleft()
            w = gossip.merge(w, push.body.view(np.float32), push.share)

    for _ in range(10):
        push = gossip.draw()
        assert push  # p is 1
        thread.push(*push, w.copy().view(np.uint8))
        merge()
    thread.end()
    merge()
    weight, mean = total(np.array([gossip.weight]))[0], total(gossip.weight * w.astype(np.float64))
    assert abs(weight - 1) <= 40 * SIZE * 2.0**-52
    # At most 10 SIZE merges of 4 roundings each, of numbers below SIZE.
    np.testing.assert_allclose(mean, (SIZE - 1) / 2, atol=10 * SIZE * 4 * U * SIZE)
    assert time.monotonic() - begin < 60


def test_a_worker_that_does_not_receive_is_sent_no_more_messages():
    """All push for half a second and take nothing, as in an evaluation; in the end nothing is lost."""
    thread, gossip = GossipThread(control().clone(), RANK, SIZE, 4 * N), RandomGossip(RANK, SIZE, 1.0, seed=3)
    body, pushed, end_s = np.full(N, RANK, np.float32).view(np.uint8), 0, time.monotonic() + 0.5
    while time.monotonic() < end_s:
        if push := gossip.draw(thread.closed_peers()):
            thread.push(*push, body)
            pushed += 1
        time.sleep(0.001)
    control().barrier()  # whoever ends takes what it is sent
    # To each other: what has arrived there, and two that it has yet to take.
    assert 0 < pushed <= (SIZE - 1) * (SIZE - 1 + 2)
    assert len(thread.arrived) < SIZE
    thread.end()
    weight = gossip.weight + sum(push.share for push in thread.arrived)
    whole, lost = total(np.array([weight, pushed - len(thread.arrived)]))
    assert abs(whole - 1) <= 20 * SIZE**2 * 2.0**-52  # a rounding for every push, at both ends
    assert lost == 0
