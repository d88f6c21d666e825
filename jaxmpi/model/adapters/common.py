"""Functions that the adapters share: on arguments of a user's functions, and checks of a model."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.contract import Model, check_facts, check_image, with_article

# Names of the switch for training in a module's call, with its value in training.
TRAIN_ARGUMENTS = {
    **dict.fromkeys(("train", "training", "is_training", "is_train"), True),
    **dict.fromkeys(("deterministic", "inference"), False),
}


class OncePerShape:
    """A function without arguments, called once; unlike `functools.cache`, it can be pickled."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        """The function's value."""
        if not hasattr(self, "value"):
            self.value = self.make()
        return self.value

    def __reduce__(self) -> tuple[Any, ...]:
        return OncePerShape, (self.make,)


def train_arguments(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """The switches that `call` has, set."""
    names = inspect.signature(call).parameters
    return {name: train is on for name, on in TRAIN_ARGUMENTS.items() if name in names}


def takes_parameter(function: Callable[..., Any], count: int, by_name: dict[str, Any] | None = None) -> bool:
    """Return True if `function` takes `count` positional arguments and these by name."""
    if isinstance(function, type):  # a metaclass may hide what its constructor takes
        function = functools.partial(function.__init__, None)
    try:
        inspect.signature(function).bind(*range(count), **(by_name or {}))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def check_call(name: str, init: Callable, apply: Callable, input_shape: Sequence[int], classes: int) -> Model:
    """Make a model that checks the shape of its images.

    Raises:
        UsageError: no name, shape or number of classes.
    """
    check_facts(name, input_shape, classes)

    def checked_init(key: jax.Array, image: jax.Array) -> tuple[PyTree, PyTree]:
        check_image(name, image.shape, tuple(input_shape))
        return init(key, image)

    def checked_apply(params: PyTree, model_state: PyTree, image: jax.Array, key: jax.Array, train: bool) -> Any:
        check_image(name, image.shape, tuple(input_shape))
        return apply(params, model_state, image, key, train)

    return Model(name=name, init=checked_init, apply=checked_apply, input_shape=tuple(input_shape), classes=classes)


def check_maker(name: str, make: Any, not_of: type | tuple, way_out: str) -> None:
    """Raise `UsageError` unless `make` takes one argument and is no `not_of`."""
    if not callable(make) or isinstance(make, not_of) or not takes_parameter(make, 1):
        raise UsageError(f"{name}: got {with_article(make)}; {way_out}")
