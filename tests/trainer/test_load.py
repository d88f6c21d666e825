"""A trained model out of a run: newest, best, from a folder or a file, bit for bit; what does not fit is named."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxmpi
from jaxmpi.checkpoint import export, exported_files
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.data.example import nested
from jaxmpi.tools import cli
from jaxmpi.trainer import main
from line_task import LINE, lines
from runs import record

TREE = {
    "params": {
        "conv": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T},
        "layers": {"0": {"w": np.asarray(jnp.arange(3, dtype=jnp.bfloat16))}},
        "a/b": np.zeros((0, 4), np.float16),
    },
    "model_state": {"count": np.array(7, np.int32), "seen": np.array([True, False])},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Run directory of seven steps with a checkpoint each, of which the third was the best by `eval_far`."""
    folder = tmp_path_factory.mktemp("load")
    every = {"eval_every": "1st", "checkpoint_every": "1st", "keep_checkpoints": 9, "monitor": "eval_far"}
    experiment = lines(folder, LINE, **every)
    main.train(experiment, "lines")
    return Path(experiment.run_dir)


def test_the_newest_one_of_a_step_and_the_best(finished):
    far = {row["step"]: row["eval_far"] for row in record(finished, "eval")}
    assert jaxmpi.load(finished).step == 7
    assert re.fullmatch(r"TrainedModel\(step=7, source=\S+\)", repr(jaxmpi.load(finished)))  # no arrays in a notebook
    assert jaxmpi.load(finished, best=True).step == min(far, key=far.__getitem__)
    third = jaxmpi.load(str(finished), step=3)
    alone = jaxmpi.load(finished / "checkpoints" / "step_00000003")
    assert third.step == alone.step == 3
    np.testing.assert_array_equal(third.params["w"], alone.params["w"])
    assert third.model_state == {}
    assert (third.params["w"] != jaxmpi.load(finished).params["w"]).all()


def test_a_file_holds_the_same_bits(tmp_path):
    file = tmp_path / "model.safetensors"
    exported_files.to_safetensors(TREE, file, 12)
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    got = jaxmpi.load(file)
    assert got.step == 12
    for (name, one), (other_name, other) in zip(
        named_leaves(TREE), named_leaves({"params": got.params, "model_state": got.model_state}), strict=True
    ):
        assert (name, one.shape, one.dtype, one.tobytes()) == (other_name, other.shape, other.dtype, other.tobytes())
    assert sorted(load_file(file)) == [  # the names that other programs see
        *("model_state.count", "model_state.seen"),
        *("params.a/b", "params.conv.kernel", "params.layers.0.w"),
    ]


def test_out_of_a_run_and_into_another(finished, tmp_path):
    file = tmp_path / "model.safetensors"
    cli.run(["export", str(finished), str(file), "--best"])
    assert jaxmpi.load(file).step == jaxmpi.load(finished, best=True).step
    (tmp_path / "next").mkdir()
    again = lines(tmp_path / "next", LINE, params=str(file), train_for="1st", optim=lines(tmp_path).optim)
    main.train(again, "lines")
    before, after = jaxmpi.load(file).params["w"], jaxmpi.load(again.run_dir).params["w"]
    assert 0 < np.abs(after - before).max() < 0.1  # one step from there, not from zero
    assert np.abs(before).min() > 0.1
    with pytest.raises(UsageError, match="exists; name a new file"):
        cli.run(["export", str(finished), str(file)])


CHANGES = {
    "missing": (lambda t: t.pop("params.w"), r"params/w: got nothing, expected float32\[3\]"),
    "extra": (lambda t: t.update({"params.v": t["params.w"]}), r"params/v: got float32\[3\], expected nothing"),
    "dtype": (
        lambda t: t.update({"params.w": np.zeros(3, np.float64)}),
        r"params/w: got float64\[3\], expected float32",
    ),
}


@pytest.mark.parametrize(("change", "match"), CHANGES.values(), ids=CHANGES)
def test_a_file_of_another_model_is_named(change, match, finished, tmp_path):
    file = tmp_path / "model.safetensors"
    cli.run(["export", str(finished), str(file)])
    tensors = {**load_file(file), "model_state.n": np.zeros(1, np.float32)}
    change(tensors)
    save_file(tensors, file)
    told = rf"{file} is not of this model:(.|\n)*{match}(.|\n)*give the model the names"
    with pytest.raises(UsageError, match=f"^--params: {told}"):
        main.train(lines(tmp_path, LINE, params=str(file)), "lines")
    with pytest.raises(UsageError, match=f"^{told}"):
        jaxmpi.load(file).like({"w": np.zeros(3, np.float32)}, {})


def test_a_damaged_file_and_others_that_are_none(finished, tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 40)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "torn.safetensors", {}, "torn.safetensors: cannot be read"),
        (tmp_path / "gone.safetensors", {}, "no such file"),
        (tmp_path / "gone", {}, "got no folder; expected a run directory"),
        (finished, {"step": 8}, "step: got 8; there are 1, 2, 3, 4, 5, 6, 7: name one of them"),
        (finished, {"step": 3, "best": True}, "got step 3 and best; give one of them"),
        (finished / "checkpoints" / "step_00000003", {"best": True}, "name the run directory"),
    ]
    for where, options, match in refused:
        with pytest.raises(UsageError, match=match):
            jaxmpi.load(where, **options)
    with pytest.raises(UsageError, match=r"a\.b: got a dot in a name"):
        exported_files.to_safetensors({"a.b": np.zeros(1)}, tmp_path / "x.safetensors", 0)


def test_a_module_of_other_arrays_is_named():
    kernel = {"kernel": np.zeros((2, 4), np.float32)}
    model = export.TrainedModel(params=kernel, model_state={}, source=Path("runs/a"))
    with pytest.raises(UsageError, match=r"bias: got nothing, .*\n  kernel: got float32\[2, 4\]"):
        model.into(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(UsageError, match="expected a module of Flax NNX, Linen or Equinox"):
        model.into(jax.nn.relu)


# ---------------------------------------------------------------- flipped bits, lost leaves, full disks


def flipped(file: Path, seed: int, count: int):
    """The file with one bit changed, `count` times over; then as it was."""
    raw = file.read_bytes()
    rng = np.random.default_rng(seed)
    for place in rng.choice(8 * len(raw), min(count, 8 * len(raw)), replace=False).tolist():
        changed = bytearray(raw)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        yield place
    file.write_bytes(raw)


def bits(model: export.TrainedModel) -> Any:
    named = named_leaves({"params": model.params, "model_state": model.model_state})
    return model.step, [(name, leaf.dtype, leaf.shape, leaf.tobytes()) for name, leaf in named]


def assert_refused_or_equal(where: Path, want: Any) -> None:
    try:
        got = bits(jaxmpi.load(where))
    except UsageError:
        return
    assert got == want


def test_a_flipped_bit_of_a_file_is_noticed(tmp_path):
    file = tmp_path / "model.safetensors"
    exported_files.to_safetensors(TREE, file, 12)
    want = bits(jaxmpi.load(file))
    for _ in flipped(file, 0, 1500):
        assert_refused_or_equal(file, want)
    assert bits(jaxmpi.load(file)) == want


@pytest.mark.parametrize("names", [("params", "params.v"), ("params.v.w", "params.v")])
def test_a_name_that_is_both_a_leaf_and_a_node_is_refused(names, tmp_path):
    save_file({name: np.zeros(1, np.float32) for name in names}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match=min(names, key=len)):
        jaxmpi.load(tmp_path / "x.safetensors")
    leaves = {name.replace(".", "/"): np.zeros(1) for name in names}
    for nest in (export.nested, nested):
        with pytest.raises(UsageError, match=min(leaves, key=len)):
            nest(leaves)


def test_names_that_orbax_would_take_for_one_are_refused(tmp_path):
    tree = {"params": {"v.w": np.ones(1, np.float32), "v": {"w": np.zeros(1, np.float32)}}}
    with pytest.raises(UsageError, match="one name"):
        exported_files.to_orbax(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", ["²", "-1", "9" * 5000])
def test_a_step_that_is_no_number_is_not_known(step, tmp_path):
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "x.safetensors", {"step": step})
    assert jaxmpi.load(tmp_path / "x.safetensors").step is None


@pytest.mark.parametrize("options", [{}, {"best": True}, {"step": 7}], ids=str)
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_an_older_checkpoint_does_not_stand_for_a_damaged_one(damage, options, finished, tmp_path):
    run_dir = Path(shutil.copytree(finished, tmp_path / "run"))
    manifest = run_dir / "checkpoints" / "step_00000007" / "manifest.json"
    if damage == "missing":
        manifest.unlink()
    else:
        next(flipped(manifest, 0, 1))
    with pytest.raises(UsageError, match="step_00000007"):
        jaxmpi.load(run_dir, **options)
    assert jaxmpi.load(run_dir, step=6).step == 6
