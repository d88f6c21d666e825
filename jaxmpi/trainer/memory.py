"""A worker's memory, part by part: checked before a state is made, and again before the first step.

Shapes say what params, the optimizer's state, gradients and their mean take, and XLA's memory analysis what activations
take: of the program of the first step, before it runs, which costs no compilation. Nothing is fitted to measurements,
so a worker needs at least what is counted here; what a process takes by itself, and an exchange's buffers in transit,
come on top. `jaxmpi forecast` prints the same table before there is a run.
"""

import argparse
import contextlib
import os
from dataclasses import dataclass, fields, replace

import jax
import numpy as np

from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.buckets import Order
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
from jaxmpi.runtime.process import give_back_at_once, keep_freed_memory
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.build import build_rule, exchange_for, forward_of, rule_state_shapes, shares_params
from jaxmpi.trainer.plan import Plan, make_plan

KEEP_FACTOR = 2  # freed memory is kept if this many times what is needed is free: its holes took up to 0.9 of it
NO_SUM = "a sum that is not made"  # its name in a program that is compiled and not run


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker, by part."""

    params: int  # the worker's own
    params_of_host: int = 0  # of which a host has one copy
    optimizer_state: int  # the rule's state, which has the optimizer's in it
    model_state: int = 0
    previous_state: int = 0  # state before a step, if it is kept until the step counts
    checkpoint: int = 0  # copy of what this worker writes, while steps continue
    host_checkpoint: int = 0  # copy of what one worker of the host writes for all
    batch: int = 0
    gradients: int
    exchanged: int = 0  # what an exchange between programs, or a skipped step, has beside gradients
    activations: int = 0  # XLA's temporary bytes; 0 until a program is compiled
    average: int = 0  # an average of all params, gathered for an evaluation
    is_fused: bool  # one program is the whole step: its temporary bytes include gradients and buckets
    is_sharded: bool = False  # each worker updates a shard of the params

    @property
    def state(self) -> int:
        """Bytes of the worker's own that exist between steps."""
        return self.params + self.model_state + self.optimizer_state

    @property
    def at_once(self) -> int:
        """The most at one time: activations are freed before gradients are exchanged, both before an evaluation."""
        if self.is_fused:
            step = max(self.gradients, self.activations)
        else:
            step = self.gradients + max(self.exchanged, self.activations)
        return self.state + self.checkpoint + max(self.previous_state + self.batch + step, self.average)

    def on_host(self, workers: int) -> int:
        """The most at one time of this many workers of a host."""
        return workers * self.at_once + self.params_of_host + self.host_checkpoint

    def parts(self) -> dict[str, int]:
        """Bytes of each part that is not 0, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.type is int}
        return {name.replace("_", " "): size for name, size in named.items() if size}

    def described(self) -> str:
        """All parts in a line, in MB."""
        return ", ".join(f"{mb(size)} of {name}" for name, size in self.parts().items())


def estimate_memory(plan: Plan, rule: Rule, *, is_fused: bool) -> WorkerMemory:
    """A worker's memory by shapes alone; `is_fused`: one program is the whole step."""
    experiment, workers = plan.experiment, plan.workers
    params, model_state = map(size_bytes, plan.shapes)
    optimizer_state = size_bytes(rule_state_shapes(rule, plan.param_shapes))
    state = params + model_state + optimizer_state
    zero, skips = rule.sharding and rule.sharding.zero, experiment.on_nonfinite == "skip"
    shard, is_shared = -(-params // workers.size), bool(zero and zero.shared_params)
    # The last checkpoint of a run is not copied, since nothing changes the state any more.
    is_copied = plan.timetable.save_every < plan.timetable.total_steps or "save" in plan.timetable.periods_s
    is_copied = is_copied and plan.exchanges
    hosts = workers.processes.hosts
    common = params * rule.params_are_replicated + optimizer_state * rule.state_is_replicated
    return WorkerMemory(
        params=0 if is_shared else params,
        params_of_host=params if is_shared else 0,
        optimizer_state=optimizer_state,
        model_state=model_state,
        previous_state=state * (skips or experiment.on_rank_loss == "shrink"),
        checkpoint=is_copied * (state - common),
        host_checkpoint=is_copied * common * (hosts[workers.processes.rank] == hosts[0]),
        gradients=shard if zero and zero.early else params,
        # A mean of all gradients, or of a shard if new params need not be gathered.
        exchanged=0 if is_fused or workers.size == 1 else max(shard if is_shared else params, state * skips),
        average=params * bool(rule.sharding and rule.eval_params),
        is_fused=is_fused,
        is_sharded=zero is not None,
    )


def with_program(memory: WorkerMemory, program: jax.stages.Compiled, batch_bytes: int) -> WorkerMemory:
    """The same with the program's temporary bytes, if XLA reports them, and a worker's batch."""
    analysis = program.memory_analysis()
    return replace(memory, activations=analysis.temp_size_in_bytes if analysis else 0, batch=batch_bytes)


def mb(number: int) -> str:
    """Bytes in MB, in three digits or whole."""
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


def describe_worker(memory: WorkerMemory, workers: int) -> str:
    """A line for the headline."""
    sharded = f"updates sharded over {workers} workers: " if memory.is_sharded else ""
    return f"{sharded}each worker holds, in MB, {memory.described()}"


def describe_step(memory: WorkerMemory, here: int, free_bytes: int) -> str:
    """A line before the first step; `here`: workers of this host."""
    start = f"a step holds {mb(memory.activations)} MB of activations, {mb(memory.at_once)} MB at once"
    if jax.default_backend() != "cpu":
        return start
    short = f"; freed buffers are given back at once, {KEEP_FACTOR} times that is not free"
    total = f"{mb(memory.on_host(here))} for {here} of this host, of {mb(free_bytes)}"
    return f"{start}: {total}{short * is_short(memory, here, free_bytes)}"


# ---------------------------------------------------------------- whether it fits


def workers_here(workers: Workers) -> int:
    """Workers of all processes of this host."""
    return workers.processes.local_size * len(workers.mine)


def is_short(memory: WorkerMemory, here: int, free_bytes: int) -> bool:
    """Return True if memory lacks room for holes between freed buffers: on CPUs, unless JAXMPI_ALLOCATOR decides."""
    is_decided = os.environ.get("JAXMPI_ALLOCATOR") in ("system", "keep")
    return KEEP_FACTOR * memory.on_host(here) > free_bytes and jax.default_backend() == "cpu" and not is_decided


def make_room(memory: WorkerMemory, plan: Plan, free_bytes: int) -> None:
    """Keep freed memory or give it back; refuse what cannot fit, on CPUs, on a host's first rank."""
    here = workers_here(plan.workers)
    if is_short(memory, here, free_bytes):
        give_back_at_once()
    else:
        keep_freed_memory()  # again, if a run of this process before was short
    if jax.default_backend() == "cpu" and plan.workers.processes.local_rank == 0:
        check_fits(memory, plan, here, free_bytes)


def check_fits(memory: WorkerMemory, plan: Plan, here: int, free_bytes: int) -> None:
    """Raise `UsageError` if the workers of a host do not fit, with the options by which a worker needs less."""
    if memory.on_host(here) <= free_bytes:
        return
    ways = [] if memory.is_sharded else ["start fewer workers on this host", "--exchange.shard-update on"]
    if not plan.experiment.resume:  # which keeps its batches
        ways.append("a smaller --local-batch" + " or --micro-batch" * (not memory.is_fused))
    raise UsageError(
        f"memory: got {here} workers on this host, {mb(memory.at_once)} MB each ({memory.described()}), "
        f"{mb(memory.on_host(here))} in all; expected at most the {mb(free_bytes)} that are free: "
        f"{', or '.join([*ways, 'a smaller model'])}"
    )


# ---------------------------------------------------------------- jaxmpi forecast


def main(options: argparse.Namespace) -> None:
    """`jaxmpi forecast`: print the table, with sharded updates and without."""
    process.prepare()
    experiment, _ = experiment_file.parse(options.fields)
    if registry.is_asynchronous(experiment.rule):
        raise UsageError(f"rule: got {experiment.rule.name}, whose workers differ; expected a synchronous rule")
    here = options.slots * experiment.devices
    hosts = tuple(worker // here for worker in range(options.n * experiment.devices))
    workers = Workers(AxisComm("workers", len(hosts), hosts), SoloProcesses(), (0,), None)
    data = replace(experiment.data, memory="none")  # records kept in memory are not counted
    plan = make_plan(replace(experiment, data=data), workers).with_fields(data=experiment.data)
    if is_auto(experiment.exchange.strategy):
        plan = plan.with_exchange(strategy=f"asa:{experiment.exchange.strategy.partition(':')[2] or '32'}")
    with plan.feed.pool, contextlib.closing(plan.feed.batches()) as batches:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(batches))
    found: dict[str, WorkerMemory] = {}
    obstacle = ""
    for word in ("off", "on"):
        sharded = plan.with_exchange(shard_update=word, **({"gather_wire": "32"} if word == "off" else {}))
        if experiment.exchange.overlap == "on" and not shares_params(sharded):
            sharded = sharded.with_exchange(overlap="auto")
        try:
            found[word] = forecast(sharded, batch)
        except UsageError as error:
            if word == experiment.exchange.shard_update:
                raise
            obstacle = f"no sharded updates: {error}"
    free_bytes, form = available_bytes(), "one program" if workers.size == 1 else "the split form"
    print(f"{workers.size} workers x local batch {plan.local_batch}, {here} on a host, {form}; MB a worker")
    rows: dict[str, list[str]] = {"--exchange.shard-update": [*found]}
    named = [memory.parts() for memory in found.values()]
    rows |= {name: [mb(each.get(name, 0)) for each in named] for each in named for name in each}
    rows["at once"] = [mb(memory.at_once) for memory in found.values()]
    rows["all on a host"] = [mb(memory.on_host(here)) for memory in found.values()]
    rows["free on this host"] = [mb(free_bytes)]
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{x:>10}" for x in row))
    if obstacle:
        print(obstacle, flush=True)
    check_fits(found[experiment.exchange.shard_update], plan, here, free_bytes)


def forecast(plan: Plan, batch: PyTree) -> WorkerMemory:
    """The memory of one worker, whose gradients are compiled for a batch of these shapes."""
    rule = build_rule(plan, exchange_for(plan, Order()))  # for its shapes and refusals alone
    gradients = steps.local_gradients(forward_of(plan), plan.micro_batch)
    memory = estimate_memory(plan, rule, is_fused=plan.workers.size == 1)
    if rule.sharding and rule.sharding.zero.early:
        gradients = rule.sharding.zero.scatter_early(gradients, NO_SUM)
    args = (*plan.shapes, batch, worker_key(plan.experiment.seed, 0), np.int32(0))
    return with_program(memory, jax.jit(gradients).lower(*args).compile(), size_bytes(batch))
