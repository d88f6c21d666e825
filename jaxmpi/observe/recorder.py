"""The record: JSON lines of rank 0 in RUN/record.jsonl, sinks and terminal.

A run may be killed at any time, and its record must stay readable. The file is unbuffered, so a killed run loses at
most the line being written. A resumed run first drops damaged lines and the lines after its checkpoint. Own times of
more than 64 ranks are reduced to the greatest of neighbouring ranks.
"""

import io
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import write_all, write_whole, writing
from jaxmpi.core.json_tree import MALFORMED
from jaxmpi.observe.flops import PEAK_MARKS, Work
from jaxmpi.observe.record_format import KINDS, PARTS, SAMPLES
from jaxmpi.observe.sinks.base import Sink, close, send
from jaxmpi.observe.step_timing import Summary
from jaxmpi.observe.terminal import UNTOLD, Plain, ProgressLine, Terminal, format_number
from jaxmpi.runtime.progress import Span

COMPUTE = [*PARTS].index("compute")
BEHIND = 1.1  # times the median: a rank that is reported as slow
MOST_FIGURES = 3  # of the task's figures of training on the terminal; the record has all
MOST_RANKS = 64  # values in a line; with more ranks, the slowest of each group of neighbours


class Unit(NamedTuple):
    """The unit of a run's speed."""

    name: str = "images"  # | tokens | examples
    per_example: float = 1.0  # in an example
    bytes_each: float = 0.0  # mean bytes of text that an example predicts; 0 if it is no text


class Recorder:
    """Writer to record, sinks and terminal on rank 0; a no-op elsewhere."""

    def __init__(
        self,
        run_dir: Path | None,
        elapsed_s: float = 0.0,
        terminal: Terminal | None = None,
        sinks: Sequence[Sink] = (),
        hosts: Sequence[str] = (),
        unit: Unit = Unit(),  # noqa: B008 of values that never change
    ) -> None:
        """Open RUN/record.jsonl for appending; `run_dir` is None on ranks other than 0.

        Args:
            elapsed_s: seconds that earlier parts of a resumed run took.
            terminal: shows rank 0's output.
            sinks: get every line, too.
            hosts: names, by rank.
            unit: of the speed.
        """
        self._unit = unit
        self._file = open_record(run_dir / "record.jsonl") if run_dir else None
        self._terminal = (terminal or Plain(sys.stdout)) if run_dir else Terminal()
        self._sinks, self._hosts = list(sinks) if run_dir else [], hosts
        now = time.monotonic()
        self._start = now - elapsed_s
        self._window = now, 0
        # Goodput is of the whole run: earlier parts of a resumed one, and the time between them, count.
        self.began_ms, self._compute_s = useful_time(run_dir) if run_dir else (0, 0.0)
        self._buckets: dict[str, np.ndarray] = {}  # seconds in flight and waited for since the last evaluation
        self._bucket_steps = 0.0

    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier parts of a resumed run included."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        self._terminal.say(text)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line: `kind`, then `fields`; NaN and infinities become null.

        Raises:
            TrainingError: it cannot be written, as on a full disk.
        """
        if self._file:
            row = {"kind": kind, **{name: as_json_number(value) for name, value in fields.items()}}
            with writing(Path(self._file.name)):
                write_all(self._file, (json.dumps(row) + "\n").encode())
            send(self._sinks, row)  # after the file: a sink may read it, as `Csv` does

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line of the user's own.

        Raises:
            UsageError: its kind is one of the trainer's, or cannot be part of a file's name, as sinks use it.
        """
        if kind in KINDS or not re.fullmatch(r"[\w-]+", kind):
            raise UsageError(
                f"write: got kind {kind!r}; expected letters, digits, _ and -, and none of {', '.join(KINDS)}"
            )
        self.write(kind, **fields)

    def sample(self, step: int, name: str, value: str | np.ndarray) -> None:
        """Write a sample: a text in its line, a picture as PNG.

        Raises:
            UsageError: a name that is none of a file, or a value that is neither a text nor a picture.
            TrainingError: it cannot be written.
        """
        if not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"show: got name {name!r}; expected letters, digits, _ and -")
        if isinstance(value, str):
            return self.write("sample", step=step, name=name, text=value)
        picture = as_picture(value)
        if self._file:
            path = f"{SAMPLES}/{name}_{step:08d}.png"
            file = Path(self._file.name).parent / path
            with writing(file):
                file.parent.mkdir(exist_ok=True)
                Image.fromarray(picture).save(png := io.BytesIO(), "PNG")
                write_whole(file, png.getvalue())
            self.write("sample", step=step, name=name, file=path)

    def train(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: float,
        examples: int,
        loss: float,
        lr: float | None,
        wait_s: float,
        skipped: int,
        gradient_norm: float = math.nan,
        anatomy: Summary | None = None,
        noted: Sequence[Span] = (),
        worker_steps: Sequence[int] = (),
        work: Work | None = None,
        shuffles: Sequence[tuple[float, int]] = (),
        **more: float,
    ) -> None:
        """Write a progress line, with the speed since the last one.

        Args:
            wait_s: seconds that a worker has waited for batches so far, mean over workers.
            skipped: corrupt examples so far, of all workers.
            gradient_norm: of a worker's gradients before the exchange, root of the mean square over workers and steps.
            anatomy: breakdown of the time of the last steps.
            noted: this rank's spans of these steps.
            worker_steps: steps of each worker under an asynchronous rule; shown on the terminal.
            work: of a step, if it is known.
            shuffles: of data in memory since the last line, seconds and bytes; shown on the terminal.
            more: fields of the record that only some runs have; `train_<name>` are figures of the task.
        """
        (begin, before), now = self._window, time.monotonic()
        self._window = now, examples
        elapsed_s, examples_per_s = self.elapsed_s(), (examples - before) / max(now - begin, 1e-9)
        per_s = examples_per_s * self._unit.per_example
        flops = work.fields(examples_per_s) if work else {}
        fields: dict[str, Any] = {"step": step, "epoch": epoch, "examples": examples, "elapsed_s": elapsed_s}
        fields |= {"loss": loss, f"{self._unit.name}_per_s": per_s}
        if self._unit.bytes_each:
            fields["bytes_per_s"] = examples_per_s * self._unit.bytes_each
        if lr is not None:
            fields["lr"] = lr
        fields |= {"wait_s": wait_s, "skipped": skipped, "gradient_norm": gradient_norm, **flops, **more}
        shares = {}
        if anatomy:
            shares = {part: anatomy.means[part] / (anatomy.step_s or 1.0) for part in anatomy.table if part != "hidden"}
            if anatomy.source == "unknown":
                shares = {UNTOLD if part == "compute" else part: share for part, share in shares.items()}
            self._add_buckets(noted, anatomy.steps)
            fields |= self._anatomy_fields(anatomy)
        self.write("train", **fields)
        figures = [format_figure(name.removeprefix("train_"), more[name]) for name in more if name.startswith("train_")]
        self._terminal.progress(
            ProgressLine(
                step=step,
                total_steps=total_steps,
                epoch=epoch,
                loss=loss,
                per_s=per_s,
                lr=lr,
                elapsed_s=elapsed_s,
                skipped=skipped,
                shares=shares,
                slowest=fields.get("slowest", ""),
                unit=self._unit.name,
                worker_steps=tuple(worker_steps),
                flops_per_s=flops.get("model_flops_per_s"),
                mfu=flops.get("mfu"),
                peak_mark=PEAK_MARKS[work.peak.source] if work and work.peak else "",
                figures=tuple(map(" ".join, figures[:MOST_FIGURES])),
                shuffles=tuple(shuffles),
            )
        )

    def _anatomy_fields(self, anatomy: Summary) -> dict[str, Any]:
        """Fields of the record about the parts of a step."""
        self._compute_s += float(anatomy.spent[COMPUTE].mean())
        ranks = len(anatomy.own_s)
        per = -(-ranks // MOST_RANKS)
        return {
            "step_s": anatomy.step_s,
            "compute_s": self._compute_s,
            "goodput": self._compute_s / max(time.time() - self.began_ms / 1000, 1e-9),
            "exchange_time": anatomy.source,
            "anatomy": {part: [*map(as_json_number, row)] for part, row in anatomy.table.items()},
            "own_s": [as_json_number(max(anatomy.own_s[i : i + per])) for i in range(0, ranks, per)],
            **({"own_ranks": per} if per > 1 else {}),
            "slowest": self._slowest(anatomy.own_s),
        }

    def _add_buckets(self, noted: Sequence[Span], steps: float) -> None:
        self._bucket_steps += steps
        for span in noted:
            if span.track in ("travel", "wait"):
                both = self._buckets.setdefault(span.name, np.zeros(2))
                both[int(span.track == "wait")] += span.end_s - span.begin_s

    def _slowest(self, own_s: Sequence[float]) -> str:
        """The rank that others wait for; empty if none is far behind."""
        worker_seconds = [seconds for seconds in own_s if seconds]  # 0: a worker that has left
        is_behind = bool(worker_seconds) and max(worker_seconds) > BEHIND * statistics.median(worker_seconds)
        return self.name(int(np.argmax(own_s))) if is_behind else ""

    def name(self, rank: int) -> str:
        """`rank 3 on node07`."""
        return f"rank {rank}" + (f" on {self._hosts[rank]}" if rank < len(self._hosts) else "")

    def evaluation(self, *, step: int, epoch: float, examples: int, eval_count: int, **means: float) -> None:
        """Write figures of `eval_count` examples: eval_loss and the task's own; there are none without examples."""
        place = {"step": step, "epoch": epoch, "examples": examples, "elapsed_s": self.elapsed_s()}
        self.write("eval", **place, eval_count=eval_count, **means)
        if self._buckets:
            by_bucket = sorted(self._buckets.items())
            buckets = [[name, *map(as_json_number, (both / self._bucket_steps).tolist())] for name, both in by_bucket]
            self.write("exchange", step=step, buckets=buckets)
        self._buckets, self._bucket_steps = {}, 0.0
        shown = "no examples"
        if means:
            figures = [format_figure(name.removeprefix("eval_"), value) for name, value in means.items()]
            shown = "  ".join(map(" ".join, figures))
            first = min(1, len(figures) - 1)  # index of the first figure after the loss, if there is one
            self._terminal.evaluated(*figures[first], value=[*means.values()][first])
        self.say(f"step {step}  evaluation on {eval_count}: {shown}  {self.elapsed_s():.1f} s")

    def start_window(self, examples: int) -> None:
        """Begin a new speed window, since the time between was not training."""
        self._window = time.monotonic(), examples

    def go_back(self, step: int) -> None:
        """Drop lines after `step`, because those steps are repeated."""
        if self._file:
            self._file.close()
            cut_record(Path(self._file.name), step)
            self._file = open_record(Path(self._file.name))
            _, self._compute_s = useful_time(Path(self._file.name).parent)  # what is repeated was of no use

    def __enter__(self) -> "Recorder":
        """Be closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Close, with the outcome: a run that an error ends has failed."""
        self.close(has_failed=error is not None)

    def close(self, has_failed: bool = False) -> None:
        """Close the record, the sinks and the panel.

        Args:
            has_failed: the run has not come to its end, which sinks may record.
        """
        self._terminal.close()
        close(self._sinks, has_failed)
        if self._file:
            self._file.close()


def as_picture(value: Any) -> np.ndarray:
    """A picture as u8[height, width] or u8[height, width, 3].

    Raises:
        UsageError: it has another shape or dtype.
    """
    picture = np.asarray(value)
    has_shape = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[-1] == 3)
    if not has_shape or picture.dtype not in (np.uint8, np.bool_) or not picture.size:
        raise UsageError(
            f"show: got {picture.dtype}{list(picture.shape)}; expected a text, or a picture, uint8[height, width] or "
            "uint8[height, width, 3]: numbers in [0, 1] times 255, in rows beside each other"
        )
    return picture.astype(np.uint8) * (255 if picture.dtype == np.bool_ else 1)


def format_figure(name: str, value: float) -> tuple[str, str]:
    """(top-1, 93.25 %) of a figure of an evaluation."""
    if match := re.fullmatch(r"(.*_)?top(\d+)", name):
        return f"{match[1] or ''}top-{match[2]}", f"{100 * value:.2f} %"
    return name.replace("bits_per_byte", "bits per byte"), format_number(value)


def cut_record(path: Path, step: int) -> None:
    """Drop lines after `step`, which a resumed run rewrites, and damaged ones."""
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            if row.get("step", 0) <= step:
                lines.append(line + b"\n")
        except (*MALFORMED, AttributeError, TypeError):  # no line of ours
            continue
    write_whole(path, b"".join(lines))


def useful_time(run_dir: Path) -> tuple[int, float]:
    """When a run was first started, in ms since 1970; and seconds of computation in the steps that its record has."""
    began_ms, compute_s = int(1000 * time.time()), 0.0
    for line in reversed((run_dir / "record.jsonl").read_bytes().splitlines()):
        row = json.loads(line)
        compute_s = compute_s or row.get("compute_s", 0.0)
        began_ms = row.get("began_ms", began_ms)
    return began_ms, compute_s


def open_record(path: Path) -> FileIO:
    """Open a record unbuffered, since `close` would repeat a full disk's error."""
    with writing(path):
        return path.open("ab", buffering=0)


def as_json_number(value: Any) -> Any:
    """Round floats to significant digits; turn NaN and infinities into null."""
    # JSON has no NaN: Python's reader would take it, jq and browsers would refuse the line.
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
