"""A task tried on shapes alone, before training."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.model.check import EXAMPLES, add_note, as_float_shapes, check_leaves, check_state, mode
from jaxmpi.model.contract import check_pair, format_value, with_article
from jaxmpi.tasks.base import Batch, Task


def check_task(task: Task, example: Batch, held_out: Batch, compute_dtype: Any = jnp.float32) -> None:
    """Check on shapes that a task returns what the trainer takes.

    Args:
        task: of an experiment.
        example: shapes of a batch of one example of training, without `weight`.
        held_out: the same of validation.
        compute_dtype: of params and inputs while the task runs.

    Raises:
        UsageError: what a part gives, and what is expected. An error of its own passes, with a note.
    """
    params, model_state = init_shapes(task, example)
    batch = batch_like(example)
    check_outputs(task, params, model_state, batch, True, compute_dtype)
    try:
        check_outputs(task, params, model_state, batch_like(held_out), False, compute_dtype)
    except KeyError as error:
        missing = sorted(set(example) - set(held_out))
        if not missing:
            raise
        raise UsageError(
            f"task {task.name} in evaluation: got validation examples of {', '.join(sorted(held_out))}; expected "
            f"{', '.join(missing)} too, as in training"
        ) from error
    if task.weight:
        with add_note(f"before training, jaxmpi was trying weight of task {task.name} on shapes"):
            got = jax.eval_shape(task.weight, batch)
        fits = getattr(got, "shape", None) == (EXAMPLES,)
        check(fits, f"task {task.name}: weight: got {format_value(got)}; expected {[EXAMPLES]}, one number an example")
    jax.clear_caches()  # jits in the model were traced without what training does around them


def metric_names(task: Task, example: Batch) -> list[str]:
    """Names of a task's metrics, without the trainer's `eval_` before them.

    Args:
        example: shapes of a batch of one example of validation, with the source's dtypes.
    """
    params, model_state = init_shapes(task, example)
    batch = batch_like(example)

    def judge(params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        return task.metrics(task.loss(params, model_state, batch, jax.random.key(0), False)[2], batch)

    return sorted(jax.eval_shape(judge, params, model_state, batch))


def batch_like(example: Batch) -> Batch:
    """Shapes of a batch of EXAMPLES such as this one."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((EXAMPLES, *x.shape[1:]), x.dtype), example)
    return {**batch, "weight": jax.ShapeDtypeStruct((EXAMPLES,), jnp.float32)}


def init_shapes(task: Task, example: Batch) -> tuple[PyTree, PyTree]:
    """Shapes of params and model state; refuse leaves not fit for training."""

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        made = task.init(key, batch)
        check_pair(made, f"task {task.name}: init: expected (params, model state)")
        check_leaves(f"task {task.name}", *made)
        return made

    with add_note(f"before training, jaxmpi was trying init of task {task.name} on shapes"):
        return jax.eval_shape(init, jax.random.key(0), example)


def check_outputs(
    task: Task, params: PyTree, model_state: PyTree, batch: Batch, train: bool, compute_dtype: Any
) -> None:
    """Refuse losses, model state, metrics or predictions of a wrong form."""
    what = f"task {task.name} in {mode(train)}"

    def judge(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        result = task.loss(params, model_state, batch, key, train)
        is_triple = isinstance(result, tuple) and len(result) == 3
        check(is_triple, f"{what}: loss: got {format_value(result)}; expected (losses, model state, outputs)")
        return result

    with add_note(f"before training, jaxmpi was trying loss of {what} on shapes"):
        params_like = as_float_shapes(params, compute_dtype)
        losses, updated, outputs = jax.eval_shape(judge, params_like, model_state, batch, jax.random.key(0))
    is_one_each = getattr(losses, "shape", None) == (EXAMPLES,) and jnp.issubdtype(losses.dtype, jnp.floating)
    check(
        is_one_each,
        f"{what}: loss: got {format_value(losses)}; "
        f"expected float32{[EXAMPLES]} for a batch of {EXAMPLES}, one loss an "
        "example: leave out the mean, which the trainer takes over all workers",
    )
    check_state(what, model_state, as_float_shapes(updated, jnp.float32))
    if train:
        return
    with add_note(f"before training, jaxmpi was trying metrics of task {task.name} on shapes"):
        ratios = jax.eval_shape(task.metrics, outputs, batch)
    check(
        isinstance(ratios, dict),
        f"{what}: metrics: got {with_article(ratios)}; expected a dict of name: (sums, counts)",
    )
    unknown = [name for name in task.maximize if name not in ratios]
    check(not unknown, f"task {task.name}: maximize: got {unknown}; its metrics are {', '.join(ratios) or 'none'}")
    for name, ratio in ratios.items():
        is_pair = isinstance(ratio, tuple) and len(ratio) == 2 and all(hasattr(x, "shape") for x in ratio)
        each = f"task {task.name}: metrics: {name}"
        check(
            is_pair,
            f"{each}: got {format_value(ratio)}; expected (sums, counts), whose quotient over all examples is shown: "
            f"(values, jnp.ones({EXAMPLES})) for a mean of values",
        )
        same = ratio[0].shape == ratio[1].shape and ratio[0].shape[:1] == (EXAMPLES,) and len(ratio[0].shape) < 3
        check(
            same,
            f"{each}: got sums {format_value(ratio[0])} and counts {format_value(ratio[1])}; "
            f"expected float32{[EXAMPLES]} each, one "
            f"number an example, or float32[{EXAMPLES}, k] each",
        )
        check(name not in ("loss", "count"), f"{each}: the trainer has a figure of this name; give it another")
    if task.predict:
        with add_note(f"before training, jaxmpi was trying predict of task {task.name} on shapes"):
            predicted = jax.eval_shape(task.predict, as_float_shapes(params, compute_dtype), model_state, batch)
        for path, leaf in named_leaves(predicted):
            check(
                getattr(leaf, "shape", ())[:1] == (EXAMPLES,),
                f"task {task.name}: predict: {path or 'outputs'}: got {format_value(leaf)}; "
                f"expected [{EXAMPLES}, ...] for a "
                f"batch of {EXAMPLES}, outputs of each example",
            )
