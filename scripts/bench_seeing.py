"""What it costs to follow a run: windows of steps with the anatomy and without, by turns, in one run of the trainer.

    python scripts/bench_seeing.py [--model googlenet | digits_cnn] [--pairs 20] [--steps 10]
    mpirun -n 2 python scripts/bench_seeing.py ...

Without it, a window still has its line in the record: loss, images/s and learning rate. Printed: median milliseconds a
step of both, median and quartiles of the ratio pair by pair.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_step import experiment

from jaxmpi import runtime, train
from jaxmpi.anatomy import LOCAL, Anatomy, Summary, Window
from jaxmpi.log import Log
from jaxmpi.processes import processes

NOTHING = Summary(0, "none", {}, {}, [], 0.0)


class Turns(Anatomy):
    """The anatomy in every other window; nothing in the others. Notes how long each took."""

    made: "Turns"

    def __init__(self, *args: Any) -> None:
        """Begin with a window that counts for nothing."""
        super().__init__(*args)
        Turns.made, self.is_on, self.took, self._since = self, True, [], time.perf_counter()

    def batches(self, batches: Iterable[Any], first_step: int) -> Iterator[Any]:
        """As of the class above, or as they come."""
        followed, plain = super().batches(batches, first_step), iter(batches)
        while (batch := next(followed if self.is_on else plain, None)) is not None:
            yield batch

    def started(self, result: Any, compiled: bool = False) -> None:
        """As of the class above, or nothing."""
        if self.is_on:
            super().started(result, compiled)

    def pause(self) -> None:
        """As of the class above, or nothing."""
        if self.is_on:
            super().pause()

    def window(self) -> Window:
        """As of the class above, or an empty one."""
        return super().window() if self.is_on else Window(0, np.zeros(len(LOCAL)), np.zeros(0), 0, [])

    def turn(self) -> None:
        """A window is over, its line written."""
        now = time.perf_counter()
        self.took.append(now - self._since)
        self.is_on, self._since = not self.is_on, now


class Lines(Log):
    """The trainer's line, or one without anatomy."""

    def line(self, step: int, sums: np.ndarray, window: Window, distance: float | None = None) -> Summary:
        """As of the class above, or what is left of it without."""
        turns, seen = Turns.made, NOTHING
        if turns.is_on:
            seen = super().line(step, sums, window, distance)
        else:
            loss, count, *_ = self.workers.processes.sum(np.array([*sums, 0.0, 0.0])).tolist()
            place: dict[str, Any] = {"step": step, "total_steps": self.plan.clock.total_steps}
            place |= {"epoch": self.plan.epoch(step), "examples": self.plan.examples(step)}
            lr = np.asarray(self.plan.lr(step - 1)).item()
            self.recorder.train(**place, loss=loss / count, lr=lr, wait_s=0.0, skipped=0)
        turns.turn()
        return seen


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits_cnn", choices=["googlenet", "digits_cnn"])
    parser.add_argument("--pairs", type=int, default=20, help="that count")
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    options = parser.parse_args()
    runtime.prepare()
    train.Anatomy, train.Log = Turns, Lines
    steps = options.steps * (2 * options.pairs + 4)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            experiment(options.model), log_every=options.steps, train_for=f"{steps}st", run_dir=folder, quiet=True
        )
        config = dataclasses.replace(config, eval_every="0st", checkpoint_every="0st", lone_every=0)
        train.train(config, "bench_seeing")
    if processes().rank == 0:
        report(np.array(Turns.made.took[3:]), options.steps)
    processes().barrier()


def report(seconds: np.ndarray, steps: int) -> None:
    """Windows without the anatomy come first: the first line of a run, after one step, had it, and so on by turns."""
    pairs = seconds[: len(seconds) // 2 * 2].reshape(-1, 2) / steps
    without, within = pairs.T
    ratio = np.percentile(within / without, (50, 25, 75))
    print(f"{len(pairs)} pairs of {steps} steps: {1e3 * np.median(within):.3f} ms a step with the anatomy, ", end="")
    print(f"{1e3 * np.median(without):.3f} without; ratio {ratio[0]:.4f} ({ratio[1]:.4f}-{ratio[2]:.4f})")


if __name__ == "__main__":
    main()
