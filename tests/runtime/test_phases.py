"""A job that shows no step yet says what it is at."""

import io
import re
import time
from collections.abc import Iterator

import pytest

from jaxmpi.observe.terminal import Panel, Plain
from jaxmpi.runtime import progress
from launching import ROOT, train, wait_until


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


def test_a_line_is_one_write_so_that_two_threads_do_not_share_it():
    class Writes(io.StringIO):
        seen: tuple[str, ...] = ()

        def write(self, text: str) -> int:
            self.seen = (*self.seen, text) if text else self.seen
            return len(text)

    by_hand, by_thread = Writes(), Writes()
    Plain(by_hand).say("a line")
    progress.stop_progress()
    progress.start_progress(by_thread, silence_s=0.02)
    with progress.phase("evaluating"):
        wait_until(lambda: bool(by_thread.seen))
    progress.stop_progress()
    assert by_hand.seen == ("a line\n",)
    assert by_thread.seen[0] == "evaluating: 0 s so far\n"


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
    text = (ROOT / "experiments" / "digits.py").read_text()
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(5)\n{text}")
    ended = train(2, str(tmp_path / "slow.py"), "--train-for", "1st", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 0, ended.out
    said = re.findall(r"^running the experiment file: (\d) s so far$", ended.out, re.MULTILINE)
    assert said
    assert len(said) == len(set(said))  # seconds of one rank
