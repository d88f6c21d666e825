"""CPU time of following a run: the recorder's calls on the training thread, and sinks.

    python scripts/bench_seeing.py [--model googlenet | digits_cnn] [--batch 32] [--windows 20] [--steps 10]
    mpirun -n 2 python scripts/bench_seeing.py ...

A run is trained, and CPU time of the training thread in the step timer and the progress log is counted, window by
window; the loader's share of waiting for a batch is left out. It prints the median a step with its 95 % interval, and
its share of a step. Then all lines of the record are sent to each sink, and to all of them. It prints the CPU time a
line, of all threads and of processes that a sink has started and ended, and its share of the CPU time of the steps
between two lines. Lines come faster than in the run, and sinks gather them for a time that is shorter by as much.
"""

import contextlib
import dataclasses
import functools
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from bench_step import experiment

from jaxmpi.comm.job import processes
from jaxmpi.config import Experiment
from jaxmpi.observe.sinks import base
from jaxmpi.observe.sinks.registry import SINKS, open_sinks
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.recover import decisions
from jaxmpi.runtime import process
from jaxmpi.trainer import lock_step, run
from jaxmpi.trainer import main as trainer_main
from jaxmpi.trainer.progress import ProgressLog

LINE_S = 0.02  # between two lines that are sent to sinks
calls_s = [0.0]  # CPU seconds of the recorder's calls, by window
window_ends = [(time.perf_counter(), time.process_time())]


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose CPU time on this thread is added to the window's."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            calls_s[-1] += time.thread_time() - begin

    return call


class CountedTimer(StepTimer):
    """Step timer whose CPU time is counted."""

    started, pause, window = counted(StepTimer.started), counted(StepTimer.pause), counted(StepTimer.window)

    def batches(self, batches: Iterable[Any], first_step: int) -> Iterator[Any]:
        """Count the timer's share of getting a batch, without the loader's."""

        def source() -> Iterator[Any]:
            inner = iter(batches)
            while True:
                begin = time.thread_time()
                batch = next(inner, None)
                calls_s[-1] -= time.thread_time() - begin
                if batch is None:
                    return
                yield batch

        next_batch = counted(functools.partial(next, super().batches(source(), first_step), None))
        while (batch := next_batch()) is not None:
            yield batch


class CountedLog(ProgressLog):
    """Progress log whose CPU time is counted; a line ends a window."""

    def line(self, *args: Any, **kwargs: Any) -> Any:
        """Write the line."""
        summary = counted(super().line)(*args, **kwargs)
        calls_s.append(0.0)
        window_ends.append((time.perf_counter(), time.process_time()))
        return summary


def main() -> None:
    """Train and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="digits_cnn", choices=["googlenet", "digits_cnn"])
    parser.add_argument("--batch", type=int, default=32, help="of a worker")
    parser.add_argument("--windows", type=int, default=20, help="that count")
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    options = parser.parse_args()
    process.prepare()
    lines: list[base.Row] = []
    lock_step.StepTimer, run.ProgressLog = CountedTimer, CountedLog
    with tempfile.TemporaryDirectory() as folder:
        never = {"eval_every": "0st", "checkpoint_every": "0st"}
        config = dataclasses.replace(
            experiment(options.model),
            local_batch=options.batch,
            train_for=f"{options.steps * (options.windows + 2)}st",
            log_every=options.steps,
            run_dir=folder,
            quiet=True,
            **never,
        )
        with contextlib.suppress(decisions.Preempted):  # what has been measured counts
            trainer_main.train(config, "bench_seeing")
        if processes().rank == 0:
            lines = harness.record(Path(folder))
    if processes().rank == 0:
        wall_s, cpu_s = np.diff(np.array(window_ends), axis=0)[2:].T / options.steps  # compiled in the first window
        mine_s = np.array(calls_s[2:-1]) / options.steps
        print(f"{len(wall_s)} windows of {options.steps} steps: {1e3 * np.median(wall_s):.3f} ms a step")
        calls, share = (
            harness.interval(1e6 * mine_s, 1, " us"),
            harness.interval(100 * mine_s / np.median(wall_s), 4, " %"),
        )
        print(f"the recorder's calls: {calls} of CPU time a step, {share}")
        report_sinks(lines, float(np.median(wall_s)), float(np.median(cpu_s)))
    processes().barrier()


def report_sinks(lines: Sequence[base.Row], step_s: float, step_cpu_s: float) -> None:
    """Print a full line's cost at each sink and at all."""
    configured = next(line for line in lines if line["kind"] == "run")
    whole = [line for line in lines if line["kind"] == "train" and "anatomy" in line]
    every = Experiment().log_every
    base.GATHER_S *= LINE_S / (every * step_s)
    os.environ["WANDB_MODE"] = "offline"
    rows = []
    for words in (*((word,) for word in SINKS), tuple(SINKS)):
        cpu_s_of_lines(words, configured, whole, 1)  # imports
        few_s, many_s = (cpu_s_of_lines(words, configured, whole, count) for count in (20, 220))
        line_s = (many_s - few_s) / 200
        rows.append([" ".join(words), f"{1e3 * line_s:.3f}", f"{100 * line_s / (every * step_cpu_s):.4f}"])
    print(harness.table(("sinks", "ms of CPU time a line", f"% of {every} steps"), rows))


def cpu_s_of_lines(words: Sequence[str], configured: base.Row, lines: Sequence[base.Row], count: int) -> float:
    """CPU time to open sinks, send them `count` lines, and close them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        begin_s = used_cpu_s()
        sinks = open_sinks(words, Path(folder))
        base.send(sinks, configured)
        for i in range(count):
            base.send(sinks, {**lines[i % len(lines)], "step": i})
            time.sleep(LINE_S)
        base.close(sinks, has_failed=False)
        return used_cpu_s() - begin_s


def used_cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


if __name__ == "__main__":
    main()
