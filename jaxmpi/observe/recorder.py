"""The record: one JSON object a line in RUN/record.jsonl, to the sinks, and what the terminal shows. Rank 0 only."""

import json
import math
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.core.files import write_all, write_whole, writing
from jaxmpi.observe import sinks
from jaxmpi.observe.sinks import Sink
from jaxmpi.observe.step_timing import PARTS, SOURCES, Summary, known, own_of, spreads
from jaxmpi.observe.terminal import Plain, Progress, Silent, Terminal
from jaxmpi.runtime.spans import Span

FORMAT = 2  # of the record; 1 had no anatomy
CLASSIC = 5120  # images of a window, as Theano-MPI's recorder had it
COMPUTE = [*PARTS].index("compute")
BEHIND = 1.1  # times the median: a rank that is told of as slow
MOST_RANKS = 64  # listed in a line one by one; of more, the slowest of as many together


class Recorder:
    """Appends to the record, feeds the sinks and tells the terminal; on other ranks it does neither."""

    def __init__(
        self,
        run_dir: Path | None,
        elapsed_s: float = 0.0,
        terminal: Terminal | None = None,
        sinks: Sequence[Sink] = (),
        hosts: Sequence[str] = (),
        bytes_each: int = 0,
    ) -> None:
        """Open RUN/record.jsonl for appending; `run_dir` None is another rank's.

        Args:
            elapsed_s: seconds that earlier parts of a resumed run took.
            terminal: what rank 0's words go to.
            sinks: get every line, too.
            hosts: names, by rank.
            bytes_each: of text, the bytes that an example predicts; 0 for images.
        """
        self._unit, self._each = ("bytes", bytes_each) if bytes_each else ("images", 1)
        self._file = opened(run_dir / "record.jsonl") if run_dir else None
        self._terminal = (terminal or Plain(sys.stdout)) if run_dir else Silent()
        self._sinks, self._hosts = list(sinks) if run_dir else [], hosts
        self._begin = time.monotonic()
        self._start = self._begin - elapsed_s
        self._window = self._begin, 0
        self._compute_s = 0.0  # in steps, since this start
        self._classic, self._buckets, self._is_warm = Classic(), Buckets(), False

    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier parts of a resumed run included."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """A line on the terminal."""
        self._terminal.say(text)

    @contextmanager
    def saying(self, what: str, first_s: float = 3.0, every_s: float = 10.0) -> Iterator[None]:
        """Say on the terminal that this goes on, and for how long, if it takes longer than `first_s`.

        A thread says it: while XLA compiles, this one does not return.
        """
        begin, is_over = time.monotonic(), threading.Event()

        def say() -> None:
            wait_s = first_s
            while not is_over.wait(wait_s):
                self.say(f"{what}: {time.monotonic() - begin:.0f} s so far")
                wait_s = every_s

        thread = threading.Thread(target=say, name=f"jaxmpi says: {what}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def write(self, kind: str, **fields: Any) -> None:
        """A line of the record: `kind`, then `fields`; numbers that JSON has no word for become null.

        Raises:
            TrainingError: it cannot be written, as on a full disk.
        """
        if self._file:
            row = {"kind": kind, **{name: jsonable(value) for name, value in fields.items()}}
            with writing(Path(self._file.name)):
                write_all(self._file, (json.dumps(row) + "\n").encode())
            sinks.send(self._sinks, row)

    def train(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: float,
        examples: int,
        loss: float,
        lr: float,
        wait_s: float,
        skipped: int,
        gradient_norm: float = math.nan,
        anatomy: Summary | None = None,
        images: int = 0,
        noted: Sequence[Span] = (),
        worker_steps: Sequence[int] = (),
        **more: float,
    ) -> None:
        """A progress line; images/s, or of text bytes/s, since the last one.

        Args:
            wait_s: seconds that a worker has waited for batches so far, their mean.
            skipped: corrupt examples so far, of all workers.
            gradient_norm: of a worker's gradients before the exchange, root of the mean square over workers and steps.
            anatomy: where the time of the last steps went.
            images: of these steps.
            noted: what this rank did in these steps.
            worker_steps: that each worker has made, where they do not keep step; shown on the terminal.
            more: fields of the record that only some runs have.
        """
        now = time.monotonic()
        since, before = self._window
        per_s = (examples - before) * self._each / max(now - since, 1e-9)
        self._window = now, examples
        told: dict[str, Any] = {"step": step, "epoch": epoch, "examples": examples, "elapsed_s": self.elapsed_s()}
        told |= {"loss": loss, f"{self._unit}_per_s": per_s, "lr": lr, "wait_s": wait_s, "skipped": skipped}
        told |= {"gradient_norm": gradient_norm, **more}
        shown = Progress(step, total_steps, epoch, loss, per_s, lr, told["elapsed_s"], skipped, unit=self._unit)
        shown = shown._replace(worker_steps=tuple(worker_steps))
        if anatomy:
            slowest = self._slowest(anatomy.own_s)
            told |= self._of_anatomy(anatomy, now) | {"slowest": slowest}
            self._buckets.add(noted, anatomy.steps)
            shown = shown._replace(slowest=slowest, **shares(anatomy))
        self.write("train", **told)
        self._terminal.progress(shown)
        # What the first line of a start tells of has compiled the step: that is no time of images.
        if anatomy and self._is_warm and (line := self._classic.add(anatomy, images, examples)):
            own_s = line.pop("own_s")
            self.write("window", step=step, **line, slowest=self._slowest(own_s))
            self._terminal.classic(classic_line(line))
        self._is_warm |= anatomy is not None

    def _of_anatomy(self, anatomy: Summary, now: float) -> dict[str, Any]:
        """Its fields of a line of the record."""
        self._compute_s += float(anatomy.spent[COMPUTE].mean())
        return {
            "step_s": anatomy.step_s,
            "goodput": self._compute_s / max(now - self._begin, 1e-9),
            "exchange_time": anatomy.source,
            "anatomy": listed(anatomy.table),
            "own_s": [*map(jsonable, blocks(anatomy.own_s))],
            **({"own_ranks": per} if (per := per_block(len(anatomy.own_s))) > 1 else {}),
        }

    def _slowest(self, own_s: Sequence[float]) -> str:
        """The rank that the others wait for; empty where none is far behind."""
        own = [seconds for seconds in own_s if seconds]  # 0: a worker that is gone
        is_behind = bool(own) and max(own) > BEHIND * statistics.median(own)
        return self.name(int(np.argmax(own_s))) if is_behind else ""

    def name(self, rank: int) -> str:
        """`rank 3 on node07`."""
        return f"rank {rank}" + (f" on {self._hosts[rank]}" if rank < len(self._hosts) else "")

    def evaluation(self, *, step: int, epoch: float, examples: int, eval_count: int, **means: float) -> None:
        """Means over `eval_count` evaluated examples: eval_loss, eval_top1, eval_top5; none where there are none.

        Of text eval_bits_per_byte = eval_loss / ln 2 too.
        """
        if self._unit == "bytes" and means:
            means["eval_bits_per_byte"] = means["eval_loss"] / math.log(2)
        place = {"step": step, "epoch": epoch, "examples": examples, "elapsed_s": self.elapsed_s()}
        self.write("eval", **place, eval_count=eval_count, **means)
        if buckets := self._buckets.taken():
            self.write("exchange", step=step, buckets=buckets)
        shown = "no examples"
        if means:
            top1, top5 = 100 * means["eval_top1"], 100 * means["eval_top5"]
            shown = f"loss {means['eval_loss']:.4f}  top-1 {top1:.2f} %  top-5 {top5:.2f} %"
            self._terminal.evaluated(means["eval_top1"])
            if "eval_bits_per_byte" in means:
                shown += f"  {means['eval_bits_per_byte']:.3f} bits per byte"
        self.say(f"step {step}  evaluation on {eval_count}: {shown}  {self.elapsed_s():.1f} s")

    def start_window(self, examples: int) -> None:
        """Begin a new window of images/s: what lay between was not training."""
        self._window = time.monotonic(), examples

    def go_back(self, step: int) -> None:
        """Drop lines after `step`: what they tell of is done again."""
        if self._file:
            self._file.close()
            cut_record(Path(self._file.name), step)
            self._file = opened(Path(self._file.name))

    def copy_to(self, folder: Path) -> None:
        """Write the record so far into another folder, even if its own file has been removed."""
        if self._file:
            shutil.copyfile(f"/proc/self/fd/{self._file.fileno()}", folder / "record.jsonl")

    def close(self) -> None:
        """Close the record, the sinks and the panel."""
        self._terminal.close()
        sinks.close(self._sinks)
        if self._file:
            self._file.close()


def listed(table: Mapping[str, Sequence[float]]) -> dict[str, list[Any]]:
    """Rows as JSON has them."""
    return {part: [*map(jsonable, row)] for part, row in table.items()}


def shares(anatomy: Summary) -> dict[str, Any]:
    """Parts of the time that are known and that the terminal shows."""
    total = anatomy.step_s or 1.0
    parts = {part: anatomy.means[part] / total for part in anatomy.table if part != "hidden"}
    return {"shares": parts, "estimated": anatomy.source == "estimated"}


class Buckets:
    """How long each bucket of this rank is under way in a step, and is waited for."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.seconds: dict[str, np.ndarray] = {}
        self.steps = 0.0

    def add(self, noted: Sequence[Span], steps: float) -> None:
        """The spans of so many steps."""
        self.steps += steps
        for span in noted:
            if span.track in ("travel", "wait"):
                both = self.seconds.setdefault(span.name, np.zeros(2))
                both[int(span.track == "wait")] += span.end_s - span.begin_s

    def taken(self) -> list[list[Any]]:
        """[label, seconds under way, seconds waited for] a step of each since the last call."""
        rows = [[name, *map(jsonable, (both / self.steps).tolist())] for name, both in sorted(self.seconds.items())]
        self.seconds, self.steps = {}, 0.0
        return rows


class Classic:
    """The time of 5,120 images, whatever the batch: what was measured since the last line, scaled."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self.spent, self.images = np.zeros((len(PARTS), 0)), 0  # seconds of every rank
        self.sources: set[str] = set()  # how the time of exchanges was known since the last line

    def add(self, anatomy: Summary, images: int, examples: int) -> dict[str, Any] | None:
        """Fields of a line where another 5,120 images are through, else None.

        Args:
            images: of the window that the anatomy is of.
            examples: so far.
        """
        if self.spent.shape != anatomy.spent.shape:  # the first, or ranks are gone
            self.spent, self.images, self.sources = np.zeros_like(anatomy.spent), 0, set()
        self.sources |= {anatomy.source}
        self.spent = self.spent + anatomy.spent
        self.images += images
        if images <= 0 or examples // CLASSIC == (examples - images) // CLASSIC:
            return None
        each, counted = self.spent * (CLASSIC / self.images), np.asarray(self.spent.any(axis=0))
        source = min(self.sources, key=SOURCES.index)  # the least that is known of any part of the line
        self.spent, self.images, self.sources = np.zeros_like(each), 0, set()
        mean = dict(zip(PARTS, each[:, counted].mean(axis=1).tolist(), strict=True))
        train_s = mean["compute"] + mean["transfer"] + mean["other"]
        told = {"train_s": train_s, "sync_s": mean["sync"], "comm_s": mean["exchange"], "wait_s": mean["data"]}
        own_s = own_of(each).tolist()
        place = {"images": CLASSIC, "time_s": sum(told.values()), **told, "exchange_time": source}
        if source == "unknown":
            place |= {"sync_s": None, "comm_s": None}
        return {**place, "anatomy": listed(known(spreads(each, counted), source)), "own_s": own_s}


def classic_line(fields: dict[str, Any]) -> str:
    """As Theano-MPI printed it: what the step computed, waited for others, exchanged, and waited for data.

    An estimate has `~` before it, an unknown time is `-` and within `train`.
    """
    mark = "~" if fields["exchange_time"] == "estimated" else ""
    shown = {name: fields[f"{name}_s"] for name in ("train", "sync", "comm", "wait")}
    texts = {name: "-" if s is None else f"{mark * (name != 'wait')}{s:.2f}" for name, s in shown.items()}
    parts = " ".join(f"{name} {text}" for name, text in texts.items())
    return f"time per {fields['images']} images: {fields['time_s']:.2f} ({parts})"


def per_block(ranks: int) -> int:
    """Neighbours that one value stands for."""
    return -(-ranks // MOST_RANKS) or 1


def blocks(values: Sequence[float]) -> list[float]:
    """At most MOST_RANKS values: the greatest of neighbours."""
    per = per_block(len(values))
    return [max(values[i : i + per]) for i in range(0, len(values), per)]


def cut_record(path: Path, step: int) -> None:
    """Drop what a resumed run does again: lines after `step`, and a line that was not written to its end."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            if row.get("step", 0) <= step:
                kept.append(line + b"\n")
        except (ValueError, AttributeError, TypeError, RecursionError):  # no line of ours
            continue
    write_whole(path, b"".join(kept))


def opened(path: Path) -> FileIO:
    """A record to append to, without a buffer: on a full disk `close` would fail once more, and hide the way out."""
    with writing(path):
        return path.open("ab", buffering=0)


def jsonable(value: Any) -> Any:
    """Floats rounded to what is worth keeping; NaN and infinities as null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
