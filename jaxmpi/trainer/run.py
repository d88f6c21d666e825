"""A run: its plan with everything that is open while it lasts; its votes, progress lines and evaluations.

Every rank votes on every step, and compares what is to be equal on all workers before a checkpoint. A progress line
covers the steps since the line before, of all workers. Each rank adds up its own steps, and one allgather a line brings
sums and timings together, so no step sends a message for the log. Sums are divided by counts here, which is exact for
unequal shares.

An evaluation is exact for uneven last batches: ranks add sums and counts in float64, without examples that only fill a
batch up, and divide once. Params are those that the rule evaluates, such as a mean or the center. Then the user's
callbacks run; before a sum that one of them makes, ranks compare which call they have reached.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import Retention, Saver
from jaxmpi.comm.agreement import check_may_send
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.config.durations import UNLIMITED, step_range
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.data.shuffle import MemoryShuffle, Shuffle, describe_memory
from jaxmpi.observe.flops import Peak, Work
from jaxmpi.observe.gradient_noise import Means, Noise
from jaxmpi.observe.recorder import Recorder, Unit
from jaxmpi.observe.sinks.registry import open_sinks
from jaxmpi.observe.step_timing import Summary, Window, flat, summary
from jaxmpi.observe.terminal import open_terminal
from jaxmpi.observe.trace import Profiler, Tracer
from jaxmpi.optim.optimizers import rate_factors
from jaxmpi.recover import decisions, shrink, signals
from jaxmpi.recover.replica_check import compare_replicas
from jaxmpi.runtime import failures, fault_injection, progress
from jaxmpi.tasks.registry import TASKS, find_spec
from jaxmpi.trainer.build import Functions
from jaxmpi.trainer.callbacks import Callback, Instruments, Moment, call_each
from jaxmpi.trainer.memory import WorkerMemory
from jaxmpi.trainer.plan import Plan
from jaxmpi.trainer.step import FigureSums, Metrics
from jaxmpi.trainer.timetable import Clock
from jaxmpi.trainer.whole_set import WholeSet, WholeSetFunction

# Over workers: loss, examples, |g_i|^2, steps; and if |g|^2 was measured |g_i|^2, |g|^2, steps. The sums and counts of
# the task's figures follow, whose number the first step tells.
SUMS = 7


@dataclass(kw_only=True)
class Run:
    """All that a coordinator needs besides the state."""

    plan: Plan
    functions: Functions
    home: HeldFolder  # the run directory
    recorder: Recorder
    notice: signals.PreemptionNotice
    recovery: decisions.Recovery
    profiler: Profiler
    shrinking: shrink.ShrinkCoordinator | None  # between ranks that continue without each other
    callback_states: Sequence[Sequence[Any]]  # of the user's own, at the start
    memory: WorkerMemory | None  # bytes that a worker holds, by part; None under asynchronous rules
    is_measured: bool = False  # False: the first step's program is still to be measured
    hosts: Sequence[str]  # names by rank
    peak: Peak | None  # most FLOP/s of all workers' devices, if known
    shuffles: int = 0  # number of shuffles of data in memory that have been recorded
    figure_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of training, by name; from the first step
    # made of plan and functions, and so anew if ranks that died are left out
    saver: Saver = field(init=False)
    votes: decisions.StepConsensus = field(init=False)
    callbacks: Sequence[Callback] = field(init=False)
    tracer: Tracer = field(init=False)
    noise: Noise | None = field(init=False)  # if the rule measures it

    def __post_init__(self) -> None:
        """Open what depends on the workers; all ranks call it."""
        plan, experiment, workers, rule = self.plan, self.experiment, self.workers, self.functions.rule
        control, keep = workers.processes, Retention(experiment.keep_checkpoints, experiment.keep_best)
        equal = {"replicated": rule.state_is_replicated, "same_params": rule.params_are_replicated}
        self.saver = Saver(self.home, control, workers=workers.size, keep=keep, **equal)
        leaves = [path for path, _ in named_leaves(plan.param_shapes)]
        clock = Clock(plan.timetable.periods_s, self.recorder.elapsed_s, is_first=control.rank == 0)
        self.votes = decisions.StepConsensus(control, self.notice, leaves, clock.due)
        own = [callback for callback in experiment.callbacks if control.rank == 0 or not callback.first_rank_only]
        self.callbacks = [Instruments(self.profiler), *own]
        self.tracer = Tracer(step_range(experiment.trace, "trace"), control, self.hosts, self.folder / "trace.json")
        self.noise = (
            Noise(workers.size, plan.clock.effective_batch // workers.size) if rule.update_with_squares else None
        )

    @property
    def experiment(self) -> Experiment:
        return self.plan.experiment

    @property
    def workers(self) -> Workers:
        return self.plan.workers

    @property
    def folder(self) -> Path:
        return self.home.path

    # ------------------------------------------------------------ votes on steps

    def count_vote(self) -> None:
        """Count the open vote, and do what is agreed."""
        self._react(self.votes.count())

    def _react(self, failure: decisions.NonFiniteStep | None) -> None:
        if failure is not None:
            failures.set_phase(f"step {failure.step}")
            self.saver.wait()  # so that the last good checkpoint is complete, and is the one named
            tail = f"{self.saver.last_good()}. Lower the learning rate, warm up or clip"
            self.recorder.say(self.recovery.decide(failure, tail))
            self.recorder.write("skipped", step=failure.step, why=str(failure))

    def compare(self, state: TrainState, step: int) -> None:
        """Compare what is to be equal on all workers by its fingerprints."""
        rule, workers = self.functions.rule, self.workers
        replicated = {"params": state.params} if rule.params_are_replicated else {}
        replicated |= {"rule": state.rule_state} if rule.state_is_replicated else {}
        if workers.size == 1 or not replicated or not self.plan.exchanges:
            return
        fingerprints = self.functions.fingerprints(replicated)
        text = compare_replicas(replicated, fingerprints, workers.mine, workers.processes, step)
        if text:
            self.saver.wait()
            self.recovery.decide_on_difference(f"{text}; {self.saver.last_good()}")

    # ------------------------------------------------------------ progress lines

    def vote_and_sum(self, step: int, metrics: Metrics | None) -> np.ndarray:
        """Vote on a step, even on one that was left out; f64[SUMS + figures] of this process's workers.

        Zeros if the step was not made, f64[] if it was left out. The noise scale compares |g_i|^2 with |g|^2, so a step
        with a short batch is left out of it.
        """
        plan, workers = self.plan, self.workers
        if metrics is None:
            self._react(self.votes.cast(step, None, 0, True))
            return np.zeros(())
        figures = rows_by_name(metrics.figures or {}, workers)
        self.figure_shapes = {name: rows.shape for name, rows in figures.items()}
        sums = np.concatenate([np.zeros(SUMS), *(rows.ravel() for rows in figures.values())])
        losses, counts, squares = (
            local_rows(value, workers).astype(np.float64) for value in (metrics.loss, metrics.count, metrics.squares)
        )
        finite = local_rows(metrics.finite, workers).reshape(len(losses), -1)
        applied = metrics.applied is None or bool(local_rows(metrics.applied, workers).all())
        found = [(i, bad) for i, bad in enumerate(map(decisions.not_finite, losses, finite)) if bad is not None]
        place, bad = found[0] if found else (0, None)
        self._react(self.votes.cast(step, bad, workers.mine[place], applied))
        if not (applied and np.isfinite(losses).all()):
            return np.zeros_like(sums)
        sums[:4] = losses.sum(), counts.sum(), squares.sum(), squares.size
        is_whole = plan.examples(step) - plan.examples(step - 1) == plan.clock.effective_batch
        if metrics.mean_square is not None and is_whole:
            mean_squares = local_rows(metrics.mean_square, workers).sum(dtype=np.float64)
            sums[4:SUMS] = squares.sum(), mean_squares, squares.size
        return sums

    def log(
        self, step: int, sums: np.ndarray, window: Window, distance: float | None = None, rate_factor: float = 1.0
    ) -> None:
        """Write mean loss and times of all workers since the last line; all ranks call it."""
        plan, feed, workers = self.plan, self.plan.feed, self.workers
        if sums.ndim == 0:  # all steps since the last line were left out, on all ranks
            sums = np.zeros(SUMS)
        mine = np.array([*sums[:SUMS], feed.skipped, feed.wait_s, distance or 0.0, *sums[SUMS:]])
        every = workers.processes.allgather_array(np.concatenate([mine, flat(window)]))
        totals = every[:, : len(mine)].sum(axis=0).tolist()
        loss, count, squares, steps, local, mean, measured, skipped, wait_s, distances, *figures = totals
        more: dict[str, Any] = {}
        if figures:
            totals_by_name = split_by_name(np.array(figures), self.figure_shapes)
            more |= {f"train_{name}": quotient(*total) for name, total in totals_by_name.items()}
        if self.noise and measured:
            more |= self.noise.fields(Means(local / measured, mean / measured))
        if distance is not None:
            more["distance"] = distances / workers.size
        before, shuffles = self.shuffles, self._new_shuffles()
        for number, (seconds, moved_bytes) in enumerate(shuffles, before + 1):
            self.recorder.write("shuffle", step=step, shuffle=number, shuffle_s=seconds, moved_bytes=moved_bytes)
        self.write(
            step,
            summary(every[:, len(mine) :], window.steps),
            rate_factor,
            epoch=plan.epoch(step),
            examples=plan.examples(step),
            loss=loss / count if count else float("nan"),
            gradient_norm=(squares / max(steps, 1.0)) ** 0.5,
            wait_s=wait_s / workers.size,
            skipped=int(skipped),
            noted=window.spans,
            shuffles=shuffles,
            **more,
        )
        if text := self.tracer.add(window.spans, step, step == plan.clock.total_steps):
            self.recorder.say(text)

    def write(
        self, step: int, times: Summary | None, rate_factor: float, *, epoch: float, skipped: int, **fields: Any
    ) -> None:
        """A line to the record and the terminal about the work of all workers.

        The fields besides: `examples` so far; their mean `loss` since the last line; `gradient_norm`, the root of the
        mean square over the steps that workers made; `wait_s` for batches so far, a mean over workers.
        """
        plan, work, flops = self.plan, None, self.functions.flops.per_worker
        if flops is not None:  # of a worker's step: model FLOPs of all workers' step
            batch = plan.clock.effective_batch
            work = Work(flops * batch / plan.local_batch, batch, self.peak)
        lr = plan.lr_of(step)
        total_steps = plan.clock.total_steps if plan.clock.total_steps < UNLIMITED else 0
        fields |= {"total_steps": total_steps, "lr": None if lr is None else lr * rate_factor}
        self.recorder.train(step=step, epoch=epoch, skipped=skipped, anatomy=times, work=work, **fields)
        most = plan.experiment.data.max_skipped
        decisions.check_budget(skipped, len(plan.feed.source), math.ceil(epoch), most)

    def say_loaded(self, memory: MemoryShuffle, step: int) -> None:
        """Say and record which data is in memory; all ranks call it."""
        mine = np.array([memory.source.newest().bytes.size / len(self.workers.mine), memory.load_s])
        worker_bytes, load_s = self.workers.processes.allgather_array(mine).max(axis=0).tolist()
        place = {"examples": len(memory.source), "group_size": memory.sampler.parts}
        self.recorder.write("memory", step=step, **place, worker_bytes=int(worker_bytes), load_s=load_s)
        is_auto, moves = memory.source.data.group_size == "auto", memory.group is not None
        self.recorder.say(describe_memory(memory.sampler, is_auto, worker_bytes, load_s, moves))

    def _new_shuffles(self) -> list[Shuffle]:
        """Unrecorded shuffles that all ranks have done: the slowest rank's seconds, all bytes."""
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


def open_recorder(plan: Plan, folder: Path, elapsed_s: float, hosts: Sequence[str]) -> Recorder:
    """The record, the sinks and the terminal; hosts are names by rank."""
    experiment = plan.experiment
    return Recorder(
        run_dir=folder,
        elapsed_s=elapsed_s,
        terminal=open_terminal(experiment.quiet),
        sinks=open_sinks(experiment.sinks, folder),
        hosts=hosts,
        unit=unit_of(experiment, plan.feed),
    )


def unit_of(experiment: Experiment, feed: DeviceFeed) -> Unit:
    """The unit of speed: tokens of language models, images, or else examples."""
    model = feed.model
    if model is not None and find_spec(experiment) is TASKS["language-model"]:
        return Unit("tokens", feed.tokens_each or math.prod(model.label_shape), feed.bytes_each)
    image = model.example() if model else feed.example().get("image")
    is_image = len(getattr(image, "shape", ())) == 4 and not (model and model.takes_tokens)
    return Unit("images" if is_image else "examples")


# ---------------------------------------------------------------- evaluation

CALLS = "what a callback calls"


def evaluate(
    run: Run, state: TrainState, step: int, after_batch: Callable[[], object] = lambda: None
) -> tuple[dict[str, float], str]:
    """Figures of every validation example once, over all workers; and why a callback ends the run, or empty.

    Params are as the rule evaluates them, and model state as `batch_statistics` says. Arrays that `whole_set` returns,
    such as a confusion matrix, are samples.

    Args:
        after_batch: called after each batch of this process.
    """
    functions = run.functions
    subject = functions.eval_params(state.params, state.rule_state), functions.mean_state(state.model_state)

    def evaluate_batch(batch: Batch) -> tuple[FigureSums, Any]:
        failures.set_phase(f"evaluation after step {step}", failures.LONG_FACTOR)  # for the watchdog: it makes progress
        fault_injection.inject_at("eval", step)
        result = functions.eval_step(*subject, batch)
        after_batch()
        return result

    plan, whole_set = run.plan, run.experiment.whole_set
    with progress.phase("evaluating"):
        figures, tables = evaluate_sets(plan.validation, plan.eval_batches, evaluate_batch, run.workers, whole_set)
    for name, text in tables.items():
        run.recorder.sample(step, name.removeprefix("eval_"), text)
    return figures, conclude(run, subject, step, figures)


def evaluate_sets(
    feeds: dict[str, DeviceFeed],
    batches_of: Callable[[DeviceFeed], Generator[Batch, None, None]],
    evaluate_batch: Callable[[Batch], tuple[FigureSums, Any]],
    workers: Workers,
    function: WholeSetFunction | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of validation sets, `eval_count` of all examples first, then each set's from its loss on.

    All ranks call it.

    Args:
        feeds: by the prefix of their figures.
        evaluate_batch: the step of an evaluation, with outputs if there is a function of the whole set.

    Returns: also the texts of arrays that the function returned, by prefix and name.
    """
    figures, tables = dict[str, Any](eval_count=0), dict[str, str]()
    for prefix, feed in feeds.items():
        whole_set = WholeSet(function, workers) if function else None
        sums: dict[str, np.ndarray] = {}  # f64[2, ...]: sums and what divides them, over this process's batches
        with contextlib.closing(batches_of(feed)) as batches:
            for batch in batches:
                batch_sums, outputs = evaluate_batch(batch)
                for name, rows in rows_by_name(batch_sums, workers).items():
                    sums[name] = sums.get(name, 0) + rows
                if whole_set:
                    whole_set.add(batch, outputs)
        names = sorted(sums, key=lambda name: name != "loss")
        flat = np.concatenate([sums[name].ravel() for name in names] or [np.zeros(0)])
        totals = split_by_name(workers.processes.allreduce_sum(flat), {name: sums[name].shape for name in names})
        count = int(totals.pop("count", np.zeros(2))[0])
        figures["eval_count"] += count
        found = {name: quotient(*total) for name, total in totals.items()} if count else {}
        if whole_set:
            found |= whole_set.figures({*found, "count"})
            tables |= {prefix + name: text for name, text in whole_set.tables.items()}
        if feed.bytes_each and "loss" in found:
            found["bits_per_byte"] = found["loss"] / math.log(2) * feed.tokens_each / feed.bytes_each
        figures |= {prefix + name: value for name, value in found.items()}
    return figures, tables


def rows_by_name(figures: FigureSums, workers: Workers) -> dict[str, np.ndarray]:
    """f64[2, ...] by name: sums and what divides them, over this process's workers."""
    return {
        name: np.stack([local_rows(value, workers).sum(axis=0, dtype=np.float64) for value in ratio])
        for name, ratio in figures.items()
    }


def split_by_name(flat: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays of these shapes, which lie one after another in a vector."""
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}


def quotient(sums: np.ndarray, counts: np.ndarray) -> float:
    """Divide sums by counts; average the columns that have a count."""
    counted = np.atleast_1d(counts) != 0
    if not counted.any():
        return float("nan")
    return float(np.mean(np.atleast_1d(sums)[counted] / np.atleast_1d(counts)[counted]))


def conclude(run: Run, subject: tuple[PyTree, PyTree], step: int, figures: dict[str, Any]) -> str:
    """Record the figures, and call the user's callbacks; why one of any rank's ends the run, or empty."""
    if figures["eval_count"] and run.experiment.monitor not in figures:
        raise UsageError(f"monitor: got {run.experiment.monitor}; the figures are {', '.join(figures)}")
    place = {"epoch": run.plan.epoch(step), "examples": run.plan.examples(step)}
    run.recorder.evaluation(step=step, **place, **figures)
    if not run.experiment.callbacks:
        return ""
    control, reasons = run.workers.processes, list[str]()
    params, model_state = jax.tree.map(lambda x: local_rows(x, run.workers)[0] if run.workers.mesh else x, subject)
    moment = Moment(
        step=step,
        epoch=run.plan.epoch(step),
        figures=figures,
        rank=control.rank,
        folder=run.folder,
        params=params,
        model_state=model_state,
        predict=lambda batch: run.functions.predict(params, model_state, batch),
        validation=lambda: own_batches(run),
        sum=partial(sum_over_ranks, run),
        say=run.recorder.say,
        write=partial(run.recorder.note, step=step),
        show=partial(run.recorder.sample, step),
        stop=reasons.append,
        mode_of=run.plan.mode_of,
    )
    for callback in run.experiment.callbacks:
        if moment.rank and callback.first_rank_only:
            continue
        name = type(callback).__name__
        failures.set_phase(f"callback {name} after step {step}", failures.LONG_FACTOR)
        call_each([callback], "after_evaluation", moment, is_asynchronous=bool(run.workers.asynchronous))
        if not callback.first_rank_only:
            control.assert_same(CALLS, {"next": f"the end of {name}.after_evaluation"})
    if reasons and run.workers.asynchronous:
        raise UsageError("Moment.stop: got an asynchronous rule, whose workers end at train_for")
    return next(filter(None, control.allgather_object(reasons[0] if reasons else "")), "")


def sum_over_ranks(run: Run, values: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, f64; all ranks call it."""
    array = np.asarray(values, np.float64)
    if run.workers.asynchronous:  # worker 0's callbacks have all batches
        return array
    check_may_send("Moment.sum")
    run.workers.processes.assert_same(CALLS, {"next": f"Moment.sum of an array {list(array.shape)}"})
    return run.workers.processes.allreduce_sum(array.ravel()).reshape(array.shape)


def own_batches(run: Run) -> Iterator[Batch]:
    """This process's rows of the first validation set's batches, in host memory."""
    axis = 1 + bool(run.workers.mesh)
    for batch in run.plan.eval_batches(next(iter(run.plan.validation.values()))):
        yield jax.tree.map(lambda x: local_rows(x, run.workers).reshape(-1, *x.shape[axis:]), batch)


def score(experiment: Experiment, means: dict[str, float]) -> float | None:
    """The figure that orders checkpoints, the lowest best; None without an evaluation."""
    value = means.get(experiment.monitor)
    return -value if value is not None and experiment.monitor_mode == "max" else value


def rate_factor(run: Run, state: TrainState) -> float:
    """The factor of the learning rate, by callbacks."""
    return next((local_rows(factor, run.workers).flat[0].item() for factor in rate_factors(state.rule_state)), 1.0)
