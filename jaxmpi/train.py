"""The spine: from an experiment to a trained model, top to bottom, once.

    python -m jaxmpi.train EXPERIMENT.py [--field value ...]              one worker
    mpirun -n 8 python -m jaxmpi.train EXPERIMENT.py [--field value ...]  eight

"Step k" is the state after k updates. Blocks that only rank 0 runs say so; all others run on all ranks.
"""

import contextlib
import dataclasses
import itertools
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jaxmpi import asynchronous, checkpoint, faults, guard, rules, rundir, runtime, survive
from jaxmpi import experiment as experiments
from jaxmpi import step as steps
from jaxmpi.anatomy import Anatomy, LoneSteps
from jaxmpi.config import AgreedError, Experiment, step_range
from jaxmpi.log import SUMS, Log, open_recorder
from jaxmpi.modelcheck import check_model
from jaxmpi.noise import Noise
from jaxmpi.parts import Functions, Plan, build_functions, initial_states, make_plan, settle_exchange
from jaxmpi.plain import HeldFolder
from jaxmpi.processes import MpiProcesses, Processes, SoloProcesses, named_leaves, processes
from jaxmpi.recorder import FORMAT, Recorder, cut_record, write_whole
from jaxmpi.rules import Rule
from jaxmpi.saver import Saver, continued, extra_of, identity, open_saver, restored, warn
from jaxmpi.state import TrainState, worker_key
from jaxmpi.trace import Profiler, Tracer
from jaxmpi.watchdog import watching
from jaxmpi.workers import Workers, gather_apart, gather_mortal, gather_workers, put, rows, take, to_device


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.train EXPERIMENT.py [--field value ...]`."""
    runtime.open_streams()
    runtime.install_excepthooks()
    runtime.prepare()  # before the experiment file, which may touch the device
    experiment, path = experiments.parse(list(sys.argv[1:] if argv is None else argv))
    runtime.make_cpu_devices(experiment.devices)
    control = processes()
    with runtime.at_work():
        code = 0
        try:
            train(experiment, path.stem, experiments.project_root(path), digest=experiments.file_digest(path))
        except guard.Preempted as preempted:
            code = preempted.code
        runtime.let_end()
        if not code:
            runtime.mark(runtime.FINISHED)
        control.leave(code)
    if code:
        sys.exit(code)


# ---------------------------------------------------------------- the run


def train(experiment: Experiment, name: str, root: Path | None = None, digest: str = "") -> dict[str, float]:
    """Train, evaluate, record, checkpoint. All ranks call it.

    Args:
        experiment: what to run.
        name: of the run directory where the experiment names none.
        root: the project's folder, whose commit is recorded.
        digest: of the experiment file, compared over ranks.

    Returns: the last evaluation: eval_loss, eval_top1, eval_top5, eval_count; empty where no step was left to do.

    Raises:
        UsageError: the experiment cannot run as asked, or ranks differ.
        TrainingError: a loss or gradient is not finite, workers' params differ, too much data is skipped, or a
            checkpoint cannot be written.
        guard.Preempted: a signal asked to leave, and the run has been saved.
    """
    runtime.doing("start", runtime.LONG)
    notice = guard.Notice()
    try:
        return train_until(notice, experiment, name, root, digest)
    except guard.Preempted as left:
        raise guard.Interrupted if notice.is_interrupt else left from None
    finally:
        notice.close()


def train_until(
    notice: guard.Notice, experiment: Experiment, name: str, root: Path | None, digest: str
) -> dict[str, float]:
    """`train`, until it is noticed that it is to leave."""
    is_apart = rules.is_asynchronous(experiment.rule)
    workers = gather_all(experiment)
    ranks = workers.processes.size if is_apart else workers.size
    rules.check_ranks(experiment.rule, ranks, experiment.optim.name)
    if is_apart:
        asynchronous.check_apart(experiment)
    rundir.agree_on(experiment, workers.processes, digest)
    rules.check_recover(experiment.rule, experiment.recover, experiment.exchange.overlap)
    if workers.processes.rank == 0:  # a model that does not fit ends the job here, with one message
        check_model(experiment.model, experiment.loss, experiment.compute_dtype)
    kept = stored_by_first(experiment, name, workers)
    if experiment.continue_from and kept is None and workers.processes.rank == 0:
        with rundir.usable():
            rundir.check_source(experiment, rules.is_asynchronous(experiment.rule))
    experiment = rundir.as_begun(experiment, kept, workers.size)
    begun = kept.scaled_for if kept else workers.size
    plan = make_plan(experiment, workers, begun)
    experiment = dataclasses.replace(experiment, model=plan.feed.model)
    # Without a common step a fast worker may make the steps of others, too.
    last_step = plan.clock.total_steps * (workers.size if is_apart else 1)
    for text in experiment.inject:
        faults.parse(text, max(begun, workers.size), last_step)
    asked = experiment.exchange.strategy
    experiment, why = settle_exchange(experiment, plan, workers, kept)
    functions = build_functions(experiment, workers, plan)._replace(asked=asked)
    rules.check_wire(experiment.rule, functions.strategy)
    with (
        watch(experiment, workers) as unwatched,
        rundir.agreed_run_dir(experiment, name, workers.processes) as home,
        plan.feed.kept(guard.Preempted),
        plan.feed.crew,
        plan.validation.crew,  # that one, or one of its own
    ):
        experiment = dataclasses.replace(experiment, from_start=False)  # it has begun: a rollback resumes it
        functions = functions._replace(why="\n".join(filter(None, (why, unwatched))))
        faults.order(experiment.inject, max(begun, workers.size), workers.mine, home.path)
        result = run_in(home, experiment, workers, plan, functions, root, notice)
        for text in faults.missed():
            warn(f"{runtime.who()}: --inject {text} has not happened: this rank came to no such place")
        return result


def gather_all(experiment: Experiment) -> Workers:
    """The workers of the job, in the way that the experiment asks for."""
    control = processes()
    control.same("what becomes of workers where one dies", {"ft": experiment.ft})
    if experiment.ft == "shrink":
        survive.check_fits(experiment)
    if experiment.ft == "shrink" and isinstance(control, MpiProcesses):
        survive.check_mpi(control)
        control.outlive()
        return gather_mortal(control)
    if rules.is_asynchronous(experiment.rule):
        return gather_apart(experiment.rule.servers, experiment.comm, experiment.devices)
    return gather_workers(experiment.devices, experiment.comm)


def watch(experiment: Experiment, workers: Workers) -> contextlib.AbstractContextManager[str]:
    """The watchdog of these workers.

    A rank that only serves gets no further, and one that dies is no reason to end: the books tell who is late.
    """
    if workers.apart:
        return contextlib.nullcontext("")
    is_mortal = experiment.ft == "shrink"
    return watching(workers.processes, experiment.stall_s, experiment.on_stall, is_mortal)


def stored_by_first(experiment: Experiment, name: str, workers: Workers) -> rundir.Stored | None:
    """What rank 0 reads of the run that is resumed."""
    with rundir.usable():
        text = json.dumps(rundir.stored(experiment, name)) if workers.processes.rank == 0 else ""
    row = json.loads(workers.processes.gather(text)[0])
    return rundir.Stored(*row) if row else None


def run_in(
    home: HeldFolder,
    experiment: Experiment,
    workers: Workers,
    plan: Plan,
    functions: Functions,
    root: Path | None,
    notice: guard.Notice,
) -> dict[str, float]:
    """Start or resume in a run directory, and go on to the end."""
    is_first, folder = workers.processes.rank == 0, home.path
    states, saved = starting_states(experiment, workers, functions.rule, folder, plan)
    start = saved.step if saved else 0
    there = saved.step_there if isinstance(saved, checkpoint.Saved) else None  # the step in a run that is continued
    if experiment.resume and is_first:
        cut_record(folder / "record.jsonl", start if there is None else -1)
    hosts = workers.processes.gather(socket.gethostname())
    elapsed_s = saved.extra.get("elapsed_s", 0.0) if saved else 0.0
    plan.feed.skipped = skipped_of(saved, workers)
    bytes_each = plan.feed.bytes_each
    each = (elapsed_s, hosts, bytes_each)
    recorder = open_recorder(experiment, folder, *each) if is_first else Recorder(None, elapsed_s)
    if is_first:
        facts = rundir.facts_of(experiment, workers, functions.strategy, functions.form, root) | {
            "asked": functions.asked,
            "format": FORMAT,
        }
        write_whole(folder / "config.json", (json.dumps(facts, indent=2) + "\n").encode())
        recorder.write("run", **facts)
    place = f"resumed at step {start}" if start and there is None else "no checkpoint in it: from the start"
    recorder.say(f"run directory {folder}" + f", {place}" * experiment.resume)
    how = f"strategy {functions.strategy}"
    if functions.rule.asynchronous:  # no strategy is run: of the one that was asked for the wire alone counts
        how = f"wire {functions.strategy.partition(':')[2]}"
    recorder.say(f"{plan.headline}; rule {experiment.rule.name}, {how}\n{functions.form}")
    if isinstance(saved, checkpoint.Saved) and there is not None:
        say_continued(recorder, experiment, saved, plan)
    if saved and start:
        say_changes(recorder, saved.extra, experiment, plan, start)
    if idle := rules.without_effect(experiment.rule):
        recorder.say(f"without effect in rule {experiment.rule.name}: {', '.join(f'rule.{name}' for name in idle)}")
    if functions.why:
        recorder.say(functions.why)
    if start >= plan.clock.total_steps:
        recorder.say(f"nothing left to do: train_for ends at step {plan.clock.total_steps}")
    recovery = guard.Recovery(experiment.recover, experiment.recover_limit)
    pact = survive.pact(experiment, workers, recorder if is_first else None)
    of_rank = f"rank_{workers.processes.rank:05d}"  # JAX names files by host: ranks of one would overwrite them
    profiler = Profiler(step_range(experiment.profile, "profile"), folder / "profile" / of_rank)
    run = assembled(home, experiment, workers, plan, functions, recorder, states, notice, recovery, profiler, pact)
    if isinstance(saved, asynchronous.Start):
        with contextlib.closing(recorder):
            return asynchronous.run(apart(run, saved, notice, hosts)) if start < plan.clock.total_steps else {}
    return run_to_end(run, states, start, Due(save=True) if there is not None else None)


def assembled(
    home: HeldFolder,
    experiment: Experiment,
    workers: Workers,
    plan: Plan,
    functions: Functions,
    recorder: Recorder,
    states: dict[int, TrainState],
    notice: guard.Notice,
    recovery: guard.Recovery,
    profiler: Profiler,
    pact: survive.Pact | None,
) -> "Run":
    """All that the loop needs, for these workers; all ranks come here together."""
    control = workers.processes
    hosts = control.gather(socket.gethostname())
    saver = open_saver(experiment, workers, functions, home, states)
    leaves = [path for path, _ in named_leaves(next(iter(states.values())).params)]
    votes = guard.Votes(control, notice, leaves)
    tracer = Tracer(step_range(experiment.trace, "trace"), control, hosts, home.path / "trace.json")
    noise = Noise(workers.size, plan.clock.effective_batch // workers.size) if functions.rule.measured else None
    return Run(
        *(experiment, workers, plan, functions, recorder, home.path, saver, notice),
        guard.Guard(votes, recovery, workers, functions, saver, recorder),
        Log(plan, workers, recorder, tracer, noise, experiment.data.max_skipped),
        profiler,
        pact,
    )


def apart(run: "Run", start: asynchronous.Start, notice: guard.Notice, hosts: Sequence[str]) -> asynchronous.Job:
    """The run of workers that do not wait for each other, as this rank has it."""
    plan, feed, functions = run.plan, run.plan.feed, run.functions
    solo = run.workers._replace(processes=SoloProcesses())  # votes and evaluations are this rank's
    leaves = [path for path, _ in named_leaves(start.state.params)]
    votes = guard.Votes(solo.processes, notice, leaves)
    told = run.recorder if run.workers.processes.rank == 0 else Aside(None)
    judge = dataclasses.replace(run.guard, votes=votes, workers=solo, recorder=told)
    by_itself = run._replace(workers=solo)

    def sums(step: int, metrics: steps.Metrics) -> np.ndarray:
        is_made = judge.passes(step, metrics)
        judge.settle()  # before anything that is not finite can reach the center
        return run.log.sums(step, metrics) if is_made else np.zeros(SUMS)

    duties = asynchronous.Duties(
        functions.train_step,
        sums,
        feed.batches,
        lambda: (feed.skipped, feed.wait_s),
        lambda: notice.given,
        lambda state: rehearse(by_itself, state),
        lambda state, step: evaluate(by_itself, state, step),
        lambda step: np.asarray(plan.lr(max(step - 1, 0))).item(),
        lambda: extra_of(run.experiment, plan, functions, run.recorder.elapsed_s()),
        lambda skipped, epochs: guard.check_budget(skipped, len(feed.source), epochs, run.experiment.data.max_skipped),
    )
    course = asynchronous.Course(
        plan.clock.effective_batch,
        len(feed.source),
        plan.clock.steps_per_epoch,
        plan.clock.total_steps,
        plan.examples(plan.clock.total_steps),
        run.experiment.log_every,
        plan.eval_every,
        plan.save_every,
    )
    keep = checkpoint.Kept(run.experiment.keep_checkpoints, run.experiment.keep_best)
    home = checkpoint.Apart(run.folder / "checkpoints", run.workers.size, keep)
    run.recorder.start_window(int(start.tally.examples))
    wire = functions.strategy.partition(":")[2]
    lookout = asynchronous.Lookout(run.experiment.stall_s, run.experiment.on_stall, hosts)
    return asynchronous.Job(
        *(run.experiment.rule, functions.rule, run.workers, wire, course, start, duties, run.recorder, home),
        *(run.saver.home, step_range(run.experiment.trace, "trace"), run.profiler, lookout),
    )


class Aside(Recorder):
    """Of a rank that keeps no record: what it alone can say goes to standard error."""

    def say(self, text: str) -> None:
        """A line that names the rank."""
        warn(f"{runtime.who()}: {text}")


class Run(NamedTuple):
    """All that the loop needs beside the state."""

    experiment: Experiment
    workers: Workers
    plan: Plan
    functions: Functions
    recorder: Recorder
    folder: Path
    saver: Saver
    notice: guard.Notice
    guard: guard.Guard
    log: Log
    profiler: Profiler
    pact: survive.Pact | None  # between ranks that go on without each other


class Begin(NamedTuple):
    """Where the loop begins."""

    step: int
    state: TrainState  # after it
    sums: np.ndarray  # f64[SUMS], since the last progress line
    late: "Due | None" = None  # what was due after the step, and is not done


def run_to_end(run: Run, states: dict[int, TrainState], start: int, late: "Due | None") -> dict[str, float]:
    """The loop, again from the newest checkpoint as often as `recover` has it go back, or without ranks that died.

    Args:
        late: is to be done before the first step.
    """
    begin: Callable[[], tuple[Run, Begin]] = lambda: (run, Begin(start, put(states, run.workers), np.zeros(SUMS), late))  # noqa: E731
    with contextlib.ExitStack() as ends:
        ends.callback(run.profiler.close)
        ends.callback(run.recorder.close)
        while True:
            try:
                run, at = begin()
                return loop(run, at)
            except guard.RollBack as back:
                begin = partial(rolled_back, run, back)
            except Exception as error:
                if run.pact is None:
                    raise
                run.pact.after(error, run.saver)
                begin = partial(gone_on, run, ends)


def rolled_back(run: Run, back: guard.RollBack) -> tuple[Run, Begin]:
    """From the newest checkpoint; the record is cut there.

    Raises:
        TrainingError: the run directory is another's, or its checkpoints or its record are gone.
    """
    run.guard.votes.count()  # on a step that counts no more
    if fate := run.saver.fate():
        raise AgreedError(f"{back}, and the run directory {str(run.folder)!r} {fate}: nothing to go back to")
    if run.workers.processes.rank == 0:
        with rundir.still_usable():
            rundir.refuse_lost(run.folder)
    experiment = dataclasses.replace(run.experiment, resume=True)
    states, saved = starting_states(experiment, run.workers, run.functions.rule, run.folder, run.plan)
    start = saved.step if saved else 0
    run.plan.feed.skipped = skipped_of(saved, run.workers)
    run.recorder.go_back(start)
    run.recorder.write("rollback", step=start, failed=back.step, why=str(back))
    run.recorder.say(f"{back}: back to step {start}")
    return run, Begin(start, put(states, run.workers), np.zeros(SUMS))


def gone_on(run: Run, ends: contextlib.ExitStack) -> tuple[Run, Begin]:
    """The run of those that are left, from the state that they hold."""
    pact = run.pact
    assert pact is not None
    assert pact.held is not None
    step, state, sums, is_settled = pact.held
    runtime.doing(f"going on without others after step {step}", runtime.LONG)
    control = pact.control
    told = [json.loads(text) for text in control.gather(json.dumps([is_settled, pact.is_unsaved]))]
    is_late, is_unsaved = not all(settled for settled, _ in told), any(unsaved for _, unsaved in told)
    workers = gather_mortal(control)
    pact.renew(workers)
    ends.enter_context(watch(run.experiment, workers))
    effective_batch, begun = run.plan.clock.effective_batch, run.plan.scaled_for
    experiment = rundir.as_begun(run.experiment, rundir.Stored(begun, begun, effective_batch, {}), workers.size)
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
    late = due(run, step, is_first=False, leaving=False) if is_late else Due()
    late = late._replace(save=late.save or is_unsaved)
    return run, Begin(step, put(states, workers), sums, late if any(late) else None)


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
        with rundir.still_usable():
            rundir.lock(run.saver.home, ends)
            pact.recorder = open_recorder(run.experiment, run.folder, *each)
        ends.callback(pact.recorder.close)
    pact.recorder.go_back(step)
    return pact.recorder


class Due(NamedTuple):
    """What is to be done after a step."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    compare: bool = False
    leave: bool = False


def due(run: Run, k: int, is_first: bool, leaving: bool) -> Due:
    """After step k."""
    plan, is_last = run.plan, k == run.plan.clock.total_steps
    save = k % plan.save_every == 0 or is_last or leaving
    return Due(
        is_first or k % run.experiment.log_every == 0 or is_last,
        k % plan.eval_every == 0 or is_last,
        save,
        k % plan.compare_every == 0 or save,
        leaving,
    )


def loop(run: Run, begin: Begin) -> dict[str, float]:
    """Steps begin.step + 1 to the last; progress, evaluations and checkpoints when they are due."""
    plan, pact, start, last = run.plan, run.pact, begin.step, run.plan.clock.total_steps
    state, sums, result = begin.state, begin.sums, {}  # sums: since the last progress line
    if pact:
        pact.keep(start, state, sums, is_settled=begin.late is None)
    run.guard.compare(state, start)  # as it came to the devices; what must be compiled for it is so from now on
    run.recorder.start_window(plan.examples(start))
    pending: list[tuple[int, steps.Metrics | None]] = []  # dispatched, not yet looked at
    anatomy = Anatomy(run.workers.size, to_device(run.workers))
    if begin.late:
        result = after_step(run, start, state, sums, begin.late, anatomy) or result
        sums = np.zeros(SUMS) if begin.late.log else sums
    lone = LoneSteps(
        run.functions.lone if run.functions.exchanges else None,
        start,
        run.experiment.lone_every,
        run.experiment.log_every,
    )
    with contextlib.closing(plan.feed.batches(start, last)) as batches:
        for k, batch in enumerate(anatomy.batches(batches, start + 1), start + 1):
            runtime.doing(f"step {k}", runtime.LONG if k == start + 1 else 1.0)
            run.saver.poll()
            note_saved(run)
            now = due(run, k, k == start + 1, run.guard.votes.leaving)
            state, batch = faults.reach("step", k, (state, batch))
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
    now: Due,
    anatomy: Anatomy,
    look: Callable[[Anatomy, int, str, TrainState], None] | None = None,
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


def update(run: Run, step: int, state: TrainState, batch: steps.Batch) -> tuple[TrainState, steps.Metrics | None]:
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
    except (AgreedError, guard.RollBack):
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
    raise guard.Preempted


def distance(run: Run, state: TrainState) -> float | None:
    """L2 of this process's workers from the mean or center that they met last, summed; None where no rule keeps it."""
    of = run.functions.rule.distance
    return rows(of(state.rule_state), run.workers).sum().item() if of else None


def evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """Every validation example once, over all workers; model state as `batch_statistics` says, params as the rule."""
    runtime.doing(f"evaluation after step {step}", runtime.LONG)
    model_state = run.functions.mean_state(state.model_state)
    params = run.functions.eval_params(state.params, state.rule_state)
    sums = np.zeros(len(steps.EvalMetrics._fields))
    for batch in run.plan.validation.batches():
        runtime.doing(f"evaluation after step {step}", runtime.LONG)  # another batch, so it gets on
        faults.reach("eval", step)
        metrics = run.functions.eval_step(params, model_state, batch)
        sums += np.array([rows(value, run.workers).sum(dtype=np.float64) for value in metrics])
    loss, top1, top5, count = run.workers.processes.sum(sums).tolist()
    means: dict[str, Any] = {"eval_count": int(count)}
    if count:
        means |= {"eval_loss": loss / count, "eval_top1": top1 / count, "eval_top5": top5 / count}
    run.recorder.evaluation(step=step, epoch=run.plan.epoch(step), examples=run.plan.examples(step), **means)
    return means


def rehearse(run: Run, state: TrainState) -> None:
    """Evaluate one batch, so that all is compiled that an evaluation takes."""
    model_state = run.functions.mean_state(state.model_state)
    with contextlib.closing(run.plan.validation.batches()) as batches:
        for batch in itertools.islice(batches, 1):
            jax.block_until_ready(run.functions.eval_step(state.params, model_state, batch))


# ---------------------------------------------------------------- state in and out


def starting_states(
    experiment: Experiment, workers: Workers, rule: Rule, folder: Path, plan: Plan
) -> tuple[dict[int, TrainState], checkpoint.Saved | asynchronous.Start | None]:
    """State 0, or that of the newest checkpoint where the run is resumed; workers apart have a start each.

    A run that continues another begins with that one's newest checkpoint, until it has one of its own.
    """
    states, now = initial_states(experiment, workers, rule), identity(experiment, plan)
    if experiment.resume and workers.processes.rank == 0:
        for path in rundir.lost(folder):
            warn(f"passed over: {path}: gone, though the record has it as saved")
    if rule.asynchronous:
        say = warn if workers.processes.rank == 0 else lambda text: None
        state, folder = states[workers.mine[0]], folder / "checkpoints"
        start = asynchronous.starting(folder, state, workers, rule.asynchronous, experiment.resume, say)
        rundir.refuse_other_run(start.extra.get("experiment", {}), now)
        return states, start
    saved = restored(folder, states, workers, rule, now) if experiment.resume else None
    if saved is None and experiment.continue_from:
        saved = continued(Path(experiment.continue_from), states, workers, rule, plan, now)
    return (saved.states if saved else states), saved


def say_continued(recorder: Recorder, experiment: Experiment, saved: checkpoint.Saved, plan: Plan) -> None:
    """Say, and record, which run this one continues, and how its steps are counted anew."""
    was, now, source = (
        saved.extra["experiment"]["effective batch"],
        plan.clock.effective_batch,
        experiment.continue_from,
    )
    recorder.say(
        f"continues {source} after its step {saved.step_there}: effective batch {was} there, {now} here, so from step "
        f"{saved.step}"
    )
    batches = {"effective_batch": {"was": was, "is": now}}
    recorder.write("continued", step=saved.step, **{"from": source}, from_step=saved.step_there, **batches)


def say_changes(recorder: Recorder, extra: dict[str, Any], experiment: Experiment, plan: Plan, start: int) -> None:
    """Say, and record, by which settings and from which learning rate a resumed run departs from its checkpoint.

    A decay that spans the run has another rate at the same step where the run is made longer or shorter.
    """
    found = rundir.changes(extra.get("settings"), rundir.settings(experiment))
    lr, before = np.asarray(plan.lr(start)).item(), extra.get("lr")
    if before not in (None, lr):
        found[f"learning rate of step {start + 1}"] = (before, lr)
    if found:
        shown = lambda value: f"{value:.6g}" if isinstance(value, float) else value  # noqa: E731
        lines = (f"changed since the checkpoint: {k}: was {shown(a)}, is {shown(b)}" for k, (a, b) in found.items())
        recorder.say("\n".join(lines))
        recorder.write("changed", step=start, changes={k: {"was": a, "is": b} for k, (a, b) in found.items()})


def skipped_of(saved: checkpoint.Saved | asynchronous.Start | None, workers: Workers) -> int:
    """Corrupt examples of all workers until a checkpoint, as the first rank's own: they are summed."""
    return saved.extra.get("skipped", 0) if saved and workers.processes.rank == 0 else 0


def save(run: Run, state: TrainState, step: int, score: float | None) -> None:
    """A checkpoint; it is written while the run goes on.

    Raises:
        TrainingError: the one before could not be written, or params or other state were not finite; or the run
            directory is gone, moved or replaced.
    """
    runtime.doing(f"checkpoint of step {step}", runtime.LONG)
    if fate := run.saver.fate():  # once the checkpoint before is written
        end_elsewhere(run, state, step, fate)
    note_saved(run)
    if not run.functions.exchanges:
        return run.recorder.say("strategy none: workers have drifted apart, so nothing is saved")
    run.saver.save(take(state, run.workers), extra_to_save(run, step), score)


def note_saved(run: Run) -> None:
    """A line of the record for a checkpoint that has become whole: if it is lost later, resuming knows."""
    if (step := run.saver.taken()) is not None:
        run.recorder.write("checkpoint", step=step)


def extra_to_save(run: Run, step: int) -> dict[str, Any]:
    """JSON values beside the state in a checkpoint of `step`; all ranks call it."""
    skipped = int(run.workers.processes.sum(np.array([run.plan.feed.skipped], np.float64))[0])
    extra = extra_of(run.experiment, run.plan, run.functions, run.recorder.elapsed_s())
    return extra | {"skipped": skipped, "lr": np.asarray(run.plan.lr(step)).item()}


def end_elsewhere(run: Run, state: TrainState, step: int, fate: str) -> NoReturn:
    """Save the run elsewhere, since its directory is not its own any more, and end it.

    Its directory is not made anew: another job may be given that name, and would resume from this run's params.

    Raises:
        AgreedError: what has become of the directory, and where the run is saved.
    """
    text = f"run directory {str(run.folder)!r} {fate}"
    if not run.functions.exchanges:
        raise AgreedError(f"{text}; strategy none saves nothing")
    place = run.saver.save_elsewhere(take(state, run.workers), extra_to_save(run, step), run.recorder.copy_to)
    raise AgreedError(f"{text}; saved at step {step} in {str(place)!r}: go on with --resume --run-dir {place}")


if __name__ == "__main__":
    main()
