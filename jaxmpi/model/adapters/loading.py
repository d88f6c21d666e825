"""Arrays of a trained model into a module of its library."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, by_path, mismatches, path_name
from jaxmpi.model.adapters.equinox import state_names
from jaxmpi.model.contract import with_article


def fill_leaves(module: Any, params: PyTree, model_state: PyTree, source: str) -> Any:
    """The module with these arrays, which are from `source`; see `jaxmpi.load(...).into`."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    if "flax" in libraries and hasattr(module, "init_with_output"):
        # When it is called, Flax compares shapes of the params it uses.
        return module.bind({"params": params, **model_state})
    if "flax" in libraries:
        return _into_nnx(module, params, model_state, source)
    if "equinox" in libraries or isinstance(module, tuple):
        return _into_equinox(module, params, model_state, source)
    raise UsageError(
        f"got {with_article(module)}; expected a module of Flax NNX, Linen or Equinox, or Equinox's (module, state): "
        "other programs take model.params and model.model_state, nested dicts of arrays"
    )


def _into_nnx(module: Any, params: PyTree, model_state: PyTree, source: str) -> Any:
    """An NNX module, changed in place."""
    from flax import nnx

    _, trained, _, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    for name, arrays, variables in (("params", params, trained), ("model_state", model_state, rest)):
        _check_same(f"{name} of {source}", by_path(arrays), by_path(nnx.to_pure_dict(variables)))
        nnx.update(module, nnx.restore_int_paths(jax.tree.map(jnp.asarray, arrays)))
    return module


def _into_equinox(module: Any, params: PyTree, model_state: PyTree, source: str) -> Any:
    """An Equinox module, or (module, state), with arrays from dicts by path."""
    import equinox as eqx

    net, state = module if isinstance(module, tuple) else (module, None)
    arrays = {name: jnp.asarray(leaf) for name, leaf in {**params, **model_state}.items()}
    names = state_names(net, state) if state is not None else []
    expected = by_path(eqx.filter(net, eqx.is_array))
    expected |= dict(zip(names, jax.tree.leaves(state), strict=True)) if state is not None else {}
    _check_same(source, arrays, expected)
    net = jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.get(path_name(path), leaf), net)
    if state is None:
        return net
    return net, jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names])


def _check_same(label: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `UsageError` unless both have the same paths, shapes and dtypes."""
    if lines := mismatches(got, expected):
        way_out = "make the module with the sizes of its training, or take model.params, nested dicts of arrays"
        raise UsageError("\n  ".join([f"{label}: not of this module:", *lines, way_out]))
