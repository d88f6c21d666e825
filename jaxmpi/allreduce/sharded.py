"""The optimizer between the exchange's halves: each worker updates a w-th.

    mean gradient, a slice each <- reduce-scatter ;  step of that slice ;  whole tree <- allgather, at 32 bits

As many bytes travel as in an allreduce, and a worker holds a w-th of the optimizer's state. Optimizers that mix the
entries of a leaf step whole leaves, dealt to workers (`core.deals`). `shards` has the halves, and says which bits they
give.

With a coarse wire for the second half a worker keeps its slice in 32 bits, the masters m. It sends what params lack:

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
from jaxmpi.allreduce.api import BUCKET_BYTES, Op, check_op, check_strategy, is_traced, settle
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.shards import Shards, shards_of
from jaxmpi.comm.agreement import without_messages
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import numbers_of, workers_of
from jaxmpi.core.deals import Leaves, deal
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, RanksOwn, named_leaves
from jaxmpi.core.random_keys import packed
from jaxmpi.core.separable import cut_for, schedule_free_parts
from jaxmpi.core.slices import Entries

NO_AVERAGES = (
    "jaxmpi.sharded(tx): got a schedule-free optimizer, which evaluates an average of the params, of which a worker "
    "would hold a slice; leave it unsharded, or take one without an average and a schedule of rates"
)


def check_floats(params: PyTree) -> None:
    """Refuse params that are not float32: slices' moments would be rounded."""
    for name, leaf in named_leaves(params):
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise UsageError(
                f"sharded: {name or '(the tree itself)'} is {getattr(leaf, 'dtype', type(leaf).__name__)}; expected "
                "float32: keep params in 32 bits and cast them inside the loss"
            )


class MasteredState(NamedTuple):
    """State of `sharded` with a coarse wire of changes."""

    of_tx: PyTree
    masters: PyTree  # this worker's slice of params in 32 bits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("own",), meta_fields=("chunks", "ranks", "cut", "whole")
)
@dataclass(frozen=True)
class ShardedState(RanksOwn):
    """State of `sharded`, and how it is cut, for whoever saves it."""

    own: PyTree  # this worker's share
    chunks: tuple[int, ...]  # by worker: the number of its share
    ranks: tuple[int, ...]  # by worker: the launcher's number; none along an axis
    cut: Entries | Leaves
    whole: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of each leaf of all shares joined

    def saved(self, worker: int) -> PyTree:
        """A worker's share as a checkpoint has it."""
        return packed(self.cut.saved(self.own, self.chunks[worker]))

    def restored(self, worker: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A worker's share from a checkpoint's whole leaves, by `read(name)`."""
        return self.cut.restored(packed(self.own), self.chunks[worker], read)


def sharded(
    tx: optax.GradientTransformation,
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    clip_norm: float = 0.0,
    gather_wire: str = "32",
    cost: Callable[[Sequence[int]], float] = math.prod,
) -> optax.GradientTransformation:
    """An Optax optimizer and its exchange, with state cut over workers.

    u <- allgather(tx(slice of (1/w) sum_i g_i)), in place of `optax.chain(exchange_gradients(strategy), tx)`. Each of w
    workers holds a w-th of tx's state. Updates are whole and the same bits on all workers; those of the chain if the
    wires are 32, each leaf travels alone and XLA fuses alike (`jaxmpi.allreduce.shards`). With one worker it is tx
    itself, with 32-bit params of its own if `gather_wire` is below 32.

    Args:
        tx: treats every entry of a tensor by itself, as Adam, AdamW, momentum, Lion and RMSProp do. It may then go by
            the names and the number of axes of tensors, not by their shapes. Or it treats every tensor by itself, as
            LARS, LAMB, Adafactor and Muon: then each worker updates whole tensors. `init` reads which from its
            equations (`jaxmpi.core.separable`).
        strategy: asa, ring, hier-asa or hier-ring, with any wire, which gradients take; shm, ar; or auto.
        op: mean or sum, of gradients.
        comm: as of `exchange`.
        bucket_bytes: as of `exchange`; for slices outside jit on one host at most 1 MiB, if it is a number.
        clip_norm: largest global norm of the mean gradient, or of the sum by `op`, as `optax.clip_by_global_norm`
            before tx; 0: any.
        gather_wire: of the updates. With a coarser one than 32 each worker keeps its slice of params in 32 bits.
            Updates bring params to within a rounding of that slice. Params must then be changed by these updates alone.
        cost: of the update of a whole tensor, by its shape, >= 0, the same on all ranks. Workers get tensors of about
            equal cost and as many entries. Muon's is `jaxmpi.optim.optimizers.muon_cost`.

    Outside jit an update of whole tensors is a program that is traced once. A Python variable that a schedule reads is
    fixed then. So keep a rate that changes in the state, by `optax.inject_hyperparams`.

    State: `ShardedState`, in which `own` is tx's for this worker's share. `init` and `update` need params.
    Communicates: as much as `exchange`, and one float with `clip_norm`; for whole tensors rows are padded to the
    longest.

    Raises:
        UsageError: as `exchange`; a strategy without halves; params that are not float32; an optimizer that mixes
            tensors, or is schedule-free.
    """
    check_op(op)
    if not is_compressor(strategy):
        check_strategy(strategy)

    def shards(params: PyTree, cut: str) -> Shards:
        workers, name, size_bytes = workers_of(comm), strategy, bucket_bytes
        if not is_compressor(name) and is_auto(name):
            sizes = [leaf.size for leaf in jax.tree.leaves(params)]
            able = with_halves(workers.hosts, gather_wire)
            name, size_bytes, *_ = settle(workers, name, size_bytes, sizes, able)
        dealt = deal(params, workers.size, cost) if cut == "leaves" else None
        return shards_of(name, op, workers, size_bytes, clip_norm, deal=dealt, gather_wire=gather_wire)

    def init(params: PyTree) -> PyTree:
        check_floats(params)
        check(not schedule_free_parts(jax.eval_shape(tx.init, params)), NO_AVERAGES)
        with without_messages("jaxmpi.sharded(tx)", "in tx", "it exchanges by itself, so give it the optimizer alone"):
            cut = cut_for(tx, params, workers_of(comm).size, cost)
        of = shards(params, cut)
        state, whole = of.cut.init(tx, params, of.chunk()), tx.init
        if gather_wire != "32":  # with one worker too, so that the state fits any number of them
            masters = of.own(params)
            if of.size == 1:  # they would be the params themselves, which a step may donate
                masters = jax.tree.map(jnp.copy, masters)
            state, whole = MasteredState(state, masters), lambda tree: MasteredState(tx.init(tree), tree)
        named = named_leaves(jax.eval_shape(lambda tree: packed(whole(tree)), params))
        leaves = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in named)
        return ShardedState(state, of.chunks, numbers_of(of.comm), of.cut.for_state_of(tx), leaves)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        check(params is not None, "sharded: got no params; expected update(grads, state, params)")
        check_floats(updates)
        check(isinstance(state, ShardedState), f"sharded: got a state of {type(state).__name__}; expected that of init")
        of = shards(updates, state.cut.name)
        refuse_other_cut(state, of, updates, strategy)
        check(
            isinstance(state.own, MasteredState) == (gather_wire != "32"),
            f"sharded: got a state with{'out' * (gather_wire != '32')} 32-bit params of its own; expected that of "
            f"gather_wire {gather_wire}: begin with this transformation's init",
        )
        mean, _ = of.scatter(updates)
        own, step, lacking = of.cut.own, functools.partial(of.cut.step, tx, tx.update), of.cut.lacking
        if isinstance(of.cut, Leaves) and not is_traced(jax.tree.leaves((updates, params, state))):
            own, step, lacking = kept_programs(of.cut, tx)
        held = state.own
        if not isinstance(held, MasteredState):
            made, of_tx = step(of.chunk(), mean, held, own(params, of.chunk()))
            return of.gather(made, updates), replace(state, own=of_tx)
        made, of_tx = step(of.chunk(), mean, held.of_tx, held.masters)
        masters = jax.tree.map(jnp.add, held.masters, made)
        changes = lacking(params, masters, of.chunk())
        wire = gather_wire if of.size > 1 else "32"
        return of.gather(changes, updates, wire), replace(state, own=MasteredState(of_tx, masters))

    return optax.GradientTransformation(init, update)


def refuse_other_cut(state: ShardedState, of: Shards, updates: PyTree, strategy: str) -> None:
    """Refuse a state that was cut by other workers, or otherwise.

    Raises:
        UsageError: got, expected, and how to go on.
    """
    way_out = "restore it by jaxmpi.Checkpoints with this transformation's init"
    check(
        state.chunks == of.chunks,
        f"sharded: got a state whose slices have the order {state.chunks}; expected {of.chunks}, that of "
        f"{strategy} on these workers: {way_out}",
    )
    ranks = numbers_of(of.comm)
    check(
        state.ranks == ranks,
        f"sharded: got a state of ranks {state.ranks}; expected one of ranks {ranks}, those of `comm`: {way_out}",
    )
    owners = (cut.deal.owners if isinstance(cut, Leaves) else () for cut in (state.cut, of.cut))
    dealt = zip((name for name, _ in named_leaves(updates)), *owners, strict=False)
    name, got, expected = next((row for row in dealt if row[1] != row[2]), ("", 0, 0))
    check(
        not name,
        f"sharded: got a state with tensor {name} in share {got}; expected it in share {expected}, as by this "
        f"`cost`: {way_out}",
    )


@functools.lru_cache(16)  # a program for each rate that is tried
def kept_programs(cut: Leaves, tx: optax.GradientTransformation) -> tuple[Callable[..., Any], ...]:
    """A cut's `own`, `step` and `lacking` as programs.

    Outside jit JAX would compile the branches, one for each worker, anew at every call.
    """
    return jax.jit(cut.own), jax.jit(functools.partial(cut.step, tx, tx.update)), jax.jit(cut.lacking)
