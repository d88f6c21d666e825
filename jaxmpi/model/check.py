"""Try a model on shapes alone, before training.

A model whose shapes do not fit would fail while the whole step is traced, far from its cause. `check_model` passes
`init`, `apply` and the loss through `jax.eval_shape`, which computes nothing and allocates nothing on a device. Each
result is compared with what the trainer takes, and the error says model, function, got and expected. Training and
evaluation are both tried, since outputs may differ: auxiliary logits exist in training alone. An error of the model's
own passes through, with a note that says what was tried.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, by_path
from jaxmpi.model.contract import Model, check_facts, check_pair, format_value, with_article

EXAMPLES = 2  # in the batch that a model is tried on
FLOATS = ("float32", "bfloat16", "float16")  # names of the dtypes that an exchange takes


def check_model(model: Any, loss: Callable[..., Any] | None = None, compute_dtype: Any = jnp.float32) -> None:
    """Check, on shapes alone, that a model gives what the trainer takes.

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
        f"got {with_article(model)} as the experiment's model; expected a jaxmpi.model.Model: nnx_model, linen_model, "
        "equinox_model and plain_model make one",
    )
    check_facts(model.name, model.input_shape, model.classes)
    params, model_state = init_shapes(model)
    for train in (True, False):
        outputs = output_shapes(model, params, model_state, train, compute_dtype)
        if loss is None or not train:
            check_logits(model, outputs, train)
        if loss is not None:
            check_loss(model, loss, outputs, train)
    jax.clear_caches()  # jits in the model were traced without what training does around them, as in `statistics_over`


def init_shapes(model: Model) -> tuple[PyTree, PyTree]:
    """Shapes of params and model state; every leaf is checked (`check_leaves`)."""

    def init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        made = model.init(key, image)
        check_pair(made, f"{model.name}: init: expected (params, model state)")
        check_leaves(model.name, *made)
        return made

    with add_note(f"before training, jaxmpi was trying init of model {model.name} on shapes"):
        return jax.eval_shape(init, jax.random.key(0), model.example())


def check_leaves(name: str, params: PyTree, model_state: PyTree) -> None:
    """Raise `UsageError` unless params can be trained and model state saved.

    There must be params, and all leaves must be arrays.
    """
    check(bool(jax.tree.leaves(params)), f"{name}: init: expected params, got none")
    for path, leaf in (by_path({"params": params}) | by_path({"model_state": model_state})).items():
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        check(is_array, f"{name}: init: {path}: got {with_article(leaf)}, expected an array: jnp.asarray makes one")
        check_kind(f"{name}: init: {path}: got {format_value(leaf)}", path.startswith("params"), leaf.dtype)


def check_kind(got: str, is_param: bool, dtype: Any) -> None:
    """Raise `UsageError` unless params, or model state, can have this dtype."""
    if is_param:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        way_out = "cast it" if is_float else "what is not trained belongs in the model state"
        check(dtype.name in FLOATS, f"{got}, expected float32: {way_out}")
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    check(not is_key, f"{got}; expected no random key: apply is given one")


def output_shapes(model: Model, params: PyTree, model_state: PyTree, train: bool, dtype: Any) -> Any:
    """Shapes of outputs, in float32; model state must keep its own shapes."""

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array) -> tuple[Any, PyTree]:
        result = model.apply(params, model_state, image, key, train)
        check_pair(result, f"{model.name}: apply: expected (outputs, model state)")
        return result

    image = model.example(EXAMPLES)
    image = image if model.takes_tokens else as_float_shapes(image, dtype)
    with add_note(f"before training, jaxmpi was trying model {model.name} in {mode(train)} on shapes"):
        result = jax.eval_shape(apply, as_float_shapes(params, dtype), model_state, image, jax.random.key(0))
    outputs, updated = as_float_shapes(result, jnp.float32)
    check_state(f"{model.name}: apply in {mode(train)}", model_state, updated)
    return outputs


def check_state(what: str, model_state: PyTree, updated: PyTree) -> None:
    """Raise `UsageError` if an updated model state has other leaves than before."""
    before, after = by_path({"model_state": model_state}), by_path({"model_state": updated})
    for path in sorted(before | after):
        got, expected = (format_value(tree[path]) if path in tree else "nothing" for tree in (after, before))
        check(
            got == expected,
            f"{what}: {path}: got {got}, expected {expected} as init gave it: model state keeps its leaves, shapes and "
            "dtypes, and its floating-point ones are float32",
        )


def check_logits(model: Model, outputs: Any, train: bool) -> None:
    """Raise `UsageError` unless outputs are logits f32[batch, classes], or f32[batch, window, classes]."""
    expected = f"float32{[EXAMPLES, *model.label_shape, model.classes]}"
    got = f"{model.name}: got {format_value(outputs)} in {mode(train)}, expected logits {expected}"
    if isinstance(outputs, (tuple, list)):
        way_out = "give the experiment a `loss` that takes the tuple: (outputs, labels i32[batch]) -> f32[batch]"
        check(False, f"{got}: {way_out if train else 'leave all but the main logits out in evaluation'}")
    way_out = f"for a batch of {EXAMPLES}: the model's last layer and its `classes` must agree"
    check(format_value(outputs) == expected, f"{got} {way_out}")


def check_loss(model: Model, loss: Callable[..., Any], outputs: Any, train: bool) -> None:
    """Raise `UsageError` unless the loss is f32[batch] or shaped like the labels."""
    labels = jax.ShapeDtypeStruct((EXAMPLES, *model.label_shape), jnp.int32)
    what = f"the experiment's `loss` on {format_value(outputs)}, which {model.name} gives in {mode(train)}"
    with add_note(f"before training, jaxmpi was trying {what}"):
        losses = jax.eval_shape(loss, outputs, labels)
    each = f"float32[{EXAMPLES}]"
    one = f"float32{list(labels.shape)}"
    check(
        format_value(losses) in (each, one),
        f"{what}: got {format_value(losses)}, expected {each}, one loss an example"
        f"{f', or {one}, one a token' if each != one else ''}: the trainer takes the mean",
    )


def mode(train: bool) -> str:
    """Name of the mode, for errors."""
    return "training" if train else "evaluation"


def as_float_shapes(tree: PyTree, dtype: Any) -> PyTree:
    """Shapes with floating-point leaves in `dtype`."""

    def cast(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return jax.tree.map(cast, tree)


@contextlib.contextmanager
def add_note(text: str) -> Iterator[None]:
    """Add a note to an error that is not the trainer's own."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        error.add_note(text)
        raise
