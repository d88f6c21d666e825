"""A finished run from Python and from the command line: figures and outputs, by any number of workers."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi.config import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.trainer import finished
from launching import mpirun_line, run, train_here
from line_task import LINE, line, lines


@pytest.mark.parametrize("devices", [1, 3])
def test_a_trainer_evaluates_what_it_has_trained(devices, tmp_path):
    trainer = jaxmpi.Trainer(
        lines(tmp_path, devices=devices, eval_every="1st", checkpoint_every="1st", keep_checkpoints=9)
    )
    figures = trainer.fit()
    again = trainer.evaluate()
    assert again.keys() == figures.keys()
    for name, value in figures.items():  # sums of 13 examples, added in another order
        assert again[name] == pytest.approx(value, rel=1e-6)
    assert trainer.evaluate(step=2)["eval_loss"] > figures["eval_loss"]
    assert trainer.evaluate(best=True) == again
    w = jaxmpi.load(trainer.run_dir).params["w"]
    batch = {name: values[:4] for name, values in line(13, 1).items()}
    np.testing.assert_allclose(trainer.predict(batch), batch["x"] @ w - batch["y"], atol=1e-5)


def test_a_task_has_a_prediction_of_its_own(tmp_path):
    task = dataclasses.replace(LINE, predict=lambda params, model_state, batch: {"y": batch["x"] @ params["w"]})
    trainer = jaxmpi.Trainer(lines(tmp_path, task))
    trainer.fit()
    x = np.eye(3, dtype=np.float32)
    np.testing.assert_allclose(trainer.predict({"x": x})["y"], jaxmpi.load(trainer.run_dir).params["w"], rtol=1e-6)


def test_outputs_are_in_the_order_of_the_data(tmp_path):
    experiment = lines(tmp_path)
    jaxmpi.Trainer(experiment).fit()
    data, w = line(13, 1), jaxmpi.load(experiment.run_dir).params["w"]
    outputs = finished.open_finished(experiment, Path(experiment.run_dir)).predict_all()
    np.testing.assert_allclose(outputs["outputs"], data["x"] @ w - data["y"], atol=1e-5)


def test_what_is_no_experiment_or_was_not_trained_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"Trainer: got .digits.; expected a jaxmpi\.config"):
        jaxmpi.Trainer("digits")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="no checkpoint; name a run directory"):
        jaxmpi.Trainer(lines(tmp_path)).evaluate()


def test_a_run_of_another_model_is_named(tmp_path):
    experiment = lines(tmp_path)
    jaxmpi.Trainer(experiment).fit()
    wide = {name: np.tile(values, (1, 2)) if name == "x" else values for name, values in line(9).items()}
    other = dataclasses.replace(experiment, data=Data("array", train=wide, validation=wide, loader="threads"))
    with pytest.raises(UsageError, match=r"params/w: got float32\[3\], expected float32\[6\]"):
        jaxmpi.Trainer(other).evaluate()


@pytest.fixture
def digits_run(tmp_path, monkeypatch):
    """A run of the digits by the command line, and the figures of its evaluation."""
    argv = ["experiments/digits.py", "--train-for", "6st", "--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["jaxmpi/train.py", *argv])
    done = train_here(*argv)
    assert done.code == 0, done.out
    rows = map(json.loads, (tmp_path / "run" / "record.jsonl").read_text().splitlines())
    [figures] = [row for row in rows if row["kind"] == "eval"]
    return tmp_path / "run", figures


@pytest.mark.e2e
def test_the_command_line_by_one_and_by_three_workers(digits_run, tmp_path):
    run_dir, figures = digits_run
    done = run([*mpirun_line(3), "jaxmpi", "evaluate", str(run_dir)], timeout_s=100)
    assert done.code == 0, done.out
    got = json.loads(done.out.splitlines()[-1])
    assert got["step"] == 6
    for name in ("eval_count", "eval_top1", "eval_top5", "eval_loss"):
        assert got[name] == pytest.approx(figures[name], rel=2e-6)  # the record has six digits
    done = run([*mpirun_line(3), "jaxmpi", "predict", str(run_dir), str(tmp_path / "three.npz")], timeout_s=100)
    assert "outputs float32[360, 10], by the model of step 6" in done.out
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        finished.predict_main([str(run_dir), str(tmp_path / "one.npz")])
    outputs = [np.load(tmp_path / f"{name}.npz")["outputs"] for name in ("one", "three")]
    np.testing.assert_allclose(*outputs, atol=1e-5)


REFUSED = {
    "folder": (["nowhere"], "nowhere/config.json: no such file"),
    "step": (["{run}", "--step", "5"], "--step: got 5; there are 6"),
    "field": (["{run}", "--data.dirr", "x"], "unknown field --data.dirr"),
}


@pytest.mark.parametrize(("argv", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_is_named(argv, match, digits_run):
    with pytest.raises(UsageError, match=match):
        finished.evaluate_main([word.format(run=digits_run[0]) for word in argv])


def test_a_run_that_python_started_says_so(tmp_path):
    experiment = lines(tmp_path)
    jaxmpi.Trainer(experiment).fit()
    config = json.loads((Path(experiment.run_dir) / "config.json").read_text())
    (Path(experiment.run_dir) / "config.json").write_text(json.dumps({**config, "command": ["notebook"]}))
    with pytest.raises(UsageError, match=r"was started from Python: use jaxmpi\.Trainer"):
        finished.evaluate_main([experiment.run_dir])
