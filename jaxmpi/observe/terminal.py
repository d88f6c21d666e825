"""Output of rank 0: a live panel, lines through pipes, or nothing.

A panel that is redrawn in place suits a terminal, but not a pipe or a file. `open_terminal` therefore chooses between
`Panel`, `Plain` and the silent base class `Terminal`. All three have the same methods, so the recorder does not depend
on the choice. `Plain` limits progress lines to one a second, and always prints the last step. The panel ends with an
empty row, because mpirun passes on whole lines only.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from jaxmpi.runtime import failures
from jaxmpi.runtime.process import launched, stat_of
from jaxmpi.runtime.progress import current, note_output, stop_progress

MOST_WORKERS = 8  # workers up to which each one's steps are shown
LINE_S = 1.0  # between lines through a pipe at least; the first and the last always come
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
BARS = "▁▂▃▄▅▆▇█"
UNTOLD = "compute+exchange"  # where nothing tells an exchange from computation
COLOURS = {
    "data": "yellow",
    "transfer": "cyan",
    "compute": "green",
    UNTOLD: "green",
    "exchange": "red",
    "sync": "magenta",
    "other": "white",
    "done": "blue",
    "left": "bright_black",
}


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """Contents of a progress line."""

    step: int
    total_steps: int  # 0: the run ends by the clock
    epoch: float
    loss: float
    per_s: float  # number of `unit` a second
    lr: float | None  # None: not known
    elapsed_s: float
    skipped: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)  # shares of a step's time, by part
    slowest: str = ""  # the rank that the others wait for
    unit: str = "images"
    worker_steps: tuple[int, ...] = ()  # by worker, under asynchronous rules
    flops_per_s: float | None = None  # model FLOP/s, if they are known
    mfu: float | None = None
    peak_mark: str = ""  # of the peak that `mfu` is a share of
    figures: tuple[str, ...] = ()  # of training since the last line, as `top-1 93.25 %`
    shuffles: tuple[tuple[float, int], ...] = ()  # seconds and bytes of each shuffle of data in memory

    @property
    def place(self) -> str:
        """The step, of how many if that is known."""
        return f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")

    @property
    def notes(self) -> list[str]:
        """The slowest rank; steps by worker, or their least, median and most; shuffles since the last line."""
        notes, steps = [f"slowest {self.slowest}"] if self.slowest else [], sorted(self.worker_steps)
        if len(steps) > MOST_WORKERS:
            notes.append(f"worker steps {steps[0]} to {steps[-1]}, median {steps[len(steps) // 2]}")
        elif steps:
            notes.append(f"worker steps {' '.join(map(str, self.worker_steps))}")
        if self.shuffles:
            seconds, sizes = zip(*self.shuffles, strict=True)
            count = f"{len(sizes)} shuffles" if len(sizes) > 1 else "shuffle"
            notes.append(f"{count} {sum(seconds):.3g} s {with_prefix(sum(sizes))}B")
        return notes

    @property
    def speed(self) -> str:
        """Speed and learning rate."""
        digits = ".0f" if self.mfu is None or self.mfu >= 0.01 else ".1g"
        mfu = "" if self.mfu is None else f" (mfu {self.peak_mark}{100 * self.mfu:{digits}} %)"
        flops = "" if self.flops_per_s is None else f"  {with_prefix(self.flops_per_s)}FLOP/s{mfu}"
        return f"{self.per_s:.1f} {self.unit}/s{flops}" + ("" if self.lr is None else f"  lr {self.lr:.3g}")

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = " ".join(text for _, text in percents(self.shares))
        texts = [
            f"{self.place}  epoch {self.epoch:.2f}  loss {format_number(self.loss)}",
            *self.figures,
            f"{self.speed}  {self.elapsed_s:.1f} s",
            f"skipped {self.skipped}" if self.skipped else "",
            parts,
            *self.notes,
        ]
        return "  ".join(filter(None, texts))


def format_number(value: float) -> str:
    """Four decimals, or three digits of values below 0.001 in size."""
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def with_prefix(value: float) -> str:
    """Three digits and a prefix: `12.3 G`."""
    factor, prefix = next((row for row in PREFIXES if value >= row[0]), PREFIXES[-1])
    return f"{value / factor:.3g} {prefix}"


def percents(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """(part, its text) of visible parts."""
    return [(part, f"{part} {100 * x:.0f} %") for part, x in shares.items() if x >= 0.005]


class Terminal:
    """Display of a rank's output; this one shows nothing.

    It is that of ranks other than 0, and of --quiet.
    """

    def say(self, text: str) -> None:
        """Show a permanent line."""

    def progress(self, progress: ProgressLine) -> None:
        """Show the progress of the run."""

    def evaluated(self, name: str, text: str, value: float) -> None:
        """Show a figure of an evaluation."""

    def close(self) -> None:
        """End the display."""


class Plain(Terminal):
    """Plain lines, for files and pipes."""

    def __init__(self, out: TextIO, line_s: float = LINE_S) -> None:
        """Write to `out`, a progress line every `line_s` seconds at most."""
        self.out, self.line_s = out, line_s
        self._last_s = -float("inf")

    def say(self, text: str) -> None:
        """Print a line; if the reader is gone, the run goes on."""
        note_output()
        try:
            # One write, since a thread prints phases: with PYTHONUNBUFFERED `print` writes the end of a line by itself.
            print(f"{text}\n", end="", file=self.out, flush=True)
        except OSError:
            failures.drop_unread_stream(self.out)

    def progress(self, progress: ProgressLine) -> None:
        """Print a line, unless one was just printed; the last always comes."""
        if time.monotonic() - self._last_s >= self.line_s or progress.step == progress.total_steps:
            self._last_s = time.monotonic()
            self.say(progress.line)


class Panel(Terminal):
    """A panel redrawn in place, below permanent lines."""

    def __init__(self, out: TextIO, columns: int) -> None:
        """Draw on `out`, which is so many columns wide at first."""
        self.out = out
        self.console = Console(file=out, force_terminal=True, width=columns, highlight=False)
        self.losses: deque[float] = deque(maxlen=400)
        self.values: deque[float] = deque(maxlen=100)  # figures of evaluations, for the curve
        self.figure = "", ""  # its name, and the last one as text
        self._first: ProgressLine | None = None
        self._now: ProgressLine | None = None
        self._is_live = False
        self.live = Live(
            console=self.console,
            refresh_per_second=4,
            transient=False,
            redirect_stdout=False,
            get_renderable=self._renderable,
        )

    def say(self, text: str) -> None:
        """Print a line above the panel."""
        self.console.print(text, markup=False)

    def progress(self, progress: ProgressLine) -> None:
        """Redraw with new progress."""
        self._first, self._now = self._first or progress, progress
        self.losses.append(progress.loss)
        self.console.width = terminal_columns(self.out) or self.console.width  # a window may have changed
        self.start()
        self.live.refresh()

    def start(self) -> None:
        """Begin to draw, at first only what the job is at."""
        if not self._is_live:
            stop_progress()
            self.live.start()
            self.console.show_cursor(True)  # a killed process could not restore it
            self._is_live = True

    def evaluated(self, name: str, text: str, value: float) -> None:
        """Redraw with a new figure."""
        self.figure = name, text
        self.values.append(value)
        if self._now:
            self.live.refresh()

    def _renderable(self) -> RenderableType:
        """The panel, and below it the job's phase if there is one.

        An empty row ends it, because mpirun passes on whole lines only.
        """
        at = current()
        rows: list[RenderableType] = [self.draw(self._now)] if self._now else []
        rows += [crop(str(at), self.console.width)] if at else []
        return Group(*rows, *([Text()] if rows else []))

    def draw(self, now: ProgressLine) -> RenderableType:
        """Progress, curves, and the breakdown of time."""
        width = self.console.width
        remaining = remaining_time(self._first or now, now)
        rows: list[str | Text] = [
            f"{now.place}  epoch {now.epoch:.2f}  {remaining}",
            bar({"done": now.step, "left": max(now.total_steps - now.step, 0)}, width, "━"),
            f"loss  {format_number(now.loss):<9} {sparkline(self.losses, max(4, width - 17))}",
        ]
        if now.figures:
            rows.append("  ".join(now.figures))
        if self.values:
            name, text = self.figure
            rows.append(f"{name} {text:<9} {sparkline(self.values, max(4, width - 12 - len(name)))}")
        rows.append(f"{now.speed}  {now.elapsed_s:.0f} s")
        if now.shares:
            rows += [bar(now.shares, width), legend(now.shares)]
        rows += now.notes
        return Group(*(crop(row, width) if isinstance(row, str) else row for row in rows))

    def close(self) -> None:
        """Stop redrawing; the last panel stays on the terminal."""
        if self._is_live:
            self.live.stop()


def crop(text: str, width: int) -> Text:
    """One line, cut to the terminal's width."""
    return Text(text[:width], no_wrap=True, overflow="crop")


def remaining_time(first: ProgressLine, now: ProgressLine) -> str:
    """Remaining time at the pace so far."""
    steps = now.step - first.step
    if not steps or not now.total_steps:
        return ""
    seconds = round((now.elapsed_s - first.elapsed_s) / steps * (now.total_steps - now.step))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """Values as bars between their least and most, sampled to the width."""
    sampled_values = [list(values)[i * len(values) // min(width, len(values))] for i in range(min(width, len(values)))]
    finite = [value for value in sampled_values if value == value and abs(value) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low or 1.0
    return "".join(BARS[min(7, int(8 * (v - low) / span))] if v in finite else "?" for v in sampled_values)


def bar(shares: Mapping[str, float], width: int, mark: str = "█") -> Text:
    """Parts of a whole as one coloured bar."""
    drawn, ends, total = Text(no_wrap=True), 0.0, sum(shares.values()) or 1.0
    for part, share in shares.items():
        begin, ends = round(width * ends / total), ends + share
        drawn.append(mark * (round(width * ends / total) - begin), style=COLOURS.get(part, "white"))
    return drawn


def legend(shares: Mapping[str, float]) -> Text:
    """Names of the bar's parts."""
    drawn = Text(overflow="fold")
    for part, text in percents(shares):
        drawn.append("  " * bool(drawn)).append(text, style=COLOURS.get(part, "white"))
    return drawn


# ---------------------------------------------------------------- choice


def open_terminal(quiet: bool, out: TextIO | None = None) -> Terminal:
    """Choose the display that suits stdout."""
    if quiet:
        return Terminal()
    columns = terminal_columns(out or sys.stdout)
    if not columns:
        return Plain(out or sys.stdout)
    panel = Panel(out or sys.stdout, columns)
    panel.start()
    return panel


def terminal_columns(out: TextIO) -> int:
    """Columns of the terminal that a stream leads to; else 0.

    Open MPI gives every rank a terminal of its own and passes on what is written there to mpirun's own output. So under
    a launcher the width is that of the first process above whose output goes elsewhere.
    """
    if not out.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    if launched() is None:
        return os.get_terminal_size(out.fileno()).columns or 80
    try:
        pid, stdout = os.getppid(), os.readlink("/proc/self/fd/1")
        above = stdout
        while pid > 1 and above == stdout:
            above, pid = os.readlink(f"/proc/{pid}/fd/1"), int(stat_of(pid)[1])
        if above == stdout or not above.startswith(("/dev/pts/", "/dev/tty")):
            return 0
        with open(above, "rb") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError, IndexError):  # another user's process, or one that has ended
        return 0
