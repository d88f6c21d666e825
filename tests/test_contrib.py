"""Files for clusters, containers and package managers say what pyproject.toml says, and are well formed."""

import ast
import re
import subprocess
import tomllib

import pytest
import yaml

from launching import ROOT

CONTRIB = ROOT / "contrib"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER_NAMES = {
    "python-flatbuffers": "flatbuffers",
    "py-opencv": "opencv-python-headless",
    "opencv": "opencv-python-headless",
}


def bounds(requirements, pattern):
    """Lower bounds by package."""
    pairs = [re.fullmatch(pattern, each).groups() for each in requirements]
    return {OTHER_NAMES.get(name, name): bound for name, bound in pairs}


NEEDED = bounds(
    [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mpi"], f"python{PROJECT['requires-python']}"],
    r"([\w-]+)>=([\w.]+)",
)


def test_conda_needs_what_pip_needs():
    recipe = yaml.safe_load((CONTRIB / "conda" / "recipe.yaml").read_text())
    assert bounds(recipe["requirements"]["run"], r"([\w-]+) >=([\w.]+)") == NEEDED
    assert recipe["context"]["version"] == PROJECT["version"]


def test_spack_needs_what_pip_needs():
    text = (CONTRIB / "spack" / "package.py").read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    specs = [ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "id", "") == "depends_on"]
    versions = [spec for spec in specs if "@" in spec]
    assert bounds(versions, r"(?:py-)?([\w-]+)@([\w.]+):(?: .*)?") == NEEDED


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


@pytest.mark.parametrize("script", sorted(CONTRIB.glob("*.sh")), ids=lambda path: path.stem)
def test_job_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, timeout=60).returncode == 0


def test_a_kubernetes_job_mounts_what_it_declares():
    pod = yaml.safe_load((CONTRIB / "mpijob.yaml").read_text())["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
