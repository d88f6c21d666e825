"""The model contract, and thin adapters that make other libraries' modules fit it unchanged."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.config import UsageError, check

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
        UsageError: `make` is no function of one argument; by `init` and `apply`, where an image is
            not of `input_shape`.
    """
    from flax import nnx  # here, since a model of another library need not pay for its import

    way_out = "expected a function that builds the module, such as lambda rngs: Net(rngs=rngs)"
    check_maker(name, make, nnx.Module, way_out)

    def build(rngs: Any) -> Any:
        module = make(rngs)
        check(isinstance(module, nnx.Module), f"{name}: got {a(module)} from its maker; {way_out}")
        return module

    @functools.cache  # building a Model costs nothing; the first apply pays
    def structure() -> tuple[Any, list[tuple[Any, Any]], frozenset[Any]]:
        module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        graph, _, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        paths = frozenset(path for path, _ in nnx.to_flat_state(rest))
        return graph, [(path, leaf) for path, leaf in nnx.to_flat_state(streams)], paths

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        _, params, _, rest = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
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

    return checked(Model(name, init, apply, tuple(input_shape), classes))


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

    return checked(Model(name, init, apply, tuple(input_shape), classes))


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

    return checked(Model(name, init, apply, tuple(input_shape), classes))


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
    count = 1 if takes(init, 1) else 2  # arguments with a default keep it
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

    return checked(Model(name, model_init, model_apply, tuple(input_shape), classes))


# ---------------------------------------------------------------- arguments


# What a module's call may name its switch, and whether it is on in training.
TRAIN_ARGUMENTS = {"train": True, "training": True, "is_training": True, "deterministic": False}


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


def checked(model: Model) -> Model:
    """The same model, which checks its images."""

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        check_image(model.name, image, model.input_shape)
        return model.init(key, image)

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> tuple[Any, PyTree]:
        check_image(model.name, image, model.input_shape)
        return model.apply(params, model_state, image, key, train)

    return model._replace(init=init, apply=apply)


def check_image(name: str, image: jax.Array, input_shape: tuple[int, ...]) -> None:
    """Raise `UsageError` unless `image` is a batch of `input_shape`."""
    check(
        tuple(image.shape[1:]) == tuple(input_shape),
        f"{name}: got images of (height, width, channels) {tuple(image.shape[1:])}; "
        f"expected {tuple(input_shape)}: change the data's crop, resize or channels, or the model's size",
    )


def check_maker(name: str, make: Any, not_of: type | tuple, way_out: str) -> None:
    """Raise `UsageError` unless `make` is a function of one argument, and no instance of `not_of`."""
    holds = callable(make) and not isinstance(make, not_of) and takes(make, 1)
    check(holds, f"{name}: got {a(make)}; {way_out}")


def check_pair(result: Any, what: str) -> None:
    """Raise `UsageError` unless `result` is a tuple of two."""
    check(isinstance(result, tuple) and len(result) == 2, f"{what}, got {shown(result)}")


def a(thing: Any) -> str:
    """What somebody handed over, for errors."""
    if thing is None:
        return "None"
    kind = "class" if isinstance(thing, type) else "function"
    return f"the {kind} {thing.__name__}" if hasattr(thing, "__name__") else f"an instance of {type(thing).__name__}"


def shown(value: Any) -> str:
    """`float32[2, 10]`, a tuple of such, or the kind of thing."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: ({', '.join(map(shown, value))})"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else a(value)


EXAMPLES = 2  # in the batch that a model is tried on
FLOATS = ("float32", "bfloat16", "float16")  # what an exchange takes


def check_model(model: Any, loss: Callable[..., Any] | None = None, compute_dtype: Any = jnp.float32) -> None:
    """Try a model on shapes alone, before training: does it give what the trainer takes?

    Args:
        model: of an experiment.
        loss: of the experiment, (outputs, labels i32[batch]) -> f32[batch]; None for softmax
            cross-entropy, which takes logits and no tuple.
        compute_dtype: of params and images while the model runs.

    Raises:
        UsageError: what `init`, `apply` or `loss` gives, and what is expected. An error of their own
            passes, with a note that says what was tried.
    """
    check(
        isinstance(model, Model),
        f"got {a(model)} as the experiment's model; expected a jaxmpi.model.Model: nnx_model, linen_model, "
        "equinox_model and plain_model make one",
    )
    params, model_state = shapes_of_init(model)
    for train in (True, False):
        outputs = shapes_of_outputs(model, params, model_state, train, compute_dtype)
        if loss is None or not train:
            check_logits(model, outputs, train)
        if loss is not None:
            check_loss(model, loss, outputs, train)


def shapes_of_init(model: Model) -> tuple[PyTree, PyTree]:
    """Shapes of params and model state, each leaf of a kind that can be trained, exchanged and saved."""

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        made = model.init(key, image)
        check_pair(made, f"{model.name}: init: expected (params, model state)")
        check(bool(jax.tree.leaves(made[0])), f"{model.name}: init: expected params, got none")
        for path, leaf in (by_path({"params": made[0]}) | by_path({"model_state": made[1]})).items():
            is_array = isinstance(leaf, (jax.Array, np.ndarray))
            check(is_array, f"{model.name}: init: {path}: got {a(leaf)}, expected an array: jnp.asarray makes one")
            check_kind(f"{model.name}: init: {path}: got {shown(leaf)}", path.startswith("params"), leaf.dtype)
        return made

    with noting(f"before training, jaxmpi was trying init of model {model.name} on shapes"):
        return jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32))


def check_kind(got: str, is_param: bool, dtype: Any) -> None:
    """Raise `UsageError` unless leaves of this dtype can be trained, or saved as model state."""
    if is_param:
        check(dtype.name in FLOATS, f"{got}, expected float32: what is not trained belongs in the model state")
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    check(not is_key, f"{got}; expected no random key: apply is given one")


def shapes_of_outputs(model: Model, params: PyTree, model_state: PyTree, train: bool, dtype: Any) -> Any:
    """Shapes of a model's outputs, in float32; model state must keep its own."""

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array) -> tuple[Any, PyTree]:
        result = model.apply(params, model_state, image, key, train)
        check_pair(result, f"{model.name}: apply: expected (outputs, model state)")
        return result

    image = jax.ShapeDtypeStruct((EXAMPLES, *model.input_shape), dtype)
    with noting(f"before training, jaxmpi was trying model {model.name} in {mode(train)} on shapes"):
        result = jax.eval_shape(apply, in_floats(params, dtype), model_state, image, jax.random.key(0))
    outputs, updated = in_floats(result, jnp.float32)
    before, after = by_path({"model_state": model_state}), by_path({"model_state": updated})
    for path in sorted(before | after):
        got, expected = (shown(tree[path]) if path in tree else "nothing" for tree in (after, before))
        check(
            got == expected,
            f"{model.name}: apply in {mode(train)}: {path}: got {got}, expected {expected} as init gave it: model "
            "state keeps its leaves, shapes and dtypes, and its floating-point ones are float32",
        )
    return outputs


def check_logits(model: Model, outputs: Any, train: bool) -> None:
    """Raise `UsageError` unless outputs are logits f32[batch, classes]."""
    expected = f"float32[{EXAMPLES}, {model.classes}]"
    got = f"{model.name}: got {shown(outputs)} in {mode(train)}, expected logits {expected}"
    if isinstance(outputs, (tuple, list)):
        way_out = "give the experiment a `loss` that takes the tuple: (outputs, labels i32[batch]) -> f32[batch]"
        check(False, f"{got}: {way_out if train else 'leave all but the main logits out in evaluation'}")
    way_out = f"for a batch of {EXAMPLES}: the model's last layer and its `classes` must agree"
    check(shown(outputs) == expected, f"{got} {way_out}")


def check_loss(model: Model, loss: Callable[..., Any], outputs: Any, train: bool) -> None:
    """Raise `UsageError` unless the loss is f32[batch]."""
    labels = jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32)
    what = f"the experiment's `loss` on {shown(outputs)}, which {model.name} gives in {mode(train)}"
    with noting(f"before training, jaxmpi was trying {what}"):
        losses = jax.eval_shape(loss, outputs, labels)
    expected = f"float32[{EXAMPLES}]"
    check(
        shown(losses) == expected,
        f"{what}: got {shown(losses)}, expected {expected}, one loss an example: the trainer takes the mean",
    )


def mode(train: bool) -> str:
    """For errors."""
    return "training" if train else "evaluation"


def in_floats(tree: PyTree, dtype: Any) -> PyTree:
    """Shapes with floating-point leaves in `dtype`."""

    def cast(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return jax.tree.map(cast, tree)


@contextlib.contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note to an error that is not the trainer's own."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        error.add_note(text)
        raise


# ---------------------------------------------------------------- statistics of a batch

FILLER_WEIGHT = 2.0**-30  # nothing beside a real example; where there is none, the mean of the fillers, not 0 / 0

Mean = Callable[[PyTree], PyTree]


class Over(NamedTuple):
    """What `batch_mean` takes the mean over, beside the examples at hand."""

    mean: Mean | None = None
    real: jax.Array | None = None


_OVER: contextvars.ContextVar[Over] = contextvars.ContextVar("_OVER", default=Over())


@contextlib.contextmanager
def statistics_over(mean: Mean | None = None, real: jax.Array | None = None) -> Iterator[None]:
    """What `batch_mean` means to the models that are called within; they see neither workers nor weights.

    It acts while a model is traced, so it belongs inside the function that is compiled, around `apply`.

    Args:
        mean: tree -> mean over all workers, in 32 bits (`exchange(tree, "asa32")`): every batch mean is then that of the
            examples of all workers. None: of this worker's.
        real: bool[batch], false where an example only fills the batch up and must not count. None: all count.
    """
    token = _OVER.set(Over(mean, real))
    try:
        yield
    finally:
        _OVER.reset(token)


def batch_mean(tree: PyTree) -> PyTree:
    """The mean over the examples of a batch, for a layer's statistics: leaves f32[batch, ...] -> f32[...].

    sum_j w_j x_j / sum_j w_j over the local batch, w_j = 1; under `statistics_over(real=...)` w_j = 2^-30 for fillers, and
    under `statistics_over(mean=...)` j runs over the examples of all workers.

    The derivative is that of the mean of all workers' losses: what the others' losses owe to this worker's examples is in
    its gradients.

    Communicates: nothing, or one mean over workers of the sums and sum_j w_j, and one of their cotangents in the backward
    pass. All workers must then call it equally often, in the same order.
    """
    over = _OVER.get()
    examples = jax.tree.leaves(tree)[0].shape[0]
    weights = jnp.ones(examples) if over.real is None else jnp.where(over.real, 1.0, FILLER_WEIGHT)

    def weighted(x: jax.Array) -> jax.Array:
        return (x * weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))).sum(0)

    sums = jax.tree.map(weighted, tree), weights.sum()
    sums, count = sums if over.mean is None else _over_workers(over.mean, sums)
    return jax.tree.map(lambda x: x / count.astype(x.dtype), sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_workers(mean: Mean, tree: PyTree) -> PyTree:
    return mean(tree)


def _over_workers_forward(mean: Mean, tree: PyTree) -> tuple[PyTree, None]:
    return mean(tree), None


def _over_workers_backward(mean: Mean, _: None, cotangents: PyTree) -> tuple[PyTree]:
    # Of L = (1/w) sum_i L_i(s), s = (1/w) sum_j x_j. Worker j's gradients are those of w L, so at x_j sum_i dL_i/ds / w.
    return (mean(cotangents),)


_over_workers.defvjp(_over_workers_forward, _over_workers_backward)
