"""The script that compares the zoo with PyTorch on a GPU: at tiny size on the CPU, and its peers."""

import importlib
import json
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jaxmpi.models.__main__ as report
from jaxmpi.models import MODELS
from launching import run

SCRIPT = [sys.executable, "scripts/bench_gpu.py"]
TWINNED = [name for name, make in MODELS.items() if not (name.startswith("digits") or make().takes_tokens)]
NEEDS_TORCH = "peers of PyTorch need torch"


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict[str, Any]:
    """Return what a dry run of one row writes; it has PyTorch in it if that is installed."""
    out = tmp_path_factory.mktemp("bench") / "dry"
    args = ("--dry", "--models", "alexnet_tiny", "--dtypes", "bfloat16", "--out", str(out))
    ended = run([*SCRIPT, *args], timeout_s=280)
    assert ended.code == 0, ended.out[-4000:]
    return json.loads(out.with_suffix(".json").read_text()) | {"tables": out.with_suffix(".md").read_text()}


def check_side(row: dict[str, Any], side: str) -> None:
    """Three rounds of every part."""
    for part in ("step", "to device", "forward", "forward+backward", "update"):
        seconds = row["seconds"][part][side]
        assert len(seconds) == 3
        assert min(seconds) > 0


@pytest.mark.slow
def test_dry_run_measures_every_part_of_the_trainers_step(dry):
    [row] = dry["rows"]
    assert (row["model"], row["dtype"], row["batch"]) == ("alexnet_tiny", "bfloat16", 4)
    check_side(row, "jaxmpi")
    params, _, _ = report.shapes(MODELS["alexnet_tiny"]())
    held = 2 * 4 * sum(leaf.size for leaf in jax.tree.leaves(params))  # params and momentum
    assert held < row["peak_bytes"]["jaxmpi"] < 10 * held
    images_per_s = 4 / np.median(row["seconds"]["step"]["jaxmpi"])
    assert f"| alexnet_tiny | bfloat16 | 4 | {images_per_s:,.0f} (" in dry["tables"]


@pytest.mark.slow
def test_dry_run_measures_the_twin_in_turn(dry):
    pytest.importorskip("torch", reason=NEEDS_TORCH, exc_type=ImportError)
    [row] = dry["rows"]
    check_side(row, "torch")
    ours, theirs = (np.array(row["seconds"]["step"][side]) for side in ("jaxmpi", "torch"))
    low, high = np.percentile(theirs / ours, (25, 75))
    assert f"({low:.2f} to {high:.2f})" in dry["tables"]


@pytest.mark.parametrize("name", TWINNED)
def test_twin_has_the_models_params(name):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH, exc_type=ImportError)
    zoo = importlib.import_module("torch_zoo")
    with torch.device("meta"):  # shapes, no memory
        twin = zoo.TWINS[name]()
    params, state, _ = report.shapes(MODELS[name]())
    theirs = sorted(p.numel() for p in twin.parameters())
    assert theirs == sorted(leaf.size for leaf in jax.tree.leaves(params))
    running = [x.numel() for path, x in twin.named_buffers() if not path.endswith("num_batches_tracked")]
    assert sorted(running) == sorted(leaf.size for leaf in jax.tree.leaves(state))
