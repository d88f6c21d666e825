"""Cuts of params that an optimizer allows, by what updates depend on.

Optax does not say whether an optimizer treats entries, tensors, or all params together. Running it on a few numbers
proves nothing. It may clip from step 1,000 on, or by a norm under a mask. It may go by how far params have moved. So
nothing runs. JAX traces `init` and `update`, and each value of their programs gets an `Origin`: the tensors on whose
numbers it depends, and whether its entry i depends on their entries i alone. The state that an update leaves
goes into the next update, until no state changes its origin. Branches count whether they are taken or not.

Origins do not show what Python computes before the program, as `1 / leaf.size`, `1 / len(leaves)` or the place of a
tensor among others. So expressions are compared: how each update is computed, by the names of what it is made of. For
slices it must be as for whole tensors, but for shapes; for whole tensors dealt to workers, as if no others were there.
Among the programs compared are those that these workers will run.

The origin of a message, a callback, or a reference that is written to is not known. So an update that depends on one
is refused. A loop counts as one equation of all that goes into it, and so does a concatenation: what takes the whole
tree through one is refused, too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmpi.core.deals import deal
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.slices import shape_of_slice

T = TypeVar("T")
ScheduleFreeState = optax.contrib.ScheduleFreeState
WORKERS = (2, 3, 4, 8)  # among whom tensors are cut to compare programs, beside those that there are
MIXED = (
    "sharded: {what} depends on other tensors with this optimizer (as with clipping by a global norm), or on how many "
    "there are; leave it unsharded, or give clip_norm to jaxmpi.sharded in place of a clipping in the chain"
)
OUTSIDE = (
    "sharded: {what} is made by this optimizer of more than its equations show (a message to other workers, a callback "
    "into Python, a reference that is written to); leave it unsharded, or let it take numbers and give numbers"
)
UNTRACED = (
    "sharded: this optimizer fails when it is traced for shares of the params ({error}), so it is not known whether "
    "its updates can be cut; leave it unsharded, or let it take tensors of any size, and no arrays of the model's "
    "shapes from elsewhere"
)
CHANGES = (
    "sharded: an update of this optimizer gives other leaves, shapes or dtypes than params have, or than its init "
    "gives its state (as with optax.monitor); leave it unsharded, or give its state all leaves at the start"
)
NO_TENSORS = (
    "sharded: this optimizer fails for a worker without tensors ({error}), and of {workers} workers some have none of "
    "{tensors}; take fewer workers, or leave it unsharded"
)
NO_HASH = (
    "sharded: got an optimizer, or a setting of it, without a hash ({error}); expected an optax.GradientTransformation "
    "of functions, and settings that are numbers or functions"
)


def cut_for(tx: Any, params: PyTree, workers: int, cost: Callable[[Sequence[int]], float] = math.prod) -> str:
    """Choose an optimizer's cut: `entries` if updates stay the same, else `leaves`.

    Args:
        params: arrays or their shapes.
        workers: who update shares.
        cost: as of `deal`, of whole tensors.

    Raises:
        UsageError: neither; the tensor whose update differs.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    names, owners = [name for name, _ in named_leaves(like)], deal(like, workers, cost).owners
    try:
        whole = Traced.of(tx, like)
        check(whole.keeps_shapes, CHANGES)
        updates = whole.updates()
        for i, name in enumerate(names):
            others = updates[i].tensors - {i}
            why = OUTSIDE if UNKNOWN.tensors & others else MIXED
            check(not others, why.format(what=f"the update of {name}"))
        if all(origin.is_entrywise for origin in updates) and not goes_by_shape(whole, tx, like, workers):
            return "entries"
        check_hash(tx)
        check(whole.keeps_dtypes, CHANGES)
        differs = by_others(whole, tx, like, owners, workers)
        check(not differs, MIXED.format(what=differs))
    except UsageError:
        raise
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        raise UsageError(UNTRACED.format(error=f"{type(error).__name__}: {error}")) from error
    return "leaves"


def check_hash(tx: Any) -> None:
    """Refuse an optimizer without a hash, by which results are cached."""
    try:
        hash(tx)
    except TypeError as error:
        raise UsageError(NO_HASH.format(error=error)) from error


def schedule_free_parts(state: PyTree) -> list[ScheduleFreeState]:
    """States of schedule-free optimizers, whose averages are of whole params."""
    return [part for part in jax.tree.leaves(state, is_leaf=is_schedule_free) if is_schedule_free(part)]


def is_schedule_free(part: PyTree) -> bool:
    """Return True for the state of a schedule-free optimizer."""
    return isinstance(part, ScheduleFreeState)


# ---------------------------------------------------------------- what Python computes


def goes_by_shape(whole: "Traced", tx: Any, like: PyTree, workers: int) -> bool:
    """Return True if an optimizer treats slices differently from whole tensors.

    Its programs for whole tensors are compared with those for slices of these workers; of two, which have the most
    rows; of three, four and eight; and of so many that a slice has one entry.

    Args:
        whole: its programs for whole tensors.
        like: shapes of params.
    """
    largest, facts = max((leaf.size for leaf in jax.tree.leaves(like)), default=1), whole.facts()
    for count in dict.fromkeys((max(workers, 2), *WORKERS, max(largest, 2))):
        try:
            slices = Traced.of(tx, jax.tree.map(lambda x, w=count: like_slice(x, w), like))
        except Exception:  # it takes tensors of these shapes alone, perhaps by whole ones
            return True
        rows = dict(named_leaves(slices.state))
        for name, leaf in named_leaves(whole.state):
            # A checkpoint takes every array for a slice, so only a single number, as a count, may be none.
            able = [shape_of_slice(leaf.shape, count), *([leaf.shape] if leaf.size == 1 else [])]
            if name not in rows or rows[name].shape not in able:
                return True
        if not slices.keeps_shapes or slices.facts() != facts:
            return True
    return False


def by_others(whole: "Traced", tx: Any, like: PyTree, owners: Sequence[int], workers: int) -> str:
    """Name what changes if the optimizer sees only some tensors; else empty.

    The optimizer is given those of each worker. It is also given the first and the last tensor of each shape alone. So
    other numbers of workers mostly have the same verdict.

    Args:
        owners: by tensor: the worker that is to update it.
    """
    leaves, structure = jax.tree.flatten(like)
    parts = [{i for i, owner in enumerate(owners) if owner == worker} for worker in range(workers)]
    last = {leaf.shape: i for i, leaf in enumerate(leaves)}
    first = {leaf.shape: i for i, leaf in reversed([*enumerate(leaves)])}
    parts += [{i} for i in {*first.values(), *last.values()}]
    known = whole.expressions()
    for part in dict.fromkeys(map(frozenset, parts)):
        mine = [leaf if i in part else optax.MaskedNode() for i, leaf in enumerate(leaves)]
        try:
            some = Traced.of(tx, jax.tree.unflatten(structure, mine))
        except Exception as error:
            if part:
                raise
            facts = {"error": f"{type(error).__name__}: {error}", "workers": workers, "tensors": len(leaves)}
            raise UsageError(NO_TENSORS.format(**facts)) from error
        check(some.keeps_shapes, CHANGES)
        for (kind, name), made in some.expressions().items():
            if known.get((kind, name)) != made:
                return f"the update of {name}" if kind == "update" else f"the state's {name}"
    return ""


class Traced(NamedTuple):
    """The two programs of an Optax transformation for params of some shapes."""

    names: tuple[str, ...]  # names of params
    state: PyTree  # its shapes
    keeps_shapes: bool  # updates have those of params, and a state those of the state before
    keeps_dtypes: bool  # likewise
    init: ClosedJaxpr  # (params) -> state
    update: ClosedJaxpr  # (gradients, state, params) -> (updates, state)

    @classmethod
    def of(cls, tx: Any, like: PyTree) -> "Traced":
        """Trace them; nothing runs."""
        # Functions of their own: JAX keeps a trace for as long as there is the function.
        init, state = jax.make_jaxpr(lambda params: tx.init(params), return_shape=True)(like)
        step = lambda *given: tx.update(*given)  # noqa: E731
        update, after = jax.make_jaxpr(step, return_shape=True)(like, state, like)
        known = like, state
        return cls(
            names=tuple(name for name, _ in named_leaves(like)),
            state=state,
            keeps_shapes=shapes_of(after) == shapes_of(known),
            keeps_dtypes=dtypes_of(after) == dtypes_of(known),
            init=init,
            update=update,
        )

    def updates(self) -> "list[Origin]":
        """The origin of each tensor's update, at any step."""
        return self._origins([])

    def _origins(self, without: list[Any]) -> "list[Origin]":
        tensors = [Origin(frozenset({i}), True) for i in range(len(self.names))]
        state = origins(self.init, tensors, without)
        while True:
            made = origins(self.update, [*tensors, *state, *tensors], without)
            updates, after = made[: len(tensors)], made[len(tensors) :]
            later = [together(pair) for pair in zip(state, after, strict=True)]
            if later == state:
                return updates
            state = later

    def facts(self) -> list[Any]:
        """Facts that slices must share: origins, expressions without shapes, equations without tensors."""
        without: list[Any] = []
        return [self._origins(without), without, self.expressions(with_shapes=False)]

    def expressions(self, *, with_shapes: bool = True) -> dict[tuple[str, str], int]:
        """Hash how updates, state 0 and new states come from named operands.

        Args:
            with_shapes: else equations that only move numbers, and shapes in others, are left out.
        """
        of_state = [name for name, _ in named_leaves(self.state)]
        named = lambda kind, names: [hash((kind, name)) for name in names]  # noqa: E731
        params, state = named("param", self.names), named("state", of_state)
        first = expressions(self.init, params, with_shapes)
        made = expressions(self.update, [*named("gradient", self.names), *state, *params], with_shapes)
        kinds = [("update", name) for name in self.names] + [("state", name) for name in of_state]
        return dict(zip(kinds, made, strict=True)) | {
            ("state 0", name): value for name, value in zip(of_state, first, strict=True)
        }


def shapes_of(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    """Structure and shapes of a tree."""
    return jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)]


def dtypes_of(tree: PyTree) -> list[Any]:
    """Dtypes of a tree."""
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def like_slice(leaf: jax.ShapeDtypeStruct, workers: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a worker's slice."""
    return jax.ShapeDtypeStruct(shape_of_slice(leaf.shape, workers), leaf.dtype)


def is_jaxpr(x: Any) -> bool:
    """Return True for the equations of a function, closed or not."""
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def opened(program: Any) -> tuple[Any, list[Any]]:
    """The equations of a function, and its constants."""
    return (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, [])


def run(
    program: Any, given: Sequence[T], constant: Callable[[Any], T], of: Callable[[Any, list[T]], list[T]]
) -> list[T]:
    """Interpret a program on other values than arrays; return its results.

    Args:
        given: values of its operands.
        constant: (array that it knows) -> value.
        of: (equation, values of its operands) -> values of its results.
    """
    jaxpr, consts = opened(program)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(constant, consts), *given], strict=True))

    def read(var: Any) -> T:
        return constant(var.val) if isinstance(var, jax.extend.core.Literal) else known[var]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, of(equation, [*map(read, equation.invars)]), strict=True))
    return [read(var) for var in jaxpr.outvars]


# Equations that compute nothing, of which other shapes may need others.
MOVES = frozenset("broadcast_in_dim reshape squeeze transpose copy".split())
# Operands, as they are.
PASSED_ON = frozenset(
    "device_put layout_constraint name optimization_barrier reshard sharding_constraint xla_metadata_value".split()
)


def expressions(program: Any, given: Sequence[int], with_shapes: bool) -> list[int]:
    """Hash how results are computed, given operands' hashes; loops are one equation."""

    def constant(x: Any) -> int:
        if isinstance(x, Tracer):  # value of a program in which the optimizer is made
            return id(x)
        with jax.ensure_compile_time_eval():  # under jit as well
            known = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        if not with_shapes and known.size and (known == known.flat[0]).all():
            known = known.flat[:1]  # one number for all entries, as of zeros in a tensor's shape
        return hash((str(known.dtype), known.shape if with_shapes else (), known.tobytes()))

    def of(equation: Any, given: list[int]) -> list[int]:
        name, options = equation.primitive.name, equation.params
        if name in PASSED_ON:
            return given
        if name in CALLS:
            return expressions(next(x for x in options.values() if is_jaxpr(x)), given, with_shapes)
        if name == "cond":
            taken = [expressions(branch, given[1:], with_shapes) for branch in options["branches"]]
            return [hash((name, given[0], each)) for each in zip(*taken, strict=True)]
        if name in MOVES and not with_shapes:
            return given[:1]
        inner = [x for x in jax.tree.leaves(list(options.values()), is_leaf=is_jaxpr) if is_jaxpr(x)]
        bodies = tuple(body_of(x, with_shapes) for x in inner)
        # Without shapes, only of equations entry by entry; `Traced.facts` has those of others that no tensor is in.
        loop = str([options.get(key) for key in ("length", "reverse")])
        plain = plain_options(options) if with_shapes or name in ENTRYWISE else loop
        return [hash((name, i, plain, bodies, *given)) for i in range(len(equation.outvars))]

    return run(program, given, constant, of)


def body_of(program: Any, with_shapes: bool) -> tuple[Any, ...]:
    """Expressions of an equation's function; without results, as in Pallas, its text."""
    jaxpr, _ = opened(program)
    text = [] if jaxpr.outvars else [str(jaxpr)]
    return (*text, *expressions(program, range(len(jaxpr.invars)), with_shapes))


def is_key(x: Any) -> bool:
    """Return True for random keys with a type of their own."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain_options(options: dict[str, Any]) -> str:
    """The options of an equation that are no functions, in words."""
    named = {key: x for key, x in options.items() if key != "sharding" and not (callable(x) or has_jaxpr(x))}
    return str(sorted((key, str(x)) for key, x in named.items()))


def has_jaxpr(x: Any) -> bool:
    """Return True if an equation's option holds a function's equations."""
    return any(is_jaxpr(leaf) for leaf in jax.tree.leaves(x, is_leaf=is_jaxpr))


# ---------------------------------------------------------------- origins of values


class Origin(NamedTuple):
    """Tensors that a value of a program depends on, and how."""

    tensors: frozenset[int]  # params, or their gradients, by number
    is_entrywise: bool  # its entry i depends on their entries i alone, and in the same way for all i


CONSTANT = Origin(frozenset(), True)  # one number, in all entries
UNKNOWN = Origin(frozenset({-1}), False)  # values of other workers, of Python while the program runs, of references
COLLECTIVES = frozenset(
    "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin ppermute precv "
    "psend psum psum_invariant ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter".split()
)
# Primitives whose result i is of entries i of the operands that have its size, and of single numbers.
ENTRYWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy "
    "copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma "
    "log log1p logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh "
    "xor".split()
)
CALLS = frozenset("call checkpoint closed_call compute_on custom_jvp_call custom_vjp_call jit pjit remat2".split())


def together(all_of: Sequence[Origin]) -> Origin:
    """The origin of values made of these, entry by entry."""
    # Most often it is one of theirs: a set of its own for each equation behind a norm would take gigabytes.
    most = max((x.tensors for x in all_of), key=len, default=frozenset())
    tensors = most if all(x.tensors <= most for x in all_of) else most.union(*(x.tensors for x in all_of))
    return Origin(tensors, all(x.is_entrywise for x in all_of))


def origins(program: Any, given: Sequence[Origin], without: list[Any]) -> list[Origin]:
    """Origins of a program's results, of those of its operands.

    Args:
        without: gets the equations that make other than constant arrays without tensors, such as `iota`, with shapes.
    """

    def constant(x: Any) -> Origin:
        is_known = np.size(x) > 1 and not isinstance(x, Tracer) and not is_key(x)
        is_one = np.size(x) == 1 or (is_known and bool((np.asarray(x) == np.asarray(x).flat[0]).all()))
        return CONSTANT if is_one else Origin(frozenset(), False)

    def of(equation: Any, given: list[Origin]) -> list[Origin]:
        name, options = equation.primitive.name, equation.params
        if name in PASSED_ON:
            return given
        if name == "cond":
            taken = [origins(branch, given[1:], without) for branch in options["branches"]]
            return [together([given[0], *each]) for each in zip(*taken, strict=True)]
        if name == "while":
            n, m = options["cond_nconsts"], options["body_nconsts"]

            def turn(carry: list[Origin]) -> list[Origin]:
                [test] = origins(options["cond_jaxpr"], [*given[:n], *carry], without)
                made = origins(options["body_jaxpr"], [*given[n : n + m], *carry], without)
                return [together([x, test]) for x in made]

            return after_loop(turn, given[n + m :])
        if name == "scan":
            n, m = options["num_consts"], options["num_carry"]
            sizes = [math.prod(var.aval.shape) for var in opened(options["jaxpr"])[0].invars[n + m :]]
            each = zip(given[n + m :], sizes, strict=True)
            rows = [Origin(x.tensors, x == CONSTANT or (size == 1 and not x.tensors)) for x, size in each]
            body = lambda carry: origins(options["jaxpr"], [*given[:n], *carry, *rows], without)  # noqa: E731
            carry = after_loop(lambda carry: body(carry)[:m], given[n : n + m])
            return [*carry, *(Origin(x.tensors, False) for x in body(carry)[m:])]
        if name in CALLS:
            return origins(next(x for x in options.values() if is_jaxpr(x)), given, without)
        is_outside = name.removesuffix("_start").removesuffix("_done") in COLLECTIVES or name.endswith("callback")
        if is_outside or equation.effects or any(map(is_reference, (*equation.invars, *equation.outvars))):
            return [UNKNOWN for _ in equation.outvars]
        whole, sizes = together(given), {math.prod(var.aval.shape) for var in equation.invars}
        made = []
        for var in equation.outvars:
            size = math.prod(var.aval.shape)
            if name in ENTRYWISE or (name in MOVES and whole == CONSTANT):
                made.append(Origin(whole.tensors, whole.is_entrywise and (not whole.tensors or sizes <= {1, size})))
                continue
            if not whole.tensors:
                without.append((name, plain_options(options), *(x.aval.shape for x in (*equation.invars, var))))
            is_number = not whole.tensors or (whole.is_entrywise and sizes <= {1})
            made.append(Origin(whole.tensors, size == 1 and is_number))
        return made

    return run(program, given, constant, of)


def after_loop(turn: Callable[[list[Origin]], list[Origin]], carry: list[Origin]) -> list[Origin]:
    """Origins of a loop's values after any number of turns."""
    while True:
        later = [together(pair) for pair in zip(carry, turn(carry), strict=True)]
        if later == carry:
            return carry
        carry = later


def is_reference(var: Any) -> bool:
    """Return True for what a program writes to."""
    return hasattr(var.aval, "inner_aval")
