"""Typed random keys as arrays of numbers, which can travel, and back."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class KeyData:
    """Typed keys as u32[..., words]; the tree's structure names their generator."""

    key_data: Any
    implementation: Any = field(metadata={"static": True})


def is_key_data(node: Any) -> bool:
    """Return True if the node stands for typed keys."""
    return isinstance(node, KeyData)


def is_key(leaf: Any) -> bool:
    """Return True if the leaf is an array of typed keys."""
    # Dtypes of keys are none of NumPy's. To look at that first takes a tenth of the time, and calls ask for every leaf.
    is_candidate = isinstance(leaf, jax.Array) and not isinstance(leaf.dtype, np.dtype)
    return is_candidate and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def packed(tree: PyTree) -> PyTree:
    """The tree with its typed keys as KeyData.

    Numbers that are not traced are NumPy's, so that bytes show what changed.
    """

    def one(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        data = jax.random.key_data(leaf)
        return KeyData(data if isinstance(data, Tracer) else np.asarray(data), jax.random.key_impl(leaf))

    return jax.tree.map(one, tree)


def unpacked(tree: PyTree) -> PyTree:
    """The tree with typed keys in place of KeyData."""

    def one(node: Any) -> Any:
        if not is_key_data(node):
            return node
        return jax.random.wrap_key_data(jnp.asarray(node.key_data), impl=node.implementation)

    return jax.tree.map(one, tree, is_leaf=is_key_data)


def key_leaves(structure: Any) -> list[bool]:
    """For every leaf of a packed tree, whether it holds keys."""
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [is_key_data(node) for node in jax.tree.leaves(tree, is_leaf=is_key_data)]


def check_op(op: str, shape: tuple[int, ...], where: str) -> None:
    """Refuse operations that give no keys, or rows of one key; `shape` is of the keys' numbers."""
    check(op in ("", "gather"), f"{where}: got random keys, which {op} cannot take: use gather or local")
    check(op != "gather" or len(shape) > 1, f"{where}: got one random key; gather needs a first axis: use key[None]")


def check_rows(shape: tuple[int, ...], where: str) -> None:
    """Refuse a single key if rows are wanted."""
    check(len(shape) > 1, f"{where}: got one random key; scatter needs a first axis: use jax.random.split(key, n)")
