"""Slices of trees: each of w workers holds 1/w of every leaf.

ZeRO, Rajbhandari et al. 2020, stage 1. A tree is cut leaf by leaf. So a tree of slices has the structure of the whole,
and masks by name stay what they are. A slice keeps the number of axes, by which masks such as `ndim > 1` go:

    f32[n0, n1, ...] -> slice c = entries c m to (c + 1) m of the flat leaf, f32[m, 1, ...] ;  m = ceil(n0 n1 ... / w)

The last slices are filled up with zeros. A single entry is worker 0's, and of one worker the slice is the leaf itself.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.pytrees import PyTree, named_leaves

OF_TX, MASTERS = "of_tx", "masters"  # fields of a rule's state with slices of params in 32 bits


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
    """Join a leaf's slices, read one by one, into the whole leaf.

    `read(number, shape)` gives a slice. If slice 0 is the whole leaf, it alone is read.
    """
    shape = shape_of_slice(like.shape, workers)
    numbers = range(1 if shape == tuple(like.shape) else workers)
    rows = [read(number, jax.ShapeDtypeStruct(shape, like.dtype)).reshape(-1) for number in numbers]
    return np.concatenate(rows)[: math.prod(like.shape)].reshape(like.shape)


class Entries(NamedTuple):
    """The cut into slices of every leaf, unlike `core.deals.Leaves`; nothing communicates."""

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

    def lacking(self, params: PyTree, masters: PyTree, chunk: Any) -> PyTree:
        """Masters less this worker's params: what it sends; 0 in padding.

        Masters move there after a resume: every worker takes up the moments of a param of one entry.
        """

        def one(own: jax.Array, mine: jax.Array, leaf: jax.Array) -> jax.Array:
            change = mine - own
            if self.workers * mine.size == leaf.size:
                return change
            filled = np.clip(leaf.size - np.arange(self.workers) * mine.size, 0, mine.size).astype(np.int32)
            at = jnp.arange(mine.size, dtype=jnp.int32).reshape(mine.shape)
            return jnp.where(at < jnp.asarray(filled)[chunk], change, jnp.zeros_like(change))

        return jax.tree.map(one, self.own(params, chunk), masters, params)

    def write(self, whole: PyTree, own: PyTree, chunk: int) -> None:
        """Copy slice `chunk` of every leaf into `whole`, in host memory."""

        def one(leaf: np.ndarray, mine: Any) -> None:
            flat = leaf.reshape(-1)[chunk * mine.size : (chunk + 1) * mine.size]
            flat[:] = np.asarray(mine).reshape(-1)[: flat.size]

        jax.tree.map(one, whole, own)

    def for_state_of(self, tx: Any) -> "Entries":
        """The cut itself: a slice has the structure of the whole."""
        return self

    def saved(self, state: PyTree, chunk: int) -> PyTree:
        """A rule's state as a checkpoint has it: as it is."""
        return state

    def restored(self, like: PyTree, chunk: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """This worker's rule state from a checkpoint's whole leaves, by `read(name)`."""

        def one(name: str, mine: Any) -> np.ndarray:
            whole = read(name)
            if whole.shape == mine.shape:
                is_elsewhere = whole.size == 1 and chunk > 0 and MASTERS in name.split("/")
                return np.zeros_like(whole) if is_elsewhere else whole  # zeros for a one-entry param's master
            flat = whole.reshape(-1)[chunk * mine.size : (chunk + 1) * mine.size]
            return np.pad(flat, (0, mine.size - flat.size)).reshape(mine.shape)

        leaves = [one(*named) for named in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)
