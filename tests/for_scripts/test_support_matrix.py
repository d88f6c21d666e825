"""scripts/support_matrix.py: its cells, and the page that it writes."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from launching import ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
support = importlib.import_module("support_matrix")


def test_a_page_names_no_path_and_no_host_and_shows_a_cells_failed_command():
    place = support.Place(Path("/tmp/x"))
    text = support.shown(place, f"\x1b[31m/tmp/x/env/bin/uv {ROOT}/a {Path.home()}/b https://example.org/simple")
    assert text == "ENV/bin/uv ./a ~/b URL"
    wrong = {"name": "python", "line": "uv venv ENV", "code": 2, "reason": support.reason_of("a\nerror: No 3.14\n---")}
    cell = {"python": "3.14", "jax": "oldest", "mpi": "openmpi", "versions": {}, "steps": [wrong]}
    shown = support.filled(f"before\n{support.BEGIN}\nold\n{support.END}\nafter\n", support.page([cell]))
    assert "old\n" not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter\n")
    assert "| 3.14 | oldest | Open MPI 5, wheel | fails |  |  |  |  |  |" in shown
    assert "| `uv venv ENV` | code 2: error: No 3.14 |" in shown


@pytest.mark.e2e
def test_on_a_machine_without_a_newer_python_or_without_a_network_ci_says_so(tmp_path):
    uv = os.environ.get("UV") or shutil.which("uv")
    if not uv:
        pytest.skip("uv makes the environment")
    nowhere: dict[str, str] = dict.fromkeys(("PATH", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"), "/")
    said = {"this machine has no Python above 3.11": nowhere}
    if support.newest_python():
        said["no network"] = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path)}
    for why, env in said.items():
        ended = run([sys.executable, "scripts/support_matrix.py", "--ci"], timeout_s=100, env=env | {"UV": uv})
        assert ended.code == 0, ended.out
        assert f"{why}, so the newest versions are not tested" in ended.out
