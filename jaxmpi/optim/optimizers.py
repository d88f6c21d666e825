"""Optimizers by name, with their masks and averages: configuration -> Optax.

A row of `OPTIMIZERS` is a direction, or the whole of an optimizer. Decay, rates and clipping are put around a direction
here, in the order of the papers. A row also says what others must know: whether an update is linear in the gradient, so
that rules may sum updates, and how updates are sharded. A transform of the user's own counts as not linear, and
`Optim.shard_by` says how it is sharded.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxmpi.comm.agreement import without_messages
from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.core.pytrees import PyTree, clipped, named_leaves
from jaxmpi.core.sharding import ElementSharding, TensorSharding, assign_tensors
from jaxmpi.core.sharding_trial import check_sharding, schedule_free_states

Transform = optax.GradientTransformation
ScheduleFreeState = optax.contrib.ScheduleFreeState
Mask = Callable[[PyTree], PyTree] | None  # params -> which tensors decay; None: all
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Optim)}


# ---------------------------------------------------------------- the table


class OptimizerSpec(NamedTuple):
    """An Optax optimizer: whole, or a direction without decay and learning rate."""

    direction: Callable[[Optim], Transform] | None = None
    whole: Callable[[Optim, optax.Schedule, Mask], Transform] | None = None
    linear: bool = False  # the mean of workers' updates is the update of their mean gradient
    decays_after: bool = False  # decay is decoupled: added to the direction, not to the gradient
    averages: bool = False  # schedule-free: all of the chain but clipping moves z, from which Optax makes y and x
    takes: tuple[str, ...] = ()  # names from SETTINGS
    by: str = "element"  # how updates are sharded: by element, by tensor; empty: not at all
    cost: Callable[[Sequence[int]], float] = math.prod  # relative cost of the update of a tensor, by its shape


def pick_args(config: Optim, **arguments: str) -> dict[str, Any]:
    """Optax's arguments by the fields of Optim, of those that are set."""
    values = {name: getattr(config, field) for name, field in arguments.items()}
    return {name: value for name, value in values.items() if value is not None}


def moments(config: Optim) -> dict[str, Any]:
    """The arguments that Adam and its kin have in common."""
    return pick_args(config, b1="b1", b2="b2", eps="eps")


def lamb(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """LAMB: Adam's direction, scaled to each tensor's norm. You et al. 2020."""
    return optax.lamb(lr, **moments(config), weight_decay=config.weight_decay, mask=mask)


def lars(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """LARS: momentum over gradients scaled to tensors' norms. You et al. 2017."""
    every = True if mask is None else mask
    return optax.lars(lr, config.weight_decay, every, **pick_args(config, momentum="momentum", eps="eps"))


def adafactor(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """Adafactor: second moments by row and column. Shazeer and Stern 2018."""
    decay = config.weight_decay or None
    return optax.adafactor(lr, weight_decay_rate=decay, weight_decay_mask=mask, **pick_args(config, eps="eps"))


def muon(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """Muon: orthogonal momentum of matrices; AdamW for others. Jordan et al. 2024."""
    settings = pick_args(config, beta="momentum", adam_b1="b1", adam_b2="b2", eps="eps")
    decay = config.weight_decay
    return optax.contrib.muon(lr, weight_decay=decay, adam_weight_decay=decay, weight_decay_mask=mask, **settings)


def muon_cost(shape: Sequence[int]) -> float:
    """Multiplications of Muon's update: a matrix takes 5 steps of x <- a x + (b A + c A A) x, A = x x^T."""
    if len(shape) != 2:
        return math.prod(shape)
    short, long = sorted(shape)
    return 5 * (2 * short**2 * long + short**3) + math.prod(shape)


def momentum_velocity(config: Optim, *, nesterov: bool = False) -> Transform:
    """Momentum, v <- mu v + g; Optax has no default mu."""
    return optax.trace(0.9 if config.momentum is None else config.momentum, nesterov=nesterov)


def rms(config: Optim) -> Transform:
    """Adam's direction without its mean of gradients, as the base of `schedule_free_adamw`."""
    b2 = 0.999 if config.b2 is None else config.b2  # Adam's; RMSProp has another
    return optax.scale_by_rms(b2, **pick_args(config, eps="eps"), eps_in_sqrt=False, bias_correction=True)


MOMENTS = ("b1", "b2", "eps")
VELOCITY = ("momentum", "rate_in_velocity")
SETTINGS = (*MOMENTS, *VELOCITY)  # fields of Optim that some optimizers have; all have the others
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": OptimizerSpec(lambda c: optax.identity(), linear=True),
    "momentum": OptimizerSpec(momentum_velocity, linear=True, takes=VELOCITY),
    "nesterov": OptimizerSpec(partial(momentum_velocity, nesterov=True), linear=True, takes=VELOCITY),
    "adam": OptimizerSpec(lambda c: optax.scale_by_adam(**moments(c)), takes=MOMENTS),
    "adamw": OptimizerSpec(lambda c: optax.scale_by_adam(**moments(c)), decays_after=True, takes=MOMENTS),
    "nadamw": OptimizerSpec(
        lambda c: optax.scale_by_adam(**moments(c), nesterov=True), decays_after=True, takes=MOMENTS
    ),
    "radam": OptimizerSpec(lambda c: optax.scale_by_radam(**moments(c)), takes=MOMENTS),
    "adabelief": OptimizerSpec(lambda c: optax.scale_by_belief(**moments(c)), takes=MOMENTS),
    "adamax": OptimizerSpec(lambda c: optax.scale_by_adamax(**moments(c)), takes=MOMENTS),
    "lion": OptimizerSpec(
        lambda c: optax.scale_by_lion(**pick_args(c, b1="b1", b2="b2")), decays_after=True, takes=("b1", "b2")
    ),
    "rmsprop": OptimizerSpec(lambda c: optax.scale_by_rms(**pick_args(c, decay="b2", eps="eps")), takes=("b2", "eps")),
    "adagrad": OptimizerSpec(lambda c: optax.scale_by_rss(**pick_args(c, eps="eps")), takes=("eps",)),
    "lamb": OptimizerSpec(whole=lamb, takes=MOMENTS, by="tensor"),
    "lars": OptimizerSpec(whole=lars, takes=("eps", "momentum"), by="tensor"),
    "adafactor": OptimizerSpec(whole=adafactor, takes=("eps",), by="tensor"),
    "muon": OptimizerSpec(whole=muon, takes=(*MOMENTS, "momentum"), by="tensor", cost=muon_cost),
    "schedule_free_sgd": OptimizerSpec(lambda c: optax.identity(), averages=True, takes=("b1",), by=""),
    "schedule_free_adamw": OptimizerSpec(rms, decays_after=True, averages=True, takes=MOMENTS, by=""),
}


# ---------------------------------------------------------------- an optimizer of a configuration


def optimizer(config: Optim, lr: optax.Schedule, *, clips: bool = True) -> Transform:
    """Chain clipping, decay, direction and learning rate; decoupled decay follows the direction.

    v <- mu v + (g + lambda w) ;  w <- w - eta v   (momentum)
    v <- mu v - eta (g + lambda w) ;  w <- w + v   (with `rate_in_velocity`)

    Both give the same params while eta stays the same. When eta falls, the first shrinks the steps at once; in the
    second v goes on with the rates under which it was gathered. Krizhevsky et al. 2012, section 5, have the second.

    Args:
        clips: False if gradients come clipped; the state has the same structure.

    Raises:
        UsageError: an unknown optimizer, a setting that it does not have, or a `transform` that is none.
    """
    rate = [scale_biases(config.bias_lr_factor)] if config.bias_lr_factor != 1 else []
    clip = [clip_by_global_norm(config.clip_norm) if clips else optax.identity()] if config.clip_norm else []
    kernels = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    mask = config.decay_mask or (None if config.decay_bias else kernels)
    if config.transform is not None:
        return optax.chain(*clip, as_custom(config, lr), *rate)
    row = lookup(OPTIMIZERS, config.name, "optimizer")
    for name in changed_settings(config, SETTINGS):
        if name not in row.takes:
            takers = ", ".join(other for other, spec in OPTIMIZERS.items() if name in spec.takes)
            raise UsageError(
                f"optim.{name}: got {getattr(config, name)}; optimizer {config.name!r} has none: leave it at "
                f"{DEFAULTS[name]}, or take {takers}"
            )
    if row.whole:
        return optax.chain(*clip, row.whole(config, lr, mask), *rate)
    assert row.direction
    decay = [optax.add_decayed_weights(config.weight_decay, mask=mask)] if config.weight_decay else []
    rate = [*rate, optax.scale_by_learning_rate(lr)]
    steps = [
        *([] if row.decays_after else decay),
        *(rate if config.rate_in_velocity else []),
        row.direction(config),
        *(decay if row.decays_after else []),
        *([] if config.rate_in_velocity else rate),
    ]
    if not row.averages:
        return optax.chain(*clip, *steps)
    # y <- b1 x + (1 - b1) z, with x the mean of z over steps: gradients at y, evaluation at x. Defazio et al. 2024.
    if config.b1 == 0:
        raise UsageError(f"optim.b1: got 0 with {config.name!r}; expected (0, 1), the share of x in y")
    return optax.chain(*clip, optax.contrib.schedule_free(optax.chain(*steps), lr, **pick_args(config, b1="b1")))


def changed_settings(config: Optim, names: Sequence[str]) -> list[str]:
    """Those of the names whose fields are not at their defaults."""
    return [name for name in names if getattr(config, name) != DEFAULTS[name]]


def clip_by_global_norm(largest: float) -> Transform:
    """Clip as Optax does, but for roundings and a copy (`clipped`)."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        return clipped(updates, optax.tree.norm(updates), largest), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_biases(factor: float) -> Transform:
    """Multiply updates of biases, tensors of one axis at most, by `factor`; the papers train them with 2 eta."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda leaf: leaf * factor if leaf.ndim <= 1 else leaf, updates)
    )


def sharding_for(config: Optim, lr: optax.Schedule, params: PyTree, workers: int) -> ElementSharding | TensorSharding:
    """How the optimizer's updates are sharded over workers.

    Args:
        params: their shapes.

    Raises:
        UsageError: for a `transform` as `check_sharding`, of `shard_by`; or messages in it.
    """
    if config.transform is None:
        row = OPTIMIZERS[config.name]
        by, cost = row.by, row.cost
    else:
        by, cost = config.shard_by, math.prod
        leaves, structure = jax.tree.flatten(params)
        key = id(config.transform), by, workers, structure, tuple(leaf.shape for leaf in leaves)
        if key not in _tried:
            tx = optimizer(dataclasses.replace(config, clip_norm=0.0), lr)
            owner = f"optimizer {config.name!r} with sharded updates"
            with without_messages(owner, "in it", "the trainer exchanges, so give it the optimizer alone"):
                check_sharding(tx, params, by, workers, f"optim.shard_by of {config.name!r}")
            _tried[key] = config.transform
    return assign_tensors(params, workers, cost) if by == "tensor" else ElementSharding(workers)


_tried: dict[Any, Any] = {}  # transforms by id, kept so that it stays theirs: a run asks several times


# ---------------------------------------------------------------- an optimizer of the user's own


def as_custom(config: Optim, lr: optax.Schedule) -> Transform:
    """The user's own optimizer.

    Raises:
        UsageError: it is no GradientTransformation, its name is one of jaxmpi's, or it comes with settings that would
            have no effect.
    """
    if config.name in OPTIMIZERS:
        raise UsageError(
            f"optim.transform: got one with the name {config.name!r}, which is jaxmpi's own; name yours, as in "
            'Optim("mine", transform=...)'
        )
    if idle := changed_settings(config, (*SETTINGS, "weight_decay", "decay_bias", "decay_mask")):
        raise UsageError(f"optim.{', '.join(idle)}: got optim.transform, too, which has its own; leave it out")
    transform = config.transform
    if not has_own_rate(config):
        transform = transform(lr)
    transform = transform.gradient_transformation() if isinstance(transform, optax.MultiSteps) else transform
    if not isinstance(transform, Transform):
        kind = f"{type(transform).__module__.partition('.')[0]}.{type(transform).__name__}"
        raise UsageError(
            f"optim.transform of {config.name!r}: got a {kind}; expected an Optax optimizer, or a function of the "
            "learning-rate schedule that gives one"
        )
    return transform


def has_own_rate(config: Optim) -> bool:
    """Return True if the user's optimizer has learning rates of its own."""
    return config.transform is not None and (isinstance(config.transform, Transform) or not callable(config.transform))


def is_linear(config: Optim) -> bool:
    """Return True if workers' mean update is that of their mean gradient; the user's own count as not."""
    return config.transform is None and lookup(OPTIMIZERS, config.name, "optimizer").linear and not config.clip_norm


# ---------------------------------------------------------------- states


class RateFactor(NamedTuple):
    """State of `scale_by_rate_factor`."""

    rate_factor: jax.Array  # f32[], or one a worker


def scale_by_rate_factor() -> Transform:
    """Multiply updates by a factor in the state, which callbacks may lower."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda u: u * state.rate_factor.astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: RateFactor(jnp.ones(())), update)


def scale_rate(state: PyTree, factor: float) -> PyTree:
    """A rule's or optimizer's state, its learning rate times a factor."""

    def scaled(part: PyTree) -> PyTree:
        return RateFactor(part.rate_factor * factor) if isinstance(part, RateFactor) else part

    return jax.tree.map(scaled, state, is_leaf=lambda part: isinstance(part, RateFactor))


def rate_factors(state: PyTree) -> list[jax.Array]:
    """Learning-rate factors of callbacks in a rule's or optimizer's state, if any."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, RateFactor))
    return [part.rate_factor for part in parts if isinstance(part, RateFactor)]


def set_step(state: PyTree, step: int) -> PyTree:
    """An optimizer's state with learning rates as after `step` steps; moments stay."""

    def at_step(part: PyTree) -> PyTree:
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=jnp.full_like(part.count, step))
        if isinstance(part, ScheduleFreeState):
            count, base = jnp.full_like(part.step_count, step + 1), set_step(part.base_optimizer_state, step)
            return part._replace(step_count=count, base_optimizer_state=base)
        return part

    counts = (optax.ScaleByScheduleState, ScheduleFreeState)
    return jax.tree.map(at_step, state, is_leaf=lambda part: isinstance(part, counts))


def is_averaged(tx: Transform, params: PyTree) -> bool:
    """Return True for a schedule-free optimizer, which evaluates its own average; by params' shapes."""
    return bool(schedule_free_states(jax.eval_shape(tx.init, params)))


def eval_params(params: PyTree, state: PyTree) -> PyTree:
    """The params with x for y in tensors that schedule-free optimizers train; a state has their z."""
    leaves = dict(named_leaves(params))
    for part in schedule_free_states(state):
        z = dict(named_leaves(part.z))
        x = optax.contrib.schedule_free_eval_params(part._replace(z=z), {name: leaves[name] for name in z})
        leaves |= {name: value.astype(leaves[name].dtype) for name, value in x.items()}
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())
