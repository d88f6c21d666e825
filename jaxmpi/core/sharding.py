"""How trees are sharded over workers (ZeRO): by element, or by tensor.

Optimizers that treat every entry alone, such as Adam, update 1/w of each tensor: `ElementSharding`. Those that mix the
entries of a tensor, such as LARS and Muon, update whole tensors: `TensorSharding` assigns each to one worker. Both give
a worker's shard of a tree, step an optimizer on it, and put shards together; neither communicates.

Nobody can read from an Optax transformation which of the two it allows, so its owner says: `by`. `check_sharding` tries
that word on a few floats. Tried and dropped: to infer it from the equations of `init` and `update`. That took 450 lines
of abstract interpretation, which every new JAX primitive could break, and refused loops and callbacks.

Rajbhandari et al. 2020, arXiv:1910.02054.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves

OF_TX, MASTERS = "of_tx", "masters"  # fields of a rule's state that keeps a shard of params in 32 bits
WORDS = (
    "'element' if the update of an entry depends on that entry alone, 'tensor' if it depends on its own tensor alone"
)

# ---------------------------------------------------------------- by element


class ElementSharding(NamedTuple):
    """Each of w workers has 1/w of every tensor.

        f32[n0, n1, ...] -> shard c = entries c m to (c + 1) m of the flat tensor, f32[m, 1, ...] ;  m = ceil(n0 n1 / w)

    A tree of shards has the structure of the whole, and a shard the number of axes of its tensor. So masks by name and
    by `ndim > 1` stay what they are. The last shards are padded with zeros; a tensor without axes is on all workers.
    """

    workers: int
    name = "entries"  # in checkpoints
    padding = 0.0  # less than an entry of each tensor

    def shard(self, tree: PyTree, index: Any) -> PyTree:
        """Shard number `index`, i32[], of every tensor."""

        def one(leaf: jax.Array) -> jax.Array:
            return shard_rows(leaf, self.workers)[index].reshape(shard_shape(leaf.shape, self.workers))

        return tree if self.workers == 1 else jax.tree.map(one, tree)

    def with_state_of(self, tx: Any) -> "ElementSharding":
        """The sharding that also knows this optimizer's state: a shard's has the structure of the whole one."""
        return self

    def init(self, tx: Any, params: PyTree, index: Any) -> PyTree:
        """The optimizer's state 0 for a shard of whole params."""
        return tx.init(self.shard(params, index))

    def step(self, step: Callable, index: Any, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """`step(grads, state, params) -> (tree like params, state)` on shards."""
        return step(grads, state, params)

    def changes(self, params: PyTree, masters: PyTree, index: Any) -> PyTree:
        """Masters less this worker's shard of params, which it sends; 0 in padding.

        Masters move there after a resume, when all workers take up the moments of a tensor of one entry; in a block of
        an 8-bit wire such a number would coarsen the others.
        """

        def one(shard: jax.Array, master: jax.Array, leaf: jax.Array) -> jax.Array:
            filled = np.clip(leaf.size - np.arange(self.workers) * master.size, 0, master.size).astype(np.int32)
            at = jnp.arange(master.size, dtype=jnp.int32).reshape(master.shape)
            return jnp.where(at < jnp.asarray(filled)[index], master - shard, 0)

        return jax.tree.map(one, self.shard(params, index), masters, params)

    def write(self, whole: PyTree, shard: PyTree, index: int) -> None:
        """Copy a shard to its place in `whole`, in host memory."""

        def one(leaf: np.ndarray, mine: Any) -> None:
            flat = leaf.reshape(-1)[index * mine.size : (index + 1) * mine.size]
            flat[:] = np.asarray(mine).reshape(-1)[: flat.size]

        jax.tree.map(one, whole, shard)

    def to_checkpoint(self, state: PyTree, index: int) -> PyTree:
        """A rule's state as a worker writes it."""
        return state

    def from_checkpoint(self, like: PyTree, index: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A worker's shard of a rule's state; `read(name)` gives whole leaves."""

        def one(name: str, mine: Any) -> np.ndarray:
            whole = read(name)
            if whole.shape == mine.shape:
                is_elsewhere = whole.size == 1 and index > 0 and MASTERS in name.split("/")
                return np.zeros_like(whole) if is_elsewhere else whole  # a master of one entry is worker 0's
            flat = whole.reshape(-1)[index * mine.size : (index + 1) * mine.size]
            return np.pad(flat, (0, mine.size - flat.size)).reshape(mine.shape)

        return jax.tree.unflatten(jax.tree.structure(like), [one(*named) for named in named_leaves(like)])


def shard_shape(shape: Sequence[int], workers: int) -> tuple[int, ...]:
    """The shape of one worker's shard of a tensor."""
    if workers == 1 or not shape:
        return tuple(shape)
    return (-(-math.prod(shape) // workers), *(1,) * (len(shape) - 1))


def shard_rows(leaf: jax.Array, workers: int) -> jax.Array:
    """[w, m]: every worker's shard of a tensor, flat."""
    width = math.prod(shard_shape(leaf.shape, workers))
    missing = workers * width - leaf.size
    flat = leaf.reshape(-1)
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(workers, width)


def unshard(rows: jax.Array, like: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
    """The inverse of `shard_rows`."""
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def read_whole(
    like: jax.ShapeDtypeStruct | jax.Array, workers: int, read: Callable[[int, jax.ShapeDtypeStruct], np.ndarray]
) -> np.ndarray:
    """Join a tensor's shards, each by `read(index, shape)`; shard 0 alone if it is the whole tensor."""
    shape = shard_shape(like.shape, workers)
    indices = range(1 if shape == tuple(like.shape) else workers)
    flat = [read(index, jax.ShapeDtypeStruct(shape, like.dtype)).reshape(-1) for index in indices]
    return np.concatenate(flat)[: math.prod(like.shape)].reshape(like.shape)


# ---------------------------------------------------------------- by tensor


class TensorShard(NamedTuple):
    """A worker's tensors of a tree like params."""

    shared: tuple[Any, ...]  # leaves that belong to no tensor, such as an optimizer's count of steps
    flats: dict[str, Any]  # all else, by dtype: one leaf after another, then zeros up to the longest of all workers

    @property
    def flat(self) -> Any:
        """The params, f32[width]."""
        return self.flats["float32"]


class StateShard(TensorShard):
    """An optimizer's state for a worker's tensors."""

    __slots__ = ()


class Layout(NamedTuple):
    """Where the leaves of each worker's tree lie in its shard."""

    structures: tuple[Any, ...]  # by worker
    leaves: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]  # by worker
    begins: tuple[tuple[int | None, ...], ...]  # of the same leaves; None for one that all workers share
    widths: tuple[tuple[str, int], ...]  # of the flat arrays, by dtype
    block: int = 1
    kind: type = TensorShard

    def flatten(self, tree: PyTree, index: int) -> Any:
        """A worker's shard, of that kind."""
        shared, flats = [], {dtype: [] for dtype, _ in self.widths}
        for leaf, begin in zip(jax.tree.leaves(tree), self.begins[index], strict=True):
            (shared if begin is None else flats[str(leaf.dtype)]).append(leaf)
        joined = {dtype: join(flats[dtype], width, dtype, self.block) for dtype, width in self.widths}
        return self.kind(tuple(shared), joined)

    def unflatten(self, shard: TensorShard, index: int) -> PyTree:
        """The inverse: a worker's tree."""
        shared, leaves = iter(shard.shared), []
        for leaf, begin in zip(self.leaves[index], self.begins[index], strict=True):
            if begin is None:
                leaves.append(next(shared))
            else:
                leaves.append(shard.flats[str(leaf.dtype)][begin : begin + leaf.size].reshape(leaf.shape))
        return jax.tree.unflatten(self.structures[index], leaves)


UNKNOWN = Layout((), (), (), ())


def layout_of(trees: Sequence[PyTree], shared: Collection[str], block: int = 1, kind: type = TensorShard) -> Layout:
    """The layout of workers' trees, in which leaves of these names are the same on all."""
    begins, ends = [], []
    for tree in trees:
        end, places = {}, []
        for name, leaf in named_leaves(tree):
            places.append(None if name in shared else end.get(str(leaf.dtype), 0))
            if name not in shared:
                end[str(leaf.dtype)] = places[-1] + -(-leaf.size // block) * block
        begins.append(tuple(places))
        ends.append(end)
    widths = tuple((dtype, max(end.get(dtype, 0) for end in ends)) for dtype in sorted(set().union(*ends)))
    leaves = tuple(tuple(jax.tree.leaves(tree)) for tree in trees)
    return Layout(tuple(map(jax.tree.structure, trees)), leaves, tuple(begins), widths, block, kind)


def join(leaves: Sequence[jax.Array], width: int, dtype: Any, block: int = 1) -> jax.Array:
    """[width]: leaves one after another, each filled up to whole blocks, then zeros."""
    flat = [jnp.pad(x.reshape(-1), (0, -x.size % block)) if x.size % block else x.reshape(-1) for x in leaves]
    return jnp.concatenate([*flat, jnp.zeros(width - sum(x.size for x in flat), dtype)])


class TensorSharding(NamedTuple):
    """Each tensor is updated by one worker.

    One program serves all workers, as with elements. So what a worker holds has one shape on all of them: its tensors
    one after another, padded with zeros to the longest. Which tensors these are is a branch of the program. Other
    workers' tensors are `optax.MaskedNode` in a branch, so masks and labels by name stay what they are.

    Tried and dropped: a program of each worker's own. A mapped axis cannot have them, and every rank of a host would
    compile its own.
    """

    structure: Any  # of params
    shapes: tuple[tuple[int, ...], ...]  # by tensor
    owners: tuple[int, ...]  # by tensor: the index of the shard that has it
    workers: int
    block: int = 1  # in a shard tensors begin at multiples of it: the floats that share a scale on the wire
    state: Layout = UNKNOWN  # of the optimizer's state, by `with_state_of`
    name = "leaves"  # in checkpoints

    @property
    def params(self) -> Layout:
        """The layout of params."""
        return params_layout(self._replace(state=UNKNOWN))

    @property
    def like(self) -> PyTree:
        """Shapes of params."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(s, jnp.float32) for s in self.shapes])

    @property
    def width(self) -> int:
        """Entries of a shard: those of the longest."""
        return dict(self.params.widths)["float32"]

    @property
    def padding(self) -> float:
        """Zeros of all shards, relative to the entries of params."""
        return self.workers * self.width / max(1, sum(map(math.prod, self.shapes))) - 1

    def select(self, tree: PyTree, index: int) -> PyTree:
        """The tensors of one shard; `optax.MaskedNode` for all others."""
        leaves = zip(self.owners, jax.tree.leaves(tree), strict=True)
        return jax.tree.unflatten(self.structure, [x if owner == index else optax.MaskedNode() for owner, x in leaves])

    def shard(self, tree: PyTree, index: Any) -> TensorShard:
        """Shard number `index`, i32[], of a whole tree."""
        branches = [lambda t, i=i: self.params.flatten(self.select(t, i), i) for i in range(self.workers)]
        return lax.switch(index, branches, tree)

    def shard_rows(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """[w, width]: every worker's shard of a tree."""
        tree = jax.tree.unflatten(self.structure, leaves)
        return jnp.stack([self.params.flatten(self.select(tree, i), i).flat for i in range(self.workers)])

    def unshard(self, rows: jax.Array) -> list[jax.Array]:
        """The tree's leaves from all shards, [w, width]."""
        trees = [self.params.unflatten(TensorShard((), {"float32": row}), i) for i, row in enumerate(rows)]
        tensors = [iter(jax.tree.leaves(tree)) for tree in trees]
        return [next(tensors[owner]) for owner in self.owners]

    def with_state_of(self, tx: Any) -> "TensorSharding":
        """The sharding that also knows this optimizer's state, of which each leaf is one worker's or all workers'.

        Raises:
            UsageError: a leaf of the state that is neither.
        """
        parts = [jax.eval_shape(tx.init, self.select(self.like, index)) for index in range(self.workers)]
        by_worker, shared = [dict(named_leaves(part)) for part in parts], set()
        for name, leaf in named_leaves(jax.eval_shape(tx.init, self.like)):
            found = [(each[name].shape, each[name].dtype) for each in by_worker if name in each]
            if set(found) != {(leaf.shape, leaf.dtype)} or len(found) not in (1, self.workers):
                raise UsageError(
                    f"sharded by tensor: {name} of the optimizer's state is {list(leaf.shape)}, but not with some of "
                    "the tensors alone; expected a state of each tensor, or one that all share: leave it unsharded"
                )
            shared |= {name} if len(found) == self.workers else set()
        return self._replace(state=layout_of(parts, shared, kind=StateShard))

    def init(self, tx: Any, params: PyTree, index: Any) -> StateShard:
        """The optimizer's state 0 for a shard of whole params."""
        branches = [lambda p, i=i: self.state.flatten(tx.init(self.select(p, i)), i) for i in range(self.workers)]
        return lax.switch(index, branches, params)

    def step(
        self, step: Callable, index: Any, grads: TensorShard, state: StateShard, params: TensorShard
    ) -> tuple[TensorShard, StateShard]:
        """`step(grads, state, params) -> (tree like params, state)` on a shard's tensors.

        The inner `cond` is a fence, since XLA fuses nothing across a branch. Otherwise the step would be fused with the
        cutting, and add norms up in another order than in a program of whole tensors.
        """

        def run(i: int, grads: TensorShard, state: StateShard, params: TensorShard) -> tuple[TensorShard, StateShard]:
            trees = self.params.unflatten(grads, i), self.state.unflatten(state, i), self.params.unflatten(params, i)
            made, after = lax.cond(index == i, lambda g, s, p: step(g, s, p), lambda g, s, p: (p, s), *trees)
            return self.params.flatten(made, i), self.state.flatten(after, i)

        return lax.switch(index, [functools.partial(run, i) for i in range(self.workers)], grads, state, params)

    def changes(self, params: PyTree, masters: TensorShard, index: Any) -> TensorShard:
        """Masters less this worker's shard of params, which it sends."""
        return jax.tree.map(jnp.subtract, masters, self.shard(params, index))

    def write(self, whole: PyTree, shard: TensorShard, index: int) -> None:
        """Copy a shard's tensors to their places in `whole`, in host memory."""
        jax.tree.map(np.copyto, self.select(whole, index), self.params.unflatten(jax.device_get(shard), index))

    def to_checkpoint(self, state: PyTree, index: int) -> PyTree:
        """A rule's state as a worker writes it: its tensors by name."""

        def one(part: Any) -> Any:
            return self._layout(part).unflatten(part, index) if isinstance(part, TensorShard) else part

        return jax.tree.map(one, state, is_leaf=lambda part: isinstance(part, TensorShard))

    def from_checkpoint(self, like: PyTree, index: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A worker's shard of a rule's state; `read(name)` gives whole leaves."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), like)
        saved = jax.eval_shape(lambda state: self.to_checkpoint(state, index), shapes)
        filled = jax.tree.unflatten(jax.tree.structure(saved), [read(name) for name, _ in named_leaves(saved)])

        def one(part: Any, mine: PyTree) -> Any:
            return self._layout(part).flatten(mine, index) if isinstance(part, TensorShard) else mine

        made = jax.tree.map(one, shapes, filled, is_leaf=lambda part: isinstance(part, TensorShard))
        return jax.tree.unflatten(jax.tree.structure(like), map(np.asarray, jax.tree.leaves(made)))

    def _layout(self, part: TensorShard) -> Layout:
        return self.state if isinstance(part, StateShard) else self.params


@functools.cache
def params_layout(sharding: TensorSharding) -> Layout:
    """Where params lie in their shards."""
    parts = [sharding.select(sharding.like, index) for index in range(sharding.workers)]
    made = layout_of(parts, (), sharding.block)
    return made._replace(widths=(("float32", max([1, *dict(made.widths).values()])),))


def assign_tensors(params: PyTree, workers: int, cost: Callable[[Sequence[int]], float] = math.prod) -> TensorSharding:
    """Assign the largest tensor first, each to the worker with the least load (Graham 1969).

    The load is the share of all cost, or of all entries if that is more: shards are padded to the longest.

    Args:
        params: arrays or their shapes.
        cost: of the update of a tensor, by its shape.

    Raises:
        UsageError: a cost that is negative or not finite.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    weights = np.array([(float(cost(shape)), math.prod(shape)) for shape in shapes]).reshape(-1, 2)
    if not all(0 <= each < math.inf for each in weights[:, 0]):
        raise UsageError(f"cost: got {weights[:, 0].tolist()}; expected a finite number from 0 on for each shape")
    totals = weights.sum(0)
    weights, owners, loads = weights / np.where(totals, totals, 1), [0] * len(shapes), np.zeros((workers, 2))
    for i in sorted(range(len(shapes)), key=lambda i: -weights[i].max()):
        after = loads + weights[i]
        owners[i] = min(range(workers), key=lambda worker: (after[worker].max(), after[worker].sum()))
        loads[owners[i]] = after[owners[i]]
    return TensorSharding(structure, shapes, tuple(owners), workers)


# ---------------------------------------------------------------- which of them an optimizer allows

TRIAL_STEPS = 200  # optimizers with accumulation move params every so many steps only
TRIAL_SCALES = (1.0, 1e3)  # of gradients: clipping by a large norm shows at the second


def check_sharding(tx: Any, params: PyTree, by: str, workers: int, option: str = "jaxmpi.sharded: by") -> None:
    """Try a transformation on a few floats, whole and in two shards.

    Finds a mean, a norm or a shape at work in the first updates, and what one infinite gradient changes elsewhere. Does
    not find what begins later, or needs more than three entries along an axis.

    Args:
        params: arrays or their shapes.
        by: element or tensor.
        option: its name in messages.

    Raises:
        UsageError: a missing or unknown word, with what both mean; a word that the trial disproves, with the tensor.
    """
    if by not in ("element", "tensor"):
        raise UsageError(f"{option}: got {by!r} for an optimizer whose sharding is not known; expected {WORDS}")
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), params))
    # The first and the last tensor of each number of axes: a trial of all 128 of GoogLeNet compiles for 9 s.
    first = {leaf.ndim: i for i, leaf in reversed([*enumerate(leaves)])}
    few = {*first.values(), *{leaf.ndim: i for i, leaf in enumerate(leaves)}.values()}
    some = [x if i in few else optax.MaskedNode() for i, x in enumerate(leaves)]
    cause = None
    try:
        with jax.ensure_compile_time_eval():
            try:
                found = _trial(tx, jax.tree.unflatten(structure, some), by)
            except Exception:  # it may know its tensors by name
                found = _trial(tx, jax.tree.unflatten(structure, leaves), by)
        if not found and by == "element":
            found = _state_by_size(tx, jax.tree.unflatten(structure, leaves), workers)
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        cause, found = error, f"a shard alone fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if found:
        what = f"{option}: got {by!r}, but {found} with this optimizer"
        raise UsageError(f"{what}; expected {WORDS}, else leave it unsharded") from cause


def _trial(tx: Any, like: PyTree, by: str) -> str:
    """What differs between updates of whole tensors and of two shards; empty if nothing does."""
    leaves, structure = jax.tree.flatten(like)
    halves = TensorSharding(structure, (), tuple(i % 2 for i in range(len(leaves))), 2)
    shard = ElementSharding(2).shard if by == "element" else halves.select
    shards = range(2 if by == "element" else min(2, len(leaves)))
    rng = np.random.default_rng(0)

    def draw(size: float, *steps: int) -> PyTree:
        shape = lambda x: [*steps, *(min(n, 3) for n in x.shape)]  # noqa: E731
        return jax.tree.map(lambda x: np.asarray(size * rng.standard_normal(shape(x)), x.dtype), like)

    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        """Relative to the largest entry; NaN is NaN."""
        apart = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, jnp.abs(a - b))
        largest = jnp.nan_to_num(jnp.maximum(jnp.abs(a), jnp.abs(b)), posinf=0).max(initial=1e-30)
        return apart.max(initial=0) / largest

    def step(carry: tuple[PyTree, list[PyTree]], grads: PyTree) -> tuple[tuple[PyTree, list[PyTree]], list[PyTree]]:
        params, states = carry
        whole, after = tx.update(grads, states[0], params)
        distances, afters = [], [after]
        for index in shards:
            update, after = tx.update(shard(grads, index), states[1 + index], shard(params, index))
            distances.append(jax.tree.map(distance, update, shard(whole, index)))
            afters.append(after)
        return (optax.apply_updates(params, whole), afters), distances

    run = jax.jit(lambda *operands: jax.lax.scan(step, *operands)[1])
    for scale in TRIAL_SCALES:
        params = draw(1.0)
        grads = jax.tree.map(lambda a, b: a + b / 2, draw(scale), draw(scale, TRIAL_STEPS))  # params go far one way
        for leaf in jax.tree.leaves(grads)[:1]:
            leaf[-1:].reshape(-1)[:1] = np.inf
        states = [tx.init(params), *(tx.init(shard(params, index)) for index in shards)]
        # Roundings are 1e-6 of a tensor's largest update; what depends on other entries is off by tenths.
        for name, distances in [named for each in run((params, states), grads) for named in named_leaves(each)]:
            if not float(distances.max()) < 1e-3:
                return f"the update of {name} depends on more than its {by}"
    return ""


def _state_by_size(tx: Any, like: PyTree, workers: int) -> str:
    """The first leaf of a state whose shape in a shard is not that of a shard of the whole one."""
    shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shard_shape(x.shape, workers), x.dtype), like)
    mine = dict(named_leaves(jax.eval_shape(tx.init, shards)))
    for name, leaf in named_leaves(jax.eval_shape(tx.init, like)):
        able = [shard_shape(leaf.shape, workers), *([leaf.shape] if leaf.size == 1 else [])]
        if name not in mine or mine[name].shape not in able:
            return f"{name} of its state goes by the shapes of tensors"
    return ""


def schedule_free_states(state: PyTree) -> list[optax.contrib.ScheduleFreeState]:
    """States of schedule-free optimizers, whose averages are of whole params."""
    is_one = lambda part: isinstance(part, optax.contrib.ScheduleFreeState)  # noqa: E731
    return [part for part in jax.tree.leaves(state, is_leaf=is_one) if is_one(part)]
