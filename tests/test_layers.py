"""The import order is the reading order: a file imports only files above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxmpi"
ORDER = [
    "config",
    "plain",
    "runtime",
    "spans",
    "processes",
    "handlers",
    "programs",
    "hostsum",
    "comm",
    "mortal",
    "mesh",
    "wires",
    "strategies",
    "costs",
    "compressors",
    "buckets",
    "hostcomm",
    "courier",
    "engine",
    "calls",
    "sums",
    "plan",
    "exchange",
    "overlap",
    "center",
    "post",
    "rules",
    "data",
    "spawned",
    "model",
    "adapters",
    "modelcheck",
    "optim",
    "state",
    "step",
    "noise",
    "workers",
    "neighbours",
    "partition",
    "feed",
    "anatomy",
    "sinks",
    "terminal",
    "recorder",
    "trace",
    "watchdog",
    "plots",
    "faults",
    "checkpoint",
    "orbax",
    "experiment",
    "rundir",
    "replicas",
    "parts",
    "saver",
    "guard",
    "log",
    "survive",
    "asynchronous",
    "train",
    "function",
    "supervise",
    "launch",
    "doctor",
    "report",
    "forecast",
    "bench",
    "cli",
]
EXEMPT = ["__init__", "cli"]
FILES = sorted(PACKAGE.rglob("*.py"))
MPI = {"mpi4py", "mpi4jax"}
MPI_FILES = ("processes", "comm", "spawned")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def layer(module: str) -> str:
    """The name in ORDER: that of the folder for `rules.awagd`."""
    return module.split(".")[0]


def imports(file: Path) -> set[str]:
    """Dotted names that a file imports anywhere, functions included; `from a import b` gives `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import in line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_layers(file: Path) -> set[str]:
    return {layer(name.removeprefix("jaxmpi.")) for name in imports(file) if name.startswith("jaxmpi.")}


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_every_file_has_its_place(file):
    assert layer(module_of(file)) in [*ORDER, "__init__"]


@pytest.mark.parametrize("file", [f for f in FILES if module_of(f) not in EXEMPT], ids=module_of)
def test_a_file_imports_only_files_above_it(file):
    mine = layer(module_of(file))
    allowed = set(ORDER[: ORDER.index(mine)])
    if mine == "data":
        allowed = {"config", "plain"}
    if file.parent != PACKAGE:
        allowed.add(mine)
    assert own_layers(file) <= allowed


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_jaxmpi_knows_no_model_and_no_experiment(file):
    assert not {name.split(".")[0] for name in imports(file)} & {"models", "experiments", "scripts", "tests"}


@pytest.mark.parametrize("file", [f for f in FILES if module_of(f) not in MPI_FILES], ids=module_of)
def test_only_these_files_import_mpi(file):
    assert not {name.split(".")[0] for name in imports(file)} & MPI


def test_the_parser_sees_imports_in_functions():
    assert {name.split(".")[0] for name in imports(PACKAGE / "processes.py")} >= MPI


def test_importing_starts_neither_mpi_nor_a_device_and_loads_no_plotting():
    job = run(
        "import sys, jaxmpi, jaxmpi.train, jaxmpi.launch.command\n"
        "from jax._src import xla_bridge\n"  # JAX has no public word for it
        "loaded = [name in sys.modules for name in ('mpi4py', 'mpi4jax', 'matplotlib')]\n"
        "print(*loaded, xla_bridge.backends_are_initialized())"
    )
    assert (job.stdout.split(), job.stderr) == (["False"] * 4, "")


# ---------------------------------------------------------------- a model knows nothing of workers

MODELS = sorted(set((PACKAGE.parent / "models").glob("*.py")) - {PACKAGE.parent / "models" / "__main__.py"})
FOR_MODELS = {"adapters", "config", "model"}  # what of the package a model may import
OF_WORKERS = {
    *("rank", "local_rank", "comm", "world", "world_size", "num_workers", "processes", "environ", "getenv"),
    *("process_index", "process_count", "device_count", "local_device_count", "devices", "local_devices"),
    *("axis_index", "axis_size", "axis_name", "psum", "pmean", "all_gather", "shard_map"),
}


def identifiers(source: str) -> set[str]:
    """Every name, attribute, argument and keyword of a source; neither comments nor texts."""
    fields = ("id", "attr", "arg", "name", "asname")
    return {
        str(getattr(node, field)) for node in ast.walk(ast.parse(source)) for field in fields if hasattr(node, field)
    }


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_a_model_knows_neither_rank_nor_communicator(file):
    assert own_layers(file) <= FOR_MODELS
    assert not {name.split(".")[0] for name in imports(file)} & {
        *MPI,
        "os",
        "socket",
        "experiments",
        "scripts",
        "tests",
    }
    assert not identifiers(file.read_text()) & OF_WORKERS


@pytest.mark.parametrize(
    "line",
    ["x = comm.size", "f(axis_name='w')", "from jax.lax import psum as s", "lambda rank: 0", "jax.process_index()"],
)
def test_every_way_to_learn_of_workers_is_seen(line):
    assert identifiers(line) & OF_WORKERS
