"""Progress lines about all ranks, from the metrics of their steps.

A line covers the steps since the line before, of all workers: loss, gradient norm, noise, waits, speed. Each rank adds
up its own steps, and one allgather a line brings sums and timings together; so no step sends a message for the log.
Sums are divided by counts here, which is exact for unequal shares. The noise scale compares |g_i|^2 with |g|^2, so
steps with a short batch are left out of it. Synchronous and asynchronous runs had a logger each; both write by
`ProgressLog.write` now.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.schema import Experiment
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.data.shuffle import MemoryShuffle, Shuffle, describe_memory
from jaxmpi.observe.flops import Peak, StepFlops, Work
from jaxmpi.observe.gradient_noise import Means, Noise
from jaxmpi.observe.recorder import Recorder, Unit
from jaxmpi.observe.sinks.registry import open_sinks
from jaxmpi.observe.step_timing import Summary, Window, flat, summary
from jaxmpi.observe.terminal import open_terminal
from jaxmpi.observe.trace import Tracer
from jaxmpi.recover.decisions import check_budget
from jaxmpi.tasks.registry import TASKS, find_spec
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.training_plan import TrainingPlan

SUMS = 7  # over workers: loss, examples, |g_i|^2, steps; and if |g|^2 was measured |g_i|^2, |g|^2, steps


class Done(NamedTuple):
    """Work of all workers, for a progress line."""

    epoch: float
    examples: int  # so far
    loss: float  # mean over examples since the last line
    gradient_norm: float  # root of the mean square over the steps that workers made
    wait_s: float  # for batches so far, mean over workers
    skipped: int  # corrupt examples so far


@dataclass(kw_only=True)
class ProgressLog:
    """Progress lines of a run."""

    plan: TrainingPlan
    workers: Workers
    recorder: Recorder
    tracer: Tracer
    noise: Noise | None  # if the rule measures it
    max_skipped: float  # share of the data
    flops: StepFlops
    peak: Peak | None  # most FLOP/s of all workers' devices, if known
    shuffles: int = 0  # number of shuffles of data in memory that have been recorded

    def loaded(self, memory: MemoryShuffle, step: int) -> None:
        """Say and record which data is in memory; all ranks call it."""
        mine = np.array([memory.source.newest().bytes.size / len(self.workers.mine), memory.load_s])
        worker_bytes, load_s = self.workers.processes.allgather_array(mine).max(axis=0).tolist()
        place = {"examples": len(memory.source), "group_size": memory.sampler.parts}
        self.recorder.write("memory", step=step, **place, worker_bytes=int(worker_bytes), load_s=load_s)
        is_auto, travels = memory.source.data.group_size == "auto", memory.group is not None
        self.recorder.say(describe_memory(memory.sampler, is_auto, worker_bytes, load_s, travels))

    def _shuffles(self) -> list[Shuffle]:
        """Unrecorded shuffles done on all ranks: the slowest rank's seconds, all bytes."""
        memory = self.plan.feed.memory
        if memory is None or memory.group is None:
            return []
        done, gather = memory.shuffles[self.shuffles :], self.workers.processes.allgather_array
        count = int(gather(np.array([len(done)])).min())  # a rank may be done a little later
        if not count:
            return []
        every = gather(np.array(done[:count], np.float64).ravel()).reshape(-1, count, 2)
        self.shuffles += count
        seconds, moved_bytes = every[..., 0].max(axis=0), every[..., 1].sum(axis=0)
        return [Shuffle(s, int(size)) for s, size in zip(seconds.tolist(), moved_bytes.tolist(), strict=True)]

    def sums(self, step: int, metrics: Metrics) -> np.ndarray:
        """f64[SUMS] of a step of this process's workers."""
        losses, counts, squares = (
            local_rows(value, self.workers).astype(np.float64)
            for value in (metrics.loss, metrics.count, metrics.squares)
        )
        return np.array(
            [losses.sum(), counts.sum(), squares.sum(), squares.size, *self._measured(step, metrics, squares)]
        )

    def _measured(self, step: int, metrics: Metrics, squares: np.ndarray) -> list[float]:
        """|g_i|^2, |g|^2 and 1 summed over workers; zeros for a short batch."""
        is_whole = self.plan.examples(step) - self.plan.examples(step - 1) == self.plan.clock.effective_batch
        if metrics.mean_square is None or not is_whole:
            return [0.0] * 3
        return [squares.sum(), local_rows(metrics.mean_square, self.workers).sum(dtype=np.float64), float(squares.size)]

    def line(
        self,
        step: int,
        sums: np.ndarray,
        window: Window,
        distance: float | None = None,
        rate_factor: float = 1.0,
    ) -> None:
        """Write mean loss and times of all workers since the last line.

        Args:
            distance: of this process's workers from what they met, summed, if the rule keeps it.
            rate_factor: by which callbacks have multiplied the learning rate.

        Raises:
            TrainingError: more data is skipped than may be.
        """
        plan, feed = self.plan, self.plan.feed
        mine = np.array([*sums, feed.skipped, feed.wait_s, distance or 0.0])
        every = self.workers.processes.allgather_array(np.concatenate([mine, flat(window)]))
        loss, count, squares, made, *measured, skipped, wait_s, distances = every[:, : len(mine)].sum(axis=0).tolist()
        seen = summary(every[:, len(mine) :], window.steps)
        done = Done(
            epoch=plan.epoch(step),
            examples=plan.examples(step),
            loss=float(loss / count) if count else float("nan"),
            gradient_norm=(squares / max(made, 1.0)) ** 0.5,
            wait_s=float(wait_s) / self.workers.size,
            skipped=int(skipped),
        )
        more = self._noise(*measured) | ({} if distance is None else {"distance": distances / self.workers.size})
        before, shuffles = self.shuffles, self._shuffles()
        for number, (seconds, moved_bytes) in enumerate(shuffles, before + 1):
            self.recorder.write("shuffle", step=step, shuffle=number, shuffle_s=seconds, moved_bytes=moved_bytes)
        self.write(step, done, seen, rate_factor, noted=window.spans, shuffles=shuffles, **more)
        if traced := self.tracer.add(window.spans, step, step == plan.clock.total_steps):
            self.recorder.say(traced)

    def write(self, step: int, done: Done, seen: Summary | None, rate_factor: float = 1.0, **more: Any) -> None:
        """A line to the record and the terminal.

        Raises:
            TrainingError: more data is skipped than may be.
        """
        plan = self.plan
        lr = plan.lr_of(step)
        place = {"total_steps": plan.clock.total_steps, "lr": None if lr is None else lr * rate_factor}
        self.recorder.train(step=step, **place, **done._asdict(), anatomy=seen, work=self._work(), **more)
        check_budget(done.skipped, len(plan.feed.source), math.ceil(done.epoch), self.max_skipped)

    def _work(self) -> Work | None:
        """Model FLOPs of all workers' step, if one worker's are known."""
        if self.flops.per_worker is None:
            return None
        batch = self.plan.clock.effective_batch
        return Work(self.flops.per_worker * batch / self.plan.feed.samplers[0].local_batch, batch, self.peak)

    def _noise(self, local: float, mean: float, count: float) -> dict[str, float]:
        """Fields of the record on gradient noise, if it was measured."""
        return self.noise.fields(Means(local / count, mean / count)) if self.noise and count else {}


def open_recorder(
    experiment: Experiment, folder: Path, elapsed_s: float, hosts: Sequence[str], feed: DeviceFeed
) -> Recorder:
    """The record, the sinks and the terminal; hosts are names by rank."""
    sinks = open_sinks(experiment.sinks, folder)
    return Recorder(
        run_dir=folder,
        elapsed_s=elapsed_s,
        terminal=open_terminal(experiment.quiet),
        sinks=sinks,
        hosts=hosts,
        unit=unit_of(experiment, feed),
    )


def unit_of(experiment: Experiment, feed: DeviceFeed) -> Unit:
    """The unit of speed: tokens of language models, images, or else examples."""
    model = feed.model
    if model is not None and find_spec(experiment) is TASKS["language-model"]:
        return Unit("tokens", feed.tokens_each or math.prod(model.label_shape), feed.bytes_each)
    image = model.example() if model else feed.example().get("image")
    is_image = len(getattr(image, "shape", ())) == 4 and not (model and model.takes_tokens)
    return Unit("images" if is_image else "examples")
