"""Check what files of strangers, the network and logs can never lead to: docs/reliability.md."""

import ast
import contextlib
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import ROOT, kill_session, mpirun_line, small_disk, train

PACKAGE = ROOT / "jaxmpi"
DIGITS = str(ROOT / "experiments" / "digits.py")
# Files that read pickles, or have them read: messages of other processes of the same job.
MESSAGES = {
    *("data/loader_worker.py", "data/memory_source.py", "functions/transport.py", "rules/asynchronous/center.py"),
    *("functions/program.py", "trainer/api.py"),
}
UNSAFE = {"marshal", "shelve", "dill", "cloudpickle", "joblib"}


def calls(tree: ast.AST) -> set[str]:
    """Return what is called, as it is written, with `allow_pickle` if that is given."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [f"allow_pickle={ast.unparse(k.value)}" for k in node.keywords if k.arg == "allow_pickle"]
            found.add(" ".join([ast.unparse(node.func), *given]))
    return found


def test_no_file_is_unpickled():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        name, tree = str(file.relative_to(PACKAGE)), ast.parse(file.read_text())
        called = calls(tree)
        imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not imports & UNSAFE or name in MESSAGES, name
        loads = {"pickle.load", "pickle.Unpickler", "cloudpickle.load", "eval", "exec", "np.load", "torch.load"}
        assert not called & loads, name
        assert not {call for call in called if call.endswith("allow_pickle=True")}, name
        assert "pickle.loads" not in called or name in MESSAGES, name


# ---------------------------------------------------------------- the network and logs


def listening(pids: list[int]) -> int:
    """Sockets of processes that listen on a TCP port."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(handle)))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and row[9] in inodes for row in rows)


def ranks_of(leader: int) -> list[int]:
    """The ranks of a job that leads its session."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(entry)) == leader and "python" in os.readlink(f"/proc/{entry}/exe"):
                found += [int(entry)] * (b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{entry}/environ").read_bytes())
        except OSError:
            continue
    return found


def count_ports(line: list[str], log: Path, env: dict[str, str]) -> int:
    """How many ports a job of two ranks listens on once it has said `ready` or trains; it is ended then."""
    with log.open("w") as out:
        job = subprocess.Popen(
            [*mpirun_line(2), sys.executable, *line], stdout=out, stderr=out, cwd=ROOT, env=os.environ | env,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while not re.search("ready.*ready|^step ", log.read_text(), re.S | re.M):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        ranks = ranks_of(job.pid)
        assert len(ranks) == 2
        return listening(ranks)
    finally:
        kill_session(job.pid)
        job.wait(20)


BARE = "from mpi4py import MPI; MPI.COMM_WORLD.barrier(); print('ready', flush=True); import time; time.sleep(300)"


@pytest.mark.slow
def test_nothing_listens_but_mpi_and_no_variable_of_the_environment_is_logged(tmp_path):
    secret, run_dir = secrets.token_hex(16), tmp_path / "run"
    env = {"PYTHONPATH": str(ROOT), "WANDB_API_KEY": secret, "MY_PASSWORD": secret}
    words = ["-m", "jaxmpi.train", DIGITS, "--run-dir", str(run_dir), "--train-for", "100000st"]
    words += ["--checkpoint-every", "5st", "--log-every", "5"]
    assert count_ports(words, tmp_path / "train.txt", env) == count_ports(["-c", BARE], tmp_path / "bare.txt", env)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.json", "record.jsonl"} <= {path.name for path in files}
    for path in [*files, tmp_path / "train.txt"]:
        assert secret.encode() not in path.read_bytes(), path


# ---------------------------------------------------------------- the disk


@pytest.mark.slow
def test_a_disk_without_room_for_the_checkpoints_kept_is_refused_before_the_first_step(tmp_path):
    with small_disk(tmp_path / "small", "1400k") as place:
        ended = train(1, DIGITS, "--run-dir", str(place / "run"))
        saves_once = train(1, DIGITS, "--train-for", "2st", "--run-dir", str(place / "short"))
    assert saves_once.code == 0, saves_once.out
    assert ended.code == 2, ended.out
    assert re.search(r"checkpoints: \d+ MB are free, 4 checkpoints that .* take \d+ MB", ended.out), ended.out
    assert "step 1/" not in ended.out
