"""The words of `jaxmpi.function` for inputs and outputs, in one table."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError, check, lookup

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))  # dtypes that `exchange` takes
LONGEST = 8  # workers named in one message at most


@dataclass(frozen=True, eq=False)
class Scatter:
    """An input of which every worker gets its share of the rows.

    `scatter` alone: an argument of the call; `scatter(variable)`: the rows that each worker holds already.
    """

    variable: Any = None

    def __call__(self, variable: Any) -> "Scatter":
        """Take the rows of a worker-resident variable."""
        check(hasattr(variable, "number"), f"scatter(...): got {type(variable).__name__}; expected a jaxmpi.variable")
        return Scatter(variable)


@dataclass(frozen=True, eq=False)
class Output:
    """Reduction of an output, over pieces and workers, and the result's place."""

    op: str = ""  # a row of OPS; empty: nothing combines
    stays: bool = False  # left on each worker, not combined over workers
    into: Any = None  # the variable that takes the result on every worker, if it is not returned

    def __call__(self, what: Any) -> "Output":
        """`mean(variable)`: all workers keep the result there. `local(mean)`: over pieces only."""
        if self is local:
            check(isinstance(what, Output) and bool(what.op), f"local(...): got {what!r}; expected mean, sum, ...")
            return Output(what.op, stays=True)
        check(hasattr(what, "number"), f"{self.op}(...): got {type(what).__name__}; expected a jaxmpi.variable")
        return replace(self, into=what)


scatter = Scatter()
mean, sum, prod, min, max, gather = (Output(op) for op in ("mean", "sum", "prod", "min", "max", "gather"))
add = Output("add")  # reduction of updates only
local = Output("", stays=True)
WORDS = {output.op or "local": output for output in (mean, sum, prod, min, max, gather, add, local)}


def from_word(output: Any) -> Any:
    """The Output that a word such as "sum" names; else the argument."""
    return WORDS.get(output, output) if isinstance(output, str) else output


class ReductionSpec(NamedTuple):
    """How two partial results become one."""

    kinds: str  # letters of the dtypes that it takes, as of `kind_letter`
    jnp: Callable | None  # function of two arrays on a device; None: placed one after another
    numpy: Callable | None
    way_out: str


NUMBERS = "iufc"
OPS: dict[str, ReductionSpec] = {
    "mean": ReductionSpec("fc", jnp.add, np.add, "use sum and divide by the number of examples, or cast it"),
    "sum": ReductionSpec(NUMBERS, jnp.add, np.add, "cast it to a number"),
    "add": ReductionSpec(NUMBERS, jnp.add, np.add, "cast it to a number"),
    "prod": ReductionSpec(NUMBERS, jnp.multiply, np.multiply, "cast it to a number"),
    "min": ReductionSpec("biuf", jnp.minimum, np.minimum, "take its absolute value or its parts"),
    "max": ReductionSpec("biuf", jnp.maximum, np.maximum, "take its absolute value or its parts"),
    "gather": ReductionSpec("biufc", None, None, "return an array with an axis of examples"),
}


def reduction_name(op: "str | Output") -> str:
    """The row's name of `mean` or "mean"."""
    name = op.op if isinstance(op, Output) else op
    lookup(OPS, name, "reduction")
    return name


def check_reducible(op: str, dtype: Any, shape: Sequence[int], where: str) -> None:
    """Refuse an output that cannot be reduced as asked."""
    if not op:
        return
    row = OPS[op]
    got = f"{where}: got {jnp.dtype(dtype)}{list(shape)}"
    check(kind_letter(dtype) in row.kinds, f"{got}, which {op} cannot take exactly: {row.way_out}")
    check(bool(row.jnp) or len(shape) > 0, f"{got}; gather needs a first axis: {row.way_out}")


def kind_letter(dtype: Any) -> str:
    """NumPy's kind letter of a dtype; bfloat16 gives f, int4 gives i."""
    dtype = jnp.dtype(dtype)
    alike = {"f": jnp.floating, "i": jnp.signedinteger, "u": jnp.unsignedinteger} if dtype.kind == "V" else {}
    return next((kind for kind, like in alike.items() if jnp.issubdtype(dtype, like)), dtype.kind)


def accumulation_dtype(dtype: Any) -> np.dtype:
    """The dtype of partial results: floats below 32 bits take 32."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float32") if dtype.itemsize < 4 and kind_letter(dtype) == "f" else dtype


def is_exchanged(op: str, dtype: Any) -> bool:
    """Return True if `exchange` reduces it; all else is gathered and combined."""
    return op in ("mean", "sum") and jnp.dtype(dtype) in FLOATS


def combine(op: str, rows: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Combine workers' arrays in rank order; mean is sum_r weights[r] row_r.

    Raises:
        UsageError: rows that do not go together.
    """
    kinds = [f"{row.dtype}{list(row.shape[1:] if op == 'gather' else row.shape)}" for row in rows]
    odd = [rank for rank, kind in enumerate(kinds) if kind != kinds[0]][:LONGEST]
    if odd:
        raise UsageError(f"{op}: worker {odd[0]} has {kinds[odd[0]]}, worker 0 has {kinds[0]}; expected the same")
    function, dtype = OPS[op].numpy, rows[0].dtype
    if function is None:
        return np.concatenate(rows)
    flat = [np.atleast_1d(row).astype(accumulation_dtype(dtype)) for row in rows]
    with np.errstate(all="ignore"):  # integers wrap, floats overflow, as in programs
        if op == "mean":
            flat = [row * np.asarray(weight, row.dtype) for row, weight in zip(flat, weights, strict=True)]
        return functools.reduce(function, flat).astype(dtype).reshape(rows[0].shape)
