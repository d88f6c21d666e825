"""Twins in PyTorch, with which scripts/bench_gpu.py compares the zoo: the same params and running statistics."""

import importlib

import jax
import pytest

import jaxmpi.models.__main__ as report
from jaxmpi.models import MODELS

TWINNED = [name for name, make in MODELS.items() if not (name.startswith("digits") or make().takes_tokens)]
NEEDS_TORCH = "peers of PyTorch need torch"


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
