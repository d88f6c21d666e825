"""Data-parallel functions if every rank runs the script."""

import numpy as np
import pytest

import function_checks
import jaxmpi
from function_checks import f32
from jaxmpi import functions as jm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes

if not isinstance(processes(), MpiProcesses):
    pytest.skip("one rank leads nobody", allow_module_level=True)
pytestmark = pytest.mark.e2e  # functions of forked workers: tests/functions/test_functions.py
RANK, SIZE = processes().rank, processes().size


REST = [pytest.param(c, marks=pytest.mark.slow) for c in function_checks.CHECKS if c not in function_checks.CORE]


@pytest.mark.parametrize("check", [*function_checks.CORE, *REST])
def test_every_rank_runs_the_script(check):
    check()


def test_a_mistake_of_one_rank_reaches_all():
    """The rank's mistake reaches the others, and the next call works."""
    f = jm.function(lambda x: x.sum(), jm.scatter, jm.sum)
    x = np.ones(2 * SIZE, np.float32)
    with pytest.raises(jaxmpi.TrainingError, match=r"worker 1 of \d failed:\n.*expected numbers"):
        f(np.array(["a"] * 2 * SIZE) if RANK == 1 else x)
    assert float(f(x)) == 2 * SIZE


def test_ranks_at_different_calls_are_refused():
    f, g = (jm.function(f, jm.scatter, jm.sum) for f in (lambda x: x.sum(), lambda x: x.max()))
    x = np.ones(2 * SIZE, np.float32)
    with pytest.raises(jaxmpi.UsageError, match="differs between workers"):
        (g if RANK == 1 else f)(x)
    with pytest.raises(jaxmpi.UsageError, match="differs between workers"):
        f(x[:SIZE] if RANK == 1 else x)
    with pytest.raises(jaxmpi.UsageError, match="differs between workers"):
        f(x, batch=slice(RANK == 1, SIZE + (RANK == 1)))
    assert float(f(x)) == float(g(x)) * 2 == 2 * SIZE


def test_a_shared_array_that_cannot_be_made_fails_on_all_ranks():
    """Only the first rank of a host tries to; all learn of it."""
    for make, message in ((lambda: np.array([object()]), "array of object"), (lambda: 1 / 0, "division by zero")):
        with pytest.raises((jaxmpi.UsageError, jaxmpi.TrainingError), match=message):
            jm.shared(make)
    assert jm.shared(f32([1, 2]))[:].tolist() == [1, 2]
