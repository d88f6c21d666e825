"""The papers' tables by one command: what is run, read and written."""

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxmpi.config import experiment_file
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
papers = importlib.import_module("papers")
reproduce = importlib.import_module("reproduce")


class Parsed(Exception):
    """A script has taken its command line, and is not to run."""


def parse_alone(monkeypatch, words: list[str]) -> None:
    """Run a line until its parser is content."""
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Parsed

    is_module = words[0] == "-m"
    module = importlib.import_module(f"{words[1]}.__main__" if is_module else Path(words[0]).stem)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", words[is_module:])
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.parametrize("name", reproduce.TABLES)
@pytest.mark.parametrize("more", [(), ("--quick",), ("--hosts", "4")], ids=["whole", "quick", "hosts"])
def test_every_command_is_accepted_by_its_script(name, more, tmp_path, capsys, monkeypatch):
    if "--hosts" in more and not reproduce.TABLES[name].on_hosts:
        pytest.skip("on one machine alone")
    reproduce.main([name, "--show", "--out", str(tmp_path), *more])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    assert shown
    assert not any(sys.executable in line for line in shown)  # a page names no machine's paths
    assert ("--hosts" in more) == any("--rate 200mbit" in line for line in shown)
    for line in shown:
        words = shlex.split(line.rpartition("python ")[2])
        if words[:3] == ["-m", "jaxmpi.tools.cli", "train"]:
            chosen, _ = experiment_file.parse(words[5:])
            assert chosen.exchange.strategy.startswith("asa")
        else:
            parse_alone(monkeypatch, words)


def table_that_runs(code: str) -> Any:
    """A job that runs a small program and reads the number that it prints."""
    return papers.PaperTable(
        "A paper, Table 9",
        lambda o: [[sys.executable, "-c", code]],
        lambda printed, files: {"answer": float(printed[0])},
        lambda o: {"answer": 21.0},
        "Theirs was half.",
    )


def test_all_continues_after_a_table_that_cannot_run(tmp_path, monkeypatch, capsys):
    """Its page says why, the others are written, and the exit code is 1."""
    here = table_that_runs("print(42)")
    jobs = {
        "first": here,
        "fails": table_that_runs("import sys; sys.exit(3)"),
        "absent": here._replace(commands=lambda o: [[sys.executable, "scripts/of_another_part.py"]]),
        "alone": here._replace(on_hosts=False),
        "says nothing": table_that_runs("print('nothing')"),
        "last": here,
    }
    monkeypatch.setattr(reproduce, "TABLES", jobs)
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["all", "--out", str(tmp_path), "--hosts", "2"])
    assert ended.value.code == 1
    pages = (tmp_path / "all.md").read_text()
    assert [line.partition(":")[0] for line in pages.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in jobs
    ]
    assert pages.count("| answer | 21 | 42 | 2 |") == 2
    assert "Did not run here: ended with code 3: python -c 'import sys; sys.exit(3)'" in pages
    assert "Did not run here: scripts/of_another_part.py: " in pages
    assert "Did not run here: --hosts: alone runs on this machine alone; leave it out" in pages
    assert "printed what cannot be read: ValueError" in pages
    assert sorted(path.parent.name for path in tmp_path.rglob("*.png")) == ["first", "last"]
    assert f"2 of 6 ran; {tmp_path / 'all.md'}" in capsys.readouterr().out
