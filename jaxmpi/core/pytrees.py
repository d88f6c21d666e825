"""Pytrees: leaves by name, their shapes and dtypes, digests."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import check

PyTree = Any


def by_path(tree: PyTree, name_of: Callable[[Any], str] | None = None) -> dict[str, Any]:
    """Leaves by names such as `layers/0/weight`; no two have the same."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = (name_of or path_name)(path)
        check(name not in named, f"two leaves of a tree have the path {name!r}; give its nodes other names")
        named[name] = leaf
    return named


def path_name(path: Any) -> str:
    """`layers/0/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def signature(tree: PyTree) -> dict[str, str]:
    """Paths to `float32[3, 64]` in order, which must agree before arrays travel."""
    return {name: f"{jnp.result_type(leaf)}{list(np.shape(leaf))}" for name, leaf in named_leaves(tree)}


def mismatches(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Lines on at most 12 differing leaves, then the number of others.

    A leaf differs if it is missing, extra, or of another shape or dtype.
    """
    descriptions = [{name: describe_leaf(x) for name, x in tree.items()} for tree in (got, expected)]
    lines = [
        f"{name}: got {descriptions[0].get(name, 'nothing')}, expected {descriptions[1].get(name, 'nothing')}"
        for name in dict.fromkeys([*expected, *got])
        if descriptions[0].get(name) != descriptions[1].get(name)
    ]
    return lines if len(lines) <= 12 else [*lines[:12], f"and {len(lines) - 12} more"]


def check_arrays(what: str, tree: PyTree) -> None:
    """Raise `UsageError` by path if a leaf, such as a module's activation function, holds no numbers."""
    for name, leaf in named_leaves(tree):
        got = describe_leaf(leaf)
        check(
            "[" in got,
            f"{what}: leaf {name or '(the tree itself)'!r}: got {got}; expected an array of numbers (of a random key: "
            "jax.random.key_data; of a module: eqx.filter(model, eqx.is_array))",
        )


def describe_leaf(leaf: Any) -> str:
    """`float32[3, 64]`; the type of a leaf that holds no numbers."""
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "a random key"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array"  # its mask would be lost
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    is_numbers = array.dtype.kind in "biufc" or jnp.issubdtype(array.dtype, jnp.number)  # bfloat16's kind is V
    return f"{array.dtype}{list(array.shape)}" if is_numbers else type(leaf).__name__


def mean_of_floats(tree: PyTree, mean: Callable[[PyTree], PyTree]) -> PyTree:
    """Floating-point leaves by `mean`, their mean over workers; others as they are."""
    leaves = OrderedDict(named_leaves(tree))  # `mean` names leaves in errors, and keeps their order
    is_float = lambda leaf: jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.floating)  # noqa: E731
    leaves |= mean(OrderedDict((path, leaf) for path, leaf in leaves.items() if is_float(leaf)))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves.values())


class RanksOwn:
    """A tree node whose numbers are each rank's own, never made equal."""


def has_ranks_own(tree: PyTree) -> bool:
    """Return True if a tree has such a node."""
    is_own = lambda x: isinstance(x, RanksOwn)  # noqa: E731
    return any(map(is_own, jax.tree.leaves(tree, is_leaf=is_own)))


def as_given(arrays: PyTree, given: PyTree) -> PyTree:
    """NumPy arrays as JAX arrays, if `given` has such in their place."""
    return jax.tree.map(lambda x, like: jnp.asarray(x) if isinstance(like, jax.Array) else x, arrays, given)


def zeros_for(shapes: PyTree) -> PyTree:
    """NumPy arrays of these shapes, to be filled."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def in_32_bits(tree: PyTree) -> PyTree:
    """Floats of 16 bits as float32, other leaves as they are: for what many small numbers are added to."""
    is_short = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4  # noqa: E731
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_short(x) else x, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Leaves in the dtypes of another tree."""
    return jax.tree.map(lambda x, other: x.astype(other.dtype), tree, like)


class ComplexParts(NamedTuple):
    """A complex leaf as two real ones."""

    real: Any
    imag: Any


def is_complex(leaf: Any) -> bool:
    """Return True for a complex number or an array of such."""
    return isinstance(leaf, complex) or getattr(getattr(leaf, "dtype", None), "kind", "") == "c"


def split_complex(tree: PyTree) -> PyTree:
    """The tree with a `ComplexParts` in the place of each complex leaf."""
    return jax.tree.map(lambda leaf: ComplexParts(leaf.real, leaf.imag) if is_complex(leaf) else leaf, tree)


def join_complex(tree: PyTree) -> PyTree:
    """The inverse of `split_complex`, for JAX's arrays."""
    is_parts = lambda x: isinstance(x, ComplexParts)  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.complex(*x) if is_parts(x) else x, tree, is_leaf=is_parts)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves with paths such as `params/conv1/kernel`; no two have the same."""

    def escaped(path: Any) -> str:
        return "/".join(jax.tree_util.keystr((key,), simple=True).replace("/", "\\/") for key in path)

    return list(by_path(tree, escaped).items())


def tree_digest(tree: PyTree) -> str:
    """SHA-256 over the bytes of all leaves."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def clipped(tree: PyTree, norm: jax.Array, largest: float) -> PyTree:
    """Scale a tree down to a largest norm; 0 means no clipping.

    x <- x min(1, largest / |x|) ;  by one factor, since XLA computes a product anew in each of its uses. But it
    stores a quotient, as `optax.clip_by_global_norm` has. With Adam, whose two moments use it, that is a copy of the
    gradient.

    Args:
        norm: of the whole tree, a number.
    """
    if not largest:
        return tree
    factor = jnp.where(norm < largest, 1.0, largest / norm)

    def scaled(x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, factor.dtype)
        return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)

    return jax.tree.map(scaled, tree)


def size_bytes(tree: PyTree) -> int:
    """Bytes of arrays, or of the shapes of some."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
