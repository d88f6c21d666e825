"""Hooks of mkdocs.yml: README as first page, menu, links out of docs/.

uv run --group docs mkdocs build

All pages are in the menu, and links out of docs/ become plain words.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# The menu, by section; pages that are not named come last.
MENU = {
    "Start": ("index", "quickstart"),
    "Run": ("choosing", "combining", "launching", "gpu", "support", "seeing", "reliability"),
    "Data and models": ("data", "packed", "text", "models", "tasks"),
    "Own loop": ("own_loop", "collectives", "functions", "porting"),
    "Inside": ("strategies", "exchange", "plan", "rules"),
    "Figures": ("results", "performance", "papers"),
    "Extend": ("extending", "api", "design"),
}
DECISIONS = "decisions"  # a section of its own: its README, then records by number
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Put every page of docs/ in the menu."""
    pages = {path.stem for path in Path(config.docs_dir).glob("*.md")} | {"index"}
    config.nav = [{title: [f"{name}.md" for name in names if name in pages]} for title, names in MENU.items()]
    others = sorted(pages.difference(*MENU.values()))
    config.nav += [{"More": [f"{name}.md" for name in others]}] if others else []
    records = sorted((Path(config.docs_dir) / DECISIONS).glob("*.md"), key=lambda path: (path.stem != "README", path))
    config.nav += [{"Decisions": [f"{DECISIONS}/{path.name}" for path in records]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, with links as seen from docs/."""
    text = LINK.sub(lambda m: f"[{m[1]}]({from_docs(m[2])})", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def from_docs(target: str) -> str:
    """Rewrite a link of README as seen from a page in docs/."""
    return target if "://" in target or target.startswith("#") else posixpath.relpath(target, "docs")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point README links at the first page; other outside links become text."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def followed(match: re.Match[str]) -> str:
        words, target = match.groups()
        if "://" in target or not target.startswith("../"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        first, is_first = posixpath.relpath("docs/index.md", folder), path.partition("#")[0] == "README.md"
        return f"[{words}]({first}{path.removeprefix('README.md')})" if is_first else words

    return LINK.sub(followed, markdown)
