"""Command lines, for every launcher that a PATH may hold."""

import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.core.errors import UsageError
from jaxmpi.launch import command
from jaxmpi.launch.options import Options, parse
from jobs import start
from launching import run
from runs import TINY, saved_leaves, steps_saved

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11",
    "prte": "prterun (PRTE) 3.0.0",
    "mpich": "HYDRA build details:\n    Version: 4.2.0",
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Launchers on PATH, and none beside this Python."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))

    def add(name: str, prints: str = "") -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {shlex.quote(prints)}\n")
        file.chmod(0o755)
        return str(file)

    return add


def line(text: str, *, cores: int = 8, is_root: bool = False, environ=None) -> list[str]:
    return command.command(parse(shlex.split(text), environ or {}), cores=cores, is_root=is_root)


PARSED = [
    ("a.py --n 3", Options(1, "mpirun", (), ("a.py", "--n", "3"))),
    ("-n 4 --comm xla a.py --seed 1", Options(4, "mpirun", (), ("a.py", "--comm", "xla", "--seed", "1"))),
    (
        "-n 8 --on-rank-loss shrink a.py --seed 1",
        Options(8, "mpirun", (), ("a.py", "--on-rank-loss", "shrink", "--seed", "1")),
    ),
    ("--resume --seed 1 -n 2 a.py", Options(2, "mpirun", (), ("a.py", "--resume", "--seed", "1"))),
    ("-n8 a.py", Options(8, "mpirun", (), ("a.py",))),
    ("--launcher srun -n 2 a.py", Options(2, "srun", (), ("a.py",))),
    ("--elastic 4:8 --restarts 3 a.py", Options(8, "mpirun", (), ("a.py",), 3, 4)),
    ("-n 6 --elastic 4:8 --restarts 3 a.py", Options(6, "mpirun", (), ("a.py",), 3, 4)),
    (
        "--launcher-args '--hostfile \"my hosts\"' -n 2 a.py",
        Options(2, "mpirun", ("--hostfile", "my hosts"), ("a.py",)),
    ),
]


@pytest.mark.parametrize(("text", "expected"), PARSED)
def test_options_end_at_the_experiment(text, expected):
    assert parse(shlex.split(text), {}) == expected


@pytest.mark.parametrize(("version", "can"), [("5.0.11", True), ("6.1", True), ("4.1.6", False)])
def test_an_mpi_that_outlives_ranks_is_told_to(version, can, path):
    path("mpirun", f"mpirun (Open MPI) {version}")
    options = parse(["-n", "2", "a.py"], {})
    for outlives in (True, False):
        words = command.command(options, cores=8, is_root=False, outlives_ranks=outlives)
        assert ("--with-ft" in words) is (outlives and can)


@pytest.mark.parametrize("elsewhere", [["--launcher", "srun"], ["--launcher-args", "--hostfile hosts"]])
def test_a_file_that_only_other_hosts_may_have_is_left_to_them(elsewhere, monkeypatch):
    launched = []
    monkeypatch.setattr(command, "launch", launched.append)
    command.main(["-n", "2", *elsewhere, "gone.py"])
    assert launched[0].train_args == ("gone.py",)
    with pytest.raises(UsageError, match="no experiment file"):
        command.main(["-n", "2", "gone.py"])


@pytest.mark.parametrize(("nodes", "launcher"), [("1", "mpirun"), ("2", "srun"), ("128", "srun")])
def test_inside_a_slurm_job_of_several_hosts_srun_is_the_default(nodes, launcher):
    assert parse(["-n", "2", "a.py"], {"SLURM_JOB_NUM_NODES": nodes}).launcher == launcher


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-n", "-n needs a value"),
        ("--restart 3 -n 2 a.py", "got --restart; did you mean '--restarts'"),
        ("--rule easgd a.py", "got --rule; did you mean '--rule.name'"),
        ("-n 2 --optim.lrr 3 a.py", "got --optim.lrr; did you mean '--optim.lr"),
        ("-n 0 a.py", "got '0'"),
        ("a.py -n 8", "-n stands before the experiment"),
        ("a.py --restarts=2", "--restarts stands before the experiment"),
        ("-n ² a.py", "-n: got '²'"),
        ("--restarts " + "9" * 5000 + " a.py", "--restarts: got '9"),
        ("--elastic 8:4 --restarts 1 a.py", "expected MIN:MAX workers"),
        ("--elastic 4:8 a.py", "give --restarts, too"),
        ("-n 9 --elastic 4:8 --restarts 1 a.py", "-n: got 9; expected 4 to 8"),
    ],
)
def test_wrong_options(text, message):
    with pytest.raises(UsageError, match=message):
        parse(shlex.split(text), {})


@pytest.mark.parametrize("text", ["a.py --x 1", "-n 1 a.py --x 1"])
def test_one_worker_needs_no_launcher(path, text):
    assert line(text) == [sys.executable, "-m", "jaxmpi.train", "a.py", "--x", "1"]


def test_one_worker_may_be_on_another_host(path):
    mpirun = path("mpirun", VERSIONS["openmpi"])
    got = line("--launcher-args '--host b:1' a.py")
    assert got[:-4] == [mpirun, "-n", "1", "--bind-to", "none", "--host", "b:1"]


MPIRUN = [
    # who prints its version, workers, cores, root -> arguments after -n N
    ("openmpi", 4, 8, False, ["--bind-to", "none"]),
    ("openmpi", 5, 8, False, ["--oversubscribe", "--bind-to", "none"]),
    ("openmpi", 4, 8, True, ["--allow-run-as-root", "--bind-to", "none"]),
    ("prte", 8, 2, True, ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]),
    ("mpich", 8, 2, True, []),
]


@pytest.mark.parametrize(("family", "workers", "cores", "is_root", "expected"), MPIRUN)
def test_mpirun_gets_what_this_machine_needs(path, family, workers, cores, is_root, expected):
    mpirun = path("mpirun", VERSIONS[family])
    got = line(f"-n {workers} a.py", cores=cores, is_root=is_root)
    assert got == [mpirun, "-n", str(workers), *expected, sys.executable, "-m", "jaxmpi.train", "a.py"]


def test_srun_ends_ranks_that_are_left_after_a_death(path):
    srun = path("srun")
    got = line("--launcher srun -n 2 a.py")
    assert got == [srun, "-n", "2", "--mpi=pmix", "--wait=60", sys.executable, "-m", "jaxmpi.train", "a.py"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-x API_KEY=s3cret -x PATH --host a:4,b:4", "-x API_KEY=... -x PATH --host a:4,b:4"),
        ("--export=ALL,TOKEN=s3cret,B=s3cret --mem=4G", "--export=ALL,TOKEN=...,B=... --mem=4G"),
        ("--mca mca_base_env_list 'A=s3cret;B=s3cret'", "--mca mca_base_env_list 'A=...;B=...'"),
        ("-genv KEY s3cret -env KEY s3cret -n 1", "-genv KEY ... -env KEY ... -n 1"),
    ],
)
def test_what_variables_for_ranks_hold_is_not_shown(text, shown):
    line = ["mpirun", *shlex.split(text), "python", "-m", "jaxmpi.train", "a.py", "--optim.lr=1"]
    assert command.without_values(line, shlex.split(text)) == f"mpirun {shown} python -m jaxmpi.train a.py --optim.lr=1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "-n 2 a.py",
            r"no mpirun beside .* or on PATH; .*(`uv sync`|install 'openmpi'`).*\. One process needs none",
        ),
        ("-n 2 --launcher mpiexec a.py", r"unknown launcher 'mpiexec'; .*there are: mpirun, srun"),
    ],
)
def test_launchers_that_are_not_there(path, text, message):
    with pytest.raises(UsageError, match=message):
        line(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "holds a run already"),
        (("--resume", "--run-dir", "empty"), "is no run directory"),
        (("--dry-run",), None),
        (("--from-start",), None),
    ],
)
def test_a_run_directory_is_looked_at_before_ranks_start(flags, message, path, tmp_path, monkeypatch):
    path("mpirun", VERSIONS["mpich"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text('{"kind": "train", "step": 1}\n')
    started = []
    monkeypatch.setattr(command, "supervise", lambda *args: started.append(args) or 0)
    with pytest.raises(UsageError if message else SystemExit, match=message):
        command.main(["-n", "2", "digits", "--run-dir", str(tmp_path / "run"), *flags])
    assert not started if message else started


@pytest.mark.e2e
def test_help_on_an_experiment_starts_no_ranks():
    ended = run([sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "2", "digits", "-h"], timeout_s=60)
    assert (ended.code, ended.out.count("--optim.lr ")) == (0, 1), ended.out


@pytest.mark.e2e
def test_a_job_needs_a_network():
    if run(["unshare", "-n", "true"], timeout_s=10).code:
        pytest.skip("network namespaces are not permitted here")
    line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "2", "digits", "--train-for", "1st"]
    ended = run(["unshare", "-n", *line], timeout_s=60)
    assert (ended.code, "--devices" in ended.out) == (2, True), ended.out
    assert "PMIX" not in ended.out.upper()


def said_once(folder: Path, *flags: str) -> str:
    """What `jaxmpi train` prints, without a home, of a mistake of two ranks; Open MPI's notices are left out."""
    (folder / "tiny.py").write_text(TINY)
    line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", "2", str(folder / "tiny.py"), *flags]
    ended = run(["env", "-u", "HOME", *line, "--run-dir", str(folder / "run")], timeout_s=100)
    assert ended.code
    assert not ended.timed_out
    assert ended.out.count("\nerror: ") == 1
    assert "MPI_ABORT" not in ended.out
    assert "prterun" not in ended.out.partition("\n")[2]
    return ended.out


@pytest.mark.e2e
def test_a_mistake_that_all_ranks_find_before_the_first_step_is_said_once(tmp_path):
    said_once(tmp_path, "--monitor", "nothing")


@pytest.mark.e2e
def test_a_step_that_is_not_finite_is_said_once_and_leaves_the_checkpoint_before_it(tmp_path):
    flags = ("--inject", "nan:rank=1,step=4", "--checkpoint-every", "1st", "--keep-checkpoints", "9")
    said = said_once(tmp_path, *flags)
    assert re.search(r"of worker 1 is not finite at step 4; last good checkpoint: \S+step_00000003", said)
    kept = steps_saved(tmp_path / "run")
    assert kept == [1, 2, 3]
    for step in kept:
        assert all(np.isfinite(leaf).all() for leaf in saved_leaves(tmp_path / "run", step)["common.bin"].values())


FAILS = "import jaxmpi\nif jaxmpi.world().rank == 1:\n    raise ValueError('boom')\nimport time; time.sleep(60)\n"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [("run -n 2 fails.py", "\nValueError: boom", 1), ("bench -n 2 --rate-mbit 5", "on one host", 2)],
)
def test_other_commands_that_start_ranks_leave_out_notices_too(words, said, code, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    ended = run([sys.executable, "-m", "jaxmpi.tools.cli", *words.split()], timeout_s=100, cwd=tmp_path)
    assert (ended.code, ended.timed_out, ended.out.count(said)) == (code, False, 1), ended.out
    assert ("Traceback" in ended.out) == (code == 1)
    assert "MPI_ABORT" not in ended.out
    assert "prterun" not in ended.out.partition("\n")[2]
    assert "\0" not in ended.out


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_jaxmpi_run_ends_its_ranks(number, tmp_path):
    (tmp_path / "waits.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    job = start([sys.executable, "-m", "jaxmpi.tools.cli", "run", "-n", "2", str(tmp_path / "waits.py")])
    job.when("ready")
    job.signal(number)
    assert job.end() == 1, job.out
