"""Whole leaves dealt to workers, for optimizers that mix a leaf's entries.

LARS, LAMB, Adafactor and Muon take leaves one by one, but not entries: a slice has another norm than its leaf, and
Newton-Schulz needs a whole matrix. So a deal gives each leaf to one of w workers, the largest first. Each leaf goes
where there is least (Graham 1969), of work and of entries. Then Newton-Schulz is divided by w as well.

One program serves all workers, as with slices. Therefore what a worker holds has one shape on all of them: a row, its
leaves one after another, filled up with zeros to the longest row. Which leaves these are is a branch of the program.
Other workers' leaves are `optax.MaskedNode` inside a branch, so masks and labels by name stay what they are.

Tried and dropped: programs of each worker's own. A mapped axis cannot have them, and every rank of a host would compile
them for itself.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import is_key_data, packed, unpacked

SHARED = -1  # owner of what all workers hold, such as counts of steps


class DealtLeaves(NamedTuple):
    """A worker's leaves of a tree like params."""

    entries: jax.Array  # f32[longest row]


class DealtState(NamedTuple):
    """An optimizer's state for a worker's leaves."""

    shared: PyTree  # the structure of the whole state, with those leaves only that no leaf of params has to itself
    rows: dict[str, jax.Array]  # all others, by dtype


class Deal(NamedTuple):
    """Which worker updates which leaf."""

    structure: Any  # tree structure of params
    shapes: tuple[tuple[int, ...], ...]  # by leaf
    owners: tuple[int, ...]  # by leaf: the number of the row that has it
    workers: int
    block: int = 1  # in a row leaves begin at multiples of it: the floats that share a scale on the wire of rows

    def sizes(self) -> list[int]:
        """Entries of each row, without what fills it up."""
        sizes = [0] * self.workers
        for owner, shape in zip(self.owners, self.shapes, strict=True):
            sizes[owner] += math.prod(shape)
        return sizes

    @property
    def width(self) -> int:
        """Entries of the longest row."""
        ends = [0] * self.workers
        for owner, shape in zip(self.owners, self.shapes, strict=True):
            ends[owner] += self.extent(shape)
        return max(1, *ends)

    def extent(self, shape: Sequence[int]) -> int:
        """Entries of a row from a leaf of this shape to the next."""
        return -(-math.prod(shape) // self.block) * self.block

    @property
    def padding(self) -> float:
        """Padding of all rows, as a share of params' entries."""
        return self.workers * self.width / max(1, sum(self.sizes())) - 1

    def like(self) -> PyTree:
        """Shapes of params."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(s, jnp.float32) for s in self.shapes])

    def part(self, tree: PyTree, row: int) -> PyTree:
        """The leaves of one row; `optax.MaskedNode` for all others."""
        leaves = zip(self.owners, jax.tree.leaves(tree), strict=True)
        return jax.tree.unflatten(self.structure, [x if owner == row else optax.MaskedNode() for owner, x in leaves])

    def row_of(self, part: PyTree) -> DealtLeaves:
        """A part as a row."""
        return DealtLeaves(joined([self.filled_up(leaf) for leaf in jax.tree.leaves(part)], self.width, jnp.float32))

    def filled_up(self, leaf: jax.Array) -> jax.Array:
        """A flat leaf with zeros up to the next."""
        missing = -leaf.size % self.block
        return jnp.pad(leaf.reshape(-1), (0, missing)) if missing else leaf.reshape(-1)

    def part_of(self, row: DealtLeaves, number: int) -> PyTree:
        """The inverse of `row_of`."""
        shapes = [shape for owner, shape in zip(self.owners, self.shapes, strict=True) if owner == number]
        leaves = cut_up(row.entries, shapes, self.block)
        return jax.tree.unflatten(
            self.structure, [next(leaves) if owner == number else optax.MaskedNode() for owner in self.owners]
        )

    def columns(self, leaves: Sequence[jax.Array], start: int, stop: int) -> jax.Array:
        """[w, stop - start]: these columns of all rows of a tree."""
        rows, ends = [[] for _ in range(self.workers)], [0] * self.workers
        for owner, leaf in zip(self.owners, map(self.filled_up, leaves), strict=True):
            begin, ends[owner] = ends[owner], ends[owner] + leaf.size
            low, high = max(start, begin), min(stop, ends[owner])
            if low < high:
                rows[owner].append(leaf[low - begin : high - begin])
        return jnp.stack([joined(pieces, stop - start, jnp.float32) for pieces in rows])

    def whole_of(self, rows: jax.Array) -> PyTree:
        """The tree of all rows, [w, longest]."""
        out, ends = [], [0] * self.workers
        for owner, shape in zip(self.owners, self.shapes, strict=True):
            begin, ends[owner] = ends[owner], ends[owner] + self.extent(shape)
            out.append(rows[owner, begin : begin + math.prod(shape)].reshape(shape))
        return jax.tree.unflatten(self.structure, out)


def deal(params: PyTree, workers: int, cost: Callable[[Sequence[int]], float] = math.prod) -> Deal:
    """Deal leaves, largest share first, each where it makes the least load.

    A share is that of all cost, or of all entries if that is more: rows are filled up to the longest.

    Args:
        params: arrays or their shapes.
        cost: of the update of a leaf, by its shape.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    costs = tuple(float(cost(shape)) for shape in shapes)
    if bad := [each for each in costs if not 0 <= each < math.inf]:
        raise UsageError(f"cost: got {bad[0]}; expected a finite number from 0 on for each shape")
    return _dealt(structure, shapes, costs, workers)


@functools.lru_cache(64)  # an update outside jit asks each time
def _dealt(structure: Any, shapes: tuple[tuple[int, ...], ...], costs: tuple[float, ...], workers: int) -> Deal:
    sizes = [math.prod(shape) for shape in shapes]
    all_costs, all_sizes = sum(costs) or 1, sum(sizes) or 1
    shares = [(a / all_costs, b / all_sizes) for a, b in zip(costs, sizes, strict=True)]
    owners, loads = [0] * len(shapes), [(0.0, 0.0)] * workers

    def load(row: int, share: tuple[float, float]) -> tuple[float, float]:
        """A row's larger load with one leaf more, and the sum."""
        each = [had + more for had, more in zip(loads[row], share, strict=True)]
        return max(each), sum(each)

    for i in sorted(range(len(shapes)), key=lambda i: -max(shares[i])):
        owners[i] = min(range(workers), key=lambda row: load(row, shares[i]))
        loads[owners[i]] = loads[owners[i]][0] + shares[i][0], loads[owners[i]][1] + shares[i][1]
    return Deal(structure, shapes, tuple(owners), workers)


def joined(leaves: Sequence[jax.Array], width: int, dtype: Any) -> jax.Array:
    """[width]: flat leaves one after another, then zeros."""
    missing = width - sum(leaf.size for leaf in leaves)
    return jnp.concatenate([*(leaf.reshape(-1) for leaf in leaves), jnp.zeros(missing, dtype)])


def cut_up(row: Any, shapes: Sequence[Sequence[int]], block: int = 1) -> Iterator[Any]:
    """The inverse of `joined`, of leaves that are filled up to blocks."""
    starts = np.cumsum([0, *(-(-math.prod(shape) // block) * block for shape in shapes)])
    return iter([row[a : a + math.prod(s)].reshape(s) for a, s in zip(starts, shapes, strict=False)])


# ---------------------------------------------------------------- an optimizer's state


class StateLayout(NamedTuple):
    """Place of each leaf of an optimizer's state."""

    names: tuple[str, ...]  # names of the whole state's leaves
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    structure: Any
    owners: tuple[int, ...]  # by leaf: the row that has it, or SHARED
    structures: tuple[Any, ...]  # by row: of the state of its part

    def own(self, row: int, dtype: str) -> list[int]:
        """Leaves of a row of this type."""
        return [i for i, owner in enumerate(self.owners) if owner == row and str(self.leaves[i].dtype) == dtype]

    def width(self, dtype: str) -> int:
        """Entries of the longest row of this type."""
        sizes = [0] * len(self.structures)
        for owner, leaf in zip(self.owners, self.leaves, strict=True):
            if owner != SHARED and str(leaf.dtype) == dtype:
                sizes[owner] += leaf.size
        return max(sizes)

    @property
    def dtypes(self) -> list[str]:
        """Types of what is not shared."""
        return sorted({str(x.dtype) for x, owner in zip(self.leaves, self.owners, strict=True) if owner != SHARED})

    def held(self, state: PyTree, row: int) -> DealtState:
        """The state of a part as a row."""
        by_name = dict(named_leaves(state))
        shared = [
            by_name[name] if owner == SHARED else optax.MaskedNode()
            for name, owner in zip(self.names, self.owners, strict=True)
        ]
        rows = {
            dtype: joined([by_name[self.names[i]] for i in self.own(row, dtype)], self.width(dtype), dtype)
            for dtype in self.dtypes
        }
        return DealtState(jax.tree.unflatten(self.structure, shared), rows)

    def by_place(self, held: DealtState, row: int) -> dict[int, Any]:
        """Leaves that a worker holds, by their place in the whole state."""
        shared = iter(jax.tree.leaves(held.shared))
        found = {i: next(shared) for i, owner in enumerate(self.owners) if owner == SHARED}
        for dtype in self.dtypes:
            places = self.own(row, dtype)
            found |= zip(places, cut_up(held.rows[dtype], [self.leaves[i].shape for i in places]), strict=True)
        return found

    def part(self, held: DealtState, row: int) -> PyTree:
        """The inverse of `held`."""
        found = self.by_place(held, row)
        return jax.tree.unflatten(self.structures[row], [found[i] for i in sorted(found)])

    def whole(self, held: DealtState, row: int) -> PyTree:
        """The whole state's structure, with those leaves that this worker holds."""
        found = self.by_place(held, row)
        return jax.tree.unflatten(self.structure, [found.get(i, optax.MaskedNode()) for i in range(len(self.owners))])


@functools.cache
def layout_of(tx: Any, given: Deal) -> StateLayout:
    """Owner of each state leaf: the only part with it, or SHARED.

    Raises:
        UsageError: a leaf of the state that is neither.
    """
    like = given.like()
    whole = jax.eval_shape(tx.init, like)
    parts = [jax.eval_shape(tx.init, given.part(like, row)) for row in range(given.workers)]
    of_parts, owners = [dict(named_leaves(part)) for part in parts], []
    for name, leaf in named_leaves(whole):
        having = [row for row, part in enumerate(of_parts) if name in part]
        is_same = all(
            (of_parts[row][name].shape, of_parts[row][name].dtype) == (leaf.shape, leaf.dtype) for row in having
        )
        if not is_same or len(having) not in (1, given.workers):
            raise UsageError(
                f"sharded: {name} of the optimizer's state is {list(leaf.shape)}, but not with some leaves alone; "
                "expected a state of each leaf by itself, or one that all have: leave the optimizer unsharded"
            )
        owners.append(SHARED if len(having) == given.workers else having[0])
    return StateLayout(
        names=tuple(name for name, _ in named_leaves(whole)),
        leaves=tuple(jax.tree.leaves(whole)),
        structure=jax.tree.structure(whole),
        owners=tuple(owners),
        structures=tuple(map(jax.tree.structure, parts)),
    )


# ---------------------------------------------------------------- the two ways of a cut


class Leaves(NamedTuple):
    """The cut into whole leaves, unlike `core.slices.Entries`; nothing communicates."""

    deal: Deal
    layout: StateLayout | None = None  # layout of the optimizer's state, for `saved` and `restored`

    @property
    def name(self) -> str:
        """Name of this cut in a checkpoint."""
        return "leaves"

    def own(self, tree: PyTree, chunk: Any) -> DealtLeaves:
        """Row number `chunk`, i32[], of a whole tree."""
        branches = [lambda t, row=row: self.deal.row_of(self.deal.part(t, row)) for row in range(self.deal.workers)]
        return lax.switch(chunk, branches, tree)

    def init(self, tx: Any, params: PyTree, chunk: Any) -> DealtState:
        """The optimizer's state 0 for one row's leaves of whole params."""
        layout = layout_of(tx, self.deal)
        branches = [
            lambda p, row=row: layout.held(tx.init(self.deal.part(p, row)), row) for row in range(self.deal.workers)
        ]
        return lax.switch(chunk, branches, params)

    def step(
        self,
        tx: Any,
        step: Callable[..., tuple[PyTree, PyTree]],
        chunk: Any,
        grads: DealtLeaves,
        state: DealtState,
        own: DealtLeaves,
    ) -> tuple[DealtLeaves, DealtState]:
        """`step(grads, state, params) -> (tree like params, state)` on a row's leaves.

        It is a branch of its own, since XLA fuses nothing across. Otherwise the step and the cutting would be in one
        program. There the step would add up norms in another order than in a program of whole leaves.
        """
        layout, given = layout_of(tx, self.deal), self.deal

        def branch(row: int) -> Callable[[DealtLeaves, DealtState, DealtLeaves], tuple[DealtLeaves, DealtState]]:
            def run(grads: DealtLeaves, state: DealtState, own: DealtLeaves) -> tuple[DealtLeaves, DealtState]:
                parts = given.part_of(grads, row), layout.part(state, row), given.part_of(own, row)
                made, after = lax.cond(chunk == row, lambda g, s, p: step(g, s, p), lambda g, s, p: (p, s), *parts)
                return given.row_of(made), layout.held(after, row)

            return run

        return lax.switch(chunk, [branch(row) for row in range(given.workers)], grads, state, own)

    def lacking(self, params: PyTree, masters: DealtLeaves, chunk: Any) -> DealtLeaves:
        """Masters less this worker's params: what it sends."""
        return jax.tree.map(jnp.subtract, masters, self.own(params, chunk))

    def write(self, whole: PyTree, own: DealtLeaves, chunk: int) -> None:
        """Copy a row's leaves to their places in `whole`, in host memory."""
        leaves = [x for x, owner in zip(jax.tree.leaves(whole), self.deal.owners, strict=True) if owner == chunk]
        pieces = cut_up(np.asarray(own.entries), [leaf.shape for leaf in leaves], self.deal.block)
        for leaf, piece in zip(leaves, pieces, strict=True):
            np.copyto(leaf, piece)

    def for_state_of(self, tx: Any) -> "Leaves":
        """The same cut, which can save and restore this optimizer's state."""
        return self._replace(layout=layout_of(tx, self.deal))

    def saved(self, state: PyTree, chunk: int) -> PyTree:
        """A rule's state for checkpoints: whole leaves by name, keys packed."""
        layout = self.layout
        assert layout

        def one(part: Any) -> Any:
            if isinstance(part, DealtState):
                return layout.whole(part, chunk)
            return self.deal.part_of(part, chunk) if isinstance(part, DealtLeaves) else part

        return packed(jax.tree.map(one, unpacked(state), is_leaf=is_dealt))

    def restored(self, like: PyTree, chunk: int, read: Callable[[str], np.ndarray]) -> PyTree:
        """This worker's rule state from a checkpoint's whole leaves, by `read(name)`."""
        layout = self.layout
        assert layout
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), like)
        saved = jax.eval_shape(lambda state: self.saved(state, chunk), shapes)
        leaves = [read(name) for name, _ in named_leaves(saved)]
        filled = unpacked(jax.tree.unflatten(jax.tree.structure(saved), leaves))

        def one(part: Any, own: PyTree) -> Any:
            if isinstance(part, DealtState):
                return layout.held(own, chunk)
            return self.deal.row_of(own) if isinstance(part, DealtLeaves) else own

        made = jax.tree.map(one, shapes, filled, is_leaf=lambda part: is_dealt(part) or is_key_data(part))
        return jax.tree.map(np.asarray, packed(made))


def is_dealt(part: Any) -> bool:
    """Return True for what a row holds."""
    return isinstance(part, (DealtLeaves, DealtState))
