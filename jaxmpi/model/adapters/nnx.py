"""Models of Flax NNX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, path_name
from jaxmpi.model.adapters.common import OncePerShape, check_call, check_maker, train_arguments
from jaxmpi.model.contract import Model, with_article


def nnx_model(make: Callable[[Any], Any], *, name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """A Flax NNX module as a `Model`, called as `module(image)`.

    Params are its `nnx.Param`s; every other variable but its random streams is model state, both as nested dicts of
    arrays. No random stream lives in the train state: each is rebuilt from `fold_in(key, i)` at every call, so a step
    depends on its key only. In evaluation the module's layers are put in eval mode and the model state comes back as it
    went in.

    Args:
        make: builds the module from an `nnx.Rngs`; called once for real by each `init`, and once on abstract values,
            when `apply` is first traced. A module whose call has an argument of `TRAIN_ARGUMENTS` gets it by name.
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.

    Raises:
        UsageError: `make` is no function of one argument; no name, shape or number of classes; by `init` and `apply`,
            if an image is not of `input_shape`.
    """
    from flax import nnx  # here, since a model of another library need not pay for its import

    way_out = "expected a function that builds the module, such as lambda rngs: Net(rngs=rngs)"
    check_maker(name, make, nnx.Module, way_out)

    def build(rngs: Any) -> Any:
        module = make(rngs)
        if not isinstance(module, nnx.Module):
            raise UsageError(f"{name}: got {with_article(module)} from its maker; {way_out}")
        _refuse_bare(name, _bare_arrays(module))
        return module

    @OncePerShape  # building a Model costs nothing; the first apply pays
    def structure() -> tuple[Any, list[tuple[Any, Any]], frozenset[Any]]:
        module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        graph, _, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        paths = frozenset(path for path, _ in nnx.to_flat_state(rest))
        return graph, [(path, leaf) for path, leaf in nnx.to_flat_state(streams)], paths

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        _, params, _, rest = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        paths = structure()[2]
        _refuse_bare(name, ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest) if path not in paths])
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        graph, streams, state_paths = structure()
        # Streams are not in the train state: a resumed step draws what it would have drawn, from its key alone.
        rngs = nnx.from_flat_state(_fresh_streams(streams, key))
        module = nnx.merge(graph, params, rngs, model_state)
        if not train:
            module.eval()  # so that a layer that is not given `train` is deterministic as well
            return module(image, **train_arguments(module, False)), model_state
        outputs = module(image, **train_arguments(module, True))
        # By path: what a call adds, such as sown intermediates, is no state.
        state = nnx.state(module, lambda path, _: path in state_paths)
        return outputs, nnx.to_pure_dict(state)

    return check_call(name, init, apply, input_shape, classes)


def _bare_arrays(module: Any) -> list[str]:
    """Paths of JAX arrays in a module's attributes that are no variables.

    NNX does not know them as leaves while a module is built on abstract values: they would be constants.
    """
    from flax import nnx

    is_known = lambda node: isinstance(node, (nnx.Variable, nnx.Pytree))  # noqa: E731
    return [
        "/".join(map(str, (*path, name, path_name(inner)))).rstrip("/")
        for path, part in nnx.iter_modules(module)
        for name, value in vars(part).items()
        for inner, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_known)
        if isinstance(leaf, jax.Array) and not is_known(leaf)
    ]


def _refuse_bare(name: str, paths: list[str]) -> None:
    """Refuse arrays that would silently not be trained."""
    if paths:
        way_out = "make it nnx.Param to train it, else nnx.Variable or a NumPy array"
        raise UsageError(f"{name}: {', '.join(paths)}: a JAX array that is no variable; {way_out}")


def _fresh_streams(streams: list[tuple[Any, Any]], key: jax.Array) -> dict[Any, jax.Array]:
    """Random streams from `key`: key i is `fold_in(key, i)`, counts are 0."""
    fresh = {}
    for i, (path, leaf) in enumerate(streams):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            stream = jax.random.fold_in(key, i)
            fresh[path] = jax.random.split(stream, leaf.shape) if leaf.shape else stream
        else:
            fresh[path] = jnp.zeros(leaf.shape, leaf.dtype)
    return fresh
