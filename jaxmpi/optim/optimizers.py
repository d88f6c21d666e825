"""Learning-rate schedules and optimizers: configuration -> Optax."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import check, lookup
from jaxmpi.core.pytrees import PyTree


class OptimizerSpec(NamedTuple):
    """Direction from gradient, and whether it is linear in it."""

    direction: Callable[[Optim], optax.GradientTransformation]
    linear: bool


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": OptimizerSpec(lambda c: optax.identity(), True),
    "momentum": OptimizerSpec(lambda c: optax.trace(c.momentum), True),
    "nesterov": OptimizerSpec(lambda c: optax.trace(c.momentum, nesterov=True), True),
    "adam": OptimizerSpec(lambda c: optax.scale_by_adam(), False),
    "adamw": OptimizerSpec(lambda c: optax.scale_by_adam(), False),
    "rmsprop": OptimizerSpec(lambda c: optax.scale_by_rms(), False),
    "adagrad": OptimizerSpec(lambda c: optax.scale_by_rss(), False),
}


def optimizer(config: Optim, lr: optax.Schedule) -> optax.GradientTransformation:
    """Clip, decay, direction, learning rate per tensor: an Optax chain in that order (adamw decays after).

    v <- mu v + (g + lambda w) ;  w <- w - eta v   (momentum)
    v <- mu v - eta (g + lambda w) ;  w <- w + v   (with `rate_in_velocity`)

    Both give the same params while eta stays the same. When eta falls, the first shrinks the steps at once; in the
    second v goes on with the rates under which it was gathered. Krizhevsky et al. 2012, section 5, have the second.

    Raises:
        UsageError: an unknown optimizer.
    """
    row = lookup(OPTIMIZERS, config.name, "optimizer")
    decay = [optax.add_decayed_weights(config.weight_decay, mask=None if config.decay_bias else not_bias)]
    decay = decay if config.weight_decay else []
    after = config.name == "adamw"
    rate = [scale_biases(config.bias_lr_factor)] if config.bias_lr_factor != 1 else []
    rate = [*rate, optax.scale_by_learning_rate(lr)]
    return optax.chain(
        *([optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []),
        *([] if after else decay),
        *(rate if config.rate_in_velocity else []),
        row.direction(config),
        *(decay if after else []),
        *([] if config.rate_in_velocity else rate),
    )


def at_step(state: PyTree, step: int) -> PyTree:
    """An optimizer's state with learning rates as after `step` steps; moments stay."""
    is_schedule = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
    now = lambda part: part._replace(count=jnp.full_like(part.count, step)) if is_schedule(part) else part  # noqa: E731
    return jax.tree.map(now, state, is_leaf=is_schedule)


def is_linear(config: Optim) -> bool:
    """Return True if the mean of the workers' updates is the update of the mean gradient."""
    return lookup(OPTIMIZERS, config.name, "optimizer").linear and not config.clip_norm


def not_bias(params: PyTree) -> PyTree:
    """True for tensors of more than one axis."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def scale_biases(factor: float) -> optax.GradientTransformation:
    """Multiply the updates of tensors of one axis, as the papers' 2 eta for biases."""
    check(factor > 0, f"bias_lr_factor: got {factor}; expected > 0")
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda leaf: leaf * factor if leaf.ndim <= 1 else leaf, updates)
    )
