"""`jaxmpi.sharded`: an Optax optimizer between the halves of its exchange (`zero`), for loops of your own.

With a coarse wire for the second half a worker keeps its shard of the params in 32 bits, the masters m. It sends what
params lack:

    m <- m + tx(g) ;  params <- params + wire(m - params)

So what a message rounds off is in the next one (error feedback). Params are off m by one rounding of a message.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import BUCKET_BYTES, Op, is_traced, resolve_auto
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.zero import Zero, make_zero
from jaxmpi.comm.agreement import refuse_together, without_messages
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import control_of, numbers_of, workers_of
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.pytrees import PyTree, RanksOwn, join_complex, named_leaves, split_complex
from jaxmpi.core.random_keys import packed
from jaxmpi.core.sharding import ElementSharding, TensorSharding, assign_tensors
from jaxmpi.core.sharding_trial import check_sharding, schedule_free_states


class MasteredState(NamedTuple):
    """State of `sharded` with a coarse wire of changes."""

    tx_state: PyTree
    masters: PyTree  # this worker's shard of params in 32 bits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("shard",), meta_fields=("indices", "ranks", "sharding", "whole")
)
@dataclass(frozen=True)
class ShardedState(RanksOwn):
    """State of `sharded`, and how it is sharded, for whoever saves it."""

    shard: PyTree  # this worker's
    indices: tuple[int, ...]  # by worker: the index of its shard
    ranks: tuple[int, ...]  # by worker: the launcher's number; none along an axis
    sharding: ElementSharding | TensorSharding
    whole: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of each leaf of all shards joined

    def to_checkpoint(self, worker: int) -> PyTree:
        """A worker's shard as a checkpoint has it."""
        return packed(self.sharding.to_checkpoint(self.shard, self.indices[worker]))

    def from_checkpoint(self, worker: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A worker's shard from a checkpoint's whole leaves, by `read(name)`."""
        return self.sharding.from_checkpoint(packed(self.shard), self.indices[worker], read)


def sharded(
    tx: optax.GradientTransformation,
    by: str = "",
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    clip_norm: float = 0.0,
    gather_wire: str = "32",
    cost: Callable[[Sequence[int]], float] = math.prod,
) -> optax.GradientTransformation:
    """An Optax optimizer and its exchange, with state sharded over workers.

    u <- all_gather(tx(shard of (1/w) sum_i g_i)), in place of `optax.chain(exchange_gradients(strategy), tx)`. Each of
    w workers has 1/w of tx's state. Updates are whole and the same bits on all workers; those of the chain if the
    wires are 32, each tensor is sent alone and XLA fuses alike (`jaxmpi.allreduce.zero`). With one worker it is tx
    itself, with 32-bit params of its own if `gather_wire` is below 32.

    Args:
        tx: an optimizer whose update of a tensor depends on no other one.
        by: `element` if tx treats every entry by itself, as Adam, AdamW, momentum, Lion and RMSProp do: each worker
            updates 1/w of each tensor. tx may go by the names and the number of axes of tensors, not by their shapes.
            `tensor` if it mixes the entries of a tensor, as LARS, LAMB, Adafactor and Muon: each worker updates whole
            tensors. `init` tries the word on a few floats.
        strategy: asa, ring, hier-asa or hier-ring, with any wire, which gradients take; shm, ar; or auto.
        op: mean or sum, of gradients.
        comm: as of `exchange`.
        bucket_bytes: as of `exchange`, by element; outside jit on one host at most 1 MiB, if it is a number.
        clip_norm: largest global norm of the mean gradient, or of the sum by `op`, as `optax.clip_by_global_norm`
            before tx; 0: any.
        gather_wire: of the updates. With a coarser one than 32 each worker keeps its shard of params in 32 bits.
            Updates bring params to within a rounding of that shard. Params must then be changed by these updates alone.
        cost: of the update of a whole tensor, by its shape, >= 0, the same on all ranks. Workers get tensors of about
            equal cost and as many entries. Muon's is `jaxmpi.optim.optimizers.muon_cost`.

    A complex tensor is two for tx, its real and its imaginary part, as by `optax.contrib.split_real_and_imaginary(tx)`;
    conjugate gradients of `jax.grad` before, as for any optimizer of Optax.

    Outside jit an update of whole tensors is a program that is traced once. A Python variable that a schedule reads is
    fixed then. So keep a rate that changes in the state, by `optax.inject_hyperparams`.

    State: `ShardedState`, in which `shard` is tx's for this worker's shard. `init` and `update` need params.
    Communicates: as much as `exchange`, and one float with `clip_norm`; shards of whole tensors are padded to the
    longest.

    Raises:
        UsageError: as `exchange`; a strategy without halves; params that are not float32; no `by`, or one that the
            trial disproves; a schedule-free optimizer.
    """
    has_masters = gather_wire != "32"

    @functools.cache
    def make(structure: Any, shapes: tuple, workers: Comm) -> Zero:
        name = strategy
        if is_auto(name):
            sizes = [math.prod(shape) for shape in shapes]
            name = resolve_auto(workers, name, bucket_bytes, sizes, with_halves(workers.hosts, gather_wire))
        like = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
        sharding = assign_tensors(like, workers.size, cost) if by == "tensor" else None
        zero = make_zero(name, op, workers, bucket_bytes, sharding, clip_norm, gather_wire=gather_wire)
        return zero._replace(sharding=zero.sharding.with_state_of(tx))

    def zero_of(tree: PyTree) -> Zero:
        leaves, structure = jax.tree.flatten(tree)
        return make(structure, tuple(leaf.shape for leaf in leaves), workers_of(comm))

    def init(params: PyTree) -> PyTree:
        params = split_complex(params)
        check_floats(params)
        if schedule_free_states(jax.eval_shape(tx.init, params)):
            raise UsageError(
                "jaxmpi.sharded(tx): got a schedule-free optimizer, which evaluates an average of the params, of which "
                "a worker would have a shard; leave it unsharded, or take one without an average and a schedule of "
                "rates"
            )
        with without_messages("jaxmpi.sharded(tx)", "in tx", "it exchanges by itself, so give it the optimizer alone"):
            check_sharding(tx, params, by, workers_of(comm).size)
        zero = zero_of(params)
        state, init_whole = zero.sharding.init(tx, params, zero.shard_index()), tx.init
        if has_masters:  # with one worker too, so that the state fits any number of them
            masters = zero.sharding.shard(params, zero.shard_index())
            if zero.size == 1:  # they would be the params themselves, which a step may donate
                masters = jax.tree.map(jnp.copy, masters)
            state, init_whole = MasteredState(state, masters), lambda tree: MasteredState(tx.init(tree), tree)
        shapes_by_name = named_leaves(jax.eval_shape(lambda tree: packed(init_whole(tree)), params))
        leaves = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in shapes_by_name)
        return ShardedState(state, zero.shard_indices, numbers_of(zero.comm), zero.sharding, leaves)

    def step(
        sharding: ElementSharding | TensorSharding, index: Any, mean: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """This worker's updates to send, and its state."""
        if not has_masters:
            return sharding.step(tx.update, index, mean, state, sharding.shard(params, index))
        master_updates, tx_state = sharding.step(tx.update, index, mean, *state)
        masters = jax.tree.map(jnp.add, state.masters, master_updates)
        return sharding.changes(params, masters, index), MasteredState(tx_state, masters)

    compiled_step = jax.jit(step, static_argnums=0)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        with refuse_together(control_of(workers_of(comm))):
            if params is None:
                raise UsageError("sharded: got no params; expected update(grads, state, params)")
            updates, params = split_complex(updates), split_complex(params)
            check_floats(updates)
            for leaf in jax.tree.leaves(params):
                check_unmasked("sharded: params", leaf)
            zero = zero_of(updates)
            check_state(state, zero, has_masters=has_masters)
        mean, _ = zero.scatter(updates)
        # Outside jit JAX would compile the branches of whole tensors, one for each worker, anew at every call.
        is_outside = not is_traced(jax.tree.leaves((updates, params, state)))
        run = compiled_step if is_outside and isinstance(zero.sharding, TensorSharding) else step
        updates_to_send, shard = run(zero.sharding, zero.shard_index(), mean, state.shard, params)
        wire = gather_wire if zero.size > 1 else "32"
        return join_complex(zero.gather(updates_to_send, updates, wire)), replace(state, shard=shard)

    return optax.GradientTransformation(init, update)


def check_floats(params: PyTree) -> None:
    """Refuse params that are not float32: moments of shards would be rounded."""
    for name, leaf in named_leaves(params):
        check_unmasked(f"sharded: {name or '(the tree itself)'}", leaf)
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise UsageError(
                f"sharded: {name or '(the tree itself)'} is {getattr(leaf, 'dtype', type(leaf).__name__)}; expected "
                "float32: keep params in 32 bits and cast them inside the loss"
            )


def check_state(state: Any, zero: Zero, *, has_masters: bool) -> None:
    """Refuse a state of another transformation, of other workers or sharded otherwise."""
    if not isinstance(state, ShardedState) or isinstance(state.shard, MasteredState) != has_masters:
        got = f"one with{'out' * has_masters} masters" if isinstance(state, ShardedState) else type(state).__name__
        raise UsageError(f"sharded: got {got}; expected the state of this transformation's init")
    for fact, got, expected in (
        ("ranks", state.ranks, numbers_of(zero.comm)),
        ("shards by worker", state.indices, zero.shard_indices),
        ("tensors by shard", *(getattr(x, "owners", "by element") for x in (state.sharding, zero.sharding))),
    ):
        if got != expected:
            raise UsageError(
                f"sharded: {fact}: got a state with {got}; expected {expected}, as on these workers by this strategy "
                "and `cost`: restore it by jaxmpi.Checkpoints with this transformation's init"
            )
