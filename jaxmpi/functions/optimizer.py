"""Synchronous descent with any Optax optimizer: all gradients are reduced as one vector.

A step is two functions over workers. The first computes gradients and takes their mean; in the second each worker
updates its own copy without an exchange. Params and optimizer state are variables, so they stay on the workers, equal
bit for bit. The mean is weighted by examples: unequal shares give the gradient over all examples. Fused into one
vector, the gradients are one reduction instead of one a leaf; so params must be float32. The loss is reduced with them
for transformations that take it, such as reduce_on_plateau. A line search cannot be made, since the update has no
examples to evaluate the loss on: Optax asks for value_fn.
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce.buckets import fuse, split
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.functions.function import Function, Marker
from jaxmpi.functions.lifecycle import current_group
from jaxmpi.functions.reductions import Outputs, mean, scatter
from jaxmpi.functions.variable import make_variable, numeric_leaves


class Optimizer:
    """Synchronous descent: every worker applies `tx` to the mean gradient.

    A step takes g = sum_r (n_r / n) grad loss(params, share_r), with n_r of the n examples on worker r.

    Args:
        loss: (params, *inputs) -> the mean loss of some examples, f32[]. With `model_state` (params, model_state,
            *inputs) -> (loss, model_state); with `aux` it returns (loss, aux); with both (loss, (model_state, aux)).
        params: tree of f32; every worker begins with it and all stay equal, bit for bit.
        tx: any Optax transformation; it is given value and grad, the loss and its gradient over all examples, but no
            value_fn, which a line search needs.
        inputs, strategy: as of `jaxmpi.function`.
        model_state: tree that every worker begins with and that the loss moves, such as running batch statistics.
        model_state_outputs: one reduction, or a tree of them, for what workers make of it: `mean` over examples keeps
            it equal on all; `local` leaves it to each worker.
        aux: one reduction, or a tree of them as `outputs` of `jaxmpi.function`, for what a step returns beside the
            loss.

    Communicates: at every step the gradient, flat, with the other means; then what else is reduced.

    Raises:
        UsageError: as `jaxmpi.function`; other params; a loss that does not return what is said above.

    `params`, `state` and `model_state` are variables; `model_state` is a tree of them as its reductions are one.
    """

    def __init__(
        self,
        loss: Any,
        params: PyTree,
        tx: optax.GradientTransformation,
        inputs: Sequence[Marker] = (scatter, scatter),
        strategy: str | None = None,
        *,
        model_state: PyTree = None,
        model_state_outputs: PyTree = mean,
        aux: PyTree = None,
    ) -> None:
        if not isinstance(inputs, (tuple, list)) or not isinstance(tx, optax.GradientTransformation):
            raise UsageError(
                f"optimizer: got tx {tx!r:.80} and inputs {inputs!r:.80}; expected an Optax transformation, a tuple "
                "of one for every input of the loss after its params"
            )
        numeric_leaves(params)  # refuse what is no tree of arrays before anything is placed
        like = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)]
        if odd := sorted({str(x.dtype) for x in like if x.dtype != np.float32}):
            raise UsageError(f"optimizer: got params of {', '.join(odd)}; expected float32, as the flat gradient is")
        structure = jax.tree.structure(params)
        # The model state is kept in a variable for each of its reductions.
        reductions = Outputs([] if model_state is None else [model_state_outputs])
        if into := [output for output in reductions.flat if output.into is not None]:
            raise UsageError(
                f"optimizer: model_state_outputs: got {into}; expected words: it makes the variables itself"
            )
        parts = reductions.split("optimizer: model_state", [model_state] if reductions.trees else [])
        numeric_leaves(parts)
        group = current_group()
        self.params = make_variable(group, params)
        self.state = make_variable(group, tx.init(jax.tree.map(jnp.asarray, params)))
        self.gradient = make_variable(group, np.zeros(sum(x.size for x in like), np.float32))
        self.value = make_variable(group, np.float32(0))
        states = [make_variable(group, part) for part in parts]
        self.model_state: Any = jax.tree.map(lambda i: states[i], reductions.numbers[0]) if reductions.trees else None
        self.has_aux = has_aux = aux is not None
        reduced = [i for i, output in enumerate(reductions.flat) if not output.stays]
        local = [i for i, output in enumerate(reductions.flat) if output.stays]
        extended = optax.with_extra_args_support(tx)  # reduce_on_plateau wants the value, others nothing

        def full_loss(params: PyTree, parts: Sequence[PyTree], examples: Sequence[PyTree]) -> tuple[Any, Any]:
            """The user's loss, any aux, and the parts of the new model state."""
            old = [jax.tree.map(lambda i: parts[i], tree) for tree in reductions.numbers]
            result = loss(params, *old, *examples)
            if not (old or has_aux):
                return result, ([], [])
            value, more = unpack_pair(result, "(loss, ...)")
            new, extra = unpack_pair(more, "(loss, (model_state, aux))") if old and has_aux else (more, more)
            new_parts = reductions.split("optimizer: the loss's model state", [new] if old else [])
            return value, ([extra] if has_aux else [], new_parts)

        def gradient(params: PyTree, *args: PyTree) -> tuple[Any, ...]:
            compute = jax.value_and_grad(full_loss, has_aux=True)
            (value, (extra, new)), grads = compute(params, args[: len(states)], args[len(states) :])
            return value, extra, fuse(jax.tree.leaves(grads)), value, *(new[i] for i in (*reduced, *local))

        def update(flat: jax.Array, value: jax.Array, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            grads = jax.tree.unflatten(structure, split(flat, like))
            extra = {"value": value, "grad": grads}  # no value_fn: the examples are gone
            updates, state = extended.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        # The loss's parameters may be passed by name; params and variables come by position.
        with contextlib.suppress(TypeError, ValueError):  # Python does not know them
            arguments = [*inspect.signature(loss).parameters.values()][1 + len(reductions.trees) :]
            by_position = [
                inspect.Parameter(f"_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(1 + len(states))
            ]
            gradient.__signature__ = inspect.Signature([*by_position, *arguments])  # pyright: ignore[reportFunctionMemberAccess]
        into_variables = [mean(self.gradient), mean(self.value), *(reductions.flat[i](states[i]) for i in reduced)]
        self._gradient = Function(
            gradient,
            inputs=(self.params, *states, *inputs),
            outputs=(mean, [aux] if has_aux else [], *into_variables),
            updates=tuple((states[i], reductions.flat[i].op or "mean") for i in local),  # over pieces
            strategy=strategy,
        )
        self._update = Function(
            update,
            inputs=(self.gradient, self.value, self.params, self.state),
            outputs=(),
            updates=(self.params, self.state),
        )

    def __call__(
        self, *args: PyTree, batch: Any = None, batch_local: Any = None, slices: int = 1, **named: PyTree
    ) -> Any:
        """Take a step; return the mean loss before it, with any aux.

        Args and errors: as of `Function.__call__`.
        """
        value, extra = self._gradient(*args, batch=batch, batch_local=batch_local, slices=slices, **named)
        self._update()
        return (value, *extra) if self.has_aux else value


def unpack_pair(result: Any, expected: str) -> tuple[Any, Any]:
    """The two parts of what a loss returned."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(f"optimizer: got {type(result).__name__} from the loss; expected {expected}")
    return result[0], result[1]


optimizer = Optimizer
