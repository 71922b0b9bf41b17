"""How many children may wait for an evaluation."""

import pytest

from rookery.loops.evolve.order import Pace


def test_a_few_may_wait_before_anything_was_timed() -> None:
    pace = Pace(num_workers=3)
    assert pace.backlog == 6
    pace.model.add(5.0)
    assert pace.backlog == 6


def test_as_many_may_wait_as_are_evaluated_during_a_call() -> None:
    pace = Pace(num_workers=8)
    pace.model.add(5.0)
    pace.evaluation.add(0.1)
    assert pace.backlog == 8 * 50


def test_slow_evaluations_leave_few_waiting() -> None:
    pace = Pace(num_workers=8)
    pace.model.add(5.0)
    pace.evaluation.add(60.0)
    assert pace.backlog == 16


def test_old_times_fade() -> None:
    pace = Pace(num_workers=1)
    pace.evaluation.add(1.0)
    for _ in range(100):
        pace.evaluation.add(3.0)
    assert pace.evaluation.value == pytest.approx(3.0, abs=1e-3)


def test_a_call_that_failed_is_not_timed() -> None:
    pace = Pace(num_workers=1)
    with pytest.raises(OSError), pace.model.timed():
        raise OSError
    assert pace.model.value is None
