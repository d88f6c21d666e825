"""The notebooks of docs/ run from the first cell to the last, in one process each, and are stored without outputs."""

import json
import re
import sys

import pytest

from launching import ROOT, run

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# As a notebook does: every cell in `__main__`, whose functions have no file that another process could import.
RUN_CELLS = """
import json, sys
text = open(sys.argv[1]).read()
for old, new in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    assert old in text, old
    text = text.replace(old, new)
for number, cell in enumerate(json.loads(text)["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), globals())
"""
SHORTER = {"devices": ("2ep", "8st", "1ep", "8st"), "record": ("4ep", "1ep")}
PRINTED = {"devices": "asa8", "forked": "loss of 301 examples", "record": "last line: "}


def test_every_notebook_is_known():
    assert {path.stem for path in NOTEBOOKS} == set(PRINTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_its_links_lead_somewhere(path):
    cells = json.loads(path.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    texts = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", texts):
        assert (path.parent / target).is_file(), target


@pytest.mark.e2e
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    if "matplotlib" in path.read_text():
        pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    ended = run(
        [sys.executable, "-W", "ignore", "-c", RUN_CELLS, str(path), *SHORTER.get(path.stem, ())],
        cwd=tmp_path,
        timeout_s=120,
    )
    assert ended.code == 0, ended.out
    assert PRINTED[path.stem] in ended.out
