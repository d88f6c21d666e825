"""IBM's way in two commands: a folder of images is packed, then trained on from memory over colours."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmpi.data import command
from launching import train

CLASSES, TRAIN, VALIDATION = 3, 8, 4  # images of each class
# The recipe with a model that compiles in no time, and smaller images and batch.
EXPERIMENT = """
import dataclasses
import jax.numpy as jnp
from jaxmpi.experiments.dimd.resnet50 import experiment as paper
from jaxmpi.model import Model

def init(key, image):
    return {"w": jnp.zeros((32 * 32 * 3, 3)), "b": jnp.zeros(3)}, {}

def apply(params, model_state, image, key, train):
    return image.reshape(len(image), -1) @ params["w"] + params["b"], model_state

data = dataclasses.replace(paper.data, resize=36, crop=32)
model = Model("softmax", init, apply, input_shape=(32, 32, 3), classes=3)
experiment = dataclasses.replace(paper, model=model, data=data, local_batch=4)
"""


def folder_of_jpegs(place: Path) -> None:
    """Photographs of noise around a colour of their class, of several sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        for label in range(CLASSES):
            folder = place / split / f"colour_{label:03}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (48 + i, 64, 3), np.uint8)
                pixels[..., label % 3] += 100
                Image.fromarray(pixels).save(folder / f"{i}.jpg", quality=90)


@pytest.mark.e2e
def test_a_folder_of_jpegs_is_trained_on_from_memory_in_two_commands(tmp_path, capsys):
    folder_of_jpegs(tmp_path / "images")
    (tmp_path / "small.py").write_text(EXPERIMENT)
    command.main(["pack", str(tmp_path / "images"), str(tmp_path / "packed"), "--resize", "36"])
    assert f"{CLASSES * TRAIN} records" in capsys.readouterr().out
    args = ("--train-for", "2ep", "--log-every", "1", "--run-dir", str(tmp_path / "run"))
    ended = train(2, str(tmp_path / "small.py"), "--data.dir", str(tmp_path / "packed"), *args)
    assert ended.code == 0, ended.out
    assert "softmax: 2 workers x local batch 4 = effective batch 8; 24 examples, 3 steps an epoch" in ended.out
    assert "lr 0.1 x 0.03125 (batch 8 / 256) = 0.003125; rule gradients, strategy color4:32" in ended.out
    rows = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    assert [row["eval_count"] for row in rows if row["kind"] == "eval"] == [CLASSES * VALIDATION] * 2
