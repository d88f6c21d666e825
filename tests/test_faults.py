"""Every fault on four ranks, for real: what the job does, who is named, and that nothing is lost or left behind.

uv run pytest -m faults                            the suite
JAXMPI_WRITE_DOCS=1 uv run pytest -m faults        the same, and the table of docs/reliability.md from it
JAXMPI_FAULTS_RANKS=8 JAXMPI_FAULTS_HOSTS=4 ...    on more ranks, on emulated hosts (scripts/cluster.py)
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from launching import LAUNCHER_PREFIXES, ROOT, fresh, kill_session, leaked, shared_memory

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
RANKS, STEPS = int(os.environ.get("JAXMPI_FAULTS_RANKS", "4")), 40
HOSTS = int(os.environ.get("JAXMPI_FAULTS_HOSTS", "1"))
DIES_S, HANGS_S = 10.0, 30.0  # bars: from the fault to the end of the job
JOB_S = 150  # no job may take longer, however busy the machine is
PAGE = ROOT / "docs" / "reliability.md"
MODEL = """
import jax
import jax.numpy as jnp
from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim
from jaxmpi.model import Model

def init(key, image):
    params = {"w": 0.01 * jax.random.normal(key, (64, 10)), "b": jnp.zeros(10)}
    return params, {"mean": jnp.zeros(64)}

def apply(params, model_state, image, key, train):
    x = image.reshape(len(image), -1)
    return x @ params["w"] + params["b"], {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0)}

experiment = Experiment(
    model=Model("softmax", init, apply, input_shape=(8, 8, 1), classes=10),
    data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.02, lr_scaling="none"), exchange=ExchangeConfig("ring32"),
    effective_batch=64, train_for="40st", checkpoint_every="10st", eval_every="20st", log_every=1,
)
"""


# ---------------------------------------------------------------- jobs whose lines have times


@dataclass
class Job:
    """A running command and what it has printed, each line with the time at which it came."""

    process: subprocess.Popen
    lines: list[tuple[float, str]]
    reader: threading.Thread

    @property
    def out(self) -> str:
        return "".join(line for _, line in self.lines)

    def when(self, pattern: str, timeout_s: float = JOB_S) -> float:
        """The time of the first line that matches, waited for."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = next((at for at, line in list(self.lines) if re.search(pattern, line)), None)
            if found is not None:
                return found
            alive = self.reader.is_alive()
            assert alive, f"no line with {pattern!r}:\n{self.out[-4000:]}"
            assert time.monotonic() < deadline, f"no line with {pattern!r} in time:\n{self.out[-4000:]}"
            time.sleep(0.02)

    def end(self) -> int:
        """The exit code, once all is printed; a job that hangs is killed and fails the test."""
        try:
            code = self.process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.reader.join(10)
            pytest.fail(f"the job hung:\n{self.out[-4000:]}")
        self.reader.join(10)
        return code


def start(line: list[str], env: dict[str, str] | None = None) -> Job:
    """A command in a session of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    process = subprocess.Popen(
        fresh(line),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | (env or {}),
        start_new_session=True,
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=read, args=(process.stdout, lines), daemon=True)
    reader.start()
    return Job(process, lines, reader)


def read(stream: IO[str], lines: list[tuple[float, str]]) -> None:
    """Lines with the time at which they came, to the stream's end."""
    with stream:
        for line in stream:
            lines.append((time.monotonic(), line))


def trainer(experiment: Path, run_dir: Path, *args: str, restarts: int = 0, ranks: int = RANKS, extra=()) -> list[str]:
    """`jaxmpi train -n 4 ...`."""
    head = [sys.executable, "-m", "jaxmpi.cli", "train", "-n", str(ranks), "--restarts", str(restarts), *extra]
    return [*(cluster(HOSTS) if HOSTS > 1 else []), *head, str(experiment), "--run-dir", str(run_dir), *args]


def cluster(hosts: int) -> list[str]:
    """What a line begins with to run on emulated hosts."""
    slots = ("--slots", str(-(-RANKS // hosts)), "--rate", "1gbit")
    return [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--hosts", str(hosts), *slots, "--"]


needs_its_launcher = pytest.mark.skipif(HOSTS > 1, reason="the process started is the cluster's")


def left_behind(folder: Path) -> list[str]:
    """Processes that still work for a run directory, a few seconds after its job has ended."""
    deadline = time.monotonic() + 5
    while (found := [pid for pid in os.listdir("/proc") if pid.isdigit() and works_for(pid, folder)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return found


def works_for(pid: str, folder: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return os.fsencode(folder) in words


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


def state_files(run_dir: Path) -> dict[str, bytes]:
    """What every worker has at the end."""
    last = run_dir / "checkpoints" / f"step_{STEPS:08d}"
    return {file.name: file.read_bytes() for file in last.glob("*.bin")}


def losses(run_dir: Path) -> list[tuple]:
    """(step, examples, loss) of every step: each once, in order, where no example is lost or repeated."""
    lines = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    return [(line["step"], line["examples"], line["loss"]) for line in lines if line["kind"] == "train"]


# ---------------------------------------------------------------- the table


class Row(NamedTuple):
    """A fault, and what comes of it."""

    fault: str  # for the page
    args: tuple[str, ...]  # of the trainer
    outcome: str  # for the page
    said: str = ""  # a pattern that the job prints
    restarts: int = 2
    code: int = 0
    equal: bool = True  # whether the final state is bitwise that of an undisturbed run
    ends: str = r"ended the job|is not finite at step|workers differ"  # what tells that the fault is noticed
    within_s: float | None = DIES_S  # from the fault to `ends`
    resume: bool = False  # whether the test goes on by hand after the job


def inject(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--inject", text))


ROLLBACK = ("--recover", "rollback")
UNTIL_SAVED = "slow:rank=2,step=36,seconds=3"  # steps are quicker than disks here
FAST = ("--compare-every", "5st")
ROWS = {
    "kill_0": Row("`kill` rank 0", inject("kill:rank=0,step=25"), "restart", "rank 0 on .*signal 9"),
    "kill_2": Row("`kill` rank 2", inject("kill:rank=2,step=25"), "restart", "rank 2 on .*signal 9"),
    "kill_first_step": Row("`kill` rank 3, first step", inject("kill:rank=3"), "restart from the start", "from step 0"),
    "kill_last_step": Row("`kill` rank 1, last step", inject("kill:rank=1,step=40"), "restart", "rank 1 on .*signal 9"),
    "kill_two": Row(
        "`kill` ranks 1 and 2 at once", inject("kill:rank=1,step=25", "kill:rank=2,step=25"), "restart", "signal 9"
    ),
    "kill_all": Row("`kill` all ranks", inject("kill:rank=all,step=25"), "restart", "signal 9"),
    "kill_again": Row(
        "`kill` rank 2, again after the restart",
        inject("kill:rank=2,step=25", "kill:rank=1,step=35"),
        "two restarts",
        "restart 2 of 2",
    ),
    "kill_0_saving": Row(
        "`kill` rank 0 while it saves", inject("kill:rank=0,step=20,at=save"), "restart", "rank 0 on .*signal 9"
    ),
    "kill_3_saving": Row(
        "`kill` rank 3 while it saves", inject("kill:rank=3,step=20,at=save"), "restart", "rank 3 on .*signal 9"
    ),
    "kill_always": Row(
        "`kill` rank 2 at every start",
        inject("kill:rank=2,step=5,times=0"),
        "stops after one restart without progress",
        "not started again: no progress since the last restart",
        restarts=5,
        code=137,
        equal=False,
    ),
    "raise": Row(
        "`raise` on rank 1", inject("raise:rank=1,step=25"), "restart", "rank 1 on .*ended.*\n(.*\n)*.*Injected"
    ),
    "raise_in_thread": Row(
        "`raise` in a thread of rank 2",
        inject("raise:rank=2,step=25,thread=1"),
        "restart",
        "rank 2 on .*ended.*\n(.*\n)*.*Injected",
    ),
    "raise_saving": Row(
        "`raise` on rank 3 while it saves",
        inject("raise:rank=3,step=20,at=save"),
        "restart",
        "rank 3 on .*ended.*\n(.*\n)*.*Injected",
    ),
    "exit_0": Row(
        "`exit` of rank 1 with code 0", inject("exit:rank=1,step=25,code=0"), "restart", "rank 1 on .*left early"
    ),
    "exit_3": Row(
        "`exit` of rank 1 with code 3", inject("exit:rank=1,step=25"), "restart", "rank 1 on .*ended the job"
    ),
    "exit_hard": Row(
        "`exit` of rank 2 without Python's end", inject("exit:rank=2,step=25,hard=1"), "restart", "rank 2 ended the job"
    ),
    "stop": Row(
        "`stop` rank 2",
        inject("stop:rank=2,step=25"),
        "restart",
        r"rank 2 ended the job.*\[2\] did not",
        within_s=HANGS_S,
    ),
    "stop_watched": Row(
        "`stop` rank 2, `--stall-s 8`",
        (*inject("stop:rank=2,step=25"), "--stall-s", "8"),
        "restart",
        "rank 2 on .*ended the job: no progress for",
        within_s=HANGS_S,
    ),
    "slow": Row(
        "`slow` rank 1, 0.05 s a step",
        inject("slow:rank=1,seconds=0.05,times=0"),
        "the others wait",
        restarts=0,
        within_s=None,
    ),
    "nan_stop": Row(
        "`nan` on rank 2",
        inject("nan:rank=2,step=25"),
        "all stop",
        "gradient of [wb] of worker 2 is not finite at step 25; last good",
        restarts=0,
        code=1,
        equal=False,
    ),
    "nan_skip": Row(
        "`nan` on rank 2, `--recover skip`",
        (*inject("nan:rank=2,step=25"), "--recover", "skip"),
        "step 25 changes nothing, on all",
        "of worker 2 is not finite at step 25: skipped",
        restarts=0,
        equal=False,
    ),
    "nan_rollback": Row(
        "`nan` on rank 2, `--recover rollback`",
        (*inject("nan:rank=2,step=25"), *ROLLBACK),
        "back to the checkpoint, within the job",
        "of worker 2 is not finite at step 25: back to step 20",
        restarts=0,
    ),
    "nan_twice": Row(
        "`nan` on rank 2 at step 25 always, `--recover rollback`",
        (*inject("nan:rank=2,step=25,times=2"), *ROLLBACK, "--checkpoint-every", "24st"),
        "back twice, then step 25 is left out",
        "(.*back to step 24\n(.*\n)*){2}",
        restarts=0,
        equal=False,
    ),
    "bitflip": Row(
        "`bitflip` on rank 3",
        (*inject("bitflip:rank=3,step=22"), *FAST),
        "found at the next comparison; all stop",
        "after step 25: worker 3 differs from the other \\d in",
        restarts=0,
        code=1,
        equal=False,
    ),
    "bitflip_restart": Row(
        "`bitflip` on rank 0, `--restarts`",
        (*inject("bitflip:rank=0,step=22"), *FAST),
        "restart from before it",
        "worker 0 differs from the other \\d in",
    ),
    "bitflip_rollback": Row(
        "`bitflip` on rank 3, `--recover rollback`",
        (*inject("bitflip:rank=3,step=22"), *FAST, *ROLLBACK),
        "back to the checkpoint, within the job",
        "worker 3 differs from the other \\d in .*: back to step 20",
        restarts=0,
    ),
    "sigterm": Row(
        "`sigterm` to rank 2 alone",
        inject("sigterm:rank=2,step=25"),
        "all save at one step and leave with 75; resumed by hand",
        "asked to leave: saved at step 2[678]",
        code=75,
        ends="asked to leave",
        resume=True,
    ),
    "disk_full": Row(
        "`disk_full` on rank 2",
        inject("disk_full:rank=2,step=20"),
        "named at that checkpoint; restart",
        "rank 2 on .*checkpoint of step 20 cannot be written: .*No space left",
    ),
    "corrupt_checkpoint": Row(
        "`corrupt_checkpoint` step 30, then `kill`",
        inject("corrupt_checkpoint:step=30", UNTIL_SAVED, "kill:rank=1,step=38"),
        "named with its leaf; restart from the one before",
        "passed over: .*step_00000030/common.bin: .*damaged, its checksum.*\n(.*\n)*.*resumed at step 20",
    ),
    "corrupt_manifest": Row(
        "`corrupt_checkpoint` of its manifest, then `kill`",
        inject("corrupt_checkpoint:step=30,file=manifest.json", UNTIL_SAVED, "kill:rank=1,step=38"),
        "named; restart from the one before",
        "resumed at step 20",
    ),
}
MEASURED: dict[str, tuple] = {}


@pytest.mark.parametrize("name", ROWS)
def test_fault(name, model, undisturbed, tmp_path):
    case, run_dir, before = ROWS[name], tmp_path / "run", shared_memory()
    env = {"JAXMPI_AGREE_TIMEOUT_S": "12"} if name == "stop" else None
    job = start(trainer(model, run_dir, *case.args, restarts=case.restarts), env)
    code = job.end()
    assert code == case.code, job.out[-6000:]
    assert re.search(case.said, job.out), job.out[-6000:]
    noticed_s = None
    if case.within_s is not None:
        noticed_s = job.when(case.ends) - job.when("injecting (?!corrupt|slow)")
        assert noticed_s <= case.within_s, job.out[-6000:]
    if case.resume:
        job = start(trainer(model, run_dir, "--resume", *case.args))
        assert job.end() == 0, job.out[-6000:]
    assert not left_behind(run_dir)
    assert not leaked(before)
    if case.code in (0, 75):
        assert losses(run_dir)[-1][:2] == losses(undisturbed)[-1][:2]
    if case.equal:
        assert losses(run_dir) == losses(undisturbed)
        assert state_files(run_dir) == state_files(undisturbed)
    MEASURED[name] = (case.fault, case.outcome, noticed_s, case.equal)


# ---------------------------------------------------------------- faults of what is around the ranks


def note(name: str, fault: str, outcome: str, noticed_s: float | None, equal: bool) -> None:
    MEASURED[name] = (fault, outcome, noticed_s, equal)


def go_on_and_compare(model: Path, run_dir: Path, undisturbed: Path) -> None:
    job = start(trainer(model, run_dir, "--resume"))
    assert job.end() == 0, job.out[-4000:]
    assert losses(run_dir) == losses(undisturbed)
    assert state_files(run_dir) == state_files(undisturbed)


SLOWLY = inject("slow:rank=1,seconds=0.1,times=0")


@needs_its_launcher
def test_sigterm_to_the_launcher(model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *SLOWLY))
    job.when("^step 15/")
    job.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert job.end() == 75, job.out
    step = re.search(r"asked to leave: saved at step (\d+)", job.out)
    assert step is not None
    assert 15 <= int(step[1]) < STEPS
    took_s = job.when("asked to leave") - asked
    assert not left_behind(tmp_path / "run")
    go_on_and_compare(model, tmp_path / "run", undisturbed)
    note("launcher_sigterm", "SIGTERM to `jaxmpi train`", "all save at one step, exit code 75; resumed", took_s, True)


@needs_its_launcher
def test_a_second_sigterm_ends_the_job_at_once(model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *inject("slow:rank=1,step=15,seconds=60")))
    job.when("injecting")
    for _ in range(2):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    begin = time.monotonic()
    assert job.end() not in (0, 75), job.out
    took_s = time.monotonic() - begin
    assert took_s < DIES_S
    assert not left_behind(tmp_path / "run")
    go_on_and_compare(model, tmp_path / "run", undisturbed)
    note("second_sigterm", "SIGTERM twice", "ends at once, unsaved; resumed", took_s, True)


@needs_its_launcher
@pytest.mark.parametrize("whom", ["jaxmpi train", "mpirun"])
def test_kill_9_of_what_started_the_ranks(whom, model, undisturbed, tmp_path):
    job = start(trainer(model, tmp_path / "run", *SLOWLY))
    job.when("^step 15/")
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(job.process.pid if whom == "jaxmpi train" else int(children[0]), signal.SIGKILL)
    begin = time.monotonic()
    assert job.end() != 0
    while left_behind(tmp_path / "run"):
        assert time.monotonic() - begin < DIES_S, "orphans"
    took_s = time.monotonic() - begin
    go_on_and_compare(model, tmp_path / "run", undisturbed)
    note(f"kill_{whom}", f"SIGKILL to `{whom}`", "no rank outlives it; resumed", took_s, True)


def test_one_worker_fewer_after_a_death(model, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    line = trainer(
        model, run_dir, *inject("kill:rank=3,step=25"), restarts=1, extra=("--elastic", f"{RANKS - 1}:{RANKS}")
    )
    job = start(line)
    assert job.end() == 0, job.out[-6000:]
    assert f"with {RANKS - 1} workers" in job.out
    assert f"{RANKS - 1} workers x local batch {-(-64 // (RANKS - 1))} = effective batch 64" in job.out
    ours, theirs = losses(run_dir), losses(undisturbed)
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]  # the same examples at every step
    for (*_, got), (*_, expected) in zip(ours, theirs, strict=True):
        assert got == pytest.approx(expected, rel=1e-4)  # sums in another order, over 15 steps
    took_s = job.when("ended the job") - job.when("injecting")
    note("elastic", "`kill` rank 3, `--elastic 3:4`", "goes on with 3 workers, the same examples a step", took_s, False)


def test_a_second_job_is_kept_out_of_a_run_directory(model, undisturbed, tmp_path):
    first = start(trainer(model, tmp_path / "run", *inject("slow:rank=1,step=12,seconds=30")))
    first.when("injecting")
    second = start(trainer(model, tmp_path / "run", "--resume"))
    assert second.end() == 2, second.out
    assert "is in use by process" in second.out
    assert first.end() == 0
    assert state_files(tmp_path / "run") == state_files(undisturbed)
    note("two_jobs", "a second job in the run directory", "refused, the first is not disturbed", None, True)


def test_a_link_between_hosts_is_cut(model, tmp_path):
    tried = subprocess.run([*cluster(4), "true"], capture_output=True, text=True, timeout=60)
    if tried.returncode == 77:
        pytest.skip(tried.stdout + tried.stderr)
    line = trainer(model, tmp_path / "run", *inject("drop_link:rank=2,step=25"), restarts=2)
    job = start(line if HOSTS > 1 else [*cluster(4), *line], {"JAXMPI_AGREE_TIMEOUT_S": "12"})
    assert job.end() == 0, job.out[-6000:]
    noticed_s = job.when("ended the job") - job.when("injecting")
    assert noticed_s < HANGS_S
    assert "restart 1 of 2" in job.out
    steps = [step for step, *_ in losses(tmp_path / "run")]
    assert steps == [*range(1, STEPS + 1)]
    note("drop_link", "`drop_link` of rank 2, 4 emulated hosts", "restart", noticed_s, False)


def test_a_host_that_is_gone_is_left_out(model, undisturbed, tmp_path):
    run_dir, hosts = tmp_path / "run", ",".join(f"node{i}:1" for i in range(4))
    tried = subprocess.run([*cluster(4), "true"], capture_output=True, text=True, timeout=60)
    if tried.returncode == 77 or HOSTS > 1:
        pytest.skip(tried.stdout + tried.stderr)
    extra = ("--elastic", "3:4", "--launcher-args", f"--host {hosts}")
    job = start([*cluster(4), *trainer(model, run_dir, *SLOWLY, restarts=1, ranks=4, extra=extra)])
    job.when("^step 15/")
    for pid in neighbours(rank_process(run_dir, 2)):
        os.kill(pid, signal.SIGKILL)
    gone = time.monotonic()
    assert job.end() == 0, job.out[-6000:]
    noticed_s = job.when("no answer from node2") - gone
    assert "with 3 workers" in job.out
    assert [one[:2] for one in losses(run_dir)] == [one[:2] for one in losses(undisturbed)]
    note("host", "a host is gone, `--elastic 3:4`", "goes on with the 3 hosts that are left", noticed_s, False)


def rank_process(run_dir: Path, rank: int) -> int:
    """The process of a rank."""
    mark = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if works_for(pid, run_dir) and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
        except OSError:
            continue
    pytest.fail(f"no rank {rank}")


def neighbours(pid: int) -> list[int]:
    """All processes of an emulated host: those with its network."""
    host, found = os.readlink(f"/proc/{pid}/ns/net"), []
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += [int(other)] if os.readlink(f"/proc/{other}/ns/net") == host else []
        except OSError:
            continue
    return found


# ---------------------------------------------------------------- the page


HEAD = "| fault | what comes of it | noticed after, s | final state bitwise as undisturbed |\n|---|---|---|---|\n"


@pytest.fixture(scope="session", autouse=True)
def page() -> Iterator[None]:
    """What was measured; its rows of the page's table are replaced where asked for."""
    yield
    rows = {fault: row(fault, *rest) for fault, *rest in MEASURED.values()}
    print("\n" + HEAD + "".join(rows.values()))
    if os.environ.get("JAXMPI_WRITE_DOCS"):
        start, _, rest = PAGE.read_text().partition("<!-- faults -->\n")
        table, _, end = rest.partition("<!-- end of faults -->")
        before = {line.split(" | ")[0].removeprefix("| "): line + "\n" for line in table.splitlines()[2:]}
        order = [fault.fault for fault in ROWS.values()]
        both = {fault: (before | rows)[fault] for fault in [*order, *before, *rows] if fault in before | rows}
        PAGE.write_text(f"{start}<!-- faults -->\n{HEAD}{''.join(both.values())}<!-- end of faults -->{end}")


def row(fault: str, outcome: str, noticed_s: float | None, equal: bool) -> str:
    """A line of the table."""
    shown = "" if noticed_s is None else f"{noticed_s:.1f}"
    return f"| {fault} | {outcome} | {shown} | {'yes' if equal else 'does not apply'} |\n"
