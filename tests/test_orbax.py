"""Params go out to Orbax and come back; what is not of this model is refused by path."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmpi import checkpoint, orbax
from jaxmpi.config import UsageError
from jaxmpi.processes import SoloProcesses
from jaxmpi.state import create

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own
PARAMS = {
    "conv": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.full(2, 7, np.float32)},
    "half": np.full(3, -0.5, ml_dtypes.bfloat16),
}


@pytest.fixture
def run_dir(tmp_path):
    for step in (3, 9):
        params = jax.tree.map(lambda x, step=step: x + np.asarray(step, x.dtype), PARAMS)
        state = create(params, {}, {}, seed=0, worker=0)._replace(step=np.full((), step, np.int32))
        checkpoint.save(
            *(tmp_path / "run" / "checkpoints", checkpoint.files_of({0: state}, True), SoloProcesses()),
            step=step,
            workers=1,
            extra={},
            keep=checkpoint.Kept(2),
        )
    return tmp_path / "run"


def test_out_and_in(run_dir, tmp_path):
    orbax.main([str(run_dir), str(tmp_path / "out"), "--step", "3"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    got = orbax.load(tmp_path / "out", like)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(one, other + np.asarray(3, other.dtype))
        assert one.dtype == other.dtype
    with pytest.raises(UsageError, match="exists; name a new folder"):
        orbax.export(run_dir, tmp_path / "out")
    for change, message in (
        ({"half": jnp.zeros(4, jnp.bfloat16)}, r"half: got bfloat16\[3\], expected bfloat16\[4\]"),
        ({"more": jnp.zeros(1)}, r"more: got nothing, expected float32\[1\]"),
    ):
        with pytest.raises(UsageError, match=message):
            orbax.load(tmp_path / "out", {**PARAMS, **change})
    with pytest.raises(UsageError, match=r"half: got bfloat16\[3\], expected nothing"):
        orbax.load(tmp_path / "out", {"conv": PARAMS["conv"]})
    next((tmp_path / "out").glob("**/_METADATA")).write_text("{")
    with pytest.raises(UsageError, match=r"cannot be read|is not of this model"):
        orbax.load(tmp_path / "out", like)


def test_of_workers_with_params_of_their_own_the_mean_goes_out(tmp_path):
    states = {}
    for worker in range(2):
        params = jax.tree.map(lambda x, by=worker: np.asarray(x + np.asarray(2 * by, x.dtype)), PARAMS)
        states[worker] = create(params, {}, {}, seed=0, worker=worker)
    checkpoint.save(
        *(tmp_path / "checkpoints", checkpoint.files_of(states, False, same_params=False), SoloProcesses()),
        **{"step": 0, "workers": 2, "extra": {}, "keep": checkpoint.Kept(2)},
    )
    mean = orbax.params_of(checkpoint.found(tmp_path / "checkpoints")[0])
    for name, leaf in checkpoint.named_leaves(PARAMS):
        np.testing.assert_array_equal(mean[name], leaf + np.asarray(1, leaf.dtype))


def test_what_cannot_be_exported(run_dir, tmp_path):
    with pytest.raises(UsageError, match="--step: got 4; there are 3, 9"):
        orbax.export(run_dir, tmp_path / "out", 4)
    with pytest.raises(UsageError, match="no checkpoint"):
        orbax.export(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match="no folder"):
        orbax.load(tmp_path / "nothing", PARAMS)
    (run_dir / "checkpoints" / "step_00000009" / "common.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="damaged"):
        orbax.export(run_dir, tmp_path / "out")
