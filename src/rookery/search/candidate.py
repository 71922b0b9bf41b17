"""What search sees of a measurement, and the records of a generation.

    fitness_of({"gsm8k": 0.4, "mmlu": 0.6}, weights={"gsm8k": 2, "mmlu": 1}, floors={"mmlu": 0.61})

Bigger is better everywhere. A failed evaluation has no score, never a low one. A candidate was
measured, a plan is of one that is to be made: plans name ids, weights and seeds, and whoever holds
the tensors or programs carries them out.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rookery.errors import ConfigError, TaskError

__all__ = [
    "BY_BLOCK",
    "CMAES",
    "COMBINATIONS",
    "FAILED",
    "RANDOM_SUM",
    "SURROGATE",
    "Candidate",
    "ChildPlan",
    "EsStep",
    "Fitness",
    "Recipe",
    "comparable_scores",
    "crowding",
    "find_violation",
    "first_front",
    "fitness_of",
    "fitness_ranks",
    "rank_key",
    "score_factors",
    "tied_ranks",
]


# Ranks of values with ties shared: what rank selection, ES utilities and CMA-ES have in common.
#
# tied_ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]


def tied_ranks(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for the smallest to n - 1 for the largest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    last = np.cumsum(counts) - 1
    means: NDArray[np.float64] = last - (counts - 1) / 2.0
    return means[inverse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """One candidate's measurement: `Fitness(score=0.47, objectives=(0.4, 0.6), violation=0.01)`."""

    score: float | None
    """None when the evaluation failed."""
    objectives: tuple[float, ...] = ()
    """One value per objective, in a fixed order; empty when there is only the score."""
    violation: float = 0.0
    """How far constraints are missed, summed; 0 is feasible."""

    def __post_init__(self) -> None:
        numbers = (*self.objectives, self.violation, *(() if self.score is None else (self.score,)))
        if not all(math.isfinite(value) for value in numbers):
            raise ValueError(
                f"Got {self}: a fitness is made of finite numbers. "
                "A measurement that could not be made is Fitness(score=None)."
            )
        if self.violation < 0:
            raise ValueError(f"Got violation {self.violation}: it is 0 (feasible) or above.")

    @property
    def is_failed(self) -> bool:
        return self.score is None


FAILED = Fitness(score=None)
"""The fitness of a candidate whose evaluation failed."""


def fitness_of(
    means: Mapping[str, float],
    *,
    weights: Mapping[str, float],
    floors: Mapping[str, float] | None = None,
    merits: Mapping[str, float] | None = None,
) -> Fitness:
    """Weighted mean over sources, one objective per source in the order of `weights`.

    `floors` says "do not get worse than this on that source"; a source may have a floor and
    weight 0. Worked example: means {"a": 0.5, "b": 0.25}, weights {"a": 3, "b": 1} and floors
    {"b": 0.375} give score 0.4375, objectives (0.5, 0.25), violation 0.125. `merits` are means
    that score and objectives are made of in place of `means`; floors hold of `means`.
    """
    total = math.fsum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ConfigError(
            f"Got the source weights {dict(weights)}: they are 0 or above and at least one is "
            "above 0. Write for example weights: {gsm8k: 1}."
        )
    floors = floors or {}
    missing = sorted((set(weights) | set(floors)) - set(means))
    if missing:
        raise ValueError(
            f"No mean was measured for {missing}; there are means for {sorted(means)}."
        )
    compared = means if merits is None else merits
    return Fitness(
        score=math.fsum(weights[name] * compared[name] for name in weights) / total,
        objectives=tuple(compared[name] for name in weights),
        violation=find_violation(means, floors),
    )


def find_violation(means: Mapping[str, float], floors: Mapping[str, float]) -> float:
    """By how much the floors are missed in all, of those sources that have a mean."""
    return math.fsum(max(0.0, floor - means[n]) for n, floor in floors.items() if n in means)


def score_factors(
    sources: Sequence[str],
    *,
    weights: Mapping[str, float] | None,
    task_weights: Sequence[float] | None = None,
) -> NDArray[np.float64]:
    """By task, such that the mean of factor * reward is the score of `fitness_of`.

    `sources` and `task_weights` are the tasks' own; without weights all sources, or all tasks,
    count alike. Two sources of weight 1 with 1 and 3 tasks: factors 2 and 2/3.
    """
    by_task: NDArray[np.float64] = np.array(task_weights or [1.0] * len(sources))
    by_source = np.full(len(sources), len(sources) / math.fsum(by_task))
    if weights is not None:
        sizes = {s: math.fsum(by_task[[source == s for source in sources]]) for s in set(sources)}
        total = math.fsum(weights[source] for source in sizes)
        if total <= 0:
            raise TaskError("The search split holds no tasks of a taskset with a weight above 0.")
        worth = {s: weights[s] / total * len(sources) / size for s, size in sizes.items()}
        by_source = np.array([worth[source] for source in sources])
    factors: NDArray[np.float64] = by_task * by_source
    return factors


def rank_key(fitness: Fitness) -> tuple[int, float]:
    """Orders any two fitnesses: failed < infeasible (less violation is better) < feasible."""
    if fitness.score is None:
        return (0, 0.0)
    if fitness.violation > 0:
        return (1, -fitness.violation)
    return (2, fitness.score)


def fitness_ranks(fitnesses: Sequence[Fitness]) -> list[float]:
    """0 for the worst to n - 1 for the best by `rank_key`; equal ones share the mean rank."""
    keys = [rank_key(fitness) for fitness in fitnesses]
    level = {key: float(place) for place, key in enumerate(sorted(set(keys)))}
    return [float(rank) for rank in tied_ranks([level[key] for key in keys])]


def comparable_scores(fitnesses: Sequence[Fitness]) -> list[float | None]:
    """One number per candidate that selection rules can compare; None stays failed.

    Feasible candidates keep their score. An infeasible one gets the worst feasible score (the
    worst score of all when none is feasible) minus its violation, so it never beats a feasible
    one and needs no penalty factor.
    """
    feasible = [f.score for f in fitnesses if f.score is not None and f.violation == 0]
    alive = [f.score for f in fitnesses if f.score is not None]
    base = min(feasible or alive, default=0.0)
    return [
        f.score
        if f.score is None or f.violation == 0
        else max(base - f.violation, -sys.float_info.max)
        for f in fitnesses
    ]


# Several objectives at once.


def first_front(fitnesses: Sequence[Fitness]) -> list[int]:
    """Indices of those that no other one beats: at least as good in every objective and better in
    one. Where all miss constraints, those with the least violation; failed ones are in no front.
    """
    alive = [index for index, fitness in enumerate(fitnesses) if not fitness.is_failed]
    least = min((fitnesses[index].violation for index in alive), default=0.0)
    best = [index for index in alive if fitnesses[index].violation == least]
    if least > 0:
        return best
    values = np.array([fitnesses[index].objectives for index in best], dtype=np.float64)
    return [
        index
        for index, row in zip(best, values, strict=True)
        if not ((values >= row).all(axis=1) & (values > row).any(axis=1)).any()
    ]


def crowding(objectives: NDArray[np.float64]) -> NDArray[np.float64]:
    """Crowding distance of each row of one front [n, m]; infinite at the ends of an objective.

    An objective on which all rows are equal says nothing and adds nothing.
    """
    distance = np.zeros(len(objectives))
    for column in objectives.T:
        order = np.argsort(column, kind="stable")
        values = column[order]
        # Halves keep the span of the largest floats finite.
        span = values[-1] / 2 - values[0] / 2
        if span == 0:
            continue
        gaps = values[2:] / 2 - values[:-2] / 2
        distance[order[1:-1]] += gaps / span
        distance[order[[0, -1]]] = np.inf
    return distance


BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE = "by_block", "cmaes", "random", "surrogate"
COMBINATIONS = frozenset({BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE, "move"})
"""Merges that plans name and no config: weighted sums of the parents, by block with weights of its
own for every block of the model; "move" is in lineages of older runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member of a population. `sigma` is the strength of its last mutation, inherited."""

    id: str
    generation: int
    fitness: Fitness
    sigma: float
    operator: str = "founder"
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """How to make one child: merge the parents with the weights, then mutate.

    `ChildPlan(id="g003-c07", generation=3, merge="ties", parents=("g002-c01", "g000-c04"),
    weights=(0.6, 0.4), mutation=None, sigma=0.1, seed_key=4711)`. A plan that only mutates has
    merge None and one parent; the merges "cmaes" and "random" are weighted sums, and so is
    "by_block", with the weights of all parents in the first block, then in the second, and so on.
    """

    id: str
    generation: int
    merge: str | None
    parents: tuple[str, ...]
    weights: tuple[float, ...]
    mutation: str | None
    sigma: float
    """Strength of the mutation."""
    seed_key: int
    """Seed of everything random in carrying the plan out."""

    @property
    def operator(self) -> str:
        """What made the child: "ties", "gaussian", or "ties+gaussian"."""
        return "+".join(name for name in (self.merge, self.mutation) if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EsStep:
    """A parent plus sum_i amounts[i] * noise(seeds[i]): a trial or a centre of an ES.

    A centre is the centre before it plus one update, a trial is a centre plus one noise: the chain
    costs as much per step at any step.
    """

    id: str
    generation: int
    parent: str
    seeds: tuple[int, ...]
    amounts: tuple[float, ...]
    is_chained: bool = False
    """The parent is an ES step, and its numbers are taken before they are rounded to its dtype:
    small updates add up as if they were made at once."""
    rank: int | None = None
    """Of the noise in each factor; None: a number of its own in every place."""

    @property
    def parents(self) -> tuple[str, ...]:
        return (self.parent,)

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,)

    @property
    def operator(self) -> str:
        return "es"


Recipe = ChildPlan | EsStep
"""How to make a candidate that is no founder."""
