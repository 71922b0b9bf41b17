"""Selection rules: who is picked, from scores alone.

    select(TournamentConfig(size=3), scores, count=2, distinct=True, rng=stream(seed, "parents"))

A score of None is a failed candidate: it is picked only when every candidate failed, and then
all are equal. Scores may be negative, all equal or all zero. With `distinct` each candidate is
picked at most once, so fewer than `count` come back when fewer are left to pick.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rookery.config import Config

__all__ = [
    "RULES",
    "RouletteConfig",
    "SelectionConfig",
    "TournamentConfig",
    "draw",
    "elites",
    "roulette",
    "select",
    "shares",
    "tournament",
]

# Drawing indices in proportion to weights: what the proportional rules share.
#
# draw(np.array([0.0, 3.0, 1.0]), count=2, distinct=True, rng=rng)


def draw(
    weights: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    order: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """`count` indices, each with probability proportional to its weight; one is above 0.

    Distinct draws take what is drawn out of the urn. Once only weights of 0 are left, the rest
    is taken in `order`, best first.
    """
    if not distinct:
        return [int(index) for index in _indices(weights, rng.random(count))]
    left = weights.copy()
    picked: list[int] = []
    while len(picked) < count and left.any():
        index = int(_indices(left, rng.random(1))[0])
        picked.append(index)
        left[index] = 0.0
    taken = set(picked)
    rest = [index for index in order if index not in taken]
    return picked + rest[: count - len(picked)]


def _indices(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    bounds = np.cumsum(weights)
    indices: NDArray[np.int64] = np.searchsorted(bounds, uniform * bounds[-1], side="right")
    # A product rounded up to the total would fall behind the last candidate with weight.
    indices = np.minimum(indices, np.flatnonzero(weights)[-1])
    return indices


# The best candidates, without chance.
#
# elites([0.2, None, 0.9], count=1) == (2,)


def elites(scores: Sequence[float | None], *, count: int) -> tuple[int, ...]:
    """Indices of the best `count`, best first, the earlier one on a tie.

    Failed candidates are left out, unless every candidate failed: then the first ones stand in,
    so that a population never becomes empty.
    """
    alive = [index for index, score in enumerate(scores) if score is not None]
    if not alive:
        return tuple(range(min(count, len(scores))))
    return tuple(sorted(alive, key=lambda index: -_value(scores[index]))[:count])


def _value(score: float | None) -> float:
    assert score is not None
    return score


# Roulette: a candidate is picked in proportion to its score.
#
# Scores of 0 and above are used as they are. When one is negative, all are shifted so that the
# worst has weight 0. All-zero and all-equal scores are equal weights.


class RouletteConfig(Config):
    """Fitness-proportional selection."""

    type: Literal["roulette"] = "roulette"


def roulette(
    config: RouletteConfig,  # noqa: ARG001  the rules share one signature
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """Indices drawn with the probabilities of `shares`."""
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    return draw(shares(scores), count=count, distinct=distinct, order=order, rng=rng)


def shares(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights that sum to 1: (1, 3) gives (1/4, 3/4), (-2, 0, 2) gives (0, 1/3, 2/3)."""
    largest = np.abs(scores).max()
    scaled = scores / largest if largest > 0 else np.zeros_like(scores)
    shifted: NDArray[np.float64] = scaled - min(0.0, float(scaled.min()))
    if not shifted.any():
        shifted = np.ones_like(scores)
    shifted /= shifted.sum()
    return shifted


# Tournament: draw `size` candidates at random, the best of them is picked; repeat.
#
# Among equals the one drawn first wins, so ties are broken by chance and not by age.


class TournamentConfig(Config):
    """Selection by tournaments."""

    type: Literal["tournament"] = "tournament"
    size: int = Field(default=2, ge=1)
    """Candidates per tournament: 1 is no pressure, more press harder."""
    replacement: bool = True
    """Whether one candidate may be drawn twice into the same tournament. Without, the worst
    `size` - 1 candidates never win, and a tournament larger than the pool picks the best."""


def tournament(
    config: TournamentConfig,
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """The winners of `count` tournaments; with `distinct` a winner does not play again."""
    pool = list(range(len(scores)))
    picked: list[int] = []
    for _ in range(count):
        if config.replacement:
            drawn = rng.integers(len(pool), size=config.size)
        else:
            drawn = rng.permutation(len(pool))[: config.size]
        players = [pool[int(index)] for index in drawn]
        winner = max(players, key=lambda index: scores[index])
        picked.append(winner)
        if distinct:
            pool.remove(winner)
    return picked


SelectionConfig = Annotated[TournamentConfig | RouletteConfig, Field(discriminator="type")]

RULES: Mapping[str, Callable[..., list[int]]] = {
    "roulette": roulette,
    "tournament": tournament,
}
"""Each is called as rule(config, scores, count=..., distinct=..., rng=...) with finite scores."""


def select(
    config: SelectionConfig,
    scores: Sequence[float | None],
    *,
    count: int,
    rng: np.random.Generator,
    distinct: bool = False,
) -> tuple[int, ...]:
    """Indices of the picked candidates, in the order they were picked."""
    if count < 0 or (count > 0 and not scores):
        raise ValueError(f"Got count {count} of {len(scores)} candidates: there is no such pick.")
    if count == 0:
        return ()
    alive = [index for index, score in enumerate(scores) if score is not None]
    pool = alive or list(range(len(scores)))
    values = np.array([scores[index] if alive else 0.0 for index in pool], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"Got scores {values}: they are finite, or None for a failed candidate.")
    wanted = min(count, len(pool)) if distinct else count
    picked = RULES[config.type](config, values, count=wanted, distinct=distinct, rng=rng)
    return tuple(pool[index] for index in picked)
