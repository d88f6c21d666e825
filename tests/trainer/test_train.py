"""Whole runs of `python -m jaxmpi.train`: what comes out, kill and resume, ranks that differ."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import NotFinite, UsageError
from jaxmpi.models.cnn import digits_cnn_tiny
from jaxmpi.runtime import failures
from jaxmpi.trainer.main import train as fit
from launching import PATH, Ended, mpirun_line, run, train, train_here
from line_task import line, lines
from runs import TINY, checkpoint, checkpoint_files, column, copy_until, record, resumed
from traces import check_schema

DIGITS = "experiments/digits.py"
DATA = Data("digits", channels=1, mean=(0.305,), std=(0.376,))
# ---------------------------------------------------------------- what comes out

LEARNER = TINY.replace("import digits_cnn_tiny", "import _model").replace(
    "digits_cnn_tiny()", '_model("small", (16, 32, 64), 10, 0.0)'
)
STEPS = 144  # six epochs, which are enough to learn
LEARNS = ("--optim.lr", "0.02", "--checkpoint-every", "60st", "--eval-every", "6ep")
BUCKETS = ("--exchange.strategy", "ring32", "--exchange.overlap", "on", "--exchange.bucket-bytes", "16000")


def on_two(folder: Path, name: str, *more: str) -> Ended:
    """Six epochs by two ranks, with a line for each step, and with buckets sent during the backward pass."""
    args = (*LEARNS, *BUCKETS, "--train-for", "6ep", "--trace", "6:15", "--run-dir", str(folder / name))
    return train(2, str(folder / "small.py"), *args, *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """The run directory of such a run, beside which others may be, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.py").write_text(LEARNER)
    ended = on_two(folder, "whole")
    assert ended.code == 0, ended.out
    return folder / "whole", ended.out


@pytest.mark.e2e
def test_ranks_learn_and_record(whole):
    run_dir, printed = whole
    rows = record(run_dir, "train")
    assert [row["step"] for row in rows][:3] == [1, 2, 3]
    assert {"step", "epoch", "examples", "elapsed_s", "loss", "images_per_s"} <= rows[0].keys()
    assert rows[-1]["examples"] == 6 * 1437  # the short last batch of an epoch is counted as it is
    [evaluation] = record(run_dir, "eval")
    assert evaluation["eval_count"] == 360  # 6 steps of 60 over 2 workers: none dropped, none padded
    assert evaluation["eval_top1"] > 0.9
    assert evaluation["eval_top5"] >= evaluation["eval_top1"]
    assert evaluation["eval_top1"] * 360 == pytest.approx(round(evaluation["eval_top1"] * 360), abs=1e-3)
    assert len(re.findall(r"^step 1/", printed, re.M)) == 1  # a line on rank 0 only
    facts = json.loads((run_dir / "config.json").read_text())
    assert facts["workers"] == 2
    assert facts["strategy"] == "ring:32"
    assert facts["transport"] == {"cpu": "MPI, from host memory", "gpu": "MPI, through the host"}[facts["backend"]]
    assert facts["versions"]["jax"] != "not installed"


def test_the_gradient_norm_of_a_line_is_the_root_mean_square_over_its_steps(tmp_path, no_launcher):
    """The rate is so low that every step has the gradient of the start, on all data."""
    asked = {"optim": Optim("sgd", lr=1e-30), "effective_batch": 50, "train_for": "4st", "log_every": 4}
    experiment = lines(tmp_path, **asked)
    fit(experiment, "lines")
    data = line(50)
    expected = np.linalg.norm(2 / 50 * data["x"].T @ data["y"])
    assert column(experiment.run_dir, "train", "gradient_norm") == pytest.approx([expected] * 2, rel=1e-5)


def train_on(ranks: int, *args: str) -> Ended:
    """Several ranks under mpirun; one here."""
    return train(ranks, *args) if ranks > 1 else train_here(*args)


@pytest.mark.e2e
def test_a_trace_of_all_ranks(whole):
    run_dir, printed = whole
    assert f"trace of steps 6 to 15: {run_dir / 'trace.json'}" in printed
    events = check_schema(json.loads((run_dir / "trace.json").read_text()), 2)
    for rank in range(2):
        mine = [e for e in events if e["pid"] == rank]
        assert {f"batch of step {k}" for k in range(6, 16)} <= {e["name"] for e in mine if e["cat"] == "data"}
        assert {f"step {k}" for k in range(6, 16)} <= {e["name"] for e in mine if e["cat"] == "compute"}
        sends = [e for e in mine if e["cat"] == "travel"]
        labels = {e["name"] for e in sends}
        assert len(labels) >= 3
        assert all(len([e for e in sends if e["name"] == label]) >= 10 for label in labels)
    # A sum ends on no rank before the last rank has started it, so on one clock it overlaps with itself on each other
    # rank. Those at the ends may be of the step before or after: see `select_steps`.
    label = min(e["name"] for e in events if e["cat"] == "travel")
    sums = [
        sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["cat"], e["name"]) == (r, "travel", label))
        for r in range(2)
    ]
    for mine, others in itertools.permutations(sums, 2):
        for begin, end in mine[1:-1]:  # a ping-pong finds the clocks of one host, which are one, to microseconds
            assert any(b < end + 500 and e > begin - 500 for b, e in others)
    last = record(run_dir, "train")[-1]
    assert last["exchange_time"] == "measured"
    assert last["anatomy"]["exchange"][1] > 0
    assert column(run_dir, "exchange", "buckets")[-1]


@pytest.mark.e2e
def test_one_worker_and_several_see_the_same_examples(whole, tmp_path):
    """N workers x B/N = 1 worker x B: dropout apart, which is off here, the runs differ by rounding only."""
    run_dir, _ = whole
    ended = train_here(str(run_dir.parent / "small.py"), *LEARNS, "--train-for", "20st", "--run-dir", str(tmp_path))
    assert ended.code == 0, ended.out
    one, two = (np.array(column(folder, "train", "loss")) for folder in (tmp_path, run_dir))
    assert len(one) == 20
    # Losses near 2.3 are sums of 60 f32 terms; 20 updates of lr 0.02 pass rounding on without blowing it up.
    np.testing.assert_allclose(two[:20], one, atol=2.0**-24 * 60 * 2.3 * 20)
    facts = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, run_dir)]
    assert [fact["workers"] for fact in facts] == [1, 2]
    assert len({(fact["form"], fact["transport"]) for fact in facts}) == 2  # they took different paths


@pytest.mark.e2e
def test_kill_and_resume_is_bit_exact(whole):
    run_dir, _ = whole
    killed = on_two(run_dir.parent, "killed", "--inject", "kill:rank=1,step=130")
    assert killed.code != 0
    assert record(run_dir.parent / "killed", "eval") == []  # it did not reach its end
    ended = on_two(run_dir.parent, "killed", "--resume")
    assert ended.code == 0, ended.out
    assert "resumed at step" in ended.out
    files = checkpoint_files(run_dir, STEPS)
    assert sorted(files) == ["common.bin", "worker_00000.bin", "worker_00001.bin"]
    assert checkpoint_files(run_dir.parent / "killed", STEPS) == files


# ---------------------------------------------------------------- bad input


def test_a_run_without_jit_is_refused_with_the_way_out(tmp_path, no_launcher):
    with jax.disable_jit(), pytest.raises(UsageError, match=r"JAX_DISABLE_JIT: .* unset it"):
        fit(Experiment(digits_cnn_tiny(), data=DATA, run_dir=str(tmp_path)), "digits")


@pytest.mark.parametrize(
    ("args", "way_out"),
    [
        ([DIGITS, "--data.crop", "4"], "--data.resize 8 --data.crop 8"),
        ([DIGITS, "--data.channels", "3"], "--data.channels 1"),
        (["gpt", "--data.window", "64"], "--data.window 128"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused_before_there_is_a_run_directory(args, way_out, tmp_path):
    ended = train_here(*args, "--run-dir", str(tmp_path / "run"))
    assert (ended.code, (tmp_path / "run").exists()) == (failures.MISUSED, False), ended.out
    assert f": give {way_out}, or a model of that size" in ended.out


@pytest.mark.e2e
def test_a_wrong_field_is_said_once_by_several_ranks():
    ended = train(2, DIGITS, "--optim.lr", "x", timeout_s=60)
    assert not ended.timed_out
    assert ended.code != 0
    assert re.sub(r"\x1b\[[\d;]*m", "", ended.out).count("'x'") == 1, ended.out


def test_a_process_trains_again_after_a_loss_that_is_not_finite(tmp_path, no_launcher):
    """The user's own programs stay compiled."""
    traced = []
    mine = jax.jit(traced.append)
    mine(1.0)
    for _ in range(2):
        with pytest.raises(NotFinite):
            fit(lines(tmp_path, optim=Optim("sgd", lr=1e30)), "lines")
    assert fit(lines(tmp_path), "lines")["eval_count"] == 13
    mine(1.0)
    assert len(traced) == 1


def test_a_run_with_an_optimizer_and_a_schedule_of_optax_resumes_bit_for_bit(tmp_path, no_launcher, as_users_have_it):
    asked = {"optim": Optim("mine", transform=optax.adamw), "schedule": Schedule(rate=lambda step: 0.1 * 0.5**step)}
    whole = lines(tmp_path, **asked, checkpoint_every="1st", keep_checkpoints=9, log_every=1)
    fit(whole, "lines")
    assert column(whole.run_dir, "train", "lr") == pytest.approx([0.1 * 0.5**k for k in range(7)], rel=1e-5)
    part = resumed(whole, 3, tmp_path / "part")
    fit(part, "lines")
    assert column(part.run_dir, "train", "loss") == column(whole.run_dir, "train", "loss")


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory) -> Path:
    """A run of two steps, with a checkpoint of the second."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    ended = train_here(DIGITS, "--train-for", "2st", "--run-dir", str(folder))
    assert ended.code == 0, ended.out
    return folder


@pytest.fixture
def begun(tmp_path, begun_once) -> tuple[str, ...]:
    """Flags of that run, for a copy of it."""
    shutil.copytree(begun_once, tmp_path / "run")
    return ("--train-for", "2st", "--run-dir", str(tmp_path / "run"))


@pytest.mark.e2e
def test_resume_goes_on_with_the_same_run_only(begun):
    ended = train_here(DIGITS, *begun, "--resume", "--seed", "1", "--effective-batch", "64")
    assert ended.code != 0
    assert "seed: got 1, expected 0 (the checkpoint's)" in ended.out
    assert "effective batch: got 64, expected 32 (the checkpoint's)" in ended.out


@pytest.mark.e2e
def test_a_resumed_run_says_what_changed_since_its_checkpoint(tmp_path, no_launcher, capsys):
    schedule, rest = Schedule("poly", power=1.0), {"effective_batch": 60, "run_dir": str(tmp_path)}
    begun = Experiment(digits_cnn_tiny(), data=DATA, optim=Optim("momentum", lr=0.01), schedule=schedule, **rest)
    fit(dataclasses.replace(begun, train_for="4st", checkpoint_every="2st"), "digits")
    shutil.rmtree(checkpoint(tmp_path, 4))
    same = dataclasses.replace(begun, resume=True, train_for="4st", log_every=1, eval_every="1st", keep_best=2)
    fit(same, "digits")
    assert "changed since" not in capsys.readouterr().out
    assert record(tmp_path, "changed") == []
    shutil.rmtree(checkpoint(tmp_path, 4))
    fit(dataclasses.replace(same, train_for="8st", micro_batch=15, optim=Optim("momentum", lr=0.02)), "digits")
    changed = {
        "micro_batch": {"was": 0, "is": 15},
        "optim.lr": {"was": 0.01, "is": 0.02},
        "train_for": {"was": "4st", "is": "8st"},
        "learning rate of step 3": {"was": pytest.approx(0.005), "is": pytest.approx(0.015)},
    }
    [line] = record(tmp_path, "changed")
    assert (line["step"], line["changes"]) == (2, changed)
    [rate] = [row["lr"] for row in record(tmp_path, "train") if row["step"] == 3]
    assert rate == pytest.approx(0.015)
    assert capsys.readouterr().out.count("changed since the checkpoint: ") == 4


# ---------------------------------------------------------------- other data


def test_resume_on_other_data_is_refused(tmp_path):
    make_digit_folders(tmp_path)
    data = ("--data.source", "imagefolder", "--data.dir", str(tmp_path), "--effective-batch", "4")
    args = (DIGITS, *data, "--train-for", "2st", "--eval-every", "0st", "--run-dir", str(tmp_path / "run"))
    assert train_here(*args).code == 0
    (tmp_path / "train" / "3" / "0.png").unlink()
    ended = train_here(*args, "--resume")
    assert ended.code != 0
    assert "the data.train.examples: got 9, expected 10 (the checkpoint's)" in ended.out


def test_a_finished_run_names_its_commit_and_says_that_nothing_is_left(begun, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{40}\+?", json.loads((tmp_path / "run" / "config.json").read_text())["commit"])
    ended = train_here(DIGITS, *begun, "--resume")
    assert ended.code == 0
    assert "nothing left to do: train_for ends at step 2" in ended.out


# ---------------------------------------------------------------- one rank alone has a fault


def one_rank_differs(tmp_path: Path, env: str, *args: str, more: Sequence[str] = ()) -> Ended:
    """Two ranks, of which rank 1 has another variable in its environment, and more arguments."""
    trainer = [sys.executable, "-m", "jaxmpi.train", *args, "--run-dir", str(tmp_path / "run")]
    line = [*mpirun_line(1), *trainer, ":", "-n", "1", "env", env, *trainer, *more]
    return run(line, timeout_s=90, env={"JAXMPI_DATA": str(tmp_path / "data")})


@pytest.mark.e2e
def test_ranks_with_other_versions_and_another_configuration_are_named(tmp_path):
    other = tmp_path / "site" / "optax-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    ended = one_rank_differs(tmp_path, f"PYTHONPATH={tmp_path / 'site'}:{PATH}", DIGITS, more=("--optim.lr", "0.1"))
    assert not ended.timed_out
    assert ended.code != 0
    assert "rank 1: versions.optax: got 9.9.9, expected " in ended.out
    assert "rank 1: experiment.optim.lr: got 0.1, expected 0.02 (rank 0)" in ended.out


def make_digit_folders(root: Path) -> None:
    """One grey image a class, for training and for validation."""
    for split in ("train", "validation"):
        for digit in range(10):
            folder = root / split / str(digit)
            folder.mkdir(parents=True)
            Image.new("L", (8, 8)).save(folder / "0.png")


@pytest.mark.e2e
def test_a_copy_of_the_data_that_differs_is_named_before_the_first_step(tmp_path):
    make_digit_folders(tmp_path / "data")
    make_digit_folders(tmp_path / "copy")
    (tmp_path / "copy" / "train" / "3" / "0.png").unlink()
    args = ("--data.source", "imagefolder", "--effective-batch", "2")
    ended = one_rank_differs(tmp_path, f"JAXMPI_DATA={tmp_path}/copy", DIGITS, *args)
    assert not ended.timed_out
    assert ended.code != 0
    assert "rank 1: train.examples: got 9, expected 10" in ended.out, ended.out


@pytest.mark.slow
def test_skipped_examples_stay_counted_when_a_run_goes_on(tmp_path):
    make_digit_folders(tmp_path / "data")
    (tmp_path / "data" / "train" / "3" / "0.png").write_bytes(b"no image")
    data = ("--data.source", "imagefolder", "--data.dir", str(tmp_path / "data"), "--data.on-error", "skip")
    args = (*data, "--data.max-skipped", "0.2", "--effective-batch", "10", "--log-every", "1", "--train-for")
    for steps, *more in (("2st",), ("4st", "--resume")):
        ended = train(2, DIGITS, *args, steps, "--run-dir", str(tmp_path / "run"), *more)
        assert ended.code == 0, ended.out
    assert [row["skipped"] for row in record(tmp_path / "run", "train")] == [1, 2, 3, 4]  # one an epoch, of one step


STATEFUL = """
from flax import nnx
import jax.numpy as jnp
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.model.adapters.nnx import nnx_model

class Counter(nnx.Variable): pass

class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(64, 10, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.steps = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x, train):
        self.steps[...] += 1
        return self.dense(self.norm(x.reshape(x.shape[0], -1), use_running_average=not train))

experiment = Experiment(
    model=nnx_model(Net, name="net", input_shape=(8, 8, 1), classes=10),
    data=Data(source="digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("sgd", lr=0.1), effective_batch=60,
)
"""
# Ranks and options. Those with statistics are of a model with batch norm and a counter. The most devices come first,
# since a process cannot have more than its first run.
RESUMED = {
    "devices, mirror": (1, "--devices 4 --rule.name awagd --data.mirror"),
    "compressed, over devices": (1, "--devices 3 --exchange.strategy topk5"),
    "statistics": (1, ""),
    "statistics of two": (2, "--exchange.strategy asa16"),
    "statistics over devices": (1, "--devices 2"),
    "awagd, momentum averaged, shm": (2, "--rule.name awagd --rule.average-momentum --exchange.strategy shm"),
    "diloco, between meetings": (2, "--rule.name diloco --rule.local-steps 8 --optim.name adam"),
    "compressed": (2, "--exchange.strategy lowrank2/ring16"),
    "subgd, micro-batches": (2, "--rule.name subgd --compute-dtype bfloat16 --micro-batch 5 --exchange.strategy asa16"),
    "overlap": (2, "--exchange.overlap on --optim.name adam --optim.clip-norm 1 --exchange.strategy ring16"),
    "one buffer": (3, "--exchange.bucket-bytes None --optim.name nesterov --exchange.strategy ring:bf16"),
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in ("statistics", "devices, mirror")))
        for case in RESUMED
    ],
)
def test_resume_is_bit_exact_whatever_the_options(case, tmp_path):
    """Through an epoch's short last step: 24 steps are an epoch."""
    ranks, options = RESUMED[case]
    (tmp_path / "net.py").write_text(STATEFUL if "statistics" in case else TINY)
    periods = ("--train-for", "30st", "--checkpoint-every", "15st", "--eval-every", "30st")
    line = (str(tmp_path / "net.py"), *options.split(), *periods)
    assert train_on(ranks, *line, "--run-dir", str(tmp_path / "whole")).code == 0
    cut = copy_until(tmp_path / "whole", 15, tmp_path / "cut")
    ended = train_on(ranks, *line, "--run-dir", str(cut), "--resume")
    assert ended.code == 0, ended.out
    assert "resumed at step 15" in ended.out
    assert checkpoint_files(cut, 30) == checkpoint_files(tmp_path / "whole", 30)
    assert column(cut, "eval", "eval_top1")[-1] == column(tmp_path / "whole", "eval", "eval_top1")[-1]


def test_a_run_directory_is_never_overwritten(begun, tmp_path):
    before = (tmp_path / "run" / "record.jsonl").read_bytes()
    ended = train_here(DIGITS, *begun)
    assert ended.code != 0
    assert "holds a run already" in ended.out
    assert (tmp_path / "run" / "record.jsonl").read_bytes() == before
