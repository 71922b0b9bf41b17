"""Plans of children: which operator, which parents with what weights, how strong a mutation.

    plan_children(members, scores, config=ChildrenConfig(), at=Birth(generation=3), seed=7)

Every child has a random stream of its own, keyed by its id: the plan of child 7 does not depend
on how many siblings there are, but for a repetition of one of them, which is drawn again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.candidate import Candidate, ChildPlan
from rookery.search.selection import SelectionConfig, TournamentConfig, select, shares
from rookery.seeding import stream, stream_seed

__all__ = [
    "Birth",
    "ChildrenConfig",
    "CrossoverConfig",
    "MutationConfig",
    "OperatorConfig",
    "SigmaConfig",
    "WeightRule",
    "convex_weights",
    "parent_weights",
    "plan_children",
]

# The weights of parents in a merge: by fitness, at random, or free.
#
# parent_weights("fitness", shares=(0.3, 0.1), reach=0.5, rng=rng) == (0.75, 0.25)


WeightRule = Literal["fitness", "free", "random", "uniform"]

MIN_SHARE = 0.05
"""A parent's smallest weight by fitness: at 0 the child would be a copy of the other one."""


def parent_weights(
    rule: WeightRule, *, shares: Sequence[float], reach: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """One weight per parent, the fittest parent first; `shares` is their fitness, >= 0.

    fitness: the ratio of shares. uniform: equal. random: anywhere in the convex hull.
    free: each from 0 to 1 + reach on its own, so the sum is not 1.
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
    """Uniform on the simplex: the gaps between sorted uniform numbers; they sum to 1."""
    cuts = [0.0, *sorted(float(cut) for cut in rng.random(count - 1)), 1.0]
    return tuple(high - low for low, high in pairwise(cuts))


ATTEMPTS = 8
"""Draws per child before a repetition of a sibling is accepted."""


class CrossoverConfig(Config):
    """Children of several parents."""

    type: Literal["crossover"] = "crossover"
    name: str = "linear"
    """The merge that carries it out."""
    share: float = Field(default=1.0, ge=0.0)
    """Its part of the children, relative to the shares of the other operators."""
    num_parents: int = Field(default=2, ge=2)
    """Parents per child, all different."""
    weights: WeightRule = "fitness"
    """fitness, uniform and random stay in the convex hull of the parents; free leaves it."""
    reach: float = Field(default=0.5, ge=0.0)
    """How far: free draws each weight from 0 to 1 + reach."""


class MutationConfig(Config):
    """Children of one parent, and changes to children of several."""

    type: Literal["mutation"] = "mutation"
    name: str = "gaussian"
    """The mutation that carries it out."""
    share: float = Field(default=1.0, ge=0.0)
    """Its part of the children, relative to the shares of the other operators."""
    after_crossover: float = Field(default=0.15, ge=0.0, le=1.0)
    """Probability that a child of several parents is mutated too."""


OperatorConfig = Annotated[CrossoverConfig | MutationConfig, Field(discriminator="type")]


class SigmaConfig(Config):
    """Self-adaptive mutation strength: each mutation multiplies it by factor, 1 or 1 / factor,
    and children inherit it, so strengths that make good children spread."""

    start: float = Field(default=0.1, gt=0.0)
    """Strength of the founders, relative to each tensor's standard deviation."""
    factor: float = Field(default=1.3, ge=1.0)
    """1 keeps the strength fixed."""
    low: float = Field(default=0.001, gt=0.0)
    """Never weaker than this."""
    high: float = Field(default=1.0, gt=0.0)
    """Never stronger than this."""

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
    """How many per generation."""
    selection: SelectionConfig = TournamentConfig()
    """How parents are picked."""
    operators: tuple[OperatorConfig, ...] = (CrossoverConfig(share=3.0), MutationConfig())
    """What makes them: for each child one is drawn by share."""
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
    """What the children of one generation have in common."""

    generation: int
    prefix: str = ""
    """Put before their ids, to tell stages apart."""


def plan_children(
    members: Sequence[Candidate],
    scores: Sequence[float | None],
    *,
    config: ChildrenConfig,
    at: Birth,
    seed: int,
) -> tuple[ChildPlan, ...]:
    """`count` plans, or none when every operator needs more living parents than there are."""
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
    """Operator, parents, weights and mutation of one child, drawn in this order."""
    operators = _feasible(config, scores)
    operator = operators[_pick([operator.share for operator in operators], rng)]
    count = 1 if isinstance(operator, MutationConfig) else operator.num_parents
    picked = select(config.selection, scores, count=count, rng=rng, distinct=count > 1)
    if isinstance(operator, MutationConfig):
        return _Recipe(None, picked, (1.0,), operator.name)
    # The fittest first; the sort keeps the order of the draw among equals.
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
    """The operators with a share that have parents enough; failed ones are parents only when
    all failed."""
    alive = sum(score is not None for score in scores) or len(scores)
    return [
        operator
        for operator in config.operators
        if operator.share > 0
        and (isinstance(operator, MutationConfig) or operator.num_parents <= alive)
    ]


def _shares(scores: Sequence[float | None]) -> list[float]:
    """Each candidate's part of all fitness; 0 for failed ones, equal when all failed."""
    alive = [index for index, score in enumerate(scores) if score is not None]
    values = np.array([scores[index] for index in alive] or [0.0] * len(scores), dtype=np.float64)
    part = dict(zip(alive or range(len(scores)), shares(values), strict=True))
    return [float(part.get(index, 0.0)) for index in range(len(scores))]


def _adapted(sigma: float, config: SigmaConfig, *, rng: np.random.Generator) -> float:
    factor = (1.0 / config.factor, 1.0, config.factor)[int(rng.integers(3))]
    return min(config.high, max(config.low, sigma * factor))


def _pick(weights: Sequence[float], rng: np.random.Generator) -> int:
    """An index with probability proportional to its weight, all of them above 0."""
    bounds = np.cumsum(weights)
    return min(len(weights) - 1, int(np.searchsorted(bounds, rng.random() * bounds[-1], "right")))
