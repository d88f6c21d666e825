"""Every fault on four ranks, for real: what the job does, who is named, and that nothing is lost or left behind.

pytest -m faults                            the suite.
JAXMPI_FAULTS_RANKS=8 pytest -m faults      on more ranks.
JAXMPI_FAULTS_HOSTS=4 pytest -m faults      on emulated hosts (scripts/cluster.py).

After every job: no process is left that has its mark, and no shared memory that nobody maps, on any of its hosts.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxmpi.runtime import failures
from jobs import HOSTS, RANKS, left_behind, process_of, start, words_of, workers
from runs import checkpoint_files, record

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
STEPS = 40
DIES_S, HANGS_S = 10.0, 30.0  # bars: from the fault to the end of the job
MODEL = """
import jax
import jax.numpy as jnp
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.model.contract import Model

def init(key, image):
    params = {"w": 0.01 * jax.random.normal(key, (64, 10)), "b": jnp.zeros(10)}
    return params, {"mean": jnp.zeros(64)}

def apply(params, model_state, image, key, train):
    x = image.reshape(len(image), -1)
    return x @ params["w"] + params["b"], {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0)}

experiment = Experiment(
    model=Model("softmax", init, apply, input_shape=(8, 8, 1), classes=10),
    data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.02), exchange=ExchangeConfig("ring32"),
    effective_batch=64, train_for="40st", checkpoint_every="10st", eval_every="20st", log_every=1,
)
"""


def trainer(experiment: Path, run_dir: Path, *args: str, restarts: int = 0, ranks: int = RANKS, extra=()) -> list[str]:
    """`jaxmpi train -n 4 ...`."""
    head = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", str(ranks), "--restarts", str(restarts), *extra]
    return [*head, str(experiment), "--run-dir", str(run_dir), *args]


needs_hosts = pytest.mark.skipif(HOSTS == 1, reason="JAXMPI_FAULTS_HOSTS=4 runs it")


# ---------------------------------------------------------------- undisturbed, and what must not differ from it


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "softmax.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def undisturbed(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = start(trainer(model, folder))
    assert job.end() == 0, job.out
    return folder


def losses(run_dir: Path) -> list[tuple]:
    """(step, examples, loss) of every step: each once, in order, if no example is lost or repeated."""
    return [(line["step"], line["examples"], line["loss"]) for line in record(run_dir, "train")]


# ---------------------------------------------------------------- the table


class Row(NamedTuple):
    """A fault, and what comes of it."""

    args: tuple[str, ...]  # of the trainer
    pattern: str = ""  # a pattern that the job prints
    restarts: int = 2
    code: int = 0
    equal: bool = True  # whether the final state is bitwise that of an undisturbed run
    ends: str = r"ended the job|is not finite at step|workers differ"  # what tells that the fault is noticed
    within_s: float | None = DIES_S  # from the fault to `ends`
    resume: bool = False  # whether the test goes on by hand after the job


def inject(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--inject", text))


ROLLBACK = ("--on-nonfinite", "rollback")
UNTIL_SAVED = "slow:rank=2,step=36,seconds=3"  # steps are quicker than disks here
FAST = ("--replica-check-every", "5st")
ROWS = {
    "kill_0": Row(inject("kill:rank=0,step=25"), "rank 0 on .*signal 9"),
    "kill_2": Row(inject("kill:rank=2,step=25"), "rank 2 on .*signal 9"),
    "kill_first_step": Row(inject("kill:rank=3"), "from step 0"),
    "kill_last_step": Row(inject("kill:rank=1,step=40"), "rank 1 on .*signal 9"),
    "kill_two": Row(inject("kill:rank=1,step=25", "kill:rank=2,step=25"), "signal 9"),
    "kill_all": Row(inject("kill:rank=all,step=25"), "signal 9"),
    "kill_again": Row(
        inject("kill:rank=2,step=25", "slow:rank=2,step=34,seconds=3", "kill:rank=1,step=36"), "restart 2 of 2"
    ),
    "kill_0_saving": Row(inject("kill:rank=0,step=20,at=save"), "rank 0 on .*signal 9"),
    "kill_3_saving": Row(inject("kill:rank=3,step=20,at=save"), "rank 3 on .*signal 9"),
    "kill_always": Row(
        inject("kill:rank=2,step=5,times=0"),
        "not started again: no progress since the last restart",
        restarts=5,
        code=137,
        equal=False,
    ),
    "raise": Row(inject("raise:rank=1,step=25"), "Injected(.*\n)+.*rank 1 on .*ended"),
    "raise_in_thread": Row(inject("raise:rank=2,step=25,thread=1"), "Injected(.*\n)+.*rank 2 on .*ended"),
    "raise_saving": Row(inject("raise:rank=3,step=20,at=save"), "Injected(.*\n)+.*rank 3 on .*ended"),
    "exit_0": Row(inject("exit:rank=1,step=25,code=0"), "rank 1/\\d on .*left early"),
    "exit_3": Row(inject("exit:rank=1,step=25"), "rank 1 on .*ended the job"),
    "exit_hard": Row(inject("exit:rank=2,step=25,hard=1"), "rank 2 ended the job"),
    "stop": Row(
        inject("stop:rank=2,step=25"),
        r"rank 2 on \S+ ended the job.*(rank 2 on \S+ did not|for rank 2 on )",
        within_s=HANGS_S,
    ),
    "stop_watched": Row(
        (*inject("stop:rank=2,step=25"), "--stall-timeout-s", "8"),
        "rank 2 on .*ended the job: no progress for",
        within_s=HANGS_S,
    ),
    "slow": Row(inject("slow:rank=1,seconds=0.05,times=0"), restarts=0, within_s=None),
    "nan_stop": Row(
        inject("nan:rank=2,step=25"),
        "gradient of [wb] of worker 2 is not finite at step 25; last good",
        restarts=0,
        code=1,
        equal=False,
    ),
    "nan_skip": Row(
        (*inject("nan:rank=2,step=25"), "--on-nonfinite", "skip"),
        "of worker 2 is not finite at step 25: skipped",
        restarts=0,
        equal=False,
    ),
    "nan_rollback": Row(
        (*inject("nan:rank=2,step=25"), *ROLLBACK), "of worker 2 is not finite at step 25: back to step 20", restarts=0
    ),
    "nan_twice": Row(
        (*inject("nan:rank=2,step=25,times=2"), *ROLLBACK, "--checkpoint-every", "24st"),
        "(.*back to step 24\n(.*\n)*){2}",
        restarts=0,
        equal=False,
    ),
    "bitflip": Row(
        (*inject("bitflip:rank=3,step=22"), *FAST),
        "after step 25: worker 3 differs from the other \\d in",
        restarts=0,
        code=1,
        equal=False,
    ),
    "bitflip_restart": Row((*inject("bitflip:rank=0,step=22"), *FAST), "worker 0 differs from the other \\d in"),
    "bitflip_rollback": Row(
        (*inject("bitflip:rank=3,step=22"), *FAST, *ROLLBACK),
        "worker 3 differs from the other \\d in .*: back to step 20",
        restarts=0,
    ),
    "sigterm": Row(
        inject("sigterm:rank=2,step=25"),
        "asked to leave: saved at step 2[678]",
        code=75,
        ends="asked to leave",
        resume=True,
    ),
    "disk_full": Row(
        inject("disk_full:rank=2,step=20"),
        r"rank 2/\d+ on .*\n.*checkpoint of step 20 cannot be written: .*No space left",
    ),
    "corrupt_checkpoint": Row(
        inject("corrupt_checkpoint:step=30", UNTIL_SAVED, "kill:rank=1,step=38"),
        "passed over: .*step_00000030/common.bin: .*damaged, its checksum.*\n(.*\n)*.*resumed at step 20",
    ),
    "corrupt_manifest": Row(
        inject("corrupt_checkpoint:step=30,file=manifest.json", UNTIL_SAVED, "kill:rank=1,step=38"),
        "resumed at step 20",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_fault(name, model, undisturbed, tmp_path):
    case, run_dir = ROWS[name], tmp_path / "run"
    env = {"JAXMPI_AGREE_TIMEOUT_S": "12", "JAXMPI_EXCHANGE_TIMEOUT_S": "12"} if name == "stop" else None
    job = start(trainer(model, run_dir, *case.args, restarts=case.restarts), env)
    code = job.end()
    assert code == case.code, job.out[-6000:]
    assert re.search(case.pattern, job.out), job.out[-6000:]
    noticed_s = None
    if case.within_s is not None:
        noticed_s = job.when(case.ends) - job.when("injecting (?!corrupt|slow)")
        assert noticed_s <= case.within_s, job.out[-6000:]
    if case.resume:
        job = start(trainer(model, run_dir, "--resume", *case.args))
        assert job.end() == 0, job.out[-6000:]
    if case.code in (0, 75):
        assert losses(run_dir)[-1][:2] == losses(undisturbed)[-1][:2]
    if case.equal:
        assert_equal(run_dir, undisturbed)


# ---------------------------------------------------------------- faults of what is around the ranks


def resume_and_compare(model: Path, run_dir: Path, undisturbed: Path) -> None:
    job = start(trainer(model, run_dir, "--resume"))
    assert job.end() == 0, job.out[-4000:]
    assert_equal(run_dir, undisturbed)


def assert_equal(run_dir: Path, undisturbed: Path) -> None:
    """Losses of all steps, and the state of every worker at the end."""
    assert losses(run_dir) == losses(undisturbed)
    assert checkpoint_files(run_dir, STEPS) == checkpoint_files(undisturbed, STEPS)


SLOWLY = inject("slow:rank=1,seconds=0.1,times=0")
UNDER_WAY = r"^step (1[5-9]|2\d)\b"  # the trainer does not tell of every step


def test_sigterm_to_the_launcher(model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *SLOWLY))
    job.when(UNDER_WAY)
    os.kill(process_of(job, "jaxmpi.tools.cli"), signal.SIGTERM)
    assert job.end() == 75, job.out
    step = re.search(r"asked to leave: saved at step (\d+)", job.out)
    assert step is not None
    assert 15 <= int(step[1]) < STEPS
    resume_and_compare(model, tmp_path / "run", undisturbed)


def test_a_second_sigterm_ends_the_job_at_once(model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *inject("slow:rank=1,step=15,seconds=60")))
    job.when("injecting")
    for _ in range(2):
        os.kill(process_of(job, "jaxmpi.tools.cli"), signal.SIGTERM)
        time.sleep(2 * failures.ONE_REQUEST_S)
    begin = time.monotonic()
    assert job.end() not in (0, 75), job.out
    assert time.monotonic() - begin < DIES_S
    resume_and_compare(model, tmp_path / "run", undisturbed)


@pytest.mark.parametrize("whom", ["jaxmpi.tools.cli", "prterun"])
def test_kill_9_of_what_started_the_ranks(whom, model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *SLOWLY))
    job.when(UNDER_WAY)
    assert len(workers(job.mark)) > RANKS
    os.kill(process_of(job, whom), signal.SIGKILL)
    begin = time.monotonic()
    while survivors := left_behind(job.mark, 0):
        assert time.monotonic() - begin < DIES_S, [words_of(pid) for pid in survivors]
        time.sleep(0.1)
    assert job.end() != 0
    resume_and_compare(model, tmp_path / "run", undisturbed)


def same_examples(run_dir: Path, undisturbed: Path) -> None:
    """The same examples at every step, and losses that differ by the order of sums alone, over 40 steps."""
    ours, theirs = losses(run_dir), losses(undisturbed)
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    for (*_, got), (*_, expected) in zip(ours, theirs, strict=True):
        assert got == pytest.approx(expected, rel=1e-4)


def test_one_worker_fewer_after_a_death(model, undisturbed, tmp_path):
    elastic = ("--elastic", f"{RANKS - 1}:{RANKS}")
    job = start(trainer(model, tmp_path / "run", *inject("kill:rank=3,step=25"), restarts=1, extra=elastic))
    assert job.end() == 0, job.out[-6000:]
    assert f"with {RANKS - 1} workers" in job.out
    assert f"{RANKS - 1} workers x local batch {-(-64 // (RANKS - 1))} = effective batch 64" in job.out
    same_examples(tmp_path / "run", undisturbed)


def test_a_second_job_is_kept_out_of_a_run_directory(model, undisturbed, tmp_path):
    first = start(trainer(model, tmp_path / "run", *SLOWLY))
    first.when(UNDER_WAY)
    pid = process_of(first, "jaxmpi.train", 1)
    os.kill(pid, signal.SIGSTOP)  # so that it is there as long as it takes
    second = start(trainer(model, tmp_path / "run", "--resume"))
    assert second.end() == 2, second.out
    assert "is in use by process" in second.out
    os.kill(pid, signal.SIGCONT)
    assert first.end() == 0
    assert checkpoint_files(tmp_path / "run", STEPS) == checkpoint_files(undisturbed, STEPS)


@needs_hosts
def test_a_link_between_hosts_is_cut(model, undisturbed, tmp_path):
    line = trainer(model, tmp_path / "run", *inject("drop_link:rank=2,step=25"), restarts=2)
    job = start(line, {"JAXMPI_AGREE_TIMEOUT_S": "12"})
    assert job.end() == 0, job.out[-6000:]
    noticed_s = job.when("ended the job") - job.when("injecting")
    assert noticed_s < HANGS_S
    assert "restart 1 of 2" in job.out
    assert_equal(tmp_path / "run", undisturbed)


@needs_hosts
def test_a_host_that_is_gone_is_left_out(model, undisturbed, tmp_path):
    out = without_a_host(model, undisturbed, tmp_path / "run", end_host, stall_timeout_s=8)
    workers = RANKS - RANKS // HOSTS
    share = -(-64 // workers)  # more than the 64 / RANKS before: in slices, so that it takes no more memory
    assert f"{workers} workers x local batch {share} = effective batch 64" in out
    assert f"in slices of {-(-share // 2)}" in out


@needs_hosts
@pytest.mark.parametrize("stall_timeout_s", [8, 600])
def test_a_host_whose_cable_is_pulled_is_left_out(model, undisturbed, tmp_path, stall_timeout_s):
    without_a_host(model, undisturbed, tmp_path / "run", pull_cable, stall_timeout_s)


def without_a_host(model, undisturbed, run_dir, lose, stall_timeout_s) -> str:
    """A run that loses its third host on the way, to its end: what it said."""
    slots = RANKS // HOSTS
    hosts, workers = ",".join(f"node{i}:{slots}" for i in range(HOSTS)), RANKS - slots
    extra = ("--elastic", f"{slots}:{RANKS}", "--launcher-args", f"--host {hosts}")
    job = start(trainer(model, run_dir, *SLOWLY, "--stall-timeout-s", str(stall_timeout_s), restarts=1, extra=extra))
    job.when(UNDER_WAY)
    rank = 2 * slots  # the first of the third host
    lose(process_of(job, "jaxmpi.train", rank))
    lost = time.monotonic()
    assert job.end() == 0, job.out[-6000:]
    assert re.search(f"jaxmpi: (rank [{rank},]+ on node2|host node2) ended the job", job.out), job.out[-6000:]
    noticed_s = job.when("ended the job") - lost
    assert noticed_s < HANGS_S, job.out[-6000:]
    assert "jaxmpi: no answer from node2\n" in job.out, job.out[-9000:]
    assert f"with {workers} workers" in job.out
    same_examples(run_dir, undisturbed)
    return job.out


def pull_cable(pid: int) -> None:
    """Let no byte reach or leave the emulated host that a process is on; its connections do not end."""
    subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", "link", "set", "eth0", "down"], check=True)


def end_host(pid: int) -> None:
    """Kill all processes of the emulated host that a process is on."""
    host = os.readlink(f"/proc/{pid}/ns/net")
    for other in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{other}/ns/net") == host:
                os.kill(int(other), signal.SIGKILL)
