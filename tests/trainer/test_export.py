"""A trained model gives the run's logits in its own library, by the blocks of docs/models.md."""

import dataclasses
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from safetensors.numpy import load_file

import jaxmpi
from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.exported_files import dotted
from jaxmpi.checkpoint.restore import read_leaves
from jaxmpi.comm.topology import gather_workers
from jaxmpi.core import pytrees
from jaxmpi.data import open_source
from jaxmpi.model.contract import Model
from jaxmpi.rules import base, gradients
from jaxmpi.tools import cli
from jaxmpi.trainer.plan import make_plan
from jaxmpi.trainer.state import initial_states
from launching import ROOT
from runs import column

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own
PAGE = (ROOT / "docs" / "models.md").read_text()
BLOCKS = dict(re.findall(r"<!-- block: (\S+\.py) -->\n```python\n(.*?)^```$", PAGE, re.S | re.M))
ROUNDING = 1e-5  # logits near 1, of sums of some thousand f32 terms in another order


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the page's experiment files, in which modules are found."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "digits.py").symlink_to(ROOT / "experiments" / "digits.py")
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.e2e
@pytest.mark.parametrize(
    "library", ["nnx", "functions", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "equinox"))]
)
def test_a_trained_model_gives_the_runs_logits_in_its_own_library(library, project, as_users_have_it, no_launcher):
    experiment = runpy.run_path(str(project / "experiments" / f"my_{library}.py"))["experiment"]
    short = {"train_for": "30st", "eval_every": "30st", "checkpoint_every": "30st", "quiet": True}
    trainer = jaxmpi.Trainer(dataclasses.replace(experiment, **short, run_dir="run"))
    trainer.fit()
    source = open_source(experiment.data, "validation")
    image, label = map(np.stack, zip(*(source[i] for i in range(len(source))), strict=True))
    want = trainer.predict({"image": image})

    cli.run(["export", "run", "model.safetensors"])  # with the names of the library, and the bits of the run
    tensors, (params, model_state) = load_file("model.safetensors"), trained(experiment.model, project)
    assert {name for name, _ in dotted({"params": params, "model_state": model_state})} == tensors.keys()
    forward, arrays = in_plain_library(library, project, tensors)
    # The same program for XLA: normalised inside, arrays as arguments. In pieces, without jit, it rounds elsewhere.
    np.testing.assert_array_equal(
        jax.jit(lambda arrays, image: forward(arrays, normalised(image)))(arrays, image), want
    )

    cli.run(["export", "run", "exported"])
    logits = runpy.run_path(str(project / f"use_{library}.py"))["logits"]
    x = normalised(jnp.asarray(image))
    np.testing.assert_allclose(logits(x), want, atol=ROUNDING)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits(x), jnp.asarray(label)).mean()
    [recorded] = column(project / "run", "eval", "eval_loss")
    assert abs(float(loss) - recorded) < ROUNDING + 5e-6 * recorded  # the record has six digits

    fresh = experiment.model.init(jax.random.key(0), x[:1])[1]
    if library != "functions":  # the statistics are trained ones, so that their loss would show
        without, _ = experiment.model.apply(params, fresh, x, jax.random.key(0), False)
        assert np.abs(without - want).max() > 1000 * ROUNDING

    again = dataclasses.replace(experiment, params="exported")
    rule = gradients.gradients(optax.sgd(0.1), base.Exchange(lambda tree: tree, lambda tree: tree))
    workers = gather_workers(1)
    [state] = initial_states(make_plan(again, workers), rule).values()  # another run begins with both
    for name, leaf in pytrees.named_leaves({"params": params, "model_state": model_state}):
        np.testing.assert_array_equal(dict(pytrees.named_leaves(state._asdict()))[name], leaf)


def normalised(image: jax.Array) -> jax.Array:
    return (image / 255 - 0.305) / 0.376


def in_plain_library(
    library: str, project: Path, tensors: dict[str, np.ndarray]
) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """(arrays, f32[batch, 8, 8, 1]) -> logits of the network, and a file's tensors as it takes them, without jaxmpi."""
    names = runpy.run_path(str(project / "experiments" / f"my_{library}.py"))
    tree = traverse_util.unflatten_dict(tensors, sep=".")
    if library == "functions":
        return lambda params, x: names["apply"](params, x, None, False), tree["params"]
    if library == "linen":
        return lambda arrays, x: names["Net"]().apply(arrays, x, train=False), {
            "params": tree["params"],
            **tree["model_state"],
        }
    if library == "nnx":
        module = names["Net"](rngs=nnx.Rngs(7))
        for part in tree.values():
            nnx.update(module, nnx.restore_int_paths(jax.tree.map(jnp.asarray, part)))
        module.eval()
        graph, state = nnx.split(module)
        return lambda state, x: nnx.merge(graph, state)(x), state
    net, state = eqx.nn.make_with_state(names["Net"])(jax.random.key(7))
    held = {name.partition(".")[2]: jnp.asarray(leaf) for name, leaf in tensors.items()}
    statistics = tuple(held.pop(f"norm/batch_state_index/{i}") for i in range(2))
    state = state.set(net.norm.batch_state_index, statistics)
    state = state.set(net.norm.batch_counter, jnp.asarray(int(held.pop("norm/batch_counter"))))  # of a weak type
    by_path = lambda path, leaf: held.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)  # noqa: E731
    net = eqx.nn.inference_mode(jax.tree_util.tree_map_with_path(by_path, net))
    arrays, static = eqx.partition((net, state), eqx.is_array)

    def forward(arrays: Any, x: jax.Array) -> jax.Array:
        net, state = eqx.combine(arrays, static)
        return jax.vmap(lambda one: net(one, state, key=None)[0], axis_name="batch")(jnp.moveaxis(x, -1, 1))

    return forward, arrays


def trained(model: Model, project: Path) -> tuple[Any, Any]:
    """Params and model state as the newest checkpoint of one worker has them, without `jaxmpi export`."""
    path = manifests.complete_checkpoints(project / "run" / "checkpoints")[-1]
    manifest = manifests.read_manifest(path)
    likes = jax.eval_shape(model.init, jax.random.key(0), model.example())
    held = {}
    for field, like in zip(("params", "model_state"), likes, strict=True):
        for name, rows in manifest["files"].items():
            index = [row for row in rows if row["path"].startswith(field)]
            if index and jax.tree.leaves(like):
                held[field] = read_leaves(path / name, index, {field: like})[field]
    return held["params"], held.get("model_state", {})
