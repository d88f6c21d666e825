"""Words of `jaxmpi.function` for inputs and outputs, and trees of them.

An output is reduced by one word, or leaf by leaf by a tree of words; each word stands for all leaves below its place.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.pytrees import PyTree, path_name


@dataclass(frozen=True, eq=False)
class Scatter:
    """An input of which every worker gets its share of the rows.

    `scatter` alone: an argument of the call; `scatter(variable)`: the rows that each worker holds already.
    """

    variable: Any = None

    def __call__(self, variable: Any) -> "Scatter":
        """Take the rows of a worker-resident variable."""
        if not hasattr(variable, "number"):
            raise UsageError(f"scatter(...): got {type(variable).__name__}; expected a jaxmpi.variable")
        return Scatter(variable)


@dataclass(frozen=True, eq=False)
class Output:
    """Reduction of an output, over pieces and workers, and the result's place."""

    op: str = ""  # a row of OPS; empty: nothing combines
    stays: bool = False  # left on each worker, not combined over workers
    into: Any = None  # the variable that takes the result, if it is not returned; of one that stays: an update

    def __call__(self, target: Any) -> "Output":
        """`mean(variable)`: all workers keep the result there. `local(mean)`: over pieces only."""
        if self is local:
            if not (isinstance(target, Output) and target.op):
                raise UsageError(f"local(...): got {target!r}; expected mean, sum, ...")
            return Output(target.op, stays=True)
        if not hasattr(target, "number"):
            raise UsageError(f"{self.op}(...): got {type(target).__name__}; expected a jaxmpi.variable")
        return replace(self, into=target)


scatter = Scatter()
mean, sum, prod, min, max, gather = (Output(op) for op in ("mean", "sum", "prod", "min", "max", "gather"))
add = Output("add")  # reduction of updates only
local = Output("", stays=True)
WORDS = {output.op or "local": output for output in (mean, sum, prod, min, max, gather, add, local)}


def from_word(output: Any) -> Any:
    """The Output that a word such as "sum" names; else the argument."""
    return WORDS.get(output, output) if isinstance(output, str) else output


# ---------------------------------------------------------------- arithmetic


class ReductionSpec(NamedTuple):
    """How two partial results become one."""

    kinds: str  # letters of the dtypes that it takes, as of `kind_letter`
    function: str = ""  # of jnp and of NumPy, of two arrays; empty: placed one after another


OPS: dict[str, ReductionSpec] = {
    "mean": ReductionSpec("fc", "add"),
    "sum": ReductionSpec("iufc", "add"),
    "add": ReductionSpec("iufc", "add"),
    "prod": ReductionSpec("iufc", "multiply"),
    "min": ReductionSpec("biuf", "minimum"),
    "max": ReductionSpec("biuf", "maximum"),
    "gather": ReductionSpec("biufc"),
}


EXCHANGED = frozenset(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def reduction_name(op: "str | Output") -> str:
    """The row's name of `mean` or "mean"."""
    name = op.op if isinstance(op, Output) else op
    lookup(OPS, name, "reduction")
    return name


def check_reducible(op: str, dtype: Any, shape: Sequence[int], where: str) -> None:
    """Refuse an output that cannot be reduced as asked."""
    got = f"{where}: got {jnp.dtype(dtype)}{list(shape)}"
    if op and kind_letter(dtype) not in OPS[op].kinds:
        way_out = "use sum and divide by the number of examples, or cast it" if op == "mean" else "cast it"
        raise UsageError(f"{got}, which {op} cannot take exactly: {way_out}")
    if op == "gather" and not shape:
        raise UsageError(f"{got}; gather needs a first axis: return an array with an axis of examples")


def kind_letter(dtype: Any) -> str:
    """NumPy's kind letter of a dtype; bfloat16 gives f, int4 gives i."""
    dtype = jnp.dtype(dtype)
    alike = {"f": jnp.floating, "i": jnp.signedinteger, "u": jnp.unsignedinteger} if dtype.kind == "V" else {}
    return next((kind for kind, like in alike.items() if jnp.issubdtype(dtype, like)), dtype.kind)


def accumulation_dtype(dtype: Any) -> np.dtype:
    """The dtype of partial results: floats below 32 bits take 32."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float32") if dtype.itemsize < 4 and kind_letter(dtype) == "f" else dtype


def is_exchanged(op: str, x: jax.Array) -> bool:
    """Return True if `exchange` reduces it; all else is gathered and combined."""
    return op in ("mean", "sum") and x.dtype in EXCHANGED and x.size > 0


def combine(op: str, rows: Sequence[np.ndarray], weights: Sequence[float] = ()) -> np.ndarray:
    """Combine workers' arrays in rank order; mean is sum_r weights[r] row_r."""
    kinds = [f"{row.dtype}{list(row.shape[op == 'gather' :])}" for row in rows]
    if odd := [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]:
        raise UsageError(f"{op}: worker {odd[0]} has {kinds[odd[0]]}, worker 0 has {kinds[0]}; expected the same")
    dtype = rows[0].dtype
    if op == "gather":
        check_reducible(op, dtype, rows[0].shape, op)
        return np.concatenate(rows)
    flat = [np.atleast_1d(row).astype(accumulation_dtype(dtype)) for row in rows]
    with np.errstate(all="ignore"):  # integers wrap, floats overflow, as in programs
        if op == "mean":
            flat = [row * np.asarray(weight, row.dtype) for row, weight in zip(flat, weights, strict=True)]
        return functools.reduce(getattr(np, OPS[op].function), flat).astype(dtype).reshape(rows[0].shape)


@functools.partial(jax.jit, static_argnums=0)
def fold(ops: tuple[str, ...], totals: list[Any], out: list[Any], weights: list[Any]) -> list[jax.Array]:
    """Combine the totals with one more piece: total <- op(total, out); for a mean, total + weight * out."""
    new = [x.astype(accumulation_dtype(x.dtype)) for x in out]
    new = [x * weight if op == "mean" else x for op, x, weight in zip(ops, new, weights, strict=True)]
    functions: list[Callable] = [getattr(jnp, OPS[op].function) for op in ops]
    return [f(t, x) for f, t, x in zip(functions, totals, new, strict=True)] if totals else new


# ---------------------------------------------------------------- trees of outputs


class ChosenOutputs(NamedTuple):
    """The outputs that a call computes."""

    structure: Any  # tree structure of the value that is returned
    returned: tuple[int, ...]  # numbers of its leaves, in its order
    computed: tuple[int, ...]  # numbers of all, ascending; then all updates

    def join(self, results: dict[int, PyTree]) -> PyTree:
        """Results by number in the user's trees; a result that is kept in a variable is None."""
        return jax.tree.unflatten(self.structure, map(results.get, self.returned))


class Outputs:
    """A tree of reductions per output; each reduces all leaves below it. Updates are further reductions behind them."""

    def __init__(self, outputs: Any, updates: Any = ()) -> None:
        """Take what a user names; a tuple or list is several outputs.

        An update is a variable, or a pair of it and an op, and a pair may stand alone.
        """
        self.is_single = type(outputs) not in (tuple, list)  # one output, which the function returns in no tuple
        trees = (outputs,) if self.is_single else tuple(outputs)
        self.trees: tuple[PyTree, ...] = jax.tree.map(from_word, trees, is_leaf=lambda leaf: leaf is None)
        named = jax.tree_util.tree_leaves_with_path(self.trees, is_leaf=lambda leaf: leaf is None)
        for _, output in named:
            if not isinstance(output, Output) or output.op == "add":
                raise UsageError(
                    f"outputs: got {output!r}; expected jaxmpi.functions.mean, sum, prod, min, max, gather, local or a "
                    "name, or a tree of them"
                )
        is_pair = isinstance(updates, (tuple, list)) and len(updates) == 2 and isinstance(updates[1], (Output, str))
        is_one_update = is_pair or not isinstance(updates, (tuple, list))
        self.updates = [parse_update(update) for update in ([updates] if is_one_update else updates)]
        self.flat = (*(output for _, output in named), *self.updates)
        # The function returns its one output or update in no tuple.
        self.is_bare = (is_one_update and not trees) or (self.is_single and not self.updates)
        # For messages: which output each reduction is of, and its path there.
        self.names = [f"{p[0].idx} {path_name(p[1:])!r}" if p[1:] else str(p[0].idx) for p, _ in named]  # pyright: ignore[reportAttributeAccessIssue]
        self.names += [str(len(trees) + i) for i in range(len(self.updates))]
        # The trees with the number in `flat` in place of each reduction.
        self._numbers: tuple[PyTree, ...] = jax.tree.unflatten(jax.tree.structure(self.trees), range(len(named)))
        self.all = self._choose(self._numbers[0] if self.is_single else self._numbers)

    def split(self, name: str, result: Any) -> list[PyTree]:
        """Split what the function of this name returned into a part for each reduction."""
        parts, first = (result,) if self.is_bare else result, len(self.trees)
        if not isinstance(parts, (tuple, list)) or len(parts) != first + len(self.updates):
            got = f"a tuple of {len(parts)}" if isinstance(parts, (tuple, list)) else type(result).__name__
            expected = f"a tuple of {first + len(self.updates)}: {first} outputs, then {len(self.updates)} updates"
            raise UsageError(f"{name} returned {got}; expected {expected}")
        leaves = []
        for place, (tree, part) in enumerate(zip(self.trees, parts[:first], strict=True)):
            expected = jax.tree.structure(tree)
            try:
                leaves += expected.flatten_up_to(part)
            except ValueError as error:
                raise UsageError(
                    f"{name}: output {place}: got a tree {jax.tree.structure(part)} for reductions {expected}; "
                    "expected the same keys, or one reduction for all below it"
                ) from error
        for update, part in zip(self.updates, parts[first:], strict=True):
            if (got := jax.tree.structure(part)) != update.into.structure:
                raise UsageError(f"{name}: an update is a tree {got}; its variable is {update.into.structure}")
        return [*leaves, *parts[first:]]

    def choose(self, subset: Any) -> ChosenOutputs:
        """The outputs of `output_subset`: places in their tuple, or keys if the one output is a dict; None for all."""
        if subset is None:
            return self.all
        tree = self._numbers[0] if self.is_single else dict(enumerate(self._numbers))
        if not isinstance(tree, dict):
            raise UsageError("output_subset: got a choice of outputs, but the only output is no dict; leave it out")
        is_list = isinstance(subset, (tuple, list)) and all(isinstance(key, (str, int)) for key in subset)
        if not is_list or len(set(subset)) < len(subset) or not set(subset) <= set(tree):
            raise UsageError(f"output_subset: got {subset!r}; expected some of {sorted(tree, key=str)}, each once")
        chosen = {key: tree[key] for key in subset}
        return self._choose(chosen if self.is_single else tuple(chosen.values()))

    def _choose(self, numbers: PyTree) -> ChosenOutputs:
        computed = tuple(sorted(jax.tree.leaves(numbers)))
        if not self.is_single:  # a tuple leaves out what is kept in variables
            numbers = tuple(n for n in numbers if not (isinstance(n, int) and self.flat[n].into is not None))
        leaves, structure = jax.tree.flatten(numbers)
        updates = range(len(self.flat) - len(self.updates), len(self.flat))
        return ChosenOutputs(structure, tuple(leaves), (*computed, *updates))


def parse_update(update: Any) -> Output:
    """`(variable, op)` as an Output; a variable alone takes the mean over pieces."""
    variable, op = update if isinstance(update, (tuple, list)) and len(update) == 2 else (update, "mean")
    op = from_word(op)
    is_op = isinstance(op, Output) and bool(op.op) and not op.stays and op.into is None
    if not hasattr(variable, "structure") or not is_op:
        raise UsageError(
            f"updates: got {update!r}; expected a jaxmpi.variable, or a pair of it and mean, sum, add, ..."
        )
    return Output(op.op, stays=True, into=variable)
