"""Several objectives at once: who is dominated by nobody, and how crowded a front is."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rookery.search.fitness import Fitness

__all__ = ["crowding", "first_front"]


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
