"""A worker's memory in a step, by parts, before the first step.

Shapes say what params, gradients and the optimizer's state take. Arrays of an exchange are as many as were measured of
its strategy, those of an update as of its optimizer. XLA says what it allots for activations: the program of the first
step is asked before it runs. This costs no compilation, for the step runs that program. So a run is checked twice:
before a state is made, by what its shapes need, and before the first step. An evaluation holds no gradients, but a
whole average of params if each worker keeps a slice of it: it counts if it needs more than a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jaxmpi.allreduce import algorithms, compression
from jaxmpi.allreduce.algorithms.spec import is_one
from jaxmpi.allreduce.buckets import assign_buckets
from jaxmpi.allreduce.shards import ONE_HOST_BUCKET_BYTES
from jaxmpi.allreduce.working_memory import at_work
from jaxmpi.checkpoint.restore import equal_fields
from jaxmpi.comm.topology import Workers
from jaxmpi.core.deals import Leaves
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, size_bytes
from jaxmpi.optim import optimizers
from jaxmpi.rules.base import Rule
from jaxmpi.runtime.allocator import give_back_at_once, is_settled, keep_freed_memory
from jaxmpi.trainer.build import rule_in_program, rule_state
from jaxmpi.trainer.resolve_auto import state_bytes, why_whole, with_shards
from jaxmpi.trainer.step_form import is_one_program, shares_params
from jaxmpi.trainer.training_plan import Job, with_exchange

DEALT_ARRAYS = 5  # at most, as big as its row, that whole tensors take on their way into an update and back: 2 to 5
KEPT_FREED = 2  # times what is held at once that there must be to keep freed memory; at most 1.9 was seen
SHARDED = "--exchange.shard-update on"
EARLY = "slices of gradients", "activations and a bucket"  # names, if gradients are added up when they come


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker in a step, and in an evaluation."""

    params: int
    model_state: int
    moments: int  # bytes of the rule's state, with the optimizer's in it
    whole_moments: int  # the same without sharded updates, and so without masters
    before: int  # bytes of params and state as they were, if the step keeps them until it counts
    gradients: int  # that exist together
    exchange: int  # bytes of an exchange between programs beside gradients, about
    update: int  # bytes of an update beside gradients, about: their mean, and what XLA allots
    chosen: int = 0  # bytes of a third state, chosen from that before and the outcome, if a step may be skipped
    is_whole: bool  # True if one program is the whole step: its figure has gradients and buckets in it
    process: int = 0  # bytes of the process itself, in a forecast; 0 once it runs
    compiler: int = 0  # bytes more of the rank that compiles for its host, in a forecast
    saved: int = 0  # bytes of a checkpoint that each worker writes, copied while steps go on
    saved_once: int = 0  # and what one worker of the host writes for all
    shares_params: bool = False  # True if the workers of a host have one copy of the params
    is_sharded: bool = False  # True if the optimizer's state, and what goes with it, is a slice
    is_early: bool = False  # True if gradients leave their program as slices; activations then have a bucket in them
    bucket: int = 0  # bytes of the largest bucket of gradients that leave early
    is_summed: bool = False  # True if gradients of micro-batches are added up; activations have the last of them
    takes_micro_batches: bool = True  # True if the step keeps its form with micro-batches
    batch_stays: bool = False  # True if the run is resumed, which keeps its batches
    devices: int = 1  # number of devices of a rank; each is a worker
    workers: int = 0  # number of workers of the job
    padding: float = 0.0  # padding of rows of whole tensors, as a share of the params
    activations: int | None = None  # bytes that XLA allots to the program beside arguments and results, if known
    average: int = 0  # bytes of all params, which an evaluation gathers and keeps to its end
    average_buckets: int = 0  # there beside the average while it is gathered, about
    eval_activations: int | None = None  # as `activations`, of the program that evaluates a local batch
    others: tuple[tuple[str, "WorkerMemory"], ...] = ()  # the same step with other options, by their spelling

    @property
    def kept(self) -> int:
        """Between steps as well, but for shared params."""
        return self.params - self.shared + self.model_state + self.moments

    @property
    def at_once(self) -> int:
        """The most at one time, in a step or in an evaluation."""
        return max(self.in_step, self.in_evaluation)

    @property
    def in_evaluation(self) -> int:
        """The most in an evaluation: buckets go before activations come."""
        lasting = self.process + self.kept + self.saved
        return lasting + self.average + max(self.average_buckets, self.eval_activations or 0)

    @property
    def in_step(self) -> int:
        """The most in a step: activations, exchange and update come in turn."""
        activations = self.activations or 0
        lasting = self.process + self.kept + self.before + self.saved
        if self.is_whole:
            return lasting + max(self.gradients, activations)
        return lasting + self.gradients + max(self.exchange, self.update, self.chosen, activations)

    def on_host(self, workers: int) -> int:
        """The most at one time of so many workers of a host."""
        return workers * self.at_once + self.shared + self.saved_once + self.compiler

    @property
    def shared(self) -> int:
        """Once a host."""
        return self.params * self.shares_params

    @property
    def fixed(self) -> int:
        """Bytes of activations that are the same for any number of examples."""
        inside = 2 * self.gradients * self.is_whole + self.bucket + self.gradients * self.is_summed
        return min(self.activations or 0, inside)

    def with_share(self, share: float) -> "WorkerMemory":
        """The same with this share of a local batch or micro-batch.

        An evaluation takes a local batch at a time, so micro-batches do not change it.
        """
        fixed = self.fixed
        evaluating = self.eval_activations
        if evaluating is not None and not self.is_summed:
            evaluating = round(share * evaluating)
        activations = fixed + round(share * ((self.activations or 0) - fixed))
        return replace(self, activations=activations, eval_activations=evaluating)

    def summed(self) -> "WorkerMemory":
        """The same with micro-batches: gradients of one are there beside their sum."""
        if self.is_summed:
            return self
        return replace(self, activations=(self.activations or 0) + self.gradients, is_summed=True)

    def with_fewer(self, share: float) -> "WorkerMemory":
        """The same for this share of the workers, with unchanged local batch.

        Slices are larger then.
        """
        if not self.is_sharded:
            return self
        more = 1 / share
        moments = round(more * self.moments)
        before = self.before + (moments - self.moments) * bool(self.before)
        rest = {"moments": moments, "before": before}
        rest |= {"saved": round(more * self.saved)}
        rest |= {"update": round(more * self.update)}
        rest |= {"chosen": self.chosen + (moments - self.moments) * bool(self.chosen)}
        if self.is_early:
            rest |= {"gradients": round(more * self.gradients), "exchange": round(more * self.exchange)}
        return replace(self, **rest)


def held(job: Job, rule: Rule, strategy: str, *, is_whole: bool) -> WorkerMemory:
    """Memory of each worker by shapes alone, also under other options.

    Args:
        rule, strategy: of the run.
        is_whole: as of `WorkerMemory`.
    """
    of = held_alone(job, rule, strategy, is_whole=is_whole)
    return replace(of, others=tuple(others(job, strategy, is_whole=is_whole)))


def held_alone(job: Job, rule: Rule, strategy: str, *, is_whole: bool) -> WorkerMemory:
    """The same without other options."""
    experiment, workers, plan = job.experiment, job.workers, job.plan
    state = plan.shapes
    params, model_state = map(size_bytes, state)
    shapes = plan.params()
    moments = size_bytes(rule_state(rule, shapes))
    keeps = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    exchanges = workers.size > 1 and not is_whole
    shards = rule.sharding and rule.sharding.shards
    shares, is_early = bool(shards and shards.shared_params), bool(shards and shards.early)
    takes_whole = bool(shards) and isinstance(shards.cut, Leaves)
    arrays = at_work(
        strategy,
        is_sharded=bool(rule.sharding),
        shares_params=shares,
        takes_whole=takes_whole,
        adds_devices=experiment.devices > 1,
    )
    slices = -(-params // workers.size)
    beside = optimizers.state_arrays(experiment.optim, gives_square=not shards and rule.measured is not None)
    if takes_whole:
        beside += DEALT_ARRAYS
    has_mean = not is_early or bool(experiment.optim.clip_norm or (shards and shards.gives_square))  # the mean is
    stepped = slices * (1 + padding(rule)) if shards else params
    saved_once, saved = copied(rule, strategy, state, moments, takes_all=experiment.devices > 1)
    hosts = workers.processes.hosts
    averages = bool(rule.sharding and rule.eval_params)  # else nothing is gathered for an evaluation
    saves = plan.timetable.save_every < plan.timetable.total_steps or bool(experiment.continue_from)  # before its end
    return WorkerMemory(
        params=params,
        model_state=model_state,
        moments=moments,
        whole_moments=state_bytes(with_shards(job, "off")) if rule.sharding else moments,
        before=keeps * (params + model_state + moments),
        gradients=slices if is_early else params,
        exchange=exchanges * (slices if is_early else round(arrays * params * (1 + padding(rule)))),
        update=exchanges * round((beside + has_mean) * stepped),
        chosen=exchanges * (experiment.on_nonfinite == "skip") * (params + model_state + moments),
        is_whole=is_whole,
        saved=saves * saved,
        saved_once=saves * saved_once * (hosts[workers.processes.rank] == hosts[0]),
        shares_params=shares,
        is_sharded=bool(rule.sharding),
        is_early=is_early,
        bucket=is_early * largest_bucket(shapes, experiment.exchange.bucket_bytes),
        is_summed=plan.micro_batch not in (0, plan.feed.samplers[0].local_batch),
        takes_micro_batches=not is_early and not (is_whole and workers.size > 1 and workers.mesh is None),
        batch_stays=experiment.resume,
        devices=experiment.devices,
        workers=workers.size,
        padding=padding(rule),
        average=params * averages,
        average_buckets=averages * average_buckets(job, rule, shapes),
    )


def copied(
    rule: Rule, strategy: str, state: tuple[PyTree, PyTree], moments: int, *, takes_all: bool
) -> tuple[int, int]:
    """Bytes copied for a checkpoint: once for all workers, and by each.

    Nothing is copied at the end of a run, when nothing changes the state any more.

    Args:
        takes_all: the state of several devices is put together first.
    """
    if not algorithms.exchanges(strategy):
        return 0, 0
    params, model_state = map(size_bytes, state)
    parts = {"params": params, "rule_state": moments, "model_state": model_state}
    common = equal_fields(rule.state_is_replicated, rule.params_are_replicated)
    once = sum(size for name, size in parts.items() if name in common)
    return once, sum(parts.values()) * (1 + takes_all) - once


def largest_bucket(params: PyTree, bucket_bytes: int | None) -> int:
    """Bytes of the largest bucket: a large leaf is one by itself."""
    largest = max((size_bytes(leaf) for leaf in jax.tree.leaves(params)), default=0)
    whole = size_bytes(params)
    return whole if bucket_bytes is None else min(whole, max(bucket_bytes, largest))


def average_buckets(job: Job, rule: Rule, params: PyTree) -> int:
    """Bytes beside an average while it is gathered, about.

    Leaves that travel together, or with zeros at their end, are taken out of what has come: they are there twice. Whole
    tensors come as rows, which are joined first.
    """
    if rule.sharding and isinstance(rule.sharding.shards.cut, Leaves):
        return round(2 * (1 + padding(rule)) * size_bytes(params))
    workers, limit = job.workers, job.experiment.exchange.bucket_bytes
    if limit is not None and is_one(workers.comm.hosts):
        limit = min(limit, ONE_HOST_BUCKET_BYTES)
    leaves = jax.tree.leaves(params)
    buckets = assign_buckets([leaf.size for leaf in leaves], limit)
    twice = [bucket for bucket in buckets if len(bucket) > 1 or leaves[bucket[0]].size % workers.size]
    return size_bytes([leaves[i] for bucket in twice for i in bucket])


def others(job: Job, strategy: str, *, is_whole: bool) -> Iterator[tuple[str, WorkerMemory]]:
    """The same with sharded updates, and with params shared on a host.

    Options are left out that cannot be, or that change the step's form. An optimizer of the user's own is not tried
    out.
    """
    if job.experiment.optim.transform is not None:
        return
    is_shared = algorithms.in_shared_memory(strategy) and not compression.is_compressor(strategy)
    for name in (strategy,) if is_shared else (strategy, "shm"):
        on = with_exchange(with_shards(job, "on"), strategy=name)
        options = f"--exchange.strategy {name} " * (name != strategy)
        options += SHARDED * (job.experiment.exchange.shard_update != "on")
        if not options or (name != strategy and not shares_params(on, name)):
            continue
        if why_whole(on) or is_one_program(on, name) != is_whole:
            continue
        yield options.strip(), held_alone(on, rule_in_program(on), name, is_whole=is_whole)


def padding(rule: Rule) -> float:
    """Padding of rows of whole tensors, as a share of the params."""
    cut = rule.sharding.shards.cut if rule.sharding else None
    return cut.deal.padding if isinstance(cut, Leaves) else 0.0


def measured(of: WorkerMemory, program: jax.stages.Compiled) -> WorkerMemory:
    """The same with the program's temporary bytes, if XLA reports them."""
    analysis = program.memory_analysis()
    return of if analysis is None else with_activations(of, analysis.temp_size_in_bytes)


def with_activations(of: WorkerMemory, temp_bytes: int) -> WorkerMemory:
    """The same with `temp_bytes` as activations; other options differ by their bucket."""
    named = [(name, replace(other, activations=temp_bytes + other.bucket - of.bucket)) for name, other in of.others]
    return replace(of, activations=temp_bytes, others=tuple(named))


# ---------------------------------------------------------------- in words


def parts(of: WorkerMemory) -> dict[str, int]:
    """Each part by its name, params and the optimizer's state first.

    If a step is one program, XLA knows gradients, activations and buckets together.
    """
    named = {
        "params": of.params - of.shared,
        "params of the host": of.shared,
        "optimizer's state": of.moments,
        "model state": of.model_state,
    }
    named |= {"state before a step": of.before}
    named |= {"copy for a checkpoint": of.saved, "copy of the host for a checkpoint": of.saved_once}
    named |= {"a process": of.process, "compiler of the host": of.compiler}
    if of.is_whole and of.activations is not None:
        named["gradients, activations and buckets"] = max(of.gradients, of.activations)
    else:
        gradients, activations = EARLY if of.is_early else ("gradients", "activations")
        named |= {gradients: of.gradients, activations: of.activations or 0}
    named["new slices" if of.is_early else "buckets"] = of.exchange
    named |= {"an update": of.update, "the state that is chosen": of.chosen}
    named |= {"an evaluation's average": of.average, "buckets of the average": of.average_buckets}
    named |= {"an evaluation's activations": of.eval_activations or 0}
    return {name: size for name, size in named.items() if size or name in ("params", "optimizer's state")}


def words(of: WorkerMemory, workers: int) -> str:
    """A line for the headline."""
    moments = f"{mb(of.moments)} of the optimizer's state"
    on = dict(of.others).get(SHARDED)
    if of.is_sharded and of.moments < of.whole_moments:
        moments = f"{mb(of.moments)} of {mb(of.whole_moments)} of the optimizer's state"
    elif of.is_sharded and of.moments > of.whole_moments:  # masters
        moments += f" ({mb(of.whole_moments)} without sharded updates)"
    elif on and on.moments < of.moments:
        moments += f" ({mb(on.moments)} with {SHARDED})"
    others = [
        f"{mb(size)} of {name}" for name, size in parts(of).items() if not name.startswith(("params", "optimizer's"))
    ]
    rows = f", whole tensors in rows that {of.padding:.1%} fill up" if of.padding else ""
    params = f"{mb(of.params)} of params" + " that all workers share" * of.shares_params
    sharded = f"updates sharded over {workers} workers{rows}: " * of.is_sharded
    return f"{sharded}each worker holds, in MB, {', '.join([params, moments, *others])}"


def words_on_gpu(of: WorkerMemory) -> str:
    """The line before a GPU worker's first step; empty without a GPU."""
    counted = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if not counted or "bytes_limit" not in counted:
        return ""
    free_bytes = counted["bytes_limit"] - counted["bytes_in_use"] + of.kept
    on_gpu = replace(of, process=0, saved=0)  # which are the host's
    return f"{words_of_phases(on_gpu)}, of {mb(free_bytes)} that its GPU has free"


def words_of_phases(of: WorkerMemory) -> str:
    """Bytes that a step holds at once, and an evaluation if more."""
    evaluation = f", an evaluation {mb(of.in_evaluation)}" * (of.in_evaluation > of.in_step)
    return f"a step holds {words_of_activations(of)}{mb(of.in_step)} MB at once{evaluation}"


def words_of_activations(of: WorkerMemory) -> str:
    """The part of a step's line about activations, if they are known."""
    named = "gradients, activations and buckets" if of.is_whole else EARLY[1] if of.is_early else "activations"
    return f"{mb(of.activations)} MB of {named}, " if of.activations is not None else ""


def words_of_step(of: WorkerMemory, here: int, free_bytes: int) -> str:
    """A line before the first step.

    Args:
        here: workers of this host.
    """
    short = "; freed buffers are given back at once, twice that is not free" if is_short(of, here, free_bytes) else ""
    return (
        f"{words_of_phases(of)}: {mb(of.on_host(here))} for {here} "
        f"worker{'s' * (here > 1)} of this host, of {mb(free_bytes)}{short}"
    )


def mb(number: int) -> str:
    """Bytes in MB, in three digits or whole."""
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


# ---------------------------------------------------------------- whether it fits


def workers_here(workers: Workers) -> int:
    """Workers of all processes of this host."""
    return workers.processes.local_size * len(workers.mine)


def allocated(of: WorkerMemory, here: int) -> int:
    """Bytes of the first step that a host's workers already hold."""
    return here * of.kept + of.shared


def is_short(of: WorkerMemory, here: int, free_bytes: int) -> bool:
    """Return True if memory lacks room for holes between freed buffers.

    The answer is False on accelerators, and if the user has set JAXMPI_ALLOCATOR.
    """
    return KEPT_FREED * of.on_host(here) > free_bytes and jax.default_backend() == "cpu" and not is_settled()


def make_room(of: WorkerMemory, job: Job, free_bytes: int) -> None:
    """Keep freed memory or give it back; refuse what cannot fit.

    Raises:
        UsageError: bytes needed and free, and what would fit; on a host's first rank, on CPUs.
    """
    here, plan = workers_here(job.workers), job.plan
    if is_short(of, here, free_bytes):
        give_back_at_once()
    else:
        keep_freed_memory()  # again, if a run of this process before was short
    if job.workers.processes.local_rank == 0 and jax.default_backend() == "cpu":
        check_fits(of, here, plan.micro_batch or plan.feed.samplers[0].local_batch, free_bytes)


def check_fits(of: WorkerMemory, here: int, batch: int, free_bytes: int) -> None:
    """Raise `UsageError` if a host's workers do not fit; suggest what would.

    Args:
        batch: examples of a worker at a time: of a micro-batch, or of the local batch.
    """
    need, each = of.on_host(here), ", ".join(f"{mb(size)} of {name}" for name, size in parts(of).items())
    check(
        need <= free_bytes,
        f"memory: got {here} worker{'s' * (here > 1)} on this host, {mb(of.at_once)} MB each ({each}), {mb(need)} in "
        f"all; expected at most the {mb(free_bytes)} that are free: "
        + (", or ".join(ways(of, here, batch, free_bytes)) or "take a smaller model, or a host of more memory"),
    )


def ways(of: WorkerMemory, here: int, batch: int, free_bytes: int) -> list[str]:
    """Options with which a run fits, each with a worker's memory."""
    found: list[str] = []
    smaller = [size for size in range(batch - 1, 0, -1) if batch % size == 0]

    def add(options: str, form: WorkerMemory) -> bool:
        fits = form.on_host(here) <= free_bytes
        if fits:
            found.append(f"{options} (about {mb(form.at_once)} each)")
        return fits

    for options, base in (("", of), *of.others):
        if options and add(options, base):
            continue
        if of.batch_stays:
            continue
        # A micro-batch has gradients whole again where they leave early, and the local batch is its multiple.
        forms = {"--local-batch": base} if not base.is_summed else {}
        forms |= {"--micro-batch": base.summed()} if base.takes_micro_batches else {}
        for flag, form in forms.items():
            named = f"{options} with {flag}" if options else flag
            any(add(f"{named} {size}", form.with_share(size / batch)) for size in smaller)
    least = of.is_sharded and here == of.workers  # a single worker in all has nothing to shard
    for workers in range(here - of.devices, least, -of.devices) if not of.batch_stays else ():
        fewer = of.with_fewer(workers / here)
        if fewer.on_host(workers) <= free_bytes:
            as_many = f", with {'--micro-batch' if of.is_summed else '--local-batch'} {batch}"
            found.append(
                f"{workers} worker{'s' * (workers > 1)} on this host{as_many} (about {mb(fewer.at_once)} each)"
            )
            break
    return found
