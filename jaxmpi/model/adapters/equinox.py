"""Models of Equinox."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, by_path, path_name
from jaxmpi.model.adapters.common import OncePerShape, check_call, check_maker
from jaxmpi.model.contract import Model, format_value, with_article


def equinox_model(
    make: Any,
    *,
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    axis_name: str = "batch",
    channels_first: bool = True,
) -> Model:
    """An Equinox module as a `Model`, under `vmap`: one example a call.

    Params are the floating-point arrays of the module. Model state is its `eqx.nn.State` and its arrays of other types.
    Both are dicts by path, such as `conv/weight`. The module is called as `module(image)`, with the state second if it
    holds any, and with `key=` if its call has it; each example gets its own key. A module with state gives
    `(outputs, state)`. In evaluation it is in `eqx.nn.inference_mode`.

    Args:
        make: builds the module from a key; or a module, whose arrays are then the initial ones.
        name, input_shape, classes: as of `nnx_model`.
        axis_name: of the `vmap`, for layers such as `eqx.nn.BatchNorm`.
        channels_first: whether the module takes f32[channels, height, width], as `eqx.nn` does.

    Raises:
        UsageError: `make` is no module and no function of one argument; by `init` and `apply`, if an image is not of
            `input_shape`.
    """
    import equinox as eqx

    way_out = "expected a function of a key that builds the module, such as lambda key: Net(key=key)"
    if not isinstance(make, eqx.Module):
        check_maker(name, make, (), way_out)

    def build(key: jax.Array) -> Any:
        module = make if isinstance(make, eqx.Module) else make(key)
        if not isinstance(module, eqx.Module):
            raise UsageError(f"{name}: got {with_article(module)} from its maker; {way_out}")
        try:
            return eqx.nn.make_with_state(lambda: module)()
        except ValueError as error:  # its state has been taken out already
            raise UsageError(f"{name}: leave eqx.nn.make_with_state to the adapter; {way_out}") from error

    @OncePerShape
    def structure() -> tuple[Any, Any]:
        return eqx.filter_eval_shape(build, jax.random.key(0))

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        module, state = build(key)
        arrays = jax.tree.map(jnp.asarray, eqx.filter(module, eqx.is_array))
        params, others = eqx.partition(arrays, eqx.is_inexact_array)
        return by_path(params), by_path(others) | by_name(module, state)

    def by_name(module: Any, state: Any) -> dict[str, jax.Array]:
        return dict(zip(state_names(module, state), jax.tree.leaves(state), strict=True))

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        empty, empty_state = structure()
        arrays = {**params, **model_state}
        module = jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.get(path_name(path), leaf), empty)
        module = module if train else eqx.nn.inference_mode(module)
        leaves = [model_state[leaf] for leaf in state_names(empty, empty_state)]
        state = jax.tree.unflatten(jax.tree.structure(empty_state), leaves)
        image = jnp.moveaxis(image, -1, 1) if channels_first else image
        call = over_examples(name, module, axis_name, stateful=bool(leaves))
        outputs, state = call(image, state, jax.random.split(key, len(image)))
        return outputs, model_state | by_name(empty, state) if train else model_state

    return check_call(name, init, apply, input_shape, classes)


def over_examples(name: str, module: Any, axis_name: str, stateful: bool) -> Callable:
    """A module of one example as (images, state, keys) -> (outputs, state)."""
    arguments = inspect.signature(module).parameters
    takes_key = "key" in arguments
    stateful = stateful or ("state" in arguments and arguments["state"].default is inspect.Parameter.empty)

    def of_one(image: jax.Array, state: Any, key: jax.Array) -> tuple[Any, Any]:
        result = module(image, *([state] if stateful else []), **({"key": key} if takes_key else {}))
        if not stateful:
            return result, state
        if not isinstance(result, tuple) or len(result) != 2 or type(result[1]) is not type(state):
            raise UsageError(
                f"{name}: got {format_value(result)} from a module that holds state; expected (outputs, state)"
            )
        return result

    return jax.vmap(of_one, in_axes=(0, None, 0), out_axes=(0, None), axis_name=axis_name)


def state_names(module: Any, state: Any) -> list[str]:
    """Names of an `eqx.nn.State`'s leaves, in order: `index path/path in value`."""
    import equinox as eqx

    is_index = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index)
    return [
        "/".join(filter(None, (path_name(path), path_name(inner))))
        for path, index in nodes
        if is_index(index)
        for inner, _ in jax.tree_util.tree_leaves_with_path(state.get(index))
    ]
