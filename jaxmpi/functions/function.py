"""A function of arrays over all workers: scatter, compute, reduce.

Stooke and Abbeel 2017 (Synkhronos) ran Theano functions so: inputs are scattered or broadcast, outputs reduced. Here
JAX traces the user's function once for each set of input shapes (`program`). A broadcast argument that has not changed
is not sent again.
"""

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.allreduce.api import check_strategy
from jaxmpi.comm.job import broadcast
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.random_keys import check_rows, key_leaves, packed, unpacked
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import lifecycle
from jaxmpi.functions.commands import perform
from jaxmpi.functions.groups import WorkerGroup, next_number
from jaxmpi.functions.program import Form, TracedFunction
from jaxmpi.functions.reductions import Outputs, Scatter, mean, scatter
from jaxmpi.functions.rows import check_choices, check_lengths, choices_by_worker, digest_rows, shard_bounds
from jaxmpi.functions.shared_array import is_shared
from jaxmpi.functions.variable import Variable, check_numbers, rows_of
from jaxmpi.functions.worker import Command, Input

Marker = Any  # scatter, scatter(variable), broadcast, or a variable
CALL_KEYWORDS = ("batch", "batch_local", "slices", "output_subset")  # of every call
CLOSED = "belongs to workers that were closed; make it anew"


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
        self.outputs = Outputs(outputs, updates)
        self.targets = [x.into for x in self.outputs.flat if x.into is not None]
        if len({id(variable) for variable in self.targets}) < len(self.targets):
            raise UsageError(f"{self.name}: one variable is to take two results; expected a variable for each")
        self.strategy = strategy
        if strategy is not None:
            check_strategy(strategy)
        self.group: WorkerGroup | None = None
        self.number = next_number()
        self.traced = TracedFunction(self.name, f, self.outputs)
        self._copies: dict[int, Any] = {}  # broadcast inputs as the workers have them, by number
        self.described: dict[str, tuple[Any, list[str], list[bool]]] = {}  # of arguments: structure, names, keys

    def __del__(self) -> None:
        if (group := getattr(self, "group", None)) is not None:
            group.dropped.append(self.number)

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
        group = self.group = self.group or self._bind()
        outputs = self.outputs.flat
        local = {i: Variable(group, None) for i, output in enumerate(outputs) if output.stays and output.into is None}
        chosen = self.outputs.all

        def prepare() -> Command:
            nonlocal chosen
            chosen = self.outputs.choose(output_subset)
            numbers = {place: variable.number for place, variable in local.items() if place in chosen.computed}
            return self._command(group, args, named, (batch, batch_local, slices), chosen.computed, numbers)

        try:
            structures, leaves = perform(group, self.name, prepare, self.number)
        except BaseException:  # Ctrl-C too: which workers have the broadcast inputs is no longer known
            self._copies = {}
            raise
        results: dict[int, Any] = local.copy()
        remaining = iter(leaves)
        for place, structure in zip(chosen.computed, structures, strict=True):
            variable = outputs[place].into or local.get(place)
            if variable is not None:
                variable.structure = structure
            else:
                results[place] = unpacked(
                    jax.tree.unflatten(structure, itertools.islice(remaining, structure.num_leaves))
                )
        return chosen.join(results)

    def _bind(self) -> WorkerGroup:
        """Belong to the present workers from now on."""
        group = lifecycle.current_group()
        group.check_usable()
        self.traced.refuses_exchange = group.size > 1 and not group.is_the_world
        group.functions[self.number], group.is_used = self.traced, True
        return group

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
        form = self.traced.number_of(Form(structure, keywords, computed))
        lengths = {x.name: len(x.value) for x in inputs if x.kind == "rows"}
        is_resident = any(x.kind == "resident" for x in inputs)
        check_choices(batch, batch_local, slices, bool(lengths), is_resident)
        rows = check_lengths(lengths, group.size, batch) if lengths else None
        edges = shard_bounds(len(rows), group.size) if rows is not None else []
        choices = choices_by_worker(batch_local, group.size) if is_resident else [None] * group.size
        # What changed is found here and not on the workers, which would need the bytes to compare them.
        fresh: dict[int, Any] = {}  # broadcast inputs that workers do not have yet, by their number
        for x in inputs:
            if x.kind == "broadcast" and not (x.number in self._copies and _is_same(self._copies[x.number], x.value)):
                # A JAX array cannot change; of others a copy is compared later.
                fresh[x.number] = x.value if isinstance(x.value, jax.Array) else np.array(x.value, order="C")
        self._copies |= fresh

        def inputs_for(rank: int) -> list[Input]:
            worker_inputs = []
            for x in inputs:
                if x.kind == "rows" and rows is not None:
                    x = x.choose(rows[edges[rank] : edges[rank + 1]], group.is_local(rank))
                elif x.kind == "resident":
                    x = x._replace(rows=choices[rank])
                elif x.kind == "broadcast":
                    value = fresh.get(x.number)
                    is_sent = value is not None and not group.is_local(rank)
                    x = x._replace(value=np.asarray(value) if is_sent else value)
                worker_inputs.append(x)
            return worker_inputs

        fields = {
            "f": self.number,
            "n": None if rows is None else len(rows),
            "slices": int(slices),
            "strategy": self.strategy or group.default_strategy,
            "locals": numbers,
        }
        agreed = {"name": self.name, **fields, "outputs": computed, "keywords": keywords}
        if group.is_the_world:
            agreed |= digest_rows(rows, choices)
        fields |= {"form": form, "agreed": json.dumps(agreed)}
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
        structures, remaining_args = [], iter(args)
        names = [*range(len(markers) - len(keywords)), *map(repr, keywords)]
        for place, (marker, name) in enumerate(zip(markers, names, strict=True)):
            if takes_argument(marker):
                tree = packed(next(remaining_args))
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
        leaves, structure = jax.tree.flatten(tree)
        if marker is not broadcast and not leaves:  # else nobody writes down what may be big
            raise UsageError(f"{name}: got {tree!r:.80}; scatter needs arrays, rows of examples")
        # Kept from the call before: to name nine leaves takes 0.03 ms, and only errors need the names.
        if name not in self.described or self.described[name][0] != structure:
            self.described[name] = structure, _leaf_names(structure), key_leaves(structure)
        _, suffixes, are_keys = self.described[name]
        for suffix, leaf, is_key in zip(suffixes, leaves, are_keys, strict=True):
            where = name + suffix
            if marker is not broadcast:
                inputs.append(rows_of(group, where, leaf, is_key))
            elif is_shared(leaf) and group.is_serial and group.is_on_one_host:
                inputs.append(Input("whole", where, leaf))
            else:
                value = in_jax_dtype(where, leaf.array if is_shared(leaf) else check_numbers(where, leaf))
                inputs.append(Input("broadcast", where, value, number=len(inputs)))


def _leaf_names(structure: Any) -> list[str]:
    """What errors append to an argument's name, by leaf."""
    named = named_leaves(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return [f" leaf {path!r}" if path else "" for path, _ in named]


def takes_argument(marker: Marker) -> bool:
    """Return True if the input comes with the call."""
    return marker is broadcast or (isinstance(marker, Scatter) and marker.variable is None)


def _sort_by_parameter(inputs: Mapping[str, Any], f: Callable, name: str) -> dict[str, Any]:
    """Inputs by name, in the order of the function's parameters."""
    parameters = inspect.signature(f).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_name = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in inputs:
        if key in CALL_KEYWORDS:
            raise UsageError(f"inputs: got {key!r}, a keyword of every call; expected another parameter name")
        if not takes_any and key not in by_name:
            raise UsageError(f"inputs: got {key!r}; expected parameters of {name}: {', '.join(by_name)}")
    order = [*parameters, *inputs]
    return dict(sorted(inputs.items(), key=lambda item: order.index(item[0])))


def _call_signature(f: Callable, markers: Sequence[Marker], keywords: Sequence[str]) -> inspect.Signature:
    """The parameters of a call: those of the function whose inputs come with it."""
    names = list(keywords)
    if not keywords:
        try:
            parameters = inspect.signature(f).parameters.items()
            names = [key for key, p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        except (TypeError, ValueError):  # Python does not know them
            names = []
    names += [f"argument_{place}" for place in range(len(names), len(markers))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    free = [name for name, marker in zip(names, markers, strict=False) if takes_argument(marker)]
    return inspect.Signature([inspect.Parameter(name, kind) for name in free])


def _is_same(before: Any, now: Any) -> bool:
    """Return True if workers have this broadcast leaf: the same JAX array, or the same bytes."""
    if isinstance(now, jax.Array) or isinstance(before, jax.Array):
        return before is now
    if (before.shape, before.dtype) != (now.shape, now.dtype):
        return False
    old, new = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (before, now))
    return np.array_equal(old, new)  # as bytes NaN equals NaN, and -0 is not 0
