"""Models of Flax Linen."""

from typing import Any

import jax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.adapters.common import check_call, train_arguments
from jaxmpi.model.contract import Model, with_article


def linen_model(module: Any, *, name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """A Flax Linen module as a `Model`.

    Params and model state, which is all other collections, are nested dicts of arrays; `intermediates` are no state. In
    training every random stream starts from the step's key, and all collections of the state are mutable; in evaluation
    there is no random stream, and the model state comes back as it went in.

    Args:
        module: an instance. If its call has an argument of `TRAIN_ARGUMENTS` it gets it by name.
        name, input_shape, classes: as of `nnx_model`.

    Raises:
        UsageError: `module` is no Linen module; by `init` and `apply`, if an image is not of `input_shape`.
    """
    from flax import linen
    from flax.core import unfreeze

    if not isinstance(module, linen.Module):
        way_out = "expected an instance of a flax.linen.Module, such as linen_model(Net(), ...)"
        raise UsageError(f"{name}: got {with_article(module)}; {way_out}")
    net: Any = module  # whose switches for training have no types

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        # Without a stream of its own name a layer takes `params`.
        variables = net.init({"params": key}, image, **train_arguments(module, True))
        collections = unfreeze(linen.meta.unbox(variables))
        return collections.pop("params", {}), collections

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        variables, keys = {"params": params, **model_state}, {"params": key} if train else {}
        outputs, updated = net.apply(
            variables, image, **train_arguments(module, train), mutable=list(model_state), rngs=keys
        )
        return outputs, unfreeze(updated) if train else model_state

    return check_call(name, init, apply, input_shape, classes)
