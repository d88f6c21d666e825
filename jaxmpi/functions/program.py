"""A user's function as programs over flat leaves, one for each set of input shapes.

The process that runs the script traces the function. Workers that do not run the script get the StableHLO of that
program, so closures, lambdas and notebook cells work there, under the settings that the script had. Only a function
that calls back into Python is sent itself, by cloudpickle, and traced anew (docs/decisions.md, 17).
"""

import functools
import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.export

from jaxmpi.comm.mpi import refusing_world
from jaxmpi.comm.shared_compile import stablehlo
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.random_keys import check_op, key_leaves, packed, unpacked
from jaxmpi.functions import profiling
from jaxmpi.functions.reductions import Outputs, check_reducible

ProgramKey = tuple[int, int, tuple]  # numbers of function and form; shape and dtype of each leaf


class Leaf(NamedTuple):
    """One array that a program returns, and what becomes of it."""

    op: str  # a row of OPS, or empty
    place: str  # result | into | local | update
    target: int  # number of the output, or of the variable
    index: int = 0  # among the leaves of the target
    name: str = ""  # name of the target, for messages


class WorkerProgram(NamedTuple):
    """A user's function for arguments of certain shapes, over flat leaves."""

    run: Callable[..., list[jax.Array]]
    leaves: tuple[Leaf, ...]
    agreed: str  # dtypes and shapes that must be the same on all workers, as JSON
    structures: tuple[Any, ...] = ()  # tree structures of the outputs, then the updates, if the function is in Python


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


class SentProgram(NamedTuple):
    """A program as other processes get it."""

    leaves: tuple[Leaf, ...]
    agreed: str
    stablehlo: bytes  # empty if the function calls back into Python
    pickled: tuple[bytes, Form, list[int]] | None = None  # then: the function, its form, the numbers of its results

    def load(self, functions: dict[int, Callable], number: int) -> WorkerProgram:
        """The program in this process; `functions` has those that came pickled, by number."""
        if self.pickled is None:
            run = jax.jit(jax.export.deserialize(bytearray(self.stablehlo)).call)
            return WorkerProgram(run, self.leaves, self.agreed)
        text, form, chosen = self.pickled
        if number not in functions:  # unpickled once, so that programs for other shapes share its state
            functions[number] = cloudpickle.loads(text)

        def compute_chosen(*flat: jax.Array) -> list[jax.Array]:
            results = jax.tree.leaves(packed(form.call(functions[number], flat)))
            return [results[i] for i in chosen]

        return WorkerProgram(jax.jit(compute_chosen), self.leaves, self.agreed)


class TracedFunction:
    """The user's function in the process that has it in Python, traced for each form and set of shapes."""

    def __init__(self, name: str, function: Callable, outputs: Outputs) -> None:
        self.name, self.function, self.outputs = name, function, outputs
        self.refuses_exchange = False  # an exchange inside would not be over the function's workers
        self.forms: list[Form] = []  # so far
        self._programs: dict[tuple[int, tuple], WorkerProgram] = {}
        self._jitted: dict[int, Any] = {}

    def number_of(self, form: Form) -> int:
        """The number of a form in this process; ranks that run the script may number forms differently."""
        if form not in self.forms:
            self.forms.append(form)
        return self.forms.index(form)

    def program(self, form: int, shapes: tuple) -> WorkerProgram:
        """The function over flat leaves, compiled when it first runs.

        `shapes` holds (shape, dtype) of each leaf.
        """
        if (form, shapes) not in self._programs:
            with profiling.part("compile"):
                self._programs[form, shapes] = self._trace(form, shapes)
        return self._programs[form, shapes]

    def _trace(self, form: int, shapes: tuple) -> WorkerProgram:
        # A weak reference: without the cycle, workers let go of what the function left there once the user drops it.
        me = weakref.proxy(self)
        computed = self.forms[form].computed

        def compute(*flat: jax.Array) -> list[PyTree]:
            parts = me._all_outputs(form, flat)
            return [parts[i] for i in computed]

        jitted = self._jitted.setdefault(form, jax.jit(compute))
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
        reduction, name = self.outputs.flat[number], self.outputs.names[number]
        where = f"{self.name}: output {name}"
        if reduction.into is not None:
            place, target = "update" if reduction.stays else "into", reduction.into.number
            return Leaf(reduction.op, place, target, name=f"{place} {target}"), where
        place = "local" if reduction.stays else "result"
        return Leaf(reduction.op, place, number, name=f"{place} {name}"), where

    def _all_outputs(self, form: int, flat: Sequence[jax.Array]) -> list[PyTree]:
        """Call the user's function; return a part for each reduction."""
        text = (
            f"{self.name}: exchange inside a function is over its workers only where every rank runs the script; "
            "return what is to be exchanged, with mean or sum as its output"
        )
        with refusing_world(text) if self.refuses_exchange else nullcontext():
            result = self.forms[form].call(self.function, flat)
        return self.outputs.split(self.name, packed(result))

    def serialize(self, form: int, shapes: tuple) -> SentProgram:
        """A program for processes without the function."""
        program = self.program(form, shapes)
        avals = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        if body := stablehlo(jax.jit(program.run), avals):
            return SentProgram(program.leaves, program.agreed, body)
        parts = jax.eval_shape(lambda *flat: self._all_outputs(form, flat), *avals)
        numbers = jax.tree.unflatten(jax.tree.structure(parts), range(len(jax.tree.leaves(parts))))
        chosen = jax.tree.leaves([numbers[i] for i in self.forms[form].computed])
        return SentProgram(program.leaves, program.agreed, b"", (self._pickled, self.forms[form], chosen))

    @functools.cached_property
    def _pickled(self) -> bytes:
        try:
            return cloudpickle.dumps(self.function)
        # Objects in the closure raise what they like when they are pickled; all of it means that they cannot be sent.
        except Exception as error:
            raise UsageError(
                f"{self.name} calls back into Python, so that it is sent itself and not its program, and cloudpickle "
                f"cannot take it: {error}; leave out what it refers to, or run the script on every rank"
            ) from error
