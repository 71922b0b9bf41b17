"""Advantages: the rewards of one group -> how much better than the group each answer was.

ADVANTAGES["group_relative"]([1.0, 0.0, 0.0, 0.0], rng=rng)    # (1.73, -0.58, -0.58, -0.58)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Literal

import numpy as np

__all__ = [
    "ADVANTAGES",
    "AdvantageName",
    "group_relative",
    "is_equal",
    "leave_one_out",
    "no_std",
    "shuffled",
]

AdvantageName = Literal["group_relative", "leave_one_out", "no_std", "shuffled"]
EQUAL = 1e-9
"""Rewards that differ by less are equal: dividing by their deviation would magnify rounding."""


def is_equal(rewards: Sequence[float]) -> bool:
    """True if no answer is better than another: there is nothing to learn from the group."""
    return max(rewards) - min(rewards) < EQUAL * max(1.0, *map(abs, rewards))


def group_relative(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """(reward - mean) / standard deviation of the group, as GRPO has it."""
    del rng
    mean, deviation = fmean(rewards), pstdev(rewards)
    return tuple((reward - mean) / deviation for reward in rewards)


def leave_one_out(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """reward - mean of the others (RLOO): the baseline does not depend on the answer itself."""
    del rng
    total, others = math.fsum(rewards), len(rewards) - 1
    return tuple(reward - (total - reward) / others for reward in rewards)


def no_std(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """reward - mean (Dr. GRPO): groups of nearly equal rewards count less."""
    del rng
    mean = fmean(rewards)
    return tuple(reward - mean for reward in rewards)


def shuffled(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """A control: those of `group_relative` handed out at random. A policy must not improve."""
    own = group_relative(rewards, rng=rng)
    return tuple(own[int(place)] for place in rng.permutation(len(own)))


ADVANTAGES: Mapping[AdvantageName, Callable[..., tuple[float, ...]]] = {
    "group_relative": group_relative,
    "leave_one_out": leave_one_out,
    "no_std": no_std,
    "shuffled": shuffled,
}
"""Each takes the rewards of a group and a random generator that belongs to the group."""
