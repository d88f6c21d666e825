"""Try a model on shapes alone, before training.

A model whose shapes do not fit would fail while the whole step is traced, far from its cause. `check_model` passes
`init`, `apply` and the loss through `jax.eval_shape`, which computes nothing and allocates nothing on a device. Each
result is compared with what the trainer takes, and the error says model, function, got and expected. Training and
evaluation are both tried, since outputs may differ: auxiliary logits exist in training alone. Of the model's own errors
those of shapes become one sentence with its line; others pass.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.frames import is_users, line_of
from jaxmpi.core.pytrees import PyTree, by_path
from jaxmpi.model.batch_statistics import forget_traces
from jaxmpi.model.contract import Model, check_facts, check_pair, format_value, with_article

EXAMPLES = 2  # in the batch that a model is tried on
FLOATS = ("float32", "bfloat16", "float16")  # names of the dtypes that an exchange takes


def check_model(model: Any, loss: Callable[..., Any] | None = None, compute_dtype: Any = jnp.float32) -> None:
    """Check, on shapes alone, that a model gives what the trainer takes.

    Args:
        model: of an experiment.
        loss: of the experiment, (outputs, labels i32[batch]) -> f32[batch]; None for softmax cross-entropy, which takes
            logits and no tuple.
        compute_dtype: of params and images while the model runs.

    Raises:
        UsageError: what `init`, `apply` or `loss` gives, and what is expected.
    """
    if not isinstance(model, Model):
        raise UsageError(
            f"got {with_article(model)} as the experiment's model; expected a jaxmpi.model.Model: nnx_model, "
            "linen_model, equinox_model and plain_model make one"
        )
    check_facts(model.name, model.input_shape, model.classes)
    with _errors_of_shapes(f"{model.name}: init", model.example()):
        params, model_state = init_shapes(model.name, model.init, model.example())
    for train in (True, False):
        outputs = _output_shapes(model, params, model_state, train, compute_dtype)
        if loss is None or not train:
            _check_logits(model, outputs, train)
        if loss is not None:
            _check_loss(model, loss, outputs, train)
    forget_traces()  # of jits in the model, made without what training does around them


# ---------------------------------------------------------------- what tasks are tried by as well


def init_shapes(name: str, init: Callable[..., Any], example: Any) -> tuple[PyTree, PyTree]:
    """Shapes of params and model state; refuse leaves that cannot be trained or saved."""

    def checked(key: jax.Array, example: Any) -> tuple[PyTree, PyTree]:
        variables = init(key, example)
        check_pair(variables, f"{name}: init: expected (params, model state)")
        params, model_state = variables
        if not jax.tree.leaves(params):
            raise UsageError(f"{name}: init: expected params, got none")
        for path, leaf in (by_path({"params": params}) | by_path({"model_state": model_state})).items():
            _check_leaf(f"{name}: init: {path}", path.startswith("params"), leaf)
        return variables

    return jax.eval_shape(checked, jax.random.key(0), example)


def _check_leaf(where: str, is_param: bool, leaf: Any) -> None:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise UsageError(f"{where}: got {with_article(leaf)}, expected an array: jnp.asarray makes one")
    if is_param and leaf.dtype.name not in FLOATS:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        way_out = "cast it" if is_float else "what is not trained belongs in the model state"
        raise UsageError(f"{where}: got {format_value(leaf)}, expected float32: {way_out}")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UsageError(f"{where}: got {format_value(leaf)}; expected no random key: apply is given one")


def check_state(name: str, model_state: PyTree, updated: PyTree) -> None:
    """Refuse an updated model state with other leaves than before."""
    before, after = by_path({"model_state": model_state}), by_path({"model_state": updated})
    for path in sorted(before | after):
        got, expected = (format_value(tree[path]) if path in tree else "nothing" for tree in (after, before))
        if got != expected:
            raise UsageError(
                f"{name}: {path}: got {got}, expected {expected} as init gave it: model state keeps its leaves, shapes "
                "and dtypes, and its floating-point ones are float32"
            )


def mode(train: bool) -> str:
    """Name of the mode, for errors."""
    return "training" if train else "evaluation"


def as_float_shapes(tree: PyTree, dtype: Any) -> PyTree:
    """Shapes with floating-point leaves in `dtype`."""

    def cast(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return jax.tree.map(cast, tree)


# ---------------------------------------------------------------- a model alone


def _output_shapes(model: Model, params: PyTree, model_state: PyTree, train: bool, dtype: Any) -> Any:
    """Shapes of outputs, in float32; model state must keep its shapes."""

    def apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array) -> tuple[Any, PyTree]:
        result = model.apply(params, model_state, image, key, train)
        check_pair(result, f"{model.name}: apply: expected (outputs, model state)")
        return result

    image = model.example(EXAMPLES)
    image = image if model.takes_tokens else as_float_shapes(image, dtype)
    with _errors_of_shapes(f"{model.name}: apply in {mode(train)}", image):
        result = jax.eval_shape(apply, as_float_shapes(params, dtype), model_state, image, jax.random.key(0))
    outputs, updated = as_float_shapes(result, jnp.float32)
    check_state(f"{model.name}: apply in {mode(train)}", model_state, updated)
    return outputs


@contextmanager
def _errors_of_shapes(call: str, image: jax.ShapeDtypeStruct) -> Iterator[None]:
    """Turn an error that JAX or the model's library raises at a shape into one that names the model's input."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        lines = [line_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__) if is_users(frame)]
        raise UsageError(
            f"{call}: got {format_value(image)}, as the model's input_shape says; expected a shape that it takes; "
            f"{', '.join(lines[-1:])}: {type(error).__name__}: {error}"
        ) from error


def _check_logits(model: Model, outputs: Any, train: bool) -> None:
    """Refuse outputs other than logits f32[batch, classes], or f32[batch, window, classes]."""
    expected = f"float32{[EXAMPLES, *model.label_shape, model.classes]}"
    if format_value(outputs) == expected:
        return
    got = f"{model.name}: got {format_value(outputs)} in {mode(train)}, expected logits {expected}"
    way_out = "the model's last layer and its `classes` must agree"
    if isinstance(outputs, (tuple, list)):
        way_out = "give the experiment a `loss` that takes the tuple, and evaluate the main logits alone"
    raise UsageError(f"{got} for a batch of {EXAMPLES}: {way_out}")


def _check_loss(model: Model, loss: Callable[..., Any], outputs: Any, train: bool) -> None:
    """Refuse a loss that is neither f32[batch] nor shaped like the labels."""
    labels = jax.ShapeDtypeStruct((EXAMPLES, *model.label_shape), jnp.int32)
    label = f"the experiment's `loss` on {format_value(outputs)}, which {model.name} gives in {mode(train)}"
    got, expected = format_value(jax.eval_shape(loss, outputs, labels)), f"float32[{EXAMPLES}]"
    if got not in (expected, f"float32{list(labels.shape)}"):
        raise UsageError(
            f"{label}: got {got}, expected {expected}, one loss an example, or one a token: the trainer takes the mean"
        )
