"""Gradients summed as soon as they are computed (ZeRO stage 2).

So gradients never exist together. A traced function is cut behind each bucket of its gradients, and the parts are run
one after another. A call between two parts adds the bucket up and gives this worker's slice. XLA orders a program by
its data alone, and left to itself it computes all gradients first: calls in order, buckets in the order of coming and
the list scheduler changed that little. So the values on which the rest of the backward pass works go through the call,
in their own buffers. Other results of a gradient, such as its square, go through as well, and so are computed before.
Some constants are large, such as the zeros to which a scan adds its gradients. The part that uses them first makes
them, of numbers that have gone through: XLA would make them at the start. Calls of jitted functions that hide such
constants, or several gradients, are put in place.

A program that is cut is fused less. So multiplications and additions may round otherwise than in one that is not cut.

Tried and dropped: to pass all live values, which gives the same arena and calls with hundreds of buffers. Also tried
and dropped: to pass only what the next gradient is made of. Then the rest of the backward pass runs ahead and keeps its
values.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxmpi.allreduce.buckets import assign_buckets, places
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.host_callbacks import can_go

LARGE = 1 << 20  # bytes of a constant that is not made before it is used

# (leaves of a bucket, values that go through) -> (their slices, those values)
Scatter = Callable[[list[jax.Array], list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


def scattering(function: Callable[..., tuple], bucket_bytes: int | None, scatter: Scatter) -> Callable[..., tuple]:
    """The same function; `scatter` turns its first result into slices, inside jit.

    Args:
        bucket_bytes: of small leaves that are summed together. Empty leaves stay as they are.
        scatter: a call between two parts of the function.

    Communicates: as `scatter`, once a bucket.
    """

    @functools.wraps(function)
    def scattered(*args: PyTree) -> tuple:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        count = len(jax.tree.leaves(shapes[0]))
        traced = opened(traced, count)
        program = traced.jaxpr
        together = buckets(program, count, bucket_bytes)
        values: dict[Any, Any] = dict(zip(program.constvars, traced.consts, strict=True))
        values |= zip(program.invars, jax.tree.leaves(args), strict=True)

        def read(var: Any) -> Any:
            return jnp.asarray(var.val, variable(var).aval.dtype) if isinstance(var, Literal) else values[var]

        slices: dict[int, jax.Array] = {}
        for part, bucket in zip(parts(program, count, together), [*together, []], strict=True):
            results = jaxpr_as_fun(ClosedJaxpr(part.program, ()))(*map(read, part.program.invars))
            values |= zip(part.program.outvars, results, strict=True)
            if bucket:
                filling = [jnp.asarray(fill.number, fill.made.aval.dtype) for fill in part.fills]
                leaves = [read(program.outvars[i]) for i in bucket]
                mine, through = scatter(leaves, [*map(read, part.through), *filling])
                slices |= zip(bucket, mine, strict=True)
                values |= zip(part.through, through, strict=False)
                for fill, number in zip(part.fills, through[len(part.through) :], strict=True):
                    values[fill.made] = jnp.broadcast_to(number.reshape(()), fill.made.aval.shape)
        results = [slices[i] if i in slices else read(var) for i, var in enumerate(program.outvars)]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return scattered


def opened(traced: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """Inline calls of jitted functions that hide several gradients or large constants."""
    gradients = set(variables(traced.jaxpr.outvars[:count]))

    def is_open(equation: JaxprEqn) -> bool:
        return equation.primitive.name == "jit" and (
            len(gradients.intersection(equation.outvars)) > 1 or has_fill(equation.params["jaxpr"].jaxpr)
        )

    def run(program: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*program.constvars, *program.invars), (*consts, *args), strict=True))
        for equation in program.eqns:
            given = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
            if is_open(equation):
                inner = equation.params["jaxpr"]
                results = run(inner.jaxpr, inner.consts, given)
            else:
                results = run_equation(equation, given)
            values |= zip(equation.outvars, results, strict=True)
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in program.outvars]

    if not any(map(is_open, traced.jaxpr.eqns)):
        return traced
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.in_avals]
    return jax.make_jaxpr(lambda *args: run(traced.jaxpr, traced.consts, args))(*avals)


def run_equation(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Results of one equation; operands of literals are not used."""
    pairs = zip(equation.invars, operands, strict=True)
    taken = {var: x for var, x in pairs if not isinstance(var, Literal)}  # one may be there twice
    names = DebugInfo("an equation", equation.primitive.name, None, None)
    program = Jaxpr([], list(taken), equation.outvars, [equation], equation.effects, names)
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*taken.values())


def has_fill(program: Jaxpr) -> bool:
    """Return True if a program fills a large array, jitted calls included."""
    return any(
        bool(fill_of(equation)) or (equation.primitive.name == "jit" and has_fill(equation.params["jaxpr"].jaxpr))
        for equation in program.eqns
    )


def buckets(program: Jaxpr, count: int, bucket_bytes: int | None) -> list[list[int]]:
    """Buckets of the first `count` results, ordered by when they are full."""
    made, leaves = places(program), [variable(atom).aval for atom in program.outvars[:count]]
    ready = sorted(range(count), key=lambda i: (made[i], -i))
    return sorted(
        assign_buckets([leaf.size for leaf in leaves], bucket_bytes, ready), key=lambda b: max(made[i] for i in b)
    )


class Fill(NamedTuple):
    """A large constant."""

    made: Any  # the variable
    number: Any  # with which it is filled


class JaxprPart(NamedTuple):
    """Equations up to a bucket's last gradient, or behind all of them."""

    program: Jaxpr
    through: list[Any]  # variables that go through the call behind it
    fills: list[Fill]  # large constants that the next part uses first


def parts(program: Jaxpr, count: int, buckets: Sequence[Sequence[int]]) -> list[JaxprPart]:
    """Cut a program, whose first `count` results are gradients, behind each bucket."""
    equations, last = program.eqns, len(buckets)
    gradients = set(variables(program.outvars[:count]))
    made = {var: i for i, equation in enumerate(equations) for var in equation.outvars}
    looks, looking = looks_at(equations, gradients)
    computed = places(program)
    ends = np.maximum.accumulate([max(computed[i] for i in bucket) for bucket in buckets])
    part_of: dict[Any, int] = {}  # number of the part that makes each variable
    number: list[int] = []  # part of each equation
    for i, equation in enumerate(equations):
        own = max(part_of.get(var, 0) for var in variables(equation.invars)) if i in looking else None
        number.append(int(np.searchsorted(ends, i)) if own is None else own)  # a look as soon as its gradient is there
        part_of |= dict.fromkeys(equation.outvars, number[-1])
    used: dict[Any, list[int]] = {}  # parts that use each variable; results are used behind all
    for k, equation in zip(number, equations, strict=True):
        for var in variables(equation.invars):
            used.setdefault(var, []).append(k)
    for var in variables(program.outvars):
        used.setdefault(var, []).append(last + 1)
    # The forward pass ends with the last result that depends on no gradient, such as the loss.
    others = set(variables(program.outvars[count:])) - looks
    forward = max((made.get(var, -1) for var in others), default=-1)
    fills: list[list[Fill]] = [[] for _ in range(last + 1)]
    for i, equation in enumerate(equations):
        fill = fill_of(equation)
        if fill and 0 < (first := min(used.get(fill.made, [0]))) <= last:
            fills[first - 1].append(fill)
            number[i] = -1  # number of no part
    filled = {fill.made for each in fills for fill in each}

    def goes_through(var: Any, k: int) -> bool:
        if var in gradients or var in filled or not can_go(var.aval.dtype):
            return False
        if var in looks:
            return part_of[var] == k < max(used[var])
        return made.get(var, -1) > forward and part_of[var] <= k and any(k < user <= last for user in used[var])

    cut = []
    for k in range(last + 1):
        own = [equation for i, equation in enumerate(equations) if number[i] == k]
        inside = {var: None for equation in own for var in equation.outvars}
        needed = {var: None for equation in own for var in variables(equation.invars) if var not in inside}
        kept = [var for var in inside if var in gradients or max(used.get(var, [-1])) > k]
        piece = program.replace(constvars=[], invars=[*needed], outvars=kept, eqns=own)
        cut.append(JaxprPart(piece, [var for var in used if goes_through(var, k)], fills[k]))
    return cut


def looks_at(equations: Sequence[JaxprEqn], gradients: set[Any]) -> tuple[set[Any], set[int]]:
    """Variables that depend on gradients but that no gradient needs.

    With them come the numbers of the equations that make them.
    """
    needed = set(gradients)  # gradients, and what some gradient depends on
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            needed |= set(variables(equation.invars))
    of_gradients, looking = set(gradients), set()
    for i, equation in enumerate(equations):
        if not of_gradients.isdisjoint(variables(equation.invars)):
            of_gradients |= set(equation.outvars)
            if needed.isdisjoint(equation.outvars):
                looking.add(i)
    return {var for i in looking for var in equations[i].outvars}, looking


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def variable(atom: Any) -> Any:
    """A variable or a literal, of which JAX's types say too little."""
    return atom


def fill_of(equation: JaxprEqn) -> Fill | None:
    """The large array that an equation fills with one number, if any."""
    if equation.primitive.name != "broadcast_in_dim" or variables(equation.invars):
        return None
    number, made = variable(equation.invars[0]).val, variable(equation.outvars[0])
    is_large = np.size(number) == 1 and made.aval.size * made.aval.dtype.itemsize >= LARGE and can_go(made.aval.dtype)
    return Fill(made, number) if is_large else None
