"""Sums of a program's buckets by the communication thread: the calls in the program, and the thread.

In a program an exchange is three kinds of calls. `open` numbers it, in the order of programs, so that all ranks give a
bucket the same number. `start` hands a bucket to the thread and returns at once. It waits for nothing but its own
gradients. So XLA runs it when they are there, on each rank in an order of its own. `done`, after the last start, waits
until a bucket holds the sum. The bucket passes through both in one buffer, which the thread changes in between: nothing
is copied, and XLA, for which only these calls use the buffer, leaves it alone. All of it is C (`host_engine.c`); Python
is called when a plan is new and when something is wrong.
"""

import functools
import json
import threading
from collections.abc import Sequence
from ctypes import c_int32
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.allreduce import host_engine
from jaxmpi.allreduce.algorithms import STRATEGIES, parse
from jaxmpi.allreduce.call_order import compare_when_run
from jaxmpi.allreduce.host_engine import DONE, OPEN, START, HostEngine, key_of, words_of
from jaxmpi.comm import c_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core import scheduling
from jaxmpi.core.errors import check
from jaxmpi.runtime import failures, host_callbacks

THREAD = "jaxmpi exchange"
RANK = f"{THREAD}: rank"
TICKET = jax.ShapeDtypeStruct((), jnp.uint32)


def unavailable_reason(strategy: str, comm: Comm) -> str | None:
    """Why this exchange cannot run beside a program; None if it can.

    The same on all ranks.
    """
    if comm.size == 1:
        return "no other worker takes part in a step"
    if not isinstance(comm, MpiComm):
        return "workers are not MPI ranks"
    if comm.processes.size < world().size:
        return "workers are a part of the job's ranks"
    if not parse(strategy).is_in_c():
        able = ", ".join(name for name, row in STRATEGIES.items() if row.parts)
        return f"strategy {strategy} does not run beside a program; {able} do, as jaxmpi has them and by its wires"
    if not parse(strategy).is_in_c(comm.hosts):
        needs = "hier-<cross> needs equally many on every host, tree 2, 4, 8 or another power of two"
        return f"strategy {strategy} is not for these ranks: {needs}"
    if not comm.processes.may_overlap:
        return "MPI gives MPI_THREAD_SERIALIZED, and two threads at once need MPI_THREAD_MULTIPLE"
    return host_engine.unavailable_reason(comm) or None


def all_reduce_on_comm_thread(
    vectors: Sequence[jax.Array],
    strategy: str,
    comm: Comm,
    half: str = "",
    *,
    labels: Sequence[str] = (),
    portable: bool = False,
    number: int | None = None,
) -> list[jax.Array]:
    """f32[n] each -> their sums over workers, by the communication thread.

    Each starts when it is ready; when all have, they are waited for in turn. No wait may be left out, though nobody
    uses its sum: until then the thread writes into the program's buffer.

    Args:
        strategy: its full name.
        half: of the strategy's sum, `scatter` or `gather`; empty: all of it.
        labels: of the vectors, for messages.
        portable: the program can be exported. Then data alone orders waits, so results of the first sums may be used
            while the last are under way. Else the calls are ordered among mpi4jax's, so that none of these waits for
            one behind it.
        number: by which ranks compare the exchange when its program runs, as of `call_order.compare_when_run`.
    """
    engine, sums = exchange_handlers(), [(strategy, half, x.size) for x in vectors]
    parts, limit = engine.parts(sums), engine.tags // 2  # a resumed exchange has the other half
    check(parts <= limit, f"got {parts} segments of gradients, expected {limit} or fewer; use overlap off")
    prefix = f"{half} of " if half else ""
    labels = labels or [f"{prefix}bucket {i + 1} of {len(vectors)}" for i in range(len(vectors))]
    text = json.dumps({"sums": sums, "labels": [*labels]})
    effect = host_callbacks.ORDERED if portable or not isinstance(comm, MpiComm) else comm.effect
    [ticket] = _call((OPEN, *words_of(key_of(text))), [], [TICKET], effect, text=text)
    # A start has no effect that orders it: it waits for its own vector alone.
    starts = [_call((START, i), [x, ticket], [x, TICKET], None) for i, x in enumerate(vectors)]
    before, totals = [last for _, last in starts], []  # tickets of all starts: no wait may hold up a computation
    order = host_callbacks.KEPT if effect is host_callbacks.ORDERED else effect
    # The comparison goes around the waits alone: XLA would put off starts behind its beginning till the gradients' end.
    with compare_when_run(comm, number):
        for i, vector in enumerate(vectors):
            total, last = _call((DONE, i), [*starts[i], *before], [vector, TICKET], order)
            totals, before = [*totals, total], [last]
    return totals


def _call(words: tuple[int, ...], operands: list, results: list, effect: Any, text: str = "") -> list[jax.Array]:
    """Call the handler; a bucket passes through in one buffer."""
    in_place = ((0, 0),) if operands else ()
    shapes = c_handlers.shaped(*results)
    return host_engine.beside_p.bind(
        *operands, results=shapes, effect=effect, words=words, in_place=in_place, text=text
    )


# ---------------------------------------------------------------- in the process


@functools.cache
def exchange_handlers() -> HostEngine:
    """The engine of all ranks of the job, with the communication thread; all ranks make the first call together."""
    comm = world()
    assert isinstance(comm, MpiComm)
    host_engine.unavailable_reason(comm)  # all ranks agree on it here, though one may trace for others
    engine, library = HostEngine(comm), host_engine.library()

    def run() -> None:
        scheduling.flush_subnormals()
        scheduling.take_short_turns()
        library.jaxmpi_beside_run(c_int32(engine.number))

    thread = threading.Thread(target=run, name=THREAD, daemon=True)

    def tell_rank(operands: list, results: list) -> None:  # i32[]: that runs a program; another may have traced it
        results[0][...] = engine.control.rank

    def stop() -> None:  # when running programs and messages under way have ended
        try:
            jax.effects_barrier()
        finally:  # a program that failed fails here once more
            library.jaxmpi_beside_stop()
            thread.join()

    host_callbacks.register(RANK, tell_rank, ends_job=True)
    thread.start()
    failures.call_before_finalize(stop)
    return engine
