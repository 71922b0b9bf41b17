"""How many children may wait for an evaluation, and why a search stops."""

from dataclasses import replace
from typing import Any

import pytest

from rookery.loops.evolve.config import BudgetConfig
from rookery.loops.evolve.order import BacklogLimit, Progress, stop_reason
from rookery.loops.evolve.search_state import Spending


def test_a_few_may_wait_before_anything_was_timed() -> None:
    backlog = BacklogLimit(num_workers=3)
    assert backlog.max_waiting == 6
    backlog.model.add(5.0)
    assert backlog.max_waiting == 6


def test_as_many_may_wait_as_are_evaluated_during_a_call() -> None:
    backlog = BacklogLimit(num_workers=8)
    backlog.model.add(5.0)
    backlog.evaluation.add(0.1)
    assert backlog.max_waiting == 8 * 50


def test_slow_evaluations_leave_few_waiting() -> None:
    backlog = BacklogLimit(num_workers=8)
    backlog.model.add(5.0)
    backlog.evaluation.add(60.0)
    assert backlog.max_waiting == 16


def test_old_times_fade() -> None:
    backlog = BacklogLimit(num_workers=1)
    backlog.evaluation.add(1.0)
    for _ in range(100):
        backlog.evaluation.add(3.0)
    assert backlog.evaluation.value == pytest.approx(3.0, abs=1e-3)


def test_a_call_that_failed_is_not_timed() -> None:
    backlog = BacklogLimit(num_workers=1)
    with pytest.raises(OSError), backlog.model.timed():
        raise OSError
    assert backlog.model.value is None


PROGRESS = Progress(
    num_attempts=10,
    num_decided=4,
    num_open=0,
    num_recorded=0,
    elapsed_s=3600.0,
    found="",
    budget=BudgetConfig(),
    spending=Spending(prompt_tokens=900, dearest_prompt_tokens=300),
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"found": "The target."}, "The target."),
        ({"found": "The target.", "num_open": 6}, ""),
        ({"budget": BudgetConfig(max_hours=1.0)}, "The budget of 1 hours is over."),
        ({"budget": BudgetConfig(max_hours=1.0), "num_recorded": 1}, ""),
        ({"budget": BudgetConfig(max_hours=1.0), "num_open": 2}, "The budget of 1 hours is over."),
        ({"budget": BudgetConfig(max_hours=1.1)}, ""),
        (
            {"budget": BudgetConfig(max_tokens=1000)},
            "The budget of 1000 tokens allows no further iteration.",
        ),
        ({"budget": BudgetConfig(max_tokens=1000), "num_open": 1}, ""),
        ({"budget": BudgetConfig(max_tokens=1200)}, ""),
    ],
)
def test_why_a_search_stops(changes: dict[str, Any], reason: str) -> None:
    assert stop_reason(replace(PROGRESS, **changes)) == reason
