"""GPT (Radford et al. 2019, "Language models are unsupervised multitask learners")."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmpi.core.errors import check
from jaxmpi.model import Model, nnx_model
from jaxmpi.model.contract import check_whole
from jaxmpi.models.layers import Array, Dense, normal, with_classes

STD = 0.02  # standard deviation of initial kernels and embeddings, but for kernels that add to the residual stream
EPS = 1e-5


class Shape(NamedTuple):
    """Shape of a decoder."""

    classes: int
    window: int
    width: int
    heads: int
    layers: int


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis (Ba et al. 2016, arXiv:1607.06450).

    y = scale (x - m) / sqrt(v + eps) + bias, with m, v and the quotient in f32.
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Array) -> Array:
        """f32[..., width] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        normal = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + EPS)
        over = (1,) * (x.ndim - 1) + (-1,)
        return normal.astype(x.dtype) * self.scale[...].reshape(over) + self.bias[...].reshape(over)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The mlp is four times as wide, with GELU.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        width, added = shape.width, normal(STD / math.sqrt(2 * shape.layers))  # 2 additions a layer
        self.heads = shape.heads
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.qkv = Dense((width, 3 * width), init=normal(STD), rngs=rngs)
        self.out = Dense((width, width), init=added, rngs=rngs)
        self.up = Dense((width, 4 * width), init=normal(STD), rngs=rngs)
        self.down = Dense((4 * width, width), init=added, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """f32[batch, window, width] -> the same."""
        x = x + self.out(attention(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


def attention(qkv: Array, heads: int) -> Array:
    """Causal attention, head by head (Vaswani et al. 2017, section 3.2).

    softmax(q k^T / sqrt(d)) v over places up to one's own, d = width / heads; the softmax is in f32.
    f32[batch, window, 3 width] -> f32[batch, window, width].
    """
    q, k, v = jnp.split(qkv, 3, axis=-1)
    window = qkv.shape[1]
    return attend(q, k, v, heads, jnp.tril(jnp.ones((1, 1, window, window), bool)))


def attend(q: Array, k: Array, v: Array, heads: int, seen: Array) -> Array:
    """Attention over the places that are seen, head by head.

    softmax(q k^T / sqrt(d)) v, the softmax in f32.
    f32[batch, places, width], f32[batch, others, width] twice, bool[batch or 1, 1, places or 1, others] -> the first's.
    """
    batch, _, width = q.shape
    q, k, v = (part.reshape(batch, -1, heads, width // heads) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(width // heads)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, -1, width)


class Gpt(nnx.Module):
    """Embeddings of tokens and places, blocks, a norm, logits."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.embedding = nnx.Param(normal(STD)(rngs.params(), (shape.classes, shape.width)))
        self.places = nnx.Param(normal(STD)(rngs.params(), (shape.window, shape.width)))
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.norm = LayerNorm(shape.width)
        self.logits = Dense((shape.width, shape.classes), init=normal(STD), rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """i32[batch, window] -> logits f32[batch, window, classes]."""
        x = jnp.take(self.embedding[...], tokens, axis=0) + self.places[...][None]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


@with_classes
def gpt(
    classes: int = 256, window: int = 128, width: int = 384, heads: int = 6, layers: int = 6, name: str = "gpt"
) -> Model:
    """A decoder over bytes: 10,893,568 params at the defaults.

    Args:
        classes: tokens that are told apart.
        window: tokens of an example, each of which sees those before it.
        width: of the residual stream; a multiple of `heads`.
        heads: of an attention.
        layers: blocks.
        name: in errors and records.

    Raises:
        UsageError: a size that is no whole number > 0; a width that does not divide by the heads.

    Reference: Radford et al. 2019. The kernel of the logits is not that of the embedding, and nothing is dropped.
    """
    shape = Shape(classes, window, width, heads, layers)
    for what, value in shape._asdict().items():
        check_whole(f"{name}: {what}", value)
    check(width % heads == 0, f"{name}: got width {width} and {heads} heads; expected a width that divides by them")
    model = nnx_model(lambda rngs: Gpt(shape, rngs), name=name, input_shape=(window,), classes=classes)
    return model._replace(input_dtype=jnp.int32, label_shape=(window,))


@with_classes
def gpt_tiny(classes: int = 256, window: int = 16) -> Model:
    """`gpt` with two layers, an eighth of the width and two heads."""
    return gpt(classes, window, width=48, heads=2, layers=2, name="gpt_tiny")
