"""Arrays that live on the workers, and collectives over them.

Params, optimizer state and data sets should not travel with every call of a function. A `Variable` is a handle: workers
keep a tree each under its number. Functions name the `Variable` as an input or as the target of a result. Trees may
differ between workers, in values and in numbers of rows. The methods are MPI's collectives, each a command of
`functions.commands`. If every rank runs the script, all ranks call them in the same order; else the script's process
calls them for all. When Python drops the handle, its number travels with the next command, and workers drop their
trees.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmpi.allreduce.api import check_strategy
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import check_op, check_rows, key_leaves, packed, unpacked
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions.commands import perform
from jaxmpi.functions.partitioning import RowSelection, check_enough, common_length, select_rows, shard_bounds
from jaxmpi.functions.reductions import Output, check_reducible, combine, reduction_name
from jaxmpi.functions.shared_array import check_jax_takes, is_shared
from jaxmpi.functions.worker import Command
from jaxmpi.functions.worker_call import take_rows
from jaxmpi.functions.worker_group import WorkerGroup


class Variable:
    """A tree of which every worker holds values of its own.

    `jaxmpi.variable` makes one, for functions as an input or a target. If every rank runs the script, all ranks call
    the same methods in the same order. All of them get the results. A script that leads workers calls the methods once.
    """

    def __init__(self, group: WorkerGroup, structure: Any, number: int | None = None) -> None:
        self.group, self.structure = group, structure
        self.number = group.next_variable_number() if number is None else number

    def __del__(self) -> None:
        self.group.dropped.append(self.number)

    def __repr__(self) -> str:
        return f"jaxmpi.variable(number={self.number}, workers={self.group.size}, {self.structure})"

    # ------------------------------------------------------------ one worker's values

    @property
    def value(self) -> PyTree:
        """The tree on this process's own worker, without communication.

        For a script that leads, or has devices as workers, this is worker 0.
        """
        self.group.check_usable()
        return self._tree(self.group.own_slot.held(self.number))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Leaves of this process's own worker."""
        return [x.shape for x in jax.tree.leaves(self.value)]

    def lengths(self) -> list[int]:
        """The number of rows that each worker holds, by rank.

        Communicates: 48 bytes a worker, no rows.

        Raises:
            UsageError: leaves of different lengths, or without rows.
        """
        self._check_keys("lengths", "gather")
        return perform(self.group, "variable.lengths", lambda: Command("lengths", self._header("lengths")))

    def get(self, rank: int | np.integer) -> PyTree:
        """The tree on one worker as NumPy arrays, random keys as such.

        Communicates: that tree.
        """
        [leaves] = self._fetch("get", self._rank("get: rank", rank), keep=False)
        return self._tree(leaves)

    def set(self, rank: int | np.integer, value: PyTree) -> None:
        """Give one worker another tree of the same structure, of any shapes."""
        self._put("set", lambda: self._leaves(value), [self._rank("set: rank", rank)])

    # ------------------------------------------------------------ from one to all

    def broadcast(self, value: PyTree = None, root: int | np.integer = 0) -> None:
        """Give all workers a tree, or (no value) that of worker `root`."""
        if value is not None:
            self._put("broadcast", lambda: self._leaves(value), None)
            return
        self._fetch("broadcast", self._rank("broadcast: root", root), keep=True)

    def scatter(self, value: PyTree, batch: Any = None) -> None:
        """Divide a tree's rows over the workers in rank order, nearly evenly.

        Args:
            value: arrays, or `jaxmpi.shared` arrays, out of which every worker copies its own rows.
            batch: which rows, as of a function's call.

        Raises:
            UsageError: leaves of different lengths, rows that are not there, or no row for some worker.
        """
        perform(self.group, "scatter", lambda: self._scattered(value, batch))

    # ------------------------------------------------------------ from all

    def gather(self) -> PyTree:
        """All workers' rows in rank order, as NumPy arrays; lengths may differ."""
        self._check_keys("gather", "gather")
        rows = self._fetch("gather", None, keep=False)
        return self._tree([concatenate_rows(leaves) for leaves in zip(*rows, strict=True)])

    def all_gather(self) -> None:
        """Every worker gets all workers' rows."""
        self._check_keys("all_gather", "gather")
        self._fetch("all_gather", None, keep=True)

    def reduce(self, op: str | Output = "mean", strategy: str | None = None) -> PyTree:
        """The tree over workers, each counted once; workers keep theirs.

        mean: (1/w) sum_r tree_r; sum, prod, min, max as they say. Args: strategy: as of `jaxmpi.exchange`.
        """
        return self._tree(self._reduce("reduce", op, strategy, keep=False))

    def all_reduce(self, op: str | Output = "mean", strategy: str | None = None) -> None:
        """Reduce; all workers keep the result, the same bits on each."""
        self._reduce("all_reduce", op, strategy, keep=True)

    # ------------------------------------------------------------ how

    def _rank(self, what: str, rank: int | np.integer) -> int:
        is_rank = isinstance(rank, (int, np.integer)) and 0 <= rank < self.group.size
        check(bool(is_rank), f"{what}: got {rank!r}; expected a worker in [0, {self.group.size})")
        return int(rank)

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return unpacked(jax.tree.unflatten(self.structure, leaves))

    def _check_keys(self, name: str, op: str) -> None:
        """Refuse what cannot be done with random keys."""
        for i, is_key in enumerate(key_leaves(self.structure)):
            if is_key:
                check_op(op, self.group.own_slot.held(self.number)[i].shape, f"variable.{name}: leaf {i}")

    def _leaves(self, value: PyTree) -> list[np.ndarray]:
        structure = jax.tree.structure(packed(value))
        check(structure == self.structure, f"variable: got a tree {structure}; expected {self.structure}")
        return numeric_leaves(value)

    def _header(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"name": f"variable.{name}", "number": self.number, **fields}

    def _put(self, name: str, leaves: Any, ranks: Sequence[int] | None) -> None:
        def prepare() -> Command:
            values = leaves()
            header = self._header(name, ranks=ranks, says=[name, self.number, ranks])
            sent = lambda rank: values if ranks is None or rank in ranks else []  # noqa: E731
            return Command("put", header, sent, sent)

        perform(self.group, f"variable.{name}", prepare)

    def _scattered(self, value: PyTree, batch: Any) -> Command:
        value = packed(value)
        leaves, structure = jax.tree.flatten(value)
        check(structure == self.structure, f"scatter: got a tree {structure}; expected {self.structure}")
        names = [f"scatter: leaf {path!r}" for path, _ in named_leaves(value)]
        leaves = [x if is_shared(x) else check_numbers(name, x) for name, x in zip(names, leaves, strict=True)]
        for name, leaf, is_key in zip(names, leaves, key_leaves(structure), strict=True):
            if is_key:
                check_rows(leaf.shape, name)
        check(all(leaf.ndim > 0 for leaf in leaves), "scatter: got an array without axes; expected rows")
        rows = select_rows(batch, common_length([len(x) for x in leaves], names))
        check_enough(rows.count, self.group.size)
        edges = shard_bounds(rows.count, self.group.size)
        spans = list(itertools.pairwise(edges))
        header = self._header("scatter", ranks=None, says=["scatter", self.number, rows.count], spans=spans)

        def own(rank: int) -> list[Any]:
            picked = rows.of(*spans[rank])
            return [in_jax_dtype(name, take_rows(leaf, picked)) for name, leaf in zip(names, leaves, strict=True)]

        if leaves and all(map(is_shared, leaves)):
            check_one_host(self.group)
            header |= {"tickets": [leaf.ticket() for leaf in leaves], "names": names, "rows": rows_header(rows)}
            return Command("put", header, own, lambda rank: worker_indices(rows, spans[rank]))
        return Command("put", header, own, own)

    def _fetch(self, name: str, rank: int | None, keep: bool) -> list[Any]:
        header = self._header(name, rank=rank, keep=keep)
        return perform(self.group, f"variable.{name}", lambda: Command("fetch", header))

    def _reduce(self, name: str, op: str | Output, strategy: str | None, keep: bool) -> list[Any]:
        def prepare() -> Command:
            row = reduction_name(op)
            self._check_keys(name, row)
            for i, x in enumerate(self.group.own_slot.held(self.number)):
                check_reducible(row, x.dtype, x.shape, f"variable.{name}: leaf {i}")
            chosen = self.group.default_strategy if strategy is None else strategy
            check_strategy(chosen)
            return Command("reduce", self._header(name, op=row, keep=keep, strategy=chosen))

        return perform(self.group, f"variable.{name}", prepare)


def concatenate_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Workers' rows end to end."""
    for row in rows[:1]:
        check_reducible("gather", row.dtype, row.shape, "variable.gather")
    return combine("gather", rows, ())


def rows_header(rows: RowSelection) -> Any:
    """Describe rows in a header: start and step, or that indices travel."""
    return "indices" if rows.indices is not None else [rows.start, rows.step]


def worker_indices(rows: RowSelection, span: tuple[int, int]) -> list[np.ndarray]:
    """The indices of a worker's part, if there are any."""
    return [] if rows.indices is None else [rows.indices[span[0] : span[1]]]


def check_one_host(group: WorkerGroup, shares: bool = True) -> None:
    """Refuse shared memory that waiting workers on other hosts cannot see."""
    check(
        not shares or not group.is_serial or group.is_on_one_host,
        "a shared array is seen on one host, and this script leads workers on several; let every rank run the script "
        "(no jaxmpi.fork), or give a plain array",
    )


def check_numbers(what: str, leaf: Any) -> Any:
    """The leaf as an array, NumPy's or JAX's.

    Raises:
        UsageError: it holds no numbers, or such as JAX does not take.
    """
    if isinstance(leaf, Tracer):
        raise UsageError(
            f"{what}: got a traced value; call functions and variables outside of jax.jit, grad and vmap: use these "
            "inside the function that jaxmpi.function wraps"
        )
    if isinstance(leaf, Variable):
        raise UsageError(f"{what}: got a jaxmpi.variable; name it in `inputs`, or take its .value")
    check_unmasked(what, leaf)
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
    check_jax_takes(what, array.dtype)
    return array


def numeric_leaves(tree: PyTree) -> list[np.ndarray]:
    """Leaves as NumPy arrays in JAX's dtypes; random keys as their numbers."""
    named = [(f"variable: leaf {path!r}", leaf) for path, leaf in named_leaves(packed(tree))]
    return [in_jax_dtype(name, np.asarray(check_numbers(name, leaf))) for name, leaf in named]


def make_variable(group: WorkerGroup, tree: PyTree) -> Variable:
    """A variable with this tree on every worker."""
    made = Variable(group, jax.tree.structure(packed(tree)))
    made._put("variable", lambda: numeric_leaves(tree), None)
    return made
