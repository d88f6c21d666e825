"""The record: one JSON object a line in RUN/record.jsonl, and a line on the terminal. Rank 0 only."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Recorder:
    """Appends to the record and prints; on other ranks it does neither."""

    def __init__(
        self, run_dir: Path | None, elapsed_s: float = 0.0, out: TextIO | None = None, bytes_each: int = 0
    ) -> None:
        """Open RUN/record.jsonl for appending; `run_dir` None is another rank's.

        Args:
            elapsed_s: seconds that earlier parts of a resumed run took.
            bytes_each: of text, the bytes that an example predicts; 0 for images.
        """
        self._unit, self._each = ("bytes", bytes_each) if bytes_each else ("images", 1)
        self._file = (run_dir / "record.jsonl").open("a") if run_dir else None
        self._out = out or sys.stdout
        self._start = time.monotonic() - elapsed_s
        self._window = time.monotonic(), 0

    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier parts of a resumed run included."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """A line on the terminal."""
        if self._file:
            print(text, file=self._out, flush=True)

    def write(self, kind: str, **fields: Any) -> None:
        """A line of the record: `kind`, then `fields`; numbers that JSON has no word for become null."""
        if self._file:
            row = {"kind": kind, **{name: jsonable(value) for name, value in fields.items()}}
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

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
        **more: float,
    ) -> None:
        """A progress line; images/s, or of text bytes/s, since the last one.

        Args:
            wait_s: seconds that a worker has waited for batches so far, their mean.
            skipped: corrupt examples so far, of all workers.
            more: fields of the record that only some runs have.
        """
        now = time.monotonic()
        since, before = self._window
        per_s = (examples - before) * self._each / max(now - since, 1e-9)
        self._window = now, examples
        self.write(
            "train",
            step=step,
            epoch=epoch,
            examples=examples,
            elapsed_s=self.elapsed_s(),
            loss=loss,
            **{f"{self._unit}_per_s": per_s},
            lr=lr,
            wait_s=wait_s,
            skipped=skipped,
            **more,
        )
        self.say(
            f"step {step}/{total_steps}  epoch {epoch:.2f}  loss {loss:.4f}  "
            f"{per_s:.1f} {self._unit}/s  lr {lr:.3g}  {self.elapsed_s():.1f} s"
            + (f"  skipped {skipped}" if skipped else "")
        )

    def evaluation(self, *, step: int, epoch: float, examples: int, eval_count: int, **means: float) -> None:
        """Means over `eval_count` evaluated examples: eval_loss, eval_top1, eval_top5; none where there are none.

        Of text eval_bits_per_byte = eval_loss / ln 2 too.
        """
        if self._unit == "bytes" and means:
            means["eval_bits_per_byte"] = means["eval_loss"] / math.log(2)
        place = {"step": step, "epoch": epoch, "examples": examples, "elapsed_s": self.elapsed_s()}
        self.write("eval", **place, eval_count=eval_count, **means)
        shown = "no examples"
        if means:
            top1, top5 = 100 * means["eval_top1"], 100 * means["eval_top5"]
            shown = f"loss {means['eval_loss']:.4f}  top-1 {top1:.2f} %  top-5 {top5:.2f} %"
            if "eval_bits_per_byte" in means:
                shown += f"  {means['eval_bits_per_byte']:.3f} bits per byte"
        self.say(f"step {step}  evaluation on {eval_count}: {shown}  {self.elapsed_s():.1f} s")

    def start_window(self, examples: int) -> None:
        """Begin a new window of images/s: what lay between was not training."""
        self._window = time.monotonic(), examples

    def close(self) -> None:
        """Close the record."""
        if self._file:
            self._file.close()


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
    aside = path.with_suffix(".tmp")
    aside.write_bytes(b"".join(kept))
    aside.replace(path)


def jsonable(value: Any) -> Any:
    """Floats rounded to what is worth keeping; NaN and infinities as null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
