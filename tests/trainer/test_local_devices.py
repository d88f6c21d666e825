"""Processes that each drive several devices, with MPI or XLA between them: Algorithm 1 of Kumar et al. 2018."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.local_devices import layout_of
from jaxmpi.comm.axis import AxisComm
from launching import Ended, train
from runs import TINY, checkpoint, checkpoint_files, column, copy_until, saved_leaves
from tolerances import U

ON_CPU = {"JAX_PLATFORMS": "cpu"}
PROCESSES, DEVICES = 3, 2
A_PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}  # nobody is there


@pytest.mark.parametrize(
    "strategy",
    [
        *("asa:32", "ring:32", "tree:32", "color4:32", "asa:bf16"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("color2:32", "root:32", "pipering:32", "ring:bf16")),
    ],
)
def test_a_sum_of_devices_lies_as_hier_would_cut_it(strategy):
    """The same bits as one process a device, over three hosts of two, where the order of additions counts."""
    hosts = tuple(worker // DEVICES for worker in range(PROCESSES * DEVICES))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((PROCESSES * DEVICES, 101)) * 10.0 ** rng.integers(-3, 3, 101)).astype(np.float32)
    workers, processes = AxisComm("w", len(hosts), hosts), AxisComm("p", PROCESSES, tuple(range(PROCESSES)))
    each = jax.vmap(lambda x: exchange(x, f"hier-{strategy}", "sum", workers), axis_name="w")

    def of_a_process(parts: jax.Array) -> jax.Array:
        layout = layout_of(x.shape[1], DEVICES, PROCESSES, strategy)
        mine = layout.interleave(functools.reduce(jnp.add, parts))
        return layout.restore(exchange(mine, strategy, "sum", processes))[: x.shape[1]]

    got = jax.vmap(of_a_process, axis_name="p")(jnp.asarray(x).reshape(PROCESSES, DEVICES, -1))
    expected = np.asarray(each(x))
    assert (expected == expected[0]).all()
    assert (np.asarray(got) == expected[:PROCESSES]).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny experiment, and the runs of this module."""
    made = tmp_path_factory.mktemp("devices")
    (made / "tiny.py").write_text(TINY)
    return made


def of_devices(folder: Path, name: str, *args: str, env: dict[str, str] | None = None) -> Ended:
    """Two processes of two devices."""
    args = (str(folder / "tiny.py"), "--run-dir", str(folder / name), "--devices", "2", *args)
    return ended_well(train(2, *args, env=ON_CPU | (env or {})))


def ended_well(ended: Ended) -> Ended:
    assert ended.code == 0, ended.out
    return ended


def whole_leaves(run_dir: Path) -> dict[str, np.ndarray]:
    """Params and the optimizer's state of the last checkpoint, flat; slices are put together by their numbers."""
    extra, leaves = json.loads((checkpoint(run_dir, 20) / "manifest.json").read_text())["extra"], {}
    chunks = extra.get("chunks", [])
    for name, rows in saved_leaves(run_dir, 20).items():
        number = 0 if name == "common.bin" else chunks[int(name[7:12])] if chunks else None
        for path, leaf in rows.items():
            if number is not None and path.startswith(("params", "rule_state")):
                leaves.setdefault(path, {})[number] = leaf.ravel()
    return {path: np.concatenate([parts[c] for c in sorted(parts)]) for path, parts in leaves.items()}


def facts(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "config.json").read_text())


@pytest.fixture(scope="module")
def over_devices(folder: Path) -> Path:
    """20 steps of two processes that drive two devices each."""
    ended = of_devices(folder, "devices", "--exchange.strategy", "ring32")
    assert "2 processes x 2 devices = 4 workers x local batch 15 = effective batch 60" in ended.out
    assert facts(folder / "devices")["workers"] == 4
    assert facts(folder / "devices")["transport"] == "MPI, from host memory; each process adds up its 2 devices"
    return folder / "devices"


@pytest.mark.e2e
def test_sharded_updates_go_on_from_whole_ones_with_the_same_bits_and_leave_slices(over_devices, folder):
    copy_until(over_devices, 10, folder / "sharded")
    ended = of_devices(folder, "sharded", "--exchange.strategy", "ring32", "--exchange.shard-update", "on", "--resume")
    assert "updates sharded over 4 workers" in ended.out
    assert column(over_devices, "train", "loss") == column(folder / "sharded", "train", "loss")
    whole, sliced = whole_leaves(over_devices), whole_leaves(folder / "sharded")
    assert whole.keys() == sliced.keys()
    for name, leaf in whole.items():
        np.testing.assert_array_equal(sliced[name][: leaf.size], leaf, err_msg=name)
    [moments] = [leaf for name, leaf in sliced.items() if name.endswith("logits/bias") and "rule_state" in name]
    assert moments.size == 12  # four slices of three entries


@pytest.fixture(scope="module")
def over_xla(folder: Path) -> Path:
    """20 steps of two processes that drive two devices each, if a proxy for downloads is set."""
    of_devices(folder, "xla", "--comm", "xla", "--exchange.strategy", "ring32", env=A_PROXY)
    return folder / "xla"


@pytest.mark.e2e
def test_a_run_over_xla_leaves_what_one_over_mpi_leaves(over_xla, over_devices):
    assert column(over_xla, "train", "step") == list(range(1, 21))
    assert facts(over_xla)["transport"] == "XLA collectives between processes, gloo"
    assert facts(over_xla)["workers"] == 4
    assert sorted(checkpoint_files(over_xla, 20)) == ["common.bin", *(f"worker_0000{i}.bin" for i in range(4))]
    assert_close(over_xla, over_devices)
    assert column(over_xla, "eval", "eval_count") == [360]


def params(run_dir: Path) -> np.ndarray:
    """f32[n]: of the last checkpoint, one leaf after another."""
    leaves = whole_leaves(run_dir)
    return np.concatenate([leaves[path] for path in sorted(leaves) if path.startswith("params")])


def assert_close(a: Path, b: Path) -> None:
    """Gradients are compiled apart, and so differ by rounding: sums of 60 x 64 terms in f32.

    A gradient's entry is below 4 here. The 20 updates of lr 0.05 at momentum 0.9 add at most ten of each to a param.
    """
    apart = 20 * 0.05 * 10 * 4 * 60 * 64 * U
    np.testing.assert_allclose(params(a), params(b), rtol=0, atol=apart)
    losses = [column(run_dir, "train", "loss") for run_dir in (a, b)]
    np.testing.assert_allclose(*losses, rtol=0, atol=U * 60 * 2.3 * 20)  # as in test_train.py


@pytest.mark.e2e
@pytest.mark.slow  # a job more
def test_resume_is_bit_exact_and_so_are_two_devices_a_process(over_xla, folder):
    """The first ten steps by 2 processes of 2 devices each, the others by 4."""
    resumed = copy_until(over_xla, 10, folder / "xla-resumed")
    line = (str(folder / "tiny.py"), "--run-dir", str(resumed), "--comm", "xla", "--exchange.strategy", "ring32")
    ended_well(train(4, *line, "--resume", env=ON_CPU))
    assert facts(folder / "xla-resumed")["workers"] == 4
    assert checkpoint_files(folder / "xla-resumed", 20) == checkpoint_files(over_xla, 20)
    assert column(folder / "xla-resumed", "train", "loss") == column(over_xla, "train", "loss")
