"""Thin adapters that make other libraries' modules fit the model contract: Flax NNX and Linen, Equinox, functions."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.config import UsageError, check
from jaxmpi.model import Model, a, check_facts, check_image, check_pair, shown

PyTree = Any


def nnx_model(make: Callable[[Any], Any], *, name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """A Flax NNX module as a `Model`; `make(rngs)` builds it, `module(image)` calls it.

    Params are its `nnx.Param`s; every other variable but its random streams is model state, both
    as nested dicts of arrays. No random stream lives in the train state: each is rebuilt from
    `fold_in(key, i)` at every call, so a step depends on its key only. In evaluation the module's
    layers are put in eval mode and the model state comes back as it went in.

    Args:
        make: builds the module from an `nnx.Rngs`; called once for real by each `init`, and once
            on abstract values, when `apply` is first traced. A module whose call has an argument
            of `TRAIN_ARGUMENTS` gets it by name.
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.

    Raises:
        UsageError: `make` is no function of one argument; no name, shape or number of classes; by `init`
            and `apply`, where an image is not of `input_shape`.
    """
    from flax import nnx  # here, since a model of another library need not pay for its import

    way_out = "expected a function that builds the module, such as lambda rngs: Net(rngs=rngs)"
    check_maker(name, make, nnx.Module, way_out)

    def build(rngs: Any) -> Any:
        module = make(rngs)
        check(isinstance(module, nnx.Module), f"{name}: got {a(module)} from its maker; {way_out}")
        check_bare(name, bare_arrays(module))
        return module

    @functools.cache  # building a Model costs nothing; the first apply pays
    def structure() -> tuple[Any, list[tuple[Any, Any]], frozenset[Any]]:
        module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        graph, _, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        paths = frozenset(path for path, _ in nnx.to_flat_state(rest))
        return graph, [(path, leaf) for path, leaf in nnx.to_flat_state(streams)], paths

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        _, params, _, rest = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        check_bare(
            name, ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest) if path not in structure()[2]]
        )
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        graph, streams, state_paths = structure()
        rngs = nnx.from_flat_state(fresh_streams(streams, key))
        module = nnx.merge(graph, params, rngs, model_state)
        if not train:
            module.eval()  # so that a layer that is not told `train` is deterministic as well
            return module(image, **train_arguments(module, False)), model_state
        outputs = module(image, **train_arguments(module, True))
        # By path: what a call adds, such as sown intermediates, is no state.
        state = nnx.state(module, lambda path, _: path in state_paths)
        return outputs, nnx.to_pure_dict(state)

    return checked(name, init, apply, input_shape, classes)


def bare_arrays(module: Any) -> list[str]:
    """Paths of the JAX arrays in a module's attributes that are no variables.

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


def check_bare(name: str, paths: list[str]) -> None:
    """Refuse arrays that would silently not be trained."""
    check(
        not paths,
        f"{name}: {', '.join(paths)}: a JAX array that is no variable; make it nnx.Param to train it, else "
        "nnx.Variable or a NumPy array",
    )


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


def linen_model(module: Any, *, name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """A Flax Linen module as a `Model`: params as they are, all other collections as model state.

    Params and model state are nested dicts of arrays; `intermediates` are no state. In training
    every random stream starts from the step's key, and all collections of the state are mutable;
    in evaluation there is no random stream, and the model state comes back as it went in.

    Args:
        module: an instance. Where its call has an argument of `TRAIN_ARGUMENTS` it gets it by name.
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.

    Raises:
        UsageError: `module` is no Linen module; by `init` and `apply`, where an image is not of
            `input_shape`.
    """
    from flax import linen
    from flax.core import unfreeze

    check(
        isinstance(module, linen.Module),
        f"{name}: got {a(module)}; expected an instance of a flax.linen.Module, such as linen_model(Net(), ...)",
    )

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        # Without a stream of its own name a layer takes `params`.
        variables = module.init({"params": key}, image, **train_arguments(module, True))
        collections = unfreeze(linen.meta.unbox(variables))
        return collections.pop("params", {}), collections

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        variables, keys = {"params": params, **model_state}, {"params": key} if train else {}
        outputs, updated = module.apply(
            variables, image, **train_arguments(module, train), mutable=list(model_state), rngs=keys
        )
        return outputs, unfreeze(updated) if train else model_state

    return checked(name, init, apply, input_shape, classes)


def equinox_model(
    make: Any,
    *,
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    axis_name: str = "batch",
    channels_first: bool = True,
) -> Model:
    """An Equinox module as a `Model`: one example a call, under `vmap`; `make(key)` builds it.

    Params are the floating-point arrays of the module. Model state is its `eqx.nn.State`, and its
    arrays of other types. Both are dicts by path, such as `conv/weight`. The module is called as
    `module(image)`, with the state second where it holds any, and `key=` where its call has that
    argument, of which each example gets one of its own. A module with state gives
    `(outputs, state)`. In evaluation it is in `eqx.nn.inference_mode`.

    Args:
        make: builds the module from a key; or a module, whose arrays are then the initial ones.
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.
        axis_name: of the `vmap`, for layers such as `eqx.nn.BatchNorm`.
        channels_first: whether the module takes f32[channels, height, width], as `eqx.nn` does.

    Raises:
        UsageError: `make` is no module and no function of one argument; by `init` and `apply`,
            where an image is not of `input_shape`.
    """
    import equinox as eqx

    way_out = "expected a function of a key that builds the module, such as lambda key: Net(key=key)"
    if not isinstance(make, eqx.Module):
        check_maker(name, make, (), way_out)

    def build(key: jax.Array) -> Any:
        module = make if isinstance(make, eqx.Module) else make(key)
        check(isinstance(module, eqx.Module), f"{name}: got {a(module)} from its maker; {way_out}")
        try:
            return eqx.nn.make_with_state(lambda: module)()
        except ValueError as error:  # its state has been taken out already
            raise UsageError(f"{name}: leave eqx.nn.make_with_state to the adapter; {way_out}") from error

    @functools.cache
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

    return checked(name, init, apply, input_shape, classes)


def over_examples(name: str, module: Any, axis_name: str, stateful: bool) -> Callable:
    """(images, state, keys) -> (outputs, state) of an Equinox module that takes one example."""
    arguments = inspect.signature(module).parameters
    takes_key = "key" in arguments
    stateful = stateful or ("state" in arguments and arguments["state"].default is inspect.Parameter.empty)

    def of_one(image: jax.Array, state: Any, key: jax.Array) -> tuple[Any, Any]:
        result = module(image, *([state] if stateful else []), **({"key": key} if takes_key else {}))
        if not stateful:
            return result, state
        check(
            isinstance(result, tuple) and len(result) == 2 and type(result[1]) is type(state),
            f"{name}: got {shown(result)} from a module that holds state; expected (outputs, state)",
        )
        return result

    return jax.vmap(of_one, in_axes=(0, None, 0), out_axes=(0, None), axis_name=axis_name)


def state_names(module: Any, state: Any) -> list[str]:
    """Names of the leaves of an `eqx.nn.State`, in their order: path of the index, path in its value."""
    import equinox as eqx

    is_index = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index)
    return [
        "/".join(filter(None, (path_name(path), path_name(inner))))
        for path, index in nodes
        if is_index(index)
        for inner, _ in jax.tree_util.tree_leaves_with_path(state.get(index))
    ]


def by_path(tree: PyTree) -> dict[str, Any]:
    """Leaves by names such as `layers/0/weight`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_name(path: Any) -> str:
    """`layers/0/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def plain_model(
    init: Callable[..., Any], apply: Callable[..., Any], *, name: str, input_shape: tuple[int, ...], classes: int
) -> Model:
    """A pair of functions as a `Model`.

    | `init` | `apply` |
    |---|---|
    | `(key)` or `(key, image)` -> params | `(params, image)` -> outputs |
    | the same -> (params, state) | `(params, state, image)` -> (outputs, state) |

    The second argument of an `apply` with state is called `state` or `model_state`. Behind these,
    `apply` may have `key` and one of `TRAIN_ARGUMENTS`, which it gets by name. Params and state are
    trees of arrays in dicts, lists and tuples.

    Args:
        init: `image` is f32[1, height, width, channels].
        apply: `image` is f32[batch, height, width, channels].
        name: of the model, for errors and records.
        input_shape: of one example: (height, width, channels).
        classes: number of logits.

    Raises:
        UsageError: a function with other arguments; by `init` and `apply`, a result that is none
            of the above, or an image not of `input_shape`.
    """
    inits = "init(key) or init(key, image), which gives params, or (params, state)"
    applies = "apply(params, image) or apply(params, state, image), and key and train by name"
    check(callable(init), f"{name}: got {a(init)} for init; expected {inits}")
    check(callable(apply), f"{name}: got {a(apply)} for apply; expected {applies}")
    arguments = list(inspect.signature(apply).parameters)
    stateful = arguments[1:2] in (["state"], ["model_state"])
    parameters = inspect.signature(init).parameters.values()
    has_more = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    count = 2 if has_more or not takes(init, 1) else 1  # arguments with a default keep it
    shapes = [parameter.name for parameter in parameters if "shape" in parameter.name]
    check(not shapes, f"{name}: init takes {shapes}: wrap it, as lambda key, image: init(key, image.shape)[1]")
    check(
        not arguments[1:2] or arguments[1] not in ("rng", "rngs", "key"),
        f"{name}: apply takes {arguments[1:2]} second: wrap it, as lambda params, image, key: "
        "apply(params, key, image)",
    )
    check(takes(init, count), f"{name}: got init{inspect.signature(init)}; expected {inits}")

    def by_name(key: Any, train: bool) -> dict[str, Any]:
        return train_arguments(apply, train) | ({"key": key} if "key" in arguments else {})

    check(
        takes(apply, 3 if stateful else 2, by_name(None, True)),
        f"{name}: got apply{inspect.signature(apply)}; expected {applies}",
    )

    def pair(result: Any, what: str) -> tuple[Any, Any]:
        if not stateful:
            return result, {}
        check_pair(result, f"{name}: {what}")
        return result

    def model_init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        made = pair(init(*(key, image)[:count]), "init, where apply takes a state: expected (params, state)")
        return jax.tree.map(jnp.asarray, made)

    def model_apply(
        params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool
    ) -> tuple[Any, PyTree]:
        state = (model_state,) if stateful else ()
        outputs, state = pair(apply(params, *state, image, **by_name(key, train)), "apply: expected (outputs, state)")
        return outputs, state if train else model_state

    return checked(name, model_init, model_apply, input_shape, classes)


# ---------------------------------------------------------------- arguments


# What a module's call may name its switch, and whether it is on in training.
TRAIN_ARGUMENTS = {
    **dict.fromkeys(("train", "training", "is_training", "is_train"), True),
    **dict.fromkeys(("deterministic", "inference"), False),
}


def train_arguments(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """The switches that `call` has, set."""
    names = inspect.signature(call).parameters
    return {name: train is on for name, on in TRAIN_ARGUMENTS.items() if name in names}


def takes(function: Callable[..., Any], count: int, by_name: dict[str, Any] | None = None) -> bool:
    """Whether a function or class can be called with so many positional arguments, and these."""
    if isinstance(function, type):  # a metaclass may hide what its constructor takes
        function = functools.partial(function.__init__, None)
    try:
        inspect.signature(function).bind(*range(count), **(by_name or {}))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


# ---------------------------------------------------------------- checks


def checked(name: str, init: Callable, apply: Callable, input_shape: Sequence[int], classes: int) -> Model:
    """A model that checks its images. Raises: UsageError: no name, shape or number of classes."""
    check_facts(name, input_shape, classes)

    def checked_init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        check_image(name, image.shape, tuple(input_shape))
        return init(key, image)

    def checked_apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> Any:
        check_image(name, image.shape, tuple(input_shape))
        return apply(params, model_state, image, key, train)

    return Model(name, checked_init, checked_apply, tuple(input_shape), classes)


def check_maker(name: str, make: Any, not_of: type | tuple, way_out: str) -> None:
    """Raise `UsageError` unless `make` is a function of one argument, and no instance of `not_of`."""
    holds = callable(make) and not isinstance(make, not_of) and takes(make, 1)
    check(holds, f"{name}: got {a(make)}; {way_out}")
