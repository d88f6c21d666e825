"""When events of a run are due: in lock step, and if progress jumps."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.trainer.loop import compilations
from jaxmpi.trainer.timetable import Clock, DueEvents, Timetable, timed_events
from launching import PATH, ROOT, train, train_here
from runs import record

TOTAL = 40
PERIODS = st.integers(1, TOTAL)
TIMETABLES = st.builds(Timetable, PERIODS, PERIODS, PERIODS, PERIODS, total_steps=st.just(TOTAL))


@given(TIMETABLES)
def test_in_lock_step_each_event_is_due_at_the_multiples_of_its_period_and_at_the_end(table):
    for step in range(1, TOTAL + 1):
        due, is_last = table.between(step - 1, step), step == TOTAL
        assert due.log == (step % table.log_every == 0 or is_last)
        assert due.evaluate == (step % table.eval_every == 0 or is_last)
        assert due.save == (step % table.save_every == 0 or is_last)
        assert due.compare == (step % table.compare_every == 0 or due.save)  # a checkpoint is of equal params


@given(TIMETABLES, st.sets(st.integers(1, TOTAL - 1)))
def test_progress_that_jumps_misses_no_event(table, marks):
    ends = [*sorted(marks), TOTAL]
    for done, now in zip([0, *ends], ends, strict=False):
        each = [table.between(step - 1, step) for step in range(done + 1, now + 1)]
        assert table.between(done, now) == DueEvents(*map(any, zip(*each, strict=True)))


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_that_is_asked_to_leave_compares_and_saves_first(step):
    due = Timetable(10, 10, 10, 10, TOTAL).between(step - 1, step, is_first=step == 1, leaving=True)
    assert due == DueEvents(compare=True, log=step == 1, evaluate=False, save=True, leave=True)


def test_where_no_step_was_made_nothing_is_due_again():
    assert Timetable(1, 1, 1, 1, TOTAL).between(TOTAL, TOTAL) == DueEvents()


# ---------------------------------------------------------------- by the clock


def test_what_is_due_by_the_clock_is_due_once_a_period_on_rank_0_alone():
    times = iter([2.5, 2.6, 3.1, 9.0, 9.5])  # the first is of a run that has been resumed
    clock = Clock({"evaluate": 3.0, "stop": 9.0}, times.__next__, is_first=True)
    assert [timed_events(clock.due()) for _ in range(4)] == [[], ["evaluate"], ["evaluate", "stop"], []]
    assert Clock({"stop": 1e-9}, iter([0.0, 1.0]).__next__, is_first=False).due() == 0


def test_the_last_step_by_the_clock_is_evaluated_and_saved():
    timetable = Timetable(TOTAL, TOTAL, TOTAL, TOTAL, TOTAL)
    assert timetable.between(3, 4, timed=["evaluate"]) == DueEvents(evaluate=True)
    assert timetable.between(3, 4, timed=["stop"]) == DueEvents(compare=True, log=True, evaluate=True, save=True)


LINES = "from pathlib import Path\nfrom line_task import lines\nexperiment = lines(Path({!r}), quiet=False)\n"


@pytest.mark.e2e
def test_a_run_by_the_clock_ends_saved_and_goes_on_if_it_gets_more_time(tmp_path):
    """Two ranks come to the same steps, or their exchanges would not fit; one worker goes on."""
    (tmp_path / "lines.py").write_text(LINES.format(str(tmp_path)))
    run, hours = tmp_path / "run", ("--eval-every", "0.5s", "--checkpoint-every", "0.25s", "--log-every", "0.0001h")
    slowly = ("--inject", "slow:rank=all,seconds=0.02,times=0")  # which leaves the cores to others
    fields = (str(tmp_path / "lines.py"), *hours, *slowly, "--run-dir", str(run))
    ended = train(2, *fields, "--train-for", "3s", env={"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}"})
    assert ended.code == 0, ended.out
    [stopped], [*evaluations, last], saved = (record(run, kind) for kind in ("stopped", "eval", "checkpoint"))
    assert evaluations
    assert stopped["step"] == last["step"] == saved[-1]["step"] > len(saved) > 3
    assert 3 <= last["elapsed_s"] < 27
    assert "nothing left to do" in train_here(*fields, "--train-for", "3s", "--resume").out
    ended = train_here(*fields, "--train-for", "40s", "--train-for", "0.0012h", "--resume")
    assert ended.code == 0, ended.out
    assert record(run, "eval")[-1]["elapsed_s"] >= 4.32


def test_a_run_of_unknown_steps_is_refused_where_they_are_needed(tmp_path):
    fields = ("experiments/digits.py", "--train-for", "30min", "--run-dir", str(tmp_path / "run"))
    assert train_here(*fields, "--schedule.span", "50%", "--schedule.decay", "poly").code == 2


def test_compilations_are_told_from_calls_of_what_is_compiled():
    program, counts = jax.jit(lambda x: 3 * x + 1), []
    for _ in range(3):
        counts.append(len(compilations()))
        program(jnp.float32(1))
    assert counts[0] < counts[1] == counts[2]


@pytest.mark.parametrize(("save_every", "done", "saves"), [(20, 0, 1), (5, 0, 4), (6, 0, 4), (6, 12, 2), (6, 19, 1)])
def test_checkpoints_that_are_still_written(save_every, done, saves):
    timetable = Timetable(1, 1, 1, save_every, 20)
    written = [step for step in range(done, 20) if timetable.between(step, step + 1).save]
    assert timetable.most_saves(done) == len(written) == saves
    assert timetable._replace(periods_s={"save": 60.0}).most_saves(done) > 20
