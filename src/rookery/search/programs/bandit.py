"""A bandit over arms, which draws the model or adapter that writes the next program.

    bandit = Bandit(BanditConfig(policy="ucb"), arms=[Arm(name="small", weight=0.8), ...])
    arm = bandit.draw(rng)
    bandit.tell(arm, gain=0.02, cost=1800)     # improvement of the score, tokens
    bandit.join(Arm(name="learned"))           # during a search: all arms are judged anew

Draws are random, with probabilities that follow the upper confidence bounds. Many attempts are in
flight and their rewards come late: the highest bound alone would send all of them to one arm.

Adaptive operator selection draws the operator of the next attempt:

    bandit = OperatorBandit()
    shares = bandit.shares({"best": True, "top": True}, horizon=1000, num_left=800)
    bandit.tell("best", gain=0.02, cost=1800, is_accepted=True, horizon=1000)

An operator's share follows its recent improvement of the best score per token, plus a prior that
favours operators which win early. A part of the attempts goes by fixed weights, so that no operator
starves. That part is small while the best score rises as fast as on average, and large if it does
not rise.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from pydantic import Field

from rookery.config import Config

__all__ = ["OPERATORS", "Arm", "Bandit", "BanditConfig", "OperatorBandit", "OperatorRecord"]


HIGHEST_GAIN = 1e300
"""Largest gain of a play, which keeps the sum of gains finite."""


class BanditConfig(Config):
    """How arms are chosen."""

    policy: Literal["weights", "ucb"] = "weights"
    """`weights` draws in proportion to the arms' weights; `ucb` starts there and learns."""
    exploration: float = Field(default=0.5, ge=0)
    """Width of the confidence bounds, with gains scaled so that the best arm has 1."""
    temperature: float = Field(default=0.3, gt=0)
    """How strictly draws follow the bounds: an arm lower by this is e times rarer."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Share of draws by weights alone, so that an arm can recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm and its earnings. `Arm(name="small", weight=0.8)` is new."""

    name: str
    weight: float = 1.0
    num_plays: int = 0
    gain: float = 0.0
    """Sum of the score's improvements."""
    cost: float = 0.0
    """Sum of costs, such as tokens."""
    num_before: int = 0
    gain_before: float = 0.0
    cost_before: float = 0.0
    """Like the two before, its value when the last arm joined a running search."""

    @property
    def num_judged(self) -> int:
        """Plays that determine its bound."""
        return self.num_plays - self.num_before

    @property
    def rate(self) -> float | None:
        """Gain per cost since the last arm joined; None before any cost."""
        cost = self.cost - self.cost_before
        return (self.gain - self.gain_before) / cost if cost > 0 else None


class Bandit:
    """The arms and the rule that draws one."""

    def __init__(self, config: BanditConfig, *, arms: Iterable[Arm] = ()) -> None:
        self._config = config
        self._arms: dict[str, Arm] = {}
        for arm in arms:
            self.add(arm)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Arms in the order they joined."""
        return tuple(self._arms.values())

    def add(self, arm: Arm) -> None:
        """Add an arm; its bound starts at the best arm's gain."""
        if arm.name in self._arms:
            raise ValueError(f"There is an arm {arm.name!r} already: each needs its own name.")
        if not 0 <= arm.weight < math.inf:
            raise ValueError(f"The arm {arm.name!r} has weight {arm.weight}: it is 0 or above.")
        self._arms[arm.name] = arm

    def join(self, arm: Arm, *, retires: Collection[str] = ()) -> None:
        """Add an arm to a running search, whose gains are smaller than at its start: all arms are
        judged by their earnings from here on. Arms in `retires` are drawn no more."""
        self.add(arm)
        for one in self.arms:
            self._arms[one.name] = replace(
                one,
                weight=0.0 if one.name in retires else one.weight,
                num_before=one.num_plays,
                gain_before=one.gain,
                cost_before=one.cost,
            )

    def tell(self, name: str, *, gain: float, cost: float) -> None:
        """Count one play. A failed attempt has gain 0 and its cost."""
        if not (gain >= 0 and 0 <= cost < math.inf):
            raise ValueError(f"Got gain {gain}, cost {cost} for {name!r}: both are 0 or above.")
        if name not in self._arms:
            raise ValueError(f"There is no arm {name!r}; there are {list(self._arms)}.")
        arm = self._arms[name]
        total = arm.gain + min(gain, HIGHEST_GAIN)
        self._arms[name] = replace(
            arm, num_plays=arm.num_plays + 1, gain=total, cost=arm.cost + cost
        )

    def shares(self) -> dict[str, float]:
        """Return the probability of each arm in the next draw."""
        weights = np.array([arm.weight for arm in self.arms])
        if not weights.sum() > 0:
            raise ValueError(f"No arm has a weight above 0: {list(self._arms)}.")
        shares = weights / weights.sum()
        if self._config.policy == "ucb":
            bounds = np.array(self._bounds())
            odds = shares * np.exp((bounds - bounds.max()) / self._config.temperature)
            floor = self._config.floor
            learnt = odds / odds.sum() if odds.sum() > 0 else shares
            shares = floor * shares + (1 - floor) * learnt
        return dict(zip(self._arms, shares.tolist(), strict=True))

    def draw(self, rng: np.random.Generator) -> str:
        """Draw the name of an arm; empty without arms."""
        if not self._arms:
            return ""
        shares = self.shares()
        sums = np.cumsum(list(shares.values()))
        place = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
        return list(shares)[min(place, len(shares) - 1)]

    def _bounds(self) -> list[float]:
        """Return upper confidence bounds on gain per cost, in units of the best arm's."""
        rates = [arm.rate for arm in self.arms]
        best = max((rate for rate in rates if rate is not None), default=0.0)
        num_plays = sum(arm.num_judged for arm in self.arms)
        return [
            (1.0 if rate is None else rate / best if best > 0 else 0.0)
            + self._config.exploration * math.sqrt(math.log1p(num_plays) / max(1, arm.num_judged))
            for arm, rate in zip(self.arms, rates, strict=True)
        ]


Shares = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """`seed` is the prior merit, relative to the mean; `weight` the share by fixed weights."""

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
"""best: a child of the best program. improver: of a program that recently improved on its parent.
top: of a draw by rank. crossover: of two good programs. repair: a failed program mended. restart: a
child of the first program, which begins a line on its own island. elite: of the best program of
such a line. Seeds and weights were chosen by simulation."""

SEED_PLAYS = 30.0
"""Attempts that a prior counts as."""
SHARPNESS = 2.0
"""Exponent of merit in shares: an operator with half the merit gets a quarter."""
PATIENCE = 0.01
"""At this recent rate of improvement, relative to the mean, half of the attempts go by weights."""
FEWEST, MOST = 0.01, 0.7
"""Bounds of the part that goes by fixed weights."""
FIRST_ACCEPTED = 10
"""Programs before a rate of improvement is known."""
TAIL = 0.08
"""Last part of the attempts, in which the part by weights falls to 0: its finds come too late."""
WINDOWS, SHORTEST_WINDOW = 12.0, 15.0
"""Recent is a twelfth of all attempts, at least 15."""


@dataclass(slots=True, kw_only=True)
class OperatorRecord:
    """Attempts and gains of one operator."""

    name: str
    num_given: int = 0
    num_accepted: int = 0
    """Attempts that gave a program."""
    num_improved: int = 0
    """Programs that were a new best."""
    cost: float = 0.0
    recent_gain: float = 0.0
    recent_cost: float = 0.0
    """Exponentially decayed sums, like `recent_gain`."""


@dataclass(slots=True)
class OperatorBandit:
    """Shares of operators, as a function of earlier attempts in their order."""

    records: dict[str, OperatorRecord] = field(default_factory=dict)
    num_told: int = 0
    num_accepted: int = 0
    gain: float = 0.0
    """Total improvement of the best score."""
    _recent_gain: float = 0.0
    _recent_accepted: float = 0.0

    def tell(
        self, name: str, *, gain: float, cost: float, is_accepted: bool, horizon: float
    ) -> None:
        """Count one attempt, which raised the best score by `gain`. A cost of 0 means that the
        model reported none. A name that is no operator, such as tuning, does not affect shares."""
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
        return math.fsum(record.cost for record in self.records.values())

    @property
    def mean_cost(self) -> float:
        return self.cost / self.num_told if self.num_told else 1.0

    def shares(self, are_due: Mapping[str, bool], *, horizon: float, num_left: float) -> Shares:
        """Return each operator's probability in the next attempt; `best` is always due. An operator
        that is not due is drawn only by its fixed weight."""
        merits = {name: self._merit(name) ** SHARPNESS for name, due in are_due.items() if due}
        weights = {name: OPERATORS[name].weight for name in are_due}
        part = self._part_by_weight(num_left / (TAIL * horizon)) if any(weights.values()) else 0.0
        total, all_weights = math.fsum(merits.values()), math.fsum(weights.values()) or 1.0
        return {
            name: (1 - part) * merits.get(name, 0.0) / total + part * weights[name] / all_weights
            for name in are_due
        }

    def _merit(self, name: str) -> float:
        """Return recent gain per cost relative to all operators' mean, mixed with the prior."""
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
