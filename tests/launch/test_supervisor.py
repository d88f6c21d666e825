"""Check who ended a job, and what the next start is given; with jobs that are shell lines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxmpi.launch import supervisor
from jaxmpi.launch.options import Options
from jaxmpi.launch.postmortem import LAUNCHER, Culprit, Exits, children_of, culprit, ranks_under
from jaxmpi.runtime import failures, job_folder
from jobs import Job, marked, start
from launching import ROOT, run, train, wait_until

RULE = "-" * 74 + "\n"
KILLED = RULE + "prterun noticed that process rank 2 with PID 24043 on node vm exited on\nsignal 9 (Killed).\n" + RULE
ENDINGS = {
    "killed": (KILLED, Culprit("2", "vm", "exited on signal 9 (Killed)")),
    "raised": (
        "jaxmpi: rank 1/3 on node07 (step 5):\nTraceback:\n  File x\n  line y\nKeyError: 'x'\n" + RULE + "MPI_ABORT\n",
        Culprit("1", "node07", ""),  # which has said so itself
    ),
    "two raised": (
        "jaxmpi: rank 3/4 on a (step 5):\nerror: first\njaxmpi: rank 1/4 on a (step 5):\nerror: second\n",
        Culprit("3", "a", ""),
    ),
    "late": (
        "jaxmpi: rank 0/4 on vm (step 5):\nerror: a barrier: rank 2 on a, rank 3 on b did not answer in time; all\n",
        Culprit("2", "a", "error: a barrier: rank 2 on a, rank 3 on b did not answer in time"),
    ),
    "waited for": (
        "jaxmpi: rank 0/4 on vm (step 5):\nerror: a bucket has waited 30 s for rank 2 on a, rank 3 on b; all\n",
        Culprit("2", "a", "error: a bucket has waited 30 s for rank 2 on a"),
    ),
    "no progress": (
        "jaxmpi: no progress for 60 s; late: rank 2 on vm, rank 3 on vm\n",
        Culprit("2", "vm", "no progress for 60 s"),
    ),
    "a host that is gone": (
        RULE + "A daemon failed to report back after being spawned. This could\nbe due to several\n\n"
        "  Local host:    node0\n  Remote host:   node2\n  Daemon exit status: 0\n" + RULE,
        Culprit("", "node2", "daemon failed to report back"),
    ),
    "srun": ("srun: error: node01: task 2: Killed\n", Culprit("2", "node01", "Killed")),
    "center": (
        "jaxmpi: rank 1/3 on vm (step 5):\nerror: rank 0 on a, which keeps the center, is gone; go on\n",
        Culprit("0", "a", "rank 0 on a, which keeps the center, is gone"),
    ),
    "abort": (RULE + 'process rank 1 with PID 7 on node a calling "abort"\n', Culprit("1", "a", 'calling "abort"')),
    "abort of a rank that notices another's end": (
        "[a:0] *** An error occurred in Socket closed\n"
        + RULE
        + 'process rank 1 with PID 7 on node a calling "abort"\n',
        None,
    ),
    "nobody": ("a warning\n", None),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_who_ended_a_job(case):
    text, expected = ENDINGS[case]
    assert culprit("something before\n" + text) == expected


def test_notices_of_what_a_sentence_says_are_left_out(tmp_path):
    notices = RULE + "MPI_ABORT was invoked on rank 1\n" + RULE + "NBC_Progress: an error 75 was found\n"
    with (tmp_path / "shown").open("w+") as shown:
        relay = supervisor.Relay(shown)
        job = os.dup(relay.end)
        relay.start()
        os.write(job, f"error: first\n{notices}{KILLED}last".encode())
        os.close(job)
        assert notices in relay.tail()  # for who ended the job
        assert (tmp_path / "shown").read_text() == f"error: first\n{KILLED}last"


@pytest.mark.parametrize(
    ("launcher_args", "dead", "workers", "hosts"),
    [
        ((), (), 7, None),
        (("--host", "a:4,b:4"), (), 8, "a:4,b:4"),
        (("--host", "a:4,b:4"), ("b",), 4, "a:4"),
        (("-H", "a:3,b:3,a:2"), ("a",), 3, "b:3"),
        (("--host", "a:4,b:4"), ("a", "b"), 0, ""),
        (("--hostfile", "hosts"), ("b",), 6, "a:4,c:2"),
        (("--hostfile=hosts",), ("a", "c"), 4, "b:4"),
    ],
)
def test_workers_that_are_left(launcher_args, dead, workers, hosts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    first = Options(8, "mpirun", launcher_args, (), 1, 2)
    slots = supervisor.hosts_of(first.launcher_args)
    (tmp_path / "hosts").write_text("# b is repaired\na max-slots=8 slots=4  # c is new\n\nb slots = 4\nc\nc\n")
    job = supervisor.with_those_left(first, first, slots, lambda host: host not in dead)
    assert job.workers == workers
    if hosts is not None:
        assert supervisor.hosts_of(job.launcher_args) == supervisor.hosts_of(("--host", hosts))
    # A host that is back takes its workers again.
    slots = supervisor.hosts_of(first.launcher_args)
    assert supervisor.with_those_left(job, first, slots, lambda host: True).workers == (8 if slots else 6)
    rigid = first._replace(min_workers=0)
    assert supervisor.with_those_left(rigid, rigid, {}, lambda host: False).workers == 8


SUPERVISED = """
import sys
from jaxmpi.launch import supervisor
from jaxmpi.launch.experiment_facts import ExperimentFacts
from jaxmpi.launch.options import Options
print("began", flush=True)
asked = Options(4, "mpirun", (), ("a.py", "--run-dir", sys.argv[1]), int(sys.argv[2]))
facts = ExperimentFacts(run_dir=sys.argv[1], from_start=len(sys.argv) > 4)
line = lambda job: ["sh", "-c", sys.argv[3], *job.train_args]
sys.exit(supervisor.supervise(asked, facts, line, lambda host: True))
"""


def supervised(
    folder: Path, script: str, restarts: int = 2, more: Sequence[str] = (), before: Sequence[str] = ()
) -> Job:
    """A supervisor whose launcher is a shell."""
    return start([*before, sys.executable, "-c", SUPERVISED, str(folder), str(restarts), script, *more])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("script", "code", "starts", "message"),
    [
        ("exit 75", 75, 1, ""),
        ("echo 'daemon failed to report back: Remote host: b'; exit 0", 1, 2, "no progress"),
        ("exit 5", 5, 2, "not started again: no progress since the last restart: still at step 0"),
    ],
)
def test_what_is_started_again(tmp_path, script, code, starts, message):
    job = supervised(tmp_path, f"echo $0 $@; {script}")
    assert job.end() == code, job.out
    assert job.out.count(f"a.py --run-dir {tmp_path}") == starts
    assert message in job.out.splitlines()[-1]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("more", "before", "script", "restart_args"),
    [
        ((), False, ":", []),  # it has died before it had a record
        ((), False, "touch record.jsonl", ["--resume", "--no-from-start"]),
        (["--from-start"], True, ":", []),  # the record is still that of the run before
        (["--from-start"], True, "cp record.jsonl x; mv x record.jsonl", ["--resume", "--no-from-start"]),
    ],
)
def test_a_restart_goes_on_with_the_run_of_its_first_start(more, before, script, restart_args, tmp_path):
    if before:
        (tmp_path / "record.jsonl").touch()
    job = supervised(tmp_path, f"echo $0 $@; cd {tmp_path}; {script}; exit 5", restarts=1, more=more)
    assert job.end() == 5
    first, second = (line.split() for line in job.out.splitlines() if line.startswith("a.py"))
    assert second == first + restart_args


# A job that is asked to leave says so, and saves itself if it has the time; a second time it ends.
LOOP = "while :; do sleep 0.05; done"
SAVES = (
    "trap 'echo asked; sleep 0.1; echo saved; exit 75' USR1; trap 'echo killed; exit 1' TERM HUP INT; echo ready $$; "
)
STAYS = SAVES.replace("sleep 0.1; echo saved; exit 75", ":")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("numbers", "code", "words"),
    [
        ([signal.SIGHUP, signal.SIGHUP], 75, "saved"),
        ([signal.SIGTERM, signal.SIGTERM], 75, "saved"),
        ([signal.SIGINT, signal.SIGINT], 130, "killed"),
        ([signal.SIGTERM, signal.SIGTERM], 143, "killed"),
    ],
)
def test_a_signal_to_the_whole_group_reaches_the_launcher_through_its_supervisor_alone(tmp_path, numbers, code, words):
    """Signals of Ctrl-C, `timeout` and a closed terminal, which mpirun gets as well, and kills ranks in 0.25 s.

    The second of `timeout`'s two signals comes at once and belongs to the first.
    """
    job = supervised(tmp_path, (SAVES if code == 75 else STAYS) + LOOP, restarts=0)
    job.when("^ready")
    os.killpg(job.process.pid, numbers[0])
    job.when("^asked")
    if code != 75:
        time.sleep(1.1 * failures.ONE_REQUEST_S)
    os.killpg(job.process.pid, numbers[1])
    assert job.end() == code, job.out
    assert words in job.out.splitlines(), job.out
    assert ("interrupted: the run saves itself" in job.out) == (signal.SIGINT in numbers)


def test_ctrl_z_stops_the_job_and_fg_lets_it_go_on(tmp_path):
    job = supervised(tmp_path, SAVES + LOOP)
    job.when("^ready")
    pids = job.process.pid, int(job.out.split()[-1])
    for number, states in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "SR")):
        job.signal(number)
        wait_until(lambda states=states: all(state_of(pid) in states for pid in pids))
    job.signal(signal.SIGTERM)
    assert job.end() == 75, job.out


def state_of(pid: int) -> str:
    """A process's state, as of ps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_request_that_comes_while_ranks_start_is_no_failure(tmp_path):
    job = supervised(tmp_path, "echo ready; exec sleep 100")  # as Python, before it minds signals
    job.when("^ready")
    job.signal(signal.SIGTERM)
    assert job.end() == failures.PREEMPTED, job.out
    assert "ended the job" not in job.out
    assert "asked to leave before the ranks could save" in job.out


@pytest.mark.e2e
def test_a_job_goes_on_where_its_terminal_goes_and_nohup_says_so(tmp_path):
    job = supervised(tmp_path, STAYS + LOOP, restarts=0, before=["nohup"])
    job.when("^ready")
    job.signal(signal.SIGHUP)
    time.sleep(0.5)
    assert "asked" not in job.out
    assert job.process.poll() is None
    for _ in range(2):
        job.signal(signal.SIGTERM)
        time.sleep(1.1 * failures.ONE_REQUEST_S)
    assert job.end() != 0


def test_survivors_are_not_killed_where_nobody_knows_whether_mpi_runs(tmp_path, monkeypatch):
    """Without a folder for marks, as with one of the user's own for segments."""
    monkeypatch.setattr(supervisor, "ENDS_S", 1.0)
    rank = "import os, sys, time; time.sleep(0.5 if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else 4)"
    start = f'for r in 0 1; do OMPI_COMM_WORLD_RANK=$r {sys.executable} -c "{rank}" & done; wait'
    job = subprocess.Popen(["/bin/sh", "-c", start])
    began, exits = time.monotonic(), Exits({})
    assert supervisor.wait_for_end(job, tmp_path / "none", outlives_ranks=True, local_ranks=2, exits=exits) == 0
    assert time.monotonic() - began > 3.5
    first = exits.culprit()
    assert first is not None
    assert first.rank == "1"


def test_nobody_is_named_if_the_launcher_ends_first():
    launcher, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    exits = Exits({LAUNCHER: launcher.pid, 0: rank.pid})
    for process in (launcher, rank):
        process.kill()
        process.wait()
        exits.wait(5)
    assert exits.culprit() is None


def test_shared_memory_of_a_job_goes_with_it_or_with_the_next_job(tmp_path):
    folder = f"echo folder ${job_folder.SEGMENTS}; touch ${job_folder.SEGMENTS}/segment"
    job = supervised(tmp_path, f"{folder}; kill -9 $$", restarts=0)
    assert job.end() != 0
    assert not Path(re.findall(r"folder (\S+)", job.out)[0]).exists()
    job = supervised(tmp_path, f"{folder}; exec sleep 100", restarts=0)
    job.when("^folder")
    job_dir = Path(job.out.split()[-1])
    assert job_dir.parent == Path("/dev/shm")
    wait_until((job_dir / "segment").exists)
    job_folder.remove_stale_folders(job_dir.parent)  # as another job does when it begins
    assert (job_dir / "segment").exists()
    job.signal(signal.SIGKILL)
    job.process.wait(10)
    job_folder.remove_stale_folders(job_dir.parent)
    assert not job_dir.exists()
    job.end()  # and nothing goes on without its supervisor


# Rank 0 starts MPI once rank 1 is gone: the launcher ends a job itself that a rank leaves meanwhile.
LEAVES = """
import os, pathlib, time
gone, rank = pathlib.Path(__file__).with_name("gone"), os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "1":
    gone.touch()
    {end}
while rank == "0" and not gone.exists():
    time.sleep(0.05)
time.sleep(0.5 * (rank == "0"))
"""
KILLS_ITSELF = "os.kill(os.getpid(), 9)"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("end", "options"),
    [
        ("os._exit(0)", ()),
        (KILLS_ITSELF, ("--on-rank-loss", "shrink")),
    ],
)
def test_a_job_that_a_rank_leaves_before_mpi_starts_is_ended(end, options, tmp_path):
    """Open MPI's launcher would wait for it for ever."""
    text = (ROOT / "experiments" / "digits.py").read_text()
    (tmp_path / "leaves.py").write_text(LEAVES.format(end=end) + text)
    ended = run(
        [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "2", str(tmp_path / "leaves.py"), *options],
        timeout_s=90,
        env={"JAXMPI_LAUNCHER_TIMEOUT_S": "3"},
    )
    assert not ended.timed_out, ended.out
    assert ended.code != 0
    assert "which has not ended the job for 3 s after rank [1] had left it" in ended.out


@pytest.mark.e2e
def test_a_start_of_mpi_has_a_limit(tmp_path):
    text = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    time.sleep(300)\n"
    (tmp_path / "late.py").write_text(text + (ROOT / "experiments" / "digits.py").read_text())
    ended = train(2, str(tmp_path / "late.py"), timeout_s=90, env={"JAXMPI_START_TIMEOUT_S": "2"})
    assert not ended.timed_out, ended.out
    assert ended.code != 0
    assert "start_mpi" in ended.out  # the stack


@pytest.mark.e2e
def test_ranks_that_start_end_with_the_supervisor_though_the_launcher_hangs(tmp_path):
    text = "import os, pathlib, time\npathlib.Path(__file__).with_name(str(os.getpid())).touch()\ntime.sleep(300)\n"
    (tmp_path / "late.py").write_text(text)
    line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "2", str(tmp_path / "late.py")]
    job = start(line)
    wait_until(lambda: len([*tmp_path.glob("[0-9]*")]) == 2, timeout_s=60)
    [launcher] = [pid for pid in children_of(job.process.pid) if ranks_under(pid)]
    os.kill(launcher, signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    wait_until(lambda: set(marked(job.mark)) <= {launcher}, timeout_s=10)
    job.drop()
