"""Facts of an experiment that the launcher finds out before it starts ranks."""

import os
import sys
from unittest import mock

import pytest

from jaxmpi.core.errors import UsageError
from jaxmpi.launch import experiment_facts
from jaxmpi.launch.experiment_facts import ExperimentFacts, facts_of, may_differ
from jaxmpi.rules.registry import RULES
from launching import ROOT

DIGITS = str(ROOT / "experiments" / "digits.py")
FILE = "from jaxmpi.config import Experiment, RuleConfig\n{}\n"
OUTLIVES = {  # lines of a file, and flags: the run outlives ranks
    "a flag for a file's rule": ("experiment = Experiment(rule=RuleConfig('easgd'))", ["--rule.name=awagd"], False),
    "shrink": ("experiment = Experiment()", ["--on-rank-loss=shrink"], True),
    "a row of one's own": (
        "from jaxmpi.rules.registry import RULES\nRULES['mine'] = RULES['gosgd']\n"
        "experiment = Experiment(rule=RuleConfig('mine'))",
        [],
        True,
    ),
    "no name in sight": (
        "import dataclasses\nexperiment = Experiment()\n"
        "experiment = dataclasses.replace(experiment, rule=dataclasses.replace(experiment.rule, name='asgd'))",
        [],
        True,
    ),
}


@pytest.fixture
def in_this_process(monkeypatch):
    """The child's part runs here, where JAX is loaded; other tests start it as a process of its own."""

    def run(words, output):
        with mock.patch.dict(RULES):
            experiment_facts.main(str(os.getppid()), *words)
        output.touch()

    monkeypatch.setattr(experiment_facts, "run_in_another_process", run)
    monkeypatch.setattr(experiment_facts.process, "end_with_parent", lambda pid: None)
    yield
    sys.modules.pop("mine", None)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("case", OUTLIVES)
def test_a_run_that_outlives_ranks_is_known_by_running_its_file(case, tmp_path):
    lines, flags, outlives = OUTLIVES[case]
    (tmp_path / "mine.py").write_text(FILE.format(lines))
    facts = facts_of([str(tmp_path / "mine.py"), *flags])
    assert facts.outlives_ranks is outlives


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("fields", "flags", "expected"),
    [
        ("run_dir='own', resume=True", ("--seed", "3"), ExperimentFacts(run_dir="own", resume=True)),
        ("run_dir='own', resume=True", ("--run_dir=b", "--no-resume"), ExperimentFacts(run_dir="b")),
        ("from_start=True", ("--resume", "--no-from-start"), ExperimentFacts(resume=True)),  # as in a restart
    ],
)
def test_the_run_directory_and_start_of_an_experiment_file_are_known(fields, flags, expected, tmp_path):
    (tmp_path / "mine.py").write_text(FILE.format(f"experiment = Experiment({fields})"))
    assert facts_of([str(tmp_path / "mine.py"), *flags]) == expected


@pytest.mark.usefixtures("in_this_process")
def test_a_mistake_is_named_before_ranks_start():
    with pytest.raises(UsageError, match=r"optim\.lr: got -1\.0"):
        facts_of([DIGITS, "--optim.lr", "-1"])
    with pytest.raises(UsageError, match=r"--rule\.tau: got 'often'"):
        facts_of([DIGITS, "--rule.tau", "often"])


@pytest.mark.usefixtures("in_this_process")
def test_a_batch_that_workers_do_not_divide_is_named_before_ranks_start(tmp_path):
    line = "experiment = Experiment(rule=RuleConfig('easgd', servers=1), effective_batch=64)"
    (tmp_path / "mine.py").write_text(FILE.format(line))
    with pytest.raises(UsageError, match="effective_batch 64 is not divisible by 3 workers"):
        facts_of([str(tmp_path / "mine.py")], processes=4)
    assert facts_of([str(tmp_path / "mine.py")], processes=5).outlives_ranks
    assert facts_of([str(tmp_path / "mine.py"), "--resume"], processes=4).resume  # with uneven shares


UNANSWERED = {  # an experiment file: why its facts are not known
    "import time\nrule = time.sleep(100)": "has run for 2 s",
    "import os\nrule = open(0).read() or os._exit(7)": "exit code 7",
}


@pytest.mark.e2e
@pytest.mark.parametrize("text", UNANSWERED)
def test_a_file_that_gives_no_answer_is_said_and_left_to_the_ranks(text, tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.py"
    file.write_text(text)
    monkeypatch.setattr(experiment_facts, "TIMEOUT_S", 2.0 if "sleep" in text else 60.0)
    assert facts_of([str(file)], file_is_here=False) == ExperimentFacts()
    errors = capsys.readouterr().err
    assert f"{file}: cannot be run by the launcher: {UNANSWERED[text]}; starting a job that a dead rank ends" in errors


@pytest.mark.e2e
def test_a_mistake_on_a_host_without_ranks_is_left_to_the_ranks(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import of_other_hosts")
    assert facts_of([str(tmp_path / "mine.py")], file_is_here=False) == ExperimentFacts()
    assert "No module named 'of_other_hosts'; starting a job" in capsys.readouterr().err
    with pytest.raises(UsageError, match="No module named 'of_other_hosts'"):
        facts_of([str(tmp_path / "mine.py")])


SURE = ["from jaxmpi.models.cnn import digits_cnn", "import os, math as m", "import jax.numpy as jnp, optax"]
UNSURE = ["from jaxmpi.experiments import gpt", "from . import gpt", "import os, my_package", "eval('1')", "x = {**{}}"]


@pytest.mark.parametrize("line", [*SURE, *UNSURE])
def test_most_files_need_not_run(line):
    text = f"from jaxmpi.config import Experiment\n{line}\nexperiment = Experiment(seed=3)\n"
    assert may_differ(["mine.py", "--seed", "1"], text) is (line in UNSURE)
    assert may_differ(["mine.py", "--resume"], text)
    assert facts_of(["gone.py", "--resume"]) == ExperimentFacts(resume=True)  # other hosts may have it
