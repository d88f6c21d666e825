"""Check who is late, by made-up words of ranks; and jobs in which a rank is really stopped."""

import io
import os
import re
import signal
import sys
import time

import pytest

from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.recover import watchdog
from jaxmpi.recover.watchdog import Mailbox, Watchdog, watching
from jaxmpi.runtime import failures, progress
from jobs import marked, start
from launching import mpirun_line, run, wait_until


class Letters(Mailbox):
    """Post whose letters the test writes and reads."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, dict]] = []
        self.coming: list[dict] = []

    def send(self, to: int, message: dict) -> None:
        self.messages.append((to, message))

    def received(self) -> list[dict]:
        come, self.coming = self.coming, []
        return come


def beat(rank: int, count: int, phase: str = "step 7", waits: tuple[str, ...] = (), patience: float = 1.0) -> dict:
    opened = [f"waits for {name}" for name in waits]
    fields = {"waits": list(waits), "open": opened, "host": f"node{rank}"}
    return {"kind": "beat", "rank": rank, "count": count, "phase": phase, "patience": patience, **fields}


def dog(rank: int = 0, stall_timeout_s: float = 10.0) -> tuple[Watchdog, Letters, io.StringIO]:
    letters, out = Letters(), io.StringIO()
    return Watchdog(letters, rank, 4, stall_timeout_s, "warn", out, now_s=0.0), letters, out


def live(watch: Watchdog, letters: Letters, seconds: range, beats) -> None:
    """A second after another; `beats` gives what the other ranks say in it."""
    for now in seconds:
        letters.coming += beats(now)
        watch.turn(float(now))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.0)
    failures.set_phase("step 7")


def test_a_rank_that_is_silent_is_named_with_its_last_phase():
    watch, letters, out = dog()
    words = ("bucket 3 of 7 (conv1/kernel)",)
    live(watch, letters, range(1, 3), lambda now: [beat(r, 5) for r in (1, 2, 3)])
    live(watch, letters, range(3, 16), lambda now: [beat(r, 5, waits=words) for r in (1, 3)])
    output = out.getvalue()
    assert "late: rank 2 on node2" in output
    assert re.search(r"rank 2 on node2 does not answer, for \d+ s; last in step 7, computes", output)
    assert "rank 1 on node1: step 7, waits for bucket 3 of 7 (conv1/kernel), for" in output
    assert "on_stall warn" in output
    assert [to for to, message in letters.messages if message["kind"] == "ask"] == [1, 3]
    assert "stacks of rank 0:" in output
    assert output.count("no progress") == 1


def test_ranks_that_progress_in_time_are_not_reported():
    watch, letters, out = dog()
    live(watch, letters, range(1, 10), lambda now: [beat(r, 5) for r in (1, 2, 3)])
    for now in range(10, 60):
        failures.set_phase(f"step {now}")
        live(watch, letters, range(now, now + 1), lambda now: [beat(r, now) for r in (1, 2, 3)])
    assert out.getvalue() == ""


def test_a_job_that_recovers_says_so_and_may_stall_again():
    watch, letters, out = dog()
    live(watch, letters, range(1, 15), lambda now: [beat(r, 5) for r in (1, 2, 3)])
    failures.set_phase("step 8")
    live(watch, letters, range(15, 18), lambda now: [beat(r, 6) for r in (1, 2, 3)])
    assert "goes on, " in out.getvalue()
    live(watch, letters, range(18, 40), lambda now: [beat(r, 6) for r in (1, 2, 3)])
    assert out.getvalue().count("no progress") == 2


def test_the_rank_with_the_least_progress_is_late_else_the_one_that_does_not_wait():
    watch, letters, out = dog(stall_timeout_s=4.0)
    failures.set_phase("step 8")
    count = failures.current_phase().count
    live(watch, letters, range(1, 8), lambda now: [beat(r, count - (r == 3)) for r in (1, 2, 3)])
    assert "late: rank 3 on node3\n" in out.getvalue()
    watch, letters, out = dog(stall_timeout_s=4.0)
    live(watch, letters, range(1, 8), lambda now: [beat(r, count, waits=("a bucket",) * (r != 1)) for r in (1, 2, 3)])
    with progress.span("wait", "a bucket"):
        live(watch, letters, range(8, 16), lambda now: [beat(r, count, waits=("a",) * (r != 1)) for r in (1, 2, 3)])
        assert watch.late() == [1]


def test_rank_1_judges_where_rank_0_is_silent_and_leaves_it_to_it_where_it_is_not():
    watch, letters, out = dog(rank=1)
    live(watch, letters, range(1, 20), lambda now: [beat(r, 5) for r in (0, 2, 3)])
    assert out.getvalue() == ""
    watch, letters, out = dog(rank=1)
    live(watch, letters, range(1, 3), lambda now: [beat(r, 5) for r in (0, 2, 3)])
    live(watch, letters, range(3, 16), lambda now: [beat(r, 5) for r in (2, 3)])
    assert "late: rank 0 on node0" in out.getvalue()


def test_the_second_judge_is_on_another_host():
    """A host that hangs takes ranks 0 and 1 with it, as ranks are mostly placed."""
    assert watchdog.choose_judges(["a", "a", "b", "b"]) == (0, 2)
    assert watchdog.choose_judges(["a", "a"]) == (0, 1)
    watch, letters, out = dog(rank=2)
    watch.judges = (0, 2)
    live(watch, letters, range(1, 3), lambda now: [beat(r, 5) for r in (0, 1, 3)])
    assert {to for to, _ in letters.messages} == {0}
    live(watch, letters, range(3, 16), lambda now: [beat(3, now)])
    assert "late: rank 0 on node0, rank 1 on node1" in out.getvalue()


def test_a_clock_jump_or_a_suspended_process_accuses_nobody():
    watch, letters, out = dog()
    live(watch, letters, range(1, 5), lambda now: [beat(r, 5) for r in (1, 2, 3)])
    live(watch, letters, range(100_000, 100_004), lambda now: [beat(r, 5) for r in (1, 2, 3)])
    assert out.getvalue() == ""


def test_a_rank_that_waits_for_working_ranks_is_not_stuck_but_a_silent_one_is():
    watch, letters, out = dog()
    live(watch, letters, range(1, 40), lambda now: [beat(1, 5), beat(2, now), beat(3, now)])
    assert out.getvalue() == ""
    live(watch, letters, range(40, 60), lambda now: [beat(2, now), beat(3, now)])
    assert "late: rank 1 on node1" in out.getvalue()


def test_compiling_and_writing_may_take_longer():
    watch, letters, out = dog()
    live(watch, letters, range(1, 55), lambda now: [beat(r, 5, patience=6.0 if r == 2 else 1.0) for r in (1, 2, 3)])
    assert out.getvalue() == ""
    live(watch, letters, range(55, 70), lambda now: [beat(r, 5, patience=6.0 if r == 2 else 1.0) for r in (1, 2, 3)])
    assert "no progress for 6" in out.getvalue()
    watch, letters, out = dog()  # but whoever falls silent is given no more time than others
    live(watch, letters, range(1, 3), lambda now: [beat(r, 5, patience=6.0) for r in (1, 2, 3)])
    live(watch, letters, range(3, 20), lambda now: [beat(r, 6) for r in (1, 3)])
    assert "late: rank 2 on node2" in out.getvalue()


def test_ranks_answer_with_their_stacks():
    watch, letters, _ = dog(rank=2)
    letters.coming = [{"kind": "ask", "rank": 0}]
    watch.turn(1.0)
    [(to, answer)] = [(to, m) for to, m in letters.messages if m["kind"] == "stacks"]
    assert to == 0
    assert "test_ranks_answer_with_their_stacks" in answer["text"]
    assert {to for to, m in letters.messages if m["kind"] == "beat"} == {0, 1}


def test_it_can_be_off():
    with watching(SoloProcesses(), 0.0, "abort") as why:
        assert why == "watchdog off: as asked"


class WithAnother(SoloProcesses):
    """Rank 0 beside a rank that is stopped as soon as the job is watched."""

    size = 2

    def allgather_object(self, value):
        return [value, value | {"rank": 1, "host": "node1"}]


def test_a_rank_that_is_stopped_before_its_first_message_is_named(capfd):
    printed = ""

    def is_named() -> bool:
        nonlocal printed
        printed += capfd.readouterr().err
        return "no progress" in printed

    with watching(WithAnother(), 0.4, "warn"):
        wait_until(is_named, 20)
    assert "late: rank 1 on node1\n" in printed


STUCK = "import time\nfrom jaxmpi.runtime import failures\nfrom jaxmpi.comm.solo import SoloProcesses\n"
STUCK += "from jaxmpi.recover.watchdog import watching\nfailures.set_phase('step 3')\n"
STUCK += "def spin():\n    time.sleep(60)\n\nwith watching(SoloProcesses(), 1.0, 'abort'):\n    spin()\n"


@pytest.mark.e2e
def test_a_single_process_that_is_stuck_ends_with_its_stack():
    ended = run([sys.executable, "-c", STUCK], timeout_s=50)
    assert not ended.timed_out
    assert ended.code == watchdog.STALLED
    assert "late: rank 0 on " in ended.out
    assert "in spin" in ended.out


# ---------------------------------------------------------------- real jobs

STALL_S = 4
TRAIN = ("-m", "jaxmpi.train", "experiments/digits.py", "--train-for", "100000st", "--local-batch", "8", "--quiet")
TRAIN += ("--checkpoint-every", "0st", "--eval-every", "0st", "--stall-timeout-s", str(STALL_S))


@pytest.mark.e2e
@pytest.mark.parametrize(
    "rule", [(), ("--rule.name", "easgd", "--exchange.strategy", "root", "--effective-batch", "0")]
)
@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_is_not_accused(rule, tmp_path):
    """Ctrl-Z for longer than --stall-timeout-s, and fg."""
    line = [*mpirun_line(2), sys.executable, *TRAIN, *rule, "--train-for", "300st", "--stall-timeout-s", "2"]
    job, written = start([*line, "--run-dir", str(tmp_path / "run")]), tmp_path / "run" / "record.jsonl"
    wait_until(lambda: written.exists() and '"kind": "train"' in written.read_text(), timeout_s=100)
    for number, after_s in ((signal.SIGSTOP, 3.5), (signal.SIGCONT, 0)):
        for pid in marked(job.mark):
            os.kill(pid, number)
        time.sleep(after_s)
    assert job.end() == 0, job.out
    assert "late:" not in job.out
