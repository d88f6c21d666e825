"""In which order gradients come to exist, and which travel together."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.allreduce.buckets import Order, assign_buckets

sizes = st.lists(st.integers(0, 3000), max_size=20)


@given(sizes, st.sampled_from([None, 4, 400, 4000, 10**6]), st.randoms())
def test_every_leaf_that_holds_something_travels_once_and_in_order(sizes, bucket_bytes, random):
    ready = list(range(len(sizes)))
    random.shuffle(ready)
    buckets = assign_buckets(sizes, bucket_bytes, ready)
    assert sorted(i for bucket in buckets for i in bucket) == [i for i, n in enumerate(sizes) if n]
    place = {leaf: i for i, leaf in enumerate(ready)}
    for bucket in buckets:
        assert [place[i] for i in bucket] == sorted(place[i] for i in bucket)
    firsts = [place[bucket[0]] for bucket in buckets]
    assert firsts == sorted(firsts)
    if bucket_bytes is None:
        assert len(buckets) <= 1
    else:
        # The first is closed by the leaf with which it holds a quarter; the others hold one leaf, or no more than all.
        assert all(4 * sum(sizes[i] for i in bucket[:-1]) <= bucket_bytes for bucket in buckets)
        assert not buckets or 16 * sum(sizes[i] for i in buckets[0][:-1]) < bucket_bytes
        # The last holds a quarter at most, unless its leaf is bigger or it is the first.
        late = [sizes[i] for i in ready if sizes[i]][-1:]
        is_small = len(buckets) > 1 and 16 * late[0] <= bucket_bytes
        assert not is_small or 16 * sum(sizes[i] for i in buckets[-1]) <= bucket_bytes


def backward(params, x):
    """Gradients of three layers, whose names say nothing of their order."""

    def loss(params):
        y = x
        for name in "mza":
            y = jnp.tanh(y @ params[name])
        return y.sum()

    return jax.grad(loss)(params), x.sum()


def test_the_order_of_gradients_is_found_and_results_stay():
    params = {name: jnp.full((3, 3), 0.1 * (i + 1)) for i, name in enumerate("amz")}  # leaves: a, m, z
    order, x = Order(), jnp.ones((2, 3))
    assert order.leaves(3) == [2, 1, 0]  # nothing is known: from the last
    noted = jax.jit(order.record(backward))
    got, expected = noted(params, x), jax.jit(backward)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert order.leaves(3) == [0, 2, 1]  # a, the last layer, then z, then m
    assert order.leaves(2) == [1, 0]  # another tree
