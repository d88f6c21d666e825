"""Arrays that live on the workers, and collectives over them.

Params, optimizer state and data sets should not be sent with every call of a function. A `Variable` is a handle:
workers keep a tree each under its number. Functions name the `Variable` as an input or as the target of a result. Trees
may differ between workers, in values and in numbers of rows. The methods are MPI's collectives, each a command of
`functions.commands`. When Python drops the handle, its number is sent with the next command, and workers drop their
trees.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmpi.allreduce.api import check_strategy
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import check_op, check_rows, key_leaves, packed, unpacked
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions.commands import perform
from jaxmpi.functions.groups import WorkerGroup, next_number
from jaxmpi.functions.reductions import Output, check_reducible, reduction_name
from jaxmpi.functions.rows import check_lengths, shard_bounds
from jaxmpi.functions.shared_array import check_jax_takes, is_shared
from jaxmpi.functions.worker import Command, Input, Leaves


class Variable:
    """A tree that each worker holds, with its values.

    `jaxmpi.variable` makes one, for functions as an input or a target. If every rank runs the script, all ranks call
    the same methods in the same order. All of them get the results. A script that leads workers calls the methods once.
    """

    def __init__(self, group: WorkerGroup, structure: Any) -> None:
        self.group, self.structure, self.number = group, structure, next_number()
        group.is_used = True

    def __del__(self) -> None:
        self.group.dropped.append(self.number)

    def __repr__(self) -> str:
        return f"jaxmpi.variable(number={self.number}, workers={self.group.size}, {self.structure})"

    # ------------------------------------------------------------ one worker's values

    @property
    def value(self) -> PyTree:
        """The tree on this process's worker, without communication.

        For a script that leads, or has devices as workers, this is worker 0.
        """
        self.group.check_usable()
        return self._tree(self.leaves)

    @property
    def leaves(self) -> Leaves:
        """The leaves on this process's worker; of random keys the numbers."""
        return self.group.worker.leaves(self.number)

    def lengths(self) -> list[int]:
        """The number of rows that each worker holds, by rank.

        Communicates: short reports, no rows.

        Raises:
            UsageError: leaves of different lengths, or without rows.
        """
        self._check_keys("lengths", "gather")
        return self._perform("lengths", lambda name: Command("lengths", name, {"number": self.number}))

    def get(self, rank: int | np.integer) -> PyTree:
        """The tree on one worker as NumPy arrays, random keys as such.

        Communicates: that tree.
        """
        return self._tree(self._collect("get", root=self._rank("get: rank", rank)))

    def set(self, rank: int | np.integer, value: PyTree) -> None:
        """Give one worker another tree of the same structure, of any shapes."""
        self._put("set", value, [self._rank("set: rank", rank)])

    # ------------------------------------------------------------ from one to all

    def broadcast(self, value: PyTree = None, root: int | np.integer = 0) -> None:
        """Give all workers a tree, or (no value) that of worker `root`."""
        if value is not None:
            self._put("broadcast", value)
        else:
            self._collect("broadcast", root=self._rank("broadcast: root", root), keep=True)

    def scatter(self, value: PyTree, batch: Any = None) -> None:
        """Divide a tree's rows over the workers in rank order, nearly evenly.

        Args:
            value: arrays, or `jaxmpi.shared` arrays, out of which every worker copies its own rows.
            batch: which rows, as of a function's call.

        Raises:
            UsageError: leaves of different lengths, rows that are not there, or no row for some worker.
        """

        def prepare(name: str) -> Command:
            tree = self._check_structure("scatter", value)
            leaves = []
            for (path, leaf), is_key in zip(named_leaves(tree), key_leaves(self.structure), strict=True):
                leaves.append(rows_of(self.group, f"scatter: leaf {path!r}", leaf, is_key))
            rows = check_lengths({x.name: len(x.value) for x in leaves}, self.group.size, batch)
            shards = [rows[a:b] for a, b in itertools.pairwise(shard_bounds(len(rows), self.group.size))]
            fields = {"number": self.number, "ranks": None, "agreed": [self.number, len(rows)]}
            return Command(
                "put", name, fields, lambda rank: [x.choose(shards[rank], self.group.is_local(rank)) for x in leaves]
            )

        self._perform("scatter", prepare)

    # ------------------------------------------------------------ from all

    def gather(self) -> PyTree:
        """All workers' rows in rank order, as NumPy arrays; lengths may differ."""
        return self._tree(self._collect("gather", "gather"))

    def all_gather(self) -> None:
        """Every worker gets all workers' rows."""
        self._collect("all_gather", "gather", keep=True)

    def reduce(self, op: str | Output = "mean", strategy: str | None = None) -> PyTree:
        """The tree over workers, each counted once; workers keep theirs.

        mean: (1/w) sum_r tree_r; sum, prod, min, max as they say. Args: strategy: as of `jaxmpi.exchange`.
        """
        return self._tree([*map(self.group.worker.put, self._collect("reduce", op, strategy=strategy))])

    def all_reduce(self, op: str | Output = "mean", strategy: str | None = None) -> None:
        """Reduce; all workers keep the result, the same bits on each."""
        self._collect("all_reduce", op, strategy=strategy, keep=True)

    # ------------------------------------------------------------ how

    def _rank(self, label: str, rank: int | np.integer) -> int:
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < self.group.size:
            raise UsageError(f"{label}: got {rank!r}; expected a worker in [0, {self.group.size})")
        return int(rank)

    def _check_structure(self, label: str, value: PyTree) -> PyTree:
        """The tree, random keys as their numbers."""
        tree = packed(value)
        if (structure := jax.tree.structure(tree)) != self.structure:
            raise UsageError(f"{label}: got a tree {structure}; expected {self.structure}")
        return tree

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return unpacked(jax.tree.unflatten(self.structure, leaves))

    def _check_keys(self, name: str, op: str) -> None:
        """Refuse what cannot be done with random keys."""
        for i, is_key in enumerate(key_leaves(self.structure)):
            if is_key:
                check_op(op, self.leaves[i].shape, f"variable.{name}: leaf {i}")

    def _perform(self, method: str, prepare: Callable[[str], Command]) -> Any:
        name = f"variable.{method}"
        return perform(self.group, name, lambda: prepare(name))

    def _put(self, method: str, value: PyTree, ranks: Sequence[int] | None = None) -> None:
        def prepare(name: str) -> Command:
            leaves = numeric_leaves(self._check_structure("variable", value))
            fields = {"number": self.number, "ranks": ranks, "agreed": [self.number, ranks]}
            return Command("put", name, fields, lambda rank: leaves if ranks is None or rank in ranks else [])

        self._perform(method, prepare)

    def _collect(
        self, method: str, op: str | Output = "", *, root: int = 0, strategy: str | None = None, keep: bool = False
    ) -> list[Any]:
        """The leaves reduced over workers, or (no op) those of worker `root`."""

        def prepare(name: str) -> Command:
            word = reduction_name(op) if op else ""
            self._check_keys(method, word)
            for i, x in enumerate(self.leaves):
                if word not in ("", "gather"):
                    check_reducible(word, x.dtype, x.shape, f"{name}: leaf {i}")
            chosen = self.group.default_strategy if strategy is None else strategy
            check_strategy(chosen)
            fields = {"number": self.number, "op": word, "root": root, "keep": keep, "strategy": chosen}
            return Command("collect", name, fields)

        return self._perform(method, prepare)


def make_variable(group: WorkerGroup, tree: PyTree) -> Variable:
    """A variable with this tree on every worker."""
    variable = Variable(group, jax.tree.structure(packed(tree)))
    variable._put("variable", tree)
    return variable


def rows_of(group: WorkerGroup, where: str, leaf: Any, is_key: bool) -> Input:
    """An array whose rows are divided over the workers, refused if it has none, or if workers cannot see it."""
    value = leaf if is_shared(leaf) else check_numbers(where, leaf)
    if is_key:
        check_rows(value.shape, where)
    if not value.ndim:
        raise UsageError(f"{where}: got a number; scatter needs an array with a first axis of examples")
    if is_shared(leaf) and group.is_serial and not group.is_on_one_host:
        raise UsageError("a shared array is seen on one host, and this script leads workers on several")
    return Input("rows", where, value)


def check_numbers(label: str, leaf: Any) -> Any:
    """The leaf as an array, NumPy's or JAX's, refused if it holds no numbers that JAX takes."""
    if isinstance(leaf, Tracer):
        raise UsageError(f"{label}: got a traced value; call functions and variables outside of jit, grad and vmap")
    if isinstance(leaf, Variable):
        raise UsageError(f"{label}: got a jaxmpi.variable; name it in `inputs`, or take its .value")
    check_unmasked(label, leaf)
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
    check_jax_takes(label, array.dtype)
    return array


def numeric_leaves(tree: PyTree) -> list[np.ndarray]:
    """Leaves as NumPy arrays in JAX's dtypes; random keys as their numbers."""
    named = [(f"variable: leaf {path!r}", leaf) for path, leaf in named_leaves(packed(tree))]
    return [in_jax_dtype(name, np.asarray(check_numbers(name, leaf))) for name, leaf in named]
