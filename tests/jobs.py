"""Jobs that a test does something to while they run: each line with its time, and a look at what is left behind.

On emulated hosts (JAXMPI_FAULTS_HOSTS=4, scripts/cluster.py) if that many are asked for.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from jaxmpi.runtime import job_folder
from launching import LAUNCHER_PREFIXES, ROOT, kill_session, leaked, shared_memory

RANKS = int(os.environ.get("JAXMPI_FAULTS_RANKS", "4"))
HOSTS = int(os.environ.get("JAXMPI_FAULTS_HOSTS", "1"))
JOB_S = 300  # no job may take longer, however busy the machine is
MARK, NUMBERS = "JAXMPI_FAULTS_JOB", itertools.count(1)
SCENERY = ("cluster.py", "unshare", "sh", "sleep", "seq")  # what emulated hosts consist of


@dataclass
class Job:
    """A running command and what it has printed, each line with the time at which it came."""

    process: subprocess.Popen
    lines: list[tuple[float, str]]
    reader: threading.Thread
    mark: str  # that all its processes have in their environment
    before: set[str]  # names in the shared memory when it began

    @property
    def out(self) -> str:
        return "".join(line for _, line in self.lines)

    def when(self, pattern: str, timeout_s: float = JOB_S) -> float:
        """The time of the first line that matches, waited for."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = not self.reader.is_alive()
            found = next((at for at, line in list(self.lines) if re.search(pattern, line)), None)
            if found is not None:
                return found
            assert not is_over, f"no line with {pattern!r}:\n{self.out[-4000:]}"
            if time.monotonic() > deadline:
                self.drop()
                pytest.fail(f"no line with {pattern!r} in time:\n{self.out[-4000:]}")
            time.sleep(0.02)

    def end(self) -> int:
        """The exit code, once all is printed and nothing is left behind; a job that hangs is killed and fails."""
        if HOSTS > 1:
            self.when(ENDED)  # its hosts stay until they have been looked at
            self.look_behind()
            seen(self.mark).touch()
        try:
            code = self.process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            self.drop()
            pytest.fail(f"the job hung:\n{self.out[-4000:]}")
        self.reader.join(10)
        if HOSTS == 1:
            self.look_behind()
        return code

    def look_behind(self) -> None:
        """Find what the job should have taken with it."""
        processes, memory = left_behind(self.mark), leaked(self.before, lambda: marked(self.mark))
        memory = {name for name in memory if not name.startswith("sm_segment.")}  # of plain mpirun, beside this job
        if processes or memory:
            words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes if os.path.exists(f"/proc/{pid}")]
            self.drop()
            pytest.fail(f"left behind: {words}, {memory}:\n{self.out[-4000:]}")

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to the command itself, or to the process of a rank."""
        os.kill(self.process.pid if rank is None else process_of(self, "jaxmpi.train", rank), number)

    def drop(self) -> None:
        """Kill all of it."""
        kill_session(self.process.pid)
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self.reader.join(10)


ENDED = "the job has ended"
# What a job is wrapped in on emulated hosts, which end with it: they wait until the test has seen what is left there.
LINGER = f"""
"$@"; code=$?
echo "{ENDED}"
for i in $(seq 300); do [ -e "$0" ] && break; sleep 0.1; done
exit $code
"""


def seen(mark: str) -> Path:
    """Return the file that a test makes for the emulated hosts to go."""
    return Path(mark + ".seen")


def start(line: list[str], env: dict[str, str] | None = None) -> Job:
    """A command in a session of its own; all its processes have its mark."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    mark, before = f"{tempfile.gettempdir()}/job-{os.getpid()}-{next(NUMBERS)}", shared_memory()
    if HOSTS > 1:
        line = [*cluster(HOSTS), "sh", "-c", LINGER, str(seen(mark)), *line]
    process = subprocess.Popen(
        job_folder.remove_leftovers_first(line),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", MARK: mark} | (env or {}),
        start_new_session=True,
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=read, args=(process.stdout, lines), daemon=True)
    reader.start()
    return Job(process, lines, reader, mark, before)


def read(stream: IO[str], lines: list[tuple[float, str]]) -> None:
    """Lines with the time at which they came, to the stream's end."""
    with stream:
        for line in stream:
            lines.append((time.monotonic(), line))


def cluster(hosts: int) -> list[str]:
    """Return what a line begins with to run on emulated hosts."""
    slots = ("--slots", str(-(-RANKS // hosts)), "--rate", "1gbit")
    return [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--hosts", str(hosts), *slots, "--"]


def marked(mark: str) -> list[int]:
    """All processes that a job has started, its emulated hosts among them."""
    entry, found = f"{MARK}={mark}".encode(), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += [int(pid)] * (entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except OSError:
            continue
    return found


def words_of(pid: int) -> list[str]:
    """A process's command line; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def workers(mark: str) -> list[int]:
    """A job's processes but those that its emulated hosts consist of."""
    found = {pid: words for pid in marked(mark) if (words := words_of(pid))[:1] not in ([], [""])}
    return [p for p, words in found.items() if not {os.path.basename(word) for word in words[:2]} & {*SCENERY}]


def left_behind(mark: str, patience_s: float = 5) -> list[int]:
    """Processes that still work for a job, a few seconds after its job has ended."""
    deadline = time.monotonic() + patience_s
    while (found := workers(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def process_of(job: Job, program: str, rank: int | None = None) -> int:
    """The process of a job that runs a program: jaxmpi.tools.cli, jaxmpi.train or prterun, and is this rank."""
    for pid in workers(job.mark):
        with contextlib.suppress(OSError):
            words, entry = words_of(pid), f"OMPI_COMM_WORLD_RANK={rank}".encode()
            is_rank = rank is None or entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if is_rank and (words[1:3] == ["-m", program] or os.path.basename(words[0]) == program):
                return pid
    pytest.fail(f"no {program} {rank}")
