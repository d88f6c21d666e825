"""Gradients that go into a sum when a program has computed them: their values, and that they never exist together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import early_scatter
from jaxmpi.runtime import host_callbacks

LAYERS, WIDTH = 8, 512


def scattered(leaves: list[jax.Array], through: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """A call that gives the first half of each gradient, as if there were two workers."""
    like = [jax.ShapeDtypeStruct((leaf.size // 2,), leaf.dtype) for leaf in leaves]
    like += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in through]
    pairs = [(i, i) for i in range(len(leaves), len(like))]
    found = host_callbacks.call("first halves", [*leaves, *through], like, pairs)
    return found[: len(leaves)], found[len(leaves) :]


def halve(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    for x, half in zip(operands, results, strict=True):
        half.reshape(-1)[:] = x.reshape(-1)[: half.size]


def differentiated(params: list[Any], x: jax.Array) -> tuple:
    """Gradients of matrices, one behind the other, the last of them in a scan; loss and |gradients|^2."""

    def loss(params: list[Any]) -> jax.Array:
        y, places = x, jnp.arange(4)
        for matrix in params[:-2]:
            y = jnp.tanh(y @ matrix)
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ params[-2]), None), y, places)
        return jnp.square(y + jnp.take(params[-1], places, axis=0).sum()).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return grads, value, sum(jnp.square(leaf).sum() for leaf in grads)


def params() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)]


def test_slices_are_those_of_the_gradients_and_gradients_never_exist_together(monkeypatch):
    args = params(), np.ones((4, WIDTH), np.float32)
    host_callbacks.register("first halves", halve)
    early = jax.jit(early_scatter.scattering(differentiated, WIDTH * WIDTH, scattered)).lower(*args).compile()
    whole = jax.jit(differentiated).lower(*args).compile()
    try:
        (slices, *others), (grads, *expected) = early(*args), whole(*args)
        for mine, leaf in zip(slices, grads, strict=True):
            half = np.asarray(leaf).reshape(-1)[: leaf.size // 2]
            # XLA fuses less of a program that is cut, and so rounds otherwise: by a third at most of what one product
            # of WIDTH terms may be off, WIDTH 2^-24.
            np.testing.assert_allclose(np.asarray(mine), half, atol=1e-5 * np.abs(half).max())
        np.testing.assert_allclose(others, expected, rtol=1e-5)
    finally:
        host_callbacks.forget("first halves")
    matrix = 4 * WIDTH * WIDTH
    held = early.memory_analysis()
    assert held
    assert held.temp_size_in_bytes < 3 * matrix, held  # a gradient, and the one that the scan begins with


def test_leaves_that_the_loss_does_not_use_have_gradients_of_zero():
    """JAX has the zero of a scalar as a constant in the program's results."""
    leaves = {"used": jnp.ones((4, 4)), "unused": jnp.ones((4, 4)), "scalar": jnp.ones(())}
    loss = lambda leaves, x: (x @ leaves["used"]).sum()  # noqa: E731
    scatter = lambda leaves, through: (leaves, through)  # noqa: E731
    differentiated = early_scatter.scattering(lambda *args: (jax.grad(loss)(*args), loss(*args)), 4, scatter)
    grads, _ = jax.jit(differentiated)(leaves, jnp.ones((2, 4)))
    np.testing.assert_array_equal(grads["used"], np.full((4, 4), 2))
    assert not grads["unused"].any()
    assert grads["scalar"] == 0


def test_random_keys_do_not_go_through_a_call():
    """A backward pass may split one for what follows; a function cannot be given it."""

    @jax.custom_vjp
    def noisy(x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        return x.sum() + y.sum()

    def backward(kept: Any, _: jax.Array) -> tuple:
        key, other = jax.random.split(kept[2])
        return jax.random.normal(key, (4,)), jax.random.normal(other, (4,)), None

    noisy.defvjp(lambda *args: (noisy(*args), args), backward)
    given: list[Any] = []

    def scatter(leaves: list[jax.Array], through: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        given.extend(through)
        return leaves, through

    differentiated = lambda xs, key: (jax.grad(lambda xs: noisy(*xs, key))(xs),)  # noqa: E731
    args = [jnp.ones(4), jnp.ones(4)], jax.random.key(0)
    [grads], [expected] = jax.jit(early_scatter.scattering(differentiated, 4, scatter))(*args), differentiated(*args)
    np.testing.assert_array_equal(grads, expected)
    assert all(host_callbacks.can_go(x.dtype) for x in given)
