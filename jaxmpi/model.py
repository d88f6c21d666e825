"""The model contract, and thin adapters that make other libraries' modules fit it unchanged."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.config import check

PyTree = Any


class Model(NamedTuple):
    """A model as a pair of pure functions and what the trainer must know of its input and output.

    `init(key, image) -> (params, model_state)`, where image is f32[1, height, width, channels];
    `apply(params, model_state, image, key, train) -> (outputs, model_state)`, where outputs are logits
    f32[batch, classes], or in training a tuple of logits whose first entry is the main one.
    """

    name: str
    init: Callable[[jax.Array, jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, jax.Array, jax.Array, bool], tuple[Any, PyTree]]
    input_shape: tuple[int, ...]  # of one example: (height, width, channels)
    classes: int


def nnx_model(make: Callable[[Any], Any], *, name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """A Flax NNX module as a `Model`; `make(rngs)` builds it, `module(image, train)` calls it.

    Params are its `nnx.Param`s; every other variable but its random streams is model state, both
    as nested dicts of arrays. No random stream lives in the train state: each is rebuilt from
    `fold_in(key, i)` at every call, so a step depends on its key only. In evaluation the module's
    layers are put in eval mode and the model state comes back as it went in.

    Args:
        make: builds the module from an `nnx.Rngs`; called once for real by each `init`, and once
            on abstract values, when `apply` is first traced.
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.

    Raises:
        UsageError: by `init` and `apply`, where an image is not of `input_shape`.
    """
    from flax import nnx  # here, since a model of another library need not pay for its import

    @functools.cache  # building a Model costs nothing; the first apply pays
    def structure() -> tuple[Any, list[tuple[Any, Any]], frozenset[Any]]:
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graph, _, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        paths = frozenset(path for path, _ in nnx.to_flat_state(rest))
        return graph, [(path, leaf) for path, leaf in nnx.to_flat_state(streams)], paths

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        check_image(name, image, input_shape)
        _, params, _, rest = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        check_image(name, image, input_shape)
        graph, streams, state_paths = structure()
        rngs = nnx.from_flat_state(fresh_streams(streams, key))
        module = nnx.merge(graph, params, rngs, model_state)
        if not train:
            module.eval()  # so that a layer that is not told `train` is deterministic as well
            return module(image, False), model_state
        outputs = module(image, True)
        # By path: what a call adds, such as sown intermediates, is no state.
        state = nnx.state(module, lambda path, _: path in state_paths)
        return outputs, nnx.to_pure_dict(state)

    return Model(name, init, apply, tuple(input_shape), classes)


def fresh_streams(streams: list[tuple[Any, Any]], key: jax.Array) -> dict[Any, jax.Array]:
    """The random streams of a module at a new key: key i is `fold_in(key, i)`, counts are 0."""
    fresh = {}
    for i, (path, leaf) in enumerate(streams):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            own = jax.random.fold_in(key, i)
            fresh[path] = jax.random.split(own, leaf.shape) if leaf.shape else own
        else:
            fresh[path] = jnp.zeros(leaf.shape, leaf.dtype)
    return fresh


def check_image(name: str, image: jax.Array, input_shape: tuple[int, ...]) -> None:
    """Raise `UsageError` unless `image` is a batch of `input_shape`."""
    check(
        tuple(image.shape[1:]) == tuple(input_shape),
        f"{name}: got images of (height, width, channels) {tuple(image.shape[1:])}; "
        f"expected {tuple(input_shape)}: change the data's crop or resize, or the model's size",
    )
