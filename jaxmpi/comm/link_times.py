"""Times of messages between ranks, and offsets of their clocks. All ranks call these functions together."""

import time

import numpy as np

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.polling import wait

PINGS = 20  # round trips between two clocks
CLOCK = 3  # tag


def pings(control: Processes) -> list[tuple[float, float]]:
    """Quickest round trip from rank 0 and clock offset of each rank, in seconds; zeros on other ranks.

    The offset is o_r = t_r - (t_send + t_recv) / 2 of the quickest of PINGS trips, by `time.perf_counter`, so it is off
    by half of that trip at most.
    """
    link_times, clock = [(0.0, 0.0)] * control.size, np.zeros(1)
    if not isinstance(control, MpiProcesses):
        return link_times
    control.barrier()
    for rank in range(1, control.size):
        if control.rank == 0:
            times = []
            for _ in range(PINGS):
                begin_s = time.perf_counter()
                control.world.Send(clock, rank, tag=CLOCK)
                control.world.Recv(clock, rank, tag=CLOCK)
                end_s = time.perf_counter()
                times.append((end_s - begin_s, float(clock[0]) - (begin_s + end_s) / 2))
            link_times[rank] = min(times)
        elif control.rank == rank:
            wait(control.world.Irecv(clock, 0, tag=CLOCK).Test, float("inf"))  # this rank's turn may be long in coming
            for ping in range(PINGS):
                if ping:
                    control.world.Recv(clock, 0, tag=CLOCK)
                control.world.Send(np.array([time.perf_counter()]), 0, tag=CLOCK)
    return link_times
