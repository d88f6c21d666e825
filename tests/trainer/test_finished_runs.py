"""A finished run from Python and from the command line: figures and outputs, by any number of workers."""

import dataclasses
import hmac
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import jaxmpi
from jaxmpi.config import Data, Experiment, experiment_file, flags
from jaxmpi.core.errors import UsageError
from jaxmpi.tools import cli
from jaxmpi.trainer import finished, main
from launching import mpirun_line, run, small_disk, train, train_here
from line_task import LINE, line, lines
from runs import column, record


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
    before = jaxmpi.load(trainer.run_dir, step=2).params["w"]
    np.testing.assert_allclose(trainer.predict(batch, step=2), batch["x"] @ before - batch["y"], atol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Experiment:
    """An experiment whose run directory holds a finished run, to be read only."""
    experiment = lines(tmp_path_factory.mktemp("lines"))
    jaxmpi.Trainer(experiment).fit()
    return experiment


def test_integers_that_jax_would_wrap_are_refused_by_predictions(trained, tmp_path):
    """JAX has no 64 bits: 2^32 + 1 would become 1."""
    large = {**line(4), "tokens": np.full(4, 2**32 + 1)}

    class Asks(jaxmpi.Callback):
        def after_evaluation(self, moment):
            moment.predict(large)

    with pytest.raises(UsageError, match="batch/tokens"):
        jaxmpi.Trainer(trained).predict(large)
    with pytest.raises(UsageError, match="batch/tokens"):
        main.train(lines(tmp_path, callbacks=(Asks(),)), "lines")


@pytest.mark.parametrize(
    "batch", [np.ones(4), {}, {"tokens": None}, {"tokens": [1, 2]}, {"tokens": np.ones((0, 2))}, {"other": np.ones(2)}]
)
def test_what_is_no_batch_is_refused_by_predictions(trained, batch):
    with pytest.raises(UsageError, match="predict: got"):
        jaxmpi.Trainer(trained).predict(batch)


@pytest.mark.e2e
@pytest.mark.slow  # a job of a notebook's
def test_a_notebook_trains_with_processes(tmp_path, capfd, no_launcher):
    class Says(jaxmpi.Callback):  # no module has it, so it travels as it is
        def after_evaluation(self, moment):
            moment.say(f"here are {moment.sum(np.ones(1))[0]:.0f}")

    experiment = lines(tmp_path, callbacks=(Says(),), quiet=False)
    trainer = jaxmpi.Trainer(experiment, workers=2)
    figures = trainer.fit()
    assert "here are 2" in capfd.readouterr().out
    assert trainer.evaluate()["eval_loss"] == pytest.approx(figures["eval_loss"], rel=1e-6)
    alone = main.train(dataclasses.replace(experiment, callbacks=(), run_dir=str(tmp_path / "alone")), "lines")
    assert figures["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    assert not list(Path(experiment.run_dir).glob("from_python*"))  # nothing stays that is unpickled
    with pytest.raises(UsageError, match=r"was started from Python: name a file"):
        cli.run(["evaluate", experiment.run_dir])
    with pytest.raises(UsageError, match=r"2 workers refused it: .*holds a run already"):
        trainer.fit()


@pytest.mark.e2e
def test_a_run_is_started_again_by_its_own_line(tmp_path, monkeypatch):
    """`--from RUN` has its file and flags, but for those given; with `--resume` the run goes on."""
    monkeypatch.chdir(tmp_path)
    begun = ("digits", "--train-for", "4st", "--local-batch", "8", "--optim.lr", "0.02", "--run-dir", "first")
    monkeypatch.setattr(sys, "argv", ["jaxmpi/train.py", *begun])
    assert train_here(*begun).code == 0
    assert json.loads(Path("first/config.json").read_text())["ranks"] == 1
    edit(Path("first/config.json"), ranks=2)
    other = ("--optim.lr", "0.03", "--from", "first", "--effective-batch", "16", "--run-dir", "other")
    ended = run([sys.executable, "-m", "jaxmpi.tools.cli", "train", *other], timeout_s=120, cwd=tmp_path)
    assert ended.code == 0, ended.out
    assert "first had -n 2, this run has -n 1" in ended.out
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (config["experiment"]["optim"]["lr"], config["effective_batch"]) == (0.03, 16)
    assert config["experiment"]["train_for"] == "4st"
    assert "--from" not in config["command"]
    ended = train_here(*experiment_file.take_run(["--from=other", "--resume", "--train-for", "6st"]))
    assert ended.code == 0, ended.out
    assert column(tmp_path / "other", "train", "step")[-1] == 6
    with pytest.raises(UsageError, match="nowhere"):
        experiment_file.take_run(["--from", "nowhere"])


def test_what_cannot_go_to_processes_is_named(tmp_path):
    lock = threading.Lock()
    trainer = jaxmpi.Trainer(lines(tmp_path, sinks=(lambda row: lock,)), workers=2)
    with pytest.raises(UsageError, match=r"cannot go to other processes: .*; make that object inside"):
        trainer.fit()


def test_what_is_no_experiment_or_was_not_trained_is_named(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint; name a run directory"):
        jaxmpi.Trainer(lines(tmp_path)).evaluate()


def test_a_run_of_another_model_is_named(trained):
    wide = {name: np.tile(values, (1, 2)) if name == "x" else values for name, values in line(9).items()}
    other = dataclasses.replace(trained, data=Data("array", train=wide, validation=wide, loader="threads"))
    with pytest.raises(UsageError, match=r"params/w: got float32\[3\], expected float32\[6\]"):
        jaxmpi.Trainer(other).evaluate()


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A run of the digits by the command line, to be read only, and the figures of its evaluation."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    argv = ["experiments/digits.py", "--train-for", "6st", "--run-dir", str(run_dir)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxmpi/train.py", *argv])
        done = train_here(*argv)
    assert done.code == 0, done.out
    [figures] = record(run_dir, "eval")
    return run_dir, figures


@pytest.mark.e2e
def test_the_command_line_by_one_and_by_two_workers(digits_run, tmp_path, capsys):
    run_dir, figures = digits_run
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        cli.run(["evaluate", str(run_dir)])
        got = json.loads(capsys.readouterr().out.splitlines()[-1])
        cli.run(["predict", str(run_dir), str(tmp_path / "one.npz")])
    assert got["step"] == 6
    for name in ("eval_count", "eval_top1", "eval_top5", "eval_loss"):
        assert got[name] == pytest.approx(figures[name], rel=2e-6)  # the record has six digits
    done = run([*mpirun_line(2), "jaxmpi", "predict", str(run_dir), str(tmp_path / "two.npz")], timeout_s=100)
    assert "outputs float32[360, 10], by the model of step 6" in done.out
    outputs = [np.load(tmp_path / f"{name}.npz")["outputs"] for name in ("one", "two")]
    np.testing.assert_allclose(*outputs, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("rule", ["gradients", pytest.param("easgd", marks=pytest.mark.slow)])
def test_two_workers_evaluate_several_splits_as_one_evaluates_each(rule, tmp_path, capsys, monkeypatch):
    """Two devices; two ranks of an asynchronous rule, whose first evaluates alone."""
    rng, counts = np.random.default_rng(0), {"train": 256, "val": 113, "test": 87}
    for name, n in counts.items():
        image = rng.integers(0, 256, (n, 8, 8, 1), np.uint8)
        np.savez(tmp_path / f"{name}.npz", image=image, label=rng.integers(0, 10, n))
    data = ("--data.source", "numpy", "--data.dir", str(tmp_path), "--data.validation-split", "val,test")
    run_dir, more = str(tmp_path / "run"), ("--train-for", "4st", "--monitor", "eval_test_top1", "--rule.name", rule)
    line = ("digits", *data, *more, "--run-dir", run_dir)
    monkeypatch.setattr(sys, "argv", ["jaxmpi/train.py", *line])
    done = train(2, *line) if rule == "easgd" else train_here(*line, "--devices", "2")
    assert done.code == 0, done.out
    assert "evaluation on 200: val_loss" in done.out
    [figures] = record(run_dir, "eval")
    for name in ("val", "test"):
        cli.run(["evaluate", run_dir, "--best", "--data.validation-split", name])
        got = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert got["eval_count"] == counts[name]
        for figure in ("loss", "top1", "top5"):
            assert figures[f"eval_{name}_{figure}"] == pytest.approx(got[f"eval_{figure}"], rel=1e-5)


def test_outputs_that_the_trainer_has_names_for_are_not_lost(trained):
    def predict(params, state, batch):
        return {"": batch["x"], "weight": batch["x"] @ params["w"], "outputs": batch["y"], "file": batch["x"] > 0}

    task = dataclasses.replace(LINE, predict=predict)
    outputs = finished.open_finished(dataclasses.replace(trained, task=task), Path(trained.run_dir)).predict_all()
    data, w = line(13, 1), jaxmpi.load(trained.run_dir).params["w"]
    np.testing.assert_allclose(outputs["weight"], data["x"] @ w, atol=1e-5)
    np.testing.assert_array_equal(outputs["outputs"], data["y"])
    np.testing.assert_array_equal(outputs[""], data["x"])


def test_a_full_disk_leaves_nothing_of_the_outputs(digits_run, tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:  # 360 examples x 10 classes x 4 bytes are less than this
        (disk / "ballast").write_bytes(b"x" * (8 << 10))
        with pytest.raises(UsageError, match=r"out\.npz: cannot be written"):
            cli.run(["predict", str(digits_run[0]), str(disk / "out.npz")])
        assert os.listdir(disk) == ["ballast"]


REFUSED = {
    "folder": (["nowhere"], "nowhere/config.json: no such file"),
    "step": (["{run}", "--step", "5"], "run: step: got 5; there are 6: name one of them"),
    "workers": (["{run}", "-n", "2"], "got -n; several workers are started by a launcher: mpirun -n 8 jaxmpi evaluate"),
    "field": (["{run}", "--data.dirr", "x"], "unknown field --data.dirr"),
    "no folder": (["{run}", "--data.dir", "x"], r"data\.dir: got .* digits, which has no folder"),
}


@pytest.mark.parametrize(("argv", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_is_named(argv, match, digits_run):
    with pytest.raises(UsageError, match=match):
        cli.run(["evaluate", *(word.format(run=digits_run[0]) for word in argv)])


@pytest.mark.parametrize(
    ("argv", "holdout"),
    [
        ([], 0.2),
        (["--data.dir", "x"], 0.0),
        (["--data.validation-split=noisy"], 0.0),
        (["--data.dir", "x", "--data.holdout", "0.3"], 0.3),
    ],
)
def test_examples_that_are_named_are_evaluated_whole(argv, holdout, tmp_path):
    line = ["train", "digits", "--data.source", "numpy", "--data.dir", "own", "--data.holdout", "0.2"]
    (tmp_path / "config.json").write_text(json.dumps({"command": line, "experiment": {}}))
    assert finished.experiment_of(tmp_path, argv).data.holdout == holdout


def test_examples_that_are_named_take_the_place_of_sets_by_name(tmp_path):
    file, data = tmp_path / "mine.py", "Data('numpy', dir='own', validation={'noisy': Data('numpy', dir='noisy')})"
    file.write_text(f"from jaxmpi.config import Data, Experiment\nexperiment = Experiment(data={data})\n")
    plain = flags.to_json(experiment_file.parse([str(file)])[0])
    (tmp_path / "config.json").write_text(json.dumps({"command": ["train", str(file)], "experiment": plain}))
    for argv, names in ([], {"noisy"}), (["--data.dir", "x"], set()):
        assert {*(finished.experiment_of(tmp_path, argv, str(file)).data.validation or ())} == names


CODE = """
from pathlib import Path
from jaxmpi.experiments.digits import experiment
(Path(__file__).parent / "executed").touch()
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A folder with an experiment file, a run that this user has begun with it, and this user's cache folder."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["jaxmpi/train.py", "mine.py", "--train-for", "1st", "--run-dir", "run"])
        assert train_here(*sys.argv[1:]).code == 0
    (folder / "executed").unlink()
    return folder


def test_an_own_run_is_evaluated_from_any_folder(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(begun / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(begun / "run", "run")
    cli.run(["evaluate", "run"])
    (begun / "executed").unlink()


def edit(config: Path, **fields: Any) -> None:
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


def sign_with_empty_key(config: Path) -> None:
    Path("cache/jaxmpi/key/key").write_bytes(b"")
    signed = json.dumps([["train.py", "other.py"], "other.py"]).encode()
    signature = hmac.new(b"", signed, "sha256").hexdigest()
    edit(config, command=["train.py", "other.py"], experiment_path="other.py", signature=signature)


STRANGERS = {  # what differs from a run that this user has begun here
    "another user": lambda config: shutil.rmtree("cache/jaxmpi/key"),
    "path": lambda config: edit(config, experiment_path="other.py"),
    "command": lambda config: edit(config, command=["train.py", "other.py"]),
    "no signature": lambda config: edit(config, signature=None),
    "empty signature, no key": lambda config: (edit(config, signature=""), os.chmod("cache/jaxmpi/key", 0o777)),
    "signed with the empty key that a crash left": lambda config: sign_with_empty_key(config),
    "name of one that ships": lambda config: edit(config, command=["train.py", "experiments/digits.py"]),
}
COMMANDS = {"evaluate": ("evaluate",), "predict": ("predict", "out.npz"), "export": ("export", "out.jaxexport")}


@pytest.mark.parametrize(
    ("change", "command"), [*((each, "evaluate") for each in STRANGERS), ("command", "predict"), ("command", "export")]
)
def test_a_file_that_a_strangers_run_names_is_not_executed(change, command, begun, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.chdir(tmp_path)
    for name in ("other.py", "experiments/digits.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(CODE)
    STRANGERS[change](tmp_path / "run" / "config.json")
    name, *out = COMMANDS[command]
    with pytest.raises(UsageError, match="--experiment"):
        cli.run([name, "run", *out])
    assert not [*tmp_path.rglob("executed")]


MALFORMED = {
    "deep": "[" * 100_000,
    "deep-experiment": '{"command": [], "experiment": ' + '{"a": ' * 300 + "1" + "}" * 301,
    "digits": '{"command": ' + "1" * 5000 + "}",
    "no-list": '{"command": 3, "experiment": {}}',
    "no-object": "[]",
    "bytes": "\udcff",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_configuration_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"config\.json"):
        cli.run(["evaluate", str(tmp_path)])


MINE = """
from pathlib import Path
from line_task import lines
experiment = lines(Path({folder!r}))
"""


def test_a_run_that_python_started_is_evaluated_by_a_file_that_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE.format(folder=str(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["notebook"])
    trainer = jaxmpi.Trainer(lines(tmp_path))
    figures = trainer.fit()
    named = [str(trainer.run_dir), "--experiment", str(tmp_path / "mine.py")]
    cli.run(["evaluate", *named])
    got = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert got == {"step": 7, **{name: pytest.approx(value, rel=1e-6) for name, value in figures.items()}}
    with pytest.raises(UsageError, match=r"mine\.py is not the run's:\n  compute_dtype: got bfloat16"):
        cli.run(["evaluate", *named, "--compute-dtype", "bfloat16"])


def write_images(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Write grey 8 x 8 images; return them by name."""
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (8, 8), np.uint8) for name in names}
    for name, pixels in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    return images


IMAGES = """
from jaxmpi.config import Data, Experiment
from jaxmpi.models.cnn import digits_cnn_tiny

experiment = Experiment(
    model=digits_cnn_tiny(),
    data=Data("imagefolder", channels=1, dir={root!r}, validation_split="val", loader="threads"),
    effective_batch=4,
    train_for="1st",
)
"""


@pytest.mark.e2e
def test_predictions_of_other_folders_have_labels_and_names_of_classes_and_files(tmp_path, capsys):
    classes = [f"c{i}" for i in range(10)]
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split, [f"{name}/{i}.png" for name in classes for i in range(2)])
    file, run_dir = tmp_path / "images.py", tmp_path / "run"
    file.write_text(IMAGES.format(root=str(tmp_path / "data")))
    ended = train_here(str(file), "--run-dir", str(run_dir))
    assert ended.code == 0, ended.out
    command = [str(run_dir), "--experiment", str(file)]
    cli.run(["predict", *command[:1], str(tmp_path / "out.npz"), *command[1:]])
    with np.load(tmp_path / "out.npz") as out:
        assert out["outputs"].shape == (20, 10)
        assert out["label"].tolist() == [i for i in range(10) for _ in range(2)]
        assert out["class_names"].tolist() == classes
        assert out["file"][3] == str(tmp_path / "data" / "val" / "c1" / "1.png")
    write_images(
        tmp_path / "renamed" / "val", [f"{name.replace('c3', 'c33')}/{i}.png" for name in classes for i in range(2)]
    )
    with pytest.raises(UsageError, match="got c33 as class 3; expected c3"):
        cli.run(["evaluate", *command, "--data.dir", str(tmp_path / "renamed")])
    images = write_images(tmp_path / "photos" / "new", [f"{i}.png" for i in range(5)])
    other = ["--data.dir", str(tmp_path / "photos"), "--data.validation-split", "new"]
    cli.run(["predict", *command[:1], str(tmp_path / "new.npz"), *command[1:], *other])
    with np.load(tmp_path / "new.npz") as out:
        assert sorted(out) == ["class_names", "file", "outputs"]
        assert out["class_names"].tolist() == classes  # of training
        assert [Path(name).name for name in out["file"]] == list(images)
        pixels = np.stack([*images.values()])[..., None]
        experiment = experiment_file.parse([str(file), "--run-dir", str(run_dir)])[0]
        np.testing.assert_allclose(jaxmpi.Trainer(experiment).predict({"image": pixels}), out["outputs"], atol=1e-5)
    with pytest.raises(UsageError, match="without folders of classes"):
        cli.run(["evaluate", *command, *other])
