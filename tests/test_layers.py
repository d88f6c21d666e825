"""The rooms of the package, and what importing it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmpi

PACKAGE = Path(__file__).parent.parent / "jaxmpi"


def run(*line: str) -> subprocess.CompletedProcess:
    return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)


def test_the_contracts_on_imports_hold():
    """Rooms, cycles, loaders without JAX, who imports MPI, what models import: pyproject.toml's importlinter."""
    job = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")
    assert job.returncode == 0, job.stdout
    assert "6 kept, 0 broken" in job.stdout


BACKENDS = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized()"  # JAX has no public word
IMPORTS = {  # what is run: what it prints
    "import sys, jaxmpi; print('jax' in sys.modules, 'exchange' in dir(jaxmpi))": "False True",
    # A job is launched and supervised without JAX, which takes a second, before the ranks start and import it.
    "import sys, jaxmpi.launch.command; print('jax' in sys.modules)": "False",
    f"import sys, jaxmpi.train; {BACKENDS}, *(name in sys.modules for name in ('mpi4py', 'mpi4jax')))": (
        "False False False"
    ),
    "import sys, jaxmpi.model; print({'flax', 'equinox'} & set(sys.modules))": "set()",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_load_nothing_and_start_nothing_that_is_not_needed(code):
    job = run(sys.executable, "-c", code)
    assert (job.stdout.strip(), job.stderr) == (IMPORTS[code], "")


def test_public_names_are_those_that_types_are_checked_with():
    """The table of lazy names and the imports under TYPE_CHECKING are the same list, for two readers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    named = {(alias.name, node.module) for node in typed.body for alias in node.names}  # pyright: ignore[reportAttributeAccessIssue]
    assert named == set(jaxmpi._MODULES.items())
    assert all(getattr(jaxmpi, name) is not None for name, _ in named)
