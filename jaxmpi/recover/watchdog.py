"""A thread on every rank that detects stalls and names late ranks.

Each rank sends its phase to two others, about once a second, over a communicator of its own: rank 0, which judges, and
one on another host if there is one, which judges if rank 0 has fallen silent. A job is stuck when no rank has got on
for `stall_timeout_s`, or one has been silent for as long: one that waits while others work, as when workers do not
keep step, is not.
"""

import collections
import faulthandler
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.polling import is_mpi_error, survives_losses
from jaxmpi.config.schema import ON_STALL
from jaxmpi.runtime import failures, progress

BEAT_S = 1.0  # between two messages of a rank; of more than RANKS ranks, less often
RANKS = 500
SILENT_BEATS = 3.5  # without a message: a rank that does not answer
ANSWER_S = 2.5  # for stacks to come: they are asked for within a beat
SHOWN = 16  # ranks named one by one
STACKS = 6  # ranks whose stacks are shown; late ones first
STALLED = 1  # exit code: to start again may help


class Mailbox:
    """Small messages between threads of ranks, which never wait; here with nobody to write to."""

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send, unless earlier messages to this rank have not been taken yet."""

    def received(self) -> list[dict[str, Any]]:
        """Messages since the last call."""
        return []


class MpiMailbox(Mailbox):
    """Pickled messages over its own communicator, between ranks of one job only."""

    MOST = 4  # messages under way to a rank: one that is stopped takes none

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._requests: dict[int, list[Any]] = collections.defaultdict(list)

    def send(self, to: int, message: dict[str, Any]) -> None:
        self._requests[to] = [request for request in self._requests[to] if not request.Test()]
        if len(self._requests[to]) < self.MOST:
            self._requests[to].append(self.comm.isend(message, to))

    def received(self) -> list[dict[str, Any]]:
        messages = []
        while (message := self.comm.improbe()) is not None:
            messages.append(message.recv())
        return messages


@dataclass
class RankStatus:
    """Knowledge of a rank; seconds of `time.monotonic`."""

    beat: dict[str, Any]
    heard_s: float
    moved_s: float  # when it got on last


@dataclass
class Watchdog:
    """One rank's part."""

    post: Mailbox
    rank: int
    size: int
    stall_timeout_s: float
    on_stall: str = "abort"
    out: TextIO = field(default_factory=lambda: sys.stderr)
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    reported_s: float | None = None  # when it last reported a stall that is not over
    now_s: float = field(default_factory=time.monotonic)
    judges: tuple[int, int] = (0, 1)  # ranks to which the others send

    @property
    def beat_s(self) -> float:
        """Seconds between two messages."""
        return min(BEAT_S * max(1.0, self.size / RANKS), self.stall_timeout_s / 4)

    def turn(self, now_s: float) -> None:
        """Send, receive, judge; once a beat."""
        self._allow_for_sleep(now_s - self.now_s)
        self.now_s = now_s
        beat = heartbeat(self.rank)
        for judge in self.judges:
            if judge == self.rank:
                self.hear(beat)
            elif judge < self.size:
                self.post.send(judge, beat)
        self.listen()
        if self.rank in self.judges:
            self._judge()

    def leave(self) -> None:
        """This rank has come to its end."""
        for judge in self.judges:
            if judge != self.rank and judge < self.size:
                self.post.send(judge, {"kind": "bye", "rank": self.rank})

    def listen(self) -> None:
        """Take what has come."""
        for message in self.post.received():
            if message["kind"] == "beat":
                self.hear(message)
            elif message["kind"] == "bye":
                self.statuses.pop(message["rank"], None)
            elif message["kind"] == "ask":
                self.post.send(message["rank"], {"kind": "stacks", "rank": self.rank, "text": thread_stacks()})
            else:
                self.stacks[message["rank"]] = message["text"]

    def _allow_for_sleep(self, gap_s: float) -> None:
        """Excuse all ranks if this process was stopped or its clock jumped."""
        if gap_s > 2 * self.beat_s:
            for status in self.statuses.values():
                status.heard_s += gap_s
                status.moved_s += gap_s

    def hear(self, beat: dict[str, Any]) -> None:
        """Note a rank's heartbeat."""
        before = self.statuses.get(beat["rank"])
        has_moved = before is None or before.beat["count"] != beat["count"]
        moved_s = self.now_s if before is None or has_moved else before.moved_s
        self.statuses[beat["rank"]] = RankStatus(beat, self.now_s, moved_s)

    def _is_silent(self, status: RankStatus) -> bool:
        return self.now_s - status.heard_s > SILENT_BEATS * self.beat_s

    def _judge(self) -> None:
        first = self.statuses.get(0)
        if self.rank != 0 and first and not self._is_silent(first):
            return  # rank 0 is there to judge
        idle_s = self.now_s - max((status.moved_s for status in self.statuses.values()), default=self.now_s)
        silent_s = self.now_s - min((status.heard_s for status in self.statuses.values()), default=self.now_s)
        # A rank may say that it is at something long, such as compiling. One that has fallen silent is given no more
        # time than others, or a rank that hangs while it compiles would be noticed after six times the limit.
        answering = [status for status in self.statuses.values() if not self._is_silent(status)]
        patience = max((status.beat["patience"] for status in answering), default=1.0)
        if idle_s < self.stall_timeout_s * patience + self.beat_s and silent_s < self.stall_timeout_s + self.beat_s:
            if self.reported_s is not None:
                self._say(f"goes on, {self.now_s - self.reported_s:.0f} s after that")
                self.reported_s = None
        elif self.reported_s is None:
            self.reported_s = self.now_s
            late = self._report(max(idle_s, silent_s))
            if self.on_stall == "abort":
                if len(late) < len(self.statuses) and self.rank not in late and failures.kill_ranks(late):
                    return self._say("killed; the others go on")
                failures.end_job(STALLED)

    def late(self) -> list[int]:
        """Ranks that others wait for: silent, else furthest behind, else not waiting."""
        silent = [rank for rank, status in self.statuses.items() if self._is_silent(status)]
        lowest_count = min(status.beat["count"] for status in self.statuses.values())
        behind = [rank for rank, status in self.statuses.items() if status.beat["count"] == lowest_count]
        busy = [rank for rank in behind if not self.statuses[rank].beat["waits"]]
        return sorted(silent or (behind if len(behind) < len(self.statuses) else busy) or behind)

    def _report(self, idle_s: float) -> list[int]:
        """Name those who are late."""
        late = self.late()
        order = [*late, *sorted(set(self.statuses) - set(late))]
        names = ", ".join(f"rank {rank} on {self.statuses[rank].beat['host']}" for rank in late[:SHOWN])
        self._say(f"no progress for {idle_s:.0f} s; late: {names}{' ...' * (len(late) > SHOWN)}")
        for rank in order[:SHOWN]:
            self._print(self._described(self.statuses[rank]))
        stack_ranks = [rank for rank in order if not self._is_silent(self.statuses[rank])][:STACKS]
        self._ask(stack_ranks)
        for rank in stack_ranks:
            if rank in self.stacks:
                self._print(f"stacks of rank {rank}:\n{self.stacks.pop(rank)}")
        self._say(f"on_stall {self.on_stall}: {ON_STALL[self.on_stall]}")
        return late

    def _described(self, status: RankStatus) -> str:
        beat = status.beat
        at = f"{beat['phase']}, {', '.join(beat['open']) or 'computes'}"
        since_s = self.now_s - status.moved_s
        if self._is_silent(status):
            silent_s = self.now_s - status.heard_s
            return f"  rank {beat['rank']} on {beat['host']} does not answer, for {silent_s:.0f} s; last in {at}"
        return f"  rank {beat['rank']} on {beat['host']}: {at}, for {since_s:.0f} s"

    def _ask(self, ranks: list[int]) -> None:
        """Let ranks send their stacks; this one's are here."""
        for rank in ranks:
            if rank == self.rank:
                self.stacks[rank] = thread_stacks()
            else:
                self.post.send(rank, {"kind": "ask", "rank": self.rank})
        deadline = time.monotonic() + ANSWER_S
        while set(ranks) - set(self.stacks) and time.monotonic() < deadline:
            time.sleep(0.02)
            self.listen()

    def _say(self, text: str) -> None:
        self._print(f"jaxmpi: watchdog of {failures.describe_rank()}: {text}")

    def _print(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def heartbeat(rank: int) -> dict[str, Any]:
    """This rank's heartbeat: its phase and step, and what it waits for."""
    at, open_spans = failures.current_phase(), progress.open_spans()
    waits = [span.name for span in open_spans if span.track == "wait"]
    opened = [f"{'waits for ' * (s.track in ('wait', 'data'))}{s.name}" for s in open_spans]
    return {
        "kind": "beat",
        "rank": rank,
        "host": socket.gethostname(),
        "phase": at.phase,
        "count": at.count,
        "patience": at.patience,
        "waits": waits,
        "open": opened,
    }


def thread_stacks() -> str:
    """Stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def choose_judges(hosts: Sequence[Any]) -> tuple[int, int]:
    """Rank 0 and the first rank on another host, else rank 1."""
    return 0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


@contextmanager
def watching(
    processes: Processes, stall_timeout_s: float, on_stall: str, is_fault_tolerant: bool = False
) -> Iterator[str]:
    """Watch the job within the block; yield a reason if it cannot.

    All ranks call it together. The reason is empty if it watches.

    Args:
        is_fault_tolerant: those that live call it again when a rank has died; until then nobody watches.
    """
    if not stall_timeout_s:
        yield "watchdog off: as asked"
    elif isinstance(processes, MpiProcesses) and not processes.may_overlap:
        yield "watchdog off: MPI gives MPI_THREAD_SERIALIZED, and a thread of its own needs MPI_THREAD_MULTIPLE"
    elif survives_losses() and not is_fault_tolerant:
        yield "watchdog off: this job goes on without ranks that die"
    else:
        post = MpiMailbox(processes.clone()) if isinstance(processes, MpiProcesses) else Mailbox()
        watchdog = Watchdog(post, processes.rank, processes.size, stall_timeout_s, on_stall)
        for beat in processes.allgather_object(heartbeat(processes.rank)):
            watchdog.hear(beat)  # a rank may be stopped before it sends one
        ended = threading.Event()
        watchdog.judges = choose_judges(processes.hosts if isinstance(processes, MpiProcesses) else [0])
        thread = threading.Thread(target=_run, args=(watchdog, ended), name="jaxmpi watchdog", daemon=True)
        thread.start()
        try:
            yield ""
        finally:
            ended.set()
            thread.join()


def _run(watchdog: Watchdog, ended: threading.Event) -> None:
    try:
        while not ended.wait(watchdog.beat_s):
            watchdog.turn(time.monotonic())
        watchdog.leave()
    except Exception as error:
        if not (survives_losses() and is_mpi_error(error)):
            raise
