"""Eight fake CPU devices, and promotions that fail where user code might silently lose or gain precision."""

import importlib.metadata
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from jaxmpi import runtime
from jaxmpi.processes import processes

UNDER_MPI = (launch := runtime.launched()) is not None and launch.size > 1

jax.config.update("jax_num_cpu_devices", 1 if UNDER_MPI else 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so a time limit per example says nothing; derandomized, so that a red run
# is red again.
hypothesis.settings.register_profile("jaxmpi", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("jaxmpi")


def pytest_report_header() -> list[str]:
    names = ("jaxmpi", "jax", "jaxlib", "flax", "optax", "numpy")
    lines = ["versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)]
    if UNDER_MPI:
        control = processes()
        from mpi4py import MPI

        lines.append(f"MPI: rank {control.rank} of {control.size}, {MPI.get_vendor()}")
    return lines


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables by which launchers tell a process its rank."""
    for names in runtime.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For Optax's Adam, which raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield
