"""Equal shares of a host's cores for processes that run independently.

Problem: asynchronous workers that share cores make as many steps as the kernel gives them time for. It balances
threads, not workers, and beside other programs the steps of equal workers differ by 20 % for seconds.

Approach: each process counts its steps in memory that the others can read. Linux shows of every thread how long it has
run and how long it has waited for a core. A process may be ahead in steps of a peer by more than a margin. It then
sleeps for a part of its time if two conditions hold. The peer has waited for a core about as long as the process, and
has not run a third longer. So one that needs more time a step gets a third more at most; and nobody waits for one that
is stopped, has ended, or waits for a message, a disk or a timer: it does not wait for a core. One's own sleep counts as
such a wait, so a sleep that helps nobody ends itself. Enough processes stay awake to keep all cores busy. There is no
message and no lock.

Tried and dropped: the time of whole processes alone (`clock_gettime` of another process). The others would slow down to
the pace of one that sleeps or reads from a disk. Also dropped: equal times instead of equal steps, since equal workers
differ by 15 % in the time that a step takes. Also dropped: no turns for a peer whose steps take a third longer. A
process that falls behind polls more a step, and is left behind for good. Also dropped: waits of all threads alike,
since those that poll wait most. A bound on steps, which is `--rule.staleness`, has all wait for a slow worker.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Container, Sequence

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.shared_memory import GoneError, Segment, attached
from jaxmpi.runtime import affinity

LOOK_S = 0.02  # between two looks, each of which takes less than 0.1 ms
MARGIN_S = 0.04  # that a process may be ahead, besides one step
KEPT_S, KEPT = 0.5, 4  # seconds, and number of steps besides, of a lag that are made up for
PHASE_S = 10.0  # over which the time of a step is taken
ALIKE = 4 / 3  # times as long as this process a peer may run, for as many steps; and its waits count for so much
MOST = 16  # peers that a process looks at: the next ones in a circle of all

Address = tuple[int, int, int, int]  # address of a `Segment`; its first number is the process id


class FairCores:
    """This process's turns on shared cores; no sleep if cores suffice.

    Attributes:
        address: where others find its count of steps; none if they cannot.
    """

    def __init__(self) -> None:
        """Make the memory that others read."""
        self.address: Address | None = None
        self._mine = np.zeros(1)  # steps made, and 1; 0 before the first and after the last
        self._files: list[list[int]] = []  # file descriptors of this process, then of its peers: one a thread
        with contextlib.suppress(UsageError):
            segment = self._segment = Segment(self._mine.nbytes)
            self.address, self._mine = segment.address, segment.array(0, (1,), np.float64)
        weakref.finalize(self, close, self._files)

    def begin(self, addresses: Sequence[Address], uncounted: Container[int] = ()) -> None:
        """Begin to count; all processes call it at about the same time.

        Args:
            addresses: of processes of this host, in the same order in each of them.
            uncounted: threads by their native numbers whose time does not count, such as one that serves the others.
        """
        here = affinity.core_mask()
        alike = [tuple(address) for address in addresses if here and mask_of(address[0]) == here]
        self._enough = affinity.cores() / max(len(alike) - 1, 1)  # share of the peers that keeps all cores busy
        self._counts = [self._mine]
        if self.address in alike and self._enough <= 1:
            place = alike.index(self.address)
            self._files.append(opened(self.address[0], uncounted))
            for address in (alike[place + 1 :] + alike[:place])[:MOST]:
                with contextlib.suppress(GoneError):  # it has ended
                    self._counts.append(attached(*address).array(0, (1,), np.float64))
                    self._files.append(opened(address[0], uncounted))
        self._mine[0] = 1.0
        self._figures = self._read().reshape(-1, 3)
        self._figures[:, 0] = 1.0  # others may have made steps by now
        self._recent = np.zeros(2)  # steps, and seconds run, of the last PHASE_S or so
        # By peer: fewer steps, seconds that it has run less than ALIKE times as long, and waited longer.
        self._lags = np.zeros((max(len(self._files) - 1, 0), 3))
        self._looked_s, self._sleep_s = time.monotonic(), 0.0

    def end(self) -> None:
        """No more steps follow; nobody is to wait for this process."""
        self._mine[0] = 0.0

    def sleep_s(self) -> float:
        """Count a step; return the seconds that this process must sleep now.

        These seconds count as slept, and are at most those since the last sleep.
        """
        self._mine[0] += 1.0
        awake_s = time.monotonic() - self._looked_s - self._sleep_s
        if not self._lags.size or awake_s < LOOK_S:
            return 0.0
        before, self._figures = self._figures, self._read()
        grown = np.maximum(self._figures - before, 0.0)  # sums fall when a thread ends, since its seconds go with it
        self._recent = self._recent * np.exp(-(awake_s + self._sleep_s) / PHASE_S) + grown[0, :2]
        step_s = self._recent[1] / max(self._recent[0], 1.0)
        in_s, kept_s = np.array([max(step_s, 1e-6), 1.0, 1.0]), KEPT_S + KEPT * step_s
        fewer, (ran_s, waited_s) = grown[0, 0] - grown[1:, 0], grown[1:, 1:].T
        more = fewer, ALIKE * grown[0, 1] - ran_s, ALIKE * waited_s - grown[0, 2] - self._sleep_s
        self._lags = np.clip(self._lags + np.stack(more, axis=1), -kept_s / in_s, kept_s / in_s)
        lags_s = np.where(self._figures[1:, 0] > 0, (self._lags * in_s).min(axis=1), -kept_s)
        over_s = lags_s.max() - MARGIN_S - step_s if np.mean(lags_s > 0) >= self._enough else 0.0
        self._looked_s, self._sleep_s = time.monotonic(), float(np.clip(over_s, 0.0, awake_s))
        return self._sleep_s

    def _read(self) -> np.ndarray:
        """f64[processes, 3]: steps, seconds run, and seconds waited for a core."""
        rows = zip(self._counts, self._files, strict=False)
        return np.array([(count[0], *times_of(files)) for count, files in rows])


def mask_of(pid: int) -> list[int]:
    """The cores that a process may use; none if it has ended."""
    with contextlib.suppress(OSError):
        return sorted(os.sched_getaffinity(pid))
    return []


def opened(pid: int, uncounted: Container[int]) -> list[int]:
    """Open each thread's file of times; reading takes a tenth of opening."""
    files = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            if int(thread) not in uncounted:
                with contextlib.suppress(OSError):  # the thread has, or the kernel keeps no such times
                    files.append(os.open(f"/proc/{pid}/task/{thread}/schedstat", os.O_RDONLY))
    return files


def times_of(files: Sequence[int]) -> tuple[float, float]:
    """Seconds that a process's live threads ran, and waited for a core.

    W = sum_t w_t r_t / max_t r_t: a thread that polls for messages runs little, and waits whenever it wakes.
    """
    ran_ns, waited_ns = [], []
    for file in files:
        with contextlib.suppress(OSError):
            ran, waited, _ = map(int, os.pread(file, 64, 0).split())
            ran_ns.append(ran)
            waited_ns.append(waited)
    weighted = sum(ran * waited for ran, waited in zip(ran_ns, waited_ns, strict=True))
    return sum(ran_ns) * 1e-9, weighted / max([1, *ran_ns]) * 1e-9


def close(files: Sequence[Sequence[int]]) -> None:
    """Close the files of all processes."""
    for file in [file for of_process in files for file in of_process]:
        os.close(file)
