"""The training step: loss, gradients, `rule.update`, and metrics as sums with counts.

All rules share one step (`train_step`): workers exchange in `rule.update`, and in the forward pass only if batch
statistics are synchronised. Examples are weighted so that the mean of the workers' losses is the mean loss of the
effective batch, however unequal their shares are. Metrics stay sums with counts until they are shown, since a mean of
means would be wrong.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, cast_like, in_32_bits, path_name
from jaxmpi.core.to_jax import to_jax
from jaxmpi.core.train_state import Batch, TrainState
from jaxmpi.model.batch_statistics import statistics_over
from jaxmpi.rules.base import Rule
from jaxmpi.tasks.base import Task
from jaxmpi.tasks.supervised import cast_floats

MOST_UNROLLED = 8  # slices of a batch, each of which is compiled by itself
FigureSums = dict[str, tuple[jax.Array, jax.Array]]  # name: sums over the examples, and what divides them


class Metrics(NamedTuple):
    """Sums over examples, divided once when they are shown."""

    loss: jax.Array  # f32[], summed, each as much as it weighs
    count: jax.Array  # f32[], examples, each as much as it weighs
    finite: Any = None  # bool[leaves of params]: whether this worker's gradients are
    applied: Any = None  # bool[], the same on all workers: whether the update was finite, and so was made
    squares: Any = None  # f32[]: |g_i|^2 of this worker's gradients
    mean_square: Any = None  # f32[]: |g|^2 of their mean over workers, if the rule measures it
    figures: FigureSums | None = None  # of the task, by this step's params before the update


def train_step(
    state: TrainState, batch: Batch, *, gradients: Callable, rule: Rule, guard: Callable | None = None
) -> tuple[TrainState, Metrics]:
    """One update; also runs outside jit, as a sequence of jits.

    Args:
        guard: `revert_if_nonfinite` or a jit of it, if an update that is not finite is not made; None if all are.
    """
    grads, model_state, metrics = gradients(state.params, state.model_state, batch, state.key, state.step)
    if rule.update_with_squares:
        params, rule_state, mean_square = rule.update_with_squares(grads, state.rule_state, state.params)
        metrics = metrics._replace(mean_square=mean_square)
    else:
        params, rule_state = rule.update(grads, state.rule_state, state.params)
    after = TrainState(
        step=state.step + 1, params=params, model_state=model_state, rule_state=rule_state, key=state.key
    )
    if guard is None:
        return after, metrics
    after, applied = guard(state, after)
    return after, metrics._replace(applied=applied)


# ---------------------------------------------------------------- forward


class Forward(NamedTuple):
    """A task with all that the trainer puts around it."""

    task: Task
    compute_dtype: Any = jnp.float32
    batch_mean: Callable[[PyTree], PyTree] | None = None  # over workers, of batch statistics; None: a worker's own

    def losses(
        self, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array, train: bool
    ) -> tuple[jax.Array, PyTree, Any, dict[str, Any]]:
        """Losses f32[batch], the new model state, outputs and scalars; passes run in `compute_dtype`, params stay f32.

        Examples that only fill the batch up are left out of batch statistics. That a model in training takes means of
        them over workers at all is checked, not that all layers do: other libraries' layers keep their own statistics.
        """
        calls: list[PyTree] = []

        def counted_mean(tree: PyTree) -> PyTree:
            calls.append(tree)
            return self.batch_mean(tree) if self.batch_mean else tree

        with statistics_over(counted_mean if self.batch_mean else None, batch["weight"] > 0 if train else None):
            losses, new_state, outputs, *scalars = self.task.loss(self.cast(params), model_state, batch, key, train)
        if train and self.batch_mean and not calls:
            raise UsageError(
                f"batch_statistics: got synchronised, but {self.task.name} has no batch norm that takes its means by "
                "jaxmpi.model.batch_mean, as jaxmpi.models.norm.BatchNorm does; use averaged"
            )
        return losses.astype(jnp.float32), cast_floats(new_state, jnp.float32), outputs, dict(*scalars)

    def cast(self, params: PyTree) -> PyTree:
        """Params in `compute_dtype`."""
        return cast_floats(params, self.compute_dtype)

    def weights(self, batch: Batch) -> jax.Array:
        """f32[batch]: each example's weight, 0 if it only fills the batch up."""
        weight = self.task.weight(batch) if self.task.weight else 1
        return jnp.where(batch["weight"] > 0, jnp.asarray(weight, jnp.float32), 0)

    def figures(self, outputs: Any, scalars: dict[str, Any], batch: Batch) -> FigureSums:
        """The task's metrics, and the scalars of its loss as means over examples, of those of weight > 0."""
        real = batch["weight"] > 0

        def total(values: jax.Array) -> jax.Array:
            shape = (-1,) + (1,) * (values.ndim - 1)
            return jnp.where(real.reshape(shape), values.astype(jnp.float32), 0).sum(0)

        # A scalar of the whole batch counts once for each of its examples, so that short batches weigh less.
        ratios = {name: (jnp.broadcast_to(value, real.shape), real) for name, value in scalars.items()}
        ratios |= self.task.metrics(outputs, batch)
        return {name: (total(sums), total(counts)) for name, (sums, counts) in ratios.items()}


# ---------------------------------------------------------------- gradients


def local_gradients(
    forward: Forward, micro_batch: int = 0, *, with_figures: bool = False
) -> Callable[[PyTree, PyTree, Batch, jax.Array, jax.Array], tuple[PyTree, PyTree, Metrics]]:
    """Gradients of one worker's share of the loss, accumulated over micro-batches.

    L_i = sum_j weight_j loss_j, with weight_j = workers w_j / (sum of w over all workers' examples in this step). So
    the mean of L_i over workers is the mean loss of the effective batch, exactly, however unequal the shares.

    Args:
        with_figures: the metrics have the task's figures, too.

    Returns: (params, model_state, batch, key u32[2], step i32[]) -> (gradients, model_state, metrics).
    """

    def loss_of(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple]:
        losses, model_state, outputs, scalars = forward.losses(params, model_state, batch, key, True)
        weights, real = forward.weights(batch), batch["weight"] > 0
        metrics = Metrics(jnp.where(real, losses * weights, 0).sum(), weights.sum())
        if with_figures:
            # Metrics need no derivative, and some have none, such as callbacks.
            outputs, scalars = jax.lax.stop_gradient((outputs, scalars))
            metrics = metrics._replace(figures=forward.figures(outputs, scalars, batch))
        return jnp.where(real, losses * batch["weight"], 0).sum(), (model_state, metrics)

    differentiate = jax.grad(loss_of, has_aux=True)

    def gradients(
        params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[PyTree, PyTree, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
        size = batch["weight"].shape[0]
        if not micro_batch or micro_batch == size:
            grads, (model_state, metrics) = differentiate(params, model_state, batch, key)
            return grads, model_state, add_norms(grads, metrics)
        slices = jax.tree.map(lambda x: x.reshape(size // micro_batch, micro_batch, *x.shape[1:]), batch)

        def accumulate(carry: tuple, item: tuple) -> tuple[tuple, Metrics]:
            total, model_state = carry
            i, piece = item
            key_of_slice = jax.random.fold_in(key, i)
            grads, (model_state, metrics) = differentiate(depend_on(params, total), model_state, piece, key_of_slice)
            return (jax.tree.map(jnp.add, total, in_32_bits(grads)), model_state), metrics

        start = (jax.tree.map(jnp.zeros_like, in_32_bits(params)), model_state)
        # XLA on CPUs runs convolutions in loops on one thread by slow code, which takes over ten times as long.
        is_unrolled = jax.default_backend() == "cpu" and size // micro_batch <= MOST_UNROLLED
        numbered = jnp.arange(size // micro_batch, dtype=jnp.int32), slices
        (total, model_state), metrics = jax.lax.scan(accumulate, start, numbered, unroll=is_unrolled or 1)
        grads = cast_like(total, params)
        return grads, model_state, add_norms(grads, jax.tree.map(lambda x: x.sum(0), metrics))

    return gradients


def depend_on(params: PyTree, total: PyTree) -> PyTree:
    """The params, computed from a total as well, so that XLA frees a slice's activations before the next slice's."""
    firsts = [x.ravel()[0] for x in jax.tree.leaves(total) if x.size and jnp.issubdtype(x.dtype, jnp.inexact)]
    one = jnp.where(jnp.isnan(sum(firsts)), jnp.nan, 1.0)
    return jax.tree.map(lambda x: x * one.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, params)


def add_norms(grads: PyTree, metrics: Metrics) -> Metrics:
    """Add |grad L_i|^2 to the metrics, and which leaves are finite.

    One pass over each leaf gives both and keeps no leaf alive. A leaf of a norm beyond 1.8e19 counts as infinite.
    """
    squares = [jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(grads)] or [jnp.zeros(())]
    return metrics._replace(finite=jnp.isfinite(jnp.stack(squares)), squares=sum(squares, jnp.zeros(())))


def after_all_gradients(gradients: Callable) -> Callable:
    """`local_gradients` of which each leaf waits for all others; the same gradients.

    g <- 1 g, where 1 is computed from sum_leaves |g|^2; NaN if that is NaN. The update of a leaf of params then comes
    after its last use in the backward pass. XLA must see that from the data alone: without it, the update of the first
    layer could overwrite params that are still read, so XLA copies such leaves at the start of every step.
    """

    @functools.wraps(gradients)
    def waiting(*args: Any) -> tuple[PyTree, PyTree, Metrics]:
        grads, model_state, metrics = gradients(*args)
        one = jnp.where(jnp.isnan(metrics.squares), jnp.nan, 1.0)
        return jax.tree.map(lambda g: g * one.astype(g.dtype), grads), model_state, metrics

    return waiting


# ---------------------------------------------------------------- steps that are not finite


def poison_nonfinite(gradients: Callable) -> Callable:
    """`local_gradients` with a NaN unless the worker's loss and gradients are finite.

    The exchange spreads the NaN to the params of all workers, where `revert_if_nonfinite` finds it: no message is
    needed. It is in the smallest leaf, so that only that leaf's bucket waits for all others.
    """

    @functools.wraps(gradients)
    def poisoned(*args: Any) -> tuple[PyTree, PyTree, Metrics]:
        grads, model_state, metrics = gradients(*args)
        leaves, structure = jax.tree.flatten(grads)
        is_finite = jnp.isfinite(metrics.loss) & metrics.finite.all()
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].size or np.inf)
        leaves[smallest] = jnp.where(is_finite, leaves[smallest], jnp.nan)
        return jax.tree.unflatten(structure, leaves), model_state, metrics

    return poisoned


def revert_if_nonfinite(before: TrainState, after: TrainState) -> tuple[TrainState, jax.Array]:
    """Keep an update if its params are finite; return (state, applied).

    All params come from an exchange, so a value that is not finite on one worker is not finite on any.
    """
    applied = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params)] or [jnp.array(True)]).all()
    kept = jax.tree.map(lambda new, old: jnp.where(applied, new, old), after, before)
    return kept._replace(step=after.step), applied


# ---------------------------------------------------------------- evaluation


def eval_step(
    forward: Forward, params: PyTree, model_state: PyTree, batch: Batch, *, with_outputs: bool = False
) -> tuple[FigureSums, Any]:
    """Sums of loss, count and metrics over examples of weight > 0; and what `predict` returns, None without outputs."""
    unused = jax.random.key(0)  # nothing is random in evaluation
    losses, _, outputs, scalars = forward.losses(params, model_state, batch, unused, False)
    weights, real = forward.weights(batch), batch["weight"] > 0
    loss = jnp.where(real, losses * weights, 0).sum(), weights.sum()
    examples = real.sum(dtype=jnp.float32)
    sums = {"loss": loss, "count": (examples, examples), **forward.figures(outputs, scalars, batch)}
    # XLA computes once what they have in common.
    return sums, predict(forward, params, model_state, batch) if with_outputs else None


def predict(forward: Forward, params: PyTree, model_state: PyTree, batch: Batch) -> Any:
    """Outputs in evaluation, floats in 32 bits; without weights all examples count."""
    batch = {"weight": jnp.ones(jax.tree.leaves(batch)[0].shape[0]), **batch}
    if forward.task.predict:
        outputs = forward.task.predict(forward.cast(params), model_state, batch)
    else:
        outputs = forward.task.loss(forward.cast(params), model_state, batch, jax.random.key(0), False)[2]
    return cast_floats(outputs, jnp.float32)


def jit_predict(forward: Forward) -> Callable[[PyTree, PyTree, Batch], Any]:
    """Jit `predict` for batches of the user's own, NumPy's or JAX's."""
    jitted = jax.jit(partial(predict, forward))

    def predict_checked(params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        lengths = {np.shape(x)[:1] for x in jax.tree.leaves(batch)} if isinstance(batch, dict) else set()
        if len(lengths) != 1 or not all(length and length[0] for length in lengths):
            shapes = jax.tree.map(np.shape, batch) if isinstance(batch, dict) else type(batch).__name__
            raise UsageError(
                f"predict: got {shapes!s:.400}; expected a dict of arrays [batch, ...], all of one length of at least 1"
            )
        # By itself jit wraps 64-bit integers and drops masks without a word.
        checked = jax.tree_util.tree_map_with_path(lambda path, x: to_jax(f"batch/{path_name(path)}", x), batch)
        try:
            return jitted(params, model_state, checked)
        except KeyError as error:  # of a task that looks up its fields
            raise UsageError(f"predict: got fields {', '.join(batch)}; expected {error}, too") from error

    return predict_checked
