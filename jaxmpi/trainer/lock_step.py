"""The coordinator of synchronous rules: workers in lock step, and the loop again after a failure.

Workers exchange inside steps, and every rank votes on every step. The vote is counted while the next step runs, and
metrics are read one step late, so neither the device nor the loop waits for them. With `--on-rank-loss shrink` the vote
comes before the next step, while the state before it still exists.

`run_to_end` runs the loop again after a rollback, or without ranks that died. After a death the ranks that remain have
agreed on the last step that counts, and each has its whole state (`recover.shrink`). With sharded updates (ZeRO) the
dead rank took its shard of the optimizer's state along, so all restore the newest checkpoint. Everything that depends
on the number of ranks is then made anew: plan, compiled functions, the place of the record.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Generator, Iterator
from functools import partial

import jax
import numpy as np

from jaxmpi.checkpoint import held_folder, run_directory
from jaxmpi.comm.job import Processes
from jaxmpi.comm.topology import gather_fault_tolerant, to_device
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import Batch, TrainState, worker_key
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.recover import decisions
from jaxmpi.runtime import failures, progress
from jaxmpi.runtime.process import give_back_freed_memory
from jaxmpi.trainer import memory
from jaxmpi.trainer.build import Functions, build_functions
from jaxmpi.trainer.evaluate import distance, evaluate, rate_factor, score
from jaxmpi.trainer.loop import Position, RunProgress, run_steps
from jaxmpi.trainer.plan import Plan, make_plan
from jaxmpi.trainer.progress import SUMS, open_recorder
from jaxmpi.trainer.run import Run, open_run, watch
from jaxmpi.trainer.state import (
    States,
    note_saved,
    place_states,
    restore_feed_and_callbacks,
    save,
    starting_states,
)
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents


class LockStep:
    """The coordinator of synchronous rules."""

    is_asynchronous = False

    def __init__(self, run: Run, sums: np.ndarray | None = None) -> None:
        """Collective: all ranks make one together.

        Args:
            sums: f64[SUMS], of this process's workers since the last progress line; None: zeros.
        """
        self.run = run
        self.timer = StepTimer(run.workers.size, to_device(run.workers))
        self.sums = np.zeros(SUMS) if sums is None else sums
        self.result: dict[str, float] = {}  # figures of the last evaluation
        self.is_stopped = False  # by a callback
        self._pending: list[tuple[int, Metrics | None]] = []  # dispatched, not yet read
        self._evaluated = -1  # step of the last evaluation

    def begin(self, position: Position) -> TrainState:
        """Keep the state, compare it over workers, and start the clock."""
        run, self.start = self.run, position.step
        if run.shrinking:
            run.shrinking.keep(position.step, position.state, self.sums, is_settled=not any(position.overdue))
        with progress.phase("comparing the params of all workers"):
            self.compare(position.step, position.state)  # programs of the comparison are compiled here, once
        run.recorder.start_window(run.plan.examples(position.step))
        return position.state

    def batches(self) -> Generator[Batch, None, None]:
        """To the last step of the run."""
        feed = self.run.plan.feed
        if feed.memory and feed.memory.load():
            self.run.log.loaded(feed.memory, self.start)
        return feed.batches(self.start, self.run.plan.clock.total_steps)

    def update(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics | None]:
        """One step, or only its number if it has failed twice."""
        self.run.saver.poll()
        note_saved(self.run)
        if step in self.run.guard.recovery.left_out:
            return state._replace(step=state.step + 1), None
        if not self.run.is_measured:
            self.run = measure_first_step(self.run, state, batch)
        return self.run.functions.train_step(state, batch)

    def after_step(self, step: int, state: TrainState, metrics: Metrics | None) -> tuple[TrainState, RunProgress]:
        """Read the metrics of the step before, or all if events are due."""
        run, leaving = self.run, self.run.guard.votes.leaving
        due = run.plan.timetable.between(step - 1, step, is_first=step == self.start + 1, leaving=leaving)
        if run.shrinking:
            run.shrinking.keep(step, state, self.sums)
        self._pending.append((step, metrics))
        while len(self._pending) > (0 if due.log or due.compare or run.shrinking else 1):
            with finish_step_on_error(state):
                self.sums = self.sums + self._read(*self._pending.pop(0))
        return state, RunProgress(step, due)

    def _read(self, step: int, metrics: Metrics | None) -> np.ndarray:
        """Vote on a step; return its f64[SUMS], zeros if it was not made."""
        is_made = self.run.guard.passes(step, metrics)
        return self.run.log.sums(step, metrics) if is_made and metrics is not None else np.zeros(SUMS)

    def pause(self, state: TrainState) -> None:
        """Wait for the device, and for the vote on the last step."""
        jax.block_until_ready(state)
        self.timer.pause()
        self.run.guard.settle()

    def compare(self, step: int, state: TrainState) -> None:
        """Fingerprints of replicated state."""
        self.run.guard.compare(state, step)

    def log(self, step: int, state: TrainState) -> None:
        """Write a line about all workers' steps."""
        run = self.run
        run.log.line(step, self.sums, self.timer.window(), distance(run, state), rate_factor(run, state))
        self.sums = np.zeros(SUMS)

    def evaluate(self, step: int, state: TrainState) -> None:
        (self.result, why), self._evaluated = evaluate(self.run, state, step), step
        if why and step < self.run.plan.clock.total_steps:
            self.is_stopped = True
            self.run.recorder.write("stopped", step=step, why=why)
            self.run.recorder.say(f"stopped at step {step}: {why}")

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Begin a checkpoint, which the saver's thread writes."""
        run = self.run
        is_last = is_last or step >= run.plan.clock.total_steps
        figure = score(run.experiment, self.result) if self._evaluated == step else None
        save(run, state, step, figure, is_last=is_last)
        if run.shrinking:
            run.shrinking.is_unsaved = False

    def leave(self, step: int, state: TrainState) -> None:
        """End a run that was asked to."""
        self._wait_for_saver()
        self.run.notice.say_saved(self.run.recorder.say, step, self.run.folder)
        raise decisions.Preempted

    def settle(self, step: int, due: DueEvents) -> None:
        """Restart the clock: evaluations, checkpoints and compiling are no training."""
        if due.evaluate or due.save:
            self.run.recorder.start_window(self.run.plan.examples(step))
        if due.evaluate or due.save or step == self.start + 1:
            self.timer.restart()
        if self.run.shrinking:
            self.run.shrinking.settle(self.sums)

    def finish(self, state: TrainState) -> dict[str, float]:
        """Wait until the last checkpoint is on disk."""
        self._wait_for_saver()
        shrinking = self.run.shrinking
        if shrinking and shrinking.control.size < shrinking.initial_size:
            self.run.recorder.say(f"finished with {shrinking.control.size} of {shrinking.initial_size} workers")
        return self.result

    def _wait_for_saver(self) -> None:
        self.run.saver.wait()
        note_saved(self.run)
        if self.run.shrinking:
            self.run.shrinking.vote()


@contextlib.contextmanager
def finish_step_on_error(state: TrainState) -> Iterator[None]:
    """Wait for the last step before raising an error of all ranks.

    The step after the one that failed has been dispatched on all ranks. Code that catches the error may send messages,
    read a checkpoint or call `train` again, which must not meet an exchange that still runs.
    """
    try:
        yield
    except (AgreedError, decisions.RollBack):
        jax.block_until_ready(state)
        raise


def measure_first_step(run: Run, state: TrainState, batch: Batch) -> Run:
    """Log the memory that the first step takes, and refuse more than is free."""
    assert run.memory is not None
    batch_bytes = size_bytes(batch) // (run.workers.size if run.workers.mesh else 1)
    needed = memory.with_program(run.memory, run.functions.compile_step(state, batch), batch_bytes)
    here = memory.workers_here(run.workers)
    free_bytes = available_bytes() + memory.allocated(needed, here)
    run.recorder.say(memory.describe_step(needed, here, free_bytes))
    memory.make_room(needed, run.plan, free_bytes)
    return dataclasses.replace(run, memory=needed, is_measured=True)


# ---------------------------------------------------------------- the loop, again after failures


def run_to_end(run: Run, states: States, start: int, overdue: DueEvents) -> dict[str, float]:
    """Run the loop, again after each rollback, or without ranks that died.

    Args:
        overdue: is to be done before the first step.
    """
    coordinator: LockStep | None = None

    def at_start() -> tuple[LockStep, Position]:
        return LockStep(run), Position(start, place_states(run, states), overdue)

    begin: Callable[[], tuple[LockStep, Position]] = at_start
    with contextlib.ExitStack() as ends:
        ends.callback(run.profiler.close)
        ends.push(run.recorder)
        while True:
            try:
                coordinator, position = begin()
                run = coordinator.run
                return run_steps(coordinator, run.callbacks, position)
            except decisions.RollBack as back:
                assert coordinator
                run = coordinator.run
                begin = partial(roll_back, run, back)
            except Exception as error:
                run = coordinator.run if coordinator else run  # with what its first step measured
                if run.shrinking is None:
                    raise
                run.shrinking.after(error, run.saver)
                begin = partial(continue_after_shrink, run, ends)
            run.profiler.close()  # its first step would start it once more


def roll_back(run: Run, back: decisions.RollBack) -> tuple[LockStep, Position]:
    """Restore the newest checkpoint; the record is cut there."""
    run.guard.votes.count()  # on a step that does not count any more
    run.saver.wait()
    states, start = restore_newest(run, run.plan, run.functions, str(back))
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    return LockStep(dataclasses.replace(run, is_measured=True)), Position(start, place_states(run, states))


def restore_newest(run: Run, plan: Plan, functions: Functions, why: str) -> tuple[States, int]:
    """States of this process's workers, and the step, of the newest checkpoint; of the start if there is none.

    Args:
        plan: that continues, perhaps with fewer workers than `run` had.
        why: it goes back, for the error.
    """
    control = plan.workers.processes
    if fate := next(filter(None, control.allgather_object(run.saver.home.fate())), ""):
        raise AgreedError(f"{why}, and the run directory {str(run.folder)!r} {fate}: nothing to go back to")
    if control.rank == 0:
        with run_directory.still_usable():
            run_directory.refuse_lost(run.folder)
    resumed = plan.with_fields(resume=True)
    states, saved = starting_states(resumed, functions.rule, run.folder)
    restore_feed_and_callbacks(resumed, saved, run.callback_states)
    return states, saved.step if saved else 0


def continue_after_shrink(run: Run, ends: contextlib.ExitStack) -> tuple[LockStep, Position]:
    """The run of the remaining ranks, from the state that they hold, or from a checkpoint if updates are sharded."""
    shrinking = run.shrinking
    assert shrinking is not None
    assert shrinking.committed is not None
    step, state, sums, is_settled = shrinking.committed
    failures.set_phase(f"going on without others after step {step}", failures.LONG)
    control = shrinking.control
    rows = control.allgather_object([is_settled, shrinking.is_unsaved])
    is_late, is_unsaved = not all(settled for settled, _ in rows), any(unsaved for _, unsaved in rows)
    workers = gather_fault_tolerant(control)
    shrinking.renew(workers)
    effective_batch, scaled_for = run.plan.clock.effective_batch, run.plan.scaled_for
    stored = run_directory.StoredSettings(scaled_for, scaled_for, effective_batch, {})
    experiment = run_directory.as_begun(run.experiment, stored, workers.size)
    plan = make_plan(experiment, workers, scaled_for, before=run.plan)
    plan = dataclasses.replace(plan, requested=run.plan.requested)
    ends.enter_context(watch(plan))
    functions = build_functions(plan)
    needed = memory_of_fewer(run, plan, functions)
    back = ""
    if run.functions.rule.sharding:  # of the old run: one worker alone shards nothing
        states, step = restore_newest(run, plan, functions, shrinking.describe_gone())
        sums, is_late, is_unsaved = np.zeros_like(sums), False, False
        back = f", with its shard of the optimizer's state: back to step {step}"
    else:
        worker = workers.mine[0]
        states = {worker: jax.tree.map(np.asarray, state._replace(key=worker_key(experiment.seed, worker)))}
    recorder = take_over_record(run, control, step - is_late, ends)
    new = open_run(
        plan,
        functions=functions,
        home=run.home,
        recorder=recorder,
        states=states,
        notice=run.notice,
        recovery=run.guard.recovery,
        profiler=run.profiler,
        shrinking=shrinking,
        callback_states=run.callback_states,
        memory=needed,
        is_measured=True,  # before there was a state
    )
    recorder.write("lost", after=step, ranks=shrinking.gone, workers=workers.size)
    recorder.say(
        f"{shrinking.describe_gone()}{back}; {workers.size} go on after step {step}\n{plan.headline}\n{functions.form}"
    )
    recorder.say(memory.describe_worker(needed, workers.size))
    shrinking.gone, shrinking.is_unsaved = [], is_unsaved
    overdue = plan.timetable.between(step - 1, step) if is_late else DueEvents()
    overdue = overdue._replace(save=overdue.save or is_unsaved)
    return LockStep(new, sums), Position(step, place_states(new, states), overdue)


def memory_of_fewer(run: Run, plan: Plan, functions: Functions) -> memory.WorkerMemory:
    """The memory of each remaining rank, which is larger if updates are sharded."""
    needed, control = memory.estimate_memory(plan, functions.rule, is_fused=functions.is_fused), plan.workers.processes
    give_back_freed_memory()
    control.barrier()  # all have given theirs back
    here, before = memory.workers_here(plan.workers), run.memory
    if before and before.is_fused == needed.is_fused:  # as many examples at a time
        needed = dataclasses.replace(needed, activations=before.activations, batch=before.batch)
    reused = memory.allocated(before, here) if before else 0  # the old state is free once the new one is made of it
    short = ""
    try:
        memory.make_room(needed, plan, available_bytes() + reused)
    except UsageError as error:
        short = str(error)
    if text := next(filter(None, control.allgather_object(short)), ""):
        raise AgreedError(f"{text}; resume from the newest checkpoint in {str(run.folder)!r}")
    return needed


def take_over_record(run: Run, control: Processes, step: int, ends: contextlib.ExitStack) -> Recorder:
    """The recorder of a remaining rank; entries after `step` are dropped.

    Whoever is rank 0 now has the record and the run directory.
    """
    if control.rank != 0:
        return run.recorder
    shrinking = run.shrinking
    assert shrinking is not None
    if shrinking.recorder is None:
        hosts = [socket.gethostname()] * control.size
        with run_directory.still_usable():
            held_folder.lock(run.saver.home, ends)
            shrinking.recorder = open_recorder(run.plan, run.folder, run.recorder.elapsed_s(), hosts)
        ends.push(shrinking.recorder)
    shrinking.recorder.go_back(step)
    return shrinking.recorder
