"""`jaxmpi bench`: real small jobs, the figures' formulas, and what it refuses."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.bench import __main__, contenders, options, plan, results
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.errors import TrainingError, UsageError
from launching import ROOT, Ended, run

BENCH = [sys.executable, "-m", "jaxmpi.bench"]
QUICK = ("--rounds", "2", "--warm-up", "1")
LIBRARIES = [*filter(options.is_installed, options.PEERS)]


def jaxmpi_bench(*args: str, timeout_s: float = 240, cwd: Path = ROOT) -> Ended:
    """`python -m jaxmpi.bench args`, as `jaxmpi bench` runs it."""
    ended = run([*BENCH, *args], timeout_s=timeout_s, cwd=cwd)
    assert not ended.timed_out, ended.out[-3000:]
    return ended


# ---------------------------------------------------------------- real jobs


WITH_A_WIRE = """
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.config import Experiment
from jaxmpi.model import Model

WIRES["mine"] = WIRES["32"]
experiment = Experiment(model=Model("mine", lambda key, image: ({}, {}), None, input_shape=(3,), classes=2))
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[str, dict]:
    """Every peer there is and both kinds of case, and a wire of a file's own: text and JSON."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mine.py").write_text(WITH_A_WIRE)
    out = folder / "bench.json"
    args = ("-n", "2", "--strategies", "ring:16", "lowrank2", "asa:mine", "--sizes", "0", "1000")
    args += ("--tree", "digits_cnn_tiny", "--experiment", str(folder / "mine.py"))
    ended = jaxmpi_bench(*args, "--out", str(out), *QUICK, timeout_s=280)
    assert ended.code == 0, ended.out[-4000:]
    return ended.out, json.loads(out.read_text())


@pytest.mark.e2e
def test_two_ranks_time_every_strategy_and_peer(two_ranks):
    text, result = two_ranks
    assert [case["floats"] for case in result["cases"][:2]] == [0, 1000]
    ours = ["ring:16", "lowrank2", "asa:mine"]
    for case in result["cases"]:
        assert (case["ranks"], case["hosts"]) == (2, 1)
        assert [row["by"] for row in case["rows"]] == ours + LIBRARIES
        assert [row["by"] for row in case["rows"] if row["is_peer"]] == LIBRARIES
        assert all(len(row["seconds"]) == 2 for row in case["rows"])
    assert all(name in text for name in ours + LIBRARIES)
    assert "bound: 3 K a rank through memory" in text
    assert result["versions"]["jax"]


@pytest.mark.e2e
def test_one_rank_has_no_peers_and_no_bound(tmp_path):
    out = tmp_path / "out.json"
    ended = jaxmpi_bench("-n", "1", "--strategies", "asa16", "--sizes", "0", "100", "--out", str(out), *QUICK)
    assert ended.code == 0, ended.out[-3000:]
    assert "one rank: nothing travels, and no peer runs" in ended.out
    for case in json.loads(out.read_text())["cases"]:
        assert [row["by"] for row in case["rows"]] == ["asa16"]
        assert (case["bound_s"], case["least_sent_bytes"]) == (None, 0)


# ---------------------------------------------------------------- refused before anything starts


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--strategies", "rnig"), "unknown strategy"),
        (("--peers", "gloo"), "unknown peer"),
        (("--sizes", "many"), "--sizes: got 'many'"),
        (("--out", "absent/out.json"), "cannot write 'absent/out.json'"),
        (("--strategies", "--peers", "none"), "nothing to time"),
        (("--launcher-args", "'", "--sizes", "8"), "No closing quotation"),
    ],
)
def test_what_is_wrong_is_said_before_a_job_starts(args, message, monkeypatch, capsys, no_launcher):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        __main__.main(args)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("jaxmpi: error: ")
    assert message in errors


MINE = """
print("a line of the file's own")
import jax.numpy as jnp
from jaxmpi.config import Experiment
from jaxmpi.model import Model

model = Model("mine", lambda key, image: ({"w": jnp.ones((3, 2))}, {}), None, input_shape=(3,), classes=2)
experiment = Experiment(model=model)
"""


@pytest.mark.e2e
def test_a_tree_is_a_model_that_ships_or_an_experiments_in_any_folder(tmp_path, monkeypatch, capsys, no_launcher):
    """Beside another project's `models`, too."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise ImportError('of another project')")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    trees = plan.trees(["mine.py", "digits_cnn_tiny"])
    assert trees["mine.py"] == {"w": (3, 2)}
    assert trees["digits_cnn_tiny"]["logits/bias"] == (10,)
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["-n", "1", "--tree", "alexne"])
    assert "--tree: unknown model 'alexne'; did you mean 'alexnet'?" in capsys.readouterr().err


def test_a_case_that_no_memory_holds_is_left_out_by_name(monkeypatch, capsys, no_launcher):
    monkeypatch.setattr(plan, "free_bytes", lambda: 2 << 30)
    with pytest.raises(UsageError, match="no case fits into memory"):
        plan.make_plan(options.parse(["--sizes", "284Mi", "--peers", "none"]), 2)
    output = capsys.readouterr().out
    assert output.startswith("297,795,584 floats: left out: 2 ranks need ")


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("value", ["--hostfile hosts", ""])
def test_the_launchers_arguments_may_look_like_ours(value, no_launcher):
    parsed = options.parse(["-n8", "--launcher-args", value, "--rounds", "3"])
    assert (parsed.n, parsed.launcher_args, parsed.rounds) == (8, value, 3)
    assert options.parse([f"--launcher-args={value}"]).launcher_args == value


def test_bounds():
    size_bytes, seconds = 4 << 20, {"copy": [0.03, 0.01, 0.01], "link": [0.1, 0.2, 0.1]}
    job = {"seconds": seconds, "floats": 1 << 20, "ranks": 4, "hosts": 1}

    def bound(rate_mbit: float | None = None, **changes: int) -> float | None:
        changed = job | changes
        return results.bound_s(changed, results.bytes_per_s(changed, rate_mbit))

    speed = 2 * contenders.COPY_BYTES / 0.01  # of one rank among all that copy at once
    assert bound() == pytest.approx(3 * size_bytes / speed)
    assert bound(hosts=2) == pytest.approx(size_bytes / (contenders.LINK_BYTES / 0.1))
    assert bound(200.0, hosts=2) == pytest.approx(size_bytes * 1514 / 1448 * 8 / 200e6)
    assert bound(200.0, hosts=4) == pytest.approx(1.5 * size_bytes * 1514 / 1448 * 8 / 200e6)
    assert bound(ranks=1) is bound(floats=0) is None


class Job(SoloProcesses):
    """Rank 1 of 3, as far as a check of results can see."""

    rank, size = 1, 3


WRONG = [1.0, math.nan, math.inf]


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("floats", [0, 13, (13 << 16) + 1])
def test_results_are_checked(op, floats):
    contender = contenders.Contender("x", op, lambda inputs: lambda: [])
    total = np.sum([contenders.pattern(rank, (floats,)) for rank in range(3)], 0)
    right = total / 3 if op == "mean" else total
    contenders.check_result(contender, [right, right.reshape(1, floats)], Job())
    for off in WRONG if floats else ():
        wrong = right.copy()
        wrong[-1] += off * 36 * contenders.ROUGH * 1.01
        with pytest.raises(TrainingError, match="x: array 1 is off by"):
            contenders.check_result(contender, [right, wrong], Job())
    if op == "mean" and floats:  # that was not divided
        with pytest.raises(TrainingError):
            contenders.check_result(contender, [total], Job())


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(options.PEERS, "absent", options.PEERS["torch"]._replace(package="no_such_package"))
    with pytest.raises(UsageError, match="peer 'absent' needs no_such_package, which is not installed"):
        options.select_peers(["absent"])
    assert "absent" not in options.select_peers(["all"])
    assert options.select_peers(["none"]) == ()
