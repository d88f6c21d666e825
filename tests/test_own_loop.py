"""Parts of a loop of one's own that need a job by themselves."""

import pytest

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
