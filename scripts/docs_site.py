"""Hooks of mkdocs.yml: README as first page, pages of options, errors and linked source, pages as Markdown.

uv run --group docs mkdocs build

A link out of docs/ leads to a page of that file's lines; of "`function` in [file](...)", to the function's first line.
The Markdown of each page lies beside it, and llms.txt lists all pages.
"""

import ast
import dataclasses
import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"(?:`([\w.]+)` in )?\[([^\]]*)\]\(\.\./([^)\s]+)\)")  # function, words and target
PROMISE = re.compile(r"^\*(Learn|Understand|Do|Look up|Evidence)\b[^:]*: (.+?)\*$", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, with links as seen from docs/."""
    text = LINK.sub(lambda m: f"[{m[1]}]({from_docs(m[2])})", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    files.append(File.generated(config, "options.md", content=options_page()))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    pages = [text, *(page.read_text() for page in Path(config.docs_dir).glob("*.md"))]
    for path in sorted({target.partition("#")[0] for page in pages for _, _, target in OUTSIDE.findall(page)}):
        if path != "README.md":
            files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    return files


def source_page(path: str) -> str:
    """A file of the repository as a page, with a target for each line; a Markdown file as it is."""
    text = (ROOT / path).read_text()

    def follow(link: re.Match[str]) -> str:
        words, target = link.groups()
        is_page = target.startswith("docs/")
        return f"[{words}](../{target.removeprefix('docs/')})" if is_page else link[0] if "://" in target else words

    head = "---\nsearch: { exclude: true }\nhide: [navigation]\n---\n"
    if path.endswith(".md"):
        return head + LINK.sub(follow, text)
    kinds = {".py": "python", ".c": "c", ".h": "c", ".sh": "bash", ".yaml": "yaml"}
    return f'{head}# {path}\n\n````{{ .{kinds.get(Path(path).suffix, "text")} linenums="1" }}\n{text}````\n'


def line_of(path: str, function: str) -> int:
    """The line at which a function begins; `a.b` is `b` in `a`.

    Raises:
        ValueError: the file has no such function.
    """
    text, at, end = (ROOT / path).read_text(), 0, 0
    for name in function.split("."):
        begin = rf"^ *(?:def|class) {name}\b" if path.endswith(".py") else rf"^\w[^;{{}}\n]*\b{name}\([^;{{]*\{{"
        if not (found := re.compile(begin, re.M).search(text, end)):
            raise ValueError(f"{path} has no function {function}: mend the page that names it")
        at, end = found.span()
    return text.count("\n", 0, at) + 1


def options_page() -> str:
    """All fields of an experiment with default and help, from the dataclasses as `--help` has them."""
    from jaxmpi.config.flags import GROUPS, Flag, flags
    from jaxmpi.experiments.digits import experiment

    def row(name: str, flag: Flag) -> str:
        [field] = [field for field in dataclasses.fields(flag.part) if field.name == flag.name]
        default = "" if field.default in (dataclasses.MISSING, "") else f"`{field.default}`"
        return f"| `--{name}` | {default} | {html.escape(flag.help).replace('|', '&#124;')} |"

    fields = flags(experiment)
    listed = {name for group in GROUPS.values() for name in group}
    others: dict[str, list[str]] = {}
    for name in fields.keys() - listed:
        others.setdefault(name.rpartition(".")[0] or "other", []).append(name)
    head = "# Options\n\n*Look up: every field of an experiment, its flag, default and meaning, made from the source.*"
    lines = [head, "\n`jaxmpi train EXPERIMENT.py --help` prints them with the experiment's own values."]
    for title, names in [*GROUPS.items(), *sorted(others.items())]:
        rows = (row(name, fields[name]) for name in (names if title in GROUPS else sorted(names)))
        lines += [f"\n## {title}\n", "| flag | default | meaning |", "|---|---|---|", *rows]
    return "\n".join([*lines, "\n**Next:** [options that combine](combining.md); [API](api.md).\n"])


# ---------------------------------------------------------------- errors

ERRORS = ("UsageError", "TrainingError", "AgreedError", "NotFinite")
ANY = "\u2026"  # stands for what a message fills in
FRAME = {"and", "expected", "got", "has", "in", "is", "one", "of", "to", "with"}  # words around what a message fills in
OF_FORMAT = re.compile(r"\{[^{}]*\}")
MARKDOWN = re.compile(r"[&<>*`|\[\]\\{}]|__")


def errors_page() -> str:
    """All messages of the package's errors in the order of their first words, from the calls that raise them."""
    head = f"""# Errors

*Look up: every message of an error, with the way out that it names, made from the source; {ANY} stands for a value.*

Messages are in the order of their first word that is no value: `{ANY}: got no folder` is found under G. Most errors are
a `jaxmpi.UsageError`, which ranks mostly find before anything is lost. The others say so: a `TrainingError` ends the
job, and an `AgreedError` is one that all ranks raise together and rank 0 prints. Limits of time are
[environment variables](launching.md#what-a-process-sets); [failures](reliability.md) has what notices a dead or late
rank, and [combining](combining.md) the messages of options that exclude each other.
"""
    rows = {row for path in (ROOT / "jaxmpi").rglob("*.py") for row in messages(ast.parse(path.read_text()))}
    lines, letter = [head], ""
    for words, kind, text in sorted((first_words(text), kind, text) for kind, text in rows):
        if words[0] != letter:
            letter = words[0]
            lines.append(f"\n## {letter.upper()}\n")
        name = "" if kind == "UsageError" else f"`{kind}`: "
        lines.append(f"- {name}{MARKDOWN.sub(entity, text)}")
    return "\n".join([*lines, "\n**Next:** [options](options.md); [failures](reliability.md).\n"])


def first_words(text: str) -> str:
    """The message from its first letter on, in lower case: what it is looked up by."""
    return re.sub(r"^[^a-z]+", "", text.lower())


def entity(match: re.Match[str]) -> str:
    """What Markdown would read, as HTML."""
    return "".join(f"&#{ord(character)};" for character in match[0])


def messages(module: ast.Module) -> list[tuple[str, str]]:
    """(error, message) of each call in a module that makes an error of ours, values replaced; no message twice."""
    texts = {
        target.id: statement.value
        for statement in ast.walk(module)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    texts_by_kind: dict[tuple[str, str], None] = {}
    for call in ast.walk(module):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        is_check = call.func.id == "check" and len(call.args) == 2
        if (call.func.id in ERRORS and call.args) or is_check:
            text = " ".join(template(call.args[-1 if is_check else 0], texts).split())
            if len({*re.findall(r"[a-z]{2,}", text)} - FRAME) > 1:  # else the message's words come from elsewhere
                texts_by_kind["UsageError" if is_check else call.func.id, text] = None
    return [*texts_by_kind]


def template(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """The text of an expression, with ANY for what it fills in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part, texts) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, texts) + template(right, texts)
        case ast.Call(func=ast.Attribute(value=form, attr="format")):
            return OF_FORMAT.sub(ANY, template(form, texts))
        case ast.Name(id=name) if isinstance(texts.get(name), ast.Constant | ast.JoinedStr):
            return template(texts[name], texts)
        case _:
            return ANY


def from_docs(target: str) -> str:
    """Rewrite a link of README as seen from a page in docs/."""
    return target if "://" in target or target.startswith("#") else posixpath.relpath(target, "docs")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links out of docs/ at the first page, and at pages of source."""

    def follow(link: re.Match[str]) -> str:
        function, words, target = link.groups()
        path, _, anchor = target.partition("#")
        if path == "README.md":
            return f"[{words}](index.md{'#' * bool(anchor)}{anchor})"
        if function:  # as HTML, since MkDocs does not know the anchors of lines
            url = get_relative_url(f"source/{path}/#__codelineno-0-{line_of(path, function)}", page.url)
            return f'`{function}` in <a href="{url}">{words}</a>'
        return f"[{words}](source/{path}.md{'#' * bool(anchor)}{anchor})"

    return markdown if page.file.src_uri.startswith("source/") else OUTSIDE.sub(follow, markdown)


def on_post_build(config: Any) -> None:
    """Write each page's Markdown beside it, and llms.txt."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}"]
    (site / "index.md").write_text((ROOT / "README.md").read_text())
    (site / "options.md").write_text(options_page())
    (site / "errors.md").write_text(errors_page())
    for source in sorted(Path(config.docs_dir).rglob("*.md")):
        (site / source.relative_to(config.docs_dir)).write_text(source.read_text())
    for section in config.nav[1:]:
        [(kind, pages)] = section.items()
        lines += ["", f"## {kind}", ""]
        for [(title, name)] in (page.items() for page in pages):
            promise = PROMISE.search((site / name).read_text())
            lines.append(f"- [{title}]({name})" + (f": {' '.join(promise[2].split())}" if promise else ""))
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
