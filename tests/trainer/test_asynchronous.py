"""Whole runs by asynchronous rules: what they count, record, save and survive; and what they refuse."""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.checkpoint.manifests import found
from jaxmpi.checkpoint.write import Retention, UncoordinatedCheckpoint
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.config.optim import Optim
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import HeldFolder
from jaxmpi.core.train_state import TrainState
from jaxmpi.launch import command, postmortem
from jaxmpi.launch.experiment_facts import facts_of
from jaxmpi.launch.options import Options
from jaxmpi.observe.recorder import Recorder
from jaxmpi.optim.optimizers import is_linear, optimizer
from jaxmpi.rules import base, parameter_server, registry
from jaxmpi.rules.gosgd import RandomGossip
from jaxmpi.rules.parameter_server import (
    Counters,
    GlobalProgress,
    Server,
    ServerExchange,
    ServerLayout,
    TimeSpent,
    WorkerReport,
)
from jaxmpi.runtime import failures, job_folder
from jaxmpi.trainer import async_chief, async_start
from jaxmpi.trainer.async_chief import SharedEvaluation
from jaxmpi.trainer.async_worker import AsyncWorker
from jaxmpi.trainer.asynchronous import AsynchronousWorker
from jaxmpi.trainer.callbacks import Callback
from jaxmpi.trainer.loop import RunProgress
from jaxmpi.trainer.step_form import center_strategy
from jaxmpi.trainer.timetable import DueEvents, Timetable
from launching import ROOT, kill_session, mpirun_line, run, train, train_here
from tolerances import USUAL_EMITTERS, U
from traces import check_schema

DIGITS = "experiments/digits.py"
EXAMPLES = 1437  # of digits, for training
COMMON = (DIGITS, "--optim.lr", "0.01", "--effective-batch", "48", "--exchange.strategy", "asa16")
RULES = {
    "easgd": ("--rule.name", "easgd", "--rule.alpha", "0.3"),
    "easgd-servers": ("--rule.name", "easgd", "--rule.alpha", "0.3", "--rule.servers", "1", "--rule.tau", "3"),
    "asgd": ("--rule.name", "asgd", "--rule.staleness", "2", "--rule.tau", "2"),
    "gosgd": ("--rule.name", "gosgd", "--rule.p", "0.2"),
    "eamsgd": ("--rule.name", "easgd", "--rule.alpha", "0.3", "--optim.name", "sgd", "--rule.momentum", "0.9"),
}


def check_lines(run_dir: Path) -> None:
    """Progress lines of a run that was never resumed: one a step, and in the last all examples since the one before."""
    lines = record(run_dir, "train")
    steps = [row["step"] for row in lines]
    assert steps == sorted(set(steps))
    for before, line in itertools.pairwise(lines):  # the others go on while worker 0 evaluates
        seconds = line["elapsed_s"] - before["elapsed_s"]
        if seconds > 0.1:  # of which the record has six digits
            assert line["images_per_s"] == pytest.approx((line["examples"] - before["examples"]) / seconds, rel=0.05)


def record(run_dir: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_run_learns_records_saves_and_is_resumed(name, tmp_path):
    ranks = 4 if "servers" in name else 3
    args = (*COMMON, *RULES[name], "--checkpoint-every", "1ep", "--eval-every", "1ep", "--run-dir", str(tmp_path))
    args += ("--trace", "2:5")
    ended = train(ranks, *args, "--train-for", "3ep")
    assert ended.code == 0, ended.out
    last = record(tmp_path, "train")[-1]
    # All workers see that there are enough when they next report, which is within 10 steps (log_every) of 16 examples.
    assert 3 * EXAMPLES <= last["examples"] < 3 * EXAMPLES + 3 * 11 * 16
    assert last["step"] == 90
    check_lines(tmp_path)
    workers = record(tmp_path, "workers")[-1]
    assert workers["alive"] == 3
    assert workers["exchanges"] > 3
    assert workers["distance"] > 0
    assert 0.01 < last["gradient_norm"] < 100
    seen = [row for row in record(tmp_path, "train") if "own_s" in row][-1]  # times may come before examples
    assert seen["exchange_time"] == "measured"
    assert seen["anatomy"]["compute"][0] > 0
    assert seen["anatomy"]["exchange"][2] > 0
    assert len(seen["own_s"]) == 3
    assert "compute " in ended.out
    check_trace(tmp_path / "trace.json", meets_center="gosgd" not in name)
    if "gosgd" not in name:
        # The center counts an exchange as it begins, but each worker's first; the next report tells of it.
        assert 0 <= sum(workers["staleness"]) - (workers["exchanges"] - 3) <= 3
    [saved] = [path for path in found(tmp_path / "checkpoints") if path.name == "step_00000090"]
    files = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(files) == {"common.bin", *(f"worker_{i:05d}.bin" for i in range(3))}
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    ended = train(ranks, *args, "--train-for", "5ep", "--resume")
    assert ended.code == 0, ended.out
    assert "resumed at step 90" in ended.out
    evals = record(tmp_path, "eval")
    assert evals[-1]["step"] == 150
    # Chance is 10 %; five epochs of GoSGD at this rate and p come to 80 %.
    assert evals[-1]["eval_top1"] > 0.7
    last = record(tmp_path, "train")[-1]
    assert 5 * EXAMPLES <= last["examples"] < 5 * EXAMPLES + 3 * 11 * 16


def check_trace(path: Path, meets_center: bool) -> None:
    """Steps 2 to 5 of each worker, which all come to however unequal their pace, and what they waited for."""
    events = check_schema(json.loads(path.read_text()), 3)
    for worker in range(3):
        names = {(e["cat"], e["name"]) for e in events if e["pid"] == worker}
        assert {("compute", f"step {k}") for k in range(2, 6)} <= names
        assert ("compute", "step 7") not in names
    assert ("the center" in {e["name"] for e in events if e["cat"] == "wait"}) == meets_center
    assert max(e["ts"] + e["dur"] for e in events) < 100e6
    assert not list(path.parent.glob("*.part"))


SHARED = (DIGITS, "--local-batch", "8", "--effective-batch", "0", "--eval-every", "99ep")  # worker 0 does not evaluate


@pytest.mark.slow
@pytest.mark.parametrize("tau", ["1", "4"])
def test_workers_of_equal_speed_make_equal_shares_of_a_long_run_to_a_tenth(tau, tmp_path):
    """Nothing slows them but each other, on fewer cores than workers; the record is written seldom.

    At tau 1 exchanges are half of the time, and a worker with a shorter way to the server would show.
    """
    args = ("--rule.name", "easgd", "--rule.tau", tau, "--train-for", "60ep", "--log-every", "200")
    ended = train(4, *SHARED, *args, "--run-dir", str(tmp_path))
    assert ended.code == 0, ended.out
    made = record(tmp_path, "workers")[-1]["worker_steps"]
    assert max(abs(4 * steps / sum(made) - 1) for steps in made) < 0.1, made


@pytest.mark.parametrize("steps", [100, 2 * async_chief.MANY - 2])
def test_who_has_made_less_than_half_of_the_steps_has_fallen_behind(steps):
    """But nobody before there are enough, and none that is gone."""
    made = [steps, steps // 2 - 1, 0, steps]
    enough = steps >= async_chief.MANY
    assert async_chief.find_stragglers(made, [False, False, True, False]) == ({1: float(steps)} if enough else {})
    assert async_chief.find_stragglers([async_chief.MANY - 1, 0], [False, True]) == {}


LATE = """
import dataclasses, os, pathlib, signal
from jaxmpi.experiments.digits import experiment as digits
model, record = digits.model, pathlib.Path(__file__).with_name("run") / "record.jsonl"
def apply(*args, **more):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "{rank}" and record.exists():
        os.kill(os.getpid(), signal.{signal})
    return model.apply(*args, **more)
experiment = dataclasses.replace(digits, model=model._replace(apply=apply), train_for="2ep", effective_batch=48)
"""


def late(folder: Path, rank: int, sent: str, *args: str) -> list[str]:
    """The line of a run of 3 workers, of which one gets a signal while it traces its step."""
    (folder / "late.py").write_text(LATE.format(rank=rank, signal=sent))
    return surviving(3, str(folder / "late.py"), *RULES["easgd"], *args, "--run-dir", str(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_hangs_before_the_start_is_named(rank, tmp_path):
    """Rank 0, for which the others wait to compile, or another, whom server 0 misses; within six times the limit."""
    ended = run(late(tmp_path, rank, "SIGSTOP", "--stall-timeout-s", "2"), timeout_s=120)
    assert not ended.timed_out
    assert ended.code != 0, ended.out
    assert f"late: rank {rank}" in ended.out
    assert "Traceback" not in ended.out, ended.out


@pytest.mark.slow
def test_a_worker_that_dies_before_the_start_holds_nobody_up(tmp_path):
    ended = run(late(tmp_path, 2, "SIGKILL"), timeout_s=120)
    assert ended.code == 0, ended.out
    assert "finished with 2 of 3 workers" in ended.out
    assert record(tmp_path / "run", "workers")[-1]["worker_steps"][2] == 0


@pytest.mark.slow
def test_who_is_slow_is_named_and_others_wait_for_it_where_there_is_a_bound(tmp_path):
    """Worker 2 takes 0.1 s a step; with staleness 1 nobody is more than a step ahead for long."""
    slow = ("--inject", "slow:rank=2,seconds=0.1,times=0", "--rule.name", "asgd", "--rule.staleness", "1")
    ended = train(3, *COMMON, *slow, "--train-for", "60st", "--log-every", "20", "--run-dir", str(tmp_path))
    assert ended.code == 0, ended.out
    last = record(tmp_path, "train")[-1]
    assert last["anatomy"]["sync"][2] > 0.05  # of the others
    assert last["anatomy"]["sync"][3] != 2
    assert last["anatomy"]["sync"][0] < 0.05  # of the slow one
    assert int(np.argmax(last["own_s"])) == 2
    assert "slowest rank 2" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["easgd", "asgd"])
def test_what_was_learnt_since_the_last_exchange_comes_to_the_center_in_the_end(name, tmp_path):
    """With periods longer than the run, of which workers hear in between; else the center would be as it began."""
    args = (*COMMON, "--rule.name", name, "--rule.tau", "1000", "--train-for", "4ep", "--run-dir", str(tmp_path))
    ended = train(2, *args)
    assert ended.code == 0, ended.out
    assert record(tmp_path, "eval")[-1]["eval_top1"] > 0.4  # chance is 0.1


@pytest.mark.slow
def test_a_step_that_any_worker_leaves_out_is_told(tmp_path):
    args = ("--inject", "nan:rank=1,step=5", "--on-nonfinite", "skip", "--train-for", "5ep", "--run-dir", str(tmp_path))
    ended = train(2, *COMMON, *RULES["easgd"], *args)
    assert ended.code == 0, ended.out
    assert re.search(r"rank 1/2 on \S+: the gradient of \S+ of worker 1 is not finite at step 5: skipped", ended.out)


class LoneWorker(AsyncWorker):
    """AsyncWorker 0 of one, with the status at hand and nothing to learn."""

    def __init__(self) -> None:
        self.number, self.workers, self.saved, self.is_done = 0, 1, 0.0, False
        self.gossip, self.tracer = RandomGossip(0, 1, 0.0, seed=0), SimpleNamespace(merge=lambda workers: "")
        self.rule = SimpleNamespace(is_gossip=False)
        self.progress = GlobalProgress(1, target=100, bound=0)

    def report(self, asks, examples=0.0):
        self.progress.report(0, WorkerReport(1, self.saved, self.is_done, **asks), Counters(examples=examples))
        [(_, answer)] = self.progress.answers()
        return answer

    def center(self):
        return {"w": np.ones(3, np.float32)}


class Saves(Callback):
    saves = 0
    whole = ()

    def state(self):
        self.saves += 1
        return {"saves": self.saves}

    def after_checkpoint(self, step, folder):
        self.whole += ((step, (folder / "manifest.json").is_file()),)


def test_a_run_that_leaves_at_the_step_of_its_last_checkpoint_keeps_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(async_chief, "run_facts", lambda *run: {})
    saves = Saves()
    state = TrainState(*(np.zeros(2, np.float32) for _ in TrainState._fields))
    timetable = Timetable(compare_every=100, log_every=1, eval_every=100, save_every=1, total_steps=10)
    clock, feed = SimpleNamespace(total_steps=10), SimpleNamespace(source=range(100))
    numbers = {"step": lambda examples: int(examples) // 10, "lr_of": lambda step: 0.1}
    run = SimpleNamespace(
        plan=SimpleNamespace(timetable=timetable, clock=clock, feed=feed, **numbers),
        log=SimpleNamespace(write=lambda *line, **more: None),
        recorder=Recorder(None),
        saver=SimpleNamespace(home=HeldFolder(tmp_path)),
        notice=SimpleNamespace(say_saved=lambda say, step, folder: None),
        experiment=SimpleNamespace(callbacks=(saves,)),
        callbacks=(saves,),
        workers=SimpleNamespace(processes=SoloProcesses(), asynchronous=True),
        folder=tmp_path,
        functions=None,
    )
    worker, start = LoneWorker(), SimpleNamespace(counters=Counters(), step=0)
    (checkpoints := tmp_path / "checkpoints").mkdir()
    parts = UncoordinatedCheckpoint(checkpoints, 1, Retention(2))
    evaluation = SimpleNamespace(is_open=False, requests=dict, conclude_if_complete=lambda answer: None)
    chief = async_chief.AsyncLeader(run, worker, parts, start, evaluation)  # pyright: ignore[reportArgumentType] # of all this a part
    assert chief.progress(state, worker.report({}, examples=10)) == RunProgress(1, DueEvents(log=True, save=True))
    chief.log(1, state)
    chief.save(1, state)
    while chief.is_writing:
        chief.wait(state)
    worker.is_done = True
    assert chief.progress(state, worker.report({"leave": 1.0}, examples=5)) == RunProgress(1, is_over=True)
    chief.finish(state)
    [saved] = found(checkpoints)
    assert saves.whole == ((1, True), (1, True))  # the second takes the place of the first
    assert saved.name == "step_00000001"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["files"]["worker_00000.bin"]
    assert manifest["extra"]["callbacks"] == [["Saves", {"saves": 2}]]


# ---------------------------------------------------------------- evaluations


class JudgingWorker(AsyncWorker):
    """A worker with a server at hand."""

    def __init__(self, number: int, server: Server) -> None:
        self.number, self.workers, self.server, self.clock, self.is_done = number, 3, server, 1, False
        self.saved = self.evaluated = 0.0
        self.new, self.spent = Counters(), TimeSpent()

    def report(self, asks):
        answer = self._server_exchange(parameter_server.PUSH, None, self._report(asks)).answer
        assert answer is not None
        return answer

    def _server_exchange(self, kind, vector, report, **posted):
        told = 0 if self.number else self.workers
        server_exchange = ServerExchange(self.server.layout, kind, vector, report, told, **posted)
        while not server_exchange.is_over():
            for sending in server_exchange.ready():
                self.server.take(self.number, sending.message)
            while self.server.out.get(self.number):
                server_exchange.take(0, self.server.out[self.number].popleft())
        return server_exchange


@pytest.mark.parametrize("batches", [0, 1, 2, 7])
@pytest.mark.parametrize("dies", [None, "before", "after"])
def test_an_evaluation_is_of_every_batch_once_by_worker_0s_params_and_state(batches, dies):
    """Worker 2 may die before or after it has posted its part; params of the others differ."""

    @jax.jit
    def eval_step(params, model_state, batch):
        loss = params["w"].astype(jnp.float32) * batch + model_state["n"].astype(jnp.float32)
        return {"loss": (loss, 1.0), "count": (1.0, 1.0), "far": (batch * 2, 4.0)}

    data = jnp.arange(1.0, 1 + batches)
    made: list[list[float]] = [[], [], []]
    workers, evaluations, states = [], [], []
    progress = GlobalProgress(3, 1e9, 0)
    server = Server(ServerLayout(100, 1, "16"), 0, np.zeros(100, np.float32), lambda *shard: None, progress)
    for number in range(3):

        def taken(begin=0, end=None, number=number):
            for batch in data[begin:end]:
                made[number].append(float(batch))
                yield batch

        feed = SimpleNamespace(samplers=[SimpleNamespace(steps_per_epoch=batches)], source=data, tokens_per_byte=1.0)
        feed.batches = taken
        own = {"eval_params": lambda params, rule_state: params, "mean_state": lambda state: state}
        run: Any = SimpleNamespace(
            plan=SimpleNamespace(validation=feed, epoch=float, examples=int),
            functions=SimpleNamespace(eval_step=eval_step, **own),
            recorder=Recorder(None),
            experiment=SimpleNamespace(callbacks=()),
            workers=SimpleNamespace(mesh=None),
        )
        state = TrainState(*[np.zeros(())] * len(TrainState._fields))
        params, model_state = {"w": jnp.bfloat16(3 + number)}, {"n": jnp.int32(70_000 + number)}
        states.append(state._replace(params=params, model_state=model_state))
        workers.append(JudgingWorker(number, server))
        evaluations.append(SharedEvaluation(run, workers[-1]))
        evaluations[-1].compile(states[-1])
        made[number].clear()
        progress.report(number, WorkerReport(0, 0), Counters())
    for _ in progress.answers():
        pass
    evaluations[0].begin(40, states[0])
    assert evaluations[0].conclude_if_complete(workers[0].report(evaluations[0].requests())) is None
    for number in (1,) if dies == "before" else (1, 2):
        evaluations[number].evaluate_shard(workers[number].report({}))
        evaluations[number].evaluate_shard(workers[number].report({}))  # which says that it has, and is not asked again
    if dies:
        server.drop_worker(2)
    outcome = evaluations[0].conclude_if_complete(workers[0].report({}))
    assert outcome is not None
    assert sorted(itertools.chain(*made)) == data.tolist()
    assert outcome.figures["eval_count"] == batches
    if batches:
        assert outcome.figures["eval_loss"] == pytest.approx(float(3 * data.mean()) + 70_000, rel=1e-7)
        assert outcome.figures["eval_far"] == pytest.approx(float(data.mean()) / 2)
        assert max(map(len, made)) <= -(-batches // 3) * (2 if dies == "before" else 1)
    assert evaluations[0].conclude_if_complete(workers[0].report(evaluations[0].requests())) is None  # it is over


# ---------------------------------------------------------------- who dies


class Fault(NamedTuple):
    """Ranks of a job, which of them is killed, and what comes of it."""

    args: tuple[str, ...]
    ranks: int
    killed: int
    code: int
    message: str


FAULTS = {
    "worker": Fault(RULES["easgd"], 3, 2, 0, "finished with 2 of 3 workers"),
    "worker-with-servers": Fault(RULES["easgd-servers"], 4, 1, 0, "finished with 2 of 3 workers"),
    "worker-asgd": Fault((*RULES["asgd"],), 3, 1, 0, "finished with 2 of 3 workers"),
    "worker-gosgd": Fault(RULES["gosgd"], 3, 2, 0, "finished with 2 of 3 workers"),
    "server": Fault(RULES["easgd-servers"], 4, 3, 1, "rank 3, which keeps the center, is gone"),
    "worker-0": Fault(RULES["easgd-servers"], 4, 0, 1, "rank 0, which keeps the record, is gone"),
    "worker-0-and-center": Fault(RULES["easgd"], 3, 0, 1, "rank 0, which keeps the center, is gone"),
}
QUICK_FAULTS = ("worker",)


@pytest.mark.e2e
@pytest.mark.parametrize("name", [n if n in QUICK_FAULTS else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_killed_worker_is_done_without_and_a_killed_center_ends_the_run(name, tmp_path):
    fault, run_dir = FAULTS[name], tmp_path / "run"
    args = [*COMMON, *fault.args, "--train-for", "8ep", "--checkpoint-every", "1ep", "--eval-every", "8ep"]
    args += ["--run-dir", str(run_dir)]
    slowly = ("--inject", "slow:rank=all,seconds=0.01,times=0")  # so that the death comes before the end
    line = surviving(fault.ranks, *args, *slowly)
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            job_folder.remove_leftovers_first(line), cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 90
        while not found(run_dir / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(rank_of(fault.killed, run_dir), signal.SIGKILL)
        code = job.wait(timeout=120)
    finally:
        kill_session(job.pid)
        job.wait()
    printed = (tmp_path / "out").read_text()
    assert code == fault.code, printed
    assert fault.message in printed, printed
    steps = [int(path.name[5:]) for path in found(run_dir / "checkpoints")]
    if fault.code == 0:
        assert record(run_dir, "workers")[-1]["alive"] == 2
        last = record(run_dir, "train")[-1]
        assert last["examples"] >= 8 * EXAMPLES
        check_lines(run_dir)
        seen = [row for row in record(run_dir, "train") if "own_s" in row][-1]  # no step, no anatomy
        assert seen["own_s"][fault.killed] == 0 < max(seen["own_s"])
        assert seen["anatomy"]["compute"][3] != fault.killed
        assert 0.01 < seen["gradient_norm"] < 100
        assert steps[-1] == 8 * 30
    else:
        ended = train(fault.ranks, *args, "--resume")  # from the last checkpoint, to the end
        assert ended.code == 0, ended.out
        assert f"resumed at step {steps[-1]}" in ended.out
        assert record(run_dir, "eval")[-1]["step"] == 8 * 30


def surviving(ranks: int, *args: str) -> list[str]:
    """The line of `jaxmpi train`, under which a run goes on without ranks that die."""
    facts = facts_of(args)
    assert facts
    options = Options(ranks, "mpirun", (), args)
    line = command.command(options, cores=2, is_root=os.geteuid() == 0, outlives_ranks=facts.outlives_ranks)
    assert "--with-ft" in line
    return line


def rank_of(rank: int, run_dir: Path) -> int:
    """The process of a rank that trains into a folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_job = str(run_dir).encode() in (entry / "cmdline").read_bytes()
                if is_job and f"OMPI_COMM_WORLD_RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no rank {rank}")


@pytest.mark.e2e
def test_an_error_of_one_rank_ends_all_where_ranks_may_die(tmp_path):
    """MPI_Abort would hang there."""
    script = (
        "import numpy as np, jaxmpi, time\ncomm = jaxmpi.world()\ncontrol = comm.processes\n"
        "if comm.rank == 1: raise ValueError('boom')\ncontrol.barrier()\n"
    )
    (tmp_path / "job.py").write_text(script)
    begin = time.monotonic()
    line = [*mpirun_line(3), "--with-ft", "ulfm", sys.executable, str(tmp_path / "job.py")]
    job = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert job.returncode == 1, job.stdout + job.stderr
    assert "rank 1/3" in job.stderr
    assert "boom" in job.stderr
    assert job.stderr.count("Traceback") == 1  # the others have nothing to say of their own
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_who_still_gathers_when_another_fails_has_nothing_to_say(tmp_path):
    """Rank 0 has all texts and ends the job, while the last rank still waits for them; most likely
    at the first, when connections are made."""
    script = (
        "import jaxmpi\ncomm = jaxmpi.world()\ncomm.processes.allgather_object('abc')\n"
        "if comm.rank == 0: raise ValueError('boom')\ncomm.processes.allgather_object('abc')\n"
    )
    (tmp_path / "job.py").write_text(script)
    line = [*mpirun_line(3), "--with-ft", "ulfm", sys.executable, str(tmp_path / "job.py")]
    for _ in range(3):
        ended = run(line, timeout_s=60)
        assert ended.code == 1, ended.out
        assert ended.out.count("Traceback") == 1, ended.out


@pytest.mark.slow
@pytest.mark.parametrize(("told", "ranks"), [(1, 3), (3, 5)], ids=["worker, then fewer", "server, then more"])
def test_a_run_that_is_asked_to_leave_is_gone_on_with_on_another_number_of_ranks(told, ranks, tmp_path):
    """By a signal to one rank alone; nothing is lost, since all have reported and saved when they leave."""
    args = (*COMMON, *RULES["easgd-servers"], "--eval-every", "9ep", "--run-dir", str(tmp_path / "run"))
    line = job_folder.remove_leftovers_first(surviving(4, *args, "--train-for", "2000ep", "--checkpoint-every", "2ep"))
    job = subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 90
        while not found(tmp_path / "run" / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(rank_of(told, tmp_path / "run"), signal.SIGTERM)
        out, _ = job.communicate(timeout=90)
    finally:
        kill_session(job.pid)
        job.wait()
    assert job.returncode == failures.PREEMPTED, out
    assert "asked to leave: saved at step" in out
    left = record(tmp_path / "run", "train")[-1]
    newest = found(tmp_path / "run" / "checkpoints")[-1]
    saved = json.loads((newest / "manifest.json").read_text())["extra"]["tally"]
    assert saved[1] >= left["examples"]  # every example that was told of
    until = left["epoch"] + 3
    ended = run(surviving(ranks, *args, "--train-for", f"{until:.0f}ep", "--resume"), timeout_s=200)
    assert ended.code == 0, ended.out
    rows = record(tmp_path / "run", "train")
    after = [row["examples"] for row in rows if row["examples"] > saved[1]]
    assert [row["examples"] for row in rows] == sorted(row["examples"] for row in rows)
    # Counting goes on from there: the first line comes within log_every steps of each worker, a report behind.
    assert saved[1] < after[0] <= saved[1] + (ranks - 1) * 20 * 24
    assert record(tmp_path / "run", "workers")[-1]["alive"] == ranks - 1


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_and_ends_the_job(tmp_path):
    args = (*COMMON, *RULES["easgd"], "--train-for", "2000ep", "--run-dir", str(tmp_path / "run"))
    line = surviving(3, *args, "--stall-timeout-s", "10", "--inject", "stop:rank=2,step=20")
    ended = run(line, timeout_s=120)
    assert not ended.timed_out
    assert ended.code != 0, ended.out
    assert re.search(r"no progress for \d+ s; late: rank 2 on ", ended.out), ended.out
    who = postmortem.culprit(ended.out)
    assert who is not None
    assert who.rank == "2"
    assert "Traceback" not in ended.out, ended.out


@pytest.mark.slow
def test_who_ends_its_gossip_while_worker_0_evaluates_is_not_late(tmp_path):
    """Worker 0 may evaluate for longer than `stall_timeout_s`; the others, who come to the end meanwhile, wait."""
    args = (
        "--eval-every",
        "40st",
        "--train-for",
        "90st",
        "--stall-timeout-s",
        "10",
        "--run-dir",
        str(tmp_path / "run"),
    )
    line = surviving(3, *COMMON, *RULES["gosgd"], *args, "--inject", "slow:rank=0,at=eval,seconds=25")
    ended = run(line, timeout_s=150)
    assert ended.code == 0, ended.out
    assert "late: " not in ended.out


# ---------------------------------------------------------------- what is refused


BAD = {"alpha": 1.5, "server_alpha": -0.1, "tau": 0, "p": 1.1, "staleness": -1, "servers": -1, "local_steps": 0}
BAD |= {"outer_lr": 0.0, "outer_momentum": 1.0, "momentum": 1.0}


@pytest.mark.parametrize("name", BAD)
def test_numbers_out_of_range_are_named(name):
    with pytest.raises(UsageError, match=rf"rule\.{name}: got {BAD[name]}"):
        RuleConfig("easgd", **{name: BAD[name]})


RANKS = {
    "got one rank": (RuleConfig("easgd"), 1),
    "rule.servers: got 3 of 3 ranks; expected at most 2": (RuleConfig("easgd", servers=3), 3),
    "rule.servers: got 1 with rule gosgd": (RuleConfig("gosgd", servers=1), 3),
    "rule.servers: got 1 with rule gradients": (RuleConfig(servers=1), 3),
    "rule.staleness: got 2 with rule gosgd": (RuleConfig("gosgd", staleness=2), 3),
    "rule.staleness: got 2 with rule easgd_sync": (RuleConfig("easgd_sync", alpha=0.1, staleness=2), 3),
    "expected at most 1/4 = 0.25": (RuleConfig("easgd_sync"), 4),
}


@pytest.mark.parametrize("message", RANKS)
def test_ranks_and_rules_that_do_not_fit_are_refused(message):
    with pytest.raises(UsageError, match=re.escape(message)):
        registry.check_ranks(*RANKS[message])


def test_a_run_that_stops_at_its_first_step_closes_its_source():
    closed = []

    def source():
        try:
            yield from range(2, 9)
        finally:
            closed.append(True)

    batches = source()
    worker: Any = SimpleNamespace(first=next(batches), source=batches)
    with contextlib.closing(AsynchronousWorker.batches(worker)) as mine:
        assert next(mine) == 2
    assert closed == [True]


@pytest.mark.parametrize("name", ["easgd", "asgd", "gosgd", "easgd_sync"])
def test_an_optimizer_whose_state_is_not_averaged_is_refused_unless_forced(name):
    config = Optim("adam")
    with pytest.raises(UsageError, match="its state is each worker's own, not averaged"):
        build(RuleConfig(name), config)
    build(RuleConfig(name, force=True), config)


def test_a_single_rank_is_told_to_start_several(tmp_path):
    ended = train_here(*COMMON, *RULES["easgd"], "--run-dir", str(tmp_path / "run"))
    assert ended.code != 0
    assert "start several (mpirun -n 4, jaxmpi train -n 4)" in ended.out


SLOWLY_ENDED = """
import os
from jaxmpi.experiments.digits import experiment
from jaxmpi.runtime import failures
failures.RANK_0_FIRST_S = 1.0
failures.PASSED_ON_S = 4.0 * (os.environ.get("OMPI_COMM_WORLD_RANK") == "0")
"""


@pytest.mark.e2e
@pytest.mark.slow  # waits for a launcher
def test_one_rank_says_what_is_refused_however_slow_the_launcher_ends_the_others(tmp_path):
    (tmp_path / "slowly.py").write_text(SLOWLY_ENDED)
    line = (sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "3", str(tmp_path / "slowly.py"))
    ended = run([*line, *RULES["easgd"], "--comm", "xla", "--run-dir", str(tmp_path / "run")], timeout_s=60)
    assert ended.code == failures.MISUSED, ended.out
    assert ended.out.count("error: comm: got xla with an asynchronous rule") == 1, ended.out
    assert "---" not in ended.out, ended.out  # no box of Open MPI's


def test_of_a_strategy_the_wire_counts():
    asked = {
        "auto": "root:32",
        "auto:16": "root:16",
        "ring16": "root:16",
        "asa:bf16": "root:bf16",
        "hier-ring": "root:32",
    }
    assert {name: center_strategy(name) for name in asked} == asked


# ---------------------------------------------------------------- the local halves, and the synchronous form


def build(config: RuleConfig, optim: Optim, workers: int = 1, lr: float = 0.05) -> Any:
    comm = AxisComm("w", workers) if workers > 1 else SoloComm()
    exchanged = base.Exchange(lambda tree: exchange(tree, comm=comm), lambda tree: exchange(tree, op="sum", comm=comm))
    tx = optimizer(optim, lambda step: jnp.float32(lr))
    return registry.build(config, tx, exchanged, optimizer=optim.name, linear=is_linear(optim, tx, {}))


def gradient(w):
    return jax.tree.map(lambda x: jnp.sin(3 * x) + x, w)


PARAMS = {"a": np.linspace(-1, 1, 7, dtype=np.float32), "b": np.array([[0.3, -2]], np.float32)}


@pytest.mark.parametrize("name", ["easgd", "asgd", "gosgd", "easgd_sync"])
@pytest.mark.parametrize("optim", [Optim("sgd"), Optim("momentum"), Optim("nesterov")], ids=lambda o: o.name)
def test_without_exchanges_a_worker_is_the_plain_optimizer_in_every_bit(name, optim):
    """`easgd_sync` meets before the first step only, when worker and center are the same."""
    rule, tx = build(RuleConfig(name, tau=100), optim), optimizer(optim, lambda step: jnp.float32(0.05))
    mine, plain = jax.tree.map(jnp.array, PARAMS), jax.tree.map(jnp.array, PARAMS)
    state, inner = rule.init(mine), tx.init(plain)
    compiled = functools.partial(jax.jit, compiler_options=USUAL_EMITTERS)

    @compiled
    def step(params, inner):
        updates, inner = tx.update(gradient(params), inner, params)
        return optax.apply_updates(params, updates), inner

    local = compiled(lambda params, state: rule.update(gradient(params), state, params))
    for _ in range(5):
        mine, state = local(mine, state)
        plain, inner = step(plain, inner)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_eamsgd_is_the_papers_two_lines_and_only_w_travels():
    """v <- delta v - eta g(w + delta v) ;  w <- w + v, and the center pulls at w. Zhang et al. 2015, section 4."""
    delta, eta, alpha = 0.9, 0.05, 0.25
    rule = build(RuleConfig("easgd", alpha=alpha, momentum=delta), Optim("sgd"), lr=eta)
    asynchronous = rule.asynchronous
    assert asynchronous is not None
    w, v = np.linspace(-1, 1, 7), np.zeros(7)
    center = np.full(7, 0.5)
    params, state = {"a": jnp.asarray(w, jnp.float32)}, rule.init({"a": jnp.asarray(w, jnp.float32)})
    for _ in range(5):
        v = delta * v - eta * (np.sin(3 * (w + delta * v)) + w + delta * v)
        w = w + v
        params, state = rule.update(gradient(params), state, params)
        w = w - alpha * (w - center)
        mine = np.asarray(asynchronous.to_center(params, state)["a"])
        new, _ = asynchronous.meet(mine, mine, mine, center.astype(np.float32))
        params = asynchronous.from_center({"a": jnp.asarray(new)}, state)
    # 5 steps of some 12 roundings of numbers below 2; errors grow by 1 + delta at most a step, to 2^5.
    np.testing.assert_allclose(asynchronous.to_center(params, state)["a"], w, atol=5 * 12 * U * 2 * 2**5)


@pytest.mark.parametrize("tau", [1, 3])
def test_synchronous_easgd_is_the_papers_and_conserves_the_sum(tau):
    """Zhang et al. 2015, equations 5 and 6 in float64; without gradients the sum of workers and center stays."""
    k, alpha, eta, steps = 4, 0.2, 0.05, 6
    rule = build(RuleConfig("easgd_sync", alpha=alpha, tau=tau), Optim("sgd"), workers=k, lr=eta)
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, (k, 5))
    params = {"a": jnp.asarray(w, jnp.float32)}
    state = jax.vmap(lambda p: rule.init(p), axis_name="w")(params)._replace(center={"a": jnp.zeros((k, 5))})
    center = np.zeros(5)
    step = jax.jit(jax.vmap(lambda p, s: rule.update(gradient(p), s, p), axis_name="w"))
    for t in range(steps):
        params, state = step(params, state)
        g, pull = np.sin(3 * w) + w, alpha * (w - center) * (t % tau == 0)
        w, center = w - eta * g - pull, center + pull.sum(0)
    assert rule.eval_params is not None
    seen = np.asarray(rule.eval_params(params, state)["a"])
    # Some 10 roundings a step of numbers below 2; a step stretches errors by 1.2 at most.
    np.testing.assert_allclose(params["a"], w, atol=steps * 10 * U * 2 * 1.2**steps)
    np.testing.assert_allclose(seen, np.tile(center, (k, 1)), atol=steps * (10 + k) * U * 4 * 1.2**steps)
    assert len({row.tobytes() for row in seen}) == 1


@pytest.mark.parametrize("optim", [Optim("sgd"), Optim("momentum", momentum=0.5)], ids=lambda o: o.name)
def test_synchronous_easgd_at_tau_1_beside_bsp(optim):
    """Synchronous EASGD beside BSP, if gradients do not depend on w.

    The mean of k workers and center goes k/(k+1) of BSP's way at every step, since pulls cancel. At k alpha = 1 the
    center is what the mean of the workers was.
    """
    k, eta, steps = 3, 0.05, 6
    grads = np.random.default_rng(1).uniform(-2, 2, (steps, k, 5)).astype(np.float32)
    elastic = build(RuleConfig("easgd_sync", alpha=1 / k, tau=1), optim, workers=k, lr=eta)
    bsp = build(RuleConfig("gradients", noise_scale=False), optim, workers=k, lr=eta)
    assert elastic.eval_params is not None
    begun = {"a": jnp.ones((k, 5))}
    at = {rule: (begun, jax.vmap(rule.init)(begun)) for rule in (elastic, bsp)}
    update = {rule: jax.jit(jax.vmap(rule.update, axis_name="w")) for rule in at}
    for t in range(steps):
        means = np.asarray(at[elastic][0]["a"], np.float64).mean(0)
        for rule, (params, state) in at.items():
            at[rule] = update[rule]({"a": jnp.asarray(grads[t])}, state, params)
        w, center = np.asarray(at[elastic][0]["a"], np.float64), np.asarray(elastic.eval_params(*at[elastic])["a"])[0]
        moved = (w.sum(0) + center) / (k + 1) - 1
        # Each step rounds some 10 sums of numbers below 2 on either side.
        np.testing.assert_allclose(moved, k / (k + 1) * (np.asarray(at[bsp][0]["a"])[0] - 1.0), atol=steps * 20 * U * 2)
        np.testing.assert_allclose(center, means, atol=(k + 3) * U * 2)
        assert len({row.tobytes() for row in w}) == k  # no BSP: workers stay apart


def test_asgd_workers_that_come_from_one_center_leave_the_sum_of_their_updates_there_as_subgd_does():
    """At tau = 1, all from the same center; small integers, which nothing rounds. And the last one has it all."""
    rule = build(RuleConfig("asgd", tau=1), Optim("sgd")).asynchronous
    assert rule is not None
    center, learnt = np.arange(4, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    begun, last = center.copy(), center
    for update in learnt:
        seen = center.copy()
        sent = rule.send(begun + update, begun)
        rule.serve(center, sent, seen)
        last, base = rule.meet(begun + update, begun, sent, seen)
        np.testing.assert_array_equal(base, seen + update)
    np.testing.assert_array_equal(center, begun + learnt.sum(0))
    np.testing.assert_array_equal(last, center)


def test_a_worker_that_a_checkpoint_does_not_know_begins_at_the_rate_of_the_run(tmp_path):
    """Else it would warm up until its first report, at the place where the others' rate has long fallen."""
    tx = optimizer(Optim("momentum"), lambda step: jnp.float32(0.1) * jnp.asarray(step, jnp.float32))
    params = {"a": np.ones(3, np.float32)}
    fresh = TrainState(np.zeros((), np.int32), params, {}, tx.init(params), np.zeros(2, np.uint32))
    home = UncoordinatedCheckpoint(tmp_path, 1, Retention(2))
    home.begin(7)
    home.write_own(7, 0, {**jax.tree.map(np.asarray, fresh)._asdict(), "weight": np.array(1.0)})
    home.end(7, {"center": params}, {"tally": [0.0] * len(Counters._fields)}, None)
    rule = build(RuleConfig("easgd"), Optim("sgd")).asynchronous
    for worker in range(2):
        start = async_start.start_from_checkpoint(found(tmp_path)[-1], fresh, worker, 2, rule)
        assert [int(x) for x in jax.tree.leaves(start.state.rule_state) if x.ndim == 0] == [7]
