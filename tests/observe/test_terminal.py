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

import pytest

from jaxmpi.observe.terminal import Panel, Plain, ProgressLine, Terminal, open_terminal, sparkline
from jaxmpi.runtime import job_folder
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


def test_without_a_terminal_lines_come_every_few_seconds_and_at_the_end():
    out = io.StringIO()
    assert isinstance(open_terminal(False, out), Plain)
    assert type(open_terminal(True, out)) is Terminal
    plain = Plain(out, line_s=3600)
    for step in (1, 2, 119, 120):
        plain.progress(dataclasses.replace(NOW, step=step))
    assert re.findall(r"^step (\d+)", out.getvalue(), re.M) == ["1", "120"]


@pytest.mark.parametrize(("mfu", "text"), [(0.172, "17"), (0.0031, "0.3")])
def test_a_small_share_of_the_peak_is_not_rounded_to_zero(mfu, text):
    assert f"(mfu <{text} %)" in dataclasses.replace(NOW, flops_per_s=1e9, mfu=mfu, peak_mark="<").line


@pytest.mark.parametrize("columns", [20, 80])
def test_a_panel_fits_its_terminal(columns):
    out = io.StringIO()
    panel = Panel(out, columns)
    panel.losses.extend(2.0 / step for step in range(1, 60))
    panel.evaluated("top-1", "50.00 %", 0.5)
    panel.evaluated("top-1", "75.00 %", 0.75)
    panel._first = dataclasses.replace(NOW, step=10, elapsed_s=20.0)
    panel.console.print(panel.draw(NOW))
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()
    assert all(len(line) <= columns for line in lines), lines
    assert lines[0].startswith("step 30/120"[:columns])
    text = "\n".join(lines)
    wide = ("0:03:00 left", "compute 60 %") if columns > 20 else ()  # 90 steps of 2 s
    assert all(part in text for part in ("top-1 75.00", "loss  0.4321", "█", *wide))
    assert sparkline([1.0, float("nan"), 3.0], 10) == "▁?█"
    assert len(sparkline([*range(1000)], 10)) == 10


def test_a_panel_draws_in_place_and_leaves_lines_above():
    out = io.StringIO()
    panel = Panel(out, 60)
    panel.say("run directory [x]")
    panel.progress(NOW)
    # A job that is killed says no good-bye: the cursor must not be hidden then.
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
    panel.progress(dataclasses.replace(NOW, step=31))
    panel.close()
    assert "run directory [x]" in out.getvalue()  # no markup
    assert "step 31/120" in out.getvalue()


def set_columns(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_all(end: int) -> bytes:
    """What comes until the other end is closed."""
    output = b""
    try:
        while chunk := os.read(end, 4096):
            output += chunk
    except OSError:
        pass
    return output


ASK = "import sys; from jaxmpi.observe.terminal import terminal_columns; print('columns', terminal_columns(sys.stdout))"
SUPERVISED = """
import sys
from jaxmpi.launch.experiment_facts import ExperimentFacts
from jaxmpi.launch.options import Options
from jaxmpi.launch.supervisor import supervise
sys.exit(supervise(Options(1, "mpirun", (), ()), ExperimentFacts(), lambda job: sys.argv[1:], lambda host: True))
"""
LAUNCHERS = {"mpirun": mpirun_line(1), "train": [sys.executable, "-c", SUPERVISED, *mpirun_line(1)]}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_terminal_behind_the_launcher_is_found(launcher, no_launcher):
    mine, theirs = pty.openpty()
    set_columns(theirs, 47)
    line = job_folder.remove_leftovers_first([*launcher, sys.executable, "-c", ASK])
    env = {**os.environ, "TERM": "xterm"}
    job = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env)
    os.close(theirs)
    assert b"columns 47" in read_all(mine)
    job.wait(timeout=60)
    os.close(mine)


def test_a_pipe_behind_the_launcher_is_one(no_launcher):
    """Open MPI gives each rank a terminal of its own, whatever its own output is."""
    line = [*mpirun_line(1), sys.executable, "-c", ASK]
    env = {**os.environ, "TERM": "xterm"}
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert ended.stdout.split() == ["columns", "0"], ended
