"""A run and its directory: what makes it this run, what all ranks agree on, and what is kept beside the record."""

import datetime
import sys
from pathlib import Path
from typing import Any

import jax

from jaxmpi import config
from jaxmpi import experiment as experiments
from jaxmpi.config import Experiment, check
from jaxmpi.processes import Processes, flatten_json
from jaxmpi.workers import Workers, transport


def agree_on(experiment: Experiment, processes: Processes, digest: str) -> None:
    """Refuse to start where ranks have different experiments or libraries."""
    check(experiment.model is not None, "the experiment has no model")
    facts = {"experiment_file": digest, "experiment": config.resolved(experiment), "versions": experiments.versions()}
    processes.same("what this run is", facts)


def agree_on_run_dir(experiment: Experiment, name: str, processes: Processes) -> Path:
    """The run directory that rank 0 chose, made.

    Raises:
        UsageError: it holds a run already and the run is not to be resumed, or the reverse.
    """
    chosen = experiment.run_dir or choose_run_dir(name, experiment.resume)
    folder = Path(processes.gather(chosen)[0])
    if experiment.resume:
        check(folder.is_dir(), f"--resume: no run directory {str(folder)!r}; name one with --run-dir")
    else:
        check(
            not (folder / "record.jsonl").exists(),
            f"run directory {str(folder)!r} holds a run already; go on with --resume, or name another with --run-dir",
        )
    processes.barrier()  # all have looked before rank 0 writes
    if processes.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def choose_run_dir(name: str, resume: bool) -> str:
    """runs/<name>-<time>, or the newest of that name."""
    if resume:
        newest = sorted(Path("runs").glob(f"{name}-[0-9]*"))
        return str(newest[-1]) if newest else f"runs/{name}-"
    return f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


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
