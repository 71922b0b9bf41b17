"""Fitness, and the records of a generation: candidates, and plans of new ones.

    fitness_of({"gsm8k": 0.4, "mmlu": 0.6}, weights={"gsm8k": 2, "mmlu": 1}, floors={"mmlu": 0.61})

Bigger is always better. A failed evaluation has no score, never a low one. Candidates were
measured; plans describe ones to make, by ids, weights and seeds, and the owner of the tensors or
programs carries them out.
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


def tied_ranks(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 0 for the smallest to n - 1 for the largest; equal values share their mean rank.

    tied_ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
    """
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
    """None if the evaluation failed."""
    objectives: tuple[float, ...] = ()
    """One value per objective, in a fixed order; empty if there is only the score."""
    violation: float = 0.0
    """Sum of the amounts by which constraints are missed; 0 is feasible."""

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


def fitness_of(
    means: Mapping[str, float],
    *,
    weights: Mapping[str, float],
    floors: Mapping[str, float] | None = None,
    merits: Mapping[str, float] | None = None,
) -> Fitness:
    """Return the weighted mean over sources, with one objective per source of `weights`, in order.

    `floors` are lower bounds of means; a source may have a floor and weight 0. If `merits` are set,
    score and objectives use these means, while floors still use `means`. Means {"a": 0.5, "b":
    0.25}, weights {"a": 3, "b": 1}, floors {"b": 0.375}: score 0.4375, objectives (0.5, 0.25),
    violation 0.125.
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
    """Return the sum of missed amounts over all floors whose source has a mean."""
    return math.fsum(max(0.0, floor - means[n]) for n, floor in floors.items() if n in means)


def score_factors(
    sources: Sequence[str],
    *,
    weights: Mapping[str, float] | None,
    task_weights: Sequence[float] | None = None,
) -> NDArray[np.float64]:
    """Return a factor per task, such that the mean of factor * reward is the score of `fitness_of`.

    `sources` and `task_weights` are per task. With neither weights, all tasks count alike. Two
    sources of weight 1 with 1 and 3 tasks: factors 2 and 2/3.
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
    """Return a sort key: failed < infeasible (less violation is better) < feasible."""
    if fitness.score is None:
        return (0, 0.0)
    if fitness.violation > 0:
        return (1, -fitness.violation)
    return (2, fitness.score)


def fitness_ranks(fitnesses: Sequence[Fitness]) -> list[float]:
    """Return 0 for the worst to n - 1 for the best by `rank_key`; equals share their mean rank."""
    keys = [rank_key(fitness) for fitness in fitnesses]
    level = {key: float(place) for place, key in enumerate(sorted(set(keys)))}
    return [float(rank) for rank in tied_ranks([level[key] for key in keys])]


def comparable_scores(fitnesses: Sequence[Fitness]) -> list[float | None]:
    """Return one number per candidate for selection rules; None if it failed.

    Feasible candidates keep their score. An infeasible one gets the worst feasible score (of all
    scores, if none is feasible) minus its violation, so it never beats a feasible one.
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


def first_front(fitnesses: Sequence[Fitness]) -> list[int]:
    """Return the indices of the Pareto front, or of the least violation if all are infeasible.
    Failed candidates are never in it."""
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
    """Return the crowding distance of each row of a front [n, m]; infinite at an objective's ends.
    An objective whose values are all equal is ignored."""
    distance = np.zeros(len(objectives))
    for column in objectives.T:
        order = np.argsort(column, kind="stable")
        values = column[order]
        # Halving avoids overflow of the largest floats.
        span = values[-1] / 2 - values[0] / 2
        if span == 0:
            continue
        gaps = values[2:] / 2 - values[:-2] / 2
        distance[order[1:-1]] += gaps / span
        distance[order[[0, -1]]] = np.inf
    return distance


BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE = "by_block", "cmaes", "random", "surrogate"
COMBINATIONS = frozenset({BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE, "move"})
"""Merges of plans that configs cannot name: weighted sums of the parents. `by_block` has separate
weights for every block of the model; "move" is in lineages of older runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member of a population. `sigma`, the strength of its last mutation, is inherited."""

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
    merge None and one parent. The merges "cmaes" and "random" are weighted sums, as is "by_block",
    whose weights list all parents for the first block, then for the second, and so on.
    """

    id: str
    generation: int
    merge: str | None
    parents: tuple[str, ...]
    weights: tuple[float, ...]
    mutation: str | None
    sigma: float
    seed_key: int
    """Seed of all randomness in carrying the plan out."""

    @property
    def operator(self) -> str:
        """The operators of the child: "ties", "gaussian", or "ties+gaussian"."""
        return "+".join(name for name in (self.merge, self.mutation) if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EsStep:
    """A parent plus sum_i amounts[i] * noise(seeds[i]): a trial or a centre of an ES.

    A centre is the previous centre plus one update, a trial is a centre plus one noise: the cost of
    a step does not depend on the steps before it.
    """

    id: str
    generation: int
    parent: str
    seeds: tuple[int, ...]
    amounts: tuple[float, ...]
    is_chained: bool = False
    """Whether the parent is an ES step whose values are used before rounding to its dtype: small
    updates then add up as if made at once."""
    rank: int | None = None
    """Rank of the noise in each factor; None draws every element independently."""

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
"""How to make a candidate that is not a founder."""
