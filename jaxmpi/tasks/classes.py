"""Tasks whose labels name classes, of an image, token or pixel."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmpi.core.errors import UsageError
from jaxmpi.tasks.base import Batch, Ratios
from jaxmpi.tasks.supervised import example_count, per_example, weighted_mean, weighted_sum


def cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy of logits f32[..., classes] and labels i32[...]: f32[...], in nats."""
    if labels.shape != outputs.shape[:-1]:
        raise UsageError(
            f"got labels {list(labels.shape)} for outputs {list(outputs.shape)}; expected one class number an example, "
            "or one a token: of one-hot labels np.argmax, or give the experiment a `loss`"
        )
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)


def counted_cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """f32[batch]: an example's mean cross-entropy over labels that are not negative."""
    return weighted_mean(cross_entropy(outputs, jnp.maximum(labels, 0)), labels >= 0)


def ranking(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """i32[...]: how many classes are ahead of the true one.

    Ties go by class number; a true class whose logit is NaN is last.
    """
    true = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    ahead = ~(logits <= true)  # not `logits > true`, by which a NaN would be ahead of nobody
    numbers = jnp.arange(logits.shape[-1]).reshape((1,) * labels.ndim + (-1,))
    tied_before = (logits == true) & (numbers < labels[..., None])
    return (ahead | tied_before).sum(-1, dtype=jnp.int32)


def places(classes: int) -> tuple[int, ...]:
    """The k of the top-k accuracies; top-5 of up to five classes is always 1."""
    return (1, 5) if classes > 5 else (1,)


def top_k(outputs: jax.Array, batch: Batch) -> Ratios:
    """Top-1 and top-5 accuracy of examples, or of their tokens."""
    place = ranking(outputs, batch["label"])
    return {f"top{k}": (per_example(place < k), jnp.ones(len(place))) for k in places(outputs.shape[-1])}


def counted_top_k(outputs: jax.Array, batch: Batch) -> Ratios:
    """The same over tokens whose label is not negative, each counted once."""
    counted = batch["label"] >= 0
    place = ranking(outputs, jnp.maximum(batch["label"], 0))
    return {f"top{k}": (weighted_sum(place < k, counted), example_count(counted)) for k in places(outputs.shape[-1])}


def overlaps(outputs: jax.Array, batch: Batch) -> Ratios:
    """Pixel accuracy, and mean intersection over union of classes, over all images."""
    labels, predictions = batch["label"], outputs.argmax(-1)
    counted = labels >= 0
    is_true, is_found = (
        jax.nn.one_hot(x, outputs.shape[-1], dtype=bool) for x in (labels, jnp.where(counted, predictions, -1))
    )
    pixels = lambda mask: mask.reshape(mask.shape[0], -1, mask.shape[-1]).sum(1, dtype=jnp.float32)  # noqa: E731
    return {
        "accuracy": (weighted_sum(predictions == labels, counted), example_count(counted)),
        "iou": (pixels(is_true & is_found), pixels(is_true | is_found)),
    }


def tokens(batch: Batch) -> Any:
    """i32[batch]: tokens of an example that count."""
    return (batch["label"] >= 0).sum(-1)
