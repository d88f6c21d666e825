"""When events of a run are due: in lock step, and if progress jumps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.trainer.timetable import DueEvents, Timetable

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
