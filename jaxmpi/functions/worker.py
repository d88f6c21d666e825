"""One worker of a function: what it keeps, and its part of a call.

A call gives a worker an `Input` for each leaf of the arguments. It may name rows of an array of this process, of shared
memory, of a message, or of a variable: all are a source and chosen rows. With `slices=n` the program runs on n pieces
of the share, one after another, for a share that does not fit at once. Pieces are combined on the device: a mean is
weighted by examples, gathered outputs are concatenated. All programs are looked up before the first one runs, so a
worker that lacks one has computed nothing yet.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import profiling
from jaxmpi.functions.program import Leaf, ProgramKey, SentProgram, WorkerProgram
from jaxmpi.functions.reductions import accumulation_dtype, check_reducible, fold
from jaxmpi.functions.reports import CallReport
from jaxmpi.functions.rows import Rows, select_rows, take_rows, worker_pieces
from jaxmpi.functions.shared_array import is_shared

Leaves = list[jax.Array]


class Command(NamedTuple):
    """A command to all workers; `inputs` is its part that differs between them."""

    kind: str  # a key of COMMANDS in `commands`
    name: str  # of the function or method, for messages
    fields: dict[str, Any]
    inputs: Callable[[int], list[Any]] = lambda rank: []  # what the worker of a rank needs


class Input(NamedTuple):
    """One leaf of the inputs, as one worker finds it."""

    kind: str  # rows | whole: of `value`; resident | variable: rows or the whole of a variable's leaf; broadcast
    name: str = ""  # for messages
    value: Any = None  # an array; of a broadcast input only if it has changed
    rows: Any = None  # chosen rows; of resident rows what the user gave
    number: int = 0  # of the variable or the broadcast input
    index: int = 0  # of the leaf in the variable

    def choose(self, rows: Rows, is_local: bool) -> "Input":
        """The input of one worker: a choice of rows if it sees the array, else a copy of them."""
        if is_local or is_shared(self.value):
            return self._replace(rows=rows)
        value = np.asarray(in_jax_dtype(self.name, take_rows(self.value, rows)))
        return self._replace(value=value, rows=range(len(rows)))

    def take(self, begin: int, end: int) -> Any:
        """Rows [begin, end) of the worker's share, in JAX's dtype."""
        return in_jax_dtype(self.name, take_rows(self.value, self.rows[begin:end]))


class Worker:
    """One worker: its rank, its device, and what it keeps. Functions and variables are numbered together."""

    def __init__(self, rank: int, device: Any) -> None:
        self.rank, self.device = rank, device
        self.variables: dict[int, Leaves] = {}  # by number
        self.broadcasts: dict[tuple[int, int], jax.Array] = {}  # by numbers of function and input
        self.programs: dict[ProgramKey, SentProgram | WorkerProgram] = {}  # from the master; loaded at first use
        self.functions: dict[int, Callable] = {}  # that call back into Python, by number
        self.release()

    def release(self) -> None:
        """Let go of the command that was carried out."""
        self.out: Leaves = []  # leaves that the command under way has made
        self.program = WorkerProgram(lambda: [], (), "")

    def forget(self, number: int) -> None:
        """Drop a variable, or what a function has left here."""
        self.variables.pop(number, None)
        self.broadcasts = {key: value for key, value in self.broadcasts.items() if key[0] != number}
        self.programs = {key: value for key, value in self.programs.items() if key[0] != number}
        self.functions.pop(number, None)

    def sent_program(self, key: ProgramKey) -> WorkerProgram | None:
        """A program that has come from the master; None if it has not."""
        program = self.programs.get(key)
        if isinstance(program, SentProgram):
            program = self.programs[key] = program.load(self.functions, key[0])
        return program

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
        if number not in self.variables:
            raise UsageError(f"worker {self.rank} holds no variable {number}; it was closed, or never made")
        return self.variables[number]

    # ------------------------------------------------------------ a call

    def compute(
        self, command: Command, workers: int, find_program: Callable[[ProgramKey], WorkerProgram | None]
    ) -> CallReport:
        """Compute this worker's outputs; the report says what must be the same on all workers."""
        fields = command.fields
        with profiling.part("shuffle"):
            inputs = [self._find(x, fields["f"]) for x in command.inputs(self.rank)]
        count, spans = self._pieces(inputs, workers, fields["n"], fields["slices"])
        # All programs are looked up before the first runs: a worker that lacks one has then changed no state, such as
        # that of a function that calls back into Python, and may begin anew.
        programs: dict[int, WorkerProgram] = {}
        for length in sorted({b - a for a, b in spans}):
            shapes = tuple(
                ((length, *x.value.shape[1:]), jax.dtypes.canonicalize_dtype(x.value.dtype))
                if isinstance(x, Input)
                else (x.shape, x.dtype)
                for x in inputs
            )
            key = fields["f"], fields["form"], shapes
            if (program := find_program(key)) is None:
                return CallReport("missing", key)
            programs[length] = program
        self.program = programs[spans[0][1] - spans[0][0]]
        self.out = self._run_pieces(spans, programs, inputs)
        for i, leaf in enumerate(self.program.leaves):
            if leaf.op == "add":
                old, new = self.leaves(leaf.target)[leaf.index], self.out[i]
                if (old.dtype, old.shape) != (new.dtype, new.shape):
                    got, expected = (f"{x.dtype}{list(x.shape)}" for x in (new, old))
                    raise UsageError(f"updates: add: got {got} for a variable of {expected}; expected the same")
                self.out[i] = _add(old, new)
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
        if not leaf.ndim:
            raise UsageError("scatter(variable): got a variable without axes; expected rows")
        return x._replace(value=leaf, rows=select_rows(x.rows, len(leaf), "batch_local"))

    def _pieces(
        self, inputs: Sequence[Any], workers: int, n: int | None, slices: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """How many examples this worker has, and its pieces [begin, end) of them; n is of all workers' scattered rows.

        One without rows counts as one example.
        """
        counts = {len(x.rows) for x in inputs if isinstance(x, Input)} or {1}
        if len(counts) > 1 or 0 in counts:
            got = f"worker {self.rank} has {' and '.join(map(str, sorted(counts)))} rows in its inputs"
            raise UsageError(f"{got}; expected the same number > 0 in its variables and its share of the arguments")
        [count] = counts
        # Pieces of scattered rows are cut among all workers, so that all programs have two lengths at most.
        spans = worker_pieces(count, 1, 0, slices) if n is None else worker_pieces(n, workers, self.rank, slices)
        return count, [(a - spans[0][0], b - spans[0][0]) for a, b in spans]

    def _run_pieces(
        self, spans: Sequence[tuple[int, int]], programs: dict[int, WorkerProgram], inputs: Sequence[Any]
    ) -> Leaves:
        """The results: op over pieces, mean weighted by examples."""
        leaves, n = self.program.leaves, spans[-1][1]
        combined = [i for i, leaf in enumerate(leaves) if leaf.op != "gather"]
        ops = tuple(leaves[i].op for i in combined)
        first, out, totals, gathered = [], [], [], []
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
                _check_piece(leaf, x, y)
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


_add = jax.jit(jnp.add)


def _check_piece(leaf: Leaf, first: Any, x: jax.Array) -> None:
    """Refuse a piece that cannot combine, or of another dtype or shape than the first, which would broadcast.

    Gathered leaves may differ in the length of their first axis.
    """
    if not leaf.op:
        raise UsageError(f"slices: {leaf.name}: nothing says how pieces combine: local(mean), local(sum)")
    check_reducible(leaf.op, x.dtype, x.shape, f"slices: {leaf.name}")
    start = leaf.op == "gather"
    if (first.dtype, first.shape[start:]) != (x.dtype, x.shape[start:]):
        got = f"{first.dtype}{list(first.shape)} of one piece and {x.dtype}{list(x.shape)} of another"
        raise UsageError(f"slices: {leaf.name}: got {got}; {leaf.op} expects the same of all: use gather, or slices=1")
