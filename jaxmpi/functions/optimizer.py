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
from collections.abc import Callable, Sequence
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
from jaxmpi.functions.reductions import Output, Outputs, mean, scatter
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
        self._like = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)]
        if odd := sorted({str(x.dtype) for x in self._like if x.dtype != np.float32}):
            raise UsageError(f"optimizer: got params of {', '.join(odd)}; expected float32, as the flat gradient is")
        self._structure, self._loss = jax.tree.structure(params), loss
        self._tx = optax.with_extra_args_support(tx)  # reduce_on_plateau wants the value, others nothing
        self._has_state, self._has_aux = model_state is not None, aux is not None
        # The model state is kept in a variable for each of its reductions.
        words = Outputs([model_state_outputs] if self._has_state else [])
        if into := [output for output in words.flat if output.into is not None]:
            raise UsageError(
                f"optimizer: model_state_outputs: got {into}; expected words: it makes the variables itself"
            )
        parts = words.split("optimizer: model_state", [model_state] if self._has_state else [])
        numeric_leaves(parts)
        group = current_group()
        self.params = make_variable(group, params)
        self.state = make_variable(group, tx.init(jax.tree.map(jnp.asarray, params)))
        self.gradient = make_variable(group, np.zeros(sum(x.size for x in self._like), np.float32))
        self.value = make_variable(group, np.float32(0))
        states = [make_variable(group, part) for part in parts]
        self._state_structure = jax.tree.structure(words.trees)
        variables = jax.tree.unflatten(self._state_structure, states)
        self.model_state: Any = variables[0] if self._has_state else None
        # Variables take the results as outputs do, so the state's tree goes through the function as the user has it.
        state_leaves = [
            Output(word.op or "mean", stays=word.stays, into=variable)  # a local one takes the mean over pieces
            for word, variable in zip(words.flat, states, strict=True)
        ]
        self._gradient = Function(
            self._make_gradient(len(states)),
            inputs=(self.params, *states, *inputs),
            outputs=(
                *(mean, [aux] if self._has_aux else [], mean(self.gradient), mean(self.value)),
                *jax.tree.unflatten(self._state_structure, state_leaves),
            ),
            strategy=strategy,
        )
        self._update = Function(
            self._make_update(),
            inputs=(self.gradient, self.value, self.params, self.state),
            outputs=(),
            updates=(self.params, self.state),
        )

    def _make_gradient(self, states: int) -> Callable[..., tuple[Any, ...]]:
        """The function of params, parts of the model state and examples, whose outputs are reduced."""

        def full_loss(params: PyTree, args: Sequence[PyTree]) -> tuple[Any, Any]:
            """The user's loss, with aux and model state as lists of one or none."""
            result = self._loss(params, *jax.tree.unflatten(self._state_structure, args[:states]), *args[states:])
            if not (self._has_state or self._has_aux):
                return result, ([], [])
            value, more = unpack_pair(result, "(loss, ...)")
            if self._has_state and self._has_aux:
                new, extra = unpack_pair(more, "(loss, (model_state, aux))")
                return value, ([extra], [new])
            return value, ([more], []) if self._has_aux else ([], [more])

        def gradient(params: PyTree, *args: PyTree) -> tuple[Any, ...]:
            (value, (extra, new)), grads = jax.value_and_grad(full_loss, has_aux=True)(params, args)
            return value, extra, fuse(jax.tree.leaves(grads)), value, *new

        # The loss's parameters may be passed by name; params and variables come by position.
        with contextlib.suppress(TypeError, ValueError):  # Python does not know them
            arguments = [*inspect.signature(self._loss).parameters.values()][1 + self._has_state :]
            first = [inspect.Parameter(f"_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(1 + states)]
            gradient.__signature__ = inspect.Signature([*first, *arguments])  # pyright: ignore[reportFunctionMemberAccess]
        return gradient

    def _make_update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """The function of the gradient, params and optimizer state, which each worker computes for itself."""

        def update(flat: jax.Array, value: jax.Array, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            grads = jax.tree.unflatten(self._structure, split(flat, self._like))
            extra = {"value": value, "grad": grads}  # no value_fn: the examples are gone
            updates, state = self._tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return update

    def __call__(
        self, *args: PyTree, batch: Any = None, batch_local: Any = None, slices: int = 1, **named: PyTree
    ) -> Any:
        """Take a step; return the mean loss before it, with any aux.

        Args and errors: as of `Function.__call__`.
        """
        value, extra, *_ = self._gradient(*args, batch=batch, batch_local=batch_local, slices=slices, **named)
        self._update()
        return (value, *extra) if self._has_aux else value


def unpack_pair(result: Any, expected: str) -> tuple[Any, Any]:
    """The two parts of what a loss returned."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(f"optimizer: got {type(result).__name__} from the loss; expected {expected}")
    return result[0], result[1]


optimizer = Optimizer
