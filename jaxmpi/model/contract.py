"""The model contract: two pure functions and facts on inputs and outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree


class Model(NamedTuple):
    """A model: two pure functions, and facts about its input and output.

    `init(key, image) -> (params, model_state)`, where image is f32[1, height, width, channels];
    `apply(params, model_state, image, key, train) -> (outputs, model_state)`. The outputs are logits
    f32[batch, classes], or in training a tuple of logits whose first entry is the main one.

    With text, `image` is i32[batch, window]. With `label_shape` (window,) logits are f32[batch, window, classes].

    If the training data has another number of classes, the trainer takes `with_classes(number)` instead and says
    so; it refuses a model without it.
    """

    name: str
    init: Callable[[jax.Array, jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, jax.Array, jax.Array, bool], tuple[Any, PyTree]]
    input_shape: tuple[int, ...]  # shape of one example: (height, width, channels), or (window,) of tokens
    classes: int
    input_dtype: Any = jnp.float32  # int32: tokens, which come as they are
    label_shape: tuple[int, ...] = ()  # shape of one example's label: () for one class, (window,) for one a token
    with_classes: "Callable[[int], Model] | None" = None  # the same model for data of another number of classes

    def example(self, batch: int = 1) -> jax.ShapeDtypeStruct:
        """The shape of a batch of inputs."""
        return jax.ShapeDtypeStruct((batch, *self.input_shape), self.input_dtype)

    @property
    def takes_tokens(self) -> bool:
        """Return True if inputs are integers, neither normalised nor cast to floats."""
        return jnp.issubdtype(self.input_dtype, jnp.integer)


def check_whole(label: str, value: Any, minimum: int = 1) -> None:
    """Raise `UsageError` unless `value` is a whole number >= `minimum`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < minimum:
        raise UsageError(f"{label}: got {value!r}; expected a whole number >= {minimum}")


def check_facts(name: Any, input_shape: Any, classes: Any) -> None:
    """Raise `UsageError` unless name, input shape and number of classes are valid."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"a model's name: got {name!r}; expected text")
    if not isinstance(input_shape, (tuple, list)) or not input_shape:
        expected = "expected (height, width, channels), or (window,) of tokens"
        raise UsageError(f"{name}: input_shape: got {input_shape!r}; {expected}")
    for length in input_shape:
        check_whole(f"{name}: input_shape {tuple(input_shape)}", length)
    check_whole(f"{name}: classes", classes)


def check_pair(result: Any, label: str) -> None:
    """Raise `UsageError` unless `result` is a tuple of two."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(f"{label}, got {format_value(result)}")


def with_article(thing: Any) -> str:
    """Describe an object that the user handed over, for errors."""
    if thing is None:
        return "None"
    kind = "class" if isinstance(thing, type) else "function"
    return f"the {kind} {thing.__name__}" if hasattr(thing, "__name__") else f"an instance of {type(thing).__name__}"


def format_value(value: Any) -> str:
    """`float32[2, 10]`, a tuple of such, or the kind of thing."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: ({', '.join(map(format_value, value))})"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else with_article(value)


def check_image(name: str, shape: tuple[int, ...], input_shape: tuple[int, ...], *, takes_tokens: bool = False) -> None:
    """Raise `UsageError` unless `shape` is that of a batch of `input_shape`."""
    got, expected = tuple(shape[1:]), tuple(input_shape)
    if got == expected:
        return
    kind, flags = "images of (height, width, channels)" if len(expected) == 3 else "examples of shape", list[str]()
    if takes_tokens and len(expected) == 1:
        flags.append(f"--data.window {expected[0]}")
    elif len(got) == len(expected) == 3:
        size = expected[0]
        if got[:2] != expected[:2] and size == expected[1]:
            flags.append(f"--data.resize {size} " * (min(got[:2]) < size) + f"--data.crop {size}")
        if got[2] != expected[2]:
            flags.append(f"--data.channels {expected[2]}")
    ways_out = [" ".join(flags)] * bool(flags) + ["a model of that size"]
    raise UsageError(f"{name}: got {kind} {got}; expected {expected}: give {', or '.join(ways_out)}")
