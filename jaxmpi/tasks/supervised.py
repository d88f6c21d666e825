"""A task of a model: inputs in, outputs compared with labels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.contract import Model, check_image
from jaxmpi.tasks.base import Batch, Judged, Ratios, Task

Loss = Callable[[Any, jax.Array], jax.Array]  # (outputs, labels) -> f32[batch, ...]


class Supervised(NamedTuple):
    """A model with all that stands between a batch and its loss."""

    model: Model
    loss: Loss
    data: Data  # its mean and standard deviation
    dtype: Any = jnp.float32  # dtype of the model's input; outputs are cast to 32 bits

    def outputs(
        self, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array, train: bool
    ) -> tuple[Any, PyTree]:
        """The model's outputs in 32 bits, and its new state."""
        image = prepare_batch(batch["image"], self.model, self.data, self.dtype)
        outputs, model_state = self.model.apply(params, model_state, image, key, train)
        return cast_floats(outputs, jnp.float32), model_state  # sums of losses and counts need 32 bits

    def judged(self, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array, train: bool) -> Judged:
        """Losses of the examples, the mean over each one's tokens or pixels."""
        outputs, model_state = self.outputs(params, model_state, batch, key, train)
        return per_example(self.loss(outputs, batch["label"])), model_state, outputs

    def predicted(self, params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        """Outputs in evaluation."""
        return self.outputs(params, model_state, batch, jax.random.key(0), False)[0]

    def task(
        self,
        name: str,
        metrics: Callable[[Any, Batch], Ratios],
        weight: Callable[[Batch], Any] | None = None,
        maximize: tuple[str, ...] = (),
    ) -> Task:
        """The task of this model."""
        return Task(
            name=f"{name} by {self.model.name}",
            init=lambda key, batch: self.model.init(key, batch["image"]),
            loss=self.judged,
            # In training auxiliary classifiers may follow the main outputs, in a tuple.
            metrics=lambda outputs, batch: metrics(outputs[0] if isinstance(outputs, tuple) else outputs, batch),
            maximize=maximize,
            predict=self.predicted,
            weight=weight,
        )


def per_example(values: jax.Array) -> jax.Array:
    """f32[batch]: the mean over an example's tokens, if it has any."""
    return values.astype(jnp.float32).reshape(values.shape[0], -1).mean(-1)


def weighted_mean(values: jax.Array, counted: jax.Array) -> jax.Array:
    """f32[batch]: the mean over counted tokens or pixels; 0 if none is."""
    return weighted_sum(values, counted) / jnp.maximum(example_count(counted), 1)


def weighted_sum(values: jax.Array, counted: jax.Array) -> jax.Array:
    """f32[batch]: the sum over an example's tokens or pixels that count."""
    return jnp.where(counted, values.astype(jnp.float32), 0).reshape(values.shape[0], -1).sum(-1)


def example_count(counted: jax.Array) -> jax.Array:
    """f32[batch]: how many of an example's tokens or pixels count."""
    return counted.astype(jnp.float32).reshape(counted.shape[0], -1).sum(-1)


# ---------------------------------------------------------------- the way of an image or of tokens into a model


def prepare_batch(image: jax.Array, model: Model, data: Data, dtype: Any) -> jax.Array:
    """The model's input: normalised images in `dtype`, tokens in `model.input_dtype`."""
    check_image(model.name, image.shape, model.input_shape, takes_tokens=model.takes_tokens)
    if not model.takes_tokens:
        return normalise(image, data).astype(dtype)
    if not jnp.issubdtype(image.dtype, jnp.integer):
        raise UsageError(
            f"{model.name}: got examples of {image.dtype}; expected tokens, whole numbers, as source text gives"
        )
    return image.astype(model.input_dtype)


def normalise(image: jax.Array, data: Data) -> jax.Array:
    """Normalise u8 images per channel: (pixel / 255 - mean) / std.

    Other images are ready, as loaders with a mean image make them.

    Raises:
        UsageError: a mean or deviation is given for images that are not u8, or a mean image for some that are.
    """
    if image.dtype != jnp.uint8:
        if not data.mean_image and (data.mean or data.std):
            raise UsageError(
                f"data.mean and data.std are for images of uint8; got {image.dtype}, which are taken as ready: leave "
                "both out, or give uint8"
            )
        return image
    if data.mean_image:
        raise UsageError(
            "data.mean_image is subtracted by loaders; got images of uint8: give (pixel - mean image) / 255 / data.std"
        )
    channels = (1,) * (image.ndim - 1) + (-1,)
    mean, std = (jnp.asarray(x, jnp.float32).reshape(channels) for x in (data.mean or (0.0,), data.std or (1.0,)))
    return (image.astype(jnp.float32) / 255 - mean) / std


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """Floating-point leaves in `dtype`; others as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
