"""One compilation for all ranks of a host; programs are sent as StableHLO.

Eight ranks that trace and compile the same step on two cores take eight times as long as one. So the first rank of a
host traces the function and sends StableHLO to the others. It compiles first, and the others read the program from
JAX's compilation cache. The cache does not help for programs over several processes' devices, whose keys contain the
process's place: `loaded_jit` sends the compiled executable, on CPUs only. A program that cannot be exported is compiled
on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.host_callbacks import EXPORTABLE
from jaxmpi.runtime.progress import phase


class CompiledFunction(NamedTuple):
    """A function compiled for arguments of one kind."""

    run: Callable[[tuple], PyTree]  # function of the arguments
    compiled: Callable[[], jax.stages.Compiled]


class CompiledTogether:
    """A function that a host's ranks compile together, at the first call with each structure, shapes and dtypes."""

    def __init__(self, make: Callable[[tuple], CompiledFunction]) -> None:
        self._make, self._programs = make, dict[Any, CompiledFunction]()

    def __call__(self, *args: PyTree) -> PyTree:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] # JAX refuses compiled programs then
            with jax.disable_jit(False):
                return self.program(args).run(args)
        return self.program(args).run(args)

    def program(self, args: tuple) -> CompiledFunction:
        """The program for arguments of this kind; ranks compile it together."""
        leaves, structure = jax.tree.flatten(args)
        kind = structure, tuple(_shape_and_dtype(leaf) for leaf in leaves)
        if kind not in self._programs:
            self._programs[kind] = self._make(args)
        return self._programs[kind]


def compiled_for(function: Any, args: tuple) -> jax.stages.Compiled:
    """The program that a jit or `CompiledTogether` keeps for these arguments."""
    if isinstance(function, CompiledTogether):
        return function.program(args).compiled()
    return function.lower(*args).compile()


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype, of JAX's arrays without `result_type` (2 ms for 512)."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else (np.shape(leaf), jnp.result_type(leaf))


def shared_jit(function: Callable, donate_argnums: tuple[int, ...], control: HostProcesses) -> CompiledTogether:
    """`jax.jit` that a host's first rank traces and compiles for all.

    The others read the program from the cache. Ranks must call the function together for the first time.
    """
    return CompiledTogether(lambda args: _compile_together(function, args, donate_argnums, control))


def _compile_together(
    function: Callable, args: tuple, donate_argnums: tuple[int, ...], control: HostProcesses
) -> CompiledFunction:
    """The compiled function for arguments of this kind."""
    leaves, structure = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(*_shape_and_dtype(leaf)) for leaf in leaves]
    argument = np.repeat(range(len(args)), [len(jax.tree.leaves(arg)) for arg in args])
    donated = tuple(np.flatnonzero(np.isin(argument, donate_argnums)).tolist())
    jax.effects_barrier()  # the control plane speaks only when the exchange is silent
    name = getattr(getattr(function, "func", function), "__name__", "a program")  # name of a partial's function, too
    with phase(f"tracing {name}"):
        body, result = control.bcast_from_host_leader(lambda: _trace(function, structure, shapes))
    if not body:
        jitted = jax.jit(function, donate_argnums=donate_argnums)
        return CompiledFunction(lambda args: jitted(*args), lambda: jitted.lower(*args).compile())
    # The first rank too compiles what it has sent, so that all look for one cache key.
    exported = jax.export.deserialize(bytearray(body))
    # Results of a program with effects are bound to their device, unlike its first arguments: one program for both.
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if exported.ordered_effects else None
    jitted = jax.jit(exported.call, donate_argnums=donated, in_shardings=place)
    lowered = jitted.lower(*shapes)
    if control.local_rank != 0:
        control.host_barrier()
    with phase(f"compiling {name}"):
        compiled = lowered.compile()
    if control.local_rank == 0:
        with phase(f"waiting for the other ranks to trace {name}"):
            control.host_barrier()
    # JAX leaves out the tokens of ordered effects if the compiled program is called by itself.
    run = jitted if exported.ordered_effects else compiled
    return CompiledFunction(lambda args: jax.tree.unflatten(result, run(*jax.tree.leaves(args))), lambda: compiled)


def _trace(function: Callable, structure: Any, shapes: list[jax.ShapeDtypeStruct]) -> tuple[bytes, Any]:
    """A function's program over flat leaves, and its result's structure; empty if it cannot be sent."""
    results = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        result, out = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        results.append(out)
        return result

    body = stablehlo(jax.jit(flat), shapes, EXPORTABLE)
    return (body, results[0]) if body else (b"", None)


def stablehlo(jitted: Any, shapes: Sequence[jax.ShapeDtypeStruct], disabled_checks: Sequence[Any] = ()) -> bytes:
    """A program as StableHLO; empty if it cannot be sent."""
    try:
        return bytes(jax.export.export(jitted, disabled_checks=disabled_checks)(*shapes).serialize())
    except NotImplementedError:  # host callbacks stay in the process that made them
        return b""
    except ValueError as error:  # XLA's own calls: only those of some age may be exported
        if "custom calls" not in str(error):
            raise
        return b""


# ---------------------------------------------------------------- programs over the devices of several processes


# XLA's default; given explicitly it gives a program another key in the cache than what others have kept there.
OWN_KEY = {"xla_embed_ir_in_executable": False}


def loaded_jit(jitted: Any, devices: Sequence[Any], control: HostProcesses) -> CompiledTogether:
    """`jax.jit` over several processes' devices: a host's first rank compiles, others load.

    Ranks must call the function together for the first time. For CPUs only: compilers for GPUs may talk to each other.
    """

    def make(args: tuple) -> CompiledFunction:
        if not jax.tree.leaves(args):  # then nothing says which devices
            return CompiledFunction(lambda args: jitted(*args), lambda: jitted.lower(*args).compile())
        compiled = _compile_or_load(jitted, args, devices, control)
        return CompiledFunction(lambda args: compiled(*args), lambda: compiled)

    return CompiledTogether(make)


def _compile_or_load(jitted: Any, args: tuple, devices: Sequence[Any], control: HostProcesses) -> jax.stages.Compiled:
    """The compiled function; machine code is sent within one host and job only."""
    lowered = jitted.lower(*args)  # on all ranks: it also loads what a program calls, such as LAPACK
    compiled_here = []

    def make() -> tuple | None:
        # Compiled without the cache: programs from there lack functions when sent on.
        option = "jax_persistent_cache_min_compile_time_secs"
        least_s = getattr(jax.config, option)
        jax.config.update(option, float("inf"))
        try:
            compiled_here.append(lowered.compile(OWN_KEY))
        finally:
            jax.config.update(option, least_s)
        try:
            return serialize(compiled_here[0])
        except (ValueError, NotImplementedError):  # such as one that calls back into Python
            return None

    with phase("compiling a program of all ranks"):
        made = control.bcast_from_host_leader(make)
    if compiled_here:
        return compiled_here[0]
    return lowered.compile() if made is None else deserialize_and_load(*made, execution_devices=devices)
