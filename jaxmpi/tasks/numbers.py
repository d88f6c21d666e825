"""Tasks whose labels are numbers: values, or yes or no per class."""

import jax
import jax.numpy as jnp
import optax

from jaxmpi.core.errors import UsageError
from jaxmpi.tasks.base import Batch, Ratios
from jaxmpi.tasks.supervised import per_example


def targets(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Labels as f32 in the outputs' shape; [batch] stands for [batch, 1].

    Raises:
        UsageError: they are not as many.
    """
    if outputs.shape not in (labels.shape, (*labels.shape, 1)):
        raise UsageError(
            f"got labels {list(labels.shape)} for outputs {list(outputs.shape)}; expected as many numbers an example "
            "as the model's `classes`"
        )
    return labels.astype(jnp.float32).reshape(outputs.shape)


def squared_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """(y - t)^2 of each number."""
    return jnp.square(outputs - targets(outputs, labels))


def errors(outputs: jax.Array, batch: Batch) -> Ratios:
    """Means of (y - t)^2 and of |y - t|."""
    differences = outputs - targets(outputs, batch["label"])
    ones = jnp.ones(differences.shape[0])
    return {"mse": (per_example(jnp.square(differences)), ones), "mae": (per_example(jnp.abs(differences)), ones)}


def binary_cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of sigmoid(logits) and labels in [0, 1] by class, in nats."""
    return optax.sigmoid_binary_cross_entropy(outputs, targets(outputs, labels))


def hits(outputs: jax.Array, batch: Batch) -> Ratios:
    """Accuracy by answer and by whole example, and F1 over all answers."""
    predictions, true = outputs > 0, targets(outputs, batch["label"]) > 0.5
    ones = jnp.ones(predictions.shape[0])
    both, either = ((x.astype(jnp.float32)).sum(-1) for x in (predictions & true, predictions ^ true))
    return {
        "accuracy": (per_example(predictions == true), ones),
        "exact": ((predictions == true).all(-1).astype(jnp.float32), ones),
        "f1": (2 * both, 2 * both + either),
    }
