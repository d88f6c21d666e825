"""Callbacks of the user's own: their moments, the end of a run, the learning rate, resuming, and what is refused."""

import dataclasses
import runpy
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import jaxmpi
from jaxmpi.config import Experiment, Optim
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.models.cnn import digits_cnn_tiny
from jaxmpi.trainer import callbacks, main
from launching import PATH, ROOT, mpirun
from line_task import lines
from runs import checkpoint_files, record, resumed, steps_saved


def test_a_run_that_does_not_improve_stops_with_a_checkpoint(tmp_path):
    frozen = Optim("sgd", lr=1e-30)
    asked = {"callbacks": (jaxmpi.EarlyStop(patience=2),), "checkpoint_every": "0st", "devices": 2}
    experiment = lines(tmp_path, optim=frozen, train_for="40st", eval_every="3st", **asked)
    means = main.train(experiment, "lines")
    [stopped] = record(experiment.run_dir, "stopped")
    assert stopped["step"] == 9  # the first evaluation is the best, two more are no better
    assert stopped["why"] == "eval_loss has not improved for 2 evaluations"
    assert steps_saved(experiment.run_dir) == [9]
    assert means["eval_count"] == 13


@pytest.mark.parametrize(
    ("fault", "words"), [("nan:step=6", "not finite"), ("bitflip:rank=1,step=5", "workers differ")]
)
def test_a_stopped_run_saves_no_step_that_was_not_checked(fault, words, tmp_path):
    """Neither one whose gradients are not finite nor one whose replicas differ."""
    frozen, stop = Optim("sgd", lr=1e-30), (jaxmpi.EarlyStop(patience=1),)
    fields = {"callbacks": stop, "checkpoint_every": "0st", "devices": 2, "log_every": 100, "inject": (fault,)}
    experiment = lines(tmp_path, optim=frozen, train_for="40st", eval_every="3st", **fields)
    with pytest.raises(TrainingError, match=words):
        main.train(experiment, "lines")
    assert not steps_saved(experiment.run_dir)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Experiment, dict[str, float]]:
    """A run with every checkpoint, and its last figures."""
    experiment = reduced(tmp_path_factory.mktemp("whole"), keep_checkpoints=20)
    return experiment, main.train(experiment, "lines")


def test_the_rate_falls_on_a_plateau(whole):
    experiment, _ = whole
    rates = [row["lr"] for row in record(experiment.run_dir, "train")]
    # The first evaluation is the best so far, so the rate falls after the second and third.
    np.testing.assert_allclose(rates, [0.01] * 8 + [0.001] * 3, rtol=1e-5)


@pytest.mark.parametrize("step", [7, 8, 9])  # before, at and after an evaluation by which the rate falls
def test_a_resumed_run_is_that_which_did_not_end(step, whole, tmp_path):
    experiment, want = whole
    part = resumed(experiment, step, tmp_path / "part")
    assert main.train(part, "lines") == want
    assert checkpoint_files(experiment.run_dir, 11) == checkpoint_files(part.run_dir, 11)


def test_a_callback_that_is_new_takes_no_other_s_state():
    kept = [["EarlyStop", {"best": 1.0, "count": 1}], ["EarlyStop", {"best": 2.0, "count": 2}]]
    new = [jaxmpi.ReduceOnPlateau(), jaxmpi.EarlyStop(), jaxmpi.EarlyStop(), jaxmpi.EarlyStop()]
    callbacks.restore(new, kept)
    assert [stop.count for stop in new[1:]] == [1, 2, 0]


def shown(name: str, folder: Path, **fields) -> tuple[Experiment, dict[str, float], list[dict]]:
    """A run of an example: the experiment, its last figures and its samples."""
    example = runpy.run_path(str(ROOT / "experiments" / "callbacks" / f"{name}.py"))["experiment"]
    experiment = dataclasses.replace(example, run_dir=str(folder / "run"), quiet=True, **fields)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        figures = main.train(experiment, name)
    return experiment, figures, record(experiment.run_dir, "sample")


def picture(experiment: Experiment, sample: dict) -> np.ndarray:
    with Image.open(Path(experiment.run_dir) / sample["file"]) as opened:
        return np.asarray(opened)


def test_a_confusion_matrix_is_a_callback(tmp_path):
    small = {"model": digits_cnn_tiny(), "effective_batch": 48, "train_for": "1ep", "devices": 3}
    experiment, means, [sample] = shown("confusion", tmp_path, **small)
    [row] = record(experiment.run_dir, "confusion")
    counts = np.array(row["counts"])
    assert counts.sum() == 360
    assert np.trace(counts) / 360 == pytest.approx(means["eval_top1"], abs=1e-6)
    shades = picture(experiment, sample)[12::24, 12::24]
    assert ((shades == 255) == (counts == 0)).all()  # white where nothing was counted


class Greedy(jaxmpi.Callback):
    def __init__(self, change):
        self.change = change

    def before_step(self, step, state, batch):
        return state, self.change(batch)


def in_place(**fields):
    """A change of the batch that is given, which is returned."""
    return lambda batch: batch.update({name: change(batch[name]) for name, change in fields.items()}) or batch


CHANGES = {
    "gone": (lambda batch: {"x": batch["x"], "y": batch["y"]}, "Greedy: before_step: batch/tokens: got nothing"),
    "shape": (lambda batch: {**batch, "x": batch["x"][:5]}, r"batch/x: got float32\[5, 3\], expected float32\[12, 3\]"),
    "no array": (in_place(x=lambda x: "text"), r"batch/x: got str, expected float32\[12, 3\]"),
}


class Forgetful(jaxmpi.Callback):
    def before_step(self, step, state, batch):
        pass


class Misspelt(jaxmpi.Callback):
    def after_evalution(self, moment):
        raise AssertionError


@pytest.mark.parametrize(("change", "match"), CHANGES.values(), ids=CHANGES)
def test_a_callback_that_changes_the_structure_of_a_batch_is_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, callbacks=(Greedy(change),)), "lines")


def test_a_callback_may_change_values_of_a_batch(tmp_path):
    plain = main.train(lines(tmp_path), "lines")
    doubled = main.train(lines(tmp_path, callbacks=(Greedy(lambda b: {**b, "y": 2 * b["y"]}),)), "lines")
    assert doubled["eval_loss"] != plain["eval_loss"]


REFUSED = {
    "open": ({"callbacks": (Greedy(threading.Lock()),)}, "callback Greedy: TypeError"),
    "none": ({"callbacks": (print,)}, "expected a jaxmpi.Callback object"),
    "nothing": ({"callbacks": (Forgetful(),)}, r"callback Forgetful: before_step: got None; expected \(state, batch\)"),
    "name": ({"callbacks": (Misspelt(),)}, "callback Misspelt: got a method after_evalution; did you mean 'after_ev"),
    "one": ({"callbacks": jaxmpi.EarlyStop()}, "expected a tuple of jaxmpi.Callback objects"),
    "figure": ({"callbacks": (jaxmpi.EarlyStop("eval_top1"),)}, "EarlyStop: monitor: got eval_top1"),
}


@pytest.mark.parametrize(("fields", "match"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(fields, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, **fields), "lines")


def test_a_second_run_begins_with_callbacks_as_they_were():
    stop = jaxmpi.EarlyStop()
    [copied] = callbacks.copy_checked((stop,))
    copied.restore({"best": 1.0, "count": 7})
    assert stop.count == 0


def test_a_state_that_is_no_json_is_refused_before_the_first_step(tmp_path):
    stop = jaxmpi.EarlyStop()
    stop.state = lambda: {"seen": np.zeros(2)}
    experiment = lines(tmp_path, callbacks=(stop,))
    with pytest.raises(UsageError, match=r"callback EarlyStop: state: .*; expected JSON values"):
        main.train(experiment, "lines")
    assert not record(experiment.run_dir, "train")


class Moments(jaxmpi.Callback):
    """Notes every moment; what a deep copy notes is in the list of the class."""

    seen: list = []  # noqa: RUF012

    def at_start(self, step, state):
        self.seen.append(("start", step))

    def before_step(self, step, state, batch):
        self.seen.append(("before", step))
        return state, batch

    def after_dispatch(self, step, state):
        self.seen.append(("dispatched", step))

    def after_evaluation(self, moment):
        self.seen.append(("evaluated", moment.step))

    def after_checkpoint(self, step, folder):
        assert (folder / "manifest.json").is_file()
        self.seen.append(("saved", step))

    def at_end(self, figures):
        self.seen.append(("end", sorted(figures)))


def test_all_moments_of_a_run_are_methods(tmp_path):
    Moments.seen = []
    asked = {"callbacks": (Moments(),), "train_for": "2st", "eval_every": "0st", "checkpoint_every": "0st"}
    main.train(lines(tmp_path, **asked), "lines")
    assert Moments.seen == [
        ("start", 0),
        *(("before", 1), ("dispatched", 1), ("before", 2), ("dispatched", 2)),
        *(("evaluated", 2), ("saved", 2), ("end", ["eval_count", "eval_far", "eval_loss"])),
    ]


class Sends(jaxmpi.Callback):
    def __init__(self, method, first_rank_only=False):
        self.first_rank_only = first_rank_only
        setattr(self, method, self.send)

    def send(self, *args):
        jaxmpi.exchange({"x": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    ("callback", "match"),
    [
        (Sends("before_step"), r"Sends: before_step: got jaxmpi\.exchange"),
        (Sends("after_dispatch"), "after_dispatch: got .* do it in at_start, after_evaluation or at_end"),
        (Sends("after_checkpoint"), "after_checkpoint: got jaxmpi.exchange while"),
        (Sends("after_evaluation", True), r"after_evaluation: got jaxmpi\.exchange on rank 0 alone"),
    ],
    ids=["before", "dispatched", "saved", "alone"],
)
def test_a_message_where_there_may_be_none_is_refused(callback, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, callbacks=(callback,)), "lines")


def test_messages_may_be_sent_where_nothing_is_under_way(tmp_path):
    sends = tuple(Sends(method) for method in ("at_start", "after_evaluation", "at_end"))
    assert main.train(lines(tmp_path, callbacks=sends, train_for="1st"), "lines")["eval_count"] > 0


ONE_RANK = """
import numpy as np, jaxmpi
from pathlib import Path
from line_task import lines

class Alone(jaxmpi.Callback):
    first_rank_only = True

    def after_evaluation(self, moment):
        print("on rank", moment.rank, len(list(moment.validation())), "batches", flush=True)

class Sums(jaxmpi.Callback):
    def after_evaluation(self, moment):
        if moment.step == 4 and moment.rank == 0:
            moment.sum(np.zeros(3))

jaxmpi.Trainer(lines(Path("{folder}"), callbacks=(Alone(), Sums()), eval_every="2st")).fit()
"""


@pytest.mark.e2e
@pytest.mark.slow  # a job
def test_a_call_that_one_rank_alone_makes_is_named(tmp_path):
    (tmp_path / "job.py").write_text(ONE_RANK.format(folder=tmp_path))
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=90, env={"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}"})
    assert ended.code == 2, ended.out
    assert ended.out.count("on rank 0 2 batches") == 2
    assert "on rank 1" not in ended.out
    assert "rank 1: next: got the end of Sums.after_evaluation, expected Moment.sum of an array [3]" in ended.out


class Shifts(Greedy):
    first_rank_only = True


@pytest.mark.parametrize("change", [lambda b: {**b, "y": 2 * b["y"]}, in_place(y=lambda y: 2 * y)], ids=["new", "same"])
def test_rank_0_alone_may_not_change_a_batch(change, tmp_path):
    with pytest.raises(UsageError, match="Shifts: before_step: got another state or batch on rank 0 alone"):
        main.train(lines(tmp_path, callbacks=(Shifts(change),)), "lines")
