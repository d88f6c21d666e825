"""Full-batch L-BFGS on handwritten digits by SciPy, from losses and gradients.

python experiments/functions/lbfgs.py
mpirun -n 2 python experiments/functions/lbfgs.py

The data are scattered once and stay on the workers. Each evaluation sends the params and takes the mean gradient. Each
worker computes in two pieces, as if its share were too big to compute at once. Asserts the minimum that one worker
finds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from jaxmpi import functions as jm

DECAY, ITERATIONS = 1e-3, 60


def loss(w, x, y):
    """Cross-entropy of a softmax, with weight decay. w: f32[650]."""
    weights, biases = w[:640].reshape(64, 10), w[640:]
    logits = jax.nn.log_softmax(x @ weights + biases)
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean() + DECAY * (weights**2).sum()


def descend(evaluate):
    """SciPy's L-BFGS, in f64, around a function of f32."""
    evaluated = lambda w: tuple(np.asarray(v, np.float64) for v in evaluate(np.float32(w)))  # noqa: E731
    return minimize(evaluated, np.zeros(650), jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS})


if __name__ == "__main__":
    workers = jm.fork()
    pixels, digits = load_digits(return_X_y=True)
    x, y = np.asarray(pixels, np.float32) / 16, np.asarray(digits, np.int32)

    examples = jm.variable({"x": x[:0], "y": y[:0]})
    examples.scatter({"x": x, "y": y})
    f = jm.function(
        lambda data, w: jax.value_and_grad(loss)(w, data["x"], data["y"]),
        (jm.scatter(examples), jm.broadcast),
        (jm.mean, jm.mean),
    )
    found = descend(lambda w: f(w, slices=2))
    print(f"loss {found.fun:.6f} after {found.nit} iterations, {found.nfev} evaluations")

    alone = descend(lambda w: jax.jit(jax.value_and_grad(loss))(w, x, y))
    assert abs(found.fun - alone.fun) < 1e-3 * alone.fun, (found.fun, alone.fun)
    print(f"{workers} workers found what one finds")
