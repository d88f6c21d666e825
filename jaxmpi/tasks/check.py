"""A task tried on shapes alone, before training."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.model.batch_statistics import forget_traces
from jaxmpi.model.check import EXAMPLES, as_float_shapes, check_state, init_shapes, mode
from jaxmpi.model.contract import Model, format_value, with_article
from jaxmpi.tasks.base import Batch, Task
from jaxmpi.tasks.supervised import prepare_batch


def check_task(
    task: Task, example: Batch, held_out: Batch, compute_dtype: Any = jnp.float32, *, train_metrics: bool = False
) -> None:
    """Check on shapes that a task returns what the trainer takes.

    Args:
        task: of an experiment.
        example: shapes of a batch of one example of training, without `weight`.
        held_out: the same of validation.
        compute_dtype: of params and inputs while the task runs.
        train_metrics: metrics are made of training's outputs, too.

    Raises:
        UsageError: what a part gives, and what is expected.
    """
    params, model_state = init_shapes(f"task {task.name}", task.init, example)
    batch = _batch_like(example)
    figures = _check_outputs(task, params, model_state, _batch_like(held_out), False, compute_dtype)
    trained = _check_outputs(task, params, model_state, batch, True, compute_dtype, train_metrics)
    if unknown := [name for name in task.maximize if name not in figures | trained]:
        names = ", ".join(figures) or "none"
        raise UsageError(f"task {task.name}: maximize: got {unknown}; its metrics are {names}")
    if task.weight:
        got = jax.eval_shape(task.weight, batch)
        if getattr(got, "shape", None) != (EXAMPLES,):
            got, expected = format_value(got), f"{[EXAMPLES]}, one number an example"
            raise UsageError(f"task {task.name}: weight: got {got}; expected {expected}")
    forget_traces()  # of jits in the model, made without what training does around them


def check_inputs(model: Model, example: Batch, data: Data) -> None:
    """Raise `UsageError` unless a model takes a source's examples.

    Args:
        example: shapes of a batch of one, with the source's dtypes.
    """
    if not {"image", "label"} <= example.keys():
        raise UsageError(
            f"data: got examples of {', '.join(example)}; expected image and label, which model {model.name} takes: "
            "rename the fields, name a table's columns as in --data.columns pixels digit, or give a task of your own"
        )
    jax.eval_shape(lambda image: prepare_batch(image, model, data, jnp.float32), example["image"])


def metric_names(task: Task, example: Batch) -> list[str]:
    """Names of a task's metrics, without the trainer's `eval_` before them.

    Args:
        example: shapes of a batch of one example of validation, with the source's dtypes.
    """
    params, model_state = init_shapes(f"task {task.name}", task.init, example)
    batch = _batch_like(example)

    def judge(params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        _, _, outputs, *scalars = task.loss(params, model_state, batch, jax.random.key(0), False)
        return dict(*scalars) | task.metrics(outputs, batch)

    return sorted(jax.eval_shape(judge, params, model_state, batch))


def _batch_like(example: Batch) -> Batch:
    """Shapes of a batch of EXAMPLES such as this one."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((EXAMPLES, *x.shape[1:]), x.dtype), example)
    return {**batch, "weight": jax.ShapeDtypeStruct((EXAMPLES,), jnp.float32)}


def _check_outputs(
    task: Task,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    train: bool,
    compute_dtype: Any,
    with_metrics: bool = True,
) -> dict[str, Any]:
    """Refuse losses, model state, metrics or predictions of a wrong form; return the figures by name."""
    label, params = f"task {task.name} in {mode(train)}", as_float_shapes(params, compute_dtype)

    def judge(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        result = task.loss(params, model_state, batch, key, train)
        if not isinstance(result, tuple) or len(result) not in (3, 4):
            raise UsageError(f"{label}: loss: got {format_value(result)}; expected (losses, model state, outputs)")
        return result

    losses, updated, outputs, *more = jax.eval_shape(judge, params, model_state, batch, jax.random.key(0))
    if getattr(losses, "shape", None) != (EXAMPLES,) or not jnp.issubdtype(losses.dtype, jnp.floating):
        raise UsageError(
            f"{label}: loss: got {format_value(losses)}; expected float32{[EXAMPLES]} for a batch of {EXAMPLES}, one "
            "loss an example: leave out the mean, which the trainer takes over all workers"
        )
    check_state(label, model_state, as_float_shapes(updated, jnp.float32))
    scalars = more[0] if more else {}
    if not isinstance(scalars, dict):
        raise UsageError(f"{label}: loss: scalars: got {with_article(scalars)}; expected a dict of name: float32")
    for name, value in scalars.items():
        if getattr(value, "shape", None) not in ((), (EXAMPLES,)):
            expected = f"float32{[EXAMPLES]}, one number an example, or float32[]"
            raise UsageError(f"{label}: loss: {name}: got {format_value(value)}; expected {expected}")
    if not with_metrics:
        return scalars
    ratios = jax.eval_shape(task.metrics, outputs, batch)
    if not isinstance(ratios, dict):
        raise UsageError(f"{label}: metrics: got {with_article(ratios)}; expected a dict of name: (sums, counts)")
    for name, ratio in ratios.items():
        _check_ratio(f"task {task.name}: metrics: {name}", ratio)
    for name in [*scalars, *ratios]:
        if name in ("loss", "count") or (name in scalars and name in ratios):
            raise UsageError(f"task {task.name}: metrics: {name}: there is a figure of this name; give it another")
    if task.predict and not train:
        predicted = jax.eval_shape(task.predict, params, model_state, batch)
        for path, leaf in named_leaves(predicted):
            if getattr(leaf, "shape", ())[:1] != (EXAMPLES,):
                raise UsageError(
                    f"task {task.name}: predict: {path or 'outputs'}: got {format_value(leaf)}; expected "
                    f"[{EXAMPLES}, ...] for a batch of {EXAMPLES}, outputs of each example"
                )
    return scalars | ratios


def _check_ratio(where: str, ratio: Any) -> None:
    """Refuse a metric other than (sums, counts)."""
    if not isinstance(ratio, tuple) or len(ratio) != 2 or not all(hasattr(x, "shape") for x in ratio):
        raise UsageError(
            f"{where}: got {format_value(ratio)}; expected (sums, counts), whose quotient over all examples is shown: "
            f"(values, jnp.ones({EXAMPLES})) for a mean of values"
        )
    sums, counts = ratio
    if sums.shape != counts.shape or sums.shape[:1] != (EXAMPLES,) or len(sums.shape) > 2:
        raise UsageError(
            f"{where}: got sums {format_value(sums)} and counts {format_value(counts)}; expected float32{[EXAMPLES]} "
            f"each, one number an example, or float32[{EXAMPLES}, k] each"
        )
