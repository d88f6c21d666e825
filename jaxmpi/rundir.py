"""A run and its directory: what makes it this run, what all ranks agree on, and what is kept beside the record."""

import datetime
import itertools
import sys
from pathlib import Path
from typing import Any

import jax

from jaxmpi import checkpoint, config
from jaxmpi import experiment as experiments
from jaxmpi.config import Experiment, UsageError, check
from jaxmpi.processes import Processes, flatten_json
from jaxmpi.workers import Workers, transport


def agree_on(experiment: Experiment, processes: Processes, digest: str) -> None:
    """Refuse to start where ranks have different experiments or libraries."""
    check(experiment.model is not None, "the experiment has no model")
    facts = {
        "experiment_file": digest,
        "experiment": config.resolved(experiment),
        "versions": experiments.versions(),
    }
    processes.same("what this run is", facts)


def agree_on_run_dir(experiment: Experiment, name: str, processes: Processes) -> Path:
    """The run directory that rank 0 chose and claimed, seen by all ranks.

    Raises:
        UsageError: it holds a run already and the run is not to be resumed, or the reverse; or a rank does not see it.
    """
    claimed = claim(experiment, name) if processes.rank == 0 else ""
    folder = Path(processes.gather(claimed)[0])
    check(
        folder.is_dir(),
        f"run directory {str(folder)!r} is not seen by this host; put it on a file system that all hosts share",
    )
    return folder


def claim(experiment: Experiment, name: str) -> str:
    """Choose the run directory, make it and its record; of two runs that ask for one only one gets it."""
    if experiment.resume:
        return resumed(experiment, name)
    try:
        folder = named(experiment.run_dir) if experiment.run_dir else fresh(name)
        (folder / "record.jsonl").open("x").close()
    except FileExistsError as error:
        raise UsageError(
            f"run directory {error.filename!r} holds a run already, or is none; go on with --resume, or name another "
            "with --run-dir"
        ) from error
    except OSError as error:
        raise UsageError(f"the run directory cannot be made: {error}; name another with --run-dir") from error
    return str(folder)


def resumed(experiment: Experiment, name: str) -> str:
    """The run directory that is asked for, or the newest of that name."""
    newest = sorted(Path("runs").glob(f"{name}-[0-9]*"))
    folder = experiment.run_dir or (str(newest[-1]) if newest else f"runs/{name}-")
    check(Path(folder).is_dir(), f"--resume: no run directory {folder!r}; name one with --run-dir")
    return folder


def stored_exchange(experiment: Experiment, name: str) -> dict[str, Any] | None:
    """The strategy and bucket size that `auto` came to in the run that is resumed; None where there are none.

    Raises:
        UsageError: the newest checkpoint's are damaged.
    """
    saved = checkpoint.found(Path(resumed(experiment, name)) / "checkpoints") if experiment.resume else []
    stored = checkpoint.read_manifest(saved[-1])["extra"].get("exchange") if saved else None
    if stored is None:
        return None
    check(
        isinstance(stored, dict)
        and {"asked", "strategy", "bucket_bytes"} == set(stored)
        and isinstance(stored["strategy"], str),
        f"{saved[-1]}: exchange: got {stored!r:.80}; expected asked, strategy and bucket_bytes: damaged",
    )
    asked = stored.pop("asked")
    return stored if asked == experiment.exchange.strategy else None


def named(run_dir: str) -> Path:
    """The run directory that is asked for, made where it is not there."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fresh(name: str) -> Path:
    """A run directory of its own: runs/<name>-<time>, with a number behind it where that is taken."""
    stem = f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError  # numbers do not end


def facts_of(experiment: Experiment, workers: Workers, strategy: str, form: str, root: Path | None) -> dict[str, Any]:
    """The resolved configuration and where it runs, for config.json and the record."""
    return {
        "experiment": config.resolved(experiment),
        "workers": workers.size,
        "strategy": strategy,
        "form": form,
        "transport": transport(workers),
        "backend": jax.default_backend(),
        "versions": experiments.versions(),
        "commit": experiments.commit(root),
        "command": sys.argv,
    }


def identity(experiment: Experiment, effective_batch: int) -> dict[str, Any]:
    """What makes a run the same run: with another of these, a step number would mean other examples or updates."""
    fields = flatten_json(config.resolved(experiment))
    names = ("model", "seed", "micro_batch", "rule.name", "optim.name")
    kept = {k: v for k, v in fields.items() if k in names or (k.startswith("data.") and k not in NOT_THE_DATA)}
    return {**kept, "effective batch": effective_batch}


# Fields of `data` under which the same examples stay the same.
NOT_THE_DATA = ("data.dir", "data.threads", "data.prefetch", "data.on_error")


def refuse_other_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Stop where a checkpoint is to be resumed as another run.

    Raises:
        UsageError: fields that differ: got, expected.
    """
    lines = [f"{k}: got {now.get(k)}, expected {v} (the checkpoint's)" for k, v in saved.items() if now.get(k) != v]
    check(not lines, "--resume goes on with the same run only:\n  " + "\n  ".join(lines))
