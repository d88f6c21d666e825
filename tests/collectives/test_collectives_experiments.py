"""The examples of collectives: each asserts that ranks compute what one process computes."""

import pytest

from launching import ROOT, mpirun

FOLDER = ROOT / "experiments" / "collectives"
NAMES = ("heat", "replica_exchange", "conjugate_gradient")  # the last one turns on 64 bits
ALL = "\n".join(f"runpy.run_module('jaxmpi.experiments.collectives.{name}', run_name='__main__')" for name in NAMES)


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_computes(ranks):
    ended = mpirun(ranks, "-c", f"import runpy\n{ALL}", timeout_s=240, env={"JAX_PLATFORMS": "cpu"})
    assert ended.code == 0, ended.out[-3000:]
    assert ended.out.count(f"{ranks} ranks: ") == len(NAMES)


def test_every_example_is_run():
    assert {file.stem for file in FOLDER.glob("*.py")} == set(NAMES)
