"""Training of an experiment from start to end.

    python -m jaxmpi.train EXPERIMENT.py [--field value ...]              one worker
    mpirun -n 8 python -m jaxmpi.train EXPERIMENT.py [--field value ...]  eight
    python -m jaxmpi.train --from RUN [--field value ...]                 as a run was started

A mistake should end a run before it has cost much time. So the parts stand in the order in which they can fail:
experiment file, workers, the model's shapes, data, exchange, step, run directory, state. Then the loop makes the steps
(`loop.py`), under any rule. "Step k" is the state after k updates. Blocks that only rank 0 runs say so; all others run
on all ranks.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import socket
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmpi.allreduce import algorithms
from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import check_disk, total_bytes, warn
from jaxmpi.checkpoint.restore import Saved
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.fault_tolerant import outlive
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import is_cuda_aware
from jaxmpi.comm.topology import Workers, gather_asynchronous, gather_fault_tolerant, gather_workers
from jaxmpi.config import experiment_file
from jaxmpi.config.durations import step_range
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import write_whole
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data import SOURCES
from jaxmpi.data.decode import CorruptExample
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
from jaxmpi.rules.asynchronous.worker import AsyncStart
from jaxmpi.runtime import failures, fault_injection, job_folder, process, progress, provenance
from jaxmpi.tasks.check import check_inputs, check_task, metric_names
from jaxmpi.tasks.registry import find_spec
from jaxmpi.trainer import callbacks, memory
from jaxmpi.trainer.asynchronous import run_asynchronously
from jaxmpi.trainer.build import Functions, build_functions, choose_exchange
from jaxmpi.trainer.conflicts import check_compatible
from jaxmpi.trainer.lock_step import run_to_end, watch
from jaxmpi.trainer.plan import Plan, make_plan
from jaxmpi.trainer.run import Run, open_recorder
from jaxmpi.trainer.state import restore_feed_and_callbacks, say_changes, starting_states

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
            train(
                experiment,
                path.stem,
                provenance.project_root(path),
                digest=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
        except decisions.Preempted as preempted:
            code = preempted.code
        failures.wait_for_ending_thread()
        if not code:
            job_folder.mark(job_folder.FINISHED)
        control.leave(code)
    if code:
        sys.exit(code)


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
    failures.set_phase("start", failures.LONG_FACTOR)
    if experiment.quiet or processes().rank != 0:
        progress.stop_progress()
    else:
        progress.start_progress()
    notice, is_first, folder = signals.PreemptionNotice(), processes().rank == 0, ""
    try:
        if experiment.dry_run:
            with run_directory.as_usage_errors():
                folder = str(run_directory.make_new_folder(f"{name}-dry-run")) if is_first else ""
            folder = processes().bcast_object(folder)
            fresh = {"run_dir": folder, "resume": False, "from_start": False, "sinks": ()}
            experiment = dataclasses.replace(experiment, **fresh)
        figures = train_until(notice, experiment, name, root, digest)
        if folder and is_first and not experiment.quiet:
            print(f"dry run: steps, evaluation and checkpoint went well; {folder} is removed", flush=True)
        return figures
    except decisions.Preempted as left:
        raise decisions.Interrupted if notice.is_interrupt else left from None
    finally:
        progress.stop_progress()
        notice.close()
        if folder and is_first:
            shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- before there is a state


def train_until(
    notice: signals.PreemptionNotice, experiment: Experiment, name: str, root: Path | None, digest: str
) -> dict[str, float]:
    """Body of `train`; raises Preempted if a signal arrives."""
    experiment = dataclasses.replace(experiment, callbacks=callbacks.copy_checked(experiment.callbacks))
    is_asynchronous = registry.is_asynchronous(experiment.rule)
    with progress.phase("waiting for all ranks, and for their devices"):
        workers = gather_all(experiment)
    control = workers.processes
    registry.check_rule(experiment.rule, control.size if is_asynchronous else workers.size)
    run_directory.agree_on(experiment, control, digest)
    if control.rank == 0:  # a model that does not fit ends the job here, with one message
        with progress.phase("tracing the model to check it"):
            check_sinks(experiment.sinks)
            if spec := find_spec(
                experiment
            ):  # if its labels are not just classes, they and the loss come with the data
                loss = experiment.loss if spec.labels == "classes" else None
                check_model(experiment.model, loss, experiment.compute_dtype)
    row = None
    if control.rank == 0:
        with run_directory.as_usage_errors():
            row = run_directory.read_stored_settings(experiment, name)
    row = control.bcast_object(row)
    stored = run_directory.StoredSettings(*row) if row else None
    experiment = run_directory.keep_batch_and_groups(experiment, stored, workers.size)
    scaled_for = stored.scaled_for if stored else workers.size
    with progress.phase("opening the data"):
        plan = make_plan(experiment, workers, scaled_for)
        if control.rank == 0:
            check_with_data(plan)
    if experiment.monitor_mode == "auto":
        plan = plan.with_fields(monitor_mode=plan.mode_of(plan.experiment.monitor))
    # Without a common step a fast worker may make the steps of others, too.
    last_step = plan.clock.total_steps * (workers.size if is_asynchronous else 1)
    for text in experiment.inject:
        fault_injection.parse(text, max(scaled_for, workers.size), last_step)
    with progress.phase("choosing the exchange"):
        plan = choose_exchange(plan, stored)
    with progress.phase("building the step"):
        functions = build_functions(plan)
    registry.check_wire(experiment.rule, plan.strategy)
    starting = contextlib.ExitStack()
    starting.enter_context(progress.phase("starting the loaders of the data"))
    with (
        starting,
        watch(plan) as unwatched,
        run_directory.agreed_run_dir(plan.experiment, name, control) as home,
        plan.feed.open_until_agreed(decisions.Preempted),
        plan.feed.pool,
        contextlib.ExitStack() as pools,
    ):
        for feed in plan.validation.values():
            pools.enter_context(feed.pool)  # that one, or one of its own
        starting.close()
        plan = plan.with_fields(from_start=False)  # from here on a rollback restores a checkpoint
        plan = plan.with_note(unwatched) if unwatched else plan
        fault_injection.request(experiment.inject, max(scaled_for, workers.size), workers.mine, home.path)
        result = run_in(home, plan, functions, notice, root, digest)
        for text in fault_injection.missed():
            warn(f"{failures.describe_rank()}: --inject {text} has not happened: this rank came to no such place")
        return result


def gather_all(experiment: Experiment) -> Workers:
    """Gather the job's workers in the way that the experiment selects."""
    control = processes()
    control.assert_same("what becomes of workers if one dies", {"on_rank_loss": experiment.on_rank_loss})
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise UsageError(
            "JAX_DISABLE_JIT: the trainer compiles its step ahead, so it cannot run without jit; unset it, and look "
            "into the step by jax.debug.print or jax.debug.breakpoint"
        )
    check_compatible(experiment)
    if experiment.on_rank_loss == "shrink" and isinstance(control, MpiProcesses):
        shrink.check_mpi(control)
        outlive(control)
        return gather_fault_tolerant(control)
    if registry.is_asynchronous(experiment.rule):
        return gather_asynchronous(experiment.rule.servers)
    return gather_workers(experiment.devices, experiment.comm)


def check_with_data(plan: Plan) -> None:
    """Raise `UsageError` unless the task fits the data and has `monitor`."""
    experiment, spec = plan.experiment, find_spec(plan.experiment)
    for feed in (plan.feed, *plan.validation.values()) if experiment.model else ():
        with contextlib.suppress(CorruptExample):  # which a loader reports, or skips
            check_inputs(experiment.model, feed.source_example(), feed.data)
    if spec is None or spec.labels == "numbers":
        train = plan.feed.example()
        for feed in plan.validation.values():
            example, train_metrics = feed.example(), experiment.train_metrics
            check_task(plan.task, train, example, experiment.compute_dtype, train_metrics=train_metrics)
    classes = tuple(getattr(plan.feed.source, "names", ()))
    for feed in plan.validation.values():
        if (names := tuple(getattr(feed.source, "names", ()))) and classes and names != classes:
            raise UsageError(
                f"data.validation: {feed.source.name}: got the classes {', '.join(names):.200}; expected those of "
                f"training, {', '.join(classes):.200}: a label must mean the same in both"
            )
    settings = {experiment.monitor: ("", "monitor_mode", experiment.monitor_mode)}  # by figure
    for callback in experiment.callbacks:
        if isinstance(callback, callbacks.Plateau) and callback.monitor != "eval_loss":  # which is the first set's
            name = f"{type(callback).__name__}: "
            settings.setdefault(callback.monitor, (name, f"{name}mode", callback.mode))
    if settings.keys() <= {f"{prefix}loss" for prefix in plan.validation}:
        return
    names = {prefix: metric_names(plan.task, feed.source_example()) for prefix, feed in plan.validation.items()}
    bits = ["bits_per_byte"] * bool(plan.feed.bytes_each)
    figures = [prefix + name for prefix in names for name in ("loss", *names[prefix], *bits)]
    for figure, (name, mode_name, mode) in settings.items():
        if figure not in figures and experiment.whole_set:  # it may be one of its names
            if mode == "auto" and plan.mode_of(figure) == "min":
                raise UsageError(f"{mode_name}: got auto with monitor {figure}; give max or min")
        elif figure not in figures:
            raise UsageError(f"{name}monitor: got {figure}; task {plan.task.name} gives {', '.join(figures)}")


# ---------------------------------------------------------------- in a run directory


def run_in(
    home: HeldFolder,
    plan: Plan,
    functions: Functions,
    notice: signals.PreemptionNotice,
    root: Path | None,
    digest: str,
) -> dict[str, float]:
    """Start or resume in a run directory, and run to the end."""
    experiment, workers, control, rule = plan.experiment, plan.workers, plan.workers.processes, functions.rule
    is_first, folder, needed = control.rank == 0, home.path, None
    if not workers.asynchronous:
        needed = memory.estimate_memory(plan, rule, is_fused=functions.is_fused)
        memory.make_room(needed, plan, available_bytes())
    with progress.phase("restoring the newest checkpoint" if experiment.resume else "initialising params"):
        states, saved = starting_states(plan, rule, folder)
    start = saved.step if saved else 0
    if experiment.resume and is_first:
        cut_record(folder / "record.jsonl", start)
    if is_first and plan.exchanges:
        equal = {"replicated": rule.state_is_replicated, "same_params": rule.params_are_replicated}
        needed_bytes = total_bytes(states, workers=workers.size, **equal)
        kept = experiment.keep_checkpoints + experiment.keep_best
        saves = plan.timetable.most_saves(start)
        check_disk(folder / "checkpoints", kept, saves, needed_bytes, shutil.disk_usage(folder).free)
    elapsed_s = saved.extra.get("elapsed_s", 0.0) if saved else 0.0
    if elapsed_s >= plan.timetable.periods_s.get("stop", math.inf):  # nothing is left to do
        plan = dataclasses.replace(plan, clock=plan.clock._replace(total_steps=start))
    restore_feed_and_callbacks(plan, saved)
    rank = f"rank_{control.rank:05d}"  # JAX names files by host: ranks of one host would overwrite them
    profiler = Profiler(step_range(experiment.profile, "profile"), folder / "profile" / rank)
    callback_states = callbacks.states(experiment.callbacks, control)
    hosts, peak = control.allgather_object(socket.gethostname()), total_peak(workers, experiment.compute_dtype)
    recorder = open_recorder(plan, folder, elapsed_s, hosts) if is_first else Recorder(None, elapsed_s)
    run = Run(
        plan=plan,
        functions=functions,
        home=home,
        recorder=recorder,
        notice=notice,
        recovery=decisions.Recovery(experiment.on_nonfinite, experiment.recover_limit),
        profiler=profiler,
        shrinking=shrink.shrinking(experiment, workers, recorder if is_first else None),
        callback_states=callback_states,
        memory=needed,
        hosts=hosts,
        peak=peak,
    )
    if is_first:
        write_facts(run, root, digest)
    say_start(run, saved)
    if isinstance(saved, AsyncStart):
        with recorder:
            return run_asynchronously(run, saved) if start < plan.clock.total_steps else {}
    return run_to_end(run, states, start)


def write_facts(run: Run, root: Path | None, digest: str) -> None:
    """The resolved configuration and its environment, to config.json and the record. Rank 0 only."""
    plan, peak, strategy = run.plan, run.peak, run.plan.strategy
    facts = run_directory.facts_of(run.experiment, run.workers, strategy, run.functions.form, root, digest) | {
        "transport": transport(
            run.workers, exchanges=plan.exchanges, in_shared_memory=algorithms.in_shared_memory(strategy)
        ),
        "asked": plan.requested,
        "effective_batch": plan.clock.effective_batch,
        "scaled_for": plan.scaled_for,
        "format": FORMAT,
    }
    if len(plan.validation) > 1:
        facts["validation_sets"] = [prefix.removeprefix("eval_")[:-1] for prefix in plan.validation]
    facts["began_ms"] = run.recorder.began_ms
    if peak:
        facts |= {"peak_flops_per_s": peak.flops_per_s, "peak": peak.source}
    write_whole(run.folder / "config.json", (json.dumps(facts, indent=2) + "\n").encode())
    run.recorder.write("run", **facts)


def transport(workers: Workers, *, exchanges: bool, in_shared_memory: bool) -> str:
    """Name the way of what workers exchange.

    Asynchronous workers send params to a center or to each other, from host memory, whatever the strategy.

    Args:
        in_shared_memory: its ranks of a host add in shared memory.
    """
    on_gpu = jax.default_backend() == "gpu"
    through_mpi = "MPI, through the host" if on_gpu else "MPI, from host memory"
    if workers.size == 1:
        return "none: one worker"
    if workers.asynchronous:
        return through_mpi
    if not exchanges:
        return "none: the strategy exchanges nothing"
    if workers.mesh is not None and workers.devices == 1:
        if workers.processes.size > 1:
            return f"XLA collectives between processes, {'NCCL' if on_gpu else 'gloo'}"
        return "XLA collectives between devices of one process"
    if in_shared_memory:
        between = "shared memory, through the host" if on_gpu else "shared memory"
    else:
        between = "MPI, CUDA-aware" if on_gpu and is_cuda_aware() else through_mpi
    return f"{between}; each process adds up its {workers.devices} devices" if workers.devices > 1 else between


def say_start(run: Run, saved: Saved | AsyncStart | None) -> None:
    """Say where and what the run is, and with what it begins."""
    plan, experiment, recorder = run.plan, run.experiment, run.recorder
    start = saved.step if saved else 0
    place = f"resumed at step {start}" if start else "no checkpoint in it: from the start"
    recorder.say(f"run directory {run.folder}" + f", {place}" * experiment.resume)
    how = f"strategy {plan.strategy}"
    if run.functions.rule.asynchronous:  # only the wire of the strategy counts
        how = f"wire {plan.strategy.partition(':')[2]}"
    recorder.say(f"{plan.headline}; rule {experiment.rule.name}, {how}\n{run.functions.form}")
    if saved and start:
        say_changes(plan, recorder, saved.extra, start)
    if plan.notes:
        recorder.say("\n".join(plan.notes))
    if start >= plan.clock.total_steps:
        recorder.say(f"nothing left to do: train_for ends at step {plan.clock.total_steps}")
    if run.memory:
        recorder.say(memory.describe_worker(run.memory, run.workers.size))
