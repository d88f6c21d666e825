"""Run under mpirun --with-ft ulfm by test_rank_loss.py: collectives that outlive ranks."""

import functools
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.fault_tolerant import FaultTolerantComm, outlive, shrink, vote
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import AgreedError
from jaxmpi.runtime import failures

STRATEGIES = ("ar", "asa:16", "ring", "root:bf16", "shm")
N = 1000


def part(rank: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n, np.float32)


def expected(strategy: str, ranks: tuple[int, ...]) -> np.ndarray:
    """The mean of these ranks' parts, by the same strategy over an axis.

    `shm` adds in rank order and divides by the number of ranks. A program of XLA's multiplies by the number's inverse
    instead.
    """
    comm = AxisComm("w", len(ranks))
    if strategy == "shm":
        return functools.reduce(np.add, map(part, ranks)) / np.float32(len(ranks))
    means = jax.jit(jax.vmap(lambda x: exchange(x, strategy, comm=comm), axis_name="w"))(
        np.stack([part(r) for r in ranks])
    )
    return np.asarray(means)[0]


def check_all(comm: FaultTolerantComm, control: MpiProcesses) -> None:
    mine = part(control.numbers[comm.rank])
    for strategy in STRATEGIES:
        got = np.asarray(jax.jit(lambda x, s=strategy: exchange(x, s, comm=comm))(mine))
        want = expected("asa" if strategy == "ar" else strategy, control.numbers)
        # `ar` adds in an order of the library's; the others in the order that the strategy says.
        same = np.allclose(got, want, rtol=0, atol=4e-7 * 4) if strategy == "ar" else got.tobytes() == want.tobytes()
        assert same, f"{strategy} over {control.numbers}: {np.abs(got - want).max()}"


def until_death(comm: FaultTolerantComm, victim: int, strategy: str) -> int:
    """Steps that all voted for, of which each adds the mean of all ranks' ones to a sum."""
    control, done = comm.processes, 0
    step = jax.jit(lambda w: w + exchange(jnp.ones(N), strategy, comm=comm))
    w = jnp.zeros(N)
    while True:
        if done == 5 and control.numbers[comm.rank] == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        new = jax.block_until_ready(step(w))
        if not vote(control, not comm.why_lost):
            assert float(w[0]) == done
            return done
        w, done = new, done + 1


def main() -> None:
    control = processes()
    assert isinstance(control, MpiProcesses)
    outlive(control)
    comm, victims = FaultTolerantComm(control), [int(v) for v in sys.argv[1].split(",")]
    check_all(comm, control)
    for victim, strategy in zip(victims, ("ring", "shm", "asa"), strict=False):
        assert until_death(comm, victim, strategy) == 5
        before = control.size
        jax.effects_barrier()
        assert shrink(control, "test") == [victim]
        comm = FaultTolerantComm(control)
        assert comm.size == control.size == before - 1
        check_all(comm, control)
    with pytest.raises(AgreedError, match="none of them is gone: test"):  # every rank says the reason that one has
        shrink(control, "test" * (control.rank == control.size - 1))
    control.allgather_object("all are here")
    print(f"rank {control.numbers[control.rank]} is left among {control.numbers}", flush=True)
    control.leave(0)


if __name__ == "__main__":
    failures.install_excepthooks()
    main()
