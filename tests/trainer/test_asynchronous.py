"""Whole runs by asynchronous rules: what they count, record, save and survive; and what they refuse."""

import itertools
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxmpi.checkpoint.manifests import complete_checkpoints
from jaxmpi.launch import command
from jaxmpi.launch.experiment_facts import facts_of
from jaxmpi.launch.options import Options
from jaxmpi.runtime import failures
from jaxmpi.trainer.build import center_strategy
from jobs import start
from launching import mpirun_line, run, train, wait_until
from runs import TINY, checkpoint, record, steps_saved
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
    files = json.loads((checkpoint(tmp_path, 90) / "manifest.json").read_text())["files"]
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


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "sent"), [(0, "SIGSTOP"), (2, "SIGSTOP"), (2, "SIGKILL")])
def test_a_worker_that_hangs_before_the_start_is_named_and_one_that_dies_holds_nobody_up(rank, sent, tmp_path):
    """It gets a signal while it traces its step: rank 0, for which the others wait to compile, or another."""
    (tmp_path / "late.py").write_text(LATE.format(rank=rank, signal=sent))
    limit = ("--stall-timeout-s", "2" if sent == "SIGSTOP" else "0")  # six times as long at the start
    line = surviving(3, str(tmp_path / "late.py"), *RULES["easgd"], *limit, "--run-dir", str(tmp_path / "run"))
    ended = run(line, timeout_s=120)
    assert not ended.timed_out
    assert (ended.code == 0) == (sent == "SIGKILL"), ended.out
    assert ("finished with 2 of 3 workers" if sent == "SIGKILL" else f"late: rank {rank}") in ended.out
    assert "Traceback" not in ended.out, ended.out


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


# ---------------------------------------------------------------- who dies


class Fault(NamedTuple):
    """Ranks of a job, which of them is killed, and what comes of it."""

    args: tuple[str, ...]
    ranks: int
    killed: int
    code: int
    message: str


HOST = socket.gethostname()
FAULTS = {
    "worker": Fault(RULES["easgd"], 3, 2, 0, "1 of 3 workers gone, rank 2 on "),
    "worker-with-servers": Fault(RULES["easgd-servers"], 4, 1, 0, "finished with 2 of 3 workers"),
    "worker-asgd": Fault((*RULES["asgd"],), 3, 1, 0, "finished with 2 of 3 workers"),
    "worker-gosgd": Fault(RULES["gosgd"], 3, 2, 0, "finished with 2 of 3 workers"),
    "server": Fault(RULES["easgd-servers"], 4, 3, 1, f"rank 3 on {HOST}, which keeps the center, is gone"),
    "worker-0": Fault(RULES["easgd-servers"], 4, 0, 1, f"rank 0 on {HOST}, which keeps the record, is gone"),
    "worker-0-and-center": Fault(RULES["easgd"], 3, 0, 1, f"rank 0 on {HOST}, which keeps the center, is gone"),
}
QUICK_FAULTS = ("worker",)


@pytest.mark.e2e
@pytest.mark.parametrize("name", [n if n in QUICK_FAULTS else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_killed_worker_is_done_without_and_a_killed_center_ends_the_run(name, tmp_path):
    fault, run_dir = FAULTS[name], tmp_path / "run"
    (tmp_path / "tiny.py").write_text(TINY)
    args = [str(tmp_path / "tiny.py"), *COMMON[1:], *fault.args, "--train-for", "4ep"]
    args += ["--checkpoint-every", "1ep", "--eval-every", "4ep"]
    args += ["--run-dir", str(run_dir)]
    slowly = ("--inject", "slow:rank=all,seconds=0.01,times=0")  # so that the death comes before the end
    code, printed = signalled(surviving(fault.ranks, *args, *slowly), fault.killed, signal.SIGKILL, run_dir)
    assert code == fault.code, printed
    assert fault.message in printed, printed
    if fault.code == 0:
        assert record(run_dir, "workers")[-1]["alive"] == 2
        last = record(run_dir, "train")[-1]
        assert last["examples"] >= 4 * EXAMPLES
        check_lines(run_dir)
        seen = [row for row in record(run_dir, "train") if "own_s" in row][-1]  # no step, no anatomy
        assert seen["own_s"][fault.killed] == 0 < max(seen["own_s"])
        assert seen["anatomy"]["compute"][3] != fault.killed
        assert 0.01 < seen["gradient_norm"] < 100
        assert steps_saved(run_dir)[-1] == 4 * 30
    else:
        last = steps_saved(run_dir)[-1]
        ended = train(fault.ranks, *args, "--resume")  # from the last checkpoint, to the end
        assert ended.code == 0, ended.out
        assert f"resumed at step {last}" in ended.out
        assert record(run_dir, "eval")[-1]["step"] == 4 * 30


def signalled(line: list[str], rank: int, number: int, run_dir: Path) -> tuple[int, str]:
    """A job of which a rank gets a signal after the first checkpoint: its exit code and what it printed."""
    job = start(line)
    try:
        wait_until(lambda: bool(complete_checkpoints(run_dir / "checkpoints")), timeout_s=90)
        job.signal(number, rank)
        return job.end(), job.out
    finally:
        job.drop()


def surviving(ranks: int, *args: str) -> list[str]:
    """The line of `jaxmpi train`, under which a run goes on without ranks that die."""
    options, outlives_ranks = Options(ranks, "mpirun", (), args), facts_of(args).outlives_ranks
    line = command.command(options, cores=2, is_root=os.geteuid() == 0, outlives_ranks=outlives_ranks)
    assert "--with-ft" in line
    return line


@pytest.mark.e2e
def test_an_error_of_one_rank_ends_all_where_ranks_may_die(tmp_path):
    """MPI_Abort would hang there."""
    script = (
        "import numpy as np, jaxmpi, time\ncomm = jaxmpi.world()\ncontrol = comm.processes\n"
        "if comm.rank == 1: raise ValueError('boom')\ncontrol.barrier()\n"
    )
    (tmp_path / "job.py").write_text(script)
    ended = run([*mpirun_line(3), "--with-ft", "ulfm", sys.executable, str(tmp_path / "job.py")], timeout_s=30)
    assert ended.code == 1, ended.out
    assert "rank 1/3" in ended.out
    assert "boom" in ended.out
    assert ended.out.count("Traceback") == 1  # the others have nothing to say of their own


@pytest.mark.slow
@pytest.mark.parametrize(("told", "ranks"), [(1, 3), (3, 5)], ids=["worker, then fewer", "server, then more"])
def test_a_run_that_is_asked_to_leave_is_gone_on_with_on_another_number_of_ranks(told, ranks, tmp_path):
    """By a signal to one rank alone; nothing is lost, since all have reported and saved when they leave."""
    run_dir = tmp_path / "run"
    args = (*COMMON, *RULES["easgd-servers"], "--eval-every", "9ep", "--run-dir", str(run_dir))
    line = surviving(4, *args, "--train-for", "2000ep", "--checkpoint-every", "2ep")
    code, out = signalled(line, told, signal.SIGTERM, run_dir)
    assert code == failures.PREEMPTED, out
    assert "asked to leave: saved at step" in out
    left = record(run_dir, "train")[-1]
    newest = complete_checkpoints(run_dir / "checkpoints")[-1]
    saved = json.loads((newest / "manifest.json").read_text())["extra"]["tally"]
    assert saved[1] >= left["examples"]  # every example that was told of
    until = left["epoch"] + 3
    ended = run(surviving(ranks, *args, "--train-for", f"{until:.0f}ep", "--resume"), timeout_s=200)
    assert ended.code == 0, ended.out
    rows = record(run_dir, "train")
    after = [row["examples"] for row in rows if row["examples"] > saved[1]]
    assert [row["examples"] for row in rows] == sorted(row["examples"] for row in rows)
    # Counting goes on from there: the first line comes within log_every steps of each worker, a report behind.
    assert saved[1] < after[0] <= saved[1] + (ranks - 1) * 20 * 24
    assert record(run_dir, "workers")[-1]["alive"] == ranks - 1


@pytest.mark.slow
def test_who_ends_its_gossip_while_worker_0_evaluates_is_not_late(tmp_path):
    """Worker 0 may evaluate for longer than `stall_timeout_s`; the others, who come to the end meanwhile, wait."""
    args = ("--eval-every", "40st", "--train-for", "90st", "--stall-timeout-s", "10", "--run-dir", str(tmp_path))
    line = surviving(3, *COMMON, *RULES["gosgd"], *args, "--inject", "slow:rank=0,at=eval,seconds=25")
    ended = run(line, timeout_s=150)
    assert ended.code == 0, ended.out
    assert "late: " not in ended.out


# ---------------------------------------------------------------- what is refused


def test_of_a_strategy_the_wire_counts():
    wires = {"auto": "32", "auto:16": "16", "ring16": "16", "asa:bf16": "bf16", "hier-ring": "32"}
    assert {name: center_strategy(name).partition(":")[2] for name in wires} == wires
