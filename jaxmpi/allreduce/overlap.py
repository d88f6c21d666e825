"""The exchange behind the backward pass, for use inside jit.

An exchange after the backward pass leaves the network idle while gradients are computed. Here each bucket is sent as
soon as its gradients exist, on the thread of `comm_thread`. The result has the same bits as `exchange` with the same
order. For MPI ranks on one host `resolve` turns `auto` off, since the exchange needs cores and memory there.
"""

import jax
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.table import algorithms_in_c
from jaxmpi.allreduce.api import (
    BUCKET_BYTES,
    TRACED,
    Choice,
    Op,
    check_leaves,
    check_op,
    check_strategy,
    is_traced,
    resolve_auto,
)
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.call_order import caller, joint_call, number_of
from jaxmpi.allreduce.comm_thread import unavailable_reason
from jaxmpi.allreduce.derivative import block_transforms
from jaxmpi.allreduce.dispatch import OnCommThread
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, workers_of
from jaxmpi.config.exchange_config import check_bucket_bytes
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, named_leaves

# ---------------------------------------------------------------- whether


def resolve(setting: str, strategy: str, comm: Comm, unfit: str = "", *, in_memory: bool = False) -> tuple[bool, str]:
    """Choose whether the exchange runs beside the backward pass, with the reason.

    Args:
        setting: auto, on or off. auto is on if ranks are on several hosts: inside one, an exchange is work for
            memory and cores, of which the backward pass leaves none.
        unfit: why the step cannot hide an exchange; empty if it can.
        in_memory: sums are in shared memory; auto is then on, since gradients do not exist together.

    Raises:
        UsageError: on, if it cannot be; or an unknown value.
    """
    if setting == "off":
        return False, "overlap off: as set"
    is_on_one_host = isinstance(comm, MpiComm) and comm.size > 1 and len(set(comm.hosts)) == 1
    if setting == "auto" and not unfit and is_on_one_host and not in_memory:
        return False, "overlap off: all ranks are on one host"  # the reason that no option changes
    reason = unfit or (None if in_memory else unavailable_reason(strategy, comm))
    is_refused = setting == "on" and comm.size > 1 and reason
    check(not is_refused, f"exchange.overlap: got {setting}, but {reason}; use off or auto")
    auto = "gradients do not exist together so" if in_memory else f"ranks are on {len(set(comm.hosts))} hosts"
    return not reason, f"overlap off: {reason}" if reason else f"overlap on: {'as asked' if setting == 'on' else auto}"


# ---------------------------------------------------------------- in a program


def exchange(
    tree: PyTree,
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    order: Order | None = None,
    portable: bool = False,
) -> PyTree:
    """`jaxmpi.exchange` inside jit, beside what computes the tree; the same bits.

    mean: (1/w) sum_i tree_i ;  sum: sum_i tree_i ;  both added in f32.

    Args:
        tree: this worker's leaves, traced; float32, bfloat16 or float16.
        strategy: asa, ring, tree, `color<k>`, pipering or `hier-<cross>` of one of these, with any wire; or auto, which
            then takes one of these.
        op: mean or sum.
        comm: all MPI ranks, on CPUs; default: the world.
        bucket_bytes: as of `jaxmpi.exchange`; what waits for the last gradient of a bucket is less if this is less.
        order: of the function that computed the tree; default: from the last leaf to the first.
        portable: the program can be exported. Other MPI calls in it are not ordered with this one: they must be such
            that all leaves depend on them.

    Communicates: while it is traced, and whenever its program runs, ranks compare as in `jaxmpi.exchange`, unless it is
    portable; then they compare plans at its first run. The strategy runs once a bucket, on a thread and a communicator
    of its own.

    Raises:
        UsageError: as `jaxmpi.exchange`; or an exchange cannot run beside a program here.
    """
    workers = workers_of(comm)
    with joint_call(workers, is_compared=not portable):  # ranks compare what is portable when they first run it
        check_op(op)
        check_bucket_bytes(bucket_bytes)
        check_strategy(strategy)
        check_leaves(tree)
        leaves, structure = jax.tree.flatten(tree)
        reason = unavailable_reason("asa:32" if is_auto(strategy) else strategy, workers) if workers.size > 1 else ""
        check(not reason, f"this exchange cannot run beside a program: {reason}; use jaxmpi.exchange")
        check(is_traced(leaves), "overlap.exchange is for use inside jax.jit; outside use jaxmpi.exchange")
        if workers.size == 1 or not leaves:
            return tree
        if is_auto(strategy):
            sizes = [leaf.size for leaf in leaves]
            strategy = resolve_auto(workers, strategy, bucket_bytes, sizes, algorithms_in_c(workers.hosts))
        choice = Choice(parse(strategy).name, op, workers, bucket_bytes, order or Order())
        labels, names = [], [name for name, _ in named_leaves(tree)]
        for bucket in (buckets := choice.buckets(leaves)):
            suffix = f" and {len(bucket) - 1} more" if len(bucket) > 1 else ""
            labels.append(f"bucket {len(labels) + 1} of {len(buckets)} ({names[bucket[0]]}{suffix})")
        number = None
        if not portable:
            workers.assert_same(choice.fingerprint(tree, TRACED))
            number = number_of(workers, f"beside its program: {choice.describe(leaves)}, {caller()}")
        choice = choice._replace(on_comm_thread=OnCommThread(tuple(labels), portable, number))
        wrapped_leaves = [block_transforms(jnp.asarray(leaf), workers) for leaf in leaves]
        return jax.tree.unflatten(structure, choice.program(wrapped_leaves)(wrapped_leaves))
