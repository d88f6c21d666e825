"""Slices of trees: each of w workers holds one w-th of every leaf. ZeRO, Rajbhandari et al. 2020, stage 1.

Leaf by leaf, so a tree of slices has the structure of the whole, and masks by name stay what they are. A slice keeps
the number of axes, by which masks such as `ndim > 1` go:

    f32[n0, n1, ...] -> slice c = entries c m to (c + 1) m of the flat leaf, f32[m, 1, ...] ;  m = ceil(n0 n1 ... / w)

The last slices are filled up with zeros. A single entry is worker 0's, and of one worker the slice is the leaf itself.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves

TRIED_STEPS = 8  # RAdam begins as momentum, for five
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


# ---------------------------------------------------------------- what can be cut


def check_state_of_slices(whole: PyTree, sliced: PyTree, workers: int) -> None:
    """Refuse an optimizer whose state of slices is no slices of its state.

    Args:
        whole: its state, or the shapes of it.
        sliced: the same of a worker's slices.

    Raises:
        UsageError: the leaf: got, expected.
    """
    rows = dict(named_leaves(sliced))
    for name, leaf in named_leaves(whole):
        got, able = tuple(np.shape(rows.get(name, ()))), shape_of_slice(leaf.shape, workers)
        if name not in rows or got not in (able, tuple(leaf.shape)):
            raise UsageError(
                f"sharded: {name} of the optimizer's state is {list(leaf.shape)}, of slices {list(got)}; expected "
                f"{list(able)}, a slice of it: an optimizer that mixes entries cannot be cut"
            )


def check_elementwise(tx: Any, params: PyTree) -> None:
    """Refuse an Optax transformation that mixes entries of a tensor, or of several; it is tried out.

    Steps from random params with the axes of the model's and at most five entries along each, whole and in slices; at
    last with a gradient that is not finite.

    Args:
        params: arrays or their shapes.

    Raises:
        UsageError: the tensor whose update differs.
    """
    with jax.ensure_compile_time_eval():
        name = mixed(tx, params)
    if name:
        raise UsageError(
            f"sharded: the update of {name} by this optimizer is not that of its slices, so it mixes entries of a "
            "tensor (as LARS, LAMB, Adafactor, Muon, clipping by a norm) or of several; leave it unsharded, or give "
            "clip_norm to jaxmpi.sharded in place of a clipping in the chain"
        )


def mixed(tx: Any, params: PyTree) -> str:
    """Name of the first tensor whose update is not that of its slices; empty if there is none."""
    rng = np.random.default_rng(0)
    like = jax.tree.map(lambda leaf: np.zeros([min(max(n, 1), 5) for n in leaf.shape], leaf.dtype), params)
    noise = lambda scale: jax.tree.map(  # noqa: E731
        lambda leaf: np.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype), like
    )
    weights, names = noise(1.0), [name for name, _ in named_leaves(like)]
    parts = [slices_of(weights, c, TRIED_WORKERS) for c in range(TRIED_WORKERS)]

    @jax.jit
    def step(grads: PyTree, state: PyTree, states: list[PyTree]) -> tuple[PyTree, list[PyTree], jax.Array]:
        whole, state = tx.update(grads, state, weights)
        made = [
            tx.update(slices_of(grads, c, TRIED_WORKERS), s, parts[c]) for c, s in zip(range(3), states, strict=True)
        ]
        rows = jax.tree.map(lambda *leaves: jnp.stack([leaf.reshape(-1) for leaf in leaves]), *[u for u, _ in made])
        apart = jax.tree.map(lambda u, row: distance(u, whole_of(row, u)), whole, rows)
        return state, [s for _, s in made], jnp.stack(jax.tree.leaves(apart))

    state, states = tx.init(weights), [tx.init(part) for part in parts]
    for scale in [1e-3, 1.0, 1e3] * (TRIED_STEPS // 3) + [math.nan]:
        grads = noise(1.0 if math.isnan(scale) else scale)
        if math.isnan(scale):
            first, *rest = jax.tree.leaves(grads)
            first.reshape(-1)[:1] = scale
            grads = jax.tree.unflatten(jax.tree.structure(grads), [first, *rest])
        state, states, apart = step(grads, state, states)
        odd = np.flatnonzero(np.asarray(apart) > 1e-4)  # rounding is below 1e-6, what mixes is off by tenths
        if odd.size:
            return names[odd[0]]
    return ""


def distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """f32[]: the largest difference, by the largest entry; infinite if only one of two entries is finite."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    both = jnp.isfinite(x) & jnp.isfinite(y)
    odd = (jnp.isfinite(x) != jnp.isfinite(y)).any()
    largest = jnp.max(jnp.where(both, jnp.abs(x), 0), initial=1e-30)
    return jnp.where(odd, jnp.inf, jnp.max(jnp.where(both, jnp.abs(x - y), 0), initial=0) / largest)
