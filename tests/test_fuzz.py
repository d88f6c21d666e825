"""Anything at all on a command line or in a file: nothing comes of it but the documented errors.

The fast share runs with every suite; 10^4 inputs each with -m slow. Packed data sets are in test_packed.py, 10^4
inputs each with --hypothesis-profile many -k "never_pass or forged".
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmpi.checkpoint import manager, manifests
from jaxmpi.checkpoint.restore import restore
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.config import durations, experiment_file, flags
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState, create
from jaxmpi.observe import recorder
from jaxmpi.runtime import fault_injection
from launching import ROOT

MANY = 10_000
SLOW = partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def run(examples: int, strategy: st.SearchStrategy, check: Callable) -> None:
    """Hypothesis with as many examples as asked for."""
    settings(max_examples=examples, deadline=None, database=None)(given(strategy)(check))()


# ---------------------------------------------------------------- overrides

FLAGS = sorted(f"--{name}" for name in flags.flags(Experiment()))
VALUES = st.sampled_from(
    ["1", "0", "-1", "1e400", "nan", "ep", "3ep", "1%", "None", "True", "a b", "", "--", "-n", "{}"]
)
WORDS = st.sampled_from(FLAGS) | VALUES | st.text(max_size=8)


@pytest.mark.parametrize("examples", [25, SLOW(MANY)])
def test_overrides(examples, capsys):
    path = str(ROOT / "experiments" / "digits.py")

    def check(words: list[str]) -> None:
        try:
            got, _ = experiment_file.parse([path, *words])
        except (UsageError, SystemExit):  # argparse's way to say the same
            return
        assert isinstance(got, Experiment)

    run(examples, st.lists(WORDS, max_size=6), check)
    capsys.readouterr()


@pytest.mark.parametrize("examples", [300, SLOW(MANY)])
def test_durations_and_faults(examples):
    def check(text: str) -> None:
        for read in (lambda: durations.duration_steps(text, 10, 32, 100), lambda: fault_injection.parse(text, 4)):
            try:
                read()
            except UsageError:
                continue

    kinds = st.builds(
        "{}:{}".format,
        st.sampled_from(sorted(fault_injection.KINDS)),
        st.text("ranksteptimes=,0123456789-.é²", max_size=20),
    )
    run(examples, st.text(max_size=20) | kinds | st.from_regex(r"[0-9.]{1,30}(ep|st|ex|%)"), check)


# ---------------------------------------------------------------- record

ROW = st.fixed_dictionaries({"kind": st.just("train"), "step": st.integers(-3, 30)}).map(
    lambda row: json.dumps(row).encode()
)


@pytest.mark.parametrize("examples", [200, SLOW(MANY)])
def test_record(examples, tmp_path):
    path = tmp_path / "record.jsonl"

    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines))
        recorder.cut_record(path, 10)
        kept = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert all(row.get("step", 0) <= 10 for row in kept)
        recorder.cut_record(path, 10)
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == kept or "NaN" in path.read_text()

    anything = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())
    run(examples, st.lists(ROW | anything, max_size=6), check)


# ---------------------------------------------------------------- checkpoints


@cache
def state() -> TrainState:
    params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(0, np.float32)}
    return create(params, {"n": np.ones(2, np.int64)}, {}, seed=0, worker=0)


@cache
def whole() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        files = manager.files_of({0: state()}, True)
        options = {"step": 0, "workers": 1, "extra": {"note": "é"}, "keep": manager.Retention(1)}
        path = manager.save(Path(folder), files, SoloProcesses(), **options)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def same_bits(one: TrainState, other: TrainState) -> bool:
    rows = ({name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state_)} for state_ in (one, other))
    return next(rows) == next(rows)


def read(folder: Path, files: dict[str, bytes]) -> TrainState | None:
    """Return what comes of these files: a state, or a documented error."""
    path = folder / "step_00000000"
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    blank = {0: jax.tree.map(np.zeros_like, state())}
    try:
        saved = restore(folder, blank, SoloProcesses(), workers=1, replicated=True, say=lambda text: None)
    except UsageError:
        return None
    return saved.states[0] if saved else None


EDIT = st.tuples(st.sampled_from(["flip", "cut", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=8))


def edited(data: bytes, edit: tuple[str, float, bytes]) -> bytes:
    kind, place, more = edit
    at = int(place * (len(data) - 1)) if data else 0
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ (more[0] or 1)]) + data[at + 1 :]
    return data[:at] if kind == "cut" else data[:at] + more + data[at:]


@pytest.mark.parametrize("examples", [150, SLOW(MANY)])
def test_damaged_checkpoints(examples, tmp_path):
    """Whatever happens to a file: the very state that was saved, or a refusal."""

    def check(name: str, edits: list) -> None:
        data = whole()[name]
        for edit in edits:
            data = edited(data, edit)
        got = read(tmp_path, {**whole(), name: data})
        assert got is None or same_bits(got, state())

    run(
        examples,
        st.tuples(st.sampled_from(sorted(whole())), st.lists(EDIT, min_size=1, max_size=3)),
        lambda x: check(*x),
    )


def put(manifest: dict, path: list, value: object) -> dict:
    """A manifest with another value somewhere."""
    manifest = json.loads(json.dumps(manifest))
    *parents, last = path
    place = manifest
    for key in parents:
        place = place[key]
    place[last] = value
    return manifest


PLACES = [
    *(["format"], ["step"], ["workers"], ["score"], ["files"], ["extra"], ["files", "common.bin"]),
    *(["files", "common.bin", 0], ["files", "worker_00000.bin"], ["files", "../../x"]),
    *(["files", "common.bin", 0, key] for key in ("path", "shape", "dtype", "offset", "crc32")),
]


@pytest.mark.parametrize("examples", [150, SLOW(MANY)])
def test_strangers_checkpoints(examples, tmp_path):
    """A manifest made on purpose, its checksum right."""

    def check(path: list, value: object) -> None:
        manifest = put(json.loads(whole()["manifest.json"]), path, value)
        read(tmp_path, {**whole(), "manifest.json": manifests.seal_manifest(manifest).encode()})

    numbers = st.integers(-(2**70), 2**70)
    values = JSON | numbers | st.lists(numbers, max_size=3) | st.sampled_from(["float32", "object", "O", "<f4"])
    run(examples, st.tuples(st.sampled_from(PLACES), values), lambda x: check(*x))


# ---------------------------------------------------------------- killed at any moment

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from jaxmpi.checkpoint import manager, manifests
from jaxmpi.checkpoint.restore import restore
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.train_state import create

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(0)

def state(step):
    made = create({"w": np.full(50_000, step, np.float32)}, {"m": np.full(10, step)}, {}, seed=0, worker=0)
    return made._replace(step=np.full((), step, np.int32))

def save(step):
    files = manager.files_of({0: state(step)}, True)
    options = dict(step=step, workers=1, extra={}, keep=manager.Retention(2, 1), score=float(-step))
    manager.save(folder, files, SoloProcesses(), **options)

def newest():
    found = restore(folder, {0: state(0)}, SoloProcesses(), workers=1, replicated=True)
    if found is None:
        return 0
    assert (found.states[0].params["w"] == found.step).all() and (found.states[0].model_state["m"] == found.step).all()
    return found.step

state(0)  # what JAX starts, it starts before the children
step, moments = 0, []
# How much of the time is spent writing is the machine's: go on until enough kills have fallen into it.
while len(moments) < kills or (sum(moments) <= kills // 4 and len(moments) < 10 * kills):
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save(step)
    time.sleep(draw.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut_off = any(folder.glob("*.tmp"))
    after = newest()
    assert after >= step, (after, step)
    moments.append(cut_off)
    step = after
print(f"{len(moments)} kills, {sum(moments)} of them while a checkpoint was written, {step} checkpoints")
"""


@pytest.mark.e2e
@pytest.mark.parametrize("kills", [40, SLOW(2000)])
def test_a_process_killed_at_any_moment_leaves_a_good_checkpoint(kills, tmp_path):
    line = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path), str(kills)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    assert int(done.stdout.split()[2]) > kills // 4
