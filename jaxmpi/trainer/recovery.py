"""The loop again: after a rollback, or without ranks that died.

After a death the ranks that are left have agreed on the last step that counts, and each has its whole state
(`recover.shrink`). With sharded updates (ZeRO) the dead rank has taken its shard of the optimizer's state along, so all
go back to the newest checkpoint. Everything that depends on the number of ranks is made anew: plan, compiled functions,
the record's place. Before that the ranks check that they have the memory, since shards are larger then.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.job import Processes
from jaxmpi.comm.topology import gather_fault_tolerant, put
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import TrainState, worker_key
from jaxmpi.observe.flops import total_peak
from jaxmpi.observe.recorder import Recorder
from jaxmpi.recover import decisions
from jaxmpi.runtime import failures
from jaxmpi.runtime.allocator import give_back_freed_memory
from jaxmpi.trainer import memory
from jaxmpi.trainer.build import Functions, build_functions
from jaxmpi.trainer.lock_step import LockStep
from jaxmpi.trainer.loop import Position, run_steps
from jaxmpi.trainer.progress import open_recorder
from jaxmpi.trainer.resume import go_on, starting_states
from jaxmpi.trainer.run import Run, assembled, watch
from jaxmpi.trainer.timetable import DueEvents
from jaxmpi.trainer.training_plan import Job, job_of


def run_to_end(run: Run, states: dict[int, TrainState], start: int, overdue: DueEvents) -> dict[str, float]:
    """Run the loop, again after each rollback, or without ranks that died.

    Args:
        overdue: is to be done before the first step.
    """

    def at_start() -> tuple[LockStep, Position]:
        return LockStep(run), Position(start, placed(run, states), overdue)

    begin: Callable[[], tuple[LockStep, Position]] = at_start
    coordinator: LockStep | None = None
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
                run.profiler.close()  # which its first step would start once more
                begin = partial(rolled_back, run, back)
            except Exception as error:
                run = coordinator.run if coordinator else run  # with what its first step measured
                if run.shrinking is None:
                    raise
                run.shrinking.after(error, run.saver)
                run.profiler.close()
                begin = partial(gone_on, run, ends)


def placed(run: Run, states: dict[int, TrainState]) -> TrainState:
    """This process's workers on its devices; `states` is emptied.

    Params that ranks share go where all read them.
    """
    sharding = run.functions.rule.sharding
    if place := sharding and sharding.zero.shared_params:
        [worker] = run.workers.mine
        params = place.fill(states[worker].params)
        states[worker] = states[worker]._replace(params=())
        state = put(states, run.workers)._replace(params=params)
    else:
        state = put(states, run.workers)
    give_back_freed_memory()
    return state


def rolled_back(run: Run, back: decisions.RollBack) -> tuple[LockStep, Position]:
    """From the newest checkpoint; the record is cut there.

    Raises:
        TrainingError: the run directory is another's, or its checkpoints or its record are gone.
    """
    run.guard.votes.count()  # on a step that counts no more
    run.saver.wait()
    states, start = restore_newest(run, run, run.functions, str(back))
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    run = dataclasses.replace(run, is_measured=True)
    return LockStep(run), Position(start, placed(run, states))


def restore_newest(run: Run, job: Job, functions: Functions, why: str) -> tuple[dict[int, TrainState], int]:
    """States of this process's workers, and the step, of the newest checkpoint; the start's if there is none.

    Args:
        job: that goes on, perhaps with fewer workers than `run` had.
        why: it goes back, for the error.

    Raises:
        TrainingError: the run directory is another's, or its checkpoints or its record are gone.
    """
    control = job.workers.processes
    if fate := next(filter(None, control.allgather_object(run.saver.home.fate())), ""):
        raise AgreedError(f"{why}, and the run directory {str(run.folder)!r} {fate}: nothing to go back to")
    if control.rank == 0:
        with run_directory.still_usable():
            run_directory.refuse_lost(run.folder)
    resumed = job.with_fields(resume=True)
    states, saved = starting_states(resumed, functions.rule, run.folder)
    go_on(resumed, saved, run.at_start)
    return states, saved.step if saved else 0


def gone_on(run: Run, ends: contextlib.ExitStack) -> tuple[LockStep, Position]:
    """The run of the remaining ranks, from the state that they hold, or from a checkpoint if updates are sharded."""
    shrinking = run.shrinking
    assert shrinking is not None
    assert shrinking.held is not None
    step, state, sums, is_settled = shrinking.held
    failures.set_phase(f"going on without others after step {step}", failures.LONG)
    control = shrinking.control
    told = control.allgather_object([is_settled, shrinking.is_unsaved])
    is_late, is_unsaved = not all(settled for settled, _ in told), any(unsaved for _, unsaved in told)
    workers = gather_fault_tolerant(control)
    shrinking.renew(workers)
    ends.enter_context(watch(run.experiment, workers))
    effective_batch, begun = run.plan.clock.effective_batch, run.plan.scaled_for
    experiment = run_directory.as_begun(
        run.experiment, run_directory.StoredSettings(begun, begun, effective_batch, {}), workers.size
    )
    job = job_of(experiment, workers, begun, before=run.plan)
    plan = job.plan
    functions = dataclasses.replace(build_functions(job), asked=run.functions.asked)
    held = memory_of_fewer(run, job, functions)
    worker, back = workers.mine[0], ""
    if run.functions.rule.sharding:  # as it was: one worker alone shards nothing
        states, step = restore_newest(run, job, functions, shrinking.told())
        sums, is_late, is_unsaved = np.zeros_like(sums), False, False
        back = f", with its shard of the optimizer's state: back to step {step}"
    else:
        states = {worker: jax.tree.map(np.asarray, state._replace(key=worker_key(experiment.seed, worker)))}
    recorder = handed_over(run, control, step - is_late, ends)
    run = assembled(
        job,
        home=run.saver.home,
        functions=functions,
        recorder=recorder,
        states=states,
        notice=run.notice,
        recovery=run.guard.recovery,
        profiler=run.profiler,
        shrinking=shrinking,
        peak=total_peak(workers, experiment.compute_dtype),
        at_start=run.at_start,
        held=held,
        is_measured=True,  # before there was a state
    )
    recorder.write("lost", after=step, ranks=shrinking.gone, workers=workers.size)
    recorder.say(f"{shrinking.told()}{back}; {workers.size} go on after step {step}\n{plan.headline}\n{functions.form}")
    recorder.say(memory.describe_worker(held, workers.size))
    shrinking.gone, shrinking.is_unsaved = [], is_unsaved
    overdue = plan.timetable.between(step - 1, step) if is_late else DueEvents()
    overdue = overdue._replace(save=overdue.save or is_unsaved)
    return LockStep(run, sums), Position(step, placed(run, states), overdue)


def memory_of_fewer(run: Run, job: Job, functions: Functions) -> memory.WorkerMemory:
    """The memory of each remaining rank, larger if updates are sharded.

    Raises:
        AgreedError: one host has no room for it: bytes needed and free. The run's checkpoints are whole.
    """
    held, workers = memory.estimate_memory(job, functions.rule, is_fused=functions.ahead.is_whole), job.workers
    give_back_freed_memory()
    workers.processes.barrier()  # all have given theirs back
    here, before = memory.workers_here(workers), run.held  # the state of now is free once the new one is made of it
    if before and before.is_fused == held.is_fused:  # as many examples at a time
        held = dataclasses.replace(held, activations=before.activations, batch=before.batch)
    mine = memory.allocated(before, here) if before else 0
    short = ""
    try:
        memory.make_room(held, job, available_bytes() + mine)
    except UsageError as error:
        short = str(error)
    if told := next(filter(None, workers.processes.allgather_object(short)), ""):
        raise AgreedError(f"{told}; resume from the newest checkpoint in {str(run.folder)!r}")
    return held


def handed_over(run: Run, control: Processes, step: int, ends: contextlib.ExitStack) -> Recorder:
    """The recorder of a remaining rank; entries after `step` are dropped.

    Whoever is rank 0 now has the record and the run directory.

    Raises:
        TrainingError: the run directory cannot be locked, or its record not be opened.
    """
    if control.rank != 0:
        return run.recorder
    shrinking = run.shrinking
    assert shrinking is not None
    if shrinking.recorder is None:
        hosts = [socket.gethostname()] * control.size
        with run_directory.still_usable():
            run_directory.lock(run.saver.home, ends)
            shrinking.recorder = open_recorder(
                run.experiment, run.folder, run.recorder.elapsed_s(), hosts, run.plan.feed
            )
        ends.push(shrinking.recorder)
    shrinking.recorder.go_back(step)
    return shrinking.recorder
