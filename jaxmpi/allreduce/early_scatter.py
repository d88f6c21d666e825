"""Gradients reduce-scattered as soon as they are computed (ZeRO stage 2), so that they never exist together.

A traced function is cut behind each bucket of its gradients, and the parts are run one after another. A call between
two parts adds the bucket up and gives this worker's shard. XLA orders a program by its data alone, and left to itself
it computes all gradients first: calls in order, buckets in the order of coming and the list scheduler changed that
little. So the values on which the rest of the backward pass works go through the call, in their own buffers. So do
other results that depend on a gradient, such as its square, which are then computed before it is gone. Large constants,
such as the zeros to which a scan adds its gradients, are made by the part that uses them first, of numbers that have
gone through: XLA would make them at the start. Calls of jitted functions, which may hide such constants or several
gradients, are inlined.

A program that is cut is fused less. So multiplications and additions may round otherwise than in one that is not cut.

Tried and dropped: to pass all live values, which gives the same arena and calls with hundreds of buffers. To pass only
what the next gradient is made of: then the rest of the backward pass runs ahead and keeps its values. An identity
around params whose VJP adds the bucket up does not tie the rest of the backward pass to the sum.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, DebugInfo, Literal

from jaxmpi.allreduce.buckets import assign_buckets, places
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.host_callbacks import can_go

Jaxpr = Any  # JAX's types say too little of what variables and literals have
JaxprEqn = Any
LARGE = 1 << 20  # bytes of a constant that is not made before it is used

# (leaves of a bucket, values that go through) -> (their shards, those values)
Scatter = Callable[[list[jax.Array], list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


def scattering(function: Callable[..., tuple], bucket_bytes: int | None, scatter: Scatter) -> Callable[..., tuple]:
    """The same function; `scatter` turns its first result into shards, inside jit.

    Args:
        bucket_bytes: of small leaves that are summed together. Empty leaves stay as they are.
        scatter: a call between two parts of the function.

    Communicates: as `scatter`, once a bucket.
    """

    @functools.wraps(function)
    def scattered(*args: PyTree) -> tuple:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        count, traced = len(jax.tree.leaves(shapes[0])), inlined(traced)
        program = traced.jaxpr
        values: dict[Any, Any] = dict(zip(program.constvars, traced.consts, strict=True))
        values |= zip(program.invars, jax.tree.leaves(args), strict=True)

        def read(var: Any) -> Any:
            dtype = getattr(var.aval, "dtype", None)
            return jnp.asarray(var.val, dtype) if isinstance(var, Literal) else values[var]

        computed, sizes = places(program), [atom.aval.size for atom in program.outvars[:count]]
        buckets = assign_buckets(sizes, bucket_bytes, sorted(range(count), key=lambda i: (computed[i], -i)))
        buckets.sort(key=lambda bucket: max(computed[i] for i in bucket))  # by when they are full
        shards: dict[int, jax.Array] = {}
        for part, bucket in zip(parts_of(program, count, buckets), [*buckets, []], strict=True):
            for equation in part.equations:
                values |= zip(equation.outvars, results_of(equation, [*map(read, equation.invars)]), strict=True)
            if bucket:
                fills = [(fill.outvars[0], fill.invars[0].val) for fill in part.fills]
                numbers = [jnp.asarray(number, var.aval.dtype) for var, number in fills]
                leaves = [read(program.outvars[i]) for i in bucket]
                bucket_shards, passed_values = scatter(leaves, [*map(read, part.through), *numbers])
                shards |= zip(bucket, bucket_shards, strict=True)
                values |= zip(part.through, passed_values, strict=False)
                for (var, _), number in zip(fills, passed_values[len(part.through) :], strict=True):
                    values[var] = jnp.broadcast_to(number.reshape(()), var.aval.shape)
        results = [shards[i] if i in shards else read(var) for i, var in enumerate(program.outvars)]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return scattered


class Part(NamedTuple):
    """Equations up to a bucket's last gradient, or behind all of them."""

    equations: list[JaxprEqn]
    through: list[Any]  # variables that go through the call behind it
    fills: list[JaxprEqn]  # that make large constants which the next part uses first


def parts_of(program: Jaxpr, count: int, buckets: Sequence[Sequence[int]]) -> list[Part]:
    """Cut a program, whose first `count` results are gradients, behind each bucket."""
    equations, last = program.eqns, len(buckets)
    gradients = set(variables(program.outvars[:count]))
    computed_at = {var: i for i, equation in enumerate(equations) for var in equation.outvars}
    derived = derived_from(gradients, equations)
    computed = places(program)
    ends = np.maximum.accumulate([max(computed[i] for i in bucket) for bucket in buckets])
    part_of_var: dict[Any, int] = {}
    part_of: list[int] = []  # by equation
    for i, equation in enumerate(equations):
        if i in derived:  # as soon as its gradient is there
            part_of.append(max(part_of_var.get(var, 0) for var in variables(equation.invars)))
        else:
            part_of.append(int(np.searchsorted(ends, i)))
        part_of_var |= dict.fromkeys(equation.outvars, part_of[-1])
    users: dict[Any, list[int]] = {}  # parts that use each variable; results are used behind all
    for k, equation in zip(part_of, equations, strict=True):
        for var in variables(equation.invars):
            users.setdefault(var, []).append(k)
    for var in variables(program.outvars):
        users.setdefault(var, []).append(last + 1)
    # The forward pass ends with the last result that depends on no gradient, such as the loss.
    derived_vars = {var for i in derived for var in equations[i].outvars}
    others = set(variables(program.outvars[count:])) - derived_vars
    forward = max((computed_at.get(var, -1) for var in others), default=-1)
    fills: list[list[JaxprEqn]] = [[] for _ in range(last + 1)]
    for i, equation in enumerate(equations):
        if is_large_fill(equation) and 0 < (first := min(users.get(equation.outvars[0], [0]))) <= last:
            fills[first - 1].append(equation)
            part_of[i] = -1  # in none
    filled = {fill.outvars[0] for part in fills for fill in part}

    def goes_through(var: Any, k: int) -> bool:
        if var in gradients or var in filled or not can_go(var.aval.dtype):
            return False
        if var in derived_vars:
            return part_of_var[var] == k < max(users[var])
        is_live = part_of_var.get(var, k + 1) <= k and any(k < user <= last for user in users[var])
        return is_live and computed_at[var] > forward

    return [
        Part(
            [equation for i, equation in enumerate(equations) if part_of[i] == k],
            [var for var in users if goes_through(var, k)],
            fills[k],
        )
        for k in range(last + 1)
    ]


def derived_from(gradients: set[Any], equations: Sequence[JaxprEqn]) -> set[int]:
    """Numbers of equations that depend on gradients, but that no gradient needs."""
    needed_vars = set(gradients)  # gradients, and what some gradient depends on
    for equation in reversed(equations):
        if not needed_vars.isdisjoint(equation.outvars):
            needed_vars |= set(variables(equation.invars))
    dependent, derived = set(gradients), set()
    for i, equation in enumerate(equations):
        if not dependent.isdisjoint(variables(equation.invars)):
            dependent |= set(equation.outvars)
            if needed_vars.isdisjoint(equation.outvars):
                derived.add(i)
    return derived


def inlined(traced: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without calls of jitted functions, which may hide several gradients, or large constants."""

    def run(program: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*program.constvars, *program.invars), (*consts, *args), strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
        for equation in program.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive.name == "jit":
                inner = equation.params["jaxpr"]
                results = run(inner.jaxpr, inner.consts, operands)
            else:
                results = results_of(equation, operands)
            values |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in program.outvars]

    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.in_avals]
    return jax.make_jaxpr(lambda *args: run(traced.jaxpr, traced.consts, args))(*avals)


def results_of(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply one equation; operands of literals are not used."""
    pairs = zip(equation.invars, operands, strict=True)
    inputs = {var: x for var, x in pairs if not isinstance(var, Literal)}  # one may be there twice
    names = DebugInfo("an equation", equation.primitive.name, None, None)
    program = core.Jaxpr([], list(inputs), equation.outvars, [equation], equation.effects, names)
    return core.jaxpr_as_fun(ClosedJaxpr(program, ()))(*inputs.values())


def is_large_fill(equation: JaxprEqn) -> bool:
    """Return True if an equation fills a large array with one number."""
    if equation.primitive.name != "broadcast_in_dim" or variables(equation.invars):
        return False
    aval, number = equation.outvars[0].aval, equation.invars[0].val
    return np.size(number) == 1 and aval.size * aval.dtype.itemsize >= LARGE and can_go(aval.dtype)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
