"""Whether workers can each update a share of the params: what the update of each tensor depends on.

Optax does not say whether an optimizer treats entries, tensors, or all params together. Running it on a few numbers
proves nothing: it may clip from step 1,000 on, or by a norm under a mask, or go by how far params have moved. So
nothing runs. JAX traces `init` and `update`, and each value of their programs gets an `Origin`: the tensors on whose
numbers it depends, and whether its entry i depends on their entries i alone. What an update leaves in the optimizer's
state goes into the next update, until no state changes its origin. Branches count whether they are taken or not.

Origins do not show numbers that are computed before the program, as `1 / leaf.size` or `1 / len(leaves)` in Python.
Those are seen by comparing equations, and the numbers in them, of programs for whole tensors and for shares.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np
import optax
import optax.contrib
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.slices import shape_of_slice, slices_of

ScheduleFreeState = optax.contrib.ScheduleFreeState
PARTS = 3  # into which params are cut or dealt to compare equations
MIXED = (
    "sharded: the update of {name} by this optimizer depends on other tensors (as with clipping by a global norm), or "
    "on how many there are; leave it unsharded, or give clip_norm to jaxmpi.sharded in place of a clipping in the chain"
)
UNTRACED = (
    "sharded: this optimizer fails when it is traced for shares of the params ({error}), so it is not known whether "
    "its updates can be cut; leave it unsharded, or let it take tensors of any size, and numbers that it knows"
)


def cut_for(tx: Any, params: PyTree) -> str:
    """How an Optax transformation can be cut: `entries` if that leaves its updates what they are, else `leaves`.

    Args:
        params: arrays or their shapes.

    Raises:
        UsageError: neither; the tensor whose update differs.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    try:
        updates = origins_of_updates(tx, like)
        odd = [i for i, origin in enumerate(updates) if origin.tensors - {i}]
        if not odd:
            if all(origin.is_entrywise for origin in updates) and not goes_by_shape(tx, like):
                return "entries"
            odd = [0] * goes_by_number(tx, like)
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        raise UsageError(UNTRACED.format(error=f"{type(error).__name__}: {error}")) from error
    if odd:
        raise UsageError(MIXED.format(name=named_leaves(like)[odd[0]][0]))
    return "leaves"


def schedule_free_parts(state: PyTree) -> list[ScheduleFreeState]:
    """The states of schedule-free optimizers in a state, or in the shapes of one: averages are of whole params."""
    return [part for part in jax.tree.leaves(state, is_leaf=is_schedule_free) if is_schedule_free(part)]


def is_schedule_free(part: PyTree) -> bool:
    """Return True for the state of a schedule-free optimizer."""
    return isinstance(part, ScheduleFreeState)


# ---------------------------------------------------------------- numbers that Python computes


def goes_by_shape(tx: Any, like: PyTree) -> bool:
    """Return True if an optimizer treats slices in another way than whole tensors, by their sizes.

    The shapes of the state and the equations of an update are compared with those of whole tensors, for three workers,
    and for so many that a slice has one entry: such a slice is below any size at which the optimizer could change its
    way.

    Args:
        like: shapes of params.
    """
    whole, equations = jax.eval_shape(tx.init, like), list(equations_of(tx, like))
    largest = max((leaf.size for leaf in jax.tree.leaves(like)), default=1)
    for workers in {PARTS, max(largest, 2)}:
        slices = jax.eval_shape(lambda tree, w=workers: slices_of(tree, 0, w), like)
        rows = dict(named_leaves(jax.eval_shape(tx.init, slices)))
        for name, leaf in named_leaves(whole):
            # A checkpoint takes every array for a slice, so only a single number, as a count, may be none.
            able = [shape_of_slice(leaf.shape, workers), *([leaf.shape] if leaf.size == 1 else [])]
            if name not in rows or rows[name].shape not in able:
                return True
        if list(equations_of(tx, slices)) != equations:
            return True
    return False


def goes_by_number(tx: Any, like: PyTree) -> bool:
    """Return True if an optimizer treats some tensors in another way than all of them."""
    leaves, structure = jax.tree.flatten(like)
    of_parts = set()
    for part in range(min(PARTS, len(leaves))):
        mine = [leaf if i % PARTS == part else optax.MaskedNode() for i, leaf in enumerate(leaves)]
        of_parts |= set(equations_of(tx, jax.tree.unflatten(structure, mine)))
    return set(equations_of(tx, like)) != of_parts


# Equations that compute nothing, of which other shapes may need others. The numbers in them count all the same.
MOVES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "jit", "pjit"}


def equations_of(tx: Any, like: PyTree) -> Iterator[tuple[str, ...]]:
    """The name of each equation of an update of params like these, and the single numbers and types in it."""
    closed = jax.make_jaxpr(tx.update)(like, jax.eval_shape(tx.init, like), like)
    pending = [(closed.jaxpr, closed.consts)]
    while pending:
        jaxpr, consts = pending.pop(0)
        yield from (("number", repr(np.asarray(x).item())) for x in consts if np.size(x) == 1)
        for equation in jaxpr.eqns:
            literals = [var.val for var in equation.invars if isinstance(var, jax.extend.core.Literal)]
            numbers = [repr(np.asarray(x).item()) for x in literals if np.size(x) == 1]  # a NaN, too, is itself
            name, options = equation.primitive.name, [equation.params.get(key) for key in ("y", "new_dtype")]
            if name not in MOVES or numbers:
                yield "" if name in MOVES else name, *numbers, *map(str, options)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    pending.append((inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, []))


def is_jaxpr(x: Any) -> bool:
    """Return True for the equations of a function, closed or not."""
    return isinstance(x, (Jaxpr, ClosedJaxpr))


# ---------------------------------------------------------------- origins of values


class Origin(NamedTuple):
    """What a value of a program depends on."""

    tensors: frozenset[int]  # params, or their gradients, by number
    is_entrywise: bool  # its entry i depends on their entries i alone, and in the same way for all i


CONSTANT = Origin(frozenset(), True)
RANDOM = Origin(frozenset({-1}), False)  # random numbers of a share are others than those of the whole
# Primitives whose operands have the shape of the result, or are single numbers.
ENTRYWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy "
    "copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma "
    "log log1p logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh "
    "xor".split()
)
CALLS = frozenset("checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2".split())


def origins_of_updates(tx: Any, like: PyTree) -> list[Origin]:
    """What the update of each tensor depends on, at any step.

    Args:
        tx: an Optax transformation.
        like: shapes of params.
    """
    tensors = [Origin(frozenset({i}), True) for i in range(len(jax.tree.leaves(like)))]
    state = origins(jax.make_jaxpr(tx.init)(like), tensors)
    update = jax.make_jaxpr(tx.update)(like, jax.eval_shape(tx.init, like), like)
    while True:
        made = origins(update, [*tensors, *state, *tensors])
        updates, after = made[: len(tensors)], made[len(tensors) :]
        later = [together(pair) for pair in zip(state, after, strict=True)]
        if later == state:
            return updates
        state = later


def together(all_of: Sequence[Origin]) -> Origin:
    """The origin of what is made of values of these, entry by entry."""
    return Origin(frozenset().union(*(x.tensors for x in all_of)), all(x.is_entrywise for x in all_of))


def moved(origin: Origin) -> Origin:
    """The origin of what is made of a value's entries in other places."""
    return origin if origin == CONSTANT else Origin(origin.tensors, False)


def origins(program: Any, given: Sequence[Origin]) -> list[Origin]:
    """Origins of a program's results, of those of its operands."""
    if isinstance(program, ClosedJaxpr):
        consts = [CONSTANT if np.size(x) == 1 else Origin(frozenset(), False) for x in program.consts]
        program = program.jaxpr
    else:
        consts = []
    known = dict(zip([*program.constvars, *program.invars], [*consts, *given], strict=True))

    def of(var: Any) -> Origin:
        return CONSTANT if isinstance(var, jax.extend.core.Literal) else known[var]

    for equation in program.eqns:
        known.update(zip(equation.outvars, origins_of_results(equation, [*map(of, equation.invars)]), strict=True))
    return [of(var) for var in program.outvars]


def origins_of_results(equation: Any, given: list[Origin]) -> list[Origin]:
    """Origins of what an equation gives, of those of its operands."""
    name, options = equation.primitive.name, equation.params
    if name == "optimization_barrier":
        return given
    if name == "cond":
        index, *rest = given
        return [together([index, *each]) for each in zip(*(origins(b, rest) for b in options["branches"]), strict=True)]
    if name == "while":
        n, m = options["cond_nconsts"], options["body_nconsts"]
        test, body = (functools.partial(origins, options[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        return after_loop(
            lambda carry: [together([x, *test([*given[:n], *carry])]) for x in body([*given[n : n + m], *carry])],
            given[n + m :],
        )
    if name == "scan":
        n, m = options["num_consts"], options["num_carry"]
        body = functools.partial(origins, options["jaxpr"])
        rows = [moved(x) for x in given[n + m :]]
        carry = after_loop(lambda carry: body([*given[:n], *carry, *rows])[:m], given[n : n + m])
        stacked = [Origin(x.tensors, False) for x in body([*given[:n], *carry, *rows])[m:]]
        return [*carry, *stacked]
    if name in CALLS:
        return origins(next(x for x in options.values() if is_jaxpr(x)), given)
    if name.startswith(("random_", "threefry", "rng_")):
        return [RANDOM for _ in equation.outvars]
    whole = together(given)
    sizes_of = lambda many: [math.prod(var.aval.shape) for var in many]  # noqa: E731
    is_of_single_numbers = all(size == 1 for size in sizes_of(equation.invars))
    is_single = is_of_single_numbers and all(size == 1 for size in sizes_of(equation.outvars))
    is_filled = name == "broadcast_in_dim" and is_of_single_numbers and whole == CONSTANT
    keeps_entries = name in ENTRYWISE or is_single or is_filled
    return [whole if keeps_entries else Origin(whole.tensors, False) for _ in equation.outvars]


def after_loop(body: Any, carry: list[Origin]) -> list[Origin]:
    """Origins of a loop's values after any number of rounds."""
    while True:
        later = [together(pair) for pair in zip(carry, body(carry), strict=True)]
        if later == carry:
            return carry
        carry = later
