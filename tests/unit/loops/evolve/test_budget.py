"""Budgets: spent to the end, and not beyond."""

import pytest

from rookery.loops.evolve.budget import find_exhausted
from rookery.loops.evolve.config import BudgetConfig
from rookery.loops.evolve.search_state import Spending

TOKENS = 70
"""Of the prompt and of the answer of one attempt, each."""


def exhausted(num_told: int, num_open: int, **budget: float) -> str:
    spending = Spending(prompt_tokens=TOKENS * num_told, completion_tokens=TOKENS * num_told)
    config = BudgetConfig.model_validate(budget)
    return find_exhausted(config, spending, num_told=num_told, num_open=num_open, elapsed_s=0.0)


@pytest.mark.parametrize("num_attempts", [20, 49, 200])
def test_equal_attempts_spend_all_tokens_whatever_is_in_flight(num_attempts: int) -> None:
    budget = 2 * TOKENS * num_attempts
    for num_told in range(1, num_attempts):
        num_open = num_attempts - 1 - num_told
        assert not exhausted(num_told, num_open, max_tokens=budget)
        assert exhausted(num_told, num_open + 1, max_tokens=budget)
        assert exhausted(num_told, num_open, max_tokens=budget - 1)


@pytest.mark.parametrize("num_attempts", [20, 49, 200])
def test_equal_attempts_spend_all_money_whatever_is_in_flight(num_attempts: int) -> None:
    prices = {"usd_per_million_prompt_tokens": 0.3, "usd_per_million_answer_tokens": 0.7}
    budget = TOKENS * num_attempts / 1e6
    for num_told in range(1, num_attempts):
        num_open = num_attempts - 1 - num_told
        assert not exhausted(num_told, num_open, max_usd=budget, **prices)
        assert exhausted(num_told, num_open + 1, max_usd=budget, **prices)


def test_what_first_programs_cost_counts_before_any_attempt() -> None:
    spending = Spending(prompt_tokens=11)
    for limit, is_over in ((10, True), (11, False)):
        config = BudgetConfig(max_tokens=limit)
        found = find_exhausted(config, spending, num_told=0, num_open=3, elapsed_s=0.0)
        assert bool(found) == is_over
