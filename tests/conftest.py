"""Eight fake CPU devices, three a rank, and promotions that fail if user code might silently lose or gain precision.

A whole tier runs in two processes; named files and slow tests in one.
"""

import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator

import hypothesis
import jax
import pytest

# Hundreds of jobs import jaxmpi: with bytecode in a fraction of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests run side by side, and JAX does not write into its cache in one go: each process has a cache of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ["XDG_CACHE_HOME"] = os.path.join(caches, worker)
    # Jobs of a few steps: machine code takes longer to optimise than to run. Files run by hand have it as users do.
    # Fusions compile several times as fast without the emitters over MLIR, and a module in one piece faster than in 32.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_use_fusion_emitters=false",
    )

from jaxmpi.comm.control import processes
from jaxmpi.runtime import launchers

# A tenth of the time would go to searches for garbage among the millions of objects of traced programs.
gc.set_threshold(100_000, 50, 100)
# Under nohup the jobs that tests start would not hear it, either.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
UNDER_MPI = (launch := launchers.launched()) is not None and launch.size > 1

jax.config.update("jax_num_cpu_devices", 3 if UNDER_MPI else 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so a time limit per example says nothing; derandomized, so that a red run
# is red again.
hypothesis.settings.register_profile("jaxmpi", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("many", deadline=None, database=None, max_examples=10_000)  # --hypothesis-profile
hypothesis.settings.load_profile("jaxmpi")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for a whole tier; none, which is this process itself, for what must not be disturbed."""
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return 2 if is_whole and not UNDER_MPI and config.option.markexpr.startswith("not ") else 0


# A file's tests stay in one process. If a long file began last, a core would wait for minutes. By itself xdist begins
# with the files of most tests, which are not those that take longest (--no-loadscope-reorder, --durations).
LONGEST = (
    "train",
    "mpirun",
    "readme",
    "overlap",
    "asynchronous",
    "rundir",
    "adapters",
    "bench",
    "functions_led",
    "comm_xla",
)
FIRST = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    items.sort(key=lambda item: FIRST.get(item.path.name, len(FIRST)))


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
    for names in launchers.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For Optax's Adam, which raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield
