"""Times of messages between ranks, and offsets of their clocks."""

import time

import numpy as np

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.polling import wait
from jaxmpi.comm.solo import SoloProcesses

PINGS = 20  # round trips between two clocks
TRIPS = 2  # round trips between two ranks whose link is timed
TURNS = 15  # in which pairs of ranks meet; of more than 16 ranks not all pairs do


def clock_offsets(control: Processes) -> list[float]:
    """Seconds by which clocks are ahead of rank 0's; see `pings`."""
    return [offset for _, offset in pings(control)]


def pings(control: Processes) -> list[tuple[float, float]]:
    """Quickest round trip from rank 0 and clock offset of each rank.

    Both are in seconds of `time.perf_counter`, and zeros on ranks other than 0. All ranks call it together. The offset
    is o_r = t_r - (t_send + t_recv) / 2 of the quickest of PINGS trips. So it is off by half of that trip at most.
    """
    if isinstance(control, SoloProcesses):
        return [(0.0, 0.0)]
    control.barrier()
    found = [(0.0, 0.0)] * control.size
    for rank in range(1, control.size):
        if control.rank == 0:
            found[rank] = _ping(control, rank)
        elif control.rank == rank:
            _pong(control)
    return found


def trips(control: Processes, floats: int) -> np.ndarray:
    """f64[size, size]: quickest round trips of f64[floats], s; NaN if none.

    Pairs exchange in turns, as in a round-robin tournament, so a rank has one partner a turn. Turns are not kept in
    step. All ranks call it together, and all get all.
    """
    if isinstance(control, SoloProcesses):
        return np.full((1, 1), np.nan)
    found, even = np.full(control.size, np.nan), control.size + control.size % 2
    for turn in range(min(even - 1, TURNS)):
        other = met(control.rank, turn, even)
        if other < control.size:
            found[other] = _trip(control, other, np.zeros(floats))
    return control.allgather_array(found)


def met(rank: int, turn: int, ranks: int) -> int:
    """The partner of a rank in a turn of a round-robin tournament.

    `ranks` is even. In `ranks - 1` turns each rank has every other once as its partner.
    """
    others = ranks - 1
    if rank == others:
        return turn * (others + 1) // 2 % others
    found = (turn - rank) % others
    return found if found != rank else others


def _trip(control: MpiProcesses, other: int, message: np.ndarray) -> float:
    ways = (control.world.Isend, control.world.Irecv)
    took = []
    for _ in range(1 + TRIPS):
        begin_s = time.perf_counter()
        for begin in ways if control.rank < other else reversed(ways):
            wait(begin(message, other, tag=4).Test, float("inf"))
        took.append(time.perf_counter() - begin_s)
    return min(took[1:])  # the other may come late to the first


def _ping(control: MpiProcesses, rank: int) -> tuple[float, float]:
    found = []
    for _ in range(PINGS):
        theirs, begin = np.zeros(1), time.perf_counter()
        control.world.Send(theirs, rank, tag=3)
        control.world.Recv(theirs, rank, tag=3)
        end = time.perf_counter()
        found.append((end - begin, float(theirs[0]) - (begin + end) / 2))
    return min(found)


def _pong(control: MpiProcesses) -> None:
    for i in range(PINGS):
        asked = np.zeros(1)
        if i == 0:  # the turn may be long in coming
            wait(control.world.Irecv(asked, 0, tag=3).Test, float("inf"))
        else:
            control.world.Recv(asked, 0, tag=3)
        control.world.Send(np.array([time.perf_counter()]), 0, tag=3)
