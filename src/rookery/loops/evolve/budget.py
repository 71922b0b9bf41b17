"""What a run may spend: tokens, money, hours. It ends before it would spend more."""

from rookery.loops.evolve.config import BudgetConfig
from rookery.loops.evolve.search_state import Spending

__all__ = ["find_exhausted", "price"]

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
    share = 1 + (num_open + 1) / num_told if num_told else 1.0
    if budget.max_tokens is not None and spending.tokens * share > budget.max_tokens:
        return f"The budget of {budget.max_tokens} tokens allows no further iteration."
    usd = price(spending, budget)
    if budget.max_usd is not None and usd is not None and usd * share > budget.max_usd:
        return f"The budget of {budget.max_usd:g} US dollars allows no further iteration."
    return ""
