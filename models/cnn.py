"""Small convolutional networks for 8x8 digits: a first run, examples and tests."""

import jax
from flax import nnx

from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import Array, Conv, Dense, max_pool, normal, with_classes


class SmallCnn(nnx.Module):
    """Two 3x3 convolutions, each pooled, a hidden dense layer, dropout and logits."""

    def __init__(self, widths: tuple[int, int, int], classes: int, drop: float, rngs: nnx.Rngs):
        first, second, hidden = widths
        self.conv1 = Conv((1, first), 3, rngs=rngs)
        self.conv2 = Conv((first, second), 3, rngs=rngs)
        self.hidden = Dense((4 * second, hidden), rngs=rngs)
        self.drop = nnx.Dropout(drop, rngs=rngs)
        self.logits = Dense((hidden, classes), init=normal(0.01), rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, 8, 8, 1] -> logits f32[batch, classes]."""
        x = max_pool(self.conv1(x), 2)  # 8x8 -> 4x4
        x = max_pool(self.conv2(x), 2)  # 4x4 -> 2x2
        x = jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.logits(self.drop(x, deterministic=not train))


def digits_cnn(classes: int = 10) -> Model:
    """A CNN for scikit-learn's digits, f32[batch, 8, 8, 1], without batch norm."""
    return _model("digits_cnn", (32, 64, 128), classes, 0.2)


def digits_cnn_tiny(classes: int = 10) -> Model:
    """`digits_cnn` with an eighth of the channels."""
    return _model("digits_cnn_tiny", (4, 8, 16), classes, 0.0)


@with_classes
def _model(name: str, widths: tuple[int, int, int], classes: int, drop: float) -> Model:
    return nnx_model(
        lambda rngs: SmallCnn(widths, classes, drop, rngs),
        name=name,
        input_shape=(8, 8, 1),
        classes=classes,
    )
