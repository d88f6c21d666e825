"""`jaxmpi forecast`: workers' memory with and without sharded updates, before a run.

One process opens the data, makes a batch, and compiles the gradients of one worker; no step is made. The evaluation of
a batch is compiled as well if it holds a whole average of params.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.shards import Shards
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config import experiment_file
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import worker_key
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.optim.optimizers import state_arrays
from jaxmpi.rules import registry
from jaxmpi.runtime import prepare
from jaxmpi.trainer.build import local_functions, rule_in_program
from jaxmpi.trainer.compatibility import check_step_mode
from jaxmpi.trainer.memory import SHARDED, WorkerMemory, check_fits, held, mb, measured, parts
from jaxmpi.trainer.resolve_auto import resolve_shards, why_whole, with_shards
from jaxmpi.trainer.step_form import shares_params
from jaxmpi.trainer.training_plan import Job, TrainingPlan, job_of, with_exchange

NO_SUM = "a sum that is not made"  # its name in a program that is compiled and not run
# Bytes measured, docs/performance.md#memory-of-a-process: a rank without its programs, that is Python, JAX and MPI;
# a loader process.
RANK_BYTES, LOADER_BYTES = 200_000_000, 25_000_000
# For a character of the text of its largest program, of each rank, and more of the one that compiles for its host.
LOADED_BYTES, COMPILED_BYTES = 100, 200


def main(options: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        UsageError: the workers of one host do not fit into the memory of this one.
    """
    prepare.prepare()
    experiment, _ = experiment_file.parse(options.fields)
    check(
        not registry.is_asynchronous(experiment.rule),
        f"rule: got {experiment.rule.name}, whose workers are not alike; expected a synchronous rule",
    )
    check_step_mode(experiment, options.n)
    each, here = experiment.devices, options.slots * experiment.devices  # workers of a rank, and of a host
    hosts = tuple(worker // here for worker in range(options.n * each))
    workers = Workers(AxisComm("workers", len(hosts), hosts), SoloProcesses(), (0,), None)
    found, free_bytes = forecast(experiment, workers), available_bytes()
    print("\n".join(table(found, workers, here, free_bytes)), flush=True)
    asked = found.on if found.on and found.is_sharded else found.off
    known = {SHARDED: found.on} if found.on else {}  # compiled, where a run has its own program to go by
    others = tuple((name, known.get(name, other)) for name, other in asked.others)
    asked = dataclasses.replace(asked, others=others)
    check_fits(asked, here, experiment.micro_batch or found.local_batch, free_bytes)


class Forecast(NamedTuple):
    """Memory of a worker, with and without sharded updates."""

    local_batch: int
    off: WorkerMemory
    on: WorkerMemory | None  # with sharded updates; None if they cannot be
    notes: list[str]
    is_sharded: bool  # True if a run has sharded updates, as asked for or as `auto` settles it


def forecast(experiment: Experiment, workers: Workers) -> Forecast:
    """The memory of one worker in split form, or fused if alone.

    Raises:
        UsageError: as a run of this experiment.
    """
    data = dataclasses.replace(experiment.data, memory="none")  # records kept in memory are not counted
    job = job_of(dataclasses.replace(experiment, data=data), workers).with_fields(data=experiment.data)
    plan, asked, notes = job.plan, experiment.exchange, []
    if is_auto(asked.strategy):
        name = "asa:" + (asked.strategy.partition(":")[2] or "32")
        notes.append(f"strategy auto, which takes what a probe of the ranks finds fastest, is counted as {name}")
        job = with_exchange(job, strategy=name)
    shared = with_shards(job, "on")
    if asked.overlap == "on" and not shares_params(shared, shared.experiment.exchange.strategy):
        notes.append("overlap on takes the fused form: here are the parts of the split one")
        job = with_exchange(job, overlap="auto")
    if experiment.comm == "xla" and workers.size > 1:
        notes.append("comm xla takes the fused form: here are the parts of the split one")
    off, on = (with_shards(job, word) for word in ("off", "on"))
    if why := why_whole(on):
        notes.append(f"no sharded updates: {why}")
    resolved, said = resolve_shards(job)
    notes += [said] if said and not why else []
    batch = shapes_of_batch(plan.feed)
    evaluating = eval_bytes(on) if experiment.optim.ema and not why else None  # else no average is gathered
    each = [forecast_of(of, batch, evaluating) for of in ([off] if why else [off, on])]
    sharded = each[1] if len(each) > 1 else None
    is_sharded = resolved.experiment.exchange.shard_update == "on"
    return Forecast(
        local_batch=plan.feed.samplers[0].local_batch, off=each[0], on=sharded, notes=notes, is_sharded=is_sharded
    )


def forecast_of(job: Job, batch: PyTree, eval_activations: int | None) -> WorkerMemory:
    """With the experiment's strategy and sharding.

    Args:
        batch: shapes of one worker's.
        eval_activations: of an evaluation that gathers an average, if they are known.
    """
    experiment, workers, plan = job.experiment, job.workers, job.plan
    rule = rule_in_program(job)
    found = held(job, rule, experiment.exchange.strategy, is_whole=False)
    gradients = local_functions(job)[0]
    if found.is_early:
        assert rule.sharding
        assert isinstance(rule.sharding.shards, Shards)
        gradients = rule.sharding.shards.scattering(gradients, NO_SUM)
    program = compiled(experiment, plan, gradients, batch)
    text, pool = len(program.as_text() or ""), plan.feed.pool
    each = {
        "process": (RANK_BYTES + LOADED_BYTES * text) // experiment.devices
        + LOADER_BYTES * pool.size * (pool.kind != "threads"),
        "compiler": COMPILED_BYTES * text,
    }

    def counted(of: WorkerMemory) -> WorkerMemory:
        return dataclasses.replace(of, **each, eval_activations=eval_activations if of.average else None)

    found = measured(counted(found), program)
    if workers.size == 1:  # gradients are no results there: they come where activations were, and updates beside them
        activations = max((2 + state_arrays(experiment.optim)) * found.gradients, found.activations or 0)
        found = dataclasses.replace(found, is_whole=True, activations=activations)
    others = tuple((name, counted(other)) for name, other in found.others)
    return dataclasses.replace(found, others=others)


def eval_bytes(job: Job) -> int | None:
    """Bytes that XLA allots to the evaluation of a worker's batch."""
    batch = shapes_of_batch(job.plan.validation)
    if batch is None:
        return None
    state = job.plan.shapes
    analysis = jax.jit(local_functions(job)[1]).lower(*state, batch).compile().memory_analysis()
    return analysis and analysis.temp_size_in_bytes


def shapes_of_batch(feed: DeviceFeed) -> PyTree:
    """Shapes of one worker's batch, of which one is made; or None.

    None: there are no examples.
    """
    with feed.pool, contextlib.closing(feed.batches()) as batches:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(batches, None))


def compiled(experiment: Experiment, plan: TrainingPlan, gradients: Callable, batch: PyTree) -> jax.stages.Compiled:
    """The program of the gradients of one worker's batch."""
    state = (*plan.shapes, batch, worker_key(experiment.seed, 0), np.int32(0))
    return jax.jit(gradients).lower(*state).compile()


def table(found: Forecast, workers: Workers, here: int, free_bytes: int) -> list[str]:
    """Lines for the terminal."""
    columns = {"off": found.off} | ({"on": found.on} if found.on else {})
    named = {word: parts(of) for word, of in columns.items()}
    form = "one program" if workers.size == 1 else "split form"
    lines = [
        f"{workers.size} workers x local batch {found.local_batch}, {here} on a host, {form}; MB a worker",
        f"{'--exchange.shard-update':28}" + "".join(f"{word:>10}" for word in columns),
    ]
    for name in dict.fromkeys(name for each in named.values() for name in each):
        lines.append(f"{name:28}" + "".join(f"{mb(each.get(name, 0)):>10}" for each in named.values()))
    lines.append(f"{'at once':28}" + "".join(f"{mb(of.at_once):>10}" for of in columns.values()))
    lines.append(f"{'all on a host':28}" + "".join(f"{mb(of.on_host(here)):>10}" for of in columns.values()))
    return [*lines, f"{'free on this host':28}{mb(free_bytes):>10}", *found.notes]
