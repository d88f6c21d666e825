"""Compressors, which send less than the gradients and keep the rest.

They may send less than 8 bits an entry. What a worker leaves out is its residual, which it adds to its next gradients
(error feedback). So over many steps all is sent. `exchange` has no state and refuses compressors; `exchange_gradients`
keeps theirs. One function and one row of the table each.
"""

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.allreduce import algorithms
from jaxmpi.allreduce.algorithms import Strategy
from jaxmpi.allreduce.wires import Wire
from jaxmpi.core.errors import UsageError, nearest
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import cut, join

EXACT = lax.Precision.HIGHEST  # else a GPU multiplies matrices of f32 with fewer bits
ROWS = 512
PIECES = 8


class Collectives(NamedTuple):
    """Collectives that a compressor may use."""

    mean: Callable[[PyTree], PyTree]  # mean of a tree, by the chosen strategy and wire, the same bits on all
    rows: Callable[[PyTree], PyTree]  # leaves [...] of all workers as [w, ...], in rank order
    wire: Wire
    local: Callable[[Callable], Callable]  # program of what a worker computes by itself; it need not communicate


class Compressor(NamedTuple):
    """Two pure functions.

    `init(params) -> state`; `compress(grads, state, collectives) -> (grads, state)`. `compress` takes this worker's
    gradients and gives what stands for their mean over workers. The result has the shapes and dtypes of grads, and is
    bitwise equal on all workers. Inside a program all of `compress` is part of that; else each of its parts is a
    program, and those that do not communicate are compiled once a host.
    """

    init: Callable[[PyTree], PyTree]
    compress: Callable[[PyTree, PyTree, Collectives], tuple[PyTree, PyTree]]


class LowRankState(NamedTuple):
    """Trees like params, with None if a leaf travels whole."""

    error: PyTree  # f32[n, m], each worker's own
    q: PyTree  # f32[m, r], equal on all workers


def lowrank(rank: int) -> Compressor:
    """PowerSGD: send each matrix as two thin factors by power iteration.

    M_i = G_i + E_i ;  P = orth((1/w) sum_i M_i Q) ;  Q = (1/w) sum_i M_i^T P ;  sent: P Q^T ;  E_i <- M_i - P P^T M_i

    Each call is one step of power iteration, from the last Q. A leaf [..., m] is taken as the matrix [n, m]. Leaves of
    fewer than two axes, and those for which r (n + m) floats would be no saving, travel whole. Orthonormal columns come
    from a QR factorization, which gives a direction even if P has lost one.
    Communicates: two means. Vogels et al. 2019, algorithms 1 and 2.
    """

    def is_thin(leaf: jax.Array) -> bool:
        n, m = matrix_shape(leaf)
        return leaf.ndim >= 2 and rank * (n + m) < n * m

    def init(params: PyTree) -> LowRankState:
        leaves, structure = jax.tree.flatten(params)
        error = [jnp.zeros(matrix_shape(leaf), jnp.float32) if is_thin(leaf) else None for leaf in leaves]
        # By NumPy, the same on all workers: every rank would compile `jax.random.normal` for every shape.
        draw = lambda i, shape: jnp.asarray(np.random.default_rng(i).standard_normal(shape, np.float32))  # noqa: E731
        q = [draw(i, (leaf.shape[-1], rank)) if is_thin(leaf) else None for i, leaf in enumerate(leaves)]
        return LowRankState(jax.tree.unflatten(structure, error), jax.tree.unflatten(structure, q))

    def project(grads: Leaves, error: Leaves, q: Leaves) -> tuple[Leaves, Leaves]:
        """M = G + E and M Q."""
        meant = jax.tree.map(lambda g, e: g.astype(jnp.float32).reshape(e.shape) + e, grads, error)
        return meant, jax.tree.map(dot, meant, q)

    def reproject(meant: Leaves, p: Leaves) -> tuple[Leaves, Leaves]:
        """P, made orthonormal, and M^T P."""
        basis = jax.tree.map(lambda columns: jnp.linalg.qr(columns)[0], p)
        return basis, jax.tree.map(transposed_dot, meant, basis)

    def rebuild(grads: Leaves, meant: Leaves, basis: Leaves, factors: Leaves, mean: Leaves) -> tuple[Leaves, Leaves]:
        """P Q^T of all workers' mean Q, as gradients, and this worker's residual: M - P Q^T of its own Q."""
        approximation = jax.tree.map(lambda b, q, g: dot(b, q.T).reshape(g.shape).astype(g.dtype), basis, mean, grads)
        return approximation, jax.tree.map(lambda m, b, q: m - dot(b, q.T), meant, basis, factors)

    def compress(grads: PyTree, state: LowRankState, collectives: Collectives) -> tuple[PyTree, LowRankState]:
        leaves, structure = jax.tree.flatten(grads)
        error, q = structure.flatten_up_to(state.error), structure.flatten_up_to(state.q)
        thin, whole = split_leaves(leaves, error)
        meant, columns = collectives.local(project)(thin, error, q)
        p, whole = collectives.mean((columns, whole))
        basis, mine = collectives.local(reproject)(meant, p)
        mean = collectives.mean(mine)
        encoded, error = collectives.local(rebuild)(thin, meant, basis, mine, mean)
        out, error, q = (jax.tree.unflatten(structure, x) for x in (merge_leaves(encoded, whole), error, mean))
        return out, LowRankState(error, q)

    return Compressor(init, compress)


Leaves = list  # of a tree: None where the other kind of leaf is, those that are compressed or those that travel whole


def split_leaves(leaves: Leaves, error: Leaves) -> tuple[Leaves, Leaves]:
    """The leaves that are compressed, which have an error, and those that travel whole."""
    pairs = [*zip(leaves, error, strict=True)]
    return [None if e is None else x for x, e in pairs], [x if e is None else None for x, e in pairs]


def merge_leaves(thin: Leaves, whole: Leaves) -> Leaves:
    """The inverse."""
    return [w if t is None else t for t, w in zip(thin, whole, strict=True)]


def matrix_shape(leaf: jax.Array) -> tuple[int, int]:
    """[..., m] as rows of m."""
    return math.prod(leaf.shape[:-1]), (leaf.shape or (1,))[-1]


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """f32[n, k] times f32[k, m]."""
    return jnp.matmul(a, b, precision=EXACT)


def transposed_dot(m: jax.Array, basis: jax.Array) -> jax.Array:
    """f32[n, m]^T times f32[n, r]."""
    # A block of rows at a time: of the whole, XLA:CPU makes a product that takes four to nine times as long.
    size = min(ROWS, len(m))
    blocks = len(m) // size

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        rows, columns = (lax.dynamic_slice_in_dim(x, i * size, size) for x in (m, basis))
        return total + dot(columns.T, rows)

    rest = dot(basis[blocks * size :].T, m[blocks * size :])
    return lax.fori_loop(0, blocks, add, rest).T


class TopKState(NamedTuple):
    """A tree like params, with None if a leaf travels whole."""

    error: PyTree  # f32[n], each worker's own


def topk(percent: float) -> Compressor:
    """Send the entries of largest magnitude of each leaf, with their indices.

    k = ceil(p n / 100) ;  m_i = g_i + e_i ;  s_i = the k largest of m_i ;  sent: (1/w) sum_i s_i ;  e_i <- m_i - s_i

    The values go over the wire, and what it rounds off stays in e_i as well. Leaves for which k values and k indices
    would be no saving travel whole. Sums are in rank order.
    Communicates: an allgather of 8 bytes an entry (wire 32), one mean of what travels whole.
    Stich et al. 2018, algorithm 1.
    """
    share = Fraction(str(percent)) / 100  # exact: in floats 7 % of 100 are more than 7

    def count(leaf: jax.Array) -> int:
        return math.ceil(share * leaf.size)

    def init(params: PyTree) -> TopKState:
        is_sparse = lambda leaf: 2 * count(leaf) < leaf.size < 2**31  # noqa: E731
        return TopKState(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.size, jnp.float32) if is_sparse(leaf) else None, params)
        )

    def select(grads: Leaves, error: Leaves, block: int) -> tuple[Leaves, jax.Array, jax.Array]:
        """Sums g + e, f32[n] each; places and values of the largest, each leaf's in blocks of their own."""
        meant = jax.tree.map(lambda g, e: g.astype(jnp.float32).reshape(-1) + e, grads, error)
        places = [(m, largest(m, count(m))) for m in jax.tree.leaves(meant)]
        return meant, join([at for _, at in places]), join([m[at] for m, at in places], block)

    def add(grads: Leaves, meant: Leaves, selection: tuple, all_selections: tuple, block: int) -> tuple[Leaves, Leaves]:
        """The mean of what was sent, and the residual of this worker.

        `selection` has this worker's places and values, `all_selections` those of all workers, as rows.
        """
        counts = [count(m) for m in jax.tree.leaves(meant)]
        own_rows = cut(selection[0], counts), cut(selection[1], counts, block)
        all_rows = cut(all_selections[0], counts), cut(all_selections[1], counts, block)
        selections = zip(*own_rows, *all_rows, strict=True)
        total: Leaves = [None] * len(meant)
        residual: Leaves = [None] * len(meant)
        for i, m in enumerate(meant):
            if m is not None:
                places, values, all_places, all_values = next(selections)
                mean = mean_sparse(all_places, all_values, m.size)
                total[i] = mean.reshape(grads[i].shape).astype(grads[i].dtype)
                residual[i] = m.at[places].add(-values, unique_indices=True)
        return total, residual

    @functools.cache  # `collectives.local` compiles a function once
    def for_block(block: int) -> tuple[Callable, Callable]:
        return functools.partial(select, block=block), functools.partial(add, block=block)

    def compress(grads: PyTree, state: TopKState, collectives: Collectives) -> tuple[PyTree, TopKState]:
        leaves, structure = jax.tree.flatten(grads)
        error = structure.flatten_up_to(state.error)
        thin, whole = split_leaves(leaves, error)
        whole = collectives.mean(whole)
        if not jax.tree.leaves(thin):
            return jax.tree.unflatten(structure, whole), state
        selected, add_selections = map(collectives.local, for_block(collectives.wire.block))
        meant, places, values = selected(thin, error)
        encode, decode = collectives.local(collectives.wire.encode), collectives.local(collectives.wire.decode)
        encoded = encode(values)
        all_places, all_sent = collectives.rows((places, encoded))
        total, residual = add_selections(thin, meant, (places, decode(encoded)), (all_places, decode(all_sent)))
        state = TopKState(jax.tree.unflatten(structure, residual))
        return jax.tree.unflatten(structure, merge_leaves(total, whole)), state

    return Compressor(init, compress)


def largest(m: jax.Array, k: int) -> jax.Array:
    """i32[k]: the places in f32[n] of the largest magnitudes, as by top_k.

    A piece after another beside the best so far: of the whole, magnitudes and XLA:CPU's indices would take another 2 n.
    """
    pieces = min(PIECES, m.size // k)
    size = m.size // pieces
    first = m.size - (pieces - 1) * size

    def merge(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = first + i * size
        piece = jnp.abs(lax.dynamic_slice_in_dim(m, start, size))
        values, index = lax.top_k(jnp.concatenate([best[0], piece]), k)
        return values, jnp.where(index < k, best[1][jnp.minimum(index, k - 1)], index - k + start)

    best = lax.top_k(jnp.abs(m[:first]), k)
    return lax.fori_loop(0, pieces - 1, merge, (best[0], best[1]))[1]


def mean_sparse(places: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """f32[n]: the mean of i32[w, k] places and f32[w, k] values.

    Workers are added one after another. Entries to which something was added are divided in place: a division of all
    would take another f32[n].
    """

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total.at[row[0]].add(row[1], unique_indices=True), None

    total = lax.scan(add, jnp.zeros(n, jnp.float32), (places, values))[0]
    return total.at[places].set(total[places] / len(places))


def flush_residual(grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Apply a single worker's gradients with all of its residual, as after a resume.

    m = g + e, in the dtype of g ;  e <- what that rounds off: zero for f32
    """
    leaves, structure = jax.tree.flatten(grads)
    updates, residuals = [], []
    for g, e in zip(leaves, structure.flatten_up_to(state.error), strict=True):
        m = g if e is None else g.astype(jnp.float32) + e.reshape(g.shape)
        updates.append(m.astype(g.dtype))
        residuals.append(None if e is None else (m - updates[-1].astype(jnp.float32)).reshape(e.shape))
    return jax.tree.unflatten(structure, updates), state._replace(error=jax.tree.unflatten(structure, residuals))


# ---------------------------------------------------------------- the table

# By name: the compressor from the number after its stem, a pattern of that number, and the same in words.
COMPRESSORS: dict[str, tuple[Callable[[str], Compressor], str, str]] = {
    "lowrank<r>": (lambda r: lowrank(int(r)), r"[1-9]\d*", "a rank from 1 on, as in lowrank4"),
    "topk<p>": (
        lambda p: topk(float(p)),
        r"(?=.*[1-9])[0-4]?\d(\.\d+)?",
        "a percentage above 0 and below 50, as in topk1 or topk0.1",
    ),
}
STEMS = {name.partition("<")[0]: row for name, row in COMPRESSORS.items()}


def is_compressor(spelling: str) -> bool:
    """Return True if it is spelled as one, rightly or not."""
    return isinstance(spelling, str) and ("/" in spelling or spelling.startswith(tuple(STEMS)))


def parse(spelling: str) -> tuple[Compressor, Strategy]:
    """`compressor/strategy` as both, such as `lowrank4/ring16`; the default strategy is asa32.

    Raises:
        UsageError: an unknown compressor or strategy, a number that the compressor cannot take, or strategy none or
            auto.
    """
    name, _, rest = spelling.partition("/")
    if rest.startswith("auto"):
        raise UsageError(f"got {spelling!r}; after the / name a strategy, as in {name}/ring16")
    strategy = algorithms.parse(rest or "asa32")
    if not strategy.spec.exchanges:
        raise UsageError(f"got {spelling!r}; strategy {rest} exchanges nothing, compressed or not")
    stem = next((stem for stem in STEMS if name.startswith(stem)), "")
    if not stem:
        raise UsageError(f"unknown compressor {name!r}; {nearest(name, COMPRESSORS)}")
    make, number, expected = STEMS[stem]
    if not re.fullmatch(number, name.removeprefix(stem)):
        raise UsageError(f"got compressor {name!r}; expected {expected}")
    return make(name.removeprefix(stem)), strategy
