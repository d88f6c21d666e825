"""Programs that travel between ranks: those that call Python functions, with an order."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.shared_compile import SharedJit
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.runtime import host_callbacks

NAME = "the test of programs"


def double(operands, results):
    np.add(operands[0], operands[0], out=results[0])


def step(state, x):
    [doubled] = host_callbacks.call(NAME, [state["p"]], [jax.ShapeDtypeStruct((3,), jnp.float32)])
    return {"p": doubled + x}, x.sum()


def test_a_program_with_effects_is_compiled_once_and_called_often(caplog):
    """Its first state comes from elsewhere, the others from itself."""
    host_callbacks.register(NAME, double)
    try:
        run = SharedJit(step, (0,), SoloProcesses())
        state, x = {"p": jnp.ones(3)}, np.ones(3, np.float32)
        state, _ = run(state, x)
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            for _ in range(3):
                state, total = run(state, x)
            assert not [record for record in caplog.records if "jit(call)" in record.getMessage()]
        assert np.asarray(state["p"]).tolist() == [31.0] * 3
        assert float(total) == 3
    finally:
        host_callbacks.forget(NAME)


def test_a_program_for_all_ranks_of_a_host_runs_with_jit_disabled():
    with jax.disable_jit():
        assert SharedJit(lambda x: x + 1, (), SoloProcesses())(jnp.ones(2)).tolist() == [2.0, 2.0]
