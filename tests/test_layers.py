"""The rooms of the package, and what importing it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import jaxmpi

PACKAGE = Path(__file__).parent.parent / "jaxmpi"


def run(*line: str) -> subprocess.CompletedProcess:
    return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)


def test_the_contracts_on_imports_hold():
    """Rooms, cycles, loaders without JAX, who imports MPI, what models import: pyproject.toml's importlinter."""
    job = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")
    assert job.returncode == 0, job.stdout
    assert "6 kept, 0 broken" in job.stdout


def test_importing_the_package_loads_no_jax():
    job = run(sys.executable, "-c", "import sys, jaxmpi; print('jax' in sys.modules, 'exchange' in dir(jaxmpi))")
    assert (job.stdout.split(), job.stderr) == (["False", "True"], "")


def test_a_job_is_launched_and_supervised_without_jax():
    """Which takes a second, before the ranks start and import it."""
    job = run(sys.executable, "-c", "import sys, jaxmpi.launch.command; print('jax' in sys.modules)")
    assert (job.stdout.split(), job.stderr) == (["False"], "")


def test_importing_starts_neither_mpi_nor_a_device_and_loads_no_plotting():
    job = run(
        sys.executable,
        "-c",
        "import sys, jaxmpi.train, jaxmpi.launch.command\n"
        "from jax._src import xla_bridge\n"  # JAX has no public word for it
        "loaded = [name in sys.modules for name in ('mpi4py', 'mpi4jax', 'matplotlib')]\n"
        "print(*loaded, xla_bridge.backends_are_initialized())",
    )
    assert (job.stdout.split(), job.stderr) == (["False"] * 4, "")


def test_public_names_are_those_that_types_are_checked_with():
    """The table of lazy names and the imports under TYPE_CHECKING are the same list, for two readers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    named = {(alias.name, node.module) for node in typed.body for alias in node.names}  # pyright: ignore[reportAttributeAccessIssue]
    assert named == set(jaxmpi._MODULES.items())
    assert all(getattr(jaxmpi, name) is not None for name, _ in named)
