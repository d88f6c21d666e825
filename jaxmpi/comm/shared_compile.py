"""One compilation for all ranks of a host; programs are sent as StableHLO.

Eight ranks that trace and compile the same step on two cores take eight times as long as one. So the first rank of a
host traces the function and sends StableHLO to the others. It compiles first, and the others read the program from
JAX's compilation cache. A program that cannot be exported is compiled on every rank, and so are programs over several
processes' devices, whose keys in the cache contain the process's place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime.host_callbacks import EXPORTABLE
from jaxmpi.runtime.progress import phase

# (function of the arguments' tree, function that returns the compiled program)
Program = tuple[Callable[[tuple], PyTree], Callable[[], jax.stages.Compiled]]


class SharedJit:
    """`jax.jit` that a host's first rank traces and compiles for all.

    Its ranks make the first call of each structure, shape and dtype together.
    """

    def __init__(self, function: Callable, donate_argnums: tuple[int, ...], control: HostProcesses) -> None:
        self._function, self._donated, self._control = function, donate_argnums, control
        self._programs = dict[Any, Program]()

    def __call__(self, *args: PyTree) -> PyTree:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] # JAX refuses compiled programs then
            with jax.disable_jit(False):
                return self.program(args)[0](args)
        return self.program(args)[0](args)

    def program(self, args: tuple) -> Program:
        """The program for arguments of this kind; ranks compile it together."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple(_shape_and_dtype(leaf) for leaf in leaves)
        if (structure, shapes) not in self._programs:
            self._programs[structure, shapes] = self._compile(structure, shapes, args)
        return self._programs[structure, shapes]

    def _compile(self, structure: Any, shapes: tuple, args: tuple) -> Program:
        function, control, avals = self._function, self._control, [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        jax.effects_barrier()  # the control plane speaks only when the exchange is silent
        name = getattr(getattr(function, "func", function), "__name__", "a program")  # of a partial's function, too
        with phase(f"tracing {name}"):
            body, result = control.bcast_from_host_leader(lambda: _trace(function, structure, avals))
        if not body:
            jitted = jax.jit(function, donate_argnums=self._donated)
            return lambda args: jitted(*args), lambda: jitted.lower(*args).compile()
        # The first rank too compiles what it has sent, so that all look for one cache key.
        exported = jax.export.deserialize(bytearray(body))
        argument = np.repeat(range(len(args)), [len(jax.tree.leaves(arg)) for arg in args])
        donated = tuple(np.flatnonzero(np.isin(argument, self._donated)).tolist())
        # Results of a program with effects are bound to their device, unlike its first arguments: one program for both.
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if exported.ordered_effects else None
        jitted = jax.jit(exported.call, donate_argnums=donated, in_shardings=place)
        lowered = jitted.lower(*avals)
        if control.local_rank != 0:
            control.host_barrier()
        with phase(f"compiling {name}"):
            compiled = lowered.compile()
        if control.local_rank == 0:
            with phase(f"waiting for the other ranks to trace {name}"):
                control.host_barrier()
        # JAX leaves out the tokens of ordered effects if the compiled program is called by itself.
        run = jitted if exported.ordered_effects else compiled
        return lambda args: jax.tree.unflatten(result, run(*jax.tree.leaves(args))), lambda: compiled


def compiled_for(function: Any, args: tuple) -> jax.stages.Compiled:
    """The program that a jit or `SharedJit` keeps for these arguments."""
    return function.program(args)[1]() if isinstance(function, SharedJit) else function.lower(*args).compile()


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype, of JAX's arrays without `result_type` (2 ms for 512)."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else (np.shape(leaf), jnp.result_type(leaf))


def _trace(function: Callable, structure: Any, avals: list[jax.ShapeDtypeStruct]) -> tuple[bytes, Any]:
    """A function's program over flat leaves, and its result's structure; empty if it cannot be sent."""
    results = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        result, out = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        results.append(out)
        return result

    body = stablehlo(jax.jit(flat), avals, EXPORTABLE)
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
