"""Budgets: spent to the end, and not beyond."""

from dataclasses import replace
from typing import Any

import pytest

from rookery.loops.evolve.config import EvolveBudgetConfig
from rookery.loops.evolve.order import (
    BacklogLimit,
    SearchProgress,
    find_exhausted,
    share_spent,
    stop_reason,
)
from rookery.loops.evolve.search_state import Spending
from rookery.loops.evolve.stages import Evaluated, Generated

TOKENS = 70
"""Of the prompt and of the answer of one attempt, each."""


def exhausted(num_told: int, num_open: int, **budget: float) -> str:
    spending = Spending()
    for _ in range(num_told):
        spending.add_attempt(Generated(prompt_tokens=TOKENS, completion_tokens=TOKENS))
    config = EvolveBudgetConfig.model_validate(budget)
    return find_exhausted(config, spending, num_told=num_told, num_open=num_open)


@pytest.mark.parametrize("num_attempts", [20, 200])
def test_equal_attempts_spend_all_tokens_whatever_is_in_flight(num_attempts: int) -> None:
    budget = 2 * TOKENS * num_attempts
    for num_told in range(1, num_attempts):
        num_open = num_attempts - 1 - num_told
        assert not exhausted(num_told, num_open, max_tokens=budget)
        assert exhausted(num_told, num_open + 1, max_tokens=budget)
        assert exhausted(num_told, num_open, max_tokens=budget - 1)


def test_equal_attempts_spend_all_money_whatever_is_in_flight() -> None:
    num_attempts = 49
    prices = {"usd_per_million_prompt_tokens": 0.3, "usd_per_million_answer_tokens": 0.7}
    budget = TOKENS * num_attempts / 1e6
    for num_told in range(1, num_attempts):
        num_open = num_attempts - 1 - num_told
        assert not exhausted(num_told, num_open, max_usd=budget, **prices)
        assert exhausted(num_told, num_open + 1, max_usd=budget, **prices)


def test_what_first_programs_cost_counts_before_any_attempt() -> None:
    spending = Spending(prompt_tokens=11)
    for limit, is_over in ((10, True), (11, False)):
        config = EvolveBudgetConfig(max_tokens=limit)
        found = find_exhausted(config, spending, num_told=0, num_open=0)
        assert bool(found) == is_over


def test_the_first_attempt_begins_alone_as_its_cost_is_not_known() -> None:
    assert not exhausted(0, 0, max_tokens=1000)
    assert exhausted(0, 1, max_tokens=1000)


def test_attempts_in_flight_count_as_much_as_the_dearest_before() -> None:
    spending, config = Spending(), EvolveBudgetConfig(max_tokens=1000)
    judged = Evaluated(prompt_tokens=50, completion_tokens=50)
    spending.add_attempt(Generated(prompt_tokens=100, completion_tokens=100), judged)
    spending.add_attempt(Generated(prompt_tokens=10, completion_tokens=10))
    assert spending.tokens == 320
    assert not find_exhausted(config, spending, num_told=2, num_open=1)
    assert find_exhausted(config, spending, num_told=2, num_open=2)


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        ({}, None),
        ({"max_tokens": 400}, 0.5),
        ({"max_answer_tokens": 200}, 0.75),
        ({"max_hours": 0.01}, 0.25),
        ({"max_hours": 0.01, "max_tokens": 400, "max_answer_tokens": 200}, 0.75),
        ({"max_tokens": 2000, "max_rollouts": 10}, 0.3),
    ],
)
def test_the_share_is_that_of_the_tightest_limit(
    budget: dict[str, float], share: float | None
) -> None:
    spending = Spending(prompt_tokens=50, completion_tokens=150, num_rollouts=3)
    config = EvolveBudgetConfig.model_validate(budget)
    assert share_spent(config, spending, elapsed_s=9.0) == share


# How many children may wait for an evaluation, and why a search stops.


def test_as_many_may_wait_as_are_evaluated_during_a_call() -> None:
    backlog = BacklogLimit(num_workers=8)
    backlog.model.add(5.0)
    backlog.evaluation.add(0.1)
    assert backlog.max_waiting == 8 * 50


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


PROGRESS = SearchProgress(
    num_attempts=10,
    num_decided=4,
    num_open=0,
    num_recorded=0,
    elapsed_s=3600.0,
    goal_reason="",
    budget=EvolveBudgetConfig(),
    spending=Spending(prompt_tokens=900, dearest_prompt_tokens=300),
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"goal_reason": "The target."}, "The target."),
        ({"goal_reason": "The target.", "num_open": 6}, ""),
        ({"budget": EvolveBudgetConfig(max_hours=1.0)}, "The budget of 1 hours is over."),
        ({"budget": EvolveBudgetConfig(max_hours=1.0), "num_recorded": 1}, ""),
        (
            {"budget": EvolveBudgetConfig(max_hours=1.0), "num_open": 2},
            "The budget of 1 hours is over.",
        ),
        ({"budget": EvolveBudgetConfig(max_hours=1.1)}, ""),
        (
            {"budget": EvolveBudgetConfig(max_tokens=1000)},
            "The budget of 1000 tokens allows no further iteration.",
        ),
        ({"budget": EvolveBudgetConfig(max_tokens=1000), "num_open": 1}, ""),
        ({"budget": EvolveBudgetConfig(max_tokens=1200)}, ""),
    ],
)
def test_why_a_search_stops(changes: dict[str, Any], reason: str) -> None:
    assert stop_reason(replace(PROGRESS, **changes)) == reason
