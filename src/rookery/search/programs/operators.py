"""Adaptive operator selection: which way of making a child gets the next attempt.

    bandit = OperatorBandit()
    shares = bandit.shares({"best": True, "top": True}, horizon=1000, num_left=800)
    bandit.tell("best", gain=0.02, cost=1800, is_accepted=True, horizon=1000)

The share of an operator follows its recent improvement of the best score per token, against a seed
that favours what wins early. A part of the attempts goes by fixed weights instead, so that no
operator starves. That part is small while the best score rises as fast as it did on average, and
large when it stands still.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OPERATORS", "OperatorBandit", "OperatorRecord"]

Shares = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """`seed` is the merit assumed before anything was told, in units of the mean merit of all;
    `weight` is its part of the attempts that go by fixed weights."""

    seed: float
    weight: float = 0.0


OPERATORS: Mapping[str, _Operator] = {
    "best": _Operator(seed=1.0),
    "improver": _Operator(seed=0.1, weight=0.1),
    "top": _Operator(seed=0.1, weight=0.35),
    "crossover": _Operator(seed=0.1, weight=0.2),
    "repair": _Operator(seed=1.0, weight=0.05),
    "restart": _Operator(seed=0.0, weight=0.05),
    "elite": _Operator(seed=0.0, weight=0.25),
}
"""best: a child of the best program; improver: of a program that lately improved on its parent;
top: of a draw by rank; crossover: of two good programs; repair: a failed program mended; restart: a
child of the first program, which begins a line on an island of its own; elite: of the best program
of such a line. Seeds and weights were chosen by simulation (docs/evolve.md)."""

SEED_PLAYS = 30.0
"""Attempts that a seed counts for."""
SHARPNESS = 2.0
"""Shares go by merit to this power: one operator with half the merit gets a quarter."""
PATIENCE = 0.01
"""When the recent rate of improvement is this part of the mean rate, half of the attempts go by
fixed weights."""
FEWEST, MOST = 0.01, 0.7
"""Bounds of the part that goes by fixed weights."""
FIRST_ACCEPTED = 10
"""Programs before a rate of improvement is known."""
TAIL = 0.08
"""In this last part of the attempts the part by fixed weights shrinks to nothing: what it finds
could no longer be followed up."""
WINDOWS, SHORTEST_WINDOW = 12.0, 15.0
"""Recent is a twelfth of all attempts, at least 15."""


@dataclass(slots=True, kw_only=True)
class OperatorRecord:
    """What an operator was given and what it won."""

    name: str
    num_given: int = 0
    num_accepted: int = 0
    """Attempts that gave a program."""
    num_improved: int = 0
    """Programs that were the best when they were told."""
    cost: float = 0.0
    recent_gain: float = 0.0
    recent_cost: float = 0.0
    """Sums in which old attempts fade."""


@dataclass(slots=True)
class OperatorBandit:
    """A function of what was told, in that order."""

    records: dict[str, OperatorRecord] = field(default_factory=dict)
    num_told: int = 0
    num_accepted: int = 0
    gain: float = 0.0
    """Of the best score, in all."""
    _recent_gain: float = 0.0
    _recent_accepted: float = 0.0

    def tell(
        self, name: str, *, gain: float, cost: float, is_accepted: bool, horizon: float
    ) -> None:
        """Count one attempt: `gain` is by how much it raised the best score. A cost of 0 is one
        that the model did not report. What is no operator, such as tuning, is counted alone."""
        if name not in OPERATORS:
            self._count(name, gain=gain, cost=cost, is_accepted=is_accepted)
            return
        cost = cost or 1.0
        kept = 1 - 1 / max(SHORTEST_WINDOW, horizon / WINDOWS)
        for record in self.records.values():
            record.recent_gain *= kept
            record.recent_cost *= kept
        record = self._count(name, gain=gain, cost=cost, is_accepted=is_accepted)
        record.recent_cost += cost
        self.num_told += 1
        if not is_accepted:
            return
        record.recent_gain += gain
        self.num_accepted += 1
        self.gain += gain
        self._recent_gain = self._recent_gain * kept + gain
        self._recent_accepted = self._recent_accepted * kept + 1

    def _count(self, name: str, *, gain: float, cost: float, is_accepted: bool) -> OperatorRecord:
        record = self.records.setdefault(name, OperatorRecord(name=name))
        record.num_given += 1
        record.num_accepted += is_accepted
        record.num_improved += is_accepted and gain > 0
        record.cost += cost
        return record

    @property
    def cost(self) -> float:
        """Of all attempts told."""
        return math.fsum(record.cost for record in self.records.values())

    @property
    def mean_cost(self) -> float:
        return self.cost / self.num_told if self.num_told else 1.0

    def shares(self, are_due: Mapping[str, bool], *, horizon: float, num_left: float) -> Shares:
        """The chance of each of these operators in the next attempt; `best` is always due. One
        that is not due gets only what goes by fixed weights."""
        merits = {name: self._merit(name) ** SHARPNESS for name, due in are_due.items() if due}
        weights = {name: OPERATORS[name].weight for name in are_due}
        part = self._part_by_weight(num_left / (TAIL * horizon)) if any(weights.values()) else 0.0
        total, all_weights = math.fsum(merits.values()), math.fsum(weights.values()) or 1.0
        return {
            name: (1 - part) * merits.get(name, 0.0) / total + part * weights[name] / all_weights
            for name in are_due
        }

    def _merit(self, name: str) -> float:
        """Recent improvement per cost, in units of the mean of all operators, mixed with the
        seed."""
        record = self.records.get(name, OperatorRecord(name=name))
        gain = math.fsum(one.recent_gain for one in self.records.values())
        cost = math.fsum(one.recent_cost for one in self.records.values())
        relative = record.recent_gain / gain * cost if gain > 0 else 0.0
        seeded = SEED_PLAYS * self.mean_cost
        return (relative + seeded * OPERATORS[name].seed) / (record.recent_cost + seeded)

    def _part_by_weight(self, tail: float) -> float:
        if self.num_accepted < FIRST_ACCEPTED:
            return FEWEST
        mean = self.gain / self.num_accepted
        recent = self._recent_gain / self._recent_accepted
        part = PATIENCE / (PATIENCE + recent / mean) if mean > 0 else MOST
        return max(FEWEST, min(MOST, part)) * min(1.0, tail)
