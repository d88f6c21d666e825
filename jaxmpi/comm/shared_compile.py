"""One compilation for all ranks of a host; programs travel as StableHLO.

Eight ranks that trace and compile the same step on two cores take eight times as long as one. The first rank of a host
therefore traces the function and sends StableHLO to the others. It compiles first, and the others read the program from
JAX's compilation cache. The cache does not help for programs over several processes' devices, whose keys contain the
process's place. `loaded_jit` therefore sends the compiled executable, on CPUs only. A program that cannot be exported
is compiled on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import progress
from jaxmpi.runtime.host_callbacks import EXPORTABLE


class CompiledFunction(NamedTuple):
    """A function compiled for arguments of one kind."""

    run: Callable[[tuple], PyTree]  # function of the arguments
    compiled: Callable[[], jax.stages.Compiled]


@dataclass(frozen=True)
class CompiledTogether:
    """A function that a host's ranks compile together, by arguments' kind."""

    make: Callable[[tuple], CompiledFunction]
    programs: dict[Any, CompiledFunction] = field(default_factory=dict)

    def __call__(self, *args: PyTree) -> PyTree:
        """Run it."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] # JAX refuses compiled programs then
            with jax.disable_jit(False):
                return self.made(args).run(args)
        return self.made(args).run(args)

    def made(self, args: tuple) -> CompiledFunction:
        """The program for arguments of this kind; ranks compile it together."""
        key = kind_of(args)
        if key not in self.programs:
            self.programs[key] = self.make(args)
        return self.programs[key]


def compiled_for(function: Any, args: tuple) -> jax.stages.Compiled:
    """The program that a jit or `CompiledTogether` keeps for these arguments."""
    if isinstance(function, CompiledTogether):
        return function.made(args).compiled()
    return function.lower(*args).compile()


def shared_jit(function: Callable, donate_argnums: tuple[int, ...], control: HostProcesses) -> CompiledTogether:
    """`jax.jit` that a host's first rank traces and compiles for all.

    The others read the program from the cache. Ranks must call the function together for the first time.
    """
    return CompiledTogether(lambda args: compile_together(function, args, donate_argnums, control))


def kind_of(args: PyTree) -> Any:
    """Structure, shapes and types: what a program is compiled for."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(shape_and_dtype(leaf) for leaf in leaves)


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype, of JAX's arrays without `result_type` (2 ms for 512)."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else (np.shape(leaf), jnp.result_type(leaf))


class SerializedProgram(NamedTuple):
    """Parts of a traced program that travel to the other ranks."""

    exported: bytes  # StableHLO over flat leaves; empty if the program cannot travel
    structure: Any  # tree structure of the result


def compile_together(
    function: Callable, args: tuple, donate_argnums: tuple[int, ...], control: HostProcesses
) -> CompiledFunction:
    """The compiled function for arguments of this kind."""
    leaves, structure = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(*shape_and_dtype(leaf)) for leaf in leaves]
    argument = np.repeat(range(len(args)), [len(jax.tree.leaves(arg)) for arg in args])
    donated = tuple(np.flatnonzero(np.isin(argument, donate_argnums)).tolist())
    jax.effects_barrier()  # the control plane speaks only when the exchange is silent
    name = getattr(getattr(function, "func", function), "__name__", "a program")  # name of a partial's function, too
    with progress.phase(f"tracing {name}"):
        program = control.bcast_from_host_leader(lambda: trace(function, structure, shapes))
    if not program.exported:
        jitted = jax.jit(function, donate_argnums=donate_argnums)
        return CompiledFunction(lambda args: jitted(*args), lambda: jitted.lower(*args).compile())
    # The first rank too compiles what it has sent, so that all look for one cache key.
    exported = jax.export.deserialize(bytearray(program.exported))
    # Results of a program with effects are bound to their device, unlike its first arguments: one program for both.
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if exported.ordered_effects else None
    jitted = jax.jit(exported.call, donate_argnums=donated, in_shardings=place)
    lowered = jitted.lower(*shapes)
    if control.local_rank != 0:
        control.host_barrier()
    with progress.phase(f"compiling {name}"):
        compiled = lowered.compile()
    if control.local_rank == 0:
        with progress.phase(f"waiting for the other ranks to trace {name}"):
            control.host_barrier()
    # JAX leaves out the tokens of ordered effects if the compiled program is called by itself.
    run = jitted if exported.ordered_effects else compiled
    return CompiledFunction(
        lambda args: jax.tree.unflatten(program.structure, run(*jax.tree.leaves(args))), lambda: compiled
    )


def trace(function: Callable, structure: Any, shapes: list[jax.ShapeDtypeStruct]) -> SerializedProgram:
    """A function's program and result structure; empty if it cannot travel."""
    made = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        result, out = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        made.append(out)
        return result

    body = stablehlo(jax.jit(flat), shapes, EXPORTABLE)
    return SerializedProgram(body, made[0] if body else None)


def stablehlo(jitted: Any, shapes: Sequence[jax.ShapeDtypeStruct], disabled_checks: Sequence[Any] = ()) -> bytes:
    """A program as StableHLO; empty if it cannot travel."""
    try:
        return bytes(jax.export.export(jitted, disabled_checks=disabled_checks)(*shapes).serialize())
    except NotImplementedError:  # host callbacks stay in the process that made them
        return b""
    except ValueError as error:  # XLA's own calls: only those of some age may be exported
        if "custom calls" not in str(error):
            raise
        return b""


# ---------------------------------------------------------------- programs over the devices of several processes


# XLA's default; said aloud it gives a program another key in the cache than what others have kept there.
OWN_KEY = {"xla_embed_ir_in_executable": False}


def loaded_jit(jitted: Any, devices: Sequence[Any], control: HostProcesses) -> CompiledTogether:
    """`jax.jit` over several processes' devices: a host's first rank compiles, others load.

    The cache does not help there: a process's place among the others is part of its keys. Ranks must call the function
    together for the first time. For CPUs only: compilers for GPUs may talk to each other.
    """

    def make(args: tuple) -> CompiledFunction:
        if not jax.tree.leaves(args):  # then nothing says which devices
            return CompiledFunction(lambda args: jitted(*args), lambda: jitted.lower(*args).compile())
        compiled = compile_or_load(jitted, args, devices, control)
        return CompiledFunction(lambda args: compiled(*args), lambda: compiled)

    return CompiledTogether(make)


def compile_or_load(jitted: Any, args: tuple, devices: Sequence[Any], control: HostProcesses) -> jax.stages.Compiled:
    """The compiled function; machine code travels within one host and job only."""
    lowered = jitted.lower(*args)  # on all ranks: it also loads what a program calls, such as LAPACK
    own = []

    def make() -> tuple | None:
        own.append(compile_afresh(lowered))
        try:
            return serialize(own[0])
        except (ValueError, NotImplementedError):  # such as one that calls back into Python
            return None

    with progress.phase("compiling a program of all ranks"):
        made = control.bcast_from_host_leader(make)
    if own:
        return own[0]
    return lowered.compile() if made is None else deserialize_and_load(*made, execution_devices=devices)


def compile_afresh(lowered: Any) -> Any:
    """Compile without the cache: programs from there lack functions when sent on."""
    name = "jax_persistent_cache_min_compile_time_secs"
    least_s = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        return lowered.compile(OWN_KEY)
    finally:
        jax.config.update(name, least_s)
