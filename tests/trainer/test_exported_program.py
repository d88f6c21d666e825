"""A model as a program: JAX alone gives the trainer's outputs, bit for bit; the file says what it takes; refusals."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from flax import nnx

import jaxmpi
from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.core.errors import UsageError
from jaxmpi.model import nnx_model
from jaxmpi.models.gpt import gpt_tiny
from jaxmpi.models.norm import BatchNorm
from jaxmpi.tools import cli
from jaxmpi.trainer import finished
from launching import ROOT
from line_task import LINE, line, lines

[SNIPPET] = re.findall(
    r"<!-- block: use_jaxexport.py -->\n```python\n(.*?)^```$", (ROOT / "docs" / "models.md").read_text(), re.S | re.M
)
# Neither jaxmpi nor the model's code or library.
JAX_ALONE = f"""
import sys
sys.modules.update(dict.fromkeys(("jaxmpi", "models", "flax", "optax", "mpi4py"), None))
{SNIPPET}
import numpy as np
for n in (1, 7):
    np.save(f"outputs{{n}}.npy", outputs(np.load(f"image{{n}}.npy")))
print(model.fun_name, model.platforms, *model.in_avals, *model.out_avals)
"""
SHORT = {"effective_batch": 8, "train_for": "3st", "eval_every": "3st", "checkpoint_every": "3st", "quiet": True}


class Net(nnx.Module):
    """A convolution, batch norm, logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv, self.norm = nnx.Conv(1, 16, (3, 3), rngs=rngs), BatchNorm(16, eps=1e-5)
        self.logits = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.logits(jax.nn.relu(self.norm(self.conv(x), train)).mean((1, 2)))


def classifier(folder: Path) -> Experiment:
    """An experiment on images of u8, with batch norm."""
    model = nnx_model(Net, name="net", input_shape=(8, 8, 1), classes=10)
    return Experiment(model=model, data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)), optim=Optim(lr=0.1))


def language_model(folder: Path) -> Experiment:
    """An experiment on tokens; what is evaluated is a schedule-free average."""
    for split in ("train", "validation"):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "a.txt").write_text((ROOT / "README.md").read_text())
    data = Data("text", dir=str(folder / "text"), window=16)
    return Experiment(model=gpt_tiny(window=16), data=data, optim=Optim("schedule_free_adamw", lr=0.01))


MODELS = {
    "classifier": (classifier, "uint8[batch,8,8,1]", "float32[batch,10]"),
    "language model": (language_model, "int32[batch,16]", "float32[batch,16,256]"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["classifier", pytest.param("language model", marks=pytest.mark.slow)])
def test_jax_alone_gives_the_trainers_outputs_bit_for_bit(name, tmp_path, no_launcher, as_users_have_it):
    make, inputs, outputs = MODELS[name]
    trainer = jaxmpi.Trainer(dataclasses.replace(make(tmp_path), **SHORT, run_dir=str(tmp_path / "run")))
    trainer.fit()
    trainer.export(tmp_path / "model.jaxexport")
    images = np.asarray(finished.open_finished(trainer.experiment, trainer.run_dir).example()["image"])
    for n in (1, 7):
        np.save(tmp_path / f"image{n}.npy", images[:n])
    line = [sys.executable, "-c", JAX_ALONE]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"step_3 ('cpu', 'cuda', 'tpu') {inputs} {outputs}" in done.stdout
    for n in (1, 7):
        np.testing.assert_array_equal(np.load(tmp_path / f"outputs{n}.npy"), trainer.predict({"image": images[:n]}))


def test_a_flipped_bit_of_a_program_or_of_its_facts_is_noticed(line_run, tmp_path):
    file, facts = tmp_path / "model.jaxexport", tmp_path / "model.jaxexport.json"
    trainer_of(line_run, heights).export(file, platforms=("cpu",))
    batch = {name: line(4)[name] for name in ("x", "tokens")}
    want = called(file, batch)
    jax.tree.map(np.testing.assert_array_equal, jaxmpi.load_program(file).call(batch), want)
    for damaged in (file, facts):
        raw = damaged.read_bytes()
        for place in np.random.default_rng(0).choice(8 * len(raw), 100, replace=False).tolist():
            changed = bytearray(raw)
            changed[place // 8] ^= 1 << place % 8
            damaged.write_bytes(changed)
            with pytest.raises(UsageError, match=r"model\.jaxexport"):
                jaxmpi.load_program(file)
        damaged.write_bytes(raw)
    facts.write_text(json.dumps(json.loads(facts.read_bytes()), sort_keys=True))  # the same facts in another order
    jax.tree.map(np.testing.assert_array_equal, jaxmpi.load_program(file).call(batch), want)
    with pytest.raises(UsageError, match="load_program"):
        jaxmpi.load(file)
    for text in ('{"sha256": 3}', "[]"):
        facts.write_text(text)
        with pytest.raises(UsageError, match=r"model\.jaxexport"):
            jaxmpi.load_program(file)
    facts.unlink()
    with pytest.raises(UsageError, match=r"model\.jaxexport\.json"):
        jaxmpi.load_program(file)


def called(file: Path, batch: dict) -> Any:
    return jax.export.deserialize(bytearray(file.read_bytes())).call(batch)


@pytest.fixture(scope="module")
def line_run(tmp_path_factory) -> Experiment:
    experiment = lines(tmp_path_factory.mktemp("line"))
    jaxmpi.Trainer(experiment).fit()
    return experiment


def trainer_of(experiment: Experiment, predict) -> jaxmpi.Trainer:
    """A trainer of the trained run, with predictions of another kind."""
    return jaxmpi.Trainer(dataclasses.replace(experiment, task=dataclasses.replace(LINE, predict=predict)))


def heights(params, model_state, batch):
    """Return predictions from all fields but y, in a tree of their own, of which `jaxmpi predict` has the names."""
    height = batch["x"] @ params["w"]
    return {"height": height, "more": [batch["tokens"], height > 0]}


def test_it_takes_the_fields_that_it_needs_and_says_what_it_gives(line_run, tmp_path):
    trainer = trainer_of(line_run, heights)
    trainer.export(tmp_path / "model.jaxexport")
    facts = json.loads((tmp_path / "model.jaxexport.json").read_text())
    integer = facts["inputs"]["tokens"]["dtype"]
    assert facts["inputs"] == {
        "tokens": {"dtype": integer, "shape": ["batch"]},
        "x": {"dtype": "float32", "shape": ["batch", 3]},
    }
    assert facts["outputs"] == {
        "height": {"dtype": "float32", "shape": ["batch"]},
        "more/0": {"dtype": integer, "shape": ["batch"]},
        "more/1": {"dtype": "bool", "shape": ["batch"]},
    }
    assert (facts["model"], facts["step"], facts["platforms"]) == ("line", 7, ["cpu", "cuda", "tpu"])
    batch = line(5, 2)
    batch = {"x": batch["x"], "tokens": batch["tokens"].astype(integer)}
    got = called(tmp_path / "model.jaxexport", batch)
    np.testing.assert_array_equal(got["height"], trainer.predict(batch)["height"])
    np.testing.assert_array_equal(got["more/0"], batch["tokens"])


def test_a_model_that_must_know_the_number_of_examples_is_exported_for_one(line_run, tmp_path):
    trainer = trainer_of(line_run, lambda params, model_state, batch: batch["x"] @ params["w"] * len(batch["x"]))
    with pytest.raises(UsageError, match=r"line cannot be exported .*--batch"):
        trainer.export(tmp_path / "any.jaxexport")
    trainer.export(tmp_path / "two.jaxexport", batch=2)
    x = line(2)["x"]
    np.testing.assert_array_equal(called(tmp_path / "two.jaxexport", {"x": x})["outputs"], trainer.predict({"x": x}))
    with pytest.raises(ValueError, match="2"):
        called(tmp_path / "two.jaxexport", {"x": line(3)["x"]})


def test_a_platform_for_which_it_cannot_be_lowered_is_refused(line_run, tmp_path):
    def predict(params, model_state, batch):
        return jax.lax.platform_dependent(batch["x"] @ params["w"], cpu=lambda y: 2 * y, tpu=lambda y: 3 * y)

    trainer = trainer_of(line_run, predict)
    with pytest.raises(UsageError, match=r"line cannot be exported .*--platforms"):
        trainer.export(tmp_path / "model.jaxexport")
    trainer.export(tmp_path / "model.jaxexport", platforms=("cpu", "tpu"))


def test_what_cannot_be_exported_is_named_and_leaves_nothing(line_run, tmp_path):
    def outside(params, model_state, batch):
        y = batch["x"] @ params["w"]
        return jax.pure_callback(np.sin, y, y)

    trainer = trainer_of(line_run, outside)
    before = set(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"line cannot be exported .*callback"):
        trainer.export(tmp_path / "model.jaxexport")
    for name, platforms in (("model.onnx", ()), ("model.jaxexport", ("cpu", "gpu"))):
        with pytest.raises(UsageError, match=r"onnx|gpu"):
            trainer.export(tmp_path / name, platforms=platforms)
    for name in ("model.jaxexport", "model.jaxexport.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(UsageError, match=f"{name} exists"):
            trainer.export(tmp_path / "model.jaxexport")
        (tmp_path / name).unlink()
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match="--batch"):
        cli.run(["export", str(trainer.run_dir), str(tmp_path / "folder"), "--batch", "2"])
