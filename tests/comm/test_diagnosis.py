"""Ranks that have come to different exchanges end the job and say which, before a program returns a wrong number."""

import re

import pytest

from launching import CLUSTER, NOT_PERMITTED, ROOT, mpirun, run

PREAMBLE = """
import threading
import jax, jax.numpy as jnp, jaxmpi
rank, strategy = int(jaxmpi.world().rank), "{strategy}"
x = jnp.full((8, 8), 1.0 + rank)
"""


def out_of(
    script: str, strategy: str = "asa32", ranks: int = 2, code: int = 2, env: dict[str, str] | None = None
) -> str:
    """What ranks print, who end with this code."""
    ended = mpirun(ranks, "-c", PREAMBLE.format(strategy=strategy) + script, timeout_s=90, env=env)
    assert not ended.timed_out, ended.out
    assert ended.code == code, ended.out
    return ended.out


def check_both_are_named(said: str, one: int = 0, other: int = 1) -> None:
    """Both have run alike before, and neither has got a number of the other's exchange."""
    place = r"'(exchange .*<string>:\d+ in .*)'"
    found = re.search(f"rank {one} to {place}, rank {other} to {place};", said)
    assert found, said
    assert found[1] != found[2]
    assert said.count("both have run") >= 2, said
    assert "numbers" not in said


IN_ANOTHER_ORDER = """
f = jax.jit(lambda x: jaxmpi.exchange(x, strategy))
g = jax.jit(lambda x: jaxmpi.exchange(2 * x, strategy))
for _ in range(3):
    f(x).block_until_ready(), g(x).block_until_ready()
print("both have run", flush=True)
first, second = (f, g) if rank == 0 else (g, f)
print("numbers", float(first(x).sum()), flush=True)  # a number, not an array that print waits for
print("numbers", float(second(x).sum()), flush=True)
"""
OF_OTHER_SIZES = IN_ANOTHER_ORDER.replace("exchange(2 * x,", "exchange(x[:2, :3],")
STUCK = IN_ANOTHER_ORDER.replace("exchange(2 * x, strategy", "exchange(2 * x, 'tree:16'")
COMPRESSED = """
tx = jaxmpi.exchange_gradients(strategy)
state = tx.init(x)
f, g = jax.jit(lambda x: tx.update(x, state)[0]), jax.jit(lambda x: 2 * tx.update(x, state)[0])
f(x).block_until_ready(), g(x).block_until_ready()
print("both have run", flush=True)
print("numbers", (f, g)[rank](x), flush=True)
"""
BESIDE = """
from jaxmpi.allreduce.overlap import exchange as beside
exchanged = lambda x: beside({"w": x}, strategy)["w"]
f = jax.jit(lambda x: jnp.sin(exchanged(x)))
g = jax.jit(
    lambda x: jnp.cos(exchanged(x)))
for _ in range(3):
    f(x).block_until_ready(), g(x).block_until_ready()
print("both have run", flush=True)
first, second = (f, g) if rank == 0 else (g, f)
print("numbers", first(x).sum(), second(x).sum(), flush=True)
"""
AS_ON_A_GPU = """
from jaxmpi.runtime import host_callbacks
host_callbacks.sees_copies = lambda: True
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


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "script"),
    [
        ("asa32", OF_OTHER_SIZES),
        ("shm", IN_A_BRANCH),
        pytest.param("topk5/ring32", COMPRESSED, marks=pytest.mark.slow),
        ("ring32", BESIDE),
        ("asa32", AS_ON_A_GPU + STUCK),
    ],
)
def test_ranks_at_different_exchanges_are_named(strategy, script):
    check_both_are_named(out_of(script, strategy))


IF_FINITE = """
import optax
tx = {tx}
params = {{"w": jnp.ones(4)}}
state, update = tx.init(params), jax.jit(tx.update)
for step in range(9):
    grads = {{"w": jnp.full(4, 1.0 + rank)}}
    if step == {odd} and rank == 1:
        grads = {{"w": jnp.full(4, jnp.nan)}}
    updates, state = update(grads, state, params)
    jnp.sin(rank + jnp.ones(rank + 1))  # ranks run other programs in between, each its own
    params = jax.block_until_ready(optax.apply_updates(params, updates))
    print("step", step, flush=True)
print("end", params["w"].tolist(), flush=True)
"""
SKIPS = "optax.apply_if_finite(optax.chain(jaxmpi.exchange_gradients(strategy), optax.adam(0.1)), 3)"


@pytest.mark.e2e
def test_a_rank_that_skipped_its_first_exchange_is_named_with_its_turn_at_the_next():
    """XLA does not tell a handler that it is not called in a program's first run."""
    out = out_of(IF_FINITE.format(tx=SKIPS, odd=0), "shm")
    assert "rank 0 at turn 1, rank 1 at turn 2" in out
    assert "step 2" not in out


SKIPS_A_SUM = """
from jaxmpi import collectives
f = jax.jit(lambda x, takes: jax.lax.cond(takes, lambda: collectives.allreduce(x), lambda: x))
for step in range(9):
    print("step", step, f(x, step != 3 + rank).sum().item(), flush=True)
"""


@pytest.mark.e2e
def test_ranks_that_skip_a_collective_in_other_runs_are_named():
    """The sum of each rank's third and the other's fourth array came out."""
    out = out_of(SKIPS_A_SUM)
    assert "at different turns" in out
    assert "step 5" not in out


@pytest.mark.e2e
def test_a_rank_that_skipped_the_last_exchange_does_not_leave_the_other_waiting():
    assert "whose script has ended" in out_of(IF_FINITE.format(tx=SKIPS, odd=8), code=1)


AFTER_A_FAILURE = """
import time
from jaxmpi.comm import diagnosis
diagnosis.SAID_AFTER_S = 1.0

def fails(value):
    raise ValueError("of the user")

@jax.jit
def f(x):
    y = jaxmpi.exchange(x, strategy)
    jax.debug.callback(fails, x[0, 0])
    return y

try:
    jax.block_until_ready(f(x)), jax.effects_barrier()
except Exception as error:
    print("caught", flush=True)
print("mean", float(jaxmpi.exchange(x, strategy)[0, 0]), flush=True)
"""


@pytest.mark.e2e
def test_an_exchange_behind_a_program_that_failed_goes_on_or_says_why_not():
    """XLA may leave out the call that ends an exchange if another part of the program raises."""
    env = {"JAXMPI_EXCHANGE_TIMEOUT_S": "2"}
    ended = mpirun(2, "-c", PREAMBLE.format(strategy="asa32") + AFTER_A_FAILURE, timeout_s=60, env=env)
    assert not ended.timed_out, ended.out
    is_told = "waits for exchange 1 of the job" in ended.out and "which has begun in this process" in ended.out
    assert ended.out.count("mean 1.5") == 2 or (ended.code == 1 and is_told), ended.out


@pytest.mark.e2e
def test_ranks_of_two_hosts_at_different_exchanges_are_named():
    script = PREAMBLE.format(strategy="ring32") + IN_ANOTHER_ORDER
    command = [*CLUSTER, "--hosts", "2", "--", "mpirun", "-n", "2", "python", "-c", script]
    ended = run(command, timeout_s=120, cwd=ROOT)
    if ended.code == NOT_PERMITTED:
        pytest.skip("no network namespaces here")
    assert not ended.timed_out, ended.out
    assert ended.code != 0, ended.out
    check_both_are_named(ended.out)


@pytest.mark.e2e
@pytest.mark.slow  # waits for threads
def test_programs_of_two_threads_do_not_exchange_at_once():
    """On rank 0 the second program has come to its exchange long before the first one, which still computes."""
    script = """
import time

def f(x, times):
    slow = jax.lax.fori_loop(0, times, lambda i, y: jnp.tanh(y @ y), jnp.full((500, 500), x[0, 0]))
    return jaxmpi.exchange(x + 1e-9 * slow[:8, :8], strategy)

f, g = jax.jit(f), jax.jit(lambda x: jaxmpi.exchange(1000 * x, strategy))
f(x, 1).block_until_ready(), g(x).block_until_ready()
results = [f(x, 400 if rank == 0 else 1)]
time.sleep(0.5)
logger = threading.Thread(target=lambda: results.append(g(x)))
logger.start(), logger.join()
results.append(f(x, 1))  # begins when the first one ends, and the second one has waited for longer

@jax.jit
def late(x, times):
    return x + 1e-9 * jax.lax.fori_loop(0, times, lambda i, y: jnp.tanh(y @ y), jnp.full((500, 500), 0.1))[:8, :8]

results.append(jaxmpi.exchange(late(3 * x, 400 if rank == 0 else 1), strategy))  # its input is late on rank 0 alone
logger = threading.Thread(target=lambda: results.append(jaxmpi.exchange(3000 * x, strategy)))
logger.start(), logger.join()
print("means", *(round(float(result[0, 0]), 3) for result in results), flush=True)
"""
    out = out_of(script, code=0)
    assert out.count("means 1.5 1500.0 1.5 4.5 4500.0") == 2, out
