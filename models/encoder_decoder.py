"""Encoder and decoder for two sequences, with norms in front.

Vaswani et al. 2017, "Attention is all you need". Not a `Model`, which has one input: a task of one's own calls it, as
experiments/tasks/translation.py does.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.contract import check_whole
from jaxmpi.models.gpt import STD, LayerNorm, Shape, attend
from jaxmpi.models.layers import Array, Dense, normal


class Attention(nnx.Module):
    """Attention of a sequence to another, or to itself."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        width, self.heads = shape.width, shape.heads
        self.q = Dense((width, width), init=normal(width**-0.5), rngs=rngs)
        self.kv = Dense((width, 2 * width), init=normal(width**-0.5), rngs=rngs)
        self.out = Dense((width, width), init=normal(STD), rngs=rngs)

    def __call__(self, x: Array, memory: Array, seen: Array) -> Array:
        """Attend from each place to those of `memory` that it sees.

        f32[batch, places, width], f32[batch, others, width], bool -> f32[batch, places, width].
        """
        k, v = jnp.split(self.kv(memory), 2, axis=-1)
        return self.out(attend(self.q(x), k, v, self.heads, seen))


class Layer(nnx.Module):
    """A layer with norms in front; a decoder's also attends to memory.

    x + attention(norm(x)), in a decoder x + attention(norm(x), memory), then x + mlp(norm(x)).
    """

    def __init__(self, shape: Shape, is_decoder: bool, rngs: nnx.Rngs):
        width = shape.width
        self.own, self.own_norm = Attention(shape, rngs), LayerNorm(width)
        self.other = Attention(shape, rngs) if is_decoder else None
        self.other_norm = LayerNorm(width) if is_decoder else None
        self.up = Dense((width, 4 * width), rngs=rngs)
        self.down = Dense((4 * width, width), init=normal(STD), rngs=rngs)
        self.norm = LayerNorm(width)

    def __call__(self, x: Array, seen: Array, memory: Array | None = None, known: Array | None = None) -> Array:
        """f32[batch, places, width] -> the same."""
        y = self.own_norm(x)
        x = x + self.own(y, y, seen)
        if self.other is not None and self.other_norm is not None:
            assert memory is not None
            assert known is not None
            x = x + self.other(self.other_norm(x), memory, known)
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class EncoderDecoder(nnx.Module):
    """Embeddings of words and places, encoder layers, decoder layers, and logits."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        std = 1 / math.sqrt(shape.width)
        self.words = nnx.Param(normal(std)(rngs.params(), (shape.classes, shape.width)))
        self.places = nnx.Param(normal(std)(rngs.params(), (shape.window, shape.width)))
        self.encoder = nnx.List([Layer(shape, False, rngs) for _ in range(shape.layers)])
        self.decoder = nnx.List([Layer(shape, True, rngs) for _ in range(shape.layers)])
        self.norm, self.memory_norm = LayerNorm(shape.width), LayerNorm(shape.width)
        self.logits = Dense((shape.width, shape.classes), init=normal(std), rngs=rngs)

    def __call__(self, source: Array, before: Array) -> Array:
        """Logits f32[batch, window, classes] of each word of the target.

        Args:
            source: i32[batch, window], 0 for padding.
            before: i32[batch, window], the word before each.
        """
        window = source.shape[1]
        is_first = jnp.arange(window)[None] == 0  # which all see, so that an empty source gives no NaN
        known = ((source > 0) | is_first)[:, None, None]
        past = jnp.tril(jnp.ones((1, 1, window, window), bool))
        x, y = (jnp.take(self.words[...], words, axis=0) + self.places[...][None] for words in (source, before))
        for layer in self.encoder:
            x = layer(x, known)
        memory = self.memory_norm(x)
        for layer in self.decoder:
            y = layer(y, past, memory, known)
        return self.logits(self.norm(y))


def encoder_decoder(
    classes: int, window: int, width: int = 64, heads: int = 4, layers: int = 2
) -> tuple[Callable[[Array], PyTree], Callable[[PyTree, Array, Array], Array]]:
    """(key) -> params, and (params, source, before) -> logits f32[batch, window, classes].

    Args:
        classes: words, of which 0 pads the source.
        window: words of a sentence, at most.
        width: of the residual stream; a multiple of `heads`.
        heads: of an attention.
        layers: of the encoder and of the decoder.

    Raises:
        UsageError: a size that is no whole number > 0; a width that does not divide by the heads.
    """
    shape = Shape(classes, window, width, heads, layers)
    for what, value in shape._asdict().items():
        check_whole(f"encoder_decoder: {what}", value)
    check(
        width % heads == 0,
        f"encoder_decoder: got width {width} and {heads} heads; expected a width that divides by them",
    )

    def init(key: Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(EncoderDecoder(shape, nnx.Rngs(key)), nnx.Param))

    def apply(params: PyTree, source: Array, before: Array) -> Array:
        graph = nnx.graphdef(nnx.eval_shape(lambda: EncoderDecoder(shape, nnx.Rngs(0))))
        return nnx.merge(graph, params)(source, before)

    return init, apply
