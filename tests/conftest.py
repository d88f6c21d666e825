"""Eight fake CPU devices, three a rank, and promotions that fail if user code might silently lose or gain precision.

A whole tier runs in two or three processes; named files and slow tests in one.
"""

import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Hundreds of jobs import jaxmpi: with bytecode in a fraction of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests run side by side, and JAX does not write into its cache in one go: each process has a cache of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ["XDG_CACHE_HOME"] = os.path.join(caches, worker)
    # Open MPI's ranks spin while they wait if a job has no more of them than cores: here other jobs need the cores.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # Jobs of a few steps: machine code takes longer to optimise than to run. Files run by hand have it as users do.
    # Fusions compile several times as fast without the emitters over MLIR, and a module in one piece faster than in 32.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_use_fusion_emitters=false",
    )

from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.runtime import process

pytest.register_assert_rewrite("function_checks", "traces", "twins")
# A tenth of the time would go to searches for garbage among the millions of objects of traced programs.
gc.set_threshold(100_000, 50, 100)
# Under nohup the jobs that tests start would not hear it, either.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
UNDER_MPI = (launch := process.launched()) is not None and launch.size > 1

jax.config.update("jax_num_cpu_devices", 3 if UNDER_MPI else 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so a time limit per example says nothing; derandomized, so that a red run
# is red again.
hypothesis.settings.register_profile("jaxmpi", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("many", deadline=None, database=None, max_examples=10_000)  # --hypothesis-profile
hypothesis.settings.load_profile("jaxmpi")


# A process of tests takes up to 1.5 GB, the ranks of its job as much. Two processes leave a fifth of two cores idle, as
# MPI starts and time limits run out; a third takes that. If memory is short, two must do.
THREE_TAKE_BYTES = 8 << 30


def is_whole_tier(config: pytest.Config) -> bool:
    """Return True unless files are named, or slow tests asked for."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    return not (is_named or UNDER_MPI) and config.option.markexpr.startswith("not ")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for the quick tier, three with jobs; none, which is this process itself, for what must not be disturbed."""
    if not is_whole_tier(config):
        return 0
    return 3 if "e2e" not in config.option.markexpr and available_bytes() >= THREE_TAKE_BYTES else 2


# A file's tests stay in one process. If a long file began last, a core would wait for minutes. By itself xdist begins
# with the files of most tests, which are not those that take longest (--no-loadscope-reorder, --durations).
LONGEST = (
    "mpirun readme sharded train supervisor loader_pool diagnosis strategies functions_led collectives local_devices "
    "launch runtime tasks"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, each before two others: side by side they would be a dozen ranks."""
    places: dict[Path, float] = {}
    for item in items:
        if item.path.stem.removeprefix("test_") not in LONGEST:
            places.setdefault(item.path, len(places))
    long = {f"test_{name}.py": 2 * place - 0.5 for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places[item.path] if item.path in places else long[item.path.name])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder of its own for each rank: they would clear away old ones at the same time and trip over it."""
    if UNDER_MPI and not config.option.basetemp:
        folder = tempfile.TemporaryDirectory(prefix="pytest-rank-")
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = folder.name


@pytest.fixture(autouse=True)
def hooks_of_before() -> Iterator[None]:
    """A test that trains installs hooks by which a thread's error ends the process: not for the tests after it."""
    before = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = before


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables by which launchers tell a process its rank."""
    for name in process.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def as_users_have_it() -> Iterator[None]:
    """JAX's own settings: what the tests forbid, Equinox and people's models do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For Optax's Adam, which raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield
