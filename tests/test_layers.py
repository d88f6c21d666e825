"""The rooms of the package, and what a model may know."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import jaxmpi

PACKAGE = Path(__file__).parent.parent / "jaxmpi"
SETTINGS = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
LAYERS = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
FLOORS = LAYERS[:2:-1]  # from the ground up
ROOMS = [room for floor in FLOORS for room in floor.split(" | ")]


def run(*line: str) -> subprocess.CompletedProcess:
    return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)


def test_the_contracts_on_imports_hold():
    """Rooms, cycles, loaders without JAX, who imports MPI, what models import: pyproject.toml's importlinter."""
    job = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")
    assert job.returncode == 0, job.stdout
    assert "6 kept, 0 broken" in job.stdout


def test_the_map_in_the_docs_has_the_rooms_on_their_floors():
    # Above all rooms: two folders of the repository, which no room knows, and the module that `python -m` runs.
    assert LAYERS[:3] == ["experiments", "models", "train"]
    rooms = {(str(n), room) for n, floor in enumerate(FLOORS, 1) for room in floor.split(" | ")}
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    assert set(re.findall(r"^\| (\d) \| `(\w+)` \|", page, re.MULTILINE)) == rooms


def folders_of_rooms() -> list[str]:
    """Rooms and the packages inside them, as `data` and `data.sources`."""
    found = [file.parent for room in ROOMS for file in (PACKAGE / room).rglob("__init__.py")]
    return sorted(".".join(folder.relative_to(PACKAGE).parts) for folder in found)


def imported_rooms(folder: Path, name: str) -> list[str]:
    """Rooms of the modules that those of a folder import from outside it, from the ground up."""
    nodes = [node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    modules = {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    rooms = {module.split(".")[1] for module in modules if re.match(rf"jaxmpi\.(?!{re.escape(name)}\.)", module)}
    return [room for room in ROOMS if room in rooms]


@pytest.mark.parametrize("name", folders_of_rooms())
def test_a_room_names_its_modules_and_the_rooms_that_it_imports(name):
    folder = PACKAGE.joinpath(*name.split("."))
    text = " ".join(str(ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))).split())
    parts, _, imports = text.rpartition("It imports ")
    modules = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    assert {*re.findall(r"`(\w+)`", parts)} == modules - {"__init__"}
    *most, last = [f"`{room}`" for room in imported_rooms(folder, name)] or ["no other room"]
    assert imports == f"{', '.join(most)} and {last}." if most else f"{last}."


def test_a_class_name_exists_once():
    """One word has one meaning: no two modules have a class of the same name."""
    places: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 300  # they are found
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


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
    assert named == set(jaxmpi._HOME.items())
    assert all(getattr(jaxmpi, name) is not None for name, _ in named)


# ---------------------------------------------------------------- a model knows nothing of workers

MODELS = sorted(set((PACKAGE.parent / "models").glob("*.py")) - {PACKAGE.parent / "models" / "__main__.py"})
OF_WORKERS = {
    *("os", "socket", "scripts", "tests"),
    *("rank", "local_rank", "comm", "world", "world_size", "num_workers", "processes", "environ", "getenv"),
    *("process_index", "process_count", "device_count", "local_device_count", "devices", "local_devices"),
    *("axis_index", "axis_size", "axis_name", "psum", "pmean", "all_gather", "shard_map"),
}


def identifiers(source: str) -> set[str]:
    """Every name, attribute, argument and keyword of a source; neither comments nor texts."""
    fields = ("id", "attr", "arg", "name", "asname")
    return {
        str(getattr(node, field)) for node in ast.walk(ast.parse(source)) for field in fields if hasattr(node, field)
    }


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_a_model_knows_neither_rank_nor_communicator(file):
    assert not identifiers(file.read_text()) & OF_WORKERS


@pytest.mark.parametrize(
    "line",
    ["x = comm.size", "f(axis_name='w')", "from jax.lax import psum as s", "lambda rank: 0", "jax.process_index()"],
)
def test_every_way_to_learn_of_workers_is_seen(line):
    assert identifiers(line) & OF_WORKERS


def test_words_of_functions_are_taken_from_the_top_and_their_new_place_said():
    with pytest.warns(FutureWarning, match=r"jaxmpi\.sum is jaxmpi\.functions\.sum now"):
        assert jaxmpi.sum is jaxmpi.functions.sum  # pyright: ignore[reportAttributeAccessIssue]
    assert {name for name in jaxmpi._MOVED if not hasattr(jaxmpi.functions, name)} == set()


def docstrings(*folders: str) -> list[tuple[str, str]]:
    """Files and their docstrings."""
    found, kinds = [], (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (path for folder in folders for path in (PACKAGE.parent / folder).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        found += [(path.name, text) for node in nodes if (text := ast.get_docstring(node))]
    return found


CODE = ("jaxmpi", "models", "experiments", "scripts")


def test_docstrings_begin_with_at_most_twelve_words_that_name_a_thing_or_an_act():
    firsts = [(name, text.split("\n\n")[0]) for name, text in docstrings(*CODE)]
    odd = ("Of ", "What ", "Where ", "Whether ", "Who ")
    long = [f"{name}: {first}" for name, first in firsts if len(first.split()) > 12 or first.startswith(odd)]
    assert not long, "\n".join(long)


ITEM = re.compile(r"- |\* |\d+\. |[\w*`./, ]+: ")  # begins a paragraph of its own
TABLE = re.compile(r"\S {2,}\S|^ *(python|mpirun|uv|jaxmpi) ")  # columns, or a command


def sentences(docstring: str) -> list[str]:
    """The sentences outside tables; a colon or semicolon ends one, too."""
    paragraphs = [""]
    for line in docstring.splitlines():
        text = "" if TABLE.search(line) else line.strip()
        if not text or ITEM.match(text):
            paragraphs.append("")
        paragraphs[-1] += f" {text}"
    return [sentence for each in paragraphs for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`(\[f])|[;:] ", each)]


def test_a_sentence_of_a_docstring_has_at_most_twenty_words():
    words = [
        (name, sentence, sum(bool(re.search("[A-Za-z]", word)) for word in sentence.split()))
        for name, text in docstrings(*CODE, "tests")
        for sentence in sentences(text)
    ]
    long = [f"{name}: {count} words: {sentence}" for name, sentence, count in words if count > 20]
    assert not long, "\n".join(long)


def test_a_sentence_of_a_docstring_begins_with_its_subject_or_a_condition():
    odd = ("Of ", "What ", "Whether ", "Who ")
    found = [(name, sentence.strip()) for name, text in docstrings(*CODE) for sentence in sentences(text)]
    assert [f"{name}: {sentence}" for name, sentence in found if sentence.startswith(odd)] == []


def test_a_comment_begins_with_a_thing_an_act_or_a_condition():
    odd = re.compile(r"# ?(of|what|whether|who|whoever|whose)\b", re.IGNORECASE)
    found = [
        f"{path.name}:{token.start[0]}: {token.string}"
        for path in (path for folder in CODE for path in (PACKAGE.parent / folder).rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and odd.match(token.string)
    ]
    assert found == []


def test_a_sentence_of_a_page_begins_with_its_subject_or_a_condition():
    odd = re.compile(r"(?:^|[.!?] )(?:Of|What|Whether|Who) .{0,40}", re.MULTILINE)
    pages = [PACKAGE.parent / "README.md", *(PACKAGE.parent / "docs").rglob("*.md")]
    prose = {page.name: re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(), flags=re.S | re.M) for page in pages}
    assert [f"{name}: {found}" for name, text in prose.items() for found in odd.findall(text)] == []


def test_sentences_are_told_from_tables_and_lists():
    docstring = "Add x.\n\nIt adds, f32[n], and y:\n- one\n- two\n\n    python a b\n    a    b\n\nArgs:\n    x: this.\n"
    assert [s.strip() for s in sentences(docstring) if s.strip()] == (
        ["Add x.", "It adds, f32[n], and y:", "- one", "- two", "Args:", "x", "this."]
    )


def methods_of(node: ast.ClassDef) -> dict[str, bool]:
    """Public methods of a class, and whether they have a docstring; a property's setter needs none."""
    found: dict[str, bool] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
            found[each.name] = found.get(each.name, False) or bool(ast.get_docstring(each))
    return found


def names_of_bases(node: ast.ClassDef) -> list[str]:
    """Of `Comm`, `base.Comm` and `Comm[T]` the name `Comm`."""
    bare = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [str(getattr(base, "id", getattr(base, "attr", ""))) for base in bare]


def with_bases(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class, and those it comes from as far as they are known."""
    found = [node]
    for each in found:  # which grows meanwhile
        found += [known[name] for name in names_of_bases(each) if name in known and known[name] not in found]
    return found


def members_of(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and attributes that methods set."""
    stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    return {*methods_of(node), *(getattr(each, "attr", getattr(each, "id", "")) for each in stored)}


def undocumented(nodes: list[ast.ClassDef], known: dict[str, ast.ClassDef]) -> list[str]:
    """Public methods without a docstring, unless a base class has it, or a protocol which the class fulfils."""
    protocols, lines = [node for node in known.values() if "Protocol" in names_of_bases(node)], []
    for node in nodes:
        line = with_bases(node, known)
        members = {member for each in line for member in members_of(each)}
        line += [each for each in protocols if members >= {*methods_of(each)}]
        documented = {name for each in line for name, is_documented in methods_of(each).items() if is_documented}
        lines += [f"{node.name}.{name}" for name in methods_of(node) if name not in documented]
    return lines


def test_a_public_method_has_a_docstring_where_it_is_or_where_it_comes_from():
    """In place of ruff's D102, which knows neither base classes nor protocols."""
    files = [file for folder in ("jaxmpi", "models", "scripts") for file in (PACKAGE.parent / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    known = {node.name: node for node in reversed(nodes)}  # the package's, where scripts have a name again
    assert undocumented([node for node in nodes if not node.name.startswith("_")], known) == []


def test_a_method_that_nothing_documents_is_found():
    source = (
        "class Comm(Protocol):\n  @property\n  def size(self): 'Workers.'\n  def sum(self): 'Over workers.'\n"
        "class Ring:\n  def __init__(self): self.size = 2\n  def sum(self): pass\n  def close(self): pass\n"
        "class Other:\n  def sum(self): pass\n"
        "class Late(Ring):\n  def sum(self): pass\n  def _cut(self): pass\n"
    )
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert undocumented(nodes, {node.name: node for node in nodes}) == ["Ring.close", "Other.sum"]
