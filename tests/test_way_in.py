"""The paths of docs/way_in.md: every function is in its file, and called by the one that the page says."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from launching import ROOT

STEP = re.compile(r"^\d+\. `(\S+)` in \[(\S+)\]\(\.\./\2\)(?:, from\s`(\S+)`)?: ", re.M)


class Step(NamedTuple):
    """A function of a path."""

    section: str
    name: str
    file: str
    caller: str  # its name; of the first of all none


def steps() -> list[Step]:
    found: list[Step] = []
    for section in (ROOT / "docs" / "way_in.md").read_text().split("\n## ")[1:]:
        rows = STEP.findall(section)
        assert len(rows) == len(re.findall(r"^\d+\. ", section, re.M)), "a step is not written as the others are"
        before = ["", *(name for name, *_ in rows)]
        title = section.partition("\n")[0]
        found += [Step(title, name, file, caller or before[i]) for i, (name, file, caller) in enumerate(rows)]
    return found


STEPS = steps()
BOUND = {  # what is called by another name, and where it gets that
    "schedule_scatter": ("scatter_part", "scatter_part=schedule_scatter"),
    "jaxmpi_host_engine": ("sums_p", "sums_p, beside_p = SOURCE.primitive()"),  # of `host_engine.c`, as XLA knows it
    "jaxmpi_compiled_calls": ("_call_p", "_call_p = SOURCE.primitive()"),
}


@functools.cache
def functions(file: Path) -> dict[str, str]:
    """The source of each function of a file, by its qualified name."""
    text = file.read_text()
    if file.suffix != ".py":  # C: from a name at the start of a line to the closing brace
        return {name: body for name, body in re.findall(r"^\w[^\n;{]*?(\w+)\([^;{]*\) (\{\n.*?^\})", text, re.M | re.S)}
    found: dict[str, str] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = ast.get_source_segment(text, child) or ""
            walk(child, f"{prefix}{child.name}." if named else prefix)

    walk(ast.parse(text), "")
    return found


def words(file: Path, source: str) -> set[str]:
    """The names and attributes that a function's body mentions; words of strings and comments are none in Python."""
    if file.suffix != ".py":
        return set(re.findall(r"\w+", source))
    nodes = [*ast.walk(ast.parse(source))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def code_lines(step: Step) -> int:
    """Lines of a function that are neither empty nor comment nor docstring."""
    source = functions(ROOT / step.file)[step.name]
    if not step.file.endswith(".py"):
        source = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
    elif doc := ast.get_docstring(ast.parse(source).body[0], clean=False):  # pyright: ignore[reportArgumentType]
        source = source.replace(f'"""{doc}"""', "", 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines())


def test_the_short_path_has_as_many_lines_as_the_page_says():
    [said] = re.findall(r"^About (\d+) lines of code", (ROOT / "docs" / "way_in.md").read_text(), re.M)
    assert sum(code_lines(step) for step in STEPS if step.section == "The short path") == pytest.approx(int(said), 0.1)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_function_is_where_the_path_says(step):
    assert step.name in functions(ROOT / step.file)


@pytest.mark.parametrize("step", [step for step in STEPS if step.caller], ids=lambda step: step.name)
def test_a_function_is_called_by_the_one_before(step):
    package = [path for suffix in ("py", "c", "h") for path in sorted((ROOT / "jaxmpi").rglob(f"*.{suffix}"))]
    name = step.caller.rpartition(".")[2]
    known = [ROOT / each.file for each in STEPS if each.name == step.caller]
    known = known or [path for path in package if re.search(rf"\b{name}\(", path.read_text())]
    callers = [(file, functions(file)[step.caller]) for file in known if step.caller in functions(file)]
    assert callers, f"no function {step.caller}"
    called = step.name.rpartition(".")[2]
    if step.name in BOUND:
        called, binding = BOUND[step.name]
        assert any(binding in path.read_text() for path in package)
    assert any(called in words(file, source) for file, source in callers)


def test_the_path_begins_at_the_command():
    assert STEPS[0].name in words(ROOT / "a.py", (ROOT / "jaxmpi" / "train.py").read_text())
