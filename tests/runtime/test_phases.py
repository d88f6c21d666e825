"""A job that shows no step yet says what it is at."""

import io
import re
import time
from collections.abc import Iterator

import pytest

from jaxmpi.observe.terminal import Panel, Plain
from jaxmpi.runtime import progress
from launching import train, wait_until


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """Where phases are said after 0.02 s of silence."""
    out = io.StringIO()
    progress.stop_progress()
    progress.start_progress(out, silence_s=0.02)
    yield out
    progress.stop_progress()


def test_a_silent_phase_is_said_with_its_time_and_part_until_it_ends(said):
    with progress.phase("making the first step"):
        with progress.phase("compiling gradients"):
            wait_until(lambda: "making the first step (compiling gradients): 0 s so far\n" in said.getvalue())
        wait_until(lambda: "making the first step: 0 s so far\n" in said.getvalue())
    assert progress.current() is None
    time.sleep(0.05)  # a line may have been under way
    ended = said.getvalue()
    time.sleep(0.1)
    assert said.getvalue() == ended


def test_lines_of_others_put_it_off(said):
    progress.stop_progress()
    progress.start_progress(said, silence_s=0.5)
    plain, begin = Plain(io.StringIO()), time.monotonic()
    with progress.phase("evaluating"):
        while time.monotonic() - begin < 1.0:
            plain.say("a line")
            time.sleep(0.01)
        assert said.getvalue() == ""


def test_a_panel_shows_the_phase_in_place_of_lines(said):
    out = io.StringIO()
    panel = Panel(out, 60)
    panel.start()
    with progress.phase("compiling gradients"):
        panel.live.refresh()
        assert "compiling gradients: 0 s so far\n" in out.getvalue()  # mpirun passes on whole lines only
        time.sleep(0.1)
    before = out.getvalue()
    panel.live.refresh()
    panel.close()
    assert "so far" not in out.getvalue().removeprefix(before)
    assert said.getvalue() == ""


@pytest.mark.e2e
def test_a_slow_start_is_said_while_the_experiment_file_runs(tmp_path):
    """Only the first of two ranks prints it, before there is a recorder."""
    (tmp_path / "slow.py").write_text("import sys, time\ntime.sleep(5)\nsys.exit(3)\n")
    ended = train(2, str(tmp_path / "slow.py"), "--run-dir", str(tmp_path / "run"))
    said = re.findall(r"^running the experiment file: (\d) s so far$", ended.out, re.MULTILINE)
    assert said, ended.out
    assert len(said) == len(set(said))  # seconds of one rank
