"""Averages of params over steps, evaluated instead of the params themselves."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, cast_like, in_32_bits
from jaxmpi.optim import optimizers
from jaxmpi.rules.base import Rule

AVERAGE = "average"  # field of the state, which `jaxmpi.load` looks for


def averaged(rule: Rule, decay: float, jit: Callable[..., Callable], name: str) -> Rule:
    """The rule with an exponential average of params, evaluated and exported instead.

    a_t = ((1 - d) / (1 - d^t)) sum_{s <= t} d^(t - s) w_s ;  kept as a <- a + (1 - d) / (1 - d^t) (w - a).

    So a has no memory of the initial params. It is kept in 32 bits: in 16 a small step towards w would be rounded away.
    Communicates nothing more: params are equal on all workers. If updates are sharded each worker has its shard of a;
    `eval_params` then gathers it, in 32 bits.

    Args:
        rule: whose params are equal on all workers after each step.
        decay: d, in (0, 1).
        jit: for the step of the average.
        name: of the rule, for the error.

    Raises:
        UsageError: a rule whose workers have params of their own, or that evaluates others already.
    """
    is_alone = rule.params_are_replicated and rule.eval_params is None and rule.asynchronous is None
    if not is_alone:
        raise UsageError(
            f"optim.ema: got {decay} with rule {name}, whose workers have params of their own or meet a center; "
            "expected gradients, subgd or awagd"
        )

    sharding = rule.sharding

    def move_average(average: PyTree, steps: jax.Array, params: PyTree, *index: jax.Array) -> tuple[PyTree, jax.Array]:
        steps = steps + 1
        share = (1 - decay) / (1 - jnp.float32(decay) ** steps.astype(jnp.float32))
        target = in_32_bits(sharding.zero.sharding.shard(params, *index) if sharding else params)
        return jax.tree.map(lambda a, w: a + share.astype(a.dtype) * (w - a), average, target), steps

    move = jit(move_average, donate_argnums=(0, 1))

    def with_average(rule_state: PyTree, average: PyTree) -> PyTree:
        return {"of_rule": rule_state, AVERAGE: in_32_bits(average), "averaged": jnp.zeros((), jnp.int32)}

    def init(params: PyTree) -> PyTree:
        return with_average(rule.init(params), params)

    def update_average(update: Callable, grads: PyTree, state: PyTree, params: PyTree) -> tuple:
        params, rule_state, *extra = update(grads, state["of_rule"], params)
        index = [sharding.zero.shard_index()] if sharding else []
        average, steps = move(state[AVERAGE], state["averaged"], params, *index)
        return params, {"of_rule": rule_state, AVERAGE: average, "averaged": steps}, *extra

    def eval_params(params: PyTree, state: PyTree) -> PyTree:
        average = sharding.zero.gather(state[AVERAGE], params) if sharding else state[AVERAGE]
        return cast_like(average, params)

    def init_shard(params: PyTree, index: jax.Array) -> PyTree:
        assert sharding
        return with_average(sharding.init(params, index), sharding.zero.sharding.shard(params, index))

    return rule._replace(
        init=init,
        update=partial(update_average, rule.update),
        update_with_squares=partial(update_average, rule.update_with_squares) if rule.update_with_squares else None,
        eval_params=eval_params,
        distance=(lambda state, of=rule.distance: of(state["of_rule"])) if rule.distance else None,
        sharding=sharding and sharding._replace(init=init_shard),
    )


def schedule_free(rule: Rule, jit: Callable[..., Callable], name: str, *, exchanges_gradients: bool) -> Rule:
    """The rule that evaluates a schedule-free optimizer's x, not its params y.

    x is exported as well. Communicates nothing: z, from which x follows, must be equal on all workers after each step.

    Args:
        rule: whose optimizer's state is equal on all workers.
        jit: for x.
        name: of the rule, for the error.
        exchanges_gradients: the optimizer's state is equal on all workers, whatever else the rule keeps.

    Raises:
        UsageError: a rule under which workers have z of their own, or that evaluates other params already.
    """
    is_alone = rule.params_are_replicated and rule.eval_params is None and rule.asynchronous is None
    if not (is_alone and (rule.state_is_replicated or exchanges_gradients)):
        raise UsageError(
            f"a schedule-free optimizer with rule {name}: its average would be each worker's own; use rule gradients, "
            "or another optimizer"
        )
    return rule._replace(eval_params=jit(optimizers.eval_params))
