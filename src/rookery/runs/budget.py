"""The budget of a run's search, and the round before which it is exhausted.

    budget = Budget(config.budget, run)
    while await budget.has_room(step, tokens=spent + next_step, num_done=known):
        ...

A round is a loop's work between two checks: a step, a generation, a position of a chain. It begins
only if the cost of the dearest round so far would fit, and is then finished. The end is an event of
the run, so that a resumed run ends at the same round.
"""

from collections.abc import Callable, Iterable

from pydantic import Field

from rookery.config import Config
from rookery.runs.run import Run

__all__ = [
    "Budget",
    "BudgetConfig",
    "find_hours_over",
    "find_share",
    "find_stop_reason",
    "find_tokens_over",
]

BUDGET = "budget"
"""Kind of the event that records a budget's end."""


class BudgetConfig(Config):
    """Limits after which the run ends; null: no limit. The final report costs extra."""

    max_answer_tokens: int | None = Field(default=None, gt=0)
    """Tokens of answers: sampled, chosen, or trained on. Prompts are shared and do not count."""
    max_hours: float | None = Field(default=None, gt=0)
    """Most hours of the run."""

    @property
    def has_limit(self) -> bool:
        return self.max_answer_tokens is not None or self.max_hours is not None


def find_hours_over(budget: BudgetConfig, *, elapsed_s: float) -> str:
    """Return why the run has to end; empty if it may go on."""
    if budget.max_hours is None or elapsed_s < budget.max_hours * 3600:
        return ""
    return f"The budget of {budget.max_hours:g} hours is over."


def find_tokens_over(budget: BudgetConfig, tokens: int) -> str:
    """Return why no round may begin that brings the run to `tokens`; empty if one may."""
    most = budget.max_answer_tokens
    if most is None or tokens <= most:
        return ""
    return f"The budget of {most:,} answer tokens has no room for more."


def find_share(
    budget: BudgetConfig,
    *,
    tokens: int,
    elapsed_s: float,
    further: Iterable[tuple[float, float | None]] = (),
) -> float | None:
    """Return the spent share of the tightest limit, if any; `further` are (spent, limit)."""
    hours = (elapsed_s / 3600, budget.max_hours)
    limits = ((tokens, budget.max_answer_tokens), hours, *further)
    return max((spent / most for spent, most in limits if most), default=None)


def find_stop_reason(run: Run) -> str:
    """Return why the first part of a run ended early; empty if none did."""
    return next((str(event.payload["reason"]) for event in run.events(BUDGET)), "")


class Budget:
    """The budget of one run, or with a `key` of one part of it."""

    def __init__(
        self,
        config: BudgetConfig,
        run: Run,
        *,
        key: str = "run",
        elapsed_s: Callable[[], float] | None = None,
    ) -> None:
        """`elapsed_s` returns the seconds of that part; None: those of the run."""
        self._config, self._run, self._key = config, run, key
        self._elapsed_s = elapsed_s or (lambda: run.elapsed_s)
        self._end = run.get(BUDGET, key)
        self.share = 0.0
        """Share of the budget that is spent after the round asked for last."""

    @property
    def stop_reason(self) -> str:
        """Why the budget ended; empty if it has not."""
        return "" if self._end is None else str(self._end.payload["reason"])

    async def has_room(self, number: int, *, tokens: int = 0, num_done: int = 0) -> bool:
        """Whether round `number`, counted from 0, may begin. `tokens` is the run's total at its
        end. The first `num_done` rounds were done before and are only repeated."""
        if self._end is not None:
            return number < int(self._end.payload["round"])
        if not self._config.has_limit or number < num_done:
            return True
        reason = self._find_exhausted(tokens)
        if reason:
            payload = {"round": number, "reason": reason}
            self._end = await self._run.append(BUDGET, payload, key=self._key)
        return not reason

    def _find_exhausted(self, tokens: int) -> str:
        config, elapsed_s = self._config, self._elapsed_s()
        self.share = find_share(config, tokens=tokens, elapsed_s=elapsed_s) or 0.0
        return find_tokens_over(config, tokens) or find_hours_over(config, elapsed_s=elapsed_s)
