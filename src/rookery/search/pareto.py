"""Several objectives at once: fronts, crowding, NSGA-II, with constraints by domination.

    fronts(fitnesses)            # [[0, 3], [1], [2]]: nobody in the first is dominated
    nsga2(fitnesses, count=8)    # the survivors
    crowded_scores(fitnesses)    # numbers any selection rule can use

Constraint domination: a feasible candidate dominates an infeasible one; of two infeasible ones
the smaller violation dominates; two feasible ones are compared by their objectives.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rookery.search.fitness import Fitness
from rookery.search.selection.elites import elites

__all__ = ["crowded_scores", "crowding", "dominates", "fronts", "nsga2"]


def dominates(a: Fitness, b: Fitness) -> bool:
    """Whether a is at least as good everywhere and better somewhere. Failed ones lose to all."""
    return bool(_domination([a, b])[0, 1])


def fronts(fitnesses: Sequence[Fitness]) -> list[list[int]]:
    """Indices by front, best front first; failed candidates are in the last front.

    O(n^2 m) for n candidates and m objectives.
    """
    better = _domination(fitnesses)
    dominated_by = better.sum(axis=0)
    remaining = np.ones(len(fitnesses), dtype=bool)
    result: list[list[int]] = []
    while remaining.any():
        front = np.flatnonzero(remaining & (dominated_by == 0))
        result.append([int(index) for index in front])
        remaining[front] = False
        dominated_by = dominated_by - better[front].sum(axis=0)
    return result


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


def crowded_scores(fitnesses: Sequence[Fitness]) -> list[float | None]:
    """Scores in NSGA-II's order: front first, then crowding; None for failed candidates.

    Selection by tournament of size 2 on these is NSGA-II's binary tournament.
    """
    keys: dict[int, tuple[int, float]] = {}
    for depth, front in enumerate(fronts(fitnesses)):
        alive = [index for index in front if not fitnesses[index].is_failed]
        if alive:
            distances = crowding(np.array([_vector(fitnesses[index]) for index in alive]))
            pairs = zip(alive, distances, strict=True)
            keys.update({index: (-depth, float(distance)) for index, distance in pairs})
    places = {key: float(place) for place, key in enumerate(sorted(set(keys.values())))}
    return [places[keys[index]] if index in keys else None for index in range(len(fitnesses))]


def nsga2(fitnesses: Sequence[Fitness], *, count: int) -> tuple[int, ...]:
    """The survivors: whole fronts while they fit, then the least crowded of the next one."""
    return elites(crowded_scores(fitnesses), count=count)


def _vector(fitness: Fitness) -> tuple[float, ...]:
    assert fitness.score is not None
    return fitness.objectives or (fitness.score,)


def _domination(fitnesses: Sequence[Fitness]) -> NDArray[np.bool_]:
    """[n, n]: row dominates column."""
    alive = np.array([not fitness.is_failed for fitness in fitnesses], dtype=bool)
    vectors = [_vector(fitness) for fitness in fitnesses if not fitness.is_failed]
    widths = {len(vector) for vector in vectors}
    if len(widths) > 1:
        raise ValueError(
            f"Got candidates with {sorted(widths)} objectives: all need the same ones."
        )
    values = np.zeros((len(fitnesses), widths.pop() if widths else 1))
    values[alive] = vectors if vectors else values[alive]
    violation = np.array([fitness.violation for fitness in fitnesses])
    feasible = alive & (violation == 0)
    infeasible = alive & (violation > 0)
    no_worse = (values[:, None, :] >= values[None, :, :]).all(axis=2)
    is_better = (values[:, None, :] > values[None, :, :]).any(axis=2)
    result: NDArray[np.bool_] = (
        (alive[:, None] & ~alive[None, :])
        | (feasible[:, None] & infeasible[None, :])
        | (infeasible[:, None] & infeasible & (violation[:, None] < violation[None, :]))
        | (feasible[:, None] & feasible & no_worse & is_better)
    )
    return result
