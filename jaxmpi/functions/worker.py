"""One worker of a function: what it holds, its part of a command, and its report.

A call gives a worker an `Input` for each leaf of the arguments. It may name rows of an array of this process, of shared
memory, of a message, or of a variable: all are a source and a `RowSelection`. With `slices=n` the program runs on n
pieces of the share, one after another, for a share that does not fit at once. Pieces are combined on the device: a mean
is weighted by examples, gathered outputs are concatenated. All programs are looked up before the first one runs, so a
worker that lacks one has computed nothing yet.

One worker may fail while the others succeed, but all must raise an error. Each therefore returns a report, and
`judge_reports` decides from all of them which error, if any, is raised.
"""

import functools
import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.json_tree import differences
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import profiling
from jaxmpi.functions.reductions import OPS, accumulation_dtype, check_reducible
from jaxmpi.functions.rows import select_rows, take_rows, worker_pieces
from jaxmpi.functions.transport import CallReport

Leaves = list[jax.Array]
ProgramKey = tuple[int, int, tuple]  # numbers of function and form, shapes and dtypes of the leaves


class WorkerFailed(TrainingError):
    """A worker's part failed; the message has its traceback.

    The workers are as before the call.
    """


class MissingPrograms(Exception):
    """Workers lack the programs of these keys, as text; the master sends them and repeats the command."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self.keys = keys


def key_text(key: ProgramKey) -> str:
    """The key of a program as text, for a report."""
    return json.dumps([*key[:2], [[list(shape), str(dtype)] for shape, dtype in key[2]]])


def key_from_text(text: str) -> ProgramKey:
    """The inverse of `key_text`."""
    function, form, shapes = json.loads(text)
    return function, form, tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes)


class Command(NamedTuple):
    """A command to all workers; `inputs` is its part that differs between them."""

    kind: str  # a key of COMMANDS in `commands`
    name: str  # of the function or method, for messages
    fields: dict[str, Any]
    inputs: Callable[[int], list[Any]] = lambda rank: []  # what the worker of a rank needs
    is_repeated: bool = False  # workers that have done their part do not do it again


class Input(NamedTuple):
    """One leaf of the inputs, as one worker finds it."""

    kind: str  # rows | whole: of `value`; resident | variable: rows or the whole of a variable's leaf; broadcast
    name: str = ""  # for messages
    value: Any = None  # an array; of a broadcast input only if it has changed
    rows: Any = None  # a RowSelection; of resident rows what the user chose
    number: int = 0  # of the variable or the broadcast input
    index: int = 0  # of the leaf in the variable

    def take(self, begin: int, end: int) -> Any:
        """Rows [begin, end) of the worker's own, in JAX's dtype."""
        return in_jax_dtype(self.name, take_rows(self.value, self.rows.index(begin, end)))


class Leaf(NamedTuple):
    """One array that a program returns, and what becomes of it."""

    op: str  # a row of OPS, or empty
    place: str  # result | into | local | update
    target: int  # number of the output, or of the variable
    index: int = 0  # among the leaves of the target
    name: str = ""  # name of the target, for messages


class WorkerProgram(NamedTuple):
    """A user's function for arguments of certain shapes, over flat leaves."""

    run: Callable[..., Leaves]
    leaves: tuple[Leaf, ...]
    agreed: str  # dtypes and shapes that must be the same on all workers, as JSON
    structures: tuple[Any, ...] = ()  # tree structures of the outputs, then the updates, if the function is in Python


class Worker:
    """One worker: its rank, its device, and what it holds."""

    def __init__(self, rank: int, device: Any) -> None:
        self.rank, self.device = rank, device
        self.variables: dict[int, Leaves] = {}  # by number
        self.broadcasts: dict[tuple[int, int], jax.Array] = {}  # by function and input
        self.programs: dict[ProgramKey, WorkerProgram] = {}  # that have come from the master
        self.release()

    def release(self) -> None:
        """Let go of the command that was carried out."""
        self.out: Leaves = []  # leaves that the command under way has made
        self.program = WorkerProgram(lambda: [], (), "")
        self.report: CallReport | None = None  # if this worker has done its part of the command under way

    def clear(self) -> None:
        """Drop all values and programs."""
        for kept in (self.variables, self.broadcasts, self.programs):
            kept.clear()

    def forget(self, number: int) -> None:
        """Drop a variable, or what function -1 - number has left here."""
        self.variables.pop(number, None)
        self.broadcasts = {key: value for key, value in self.broadcasts.items() if key[0] != -1 - number}
        self.programs = {key: value for key, value in self.programs.items() if key[0] != -1 - number}

    def put(self, array: Any) -> jax.Array:
        """The array on this worker's device."""
        return jax.device_put(array, self.device)

    def copy(self, array: Any) -> jax.Array:
        """The array on this worker's device, in memory that nobody else writes."""
        return self.put(jnp.array(array) if isinstance(array, jax.Array) else np.array(array))

    def argument(self, array: Any) -> Any:
        """The array as a program's argument; calls place NumPy's arrays faster than `put`."""
        is_default = self.device is jax.local_devices()[0] and jax.config.jax_default_device is None  # pyright: ignore[reportAttributeAccessIssue]
        return array if is_default and isinstance(array, np.ndarray) else self.put(array)

    def leaves(self, number: int) -> Leaves:
        """The leaves of a variable."""
        check(number in self.variables, f"worker {self.rank} holds no variable {number}; it was closed, or never made")
        return self.variables[number]

    # ------------------------------------------------------------ a call

    def compute(self, command: Command, workers: int, program: Callable[[ProgramKey], WorkerProgram]) -> CallReport:
        """Compute this worker's outputs, unless a repeated command finds them.

        The report says what must be the same on all workers.
        """
        if self.report is None or not command.is_repeated:
            self.release()
            self.report = self._compute(command, workers, program)
        return self.report

    def _compute(self, command: Command, workers: int, program: Callable[[ProgramKey], WorkerProgram]) -> CallReport:
        fields = command.fields
        with profiling.part("shuffle"):
            inputs = [self._find(x, fields["f"]) for x in command.inputs(self.rank)]
        spans, count = [(0, 1)], 1
        if counts := {x.rows.count for x in inputs if isinstance(x, Input)}:
            got = f"worker {self.rank} has {sorted(counts)} rows in its inputs"
            check(len(counts) == 1, f"{got}; expected the same number in its variables and its share of the arguments")
            check(counts != {0}, f"worker {self.rank} has no example; every worker needs one")
            [count] = counts
            n, slices = fields["n"], fields["slices"]
            spans = worker_pieces(count, 1, 0, slices) if n is None else worker_pieces(n, workers, self.rank, slices)
            spans = [(a - spans[0][0], b - spans[0][0]) for a, b in spans]
        programs = {}
        for length in sorted({b - a for a, b in spans}):
            shapes = tuple(
                ((length, *x.value.shape[1:]), jax.dtypes.canonicalize_dtype(x.value.dtype))
                if isinstance(x, Input)
                else (x.shape, x.dtype)
                for x in inputs
            )
            programs[length] = program((fields["f"], fields["form"], shapes))
        self.program = programs[spans[0][1] - spans[0][0]]
        self.out = self._run_pieces(spans, programs, inputs)
        for i, leaf in enumerate(self.program.leaves):
            if leaf.op == "add":
                old, new = self.leaves(leaf.target)[leaf.index], self.out[i]
                got, expected = (f"{x.dtype}{list(x.shape)}" for x in (new, old))
                check(
                    got == expected, f"updates: add: got {got} for a variable that holds {expected}; expected the same"
                )
                self.out[i] = jitted_add(old, new)
        return CallReport("ok", f'{{"call": {fields["agreed"]}, "outputs": {self.program.agreed}}}', count)

    def _find(self, x: Input, function: int) -> Any:
        """An array that programs take whole, or an Input whose rows they take."""
        if x.kind == "rows":
            return x
        if x.kind == "whole":
            return self.argument(in_jax_dtype(x.name, np.asarray(x.value)))
        if x.kind == "broadcast":
            if x.value is not None:
                self.broadcasts[function, x.number] = self.put(x.value)
            return self.broadcasts[function, x.number]
        leaf = self.leaves(x.number)[x.index]
        if x.kind == "variable":
            return leaf
        check(leaf.ndim > 0, "scatter(variable): got a variable without axes; expected rows")
        return x._replace(value=leaf, rows=select_rows(x.rows, len(leaf), "batch_local"))

    def _run_pieces(
        self, spans: Sequence[tuple[int, int]], programs: dict[int, WorkerProgram], inputs: Sequence[Any]
    ) -> Leaves:
        """The results: op over pieces, mean weighted by examples."""
        leaves, n = self.program.leaves, spans[-1][1]
        combined = [i for i, leaf in enumerate(leaves) if leaf.op != "gather"]
        ops = tuple(leaves[i].op for i in combined)
        first: list[jax.ShapeDtypeStruct] = []
        out, totals, gathered = [], [], []
        for a, b in spans:
            with profiling.part("shuffle"):
                arguments = [self.argument(x.take(a, b)) if isinstance(x, Input) else x for x in inputs]
            with jax.disable_jit(False):  # results must be JAX's arrays
                out = programs[b - a].run(*arguments)
            if len(spans) == 1:
                # The caller may overwrite its arrays: a result that lies in one is copied.
                theirs = {x.ctypes.data if isinstance(x, np.ndarray) else x.unsafe_buffer_pointer() for x in arguments}
                return [self.copy(x) if x.unsafe_buffer_pointer() in theirs else x for x in out]
            first = first or [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
            for leaf, x, y in zip(leaves, first, out, strict=True):
                check_piece(leaf, x, y)
            gathered.append({i: x for i, x in enumerate(out) if i not in combined})
            dtypes = [accumulation_dtype(out[i].dtype) for i in combined]
            weights = [np.asarray((b - a) / n, dtype) for dtype in dtypes]
            totals = fold(ops, totals, [out[i] for i in combined], weights)
        whole = {i: total.astype(out[i].dtype) for i, total in zip(combined, totals, strict=True)}
        return [whole[i] if i in whole else jnp.concatenate([x[i] for x in gathered]) for i in range(len(out))]

    def store(self, results: dict[int, Any], local: dict[int, int]) -> None:
        """Store the outputs that stay here; `local` has the numbers of new variables by output."""
        new: dict[int, Leaves] = {number: [] for number in local.values()}
        for i, leaf in enumerate(self.program.leaves):
            if leaf.place == "local":
                new[local[leaf.target]].append(self.out[i])
            elif leaf.place != "result":
                value = self.put(results[i]) if leaf.place == "into" else self.out[i]
                new.setdefault(leaf.target, []).append(value)
        self.variables.update(new)


jitted_add = jax.jit(jnp.add)


def check_piece(leaf: Leaf, first: Any, x: jax.Array) -> None:
    """Refuse a piece that cannot combine, or of another dtype or shape than the first, which would broadcast.

    Gathered leaves may differ in the length of their first axis.
    """
    check(bool(leaf.op), f"slices: {leaf.name}: nothing says how pieces combine: local(mean), local(sum)")
    check_reducible(leaf.op, x.dtype, x.shape, f"slices: {leaf.name}")
    start = leaf.op == "gather"
    check(
        (first.dtype, first.shape[start:]) == (x.dtype, x.shape[start:]),
        f"slices: {leaf.name}: got {first.dtype}{list(first.shape)} of one piece and {x.dtype}{list(x.shape)} of "
        f"another; {leaf.op} expects the same of all: reduce over the examples of a piece in the function, use gather, "
        "or slices=1",
    )


@functools.partial(jax.jit, static_argnums=0)
def fold(ops: tuple[str, ...], totals: Leaves, out: Leaves, weights: Leaves) -> Leaves:
    """Combine the totals with one more piece: total <- op(total, out); for a mean, total + weight * out."""
    new = [x.astype(accumulation_dtype(x.dtype)) for x in out]
    new = [x * weight if op == "mean" else x for op, x, weight in zip(ops, new, weights, strict=True)]
    return [OPS[op].jnp(t, x) for op, t, x in zip(ops, totals, new, strict=True)] if totals else new  # pyright: ignore[reportOptionalCall]


# ---------------------------------------------------------------- reports


def error_text(error: BaseException) -> str:
    """Its text, or its kind if it has none."""
    return str(error) or type(error).__name__


def failure_report(error: BaseException) -> CallReport:
    """Text of an error; a user's mistake needs no traceback."""
    if isinstance(error, MissingPrograms):
        return CallReport("missing", error.keys[0])
    if isinstance(error, (UsageError, TrainingError)):
        return CallReport("error", str(error))
    return CallReport("error", "".join(traceback.format_exception(error)).rstrip())


def judge_reports(what: str, reports: list[CallReport], errors: dict[int, Exception]) -> None:
    """Raise one error everywhere unless all reports are well and say the same.

    An original exception of this process, by rank in `errors`, is raised if no worker did its part.
    """
    if failed := [rank for rank, report in enumerate(reports) if report.kind == "error"]:
        original = next((errors[rank] for rank in failed if rank in errors), None)
        if original and all(report.kind != "ok" for report in reports):
            raise original
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        text = reports[failed[0]].text
        raise WorkerFailed(f"{what}: worker {failed[0]} of {len(reports)}{more} failed:\n{text}") from original
    if missing := sorted({report.text for report in reports if report.kind == "missing"}):
        raise MissingPrograms(missing)
    if odd := [rank for rank, report in enumerate(reports) if report.text != reports[0].text]:
        lines = [line for rank in odd[:8] for line in differences(rank, reports[rank].text, 0, reports[0].text)]
        raise UsageError(f"{what} differs between workers:\n" + "\n".join(lines[:24]))
