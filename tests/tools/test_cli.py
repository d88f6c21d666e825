import contextlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmpi.tools import cli, completion
from jaxmpi.trainer import main
from launching import ROOT


def run(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The console script, as pip makes it."""
    code = "import sys; from jaxmpi.tools.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_every_command(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxmpi", *argv])
    cli.main()
    out = capsys.readouterr().out
    assert all(name in out and command.summary in out for name, command in cli.COMMANDS.items())


@pytest.mark.parametrize("line", [*cli.COMMANDS, "data pack", "data check"])
def test_every_command_has_help(line, monkeypatch, capsys):
    """Its example has no option that the help does not explain."""
    monkeypatch.setattr(sys, "argv", ["jaxmpi", *line.split(), "--help"])
    with contextlib.suppress(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    assert out.startswith(f"usage: jaxmpi {line} ")
    [example] = re.findall(r"^example: (?:mpirun -n 8 )?jaxmpi (.*)", out, re.MULTILINE)
    assert all(out.count(flag) > 1 for flag in re.findall(r"(?<= )--?[a-z][\w-]*", example))


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxmpi", "--version"])
    cli.main()
    out = capsys.readouterr().out
    assert f"jaxmpi {importlib.metadata.version('jaxmpi')}  jax {importlib.metadata.version('jax')}  " in out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("do", ["doctor"]),
        ("train --optim.lr-f", ["--optim.lr-for-batch"]),
        ("train dig", ["digits"]),
        ("plan --ga", ["--gamma-s-per-byte"]),
        ("evaluate --data.v", ["--data.validation-split"]),
        ("data ''", ["pack", "check", "words", "tokens"]),
        ("data pack a b --hol", ["--holdout"]),
        ("predict --data.s", ["--data.source"]),
        ("train digits --rule.name lo", ["local_sgd"]),
        ("train digits --exchange.strategy a", ["ar", "asa", "auto"]),
        ("train digits --compute-dtype b", ["bfloat16"]),
    ],
)
def test_bash_completes_commands_flags_and_experiments(words, offered):
    line = f"COMP_WORDS=(jaxmpi {words}); COMP_CWORD={len(words.split())}"
    completed = f'eval "$(cat)"; {line}; _jaxmpi; echo "${{COMPREPLY[@]}}"'
    script = run("completion").stdout
    out = subprocess.run(["bash", "-c", completed], input=script, capture_output=True, text=True, timeout=20).stdout
    assert set(offered) <= {*out.split()}
    assert "--seed" not in out


def test_flags_are_completed_by_the_rows_of_their_tables():
    offered = {name: {*completion.words_by_flag()[name]} for name in main.TABLES}
    assert offered == {name: {row for row in table if "<" not in row} for name, table in main.TABLES.items()}


def test_an_unknown_command_lists_what_exists(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxmpi", "trian"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert re.search(r"unknown command 'trian'; did you mean 'train'\? .*: .*models, .*train", errors)


def test_ranks_leave_a_usage_error_to_the_first(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["jaxmpi", "evaluate", "nowhere"])
    for rank in range(2):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        with pytest.raises(SystemExit):
            cli.main()
        assert (len(slept), "nowhere" in capsys.readouterr().err) == (rank, True)


MISTAKES = {
    "train -n 8 digits --efective-batch 3": "unknown field --efective-batch; did you mean 'effective-batch'?",
    "train -n 8 digits --optim.lr fast": "--optim.lr: got 'fast'; expected float",
    "train --local-batch 8": "name an experiment first",
    "sweep digits -n 2 --vary optim.lr=1": "jaxmpi sweep -n ... EXPERIMENT.py",
    "train -n 8 digits --train-for": "--train-for: got nothing; expected str",
    "bench --speed": "got --speed",
    "sweep digits --vary optim.lr=1 --seeds 1.5": "--seeds: got '1.5'; expected a whole number",
    "plan --bytes 4e6 --alpha-s 1e-4": "give --alpha-s and --beta-s-per-byte together",
    "forecast digits -n 4 --slots 5": "--slots: got 5; expected 1 to 4 ranks a host",
    "doctor --speed": "got --speed",
    "evaluate run": "config.json: no such file; name a run directory",
    "export run model.jaxexport --platforms abacus": "platforms: got abacus; expected cpu",
    "report": "the following arguments are required: RUN",
    "run": "the following arguments are required: SCRIPT.py",
    "completion fish": "got fish",
}


def test_what_no_command_can_take_is_refused_without_jax():
    """An answer may take 0.5 s, which importing JAX takes alone."""
    code = (
        "import contextlib, io, json, sys\n"
        "from jaxmpi.tools import cli\n"
        "sys.modules['jax'] = None\n"
        "def said(line):\n"
        "    sys.argv = ['jaxmpi', *line.split()]\n"
        "    with contextlib.redirect_stdout(text := io.StringIO()), contextlib.redirect_stderr(text):\n"
        "        try: cli.main()\n"
        "        except SystemExit as end: return end.code, text.getvalue()\n"
        "print(json.dumps({line: said(line) for line in json.loads(sys.argv[1])}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, json.dumps([*MISTAKES])], capture_output=True, text=True)
    exits = json.loads(ended.stdout)
    is_good = {line: MISTAKES[line] in said.partition("jaxmpi: error: ")[2] for line, (_, said) in exits.items()}
    assert {line: exits[line] for line in exits if exits[line][0] != 2 or not is_good[line]} == {}, ended.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("after_s", [0.0, 0.6])
@pytest.mark.parametrize(
    ("command", "imports"),
    [(["jaxmpi.tools.cli", "train", "-n", "2"], "jaxmpi.launch.supervisor"), (["jaxmpi.train"], "jax._src.config")],
)
def test_ctrl_c_in_the_first_second_is_one_line(command, imports, after_s, tmp_path):
    """While Python imports; a job that runs by then may say how it is saved."""
    line = [sys.executable, "-X", "importtime", "-m", *command, "experiments/digits.py"]
    line += ["--run-dir", str(tmp_path / "run")]
    job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert job.stderr
    while imports not in (imported := job.stderr.readline()):
        assert imported
    time.sleep(after_s)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
