"""How trees are sharded over workers (ZeRO): by element, or by tensor.

Optimizers that treat every entry alone, such as Adam, update 1/w of each tensor: `ElementSharding`. Those that mix the
entries of a tensor, such as LARS and Muon, update whole tensors: `TensorSharding` assigns each to one worker. Both give
a worker's shard of a tree, step an optimizer on it, and put shards together; neither communicates.

Nobody can read from an Optax transformation which of the two it allows, so its owner says: `by`. `check_sharding` tries
that word on a few floats. Tried and dropped: to infer it from the equations of `init` and `update`. That took 450 lines
of abstract interpretation, which every new JAX primitive could break, and refused loops and callbacks.

Rajbhandari et al. 2020, arXiv:1910.02054.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import is_key_data, packed, unpacked

OF_TX, MASTERS = "of_tx", "masters"  # fields of a rule's state that keeps a shard of params in 32 bits
WORDS = (
    "'element' if the update of an entry depends on that entry alone, 'tensor' if it depends on its own tensor alone"
)
NO_WORD = "{option}: got {by!r} for an optimizer whose sharding is not known; expected " + WORDS
WRONG_WORD = "{option}: got {by!r}, but {why} with this optimizer; expected " + WORDS + ", else leave it unsharded"

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

    def init(self, tx: Any, params: PyTree, index: Any) -> PyTree:
        """The optimizer's state 0 for a shard of whole params."""
        return tx.init(self.shard(params, index))

    def step(
        self, step: Callable[..., tuple[PyTree, PyTree]], index: Any, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """`step(grads, state, params) -> (tree like params, state)` on shards."""
        return step(grads, state, params)

    def changes(self, params: PyTree, masters: PyTree, index: Any) -> PyTree:
        """Masters less this worker's shard of params, which it sends; 0 in padding.

        Masters move there after a resume, when all workers take up the moments of a tensor of one entry; in a block of
        an 8-bit wire such a number would coarsen the others.
        """

        def one(shard: jax.Array, master: jax.Array, leaf: jax.Array) -> jax.Array:
            change = master - shard
            if self.workers * master.size == leaf.size:
                return change
            filled = np.clip(leaf.size - np.arange(self.workers) * master.size, 0, master.size).astype(np.int32)
            at = jnp.arange(master.size, dtype=jnp.int32).reshape(master.shape)
            return jnp.where(at < jnp.asarray(filled)[index], change, jnp.zeros_like(change))

        return jax.tree.map(one, self.shard(params, index), masters, params)

    def write(self, whole: PyTree, shard: PyTree, index: int) -> None:
        """Copy a shard to its place in `whole`, in host memory."""

        def one(leaf: np.ndarray, mine: Any) -> None:
            flat = leaf.reshape(-1)[index * mine.size : (index + 1) * mine.size]
            flat[:] = np.asarray(mine).reshape(-1)[: flat.size]

        jax.tree.map(one, whole, shard)

    def with_state_of(self, tx: Any) -> "ElementSharding":
        """The sharding that also knows this optimizer's state: a shard's has the structure of the whole one."""
        return self

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

        leaves = [one(*named) for named in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


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

    flat: Any  # f32[width], one tensor after another, then zeros


class StateShard(NamedTuple):
    """An optimizer's state for a worker's tensors."""

    shared: PyTree  # the whole state's structure with what belongs to no tensor, such as counts of steps
    flats: dict[str, jax.Array]  # all else, by dtype


class StateLayout(NamedTuple):
    """Where each leaf of an optimizer's state lies."""

    names: tuple[str, ...]  # of the whole state's leaves
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    structure: Any
    owners: tuple[int, ...]  # by leaf: the worker that has it, or SHARED
    structures: tuple[Any, ...]  # by worker: of the state of its tensors

    def owned(self, index: int, dtype: str) -> list[int]:
        """A worker's leaves of this dtype."""
        return [i for i, owner in enumerate(self.owners) if owner == index and str(self.leaves[i].dtype) == dtype]

    @property
    def widths(self) -> dict[str, int]:
        """By dtype: entries of the worker that has most."""
        dtypes = sorted({str(x.dtype) for x, owner in zip(self.leaves, self.owners, strict=True) if owner != SHARED})
        workers = range(len(self.structures))
        return {t: max(sum(self.leaves[i].size for i in self.owned(worker, t)) for worker in workers) for t in dtypes}

    def flatten(self, state: PyTree, index: int) -> StateShard:
        """The state of a worker's tensors, in the shapes that all workers have."""
        by_name = dict(named_leaves(state))
        named = zip(self.names, self.owners, strict=True)
        shared = [by_name[name] if owner == SHARED else optax.MaskedNode() for name, owner in named]
        flats = {
            dtype: join([by_name[self.names[i]] for i in self.owned(index, dtype)], width, dtype)
            for dtype, width in self.widths.items()
        }
        return StateShard(jax.tree.unflatten(self.structure, shared), flats)

    def by_place(self, shard: StateShard, index: int) -> dict[int, Any]:
        """A worker's leaves, by their place in the whole state."""
        shared = iter(jax.tree.leaves(shard.shared))
        found = {i: next(shared) for i, owner in enumerate(self.owners) if owner == SHARED}
        for dtype in self.widths:
            places = self.owned(index, dtype)
            found |= zip(places, split(shard.flats[dtype], [self.leaves[i].shape for i in places]), strict=True)
        return found

    def unflatten(self, shard: StateShard, index: int) -> PyTree:
        """The inverse of `flatten`."""
        found = self.by_place(shard, index)
        return jax.tree.unflatten(self.structures[index], [found[i] for i in sorted(found)])


SHARED = -1  # owner of what all workers hold


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
    layout: StateLayout | None = None  # of the optimizer's state
    name = "leaves"  # in checkpoints

    @property
    def width(self) -> int:
        """Entries of a shard: those of the longest."""
        sizes = [0] * self.workers
        for owner, shape in zip(self.owners, self.shapes, strict=True):
            sizes[owner] += self.extent(shape)
        return max(1, *sizes)

    @property
    def padding(self) -> float:
        """Zeros of all shards, relative to the entries of params."""
        return self.workers * self.width / max(1, sum(map(math.prod, self.shapes))) - 1

    def extent(self, shape: Sequence[int]) -> int:
        """Entries from the beginning of a tensor in a shard to the next."""
        return -(-math.prod(shape) // self.block) * self.block

    def select(self, tree: PyTree, index: int) -> PyTree:
        """The tensors of one shard; `optax.MaskedNode` for all others."""
        leaves = zip(self.owners, jax.tree.leaves(tree), strict=True)
        return jax.tree.unflatten(self.structure, [x if owner == index else optax.MaskedNode() for owner, x in leaves])

    def flatten(self, selected: PyTree) -> TensorShard:
        """Selected tensors as a shard."""
        return TensorShard(join([self._padded(leaf) for leaf in jax.tree.leaves(selected)], self.width, jnp.float32))

    def unflatten(self, shard: TensorShard, index: int) -> PyTree:
        """The inverse of `flatten`."""
        leaves = self.tensors(shard, index)
        return jax.tree.unflatten(
            self.structure, [next(leaves) if owner == index else optax.MaskedNode() for owner in self.owners]
        )

    def tensors(self, shard: TensorShard, index: int) -> Iterator[Any]:
        """The tensors of a shard, in the order of the tree."""
        return split(
            shard.flat, [s for s, owner in zip(self.shapes, self.owners, strict=True) if owner == index], self.block
        )

    def columns(self, leaves: Sequence[jax.Array], start: int, stop: int) -> jax.Array:
        """[w, stop - start]: these entries of all shards of a tree."""
        pieces, ends = [[] for _ in range(self.workers)], [0] * self.workers
        for owner, leaf in zip(self.owners, map(self._padded, leaves), strict=True):
            begin, ends[owner] = ends[owner], ends[owner] + leaf.size
            low, high = max(start, begin), min(stop, ends[owner])
            if low < high:
                pieces[owner].append(leaf[low - begin : high - begin])
        return jnp.stack([join(each, stop - start, jnp.float32) for each in pieces])

    def unshard(self, rows: jax.Array) -> list[jax.Array]:
        """The tree's leaves from all shards, [w, width]."""
        out, ends = [], [0] * self.workers
        for owner, shape in zip(self.owners, self.shapes, strict=True):
            begin, ends[owner] = ends[owner], ends[owner] + self.extent(shape)
            out.append(rows[owner, begin : begin + math.prod(shape)].reshape(shape))
        return out

    def _padded(self, leaf: jax.Array) -> jax.Array:
        missing = -leaf.size % self.block
        return jnp.pad(leaf.reshape(-1), (0, missing)) if missing else leaf.reshape(-1)

    def shard(self, tree: PyTree, index: Any) -> TensorShard:
        """Shard number `index`, i32[], of a whole tree."""
        branches = [lambda t, i=i: self.flatten(self.select(t, i)) for i in range(self.workers)]
        return lax.switch(index, branches, tree)

    def with_state_of(self, tx: Any) -> "TensorSharding":
        """The sharding that also knows this optimizer's state, of which each leaf is one worker's or all workers'.

        Raises:
            UsageError: a leaf of the state that is neither.
        """
        like = jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(s, jnp.float32) for s in self.shapes])
        whole = jax.eval_shape(tx.init, like)
        parts = [jax.eval_shape(tx.init, self.select(like, index)) for index in range(self.workers)]
        by_worker, owners = [dict(named_leaves(part)) for part in parts], []
        for name, leaf in named_leaves(whole):
            having = [index for index, part in enumerate(by_worker) if name in part]
            found = {(by_worker[index][name].shape, by_worker[index][name].dtype) for index in having}
            if found != {(leaf.shape, leaf.dtype)} or len(having) not in (1, self.workers):
                raise UsageError(
                    f"sharded by tensor: {name} of the optimizer's state is {list(leaf.shape)}, but not with some of "
                    "the tensors alone; expected a state of each tensor, or one that all share: leave it unsharded"
                )
            owners.append(SHARED if len(having) == self.workers else having[0])
        layout = StateLayout(
            names=tuple(name for name, _ in named_leaves(whole)),
            leaves=tuple(jax.tree.leaves(whole)),
            structure=jax.tree.structure(whole),
            owners=tuple(owners),
            structures=tuple(map(jax.tree.structure, parts)),
        )
        return self._replace(layout=layout)

    @property
    def state(self) -> StateLayout:
        """The layout of the optimizer's state, of `with_state_of`."""
        assert self.layout
        return self.layout

    def init(self, tx: Any, params: PyTree, index: Any) -> StateShard:
        """The optimizer's state 0 for a shard of whole params."""
        branches = [lambda p, i=i: self.state.flatten(tx.init(self.select(p, i)), i) for i in range(self.workers)]
        return lax.switch(index, branches, params)

    def step(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        index: Any,
        grads: TensorShard,
        state: StateShard,
        params: TensorShard,
    ) -> tuple[TensorShard, StateShard]:
        """`step(grads, state, params) -> (tree like params, state)` on a shard's tensors.

        The inner `cond` is a fence, since XLA fuses nothing across a branch. Otherwise the step would be fused with the
        cutting, and add norms up in another order than in a program of whole tensors.
        """

        def branch(i: int) -> Callable[..., tuple[TensorShard, StateShard]]:
            def run(grads: TensorShard, state: StateShard, params: TensorShard) -> tuple[TensorShard, StateShard]:
                trees = self.unflatten(grads, i), self.state.unflatten(state, i), self.unflatten(params, i)
                made, after = lax.cond(index == i, lambda g, s, p: step(g, s, p), lambda g, s, p: (p, s), *trees)
                return self.flatten(made), self.state.flatten(after, i)

            return run

        return lax.switch(index, [branch(i) for i in range(self.workers)], grads, state, params)

    def changes(self, params: PyTree, masters: TensorShard, index: Any) -> TensorShard:
        """Masters less this worker's shard of params, which it sends."""
        return jax.tree.map(jnp.subtract, masters, self.shard(params, index))

    def write(self, whole: PyTree, shard: TensorShard, index: int) -> None:
        """Copy a shard's tensors to their places in `whole`, in host memory."""
        leaves = [x for x, owner in zip(jax.tree.leaves(whole), self.owners, strict=True) if owner == index]
        for leaf, tensor in zip(leaves, self.tensors(TensorShard(np.asarray(shard.flat)), index), strict=True):
            np.copyto(leaf, tensor)

    def to_checkpoint(self, state: PyTree, index: int) -> PyTree:
        """A rule's state as a worker writes it: its tensors by name, keys packed."""

        def one(part: Any) -> Any:
            if isinstance(part, StateShard):
                found = self.state.by_place(part, index)
                every = [found.get(i, optax.MaskedNode()) for i in range(len(self.state.owners))]
                return jax.tree.unflatten(self.state.structure, every)
            return self.unflatten(part, index) if isinstance(part, TensorShard) else part

        return packed(jax.tree.map(one, unpacked(state), is_leaf=is_tensor_shard))

    def from_checkpoint(self, like: PyTree, index: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A worker's shard of a rule's state; `read(name)` gives whole leaves."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), like)
        saved = jax.eval_shape(lambda state: self.to_checkpoint(state, index), shapes)
        leaves = [read(name) for name, _ in named_leaves(saved)]
        filled = unpacked(jax.tree.unflatten(jax.tree.structure(saved), leaves))

        def one(part: Any, mine: PyTree) -> Any:
            if isinstance(part, StateShard):
                return self.state.flatten(mine, index)
            return self.flatten(mine) if isinstance(part, TensorShard) else mine

        made = jax.tree.map(one, shapes, filled, is_leaf=lambda part: is_tensor_shard(part) or is_key_data(part))
        return jax.tree.map(np.asarray, packed(made))


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
    costs, sizes = [float(cost(shape)) for shape in shapes], [math.prod(shape) for shape in shapes]
    if bad := [each for each in costs if not 0 <= each < math.inf]:
        raise UsageError(f"cost: got {bad[0]}; expected a finite number from 0 on for each shape")
    all_costs, all_sizes = sum(costs) or 1, sum(sizes) or 1
    weights = [(a / all_costs, b / all_sizes) for a, b in zip(costs, sizes, strict=True)]
    owners, loads = [0] * len(shapes), [(0.0, 0.0)] * workers

    def with_more(worker: int, weight: tuple[float, float]) -> tuple[float, float]:
        return loads[worker][0] + weight[0], loads[worker][1] + weight[1]

    def load(worker: int, weight: tuple[float, float]) -> tuple[float, float]:
        both = with_more(worker, weight)
        return max(both), sum(both)

    for i in sorted(range(len(shapes)), key=lambda i: -max(weights[i])):
        owners[i] = min(range(workers), key=lambda worker: load(worker, weights[i]))
        loads[owners[i]] = with_more(owners[i], weights[i])
    return TensorSharding(structure, shapes, tuple(owners), workers)


def join(leaves: Sequence[jax.Array], width: int, dtype: Any) -> jax.Array:
    """[width]: flat leaves one after another, then zeros."""
    missing = width - sum(leaf.size for leaf in leaves)
    return jnp.concatenate([*(leaf.reshape(-1) for leaf in leaves), jnp.zeros(missing, dtype)])


def split(flat: Any, shapes: Sequence[Sequence[int]], block: int = 1) -> Iterator[Any]:
    """The inverse of `join`, of leaves that begin at multiples of `block`."""
    starts = np.cumsum([0, *(-(-math.prod(shape) // block) * block for shape in shapes)])
    return iter([flat[a : a + math.prod(s)].reshape(s) for a, s in zip(starts, shapes, strict=False)])


def is_tensor_shard(part: Any) -> bool:
    """Return True for what a worker holds of whole tensors."""
    return isinstance(part, (TensorShard, StateShard))


# ---------------------------------------------------------------- which of them an optimizer allows

TRIAL_STEPS, TRIAL_MOVES = 200, 20  # optimizers with accumulation move params every so many steps only
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
        raise UsageError(NO_WORD.format(option=option, by=by))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), params)
    try:
        with jax.ensure_compile_time_eval():
            try:
                found = _trial(tx, few_tensors(like), by)
            except Exception:  # it may know its tensors by name
                found = _trial(tx, like, by)
        if not found and by == "element":
            found = _state_by_size(tx, like, workers)
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        why = f"a shard alone fails ({type(error).__name__}: {error})"
        raise UsageError(WRONG_WORD.format(option=option, by=by, why=why)) from error
    if found:
        raise UsageError(WRONG_WORD.format(option=option, by=by, why=found))


def few_tensors(tree: PyTree) -> PyTree:
    """The first and the last tensor of each number of axes; a trial of all 128 of GoogLeNet compiles for 9 s."""
    leaves, structure = jax.tree.flatten(tree)
    first = {leaf.ndim: i for i, leaf in reversed([*enumerate(leaves)])}
    last = {leaf.ndim: i for i, leaf in enumerate(leaves)}
    few = {*first.values(), *last.values()}
    return jax.tree.unflatten(structure, [x if i in few else optax.MaskedNode() for i, x in enumerate(leaves)])


def _trial(tx: Any, like: PyTree, by: str) -> str:
    """What differs between an update of whole tensors and one of two shards; empty if nothing does."""
    leaves, structure = jax.tree.flatten(like)
    halves = TensorSharding(structure, (), tuple(i % 2 for i in range(len(leaves))), 2)
    shard = ElementSharding(2).shard if by == "element" else halves.select
    indices, names = range(2 if by == "element" else min(2, len(leaves))), []
    rng = np.random.default_rng(0)

    def draw(size: float) -> PyTree:
        return jax.tree.map(
            lambda x: np.asarray(size * rng.standard_normal([min(n, 3) for n in x.shape]), x.dtype), like
        )

    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        """Relative to the largest entry; NaN is NaN."""
        apart = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, jnp.abs(a - b))
        largest = jnp.nan_to_num(jnp.maximum(jnp.abs(a), jnp.abs(b)), posinf=0).max(initial=1e-30)
        return apart.max(initial=0) / largest

    @jax.jit
    def step(params: PyTree, states: list[PyTree], grads: PyTree) -> tuple[PyTree, list[PyTree], list[Any], Any]:
        whole, after = tx.update(grads, states[0], params)
        distances, afters = [], [after]
        names.clear()
        for index in indices:
            update, after = tx.update(shard(grads, index), states[1 + index], shard(params, index))
            pairs = zip(named_leaves(update), named_leaves(shard(whole, index)), strict=True)
            distances += [distance(a, b) for (_, a), (_, b) in pairs]
            names.extend(name for name, _ in named_leaves(update))
            afters.append(after)
        has_moved = jnp.stack([(u != 0).any() for u in jax.tree.leaves(whole)] or [jnp.bool(True)]).any()
        return optax.apply_updates(params, whole), afters, distances, has_moved

    def described(states: list[PyTree]) -> Any:
        return jax.tree.structure(states), [*map(np.shape, jax.tree.leaves(states))]

    for scale in TRIAL_SCALES:
        params, slope, moves = draw(1.0), draw(scale), 0
        states = [tx.init(params), *(tx.init(shard(params, index)) for index in indices)]
        for i in range(TRIAL_STEPS):
            grads = jax.tree.map(lambda a, b: a + b / 2, slope, draw(scale))  # one direction: params go far
            is_last = moves == TRIAL_MOVES or i + 1 == TRIAL_STEPS
            if is_last and leaves:
                jax.tree.leaves(grads)[0].reshape(-1)[:1] = np.inf
            params, after, distances, has_moved = step(params, states, grads)
            if described(after) != described(states):
                return "its state gets other leaves or shapes in an update"
            # Roundings are 1e-6 of a tensor's largest update; what depends on other entries is off by tenths.
            if far := [name for name, x in zip(names, distances, strict=True) if not float(x) < 1e-3]:
                return f"the update of {far[0]} depends on more than its {by}"
            states, moves = after, moves + bool(has_moved)
            if is_last:
                break
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

    def is_one(part: Any) -> bool:
        return isinstance(part, optax.contrib.ScheduleFreeState)

    return [part for part in jax.tree.leaves(state, is_leaf=is_one) if is_one(part)]
