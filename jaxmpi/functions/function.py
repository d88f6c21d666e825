"""A function of arrays over all workers: scatter, compute, reduce.

Stooke and Abbeel 2017 (Synkhronos) ran Theano functions so: inputs are scattered or broadcast, outputs reduced. Here
JAX traces the user's function once for each set of input shapes (`Function.program`). Workers that do not run the
script get the StableHLO of that program, so closures, lambdas and notebook cells work. Only a function that calls back
into Python is sent by its name (docs/decisions/0017). `CallInputs` notes for each leaf of the inputs how it reaches the
workers: sent, read out of shared memory, or held by them already. A broadcast argument that has not changed is not sent
again.
"""

import functools
import itertools
import json
import pickle
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from jaxmpi.allreduce.api import check_strategy
from jaxmpi.comm.job import broadcast
from jaxmpi.comm.mpi import refusing_world
from jaxmpi.comm.shared_compile import stablehlo
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import check_op, check_rows, key_leaves, packed, unpacked
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import lifecycle, profiling
from jaxmpi.functions.commands import perform
from jaxmpi.functions.import_by_name import qualified_name
from jaxmpi.functions.outputs import ChosenOutputs, join_results, parse_outputs
from jaxmpi.functions.partitioning import (
    RowSelection,
    check_enough,
    check_indices,
    choices_by_worker,
    common_length,
    select_rows,
    shard_bounds,
)
from jaxmpi.functions.reductions import Output, Scatter, check_reducible, from_word
from jaxmpi.functions.shared_array import is_shared
from jaxmpi.functions.signature import Form, bind_arguments, sort_by_parameter
from jaxmpi.functions.variable import Variable, check_numbers, check_one_host, rows_header
from jaxmpi.functions.worker import Command, Leaf, WorkerProgram
from jaxmpi.functions.worker_call import canonical_dtype, take_rows
from jaxmpi.functions.worker_group import WorkerGroup

Marker = Any  # scatter, scatter(variable), broadcast, or a variable
OF_OTHERS = "belongs to workers that were closed"
_numbers = itertools.count()  # functions in the order in which they are made, the same on all ranks


class Function:
    """A function over workers. `__wrapped__` is the user's own function."""

    def __init__(
        self,
        function: Callable,
        inputs: Mapping[str, Marker] | Sequence[Marker] | Marker,
        outputs: PyTree,
        updates: Any,
        strategy: str | None,
    ) -> None:
        self.__wrapped__ = function
        self.name = getattr(function, "__name__", "function")
        by_name = sort_by_parameter(inputs, function, self.name) if isinstance(inputs, Mapping) else {}
        self.keywords = tuple(by_name)  # if inputs have names, all arguments are passed by them
        several = isinstance(inputs, (Mapping, tuple, list))
        markers = [*(by_name.values() if by_name else inputs)] if several else [inputs]
        self.inputs: Sequence[Marker] | None = markers if several or not takes_argument(inputs) else None
        self.all_inputs = inputs
        self.trees = parse_outputs(outputs)
        self.outputs = self.trees.flat
        every = [updates] if isinstance(updates, Variable) else list(updates)
        is_pair = len(every) == 2 and isinstance(every[0], Variable) and isinstance(every[1], (Output, str))
        self.updates = tuple(parse_update(update) for update in ([updates] if is_pair else every))
        is_one_update = not self.trees.trees and (is_pair or isinstance(updates, Variable))
        self.is_bare = is_one_update or (self.trees.is_single and not self.updates)  # f returns that one, in no tuple
        check_markers(markers)
        self.targets: list[Variable] = [x.into for x in (*self.outputs, *self.updates) if x.into is not None]
        check_targets(self.name, self.targets)
        self.strategy = strategy
        if strategy is not None:
            check_strategy(strategy)
        self.group: WorkerGroup | None = None
        self.number = next(_numbers)
        self.forms: list[Form] = []  # so far
        self.programs: dict[tuple[int, tuple], WorkerProgram] = {}
        self.jitted: dict[int, Any] = {}
        self.sent: list[Any] = []  # broadcast leaves as the workers have them

    def __del__(self) -> None:
        if (group := getattr(self, "group", None)) is not None:
            group.dropped.append(-1 - self.number)

    def __call__(
        self,
        *args: PyTree,
        batch: Any = None,
        batch_local: Any = None,
        slices: int = 1,
        output_subset: Sequence[Any] | None = None,
        **named: PyTree,
    ) -> PyTree:
        """Compute on all workers and reduce.

        Args:
            args: one for every `scatter` and `broadcast` among the inputs, arrays or trees of them.
            named: those that come by the name of the function's parameter.
            batch: which examples of the scattered arguments: the first n, a slice, indices, or a mask of booleans;
                default all.
            batch_local: which rows of the variables in `scatter(variable)`: for all workers, or a list with one choice
                a worker.
            slices: in how many pieces each worker computes its share.
            output_subset: the only outputs to compute: places in their tuple, in the order of the result, or keys of
                a dict of outputs. Updates are computed in any case; variables that take other outputs keep what they
                hold.

        Returns:
            the outputs that are neither kept in a variable nor updates; of `local` ones a variable. In a tree of
            outputs, None stands for one that is kept in a variable.

        Communicates: arguments that this process has and others need, but no broadcast argument that has not changed;
        48 bytes a worker; then each output as it is reduced.

        Raises:
            UsageError: arguments, rows or outputs that cannot be. WorkerFailed (a TrainingError): a worker failed; its
                traceback is in the message, and the next call works.
        """
        group = self._bind_group()
        made = {place: Variable(group, None) for place, output in enumerate(self.outputs) if output.stays}
        chosen: list[ChosenOutputs] = []
        known = len(self.forms)

        def prepare() -> Command:
            profiling.identify(self.number)
            chosen.append(self.trees.chosen(output_subset))
            return self._command(group, (args, named), batch, batch_local, slices, made, chosen[0])

        try:
            structures, leaves = perform(group, self.name, prepare)
        except BaseException:
            self.sent = []
            # Ranks that run the script may not all have come to the same forms; waiting workers keep programs.
            if not group.is_serial:
                self._forget_forms(known)
            raise
        return self._results(structures, leaves, made, chosen[0])

    def _bind_group(self) -> WorkerGroup:
        """This function's worker group: the current one at the first call."""
        if self.group is None:
            self.group = lifecycle.current_group()
            self.group.check_usable()
            self.group.functions[self.number], self.group.is_used = self, True
        return self.group

    # ------------------------------------------------------------ arguments

    def _command(
        self,
        group: WorkerGroup,
        arguments: tuple[Sequence[PyTree], dict[str, PyTree]],
        batch: Any,
        batch_local: Any,
        slices: int,
        made: dict[int, Variable],
        chosen: ChosenOutputs,
    ) -> Command:
        is_count = isinstance(slices, (int, np.integer)) and slices >= 1
        check(is_count, f"slices: got {slices!r}; expected a whole number > 0")
        check(all(v.group is group for v in self.targets), f"{self.name}: a variable that takes a result {OF_OTHERS}")
        bound = CallInputs(group)
        markers, args, keywords = self._arguments(*arguments)
        structure = bound.add_all(markers, args, keywords)
        header = bound.header(batch, batch_local, int(slices))
        names = {str(place): variable.number for place, variable in made.items() if place in chosen.computed}
        form = self._form_number(Form(structure, keywords, chosen.computed))
        header |= {"f": self.number, "form": form, "name": self.name, "locals": names, "outputs": chosen.computed}
        header["strategy"] = self.strategy or group.default_strategy
        agreed = ("name", "f", "form", "n", "rows", "local", "slices", "strategy", "locals", "outputs")
        header["says"] = json.dumps({key: header[key] for key in agreed} | bound.chosen())
        fresh = self._changed_broadcasts(bound)
        header["fresh"] = list(fresh)
        given = LocalInputs(bound.given, bound.rows, bound.local, fresh)
        return Command("call", header, given, lambda rank: bound.arrays_for(rank, list(fresh.values())))

    def _changed_broadcasts(self, bound: "CallInputs") -> dict[int, Any]:
        """The broadcast leaves that workers do not have yet, by their number."""
        fresh = {}
        for i, leaf in enumerate(bound.broadcast):
            if i >= len(self.sent) or not is_unchanged(self.sent[i], leaf):
                self.sent[i : i + 1] = [comparison_copy(leaf)]
                fresh[i] = self.sent[i]
        return fresh

    def _arguments(
        self, args: Sequence[PyTree], named: dict[str, PyTree]
    ) -> tuple[Sequence[Marker], Sequence[PyTree], tuple[str, ...]]:
        """Return markers by place, arguments in order, and the last places' names."""
        if self.inputs is None:
            keywords = tuple(sorted(named))
            every = [*args, *(named[key] for key in keywords)]
            return [self.all_inputs] * len(every), every, keywords
        free = [place for place, marker in enumerate(self.inputs) if takes_argument(marker)]
        return self.inputs, bind_arguments(self.name, self.__wrapped__, free, self.keywords, args, named), self.keywords

    def _forget_forms(self, known: int) -> None:
        """Leave only the first `known` forms."""
        del self.forms[known:]
        self.jitted = {form: jitted for form, jitted in self.jitted.items() if form < known}
        self.programs = {key: program for key, program in self.programs.items() if key[0] < known}

    def _form_number(self, form: Form) -> int:
        if form not in self.forms:
            self.forms.append(form)
        return self.forms.index(form)

    # ------------------------------------------------------------ programs

    def program(self, form: int, shapes: tuple) -> WorkerProgram:
        """The function over flat leaves, compiled when it first runs.

        `shapes` holds (shape, dtype) of each leaf.
        """
        if (form, shapes) not in self.programs:
            with profiling.part("compile"):
                self.programs[form, shapes] = self._trace(form, shapes)
        return self.programs[form, shapes]

    def _trace(self, form: int, shapes: tuple) -> WorkerProgram:
        me = weakref.proxy(self)  # a weak reference: dropping the function lets go at once of what workers hold of it
        jitted = self.jitted.setdefault(form, jax.jit(lambda *flat: me._computed_outputs(form, flat)))
        parts = jitted.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).out_info
        leaves, says = [], []
        for (leaf, name), part in zip(self._destinations(form), parts, strict=True):
            are_keys = key_leaves(jax.tree.structure(part))
            for index, (aval, is_key) in enumerate(zip(jax.tree.leaves(part), are_keys, strict=True)):
                leaves.append(leaf._replace(index=index))
                if is_key and (leaf.place, leaf.op) != ("update", "mean"):  # its default
                    check_op(leaf.op, aval.shape, f"{self.name}: output {name}")
                if leaf.place in ("result", "into"):  # in other places only pieces combine, if there are several
                    check_reducible(leaf.op, aval.dtype, aval.shape, f"{self.name}: output {name}")
                says.append(describe_output(leaves[-1], aval))
        structures = tuple(jax.tree.structure(part) for part in parts)
        return WorkerProgram(
            lambda *flat: jax.tree.leaves(jitted(*flat)), tuple(leaves), json.dumps(dict(says)), structures
        )

    def _destinations(self, form: int) -> list[tuple[Leaf, str]]:
        """Destination of each part that a program returns, and name for messages."""
        outputs = [
            (output_leaf(i, self.outputs[i], self.trees.names[i]), self.trees.names[i])
            for i in self.forms[form].outputs
        ]
        first = len(self.trees.trees)
        updates = [
            (
                Leaf(
                    op=update.op,
                    place="update",
                    target=update.into.number,
                    index=0,
                    name=f"update {update.into.number}",
                ),
                str(first + i),
            )
            for i, update in enumerate(self.updates)
        ]
        return [*outputs, *updates]

    def _computed_outputs(self, form: int, flat: Sequence[jax.Array]) -> list[PyTree]:
        """Call the user's function; return trees of computed outputs, then of updates."""
        parts, outputs = self._all_outputs(form, flat), self.forms[form].outputs
        return [*(parts[i] for i in outputs), *parts[len(self.outputs) :]]

    def _all_outputs(self, form: int, flat: Sequence[jax.Array]) -> list[PyTree]:
        """All outputs, then all updates, as what is checked."""
        with self._refuse_exchange():
            result = self.forms[form].call(self.__wrapped__, flat)
        expected = len(self.trees.trees) + len(self.updates)
        parts = (result,) if self.is_bare else result
        check(
            isinstance(parts, (tuple, list)) and len(parts) == expected,
            f"{self.name} returned {'an array' if isinstance(result, jax.Array) else type(result).__name__}"
            f"{f' of {len(parts)}' if isinstance(parts, (tuple, list)) else ''}; expected a tuple of {expected}: "
            f"{len(self.trees.trees)} outputs, then {len(self.updates)} updates",
        )
        parts, first = packed(list(parts)), len(self.trees.trees)
        for update, part in zip(self.updates, parts[first:], strict=True):
            got, wanted = jax.tree.structure(part), update.into.structure
            check(got == wanted, f"{self.name}: an update is a tree {got}; its variable is {wanted}")
        return [*self.trees.split(self.name, parts[:first]), *parts[first:]]

    def _refuse_exchange(self) -> AbstractContextManager[None]:
        """Refuse an exchange in the function that is not over its workers."""
        if self.group is None or self.group.size == 1 or self.group.is_the_world:
            return nullcontext()
        return refusing_world(
            f"{self.name}: exchange inside a function is over its workers only where every rank runs the script; these "
            f"{self.group.size} are devices of one process, or wait for this script's commands. Return what is to be "
            "exchanged, with mean or sum as its output, and go on in a second function or in the script"
        )

    def serialize_program(self, form: int, shapes: tuple) -> tuple[dict[str, Any], bytes]:
        """Header and body of a program for a process without the function."""
        program = self.program(form, shapes)
        header = {"name": self.name, "leaves": program.leaves, "says": program.says, "module": ""}
        avals = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        if body := stablehlo(jax.jit(program.run), avals):
            return header, body
        parts = jax.eval_shape(lambda *flat: self._all_outputs(form, flat), *avals)
        numbers = jax.tree.unflatten(jax.tree.structure(parts), range(len(jax.tree.leaves(parts))))
        picked = [*(numbers[i] for i in self.forms[form].outputs), *numbers[len(self.outputs) :]]
        return {**header, **qualified_name(self.__wrapped__), "picked": jax.tree.leaves(picked)}, pickle.dumps(
            self.forms[form]
        )

    # ------------------------------------------------------------ results

    def _results(
        self, structures: Sequence[Any], leaves: list[Any], made: dict[int, Variable], chosen: ChosenOutputs
    ) -> PyTree:
        leaves_left, results = iter(leaves), {}
        for place, structure in zip(chosen.computed, structures, strict=False):
            output = self.outputs[place]
            if output.stays:
                made[place].structure = structure
                results[place] = made[place]
            elif output.into is not None:
                output.into.structure = structure
            else:
                mine = [next(leaves_left) for _ in range(structure.num_leaves)]
                results[place] = unpacked(jax.tree.unflatten(structure, mine))
        return join_results(chosen, results)


class LocalInputs(NamedTuple):
    """Inputs that the caller's own workers take directly, with the chosen rows."""

    leaves: list[Any]
    rows: RowSelection | None
    local: list[Any]
    fresh: dict[int, Any]


def parse_update(update: Any) -> Output:
    """`(variable, op)`, or a variable alone, as an Output.

    A variable alone takes the mean over pieces.
    """
    variable, op = update if isinstance(update, (tuple, list)) else (update, Output("mean"))
    op = from_word(op)
    check(
        isinstance(variable, Variable) and isinstance(op, Output) and bool(op.op) and not op.stays and op.into is None,
        f"updates: got {update!r}; expected a jaxmpi.variable, or a pair of it and mean, sum, add, prod, min, max or "
        "gather",
    )
    return Output(op.op, stays=True, into=variable)


def takes_argument(marker: Marker) -> bool:
    """Return True if the input comes with the call."""
    return marker is broadcast or (isinstance(marker, Scatter) and marker.variable is None)


def check_markers(inputs: Sequence[Marker]) -> None:
    """Refuse markers that no input can have."""
    for marker in inputs:
        check(
            marker is broadcast or isinstance(marker, (Scatter, Variable)),
            f"inputs: got {marker!r}; expected jaxmpi.functions.scatter, broadcast, a variable or scatter(variable)",
        )


def check_targets(name: str, targets: Sequence[Variable]) -> None:
    """Refuse two results for one variable."""
    once = len({id(variable) for variable in targets}) == len(targets)
    check(once, f"{name}: one variable is to take two results; expected a variable for each")


def output_leaf(place: int, wanted: Output, label: str) -> Leaf:
    """Destination of an output's first leaf."""
    if wanted.into is not None:
        return Leaf(op=wanted.op, place="into", target=wanted.into.number, index=0, name=f"into {wanted.into.number}")
    kind = "local" if wanted.stays else "result"
    return Leaf(op=wanted.op, place=kind, target=place, index=0, name=f"{kind} {label}")


def describe_output(leaf: Leaf, aval: Any) -> tuple[str, str]:
    """Facts of an output that must be equal on all workers."""
    crosses = leaf.place in ("result", "into")
    shape = list(aval.shape[1:] if leaf.op == "gather" else aval.shape)
    return f"{leaf.name} leaf {leaf.index}", f"{leaf.op} of {aval.dtype}{shape}" if crosses else ""


# ---------------------------------------------------------------- the arguments of one call


class CallInputs:
    """The input leaves of one call, and how each reaches the workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.inputs: list[list[Any]] = []  # how each leaf comes; see `compute`
        self.given: list[Any] = []  # the leaf itself, if it comes with the call
        self.lengths: dict[str, int] = {}  # lengths of scattered leaves, by name
        self.broadcast: list[Any] = []
        self.rows: RowSelection | None = None
        self.local: list[Any] = [None] * group.size

    def add_all(self, markers: Sequence[Marker], args: Sequence[PyTree], keywords: Sequence[str]) -> Any:
        """Add all inputs, the last by name; return the arguments' structure."""
        left, structures = iter(args), []
        names = [*range(len(markers) - len(keywords)), *map(repr, keywords)]
        for place, (marker, name) in enumerate(zip(markers, names, strict=True)):
            variable = marker.variable if isinstance(marker, Scatter) else marker
            if takes_argument(marker):
                structures.append(self._add_argument(f"argument {name}", marker, next(left)))
            else:
                check(variable.group is self.group, f"input {place}: the variable {OF_OTHERS}")
                held = self.group.own_slot.held(variable.number)
                count = len(held)
                if isinstance(marker, Scatter):
                    for leaf, is_key in zip(held, key_leaves(variable.structure), strict=True):
                        if is_key:
                            check_rows(leaf.shape, f"input {place}")
                self.inputs += [
                    ["rows" if isinstance(marker, Scatter) else "whole", variable.number, i] for i in range(count)
                ]
                self.given += [None] * count
                structures.append(variable.structure)
        return jax.tree_util.treedef_tuple(structures)

    def _add_argument(self, name: str, marker: Marker, tree: PyTree) -> Any:
        tree = packed(tree)
        leaves, are_keys = named_leaves(tree), key_leaves(jax.tree.structure(tree))
        if marker is not broadcast and not leaves:  # else nobody writes down what may be big
            raise UsageError(f"{name}: got {tree!r:.80}; scatter needs arrays, rows of examples")
        for (path, leaf), is_key in zip(leaves, are_keys, strict=True):
            where_ = f"{name}{f' leaf {path!r}' if path else ''}"
            array = leaf if is_shared(leaf) else check_numbers(where_, leaf)
            if marker is broadcast and is_shared(leaf) and self.group.is_serial and self.group.is_on_one_host:
                self.inputs.append(["read", where_, leaf.ticket()])
            elif marker is broadcast:
                self.inputs.append(["kept", len(self.broadcast)])
                self.broadcast.append(in_jax_dtype(where_, array.array if is_shared(leaf) else array))
            else:
                if is_key:
                    check_rows(array.shape, where_)
                check(array.ndim > 0, f"{where_}: got a number; scatter needs an array with a first axis of examples")
                self.lengths[where_] = len(array)
                self.inputs.append(["shared", where_, leaf.ticket()] if is_shared(leaf) else ["sent", where_])
                check_one_host(self.group, is_shared(leaf))
            self.given.append(array)
        return jax.tree.structure(tree)

    def header(self, batch: Any, batch_local: Any, slices: int) -> dict[str, Any]:
        """Facts of the call that all workers need."""
        scattered, resident = bool(self.lengths), any(entry[0] == "rows" for entry in self.inputs)
        check(batch is None or scattered, "batch: got a choice of examples, but no argument is scattered")
        check(batch_local is None or resident, "batch_local: got a choice of rows, but no input is scatter(variable)")
        check(slices == 1 or scattered or resident, f"slices: got {slices}, but no input is scattered")
        if scattered:
            self.rows = select_rows(batch, common_length([*self.lengths.values()], [*self.lengths]))
            check_enough(self.rows.count, self.group.size)
        if resident:
            self.local = choices_by_worker(batch_local, self.group.size)
        return {
            "n": self.rows.count if self.rows else None,
            "rows": rows_header(self.rows) if self.rows else None,
            "local": [row_choice_header(choice) for choice in self.local] if resident else [],
            "slices": slices,
            "inputs": self.inputs,
        }

    def chosen(self) -> dict[str, int]:
        """Digest of indices, by which ranks that run the script compare them."""
        if self.group.is_serial or len(self.group.slots) == self.group.size:
            return {}
        choices = [self.rows.indices if self.rows else None, *self.local]
        indices = [np.asarray(choice, np.int64) for choice in choices if hasattr(choice, "__len__")]
        return {"indices": functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), indices, 0)}

    def arrays_for(self, rank: int, fresh: list[Any]) -> list[Any]:
        """The arrays sent to a worker, in the order it takes them."""
        arrays = []
        if self.rows is not None:
            edges = shard_bounds(self.rows.count, self.group.size)
            begin, end = edges[rank], edges[rank + 1]
            if self.rows.indices is not None:
                arrays.append(self.rows.indices[begin:end])
            for entry, leaf in zip(self.inputs, self.given, strict=True):
                if entry[0] == "sent":
                    arrays.append(in_jax_dtype(entry[1], np.asarray(take_rows(leaf, self.rows.of(begin, end)))))
        if any(entry[0] == "rows" for entry in self.inputs) and row_choice_header(self.local[rank])[0] == "indices":
            arrays.append(np.asarray(self.local[rank]))
        return arrays + fresh


def row_choice_header(choice: Any) -> list[Any]:
    """One worker's choice of rows as JSON; indices travel apart."""
    if isinstance(choice, slice):
        return ["slice", [None if v is None else int(v) for v in (choice.start, choice.stop, choice.step)]]
    if choice is None or isinstance(choice, (int, np.integer)):
        return ["first", None if choice is None else int(choice)]
    if np.asarray(choice).dtype != bool:  # a mask's length is checked where the rows are
        check_indices(choice, np.iinfo(np.int64).max, "batch_local")
    return ["indices", None]


def is_unchanged(before: Any, now: Any) -> bool:
    """Return True if workers have this broadcast leaf: same array or bytes."""
    if isinstance(now, jax.Array) or isinstance(before, jax.Array):
        return before is now
    same_kind = before.shape == now.shape and before.dtype == canonical_dtype(now.dtype)
    return same_kind and np.array_equal(as_words(before), as_words(now.astype(before.dtype, copy=False)))


def as_words(array: np.ndarray) -> np.ndarray:
    """Values as bytes: NaN equals NaN, and -0 is not 0."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def comparison_copy(leaf: Any) -> Any:
    """The leaf for later comparison: a JAX array itself, else a copy."""
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf, dtype=canonical_dtype(leaf.dtype), order="C")
