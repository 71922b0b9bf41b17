"""Selection of parents, and plans of children: operator, weights, mutation strength.

    select(TournamentConfig(size=3), scores, count=2, distinct=True, rng=stream(seed, "parents"))
    plan_children(members, scores, config=ChildrenConfig(), at=Birth(generation=3), seed=7)

A score of None is a failed candidate: it is picked only if every candidate failed, and then all
count as equal. Scores may be negative, all equal or all zero. With `distinct` each candidate is
picked at most once, so the result may be shorter than `count`.

Every child has its own random stream, keyed by its id: child 7's plan does not depend on the number
of siblings, except that a plan equal to an earlier sibling's is drawn again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.candidate import Candidate, ChildPlan
from rookery.seeding import stream, stream_seed

__all__ = [
    "RULES",
    "Birth",
    "ChildrenConfig",
    "CrossoverConfig",
    "MutationConfig",
    "OperatorConfig",
    "RouletteConfig",
    "SelectionConfig",
    "SigmaConfig",
    "TournamentConfig",
    "WeightRule",
    "convex_weights",
    "draw",
    "elites",
    "parent_weights",
    "plan_children",
    "roulette",
    "select",
    "shares",
    "tournament",
]


def draw(
    weights: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    order: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """Draw `count` indices in proportion to weights, at least one of which is above 0.

    draw(np.array([0.0, 3.0, 1.0]), count=2, distinct=True, order=[1, 2, 0], rng=rng)

    Distinct draws are without replacement. Once only weights of 0 are left, the rest is taken in
    `order`, best first.
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
    # A product rounded up to the total would land behind the last candidate with weight.
    indices = np.minimum(indices, np.flatnonzero(weights)[-1])
    return indices


def elites(scores: Sequence[float | None], *, count: int) -> tuple[int, ...]:
    """Return the indices of the best `count`, best first, the earlier one on a tie.

    elites([0.2, None, 0.9], count=1) == (2,). Failed candidates are left out. If all failed, the
    first ones are returned, so that a population never becomes empty.
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
# Scores of 0 and above are used as they are. If one is negative, all are shifted so that the worst
# has weight 0. All-zero and all-equal scores are equal weights.


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
    """Draw indices with the probabilities of `shares`."""
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    return draw(shares(scores), count=count, distinct=distinct, order=order, rng=rng)


def shares(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights that sum to 1: (1, 3) gives (1/4, 3/4), (-2, 0, 2) gives (0, 1/3, 2/3)."""
    largest = np.abs(scores).max()
    scaled = scores / largest if largest > 0 else np.zeros_like(scores)
    shifted: NDArray[np.float64] = scaled - min(0.0, float(scaled.min()))
    if not shifted.any():
        shifted = np.ones_like(scores)
    shifted /= shifted.sum()
    return shifted


# Tournament: draw `size` candidates at random and pick the best of them; repeat.
#
# Among equals the first drawn wins, so that chance breaks ties, not age.


class TournamentConfig(Config):
    """Selection by tournaments."""

    type: Literal["tournament"] = "tournament"
    size: int = Field(default=2, ge=1)
    """Candidates per tournament: 1 is no selection pressure, more is stronger."""
    replacement: bool = True
    """Whether a candidate may be drawn twice into one tournament. If false, the worst `size` - 1
    candidates never win, and a tournament larger than the pool picks the best."""


def tournament(
    config: TournamentConfig,
    scores: NDArray[np.float64],
    *,
    count: int,
    distinct: bool,
    rng: np.random.Generator,
) -> list[int]:
    """Return the winners of `count` tournaments; with `distinct` each wins at most once."""
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
"""Rules by type: rule(config, scores, count=..., distinct=..., rng=...), with finite scores."""


def select(
    config: SelectionConfig,
    scores: Sequence[float | None],
    *,
    count: int,
    rng: np.random.Generator,
    distinct: bool = False,
) -> tuple[int, ...]:
    """Return the indices of the picked candidates, in the order they were picked."""
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


# The weights of parents in a merge: by fitness, at random, or free.
#
# parent_weights("fitness", shares=(0.3, 0.1), reach=0.5, rng=rng) == (0.75, 0.25)


WeightRule = Literal["fitness", "free", "random", "uniform"]

MIN_SHARE = 0.05
"""Smallest share of fitness that counts: with 0 the child would copy the other parent."""


def parent_weights(
    rule: WeightRule, *, shares: Sequence[float], reach: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """Return one weight per parent, the fittest parent first; `shares` is their fitness, >= 0.

    fitness: the ratio of shares. uniform: equal. random: anywhere in the convex hull. free: each
    from 0 to 1 + reach independently, so the sum is not 1.
    """
    count = len(shares)
    if rule == "random":
        return convex_weights(count, rng=rng)
    if rule == "free":
        return tuple(float(weight) for weight in (1.0 + reach) * rng.random(count))
    total = sum(shares)
    if rule != "fitness" or total == 0:
        return (1.0 / count,) * count
    floored = [max(share / total, MIN_SHARE) for share in shares]
    return tuple(share / sum(floored) for share in floored)


def convex_weights(count: int, *, rng: np.random.Generator) -> tuple[float, ...]:
    """Draw from the simplex uniformly: gaps between sorted uniform numbers, which sum to 1."""
    cuts = [0.0, *sorted(float(cut) for cut in rng.random(count - 1)), 1.0]
    return tuple(high - low for low, high in pairwise(cuts))


ATTEMPTS = 8
"""Draws per child before a duplicate of a sibling is accepted."""


class CrossoverConfig(Config):
    """Children of several parents."""

    type: Literal["crossover"] = "crossover"
    name: str = "linear"
    """Merge method."""
    share: float = Field(default=1.0, ge=0.0)
    """Share of the children, relative to the other operators' shares."""
    num_parents: int = Field(default=2, ge=2)
    """Parents per child, all different."""
    weights: WeightRule = "fitness"
    """fitness, uniform and random stay in the convex hull of the parents; free leaves it."""
    reach: float = Field(default=0.5, ge=0.0)
    """Range of free weights: each is drawn from 0 to 1 + reach."""


class MutationConfig(Config):
    """Children of one parent, and changes to children of several."""

    type: Literal["mutation"] = "mutation"
    name: str = "gaussian"
    """Mutation method."""
    share: float = Field(default=1.0, ge=0.0)
    """Share of the children, relative to the other operators' shares."""
    after_crossover: float = Field(default=0.15, ge=0.0, le=1.0)
    """Probability that a child of several parents is mutated too."""


OperatorConfig = Annotated[CrossoverConfig | MutationConfig, Field(discriminator="type")]


class SigmaConfig(Config):
    """Self-adaptive mutation strength: each mutation multiplies it by factor, 1 or 1 / factor.
    Children inherit it, so strengths that make good children spread."""

    start: float = Field(default=0.1, gt=0.0)
    """Strength of the founders, relative to each tensor's standard deviation."""
    factor: float = Field(default=1.3, ge=1.0)
    """Factor of a change; 1 keeps the strength fixed."""
    low: float = Field(default=0.001, gt=0.0)
    """Lower bound of the strength."""
    high: float = Field(default=1.0, gt=0.0)
    """Upper bound of the strength."""

    @model_validator(mode="after")
    def _check_order(self) -> "SigmaConfig":
        if not self.low <= self.start <= self.high:
            raise ValueError(
                f"sigma starts at {self.start} between {self.low} and {self.high}; "
                "write low <= start <= high."
            )
        return self


class ChildrenConfig(Config):
    """How children are made."""

    count: int = Field(default=16, ge=1)
    """Children per generation."""
    selection: SelectionConfig = TournamentConfig()
    """How parents are picked."""
    operators: tuple[OperatorConfig, ...] = (CrossoverConfig(share=3.0), MutationConfig())
    """Operators; each child draws one by share."""
    sigma: SigmaConfig = SigmaConfig()
    """Mutation strength."""

    @model_validator(mode="after")
    def _check_shares(self) -> "ChildrenConfig":
        if not sum(operator.share for operator in self.operators) > 0:
            raise ValueError(
                "operators holds none with a share above 0; write for example "
                "operators: [{type: crossover, name: linear, share: 1}]."
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Values that the children of one generation share."""

    generation: int
    prefix: str = ""
    """Prefix of their ids, to tell stages apart."""


def plan_children(
    members: Sequence[Candidate],
    scores: Sequence[float | None],
    *,
    config: ChildrenConfig,
    at: Birth,
    seed: int,
) -> tuple[ChildPlan, ...]:
    """Return `count` plans, or none if every operator needs more living parents than there are."""
    if not _feasible(config, scores):
        return ()
    plans: list[ChildPlan] = []
    made: set[object] = set()
    for index in range(config.count):
        name = f"{at.prefix}g{at.generation:03d}-c{index:02d}"
        for attempt in range(ATTEMPTS):
            rng = stream(seed, "child", name, attempt)
            recipe = _recipe(scores, config=config, rng=rng)
            if recipe.mutation is not None or recipe not in made:
                break
        made.add(recipe)
        heaviest = members[recipe.parents[recipe.weights.index(max(recipe.weights))]].sigma
        plans.append(
            ChildPlan(
                id=name,
                generation=at.generation,
                merge=recipe.merge,
                parents=tuple(members[parent].id for parent in recipe.parents),
                weights=recipe.weights,
                mutation=recipe.mutation,
                sigma=_adapted(heaviest, config.sigma, rng=rng) if recipe.mutation else heaviest,
                seed_key=stream_seed(seed, "plan", name),
            )
        )
    return tuple(plans)


@dataclass(frozen=True, slots=True)
class _Recipe:
    merge: str | None
    parents: tuple[int, ...]
    weights: tuple[float, ...]
    mutation: str | None


def _recipe(
    scores: Sequence[float | None],
    *,
    config: ChildrenConfig,
    rng: np.random.Generator,
) -> _Recipe:
    """Draw operator, parents, weights and mutation of one child, in this order."""
    operators = _feasible(config, scores)
    operator = operators[_pick([operator.share for operator in operators], rng)]
    count = 1 if isinstance(operator, MutationConfig) else operator.num_parents
    picked = select(config.selection, scores, count=count, rng=rng, distinct=count > 1)
    if isinstance(operator, MutationConfig):
        return _Recipe(None, picked, (1.0,), operator.name)
    # Fittest first; the sort keeps the order of the draw among equals.
    parents = tuple(sorted(picked, key=lambda index: -(scores[index] or 0.0)))
    part = _shares(scores)
    weights = parent_weights(
        operator.weights, shares=[part[i] for i in parents], reach=operator.reach, rng=rng
    )
    mutations = [other for other in config.operators if isinstance(other, MutationConfig)]
    hit = next((m.name for m in mutations if rng.random() < m.after_crossover), None)
    return _Recipe(operator.name, parents, weights, hit)


def _feasible(
    config: ChildrenConfig, scores: Sequence[float | None]
) -> list[CrossoverConfig | MutationConfig]:
    """Return operators with enough parents; failed candidates are parents only if all failed."""
    alive = sum(score is not None for score in scores) or len(scores)
    return [
        operator
        for operator in config.operators
        if operator.share > 0
        and (isinstance(operator, MutationConfig) or operator.num_parents <= alive)
    ]


def _shares(scores: Sequence[float | None]) -> list[float]:
    """Return each candidate's share of all fitness; 0 for failed ones, equal if all failed."""
    alive = [index for index, score in enumerate(scores) if score is not None]
    values = np.array([scores[index] for index in alive] or [0.0] * len(scores), dtype=np.float64)
    part = dict(zip(alive or range(len(scores)), shares(values), strict=True))
    return [float(part.get(index, 0.0)) for index in range(len(scores))]


def _adapted(sigma: float, config: SigmaConfig, *, rng: np.random.Generator) -> float:
    factor = (1.0 / config.factor, 1.0, config.factor)[int(rng.integers(3))]
    return min(config.high, max(config.low, sigma * factor))


def _pick(weights: Sequence[float], rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to its weight, all of which are above 0."""
    bounds = np.cumsum(weights)
    return min(len(weights) - 1, int(np.searchsorted(bounds, rng.random() * bounds[-1], "right")))
