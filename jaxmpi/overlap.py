"""The exchange behind the backward pass: buckets leave as soon as their gradients exist, on one thread a rank.

In a program an exchange is three kinds of calls. `open` numbers it, in the order of programs, so that all ranks give a
bucket the same number. `start` hands a bucket to the communication thread and returns at once; it waits for nothing but
its own gradients, so XLA runs it when they are there, on each rank in an order of its own. `done`, after the last
start, waits until a bucket holds the sum. The bucket passes through both in one buffer, which the thread changes in
between: nothing is copied, and XLA, for which only these calls use the buffer, leaves it alone.
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
# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits. Enough is under way to keep a link busy meanwhile.
CALM_S, HURRY_S = 0.002, 0.0003
WINDOW = 16  # segments of a bucket under way at once
TAGS = 1 << 15  # that every MPI has
KEPT = 100  # exchanges after which a bucket that nobody has asked for is forgotten
THREAD = "jaxmpi exchange"
TIMEOUT_S = float(os.environ.get("JAXMPI_EXCHANGE_TIMEOUT_S", "1800"))
OPEN, START, DONE, SEND, COLLECT = (f"jaxmpi exchange: {verb}" for verb in ("open", "start", "done", "send", "collect"))


# ---------------------------------------------------------------- the thread


@dataclass(eq=False)
class Job:
    """A bucket on its way."""

    label: str
    exchange: int  # the number of the exchange it belongs to
    bucket: np.ndarray  # f32[n], the thread's to change until it is summed
    waiting: Iterator[Iterator[Messages]]  # segments not yet begun
    under_way: int = 0  # segments
    summed: threading.Event = field(default_factory=threading.Event)


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
        self.count = self.exchanges = 0  # segments and exchanges so far, in all programs; equal on all ranks
        self.jobs: dict[tuple[int, int], Job] = {}
        self.events: deque[Event] = deque(maxlen=4096)  # what was when, for whom it interests
        self._arrived: deque[Job] = deque()
        self._segments: list[Segment] = []
        self._wake = threading.Condition()
        self._is_ending = False
        self._is_waited_for = False
        self._moved_s = time.monotonic()  # when the last message came or went
        for name, function in self._functions().items():
            handlers.register(name, function, ends_job=True)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
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
        courier.cache_clear()

    # ------------------------------------------------------------ called by programs

    def _functions(self) -> dict[str, handlers.Function]:
        return {OPEN: self._open, START: self._start, DONE: self._done, SEND: self._send, COLLECT: self._collect}

    def _open(self, operands: list, results: list, segments: int) -> None:
        """Ticket u32[2]: this session, and the number of the exchange's first segment."""
        results[0][:] = self.session, self.count
        self.count, self.exchanges = (self.count + segments) % 2**32, self.exchanges + 1
        for key in [key for key, job in list(self.jobs.items()) if job.exchange <= self.exchanges - KEPT]:
            del self.jobs[key]
        self._note("open", "")

    def _start(self, operands: list, results: list, strategy: str, first: int, label: str) -> None:
        """(bucket, ticket) -> (the bucket, which is not ready, ticket)."""
        bucket, ticket = operands
        if bucket.ctypes.data != results[0].ctypes.data:
            np.copyto(results[0], bucket)
        results[1][:] = ticket
        self._carry(results[0], key_of(ticket, first), strategy, label)

    def _done(self, operands: list, results: list, first: int) -> None:
        """(bucket, ticket, what must be there before) -> (sum); waits."""
        bucket, ticket = operands[:2]
        job = self.jobs.pop(key_of(ticket, first))
        self._wait(job)
        moved = job.bucket.ctypes.data != bucket.ctypes.data
        check(not moved, f"XLA has moved {job.label} while it travelled; switch overlap off and report this")
        if bucket.ctypes.data != results[0].ctypes.data:
            np.copyto(results[0], bucket)

    def _send(self, operands: list, results: list, strategy: str, first: int, label: str) -> None:
        """(bucket, ticket) -> (ticket); a copy travels."""
        bucket, ticket = operands
        self._carry_copy(bucket, key_of(ticket, first), strategy, label)
        results[0][:] = ticket

    def _collect(self, operands: list, results: list, strategy: str, first: int, again: int, label: str) -> None:
        """(bucket, its ticket, ticket of this step, what must be there before) -> (its sum); waits.

        Where it is not under way, as after a resume, it is sent now: on all ranks alike.
        """
        bucket, sent, ticket = operands[:3]
        key = key_of(sent, first)
        if key not in self.jobs:
            key = key_of(ticket, again)
            self._carry_copy(bucket, key, strategy, label)
        job = self.jobs.pop(key)
        self._wait(job)
        np.copyto(results[0], job.bucket)

    def _carry_copy(self, bucket: np.ndarray, key: tuple[int, int], strategy: str, label: str) -> None:
        self._carry(bucket.copy(), key, strategy, label)

    def _carry(self, bucket: np.ndarray, key: tuple[int, int], strategy: str, label: str) -> None:
        total = HostSum(strategy, self.comm)
        tags = [(key[1] + i) % TAGS for i in range(total.segments(bucket.size))]
        job = self.jobs[key] = Job(label, self.exchanges, bucket, total.of(bucket, tags))
        self._note("start", label)
        with self._wake:
            self._arrived.append(job)
            self._wake.notify()

    def _wait(self, job: Job) -> None:
        self._note("wait", job.label)
        self._is_waited_for = True
        job.summed.wait()
        self._is_waited_for = False
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
                    time.sleep(HURRY_S if self._is_waited_for else CALM_S)

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
    portable: bool = False,
) -> PyTree:
    """`jaxmpi.exchange` inside jit, under way while the rest of the tree is computed.

    The bits are those of the strategy run in the program itself, over the same buckets.

    Args:
        tree: this worker's leaves, traced; float32, bfloat16 or float16.
        strategy: ring or asa, with any wire.
        op: mean or sum.
        comm: all MPI ranks, on CPUs; default: the world.
        bucket_bytes: as of `jaxmpi.exchange`; what waits for the last gradient of a bucket is less where this is less.
        order: of the function that computed the tree; default: from the last leaf to the first.
        beside: False runs the strategy in the program, for comparison.
        portable: leave out what keeps a program from being exported: ranks are not compared, and other MPI calls in the
            program are not ordered with this one. They then must be such that the gradients depend on them.

    Communicates: a comparison of structure and options between ranks while tracing, then the strategy once a bucket, on
    a thread and a communicator of its own.

    Raises:
        UsageError: as `jaxmpi.exchange`; or an exchange cannot run beside a program here.
    """
    choice, leaves = agree(tree, strategy, op, comm or world(), bucket_bytes, order, beside, portable)
    if choice.comm.size == 1:
        return tree
    vectors = choice.fused(leaves)
    return choice.split(travelled(vectors, choice) if beside else choice.in_program(vectors), tree)


def agree(
    tree: PyTree,
    strategy: str,
    op: Op,
    comm: Comm,
    bucket_bytes: int | None,
    order: Order | None,
    beside: bool = True,
    portable: bool = False,
) -> tuple["Choice", list[jax.Array]]:
    """What is exchanged how, once all ranks say the same, and the leaves."""
    check_op(op)
    check_leaves(tree)
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True) if jax.tree.leaves(tree) else ((), ())
    traced = not leaves or any(isinstance(leaf, Tracer) for leaf in leaves)
    check(traced, "overlap.exchange is for use inside jax.jit; outside use jaxmpi.exchange")
    reason = why_not(strategy, comm) if beside and comm.size > 1 else ""
    check(not reason, f"this exchange cannot run beside the backward pass: {reason}; use jaxmpi.exchange")
    buckets = plan([leaf.size for leaf in leaves], bucket_bytes, (order or Order()).leaves(len(leaves)))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    choice = Choice(parse(strategy), op, comm, buckets, names, portable)
    if not portable:
        comm.sign(choice.statement(tree))
    return choice, [not_differentiable(jnp.asarray(leaf)) for leaf in leaves]


class Choice(NamedTuple):
    """How to exchange, with whom, and in which buckets."""

    strategy: Strategy
    op: Op
    comm: Comm
    buckets: list[list[int]]
    names: list[str]  # of the leaves
    portable: bool

    def statement(self, tree: PyTree) -> Statement:
        """What must be the same on all ranks."""
        options = {"strategy": self.strategy.name, "op": self.op, "buckets": self.buckets}
        return statement("overlap.exchange", {**options, "leaf": signature(tree)})

    def fused(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Leaves -> buckets f32[n]."""
        return [fuse([leaves[i] for i in bucket]) for bucket in self.buckets]

    def split(self, sums: Sequence[jax.Array], tree: PyTree) -> PyTree:
        """Sums of buckets -> the tree of sums or means."""
        leaves, structure = jax.tree.flatten(tree)
        divisor = self.comm.size if self.op == "mean" else 1
        for bucket, total in zip(self.buckets, sums, strict=True):
            for i, leaf in zip(bucket, split(total / divisor, [leaves[i] for i in bucket]), strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)

    def in_program(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """The strategy in the program itself."""
        return [sum_bucket(vector, self.strategy, self.comm) for vector in vectors]

    def attributes(self, vectors: Sequence[jax.Array]) -> tuple[list[dict[str, Any]], int]:
        """Of each bucket what its calls must know, and the number of all segments."""
        total = HostSum(self.strategy.name, courier().comm)
        ends = np.cumsum([0, *(total.segments(vector.size) for vector in vectors)]).tolist()
        each = [{"strategy": self.strategy.name, "first": n, "label": self.label(b)} for b, n in enumerate(ends[:-1])]
        return each, ends[-1]

    def label(self, b: int) -> str:
        """Of bucket b, for messages: `bucket 2 of 7 (conv1/kernel and 3 more)`."""
        first, *more = self.buckets[b]
        others = f" and {len(more)} more" if more else ""
        return f"bucket {b + 1} of {len(self.buckets)} ({self.names[first]}{others})"

    def effect(self) -> Any:
        """What orders exchanges among other calls: that of mpi4jax, so that none of them waits for one behind it."""
        return handlers.ORDERED if self.portable else mpi_effect(self.comm)


@functools.cache
def mpi_effect(comm: Comm) -> Any:
    """The ordered effect of this comm's own calls."""
    [effect] = jax.make_jaxpr(comm.allreduce)(jnp.zeros(1)).effects
    return effect


TICKET = jax.ShapeDtypeStruct((2,), jnp.uint32)


def travelled(vectors: Sequence[jax.Array], choice: Choice) -> list[jax.Array]:
    """f32[n] each -> their sums over workers: all start, each when it is ready; then they are waited for in turn."""
    each, segments = choice.attributes(vectors)
    [ticket] = handlers.call(OPEN, [], [TICKET], effect=choice.effect(), segments=segments)
    started = [
        handlers.call(START, [vector, ticket], [like(vector), TICKET], [(0, 0)], None, **attributes)
        for vector, attributes in zip(vectors, each, strict=True)
    ]
    before, sums = [own for _, own in started], []  # what waits must not hold up what computes
    for (x, own), attributes in zip(started, each, strict=True):
        operands, before = [x, own, *before], []
        sums += handlers.call(DONE, operands, [like(x)], [(0, 0)], choice.effect(), first=attributes["first"])
    return sums


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
    portable: bool = False,
) -> optax.GradientTransformation:
    """The exchange of one step behind the whole of the next. This is another algorithm than synchronous SGD.

    u_t = (1/w) sum_i g_i(x_(t-1)), u_1 = 0: gradients are applied one step late, at other params than those they were
    taken at. Inside jit. What the last step of a run has sent is never applied.

    Args: as of `exchange`; beside: False exchanges late as well, but in the program, with the same bits.
    State: `Late`, each worker's own. A checkpoint of it is exact: what travelled when it was taken is sent again.
    Communicates: as `exchange`, of the last step's gradients. Raises: as `exchange`.
    """

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Late]:
        del params
        choice, leaves = agree(updates, strategy, op, comm or world(), bucket_bytes, order, beside, portable)
        if choice.comm.size == 1:
            return state.gradients, Late(updates, state.ticket)
        vectors, last = choice.fused(leaves), choice.fused(jax.tree.leaves(state.gradients))
        sums, ticket = relayed(vectors, last, state, choice) if beside else (choice.in_program(last), state.ticket)
        return choice.split(sums, updates), Late(updates, ticket)

    def init(params: PyTree) -> Late:
        return Late(jax.tree.map(jnp.zeros_like, params), jnp.zeros(2, jnp.uint32))

    return optax.GradientTransformation(init, update)


def relayed(
    vectors: Sequence[jax.Array], last: Sequence[jax.Array], state: Late, choice: Choice
) -> tuple[list[jax.Array], jax.Array]:
    """f32[n] each, and those of the last step -> the last step's sums, and the ticket of these."""
    each, segments = choice.attributes(vectors)
    [ticket] = handlers.call(OPEN, [], [TICKET], effect=choice.effect(), segments=2 * segments)
    sent = [
        handlers.call(SEND, [vector, ticket], [TICKET], effect=None, **attributes)[0]
        for vector, attributes in zip(vectors, each, strict=True)
    ]
    sums = []
    for x, attributes in zip(last, each, strict=True):
        operands, sent, again = [x, state.ticket, ticket, *sent], [], segments + attributes["first"]
        sums += handlers.call(COLLECT, operands, [like(x)], effect=choice.effect(), again=again, **attributes)
    return sums, ticket
