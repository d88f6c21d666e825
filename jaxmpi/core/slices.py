"""Slices of trees: each of w workers holds one w-th of every leaf. ZeRO, Rajbhandari et al. 2020, stage 1.

Leaf by leaf, so a tree of slices has the structure of the whole, and masks by name stay what they are. A slice keeps
the number of axes, by which masks such as `ndim > 1` go:

    f32[n0, n1, ...] -> slice c = entries c m to (c + 1) m of the flat leaf, f32[m, 1, ...] ;  m = ceil(n0 n1 ... / w)

The last slices are filled up with zeros. A single entry is worker 0's, and of one worker the slice is the leaf itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves

OF_TX, MASTERS = "of_tx", "masters"  # fields of a rule's state with slices of params in 32 bits
TRIED_UPDATES = 8  # that move params; RAdam begins as momentum, for five
LEAST_STEPS, TRIED_STEPS = 40, 2000  # some move params, or some of them, only every k steps
TRIED_SCALES = (1e-3, 1.0, 1e3, 1e6)  # of gradients: clipping shows at one of them
TRIED_WORKERS = 3


def shape_of_slice(shape: Sequence[int], workers: int) -> tuple[int, ...]:
    """The shape of one worker's slice of a leaf."""
    if workers == 1 or not shape:
        return tuple(shape)
    return (-(-math.prod(shape) // workers), *(1,) * (len(shape) - 1))


def rows_of(leaf: jax.Array, workers: int) -> jax.Array:
    """[w, m]: every worker's slice of a leaf, flat."""
    width = math.prod(shape_of_slice(leaf.shape, workers))
    missing = workers * width - leaf.size
    flat = leaf.reshape(-1)
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(workers, width)


def slices_of(tree: PyTree, chunk: Any, workers: int) -> PyTree:
    """Slice number `chunk`, i32[], of every leaf."""

    def one(leaf: jax.Array) -> jax.Array:
        return rows_of(leaf, workers)[chunk].reshape(shape_of_slice(leaf.shape, workers))

    return tree if workers == 1 else jax.tree.map(one, tree)


def whole_of(rows: jax.Array, like: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
    """The inverse of `rows_of`."""
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def whole_of_slices(
    like: jax.ShapeDtypeStruct | jax.Array, workers: int, read: Callable[[int, jax.ShapeDtypeStruct], np.ndarray]
) -> np.ndarray:
    """A whole leaf of the slices that `read(number, shape)` gives; of one, if the first has all of it."""
    shape = shape_of_slice(like.shape, workers)
    numbers = range(1 if shape == tuple(like.shape) else workers)
    rows = [read(number, jax.ShapeDtypeStruct(shape, like.dtype)).reshape(-1) for number in numbers]
    return np.concatenate(rows)[: math.prod(like.shape)].reshape(like.shape)


class Entries(NamedTuple):
    """The cut into slices of every leaf; `core.deals.Leaves` is that into whole leaves. Nothing communicates."""

    workers: int

    @property
    def name(self) -> str:
        """Name of this cut in a checkpoint."""
        return "entries"

    def own(self, tree: PyTree, chunk: Any) -> PyTree:
        """Slice number `chunk`, i32[], of every leaf."""
        return slices_of(tree, chunk, self.workers)

    def init(self, tx: Any, params: PyTree, chunk: Any) -> PyTree:
        """The optimizer's state 0 for these slices of params, whole."""
        return tx.init(self.own(params, chunk))

    def step(
        self, tx: Any, step: Callable[..., tuple[PyTree, PyTree]], chunk: Any, grads: PyTree, state: PyTree, own: PyTree
    ) -> tuple[PyTree, PyTree]:
        """`step(grads, state, params) -> (tree like params, state)` on slices."""
        return step(grads, state, own)

    def write(self, whole: PyTree, own: PyTree, chunk: int) -> None:
        """Put slice number `chunk` of every leaf in its place in whole leaves, on the host."""

        def one(leaf: np.ndarray, mine: Any) -> None:
            flat = leaf.reshape(-1)[chunk * mine.size : (chunk + 1) * mine.size]
            flat[:] = np.asarray(mine).reshape(-1)[: flat.size]

        jax.tree.map(one, whole, own)

    def saved(self, tx: Any, state: PyTree, chunk: int) -> PyTree:
        """A rule's state as a checkpoint has it: as it is."""
        return state

    def restored(self, tx: Any, like: PyTree, chunk: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """A rule's state as this worker holds it, of whole leaves that `read(name)` gives from a checkpoint."""

        def one(name: str, mine: Any) -> np.ndarray:
            whole = read(name)
            if whole.shape == mine.shape:
                is_elsewhere = whole.size == 1 and chunk > 0 and MASTERS in name.split("/")
                return np.zeros_like(whole) if is_elsewhere else whole  # of a param of one entry
            flat = whole.reshape(-1)[chunk * mine.size : (chunk + 1) * mine.size]
            return np.pad(flat, (0, mine.size - flat.size)).reshape(mine.shape)

        leaves = [one(*named) for named in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


# ---------------------------------------------------------------- what can be cut


MIXED = (
    "sharded: the update of {name} by this optimizer depends on other tensors (as with clipping by a global norm), or "
    "on how many there are; leave it unsharded, or give clip_norm to jaxmpi.sharded in place of a clipping in the chain"
)
UNTRIED = (
    "sharded: this optimizer fails when it is tried out on small tensors ({error}), so it is not known whether its "
    "updates can be cut; leave it unsharded, or let it take tensors of any size, and numbers that it knows"
)
# Equations that compute nothing, of which other shapes may need others. The numbers in them count all the same.
MOVES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "jit", "pjit"}


def cut_for(tx: Any, params: PyTree) -> str:
    """How an Optax transformation can be cut: `entries` if that leaves its updates what they are, else `leaves`.

    It is tried out.

    Args:
        params: arrays or their shapes.

    Raises:
        UsageError: neither; the tensor whose update differs.
    """
    try:
        is_whole = goes_by_shape(tx, params)
        with jax.ensure_compile_time_eval():  # it may be tried while a program is traced
            if not (is_whole or mixed(tx, params)):
                return "entries"
            name = mixed(tx, params, "leaves")
    except UsageError:
        raise
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        raise UsageError(UNTRIED.format(error=f"{type(error).__name__}: {error}")) from error
    if name:
        raise UsageError(MIXED.format(name=name))
    return "leaves"


def goes_by_shape(tx: Any, params: PyTree) -> bool:
    """Return True if an optimizer treats slices in another way than whole tensors, by their sizes.

    Small tensors do not show it, so nothing runs. The shapes of the state and the equations of an update are compared
    with those of whole tensors, for three workers, and for so many that a slice has one entry: such a slice is below
    any size at which the optimizer could change its way.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    whole, equations = jax.eval_shape(tx.init, like), list(computed(tx, like))
    largest = max((leaf.size for leaf in jax.tree.leaves(like)), default=1)
    for workers in {TRIED_WORKERS, max(largest, 2)}:
        slices = jax.eval_shape(lambda tree, w=workers: slices_of(tree, 0, w), like)
        rows = dict(named_leaves(jax.eval_shape(tx.init, slices)))
        for name, leaf in named_leaves(whole):
            # A checkpoint takes every array for a slice, so only a single number, as a count, may be none.
            able = [shape_of_slice(leaf.shape, workers), *([leaf.shape] if leaf.size == 1 else [])]
            if name not in rows or rows[name].shape not in able:
                return True
        if list(computed(tx, slices)) != equations:
            return True
    return False


def computed(tx: Any, like: PyTree) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The name of each equation of an update of params like these, and the single numbers and types in it."""
    closed = jax.make_jaxpr(tx.update)(like, jax.eval_shape(tx.init, like), like)
    pending = [(closed.jaxpr, closed.consts)]
    while pending:
        jaxpr, consts = pending.pop(0)
        yield "numbers", tuple(repr(np.asarray(x).item()) for x in consts if np.size(x) == 1)
        for equation in jaxpr.eqns:
            literals = [var.val for var in equation.invars if isinstance(var, jax.extend.core.Literal)]
            numbers = [repr(np.asarray(x).item()) for x in literals if np.size(x) == 1]  # a NaN, too, is itself
            name, options = equation.primitive.name, [equation.params.get(key) for key in ("y", "new_dtype")]
            if name not in MOVES or numbers:
                yield "" if name in MOVES else name, (*numbers, *map(str, options))
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    pending.append((inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, []))


def is_jaxpr(x: Any) -> bool:
    """Return True for the equations of a function, closed or not."""
    return isinstance(x, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def mixed(tx: Any, params: PyTree, cut: str = "entries") -> str:
    """Name of the first tensor whose update is not that of its slices, or of it alone; empty if there is none.

    Steps from random params with the axes of the model's and at most five entries along each, whole and cut, until
    several have moved params; then once more from the start, where no schedule has ended, with gradients that are not
    finite. If no step moves params, it cannot be known, and the first tensor is named. Gradients are of sizes by
    chance, since an optimizer may look at every k-th alone.

    Args:
        params: arrays or their shapes.
        cut: `entries`, or `leaves` to let each of three workers have some tensors.
    """
    rng = np.random.default_rng(0)
    like = jax.tree.map(lambda leaf: np.zeros([min(max(n, 1), 5) for n in leaf.shape], leaf.dtype), params)
    noise = lambda scale: jax.tree.map(  # noqa: E731
        lambda leaf: np.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype), like
    )
    weights, names = noise(1.0), [name for name, _ in named_leaves(like)]
    structure = jax.tree.structure(like)

    def part(tree: PyTree, worker: int) -> PyTree:
        if cut == "entries":
            return slices_of(tree, worker, TRIED_WORKERS)
        leaves = enumerate(jax.tree.leaves(tree))
        return jax.tree.unflatten(
            structure, [x if i % TRIED_WORKERS == worker else optax.MaskedNode() for i, x in leaves]
        )

    def joined(parts: list[PyTree]) -> list[jax.Array]:
        leaves = [jax.tree.leaves(each) for each in parts]
        if cut == "leaves":
            return [leaves[i % TRIED_WORKERS][i // TRIED_WORKERS] for i in range(len(names))]
        rows = [jnp.stack([leaf.reshape(-1) for leaf in each]) for each in zip(*leaves, strict=True)]
        return [whole_of(row, leaf) for row, leaf in zip(rows, jax.tree.leaves(like), strict=True)]

    @jax.jit
    def step(grads: PyTree, state: PyTree, states: list[PyTree]) -> tuple[PyTree, list[PyTree], jax.Array, jax.Array]:
        whole, state = tx.update(grads, state, weights)
        made = [tx.update(part(grads, c), s, part(weights, c)) for c, s in enumerate(states)]
        leaves, rows = jax.tree.leaves(whole), joined([update for update, _ in made])
        apart = [distance(u, row) for u, row in zip(leaves, rows, strict=True)]
        has_moved = jnp.stack([(x != 0).any() for x in (*leaves, *rows)]).any()
        return state, [s for _, s in made], jnp.stack(apart), has_moved

    for wanted, is_finite in ((TRIED_UPDATES, True), (1, False)):
        state, states, moved = tx.init(weights), [tx.init(part(weights, c)) for c in range(TRIED_WORKERS)], 0
        for i in range(TRIED_STEPS):
            grads = noise(rng.choice(TRIED_SCALES))
            if not is_finite:
                first, *rest = jax.tree.leaves(grads)
                first.reshape(-1)[:1] = math.nan
                grads = jax.tree.unflatten(structure, [first, *rest])
            state, states, apart, has_moved = step(grads, state, states)
            odd = np.flatnonzero(np.asarray(apart) > 1e-4)  # rounding is below 1e-6, what mixes is off by tenths
            if odd.size:
                return names[odd[0]]
            moved += bool(has_moved)
            if moved >= wanted and i + 1 >= LEAST_STEPS:
                break
        if is_finite and not moved:
            return names[0]
    return ""


def distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """f32[]: the largest difference, by the largest entry; infinite if only one of two entries is finite."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    both = jnp.isfinite(x) & jnp.isfinite(y)
    odd = (jnp.isfinite(x) != jnp.isfinite(y)).any()
    largest = jnp.max(jnp.where(both, jnp.abs(x), 0), initial=1e-30)
    return jnp.where(odd, jnp.inf, jnp.max(jnp.where(both, jnp.abs(x - y), 0), initial=0) / largest)
