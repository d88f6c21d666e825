"""Callbacks of the user's own: their moments, the end of a run, the learning rate, resuming, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.core.errors import UsageError
from jaxmpi.models.cnn import digits_cnn_tiny
from jaxmpi.trainer import callbacks, main
from line_task import lines


def record(experiment: Experiment, kind: str) -> list[dict]:
    rows = map(json.loads, (Path(experiment.run_dir) / "record.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def steps_saved(experiment: Experiment) -> list[int]:
    return sorted(int(path.name[5:]) for path in (Path(experiment.run_dir) / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_does_not_improve_stops_with_a_checkpoint(devices, tmp_path):
    frozen = Optim("sgd", lr=1e-30, lr_scaling="none")
    asked = {"callbacks": (jaxmpi.EarlyStop(patience=2),), "checkpoint_every": "0st", "devices": devices}
    experiment = lines(tmp_path, optim=frozen, train_for="40st", eval_every="3st", **asked)
    means = main.train(experiment, "lines")
    [stopped] = record(experiment, "stopped")
    assert stopped["step"] == 9  # the first evaluation is the best, two more are no better
    assert stopped["why"] == "eval_loss has not improved for 2 evaluations"
    assert steps_saved(experiment) == [9]
    assert means["eval_count"] == 13


def test_a_run_that_improves_goes_on(tmp_path):
    experiment = lines(tmp_path, callbacks=(jaxmpi.EarlyStop(patience=1),), eval_every="1st")
    main.train(experiment, "lines")
    assert not record(experiment, "stopped")


def reduced(folder: Path, **fields) -> Experiment:
    """Rate 0.01, a tenth of it from step 5 and a hundredth from step 9 on: nothing is ever better by 1e9."""
    plateau = jaxmpi.ReduceOnPlateau(0.1, patience=1, min_delta=1e9)
    asked = {
        "callbacks": (plateau,),
        "eval_every": "4st",
        "checkpoint_every": "1st",
        "train_for": "11st",
        "log_every": 1,
    }
    return lines(folder, **asked | fields)


def test_the_rate_falls_on_a_plateau(tmp_path):
    experiment = reduced(tmp_path)
    main.train(experiment, "lines")
    rates = [row["lr"] for row in record(experiment, "train")]
    # The first evaluation is the best so far, so the rate falls after the second and third.
    np.testing.assert_allclose(rates, [0.01] * 8 + [0.001] * 3, rtol=1e-5)


@pytest.mark.parametrize("step", [7, 8, 9])  # before, at and after an evaluation by which the rate falls
def test_a_resumed_run_is_that_which_did_not_end(step, tmp_path):
    whole, part = reduced(tmp_path, keep_checkpoints=20), reduced(tmp_path, run_dir=str(tmp_path / "part"))
    want = main.train(whole, "lines")
    shutil.copytree(whole.run_dir, part.run_dir)
    for later in range(step + 1, 12):
        shutil.rmtree(Path(part.run_dir) / "checkpoints" / f"step_{later:08}")
    assert main.train(dataclasses.replace(part, resume=True), "lines") == want
    last = [Path(run.run_dir) / "checkpoints" / "step_00000011" / "common.bin" for run in (whole, part)]
    assert last[0].read_bytes() == last[1].read_bytes()


class Confusion(jaxmpi.Callback):
    def after_evaluation(self, moment):
        counts = np.zeros((10, 10))
        for batch in moment.validation():
            said = np.asarray(moment.predict(batch)).argmax(-1)
            np.add.at(counts, (batch["label"], said), batch["weight"] > 0)
        counts = moment.sum(counts)
        if moment.rank == 0:
            np.save(moment.folder / "confusion.npy", counts)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_confusion_matrix_is_a_callback(devices, tmp_path):
    experiment = Experiment(
        model=digits_cnn_tiny(),
        data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)),
        optim=Optim("adam", lr=0.01),
        effective_batch=48,
        train_for="1ep",
        devices=devices,
        callbacks=(Confusion(),),
        run_dir=str(tmp_path / "run"),
        quiet=True,
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        means = main.train(experiment, "digits")
    counts = np.load(tmp_path / "run" / "confusion.npy")
    assert counts.sum() == 360
    assert np.trace(counts) / 360 == pytest.approx(means["eval_top1"], abs=1e-6)


class Greedy(jaxmpi.Callback):
    def __init__(self, change):
        self.change = change

    def before_step(self, step, state, batch):
        return state, self.change(batch)


CHANGES = {
    "gone": (lambda batch: {"x": batch["x"], "y": batch["y"]}, "Greedy: before_step: batch/tokens: got nothing"),
    "shape": (lambda batch: {**batch, "x": batch["x"][:5]}, r"batch/x: got float32\[5, 3\]; expected float32\[12, 3\]"),
    "dtype": (lambda batch: {**batch, "x": batch["x"].astype("float16")}, r"batch/x: got float16\[12, 3\]"),
}


@pytest.mark.parametrize(("change", "match"), CHANGES.values(), ids=CHANGES)
def test_a_callback_that_changes_the_structure_of_a_batch_is_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, callbacks=(Greedy(change),)), "lines")


def test_a_callback_may_change_values_of_a_batch(tmp_path):
    plain = main.train(lines(tmp_path), "lines")
    doubled = main.train(lines(tmp_path, callbacks=(Greedy(lambda b: {**b, "y": 2 * b["y"]}),)), "lines")
    assert doubled["eval_loss"] != plain["eval_loss"]


REFUSED = {
    "none": ({"callbacks": (print,)}, "expected a jaxmpi.Callback object"),
    "one": ({"callbacks": jaxmpi.EarlyStop()}, "expected a tuple of jaxmpi.Callback objects"),
    "figure": (
        {"callbacks": (jaxmpi.EarlyStop("eval_top1"),)},
        "EarlyStop: monitor: got eval_top1; this run has eval_c",
    ),
}


@pytest.mark.parametrize(("fields", "match"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(fields, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, **fields), "lines")


def test_settings_out_of_range_are_named():
    for make in (lambda: jaxmpi.EarlyStop(patience=0), lambda: jaxmpi.EarlyStop(mode="least")):
        with pytest.raises(UsageError, match=r"EarlyStop: (patience|mode): got"):
            make()
    with pytest.raises(UsageError, match=r"factor: got 2; expected 0 < factor < 1"):
        jaxmpi.ReduceOnPlateau(2)


def test_a_second_run_begins_with_callbacks_as_they_were():
    stop = jaxmpi.EarlyStop()
    [copied] = callbacks.checked((stop,))
    copied.restore({"best": 1.0, "count": 7})
    assert stop.count == 0
