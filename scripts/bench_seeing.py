"""Cost of following a run: windows with and without a step's anatomy.

    python scripts/bench_seeing.py [--model googlenet | digits_cnn] [--batch 32] [--pairs 20] [--steps 10]
    mpirun -n 2 python scripts/bench_seeing.py ...

Windows take turns in one run. Without the anatomy, a window still has its line in the record: loss, images/s and
learning rate. It prints median milliseconds a step of both; the median of the ratio pair by pair, of seconds and of the
process's CPU time, with its 95 % interval; and the CPU time of the recorder's own calls on the training thread, beyond
the line without the anatomy. Then all its lines go to each of the sinks, and to all of them. The script prints CPU
time a line of all threads and of processes that a sink has started and ended. It also prints the share of this time in
the CPU time of the steps between two lines. Lines come faster than in the run. Sinks gather them for a time that is
shorter by as much. So as many lines share a way as in the run.
"""

import contextlib
import dataclasses
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
from bench_step import experiment

from jaxmpi.comm.job import processes
from jaxmpi.config import Experiment
from jaxmpi.observe.record_format import PARTS
from jaxmpi.observe.sinks import base
from jaxmpi.observe.sinks.registry import SINKS, open_sinks
from jaxmpi.observe.step_timing import LOCAL, StepTimer, Summary, Window
from jaxmpi.recover import decisions
from jaxmpi.runtime import prepare
from jaxmpi.trainer import lock_step, run
from jaxmpi.trainer import main as trainer_main
from jaxmpi.trainer.progress import ProgressLog

LINE_S = 0.02  # between two lines that go to sinks
NOTHING = Summary(0, "none", {}, {}, [], 0.0, np.zeros((len(PARTS), 0)))


class Took(NamedTuple):
    """Seconds of a window."""

    wall_s: float
    cpu_s: float  # CPU seconds of all threads
    calls_s: float  # CPU seconds of the training thread, in the recorder's calls


class Source:
    """Batches, and the CPU time of the thread that waits for them."""

    def __init__(self, batches: Iterable[Any]) -> None:
        """Take the batches."""
        self.batches, self.cpu_s = iter(batches), 0.0

    def __iter__(self) -> Iterator[Any]:
        """Return this iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, and count the CPU time."""
        begin = time.thread_time()
        try:
            return next(self.batches)
        finally:
            self.cpu_s += time.thread_time() - begin


class Turns(StepTimer):
    """Step timer, on in every other window, that records windows' times."""

    made: "Turns"

    def __init__(self, *args: Any) -> None:
        """Begin with a window that counts for nothing."""
        super().__init__(*args)
        Turns.made, self.is_on, self.took, self.calls_s = self, True, [], 0.0
        self._since = time.perf_counter(), time.process_time()

    def batches(self, batches: Iterable[Any], first_step: int) -> Iterator[Any]:
        """Follow the batches if the window is on; else pass them through."""
        source = Source(batches)
        followed = super().batches(source, first_step)
        while True:
            begin, source.cpu_s = time.thread_time(), 0.0
            batch = next(followed if self.is_on else source, None)
            self.calls_s += (time.thread_time() - begin - source.cpu_s) * self.is_on
            if batch is None:
                return
            yield batch

    def started(self, result: Any, compiled: bool = False) -> None:
        """Call the parent's method if the window is on."""
        begin = time.thread_time()
        if self.is_on:
            super().started(result, compiled)
        self.calls_s += time.thread_time() - begin

    def pause(self) -> None:
        """Call the parent's method if the window is on."""
        begin = time.thread_time()
        if self.is_on:
            super().pause()
        self.calls_s += time.thread_time() - begin

    def window(self) -> Window:
        """The parent's window if it is on; else an empty one."""
        begin = time.thread_time()
        seen = (
            super().window()
            if self.is_on
            else Window(steps=0, parts=np.zeros(len(LOCAL)), exposed=np.zeros(0), source=0, spans=[])
        )
        self.calls_s += time.thread_time() - begin
        return seen

    def turn(self) -> None:
        """End a window, after its line; switch on or off."""
        now = time.perf_counter(), time.process_time()
        self.took.append(Took(now[0] - self._since[0], now[1] - self._since[1], self.calls_s))
        self.is_on, self._since, self.calls_s = not self.is_on, now, 0.0


class Lines(ProgressLog):
    """Log with the trainer's line, or one without the anatomy."""

    def line(
        self,
        step: int,
        sums: np.ndarray,
        window: Window,
        distance: float | None = None,
        rate_factor: float = 1.0,
    ) -> Summary:
        """Write the line, without the anatomy if the window is off."""
        turns, seen, begin = Turns.made, NOTHING, time.thread_time()
        if turns.is_on:
            seen = super().line(step, sums, window, distance, rate_factor)
        else:
            loss, count, *_ = self.workers.processes.allreduce_sum(np.array([*sums, 0.0, 0.0])).tolist()
            place: dict[str, Any] = {"step": step, "total_steps": self.plan.clock.total_steps}
            place |= {"epoch": self.plan.epoch(step), "examples": self.plan.examples(step)}
            lr = self.plan.lr_of(step)
            self.recorder.train(**place, loss=loss / count, lr=lr, wait_s=0.0, skipped=0)
        turns.calls_s += time.thread_time() - begin
        turns.turn()
        return seen


def main() -> None:
    """Run, compare, print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="digits_cnn", choices=["googlenet", "digits_cnn"])
    parser.add_argument("--batch", type=int, default=32, help="of a worker")
    parser.add_argument("--pairs", type=int, default=20, help="that count")
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    options = parser.parse_args()
    prepare.prepare()
    lines: list[base.Row] = []
    lock_step.StepTimer, run.ProgressLog = Turns, Lines
    steps = options.steps * (2 * options.pairs + 4)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            experiment(options.model), log_every=options.steps, train_for=f"{steps}st", run_dir=folder, quiet=True
        )
        config = dataclasses.replace(config, eval_every="0st", checkpoint_every="0st", compute_only_every=0)
        with contextlib.suppress(decisions.Preempted):  # asked to leave: what has been measured counts
            trainer_main.train(dataclasses.replace(config, local_batch=options.batch), "bench_seeing")
        if processes().rank == 0:
            lines = harness.record(Path(folder))
    if processes().rank == 0:
        took = np.array(Turns.made.took[3:])
        report(took, options.steps)
        wall_s, cpu_s = (np.median(took[:, :2], axis=0) / options.steps).tolist()
        report_sinks(lines, wall_s, cpu_s)
    processes().barrier()


def report(took: np.ndarray, steps: int) -> None:
    """Print the comparison of windows in pairs.

    A pair begins without the anatomy, as the line after step 1 has it.
    """
    pairs = took[: len(took) // 2 * 2].reshape(-1, 2, len(Took._fields)) / steps
    without, within = pairs[:, 0], pairs[:, 1]
    wall, base = np.median(within[:, 0]), np.median(without[:, 0])
    print(f"{len(pairs)} pairs of {steps} steps: {1e3 * wall:.3f} ms a step with the anatomy, {1e3 * base:.3f} without")
    for name, i in (("seconds", 0), ("CPU time", 1)):
        print(f"ratio of {name}: {shown(within[:, i] / without[:, i], 4)}")
    calls = within[:, 2] - without[:, 2]
    print(f"the recorder's calls: {shown(1e6 * calls, 1)} us of CPU time a step, {shown(100 * calls / wall, 4)} %")


def report_sinks(lines: Sequence[base.Row], step_s: float, step_cpu_s: float) -> None:
    """Print a full line's cost at each sink and at all."""
    configured = next(line for line in lines if line["kind"] == "run")
    whole = [line for line in lines if line["kind"] == "train" and "anatomy" in line]
    every = Experiment().log_every
    print(f"a line every {every} steps of {1e3 * step_cpu_s:.3f} ms of CPU time:")
    base.GATHER_S *= LINE_S / (every * step_s)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRACKIO_DIR": folder, "WANDB_MODE": "offline"}
        for words in (*((word,) for word in SINKS), tuple(SINKS)):
            cpu_s_of(words, configured, whole, 1)  # imports
            few_s, many_s = (cpu_s_of(words, configured, whole, count) for count in (20, 220))
            line_s = (many_s - few_s) / 200
            share = 100 * line_s / (every * step_cpu_s)
            print(f"sinks {' '.join(words)}: {1e3 * line_s:.3f} ms of CPU time a line, {share:.4f} % of the steps'")


def cpu_s_of(words: Sequence[str], configured: base.Row, lines: Sequence[base.Row], count: int) -> float:
    """CPU time to open sinks, send them `count` lines, and close them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        begin_s = used_s()
        sinks = open_sinks(words, Path(folder))
        base.send(sinks, configured)
        for i in range(count):
            base.send(sinks, {**lines[i % len(lines)], "step": i})
            time.sleep(LINE_S)
        base.close(sinks, has_failed=False)
        return used_s() - begin_s


def used_s() -> float:
    """CPU time of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def shown(values: np.ndarray, digits: int) -> str:
    """Median, its 95 % interval, quartiles."""
    quartiles = "-".join(f"{value:.{digits}f}" for value in np.percentile(values, (25, 75)))
    return f"{harness.interval(values, digits)[:-1]}; quartiles {quartiles})"


if __name__ == "__main__":
    main()
