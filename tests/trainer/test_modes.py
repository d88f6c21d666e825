"""Every mode of training, past everything that happens now and then: a comparison of the workers' params, an
evaluation, a checkpoint, the end of an epoch.

A run of a few steps with default periods comes to none of them but the last evaluation and checkpoint. Here all are due
every few steps. So one short job per mode comes to each at least twice, and to several at one step.
"""

import math
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jaxmpi
from launching import mpirun_line, run, train, train_here
from runs import checkpoint, copy_until, record, saved_leaves, steps_saved

STEPS, EVAL_EVERY, SAVE_EVERY = 13, 5, 4
EXPERIMENT = f"""
import numpy as np

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim
from jaxmpi.models.cnn import digits_cnn_tiny

pixels = np.random.default_rng(0)
examples = [(pixels.integers(0, 255, (8, 8, 1), np.uint8), i % 10) for i in range(40)]

experiment = Experiment(
    model=digits_cnn_tiny(),
    data=Data("array", channels=1, train=examples, validation=examples[:17], loaders=1),
    optim=Optim("momentum", lr=0.01),
    effective_batch=16, train_for="{STEPS}st", eval_every="{EVAL_EVERY}st", checkpoint_every="{SAVE_EVERY}st",
    exchange=ExchangeConfig("asa32"), replica_check_every="3st", log_every=2,
)
"""


class Mode(NamedTuple):
    """A way to train."""

    args: str = ""
    ranks: int = 2
    is_measured: bool = False  # the record must have the time of exchanges
    steps_together: bool = True


SHARED = "--exchange.strategy shm --exchange.shard-update on"
EASGD = "--optim.name sgd --rule.name easgd --effective-batch 0 --local-batch 8"
DEFAULT = {
    "split": Mode("--exchange.overlap off", is_measured=True),
    "xla": Mode("--comm xla"),
    "devices": Mode("--devices 2", ranks=1),
    "overlap": Mode("--exchange.overlap on --exchange.strategy asa32", is_measured=True),
    "in_memory": Mode("--exchange.overlap off --data.memory partition --data.loader threads"),
    "diloco": Mode("--rule.name diloco --rule.local-steps 3 --comm xla"),
    "easgd": Mode(EASGD, is_measured=True, steps_together=False),
    "shrink": Mode("--on-rank-loss shrink"),
    "shared_params": Mode(f"{SHARED} --exchange.overlap on --optim.ema 0.9", is_measured=True),
}
SLOW = {
    "one": Mode(ranks=1),
    "shm": Mode("--exchange.strategy shm", is_measured=True),
    "compressed": Mode("--exchange.strategy topk0.1/asa32 --comm xla"),
    "subgd": Mode("--rule.name subgd"),
    "awagd": Mode("--rule.name awagd --rule.average-momentum --comm xla"),
    "local_sgd": Mode("--rule.name local_sgd --rule.local-steps 3"),
    "diloco_split": Mode("--rule.name diloco --rule.local-steps 3"),
    "easgd_sync": Mode("--optim.name sgd --rule.name easgd_sync", is_measured=True),
    "asgd": Mode(EASGD + " --rule.name asgd", is_measured=True, steps_together=False),
    "gosgd": Mode(EASGD + " --rule.name gosgd --rule.p 0.5", is_measured=True, steps_together=False),
    "served": Mode(EASGD + " --rule.servers 1", ranks=3, is_measured=True, steps_together=False),
    "xla_devices": Mode("--comm xla --devices 2"),
    "xla_in_memory": Mode("--comm xla --data.memory partition --data.loader threads"),
    "devices_in_memory": Mode("--devices 2 --data.memory partition --data.loader threads", ranks=1),
    "overlap_in_memory": Mode(
        "--exchange.overlap on --exchange.strategy asa32 --data.memory partition --data.loader threads",
        is_measured=True,
    ),
    "skip": Mode("--on-nonfinite skip --inject nan:rank=1,step=6"),
    "shared_params_of_whole_gradients": Mode(f"{SHARED} --exchange.overlap off", is_measured=True),
    "shared_params_roll_back": Mode(
        f"{SHARED} --from-start --on-nonfinite rollback --inject nan:rank=1,step=6", is_measured=True
    ),
    "sharded_overlap": Mode(
        "--exchange.overlap on --exchange.strategy ring32 --exchange.shard-update on --optim.ema 0.9", is_measured=True
    ),
    "sharded_xla": Mode("--comm xla --exchange.strategy ar --exchange.shard-update on --optim.ema 0.9"),
    "sharded_devices": Mode("--devices 2 --exchange.shard-update on --optim.ema 0.9", ranks=1),
    "changes_in_16_bits": Mode("--exchange.strategy asa16 --exchange.gather-wire 16 --exchange.shard-update on"),
    "changes_in_8_bits": Mode("--exchange.strategy asa32 --exchange.gather-wire 8 --exchange.shard-update on"),
    "sharded_shrink": Mode("--on-rank-loss shrink --exchange.shard-update on"),
    "roll_back": Mode("--from-start --on-nonfinite rollback --inject nan:rank=1,step=6 --comm xla"),
    "micro": Mode("--micro-batch 4 --comm xla"),
    "bfloat16": Mode("--compute-dtype bfloat16 --comm xla"),
}


WITH_TESTS = ("split", "devices", "overlap", "xla", "in_memory", "easgd")  # of their own that CI runs


@pytest.mark.e2e
@pytest.mark.parametrize(
    "mode",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW or name in WITH_TESTS)) for name in DEFAULT | SLOW],
    ids=lambda name: name,
)
def test_a_mode_trains_past_everything_periodic(mode, tmp_path):
    row, folder = (DEFAULT | SLOW)[mode], tmp_path / "run"
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    args = (str(tmp_path / "tiny.py"), "--run-dir", str(folder), *row.args.split())
    if "--on-rank-loss" in args:
        tolerant = [*mpirun_line(row.ranks), "--with-ft", "ulfm"]
        ended = run([*tolerant, sys.executable, "-m", "jaxmpi.train", *args], timeout_s=120)
    else:
        ended = train(row.ranks, *args)
    assert ended.code == 0, ended.out
    lines, evaluations = record(folder, "train"), record(folder, "eval")
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["epoch"] > 4
    assert "measured" in {line["exchange_time"] for line in lines} or not row.is_measured
    assert all(line["eval_count"] == 17 for line in evaluations)  # by worker 0 alone where workers do not meet
    if row.steps_together:
        last = {line["step"] for line in evaluations}
        assert last == {*range(EVAL_EVERY, STEPS, EVAL_EVERY), STEPS}
        assert steps_saved(folder)[-2:] == [12, STEPS]
    else:
        assert len(evaluations) >= 2
        assert list((folder / "checkpoints").iterdir())


def of_whole_tensors(folder: Path, *flags: str) -> str:
    """Output of a run of two devices with LAMB, whose updates are of whole tensors if they are sharded."""
    (folder.parent / "tiny.py").write_text(EXPERIMENT)
    args = ("--devices", "2", "--optim.name", "lamb", "--exchange.overlap", "off", "--exchange.shard-update", *flags)
    ended = train_here(str(folder.parent / "tiny.py"), "--run-dir", str(folder), *args)
    assert ended.code == 0, ended.out
    return ended.out


@pytest.mark.e2e
def test_a_checkpoint_of_whole_tensors_has_each_once(tmp_path):
    assert "updates sharded over 2 workers" in of_whole_tensors(tmp_path / "run", "on")
    files = saved_leaves(tmp_path / "run", STEPS)
    params = {path.removeprefix("params/"): leaf.shape for path, leaf in files["common.bin"].items()}
    for moment in ("mu", "nu"):
        leaves = [each for rows in files.values() for each in rows.items() if f"/{moment}/" in each[0]]
        saved = [(path.partition(f"/{moment}/")[2], leaf.shape) for path, leaf in leaves]
        assert sorted(saved) == sorted((name, params[name]) for name, _ in saved)
        assert len(dict(saved)) == len(saved) == len([name for name in params if "/" in name])


@pytest.mark.slow  # two runs
def test_a_run_without_sharded_updates_goes_on_from_whole_tensors(tmp_path):
    of_whole_tensors(tmp_path / "dealt", "on")
    copy_until(tmp_path / "dealt", 12, tmp_path / "whole")
    said = of_whole_tensors(tmp_path / "whole", "off", "--resume")
    assert "resumed at step 12" in said
    assert "updates sharded" not in said
    dealt, whole = (jaxmpi.load(tmp_path / name).params for name in ("dealt", "whole"))
    # Programs of whole tensors and of rows may round a norm or a product otherwise, once a step.
    near = jax.tree.map(lambda x, y: np.abs(x - y).max() <= 2.0**-16 * np.abs(x).max(), dealt, whole)
    assert jax.tree.all(near)


@pytest.mark.slow  # three runs
@pytest.mark.e2e
def test_a_run_with_masters_goes_on_with_another_number_of_workers_and_without_masters(tmp_path):
    """Params are masters to within 2^-11 of the last change, from which each run takes the same step 13."""
    folder, last = tmp_path / "run", checkpoint(tmp_path / "run", STEPS)
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    args = (str(tmp_path / "tiny.py"), "--run-dir", str(folder), "--exchange.strategy", "asa32")
    ends = []
    for ranks, wire, resume in ((2, "16", ()), (4, "16", ("--resume",)), (1, "32", ("--resume",))):
        ended = train(ranks, *args, "--exchange.shard-update", "on", "--exchange.gather-wire", wire, *resume)
        assert ended.code == 0, ended.out
        assert not resume or "resumed at step 12" in ended.out
        ends.append(jaxmpi.load(folder, step=STEPS).params)
        has_masters = any("masters" in path for rows in saved_leaves(folder, STEPS).values() for path in rows)
        assert has_masters == (wire == "16")
        if wire == "16":
            shutil.rmtree(last)
    at_12 = jaxmpi.load(folder, step=12).params
    largest = lambda a, b: max(map(np.max, jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y), a, b))))  # noqa: E731
    # Two changes at step 13 and one at step 12, at most twice as large, are rounded: step 13's has 0.9 of it. The last
    # term is the order in which gradients of 16 examples, below 1, are added.
    off = 2.0**-11 * 4 * largest(ends[0], at_12) + 2.0**-20
    assert largest(ends[0], at_12) > 100 * off
    assert max(largest(end, ends[0]) for end in ends[1:]) <= off
