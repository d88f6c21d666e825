"""A worker's memory, part by part: checked before a state is made, and again before the first step.

Shapes say what params, the optimizer's state, gradients and their mean take, and XLA's memory analysis what activations
do. The program of the first step is asked before it runs, which costs no compilation, for the step runs that program.
Nothing is fitted to measurements, so a worker needs at least what is counted here: what a process takes by itself and
an exchange's buffers in transit come on top. `jaxmpi forecast` prints the same table before there is a run.
"""

import argparse
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmpi.allreduce import algorithms
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, size_bytes
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.core.train_state import worker_key
from jaxmpi.rules import registry
from jaxmpi.rules.base import Rule
from jaxmpi.runtime import process
from jaxmpi.runtime.allocator import give_back_at_once, is_settled, keep_freed_memory
from jaxmpi.trainer.build import local_functions, rule_in_program, rule_state
from jaxmpi.trainer.compatibility import check_step_mode
from jaxmpi.trainer.resolve_auto import resolve_shards, why_whole, with_shards
from jaxmpi.trainer.step_form import shares_params
from jaxmpi.trainer.training_plan import Job, job_of, with_exchange

KEEP_FACTOR = 2  # freed memory is kept if so many times what is needed is free: its holes took up to 0.9 of it
NO_SUM = "a sum that is not made"  # its name in a program that is compiled and not run


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker, by part."""

    params: int
    optimizer_state: int  # the rule's state, which has the optimizer's in it
    model_state: int = 0
    previous_state: int = 0  # state before a step, if it is kept until the step counts
    checkpoint: int = 0  # copy of what this worker writes, while steps go on
    host_checkpoint: int = 0  # copy of what one worker of the host writes for all
    batch: int = 0
    gradients: int
    exchanged: int = 0  # what an exchange between programs, or a skipped step, has beside gradients
    activations: int = 0  # XLA's temporary bytes; 0 until a program is compiled
    average: int = 0  # an average of all params, gathered for an evaluation
    is_fused: bool  # one program is the whole step: its temporary bytes have gradients and buckets in them
    shards: Any = None  # of sharded updates

    @property
    def shared(self) -> int:
        """Bytes of params of which a host has one copy."""
        return self.params * bool(self.shards and self.shards.shared_params)

    @property
    def state(self) -> int:
        """Bytes of the worker's own that are there between steps."""
        return self.params - self.shared + self.model_state + self.optimizer_state

    @property
    def at_once(self) -> int:
        """The most at one time: activations are gone when gradients are exchanged, both in an evaluation."""
        if self.is_fused:
            step = max(self.gradients, self.activations)
        else:
            step = self.gradients + max(self.exchanged, self.activations)
        return self.state + self.checkpoint + max(self.previous_state + self.batch + step, self.average)

    def on_host(self, workers: int) -> int:
        """The most at one time of this many workers of a host."""
        return workers * self.at_once + self.shared + self.host_checkpoint


def estimate_memory(job: Job, rule: Rule, *, is_fused: bool) -> WorkerMemory:
    """A worker's memory by shapes alone; `is_fused`: one program is the whole step."""
    experiment, workers, plan = job.experiment, job.workers, job.plan
    params, model_state = map(size_bytes, plan.shapes)
    optimizer_state = size_bytes(rule_state(rule, plan.params()))
    state = params + model_state + optimizer_state
    shards, skips = rule.sharding and rule.sharding.zero, experiment.on_nonfinite == "skip"
    shard = -(-params // workers.size)
    gradients = shard if shards and shards.early else params
    mean = shard if shards and shards.shared_params else params  # else new params are gathered
    # The last checkpoint of a run is not copied, for nothing changes the state any more.
    is_copied = plan.timetable.save_every < plan.timetable.total_steps or bool(experiment.continue_from)
    is_copied = is_copied and algorithms.exchanges(experiment.exchange.strategy)
    hosts = workers.processes.hosts
    common = params * rule.params_are_replicated + optimizer_state * rule.state_is_replicated
    return WorkerMemory(
        params=params,
        optimizer_state=optimizer_state,
        model_state=model_state,
        previous_state=state * (skips or experiment.on_rank_loss == "shrink"),
        checkpoint=is_copied * (state - common),
        host_checkpoint=is_copied * common * (hosts[workers.processes.rank] == hosts[0]),
        gradients=gradients,
        exchanged=0 if is_fused or workers.size == 1 else max(mean, state * skips),
        average=params * bool(rule.sharding and rule.eval_params),
        is_fused=is_fused,
        shards=shards,
    )


def with_program(memory: WorkerMemory, program: jax.stages.Compiled, batch_bytes: int) -> WorkerMemory:
    """The same with the program's temporary bytes, if XLA reports them, and a worker's batch."""
    analysis = program.memory_analysis()
    return replace(memory, activations=analysis.temp_size_in_bytes if analysis else 0, batch=batch_bytes)


# ---------------------------------------------------------------- in words


def parts(memory: WorkerMemory) -> dict[str, int]:
    """The table: bytes of each part by its name."""
    named = {
        "params": memory.params - memory.shared,
        "params of the host": memory.shared,
        "optimizer's state": memory.optimizer_state,
        "model state": memory.model_state,
        "state before a step": memory.previous_state,
        "copy for a checkpoint": memory.checkpoint,
        "copy of the host for a checkpoint": memory.host_checkpoint,
        "batch": memory.batch,
        "gradients": memory.gradients,
        "exchange": memory.exchanged,
        "activations": memory.activations,
        "an evaluation's average": memory.average,
    }
    return {name: size for name, size in named.items() if size or name == "optimizer's state"}


def mb(number: int) -> str:
    """Bytes in MB, in three digits or whole."""
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


def describe_parts(memory: WorkerMemory) -> str:
    """All parts in a line."""
    return ", ".join(f"{mb(size)} of {name}" for name, size in parts(memory).items())


def describe_worker(memory: WorkerMemory, workers: int) -> str:
    """A line for the headline."""
    sharded = f"updates sharded over {workers} workers: " * (memory.shards is not None)
    return f"{sharded}each worker holds, in MB, {describe_parts(memory)}"


def describe_step(memory: WorkerMemory, here: int, free_bytes: int) -> str:
    """A line before the first step; `here`: workers of this host."""
    start = f"a step holds {mb(memory.activations)} MB of activations, {mb(memory.at_once)} MB at once"
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        free_bytes = stats["bytes_limit"] - stats["bytes_in_use"] + memory.state
        return f"{start}, of {mb(free_bytes)} that its GPU has free"
    short = f"; freed buffers are given back at once, {KEEP_FACTOR} times that is not free"
    total = f"{mb(memory.on_host(here))} for {here} worker{'s' * (here > 1)} of this host, of {mb(free_bytes)}"
    return f"{start}: {total}{short * is_short(memory, here, free_bytes)}"


# ---------------------------------------------------------------- whether it fits


def workers_here(workers: Workers) -> int:
    """Workers of all processes of this host."""
    return workers.processes.local_size * len(workers.mine)


def allocated(memory: WorkerMemory, here: int) -> int:
    """Bytes of the first step that a host's workers already hold."""
    return here * memory.state + memory.shared


def is_short(memory: WorkerMemory, here: int, free_bytes: int) -> bool:
    """Return True if memory lacks room for holes between freed buffers: on CPUs, unless JAXMPI_ALLOCATOR decides."""
    return KEEP_FACTOR * memory.on_host(here) > free_bytes and jax.default_backend() == "cpu" and not is_settled()


def make_room(memory: WorkerMemory, job: Job, free_bytes: int) -> None:
    """Keep freed memory or give it back; refuse what cannot fit.

    Raises:
        UsageError: bytes needed and free, and what would fit; on a host's first rank, on CPUs.
    """
    here = workers_here(job.workers)
    if is_short(memory, here, free_bytes):
        give_back_at_once()
    else:
        keep_freed_memory()  # again, if a run of this process before was short
    # What would fit is found on all ranks, which agree on what the exchange can be.
    is_over = memory.on_host(here) > free_bytes and jax.default_backend() == "cpu"
    if any(job.workers.processes.allgather_object(is_over)):
        fixes = suggest_fixes(memory, job, here, free_bytes)
        if is_over and job.workers.processes.local_rank == 0:
            raise does_not_fit(memory, here, free_bytes, fixes)


def check_fits(memory: WorkerMemory, job: Job, here: int, free_bytes: int) -> None:
    """Raise `UsageError` if the workers of a host do not fit; suggest what would."""
    if memory.on_host(here) > free_bytes:
        raise does_not_fit(memory, here, free_bytes, suggest_fixes(memory, job, here, free_bytes))


def does_not_fit(memory: WorkerMemory, here: int, free_bytes: int, fixes: list[str]) -> UsageError:
    """The error of a host's workers that do not fit, with what would."""
    return UsageError(
        f"memory: got {here} worker{'s' * (here > 1)} on this host, {mb(memory.at_once)} MB each "
        f"({describe_parts(memory)}), {mb(memory.on_host(here))} in all; expected at most the {mb(free_bytes)} "
        f"that are free: {', or '.join(fixes or ['take a smaller model, or a host of more memory'])}"
    )


def suggest_fixes(memory: WorkerMemory, job: Job, here: int, free_bytes: int) -> list[str]:
    """Options with which the workers of a host fit, each with what a worker then needs."""
    found: list[str] = []
    local_batch = job.plan.feed.samplers[0].local_batch
    batch = job.plan.micro_batch or local_batch

    def add(option: str, other: WorkerMemory, workers: int = here) -> bool:
        fits = other.on_host(workers) <= free_bytes
        if fits:
            found.append(f"{option} (about {mb(other.at_once)} each)")
        return fits

    strategy = job.experiment.exchange.strategy
    for name in (strategy,) if strategy.startswith("shm") else (strategy, "shm"):
        on = with_exchange(with_shards(job, "on"), strategy=name)
        if memory.shards if name == strategy else not shares_params(on, name):
            continue
        if job.experiment.optim.transform is None and not why_whole(on):  # a transform of the user's is not tried out
            other = estimate_memory(on, rule_in_program(on), is_fused=memory.is_fused)
            other = replace(other, activations=memory.activations, batch=memory.batch)
            add("--exchange.shard-update on" + " --exchange.strategy shm" * (name != strategy), other)
    if job.experiment.resume:  # which keeps its batches
        return found
    flags = {"--local-batch": 0} if batch == local_batch else {}
    if not (memory.is_fused or (memory.shards and memory.shards.early)):
        flags["--micro-batch"] = memory.gradients * (batch == local_batch)  # gradients of one, beside their sum
    fixed = memory.gradients * memory.is_fused  # part of the activations for any number of examples
    for flag, more in flags.items():
        for size in (size for size in range(batch - 1, 0, -1) if batch % size == 0):
            activations = fixed + (memory.activations - fixed) * size // batch + more
            if add(f"{flag} {size}", replace(memory, activations=activations)):
                break
    each = job.experiment.devices
    for workers in range(here - each, 0, -each) if not memory.shards else ():  # shards of fewer are larger
        if add(f"{workers} worker{'s' * (workers > 1)} on this host", memory, workers):
            break
    return found


# ---------------------------------------------------------------- before a run


def main(options: argparse.Namespace) -> None:
    """`jaxmpi forecast`: print the table, with sharded updates and without.

    Raises:
        UsageError: the workers of one host do not fit into the memory of this one.
    """
    process.prepare()
    experiment, _ = experiment_file.parse(options.fields)
    if registry.is_asynchronous(experiment.rule):
        raise UsageError(f"rule: got {experiment.rule.name}, whose workers differ; expected a synchronous rule")
    check_step_mode(experiment, options.n)
    here = options.slots * experiment.devices
    hosts = tuple(worker // here for worker in range(options.n * experiment.devices))
    workers = Workers(AxisComm("workers", len(hosts), hosts), SoloProcesses(), (0,), None)
    data = replace(experiment.data, memory="none")  # records kept in memory are not counted
    job = job_of(replace(experiment, data=data), workers).with_fields(data=experiment.data)
    if is_auto(experiment.exchange.strategy):
        job = with_exchange(job, strategy=f"asa:{experiment.exchange.strategy.partition(':')[2] or '32'}")
    on = with_shards(job, "on")
    if experiment.exchange.overlap == "on" and not shares_params(on, on.experiment.exchange.strategy):
        job = with_exchange(job, overlap="auto")
    columns = {"off": with_shards(job, "off"), "on": with_shards(job, "on")}
    why, (settled, reason) = why_whole(columns["on"]), resolve_shards(job)
    if why:
        del columns["on"]
    with job.plan.feed.pool, contextlib.closing(job.plan.feed.batches()) as batches:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(batches))
    found, free_bytes = {word: forecast(each, batch) for word, each in columns.items()}, available_bytes()
    form = "one program" if workers.size == 1 else "the split form"
    local_batch = job.plan.feed.samplers[0].local_batch
    print(f"{workers.size} workers x local batch {local_batch}, {here} on a host, {form}; MB a worker")
    named = [parts(memory) for memory in found.values()]
    rows: dict[str, list[str]] = {"--exchange.shard-update": [*found]}
    rows |= {name: [mb(each.get(name, 0)) for each in named] for each in named for name in each}
    rows["at once"] = [mb(memory.at_once) for memory in found.values()]
    rows["all on a host"] = [mb(memory.on_host(here)) for memory in found.values()]
    rows["free on this host"] = [mb(free_bytes)]
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{x:>10}" for x in row))
    if why or reason:
        print(f"no sharded updates: {why}" if why else reason, flush=True)
    word = settled.experiment.exchange.shard_update if "on" in found else "off"
    check_fits(found[word], columns[word], here, free_bytes)


def forecast(job: Job, batch: PyTree) -> WorkerMemory:
    """The memory of one worker, whose gradients are compiled for a batch of these shapes."""
    rule, gradients = rule_in_program(job), local_functions(job)[0]
    memory = estimate_memory(job, rule, is_fused=job.workers.size == 1)
    if memory.shards and memory.shards.early:
        gradients = memory.shards.scatter_early(gradients, NO_SUM)
    args = (*job.plan.shapes, batch, worker_key(job.experiment.seed, 0), np.int32(0))
    return with_program(memory, jax.jit(gradients).lower(*args).compile(), size_bytes(batch))
