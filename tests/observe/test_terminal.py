"""Lines through a pipe, a panel on a terminal however narrow, nothing if nothing is asked for."""

import dataclasses
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from jaxmpi.observe.terminal import (
    Panel,
    Plain,
    ProgressLine,
    Terminal,
    open_terminal,
    remaining_time,
    sparkline,
)
from jaxmpi.runtime import job_folder
from jaxmpi.runtime.progress import terminal_columns
from launching import ROOT, mpirun_line

SHARES = {"data": 0.1, "transfer": 0.0, "compute": 0.6, "exchange": 0.2, "sync": 0.07, "other": 0.03}
NOW = ProgressLine(
    step=30,
    total_steps=120,
    epoch=1.25,
    loss=0.4321,
    per_s=1234.5,
    lr=0.02,
    elapsed_s=60.0,
    shares=SHARES,
    slowest="rank 3 on a-host-with-a-rather-long-name",
)


def test_lines_come_every_few_seconds_and_at_the_end():
    out = io.StringIO()
    plain = Plain(out, line_s=3600)
    for step in (1, 2, 119, 120):
        plain.progress(dataclasses.replace(NOW, step=step))
    assert re.findall(r"^step (\d+)", out.getvalue(), re.M) == ["1", "120"]


@pytest.mark.parametrize("columns", [20, 80])
def test_a_panel_fits_its_terminal(columns):
    out = io.StringIO()
    panel = Panel(out, columns)
    for step in range(1, 60):
        panel.losses.append(2.0 / step)
    panel.evaluated("top-1", "50.00 %", 0.5)
    panel.evaluated("top-1", "75.00 %", 0.75)
    panel._first = dataclasses.replace(NOW, step=10, elapsed_s=20.0)
    panel.console.print(panel.draw(NOW))
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()
    assert all(len(line) <= columns for line in lines), lines
    assert lines[0].startswith("step 30/120"[:columns])
    text = "\n".join(lines)
    assert "top-1 75.00" in text
    assert "loss  0.4321" in text
    assert "█" in text
    if columns >= 40:
        assert "0:03:00 left" in text  # 90 steps of 2 s
        assert "compute 60 %" in text


def test_a_panel_draws_in_place_and_leaves_lines_above():
    out = io.StringIO()
    panel = Panel(out, 60)
    panel.say("run directory [x]")
    panel.progress(NOW)
    # A job that is killed says no good-bye: the cursor must not be hidden then.
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
    panel.say("step 30  evaluation")
    panel.progress(dataclasses.replace(NOW, step=31))
    panel.close()
    assert "run directory [x]" in out.getvalue()  # no markup
    assert "\x1b[" in out.getvalue()
    assert "step 31/120" in out.getvalue()


def test_a_panel_follows_the_width_of_its_window(no_launcher, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    mine, theirs = pty.openpty()
    drain = threading.Thread(target=lambda: [*iter(lambda: read_all(mine), b"")])
    drain.start()
    with os.fdopen(theirs, "w") as out:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        panel = open_terminal(False, out)
        assert isinstance(panel, Panel)
        panel.progress(NOW)
        assert panel.console.width == 80
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        panel.progress(NOW)
        assert panel.console.width == 40
        panel.close()
    drain.join(timeout=10)
    os.close(mine)


def read_all(end: int) -> bytes:
    """Return what has come; nothing once the other end is closed."""
    try:
        return os.read(end, 4096)
    except OSError:
        return b""


def test_curves():
    assert sparkline([], 10) == ""
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([1.0, float("nan"), 3.0], 10) == "▁?█"
    assert len(sparkline(list(range(1000)), 10)) == 10
    assert remaining_time(NOW, NOW) == ""


def test_where_there_is_no_terminal_lines_come():
    assert isinstance(open_terminal(False, io.StringIO()), Plain)
    assert type(open_terminal(True, io.StringIO())) is Terminal
    assert terminal_columns(io.StringIO()) == 0


ASK = "import sys; from jaxmpi.runtime.progress import terminal_columns; print('columns', terminal_columns(sys.stdout))"


def seen_columns(line: list[str], columns: int) -> int:
    """Return the columns seen by a command that runs on a terminal of so many columns."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    job = subprocess.Popen(
        job_folder.remove_leftovers_first(line), stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env
    )
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(mine, 4096):
            said += chunk
    except OSError:  # the other end is closed
        pass
    job.wait(timeout=60)
    os.close(mine)
    found = re.search(rb"columns (\d+)", said)
    assert found, said
    return int(found[1])


KEPT_GOING = """
import sys
from jaxmpi.launch.supervisor import SupervisedJob, supervise
sys.exit(supervise(SupervisedJob(1, 1, 0, (), ()), lambda *_: sys.argv[1:], lambda host: True))
"""
ABOVE = {"mpirun": mpirun_line(1), "train": [sys.executable, "-c", KEPT_GOING, *mpirun_line(1)]}


@pytest.mark.parametrize("launcher", ABOVE.values(), ids=ABOVE)
def test_a_terminal_behind_the_launcher_is_found(launcher, no_launcher):
    assert seen_columns([*launcher, sys.executable, "-c", ASK], 47) == 47


def test_a_pipe_behind_the_launcher_is_one(no_launcher):
    """Open MPI gives each rank a terminal of its own, whatever its own output is."""
    line = [*mpirun_line(1), sys.executable, "-c", ASK]
    env = {**os.environ, "TERM": "xterm"}
    said = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert said.stdout.split() == ["columns", "0"], said
