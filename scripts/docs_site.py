"""Hooks of mkdocs.yml: README as first page, a page of options, links out of docs/, pages as Markdown.

uv run --group docs mkdocs build

Links out of docs/ become plain words. The Markdown of each page lies beside it, and llms.txt lists all pages.
"""

import dataclasses
import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
PROMISE = re.compile(r"^\*(Learn|Understand|Do|Look up|Evidence)\b[^:]*: (.+?)\*$", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, with links as seen from docs/."""
    text = LINK.sub(lambda m: f"[{m[1]}]({from_docs(m[2])})", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    files.append(File.generated(config, "options.md", content=options_page()))
    return files


def options_page() -> str:
    """All fields of an experiment with default and help, from the dataclasses as `--help` has them."""
    from jaxmpi.config.flags import GROUPS, Flag, flags
    from jaxmpi.experiments.digits import experiment

    def row(name: str, flag: Flag) -> str:
        [field] = [field for field in dataclasses.fields(flag.part) if field.name == flag.name]
        default = "" if field.default in (dataclasses.MISSING, "") else f"`{field.default}`"
        return f"| `--{name}` | {default} | {html.escape(flag.help).replace('|', '&#124;')} |"

    known = flags(experiment)
    listed = {name for group in GROUPS.values() for name in group}
    others: dict[str, list[str]] = {}
    for name in known.keys() - listed:
        others.setdefault(name.rpartition(".")[0] or "other", []).append(name)
    head = "# Options\n\n*Look up: every field of an experiment, its flag, default and meaning, made from the source.*"
    lines = [head, "\n`jaxmpi train EXPERIMENT.py --help` prints them with the experiment's own values."]
    for title, names in [*GROUPS.items(), *sorted(others.items())]:
        rows = (row(name, known[name]) for name in (names if title in GROUPS else sorted(names)))
        lines += [f"\n## {title}\n", "| flag | default | meaning |", "|---|---|---|", *rows]
    return "\n".join([*lines, "\n**Next:** [options that combine](combining.md); [API](api.md).\n"])


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


def on_post_build(config: Any) -> None:
    """Write each page's Markdown beside it, and llms.txt."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}"]
    (site / "index.md").write_text((ROOT / "README.md").read_text())
    (site / "options.md").write_text(options_page())
    for source in sorted(Path(config.docs_dir).rglob("*.md")):
        (site / source.relative_to(config.docs_dir)).write_text(source.read_text())
    for section in config.nav[1:]:
        [(kind, pages)] = section.items()
        lines += ["", f"## {kind}", ""]
        for [(title, name)] in (page.items() for page in pages):
            promise = PROMISE.search((site / name).read_text())
            lines.append(f"- [{title}]({name})" + (f": {' '.join(promise[2].split())}" if promise else ""))
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
