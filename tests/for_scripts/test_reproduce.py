"""The papers' tables by one command: every line that it runs is accepted by its script."""

import argparse
import importlib
import shlex
import sys
from pathlib import Path

import pytest

from jaxmpi.config import experiment_file
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
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
