"""Order of asks and tells for throughput, with backlog and budget limits.

    order = SteadyOrder(num_attempts=1000, has_room=..., may_begin=..., decided=..., planned=[3])

`SteadyOrder` tells an attempt as soon as it ends. `Window` gives the same kind of steps in an order
that makes results independent of the number of workers. Both first replay the recorded decisions,
in their original order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rookery.loops.evolve.config import EvolveBudgetConfig
from rookery.loops.evolve.search_state import Spending
from rookery.loops.evolve.stages import Stages
from rookery.runs.budget import find_hours_over, find_share
from rookery.search.programs.database import Ask, Tell

__all__ = [
    "BacklogLimit",
    "Order",
    "SearchProgress",
    "SteadyOrder",
    "find_exhausted",
    "price",
    "share_spent",
    "stop_reason",
]


class Order(Protocol):
    """A Window or a SteadyOrder."""

    def decide(self, attempt: int, result: Stages) -> None:
        """Hand in a finished attempt."""
        ...

    def next_step(self) -> Ask | Tell[Stages] | None:
        """Return the next step, or None if an attempt in flight has to end first."""
        ...

    def stop(self) -> None:
        """Ask for no further attempts. Attempts in flight are still told. Idempotent."""
        ...


class SteadyOrder:
    """Tells at once, and asks while there is room."""

    def __init__(
        self,
        *,
        num_attempts: int,
        has_room: Callable[[], bool],
        may_begin: Callable[[int], bool],
        decided: Mapping[int, Stages],
        planned: Iterable[int],
    ) -> None:
        """`decided` is in order of decision; `planned` attempts began in an earlier process."""
        self._num_attempts = num_attempts
        self._has_room = has_room
        self._may_begin = may_begin
        self._told: deque[Tell[Stages]] = deque(
            Tell(attempt=number, result=stages) for number, stages in decided.items()
        )
        self._planned = deque(sorted(planned))
        self._next = 1 + max((*decided, *self._planned), default=0)
        missing = set(range(1, self._next)) - set(decided) - set(self._planned)
        self._planned.extend(sorted(missing))

    def decide(self, attempt: int, result: Stages) -> None:
        self._told.append(Tell(attempt=attempt, result=result))

    def next_step(self) -> Ask | Tell[Stages] | None:
        if self._told:
            return self._told.popleft()
        if not self._has_room():
            return None
        if self._planned:
            may_begin = self._may_begin(self._planned[0])
            return Ask(attempt=self._planned.popleft()) if may_begin else None
        if self._next > self._num_attempts or not self._may_begin(self._next):
            return None
        self._next += 1
        return Ask(attempt=self._next - 1)

    def stop(self) -> None:
        self._num_attempts = min(self._num_attempts, self._next - 1)


PER_WORKER = 2
"""Children per worker that may always wait, so that no worker is idle during a model call."""
MEMORY = 0.9
"""Weight of the old mean when a new time is added."""


@dataclass(slots=True)
class MeanSeconds:
    """Exponential mean of durations, in seconds; None before the first."""

    value: float | None = None

    def add(self, seconds: float) -> None:
        known = seconds if self.value is None else self.value
        self.value = MEMORY * known + (1 - MEMORY) * seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block and add its duration, unless it raises."""
        start = time.monotonic()
        yield
        self.add(time.monotonic() - start)


@dataclass(slots=True, kw_only=True)
class BacklogLimit:
    """Limits how many children may wait for evaluation before model calls pause.

        backlog = BacklogLimit(num_workers=8)
        backlog.model.add(5.0)
        backlog.evaluation.add(0.1)
        backlog.max_waiting == 400

    The limit is the number of children that the workers evaluate during one model call: they do not
    delay that call's child. If evaluations are slow, few may wait, because parents would be chosen
    long before their children count.
    """

    num_workers: int
    model: MeanSeconds = field(default_factory=MeanSeconds)
    evaluation: MeanSeconds = field(default_factory=MeanSeconds)

    @property
    def max_waiting(self) -> int:
        """Number of children that may wait."""
        each = PER_WORKER
        if self.model.value is not None and self.evaluation.value:
            each = max(each, int(self.model.value / self.evaluation.value))
        return each * self.num_workers


ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of prices."""
_MILLION = 1e6


def price(spending: Spending, budget: EvolveBudgetConfig) -> float | None:
    """Return the cost in US dollars, or None without prices or token counts."""
    if spending.num_unreported:
        return None
    return _price(spending.prompt_tokens, spending.completion_tokens, budget)


def find_exhausted(
    budget: EvolveBudgetConfig, spending: Spending, *, num_told: int, num_open: int
) -> str:
    """Return why no attempt may begin beside those in flight; empty if one may.

    Each attempt in flight counts as much as the most expensive one so far. The first attempt begins
    alone, because its cost is unknown.
    """
    if budget.max_rollouts is not None:
        needed = (num_open + 1) * spending.dearest_rollouts
        if spending.num_rollouts + needed > budget.max_rollouts:
            return f"The budget of {budget.max_rollouts} rollouts allows no further iteration."
    if budget.max_tokens is None and budget.max_usd is None and budget.max_answer_tokens is None:
        return ""
    if spending.num_unreported:
        return "A model does not report its tokens, so that the budget cannot be kept."
    if num_open and not num_told:
        return "The cost of an iteration is not known yet."
    num_begun = num_open + 1
    prompt = spending.prompt_tokens + num_begun * spending.dearest_prompt_tokens
    answer = spending.completion_tokens + num_begun * spending.dearest_completion_tokens
    most, trained = budget.max_answer_tokens, spending.training_answer_tokens
    if most is not None and answer + trained + spending.choice_tokens > most:
        return f"The budget of {most} answer tokens allows no further iteration."
    max_tokens, max_usd, usd = budget.max_tokens, budget.max_usd, _price(prompt, answer, budget)
    if max_tokens is not None and prompt + answer + spending.training_tokens > max_tokens:
        return f"The budget of {max_tokens} tokens allows no further iteration."
    if max_usd is not None and usd is not None and usd > max_usd * (1 + ROUNDING):
        return f"The budget of {max_usd:g} US dollars allows no further iteration."
    return ""


def share_spent(
    budget: EvolveBudgetConfig, spending: Spending, *, elapsed_s: float
) -> float | None:
    """Return the spent share of the tightest limit, or None without limits."""
    answers = spending.completion_tokens + spending.training_answer_tokens + spending.choice_tokens
    further = (
        (spending.num_rollouts, budget.max_rollouts),
        (spending.tokens, budget.max_tokens),
        (price(spending, budget) or 0.0, budget.max_usd),
    )
    return find_share(budget, tokens=answers, elapsed_s=elapsed_s, further=further)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """The progress and spending of a search."""

    num_attempts: int
    """Planned attempts. The search may end earlier."""
    num_decided: int
    num_open: int
    """Attempts in flight."""
    num_recorded: int
    """Recorded decisions not yet replayed. They are told even if the budget is spent."""
    elapsed_s: float
    goal_reason: str
    """Why a target score or the patience ends the search; empty otherwise."""
    budget: EvolveBudgetConfig
    spending: Spending


def stop_reason(progress: SearchProgress) -> str:
    """Return why no further attempt begins. Empty if one may, or if none is left."""
    if progress.num_decided + progress.num_open >= progress.num_attempts:
        return ""
    if progress.goal_reason or progress.num_recorded:
        return progress.goal_reason
    hours = find_hours_over(progress.budget, elapsed_s=progress.elapsed_s)
    if hours or progress.num_open:
        return hours
    return find_exhausted(
        progress.budget, progress.spending, num_told=progress.num_decided, num_open=0
    )


def _price(prompt_tokens: int, completion_tokens: int, budget: EvolveBudgetConfig) -> float | None:
    prompt, answer = budget.usd_per_million_prompt_tokens, budget.usd_per_million_answer_tokens
    if prompt is None or answer is None:
        return None
    return (prompt_tokens * prompt + completion_tokens * answer) / _MILLION
