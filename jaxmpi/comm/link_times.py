"""Times of messages between ranks, and offsets of their clocks. All ranks call these functions together."""

import time

import numpy as np

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.polling import wait
from jaxmpi.comm.solo import SoloProcesses

PINGS = 20  # round trips between two clocks
TRIPS = 2  # round trips between two ranks whose link is timed
TURNS = 15  # in which pairs of ranks meet; of more than 16 ranks not all pairs do
CLOCK, LINK = 3, 4  # tags


def clock_offsets(control: Processes) -> list[float]:
    """Seconds by which clocks are ahead of rank 0's; see `pings`."""
    return [offset for _, offset in pings(control)]


def pings(control: Processes) -> list[tuple[float, float]]:
    """Quickest round trip from rank 0 and clock offset of each rank, in seconds; zeros on other ranks.

    The offset is o_r = t_r - (t_send + t_recv) / 2 of the quickest of PINGS trips, by `time.perf_counter`, so it is off
    by half of that trip at most.
    """
    if isinstance(control, SoloProcesses):
        return [(0.0, 0.0)]
    control.barrier()
    found, clock = [(0.0, 0.0)] * control.size, np.zeros(1)
    for rank in range(1, control.size):
        if control.rank == 0:
            times = []
            for _ in range(PINGS):
                begin_s = time.perf_counter()
                control.world.Send(clock, rank, tag=CLOCK)
                control.world.Recv(clock, rank, tag=CLOCK)
                end_s = time.perf_counter()
                times.append((end_s - begin_s, float(clock[0]) - (begin_s + end_s) / 2))
            found[rank] = min(times)
        elif control.rank == rank:
            wait(control.world.Irecv(clock, 0, tag=CLOCK).Test, float("inf"))  # this rank's turn may be long in coming
            for ping in range(PINGS):
                if ping:
                    control.world.Recv(clock, 0, tag=CLOCK)
                control.world.Send(np.array([time.perf_counter()]), 0, tag=CLOCK)
    return found


def trips(control: Processes, floats: int) -> np.ndarray:
    """f64[size, size]: quickest round trips of f64[floats], s; NaN if none.

    Pairs exchange in turns, as in a round-robin tournament, so a rank has one partner a turn. Turns are not kept in
    step.
    """
    if isinstance(control, SoloProcesses):
        return np.full((1, 1), np.nan)
    found, even = np.full(control.size, np.nan), control.size + control.size % 2
    for turn in range(min(even - 1, TURNS)):
        partner = met(control.rank, turn, even)
        if partner < control.size:
            found[partner] = _trip(control, partner, np.zeros(floats))
    return control.allgather_array(found)


def met(rank: int, turn: int, ranks: int) -> int:
    """The partner of a rank in a turn of a round-robin tournament of an even number of ranks.

    In `ranks - 1` turns each rank has every other once as its partner.
    """
    others = ranks - 1
    if rank == others:
        return turn * (others + 1) // 2 % others
    partner = (turn - rank) % others
    return partner if partner != rank else others


def _trip(control: MpiProcesses, partner: int, message: np.ndarray) -> float:
    ways = (control.world.Isend, control.world.Irecv)
    times = []
    for _ in range(1 + TRIPS):
        begin_s = time.perf_counter()
        for begin in ways if control.rank < partner else reversed(ways):
            wait(begin(message, partner, tag=LINK).Test, float("inf"))
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])  # the other may come late to the first
