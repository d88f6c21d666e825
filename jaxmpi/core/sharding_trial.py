"""A trial of the word for how an optimizer's updates are sharded, by element or by tensor, on a few floats.

Tried and dropped: to infer the word from the equations of `init` and `update`. That took 450 lines of abstract
interpretation, which every new JAX primitive could break, and refused loops and callbacks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.sharding import ElementSharding, TensorSharding, shard_shape

WORDS = (
    "'element' if the update of an entry depends on that entry alone, 'tensor' if it depends on its own tensor alone"
)
TRIAL_STEPS = 200  # optimizers with accumulation move params every so many steps only
TRIAL_SCALES = (1.0, 1e3)  # of gradients: clipping by a large norm shows at the second


def check_sharding(tx: Any, params: PyTree, by: str, workers: int, option: str = "jaxmpi.sharded: by") -> None:
    """Try a transformation on a few floats, whole and in two shards.

    Finds a mean, a norm or a shape at work in the first updates, and what one infinite gradient changes elsewhere. Does
    not find what begins later, or needs more than three entries along an axis.

    Args:
        params: arrays or their shapes.
        by: element or tensor.
        option: its name in messages.

    Raises:
        UsageError: a missing or unknown word, with what both mean; a word that the trial disproves, with the tensor.
    """
    if by not in ("element", "tensor"):
        raise UsageError(f"{option}: got {by!r} for an optimizer whose sharding is not known; expected {WORDS}")
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), params))
    # The first and the last tensor of each number of axes: a trial of all 128 of GoogLeNet compiles for 9 s.
    first = {leaf.ndim: i for i, leaf in reversed([*enumerate(leaves)])}
    indices = {*first.values(), *{leaf.ndim: i for i, leaf in enumerate(leaves)}.values()}
    few = tuple(x if i in indices else optax.MaskedNode() for i, x in enumerate(leaves))
    try:
        try:
            objection = _trial(tx.init, tx.update, structure, few, by)
        except Exception:  # it may know its tensors by name
            objection = _trial(tx.init, tx.update, structure, tuple(leaves), by)
        if not objection and by == "element":
            objection = _state_by_size(tx, jax.tree.unflatten(structure, leaves), workers)
    except Exception as error:  # whatever a user's code raises that knows the model's tensors alone
        objection = f"a shard alone fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if objection:
        what = f"{option}: got {by!r}, but {objection} with this optimizer"
        raise UsageError(
            f"{what}; expected {WORDS}; clipping by the global norm is an argument, clip_norm=; else leave it unsharded"
        )


@functools.lru_cache(64)
@jax.ensure_compile_time_eval()
def _trial(init: Callable, update: Callable, structure: Any, leaves: tuple[Any, ...], by: str) -> str:
    """What differs between updates of whole tensors and of two shards; empty if nothing does."""
    like = jax.tree.unflatten(structure, leaves)
    count, structure = len(jax.tree.leaves(like)), jax.tree.structure(like)  # without those that are left out
    halves = TensorSharding(structure, (), tuple(i % 2 for i in range(count)), 2)
    shard = ElementSharding(2).shard if by == "element" else halves.select
    shards = range(2 if by == "element" else min(2, count))
    rng = np.random.default_rng(0)

    def draw(size: float, *steps: int) -> PyTree:
        shape = lambda x: [*steps, *(min(n, 3) for n in x.shape)]  # noqa: E731
        return jax.tree.map(lambda x: np.asarray(size * rng.standard_normal(shape(x)), x.dtype), like)

    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        """Relative to the largest entry; NaN is NaN."""
        apart = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, jnp.abs(a - b))
        largest = jnp.nan_to_num(jnp.maximum(jnp.abs(a), jnp.abs(b)), posinf=0).max(initial=1e-30)
        return apart.max(initial=0) / largest

    def step(carry: tuple[PyTree, list[PyTree]], grads: PyTree) -> tuple[tuple[PyTree, list[PyTree]], list[PyTree]]:
        params, states = carry
        whole, after = update(grads, states[0], params)
        distances, afters = [], [after]
        for index in shards:
            part, after = update(shard(grads, index), states[1 + index], shard(params, index))
            distances.append(jax.tree.map(distance, part, shard(whole, index)))
            afters.append(after)
        return (optax.apply_updates(params, whole), afters), distances

    run = jax.jit(lambda *operands: jax.lax.scan(step, *operands)[1])
    for scale in TRIAL_SCALES:
        params = draw(1.0)
        grads = jax.tree.map(lambda a, b: a + b / 2, draw(scale), draw(scale, TRIAL_STEPS))  # params go far one way
        for leaf in jax.tree.leaves(grads)[:1]:
            leaf[-1:].reshape(-1)[:1] = np.inf
        states = [init(params), *(init(shard(params, index)) for index in shards)]
        # Roundings are 1e-6 of a tensor's largest update; what depends on other entries is off by tenths.
        with jax.disable_jit(False):  # else JAX_DISABLE_JIT compiles each slice of 20 unrolled updates, a minute of it
            trial = run((params, states), grads)
        for name, distances in [named for each in trial for named in named_leaves(each)]:
            if not float(distances.max()) < 1e-3:
                return f"the update of {name} depends on more than its {by}"
    return ""


def _state_by_size(tx: Any, like: PyTree, workers: int) -> str:
    """The first leaf of a state whose shape in a shard is not that of a shard of the whole one."""
    shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shard_shape(x.shape, workers), x.dtype), like)
    mine = dict(named_leaves(jax.eval_shape(tx.init, shards)))
    for name, leaf in named_leaves(jax.eval_shape(tx.init, like)):
        able = [shard_shape(leaf.shape, workers), *([leaf.shape] if leaf.size == 1 else [])]
        if name not in mine or mine[name].shape not in able:
            return f"{name} of its state goes by the shapes of tensors"
    return ""


def schedule_free_states(state: PyTree) -> list[optax.contrib.ScheduleFreeState]:
    """States of schedule-free optimizers, whose averages are of whole params."""
    is_one = lambda part: isinstance(part, optax.contrib.ScheduleFreeState)  # noqa: E731
    return [part for part in jax.tree.leaves(state, is_leaf=is_one) if is_one(part)]
