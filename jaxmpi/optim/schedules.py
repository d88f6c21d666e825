"""Learning-rate schedules: warm-up and decay as functions of the step."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.config.durations import UNLIMITED, duration_steps
from jaxmpi.config.optim import Schedule
from jaxmpi.core.errors import UsageError, check, lookup

Share = Callable[[jax.Array], jax.Array]  # step i32[] -> share of the peak learning rate, f32[]


class Clock(NamedTuple):
    """Conversion of durations into steps."""

    steps_per_epoch: int
    effective_batch: int
    total_steps: int

    def steps(self, duration: str) -> int:
        """The duration in steps.

        Raises:
            UsageError: a share of a run that ends by the clock.
        """
        if "%" in duration and self.total_steps == UNLIMITED:
            raise UsageError(
                f"schedule: got {duration} of a run that ends by the clock, whose steps are not known: give its span "
                "and warm-up in epochs or steps, as --schedule.span 30ep; or --schedule.decay constant"
            )
        return duration_steps(duration, self.steps_per_epoch, self.effective_batch, self.total_steps)


# ---------------------------------------------------------------- schedules


def fraction(step: jax.Array, whole: int) -> jax.Array:
    """Step / whole, f32.

    Schedules pass the whole steps that are left of a span, since 1 - step / span would not end in 0.
    """
    return step.astype(jnp.float32) / whole


def constant(config: Schedule, clock: Clock) -> Share:
    """The factor 1."""
    return lambda step: jnp.ones((), jnp.float32)


def step_decay(config: Schedule, clock: Clock) -> Share:
    """factor^(number of boundaries passed)."""
    check(bool(config.boundaries), "schedule.decay step: got no boundaries; give --schedule.boundaries 30ep 60ep")
    at = np.array([clock.steps(boundary) for boundary in config.boundaries], np.int32)
    return lambda step: jnp.float32(config.factor) ** jnp.sum(step >= at).astype(jnp.float32)


def poly(config: Schedule, clock: Clock) -> Share:
    """(1 - t / span)^power with t in steps."""
    span = max(clock.steps(config.span), 1)
    return lambda step: jnp.maximum(fraction(span - step, span), 0) ** jnp.float32(config.power)


def poly_epoch(config: Schedule, clock: Clock) -> Share:
    """(1 - epoch * minibatches / max_it)^power, held through each epoch.

    max_it is `span` in steps; Theano-MPI takes 240 epochs. Ma et al. 2016, section 4; papers that copied the original
    code compound it, which decays far faster.
    """
    schedule = poly(config, clock)
    return lambda step: schedule(step // clock.steps_per_epoch * clock.steps_per_epoch)


def cosine(config: Schedule, clock: Clock) -> Share:
    """(1 + cos(pi t / span)) / 2."""
    span = max(clock.steps(config.span), 1)
    return lambda step: (1 + jnp.cos(jnp.pi * jnp.minimum(fraction(step, span), 1))) / 2


DECAYS = {"constant": constant, "step": step_decay, "poly": poly, "poly_epoch": poly_epoch, "cosine": cosine}


def linear_warmup(config: Schedule, clock: Clock, workers: int) -> Share:
    """From `warmup_from` (0: one step's share) to 1, a little each step."""
    over = max(clock.steps(config.warmup), 1)
    first = config.warmup_from or 1 / over
    return lambda step: jnp.minimum(first + (1 - first) * fraction(step, over), 1)


def geometric_warmup(config: Schedule, clock: Clock, workers: int) -> Share:
    """From `warmup_from` (0: 1/k) to 1 by an equal factor each epoch."""
    over = max(clock.steps(config.warmup), 1)
    first = config.warmup_from or 1 / workers

    def share(step: jax.Array) -> jax.Array:
        epoch_start = step // clock.steps_per_epoch * clock.steps_per_epoch
        return jnp.minimum(jnp.float32(first) ** fraction(over - epoch_start, over), 1)

    return share


WARMUPS = {"linear": linear_warmup, "geometric": geometric_warmup}


def schedule(config: Schedule, clock: Clock, peak_lr: float, workers: int, factor: float = 1.0) -> optax.Schedule:
    """Learning-rate schedule: peak * warm-up * decay, or factor * `config.rate`.

    Args:
        factor: by which the rate is scaled for the workers; `peak_lr` has it already.

    Raises:
        UsageError: an unknown decay or warm-up, or a text that is no duration.
    """
    if rate := config.rate:
        return lambda step: jnp.asarray(factor * rate(jnp.asarray(step)), jnp.float32)
    if config.warmup_lr:
        config = dataclasses.replace(config, warmup_lr=0.0, warmup_from=min(config.warmup_lr / peak_lr, 1.0))
    decay = lookup(DECAYS, config.decay, "schedule.decay")(config, clock)
    warm = lookup(WARMUPS, config.warmup_shape, "schedule.warmup_shape")(config, clock, workers)
    if clock.steps(config.warmup) == 0:
        return lambda step: peak_lr * decay(jnp.asarray(step))
    return lambda step: peak_lr * warm(jnp.asarray(step)) * decay(jnp.asarray(step))
