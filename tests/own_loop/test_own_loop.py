"""Parts of a custom training loop that need a job of their own."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from launching import mpirun

LATE = """
import jax.numpy as jnp
x = jnp.ones(3)
import jaxmpi
comm = jaxmpi.world()
jaxmpi.print0("sum", jaxmpi.metrics.sum(1))
"""


@pytest.mark.e2e
def test_a_world_after_the_first_array_warns_at_its_line():
    ended = mpirun(2, "-c", LATE, timeout_s=60)
    assert ended.code == 0, ended.out
    assert ended.out.count("<string>:5: UserWarning: JAX's device started before jaxmpi.world()") == 2, ended.out
    assert ended.out.count("sum 2") == 1


ALONE = """
from mpi4py import MPI
import numpy as np
import jaxmpi
part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
print("mean", float(jaxmpi.exchange(np.float32(MPI.COMM_WORLD.rank), comm=part)), flush=True)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.e2e
def test_subcommunicators_of_mpi4py_start_jaxmpi_without_the_world():
    ended = mpirun(3, "-c", ALONE, timeout_s=40)
    assert not ended.timed_out, ended.out
    assert ended.code == 0, ended.out
    assert ended.out.count("mean 1.0") == 3


FAILS = """
import sys
from mpi4py import MPI
def load():
    raise ValueError("no data here")
sys.excepthook = lambda *error: print("a library's own words", flush=True)
if MPI.COMM_WORLD.rank == 1:
    {}
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("mistake", "code", "said"),
    [
        ("load()", 1, r"jaxmpi: rank 1/2 on \S+:\nTraceback.*\n.*fails.py\", line 8, in <module>\n.*\n.*in load"),
        ("sys.exit(3)", 3, r"jaxmpi: rank 1/2 on \S+ has left with exit code 3; ending the job\n"),
    ],
)
def test_jaxmpi_run_ends_the_job_with_the_rank_whose_script_fails_without_jaxmpi(mistake, code, said, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS.format(mistake))
    run = ("-c", "from jaxmpi.tools.cli import main; main()", "run", str(tmp_path / "fails.py"))
    ended = mpirun(2, *run, timeout_s=60)
    assert not ended.timed_out, ended.out
    assert ended.code == code, ended.out
    assert re.search(said, ended.out), ended.out


def test_ranks_of_an_unknown_launcher_do_not_work_alone_in_silence(no_launcher, monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    with pytest.warns(UserWarning, match="got PMIX_RANK, as of a rank, .* so this process works alone; expected OMPI"):
        assert processes.__wrapped__().size == 1
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=2), Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(jaxmpi.UsageError, match=r"MPI has 2 ranks, but their launcher sets no variable"):
        processes.__wrapped__()


@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 1.0), (jnp.float16, 300.0)])
def test_many_batches_in_16_bits_are_accumulated_in_32(dtype, size, standard_promotion, no_launcher):
    """1 + 256 is 256 in bfloat16, and 300 * 256 is infinite in float16."""
    params = {"w": jnp.zeros((), dtype)}
    tx = jaxmpi.accumulate_gradients(optax.sgd(1.0), 1024)
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(1024):
        updates, state = update({"w": jnp.asarray(size, dtype)}, state, params)
    assert updates["w"].dtype == dtype
    assert -float(updates["w"]) == size


def test_what_cannot_be_accumulated_is_refused(standard_promotion, no_launcher):
    for every in (0, 2.5, True):
        with pytest.raises(UsageError, match="every: got"):
            jaxmpi.accumulate_gradients(optax.sgd(1.0), every)  # pyright: ignore[reportArgumentType]
    tx, params = jaxmpi.accumulate_gradients(optax.sgd(1.0), 2), {"count": jnp.int32(0), "w": jnp.ones(1)}
    zero = np.zeros((), jax.dtypes.float0)
    with pytest.raises(UsageError, match="count"):  # the gradient of an integer
        tx.update({"count": zero, "w": jnp.ones(1)}, tx.init(params), params)
    w = {"w": params["w"]}
    with pytest.raises(UsageError, match="w: got 1e\\+300"):  # beyond 32 bits
        tx.update({"w": np.full(1, 1e300)}, tx.init(w), w)
    state: Any = tx.update({"w": 0.5}, tx.init(w), w)[1]
    assert state.total["w"] == 0.5


def test_weights_are_required_if_they_are_promised_and_may_all_be_0(standard_promotion, no_launcher):
    tx = jaxmpi.accumulate_gradients(optax.sgd(1.0), 1, weighted=True)
    w = jnp.ones(2)
    updates, _ = tx.update(w * jnp.nan, tx.init(w), w, weight=0)
    assert np.asarray(updates).tolist() == [0, 0]
    wrongs: list[dict[str, Any]] = [{}, {"weight": -1}, {"weight": np.nan}, {"weight": np.ones(2)}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="weight: got"):
            tx.update(w, tx.init(w), w, **wrong)


def test_masked_arrays_are_refused_by_name_wherever_gradients_come_in(standard_promotion, no_launcher):
    masked, w = np.ma.masked_array([1.0, 2.0], [False, True], np.float32), np.ones(2, np.float32)
    accumulated = jaxmpi.accumulate_gradients(optax.sgd(1.0), 1)
    sharded = jaxmpi.sharded(optax.sgd(1.0), "element")
    compressed = jaxmpi.exchange_gradients("topk5")
    calls = {
        "exchange: leaf 'w'": lambda: jaxmpi.exchange({"w": masked}),
        "exchange: leaf 'w/real'": lambda: jaxmpi.exchange({"w": masked.astype(np.complex64)}),
        "leaf 'w'": lambda: compressed.update({"w": masked}, compressed.init({"w": w})),
        "accumulate_gradients: w": lambda: accumulated.update({"w": masked}, accumulated.init({"w": w})),
        "sharded: w": lambda: sharded.init({"w": masked}),
        "sharded: w: ": lambda: sharded.update({"w": masked}, sharded.init({"w": w}), {"w": w}),
        "sharded: params": lambda: sharded.update({"w": w}, sharded.init({"w": w}), {"w": masked}),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=f"{name}.*masked array"):
            call()
