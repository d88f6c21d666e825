"""SGD with one worker in plain JAX; sgd.py uses all workers.

python experiments/functions/sgd_before.py

The pair is that of Stooke and Abbeel 2017, appendix A: only the lines marked as changed in sgd.py change.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

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
    params = build_net()
    train = jax.jit(step)
    rng = np.random.default_rng(1)
    losses = []
    for _ in range(STEPS):
        batch = rng.choice(len(x), BATCH, replace=False)
        value, params = train(x[batch], y[batch], params)
        losses.append(float(value))
    return losses, jax.tree.map(np.asarray, params)


if __name__ == "__main__":
    losses, _ = main()
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
