"""Optimizers by name, with their masks and averages: configuration -> Optax.

A row of `OPTIMIZERS` is a direction, or the whole of an optimizer. Decay, rates and clipping are put around a direction
here, in the order of the papers. A row also says what others must know: whether an update is linear in the gradient, so
that rules may sum updates; how updates can be cut over workers; how much memory XLA allots to one. For an optimizer of
the user's own, linearity is tried out, and the cut is read from its equations (`jaxmpi.core.separable`).
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxmpi.comm.agreement import without_messages
from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.pytrees import PyTree, clipped, named_leaves
from jaxmpi.core.separable import ScheduleFreeState, cut_for, is_schedule_free, schedule_free_parts

Transform = optax.GradientTransformation
Mask = Callable[[PyTree], PyTree] | None  # params -> which tensors decay; None: all
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Optim)}


class OptimizerSpec(NamedTuple):
    """An Optax optimizer: whole, or a direction without decay and learning rate."""

    direction: Callable[[Optim], Transform] | None = None
    whole: Callable[[Optim, optax.Schedule, Mask], Transform] | None = None
    linear: bool = False  # True if the mean of workers' updates is the update of their mean gradient
    decays_after: bool = False  # decay is decoupled: added to the direction, not to the gradient
    averages: bool = False  # schedule-free: all of the chain but clipping moves z, from which Optax makes y and x
    takes: tuple[str, ...] = ()  # names from SETTINGS
    # pieces of which workers can each update a share: "entries" of every tensor, whole "leaves"; empty: neither
    cut: str = ""
    cost: Callable[[Sequence[int]], float] = math.prod  # relative cost of the update of a tensor, by its shape


def changed_settings(config: Optim, names: Sequence[str]) -> list[str]:
    """Those of the names whose fields are not at their defaults."""
    return [name for name in names if getattr(config, name) != DEFAULTS[name]]


def given_settings(config: Optim, **arguments: str) -> dict[str, Any]:
    """Optax's arguments by the fields of Optim, of those that are set."""
    values = {name: getattr(config, field) for name, field in arguments.items()}
    return {name: value for name, value in values.items() if value is not None}


def adams(config: Optim) -> dict[str, Any]:
    """The arguments that Adam and its kin have in common."""
    return given_settings(config, b1="b1", b2="b2", eps="eps")


def lamb(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """LAMB: Adam's direction, scaled to each tensor's norm. You et al. 2020."""
    return optax.lamb(lr, **adams(config), weight_decay=config.weight_decay, mask=mask)


def lars(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """LARS: momentum over gradients scaled to tensors' norms. You et al. 2017."""
    every = True if mask is None else mask
    return optax.lars(lr, config.weight_decay, every, **given_settings(config, momentum="momentum", eps="eps"))


def adafactor(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """Adafactor: second moments by row and column. Shazeer and Stern 2018."""
    decay = config.weight_decay or None
    return optax.adafactor(lr, weight_decay_rate=decay, weight_decay_mask=mask, **given_settings(config, eps="eps"))


def muon(config: Optim, lr: optax.Schedule, mask: Mask) -> Transform:
    """Muon: orthogonal momentum of matrices; AdamW for others. Jordan et al. 2024."""
    own = given_settings(config, beta="momentum", adam_b1="b1", adam_b2="b2", eps="eps")
    decay = config.weight_decay
    return optax.contrib.muon(lr, weight_decay=decay, adam_weight_decay=decay, weight_decay_mask=mask, **own)


def muon_cost(shape: Sequence[int]) -> float:
    """Multiplications of Muon's update of a tensor.

    A matrix takes 5 steps of x <- a x + (b A + c A A) x, A = x x^T.
    """
    if len(shape) != 2:
        return math.prod(shape)
    short, long = sorted(shape)
    return 5 * (2 * short**2 * long + short**3) + math.prod(shape)


def momentum_velocity(config: Optim, *, nesterov: bool = False) -> Transform:
    """Momentum, v <- mu v + g; Optax has no default mu."""
    return optax.trace(MOMENTUM if config.momentum is None else config.momentum, nesterov=nesterov)


def rms(config: Optim) -> Transform:
    """Adam's direction without its mean of gradients, as the base of `schedule_free_adamw`."""
    b2 = 0.999 if config.b2 is None else config.b2  # Adam's; RMSProp has another
    return optax.scale_by_rms(b2, **given_settings(config, eps="eps"), eps_in_sqrt=False, bias_correction=True)


def schedule_free(config: Optim, lr: optax.Schedule, base: Transform) -> Transform:
    """Schedule-free steps: z by the base, gradients at y, evaluation at x.

    y <- b1 x + (1 - b1) z, with x the mean of z over steps. The base has no momentum. Defazio et al. 2024.

    Raises:
        UsageError: b1 is 0, with which x cannot be told from y and z.
    """
    check(config.b1 != 0, f"optim.b1: got 0 with {config.name!r}; expected (0, 1), the share of x in y")
    return optax.contrib.schedule_free(base, lr, **given_settings(config, b1="b1"))


def clip_by_global_norm(largest: float) -> Transform:
    """Clip as Optax does, but for roundings and a copy (`clipped`)."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        return clipped(updates, optax.tree.norm(updates), largest), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


MOMENTUM = 0.9  # coefficient of `momentum` and `nesterov`, if Optim names none
MOMENTS = ("b1", "b2", "eps")
VELOCITY = ("momentum", "rate_in_velocity")
SETTINGS = (*MOMENTS, *VELOCITY)  # fields of Optim that some optimizers have; all have the others
TRIED_UPDATES = 20  # some begin as another: RAdam is momentum for five steps
LEAST_STEPS, TRIED_STEPS = 40, 2000  # some move params, or some of them, only every k steps
TRIED_SCALES = (1e-3, 1.0, 1e3, 1e6)  # factors of gradients; clipping shows at one of them
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": OptimizerSpec(lambda c: optax.identity(), linear=True, cut="entries"),
    "momentum": OptimizerSpec(momentum_velocity, linear=True, takes=VELOCITY, cut="entries"),
    "nesterov": OptimizerSpec(partial(momentum_velocity, nesterov=True), linear=True, takes=VELOCITY, cut="entries"),
    "adam": OptimizerSpec(lambda c: optax.scale_by_adam(**adams(c)), takes=MOMENTS, cut="entries"),
    "adamw": OptimizerSpec(lambda c: optax.scale_by_adam(**adams(c)), decays_after=True, takes=MOMENTS, cut="entries"),
    "nadamw": OptimizerSpec(
        lambda c: optax.scale_by_adam(**adams(c), nesterov=True), decays_after=True, takes=MOMENTS, cut="entries"
    ),
    "radam": OptimizerSpec(lambda c: optax.scale_by_radam(**adams(c)), takes=MOMENTS, cut="entries"),
    "adabelief": OptimizerSpec(lambda c: optax.scale_by_belief(**adams(c)), takes=MOMENTS, cut="entries"),
    "adamax": OptimizerSpec(lambda c: optax.scale_by_adamax(**adams(c)), takes=MOMENTS, cut="entries"),
    "lion": OptimizerSpec(
        lambda c: optax.scale_by_lion(**given_settings(c, b1="b1", b2="b2")),
        decays_after=True,
        takes=("b1", "b2"),
        cut="entries",
    ),
    "rmsprop": OptimizerSpec(
        lambda c: optax.scale_by_rms(**given_settings(c, decay="b2", eps="eps")),
        takes=("b2", "eps"),
        cut="entries",
    ),
    "adagrad": OptimizerSpec(
        lambda c: optax.scale_by_rss(**given_settings(c, eps="eps")), takes=("eps",), cut="entries"
    ),
    "lamb": OptimizerSpec(whole=lamb, takes=MOMENTS, cut="leaves"),
    "lars": OptimizerSpec(whole=lars, takes=("eps", "momentum"), cut="leaves"),
    "adafactor": OptimizerSpec(whole=adafactor, takes=("eps",), cut="leaves"),
    "muon": OptimizerSpec(whole=muon, takes=(*MOMENTS, "momentum"), cut="leaves", cost=muon_cost),
    "schedule_free_sgd": OptimizerSpec(lambda c: optax.identity(), averages=True, takes=("b1",)),
    "schedule_free_adamw": OptimizerSpec(rms, decays_after=True, averages=True, takes=MOMENTS),
}


def cut_of(config: Optim, tx: Transform, params: PyTree, workers: int) -> str:
    """`entries` or `leaves`: parts of which workers can each update a share.

    Args:
        tx: what `optimizer` has made of the configuration, without clipping.
        params: their shapes.
        workers: who update shares.

    Raises:
        UsageError: the user's can be cut in neither way.
    """
    if config.transform is None:
        return OPTIMIZERS[config.name].cut
    who, out = (
        f"optimizer {config.name!r} with sharded updates",
        "the trainer exchanges, so give it the optimizer alone",
    )
    with without_messages(who, "in it", out):
        return cut_for(tx, params, workers)


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
    mask = config.decay_mask or (None if config.decay_bias else not_bias)
    if config.transform is not None:
        return optax.chain(*clip, as_custom(config, lr), *rate)
    row = lookup(OPTIMIZERS, config.name, "optimizer")
    for name in changed_settings(config, SETTINGS):
        takers = ", ".join(other for other, spec in OPTIMIZERS.items() if name in spec.takes)
        check(
            name in row.takes,
            f"optim.{name}: got {getattr(config, name)}; optimizer {config.name!r} has none: leave it at "
            f"{DEFAULTS[name]}, or take {takers}",
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
    return optax.chain(*clip, *([schedule_free(config, lr, optax.chain(*steps))] if row.averages else steps))


class RateFactor(NamedTuple):
    """State of `scale_by_rate_factor`."""

    rate_factor: jax.Array  # f32[], or one a worker


def scale_by_rate_factor() -> optax.GradientTransformation:
    """Multiply updates by a factor in the state, which callbacks may lower."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda u: u * state.rate_factor.astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: RateFactor(jnp.ones(())), update)


def is_rate_factor(part: PyTree) -> bool:
    """Return True for the state of `scale_by_rate_factor`."""
    return isinstance(part, RateFactor)


def scale_rate(state: PyTree, factor: float) -> PyTree:
    """A rule's or optimizer's state, its learning rate times a factor."""
    scaled = lambda part: RateFactor(part.rate_factor * factor) if is_rate_factor(part) else part  # noqa: E731
    return jax.tree.map(scaled, state, is_leaf=is_rate_factor)


def rate_factors(state: PyTree) -> list[jax.Array]:
    """Learning-rate factors of callbacks in a rule's or optimizer's state, if any."""
    return [part.rate_factor for part in jax.tree.leaves(state, is_leaf=is_rate_factor) if is_rate_factor(part)]


def as_custom(config: Optim, lr: optax.Schedule) -> Transform:
    """The user's own optimizer.

    Raises:
        UsageError: it is none, has the name of one of jaxmpi's, or another setting that would have no effect is given.
    """
    check(
        config.name not in OPTIMIZERS,
        f"optim.transform: got one with the name {config.name!r}, which is jaxmpi's own; name yours, as in "
        'Optim("mine", transform=...)',
    )
    idle = changed_settings(config, (*SETTINGS, "weight_decay", "decay_bias", "decay_mask"))
    check(not idle, f"optim.{', '.join(idle)}: got optim.transform, too, which has its own; leave it out")
    expected = "expected an Optax optimizer, or a function of the learning-rate schedule that gives one"
    if has_own_rate(config):
        made = config.transform
    else:
        try:
            inspect.signature(config.transform).bind(lr)
        except TypeError as error:
            raise UsageError(
                f"optim.transform of {config.name!r}: got a function that takes no schedule ({error}); {expected}"
            ) from error
        made = config.transform(lr)
    made = made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made
    kind = f"{type(made).__module__.partition('.')[0]}.{type(made).__name__}"
    check(isinstance(made, Transform), f"optim.transform of {config.name!r}: got a {kind}; {expected}")
    return made


def has_own_rate(config: Optim) -> bool:
    """Return True if the user's optimizer has learning rates of its own."""
    return config.transform is not None and (isinstance(config.transform, Transform) or not callable(config.transform))


def check_takes_gradients(config: Optim, tx: Transform, params: PyTree) -> None:
    """Refuse an optimizer that wants more than gradients, state and params.

    Args:
        params: their shapes.

    Raises:
        UsageError: such as a line search, which evaluates the loss.
    """
    try:
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    except TypeError as error:
        raise UsageError(
            f"optimizer {config.name!r} wants more than gradients and params ({error}); jaxmpi.optimizer gives it the "
            "value and gradient of a loss, docs/functions.md"
        ) from error


def set_step(state: PyTree, step: int) -> PyTree:
    """An optimizer's state with learning rates as after `step` steps; moments stay."""

    def now(part: PyTree) -> PyTree:
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=jnp.full_like(part.count, step))
        if is_schedule_free(part):
            count, base = jnp.full_like(part.step_count, step + 1), set_step(part.base_optimizer_state, step)
            return part._replace(step_count=count, base_optimizer_state=base)
        return part

    return jax.tree.map(
        now, state, is_leaf=lambda part: isinstance(part, (optax.ScaleByScheduleState, ScheduleFreeState))
    )


def is_averaged(tx: Transform, params: PyTree) -> bool:
    """Return True for a schedule-free optimizer, which evaluates its own average.

    Args:
        params: their shapes.
    """
    return bool(schedule_free_parts(jax.eval_shape(tx.init, params)))


def eval_params(params: PyTree, state: PyTree) -> PyTree:
    """The params with x for y in tensors that schedule-free optimizers train.

    Args:
        state: of a rule or an optimizer, which holds their z.
    """
    leaves = dict(named_leaves(params))
    for part in schedule_free_parts(state):
        z = dict(named_leaves(part.z))
        x = optax.contrib.schedule_free_eval_params(part._replace(z=z), {name: leaves[name] for name in z})
        leaves |= {name: value.astype(leaves[name].dtype) for name, value in x.items()}
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def is_linear(config: Optim, tx: Transform, params: PyTree) -> bool:
    """Return True if workers' mean update is that of their mean gradient.

    For the table's optimizers it is known; the user's own is tried out.

    Args:
        tx: what `optimizer` has made of the configuration.
        params: their shapes.
    """
    if config.transform is None:
        return lookup(OPTIMIZERS, config.name, "optimizer").linear and not config.clip_norm
    try:
        return all(is_linear_at(tx, params, scale) for scale in TRIED_SCALES)  # clipping shows at one of them
    except Exception:  # whatever a user's code raises that knows the model's tensors alone: it cannot be known
        return False


def is_linear_at(tx: Transform, params: PyTree, scale: float) -> bool:
    """Compare two workers' mean update with that of their mean gradient.

    All three start each step from the same params, at first random; gradients are random, of size `scale`. The tensors
    have the axes of the model's, but at most three entries along each. Steps go on until several have moved params; if
    none does, it cannot be known.
    """
    rng = np.random.default_rng(0)

    def noise(size: float) -> PyTree:
        small = lambda leaf: (size * rng.standard_normal([min(n, 3) for n in leaf.shape])).astype(leaf.dtype)  # noqa: E731
        return jax.tree.map(small, params)

    def size(update: jax.Array) -> jax.Array:
        return jnp.maximum(jnp.abs(update).max(), 1e-30)  # some tensors may be left as they are

    @jax.jit
    def step(w: PyTree, states: list[PyTree], gradients: list[PyTree]) -> tuple[PyTree, list[PyTree], jax.Array, Any]:
        gradients = [*gradients, jax.tree.map(lambda a, b: (a + b) / 2, *gradients)]
        (a, _), (b, _), (one, _) = made = [tx.update(g, s, w) for g, s in zip(gradients, states, strict=True)]
        largest = jax.tree.map(lambda *each: jnp.stack([size(x) for x in each]).max(), a, b, one)
        distances = jax.tree.map(lambda a, b, one, most: jnp.abs((a + b) / 2 - one).max() / most, a, b, one, largest)
        has_moved = jnp.stack([(x != 0).any() for x in jax.tree.leaves((a, b, one))]).any()
        worst = jnp.stack(jax.tree.leaves(distances)).max()
        return optax.apply_updates(w, one), [state for _, state in made], worst, has_moved

    w, worst, moved = noise(1.0), 0.0, 0
    states = [tx.init(w)] * 3
    for i in range(TRIED_STEPS):
        w, states, distances, has_moved = step(w, states, [noise(scale), noise(scale)])
        worst, moved = max(worst, float(distances)), moved + bool(has_moved)
        # Each of a few operations on three numbers of a size rounds by 2^-24; what is not linear is off by tenths.
        if worst >= 1e-3 or (moved >= TRIED_UPDATES and i + 1 >= LEAST_STEPS):
            break
    return worst < 1e-3 and moved > 0


def not_bias(params: PyTree) -> PyTree:
    """True for tensors of more than one axis."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def scale_biases(factor: float) -> optax.GradientTransformation:
    """Multiply updates of biases, tensors of one axis at most, by `factor`.

    The papers train biases with 2 eta.
    """
    check(factor > 0, f"bias_lr_factor: got {factor}; expected > 0")
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda leaf: leaf * factor if leaf.ndim <= 1 else leaf, updates)
    )
