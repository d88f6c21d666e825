"""Going on without ranks that die: what comes of every fault, and that it is what a resume with fewer would give.

pytest -m faults tests/recover/test_rank_loss.py
"""

import functools
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.restore import RULE_STATE, is_at
from jobs import start
from launching import ROOT, mpirun_line, run, train
from runs import column, record, steps_saved
from test_faults import MODEL, inject, losses, trainer

STEPS, RANKS = 40, 4
NOTICED_S, NEXT_S = 10.0, 60.0  # from the fault to the word that a rank is gone, and to the end of the next step
DIGITS = str(ROOT / "experiments" / "digits.py")


# ---------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_a_launcher_that_ends_the_job_with_its_first_rank_is_refused(tmp_path):
    ended = train(2, DIGITS, "--on-rank-loss", "shrink", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 2, ended.out
    assert "on_rank_loss: got shrink, but this MPI ends a job with its first rank" in ended.out


# ---------------------------------------------------------------- collectives


@pytest.mark.e2e
@pytest.mark.slow  # a run that loses a rank is the next test
def test_collectives_have_the_bits_of_others_and_outlive_ranks():
    """Rank 2, then rank 0 is killed between two steps: programs of those that live end, and new ones are right."""
    script = str(ROOT / "tests" / "fault_tolerant_checks.py")
    line = [*mpirun_line(4), "--with-ft", "ulfm", sys.executable, script, "2,0"]
    ended = run(line, timeout_s=200)
    assert not ended.timed_out, ended.out
    assert ended.code == 0, ended.out
    assert {f"rank {r} is left among (1, 3)" for r in (1, 3)} <= set(ended.out.splitlines()), ended.out


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "softmax.py"
    path.write_text(MODEL)
    return path


class Phase(NamedTuple):
    """A phase of a run: so many workers, up to a step."""

    workers: int
    upto: int


@pytest.fixture(scope="session")
def reference(model, tmp_path_factory):
    """(phases of a run) -> what is equal on all workers.

    It is equal in the end, if each phase is resumed from the one before.
    """

    @functools.cache
    def final_state(*phases: Phase, args: tuple[str, ...] = ()) -> dict[tuple[str, str], tuple[list[int], int]]:
        folder = tmp_path_factory.mktemp("reference") / "run"
        for phase in phases:
            resume = ["--resume"] * (phase is not phases[0])
            steps = ["--train-for", f"{phase.upto}st", "--checkpoint-every", "0st", *resume]
            job = start(trainer(model, folder, *steps, *args, ranks=phase.workers))
            assert job.end() == 0, job.out
        return saved_state(folder)

    return final_state


def saved_state(run_dir: Path) -> dict[tuple[str, str], tuple[list[int], int]]:
    """Shapes and checksums of the last checkpoint: step, params and optimizer, shards included; no batch statistics."""
    [last] = [
        path for path in manifests.complete_checkpoints(run_dir / "checkpoints") if manifests.step_of(path) == STEPS
    ]
    files = manifests.read_manifest(last)["files"]
    return {
        (file, row["path"]): (row["shape"], row["crc32"])
        for file, rows in files.items()
        for row in rows
        if file == "common.bin" or is_at(row["path"], RULE_STATE)
    }


class Row(NamedTuple):
    """Faults, who is gone for them, and how many ranks there are."""

    args: tuple[str, ...]
    lost_ranks: list[int]
    ranks: int = RANKS
    within_s: float = NOTICED_S
    flags: tuple[str, ...] = ()  # of the run that it equals, too


SHARDED = ("--exchange.shard-update", "on")
ROWS = {
    "kill_2": Row(inject("kill:rank=2,step=25"), [2]),
    "kill_0": Row(inject("kill:rank=0,step=25"), [0]),
    "kill_one_after_another": Row(inject("kill:rank=2,step=25", "kill:rank=0,step=33"), [2, 0]),
    "kill_two_at_once": Row(inject("kill:rank=1,step=25", "kill:rank=2,step=25"), [1, 2]),
    "kill_in_evaluation": Row(inject("kill:rank=1,step=20,at=eval"), [1]),
    "kill_0_in_evaluation": Row(inject("kill:rank=0,step=20,at=eval"), [0]),
    "kill_0_saving": Row(inject("kill:rank=0,step=20,at=save"), [0]),
    "kill_3_saving": Row(inject("kill:rank=3,step=20,at=save"), [3]),
    "kill_first_step": Row(inject("kill:rank=3,step=1"), [3]),
    "kill_last_step": Row(inject("kill:rank=1,step=40"), [1]),
    "kill_0_in_the_last_evaluation": Row(inject("kill:rank=0,step=40,at=eval"), [0]),
    "kill_1_saving_the_last": Row(inject("kill:rank=1,step=40,at=save"), [1]),
    "kill_to_one": Row(inject("kill:rank=0,step=25"), [0], ranks=2),
    "raise": Row(inject("raise:rank=1,step=25"), [1]),
    "raise_in_thread": Row(inject("raise:rank=1,step=25,thread=1"), [1]),
    "exit_3": Row(inject("exit:rank=2,step=25"), [2]),
    "exit_0": Row(inject("exit:rank=2,step=25,code=0"), [2]),
    "stop": Row((*inject("stop:rank=2,step=25"), "--stall-timeout-s", "8"), [2], within_s=60),
    "shm": Row((*inject("kill:rank=1,step=25"), "--exchange.strategy", "shm"), [1]),
    "sharded": Row((*inject("kill:rank=2,step=25", "kill:rank=0,step=33"), *SHARDED), [2, 0]),
    "sharded_two_at_once": Row((*inject("kill:rank=0,step=25", "kill:rank=2,step=25"), *SHARDED), [0, 2]),
    "sharded_in_evaluation": Row((*inject("kill:rank=1,step=20,at=eval"), *SHARDED), [1]),
    "sharded_saving": Row((*inject("kill:rank=0,step=20,at=save"), *SHARDED), [0]),
    "sharded_masters": Row((*inject("kill:rank=2,step=25"), *SHARDED), [2], flags=("--exchange.gather-wire", "16")),
    "sharded_whole_tensors": Row((*inject("kill:rank=2,step=25"), *SHARDED), [2], flags=("--optim.name", "lamb")),
    "sharded_average": Row((*inject("kill:rank=2,step=25"), *SHARDED), [2], flags=("--optim.ema", "0.9")),
    "sharded_to_one": Row((*inject("kill:rank=0,step=25"), *SHARDED), [0], ranks=2),
}


@pytest.mark.e2e
def test_the_last_worker_continues_alone(model, tmp_path):
    """Rank 0, which keeps the record, dies at step 4 of 6, with its shard of the optimizer's state.

    There is no checkpoint yet, so rank 1 begins anew.
    """
    folder = tmp_path / "run"
    args = ("--on-rank-loss", "shrink", "--train-for", "6st", *inject("kill:rank=0,step=4"), *SHARDED)
    args += ("--optim.clip-norm", "1")
    job = start(trainer(model, folder, *args, ranks=2))
    assert job.end() == 0, job.out
    assert record(folder, "lost") == [{"kind": "lost", "after": 0, "ranks": [0], "workers": 1}]
    assert "back to step 0" in job.out
    assert [(step, count) for step, count, _ in losses(folder)] == [(step, 64 * step) for step in range(1, 7)]
    assert "finished with 1 of 2 workers" in job.out
    half, whole = map(float, re.findall(r"of params, ([\d.]+) of", job.out)[:2])  # of the optimizer's state
    assert whole > 1.9 * half
    assert steps_saved(folder) == [6]


@pytest.mark.faults
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", ROWS)
def test_the_remaining_ranks_repeat_the_step_and_continue(name, model, reference, tmp_path):
    row, folder = ROWS[name], tmp_path / "run"
    job = start(trainer(model, folder, "--on-rank-loss", "shrink", *row.args, *row.flags, ranks=row.ranks))
    code = job.end()
    assert code == 0, job.out
    lost = record(folder, "lost")
    assert [rank for line in lost for rank in line["ranks"]] == row.lost_ranks, job.out
    assert lost[-1]["workers"] == row.ranks - len(row.lost_ranks)
    assert f"finished with {row.ranks - len(row.lost_ranks)} of {row.ranks} workers" in job.out
    assert [(step, count) for step, count, _ in losses(folder)] == expected_steps(), job.out
    assert column(folder, "eval", "step") == [20, 40]
    assert column(folder, "eval", "eval_count") == [360, 360]
    if name in ("kill_0_saving", "kill_3_saving"):  # the checkpoint that was dropped is made by those that live
        assert 20 in column(folder, "checkpoint", "step")
    check_times(job, row, lost)
    # 64 examples do not divide by 3 when a run begins, and shared memory adds in another order than the ring.
    if lost[0]["after"] and "shm" not in name:
        args = (*(SHARDED if name.startswith("sharded") else ()), *row.flags)
        assert saved_state(folder) == reference(*phases_of(row.ranks, lost), args=args)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_an_unreported_bad_exit_ends_the_job(model, tmp_path):
    """Open MPI neither reports it nor ends the others."""
    folder = tmp_path / "run"
    faults = (*inject("exit:rank=2,step=25,hard=1"), "--stall-timeout-s", "8")
    job = start(trainer(model, folder, "--on-rank-loss", "shrink", *faults))
    assert job.end() != 0
    assert "late: rank 2 on" in job.out


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (inject("nan:rank=2,step=25"), 1, "of worker 2 is not finite at step 25"),
        (inject("sigterm:rank=2,step=25"), 75, "asked to leave: saved at step"),
        (inject("kill:rank=all,step=25"), 137, "injecting kill:rank=all"),
    ],
    ids=["nan", "sigterm", "kill_all"],
)
def test_joint_decisions_still_end_the_job(args, code, message, model, tmp_path):
    folder = tmp_path / "run"
    job = start(trainer(model, folder, "--on-rank-loss", "shrink", *args))
    assert job.end() == code, job.out
    assert message in job.out


def expected_steps() -> list[tuple[int, int]]:
    """(step, examples so far) of each step, once: 1,437 examples in steps of 64."""
    epochs = [divmod(step, 23) for step in range(1, STEPS + 1)]
    return [(step, epoch * 1437 + batch * 64) for step, (epoch, batch) in enumerate(epochs, 1)]


def phases_of(ranks: int, lost: list[dict[str, Any]]) -> list[Phase]:
    """The run as phases with as many workers each; two deaths after one step make one."""
    sizes = {0: ranks} | {line["after"]: line["workers"] for line in lost}
    ends = [*sorted(sizes)[1:], STEPS]
    return [Phase(size, end) for (_, size), end in zip(sorted(sizes.items()), ends, strict=True)]


def check_times(job, row: Row, lost: list[dict[str, Any]]) -> None:
    """Time to notice, and time to the next line of progress.

    That line comes with the next step or some later.
    """
    fault, noticed_s = job.when("injecting"), job.when(r"is gone\b.*; \d go on")
    print(f"noticed and shrunk after {noticed_s - fault:.2f} s", end="")
    assert noticed_s - fault < row.within_s
    if lost[0]["after"] < STEPS:
        following = min(at for at, line in job.lines if at > noticed_s and re.match(rf"step \d+/{STEPS} ", line))
        print(f", trained on after {following - fault:.2f} s", end="")
        assert following - fault < row.within_s + NEXT_S
    print()
