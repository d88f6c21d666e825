"""Language models of projected LSTM layers (Sak et al. 2014, arXiv:1402.1128)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxmpi.model import Model, nnx_model
from jaxmpi.model.contract import check_whole
from jaxmpi.models.layers import Array, Dense, normal, with_classes

FORGET_BIAS = 1.0  # Jozefowicz et al. 2015: a cell keeps its content until it has learnt otherwise


class Widths(NamedTuple):
    """Entries of embeddings and layer outputs (`width`), and cells of a layer."""

    width: int
    cells: int


class Lstm(nnx.Module):
    """An LSTM layer (Hochreiter & Schmidhuber 1997) with projected outputs.

    i, f, g, o = x W + r U + b ;  c <- s(f) c + s(i) tanh(g) ;  r <- (s(o) tanh(c)) P, s the logistic function.
    Params: input f32[in, 4 cells] (W), state f32[width, 4 cells] (U), bias f32[4 cells], project f32[cells, width] (P).
    At the start of a window c and r are 0.
    """

    def __init__(self, inner: int, widths: Widths, rngs: nnx.Rngs):
        width, cells = widths
        self.input = nnx.Param(normal(1 / math.sqrt(inner))(rngs.params(), (inner, 4 * cells)))
        self.state = nnx.Param(normal(1 / math.sqrt(width))(rngs.params(), (width, 4 * cells)))
        bias = np.zeros(4 * cells, np.float32)
        bias[cells : 2 * cells] = FORGET_BIAS
        self.bias = nnx.Param(jnp.asarray(bias))
        self.project = nnx.Param(normal(1 / math.sqrt(cells))(rngs.params(), (cells, width)))

    def __call__(self, x: Array) -> Array:
        """f32[batch, window, in] -> f32[batch, window, width]."""
        state, project = self.state[...], self.project[...]
        known = x @ self.input[...] + self.bias[...].reshape(1, 1, -1)  # for all places at once

        def step(carry: tuple[Array, Array], known: Array) -> tuple[tuple[Array, Array], Array]:
            c, r = carry
            i, f, g, o = jnp.split(known + r @ state, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            r = (jax.nn.sigmoid(o) * jnp.tanh(c)) @ project
            return (c, r), r

        c, r = (jnp.zeros((x.shape[0], n), x.dtype) for n in project.shape)
        _, outputs = lax.scan(step, (c, r), known.swapaxes(0, 1))
        return outputs.swapaxes(0, 1)


class LstmLanguageModel(nnx.Module):
    """An embedding, LSTM layers one on the other, logits."""

    def __init__(self, words: int, layers: int, widths: Widths, rngs: nnx.Rngs):
        self.embedding = nnx.Param(normal(1.0)(rngs.params(), (words, widths.width)))
        self.layers = nnx.List([Lstm(widths.width, widths, rngs) for _ in range(layers)])
        self.words = Dense((widths.width, words), init=normal(1 / math.sqrt(widths.width)), rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """i32[batch, window] -> logits f32[batch, window, words]."""
        x = jnp.take(self.embedding[...], tokens, axis=0)
        for layer in self.layers:
            x = layer(x)
        return self.words(x)


@with_classes
def lstm(classes: int = 256, window: int = 128, width: int = 256, cells: int = 512, layers: int = 2) -> Model:
    """A language model over bytes: 2,494,720 params at the defaults.

    Args:
        classes: tokens that are told apart.
        window: tokens of an example.
        width: of the embedding and of a layer's output.
        cells: of a layer.
        layers: LSTM layers.

    Reference: Jozefowicz et al. 2016, arXiv:1602.02410, LSTM-<cells>-<width>. No peepholes, no dropout; a window starts
    from state 0, and the softmax is in full.
    """
    return _model("lstm", classes, window, layers, Widths(width, cells))


@with_classes
def lstm_tiny(classes: int = 256, window: int = 16) -> Model:
    """`lstm` with an eighth of the width and of the cells."""
    return _model("lstm_tiny", classes, window, 2, Widths(32, 64))


@with_classes
def lm300m(classes: int = 72_000, window: int = 20) -> Model:
    """The ring-allreduce article's size: 298,588,480 params, two layers, 72,000 words.

    Gibiansky 2017 gives 300 million params and no more. Widths and window are those of Jozefowicz et al. 2016, section
    5.5 (LSTM-8192-1024, unrolled 20 steps). The number of words follows from the size.
    """
    return _model("lm300m", classes, window, 2, Widths(1024, 8192))


@with_classes
def lm300m_tiny(classes: int = 256, window: int = 20) -> Model:
    """`lm300m` with a 64th of width and cells, over bytes."""
    return _model("lm300m_tiny", classes, window, 2, Widths(16, 128))


def _model(name: str, classes: int, window: int, layers: int, widths: Widths) -> Model:
    for what, value in {"classes": classes, "window": window, "layers": layers, **widths._asdict()}.items():
        check_whole(f"{name}: {what}", value)
    model = nnx_model(
        lambda rngs: LstmLanguageModel(classes, layers, widths, rngs),
        name=name,
        input_shape=(window,),
        classes=classes,
    )
    return model._replace(input_dtype=jnp.int32, label_shape=(window,))
