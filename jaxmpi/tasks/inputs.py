"""The way of an image or of tokens into a model."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.config.data import Data
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.contract import Model, check_image


def prepare_batch(image: jax.Array, model: Model, data: Data, dtype: Any) -> jax.Array:
    """The model's input: normalised images in `dtype`, tokens in `model.input_dtype`."""
    check_image(model.name, image.shape, model.input_shape)
    if not model.takes_tokens:
        return normalise(image, data).astype(dtype)
    is_whole = jnp.issubdtype(image.dtype, jnp.integer)
    check(
        is_whole, f"{model.name}: got examples of {image.dtype}; expected tokens, whole numbers, as source text gives"
    )
    return image.astype(model.input_dtype)


def normalise(image: jax.Array, data: Data) -> jax.Array:
    """Normalise u8 images per channel: (pixel / 255 - mean) / std.

    Other images are ready, as loaders with a mean image make them.

    Raises:
        UsageError: a mean or deviation is given for images that are not u8, or a mean image for some that are.
    """
    if image.dtype != jnp.uint8:
        check(
            bool(data.mean_image) or not (data.mean or data.std),
            f"data.mean and data.std are for images of uint8; got {image.dtype}, which are taken as ready: leave both "
            "out, or give uint8",
        )
        return image
    check(
        not data.mean_image,
        "data.mean_image is subtracted by loaders; got images of uint8: give (pixel - mean image) / 255 / data.std",
    )
    pixels = image.astype(jnp.float32) / 255
    mean = jnp.asarray(data.mean or (0.0,), jnp.float32)
    std = jnp.asarray(data.std or (1.0,), jnp.float32)
    return (pixels - mean.reshape((1,) * (image.ndim - 1) + (-1,))) / std.reshape((1,) * (image.ndim - 1) + (-1,))


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """Floating-point leaves in `dtype`; others as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
