"""The wheel, outside the clone: what ships, and that it runs by the same names as in a clone."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from launching import LAUNCHER_PREFIXES, ROOT

# Calls of `jaxmpi`, and what each prints; `{site}` is where the wheel is.
LINES = {
    "train digits --train-for 20st": ("comes with jaxmpi, {site}/jaxmpi/experiments/digits.py", "step 20/20", "top-1"),
    "train experiments/papers/vgg16.py --help": ("{site}/jaxmpi/experiments/papers/vgg16.py", "--optim.lr"),
    "experiments --copy tasks/gan": ("copied to experiments/tasks/gan.py",),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Site-packages of an environment with this wheel; libraries are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=60)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)  # all that installing a pure wheel does, but for the script `jaxmpi`
    # A path file adds the folder alone: the editable install in it has one as well, which nobody reads.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return site


def jaxmpi(site: Path, folder: Path, line: str) -> str:
    """Return the output of `jaxmpi LINE` in a folder without a clone."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHER_PREFIXES, "PYTHON", "JAXMPI_DATA"))}
    job = subprocess.run(
        [str(site.parents[2] / "bin" / "python"), "-m", "jaxmpi.tools.cli", *line.split()],
        cwd=folder,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert job.returncode == 0, job.stdout
    return job.stdout


def test_the_wheel_has_every_file_of_the_package_the_models_and_the_experiments(installed):
    folders = {"jaxmpi": ROOT / "jaxmpi", "jaxmpi/models": ROOT / "models", "jaxmpi/experiments": ROOT / "experiments"}
    ours = {Path(name, path.relative_to(folder)) for name, folder in folders.items() for path in folder.rglob("*.*")}
    assert {path for path in ours if path.suffix != ".pyc" and not (installed / path).is_file()} == set()
    assert Path("jaxmpi/py.typed") in ours
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"jaxmpi", "libraries.pth"}
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


@pytest.mark.e2e
def test_all_that_ships_runs_outside_a_clone(installed, tmp_path):
    for line, expected in LINES.items():
        printed = jaxmpi(installed, tmp_path, line)
        for text in expected:
            assert text.format(site=installed) in printed, (line, printed)
