"""The training loop: a step, what is due after it, and the ways it ends."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.control import Processes
from jaxmpi.comm.topology import gather_mortal, put, to_device
from jaxmpi.core import train_state
from jaxmpi.core.errors import AgreedError
from jaxmpi.core.train_state import TrainState, worker_key
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import ComputeOnlyProbe, StepTimer
from jaxmpi.recover import decisions
from jaxmpi.runtime import failures, fault_injection
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.build import build_functions, make_plan
from jaxmpi.trainer.evaluate import distance, evaluate
from jaxmpi.trainer.progress import SUMS, open_recorder
from jaxmpi.trainer.resume import note_saved, save, skipped_of, starting_states
from jaxmpi.trainer.run import Run, assembled, watch


class Position(NamedTuple):
    """Where the loop begins."""

    step: int
    state: TrainState  # after it
    sums: np.ndarray  # f64[SUMS], since the last progress line
    late: "DueEvents | None" = None  # what was due after the step, and is not done


def run_to_end(run: Run, states: dict[int, TrainState], start: int, late: "DueEvents | None") -> dict[str, float]:
    """The loop, again from the newest checkpoint as often as `recover` has it go back, or without ranks that died.

    Args:
        late: is to be done before the first step.
    """

    def at_start() -> tuple[Run, Position]:
        return run, Position(start, put(states, run.workers), np.zeros(SUMS), late)

    begin: Callable[[], tuple[Run, Position]] = at_start
    with contextlib.ExitStack() as ends:
        ends.callback(run.profiler.close)
        ends.callback(run.recorder.close)
        while True:
            try:
                run, at = begin()
                return loop(run, at)
            except decisions.RollBack as back:
                begin = partial(rolled_back, run, back)
            except Exception as error:
                if run.pact is None:
                    raise
                run.pact.after(error, run.saver)
                begin = partial(gone_on, run, ends)


def rolled_back(run: Run, back: decisions.RollBack) -> tuple[Run, Position]:
    """From the newest checkpoint; the record is cut there.

    Raises:
        TrainingError: the run directory is another's, or its checkpoints or its record are gone.
    """
    run.guard.votes.count()  # on a step that counts no more
    if fate := run.saver.fate():
        raise AgreedError(f"{back}, and the run directory {str(run.folder)!r} {fate}: nothing to go back to")
    if run.workers.processes.rank == 0:
        with run_directory.still_usable():
            run_directory.refuse_lost(run.folder)
    experiment = dataclasses.replace(run.experiment, resume=True)
    states, saved = starting_states(experiment, run.workers, run.functions.rule, run.folder, run.plan)
    start = saved.step if saved else 0
    run.plan.feed.skipped = skipped_of(saved, run.workers)
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    return run, Position(start, put(states, run.workers), np.zeros(SUMS))


def gone_on(run: Run, ends: contextlib.ExitStack) -> tuple[Run, Position]:
    """The run of those that are left, from the state that they hold."""
    pact = run.pact
    assert pact is not None
    assert pact.held is not None
    step, state, sums, is_settled = pact.held
    failures.doing(f"going on without others after step {step}", failures.LONG)
    control = pact.control
    told = [json.loads(text) for text in control.gather(json.dumps([is_settled, pact.is_unsaved]))]
    is_late, is_unsaved = not all(settled for settled, _ in told), any(unsaved for _, unsaved in told)
    workers = gather_mortal(control)
    pact.renew(workers)
    ends.enter_context(watch(run.experiment, workers))
    effective_batch, begun = run.plan.clock.effective_batch, run.plan.scaled_for
    experiment = run_directory.as_begun(
        run.experiment, run_directory.Stored(begun, begun, effective_batch, {}), workers.size
    )
    plan = make_plan(experiment, workers, begun, before=run.plan)
    functions = build_functions(experiment, workers, plan)._replace(asked=run.functions.asked)
    worker = workers.mine[0]
    state = state._replace(key=worker_key(experiment.seed, worker))
    recorder = handed_over(run, control, step - is_late, ends)
    states = {worker: jax.tree.map(np.asarray, state)}
    parts = (states, run.notice, run.guard.recovery, run.profiler, pact)
    run = assembled(run.saver.home, experiment, workers, plan, functions, recorder, *parts)
    recorder.write("lost", after=step, ranks=pact.gone, workers=workers.size)
    recorder.say(f"{pact.told()}; {workers.size} go on after step {step}\n{plan.headline}\n{functions.form}")
    pact.gone, pact.is_unsaved = [], False
    late = due(run, step, is_first=False, leaving=False) if is_late else DueEvents()
    late = late._replace(save=late.save or is_unsaved)
    return run, Position(step, put(states, workers), sums, late if any(late) else None)


def handed_over(run: Run, control: Processes, step: int, ends: contextlib.ExitStack) -> Recorder:
    """The recorder of a rank among those that are left; what is to be done again after `step` is dropped.

    Whoever is rank 0 now has the record and the run directory.

    Raises:
        TrainingError: the run directory cannot be locked, or its record not be opened.
    """
    if control.rank != 0:
        return run.recorder
    pact = run.pact
    assert pact is not None
    if pact.recorder is None:
        hosts = [socket.gethostname()] * control.size
        each = (run.recorder.elapsed_s(), hosts, run.plan.feed.bytes_each)
        with run_directory.still_usable():
            run_directory.lock(run.saver.home, ends)
            pact.recorder = open_recorder(run.experiment, run.folder, *each)
        ends.callback(pact.recorder.close)
    pact.recorder.go_back(step)
    return pact.recorder


class DueEvents(NamedTuple):
    """What is to be done after a step."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    compare: bool = False
    leave: bool = False


def due(run: Run, k: int, is_first: bool, leaving: bool) -> DueEvents:
    """After step k."""
    plan, is_last = run.plan, k == run.plan.clock.total_steps
    save = k % plan.save_every == 0 or is_last or leaving
    return DueEvents(
        is_first or k % run.experiment.log_every == 0 or is_last,
        k % plan.eval_every == 0 or is_last,
        save,
        k % plan.compare_every == 0 or save,
        leaving,
    )


def loop(run: Run, begin: Position) -> dict[str, float]:
    """Steps begin.step + 1 to the last; progress, evaluations and checkpoints when they are due."""
    plan, pact, start, last = run.plan, run.pact, begin.step, run.plan.clock.total_steps
    state, sums, result = begin.state, begin.sums, {}  # sums: since the last progress line
    if pact:
        pact.keep(start, state, sums, is_settled=begin.late is None)
    run.guard.compare(state, start)  # as it came to the devices; what must be compiled for it is so from now on
    run.recorder.start_window(plan.examples(start))
    pending: list[tuple[int, steps.Metrics | None]] = []  # dispatched, not yet looked at
    anatomy = StepTimer(run.workers.size, to_device(run.workers))
    if begin.late:
        result = after_step(run, start, state, sums, begin.late, anatomy) or result
        sums = np.zeros(SUMS) if begin.late.log else sums
    lone = ComputeOnlyProbe(
        run.functions.lone if run.functions.exchanges else None,
        start,
        run.experiment.lone_every,
        run.experiment.log_every,
    )
    with contextlib.closing(plan.feed.batches(start, last)) as batches:
        for k, batch in enumerate(anatomy.batches(batches, start + 1), start + 1):
            failures.doing(f"step {k}", failures.LONG if k == start + 1 else 1.0)
            run.saver.poll()
            note_saved(run)
            now = due(run, k, k == start + 1, run.guard.votes.leaving)
            state, batch = fault_injection.reach("step", k, (state, batch))
            run.profiler.before(k)
            compiling = run.recorder.saying("compiling the first step") if k == start + 1 else contextlib.nullcontext()
            with compiling:
                state, metrics = update(run, k, state, batch)
            run.profiler.after(k, state)
            anatomy.started(next(iter(jax.tree.leaves(state.params)), state.step), compiled=k == start + 1)
            if pact:
                pact.keep(k, state, sums)
            pending.append((k, metrics))
            # One step late, so that the device never waits for the log.
            while len(pending) > (0 if now.log or now.save or now.compare or pact else 1):
                with none_under_way(state):
                    sums = sums + looked_at(run, *pending.pop(0))
            seen = after_step(run, k, state, sums, now, anatomy, partial(lone.now, batch=batch))
            result = seen or result
            sums = np.zeros(SUMS) if now.log else sums
            if k == start + 1:
                anatomy.restart()  # ranks are through with compiling at different times
            if pact:
                pact.settle(sums)
    run.saver.wait()
    note_saved(run)
    if pact:
        pact.vote()
        if pact.control.size < pact.began:
            run.recorder.say(f"finished with {pact.control.size} of {pact.began} workers")
    return result


def after_step(
    run: Run,
    k: int,
    state: TrainState,
    sums: np.ndarray,
    now: DueEvents,
    anatomy: StepTimer,
    look: Callable[[StepTimer, int, str, TrainState], None] | None = None,
) -> dict[str, float] | None:
    """What is due after step k; the evaluation, where there is one.

    Args:
        look: what looks at the time of exchanges after a progress line.
    """
    result = None
    if now.log or now.evaluate or now.compare:
        jax.block_until_ready(state)  # the control plane speaks only when the exchange is silent
        anatomy.pause()
        run.guard.settle()
    if now.compare:
        run.guard.compare(state, k)
    if now.log:
        seen = run.log.line(k, sums, anatomy.window(), distance(run, state))
        if look:
            look(anatomy, k, seen.source, state)
    if now.evaluate:
        result = evaluate(run, state, k)
    if now.save:
        save(run, state, k, result.get("eval_loss") if result else None)
    if now.leave:
        leave(run, k)
    if now.evaluate or now.save:
        run.recorder.start_window(run.plan.examples(k))
        anatomy.restart()
    return result


def update(run: Run, step: int, state: TrainState, batch: train_state.Batch) -> tuple[TrainState, steps.Metrics | None]:
    """One step, or only its number where it failed twice: then there are no metrics."""
    if step in run.guard.recovery.left_out:
        return state._replace(step=state.step + 1), None
    return run.functions.train_step(state, batch)


def looked_at(run: Run, step: int, metrics: steps.Metrics | None) -> np.ndarray:
    """f64[SUMS] of this process's workers, of a step that was made; and this process's vote on it.

    Raises:
        TrainingError, guard.RollBack: what all ranks agree to do about the step before.
    """
    is_made = run.guard.passes(step, metrics)
    return run.log.sums(step, metrics) if is_made and metrics is not None else np.zeros(SUMS)


@contextlib.contextmanager
def none_under_way(state: TrainState) -> Iterator[None]:
    """Wait for the last step before an error that all ranks raise together leaves here.

    The step after the one that failed has been dispatched on all ranks. Whoever catches the error may send messages,
    read a checkpoint or call `train` again at once, beside an exchange that still goes on.
    """
    try:
        yield
    except (AgreedError, decisions.RollBack):
        jax.block_until_ready(state)
        raise


def leave(run: Run, step: int) -> None:
    """End a run that was asked to.

    Raises:
        guard.Preempted: once its checkpoint is on disk.
    """
    run.saver.wait()
    note_saved(run)
    if run.pact:
        run.pact.vote()
    why = "interrupted" if run.notice.is_interrupt else "asked to leave"
    run.recorder.say(f"{why}: saved at step {step}; go on with --resume --run-dir {run.folder}")
    raise decisions.Preempted
