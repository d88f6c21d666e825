"""The form of the step: its programs, and what travels beside them.

fused: one jit; only here can the exchange run beside the backward pass. split: gradients, exchange and update are jits
of their own. So one rank per host compiles the two big ones, and the others read them from the cache. A jit that holds
a communicator can never be read from it (docs/decisions/0007). Several ranks on CPUs get the split form by default.

Two things may be sent while a program computes: buckets of gradients, during the backward pass of a fused step; and
gradients that go into the sum in shared memory as they come, so that they never exist together. This module decides
which of them do, and says why the others cannot. It compiles nothing and sends nothing: all ranks come to the same
answers.
"""

import dataclasses

import jax

from jaxmpi.allreduce import algorithms, comm_thread, compression, overlap
from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import BUCKET_BYTES
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.sharded import check_floats
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.core.sharding import ElementSharding, TensorSharding
from jaxmpi.optim import optimizers
from jaxmpi.rules import registry
from jaxmpi.runtime import host_callbacks
from jaxmpi.trainer.compatibility import UnfitForOverlap
from jaxmpi.trainer.training_plan import Job

# `auto` shards updates if a worker saves so much of the optimizer's state, and sums gradients early if so much of them.
SAVED_BYTES = BUCKET_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepForm:
    """The form of a run's step."""

    is_split: bool  # gradients, exchange and update are jits of their own; else all are one
    is_beside: bool  # buckets travel behind the backward pass
    is_early: bool  # gradients go into the sum in shared memory as they come
    why: str  # the exchange is hidden or not, for the log


def form_of(job: Job, strategy: str) -> StepForm:
    """The form that suits these workers.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    is_early, why_early = is_scattered_early(job, strategy)
    is_beside, why_beside = chosen_overlap(job, strategy)
    why = why_early if shares_params(job, strategy) else why_beside
    return StepForm(is_split=is_split(job) and not is_beside, is_beside=is_beside, is_early=is_early, why=why)


def is_split(job: Job) -> bool:
    """Return True if the step is split.

    A step is split by default if several ranks would compile one program on the same cores. With several devices a
    process a step always is split: MPI is called between programs over them.
    """
    workers, mode = job.workers, job.experiment.step_mode
    if workers.devices > 1:
        return True
    if mode != "auto" or workers.mesh is not None:
        return mode == "split" and workers.mesh is None
    return workers.comm.size > 1 and jax.default_backend() == "cpu"


def chosen_overlap(job: Job, strategy: str) -> tuple[bool, str]:
    """Return True if buckets travel beside the step's program, and why.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    if shares_params(job, strategy):
        return False, ""
    return overlap.chosen(job.experiment.exchange.overlap, strategy, job.workers.comm, unfit_for_overlap(job))


def shares_params(job: Job, strategy: str) -> bool:
    """Return True if sharded updates write params that the host's ranks share.

    All ranks of the one host read these params, between programs. They are not shared if the params before a step are
    needed until it counts. With `--comm xla` a step is one program over all devices, whose mesh a forecast lacks.
    """
    experiment = job.experiment
    if experiment.exchange.shard_update != "on" or job.workers.size == 1 or experiment.comm == "xla":
        return False
    if compression.is_compressor(strategy):
        return False
    keeps = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    is_exact = experiment.exchange.gather_wire == "32"
    is_in_reach = algorithms.in_shared_memory(strategy) and jax.default_backend() == "cpu"
    return is_in_reach and is_exact and not keeps and is_split(job) and experiment.devices == 1


def is_scattered_early(job: Job, strategy: str) -> tuple[bool, str]:
    """Return True if gradients are summed in shared memory early, and why.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    if not shares_params(job, strategy):
        return False, ""
    asked, unfit = job.experiment.exchange.overlap, unfit_for_overlap(job)
    saved = size_bytes(job.plan.params()) * (job.workers.size - 1) // job.workers.size
    if asked == "auto" and not unfit and saved < SAVED_BYTES:
        unfit = f"{saved / 1e6:.3g} MB of gradients less are less than a bucket of {SAVED_BYTES / 1e6:.3g}"
    return overlap.chosen_in_memory(asked, unfit)


def unfit_for_overlap(job: Job) -> str:
    """Why this step cannot hide an exchange; empty if it can."""
    experiment, workers, plan = job.experiment, job.workers, job.plan
    if workers.devices > 1:
        return UnfitForOverlap.DEVICES.format(devices=workers.devices)
    if experiment.exchange.shard_update == "on" and (reason := unfit_slices(job, experiment.exchange.strategy)):
        return reason
    if experiment.step_mode == "split":
        return UnfitForOverlap.SPLIT
    if experiment.on_rank_loss == "shrink":
        return UnfitForOverlap.VOTES
    if registry.is_periodic(experiment.rule):
        return UnfitForOverlap.PERIODIC.format(rule=experiment.rule.name)
    if compression.is_compressor(experiment.exchange.strategy):
        return UnfitForOverlap.COMPRESSOR
    fits = plan.micro_batch in (0, plan.feed.samplers[0].local_batch)
    return "" if fits else UnfitForOverlap.MICRO_BATCHES


def unfit_slices(job: Job, strategy: str) -> str:
    """Why the halves of a sharded exchange cannot run concurrently with the step, or empty."""
    experiment, workers = job.experiment, job.workers
    if compression.is_compressor(strategy):
        return ""  # refused for itself
    name = "asa:32" if is_auto(strategy) else algorithms.parse(strategy).name
    if shares_params(job, name):
        if experiment.batch_statistics == "synchronised":
            return UnfitForOverlap.SCATTERS
        if isinstance(sharding_of(job), TensorSharding):
            return UnfitForOverlap.WHOLE.format(optimizer=experiment.optim.name)
        return host_callbacks.unavailable_reason() or ""
    halves, algorithm = algorithms.parse(name).spec.halves, name.partition(":")[0]
    if not halves:
        return ""  # refused for itself
    if not halves.scatter_part:
        if nowhere := comm_thread.unavailable_reason("asa:32", workers.comm):
            return nowhere
        with_both = [(each, algorithms.parse(each).spec.halves) for each in with_halves(workers.comm.hosts)]
        able = ", ".join(each for each, both in with_both if both and both.scatter_part)
        return UnfitForOverlap.HALVES.format(algorithm=algorithm, able=able)
    if experiment.batch_statistics == "synchronised":
        return UnfitForOverlap.SLICES
    return comm_thread.unavailable_reason(f"{algorithm}:{experiment.exchange.gather_wire}", workers.comm) or ""


def sharding_of(job: Job) -> ElementSharding | TensorSharding:
    """How sharded updates divide the params among workers.

    Raises:
        UsageError: the optimizer allows none, or params are not float32.
    """
    check_floats(job.plan.params())
    return optimizers.sharding_for(job.experiment.optim, job.plan.lr, job.plan.params(), job.workers.size)
