"""Run directories: their choice, their lock, checks at start, and the identity of a resumed run.

Two jobs in one directory would destroy each other's files, and a resume with other data gives wrong numbers. Rank 0
chooses the directory and locks it, and all ranks check that they see it. A checkpoint holds the fields of `identity`;
one that differs is refused by name. Fields of `settings` may change, and the change is reported. All other fields
change no update. The batch and the choice of `auto` come from the newest checkpoint (`stored`), or from config.json
before there is one. So a run resumes with the same examples a step on another number of workers.

This module imports no JAX: the supervisor of a job chooses the folder, too.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmpi.checkpoint.held_folder import HeldFolder, locked
from jaxmpi.checkpoint.manifests import AGAIN, checkpoint_folders, complete_checkpoints, newest_manifest
from jaxmpi.config import experiment_file, flags
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.files import refuse_ways_out
from jaxmpi.core.json_tree import MALFORMED, flatten_json, read_json
from jaxmpi.runtime import provenance

if TYPE_CHECKING:
    from jaxmpi.comm.job import Processes
    from jaxmpi.comm.topology import Workers

CONFIG = "config.json"  # a run's configuration

# ---------------------------------------------------------------- which directory


def make_folder(run_dir: str) -> Path:
    """The requested run directory, made if absent."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_new_folder(name: str) -> Path:
    """Make a new run directory: runs/<name>-<time>, with a number if taken."""
    stem = f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError  # numbers do not end


def find_run_to_resume(experiment: Experiment, name: str) -> Path:
    """The requested run directory, or the newest that `make_new_folder` made of that name."""
    stamped = re.compile(rf"{re.escape(name)}-(\d{{8}})-(\d{{6}})(?:-(\d+))?")
    runs = map(stamped.fullmatch, os.listdir("runs") if os.path.isdir("runs") else [])
    runs_by_time = {
        tuple(map(int, run.groups(default="1"))): run[0]
        for run in runs
        if run and Path("runs", run[0], "record.jsonl").is_file()
    }
    folder = Path(experiment.run_dir or Path("runs", runs_by_time[max(runs_by_time)] if runs_by_time else f"{name}-"))
    check(
        (folder / "record.jsonl").is_file(),
        f"--resume: {str(folder)!r} is no run directory, it has no record.jsonl; name one with --run-dir",
    )
    return folder


@contextlib.contextmanager
def agreed_run_dir(experiment: Experiment, name: str, processes: "Processes") -> Iterator[HeldFolder]:
    """Hold rank 0's run directory on all ranks, locked against other jobs."""
    with contextlib.ExitStack() as stack:
        home = claim(experiment, name, stack) if processes.rank == 0 else None
        folder = Path(processes.bcast_object(str(home.path) if home else ""))
        if home is None:
            try:
                home = HeldFolder(folder)
            except OSError as error:
                raise UsageError(
                    f"run directory {str(folder)!r} is not seen by this host ({error.strerror}); put it on a file "
                    "system that all hosts share"
                ) from error
            stack.callback(home.close)
        yield home


def claim(experiment: Experiment, name: str, stack: contextlib.ExitStack) -> HeldFolder:
    """Choose the run directory, make it and its record, and lock it."""
    with as_usage_errors():
        if experiment.resume:
            folder = find_run_to_resume(experiment, name)
        else:
            folder = make_folder(experiment.run_dir) if experiment.run_dir else make_new_folder(name)
        refuse_ways_out(
            folder,
            f"run directory {str(folder)!r}",
            "a run writes nothing through those: remove it (--run-dir itself may be a link to a larger disk)",
        )
        home = stack.enter_context(locked(folder))
        if experiment.resume:
            refuse_lost(folder)
        else:
            if experiment.from_start:
                _set_aside(folder)
            refuse_run(folder)
            (folder / "record.jsonl").write_text("")
    return home


@contextlib.contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn an OSError into a `UsageError` that names the way out."""
    try:
        yield
    except OSError as error:
        is_file = isinstance(error, FileExistsError)  # a folder that exists is no error
        why = f"{str(error.filename)!r} is a file, not a folder" if is_file else error
        raise UsageError(f"the run directory cannot be used: {why}; name another with --run-dir") from error


@contextlib.contextmanager
def as_training_errors() -> Iterator[None]:
    """Turn errors of the run directory during training into `TrainingError`."""
    try:
        yield
    except (OSError, UsageError) as error:
        raise TrainingError(f"the run directory cannot be used any more: {error}") from error


# ---------------------------------------------------------------- what it holds


def refuse_run(folder: Path) -> None:
    """Refuse a folder with a checkpoint or steps."""
    record = folder / "record.jsonl"
    if complete_checkpoints(folder / "checkpoints") or (record.exists() and b'"kind": "train"' in record.read_bytes()):
        raise UsageError(
            f"run directory {str(folder)!r} holds a run already; go on with --resume, begin again with --from-start, "
            "or name another with --run-dir"
        )


def _set_aside(folder: Path) -> None:
    """Rename an earlier run's files by the next free number, as record.1.jsonl.

    With them goes the run's identity at the services of sinks, since another run begins.
    """
    old = [path for name in ("record.jsonl", "sinks.json", "checkpoints") if (path := folder / name).exists()]
    for number in itertools.count(1):
        asides = [path.with_name(f"{path.stem}.{number}{path.suffix}") for path in old]
        if not any(map(os.path.lexists, asides)):
            break
    for path, aside in zip(old, asides, strict=True):
        path.rename(aside)


def refuse_lost(folder: Path) -> None:
    """Refuse to resume at step 0, where its record would be cut, a run that had saved checkpoints."""
    steps = []
    for line in (folder / "record.jsonl").read_bytes().splitlines():
        if b'"checkpoint"' in line:
            with contextlib.suppress(*MALFORMED):  # a torn line
                row = json.loads(line)
                if isinstance(row, dict) and row.get("kind") == "checkpoint" and type(row.get("step")) is int:
                    steps.append(row["step"])
    if steps and not checkpoint_folders(folder / "checkpoints"):
        raise UsageError(
            f"--resume: the record of {str(folder)!r} has checkpoints up to step {max(steps)}, and "
            f"{str(folder / 'checkpoints')!r} has none: {AGAIN}"
        )


# ---------------------------------------------------------------- what a resumed run keeps


class StoredSettings(NamedTuple):
    """Settings of a resumed run that its newest checkpoint decides."""

    workers: int  # that wrote it
    scaled_for: int  # initial number of workers
    effective_batch: int
    exchange: dict[str, Any]  # asked, strategy, bucket_bytes and, except in old checkpoints, overlap
    group_size: int = 0  # workers that held one copy of the data in memory; 0: not known


def read_stored_settings(experiment: Experiment, name: str) -> StoredSettings | None:
    """Read the stored settings of the run to resume; None without one.

    Without a checkpoint they are those of its config.json: a job that lost a worker before the first checkpoint goes on
    with the same examples a step, too.

    Raises:
        UsageError: the settings in the newest checkpoint are malformed; or it is of another rule or optimizer, whose
            state has other leaves.
    """
    if not experiment.resume:
        return None
    run_dir = find_run_to_resume(experiment, name)
    folder = run_dir / "checkpoints"
    manifest = newest_manifest(folder)
    if manifest is None:
        return read_config_settings(experiment, run_dir)
    extra = manifest["extra"]
    is_run = extra.keys() >= {"exchange", "scaled_for"} and "effective batch" in extra.get("experiment", {})
    check(is_run, f"{folder}: the newest checkpoint is not of a run of the trainer; name the directory of one")
    run = extra["experiment"]
    # Another rule or optimizer has a state of other leaves.
    shaping = {name: run[name] for name in SHAPING if name in run}
    refuse_other_run(shaping, flatten_json(flags.to_json(experiment)))
    return StoredSettings(
        workers=manifest["workers"],
        scaled_for=extra["scaled_for"],
        effective_batch=run["effective batch"],
        exchange=extra["exchange"],
        group_size=extra.get("group_size", 0),
    )


def read_config_settings(experiment: Experiment, run_dir: Path) -> StoredSettings | None:
    """Settings of a run without checkpoints; None if batch or exchange differ."""
    try:
        facts = read_json(run_dir / CONFIG, experiment_file.MOST_CONFIG_BYTES, "a run's configuration")
        workers, scaled_for, batch = (int(facts[name]) for name in ("workers", "scaled_for", "effective_batch"))
        exchange = {name: facts["experiment"]["exchange"][name] for name in ("strategy", "bucket_bytes", "overlap")}
        is_same = facts["asked"] == experiment.exchange.strategy
    except (ValueError, KeyError, TypeError):  # it did not come so far, or an earlier version wrote it
        return None
    asked_batch = experiment.effective_batch or experiment.local_batch * scaled_for
    exchange["asked"] = experiment.exchange.strategy
    return StoredSettings(workers, scaled_for, batch, exchange) if is_same and asked_batch in (0, batch) else None


def stored_exchange(stored: StoredSettings | None, config: ExchangeConfig) -> dict[str, Any] | None:
    """Exchange settings that `auto` chose in the run to resume; else None."""
    if stored is None or stored.exchange["asked"] != config.strategy:
        return None
    is_off = config.overlap == "auto" and stored.exchange.get("overlap") == "off"
    settled = {name: stored.exchange[name] for name in ("strategy", "bucket_bytes")}
    return settled | {"overlap": "off" if is_off else config.overlap}


def keep_batch_and_groups(experiment: Experiment, stored: StoredSettings | None, workers: int) -> Experiment:
    """The experiment with the run's groups; if workers changed, its effective batch."""
    if stored and stored.group_size and experiment.data.group_size == "auto" and workers % stored.group_size == 0:
        data = dataclasses.replace(experiment.data, group_size=stored.group_size)
        experiment = dataclasses.replace(experiment, data=data)
    if stored is None or stored.scaled_for == workers:
        return experiment
    batch = stored.effective_batch
    requested_batch = experiment.effective_batch or experiment.local_batch * stored.scaled_for
    if requested_batch not in (0, batch):
        raise UsageError(
            f"--resume with {workers} workers instead of {stored.scaled_for} keeps the effective batch of {batch}; "
            f"got {requested_batch}; {NEW_RUN}"
        )
    return dataclasses.replace(experiment, effective_batch=batch, local_batch=0)


# ---------------------------------------------------------------- what a run is


def agree_on(experiment: Experiment, processes: "Processes", digest: str) -> None:
    """Refuse to start if ranks have different experiments or libraries."""
    facts = {"experiment_file": digest, "experiment": flags.to_json(experiment), "versions": provenance.versions()}
    processes.assert_same("what this run is", facts)


def facts_of(
    experiment: Experiment, workers: "Workers", strategy: str, form: str, root: Path | None, digest: str
) -> dict[str, Any]:
    """The resolved configuration and its environment, for config.json and the record.

    Asynchronous workers run no strategy: only its wire counts. The signature tells later commands that this user has
    begun the run, so that its experiment file may be executed.

    Args:
        digest: of the experiment file; empty if there is none.
    """
    import jax  # the supervisor needs none of this

    words = experiment_file.file_first(sys.argv[1:])
    is_file = bool(words) and experiment_file.is_experiment(words[0], "")
    path = str(experiment_file.locate(words[0]).resolve()) if is_file else ""
    return {
        "experiment": flags.to_json(experiment),
        "workers": workers.size,
        "ranks": workers.processes.size,
        "strategy": f"wire {strategy.partition(':')[2]}" if workers.asynchronous else strategy,
        "form": form,
        "backend": jax.default_backend(),
        "experiment_file": digest,
        "versions": provenance.versions(),
        "commit": provenance.commit(root),
        "command": sys.argv,
        "experiment_path": path,
        "signature": provenance.sign([sys.argv, path]),
    }


# Fields that decide, together with the model, which leaves a state has.
SHAPING = ("rule.name", "optim.name", "optim.rate_in_velocity", "optim.ema")
# Fields of `data` that leave the examples unchanged.
NOT_THE_DATA = (
    *("data.dir", "data.loader", "data.loaders", "data.prefetch", "data.stall_timeout_s", "data.on_error"),
    # If they change the order, the data's facts say so.
    *("data.shuffle_by", "data.memory", "data.group_size", "data.shuffle_period"),
)
# Fields that change no update: output, retention, monitoring, paths; and batches, which `identity` has.
NOT_THE_NUMBERS = (
    *("run_dir", "resume", "from_start", "params", "inject", "local_batch", "effective_batch"),
    *("eval_every", "checkpoint_every", "keep_checkpoints", "keep_best", "monitor", "monitor_mode", "log_every"),
    *("quiet", "trace", "profile", "sinks", "stall_timeout_s", "on_stall", "on_nonfinite", "recover_limit"),
    *("rule.noise_scale", "replica_check_every", "on_rank_loss"),
    *("train_metrics", "whole_set", "eval_for", "dry_run"),
    *NOT_THE_DATA,
)
NEW_RUN = "for a new run from its params: jaxmpi export RUN FOLDER, then --params FOLDER"


def identity(experiment: Experiment, effective_batch: int, data: dict[str, Any]) -> dict[str, Any]:
    """Fields that identify a run: a resumed run must have the same.

    If one changes, a step number means other examples or updates.
    """
    fields = flatten_json(flags.to_json(experiment))
    names = ("model", "seed", *SHAPING)
    settings = {k: v for k, v in fields.items() if k in names or (k.startswith("data.") and k not in NOT_THE_DATA)}
    return {**settings, **flatten_json(data), "effective batch": effective_batch}


def refuse_other_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a checkpoint as another run.

    Raises:
        UsageError: fields that differ: got, expected.
    """
    kept = {name: value for name, value in saved.items() if name != "micro_batch"}  # which checkpoints of 0.1 have
    names = [name for name, value in kept.items() if now.get(name) != value]
    lines = [f"{name}: got {now.get(name)}, expected {saved[name]} (the checkpoint's)" for name in names]
    check(not lines, "\n  ".join(["a run goes on as the same run only:", *lines, NEW_RUN]))


def settings(experiment: Experiment) -> dict[str, Any]:
    """The resolved fields that affect updates, for a checkpoint."""
    fields = flatten_json(flags.to_json(experiment))
    return {name: value for name, value in fields.items() if name not in NOT_THE_NUMBERS}


def changes(saved: Any, now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from a checkpoint's: name to (old, new).

    Args:
        saved: the checkpoint's `settings`; older checkpoints have none, and then no change is known.
    """
    names = [name for name in now if name in saved] if isinstance(saved, dict) else []
    return {name: (saved[name], now[name]) for name in names if saved[name] != now[name]}
