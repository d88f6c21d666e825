"""Ranks that have come to different exchanges end the job and say which, before a number has changed hands."""

import re

import pytest

from launching import mpirun

PREAMBLE = """
import threading
import jax, jax.numpy as jnp, jaxmpi
rank, strategy = int(jaxmpi.world().rank), "{strategy}"
x = jnp.full((8, 8), 1.0 + rank)
"""
IN_ANOTHER_ORDER = """
f = jax.jit(lambda x: jaxmpi.exchange(x, strategy))
g = jax.jit(lambda x: jaxmpi.exchange(2 * x, strategy))
for _ in range(3):
    f(x).block_until_ready(), g(x).block_until_ready()
print("both have run", flush=True)
first, second = (f, g) if rank == 0 else (g, f)
print("numbers", first(x).sum(), second(x).sum(), flush=True)
"""
COMPRESSED = """
tx = jaxmpi.exchange_gradients(strategy)
state = tx.init(x)
f, g = jax.jit(lambda x: tx.update(x, state)[0]), jax.jit(lambda x: 2 * tx.update(x, state)[0])
f(x).block_until_ready(), g(x).block_until_ready()
print("both have run", flush=True)
print("numbers", (f, g)[rank](x), flush=True)
"""
IN_A_BRANCH = """
@jax.jit
def h(x, taken):
    y = jax.lax.cond(taken, lambda x: jaxmpi.exchange(x, strategy), lambda x: x, x)
    return jaxmpi.exchange(2 * y, strategy)

h(x, True).block_until_ready(), h(x, False).block_until_ready()
print("both have run", flush=True)
print("numbers", h(x, rank == 0), flush=True)
"""


@pytest.mark.parametrize(
    ("strategy", "script"),
    [
        ("asa32", IN_ANOTHER_ORDER),
        ("shm", IN_A_BRANCH),
        ("topk5/ring32", COMPRESSED),
    ],
)
def test_ranks_at_different_exchanges_are_named(strategy, script):
    ended = mpirun(2, "-c", PREAMBLE.format(strategy=strategy) + script, timeout_s=90)
    assert not ended.timed_out, ended.out
    assert ended.code == 2, ended.out
    assert ended.out.count("both have run") == 2, ended.out
    assert "numbers" not in ended.out
    found = re.search(
        r"rank 0 to 'exchange (\d+) of the job \(.*<string>:\d+ in .*rank 1 to 'exchange (\d+) ", ended.out
    )
    assert found, ended.out
    assert found[1] != found[2]


def test_a_second_thread_is_refused_while_one_exchanges():
    """The others' exchange waits for rank 1, so both threads of rank 0 are in it for certain."""
    script = """
import time
said = []

def first():
    said.append(float(jaxmpi.exchange(x, strategy)[0, 0]))

def second():
    try:
        jaxmpi.exchange(x, strategy)
    except jaxmpi.UsageError as error:
        said.append(str(error))

if rank == 0:
    one = threading.Thread(target=first, name="trainer")
    one.start()
    from jaxmpi.allreduce import call_order
    while call_order._door.holder != "trainer":
        time.sleep(0.01)
    two = threading.Thread(target=second, name="logger")
    two.start(), two.join()
    print("refused:", said, flush=True)
    one.join()
else:
    time.sleep(3)
    first()
print("mean", said[-1], float(jaxmpi.exchange(x, strategy)[0, 0]), flush=True)
"""
    ended = mpirun(2, "-c", PREAMBLE.format(strategy="asa32") + script, timeout_s=90)
    assert ended.code == 0, ended.out
    assert "thread 'logger' calls it while thread 'trainer' is in it; expected one at a time" in ended.out
    assert ended.out.count("mean 1.5 1.5") == 2, ended.out
