"""Timeline of all ranks in one file for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each rank is a process, with a track each for data, transfer, compute and waits, and one for every bucket. A bucket's
exchange is hidden while its bar lies under a bar of compute.
"""

import contextlib
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmpi.comm.job import Processes
from jaxmpi.core.files import write_whole
from jaxmpi.runtime.progress import TRACKS, Span

FIRST_BUCKET = 100  # number of the first bucket's track
Event = dict[str, Any]
Steps = tuple[int, int]  # first and last; (0, 0): none


class Tracer:
    """Collector of spans of some steps, which writes those of all ranks."""

    def __init__(self, steps: Steps, processes: Processes, hosts: Sequence[str], path: Path) -> None:
        """Trace these steps to rank 0's file; `hosts` are names by rank."""
        (self.first, self.last), self.processes, self.hosts, self.path = steps, processes, hosts, path
        self._spans: list[Span] = []

    def add(self, noted: Sequence[Span], step: int, is_end: bool) -> str:
        """Take a window's spans up to this step; all ranks call together.

        Returns: a line on the file written, after the last step or at the end of the run; else empty. A run that goes
            on after these steps writes none: the file is that of the run before.

        Communicates: when it writes, ranks compare their clocks and rank 0 gathers their spans.
        """
        if not self.last or step < self.first:
            return f"no trace: the run ends at step {step}, before step {self.first}" if self.last and is_end else ""
        self._spans += noted
        if step < self.last and not is_end:
            return ""
        # Now, not at the start: clocks of hosts drift by microseconds a second.
        offsets = [offset for _, offset in self.processes.pings()]
        every = self.processes.allgather_object(select_steps(self._spans, (self.first, self.last)))
        last = min(self.last, step)
        self._spans, self.last = [], 0
        if not any(every):
            return ""
        if self.processes.rank == 0:
            ranks = [[Span(*span) for span in rank_spans] for rank_spans in every]
            write_events(merge_events(ranks, offsets, self.hosts), self.path)
        return f"trace of steps {self.first} to {last}: {self.path}"


class UncoordinatedTrace:
    """Trace under asynchronous rules: worker 0 merges parts that workers write."""

    def __init__(self, steps: Steps, processes: Processes, path: Path) -> None:
        """Trace these steps, by each worker's own count, to a file.

        Communicates: if there are steps to trace, ranks compare their clocks, here and not again.
        """
        (self.first, self.last), self.path = steps, path
        self.offsets = [offset for _, offset in processes.pings()] if self.last else []
        self.hosts = processes.allgather_object(socket.gethostname()) if self.last else []
        self._spans: list[Span] = []
        self._is_open = bool(self.last)

    def add(self, noted: Sequence[Span], worker: int, step: int, is_end: bool = False) -> None:
        """Take a worker's spans, written after its last step or at `is_end`."""
        if not self._is_open or (step < self.first and not is_end):
            return
        self._spans += noted
        if step >= self.last or is_end:
            self._is_open = False
            part = self._part(worker)
            write_whole(part, json.dumps(select_steps(self._spans, (self.first, self.last))).encode())

    def merge(self, workers: int) -> str:
        """Merge parts on worker 0 after the others' end; return a message.

        The message is empty if there were no steps to trace.
        """
        if not self.last:
            return ""
        # Files, since workers end at different times and no collective brings them together.
        parts = [self._part(worker) for worker in range(workers)]
        texts = [part.read_text() if part.exists() else "[]" for part in parts]  # a dead worker has none
        ranks = [[Span(*span) for span in json.loads(text)] for text in texts]
        for part in parts:
            part.unlink(missing_ok=True)
        if not any(ranks):
            return f"no trace: no worker came to step {self.first}"
        write_events(merge_events(ranks, self.offsets[:workers], self.hosts), self.path)
        return f"trace of steps {self.first} to {self.last} of each worker: {self.path}"

    def _part(self, worker: int) -> Path:
        return self.path.with_name(f"{self.path.stem}_{worker:05d}.part")


def write_events(events: Sequence[Event], path: Path) -> None:
    """Write events in the format that Perfetto reads."""
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def select_steps(noted: Sequence[Span], steps: Steps) -> list[Span]:
    """Spans from the first step's batch wait to the last step's end.

    The loop is up to a step ahead of its device. So on one rank a bucket of the step before may still be under way at
    the first batch wait, and on another none.
    """
    numbered = [(int(m[1]), span) for span in noted if (m := re.search(r"step (\d+)$", span.name))]
    inside = [span for step, span in numbered if steps[0] <= step <= steps[1]]
    if not inside:
        return []
    begin, end = min(span.begin_s for span in inside), max(span.end_s for span in inside)
    return [span for span in noted if span.end_s > begin and span.begin_s < end]


def merge_events(ranks: Sequence[Sequence[Span]], offsets: Sequence[float], hosts: Sequence[str]) -> list[Event]:
    """Events of all ranks in microseconds on rank 0's clock, offsets subtracted."""
    begins = [span.begin_s - off for spans, off in zip(ranks, offsets, strict=True) for span in spans]
    zero, events = min(begins, default=0.0), []
    for rank, (noted, offset) in enumerate(zip(ranks, offsets, strict=True)):
        tracks = track_numbers(noted)
        names = [("process_name", 0, f"rank {rank} on {hosts[rank]}")]
        names += [("thread_name", number, name) for name, number in tracks.items()]
        events += [{"ph": "M", "name": k, "pid": rank, "tid": i, "args": {"name": name}} for k, i, name in names]
        for span in sorted(noted, key=lambda s: s.begin_s):
            place = {"pid": rank, "tid": tracks[track_name(span)], "ts": 1e6 * (span.begin_s - offset - zero)}
            length = {"dur": 1e6 * (span.end_s - span.begin_s)}
            events.append({"ph": "X", "name": span.name, "cat": span.track, **place, **length})
    return events


def track_name(span: Span) -> str:
    """The track's name: a bucket's own while it travels; one rank cannot separate exchange from sync."""
    return span.name if span.track == "travel" else "exchange and sync" if span.track == "wait" else span.track


def track_numbers(noted: Sequence[Span]) -> dict[str, int]:
    """Tracks by name, numbered in display order."""
    fixed = ["exchange and sync" if track == "wait" else track for track in TRACKS if track != "travel"]
    buckets = {span.name for span in noted if span.track == "travel"}
    by_number = sorted(buckets, key=lambda name: ([*map(int, re.findall(r"^bucket (\d+) ", name))], name))
    return {name: i for i, name in enumerate(fixed)} | {name: i for i, name in enumerate(by_number, FIRST_BUCKET)}


class Profiler:
    """JAX's own profiler around some steps, on every rank."""

    def __init__(self, steps: Steps, folder: Path) -> None:
        """Profile these steps to a folder of its own."""
        (self.first, self.last), self.folder = steps, folder
        self._ends = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Start the profiler if this step is the first."""
        if self.last and step == self.first:
            self._ends.enter_context(jax.profiler.trace(str(self.folder)))

    def after(self, step: int, state: Any) -> None:
        """Stop the profiler if this dispatched step is the last."""
        if self.last and step == self.last:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Stop the profiler if it runs."""
        self._ends.close()
