"""The pages as a site: it builds, without warnings, and all pages are in it."""

import html
import re
import subprocess
import sys

import pytest

import jaxmpi
from launching import ROOT


@pytest.mark.e2e
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    assert not re.findall(r"^(?:WARNING|ERROR).*", built.stderr, re.M)
    docs = ROOT / "docs"
    pages = {"options", "errors", *(page.stem for page in docs.glob("*.md"))}
    assert all((tmp_path / "site" / page / "index.html").is_file() for page in pages)
    first, listed = ((tmp_path / "site" / name).read_text() for name in ("index.html", "llms.txt"))
    assert all(f'href="{page}/"' in first for page in pages), "a page is not in the menu"
    assert all(f"({page}.md): " in listed for page in pages), "a page does not say its kind and promise"
    assert all("\n**Next:** " in (tmp_path / "site" / f"{page}.md").read_text() for page in pages)
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "bitwise equal on all workers" in api  # of jaxmpi.exchange's docstring
    assert "--optim.lr" in (tmp_path / "site" / "options" / "index.html").read_text()
    errors = (tmp_path / "site" / "errors" / "index.html").read_text()
    assert "use exchange_gradients(" in errors  # of `allreduce/api.py`
    rows = re.findall(r"^- (?:`\w+`: )?(.*)", html.unescape((tmp_path / "site" / "errors.md").read_text()), re.M)
    words = [re.sub(r"^[^a-z]+", "", row.lower()) for row in rows]
    assert words == sorted(words), "a message is not where its first word leads"
    way_in = (tmp_path / "site" / "way_in" / "index.html").read_text()
    [page, line] = re.findall(r'href="\.\./(source/jaxmpi/trainer/main\.py/)#([\w-]+)">', way_in)[0]
    assert f'id="{line}"' in (tmp_path / "site" / page / "index.html").read_text()


def test_every_public_name_is_in_the_api():
    page = (ROOT / "docs" / "api.md").read_text()
    entries = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (\S+)$", page, re.M)}
    assert not [name for name in jaxmpi._MODULES if name not in entries and f"`{name}`" not in page]
