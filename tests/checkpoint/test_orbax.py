"""Params go out to Orbax and come back; what is not of this model is refused by path."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxmpi.checkpoint import export, exported_files, manifests
from jaxmpi.checkpoint.manager import Retention, UncoordinatedCheckpoint, files_of, save
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core import pytrees
from jaxmpi.core.errors import UsageError
from jaxmpi.core.train_state import create
from jaxmpi.optim import optimizers
from jaxmpi.rules import base
from jaxmpi.rules.synchronous import easgd_sync
from jaxmpi.tools import cli
from launching import run, small_disk

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own
STATE = {"norm": {"mean": np.arange(3, dtype=np.float32)}, "calls": np.full((), 4, np.int32)}
PARAMS = {
    "conv": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.full(2, 7, np.float32)},
    "half": np.full(3, -0.5, ml_dtypes.bfloat16),
}


def saved(folder, states, step=0, replicated=False, **how):
    """The model in a checkpoint of these states, by path."""
    files = files_of(states, replicated, **how)
    save(folder, files, SoloProcesses(), step=step, workers=len(states), extra={}, keep=Retention(2))
    return export.model_of(manifests.complete_checkpoints(folder)[0])


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    for step in (3, 9):
        params = jax.tree.map(lambda x, step=step: x + np.asarray(step, x.dtype), PARAMS)
        state = create(params, STATE, {}, seed=0, worker=0)._replace(step=np.full((), step, np.int32))
        saved(tmp_path / "run" / "checkpoints", {0: state}, step, replicated=True)
    return tmp_path / "run"


def test_an_export_can_be_loaded(run_dir, tmp_path):
    cli.run(["export", str(run_dir), str(tmp_path / "out"), "--step", "3"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    got = exported_files.params_from_orbax(tmp_path / "out", like, STATE)
    assert got.has_state
    jax.tree.map(np.testing.assert_array_equal, got.model_state, STATE)
    for one, other in zip(jax.tree.leaves(got.params), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(one, other + np.asarray(3, other.dtype))
        assert one.dtype == other.dtype
    with pytest.raises(UsageError, match="exists; name a new folder"):
        cli.run(["export", str(run_dir), str(tmp_path / "out")])
    for change, message in (
        ({"half": jnp.zeros(4, jnp.bfloat16)}, r"params/half: got bfloat16\[3\], expected bfloat16\[4\]"),
        ({"more": jnp.zeros(1)}, r"more: got nothing, expected float32\[1\]"),
    ):
        with pytest.raises(UsageError, match=message):
            exported_files.params_from_orbax(tmp_path / "out", {**PARAMS, **change}, STATE)
    with pytest.raises(UsageError, match=r"half: got bfloat16\[3\], expected nothing"):
        exported_files.params_from_orbax(tmp_path / "out", {"conv": PARAMS["conv"]}, STATE)
    with pytest.raises(UsageError, match=r"model_state/calls: got int32\[\], expected nothing"):
        exported_files.params_from_orbax(tmp_path / "out", PARAMS, {})
    next((tmp_path / "out").glob("**/_METADATA")).write_text("{")
    with pytest.raises(UsageError, match=r"cannot be read|is not of this model"):
        exported_files.params_from_orbax(tmp_path / "out", like, {})


def test_the_mean_of_workers_with_different_params_is_exported(tmp_path):
    states = {}
    for worker in range(2):
        params = jax.tree.map(lambda x, by=worker: np.asarray(x + np.asarray(2 * by, x.dtype)), PARAMS)
        model_state = {**STATE, "calls": np.full((), worker, np.int32), "var": np.full(2, worker, np.float32)}
        states[worker] = create(params, model_state, {}, seed=0, worker=worker)
    mean = saved(tmp_path, states, same_params=False)
    for name, leaf in pytrees.named_leaves({"params": PARAMS}):
        np.testing.assert_array_equal(mean[name], leaf + np.asarray(1, leaf.dtype))
    np.testing.assert_array_equal(mean["model_state/var"], [0.5, 0.5])
    np.testing.assert_array_equal(mean["model_state/norm/mean"], STATE["norm"]["mean"])
    np.testing.assert_array_equal(mean["model_state/calls"], 0)  # a count has no mean: it is worker 0's


def test_the_average_of_a_schedule_free_optimizer_is_exported(tmp_path):
    """Beside others, which have another one, in each worker's own file."""
    free = optax.contrib.schedule_free_sgd(0.5, b1=0.6)
    kinds = {"conv": {"kernel": "free", "a/b": "rest"}, "half": "rest"}
    tx = optax.chain(optax.clip(1.0), optax.multi_transform({"free": free, "rest": optax.sgd(0.1)}, kinds))
    params, rule_state = PARAMS, tx.init(jax.tree.map(jnp.asarray, PARAMS))
    for _ in range(3):
        updates, rule_state = tx.update(jax.tree.map(jnp.ones_like, params), rule_state, params)
        params = optax.apply_updates(params, updates)
    states = {worker: create(params, {}, (rule_state,), seed=0, worker=worker) for worker in range(2)}
    got = saved(tmp_path, states, step=3)
    want = dict(pytrees.named_leaves({"params": params}))
    start = PARAMS["conv"]["kernel"]
    x = start - 0.5 * np.mean([1, 2, 3], dtype=np.float32)  # z falls by 0.5 a step
    assert np.abs(want["params/conv/kernel"] - x).max() > 0.1
    np.testing.assert_allclose(got["params/conv/kernel"], x, atol=1e-6)
    np.testing.assert_allclose(optimizers.eval_params(params, (rule_state,))["conv"]["kernel"], x, atol=1e-6)
    for name in ("params/conv/a\\/b", "params/half"):
        np.testing.assert_array_equal(got[name], want[name])
        assert got[name].dtype == want[name].dtype


def test_the_center_of_a_rule_is_exported(tmp_path):
    """As in evaluation: of an asynchronous one, and of `easgd_sync`, where it is a part of the state."""
    center = jax.tree.map(lambda x: np.asarray(x + np.asarray(5, x.dtype)), PARAMS)
    exchange = base.Exchange(lambda tree: tree, lambda tree: tree)
    rule = easgd_sync(optax.sgd(0.1), exchange, RuleConfig("easgd_sync", alpha=0.5))
    synchronous = create(PARAMS, {}, rule.init(center), seed=0, worker=0)
    checkpoint = UncoordinatedCheckpoint(tmp_path / "apart", 1, Retention(2))
    checkpoint.begin(0)
    checkpoint.write_own(0, 0, create(PARAMS, {}, {}, seed=0, worker=0)._asdict())
    checkpoint.end(0, {"center": center}, {}, None)
    for got in (
        saved(tmp_path / "sync", {0: synchronous}, same_params=False),
        export.model_of(manifests.complete_checkpoints(tmp_path / "apart")[0]),
    ):
        assert set(got) == {name for name, _ in pytrees.named_leaves({"params": PARAMS})}
        for name, leaf in pytrees.named_leaves({"params": center}):
            np.testing.assert_array_equal(got[name], leaf)


def test_params_without_state_leave_the_state_of_the_model(tmp_path):
    """Also of a model whose own params have a node called so."""
    for number, tree in enumerate((PARAMS, {"params": PARAMS})):
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / f"{number}", tree)
        got = exported_files.params_from_orbax(tmp_path / f"{number}", tree, STATE)
        assert not got.has_state
        assert got.model_state is STATE
        jax.tree.map(np.testing.assert_array_equal, got.params, tree)


@pytest.mark.e2e
def test_an_export_that_cannot_be_written_ends_and_leaves_nothing(run_dir, tmp_path):
    """On a full disk it waited for ever for a thread of Orbax."""
    with small_disk(tmp_path / "disk", inodes=3) as home:
        line = [sys.executable, "-m", "jaxmpi.tools.cli", "export", str(run_dir), str(home / "out")]
        ended = run(line, timeout_s=60)
        assert (ended.timed_out, ended.code != 0) == (False, True), ended.out
        assert f"error: {home / 'out'}: cannot be written: " in ended.out
        assert "Traceback" not in ended.out
        assert not os.listdir(home)


def test_an_orbax_folder_on_a_disk_without_room_for_its_arrays_is_refused_in_one_sentence(tmp_path, capfd):
    with small_disk(tmp_path / "disk", size="4m", inodes=12) as home:
        with pytest.raises(UsageError, match=rf"^{home}/out: cannot be written: No space left on device; nothing"):
            exported_files.to_orbax({"params": {"w": np.random.default_rng(0).random((400, 100))}}, home / "out")
        assert not os.listdir(home)
    assert "Traceback" not in capfd.readouterr().err


ROWS = {
    "many": lambda row: [row, *({**row, "path": f"params/{i}"} for i in range(100))],
    "twice": lambda row: [row, row],
    "void": lambda row: [{**row, "shape": [3], "dtype": "|V2"}],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_strangers_checkpoint_takes_no_more_memory_than_its_file_and_is_refused_by_name(run_dir, tmp_path, name):
    file = run_dir / "checkpoints" / "step_00000009" / "manifest.json"
    manifest = json.loads(file.read_text())
    rows = manifest["files"]["common.bin"]
    half = next(row for row in rows if row["path"] == "params/half")
    manifest["files"]["common.bin"] = [*(row for row in rows if row is not half), *ROWS[name](half)]
    file.write_text(manifests.seal_manifest(manifest))
    with pytest.raises(UsageError, match=r"common.bin: .*damaged"):
        cli.run(["export", str(run_dir), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_nothing_outside_a_strangers_folder_is_read(run_dir, tmp_path):
    cli.run(["export", str(run_dir), str(tmp_path / "out")])
    file = tmp_path / "out" / "_METADATA"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="_METADATA: got something other than a regular file"):
        exported_files.params_from_orbax(tmp_path / "out", PARAMS, STATE)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="_METADATA: got something other than a regular file"):
        exported_files.params_from_orbax(tmp_path / "out", PARAMS, STATE)


def test_a_strangers_chunk_is_no_larger_than_its_leaf(tmp_path):
    import tensorstore

    like = {"w": np.zeros(4, np.float32)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "out", like)
    array = {"shape": [4], "chunks": [10**9], "dtype": "<f4", "fill_value": 0, "compressor": None}
    place = {"driver": "ocdbt", "base": f"file://{tmp_path}/out/", "path": "w/"}
    spec = {"driver": "zarr", "kvstore": place, "metadata": array, "create": True, "delete_existing": True}
    tensorstore.open(spec).result()
    with pytest.raises(UsageError, match=r"w: got chunks of \[1000000000\], expected \[4\] at most"):
        exported_files.params_from_orbax(tmp_path / "out", like, {})
