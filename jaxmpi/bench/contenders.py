"""Contenders of the benchmark: exchanges whose first result is checked.

A benchmark must not time an exchange that computes a wrong result. Each contender therefore exchanges a known pattern,
which `check_result` compares with its sum or mean. Entries are integers from 0 to 12, so float32 sums are exact in any
order. The check has a tolerance, because 16-bit wires round. Compressors and `none` compute no plain mean, so their
results are not checked. `COPY` and `LINK` measure memory and network speed for reference.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import compression
from jaxmpi.allreduce.algorithms import exchanges
from jaxmpi.allreduce.api import Op, check_strategy, exchange, exchange_gradients
from jaxmpi.allreduce.autotune import choose, is_auto
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import world
from jaxmpi.core.errors import TrainingError

Arrays = Sequence[Any]  # f32 each, of NumPy, JAX or torch
Run = Callable[[], Arrays]  # one exchange, finished when it returns
Shape = tuple[int, ...]
PATTERN = np.arange(13, dtype=np.float32)  # whole numbers: sums are exact in any order, and of no length zero
ROUGH = 0.1  # share of the largest sum there may be: more than a wire rounds away, less than a wrong sum is off
COPY_BYTES = 64 << 20  # bytes of one copy, beyond the caches if several ranks copy
LINK_BYTES = 2 << 20  # bytes of one message between hosts


class Inputs:
    """This rank's data of one case, each form made at first use."""

    def __init__(self, shapes: Sequence[Shape], control: Processes) -> None:
        """Take the leaves' shapes."""
        self.shapes, self.control = [tuple(shape) or (1,) for shape in shapes], control
        self.floats = sum(math.prod(shape) for shape in shapes)
        self.picked: dict[str, dict[str, Any]] = {}  # by contender that chooses a strategy: its choice, and why

    @functools.cached_property
    def leaves(self) -> list[jax.Array]:
        """The tree's leaves, f32."""
        return [jnp.array(pattern(self.control.rank, shape)) for shape in self.shapes]

    @functools.cached_property
    def flat(self) -> jax.Array:
        """f32[n]: one array with as many floats, which is less work."""
        return jnp.array(pattern(self.control.rank, (self.floats,)))

    @functools.cached_property
    def work(self) -> np.ndarray:
        """f32[n] to receive into, or to sum in place."""
        return np.array(self.flat)


def pattern(rank: int, shape: Shape) -> np.ndarray:
    """f32[shape]: 0 ... 12 repeated, shifted by one place per rank."""
    floats = math.prod(shape)
    return np.tile(np.roll(PATTERN, rank), -(-floats // PATTERN.size))[:floats].reshape(shape)


class Contender(NamedTuple):
    """Something to time."""

    name: str
    op: Op | None  # its result; None: no exchange
    start: Callable[[Inputs], Run]


def strategy(name: str) -> Contender:
    """`jaxmpi.exchange` of the tree, mean, in jit."""

    def start(inputs: Inputs) -> Run:
        run = jax.jit(lambda leaves: exchange(leaves, name))
        return lambda: jax.block_until_ready(run(inputs.leaves))

    return Contender(name, "mean" if exchanges(name) else None, start)


def auto_contender(name: str) -> Contender:
    """The exchange that `auto` picks for each case; rank 0 prints why."""

    def start(inputs: Inputs) -> Run:
        picked = choose(world(), [math.prod(shape) for shape in inputs.shapes], name)
        inputs.picked[name] = {k: v for k, v in picked._asdict().items() if k != "overlap"}
        if inputs.control.rank == 0:
            print(f"jaxmpi: {picked.why}", flush=True)

        def mean(leaves: list[jax.Array]) -> list[jax.Array]:
            return exchange(leaves, picked.strategy)

        run = jax.jit(mean)
        return lambda: jax.block_until_ready(run(inputs.leaves))

    return Contender(name, "mean", start)


def compressor(name: str) -> Contender:
    """`jaxmpi.exchange_gradients`, whose state has a residual: the result is no plain mean."""

    def start(inputs: Inputs) -> Run:
        tx = exchange_gradients(name)
        state = tx.init(inputs.leaves)

        def run() -> Arrays:
            nonlocal state
            updates, state = tx.update(inputs.leaves, state)
            return jax.block_until_ready(updates)

        return run

    return Contender(name, None, start)


def find_contender(name: str) -> Contender:
    """The strategy, `auto` or compressor of this name.

    Raises:
        UsageError: there is none.
    """
    if compression.is_compressor(name):
        compression.parse(name)
        return compressor(name)
    check_strategy(name)
    return auto_contender(name) if is_auto(name) else strategy(name)


def check_result(contender: Contender, arrays: Arrays, control: Processes) -> None:
    """Refuse to time a contender with a wrong sum.

    Raises:
        TrainingError: an entry is off by more than wires round.
    """
    if contender.op is None:
        return
    weight = 1 / control.size if contender.op == "mean" else 1
    expected = weight * np.sum([np.roll(PATTERN, rank) for rank in range(control.size)], 0)
    allowed = ROUGH * weight * control.size * float(PATTERN.max())
    for i, array in enumerate(arrays):
        got = np.asarray(array).reshape(-1)
        error = float(np.abs(got - np.resize(expected, got.size)).max(initial=0.0))
        if not error <= allowed:  # true for NaN
            raise TrainingError(f"{contender.name}: array {i} is off by {error:g}; expected at most {allowed:g}")


def mpi_control(inputs: Inputs) -> MpiProcesses:
    """The control plane of several ranks; peers do not run with one."""
    assert isinstance(inputs.control, MpiProcesses)
    return inputs.control


# ---------------------------------------------------------------- reference speeds


def time_copy(inputs: Inputs) -> Run:
    """Copy COPY_BYTES on all ranks at once: measures this host's memory."""
    control = mpi_control(inputs)
    source = np.ones(COPY_BYTES // 4, np.float32)
    target = np.empty_like(source)

    def run() -> Arrays:
        np.copyto(target, source)
        control.world.Barrier()  # ranks that share a core may copy one after another
        return []

    return run


def time_link(inputs: Inputs) -> Run:
    """Send LINK_BYTES from each host's first rank to the next host's."""
    control = mpi_control(inputs)
    firsts = [control.hosts.index(host) for host in sorted(set(control.hosts))]
    send_buffer = np.ones(LINK_BYTES, np.uint8)
    received = np.empty_like(send_buffer)
    place = firsts.index(control.rank) if control.rank in firsts else None

    def run() -> Arrays:
        if place is not None:
            to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
            control.world.Sendrecv(send_buffer, to, recvbuf=received, source=source)
        return []

    return run


COPY = Contender("copy", None, time_copy)
LINK = Contender("link", None, time_link)
