"""Counts of the code of jaxmpi/, as docs/design.md has them.

    python scripts/count_code.py        # of the files that git knows in the current folder

Rooms are the folders of jaxmpi/, and files at its top. An arrow is an import of one room by another in any line of its
files; `__init__.py` at the top is left out. Floors are the rooms on the longest path of arrows. Functions are those at
the top level of modules. A use is a name or an attribute so spelled, imports left out.
"""

import ast
import collections
import functools
import subprocess
from pathlib import Path

import harness


def room_of(file: str) -> str:
    """The room of a file; empty for the package's own `__init__.py`."""
    _, room, *_ = Path(file).with_suffix("").parts
    return "" if room == "__init__" else room


def imported(tree: ast.AST) -> set[str]:
    """Rooms that a module's lines import."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("jaxmpi.")}


def counts() -> dict[str, int]:
    """Each count by its name."""
    files = subprocess.run(
        ["git", "ls-files", "jaxmpi/*.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {file: Path(file).read_text() for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    uses = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name))
    anys = uses["Any"]
    uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    functions = [node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)]
    rooms = {room_of(file) for file in files} - {""}
    arrows = {room: set[str]() for room in rooms}
    for file, tree in trees.items():
        if room := room_of(file):
            arrows[room] |= (imported(tree) & rooms) - {room}

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, arrows[room]), default=0)

    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    return {
        "files at the top": sum(file.count("/") == 1 for file in files if not file.endswith("__main__.py")),
        "rooms": len(rooms),
        "floors": max(map(floor, rooms)),
        "arrows": sum(map(len, arrows.values())),
        "files": len(files),
        "lines": len(lines),
        "functions of modules": len(functions),
        "of them with one use": sum(uses[name] == 1 for name in functions),
        "of them without": sum(uses[name] == 0 for name in functions),
        "Any": anys,
        "lines that are comments": sum(line.startswith("#") and "-----" not in line for line in lines),
    }


if __name__ == "__main__":
    print(harness.table(("of jaxmpi/", "count"), [(name, f"{count:,}") for name, count in counts().items()]))
