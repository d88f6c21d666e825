"""Experiments that come with jaxmpi, by name, in any folder."""

from pathlib import Path

import pytest

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.launch.options import parse
from jaxmpi.runtime import provenance
from jaxmpi.tools import experiments
from launching import ROOT

DIGITS = ROOT / "experiments" / "digits.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A folder that is no clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["digits", "experiments/digits.py", "digits.py"])
def test_a_name_is_the_file_that_ships_and_the_run_says_which(name, capsys):
    experiment, path = experiment_file.parse([name, "--train-for", "3st"])
    assert (path, experiment.train_for) == (DIGITS, "3st")
    assert capsys.readouterr().err == (
        f"jaxmpi: no file {name!r} here: this is the experiment of that name that comes with jaxmpi, {DIGITS}\n"
    )


def test_a_file_of_that_name_goes_first(elsewhere, capsys):
    (elsewhere / "digits").mkdir()  # such as data: no experiment
    (elsewhere / "digits.py").write_text(DIGITS.read_text())
    assert experiment_file.parse(["digits.py"])[1] == Path("digits.py")
    assert capsys.readouterr().err == ""
    assert experiment_file.parse(["digits"])[1] == DIGITS


@pytest.mark.parametrize(
    ("line", "train_args"),
    [
        ("-n 2 digits --seed 1", "digits --seed 1"),
        ("-n 2 --seed 1 papers/vgg16", "papers/vgg16 --seed 1"),
        ("--data.source digits mine.py", "mine.py --data.source digits"),  # the value of a flag is no experiment
    ],
)
def test_the_launcher_knows_a_name_from_the_value_of_a_flag(line, train_args):
    assert parse(line.split()).train_args == tuple(train_args.split())


def test_an_unknown_name_is_answered_with_the_nearest_that_ships():
    with pytest.raises(UsageError, match=r"no experiment file 'digit'; with jaxmpi come: did you mean 'digits'\?"):
        experiment_file.parse(["digit"])


def test_an_installed_experiment_belongs_to_no_project_above_it(elsewhere, monkeypatch):
    site = elsewhere / "project" / ".venv" / "site-packages" / "jaxmpi"
    (elsewhere / "project" / "pyproject.toml").parent.mkdir()
    (elsewhere / "project" / "pyproject.toml").touch()
    assert provenance.project_root(site / "experiments" / "digits.py") == elsewhere / "project"
    monkeypatch.setattr(provenance, "PACKAGE", site)
    assert provenance.project_root(site / "experiments" / "digits.py") == elsewhere


def test_they_are_listed_and_copied_once(capsys):
    experiments.main([])
    listed = capsys.readouterr().out
    assert {line.split("  ")[0] for line in listed.splitlines()} >= {"digits", "papers/vgg16", "functions/sgd"}
    experiments.main(["--copy", "tasks/gan.py"])
    assert capsys.readouterr().out == "copied to experiments/tasks/gan.py\n"
    copy = Path("experiments/tasks/gan.py")
    assert copy.read_text() == (ROOT / copy).read_text()
    with pytest.raises(UsageError, match="is there already"):
        experiments.main(["--copy", "tasks/gan"])
