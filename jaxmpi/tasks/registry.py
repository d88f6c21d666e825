"""Table of tasks, one row for each kind of labels.

A user's own task is a `Task` in the experiment, or another row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.model.contract import Model
from jaxmpi.tasks import classes, numbers
from jaxmpi.tasks.base import Batch, Ratios, Task
from jaxmpi.tasks.supervised import Loss, Supervised


class TaskSpec(NamedTuple):
    """A row of `TASKS`."""

    build: Callable[[Supervised], Task]
    loss: Loss  # if the experiment has none
    labels: str  # a key of jaxmpi.data.example.LABELS
    summary: str


def supervised(name: str, metrics: Callable[[Any, Batch], Ratios], **more: Any) -> Callable[[Supervised], Task]:
    """What makes the task of a model; arguments as of `Supervised.task`."""
    return lambda builder: builder.task(name, metrics, **more)


def ranked(name: str, metrics: Callable[[Any, Batch], Ratios], **more: Any) -> Callable[[Supervised], Task]:
    """The same where labels name classes; `metrics` leaves top-5 out where it would always be 1."""
    return lambda builder: builder.task(
        name, metrics, maximize=tuple(f"top{k}" for k in classes.places(builder.model.classes)), **more
    )


TASKS: dict[str, TaskSpec] = {
    "classification": TaskSpec(
        ranked("classification", classes.top_k),
        classes.cross_entropy,
        "classes",
        "one class an example",
    ),
    "language-model": TaskSpec(  # an example's loss is the mean over tokens
        ranked("language model", classes.top_k), classes.cross_entropy, "classes", "one class a token"
    ),
    "token-classification": TaskSpec(
        ranked("token classification", classes.counted_top_k, weight=classes.tokens),
        classes.counted_cross_entropy,
        "classes or none",
        "one class a token, padding labelled -1; weighted by token",
    ),
    "segmentation": TaskSpec(
        supervised("segmentation", classes.overlaps, maximize=("accuracy", "iou")),
        classes.counted_cross_entropy,
        "classes or none",
        "one class a pixel, -1: not counted",
    ),
    "regression": TaskSpec(
        supervised("regression", numbers.errors), numbers.squared_error, "numbers", "numbers, by squared error"
    ),
    "multi-label": TaskSpec(
        supervised("multi-label", numbers.hits, maximize=("accuracy", "exact", "f1")),
        numbers.binary_cross_entropy,
        "numbers",
        "0 or 1 for each class",
    ),
}


def find_spec(experiment: Experiment) -> TaskSpec | None:
    """The row of an experiment; None if it has its own task.

    Raises:
        UsageError: no such row, or not exactly one of a model and a task of its own.
    """
    task, model = experiment.task, experiment.model
    if isinstance(task, Task):
        if model is not None or experiment.loss is not None:
            way_out = "a task of your own has its model in it: leave `model` and `loss` out"
            raise UsageError(f"task: got task {task.name} and a model or a loss; {way_out}")
        return None
    if not isinstance(task, str):
        raise UsageError(f"task: got {task!r}; expected auto, a jaxmpi.Task or one of {', '.join(TASKS)}")
    if task != "auto":
        lookup(TASKS, task, "task")
    if model is None:
        raise UsageError("the experiment has no model; give one, or a task of its own: task=jaxmpi.Task(...)")
    is_text = isinstance(model, Model) and model.takes_tokens and bool(model.label_shape)
    kind = ("language-model" if is_text else "classification") if task == "auto" else task
    return lookup(TASKS, kind, "task")


def make_task(experiment: Experiment) -> Task:
    """The task of an experiment, its model made to fit the data."""
    spec = find_spec(experiment)
    if spec is None:
        return experiment.task
    dtype: Any = jnp.bfloat16 if experiment.compute_dtype == "bfloat16" else jnp.float32
    return spec.build(Supervised(experiment.model, experiment.loss or spec.loss, experiment.data, dtype))
