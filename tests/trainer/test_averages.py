"""Averages that are evaluated instead of params, moving or schedule-free: by definition, exported, resumed, refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from optax.contrib import schedule_free_sgd

import jaxmpi
from jaxmpi.config import Optim, RuleConfig
from jaxmpi.core.errors import UsageError
from jaxmpi.trainer import main
from line_task import STEPS, line, lines
from runs import checkpoint_files, resumed, saved_leaves

D = 0.8


def averaged(folder: Path, **fields):
    asked = {"optim": Optim("sgd", lr=0.01, ema=D), "checkpoint_every": "1st", "keep_checkpoints": 9}
    return lines(folder, **asked | fields)


def params_at(run_dir: str, step: int) -> np.ndarray:
    """Return the params that the steps made, not their average."""
    return saved_leaves(run_dir, step)["common.bin"]["params/w"].astype(np.float64)


@pytest.mark.parametrize("fields", [{"devices": 3}, {"rule": RuleConfig("awagd"), "devices": 2}])
def test_it_is_evaluated_and_exported(fields, tmp_path):
    experiment = averaged(tmp_path, **fields)
    means = main.train(experiment, "lines")
    each = np.stack([params_at(experiment.run_dir, step) for step in range(1, STEPS + 1)])
    weights = D ** np.arange(STEPS - 1, -1, -1.0)
    want = weights @ each / weights.sum()
    # Seven updates of numbers below 1, each rounded a few times in 32 bits.
    np.testing.assert_allclose(jaxmpi.load(experiment.run_dir).params["w"], want, atol=1e-6)
    data = line(13, 1)
    assert means["eval_far"] == pytest.approx(np.abs(data["x"] @ want - data["y"]).mean(), rel=1e-5)
    assert np.abs(each[-1] - want).max() > 1e-2


B1 = 0.7
FREE = {"optim": Optim("schedule_free_sgd", lr=0.05, b1=B1)}


def test_x_of_a_schedule_free_optimizer_is_evaluated_and_exported_and_is_that_of_one_worker(tmp_path):
    found = []
    for devices in (1, 3):
        experiment = averaged(tmp_path, **FREE, devices=devices)
        means = main.train(experiment, "lines")
        x = np.zeros(3)
        for t in range(1, STEPS + 1):  # y = b1 x + (1 - b1) z and x = mean of z so far, so the params say what x is
            z = (params_at(experiment.run_dir, t) - B1 * (1 - 1 / t) * x) / (B1 / t + 1 - B1)
            x = x + (z - x) / t
        # Seven steps of numbers below 3, each rounded a few times in 32 bits, and divided by b1 and 1 - b1.
        np.testing.assert_allclose(jaxmpi.load(experiment.run_dir).params["w"], x, atol=1e-5)
        data = line(13, 1)
        assert means["eval_far"] == pytest.approx(np.abs(data["x"] @ x - data["y"]).mean(), rel=1e-5)
        assert np.abs(params_at(experiment.run_dir, STEPS) - x).max() > 1e-2
        assert jaxmpi.Trainer(experiment).evaluate()["eval_far"] == pytest.approx(means["eval_far"], rel=1e-6)
        found.append(x)
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, FREE], ids=["ema", "schedule-free"])
def test_a_resumed_run_has_the_same(fields, tmp_path):
    whole = averaged(tmp_path, **fields)
    want = main.train(whole, "lines")
    part = resumed(whole, 3, tmp_path / "part")
    assert main.train(part, "lines") == want
    assert checkpoint_files(whole.run_dir, STEPS) == checkpoint_files(part.run_dir, STEPS)


def test_rules_whose_workers_differ_refuse_it(tmp_path):
    with pytest.raises(UsageError, match=r"optim\.ema: got 0\.8 with rule local_sgd, whose workers have params"):
        main.train(averaged(tmp_path, rule=RuleConfig("local_sgd"), devices=2), "lines")
    with pytest.raises(UsageError, match=r"optim\.ema: got 1\.5; expected \[0, 1\)"):
        Optim(ema=1.5)


NO_AVERAGE = {
    "ema": ({"optim": dataclasses.replace(FREE["optim"], ema=0.9)}, r"optim\.ema: got optimizer schedule_free_sgd"),
    "plateau": (
        {"callbacks": (jaxmpi.ReduceOnPlateau(factor=0.5),)},
        "ReduceOnPlateau: got optimizer schedule_free_sgd",
    ),
    "local": ({"rule": RuleConfig("local_sgd"), "devices": 2}, "a schedule-free optimizer with rule local_sgd"),
    "forced": ({"rule": RuleConfig("awagd", force=True), "devices": 2}, "a schedule-free optimizer with rule awagd"),
    "own": (
        {"optim": Optim("mine", transform=schedule_free_sgd(0.1)), "rule": RuleConfig("local_sgd"), "devices": 2},
        "a schedule-free optimizer with rule local_sgd",
    ),
}


@pytest.mark.parametrize("case", NO_AVERAGE)
def test_a_second_average_and_workers_with_averages_of_their_own_are_refused(case, tmp_path):
    fields, message = NO_AVERAGE[case]
    with pytest.raises(UsageError, match=message):
        main.train(averaged(tmp_path, **FREE | fields), "lines")
