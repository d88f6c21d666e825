"""Models that are plain functions."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.adapters.common import check_call, takes_parameter, train_arguments
from jaxmpi.model.contract import Model, check_pair, with_article


def plain_model(
    init: Callable[..., Any], apply: Callable[..., Any], *, name: str, input_shape: tuple[int, ...], classes: int
) -> Model:
    """A pair of functions as a `Model`.

    | `init` | `apply` |
    |---|---|
    | `(key)` or `(key, image)` -> params | `(params, image)` -> outputs |
    | the same -> (params, state) | `(params, state, image)` -> (outputs, state) |

    The second argument of an `apply` with state is called `state` or `model_state`. Behind these, `apply` may have
    `key` and one of `TRAIN_ARGUMENTS`, which it gets by name. Params and state are trees of arrays in dicts, lists and
    tuples.

    Args:
        init: `image` is f32[1, height, width, channels].
        apply: `image` is f32[batch, height, width, channels].
        name, input_shape, classes: as of `nnx_model`.

    Raises:
        UsageError: a function with other arguments; by `init` and `apply`, a result that is none of the above, or an
            image not of `input_shape`.
    """
    inits = "init(key) or init(key, image), which gives params, or (params, state)"
    applies = "apply(params, image) or apply(params, state, image), and key and train by name"
    for role, function, expected in (("init", init, inits), ("apply", apply, applies)):
        if not callable(function):
            raise UsageError(f"{name}: got {with_article(function)} for {role}; expected {expected}")
    arguments = list(inspect.signature(apply).parameters)
    stateful = arguments[1:2] in (["state"], ["model_state"])
    parameters = inspect.signature(init).parameters.values()
    has_more = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    count = 2 if has_more or not takes_parameter(init, 1) else 1  # arguments with a default keep it
    if not takes_parameter(init, count):
        raise UsageError(f"{name}: got init{inspect.signature(init)}; expected {inits}")

    def by_name(key: Any, train: bool) -> dict[str, Any]:
        return train_arguments(apply, train) | ({"key": key} if "key" in arguments else {})

    if not takes_parameter(apply, 3 if stateful else 2, by_name(None, True)):
        raise UsageError(f"{name}: got apply{inspect.signature(apply)}; expected {applies}")

    def pair(result: Any, role: str) -> tuple[Any, Any]:
        if not stateful:
            return result, {}
        check_pair(result, f"{name}: {role}")
        return result

    def model_init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        variables = pair(init(*(key, image)[:count]), "init, if apply takes a state: expected (params, state)")
        return jax.tree.map(jnp.asarray, variables)

    def model_apply(
        params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool
    ) -> tuple[Any, PyTree]:
        state = (model_state,) if stateful else ()
        outputs, state = pair(apply(params, *state, image, **by_name(key, train)), "apply: expected (outputs, state)")
        return outputs, state if train else model_state

    return check_call(name, model_init, model_apply, input_shape, classes)
