"""Synchronous descent with any Optax optimizer: gradients of all leaves travel as one flat vector."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.allreduce.buckets import fuse, split
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.functions.function import Function, Marker
from jaxmpi.functions.lifecycle import team
from jaxmpi.functions.reductions import mean, scatter
from jaxmpi.functions.variable import make, numbers


class Optimizer:
    """Result of `jaxmpi.optimizer`: params and optimizer state on every worker, and the two functions of a step."""

    def __init__(
        self,
        loss: Any,
        params: PyTree,
        tx: optax.GradientTransformation,
        inputs: Sequence[Marker],
        strategy: str | None,
    ) -> None:
        check(
            isinstance(inputs, (tuple, list)),
            f"optimizer: inputs: got {inputs!r}; expected a tuple, one for every input of the loss after its params",
        )
        is_optax = isinstance(tx, optax.GradientTransformation)
        check(is_optax, f"optimizer: tx: got {tx!r:.80}; expected an Optax transformation, such as optax.sgd(0.1)")
        numbers(params)  # refuse what is no tree of arrays before anything is placed
        like = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)]
        odd = sorted({str(x.dtype) for x in like if x.dtype != np.float32})
        check(not odd, f"optimizer: got params of {', '.join(odd)}; expected float32, which one flat gradient holds")
        structure = jax.tree.structure(params)
        self.params = make(team(), params)
        self.state = make(team(), tx.init(jax.tree.map(jnp.asarray, params)))
        self.gradient = make(team(), np.zeros(sum(x.size for x in like), np.float32))
        self.value = make(team(), np.float32(0))
        extended = optax.with_extra_args_support(tx)  # reduce_on_plateau wants the value, others nothing

        def gradient(params: PyTree, *examples: PyTree) -> tuple[jax.Array, jax.Array, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *examples)
            return value, fuse(jax.tree.leaves(grads)), value

        def update(flat: jax.Array, value: jax.Array, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            grads = jax.tree.unflatten(structure, split(flat, like))
            extra = {"value": value, "grad": grads, "value_fn": no_more_values}
            updates, state = extended.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        parts, kept = (self.gradient, self.value), (self.params, self.state)
        self._gradient = Function(gradient, (self.params, *inputs), (mean, *(mean(x) for x in parts)), (), strategy)
        self._update = Function(update, (*parts, *kept), (), kept, None)

    def __call__(self, *args: PyTree, batch: Any = None, batch_local: Any = None, slices: int = 1) -> jax.Array:
        """One step; the mean loss of the examples, before it. Args and errors: as of `Function.__call__`."""
        (loss,) = self._gradient(*args, batch=batch, batch_local=batch_local, slices=slices)
        self._update()
        return loss


def no_more_values(*_: Any, **__: Any) -> NoReturn:
    """Refuse the evaluations of a line search, while it is traced."""
    raise UsageError(
        "optimizer: tx evaluates the loss anew (value_fn), as line searches do, and a step has the examples no more; "
        "leave the search out, as in optax.lbfgs(0.1, linesearch=None), or drive one from the script through "
        "jaxmpi.function"
    )


def optimizer(
    loss: Any,
    params: PyTree,
    tx: optax.GradientTransformation,
    inputs: Sequence[Marker] = (scatter, scatter),
    strategy: str | None = None,
) -> Optimizer:
    """Synchronous descent: g = sum_r (n_r / n) grad loss(params, share_r), then one step of `tx` on every worker.

    Args:
        loss: (params, *inputs) -> the mean loss of some examples, f32[].
        params: tree of f32; every worker begins with it and all stay equal, bit for bit.
        tx: any Optax transformation; it is given value and grad, the loss and its gradient over all examples. One
            that evaluates the loss anew (value_fn), as a line search does, is refused.
        inputs, strategy: as of `jaxmpi.function`.

    Communicates: at every step the gradient, once, flat. Raises: UsageError: as `jaxmpi.function`; other params.
    """
    return Optimizer(loss, params, tx, inputs, strategy)
