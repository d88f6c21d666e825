"""A function of arrays over all workers: scatter, compute, reduce.

Stooke and Abbeel 2017 (Synkhronos) ran Theano functions so: inputs are scattered or broadcast, outputs reduced. Here
JAX traces the user's function once for each set of input shapes (`Function.program`). Workers that do not run the
script get the StableHLO of that program, so closures, lambdas and notebook cells work. Only a function that calls back
into Python is sent itself, by cloudpickle (docs/decisions.md, 17). A broadcast argument that has not changed is not
sent again.
"""

import functools
import inspect
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np

from jaxmpi.allreduce.api import check_strategy
from jaxmpi.comm.job import broadcast
from jaxmpi.comm.mpi import refusing_world
from jaxmpi.comm.shared_compile import stablehlo
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import check_op, check_rows, key_leaves, packed, unpacked
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import lifecycle, profiling
from jaxmpi.functions.commands import perform
from jaxmpi.functions.groups import WorkerGroup
from jaxmpi.functions.reductions import Output, Outputs, Scatter, check_reducible, from_word, mean, scatter
from jaxmpi.functions.rows import check_choices, check_lengths, choices_by_worker, digest_rows, shard_bounds
from jaxmpi.functions.shared_array import is_shared
from jaxmpi.functions.variable import Variable, check_numbers, rows_of
from jaxmpi.functions.worker import Command, Input, Leaf, WorkerProgram

Marker = Any  # scatter, scatter(variable), broadcast, or a variable
CALL_KEYWORDS = ("batch", "batch_local", "slices", "output_subset")  # of every call
CLOSED = "belongs to workers that were closed; make it anew"
_numbers = itertools.count()  # functions in the order in which they are made, the same on all ranks


class Form(NamedTuple):
    """One way to call a function.

    The form and the leaves' shapes and dtypes together determine the program.
    """

    structure: Any  # tree structure of all arguments, in a tuple
    keywords: tuple[str, ...]  # names of the last arguments, which are passed by name
    computed: tuple[int, ...]  # numbers of the outputs that are computed, then of all updates

    def call(self, function: Callable, flat: Sequence[Any]) -> PyTree:
        """The user's function of its leaves."""
        args = unpacked(jax.tree.unflatten(self.structure, flat))
        first = len(args) - len(self.keywords)
        return function(*args[:first], **dict(zip(self.keywords, args[first:], strict=True)))


class Function:
    """A function that runs `f`, its `__wrapped__`, over all workers.

    It returns y = op_r f(x_r, ...), with x_r the r-th share of the examples.

    Args:
        f: a JAX function of arrays and trees of them; it must give for shares what goes together by its outputs' ops.
        inputs: for every argument of f, or one for all: `scatter` (rows divided, as evenly as can be), `broadcast`
            (whole), a variable (each worker's own). `scatter(variable)` is also possible (its rows, for `slices` and
            `batch_local`). A dict names parameters of f, which it then gets by name; those that it leaves out keep
            their defaults.
        outputs: for every output, or one for the only one: `mean` (weighted by examples), `sum`, `prod`, `min`, `max`,
            `gather` (rows in order), `local` (left on the workers, as a variable). `mean(variable)` keeps the result
            on all workers instead of returning it; `local(mean)` says how pieces combine. Words do as well: "sum".
            A tree of them, such as a dict, reduces an output leaf by leaf: each stands for all that is below its place.
        updates: variables, or pairs (variable, op), that take what f returns after its outputs, each worker for itself;
            op is over pieces: `mean` (default), `sum`, `prod`, `min`, `max`, `gather`; `add` adds to the old value.
            One may stand alone; with outputs=() it is what f returns.
        strategy: of sums and means, as of `jaxmpi.exchange`; default: `shm` on one host's CPUs, `ar` over GPUs of one
            process, else `asa32`.

    Communicates: at its calls; see `Function.__call__`. Raises: UsageError: no such input, output or update.
    """

    def __init__(
        self,
        f: Callable,
        inputs: Mapping[str, Marker] | Sequence[Marker] | Marker = scatter,
        outputs: PyTree = mean,
        updates: Any = (),
        strategy: str | None = None,
    ) -> None:
        if not callable(f):
            raise UsageError(f"function: got {f!r}; expected a function")
        self.__wrapped__ = f
        self.name = getattr(f, "__name__", "function")
        if isinstance(inputs, Mapping):
            inputs = _sort_by_parameter(inputs, f, self.name)
        self.keywords = tuple(inputs) if isinstance(inputs, Mapping) else ()  # all arguments are passed by these names
        is_one_word = not isinstance(inputs, (Mapping, tuple, list))
        every: Any = inputs.values() if isinstance(inputs, Mapping) else [inputs] if is_one_word else inputs
        self.markers: list[Marker] = [*every]
        for marker in self.markers:
            if marker is not broadcast and not isinstance(marker, (Scatter, Variable)):
                raise UsageError(f"inputs: got {marker!r}; expected scatter, broadcast, a variable, scatter(variable)")
        self.takes_any = is_one_word and takes_argument(inputs)  # one word for any number of arguments
        self.signature = _call_signature(f, self.markers, self.keywords)
        self.outputs = Outputs(outputs)
        is_pair = isinstance(updates, (tuple, list)) and len(updates) == 2 and isinstance(updates[1], (Output, str))
        is_one_update = is_pair or not isinstance(updates, (tuple, list))
        self.updates = [_parse_update(update) for update in ([updates] if is_one_update else updates)]
        self.reductions = [*self.outputs.flat, *self.updates]
        # The function returns its one output or update in no tuple.
        self.is_bare = (is_one_update and not self.outputs.trees) or (self.outputs.is_single and not self.updates)
        self.targets = [x.into for x in self.reductions if x.into is not None]
        if len({id(variable) for variable in self.targets}) < len(self.targets):
            raise UsageError(f"{self.name}: one variable is to take two results; expected a variable for each")
        self.strategy = strategy
        if strategy is not None:
            check_strategy(strategy)
        self.group: WorkerGroup | None = None
        self.number = next(_numbers)
        self.forms: list[Form] = []  # so far
        self.programs: dict[tuple[int, tuple], WorkerProgram] = {}
        self.jitted: dict[int, Any] = {}
        self.sent: dict[int, Any] = {}  # broadcast inputs as the workers have them, by number

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
        a short report of each worker; then each output as it is reduced.

        Raises:
            UsageError: arguments, rows or outputs that cannot be. WorkerFailed (a TrainingError): a worker failed; its
                traceback is in the message, and the next call works.
        """
        if self.group is None:
            self.group = lifecycle.current_group()
            self.group.check_usable()
            self.group.functions[self.number], self.group.is_used = self, True
        group = self.group
        local = {place: Variable(group, None) for place, output in enumerate(self.outputs.flat) if output.stays}
        chosen = self.outputs.all

        def prepare() -> Command:
            nonlocal chosen
            profiling.identify(self.number)
            chosen = self.outputs.choose(output_subset)
            numbers = {place: variable.number for place, variable in local.items() if place in chosen.computed}
            return self._command(group, args, named, (batch, batch_local, slices), chosen.computed, numbers)

        try:
            structures, leaves = perform(group, self.name, prepare)
        except BaseException:
            self.sent = {}
            raise
        results: dict[int, Any] = local.copy()
        remaining = iter(leaves)
        for place, structure in zip(chosen.computed, structures, strict=False):
            output = self.outputs.flat[place]
            if output.stays:
                local[place].structure = structure
            elif output.into is not None:
                output.into.structure = structure
            else:
                mine = itertools.islice(remaining, structure.num_leaves)
                results[place] = unpacked(jax.tree.unflatten(structure, mine))
        return chosen.join(results)

    # ------------------------------------------------------------ arguments

    def _command(
        self,
        group: WorkerGroup,
        args: Sequence[PyTree],
        named: Mapping[str, PyTree],
        how: tuple[Any, Any, Any],
        computed: tuple[int, ...],
        numbers: dict[int, int],
    ) -> Command:
        batch, batch_local, slices = how
        for variable in self.targets:
            if variable.group is not group:
                raise UsageError(f"{self.name}: a variable that takes a result {CLOSED}")
        inputs, structure, keywords = self._inputs(group, args, named)
        updates = range(len(self.outputs.flat), len(self.reductions))
        form = Form(structure, keywords, (*computed, *updates))
        if form not in self.forms:
            self.forms.append(form)
        lengths = {x.name: len(x.value) for x in inputs if x.kind == "rows"}
        is_resident = any(x.kind == "resident" for x in inputs)
        check_choices(batch, batch_local, slices, bool(lengths), is_resident)
        rows = check_lengths(lengths, group.size, batch) if lengths else None
        edges = shard_bounds(rows.count, group.size) if rows else []
        choices = choices_by_worker(batch_local, group.size) if is_resident else [None] * group.size
        fresh: dict[int, Any] = {}  # broadcast inputs that workers do not have yet, by their number
        for x in inputs:
            if x.kind == "broadcast" and not (x.number in self.sent and _is_same(self.sent[x.number], x.value)):
                # A JAX array cannot change; of others a copy is compared later.
                fresh[x.number] = x.value if isinstance(x.value, jax.Array) else np.array(x.value, order="C")
        self.sent |= fresh

        def inputs_for(rank: int) -> list[Input]:
            found = []
            for x in inputs:
                if x.kind == "rows" and rows is not None:
                    x = x.choose(rows.shard(edges[rank], edges[rank + 1]), group.is_local(rank))
                elif x.kind == "resident":
                    x = x._replace(rows=choices[rank])
                elif x.kind == "broadcast":
                    value = fresh.get(x.number)
                    is_sent = value is not None and not group.is_local(rank)
                    x = x._replace(value=np.asarray(value) if is_sent else value)
                found.append(x)
            return found

        fields = {
            "f": self.number,
            "n": rows.count if rows else None,
            "slices": int(slices),
            "strategy": self.strategy or group.default_strategy,
            "locals": numbers,
        }
        agreed = {"name": self.name, **fields, "outputs": computed, "keywords": keywords}
        if group.is_the_world:
            agreed |= digest_rows(rows, choices)
        # Numbers of forms are this process's own: ranks that run the script may not all have come to the same.
        fields |= {"form": self.forms.index(form), "agreed": json.dumps(agreed)}
        return Command("call", self.name, fields, inputs_for)

    def _inputs(
        self, group: WorkerGroup, args: Sequence[PyTree], named: Mapping[str, PyTree]
    ) -> tuple[list[Input], Any, tuple[str, ...]]:
        """The leaves of all inputs, the arguments' structure, and the names of the last ones."""
        markers, keywords = self.markers, self.keywords
        if self.takes_any:
            keywords = tuple(sorted(named))
            args = [*args, *(named[key] for key in keywords)]
            markers = markers * len(args)
        else:
            try:
                args = self.signature.bind(*args, **named).args
            except TypeError as error:
                expected = f"one for every scatter and broadcast: {', '.join(self.signature.parameters)}"
                raise UsageError(f"{self.name}: {error}; expected {expected}") from error
        inputs: list[Input] = []
        structures, left = [], iter(args)
        names = [*range(len(markers) - len(keywords)), *map(repr, keywords)]
        for place, (marker, name) in enumerate(zip(markers, names, strict=True)):
            if takes_argument(marker):
                tree = packed(next(left))
                structures.append(jax.tree.structure(tree))
                self._add_argument(group, inputs, marker, tree, f"argument {name}")
                continue
            variable = marker.variable if isinstance(marker, Scatter) else marker
            if variable.group is not group:
                raise UsageError(f"input {place}: the variable {CLOSED}")
            structures.append(variable.structure)
            kind = "resident" if isinstance(marker, Scatter) else "variable"
            for i, (leaf, is_key) in enumerate(zip(variable.leaves, key_leaves(variable.structure), strict=True)):
                if is_key and kind == "resident":
                    check_rows(leaf.shape, f"input {place}")
                inputs.append(Input(kind, f"input {place}", number=variable.number, index=i))
        return inputs, jax.tree_util.treedef_tuple(structures), keywords

    def _add_argument(self, group: WorkerGroup, inputs: list[Input], marker: Marker, tree: PyTree, name: str) -> None:
        leaves = named_leaves(tree)
        if marker is not broadcast and not leaves:  # else nobody writes down what may be big
            raise UsageError(f"{name}: got {tree!r:.80}; scatter needs arrays, rows of examples")
        for (path, leaf), is_key in zip(leaves, key_leaves(jax.tree.structure(tree)), strict=True):
            where = f"{name}{f' leaf {path!r}' if path else ''}"
            if marker is not broadcast:
                inputs.append(rows_of(group, where, leaf, is_key))
            elif is_shared(leaf) and group.is_serial and group.is_on_one_host:
                inputs.append(Input("whole", where, leaf))
            else:
                value = in_jax_dtype(where, leaf.array if is_shared(leaf) else check_numbers(where, leaf))
                inputs.append(Input("broadcast", where, value, number=len(inputs)))

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
        computed = self.forms[form].computed

        def compute(*flat: jax.Array) -> list[PyTree]:
            parts = me._all_outputs(form, flat)
            return [parts[i] for i in computed]

        jitted = self.jitted.setdefault(form, jax.jit(compute))
        parts = jitted.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).out_info
        leaves, agreed = [], {}
        for number, part in zip(computed, parts, strict=True):
            leaf, where = self._destination(number)
            are_keys = key_leaves(jax.tree.structure(part))
            for index, (aval, is_key) in enumerate(zip(jax.tree.leaves(part), are_keys, strict=True)):
                leaves.append(leaf._replace(index=index))
                if is_key and (leaf.place, leaf.op) != ("update", "mean"):  # its default
                    check_op(leaf.op, aval.shape, where)
                is_reduced = leaf.place in ("result", "into")  # elsewhere only pieces combine, if there are several
                if is_reduced:
                    check_reducible(leaf.op, aval.dtype, aval.shape, where)
                shape = list(aval.shape[leaf.op == "gather" :])
                agreed[f"{leaf.name} leaf {index}"] = f"{leaf.op} of {aval.dtype}{shape}" if is_reduced else ""
        structures = tuple(jax.tree.structure(part) for part in parts)
        return WorkerProgram(
            lambda *flat: jax.tree.leaves(jitted(*flat)), tuple(leaves), json.dumps(agreed), structures
        )

    def _destination(self, number: int) -> tuple[Leaf, str]:
        """What becomes of an output or update, and its name for messages."""
        reduction, first_update = self.reductions[number], len(self.outputs.flat)
        is_update = number >= first_update
        name = str(len(self.outputs.trees) + number - first_update) if is_update else self.outputs.names[number]
        where = f"{self.name}: output {name}"
        if reduction.into is not None:
            place, target = "update" if is_update else "into", reduction.into.number
            return Leaf(reduction.op, place, target, name=f"{place} {target}"), where
        place = "local" if reduction.stays else "result"
        return Leaf(reduction.op, place, number, name=f"{place} {name}"), where

    def _all_outputs(self, form: int, flat: Sequence[jax.Array]) -> list[PyTree]:
        """Call the user's function; return all outputs, then all updates."""
        with self._refuse_exchange():
            result = self.forms[form].call(self.__wrapped__, flat)
        first = len(self.outputs.trees)
        parts = (result,) if self.is_bare else result
        if not isinstance(parts, (tuple, list)) or len(parts) != first + len(self.updates):
            got = f"a tuple of {len(parts)}" if isinstance(parts, (tuple, list)) else type(result).__name__
            expected = f"a tuple of {first + len(self.updates)}: {first} outputs, then {len(self.updates)} updates"
            raise UsageError(f"{self.name} returned {got}; expected {expected}")
        parts = packed(list(parts))
        for update, part in zip(self.updates, parts[first:], strict=True):
            if (got := jax.tree.structure(part)) != update.into.structure:
                raise UsageError(f"{self.name}: an update is a tree {got}; its variable is {update.into.structure}")
        return [*self.outputs.split(self.name, parts[:first]), *parts[first:]]

    def _refuse_exchange(self) -> AbstractContextManager[None]:
        """Refuse an exchange in the function that is not over its workers."""
        if self.group is None or self.group.size == 1 or self.group.is_the_world:
            return nullcontext()
        return refusing_world(
            f"{self.name}: exchange inside a function is over its workers only where every rank runs the script; "
            "return what is to be exchanged, with mean or sum as its output"
        )

    def serialize_program(self, form: int, shapes: tuple) -> tuple[str, tuple[Leaf, ...], str, bytes, Any]:
        """The function's name, and what `commands.program` makes of it in a process without the function."""
        program = self.program(form, shapes)
        avals = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        body, pickled = stablehlo(jax.jit(program.run), avals), None
        if not body:
            parts = jax.eval_shape(lambda *flat: self._all_outputs(form, flat), *avals)
            numbers = jax.tree.unflatten(jax.tree.structure(parts), range(len(jax.tree.leaves(parts))))
            chosen = jax.tree.leaves([numbers[i] for i in self.forms[form].computed])
            pickled = self._pickled, self.forms[form], chosen
        return self.name, program.leaves, program.agreed, body, pickled

    @functools.cached_property
    def _pickled(self) -> bytes:
        try:
            return cloudpickle.dumps(self.__wrapped__)
        except Exception as error:  # of many kinds
            raise UsageError(
                f"{self.name} calls back into Python, so that it is sent itself and not its program, and cloudpickle "
                f"cannot take it: {error}; leave out what it refers to, or run the script on every rank"
            ) from error


def takes_argument(marker: Marker) -> bool:
    """Return True if the input comes with the call."""
    return marker is broadcast or (isinstance(marker, Scatter) and marker.variable is None)


def _sort_by_parameter(inputs: Mapping[str, Any], f: Callable, name: str) -> dict[str, Any]:
    """Inputs by name, in the order of the function's parameters."""
    known = inspect.signature(f).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    by_name = [key for key, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in inputs:
        if key in CALL_KEYWORDS:
            raise UsageError(f"inputs: got {key!r}, a keyword of every call; expected another parameter name")
        if not takes_any and key not in by_name:
            raise UsageError(f"inputs: got {key!r}; expected parameters of {name}: {', '.join(by_name)}")
    order = [*known, *inputs]
    return dict(sorted(inputs.items(), key=lambda item: order.index(item[0])))


def _call_signature(f: Callable, markers: Sequence[Marker], keywords: Sequence[str]) -> inspect.Signature:
    """The parameters of a call: those of the function whose inputs come with it."""
    names = list(keywords)
    if not keywords:
        try:
            known = inspect.signature(f).parameters.items()
            names = [key for key, p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        except (TypeError, ValueError):  # Python does not know them
            names = []
    names += [f"argument_{place}" for place in range(len(names), len(markers))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    free = [name for name, marker in zip(names, markers, strict=False) if takes_argument(marker)]
    return inspect.Signature([inspect.Parameter(name, kind) for name in free])


def _parse_update(update: Any) -> Output:
    """`(variable, op)` as an Output; a variable alone takes the mean over pieces."""
    variable, op = update if isinstance(update, (tuple, list)) and len(update) == 2 else (update, "mean")
    op = from_word(op)
    is_op = isinstance(op, Output) and bool(op.op) and not op.stays and op.into is None
    if not isinstance(variable, Variable) or not is_op:
        raise UsageError(
            f"updates: got {update!r}; expected a jaxmpi.variable, or a pair of it and mean, sum, add, ..."
        )
    return Output(op.op, stays=True, into=variable)


def _is_same(before: Any, now: Any) -> bool:
    """Return True if workers have this broadcast leaf: the same JAX array, or the same bytes."""
    if isinstance(now, jax.Array) or isinstance(before, jax.Array):
        return before is now
    if (before.shape, before.dtype) != (now.shape, now.dtype):
        return False
    old, new = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (before, now))
    return np.array_equal(old, new)  # as bytes NaN equals NaN, and -0 is not 0
