"""The weights of parents in a merge: by fitness, at random, or beyond the convex hull.

parent_weights("fitness", shares=(0.3, 0.1), reach=0.5, rng=rng) == (0.75, 0.25)
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

__all__ = ["WeightRule", "convex_weights", "may_be_negative", "parent_weights"]

WeightRule = Literal["extrapolate", "fitness", "free", "random", "uniform"]

MIN_SHARE = 0.05
"""A parent's smallest weight by fitness: at 0 the child would be a copy of the other one."""


def parent_weights(
    rule: WeightRule, *, shares: Sequence[float], reach: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """One weight per parent, the fittest parent first; `shares` is their fitness, >= 0.

    fitness: the ratio of shares. uniform: equal. random: anywhere in the convex hull.
    extrapolate: (1 + t, -t) for two parents, t up to `reach`, beyond the fittest and away from
    the others. free: each from 0 to 1 + reach on its own, so the sum is not 1.
    """
    count = len(shares)
    if rule == "random":
        return convex_weights(count, rng=rng)
    if rule == "free":
        return tuple(float(weight) for weight in (1.0 + reach) * rng.random(count))
    if rule == "extrapolate" and count > 1:
        beyond = reach * float(rng.random())
        return (1.0 + beyond, *[-beyond / (count - 1)] * (count - 1))
    total = sum(shares)
    if rule != "fitness" or total == 0:
        return (1.0 / count,) * count
    floored = [max(share / total, MIN_SHARE) for share in shares]
    return tuple(share / sum(floored) for share in floored)


def may_be_negative(rule: WeightRule, *, reach: float) -> bool:
    """Whether the rule gives weights below 0, which not every merge takes."""
    return rule == "extrapolate" and reach > 0


def convex_weights(count: int, *, rng: np.random.Generator) -> tuple[float, ...]:
    """Uniform on the simplex: the gaps between sorted uniform numbers; they sum to 1."""
    cuts = [0.0, *sorted(float(cut) for cut in rng.random(count - 1)), 1.0]
    return tuple(high - low for low, high in pairwise(cuts))
