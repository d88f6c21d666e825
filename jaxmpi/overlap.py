"""The exchange behind the backward pass: buckets leave as soon as their gradients exist, on one thread a rank.

In a program an exchange is three kinds of calls. `open` numbers it, in the order of programs, so that all ranks give a
bucket the same number. `start` hands a bucket to the communication thread and returns at once; it waits for nothing but
its own gradients, so XLA runs it where they appear. `done`, after the last start, waits until a bucket holds the sum.
The bucket passes through both in one buffer, which the thread changes in place in between: nothing is copied, and what
XLA does in the meantime cannot touch it.
"""

import atexit
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmpi import handlers, hostcomm
from jaxmpi.comm import Comm, MpiComm, world
from jaxmpi.config import TrainingError, check, lookup
from jaxmpi.exchange import (
    BUCKET_BYTES,
    Op,
    check_leaves,
    check_op,
    fuse,
    not_differentiable,
    split,
    sum_bucket,
)
from jaxmpi.exchange import plan as pack
from jaxmpi.hostcomm import HostComm, HostSum, Messages
from jaxmpi.processes import Statement, signature, statement
from jaxmpi.strategies import Strategy, parse

PyTree = Any
POLL_S = 0.0004  # between looks at pending messages; a link's buffers hold more than it carries meanwhile
WINDOW = 16  # segments of a bucket under way at once
TAGS = 1 << 15  # that every MPI has
TIMEOUT_S = float(os.environ.get("JAXMPI_EXCHANGE_TIMEOUT_S", "1800"))
OPEN, START, DONE, SEND, COLLECT = (f"jaxmpi exchange: {verb}" for verb in ("open", "start", "done", "send", "collect"))


# ---------------------------------------------------------------- the thread


@dataclass(eq=False)
class Job:
    """A bucket on its way."""

    label: str
    waiting: Iterator[Iterator[Messages]]  # segments not yet begun
    address: int  # of the bucket
    under_way: int = 0  # segments
    summed: threading.Event = field(default_factory=threading.Event)
    result: np.ndarray | None = None  # where the bucket is the thread's own copy


class Segment(NamedTuple):
    """Part of a bucket, and what it waits for."""

    job: Job
    sum: Iterator[Messages]
    messages: Messages


class Event(NamedTuple):
    """What happened to which bucket, and when."""

    what: str  # open | start | summed | wait | done
    label: str
    time_s: float  # of time.perf_counter


class Courier:
    """The communication thread, and what programs call to reach it."""

    def __init__(self, comm: HostComm, session: int) -> None:
        """Start the thread; all ranks come here together, and each has one courier.

        Args:
            comm: messages of its own, used by this thread alone.
            session: a number that no earlier process of this run has had, the same on all ranks.
        """
        self.comm, self.session = comm, session
        self.count = 0  # buckets' segments so far, in all programs; equal on all ranks
        self.jobs: dict[tuple[int, int], Job] = {}
        self.events: deque[Event] = deque(maxlen=4096)  # what was when, for whom it interests
        self._arrived: deque[Job] = deque()
        self._segments: list[Segment] = []
        self._wake = threading.Condition()
        self._is_ending = False
        self._moved_s = time.monotonic()  # when the last message came or went
        for name, function in self._functions().items():
            handlers.register(name, function, ends_job=True)
        self._thread = threading.Thread(target=self._run, name="jaxmpi exchange", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread once what is under way has arrived."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        self._thread.join()

    def close(self) -> None:
        """End the thread, give back communicator and names; all ranks come here together."""
        self.stop()
        atexit.unregister(self.stop)
        self.comm.free()
        for name in self._functions():
            handlers.forget(name)

    # ------------------------------------------------------------ called by programs

    def _functions(self) -> dict[str, handlers.Function]:
        return {OPEN: self._open, START: self._start, DONE: self._done, SEND: self._send, COLLECT: self._collect}

    def _open(self, operands: list, results: list, segments: int) -> None:
        """Ticket u32[2]: this session, and the number of the exchange's first segment."""
        results[0][:] = self.session, self.count
        self.count = (self.count + segments) % 2**32
        self._note("open", "")

    def _start(self, operands: list, results: list, strategy: str, first: int, label: str) -> None:
        """(bucket, ticket) -> (the bucket, which is not ready, ticket)."""
        bucket, ticket = operands
        if bucket.ctypes.data != results[0].ctypes.data:
            np.copyto(results[0], bucket)
        results[1][:] = ticket
        self._carry(results[0], key_of(ticket, first), strategy, label)

    def _done(self, operands: list, results: list, first: int) -> None:
        """(bucket, ticket, what must be there before) -> (sum, turn); waits."""
        bucket, ticket = operands[:2]
        job = self.jobs.pop(key_of(ticket, first))
        self._wait(job)
        moved = job.address != bucket.ctypes.data
        check(not moved, f"XLA has moved {job.label} while it travelled; switch overlap off and report this")
        if bucket.ctypes.data != results[0].ctypes.data:
            np.copyto(results[0], bucket)
        results[1][...] = 0

    def _send(self, operands: list, results: list, strategy: str, first: int, label: str) -> None:
        """(bucket, ticket) -> (turn); a copy travels."""
        bucket, ticket = operands
        own = bucket.copy()
        self._carry(own, key_of(ticket, first), strategy, label).result = own
        results[0][...] = 0

    def _collect(self, operands: list, results: list, strategy: str, first: int, again: int, label: str) -> None:
        """(bucket, its ticket, ticket of this step, what must be there before) -> (its sum, turn).

        Where it is not under way, as after a resume, it is sent now: on all ranks alike.
        """
        bucket, sent, ticket = operands[:3]
        job = self.jobs.pop(key_of(sent, first), None)
        if job is None:
            key = key_of(ticket, again)
            own = bucket.copy()
            self._carry(own, key, strategy, label).result = own
            job = self.jobs.pop(key)
        self._wait(job)
        np.copyto(results[0], job.result)
        results[1][...] = 0

    def _carry(self, x: np.ndarray, key: tuple[int, int], strategy: str, label: str) -> Job:
        total = HostSum(strategy, self.comm)
        tags = [(key[1] + i) % TAGS for i in range(total.segments(x.size))]
        job = self.jobs[key] = Job(label, total.of(x, tags), x.ctypes.data)
        self._note("start", label)
        with self._wake:
            self._arrived.append(job)
            self._wake.notify()
        return job

    def _wait(self, job: Job) -> None:
        self._note("wait", job.label)
        job.summed.wait()
        self._note("done", job.label)

    def _note(self, what: str, label: str) -> None:
        self.events.append(Event(what, label, time.perf_counter()))

    # ------------------------------------------------------------ the thread's own

    def _run(self) -> None:
        hostcomm.flush_subnormals()
        hostcomm.take_short_turns()
        with np.errstate(all="ignore"):  # NaN and infinity pass through to all ranks
            while self._take():
                if not self._poll():
                    time.sleep(POLL_S)

    def _take(self) -> bool:
        """Begin what has arrived, waiting where there is nothing else to do; False at the end."""
        with self._wake:
            while not (self._arrived or self._segments or self._is_ending):
                self._wake.wait()
                self._moved_s = time.monotonic()
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        for job in arrived:
            self._begin(job)
        return bool(self._segments or not self._is_ending)

    def _begin(self, job: Job) -> None:
        """Have up to WINDOW segments of a job under way; it is summed where none is left."""
        while job.under_way < WINDOW and (segment := next(job.waiting, None)) is not None:
            job.under_way += 1
            self._resume(job, segment)
        if job.under_way == 0 and not job.summed.is_set():
            self._note("summed", job.label)
            job.summed.set()

    def _resume(self, job: Job, segment: Iterator[Messages]) -> None:
        """Go on with a segment, whose messages have come, to its next messages or its end."""
        try:
            messages = next(segment, None)
        except Exception as error:
            error.add_note(f"in the exchange of {job.label}")
            raise
        if messages is not None:
            self._segments.append(Segment(job, segment, messages))
        else:
            job.under_way -= 1

    def _poll(self) -> bool:
        """Look once at all messages; go on with the segments that have theirs. False where nothing has come."""
        if not self.comm.test([request for s in self._segments for request in s.messages.requests]):
            self._check_time()
            return not self._segments
        self._moved_s = time.monotonic()
        ready = [s for s in self._segments if not any(s.messages.requests)]
        self._segments = [s for s in self._segments if any(s.messages.requests)]
        for segment in ready:
            self._resume(segment.job, segment.sum)
        for job in dict.fromkeys(s.job for s in ready):
            self._begin(job)
        return True

    def _check_time(self) -> None:
        if self._segments and time.monotonic() - self._moved_s > TIMEOUT_S:
            job, _, messages = self._segments[0]
            late = ", ".join(map(str, sorted({*messages.peers} - {self.comm.rank})))
            raise TrainingError(
                f"{job.label} has waited {TIMEOUT_S:.0f} s for rank {late}; all ranks must exchange as often "
                "(JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
            )


def key_of(ticket: np.ndarray, first: int) -> tuple[int, int]:
    """Of a bucket whose segments begin at number `first` of an exchange."""
    return int(ticket[0]), (int(ticket[1]) + first) % 2**32


@functools.cache
def courier() -> Courier:
    """This process's courier; all ranks come here together for the first time."""
    comm = world()
    assert isinstance(comm, MpiComm)
    session = comm.processes.bcast(np.array(time.time_ns() % 2**32, np.uint32))
    return Courier(HostComm(comm.processes.world, comm.order), int(session))


# ---------------------------------------------------------------- whether


def why_not(strategy: str, comm: Comm) -> str:
    """Why an exchange cannot run beside the backward pass; empty where it can. The same on all ranks."""
    if comm.size == 1:
        return "there is one worker"
    if not isinstance(comm, MpiComm):
        return "workers are not MPI ranks"
    if not hostcomm.has(parse(strategy)):
        return f"strategy {strategy} is not among {', '.join(hostcomm.HOST_SUMS)}"
    return hostcomm.why_no_threads() or handlers.why_not()


def chosen(asked: str, strategy: str, comm: Comm) -> tuple[bool, str]:
    """Whether to overlap, and a line that says so and why.

    Args: asked: on; off; or auto, which is on where ranks are on several hosts: inside one, what travels is memory's
        and cores' work, of which the backward pass leaves none.

    Raises:
        UsageError: on, where it cannot be; or an unknown word.
    """
    lookup({"auto": 0, "on": 1, "off": 2}, asked, "exchange.overlap")
    reason = why_not(strategy, comm) if asked != "off" else "exchange.overlap is off"
    check(asked != "on" or comm.size == 1 or not reason, f"exchange.overlap: got on, but {reason}; use off or auto")
    if asked == "auto" and not reason and len(set(comm.hosts)) == 1:
        reason = "all ranks are on one host"
    return not reason, f"no overlap: {reason}" if reason else "the exchange runs beside the backward pass"


# ---------------------------------------------------------------- what travels when


class Order:
    """In which order a program computes gradients, found while it is traced."""

    def __init__(self) -> None:
        """Nothing has been traced."""
        self.places: tuple[int, ...] = ()  # of each leaf: which equation of the program gives it

    def of(self, function: Callable[..., tuple]) -> Callable[..., tuple]:
        """The same function, which notes the order of its first result's leaves when it is traced."""

        def noted(*args: PyTree) -> tuple:
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            self.places = places(traced.jaxpr)[: len(jax.tree.leaves(shapes[0]))]
            results = jax.extend.core.jaxpr_as_fun(traced)(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return noted

    def leaves(self, count: int) -> list[int]:
        """Leaves of a tree like that one, from the first computed to the last; any other tree from its end."""
        known = self.places if len(self.places) == count else (0,) * count
        return sorted(range(count), key=lambda i: (known[i], -i))


def places(jaxpr: jax.extend.core.Jaxpr) -> tuple[int, ...]:
    """Of each result the number of the equation that computes it; -1 where it is given."""
    made = {var: i for i, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    return tuple(-1 if isinstance(var, jax.extend.core.Literal) else made.get(var, -1) for var in jaxpr.outvars)


def plan(sizes: Sequence[int], bucket_bytes: int | None, ready: Sequence[int]) -> list[list[int]]:
    """Which leaves travel together, as `exchange.plan`, from the first that is ready to the last.

    The first bucket is closed when it holds a quarter of `bucket_bytes`: nothing travels until it has left.
    """
    ready = [i for i in ready if sizes[i]]
    first, held = 0, 0
    while bucket_bytes and first < len(ready) and 4 * held < bucket_bytes and 4 * sizes[ready[first]] < bucket_bytes:
        held += 4 * sizes[ready[first]]
        first += 1
    rest = pack([sizes[i] for i in ready[first:]], bucket_bytes)
    return [bucket for bucket in (ready[:first], *([ready[first + i] for i in group] for group in rest)) if bucket]


# ---------------------------------------------------------------- in a program


def exchange(
    tree: PyTree,
    strategy: str = "ring32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    order: Order | None = None,
    beside: bool = True,
) -> PyTree:
    """`jaxmpi.exchange` inside jit, under way while the rest of the tree is computed.

    The bits are those of the strategy run in the program itself, over the same buckets.

    Args:
        tree: this worker's leaves, traced; float32, bfloat16 or float16.
        strategy: ring or asa, with any wire.
        op: mean or sum.
        comm: all MPI ranks, each on CPUs; default: the world.
        bucket_bytes: as of `jaxmpi.exchange`; here also how much waits for its last gradient before it leaves.
        order: of the function that computed the tree; default: from the last leaf to the first.
        beside: False runs the strategy in the program, for comparison.

    Communicates: a comparison of structure and options between ranks while tracing, then the strategy once a bucket, on
    a thread and a communicator of its own.

    Raises:
        UsageError: as `jaxmpi.exchange`; or the exchange cannot run beside a program here.
    """
    workers: Comm = comm or world()
    choice, leaves = agree(tree, strategy, op, workers, bucket_bytes, order, beside)
    if workers.size == 1:
        return tree
    vectors = choice.fused(leaves)
    sums = travelled(vectors, choice) if beside else [sum_bucket(x, choice.strategy, workers) for x in vectors]
    return jax.tree.unflatten(jax.tree.structure(tree), choice.split(sums, leaves))


def agree(
    tree: PyTree,
    strategy: str,
    op: Op,
    comm: Comm | None,
    bucket_bytes: int | None,
    order: Order | None,
    beside: bool = True,
) -> tuple["Choice", list[jax.Array]]:
    """What is exchanged how, once all ranks say the same, and the leaves."""
    check_op(op)
    check_leaves(tree)
    workers: Comm = comm or world()
    leaves = jax.tree.leaves(tree)
    check(all(isinstance(leaf, Tracer) for leaf in leaves), "overlap.exchange is for use inside jax.jit; use exchange")
    reason = why_not(strategy, workers) if beside and workers.size > 1 else ""
    check(not reason, f"this exchange cannot run beside the backward pass: {reason}; use jaxmpi.exchange")
    buckets = plan([leaf.size for leaf in leaves], bucket_bytes, (order or Order()).leaves(len(leaves)))
    choice = Choice(parse(strategy), op, workers, buckets)
    workers.sign(choice.statement(tree))
    return choice, [not_differentiable(leaf) for leaf in leaves]


class Choice(NamedTuple):
    """How to exchange, with whom, and in which buckets."""

    strategy: Strategy
    op: Op
    comm: Comm
    buckets: list[list[int]]

    def statement(self, tree: PyTree) -> Statement:
        """What must be the same on all ranks."""
        options = {"strategy": self.strategy.name, "op": self.op, "buckets": self.buckets}
        return statement("overlap.exchange", {**options, "leaf": signature(tree)})

    def fused(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Leaves -> buckets f32[n]."""
        return [fuse([leaves[i] for i in bucket]) for bucket in self.buckets]

    def split(self, sums: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Buckets -> leaves, which of a sum are divided here if the mean is wanted."""
        out, divisor = list(leaves), self.comm.size if self.op == "mean" else 1
        for bucket, total in zip(self.buckets, sums, strict=True):
            for i, leaf in zip(bucket, split(total / divisor, [leaves[i] for i in bucket]), strict=True):
                out[i] = leaf
        return out

    def label(self, b: int) -> str:
        """Of bucket b, for messages."""
        return f"bucket {b + 1} of {len(self.buckets)} ({self.strategy.name})"


TICKET = jax.ShapeDtypeStruct((2,), jnp.uint32)
TURN = jax.ShapeDtypeStruct((), jnp.int32)


def travelled(vectors: Sequence[jax.Array], choice: Choice) -> list[jax.Array]:
    """f32[n] each -> their sums over workers: all start, each when it is ready; then they are waited for in turn."""
    firsts, segments = numbers(vectors, choice)
    [ticket] = handlers.call(OPEN, [], [TICKET], segments=segments)
    started = []
    for b, (vector, first) in enumerate(zip(vectors, firsts, strict=True)):
        attributes = {"strategy": choice.strategy.name, "first": first, "label": choice.label(b)}
        started.append(handlers.call(START, [vector, ticket], [like(vector), TICKET], [(0, 0)], None, **attributes))
    sums, before = [], [own for _, own in started]  # what waits must not hold up what computes
    for (vector, own), first in zip(started, firsts, strict=True):
        total, *before = handlers.call(DONE, [vector, own, *before], [like(vector), TURN], [(0, 0)], None, first=first)
        sums.append(total)
    return sums


def numbers(vectors: Sequence[jax.Array], choice: Choice) -> tuple[list[int], int]:
    """Of each bucket the number of its first segment, and how many segments there are."""
    total = HostSum(choice.strategy.name, courier().comm)
    ends = np.cumsum([total.segments(vector.size) for vector in vectors]).tolist()
    return [0, *ends[:-1]], ends[-1]


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# ---------------------------------------------------------------- one step late


class Late(NamedTuple):
    """State of `delayed_gradients`, each worker's own."""

    gradients: PyTree  # of the last step, as they were sent
    ticket: jax.Array  # u32[2]: under which number they travel; where nothing does, they are sent again


def delayed_gradients(
    strategy: str = "ring32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    order: Order | None = None,
    beside: bool = True,
) -> optax.GradientTransformation:
    """The exchange of one step behind the whole of the next. This is another algorithm than synchronous SGD.

    u_t = (1/w) sum_i g_i(x_(t-1)), with g(x_0) = 0: gradients are applied one step late, at other params than those they
    were taken at, and the first step applies none. Inside jit. What the last step has sent is never applied.

    Args: as of `exchange`; beside: False exchanges late as well, but in the program, with the same bits.
    State: `Late`, each worker's own. A checkpoint of it is exact: what travelled when it was taken is sent again.
    Communicates: as `exchange`, of the last step's gradients. Raises: as `exchange`.
    """
    options = {"strategy": strategy, "op": op, "comm": comm, "bucket_bytes": bucket_bytes, "order": order}

    def update(updates: PyTree, state: Late, params: PyTree | None = None) -> tuple[PyTree, Late]:
        del params
        if not beside or (comm or world()).size == 1:
            return exchange(state.gradients, **options, beside=False), Late(updates, state.ticket)
        choice, leaves = agree(updates, **options)
        sums, ticket = relayed(
            choice.fused(leaves), choice.fused(jax.tree.leaves(state.gradients)), state.ticket, choice
        )
        means = choice.split(sums, leaves)
        return jax.tree.unflatten(jax.tree.structure(updates), means), Late(updates, ticket)

    return optax.GradientTransformation(
        lambda params: Late(jax.tree.map(jnp.zeros_like, params), jnp.zeros(2, jnp.uint32)), update
    )


def relayed(
    vectors: Sequence[jax.Array], last: Sequence[jax.Array], sent: jax.Array, choice: Choice
) -> tuple[list[jax.Array], jax.Array]:
    """f32[n] each, those of the last step, and their ticket -> the last step's sums, and the ticket of these."""
    firsts, segments = numbers(vectors, choice)
    [ticket] = handlers.call(OPEN, [], [TICKET], segments=2 * segments)
    each = [
        {"strategy": choice.strategy.name, "first": first, "label": choice.label(b)} for b, first in enumerate(firsts)
    ]
    before = [handlers.call(SEND, [x, ticket], [TURN], effect=None, **a)[0] for x, a in zip(vectors, each, strict=True)]
    sums = []
    for x, a in zip(last, each, strict=True):
        operands, again = [x, sent, ticket, *before], segments + a["first"]
        total, *before = handlers.call(COLLECT, operands, [like(x), TURN], effect=None, again=again, **a)
        sums.append(total)
    return sums, ticket
