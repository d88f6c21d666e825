"""Saved values come back bit for bit; what is damaged, foreign or hostile is refused by name."""

import json
import math
import os
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxmpi.checkpoint import manager, manifests
from jaxmpi.checkpoint.restore import restore as restore_newest
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState, create


def state(worker: int = 0, step: int = 7) -> TrainState:
    rng = np.random.default_rng(worker)
    shared = np.random.default_rng(99)
    params = {
        "conv": {"kernel": shared.standard_normal((3, 5)).astype(np.float32), "bias": np.full(3, -0.0, np.float32)},
        "conv/bias": np.full(3, 2, np.float32),  # a slash in a dict's key is no step into a dict
        "half": shared.standard_normal(7).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(np.nan) * np.ones((), np.float32),
    }
    model_state = {"mean": rng.standard_normal(4).astype(np.float16), "count": np.array([worker], np.int64)}
    rule_state = ({"v": rng.standard_normal(3).astype(np.float32)}, np.int32(3) * np.ones((), np.int32), None)
    train_state = create(params, model_state, rule_state, seed=1, worker=worker)
    return train_state._replace(step=np.asarray(step, np.int32))


def save(folder, states=None, *, step=7, replicated=False, keep=2, extra=None, best=0, score=None):
    states = states or {worker: state(worker, step) for worker in range(3)}
    return manager.save(
        folder,
        manager.files_of(states, replicated),
        SoloProcesses(),
        step=step,
        workers=len(states),
        extra=extra or {"elapsed_s": 1.5},
        keep=manager.Retention(keep, best),
        score=score,
    )


def restore(folder, like=None, *, workers: int = 3, replicated: bool = False, say=pytest.fail):
    like = like or {worker: blank(state(worker)) for worker in range(3)}
    saved = restore_newest(folder, like, SoloProcesses(), workers=workers, replicated=replicated, say=say)
    assert saved is not None
    return saved


def blank(like: TrainState) -> TrainState:
    """The same structure with nothing in it."""
    return jax.tree.map(np.zeros_like, like)


def bits(tree) -> dict:
    return {
        name: (np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes()) for name, leaf in named_leaves(tree)
    }


def steps(folder) -> list[int]:
    return [manifests.step_of(path) for path in manifests.complete_checkpoints(folder)]


@pytest.mark.parametrize("replicated", [False, True])
def test_restored_values_are_bitwise_equal(tmp_path, replicated):
    states = {worker: state(worker) for worker in range(3)}
    if replicated:
        states = {worker: s._replace(rule_state=states[0].rule_state) for worker, s in states.items()}
    path = save(tmp_path, states, replicated=replicated, extra={"elapsed_s": 2.5, "note": "x"})
    saved = restore(tmp_path, replicated=replicated)
    assert (saved.step, saved.extra) == (7, {"elapsed_s": 2.5, "note": "x"})
    for worker, expected in states.items():
        assert bits(saved.states[worker]) == bits(expected)
    names = {row["path"] for row in json.loads((path / "manifest.json").read_text())["files"]["common.bin"]}
    assert any(name.startswith("rule_state") for name in names) == replicated  # what is equal is written once
    (path / "worker_00000.bin").unlink()
    restored = restore(tmp_path, {2: blank(state(2))}, replicated=replicated)  # a process reads its own workers only
    assert bits(restored.states) == bits({2: states[2]})


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = (0.5, 0.2, None, 0.9, 0.3, 0.4)
    for name, newest, best in (("one", 2, 1), ("two", 1, 2)):
        for step, score in enumerate(scores, 1):
            save(tmp_path / name, {0: state(0)}, step=step, keep=newest, best=best, score=score)
        assert steps(tmp_path / name) == [2, 5, 6]
    for step, score in enumerate([0.5, math.nan, 0.4, math.inf, 10**400, True, 0.6]):  # no number is not the best
        save(tmp_path / "odd", {0: state(0)}, step=step, keep=1, best=1, score=score)
    assert steps(tmp_path / "odd") == [2, 6]
    for step in (1, 2, 10, 100000000):
        save(tmp_path / "long", step=step, keep=2)
    assert steps(tmp_path / "long") == [10, 100000000]
    save(tmp_path / "long", step=3, keep=2)  # what was just saved stays, whatever lies beside it
    assert steps(tmp_path / "long") == [3, 10, 100000000]
    assert restore(tmp_path / "long").step == 100000000


def test_foreign_files_are_left_alone_and_do_not_prevent_checkpoints(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    newest = save(elsewhere)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step_00000001").symlink_to(newest)
    (folder / "step_00000002.tmp").symlink_to(elsewhere)
    (folder / "step_00000003.tmp").touch()
    for step in (8, 9):
        save(folder, {0: state(0)}, step=step, keep=1)
    assert steps(folder) == [9]
    assert (newest / "manifest.json").is_file()


def test_an_interrupted_checkpoint_is_skipped(tmp_path):
    save(tmp_path, step=5)
    save(tmp_path, step=6).rename(tmp_path / "step_00000006.tmp")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert restore(tmp_path).step == 5
    save(tmp_path, step=6)  # over the leftovers
    (tmp_path / "step_00000009").mkdir()  # its manifest is lost: it had its name when it was whole
    messages = []
    assert restore(tmp_path, say=messages.append).step == 6
    assert "step_00000009/manifest.json: no such file" in "".join(messages)
    assert not (tmp_path / "step_00000006.tmp").exists()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_on_another_number_of_workers_each_gets_the_mean(tmp_path, workers):
    states = {worker: state(worker) for worker in range(3)}
    save(tmp_path, states)
    saved = restore(tmp_path, {worker: blank(state(worker)) for worker in range(workers)}, workers=workers)
    assert (saved.workers, saved.step) == (3, 7)
    for worker, got in saved.states.items():
        assert bits(got.params) == bits(states[0].params)
        assert got.key.tolist() == blank(state(worker)).key.tolist()  # the stream of this worker, not of worker 0
        assert got.model_state["count"] == states[0].model_state["count"]
        for get in (lambda s: s.model_state["mean"], lambda s: s.rule_state[0]["v"]):
            mean = np.mean([get(s).astype(np.float64) for s in states.values()], axis=0).astype(get(states[0]).dtype)
            np.testing.assert_array_equal(get(got), mean)


# ---------------------------------------------------------------- damaged


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


DAMAGE = [
    (lambda path: flip(path / "common.bin", 0), "common.bin: params/conv/bias: damaged, its checksum"),
    (lambda path: flip(path / "common.bin", -1), "common.bin: step: damaged, its checksum"),
    (lambda path: flip(path / "worker_00001.bin", 0), "worker_00001.bin: key: damaged, its checksum"),
    (lambda path: os.truncate(path / "worker_00002.bin", 9), "worker_00002.bin: .*: the file ends"),
    (lambda path: (path / "worker_00002.bin").unlink(), "worker_00002.bin: no such file"),
    (lambda path: flip(path / "manifest.json", 40), "manifest.json: damaged, "),
    (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json: damaged, it is no JSON"),
    (lambda path: [file.unlink() for file in path.glob("*.bin")], "no such file"),
]


@pytest.mark.parametrize(("do", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, do, message):
    save(tmp_path, step=3)
    do(save(tmp_path, step=7))
    messages = []
    saved = restore(tmp_path, say=messages.append)
    assert saved.step == 3
    assert bits(saved.states[1]) == bits(state(1, step=3))
    assert re.match(f"passed over: .*step_00000007.*{message}", messages[0])
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(UsageError, match=f"no checkpoint in .* is whole:\n  .*{message}"):
        restore(tmp_path, say=messages.append)


# ---------------------------------------------------------------- foreign and hostile: nothing outside, nothing huge


def with_params(params):
    return {worker: blank(state(worker))._replace(params=params) for worker in range(3)}


def other(**changes) -> dict:
    return with_params({**state().params, **changes})


FOREIGN = [
    (other(scalar=np.zeros(2, np.float32)), r"params/scalar: got float32\[\], expected float32\[2\]"),
    (other(half=np.zeros(7, np.float16)), r"params/half: got bfloat16\[7\], expected float16\[7\]"),
    (other(more=np.zeros(2, np.float32)), r"params/more: got nothing, expected float32\[2\]"),
    (
        with_params({"half": np.zeros(7, ml_dtypes.bfloat16)}),
        "leaves that this model does not have: params/conv/bias, ",
    ),
]


@pytest.mark.parametrize(("like", "message"), FOREIGN)
def test_another_model_or_rule_is_refused_by_path(tmp_path, like, message):
    save(tmp_path)
    with pytest.raises(UsageError, match=message):
        restore(tmp_path, like)
    with pytest.raises(UsageError, match=r"rule_state.*: got nothing, expected"):
        restore(tmp_path, replicated=True)


def set_row(**fields):
    def change(manifest):
        next(row for row in manifest["files"]["common.bin"] if row["path"] == "params/half").update(fields)

    return change


def rename_leaf(manifest):
    manifest["files"]["common.bin"][0]["path"] = "../../etc/passwd"


def set_field(name, value):
    return lambda manifest: manifest.update({name: value})


HOSTILE = [
    (set_row(shape=[10**12]), r"params/half: got bfloat16\[1000000000000\], expected bfloat16\[7\]"),
    (set_row(dtype="object"), r"got object\[7\], expected bfloat16\[7\]"),
    (set_row(offset=10**30), "params/half: the file ends before the leaf does"),
    (set_row(offset=-1), "common.bin: got .*index"),
    (set_row(offset=1), "params/half: damaged, its checksum does not match"),
    (set_row(shape=[[[7]]]), "common.bin: got .*index"),
    (rename_leaf, "leaves that this model does not have: ../../etc/passwd"),
    (set_field("files", {"../../secret.bin": [], "a": [], "b": []}), "files: got .*expected common.bin"),
    (set_field("files", {"common.bin": None}), "common.bin: got .*index"),
    (set_field("step", 8), "step: got 8; expected 7"),
    (set_field("extra", "x" * 10**6), "extra: got 'x{79};"),
    (set_field("format", True), "got format True; expected 2"),
    (set_field("workers", True), "workers: got True"),
    (set_field("workers", 10**9), "workers: got 1000000000; expected"),
    (set_field("extra", {"elapsed_s": "soon"}), "extra: elapsed_s: got"),
    (set_field("extra", {"elapsed_s": float("nan")}), "extra: elapsed_s: got"),
    (set_field("extra", {"skipped": 10**30}), "extra: skipped: got"),
    (set_field("extra", {"experiment": ["model"]}), "extra: experiment: got"),
    (set_field("extra", {"tally": [float("inf")]}), "extra: tally: got"),
    (set_field("extra", {"exchange": "text"}), "exchange: got"),
    (set_field("extra", {"exchange": {}}), "exchange: got"),
    (set_field("extra", {"exchange": {"asked": "auto", "strategy": 3, "bucket_bytes": 4}}), "exchange: got"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[f"{i} {row[1][:30]}" for i, row in enumerate(HOSTILE)])
def test_hostile_manifests_are_refused(tmp_path, change, message):
    file = save(tmp_path) / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(manifests.seal_manifest(manifest))  # a stranger knows how to make a checksum
    with pytest.raises(UsageError, match=message):
        restore(tmp_path, say=str)


@pytest.mark.parametrize("name", ["manifest.json", "common.bin", "worker_00001.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_regular_files_are_read(tmp_path, name, kind):
    file = save(tmp_path / "run") / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(file)
    with pytest.raises(UsageError, match=f"{name}: "):
        restore(tmp_path / "run", say=str)
