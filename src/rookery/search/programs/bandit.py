"""A bandit over arms: which model or adapter writes the next program.

    bandit = Bandit(BanditConfig(policy="ucb"), arms=[Arm(name="small", weight=0.8), ...])
    arm = bandit.draw(rng)
    bandit.tell(arm, gain=0.02, cost=1800)     # improvement of the score, tokens
    bandit.join(Arm(name="learned"))           # while a search goes on: all are judged anew

A draw is random with probabilities that follow the upper confidence bounds. Many attempts are in
flight at a time and their rewards come late: taking the highest bound would send all of them to
one arm.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from rookery.config import Config

__all__ = ["Arm", "Bandit", "BanditConfig"]

HIGHEST_GAIN = 1e300
"""A play counts for no more: keeps the sum of gains finite."""


class BanditConfig(Config):
    """How arms are chosen."""

    policy: Literal["weights", "ucb"] = "weights"
    """`weights` draws in proportion to the arms' weights; `ucb` starts there and learns."""
    exploration: float = Field(default=0.5, ge=0)
    """Width of the confidence bounds; gains are scaled so that the best arm has 1."""
    temperature: float = Field(default=0.3, gt=0)
    """How strictly draws follow the bounds: an arm that is lower by this is e times rarer."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Share of draws that go by the weights alone, so that an arm can recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm and what it earned. `Arm(name="small", weight=0.8)` is new."""

    name: str
    weight: float = 1.0
    num_plays: int = 0
    gain: float = 0.0
    """Improvements of the score, summed."""
    cost: float = 0.0
    """What they cost, summed."""
    num_before: int = 0
    gain_before: float = 0.0
    cost_before: float = 0.0
    """What it had when the last arm joined a search under way."""

    @property
    def num_judged(self) -> int:
        """Plays that its bound follows from."""
        return self.num_plays - self.num_before

    @property
    def rate(self) -> float | None:
        """Gain per cost since arms are compared; None before it has cost anything."""
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
        """In the order in which they joined."""
        return tuple(self._arms.values())

    def add(self, arm: Arm) -> None:
        """Let an arm join; its bound starts at the best arm's gain."""
        if arm.name in self._arms:
            raise ValueError(f"There is an arm {arm.name!r} already: each needs its own name.")
        if not 0 <= arm.weight < math.inf:
            raise ValueError(f"The arm {arm.name!r} has weight {arm.weight}: it is 0 or above.")
        self._arms[arm.name] = arm

    def join(self, arm: Arm, *, retires: Collection[str] = ()) -> None:
        """Let an arm join a search under way, where gains are smaller than at its start: from here
        on all arms are judged by what they earn from here on. `retires` are drawn no more."""
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
        """The chance of each arm in the next draw."""
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
        """The name of an arm; empty when there are none."""
        if not self._arms:
            return ""
        shares = self.shares()
        sums = np.cumsum(list(shares.values()))
        place = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
        return list(shares)[min(place, len(shares) - 1)]

    def _bounds(self) -> list[float]:
        """Upper confidence bounds on gain per cost, in units of the best arm's."""
        rates = [arm.rate for arm in self.arms]
        best = max((rate for rate in rates if rate is not None), default=0.0)
        num_plays = sum(arm.num_judged for arm in self.arms)
        return [
            (1.0 if rate is None else rate / best if best > 0 else 0.0)
            + self._config.exploration * math.sqrt(math.log1p(num_plays) / max(1, arm.num_judged))
            for arm, rate in zip(self.arms, rates, strict=True)
        ]
