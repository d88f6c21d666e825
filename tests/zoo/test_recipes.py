"""The experiments' recipes against the papers' numbers, and that each has one for embedded data."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.config import experiment_file
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.data import open_source
from jaxmpi.optim import schedules
from jaxmpi.trainer.plan import rate_factor
from launching import ROOT, train
from runs import column

FILES = sorted((ROOT / "experiments").glob("*.py"))
BELOW = [path for room in ("dimd", "scaling") for path in sorted((ROOT / "experiments" / room).glob("*.py"))]
OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
STEPS = 1000  # an epoch
OWN = None  # the optimizer's own momentum, 0.9: tests/optim/test_optimizers.py
TOO_BIG = ("lm300m",)  # 7 GB a rank and more
QUICK = ("scaling/alexnet",)  # to compile and to evaluate; other tests train digits.py by two ranks


def recipe(name: str) -> Experiment:
    return experiment_file.load(ROOT / "experiments" / f"{name}.py")


def rates(experiment: Experiment, workers: int, epochs: list[float]) -> list[float]:
    """Return the rates that each worker runs at these epochs."""
    factor = rate_factor(experiment.optim, experiment.local_batch * workers)
    clock = schedules.Clock(STEPS, experiment.local_batch * workers, 90 * STEPS)
    lr = schedules.schedule(experiment.schedule, clock, experiment.optim.lr * factor, workers)
    return [np.asarray(lr(round(epoch * STEPS))).item() for epoch in epochs]


@pytest.mark.parametrize(("workers", "lr"), [(1, 0.01), (2, 0.01), (4, 0.01), (8, 0.005)])
def test_alexnet(workers, lr, no_launcher, monkeypatch):
    """Ma et al. 2016, table 1, by number of workers; divided by 10 every 20 epochs."""
    for variable, value in zip(OMPI, ("0", str(workers)), strict=True):
        monkeypatch.setenv(variable, value)
    experiment = recipe("alexnet")
    assert (experiment.local_batch, experiment.train_for, experiment.rule.name) == (128, "70ep", "subgd")
    assert (experiment.optim.name, experiment.optim.momentum, experiment.data.crop) == ("momentum", OWN, 227)
    assert (experiment.optim.bias_lr_factor, experiment.optim.decay_bias, experiment.optim.weight_decay) == (
        2,
        False,
        5e-4,
    )
    assert rates(experiment, workers, [0, 19.9, 20, 40, 60]) == pytest.approx([lr, lr, lr / 10, lr / 100, lr / 1000])


@pytest.mark.parametrize(("workers", "lr"), [(1, 0.01), (2, 0.007), (4, 0.005), (8, 0.005)])
def test_googlenet(workers, lr, no_launcher, monkeypatch):
    """Ma et al. 2016, table 1 and footnote 13; AWAGD runs k times the rate."""
    for variable, value in zip(OMPI, ("0", str(workers)), strict=True):
        monkeypatch.setenv(variable, value)
    experiment = recipe("googlenet")
    assert (experiment.local_batch, experiment.rule.name, experiment.optim.weight_decay) == (32, "awagd", 2e-4)
    assert (experiment.optim.bias_lr_factor, experiment.optim.decay_bias) == (2, False)
    assert (experiment.optim.name, experiment.optim.momentum, experiment.data.crop) == ("momentum", OWN, 224)
    expected = [workers * lr * (1 - epoch / 240) ** 0.5 for epoch in (0, 0, 60)]
    assert rates(experiment, workers, [0, 0.9, 60]) == pytest.approx(expected)


def test_vgg16():
    experiment = recipe("vgg16")
    assert (experiment.optim.bias_lr_factor, experiment.optim.decay_bias, experiment.optim.momentum) == (2, False, OWN)
    assert experiment.data.crop == 224
    assert (experiment.local_batch, experiment.train_for, experiment.optim.weight_decay) == (32, "40ep", 5e-4)
    assert rates(experiment, 8, [0, 14.9, 15, 30, 35]) == pytest.approx([2e-3, 2e-3, 2e-4, 2e-5, 2e-6])


@pytest.mark.parametrize("name", ["resnet50", "googlenetbn", "dimd/resnet50", "dimd/googlenetbn"])
@pytest.mark.parametrize(("workers", "local_batch"), [(4, 64), (256, 64), (8, 128)])
def test_ibm(name, workers, local_batch):
    """From 0.1 to 0.1 b n / 256 over 5 epochs, divided by 10 every 30 of 90; crops of random area and aspect."""
    assert recipe(name).local_batch == 64
    experiment, peak = dataclasses.replace(recipe(name), local_batch=local_batch), 0.1 * local_batch * workers / 256
    assert (experiment.train_for, experiment.data.crop) == ("90ep", 224)
    assert (experiment.data.crop_area, experiment.data.mirror) == ((0.08, 1.0), True)
    assert (experiment.optim.name, experiment.optim.momentum, experiment.optim.weight_decay) == ("momentum", OWN, 1e-4)
    expected = [0.1, (0.1 + peak) / 2, peak, peak, peak / 10, peak / 100]
    assert rates(experiment, workers, [0, 2.5, 5, 29.9, 30, 60]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_experiment_runs_on_embedded_data(file: Path):
    experiment = experiment_file.load(file)
    embedded = experiment.fallback or experiment
    source = open_source(embedded.data, "train")
    image, _ = source[0]
    channels = () if embedded.model.takes_tokens else (embedded.data.channels,)
    assert (*image.shape[:2], *channels) == embedded.model.input_shape
    assert source.classes == embedded.model.classes or file.stem == "lm300m"  # which knows words, of which few occur


@pytest.mark.e2e
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(ROOT / "experiments" / f"{name}.py", marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in (str(f.relative_to(ROOT / "experiments").with_suffix("")) for f in [*FILES, *BELOW])
        if name not in TOO_BIG
    ],
)
def test_two_steps_on_embedded_data(file: Path, tmp_path):
    """The file as its header has it, by two ranks, but for its length."""
    args = ("--train-for", "2st", "--log-every", "1", "--run-dir", str(tmp_path / "run"))
    ended = train(2, str(file), *args, timeout_s=280, env={"JAXMPI_DATA": ""})
    assert ended.code == 0, ended.out
    assert column(tmp_path / "run", "train", "step") == [1, 2]
    assert all(map(math.isfinite, column(tmp_path / "run", "train", "loss")))
    source = "stdlib" if file.stem in ("gpt", "lstm") else "animals" if file.parent.name == "scaling" else "digits"
    examples = len(open_source(Data(source), "validation"))
    assert column(tmp_path / "run", "eval", "eval_count") == [examples]
    if (embedded := experiment_file.load(file).fallback) is not None:
        assert ended.out.count(f"training {embedded.model.name} on the embedded digits, with a recipe of its own") == 1
