"""Training by asynchronous rules: workers that do not wait for each other, and ranks that keep the center.

Nothing in here is a collective. A worker meets the center every tau steps, or others by chance, and says what it has
done in a report to server 0, which counts for all: examples of all workers make steps, epochs and the end of the run.
Worker 0 evaluates, keeps the record, and makes a checkpoint of what each worker writes when it next comes by.
"""

import contextlib
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint import format
from jaxmpi.checkpoint.manager import refuge, written
from jaxmpi.checkpoint.uncoordinated import UncoordinatedCheckpoint
from jaxmpi.comm.control import AGREE_TIMEOUT_S, MpiProcesses
from jaxmpi.comm.topology import Workers, to_device
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import ON_STALL, Experiment
from jaxmpi.core.errors import TrainingError, check
from jaxmpi.core.files import HeldFolder
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe import trace
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.step_timing import StepTimer, Window, by_name, summary_apart
from jaxmpi.optim import optimizers
from jaxmpi.recover import decisions
from jaxmpi.recover.watchdog import STALLED
from jaxmpi.rules.base import Asynchronous, Rule
from jaxmpi.rules.gosgd import Gossip
from jaxmpi.rules.gossip_transport import GossipThread
from jaxmpi.rules.parameter_server import (
    END,
    LEAVE,
    PUSH,
    READ,
    TIMES,
    Answer,
    Counters,
    GlobalProgress,
    Layout,
    Report,
    Server,
    ServerExchange,
    TimeSpent,
)
from jaxmpi.rules.parameter_server_transport import ServerChannel, ServerEndpoint, converse
from jaxmpi.runtime import failures, fault_injection, spans

MANY = 50  # steps of a worker, before it is told who has made few
LOOK_S = 0.02  # between reports of a worker that has nothing left to do but wait for the others


# ---------------------------------------------------------------- params as one vector


class Flat(NamedTuple):
    """How a tree of floating-point leaves lies in f32[n]."""

    structure: Any
    like: list[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, params: PyTree) -> "Flat":
        """Of params.

        Raises:
            UsageError: a leaf is no float32, bfloat16 or float16, by path.
        """
        for name, leaf in named_leaves(params):
            is_small = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize <= 4
            check(is_small, f"params {name}: got {leaf.dtype}; a center holds float32, bfloat16 or float16")
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])

    @property
    def n(self) -> int:
        """Floats in all."""
        return sum(leaf.size for leaf in self.like)

    def vector(self, params: PyTree) -> np.ndarray:
        """f32[n], a copy."""
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(params)])

    def tree(self, vector: np.ndarray) -> PyTree:
        """The params in f32[n], as arrays of NumPy that share its memory where their type is f32."""
        parts = np.split(vector, np.cumsum([leaf.size for leaf in self.like])[:-1])
        shaped = [
            part.reshape(leaf.shape).astype(leaf.dtype, copy=False) for part, leaf in zip(parts, self.like, strict=True)
        ]
        return jax.tree.unflatten(self.structure, shaped)


def on_device(tree: PyTree) -> PyTree:
    """Copies on this worker's device, bound to it as results of a step are."""
    return jax.device_put(jax.tree.map(jnp.array, tree), jax.local_devices()[0])


# ---------------------------------------------------------------- what a run hands in


def check_apart(experiment: Experiment) -> None:
    """Refuse what needs all workers together.

    Raises:
        UsageError: with an asynchronous rule, by field.
    """
    for name, value, instead in (
        ("recover", "rollback", "skip or stop"),
        ("batch_statistics", "synchronised", "averaged or local"),
        ("form", "split", "auto"),
    ):
        got = getattr(experiment, name)
        check(got != value, f"{name}: got {got} with an asynchronous rule, whose workers do not meet; {instead}")
    memory = experiment.data.memory
    check(
        memory != "partition",
        "data.memory: got partition with an asynchronous rule, whose workers do not meet to shuffle; take another",
    )


class Duties(NamedTuple):
    """What the run does in its own way: steps, batches, evaluation."""

    step: Any  # jitted: (state, batch) -> (state, metrics)
    sums: Callable[[int, Any], np.ndarray]  # (step, metrics) -> [loss, examples, |g|^2, ...] of this worker, finite
    batches: Callable[[int], Generator[Any, None, None]]  # of this worker, from a step of its own on
    waits: Callable[[], tuple[int, float]]  # corrupt examples, and seconds waited for batches, so far
    is_called_away: Callable[[], bool]  # a signal has asked to leave
    rehearse: Callable[[TrainState], None]  # compile what an evaluation takes
    evaluate: Callable[[TrainState, int], dict[str, float]]  # the state's params, after a step of the run
    lr: Callable[[int], float]
    extra: Callable[[], dict[str, Any]]  # what a checkpoint keeps beside
    check_skipped: Callable[[int, int], None]  # (corrupt examples of all workers, epochs begun)


class Timetable(NamedTuple):
    """When what is due, in steps: a step is as many examples, of all workers, as one of a synchronous run."""

    effective_batch: int
    epoch_examples: int
    epoch_steps: int
    total_steps: int
    target: int  # examples of all workers in the whole run
    log_every: int
    eval_every: int
    save_every: int

    def step(self, examples: float) -> int:
        """The step that all workers together have come to."""
        epochs, rest = divmod(int(examples), self.epoch_examples)
        return min(epochs * self.epoch_steps + rest // self.effective_batch, self.total_steps)


@dataclass
class Start:
    """Where a run begins: state 0, or what a checkpoint holds of it."""

    center: np.ndarray  # f32[n]
    state: TrainState
    tally: Counters
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    weight: float = 0.0  # of this worker in gossip


def starting(
    folder: Path, state: TrainState, workers: Workers, rule: Asynchronous, resume: bool, say: Callable[[str], None]
) -> Start:
    """State 0, or the newest checkpoint where a run is resumed, with any number of workers.

    Args:
        folder: RUN/checkpoints.
        say: is told of damaged ones that are passed over.
    """
    read = partial(start_of, state=state, worker=workers.mine[0], workers=workers.size, rule=rule)
    found = format.first_whole(folder, workers.processes, read, say) if resume else None
    workers.processes.same("the checkpoint to resume from", {"step": found.step if found else 0})
    return found or Start(Flat.of(state.params).vector(state.params), state, Counters())


def start_of(path: Path, state: TrainState, worker: int, workers: int, rule: Asynchronous) -> Start:
    """What a checkpoint holds for a worker; one whose part is not in it begins at the center.

    On another number of workers weights of gossip begin anew, so that they sum to 1.
    """
    manifest = format.read_manifest(path)
    center = format.read_file(path, manifest, "common.bin", {"center": state.params})["center"]
    mine, weight = state._replace(step=np.array(manifest["step"], np.int32), params=center), 0.0
    name = format.own_file(worker)
    if manifest["files"].get(name):
        own = format.read_file(path, manifest, name, {**state._asdict(), "weight": np.zeros(())})
        weight = float(own.pop("weight")) * (manifest["workers"] == workers)
        mine = TrainState(**own)
    if rule.starts_at_center:
        mine = mine._replace(params=center)
    mine = mine._replace(
        rule_state=optimizers.at_step(mine.rule_state, manifest["step"])
    )  # a new worker's is of step 0
    extra = manifest["extra"]
    tally = extra.get("tally")
    # Of an older version: what it did not count begins at 0.
    is_tally = isinstance(tally, list) and len(tally) <= len(Counters._fields) and all(type(x) is float for x in tally)
    most = len(Counters._fields)
    format.undamaged(is_tally, f"{path}: tally: got {tally!r:.80}; expected at most {most} numbers: damaged")
    return Start(Flat.of(state.params).vector(center), mine, Counters(*extra["tally"]), manifest["step"], extra, weight)


# ---------------------------------------------------------------- ranks and what they keep


class Post(NamedTuple):
    """How this rank reaches the others."""

    layout: Layout
    lines: Sequence[ServerChannel]  # a worker's, to all servers
    counter: ServerEndpoint | None  # where this rank keeps a shard
    gossiper: GossipThread | None


def open_post(config: RuleConfig, rule: Asynchronous, workers: Workers, wire: str, start: Start, target: int) -> Post:
    """Lines, shards and communicators; all ranks come here together."""
    control = workers.processes
    assert isinstance(control, MpiProcesses)
    check(
        control.may_overlap,
        "MPI gives MPI_THREAD_SERIALIZED; asynchronous rules exchange from threads of their own and need "
        "MPI_THREAD_MULTIPLE: use an MPI with full thread support, or rule gradients",
    )
    to_center, between_workers = control.clone(), control.clone()
    rank, servers, n = control.rank, max(config.servers, 1), start.center.size
    first = workers.size if config.servers else 0  # rank of server 0
    # What is laid down in the end of gossip is alpha w and alpha, and travels as it is.
    layout = Layout(n + 1, 1, "32") if rule.is_gossip else Layout(n, servers, wire)
    counter = None
    if 0 <= rank - first < servers:
        ledger = GlobalProgress(workers.size, target, config.staleness, start.tally) if rank == first else None
        server = open_server(layout, rank - first, rule, start.center, ledger)
        counter = ServerEndpoint(to_center, server, range(workers.size), layout.message_bytes())
    if rank >= workers.size:
        return Post(layout, [], counter, None)
    lines = [ServerChannel(to_center, first + s) for s in range(servers)]
    body_bytes = Layout(n, 1, wire).host_wire().size_bytes(n)
    gossiper = GossipThread(between_workers, rank, workers.size, body_bytes) if rule.is_gossip else None
    return Post(layout, lines, counter, gossiper)


def open_server(
    layout: Layout, number: int, rule: Asynchronous, center: np.ndarray, ledger: GlobalProgress | None
) -> Server:
    """A shard of the center; in gossip nothing, to which workers will add."""
    begin, end = layout.bounds(number)
    shard = np.zeros(end - begin, np.float32) if rule.is_gossip else center[begin:end].copy()
    return Server(layout, number, shard, rule.serve, ledger)


# ---------------------------------------------------------------- a worker


class Worker:
    """One worker's part in a run, between its steps."""

    def __init__(self, job: "Job", rule: Asynchronous, post: Post, tracer: trace.UncoordinatedTrace) -> None:
        """Take up what the run starts with."""
        self.tracer = tracer
        self.rule, self.post, start, size = rule, post, job.start, job.workers.size
        self.number, self.workers, self.flat = job.workers.mine[0], size, Flat.of(start.state.params)
        self.wire = Layout(self.flat.n, 1, job.wire).host_wire()
        self.base = start.center  # f32[n]: the center as this worker last knew it
        self.new, self.spent = Counters(), TimeSpent()  # since the last report
        self.clock, self.saved = 0, 0.0
        self._held_s = 0.0  # of the last talk: waited for nothing but the answer to its report
        self.is_done = False
        self.tau = job.config.tau
        self._waited = 0, 0.0
        seed = int(np.asarray(start.state.key)[0]) + start.step
        self.gossip = Gossip(self.number, size, job.config.p, seed, start.weight)

    def count(self, sums: np.ndarray, steps: int, skipped: int, wait_s: float) -> None:
        """Steps that were done: [loss, examples, |g|^2], and what feed counts since its start."""
        loss, examples, square = map(float, sums[:3])
        before, self._waited = self._waited, (skipped, wait_s)
        new = Counters(steps, examples, loss, skipped - before[0], wait_s - before[1], square=square)
        self.new = self.new.plus(new)

    def spend(self, window: Window) -> None:
        """Count where the time of steps went."""
        part = by_name(window)
        alike = {name: part[name] for name in ("data", "transfer", "compute", "other")}
        self.spent = self.spent.plus(TimeSpent(window.steps, exchange=part["exposed"], **alike))

    def begin_with_all(self) -> None:
        """Say that this worker is ready, and wait until all are that live; before its first step."""
        failures.doing("start", failures.LONG)
        self._answer(self._talk(PUSH, None, self._report({})))
        spans.drain()  # it is no part of a step

    def tell(self, asks: Mapping[str, float]) -> Answer:
        """A report without an exchange."""
        begin = time.perf_counter()
        talk = self._talk(PUSH, None, self._report(asks))
        self.spent = self.spent.plus(TimeSpent(sync=time.perf_counter() - begin))
        return self._answer(talk)

    def exchange(self, state: TrainState, asks: Mapping[str, float]) -> tuple[TrainState, Answer]:
        """Meet the center, and report: the state after it, and how things stand."""
        begin = time.perf_counter()
        w = self.flat.vector(self.rule.outward(state.params, state.rule_state))
        talk = self._talk(PUSH, self.rule.send(w, self.base), self._report(asks))
        distance = float(np.linalg.norm(w - talk.seen))
        w, self.base = self.rule.meet(w, self.base, talk.sent, talk.seen)
        state = state._replace(params=self._params(w, state))
        took_s = time.perf_counter() - begin
        self._met(distance, talk.sent_bytes, took_s)
        self.spent = self.spent.plus(TimeSpent(exchange=took_s - self._held_s, sync=self._held_s))
        return state, self._answer(talk)

    def gossip_step(self, state: TrainState) -> TrainState:
        """Merge what has arrived, then perhaps push."""
        gossiper = self.post.gossiper
        assert gossiper is not None
        begin, w = 0.0, None
        while gossiper.arrived:
            parcel = gossiper.arrived.popleft()
            if w is None:
                begin, w = end_s(state), self.flat.vector(state.params)
            sent = self.wire.decode(parcel.body)
            self._met(float(np.linalg.norm(w - sent)), 0, 0.0)
            w = self.gossip.merge(w, sent, parcel.share)
        if w is not None:
            state = state._replace(params=self._params(w, state))
        push = None if self.is_done else self.gossip.draw(gossiper.shut())
        if push:
            begin = begin or end_s(state)
            body = self.wire.encode(self.flat.vector(state.params) if w is None else w)
            gossiper.push(push.to, push.share, body)
            self.new = self.new.plus(Counters(sent_bytes=body.size))
        if push or w is not None:
            spans.note("wait", "gossip", begin, time.perf_counter())
            self.new = self.new.plus(Counters(exchange_s=time.perf_counter() - begin))
        return state

    def end(self, state: TrainState) -> TrainState:
        """After the last step: meet the center with what has been learnt since.

        In gossip: take what is under way, then lay alpha w and alpha down at the center.
        """
        if self.post.gossiper is not None:
            self.post.gossiper.end(lambda: self.tell({}))  # not late, though others may be long in coming
        self.is_done = True
        if self.post.gossiper is None:
            return self.exchange(state, {})[0] if self.clock % self.tau else state
        state = self.gossip_step(state)
        weight = np.float32(self.gossip.weight)
        self._talk(PUSH, np.append(weight * self.flat.vector(state.params), weight), None)
        return state

    def center(self) -> PyTree:
        """The center's params; in gossip the weighted mean of what workers have laid down."""
        seen = self._talk(READ, np.empty(self.post.layout.n, np.float32), None).seen
        return self.flat.tree(seen[:-1] / seen[-1] if self.rule.is_gossip else seen)

    def times(self) -> np.ndarray:
        """f64[workers, TimeSpent]: where the time of all has gone, as last reported."""
        return self._talk(TIMES, None, None).times

    def write_if_asked(
        self, apart: UncoordinatedCheckpoint, home: HeldFolder, state: TrainState, answer: Answer
    ) -> None:
        """This worker's part of a checkpoint that has been begun."""
        save = answer.books.save
        if save <= self.saved:
            return
        step = int(save) - 1
        host = jax.tree.map(np.asarray, state)
        for path, leaf in named_leaves(host):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(leaf).all():
                raise TrainingError(f"{path} of worker {self.number} is not finite: not saved, earlier ones stay")
        with written(step, home):
            apart.write_own(step, self.number, {**host._asdict(), "weight": np.array(self.gossip.weight)})
        self.saved = save

    def close(self, is_left: bool) -> None:
        """Worker 0: all is over, or is to be gone on with later."""
        self.tell({"closing": 1.0})
        self._talk(LEAVE if is_left else END, None, None)

    def _talk(self, kind: int, vector: np.ndarray | None, report: Sequence[float] | None) -> ServerExchange:
        talk = ServerExchange(self.post.layout, kind, vector, report, self.workers)
        with spans.span("wait", "the center"):
            self._held_s = converse(talk, self.post.lines)
        return talk

    def _answer(self, talk: ServerExchange) -> Answer:
        assert talk.answer is not None
        check_alive(talk.answer)
        return talk.answer

    def _report(self, asks: Mapping[str, float]) -> list[float]:
        said = [*Report(self.clock, self.saved, self.is_done, **asks), *self.new, *self.spent]
        self.new, self.spent = Counters(), TimeSpent()
        return said

    def _params(self, w: np.ndarray, state: TrainState) -> PyTree:
        return self.rule.inward(on_device(self.flat.tree(w)), state.rule_state)

    def _met(self, distance: float, sent_bytes: int, seconds: float) -> None:
        self.new = self.new.plus(Counters(exchanges=1, exchange_s=seconds, sent_bytes=sent_bytes, distance=distance))


def end_s(state: TrainState) -> float:
    """When the step behind a state is through; waits for it."""
    jax.block_until_ready(state.params)
    return time.perf_counter()


def check_alive(answer: Answer) -> None:
    """Raise `TrainingError` where worker 0 is gone."""
    if answer.books.closing == 2:
        raise TrainingError("worker 0, which keeps the record, is gone; go on from the last checkpoint with --resume")


# ---------------------------------------------------------------- worker 0's duties


class ChiefWorker:
    """The record, evaluations and checkpoints, when the examples of all workers make them due. Worker 0 only."""

    def __init__(self, worker: Worker, job: "Job") -> None:
        """Go on from where the run starts."""
        self.worker, self.course, self.duties, start = worker, job.course, job.duties, job.start
        self.recorder, self.apart, self.home = job.recorder, job.apart, job.home
        self.before = self.at = start.tally  # at the last progress line; when the last checkpoint was begun
        self.logged, self.evaluated, self.begun = -1, start.step, start.step  # steps
        self.number = 0.0  # of the last checkpoint: its step + 1, and 1/2 more for that of the end, maybe of that step
        self.is_writing = False  # a checkpoint, whose parts workers still write
        self.alive, self.times = 0, np.zeros((worker.workers, len(TimeSpent._fields)))  # as at the last line
        self.behind: frozenset[int] = frozenset()  # workers that were, at the last line
        self.result: dict[str, float] = {}

    def asks(self) -> dict[str, float]:
        """What the next report says to all workers: to write their parts of a checkpoint."""
        return {"save": self.number} if self.is_writing else {}

    def look(self, state: TrainState, answer: Answer) -> None:
        """Do what is due."""
        step, course = self.course.step(answer.tally.examples), self.course
        is_due = self.logged < 0 or step // course.log_every > self.logged // course.log_every
        if is_due and not answer.books.stop:  # the last lines come when all are done
            self.log(step, answer)
        if self.is_writing and answer.books.save == self.number and answer.books.saved >= answer.books.alive:
            self.commit(state)
        if answer.books.stop:
            return
        if step // course.eval_every > self.evaluated // course.eval_every:
            self.evaluate(state, step)
        if step // course.save_every > self.begun // course.save_every and not self.is_writing:
            self.begin(step, state, answer)

    def begin(self, step: int, state: TrainState, answer: Answer) -> None:
        """Have all workers write their parts of a checkpoint.

        Raises:
            TrainingError: it cannot be written; or the run directory is gone, moved or replaced: then the center is
                saved elsewhere.
        """
        self.begun, self.at = step, answer.tally
        if fate := self.home.fate():
            self.end_elsewhere(state, fate)
        with written(step, self.home):
            self.apart.begin(step)
        self.is_writing = True
        self.number = step + 1 + self.worker.is_done / 2

    def evaluate(self, state: TrainState, step: int) -> None:
        """On the center; in gossip on worker 0's own params until all have laid theirs down."""
        self.result = self.duties.evaluate(state._replace(params=on_device(self.shared(state))), step)
        self.evaluated = step
        self.recorder.start_window(int(self.before.examples))

    def commit(self, state: TrainState) -> None:
        """Make a checkpoint of the parts."""
        score = self.result.get("eval_loss") if self.evaluated == self.begun else None
        with written(self.begun, self.home):
            self.apart.end(self.begun, {"center": self.shared(state)}, self.extra(), score)
        self.recorder.write("checkpoint", step=self.begun)
        self.is_writing = False

    def extra(self) -> dict[str, Any]:
        """JSON values beside the state in a checkpoint."""
        return self.duties.extra() | {"tally": [*map(float, self.at)], "lr": self.duties.lr(self.begun + 1)}

    def end_elsewhere(self, state: TrainState, fate: str) -> NoReturn:
        """Save the center elsewhere, from which all workers can go on, and end the run."""
        place = refuge(self.home, self.recorder.copy_to)
        apart = self.apart._replace(folder=place / "checkpoints")
        with written(self.begun, self.home):
            apart.begin(self.begun)
            apart.end(self.begun, {"center": self.shared(state)}, self.extra(), None)
        raise TrainingError(
            f"run directory {str(self.home.path)!r} {fate}; the center is saved at step {self.begun} in "
            f"{str(place)!r}: go on with --resume --run-dir {place}"
        )

    def shared(self, state: TrainState) -> PyTree:
        """The params that stand for all workers'."""
        is_own = self.worker.rule.is_gossip and not self.worker.is_done
        return jax.tree.map(np.asarray, state.params) if is_own else self.worker.center()

    def log(self, step: int, answer: Answer) -> None:
        """Lines of what was done since the last ones."""
        now, alive = answer.tally, int(answer.books.alive)
        since = Counters(*(a - b for a, b in zip(now, self.before, strict=True)))
        if not since.examples:
            return
        before, self.times = self.times, self.worker.times()
        spent = dict(zip(TimeSpent._fields, (self.times - before).T, strict=True))
        made = dict(zip(TimeSpent._fields, self.times.T, strict=True))
        worker_steps = made["steps"].astype(int).tolist()
        self.recorder.train(
            step=step,
            total_steps=self.course.total_steps,
            epoch=now.examples / self.course.epoch_examples,
            examples=int(now.examples),
            loss=since.loss / since.examples,
            lr=self.duties.lr(step),
            wait_s=now.wait_s / max(alive, 1),
            skipped=int(now.skipped),
            gradient_norm=(since.square / max(since.steps, 1.0)) ** 0.5,
            anatomy=summary_apart(spent) if spent["steps"].any() else None,
            images=int(since.examples),
            worker_steps=worker_steps,
        )
        self.duties.check_skipped(int(now.skipped), int(now.examples // self.course.epoch_examples) + 1)
        self.recorder.write(
            "workers",
            step=step,
            alive=alive,
            exchanges=int(now.exchanges),
            exchange_s=now.exchange_s,
            sent_bytes=int(now.sent_bytes),
            distance=since.distance / max(since.exchanges, 1),
            staleness=[int(count) for count in answer.staleness],
            worker_steps=worker_steps,
        )
        behind = fallen_behind(worker_steps, made["gone"] > 0)
        for number in sorted(behind.keys() - self.behind):
            name = self.recorder.name(number)
            self.recorder.say(
                f"{name} has fallen behind: {worker_steps[number]} steps, {behind[number]:g} by the median"
            )
        self.behind = frozenset(behind)
        if alive < self.alive:
            self.recorder.say(f"{self.alive - alive} of {self.alive} workers gone; the others go on")
        self.before, self.logged, self.alive = now, step, alive

    def finish(self, state: TrainState, answer: Answer) -> None:
        """When all others have made their last exchange: the last evaluation and checkpoint, then the word to go."""
        while self.is_writing or answer.books.done < answer.books.alive:
            answer = self.again(state)
        step = self.course.step(answer.tally.examples)
        self.log(step, answer)
        if step == self.course.total_steps:
            self.evaluate(state, step)
        self.begin(step, state, answer)
        while self.is_writing:
            answer = self.again(state)
        if traced := self.worker.tracer.merge(self.worker.workers):
            self.recorder.say(traced)
        lost = self.worker.workers - int(answer.books.alive)
        if answer.books.stop == 2:
            folder = self.apart.folder.parent
            self.recorder.say(f"asked to leave: saved at step {step}; go on with --resume --run-dir {folder}")
        if lost:
            self.recorder.say(f"finished with {self.worker.workers - lost} of {self.worker.workers} workers")

    def again(self, state: TrainState) -> Answer:
        """Report, write what is asked for, look."""
        time.sleep(LOOK_S)
        answer = self.worker.tell(self.asks())
        self.worker.write_if_asked(self.apart, self.home, state, answer)
        self.look(state, answer)
        return answer


def fallen_behind(worker_steps: Sequence[int], is_gone: Sequence[bool] | np.ndarray) -> dict[int, float]:
    """Workers that have made less than half of the steps of the median of those that are there, and that median.

    While it is below MANY steps nobody is: all are within what one report tells of.
    """
    there = {number: made for number, made in enumerate(worker_steps) if not is_gone[number]}
    median = float(np.median([*there.values()])) if there else 0.0
    return {number: median for number, made in there.items() if median >= MANY and made < median / 2}


# ---------------------------------------------------------------- the run


class Job(NamedTuple):
    """A run, as this rank sees it."""

    config: RuleConfig
    rule: Rule
    workers: Workers
    wire: str
    course: Timetable
    start: Start
    duties: Duties
    recorder: Recorder
    apart: UncoordinatedCheckpoint
    home: HeldFolder  # the run directory
    traced: trace.Steps  # of each worker's own count
    profiler: trace.Profiler
    lookout: "HeartbeatMonitor"


@dataclass
class HeartbeatMonitor:
    """What the rank that keeps the books looks out for: workers that hang, which no other would notice, and signals.

    A worker reports every tau steps or so. Worker 0 evaluates and saves in between, and is given more time.
    """

    stall_s: float  # without a word of a worker; 0: no limit
    on_stall: str
    hosts: Sequence[str]  # by rank
    told: set[int] = field(default_factory=set)

    def start_s(self) -> float:
        """How long a worker may take for its first batch and to compile; beyond it, it is late."""
        return failures.LONG * (self.stall_s or AGREE_TIMEOUT_S)

    def limit_s(self, worker: int, is_absent: bool) -> float:
        """How long a worker may say nothing."""
        if is_absent:
            return self.start_s()
        return (self.stall_s or math.inf) * (1.0 if worker else failures.LONG)

    def look(self, counter: ServerEndpoint, is_called_away: bool) -> None:
        """Name workers that have fallen silent, and end the job where it is to; pass on a signal to leave."""
        ledger = counter.server.ledger
        if ledger is None:
            return
        if is_called_away:
            ledger.leaving = 1.0
        late = {w: s for w, s in counter.silent_s().items() if s > self.limit_s(w, w in ledger.absent)}
        self.told &= set(late)
        if late.keys() <= self.told:
            return
        self.told |= set(late)
        names = ", ".join(f"rank {worker} on {self.hosts[worker]}" for worker in late)
        sys.stderr.write(
            f"jaxmpi: watchdog of {failures.who()}: no progress for {max(late.values()):.0f} s; late: {names}; other "
            f"workers go on, but no checkpoint is made\njaxmpi: on_stall {self.on_stall}: {ON_STALL[self.on_stall]}\n"
        )
        if self.on_stall == "abort":
            failures.end_job(STALLED)
        counter.server.excuse(late.keys() & ledger.absent)


def run(job: Job) -> dict[str, float]:
    """This rank's part, to the end; the last evaluation on worker 0.

    Raises:
        TrainingError: the center or worker 0 is gone, or the loss is not finite.
    """
    rule = job.rule.asynchronous
    assert rule is not None
    tracer = trace.UncoordinatedTrace(job.traced, job.workers.processes, job.home.path / "trace.json")
    post = open_post(job.config, rule, job.workers, job.wire, job.start, job.course.target)
    source = job.duties.batches(int(job.start.state.step)) if post.lines else None
    serve = partial(kept_open, job, post.counter) if post.counter else None
    if source is None:
        assert serve is not None
        serve()
        return {}
    thread = threading.Thread(target=serve, name="jaxmpi center", daemon=True) if serve else None
    if thread:
        thread.start()  # before anything is compiled: it names who is late
    worker = Worker(job, rule, post, tracer)
    step, state, batches = compiled_in_turn(job, source)
    keeper = ChiefWorker(worker, job) if worker.number == 0 else None
    if keeper:
        job.duties.rehearse(state)  # else the others would go on while it compiles the first evaluation
    worker.begin_with_all()
    if keeper:
        job.recorder.start_window(int(job.start.tally.examples))
    with contextlib.closing(source), contextlib.closing(job.profiler):
        state, answer = work(job, worker, keeper, step, state, batches)
    state = worker.end(state)
    if keeper is None:
        wait_for_word(job, worker, state)
        leave_where_asked(answer)
        return {}
    keeper.finish(state, answer)
    worker.close(answer.books.stop == 2)
    if thread:
        thread.join()
    leave_where_asked(answer)
    return keeper.result


def kept_open(job: Job, counter: ServerEndpoint) -> None:
    """Serve to the end, in this thread.

    Raises:
        guard.Preempted: on a rank that only serves, where the run is to be resumed later.
    """
    counter.run(lambda: job.lookout.look(counter, job.duties.is_called_away()))
    if counter.server.is_left and job.workers.processes.rank >= job.workers.size:
        raise decisions.Preempted


def leave_where_asked(answer: Answer) -> None:
    """Raise `decisions.Preempted` where the run is to be resumed later."""
    if answer.books.stop == 2:
        raise decisions.Preempted


def compiled_in_turn(job: Job, batches: Iterator[Any]) -> tuple[Callable, TrainState, Iterator[Any]]:
    """The step, compiled first on one rank of a host, so that others find it in the cache; the state; batches."""
    state, first = on_device(job.start.state), next(batches)
    compiled = job.workers.processes.after_first(
        lambda: job.duties.step.lower(state, first).compile(), job.lookout.start_s()
    )
    return compiled, state, itertools.chain([first], batches)


def work(
    job: Job, worker: Worker, keeper: ChiefWorker | None, step: Callable, state: TrainState, batches: Iterator[Any]
) -> tuple[TrainState, Answer]:
    """Steps, until enough examples have been seen by all workers together."""
    pending, often, anatomy = [], job.course.log_every, StepTimer(job.workers.size, to_device(job.workers))
    if not worker.rule.is_gossip:
        often = min(often, job.config.tau)
    first = int(job.start.state.step) + 1
    for k, batch in enumerate(anatomy.batches(batches, first), first):
        failures.doing(f"step {k}")
        state, batch = fault_injection.reach("step", k, (state, batch))
        job.profiler.before(k)
        state, metrics = step(state, batch)
        job.profiler.after(k, state)
        anatomy.started(next(iter(jax.tree.leaves(state.params)), state.step))
        pending.append((k, metrics))
        worker.clock += 1
        if worker.rule.is_gossip:
            state = worker.gossip_step(state)
        meets = not worker.rule.is_gossip and worker.clock % job.config.tau == 0
        if not meets and worker.clock % often:
            continue
        sums = np.sum([job.duties.sums(*one) for one in pending], axis=0)
        anatomy.pause()
        worker.count(sums, len(pending), *job.duties.waits())
        window = anatomy.window()
        worker.spend(window)
        worker.tracer.add(window.spans, worker.number, k)
        pending.clear()
        asks = (keeper.asks() if keeper else {}) | {"leave": float(job.duties.is_called_away())}
        state, answer = worker.exchange(state, asks) if meets else (state, worker.tell(asks))
        worker.write_if_asked(job.apart, job.home, state, answer)
        if keeper:
            keeper.look(state, answer)
        anatomy.restart()  # a talk has been counted, and the record and checkpoints are no training
        if answer.books.stop:
            worker.tracer.add(spans.drain(), worker.number, k, is_end=True)
            return state, answer
        now = job.course.step(answer.tally.examples)
        state = state._replace(rule_state=optimizers.at_step(state.rule_state, now))
    raise AssertionError  # training batches do not end


def wait_for_word(job: Job, worker: Worker, state: TrainState) -> None:
    """Until worker 0 says that all is over; write the last part of a checkpoint meanwhile."""
    answer = worker.tell({})
    while not answer.books.closing:
        time.sleep(LOOK_S)
        worker.write_if_asked(job.apart, job.home, state, answer)
        answer = worker.tell({})
