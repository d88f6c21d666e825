"""How trees are sharded over workers (ZeRO): by element, or by tensor.

Optimizers that treat every entry alone, such as Adam, update 1/w of each tensor: `ElementSharding`. Those that mix the
entries of a tensor, such as LARS and Muon, update whole tensors: `TensorSharding` assigns each to one worker. Both give
a worker's shard of a tree, step an optimizer on it, and put shards together; neither communicates.

Nobody can read from an Optax transformation which of the two it allows, so its owner says, and `sharding_trial` tries
that word.

Rajbhandari et al. 2020, arXiv:1910.02054.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import packed, unpacked

OF_TX, MASTERS = "of_tx", "masters"  # fields of a rule's state that keeps a shard of params in 32 bits

# ---------------------------------------------------------------- vectors


def join(parts: Sequence[jax.Array], block: int = 1, width: int = 0) -> jax.Array:
    """[..., n] each -> [..., m]: one after another, each at a whole block if there are several, then zeros to a width.

    The floats of a block share a scale on a coarse wire. With two tensors in it the smaller would be rounded away.
    """
    if len(parts) > 1 and block > 1:
        parts = [jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % block)]) for x in parts]
    missing = width - sum(x.shape[-1] for x in parts)
    if missing > 0:
        parts = [*parts, jnp.zeros((*parts[0].shape[:-1], missing), parts[0].dtype)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def cut(vector: jax.Array, sizes: Sequence[int], block: int = 1) -> list[jax.Array]:
    """The inverse of `join`: [..., m] -> [..., n] for each size n."""
    begins = np.cumsum([0, *(round_up(n, block) for n in sizes)]).tolist()
    return [vector[..., begin : begin + n] for begin, n in zip(begins, sizes, strict=False)]


def round_up(n: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-n // multiple) * multiple


# ---------------------------------------------------------------- by element


class ElementSharding(NamedTuple):
    """Each of w workers has 1/w of every tensor.

        f32[n0, n1, ...] -> shard c = entries c m to (c + 1) m of the flat tensor, f32[m, 1, ...] ;  m = ceil(n0 n1 / w)

    A tree of shards has the structure of the whole, and a shard the number of axes of its tensor. So masks by name and
    by `ndim > 1` stay what they are. The last shards are padded with zeros; a tensor without axes is on all workers.
    """

    workers: int
    name = "entries"  # in checkpoints

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
        """Masters less this worker's shard of params, which it sends; 0 in padding."""

        def one(shard: jax.Array, master: jax.Array, leaf: jax.Array) -> jax.Array:
            # Masters move in padding after a resume, when all workers take up the moments of a tensor of one entry. In
            # a block of an 8-bit wire such a number would coarsen the others.
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
    """The shape of one worker's shard of a tensor; an empty tensor is on all workers."""
    if workers == 1 or not shape or 0 in shape:
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

    flats: dict[str, Any]  # by dtype: one leaf after another, then zeros up to the longest of all workers

    @property
    def flat(self) -> Any:
        """The params, f32[width]."""
        return self.flats["float32"]


class StateShard(NamedTuple):
    """An optimizer's state for a worker's tensors."""

    flats: dict[str, Any]  # as of `TensorShard`
    rest: PyTree  # the state, with None in place of tensors' leaves: counts, rates and what else all workers have


class Layout(NamedTuple):
    """Where the leaves of each worker's tree lie in its flat arrays."""

    structures: tuple[Any, ...] = ()  # by worker
    leaves: tuple[tuple[jax.ShapeDtypeStruct, ...], ...] = ()  # by worker
    is_shared: tuple[tuple[bool, ...], ...] = ()  # by worker and leaf: all workers have it, so it lies in none
    widths: tuple[tuple[str, int], ...] = ()  # by dtype
    block: int = 1

    def flatten(self, tree: PyTree, index: int) -> dict[str, Any]:
        """A worker's flat arrays."""
        flats, leaves = {}, zip(jax.tree.leaves(tree), self.is_shared[index], strict=True)
        own_leaves = [x.reshape(-1) for x, is_shared in leaves if not is_shared]
        for dtype, width in self.widths:
            parts = [x for x in own_leaves if str(x.dtype) == dtype]
            flats[dtype] = join(parts or [jnp.zeros(width, dtype)], self.block, width)
        return flats

    def unflatten(self, flats: dict[str, Any], index: int, shared: Sequence[Any] = ()) -> PyTree:
        """The inverse, with the leaves that all workers have: a worker's tree."""
        rows, parts = [*zip(self.leaves[index], self.is_shared[index], strict=True)], {}
        for dtype, flat in flats.items():
            sizes = [like.size for like, is_shared in rows if not is_shared and str(like.dtype) == dtype]
            parts[dtype] = iter(cut(flat, sizes, self.block))
        others = iter(shared)
        leaves = [next(others) if is_shared else next(parts[str(x.dtype)]).reshape(x.shape) for x, is_shared in rows]
        return jax.tree.unflatten(self.structures[index], leaves)


def layout_of(trees: Sequence[PyTree], shared: Collection[str] = (), block: int = 1) -> Layout:
    """The layout of these workers' trees; all have leaves of the names `shared`."""
    named, widths = [named_leaves(tree) for tree in trees], {}
    for each in named:
        sizes = Counter[str]()
        for name, leaf in each:
            sizes[str(leaf.dtype)] += 0 if name in shared else round_up(leaf.size, block)
        widths |= {dtype: max(size, widths.get(dtype, 0)) for dtype, size in sizes.items() if size}
    return Layout(
        tuple(map(jax.tree.structure, trees)),
        tuple(tuple(leaf for _, leaf in each) for each in named),
        tuple(tuple(name in shared for name, _ in each) for each in named),
        tuple(sorted(widths.items())),
        block,
    )


class TensorSharding(NamedTuple):
    """Each tensor is updated by one worker; methods are those of `ElementSharding`.

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
    state: Layout = Layout()  # of the optimizer's state, by `with_state_of`
    name = "leaves"  # in checkpoints

    @property
    def params(self) -> Layout:
        return params_layout(self._replace(state=Layout()))

    @property
    def like(self) -> PyTree:
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(s, jnp.float32) for s in self.shapes])

    def select(self, tree: PyTree, index: int) -> PyTree:
        """The tensors of one shard; `optax.MaskedNode` for all others."""
        leaves = zip(self.owners, jax.tree.leaves(tree), strict=True)
        return jax.tree.unflatten(self.structure, [x if owner == index else optax.MaskedNode() for owner, x in leaves])

    def shard(self, tree: PyTree, index: Any) -> TensorShard:
        branches = [lambda t, i=i: TensorShard(self.params.flatten(self.select(t, i), i)) for i in range(self.workers)]
        return lax.switch(index, branches, tree)

    def shard_rows(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """[w, width]: every worker's shard of a tree."""
        tree = jax.tree.unflatten(self.structure, leaves)
        return jnp.stack([self.params.flatten(self.select(tree, i), i)["float32"] for i in range(self.workers)])

    def unshard(self, rows: jax.Array) -> list[jax.Array]:
        """The tree's leaves from all shards, [w, width]."""
        trees = [self.params.unflatten({"float32": row}, i) for i, row in enumerate(rows)]
        tensors = [iter(jax.tree.leaves(tree)) for tree in trees]
        return [next(tensors[owner]) for owner in self.owners]

    def with_state_of(self, tx: Any) -> "TensorSharding":
        """The sharding that also knows this optimizer's state, of which each leaf is one worker's or all workers'.

        Raises:
            UsageError: a leaf of the state that is neither.
        """
        init = lambda params: packed(tx.init(params))  # noqa: E731
        states = [jax.eval_shape(init, self.select(self.like, index)) for index in range(self.workers)]
        by_worker, shared = [dict(named_leaves(state)) for state in states], set()
        for name, leaf in named_leaves(jax.eval_shape(init, self.like)):
            by_shard = [(each[name].shape, each[name].dtype) for each in by_worker if name in each]
            if set(by_shard) != {(leaf.shape, leaf.dtype)} or len(by_shard) not in (1, self.workers):
                raise UsageError(
                    f"sharded by tensor: {name} of the optimizer's state is {list(leaf.shape)}, but not with some of "
                    "the tensors alone; expected a state of each tensor, or one that all share: leave it unsharded"
                )
            shared |= {name} if len(by_shard) == self.workers else set()
        return self._replace(state=layout_of(states, shared))

    def init(self, tx: Any, params: PyTree, index: Any) -> StateShard:
        branches = [lambda p, i=i: self._shard_state(tx.init(self.select(p, i)), i) for i in range(self.workers)]
        return lax.switch(index, branches, params)

    def step(
        self, step: Callable, index: Any, grads: TensorShard, state: StateShard, params: TensorShard
    ) -> tuple[TensorShard, StateShard]:
        def run(i: int, grads: TensorShard, state: StateShard, params: TensorShard) -> tuple[TensorShard, StateShard]:
            trees = self._unflatten(grads, i), unpacked(self._unflatten(state, i)), self._unflatten(params, i)
            # The `cond` is a fence, since XLA fuses nothing across a branch. Otherwise the step would be fused with the
            # slicing, and add norms up in another order than in a program of whole tensors.
            updated, after = lax.cond(index == i, lambda g, s, p: step(g, s, p), lambda g, s, p: (p, s), *trees)
            return TensorShard(self.params.flatten(updated, i)), self._shard_state(after, i)

        return lax.switch(index, [functools.partial(run, i) for i in range(self.workers)], grads, state, params)

    def changes(self, params: PyTree, masters: TensorShard, index: Any) -> TensorShard:
        return jax.tree.map(jnp.subtract, masters, self.shard(params, index))

    def write(self, whole: PyTree, shard: TensorShard, index: int) -> None:
        jax.tree.map(np.copyto, self.select(whole, index), self._unflatten(jax.device_get(shard), index))

    def to_checkpoint(self, state: PyTree, index: int) -> PyTree:
        return map_shards(lambda shard: self._unflatten(shard, index), state)

    def from_checkpoint(self, like: PyTree, index: int, read: Callable[[str], np.ndarray]) -> PyTree:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), like)
        saved = jax.eval_shape(lambda state: self.to_checkpoint(state, index), shapes)
        filled = jax.tree.unflatten(jax.tree.structure(saved), [read(name) for name, _ in named_leaves(saved)])

        def shard(like: Any, tree: PyTree) -> Any:
            is_state = isinstance(like, StateShard)
            return self._shard_state(tree, index) if is_state else TensorShard(self.params.flatten(tree, index))

        made = map_shards(shard, shapes, filled)
        return jax.tree.unflatten(jax.tree.structure(like), map(np.asarray, jax.tree.leaves(made)))

    def _shard_state(self, state: PyTree, index: int) -> StateShard:
        state = packed(state)
        leaves = zip(jax.tree.leaves(state), self.state.is_shared[index], strict=True)
        rest = jax.tree.unflatten(self.state.structures[index], [x if is_shared else None for x, is_shared in leaves])
        # One structure for all workers, which the program of all of them needs.
        rest = jax.tree.map(lambda x: None if is_masked(x) else x, rest, is_leaf=is_masked)
        return StateShard(self.state.flatten(state, index), rest)

    def _unflatten(self, shard: TensorShard | StateShard, index: int) -> PyTree:
        if isinstance(shard, StateShard):
            return self.state.unflatten(shard.flats, index, jax.tree.leaves(shard.rest))
        return self.params.unflatten(shard.flats, index)


def is_masked(node: Any) -> bool:
    """Return True for Optax's stand-in of a tensor that is left out."""
    return isinstance(node, optax.MaskedNode)


def map_shards(function: Callable, state: PyTree, *rest: PyTree) -> PyTree:
    """`function` of the shards of whole tensors in a rule's state; other nodes are those of the last tree."""
    is_shard = lambda node: isinstance(node, (TensorShard, StateShard))  # noqa: E731
    one = lambda *nodes: function(*nodes) if is_shard(nodes[0]) else nodes[-1]  # noqa: E731
    return jax.tree.map(one, state, *rest, is_leaf=is_shard)


@functools.cache
def params_layout(sharding: TensorSharding) -> Layout:
    """Where params lie in their shards."""
    trees = [sharding.select(sharding.like, index) for index in range(sharding.workers)]
    layout = layout_of(trees, block=sharding.block)
    return layout._replace(widths=(("float32", max([1, *dict(layout.widths).values()])),))


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
