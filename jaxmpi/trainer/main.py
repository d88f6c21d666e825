"""Training of an experiment from start to end, in reading order.

    python -m jaxmpi.train EXPERIMENT.py [--field value ...]              one worker
    mpirun -n 8 python -m jaxmpi.train EXPERIMENT.py [--field value ...]  eight

A mistake should end a run before it has cost much time. So the parts stand in the order in which they can fail. First
come the experiment file, the workers and the model's shapes. Then come the data, the exchange, the step and the run
directory. `run_in` restores or makes the state and opens the record. The loop (`loop.py`) makes the steps, under any
rule. "Step k" is the state after k updates. Blocks that only rank 0 runs say so; all others run
on all ranks.
"""

import contextlib
import dataclasses
import json
import socket
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmpi.allreduce import algorithms
from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.manager import warn
from jaxmpi.checkpoint.restore import Saved
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import Workers, gather_asynchronous, gather_fault_tolerant, gather_workers, transport
from jaxmpi.config import experiment_file
from jaxmpi.config.durations import step_range
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.core.files import HeldFolder, write_whole
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data import SOURCES
from jaxmpi.model.check import check_model
from jaxmpi.observe.flops import total_peak
from jaxmpi.observe.record_format import FORMAT
from jaxmpi.observe.recorder import Recorder, cut_record
from jaxmpi.observe.sinks.registry import SINKS, check_sinks
from jaxmpi.observe.trace import Profiler
from jaxmpi.optim.optimizers import OPTIMIZERS
from jaxmpi.optim.schedules import DECAYS, WARMUPS
from jaxmpi.recover import decisions, shrink, signals
from jaxmpi.rules import registry
from jaxmpi.rules.asynchronous.start import AsyncStart
from jaxmpi.runtime import failures, fault_injection, job_folder, process, progress, provenance
from jaxmpi.tasks.check import check_task, metric_names
from jaxmpi.tasks.registry import find_spec
from jaxmpi.trainer import callbacks, memory
from jaxmpi.trainer.asynchronous import run_asynchronously
from jaxmpi.trainer.build import Functions, build_functions
from jaxmpi.trainer.compatibility import check_compatible, check_step_mode
from jaxmpi.trainer.progress import open_recorder
from jaxmpi.trainer.recovery import run_to_end
from jaxmpi.trainer.resolve_auto import resolve_exchange, resolve_overlap, resolve_shards
from jaxmpi.trainer.resume import go_on, say_changes, starting_states
from jaxmpi.trainer.run import assembled, watch
from jaxmpi.trainer.timetable import DueEvents
from jaxmpi.trainer.training_plan import Job, job_of

# Names that a flag takes, live: an experiment file may have added rows of its own when --help lists them.
TABLES: dict[str, Mapping[str, Any]] = {
    "rule.name": registry.RULES,
    "exchange.strategy": ChainMap(algorithms.STRATEGIES, {"auto": None}),
    "data.source": SOURCES,
    "optim.name": OPTIMIZERS,
    "schedule.decay": DECAYS,
    "sinks": SINKS,
    "schedule.warmup-shape": WARMUPS,
}


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.train EXPERIMENT.py [--field value ...]`."""
    failures.open_streams()
    failures.install_excepthooks()
    process.prepare()  # before the experiment file, which may touch the device
    with progress.phase("running the experiment file"):
        experiment, path = experiment_file.parse(list(sys.argv[1:] if argv is None else argv), TABLES)
    process.take_devices(experiment.devices)
    with progress.phase("starting MPI, which waits for all ranks"):
        control = processes()
    with failures.at_work():
        code = 0
        try:
            train(experiment, path.stem, provenance.project_root(path), digest=provenance.file_digest(path))
        except decisions.Preempted as preempted:
            code = preempted.code
        failures.wait_for_ending_thread()
        if not code:
            job_folder.mark(job_folder.FINISHED)
        control.leave(code)
    if code:
        sys.exit(code)


# ---------------------------------------------------------------- the run


def train(experiment: Experiment, name: str, root: Path | None = None, digest: str = "") -> dict[str, float]:
    """Train, evaluate, record, checkpoint. All ranks call it.

    Args:
        experiment: what to run.
        name: of the run directory if the experiment names none.
        root: the project's folder, whose commit is recorded.
        digest: of the experiment file, compared over ranks and recorded.

    Returns: the last evaluation: eval_count, eval_loss and the task's metrics, such as eval_top1; empty if no step was
        left to do.

    Raises:
        UsageError: the experiment cannot run as asked, or ranks differ.
        TrainingError: a loss or gradient is not finite, workers' params differ, or too much data is skipped. It is also
            raised if a checkpoint cannot be written.
        decisions.Preempted: a signal asked to leave, and the run has been saved.
    """
    failures.set_phase("start", failures.LONG)
    if experiment.quiet or processes().rank != 0:
        progress.stop_progress()
    else:
        progress.start_progress()
    notice = signals.PreemptionNotice()
    try:
        return train_until(notice, experiment, name, root, digest)
    except decisions.Preempted as left:
        raise decisions.Interrupted if notice.is_interrupt else left from None
    finally:
        progress.stop_progress()
        notice.close()


def train_until(
    notice: signals.PreemptionNotice, experiment: Experiment, name: str, root: Path | None, digest: str
) -> dict[str, float]:
    """`train`, until it is noticed that it is to leave."""
    experiment = dataclasses.replace(experiment, callbacks=callbacks.checked(experiment.callbacks))
    is_asynchronous = registry.is_asynchronous(experiment.rule)
    with progress.phase("waiting for all ranks, and for their devices"):
        workers = gather_all(experiment)
    ranks = workers.processes.size if is_asynchronous else workers.size
    registry.check_ranks(experiment.rule, ranks)
    run_directory.agree_on(experiment, workers.processes, digest)
    if workers.processes.rank == 0:  # a model that does not fit ends the job here, with one message
        with progress.phase("tracing the model to check it"):
            check_before_data(experiment)
    with run_directory.usable():  # read on rank 0: what all must know of a run that is resumed
        found = run_directory.stored(experiment, name) if workers.processes.rank == 0 else None
    row = workers.processes.bcast_object(found)
    kept = run_directory.StoredSettings(*row) if row else None
    if experiment.continue_from and kept is None and workers.processes.rank == 0:
        with run_directory.usable():
            run_directory.check_source(experiment)
    experiment = run_directory.as_begun(experiment, kept, workers.size)
    begun = kept.scaled_for if kept else workers.size
    with progress.phase("opening the data"):
        job = job_of(experiment, workers, begun)
        if workers.processes.rank == 0:
            check_with_data(job)
    if experiment.monitor_mode == "auto":
        job = job.with_fields(monitor_mode=job.plan.task.mode_of(experiment.monitor))
    plan = job.plan
    # Without a common step a fast worker may make the steps of others, too.
    last_step = plan.clock.total_steps * (workers.size if is_asynchronous else 1)
    for text in experiment.inject:
        fault_injection.parse(text, max(begun, workers.size), last_step)
    asked = experiment.exchange.strategy
    with progress.phase("choosing the exchange"):
        job, why_overlap = resolve_overlap(job)
        job, why = resolve_exchange(job, kept)
        job, why_shards = resolve_shards(job)
    experiment = job.experiment
    with progress.phase("building the step"):
        functions = dataclasses.replace(build_functions(job), asked=asked)
    registry.check_wire(experiment.rule, functions.strategy)
    starting = contextlib.ExitStack()
    starting.enter_context(progress.phase("starting the loaders of the data"))
    with (
        starting,
        watch(experiment, workers) as unwatched,
        run_directory.agreed_run_dir(experiment, name, workers.processes) as home,
        plan.feed.open_until_agreed(decisions.Preempted),
        plan.feed.pool,
        plan.validation.pool,  # that one, or one of its own
    ):
        starting.close()
        # It has begun: a rollback resumes it.
        job = job.with_fields(from_start=False)
        functions = dataclasses.replace(
            functions, why="\n".join(filter(None, (why_overlap, why, why_shards, unwatched)))
        )
        fault_injection.request(experiment.inject, max(begun, workers.size), workers.mine, home.path)
        result = run_in(home, job, functions, notice, root, digest)
        for text in fault_injection.missed():
            warn(f"{failures.describe_rank()}: --inject {text} has not happened: this rank came to no such place")
        return result


def check_before_data(experiment: Experiment) -> None:
    """Raise `UsageError` unless sinks are known and a model fits the trainer."""
    check_sinks(experiment.sinks)
    spec = find_spec(experiment)
    if spec:  # if its labels are not just classes, they and the loss are known with the data
        loss = experiment.loss if spec.labels == "classes" else None
        check_model(experiment.model, loss, experiment.compute_dtype)


def check_with_data(job: Job) -> None:
    """Raise `UsageError` unless the task fits the data and has `monitor`."""
    experiment, plan = job.experiment, job.plan
    spec, asked = find_spec(experiment), experiment.monitor
    if spec is None or spec.labels == "numbers":
        check_task(plan.task, plan.feed.example(), plan.validation.example(), experiment.compute_dtype)
    if asked != "eval_loss":
        figures = ["eval_loss", *(f"eval_{name}" for name in metric_names(plan.task, plan.validation.source_example()))]
        check(asked in figures, f"monitor: got {asked}; task {plan.task.name} gives {', '.join(figures)}")


def gather_all(experiment: Experiment) -> Workers:
    """Gather the job's workers in the way that the experiment selects."""
    control = processes()
    control.assert_same("what becomes of workers if one dies", {"on_rank_loss": experiment.on_rank_loss})
    check_compatible(experiment)
    check_step_mode(experiment, control.size)
    if experiment.on_rank_loss == "shrink" and isinstance(control, MpiProcesses):
        shrink.check_mpi(control)
        control.outlive()
        return gather_fault_tolerant(control)
    if registry.is_asynchronous(experiment.rule):
        return gather_asynchronous(experiment.rule.servers)
    return gather_workers(experiment.devices, experiment.comm)


def run_in(
    home: HeldFolder,
    job: Job,
    functions: Functions,
    notice: signals.PreemptionNotice,
    root: Path | None,
    digest: str,
) -> dict[str, float]:
    """AsyncStart or resume in a run directory, and run to the end."""
    experiment, workers, plan = job.experiment, job.workers, job.plan
    is_first, folder = workers.processes.rank == 0, home.path
    held = None
    if not workers.asynchronous:
        held = memory.estimate_memory(job, functions.rule, is_fused=functions.ahead.is_whole)
        memory.make_room(held, job, available_bytes())
    with progress.phase("restoring the newest checkpoint" if experiment.resume else "initialising params"):
        states, saved = starting_states(job, functions.rule, folder)
    start = saved.step if saved else 0
    there = saved.step_there if isinstance(saved, Saved) else None  # the step in a run that is continued
    if experiment.resume and is_first:
        cut_record(folder / "record.jsonl", start if there is None else -1)
    hosts = workers.processes.allgather_object(socket.gethostname())
    elapsed_s = saved.extra.get("elapsed_s", 0.0) if saved else 0.0
    go_on(job, saved)
    at_start = callbacks.states(experiment.callbacks, workers.processes)
    peak = total_peak(workers, experiment.compute_dtype)
    recorder = Recorder(None, elapsed_s)
    if is_first:
        recorder = open_recorder(experiment, folder, elapsed_s, hosts, plan.feed)
        facts = run_directory.facts_of(experiment, workers, functions.strategy, functions.form, root, digest) | {
            "transport": transport(
                workers,
                exchanges=algorithms.exchanges(functions.strategy),
                in_shared_memory=algorithms.in_shared_memory(functions.strategy),
            ),
            "asked": functions.asked,
            "effective_batch": plan.clock.effective_batch,
            "scaled_for": plan.scaled_for,
            "format": FORMAT,
            **({"peak_flops_per_s": peak.flops_per_s, "peak": peak.source} if peak else {}),
        }
        write_whole(folder / "config.json", (json.dumps(facts, indent=2) + "\n").encode())
        recorder.write("run", **facts)
    say_start(job, functions, recorder, folder, saved)
    if held:
        recorder.say(memory.describe_worker(held, job.workers.size))
    of_rank = f"rank_{workers.processes.rank:05d}"  # JAX names files by host: ranks of one would overwrite them
    run = assembled(
        job,
        home=home,
        functions=functions,
        recorder=recorder,
        states=states,
        notice=notice,
        recovery=decisions.Recovery(experiment.on_nonfinite, experiment.recover_limit),
        profiler=Profiler(step_range(experiment.profile, "profile"), folder / "profile" / of_rank),
        shrinking=shrink.shrinking(experiment, workers, recorder if is_first else None),
        peak=peak,
        at_start=at_start,
        held=held,
    )
    if isinstance(saved, AsyncStart):
        with recorder:
            return run_asynchronously(run, saved, hosts) if start < plan.clock.total_steps else {}
    return run_to_end(run, states, start, DueEvents(save=there is not None))


# ---------------------------------------------------------------- state in and out


def say_start(
    job: Job, functions: Functions, recorder: Recorder, folder: Path, saved: Saved | AsyncStart | None
) -> None:
    """Say where and what the run is, and with what it begins."""
    experiment, plan = job.experiment, job.plan
    start, is_continued = saved.step if saved else 0, isinstance(saved, Saved) and saved.step_there is not None
    place = f"resumed at step {start}" if start and not is_continued else "no checkpoint in it: from the start"
    recorder.say(f"run directory {folder}" + f", {place}" * experiment.resume)
    how = f"strategy {functions.strategy}"
    if functions.rule.asynchronous:  # no strategy is run: of the one that was asked for the wire alone counts
        how = f"wire {functions.strategy.partition(':')[2]}"
    recorder.say(f"{plan.headline}; rule {experiment.rule.name}, {how}\n{functions.form}")
    if isinstance(saved, Saved) and is_continued:
        say_continued(job, recorder, saved)
    if saved and start:
        say_changes(job, recorder, saved.extra, start)
    if functions.why:
        recorder.say(functions.why)
    if start >= plan.clock.total_steps:
        recorder.say(f"nothing left to do: train_for ends at step {plan.clock.total_steps}")


def say_continued(job: Job, recorder: Recorder, saved: Saved) -> None:
    """Say and record which run is continued, and how steps are counted."""
    was, now = saved.extra["experiment"]["effective batch"], job.plan.clock.effective_batch
    source = job.experiment.continue_from
    recorder.say(
        f"continues {source} after its step {saved.step_there}: effective batch {was} there, {now} here, so from step "
        f"{saved.step}"
    )
    batches = {"effective_batch": {"was": was, "is": now}}
    recorder.write("continued", step=saved.step, **{"from": source}, from_step=saved.step_there, **batches)
