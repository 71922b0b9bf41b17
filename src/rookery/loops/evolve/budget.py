"""What a run may spend: tokens, money, hours. It ends before it would spend more."""

from rookery.loops.evolve.config import BudgetConfig
from rookery.loops.evolve.search_state import Spending

__all__ = ["find_exhausted", "find_hours_over", "price"]

ROUNDING = 1e-9
"""Sums of prices are off by less."""
_MILLION = 1e6


def price(spending: Spending, budget: BudgetConfig) -> float | None:
    """US dollars by the prices of the config; None without prices or without counts of tokens."""
    if spending.num_unreported:
        return None
    return _price(spending.prompt_tokens, spending.completion_tokens, budget)


def find_hours_over(budget: BudgetConfig, *, elapsed_s: float) -> str:
    """Why the run has to end; empty while it may go on."""
    if budget.max_hours is None or elapsed_s < budget.max_hours * 3600:
        return ""
    return f"The budget of {budget.max_hours:g} hours is over."


def find_exhausted(
    budget: BudgetConfig, spending: Spending, *, num_told: int, num_open: int
) -> str:
    """Why no further attempt may begin beside those in flight; empty while one may.

    Attempts in flight count as much as the dearest one before them. What the first one costs is
    not known: it begins alone.
    """
    if budget.max_tokens is None and budget.max_usd is None:
        return ""
    if spending.num_unreported:
        return "A model does not report its tokens, so that the budget cannot be kept."
    if num_open and not num_told:
        return "What an iteration costs is not known yet."
    num_begun = num_open + 1
    prompt = spending.prompt_tokens + num_begun * spending.dearest_prompt_tokens
    answer = spending.completion_tokens + num_begun * spending.dearest_completion_tokens
    max_tokens, max_usd, usd = budget.max_tokens, budget.max_usd, _price(prompt, answer, budget)
    if max_tokens is not None and prompt + answer > max_tokens:
        return f"The budget of {max_tokens} tokens allows no further iteration."
    if max_usd is not None and usd is not None and usd > max_usd * (1 + ROUNDING):
        return f"The budget of {max_usd:g} US dollars allows no further iteration."
    return ""


def _price(prompt_tokens: int, completion_tokens: int, budget: BudgetConfig) -> float | None:
    prompt, answer = budget.usd_per_million_prompt_tokens, budget.usd_per_million_answer_tokens
    if prompt is None or answer is None:
        return None
    return (prompt_tokens * prompt + completion_tokens * answer) / _MILLION
