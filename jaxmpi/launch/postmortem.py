"""The rank that ended a job first, from the job's output, and ranks that are alive."""

import os
import re
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxmpi.runtime.process import LAUNCHERS

TAIL_BYTES = 200_000  # bytes at the end of a job's output, searched for the culprit


class Culprit(NamedTuple):
    """The rank or host that ended a job."""

    rank: str  # empty if it is the whole host
    host: str  # empty if unknown
    words: str  # what others say of it; empty if it has said itself why, right above

    def __str__(self) -> str:
        if not self.rank:
            return f"host {self.host} ended the job: {self.words}"
        place = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{place} ended the job" + (f": {self.words}" if self.words else ", as it says above")


# A host is gone, and mpirun's daemon with it: mpirun ends with the daemon's exit code, which may be 0.
HOST_GONE = re.compile(
    r"(?P<words>daemon failed to report back|lost communication with a remote daemon)"
    r".*?Remote (?:host:|daemon: \S+ on node)\s+(?P<host>\S+)",
    re.S,
)
KILLED = re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) (?P<words>exited on\s+signal[^.]*)")
ABORTS = re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) (?P<words>calling\s+.abort.)")
# With spawned processes, Open MPI has a rank abort the job that only notices the end of another.
NOTICED = "*** An error occurred in Socket closed"
# Messages that name the culprit, the most reliable first: groups rank, host and words.
TRACES = [
    re.compile(r"(?P<words>no progress for \d+ s); late: rank (?P<rank>\d+) on (?P<host>[^\s,;]+)"),
    re.compile(
        r"on \S+ \([^)]*\):\n(?P<words>error: .*?has waited \d+ s for rank (?P<rank>\d+)(?: on (?P<host>[^\s,;]+))?)"
    ),
    re.compile(
        r"on \S+ \([^)]*\):\n(?P<words>error: .*?"
        r"rank (?P<rank>\d+)(?: on (?P<host>[^\s,;]+))?(?:, [^;:]*)? did not answer in time)"
    ),
    HOST_GONE,
    KILLED,
    # Of an asynchronous rule: said by a rank that has noticed.
    re.compile(
        r"error: (?P<words>rank (?P<rank>\d+)(?: on (?P<host>[^\s,]+))?, which keeps the (?:center|record), is gone)"
    ),
    re.compile(r"^jaxmpi: rank (?P<rank>\d+)/\d+ on (?P<host>\S+)(?: \([^)]*\))?:\n", re.M),
    re.compile(r"^jaxmpi: rank (?P<rank>\d+)/\d+ on (?P<host>\S+) (?:left early|has ended)", re.M),
    ABORTS,
    re.compile(r"Process name: \[.*,(?P<rank>\d+)\]\s+(?P<words>Exit code:\s+\d+)"),
    re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<rank>[\d,-]+): (?P<words>.*)"),
]


def culprit(text: str) -> Culprit | None:
    """The culprit in a job's standard error; None if none is named."""
    traces = [trace for trace in TRACES if not (trace is ABORTS and NOTICED in text)]
    first_match = next((match for trace in traces if (match := trace.search(text))), None)
    if first_match is None:
        return None
    groups = first_match.groupdict("")
    return Culprit(groups.get("rank", ""), groups.get("host", ""), " ".join(groups.get("words", "").split()))


# ---------------------------------------------------------------- who is alive

LAUNCHER = -1  # in place of a rank


class Exits:
    """Which rank of this host ends first, by the kernel's notice.

    After processes spawned by MPI, Open MPI's launcher ends a job in which a rank is killed without a word.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._poll, self._ranks, self._first = select.poll(), dict[int, int](), list[int]()
        self.watch(pids)

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch these processes by rank, and `LAUNCHER`, too."""
        for rank in pids.keys() - self._ranks.values():
            with suppress(OSError, AttributeError):  # it has ended, or the system is too old
                handle = os.pidfd_open(pids[rank])
                self._ranks[handle] = rank
                self._poll.register(handle, select.POLLIN)

    def wait(self, seconds: float) -> float:
        """Wait for the first end, or so long; return the seconds that are left."""
        begin_s = time.monotonic()
        if not self._first:
            self._first = [self._ranks[handle] for handle, _ in self._poll.poll(1000 * seconds)]
        return max(0.0, seconds - (time.monotonic() - begin_s))

    def close(self) -> None:
        """Watch no more: each process watched has a file handle, and a job may be restarted often."""
        for handle in self._ranks:
            os.close(handle)
        self._ranks.clear()

    def culprit(self) -> Culprit | None:
        """The first one, if there was one and none with it."""
        if len(self._first) != 1 or self._first == [LAUNCHER]:
            return None
        words = "it ended before the others, without a word, as a killed one does (no memory left: dmesg)"
        return Culprit(str(self._first[0]), socket.gethostname(), words)


def ranks_under(pid: int) -> dict[int, int]:
    """A launcher's processes on this host by rank, except spawned ones."""
    variables = tuple(f"{names[0]}=".encode() for names in LAUNCHERS.values())
    jobs = b"PMIX_NAMESPACE="  # Open MPI's job: the launcher's own ends with @1, of spawned processes with @2, ...
    pids_by_rank: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            with suppress(OSError):  # it has ended
                environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                ranks = [int(line.partition(b"=")[2]) for line in environ if line.startswith(variables)]
                is_spawned = any(line.startswith(jobs) and not line.endswith(b"@1") for line in environ)
                if not ranks:
                    waiting.append(child)
                elif not is_spawned:
                    pids_by_rank[ranks[0]] = child
    return pids_by_rank


def children_of(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    children: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children
