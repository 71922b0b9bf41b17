"""Sums of the founders that a model of all answers so far expects to be good.

stages: [{type: random, count: 20}, {type: surrogate, generations: 3}]

repeat: fit log-odds of every task to the coefficients of all sums; propose sums; measure them
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.loops.genome.search_evaluator import SearchEvaluator
from rookery.loops.genome.stages.context import (
    StageContext,
    Unit,
    count_blocks,
    live_coefficients,
    measure_sums,
)
from rookery.search.candidate import rank_key, score_factors
from rookery.search.merit import merits_at
from rookery.search.surrogate import NUM_STARTS, Bounds, Surrogate, Worth, propose
from rookery.seeding import stream
from rookery.types import Adapter

__all__ = ["SurrogateStage", "run_surrogate"]

Array = NDArray[np.float64]
MOST_POINTS = 256
"""Limit of sums that the model is fitted to, the best ones. The cost grows with their cube."""
MOST = 100.0
"""Limit of a coefficient's size. With larger ones the model's equations cannot be solved."""
MISSED = 100.0
"""Penalty for missing a floor by 1, so that such candidates rank below all others."""


class SurrogateStage(Config):
    """A model of every task's log-odds, over the coefficients of a sum, proposes the next sums."""

    type: Literal["surrogate"] = "surrogate"
    generations: int = Field(default=3, ge=1)
    """Number of generations."""
    population: int = Field(default=10, ge=1, le=256)
    """Sums per generation."""
    unit: Unit = "block"
    """Part of the model with its own coefficients: each block, or the model as a whole."""
    low: float = Field(default=0.0, ge=-MOST, le=MOST)
    """Smallest value of a coefficient."""
    high: float = Field(default=1.5, ge=-MOST, le=MOST)
    """Largest value of a coefficient."""

    @model_validator(mode="after")
    def _check_limits(self) -> "SurrogateStage":
        if not self.low < self.high:
            raise ValueError(
                f"coefficients go from {self.low} to {self.high}; low must be below high: "
                "write for example low: 0, high: 1.5."
            )
        return self

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """Return the maximum number of measured candidates."""
        return self.generations * self.population


async def run_surrogate(config: SurrogateStage, context: StageContext) -> list[str]:
    """Search the founders' coefficients. The last generation is the population."""
    population: list[str] = []
    for number in range(config.generations):
        rng = stream(context.seed, "surrogate", context.index, number)
        points = await asyncio.to_thread(_propose, config, context, rng)
        if not points or not await context.has_room(len(points)):
            break
        fitness = await measure_sums(
            context, points, stage="surrogate", letter="n", unit=config.unit
        )
        population = [name for name, member in fitness.items() if not member.is_failed]
    return population


def _propose(
    config: SurrogateStage, context: StageContext, rng: np.random.Generator
) -> list[tuple[float, ...]]:
    founders = [context.builder.adapter(founder) for founder in context.builder.founders]
    num_blocks = count_blocks(config.unit, founders)
    search, sums = context.search, _sums(context, num_blocks)
    points = np.array(list(sums.values()))
    measured = [search.measured[name] for name in sums]
    rewards = _table(search, [candidate.rewards for candidate in measured])
    answers = _table(
        search, [{**candidate.rewards, **candidate.certainties} for candidate in measured]
    )
    # Rewards may exceed 0 to 1, so each task's range is taken from its answers.
    low = np.fmin.reduce(answers, axis=0, initial=0.0)
    span = np.fmax.reduce(answers, axis=0, initial=1.0) - low
    certainties = (answers - low) / span
    limits = _certainty_limits(certainties, rewards > 0.5, num_choices=_num_choices(search))
    is_live = np.array(live_coefficients(config.unit, founders))
    proposed = propose(
        Surrogate(points, certainties, num_blocks=num_blocks, is_live=is_live),
        starts=points[:NUM_STARTS],
        box=Bounds(config.low, config.high),
        worth=_worth(search, low, span, limits),
        count=config.population,
        rng=rng,
    )
    return [tuple(point) for point in proposed.tolist()]


def _certainty_limits(
    certainties: Array, is_right: NDArray[np.bool_], *, num_choices: Sequence[int]
) -> Array:
    """Return for each task the certainty from which its right choice is the most likely.

    With two choices that is a half. With more it lies between a guess and a half: halfway between
    the certainties of wrong and right answers.
    """
    guess = 1.0 / np.maximum(2, num_choices)
    wrong = np.fmax.reduce(np.where(is_right, np.nan, certainties), axis=0, initial=0.0)
    right = np.fmin.reduce(np.where(is_right, certainties, np.nan), axis=0, initial=1.0)
    limits: Array = (np.clip(wrong, guess, 0.5) + np.clip(right, guess, 0.5)) / 2
    return limits


def _worth(search: SearchEvaluator, low: Array, span: Array, limits: Array) -> Worth:
    """Return a function for the weighted merit, less a large penalty for missed floors. A task's
    reward is `low` + `span` * chance; for choices it is 1 above `limits`."""
    sources = [task.source for task in search.tasks]
    num_choices = _num_choices(search)
    weights = [task.weight for task in search.tasks]
    factors = span * score_factors(sources, weights=search.weights, task_weights=weights)
    factors /= len(sources)
    places = {s: np.flatnonzero([other == s for other in sources]) for s in search.floors}

    def worth(chances: Array) -> Array:
        merits = merits_at(chances, merit=search.merit, num_choices=num_choices, limits=limits)
        value: Array = merits @ factors
        for source, floor in search.floors.items():
            at = places[source]
            chance = chances[:, at]
            is_choice = np.take(num_choices, at) > 0
            rewards = np.where(is_choice, chance > limits[at], low[at] + span[at] * chance)
            value = value - MISSED * np.maximum(0.0, floor - rewards.mean(axis=1))
        return value

    return worth


def _num_choices(search: SearchEvaluator) -> list[int]:
    return [search.num_choices.get(task.id, 0) for task in search.tasks]


def _sums(context: StageContext, num_blocks: int) -> dict[str, tuple[float, ...]]:
    """Return the coefficients of founders and measured sums, best first."""
    measured = context.search.measured
    alive = [name for name, candidate in measured.items() if not candidate.fitness.is_failed]
    alive.sort(key=lambda name: rank_key(measured[name].fitness), reverse=True)
    points = {name: _point(context, name, num_blocks) for name in alive}
    known = {n: p for n, p in points.items() if p is not None and max(map(abs, p)) <= MOST}
    return dict(list(known.items())[:MOST_POINTS])


def _point(context: StageContext, name: str, num_blocks: int) -> tuple[float, ...] | None:
    """Return a candidate's coefficients in every block, or None if it is no sum of founders."""
    founders = context.builder.founders
    if name in founders:
        return tuple(float(name == founder) for founder in founders) * num_blocks
    weights = context.builder.coefficients(name)
    if weights is None or len(weights) == num_blocks * len(founders):
        return weights
    return weights * num_blocks if len(weights) == len(founders) else None


def _table(search: SearchEvaluator, values: Sequence[Mapping[str, float]]) -> Array:
    """Arrange as [candidates, tasks], with NaN for missing answers."""
    return np.array([[by_task.get(task.id, np.nan) for task in search.tasks] for by_task in values])
