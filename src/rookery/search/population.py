"""One generation of a population as a pure plan: ask for children, tell their fitness.

    population = make_population(fitness_by_id, config=config, seed=seed)
    while population.generation < 10:
        plans = ask(population, config=config, seed=seed)
        fitness = evaluate(carry_out(plans))             # every plan's id -> Fitness
        population = tell(population, fitness, config=config, seed=seed)
    population.best

Plans follow from (population, config, seed) alone, so `tell` asks again instead of remembering. A
population saved after any generation resumes as if it had never stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config, without_removed
from rookery.errors import ConfigError
from rookery.search.candidate import (
    RANDOM_SUM,
    Candidate,
    ChildPlan,
    Fitness,
    comparable_scores,
    rank_key,
)
from rookery.search.children import (
    Birth,
    ChildrenConfig,
    SelectionConfig,
    convex_weights,
    elites,
    plan_children,
    select,
)
from rookery.seeding import shuffled, stream, stream_seed

__all__ = [
    "Mark",
    "Population",
    "PopulationConfig",
    "SurvivalConfig",
    "ask",
    "make_population",
    "pair_plans",
    "random_plans",
    "random_weights",
    "survivors",
    "tell",
]


MAX_STRENGTH = 1.5
"""Largest strength that a single founder is tried in."""


def pair_plans(ids: Sequence[str], *, count: int, seed: int) -> tuple[ChildPlan, ...]:
    """Return `count` merges of two with random weights; all pairs come before any repeats."""
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
    """Draw the weights of a sum of two or more of the founders. Their total lies between 1 (the
    mean) and their number (the plain sum), log-uniform; their shares are uniform (Dirichlet)."""
    if num_founders == 1:
        return MAX_STRENGTH * rng.random(1)
    count = int(rng.integers(2, num_founders + 1))
    weights = np.zeros(num_founders)
    members = rng.permutation(num_founders)[:count]
    weights[members] = rng.dirichlet(np.ones(count)) * count ** rng.random()
    return weights


def random_plans(ids: Sequence[str], *, count: int, seed: int) -> tuple[ChildPlan, ...]:
    """Return `count` sums of founders: first the uniform average, then random weights."""
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


_REMOVED = {
    "swarm": (None, "leave it out: moves of a swarm found nothing that crossovers do not"),
    "objective": ("score", "write floors for tasksets that must not get worse"),
}


class SurvivalConfig(Config):
    """Selection of survivors among parents and children."""

    num_elites: int = Field(default=1, ge=1)
    """Number of best candidates that always survive."""
    rule: SelectionConfig | None = None
    """Rule that picks the other survivors; null takes the next best."""


def survivors(
    scores: Sequence[float | None],
    *,
    size: int,
    config: SurvivalConfig,
    rng: np.random.Generator,
) -> tuple[int, ...]:
    """Return the indices of the survivors: the elites, best first, then by the rule.

    Failed candidates do not survive, unless all failed; then all count as equal. If fewer than
    `size` are alive, fewer survive.
    """
    kept = elites(scores, count=min(config.num_elites, size))
    alive = [index for index, score in enumerate(scores) if score is not None]
    rest = [index for index in alive or range(len(scores)) if index not in set(kept)]
    values = [scores[index] for index in rest]
    count = min(size - len(kept), len(rest))
    if count == 0:
        return kept
    if config.rule is None:
        chosen = elites(values, count=count)
    else:
        chosen = select(config.rule, values, count=count, rng=rng, distinct=True)
    return (*kept, *(rest[index] for index in chosen))


class PopulationConfig(Config):
    """How a population makes its next generation."""

    size: int = Field(default=16, ge=1)
    """Candidates alive at a time."""
    children: ChildrenConfig = ChildrenConfig()
    """How children are made."""
    survival: SurvivalConfig = SurvivalConfig()
    """How survivors are picked among parents and children."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, document: object) -> object:
        return without_removed(document, _REMOVED)

    @model_validator(mode="after")
    def _check_counts(self) -> "PopulationConfig":
        if self.survival.num_elites > self.size:
            raise ValueError(
                f"survival.num_elites is {self.survival.num_elites} in a population of "
                f"{self.size}; it is at most the size."
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The best candidate ever seen, and its generation."""

    id: str
    fitness: Fitness
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The living candidates after a generation, in the order they were picked as survivors."""

    generation: int
    members: tuple[Candidate, ...]
    best: Mark | None
    """None while every evaluation failed."""
    num_evaluated: int
    """Evaluations so far, founders and failures included."""
    prefix: str = ""
    """Prefix of its children's ids; populations that share ids need different ones."""

    @property
    def num_stale(self) -> int:
        """Generations since the best candidate was found."""
        return self.generation - (self.best.generation if self.best is not None else 0)


def make_population(
    fitness: Mapping[str, Fitness], *, config: PopulationConfig, seed: int, prefix: str = ""
) -> Population:
    """Return generation 0: the founders with their fitness, at most `size` of them."""
    if not fitness:
        raise ValueError("Got no founders: a population starts with at least one candidate.")
    founders = [
        Candidate(id=id, generation=0, fitness=measured, sigma=config.children.sigma.start)
        for id, measured in fitness.items()
    ]
    empty = Population(generation=0, members=(), best=None, num_evaluated=0, prefix=prefix)
    return _settle(empty, founders, founders, config=config, seed=seed)


def ask(population: Population, *, config: PopulationConfig, seed: int) -> tuple[ChildPlan, ...]:
    """Return the next generation's plans; none if every operator lacks living parents."""
    return plan_children(
        population.members,
        comparable_scores([member.fitness for member in population.members]),
        config=config.children,
        at=Birth(generation=population.generation + 1, prefix=population.prefix),
        seed=seed,
    )


def tell(
    population: Population,
    fitness: Mapping[str, Fitness],
    *,
    config: PopulationConfig,
    seed: int,
) -> Population:
    """Return the next generation, given the fitness of every plan."""
    plans = ask(population, config=config, seed=seed)
    if set(fitness) != {plan.id for plan in plans}:
        missing = sorted({plan.id for plan in plans} - set(fitness))
        unknown = sorted(set(fitness) - {plan.id for plan in plans})
        raise ValueError(f"The children {missing} are missing, {unknown} were not asked for.")
    children = [
        Candidate(
            id=plan.id,
            generation=plan.generation,
            fitness=fitness[plan.id],
            sigma=plan.sigma,
            operator=plan.operator,
            parents=plan.parents,
        )
        for plan in plans
    ]
    following = replace(population, generation=population.generation + 1)
    pool = [*population.members, *children]
    return _settle(following, pool, children, config=config, seed=seed)


def _settle(
    population: Population,
    pool: Sequence[Candidate],
    measured: Sequence[Candidate],
    *,
    config: PopulationConfig,
    seed: int,
) -> Population:
    """Make the pool's survivors the members; count `measured` and update the best."""
    rng = stream(seed, "survival", population.prefix, population.generation)
    scores = comparable_scores([candidate.fitness for candidate in pool])
    kept = survivors(scores, size=config.size, config=config.survival, rng=rng)
    best = population.best
    for candidate in measured:
        if candidate.fitness.is_failed:
            continue
        if best is None or rank_key(candidate.fitness) > rank_key(best.fitness):
            best = Mark(
                id=candidate.id, fitness=candidate.fitness, generation=population.generation
            )
    return replace(
        population,
        members=tuple(pool[index] for index in kept),
        best=best,
        num_evaluated=population.num_evaluated + len(measured),
    )
