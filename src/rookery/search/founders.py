"""Plans that need no population: pair merges to start from, random search to compare with.

pair_plans(adapter_ids, count=6, seed=7)        # random pairs, random convex weights
random_plans(adapter_ids, count=120, seed=7)    # the baseline at equal evaluations
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rookery.errors import ConfigError
from rookery.search.candidate import RANDOM_SUM, ChildPlan
from rookery.search.children import convex_weights
from rookery.seeding import shuffled, stream, stream_seed

__all__ = ["pair_plans", "random_plans", "random_weights"]

MAX_STRENGTH = 1.5
"""A single founder is tried in strengths up to this."""


def pair_plans(ids: Sequence[str], *, count: int, seed: int) -> tuple[ChildPlan, ...]:
    """`count` merges of two: every pair once before any comes again, weights always fresh."""
    if len(set(ids)) < 2:
        raise ConfigError(
            f"Got the founders {list(ids)}: a pair needs two different ones. Give more, "
            "or write init.use: adapters."
        )
    pairs = shuffled(list(combinations(ids, 2)), rng=stream(seed, "pairs"))
    plans = []
    for index in range(count):
        weights = convex_weights(2, rng=stream(seed, "pairs", index))
        pair = pairs[index % len(pairs)]
        plans.append(_plan(pair, weights, name=f"g000-c{index:02d}", seed=seed))
    return tuple(plans)


def random_weights(num_founders: int, *, rng: np.random.Generator) -> NDArray[np.float64]:
    """Of one sum: some founders, two at least, share a total from 1, their mean, up to their
    number, their plain sum. The shares are uniform (Dirichlet), the total's logarithm is too."""
    if num_founders == 1:
        return MAX_STRENGTH * rng.random(1)
    count = int(rng.integers(2, num_founders + 1))
    weights = np.zeros(num_founders)
    members = rng.permutation(num_founders)[:count]
    weights[members] = rng.dirichlet(np.ones(count)) * count ** rng.random()
    return weights


def random_plans(ids: Sequence[str], *, count: int, seed: int) -> tuple[ChildPlan, ...]:
    """`count` sums of founders: the uniform average, then random weights."""
    plans = []
    for index in range(count):
        drawn = random_weights(len(ids), rng=stream(seed, "random", index))
        if index == 0 and len(ids) > 1:
            drawn = np.full(len(ids), 1.0 / len(ids))
        weights = tuple(float(weight) for weight in drawn)
        plan = _plan(tuple(ids), weights, name=f"r{index:04d}", seed=seed)
        plans.append(replace(plan, merge=RANDOM_SUM))
    return tuple(plans)


def _plan(
    parents: tuple[str, ...], weights: tuple[float, ...], *, name: str, seed: int
) -> ChildPlan:
    """A linear merge without mutation."""
    return ChildPlan(
        id=name,
        generation=0,
        merge="linear",
        parents=parents,
        weights=weights,
        mutation=None,
        sigma=0.0,
        seed_key=stream_seed(seed, "plan", name),
    )
