"""Synchronous SGD with all workers: sgd_before.py, with the changes marked.

python experiments/functions/sgd.py                # all devices or cores
mpirun -n 2 python experiments/functions/sgd.py    # ranks of any launcher

Every worker takes a step with its share of the batch, then the workers' params are averaged. For plain SGD that is the
step with the mean gradient. Asserts the losses and params of one worker. 10 s on 2 cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from jaxmpi import functions as jm  # changed

BATCH, STEPS, LR = 144, 100, 0.5


def loss(params, x, y):
    """Mean cross-entropy with one hidden layer; x: f32[batch, 64], y: i32[batch]."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    logits = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"])
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def step(x, y, params):
    """The loss, and params after one step."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return value, jax.tree.map(lambda p, g: p - LR * g, params, grads)


def build_net():
    """Initial params."""
    rng = np.random.default_rng(0)
    weights = lambda *shape: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)  # noqa: E731
    return {
        "w1": weights(64, 32),
        "b1": np.zeros(32, np.float32),
        "w2": weights(32, 10),
        "b2": np.zeros(10, np.float32),
    }


def main():
    """Losses of all steps, and the params at the end."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = np.asarray(pixels, np.float32) / 16, np.asarray(digits, np.int32)
    x, y = jm.shared(x), jm.shared(y)  # changed
    params = jm.variable(build_net())  # changed
    train = jm.function(step, (jm.scatter, jm.scatter, params), (jm.mean,), (params,))  # changed
    rng = np.random.default_rng(1)
    losses = []
    for _ in range(STEPS):
        batch = rng.choice(len(x), BATCH, replace=False)
        (value,) = train(x, y, batch=batch)  # changed
        params.all_reduce("mean")  # changed
        losses.append(float(value))
    return losses, params.get(0)  # changed


if __name__ == "__main__":
    workers = jm.fork()  # changed
    losses, params = main()
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")

    from jaxmpi.experiments.functions import sgd_before  # from here on: is it what one worker does?

    alone_losses, alone = sgd_before.main()
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), params, alone)
    print(f"{workers} workers did what one does")
