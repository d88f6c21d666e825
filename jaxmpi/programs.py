"""One compilation for all ranks of a host: programs that travel as StableHLO.

Eight ranks that trace and compile the same step on two cores take eight times as long as one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxmpi.handlers import EXPORTABLE

PyTree = Any


class Host(Protocol):
    """What sharing needs of the control plane between the ranks of a host."""

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        ...

    def host_barrier(self) -> None:
        """Wait for all ranks of this host."""
        ...

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank of this host makes, on all its ranks."""
        ...


def shared_jit(function: Callable, donate_argnums: tuple[int, ...], control: Host) -> Callable:
    """`jax.jit` whose program the host's first rank traces and compiles; the others read it from the cache.

    Ranks must call the function together for the first time.
    """
    programs: dict[Any, Callable] = {}

    def call(*args: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if key not in programs:
            programs[key] = compile_together(function, args, donate_argnums, control)
        return programs[key](leaves)

    return call


class Program(NamedTuple):
    """What of a traced program travels to the other ranks."""

    exported: bytes  # StableHLO over flat leaves; empty where the program cannot travel
    structure: Any  # of the result


def compile_together(
    function: Callable, args: tuple, donate_argnums: tuple[int, ...], control: Host
) -> Callable[[list[Any]], PyTree]:
    """The compiled function of args' leaves."""
    leaves, structure = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    argument = np.repeat(range(len(args)), [len(jax.tree.leaves(arg)) for arg in args])
    donated = tuple(np.flatnonzero(np.isin(argument, donate_argnums)).tolist())
    jax.effects_barrier()  # the control plane speaks only when the exchange is silent
    program = control.from_first(lambda: trace(function, structure, shapes))
    if not program.exported:
        jitted = jax.jit(function, donate_argnums=donate_argnums)
        return lambda leaves: jitted(*jax.tree.unflatten(structure, leaves))
    # The first rank too compiles what it has sent, so that all look for one cache key.
    exported = jax.export.deserialize(bytearray(program.exported))
    # Results of a program with effects are bound to their device, unlike its first arguments: one program for both.
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if exported.ordered_effects else None
    jitted = jax.jit(exported.call, donate_argnums=donated, in_shardings=place)
    lowered = jitted.lower(*shapes)
    if control.local_rank != 0:
        control.host_barrier()
    compiled = lowered.compile()
    if control.local_rank == 0:
        control.host_barrier()
    # JAX leaves out the tokens of ordered effects where the compiled program is called by itself.
    run = jitted if exported.ordered_effects else compiled
    return lambda leaves: jax.tree.unflatten(program.structure, run(*leaves))


def trace(function: Callable, structure: Any, shapes: list[jax.ShapeDtypeStruct]) -> Program:
    """The program of a function and the structure of its result; no program for one that cannot travel."""
    made = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        result, out = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        made.append(out)
        return result

    try:
        exported = jax.export.export(jax.jit(flat), disabled_checks=EXPORTABLE)(*shapes).serialize()
    except NotImplementedError:  # host callbacks stay in the process that made them
        return Program(b"", None)
    except ValueError as error:  # of XLA's own calls only those of some age may be exported
        if "custom calls" not in str(error):
            raise
        return Program(b"", None)
    return Program(bytes(exported), made[0])
