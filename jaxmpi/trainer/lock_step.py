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
from collections.abc import Callable, Generator
from functools import partial

import jax
import numpy as np

from jaxmpi.checkpoint import held_folder, run_directory
from jaxmpi.comm.topology import gather_fault_tolerant, local_rows, to_device
from jaxmpi.core.errors import AgreedError
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import Batch, TrainState, worker_key
from jaxmpi.observe.flops import total_peak
from jaxmpi.observe.step_timing import StepTimer
from jaxmpi.recover import decisions
from jaxmpi.recover.watchdog import watching
from jaxmpi.runtime import failures, progress
from jaxmpi.runtime.process import give_back_freed_memory
from jaxmpi.trainer import memory
from jaxmpi.trainer.build import build_functions
from jaxmpi.trainer.loop import Coordinator, Position, RunProgress, run_steps
from jaxmpi.trainer.plan import Plan, make_plan
from jaxmpi.trainer.run import Run, evaluate, open_recorder, rate_factor, score
from jaxmpi.trainer.state import (
    States,
    begin_checkpoint,
    note_saved,
    place_states,
    restore_feed_and_callbacks,
    starting_states,
)
from jaxmpi.trainer.step import Metrics
from jaxmpi.trainer.timetable import DueEvents, timed_events


class LockStep(Coordinator):
    """The coordinator of synchronous rules."""

    def __init__(self, run: Run, sums: np.ndarray | None = None) -> None:
        self.run = run
        self.timer = StepTimer(run.workers.size, to_device(run.workers))
        self.sums = np.zeros(()) if sums is None else sums
        self.result: dict[str, float] = {}  # figures of the last evaluation
        self._pending: list[tuple[int, Metrics | None]] = []  # dispatched, not yet read
        self._evaluated = -1  # step of the last evaluation
        self._is_time_up = False  # by the clock: the run ends after this step

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
        feed = self.run.plan.feed
        if feed.memory and feed.memory.load():
            self.run.say_loaded(feed.memory, self.start)
        return feed.batches(self.start, self.run.plan.clock.total_steps)

    def update(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics | None]:
        """One step; one that has failed twice only advances the counter."""
        run = self.run
        run.saver.poll()
        note_saved(run)
        if step in run.recovery.left_out:
            return state._replace(step=state.step + 1), None
        if not run.is_measured:
            measure_first_step(run, state, batch)
        return run.functions.train_step(state, batch)

    def after_step(self, step: int, state: TrainState, metrics: Metrics | None) -> tuple[TrainState, RunProgress]:
        """Read the metrics of the step before, or all if events are due."""
        run, is_first = self.run, step == self.start + 1
        timed = timed_events(run.votes.take_timed())
        due = run.plan.timetable.between(step - 1, step, is_first=is_first, leaving=run.votes.leaving, timed=timed)
        self._is_time_up = "stop" in timed
        if run.shrinking:
            run.shrinking.keep(step, state, self.sums)
        self._pending.append((step, metrics))
        try:
            is_awaited = due.log or due.compare or due.evaluate or run.shrinking  # `pause` counts the vote on this step
            while len(self._pending) > (0 if is_awaited else 1):
                self.sums = self.sums + run.vote_and_sum(*self._pending.pop(0))
        except (AgreedError, decisions.RollBack):
            # The step after the one that failed has been dispatched on all ranks. Code that catches the error may send
            # messages, or call `train` again, which must not meet an exchange that still runs.
            jax.block_until_ready(state)
            raise
        return state, RunProgress(step, due)

    def pause(self, state: TrainState) -> None:
        """Wait for the device, and for the vote on the last step."""
        jax.block_until_ready(state)
        self.timer.pause()
        self.run.count_vote()

    def compare(self, step: int, state: TrainState) -> None:
        self.run.compare(state, step)

    def log(self, step: int, state: TrainState) -> None:
        run, distance = self.run, None
        if distance_of := run.functions.rule.distance:  # of this process's workers from what they met last
            distance = local_rows(distance_of(state.rule_state), run.workers).sum().item()
        run.log(step, self.sums, self.timer.window(), distance, rate_factor(run, state))
        self.sums = np.zeros(())

    def evaluate(self, step: int, state: TrainState) -> None:
        (self.result, why), self._evaluated = evaluate(self.run, state, step), step
        why = why or (f"train_for {self.run.experiment.train_for} is over" if self._is_time_up else "")
        if why and step < self.run.plan.clock.total_steps:
            self.is_stopped = True
            self.run.recorder.write("stopped", step=step, why=why)
            self.run.recorder.say(f"stopped at step {step}: {why}")

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        run = self.run
        is_last = is_last or step >= run.plan.clock.total_steps
        figure = score(run.experiment, self.result) if self._evaluated == step else None
        begin_checkpoint(run, state, step, figure, is_last=is_last)
        if run.shrinking:
            run.shrinking.is_unsaved = False

    def leave(self, step: int, state: TrainState) -> None:
        self._wait_for_saver()
        self.run.notice.say_saved(self.run.recorder.say, step, self.run.folder)
        raise decisions.Preempted

    def after_actions(self, step: int, due: DueEvents) -> None:
        """Restart the clock: evaluations, checkpoints and compiling are no training."""
        if due.evaluate or due.save:
            self.run.recorder.start_window(self.run.plan.examples(step))
        if due.evaluate or due.save or step == self.start + 1:
            self.timer.restart()
        if self.run.shrinking:
            self.run.shrinking.note_settled(self.sums)

    def finish(self, state: TrainState) -> dict[str, float]:
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


def measure_first_step(run: Run, state: TrainState, batch: Batch) -> None:
    """Log the memory that the first step takes, and refuse more than is free."""
    assert run.memory is not None
    batch_bytes = size_bytes(batch) // (run.workers.size if run.workers.mesh else 1)
    program = run.functions.compile_step(state, batch)
    run.memory, run.is_measured = memory.with_program(run.memory, program, batch_bytes), True
    here = memory.workers_here(run.workers)
    free_bytes = available_bytes() + here * run.memory.state + run.memory.params_of_host  # the state is there already
    run.recorder.say(memory.describe_step(run.memory, here, free_bytes))
    memory.make_room(run.memory, run.plan, free_bytes)


# ---------------------------------------------------------------- the loop, again after failures


def run_to_end(run: Run, states: States, start: int) -> dict[str, float]:
    """Run the loop, again after each rollback, or without ranks that died."""

    def at_start() -> tuple[LockStep, Position]:
        return LockStep(run), Position(start, place_states(run, states))

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
                begin = partial(roll_back, run, back)
            except Exception as error:
                if run.shrinking is None:
                    raise
                run.shrinking.after(error, run.saver)
                begin = partial(continue_after_shrink, run, ends)
            run.profiler.close()  # its first step would start it once more


def roll_back(run: Run, back: decisions.RollBack) -> tuple[LockStep, Position]:
    """Restore the newest checkpoint; the record is cut there."""
    run.votes.count()  # on a step that does not count any more
    run.saver.wait()
    states, start = restore_newest(run, str(back))
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    run.is_measured = True
    return LockStep(run), Position(start, place_states(run, states))


def restore_newest(run: Run, why: str) -> tuple[States, int]:
    """States of this process's workers, and the step, of the newest checkpoint; of the start if there is none."""
    control = run.workers.processes
    if fate := next(filter(None, control.allgather_object(run.home.fate())), ""):
        raise AgreedError(f"{why}, and the run directory {str(run.folder)!r} {fate}: nothing to go back to")
    if control.rank == 0:
        with run_directory.as_training_errors():
            run_directory.refuse_lost(run.folder)
    resumed = run.plan.with_fields(resume=True)
    states, saved = starting_states(resumed, run.functions.rule, run.folder)
    restore_feed_and_callbacks(resumed, saved, run.callback_states)
    return states, saved.step if saved else 0


def continue_after_shrink(run: Run, ends: contextlib.ExitStack) -> tuple[LockStep, Position]:
    """The run of the remaining ranks, from the state that they hold, or from a checkpoint if updates are sharded."""
    shrinking = run.shrinking
    assert shrinking is not None
    assert shrinking.committed is not None
    step, state, sums, is_settled = shrinking.committed
    failures.set_phase(f"going on without others after step {step}", failures.LONG_FACTOR)
    control = shrinking.control
    rows = control.allgather_object([is_settled, shrinking.is_unsaved])
    is_late, is_unsaved = not all(settled for settled, _ in rows), any(unsaved for _, unsaved in rows)
    workers, was_sharded = gather_fault_tolerant(control), run.functions.rule.sharding is not None
    shrinking.renew(workers)
    scaled_for = run.plan.scaled_for
    stored = run_directory.StoredSettings(scaled_for, scaled_for, run.plan.clock.effective_batch, {})
    experiment = run_directory.keep_batch_and_groups(run.experiment, stored, workers.size)
    plan = make_plan(experiment, workers, scaled_for, before=run.plan)
    plan = dataclasses.replace(plan, requested=run.plan.requested)
    ends.enter_context(watch(plan))
    functions, before = build_functions(plan), run.memory
    assert before is not None
    # Of as many examples at a time; state is larger if updates are sharded.
    needed = memory.estimate_memory(plan, functions.rule, is_fused=functions.is_fused)
    needed = dataclasses.replace(needed, activations=before.activations, batch=before.batch)
    hosts, peak = control.allgather_object(socket.gethostname()), total_peak(workers, experiment.compute_dtype)
    run = dataclasses.replace(run, plan=plan, functions=functions, memory=needed, hosts=hosts, peak=peak)
    run.is_measured = True
    give_back_freed_memory()
    back = ""
    if was_sharded:
        states, step = restore_newest(run, shrinking.describe_gone())
        sums, is_late, is_unsaved = np.zeros_like(sums), False, False
        back = f", with its shard of the optimizer's state: back to step {step}"
    else:
        worker = workers.mine[0]
        states = {worker: jax.tree.map(np.asarray, state._replace(key=worker_key(experiment.seed, worker)))}
    if control.rank == 0:
        if shrinking.recorder is None:  # this rank is now rank 0, which has the record and the run directory
            with run_directory.as_training_errors():
                run.home.lock = ends.enter_context(held_folder.locked(run.folder)).lock
                shrinking.recorder = open_recorder(plan, run.folder, run.recorder.elapsed_s(), hosts)
            ends.push(shrinking.recorder)
        run.recorder = shrinking.recorder
        run.recorder.go_back(step - is_late)
    run.recorder.write("lost", after=step, ranks=shrinking.lost_ranks, workers=workers.size)
    run.recorder.say(
        f"{shrinking.describe_gone()}{back}; {workers.size} go on after step {step}\n{plan.headline}\n{functions.form}"
    )
    run.recorder.say(memory.describe_worker(needed, workers.size))
    shrinking.lost_ranks, shrinking.is_unsaved = [], is_unsaved
    overdue = plan.timetable.between(step - 1, step) if is_late else DueEvents()
    overdue = overdue._replace(save=overdue.save or is_unsaved)
    return LockStep(run, sums), Position(step, place_states(run, states), overdue)


def watch(plan: Plan) -> contextlib.AbstractContextManager[str]:
    """The watchdog of these workers.

    Asynchronous runs have none: a rank that only serves makes no steps, and server 0 knows who is late.
    """
    experiment, workers = plan.experiment, plan.workers
    if workers.asynchronous:
        return contextlib.nullcontext("")
    is_fault_tolerant = experiment.on_rank_loss == "shrink"
    return watching(workers.processes, experiment.stall_timeout_s, experiment.on_stall, is_fault_tolerant)
