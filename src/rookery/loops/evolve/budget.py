"""What a run may spend: tokens, money, hours. It ends before it would spend more."""

import math

from rookery.loops.evolve.config import BudgetConfig
from rookery.loops.evolve.search_state import Spending

__all__ = ["find_exhausted", "price"]

ROUNDING = 1e-9
"""Sums of prices are off by less."""
_MILLION = 1e6


def price(spending: Spending, budget: BudgetConfig) -> float | None:
    """US dollars by the prices of the config; None without prices or without counts of tokens."""
    prompt, answer = budget.usd_per_million_prompt_tokens, budget.usd_per_million_answer_tokens
    if prompt is None or answer is None or spending.num_unreported:
        return None
    return (spending.prompt_tokens * prompt + spending.completion_tokens * answer) / _MILLION


def find_exhausted(
    budget: BudgetConfig, spending: Spending, *, num_told: int, num_open: int, elapsed_s: float
) -> str:
    """Why no further attempt may begin; empty while one may.

    Attempts in flight count as much as those before them did on average.
    """
    if budget.max_hours is not None and elapsed_s >= budget.max_hours * 3600:
        return f"The budget of {budget.max_hours:g} hours is over."
    if budget.max_tokens is None and budget.max_usd is None:
        return ""
    if spending.num_unreported:
        return "A model does not report its tokens, so that the budget cannot be kept."
    # Not as a quotient: attempts of equal cost may spend the budget to its last token.
    num_begun = num_told + num_open + 1 if num_told else 1
    num_paid = num_told or 1
    max_tokens, max_usd, usd = budget.max_tokens, budget.max_usd, price(spending, budget)
    if max_tokens is not None and spending.tokens * num_begun > max_tokens * num_paid:
        return f"The budget of {max_tokens} tokens allows no further iteration."
    limit = math.inf if max_usd is None else max_usd * num_paid * (1 + ROUNDING)
    if usd is not None and usd * num_begun > limit:
        return f"The budget of {max_usd:g} US dollars allows no further iteration."
    return ""
