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


def state(worker: int = 0, step: int = 7, width: int = 5) -> TrainState:
    rng = np.random.default_rng(worker)
    shared = np.random.default_rng(99)
    params = {
        "conv": {"kernel": shared.standard_normal((3, width)).astype(np.float32), "bias": np.full(3, -0.0, np.float32)},
        "half": shared.standard_normal(7).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(np.nan) * np.ones((), np.float32),
    }
    model_state = {"mean": rng.standard_normal(4).astype(np.float16), "count": np.array([worker], np.int64)}
    rule_state = ({"v": rng.standard_normal(3).astype(np.float32)}, np.int32(3) * np.ones((), np.int32), None)
    made = create(params, model_state, rule_state, seed=1, worker=worker)
    return made._replace(step=np.asarray(step, np.int32))


def save(
    folder, states=None, *, step: int = 7, replicated: bool = False, keep: int = 2, extra=None, best=0, score=None
):
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
    return restore_newest(folder, like, SoloProcesses(), workers=workers, replicated=replicated, say=say)


def blank(like: TrainState) -> TrainState:
    """The same structure with nothing in it."""
    return jax.tree.map(np.zeros_like, like)


def bits(tree) -> dict:
    return {
        name: (np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes()) for name, leaf in named_leaves(tree)
    }


@pytest.mark.parametrize("replicated", [False, True])
def test_everything_comes_back_bit_for_bit(tmp_path, replicated):
    states = {worker: state(worker) for worker in range(3)}
    if replicated:
        states = {worker: s._replace(rule_state=states[0].rule_state) for worker, s in states.items()}
    path = save(tmp_path, states, replicated=replicated, extra={"elapsed_s": 2.5, "note": "x"})
    saved = restore(tmp_path, replicated=replicated)
    assert saved is not None
    assert (saved.step, saved.extra) == (7, {"elapsed_s": 2.5, "note": "x"})
    for worker, expected in states.items():
        assert bits(saved.states[worker]) == bits(expected)
    files = sorted(p.name for p in path.iterdir())
    assert files == ["common.bin", "manifest.json", *(f"worker_{w:05d}.bin" for w in range(3))]
    assert path.name == "step_00000007"


def test_what_is_equal_on_all_workers_is_written_once(tmp_path):
    apart, once = (save(tmp_path / str(replicated), replicated=replicated) for replicated in (False, True))
    size = lambda path, name: (path / name).stat().st_size  # noqa: E731
    assert size(once, "common.bin") > size(apart, "common.bin")
    assert size(once, "worker_00001.bin") < size(apart, "worker_00001.bin")


def test_a_process_reads_its_own_workers_only(tmp_path):
    path = save(tmp_path)
    (path / "worker_00000.bin").unlink()
    saved = restore(tmp_path, {2: blank(state(2))})
    assert saved is not None
    assert list(saved.states) == [2]
    assert bits(saved.states[2]) == bits(state(2))


def test_a_score_that_is_no_number_is_not_the_best(tmp_path):
    for step, score in enumerate([0.5, math.nan, 0.4, math.inf, 10**400, True, 0.6]):
        save(tmp_path, {0: state(0)}, step=step, keep=1, best=1, score=score)
    assert [manifests.step_of(path) for path in manifests.found(tmp_path)] == [2, 6]


def test_what_is_no_folder_of_ours_stays_and_stops_no_checkpoint(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    kept = save(elsewhere)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step_00000001").symlink_to(kept)
    (folder / "step_00000002.tmp").symlink_to(elsewhere)
    (folder / "step_00000003.tmp").touch()
    for step in (8, 9):
        save(folder, {0: state(0)}, step=step, keep=1)
    assert [manifests.step_of(path) for path in manifests.found(folder)] == [9]
    assert (kept / "manifest.json").is_file()


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 100000000):
        save(tmp_path, step=step, keep=2)
    assert [path.name for path in manifests.found(tmp_path)] == ["step_00000010", "step_100000000"]
    save(tmp_path, step=3, keep=2)  # what was just saved stays, whatever lies beside it
    assert len(manifests.found(tmp_path)) == 3
    saved = restore(tmp_path)
    assert saved is not None
    assert saved.step == 100000000


def test_a_step_saved_again_replaces_what_was_there(tmp_path):
    save(tmp_path)
    changed = {
        w: state(w)._replace(model_state={"mean": np.ones(4, np.float16), "count": np.array([9])}) for w in range(3)
    }
    save(tmp_path, changed)
    saved = restore(tmp_path)
    assert saved is not None
    assert bits(saved.states[1]) == bits(changed[1])


def test_paths_that_look_alike_stay_apart(tmp_path):
    """A slash in a dict's key is no step into a dict."""
    params = {"a/b": np.full(3, 1, np.float32), "a": {"b": np.full(3, 2, np.float32)}}
    made = create(params, {}, {}, seed=1, worker=0)._replace(step=np.asarray(7, np.int32))
    save(tmp_path, {0: made})
    found = restore(tmp_path, {0: blank(made)}, workers=1)
    assert found is not None
    assert bits(found.states[0]) == bits(made)


def test_what_was_cut_off_while_it_was_written_is_passed_over(tmp_path):
    save(tmp_path, step=5)
    path = save(tmp_path, step=6)
    path.rename(tmp_path / "step_00000006.tmp")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    saved = restore(tmp_path)
    assert saved is not None
    assert saved.step == 5
    save(tmp_path, step=6)  # over the leftovers
    (tmp_path / "step_00000009").mkdir()  # its manifest is lost: it had its name when it was whole
    said = []
    again = restore(tmp_path, say=said.append)
    assert again is not None
    assert again.step == 6
    assert "step_00000009/manifest.json: no such file, though a checkpoint has one" in "".join(said)
    assert not (tmp_path / "step_00000006.tmp").exists()


@pytest.mark.parametrize("kept", [manager.Retention(2, 1), manager.Retention(1, 2)])
def test_the_best_are_kept_beside_the_newest(tmp_path, kept):
    for step, score in enumerate((0.5, 0.2, None, 0.9, 0.3, 0.4), 1):
        save(tmp_path, step=step, keep=kept.newest, best=kept.best, score=score)
    steps = [manifests.step_of(path) for path in manifests.found(tmp_path)]
    assert steps == {2: [2, 5, 6], 1: [2, 5, 6]}[kept.newest]


# ---------------------------------------------------------------- foreign


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
def test_another_model_is_refused_by_path(tmp_path, like, message):
    save(tmp_path)
    with pytest.raises(UsageError, match=message):
        restore(tmp_path, like)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_on_another_number_of_workers_each_has_the_mean(tmp_path, workers):
    states = {worker: state(worker) for worker in range(3)}
    save(tmp_path, states)
    saved = restore(tmp_path, {worker: blank(state(worker)) for worker in range(workers)}, workers=workers)
    assert saved is not None
    assert (saved.workers, saved.step) == (3, 7)
    for worker, got in saved.states.items():
        assert bits(got.params) == bits(states[0].params)
        assert got.key.tolist() == blank(state(worker)).key.tolist()  # the stream of this worker, not of worker 0
        assert got.model_state["count"] == states[0].model_state["count"]
        mean = np.mean([s.model_state["mean"].astype(np.float64) for s in states.values()], axis=0).astype(np.float16)
        np.testing.assert_array_equal(got.model_state["mean"], mean)
        owed = np.mean([s.rule_state[0]["v"].astype(np.float64) for s in states.values()], axis=0).astype(np.float32)
        np.testing.assert_array_equal(got.rule_state[0]["v"], owed)


def test_another_rule_is_refused(tmp_path):
    save(tmp_path, replicated=False)
    with pytest.raises(UsageError, match=r"rule_state.*: got nothing, expected"):
        restore(tmp_path, replicated=True)


# ---------------------------------------------------------------- damaged


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


DAMAGE = [
    (lambda path: flip(path / "common.bin", 0), "common.bin: params/conv/bias: damaged, its checksum does not match"),
    (lambda path: flip(path / "common.bin", -1), "common.bin: step: damaged, its checksum does not match"),
    (lambda path: flip(path / "worker_00001.bin", 0), "worker_00001.bin: key: damaged, its checksum does not match"),
    (
        lambda path: os.truncate(path / "worker_00002.bin", 9),
        "worker_00002.bin: .*: the file ends before the leaf does",
    ),
    (lambda path: (path / "worker_00002.bin").unlink(), "worker_00002.bin: no such file"),
    (lambda path: flip(path / "manifest.json", 40), "manifest.json: damaged, "),
    (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json: damaged, it is no JSON"),
    (lambda path: [file.unlink() for file in path.glob("*.bin")], "no such file"),
]


@pytest.mark.parametrize(("do", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_newest_one_is_named_and_the_one_before_is_used(tmp_path, do, message):
    save(tmp_path, step=3)
    path = save(tmp_path, step=7)
    do(path)
    said = []
    saved = restore(tmp_path, say=said.append)
    assert saved is not None
    assert saved.step == 3
    assert bits(saved.states[1]) == bits(state(1, step=3))
    assert re.match(f"passed over: .*step_00000007.*{message}", said[0])
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(UsageError, match=f"no checkpoint in .* is whole:\n  .*{message}"):
        restore(tmp_path, say=said.append)


def test_bytes_of_a_manifest_count(tmp_path):
    """A flipped bit is damage or, between words, nothing: never another state."""
    path = save(tmp_path, {0: state(0)}) / "manifest.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        flip(path, at)
        try:
            saved = restore(tmp_path, {0: blank(state(0))}, workers=1, say=str)
        except UsageError:
            saved = None
        assert saved is None or bits(saved.states[0]) == bits(state(0))
        path.write_bytes(whole)


# ---------------------------------------------------------------- hostile: nothing outside the checkpoint, nothing huge


def set_row(**fields):
    def change(manifest):
        row = next(row for row in manifest["files"]["common.bin"] if row["path"] == "params/half")
        row.update(fields)

    return change


def set_field(name, value):
    return lambda manifest: manifest.update({name: value})


def rename_leaf(manifest):
    manifest["files"]["common.bin"][0]["path"] = "../../etc/passwd"


HOSTILE = [
    (set_row(shape=[10**12]), r"params/half: got bfloat16\[1000000000000\], expected bfloat16\[7\]"),
    (set_row(dtype="object"), r"got object\[7\], expected bfloat16\[7\]"),
    (set_row(offset=10**30), "params/half: the file ends before the leaf does"),
    (set_row(offset=-1), "common.bin: damaged, not an index"),
    (set_row(offset=1), "params/half: damaged, its checksum does not match"),
    (rename_leaf, "leaves that this model does not have: ../../etc/passwd"),
    (set_field("files", {"../../secret.bin": [], "a": [], "b": []}), "files: got .*expected common.bin"),
    (set_field("files", {"common.bin": None}), "common.bin: damaged, not an index"),
    (set_field("step", 8), "step: got 8; expected 7"),
    (set_field("extra", "x" * 10**6), "extra: got 'x{79};"),
    (set_field("format", True), "got format True; expected 2"),
    (set_field("workers", True), "workers: got True"),
    (set_field("workers", 10**9), "workers: got 1000000000; expected one file for each"),
    (set_row(shape=[[[7]]]), "common.bin: damaged, not an index"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message[:40] for _, message in HOSTILE])
def test_hostile_manifests_are_refused(tmp_path, change, message):
    file = save(tmp_path) / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(manifests.sealed(manifest))  # a stranger knows how to make a checksum
    with pytest.raises(UsageError, match=message):
        restore(tmp_path, say=str)


EXTRAS = [
    {"elapsed_s": "soon"},
    {"elapsed_s": float("nan")},
    {"skipped": 10**30},
    {"experiment": ["model"]},
    {"tally": [float("inf")]},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=[str(extra)[:24] for extra in EXTRAS])
def test_hostile_words_beside_the_state_are_refused(tmp_path, extra):
    file = save(tmp_path) / "manifest.json"
    file.write_text(manifests.sealed(json.loads(file.read_text()) | {"extra": extra}))
    with pytest.raises(UsageError, match=f"extra: {next(iter(extra))}: got"):
        restore(tmp_path, say=str)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff\xfe", b"[" * 10**6, b'{"format": 2}'])
def test_what_is_no_manifest(tmp_path, text):
    (save(tmp_path) / "manifest.json").write_bytes(text)
    with pytest.raises(UsageError, match="step_00000007"):
        restore(tmp_path, say=str)


@pytest.mark.parametrize("name", ["manifest.json", "common.bin", "worker_00001.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_but_regular_files_is_read(tmp_path, name, kind):
    file = save(tmp_path / "run") / name
    whole = file.read_bytes()
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    file.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(file)
    with pytest.raises(UsageError, match=f"{name}: "):
        restore(tmp_path / "run", say=str)


def test_a_stranger_cannot_have_the_memory_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "MANIFEST_BYTES", 10)
    save(tmp_path)
    with pytest.raises(UsageError, match=r"manifest.json: damaged, more than 10 bytes"):
        restore(tmp_path, say=str)
